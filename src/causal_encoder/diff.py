"""Two bundles side by side: for upgrades of torch, of the runtime, or of this package.

Both run under the runtime that is installed here. Their outputs are compared over the grid
of `verify`; how long a run takes is measured as `bench` measures it, in turns.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from causal_encoder.bench import ROUNDS, Progress, example_ids, measure
from causal_encoder.contestant import entered
from causal_encoder.errors import BundleError
from causal_encoder.export.artifact import Run, open_bare
from causal_encoder.export.subject import (
    BATCH_SIZES,
    RELATIVE_ERROR_LIMITS,
    distance,
    grid_lengths,
    relative_distance,
)
from causal_encoder.runners import Job
from causal_encoder.serve import Bundle, EncoderSession, Manifest, open_bundle
from causal_encoder.serve.cpu import available_cpus

_SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
    """How far the outputs are apart over the grid.

    Attributes:
        measure: "absolute" between two fp32 bundles, else "relative L2".
        largest: the largest difference; infinite for NaN, null in JSON.
        limit: the sum of what both bundles may be away from the reference.
        batch_size, seq_len: where the largest difference is.
    """

    measure: str
    largest: float
    limit: float
    batch_size: int
    seq_len: int

    @property
    def passed(self) -> bool:
        """Whether the outputs are as near as the budgets of both allow."""
        return self.largest <= self.limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency:
    """Median milliseconds a run of one shape, and B's as a multiple of A's."""

    batch_size: int
    seq_len: int
    a_ms: float
    b_ms: float
    ratio: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """What `diff` found.

    Attributes:
        facts: name of a fact to its value in A and in B.
        parity: how far the outputs are apart.
        latency: a row for each shape.
    """

    facts: Mapping[str, tuple[Any, Any]]
    parity: Parity
    latency: tuple[Latency, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the README documents them."""
        largest = self.parity.largest if math.isfinite(self.parity.largest) else None
        return {
            "schema_version": _SCHEMA_VERSION,
            "facts": {name: {"a": a, "b": b} for name, (a, b) in self.facts.items()},
            "parity": dataclasses.asdict(self.parity)
            | {"largest": largest, "passed": self.parity.passed},
            "latency": [dataclasses.asdict(row) for row in self.latency],
        }


def compare(
    bundle_a: str | os.PathLike[str],
    bundle_b: str | os.PathLike[str],
    *,
    device: str = "auto",
    progress: Progress | None = None,
) -> Difference:
    """Compare two bundles of any format, up to the shorter max_len.

    Args:
        bundle_a: folder of the first bundle, for example the one in use.
        bundle_b: folder of the second, for example the one that may replace it.
        device: for ONNX bundles, as for a session; the others run on CPU.
        progress: called with (step, done, total).

    Raises:
        BundleError: a bundle is damaged, or they do not take and give the same.
        DeviceError: the device cannot be used.
    """
    manifests, runs, placements = [], [], []
    for path in (bundle_a, bundle_b):
        with open_bundle(path) as opened:
            run, placement = _open(opened, device)
        manifests.append(opened.manifest)
        runs.append(run)
        placements.append(placement)
    a, b = manifests
    for name in ("vocab_size", "d_model"):
        if getattr(a, name) != getattr(b, name):
            raise BundleError(
                f"{name} is {getattr(a, name)} in {bundle_a} and {getattr(b, name)} in "
                f"{bundle_b}; only bundles of one kind of model can be compared"
            )
    max_len = min(a.max_len, b.max_len)
    shapes = [(1, min(16, max_len)), (1, min(128, max_len)), (8, min(128, max_len))]
    shapes = list(dict.fromkeys(shapes))
    cells = [(batch, length) for length in grid_lengths(max_len) for batch in BATCH_SIZES]
    total = len(cells) + len(shapes) * (ROUNDS + 1)
    report: Progress = progress or (lambda *_: None)
    parity = _parity(a, b, runs[0], runs[1], cells, lambda step, n: report(step, n, total))
    latency = _latency((bundle_a, bundle_b), (a, b), device, shapes, len(cells), total, report)
    report("done", total, total)
    return Difference(facts=_facts(a, b, placements), parity=parity, latency=latency)


def _open(bundle: Bundle, device: str) -> tuple[Run, str]:
    """How to run a bundle, and where it runs."""
    if bundle.manifest.format != "onnx":
        return open_bare(bundle.model_path, bundle.manifest.format), "torch on cpu"
    session = EncoderSession(bundle.folder, device)
    nodes = ", ".join(f"{count} {name}" for name, count in session.placement.nodes.items())
    return session.run, f"{session.placement.device}: {nodes}"


def _facts(a: Manifest, b: Manifest, placements: list[str]) -> Mapping[str, tuple[Any, Any]]:
    facts: dict[str, tuple[Any, Any]] = {
        name: (getattr(a, name), getattr(b, name))
        for name in ("format", "precision", "opset", "ir_version", "min_onnxruntime", "max_len")
    }
    facts["checkpoint"] = (a.checkpoint_sha256[:12], b.checkpoint_sha256[:12])
    facts["size_bytes"] = (_size_bytes(a), _size_bytes(b))
    facts["placement"] = (placements[0], placements[1])
    for kind, old, new in (("made with", a.tools, b.tools), ("operator", a.operators, b.operators)):
        for name in sorted(set(old) | set(new)):
            facts[f"{kind} {name}"] = (old.get(name), new.get(name))
    return facts


def _size_bytes(manifest: Manifest) -> int:
    return sum(file.size_bytes for file in manifest.files.values())


def _parity(
    a: Manifest,
    b: Manifest,
    run_a: Run,
    run_b: Run,
    cells: list[tuple[int, int]],
    tick: Callable[[str, int], None],
) -> Parity:
    both_fp32 = a.precision == b.precision == "fp32"
    measured = distance if both_fp32 else relative_distance
    worst, place = 0.0, cells[0]
    random = np.random.default_rng(0)
    for done, cell in enumerate(cells):
        tick(f"{cell[0]} x {cell[1]}", done)
        ids = random.integers(0, a.vocab_size, cell, np.int64)
        found = measured(run_b(ids), run_a(ids).astype(np.float64))
        if found > worst:
            worst, place = found, cell
    return Parity(
        measure="absolute" if both_fp32 else "relative L2",
        largest=worst,
        limit=sum(_limit(manifest, both_fp32) for manifest in (a, b)),
        batch_size=place[0],
        seq_len=place[1],
    )


def _limit(manifest: Manifest, both_fp32: bool) -> float:
    """What a bundle may be away from the reference: by its own report, or its precision."""
    if not both_fp32:
        return RELATIVE_ERROR_LIMITS.get(manifest.precision, 0.0)
    checks = manifest.parity["checks"] if manifest.parity is not None else []
    return sum(check["limit"] for check in checks if check["name"] == "parity")


def _latency(
    bundles: tuple[str | os.PathLike[str], str | os.PathLike[str]],
    manifests: tuple[Manifest, Manifest],
    device: str,
    shapes: list[tuple[int, int]],
    done: int,
    total: int,
    report: Progress,
) -> tuple[Latency, ...]:
    rows = []
    with contextlib.ExitStack() as stack:
        contestants = []
        for name, bundle, manifest in zip("ab", bundles, manifests, strict=True):
            job = Job(
                contestant="bundle",
                bundle=os.fspath(bundle),
                checkpoint=None,
                device=device if manifest.format == "onnx" else "cpu",
                threads=available_cpus(),
            )
            contestants.append(stack.enter_context(entered(name, job)))
        for contestant in contestants:
            contestant.answer("loading")
        for number, shape in enumerate(shapes):
            start = done + number * (ROUNDS + 1)
            ids = example_ids(min(manifests, key=lambda m: m.max_len), shape)
            a, b = measure(contestants, ids, start, total, report, most=ROUNDS)
            rows.append(
                Latency(
                    batch_size=shape[0],
                    seq_len=shape[1],
                    a_ms=a.p50_ms,
                    b_ms=b.p50_ms,
                    ratio=b.p50_ms / a.p50_ms,
                )
            )
    return tuple(rows)
