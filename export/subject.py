"""The artifact under examination, beside the model it is measured against.

The reference is the model in float64 on CPU. The model itself is tested elsewhere, against
independent transcriptions of the mathematics.

Shapes: B batch, T sequence length, D d_model, L max_len.
"""

import dataclasses
import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from causal_encoder.errors import BundleError, DeviceError
from causal_encoder.export.artifact import (
    OPTIMIZATION_LEVELS,
    Facts,
    Run,
    facts_of_archive,
    facts_of_onnx,
    open_bare,
    open_onnx,
    read_facts,
)
from causal_encoder.export.prepare import exact_arithmetic
from causal_encoder.export.trace import ARCHIVES, OPSETS, trace_onnx
from causal_encoder.model import CausalEncoder
from causal_encoder.serve import Bundle, EncoderSession, Manifest

Array = npt.NDArray[Any]

BATCH_SIZES = (1, 2, 3, 8)
# fp32: the largest error of an artifact over the grid may be this many times the largest
# error of eager fp32 over the same grid, plus a little for where eager happens to be exact.
EAGER_ERROR_FACTOR = 4.0
ERROR_FLOOR = 1e-6
EAGER_ERROR_CEILING = 1e-2
# Lower precisions: the largest relative L2 error of the vector of any one position. An
# error of r bounds the cosine too: it is at least 1 - r^2 / 2 to first order. fp16 was
# measured at 4e-4 to 7e-4 over 2 to 24 layers of PyTorch's initial weights, and up to 4e-3
# on harsh ones; bf16, with 3 bits less, gets 8 times as much, to be measured on a GPU.
# int8 was measured at 6e-3 to 1.7e-2 over 2 to 24 layers of initial weights, and up to 9.5e-2
# on harsh ones.
RELATIVE_ERROR_LIMITS = {"fp16": 1e-2, "bf16": 8e-2, "int8": 1e-1}
# What an int8 file may move by where only other tokens, rows or settings change. It is 0
# unless another order of additions tips the rounding of an activation.
INT8_INVARIANCE_LIMIT = 1e-2
# Long enough to cross the blocks that kernels work in, short enough to be quick.
_PROPERTY_LENGTH = 257


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape of the parity grid, with the largest errors against the reference.

    The artifact's error is that of its finite values; `finite` tells whether all are.
    """

    batch: int
    length: int
    error: float
    eager_error: float
    finite: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """An artifact under examination.

    Attributes:
        manifest: the bundle's manifest.
        facts: what the model file is.
        traced: what the exporter has just traced, where that is known; see `expected`.
        model: the prepared model, float32.
        model_bytes: size of the model file and the data beside it.
        run: runs the artifact as its users do; for ONNX through an EncoderSession.
        bare: runs the file past all our checks, on the same device.
        reopen: loads the file once more, with an optimisation level and a thread count.
        device: "cpu" or "cuda", where all of these run; "none" if the file cannot run here,
            and then none of them may be called.
        tick: called with a word as each piece of the long work begins.
    """

    manifest: Manifest
    facts: Facts
    traced: Facts | None
    model: CausalEncoder
    model_bytes: int
    run: Run
    bare: Run
    reopen: Callable[[str, int], Run]
    device: str
    tick: Callable[[str], None] = lambda _: None

    @functools.cached_property
    def expected(self) -> Facts:
        """What a file of this model is, if the versions of the tools that are here write it."""
        if self.traced is not None:
            return self.traced
        self.tick("tracing")
        with exact_arithmetic():
            if self.manifest.format != "onnx":
                archive = ARCHIVES[self.manifest.format](self.model)
                return facts_of_archive(io.BytesIO(archive), self.manifest.format)
            opset = self.manifest.opset or 0
            if opset not in OPSETS:
                raise BundleError(f"opset {self.manifest.opset} is not one that is exported")
            return facts_of_onnx(
                trace_onnx(self.model, opset, self.manifest.precision, self.manifest.target)
            )

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
        found = self.run(ids)
        finite = np.isfinite(found)
        return Cell(
            batch=batch,
            length=length,
            error=self.distance(_where(finite, found, expected), expected),
            eager_error=self.distance(eager, expected),
            finite=bool(finite.all()),
        )

    def distance(self, found: Array, expected: Array) -> float:
        """The error in the measure of the precision: absolute for fp32, else relative."""
        measure = distance if self.manifest.precision == "fp32" else relative_distance
        return measure(found, expected)

    @functools.cached_property
    def limit(self) -> float:
        """The largest error an artifact may have."""
        if self.manifest.precision != "fp32":
            return RELATIVE_ERROR_LIMITS[self.manifest.precision]
        # Where eager itself is no measure, because it overflows, is far off, or its outputs are
        # smaller than the floor, nothing is allowed over a hundredth of the largest output.
        ceiling = EAGER_ERROR_CEILING * float(np.abs(self.reference).max())
        return min(ceiling, self._eager_limit) if np.isfinite(ceiling) else 0.0

    @property
    def invariance_limit(self) -> float:
        """How far two runs that must agree may be apart."""
        int8 = self.manifest.precision == "int8"
        return min(self.limit, INT8_INVARIANCE_LIMIT) if int8 else self.limit

    @property
    def _eager_limit(self) -> float:
        return EAGER_ERROR_FACTOR * max(cell.eager_error for cell in self.grid) + ERROR_FLOOR

    @property
    def property_ids(self) -> Array:
        """(8, T) ids of a middling length, for the checks that compare run with run."""
        return self.ids[:, : min(self.model.config.max_len, _PROPERTY_LENGTH)].copy()


def _where(finite: Array, found: Array, expected: Array) -> Array:
    """The values found, and the expected ones where those are not finite."""
    return np.where(finite, found, expected) if found.shape == expected.shape else found


def count_ticks(max_len: int) -> int:
    """How often a Subject ticks at most: the trace, the reference, the grid, the settings."""
    return (
        1
        + len(OPTIMIZATION_LEVELS) * 2
        + max(BATCH_SIZES)
        + len(BATCH_SIZES) * len(grid_lengths(max_len))
    )


def open_subject(
    bundle: Bundle,
    model: CausalEncoder,
    device: str,
    tick: Callable[[str], None] = lambda _: None,
    traced: Facts | None = None,
) -> Subject:
    """Load what the checks need; afterwards the bundle may be replaced.

    Args:
        bundle: an opened bundle.
        model: a prepared model that has the bundle's config.
        device: "cpu", "cuda" or "auto".
        tick: see Subject.
        traced: what the exporter has just traced; it is traced again if not given.
    """
    manifest, path = bundle.manifest, bundle.model_path
    subject = functools.partial(
        Subject,
        manifest=manifest,
        facts=read_facts(path, manifest.format),
        traced=traced,
        model=model,
        model_bytes=sum(file.size_bytes for file in manifest.files.values()),
        tick=tick,
    )
    if manifest.format != "onnx":
        if device == "cuda":
            raise DeviceError(
                f"a {manifest.format} bundle is verified on CPU; pass device='cpu' (--device cpu)"
            )
        bare = open_bare(path, manifest.format)
        return subject(run=bare, bare=bare, reopen=lambda *_: bare, device="cpu")
    try:
        session = EncoderSession(bundle.folder, device, check_finite=False)
    except DeviceError:
        if device == "cuda" or manifest.precision != "bf16":
            raise
        return subject(run=_absent, bare=_absent, reopen=_absent, device="none")
    except BundleError as error:
        broken = functools.partial(_raise, error)
        return subject(run=broken, bare=broken, reopen=broken, device="cpu")
    used = session.placement.device
    return subject(
        run=session.run,
        bare=open_bare(path, "onnx", used),
        reopen=functools.partial(open_onnx, path, used),
        device=used,
    )


def _absent(*_: Any) -> Any:
    raise AssertionError("this artifact cannot run here")


def _raise(error: Exception, *_: Any) -> Any:
    """A file that no session opens: every check that runs it is refuted with the reason."""
    raise error


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


def relative_distance(found: Array, expected: Array) -> float:
    """Largest relative L2 error of the vector of a position; infinite as `distance`.

    A vector much shorter than the others is measured against their mean length.
    """
    if found.shape != expected.shape:
        return float("inf")
    lengths = np.linalg.norm(expected, axis=-1)
    scale = np.maximum(lengths, lengths.mean() if lengths.size else 0.0)
    errors = np.linalg.norm(found - expected, axis=-1)
    largest = float(np.divide(errors, scale, where=errors > 0, out=errors * 0).max(initial=0.0))
    return largest if np.isfinite(largest) else float("inf")
