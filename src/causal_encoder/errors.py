"""Every error this package raises on purpose.

    CausalEncoderError
    +-- InputError (also ValueError)      what was passed to a model or session
    |   +-- InvalidInputError             not a rectangular batch of integer ids
    |   +-- EmptySequenceError            T = 0
    |   +-- SequenceTooLongError          T > max_len
    |   +-- TokenOutOfRangeError          id < 0 or id >= vocab_size
    +-- NonFiniteOutputError              the weights produced NaN or infinity
    +-- ConfigError (also ValueError)     an EncoderConfig that cannot be built
    +-- CheckpointError                   a checkpoint that cannot be trusted
    +-- ExportError                       an export that was refused or refuted
    +-- BundleError                       a bundle that cannot be trusted
    +-- DeviceError                       CUDA was asked for and is not truly used

Each message is one line: the value, the limit, the remedy. The input errors are built
by the functions below, so that eager PyTorch and the torch-free session say the same.
"""


class CausalEncoderError(Exception):
    """Base of every error below."""


class InputError(CausalEncoderError, ValueError):
    """The ids cannot be encoded."""


class InvalidInputError(InputError):
    """The ids are not a rectangular (batch, sequence) array of integers."""


class EmptySequenceError(InputError):
    """A sequence has no tokens."""


class SequenceTooLongError(InputError):
    """A sequence has more tokens than max_len."""


class TokenOutOfRangeError(InputError):
    """An id is negative or not below vocab_size."""


class NonFiniteOutputError(CausalEncoderError):
    """The output holds NaN or infinity although the ids were valid."""


class ConfigError(CausalEncoderError, ValueError):
    """A configuration value is outside its limits."""


class CheckpointError(CausalEncoderError):
    """A checkpoint is damaged, incomplete, or does not fit its config."""


class ExportError(CausalEncoderError):
    """An export was refused, or its file failed verification."""


class BundleError(CausalEncoderError):
    """A bundle is damaged, incomplete, or of another kind than asked for."""


class DeviceError(CausalEncoderError):
    """The device asked for cannot run the model."""


def invalid_dtype(dtype: object) -> InvalidInputError:
    """Ids of a type that is not an integer."""
    return InvalidInputError(f"ids have dtype {dtype}, expected integers; convert them to int64")


def invalid_rank(shape: tuple[int, ...]) -> InvalidInputError:
    """Ids that are not (batch, sequence)."""
    return InvalidInputError(
        f"ids have shape {shape}, expected two axes (batch, sequence); "
        "put a single sequence in a batch of one"
    )


def empty_sequence(row: int | None = None) -> EmptySequenceError:
    """T = 0, or an empty row of a ragged batch."""
    where = "the sequence" if row is None else f"sequence {row}"
    return EmptySequenceError(f"{where} has 0 tokens, at least 1 is needed; drop it from the batch")


def sequence_too_long(length: int, max_len: int, position: str) -> SequenceTooLongError:
    """T > max_len; the remedy depends on whether the position scheme can be extended."""
    remedy = (
        "its learned table has no further rows, so shorten the sequence"
        if "learned" in position
        else "shorten the sequence or export again with a larger max_len (--max-len)"
    )
    return SequenceTooLongError(
        f"sequence length {length} is over max_len {max_len} of the {position} positions; "
        f"{remedy}; a session can also cut it: overflow='truncate' (--overflow truncate)"
    )


def token_out_of_range(token: int, row: int, column: int, vocab_size: int) -> TokenOutOfRangeError:
    """An id outside 0..vocab_size-1, with its place in the batch."""
    return TokenOutOfRangeError(
        f"id {token} at (row {row}, column {column}) is outside 0..{vocab_size - 1}; "
        "check that tokenizer and model belong together"
    )
