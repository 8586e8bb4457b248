"""The one place where ids are checked before they reach ONNX Runtime.

On CUDA an id out of range reads as zeros and on CPU -1 reads the last row, both without
an error, so everything is decided here, on the host. Checked in this order: type, empty
sequence, length, ids.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from causal_encoder import errors
from causal_encoder.serve.manifest import Manifest

Ids = npt.NDArray[np.int64]
OVERFLOWS = ("error", "truncate")
_INT64 = np.dtype(np.int64)


def check_batch(ids: Any, manifest: Manifest, overflow: str) -> Ids:
    """Turn a rectangular batch into what the model takes.

    Args:
        ids: (B, T) array or nested lists, of any integer dtype and byte order.
        manifest: names the limits max_len and vocab_size.
        overflow: "error" refuses T > max_len, "truncate" keeps the first max_len tokens
            of each row and warns.

    Returns:
        (B, T) int64, contiguous, native byte order, every value in 0..vocab_size-1.

    Raises:
        InputError: one of its four kinds.
    """
    array = _as_integers(ids, "pass rows of different lengths to encode")
    if array.ndim != 2:
        raise errors.invalid_rank(array.shape)
    if array.shape[1] == 0:
        raise errors.empty_sequence()
    if array.shape[1] > manifest.max_len:
        array = array[:, : _allowed_length(array.shape[1], manifest, overflow)]
    wide = _widen(array)
    if _any_out_of_range(wide, manifest.vocab_size):
        row, column = _first_out_of_range(wide, manifest.vocab_size)
        token = int(array[row, column])
        raise errors.token_out_of_range(token, row, column, manifest.vocab_size)
    return wide


def check_ragged(rows: Iterable[Any], manifest: Manifest, overflow: str) -> list[Ids]:
    """Turn sequences of different lengths into int64 vectors; errors name the row.

    Args:
        rows: one sequence of ids each.
        manifest: names the limits max_len and vocab_size.
        overflow: as in check_batch, for each row.

    Returns:
        One (len_i,) int64 vector a row.

    Raises:
        InputError: one of its four kinds.
    """
    if isinstance(rows, str | bytes) or not np.iterable(rows):
        raise errors.InvalidInputError(
            f"rows are {type(rows).__name__}, expected a list of sequences of ids"
        )
    checked = [_as_vector(index, row) for index, row in enumerate(rows)]
    for index, array in enumerate(checked):
        if array.shape[0] == 0:
            raise errors.empty_sequence(index)
    wide = []
    for index, array in enumerate(checked):
        try:
            length = _allowed_length(array.shape[0], manifest, overflow)
        except errors.SequenceTooLongError as error:
            raise errors.SequenceTooLongError(f"sequence {index}: {error}") from error
        wide.append(_widen(array[:length]))
    if wide and _any_out_of_range(np.concatenate(wide), manifest.vocab_size):
        for index, row in enumerate(wide):
            if _any_out_of_range(row, manifest.vocab_size):
                (column,) = _first_out_of_range(row, manifest.vocab_size)
                token = int(checked[index][column])
                raise errors.token_out_of_range(token, index, column, manifest.vocab_size)
    return wide


def _as_vector(index: int, row: Any) -> npt.NDArray[Any]:
    try:
        array = _as_integers(row, "pass a flat list of ids for each sequence")
    except errors.InvalidInputError as error:
        raise errors.InvalidInputError(f"sequence {index}: {error}") from error
    if array.ndim != 1:
        raise errors.InvalidInputError(
            f"sequence {index} has shape {array.shape}, expected one axis of ids, as in "
            "encode([[5, 9], [7]])"
        )
    return array


def _as_integers(ids: Any, remedy: str) -> npt.NDArray[Any]:
    if type(ids) is not np.ndarray:
        return _from_array_like(ids, remedy)
    if ids.dtype.kind not in "iu":
        raise errors.invalid_dtype(ids.dtype)
    return ids


def _from_array_like(ids: Any, remedy: str) -> npt.NDArray[Any]:
    """As NumPy reads it, where NumPy does not pass over a bool, a mask or text."""
    if ids is None or isinstance(ids, str | bytes):
        raise errors.InvalidInputError(f"ids are {type(ids).__name__}, expected integers")
    try:
        array, kinds = np.asarray(ids), _element_types(ids)
    except errors.InvalidInputError:
        raise
    except Exception as error:  # array-likes of other libraries raise what they like
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "inhomogeneous" in reason:  # NumPy says in many words that rows differ in length
            reason = "their rows differ in length"
        raise errors.InvalidInputError(
            f"ids are not a rectangular array of integers ({reason}); {remedy}"
        ) from error
    if kinds & {bool, np.bool_}:
        raise errors.invalid_dtype("bool")  # among integers, NumPy would read True as 1
    if array.dtype.kind not in "iu" and kinds <= {int}:
        # Nothing at all, or numbers beyond 64 bits; those are out of range for any model.
        return np.asarray(ids, np.int64 if array.size == 0 else object)
    if array.dtype.kind not in "iu":
        raise errors.invalid_dtype(array.dtype)
    return array


def _element_types(ids: Any) -> set[type]:
    """Types of what nested sequences hold in the end; for an array, of its elements."""
    if isinstance(ids, np.ma.MaskedArray):
        raise errors.InvalidInputError(
            "ids are a masked array, and a session knows no mask; fill it with ids.filled(0), "
            "or pass rows without what is masked to encode"
        )
    if isinstance(ids, bytearray) or (isinstance(ids, memoryview) and ids.itemsize == 1):
        raise errors.InvalidInputError(
            f"ids are {type(ids).__name__}, expected integers; "
            "if each byte is an id, pass np.frombuffer(ids, np.uint8)"
        )
    if isinstance(ids, memoryview) or hasattr(ids, "__array__"):
        return {np.asarray(ids).dtype.type}
    if isinstance(ids, str | bytes | Mapping) or not _is_sequence(ids):
        return {type(ids)}
    kinds = set(map(type, ids))
    scalars = {kind for kind in kinds if issubclass(kind, int | np.generic)}
    if kinds == scalars:
        return kinds
    return scalars.union(*(_element_types(item) for item in ids if type(item) not in scalars))


def _is_sequence(value: Any) -> bool:
    """What NumPy goes through item by item; not every class of that kind is a Sequence."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _allowed_length(length: int, manifest: Manifest, overflow: str) -> int:
    if length <= manifest.max_len:
        return length
    if overflow == "error":
        raise errors.sequence_too_long(length, manifest.max_len, manifest.position)
    warnings.warn(
        f"a sequence of {length} tokens was cut to its first {manifest.max_len} (max_len)",
        stacklevel=4,  # the caller of the session's method
    )
    return manifest.max_len


def _widen(array: npt.NDArray[Any]) -> Ids:
    if array.dtype.kind == "O":
        array = np.where((array >= -(2**63)) & (array < 2**63), array, -1)
    if array.dtype is _INT64 and array.flags.c_contiguous:
        return array  # as it mostly is
    return np.ascontiguousarray(array, dtype=np.int64)


def _any_out_of_range(wide: Ids, vocab_size: int) -> bool:
    # Read as unsigned, a negative id is huge, so one maximum answers for both ends. An id
    # of 2^63 or more wrapped to negative when it was widened, and is caught the same way.
    return wide.size > 0 and bool(np.maximum.reduce(wide.view(np.uint64), axis=None) >= vocab_size)


def _first_out_of_range(wide: Ids, vocab_size: int) -> tuple[int, ...]:
    return tuple(int(axis[0]) for axis in (wide.view(np.uint64) >= vocab_size).nonzero())
