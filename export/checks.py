"""What is checked of an artifact: one function a check, one table at the end.

The reference is the model in float64 on CPU. The model itself is tested elsewhere, against
independent transcriptions of the mathematics.

Shapes: B batch, T sequence length, D d_model, V vocabulary, L max_len.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from causal_encoder.errors import (
    DeviceError,
    EmptySequenceError,
    InputError,
    SequenceTooLongError,
    TokenOutOfRangeError,
)
from causal_encoder.export.artifact import Facts, Run, open_bare, read_facts
from causal_encoder.export.prepare import INPUT, metadata, output_of
from causal_encoder.model import CausalEncoder, fingerprint
from causal_encoder.serve import Bundle, EncoderSession, Manifest

Array = npt.NDArray[Any]

BATCH_SIZES = (1, 2, 3, 8)
# fp32: the largest error of an artifact over the grid may be this many times the largest
# error of eager fp32 over the same grid, plus a little for where eager happens to be exact.
EAGER_ERROR_FACTOR = 4.0
ERROR_FLOOR = 1e-6

_RANDOM_OPERATORS = ("dropout", "random", "bernoulli", "multinomial", "rand")
# Long enough to cross the blocks that kernels work in, short enough to be quick.
_PROPERTY_LENGTH = 257


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found; it holds if there is no detail."""

    measured: float | None = None
    limit: float | None = None
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape of the parity grid, with the largest errors against the reference."""

    batch: int
    length: int
    error: float
    eager_error: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """An artifact under examination.

    Attributes:
        manifest: the bundle's manifest.
        facts: what the model file says of itself.
        model: the prepared model, float32.
        run: runs the artifact as its users do; for ONNX through an EncoderSession.
        bare: runs the file past all our checks, on CPU.
        device: "cpu" or "cuda", where `run` runs.
        tick: called with a word as each piece of the long work begins.
    """

    manifest: Manifest
    facts: Facts
    model: CausalEncoder
    run: Run
    bare: Run
    device: str
    tick: Callable[[str], None] = lambda _: None

    @functools.cached_property
    def ids(self) -> Array:
        """(8, L) int64, random, the first and last id among them."""
        config = self.model.config
        shape = (max(BATCH_SIZES), config.max_len)
        ids = np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int64)
        ids[0, 0], ids[-1, 0] = 0, config.vocab_size - 1
        return ids

    @functools.cached_property
    def reference(self) -> Array:
        """(8, L, D) float64: by causality, every cell of the grid is a corner of it."""
        model = CausalEncoder(self.model.config, torch.float64).eval()
        model.load_state_dict(self.model.state_dict())
        rows = []
        for row in self.ids:
            self.tick("reference")
            rows.append(model(torch.from_numpy(row[None])).numpy())
        return np.concatenate(rows)

    @functools.cached_property
    def grid(self) -> tuple[Cell, ...]:
        """Every batch size with every length, around the powers of two and the ends."""
        return tuple(
            self._measure(batch, length)
            for length in grid_lengths(self.model.config.max_len)
            for batch in BATCH_SIZES
        )

    def _measure(self, batch: int, length: int) -> Cell:
        self.tick(f"{batch} x {length}")
        ids = self.ids[:batch, :length].copy()
        expected = self.reference[:batch, :length]
        eager = self.model(torch.from_numpy(ids)).numpy()
        return Cell(
            batch=batch,
            length=length,
            error=distance(self.run(ids), expected),
            eager_error=distance(eager, expected),
        )

    @property
    def limit(self) -> float:
        """The largest error an artifact may have."""
        return EAGER_ERROR_FACTOR * max(cell.eager_error for cell in self.grid) + ERROR_FLOOR

    @property
    def property_ids(self) -> Array:
        """(8, T) ids of a middling length, for the checks that compare run with run."""
        return self.ids[:, : min(self.model.config.max_len, _PROPERTY_LENGTH)].copy()


def count_ticks(max_len: int) -> int:
    """How often a Subject ticks: rows of the reference and cells of the grid."""
    return max(BATCH_SIZES) + len(BATCH_SIZES) * len(grid_lengths(max_len))


def open_subject(
    bundle: Bundle, model: CausalEncoder, device: str, tick: Callable[[str], None] = lambda _: None
) -> Subject:
    """Load what the checks need; afterwards the bundle may be replaced."""
    bare = open_bare(bundle.model_path, bundle.manifest.format)
    run, used_device = bare, "cpu"
    if bundle.manifest.format != "onnx":
        if device == "cuda":
            raise DeviceError(
                f"a {bundle.manifest.format} bundle is verified on CPU; pass --device cpu"
            )
    else:
        session = EncoderSession(bundle.folder, device, check_finite=False)
        run, used_device = session.run, session.placement.device
    return Subject(
        manifest=bundle.manifest,
        facts=read_facts(bundle.model_path, bundle.manifest.format),
        model=model,
        run=run,
        bare=bare,
        device=used_device,
        tick=tick,
    )


def grid_lengths(max_len: int) -> tuple[int, ...]:
    """1, 2, 3, then 2^k - 1, 2^k, 2^k + 1, .., L - 1, L."""
    powers = [2**k for k in range(1, max_len.bit_length() + 1)]
    lengths = {1, max_len - 1, max_len} | {p + step for p in powers for step in (-1, 0, 1)}
    return tuple(sorted(length for length in lengths if 1 <= length <= max_len))


def distance(found: Array, expected: Array) -> float:
    """Largest absolute difference; infinite for NaN or another shape."""
    if found.shape != expected.shape:
        return float("inf")
    largest = float(np.abs(found - expected).max(initial=0.0))
    return largest if np.isfinite(largest) else float("inf")


def source(subject: Subject) -> Finding:
    """The bundle names the weights that it is checked against."""
    if subject.manifest.checkpoint_sha256 == fingerprint(subject.model):
        return Finding()
    return Finding(detail="the bundle was exported from other weights than these")


def facts_agree(subject: Subject) -> Finding:
    """The model file says of itself what the manifest says of it."""
    manifest, facts = subject.manifest, subject.facts
    pairs: Mapping[str, tuple[object, object]] = {
        "operators": (dict(facts.operators), dict(manifest.operators)),
        "opset": (facts.opset, manifest.opset),
        "ir_version": (facts.ir_version, manifest.ir_version),
        **{
            key: (facts.metadata.get(key), value)
            for key, value in metadata(subject.model.config, manifest.precision).items()
            if not key.endswith(".version")
        },
    }
    for name, (found, expected) in pairs.items():
        if found != expected:
            return Finding(detail=f"{name} is {found!r} in the file, expected {expected!r}")
    return Finding()


def axes_dynamic(subject: Subject) -> Finding:
    """Batch and sequence are still open in the file."""
    config, facts = subject.model.config, subject.facts
    output = output_of(config).axes
    expected: tuple[str | int, ...] = INPUT.axes
    if subject.manifest.format == "program" and config.max_len == 1:
        expected = (INPUT.axes[0], 1)  # the only length there is
    for name, found, wanted in (
        ("input", facts.input_axes, expected),
        ("output", facts.output_axes, output),
    ):
        if found is not None and found != wanted:
            return Finding(detail=f"{name} axes are {found}, expected {wanted}")
    return Finding()


def deterministic(subject: Subject) -> Finding:
    """No dropout and no random operator is left, and a second run gives the same bits."""
    for operator in subject.facts.operators:
        if any(word in operator.lower() for word in _RANDOM_OPERATORS):
            return Finding(detail=f"operator {operator} is in the graph")
    ids = subject.property_ids
    if not np.array_equal(subject.run(ids), subject.run(ids), equal_nan=True):
        return Finding(detail=f"two runs on the same {ids.shape} ids differ")
    return Finding()


def parity(subject: Subject) -> Finding:
    """Every cell of the grid is as near to the reference as eager fp32 is, by the budget."""
    worst = max(cell.error for cell in subject.grid)
    failing = next((cell for cell in subject.grid if cell.error > subject.limit), None)
    detail = (
        f"error {failing.error:.3g} is over {subject.limit:.3g} "
        f"at batch {failing.batch}, sequence {failing.length}"
        if failing
        else ""
    )
    return Finding(measured=worst, limit=subject.limit, detail=detail)


def causal(subject: Subject) -> Finding:
    """Changing a token changes no earlier output."""
    ids = subject.property_ids
    vocab_size, length = subject.model.config.vocab_size, ids.shape[1]
    before = subject.run(ids)
    cases = []
    for position in sorted({1, length // 2, length - 1} - {0}):
        changed = ids.copy()
        changed[:, position:] = (changed[:, position:] + 1) % vocab_size
        difference = distance(subject.run(changed)[:, :position], before[:, :position])
        cases.append((difference, f"when tokens from position {position} on change"))
    return _largest(cases, subject.limit, "earlier outputs move by")


def batch_invariant(subject: Subject) -> Finding:
    """A row alone gives what it gives among others."""
    ids = subject.property_ids
    together = subject.run(ids)
    cases = [
        (distance(subject.run(ids[row : row + 1].copy()), together[row : row + 1]), f"in row {row}")
        for row in range(len(ids))
    ]
    return _largest(cases, subject.limit, "a row alone and in a batch differ by")


def padding_invariant(subject: Subject) -> Finding:
    """Padding on the right changes no real position."""
    ids = subject.property_ids
    cases = []
    for length in grid_lengths(ids.shape[1]):
        padded = ids.copy()
        padded[:, length:] = 0
        difference = distance(subject.run(padded)[:, :length], subject.run(ids[:, :length].copy()))
        cases.append((difference, f"at length {length}, padded to {ids.shape[1]}"))
    return _largest(cases, subject.limit, "rows move by")


def refuses_too_long(subject: Subject) -> Finding:
    """T > L is refused, and never answered by the bare file."""
    max_len = subject.model.config.max_len
    for length in (max_len + 1, max_len + 2, 2 * max_len + 1):
        ids = np.zeros((2, length), np.int64)
        if detail := _answered(subject, ids, SequenceTooLongError, (slice(None), max_len)):
            return Finding(detail=f"sequence length {length}: {detail}")
    return Finding()


def refuses_empty(subject: Subject) -> Finding:
    """T = 0 is refused."""
    detail = _answered(subject, np.zeros((2, 0), np.int64), EmptySequenceError, None)
    return Finding(detail=f"sequence length 0: {detail}" if detail else "")


def refuses_bad_ids(subject: Subject) -> Finding:
    """An id outside 0..V-1 is refused, and from there on never answered by the bare file."""
    vocab_size = subject.model.config.vocab_size
    for token in (-1, -vocab_size - 1, -(2**40), vocab_size, vocab_size + 1, 2**40, 2**63 - 1):
        for column in {0, subject.property_ids.shape[1] - 1}:
            ids = subject.property_ids
            ids[1, column] = token
            if detail := _answered(subject, ids, TokenOutOfRangeError, (slice(1, 2), column)):
                return Finding(detail=f"id {token} at column {column}: {detail}")
    return Finding()


def _largest(cases: list[tuple[float, str]], limit: float, what: str) -> Finding:
    failing = next((case for case in cases if case[0] > limit), None)
    return Finding(
        measured=max((difference for difference, _ in cases), default=0.0),
        limit=limit,
        detail=f"{what} {failing[0]:.3g}, over {limit:.3g}, {failing[1]}" if failing else "",
    )


def _answered(
    subject: Subject,
    ids: Array,
    expected: type[InputError],
    poisoned: tuple[slice, int] | None,
) -> str:
    """Empty if the artifact refuses the ids, else what it did.

    Args:
        subject: the artifact.
        ids: what it must refuse.
        expected: the error of an EncoderSession.
        poisoned: (rows, column) from where on the bare file, if it answers, must give NaN.
    """
    try:
        hidden = subject.bare(ids)
    except Exception:  # noqa: BLE001  # any error of the runtime is a refusal
        hidden = None
    if hidden is not None:
        rest = hidden if poisoned is None else hidden[poisoned[0], poisoned[1] :]
        if rest.size == 0 or not np.isnan(rest).all(axis=-1).all():
            return f"the file answers with shape {hidden.shape}, expected an error or NaN"
    if subject.manifest.format == "onnx":
        try:
            subject.run(ids)
        except expected:
            return ""
        except Exception as error:  # noqa: BLE001  # the wrong refusal is a finding
            return f"the session raises {type(error).__name__}, expected {expected.__name__}"
        return f"the session answers, expected {expected.__name__}"
    return ""


CHECKS: Mapping[str, Callable[[Subject], Finding]] = {
    "source": source,
    "facts": facts_agree,
    "axes": axes_dynamic,
    "deterministic": deterministic,
    "parity": parity,
    "causality": causal,
    "batch invariance": batch_invariant,
    "padding invariance": padding_invariant,
    "refuses too long": refuses_too_long,
    "refuses empty": refuses_empty,
    "refuses bad ids": refuses_bad_ids,
}
