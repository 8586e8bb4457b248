"""Latency of a bundle over batch sizes and sequence lengths, beside PyTorch's.

What makes the comparison fair: every contestant gets the same ids, device, number of
threads and float32 precision without TF32. Each has its own process, and for each shape
they take short turns, so that a slow minute of the machine falls on all of them. The
first run of a shape (compilation, growing memory) is reported apart, then comes a turn
that is not counted. Waiting for a CPU that other programs used is measured too.
"""

import contextlib
import csv
import dataclasses
import importlib.util
import io
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from causal_encoder import errors
from causal_encoder.contestant import Contestant, Job, entered
from causal_encoder.errors import ConfigError
from causal_encoder.machine import Machine, this_machine
from causal_encoder.serve import Manifest, open_bundle
from causal_encoder.serve.cpu import available_cpus
from causal_encoder.serve.inputs import check_batch
from causal_encoder.serve.placement import DEVICES

CONTESTANTS = ("eager", "torchscript", "compile")
USUAL_SEQ_LENS = (16, 64, 256, 1024)
ROUNDS = 5
TURN_S = 0.35
MIN_RUNS = 3  # of a turn, however long a run takes
# Threads that ended their work spin for some milliseconds before they sleep.
_SETTLE_S = 0.02
_SOUND_WAIT = 0.05  # more waiting for a CPU than this is worth a warning
_SCHEMA_VERSION = 1
_RESIDENCY = {
    "cpu": "ids and result in main memory; the checks of ids, and of an ONNX result, included",
    "cuda": "ids and result stay on the GPU, no copies; the clock is read after synchronising",
}

# Called with (step, steps done, steps in all).
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Latency of one contestant for one shape, in milliseconds a run.

    Attributes:
        contestant: the bundle's format, or one of CONTESTANTS.
        batch_size, seq_len: the shape of the ids.
        cold_ms: the first run of this shape in the contestant's process.
        n: number of timed runs; their fastest and percentiles follow.
        waited: share of the time spent waiting for a CPU that other programs used, 0 to 1;
            near 0 if the measurement is sound, None if the system does not tell.
        ratio_to_bundle: p50 as a multiple of the bundle's, over 1 if the bundle is
            faster; None for the bundle.
    """

    contestant: str
    batch_size: int
    seq_len: int
    cold_ms: float
    n: int
    min_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    waited: float | None
    ratio_to_bundle: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The result of `run_benchmark`.

    Attributes:
        bundle: folder of the bundle.
        contestants: names in the order of the rows, the bundle's format first.
        device: "cpu" or "cuda", where all of them ran.
        precision: type of the weights.
        tf32: whether float32 products were rounded to TF32; never.
        residency: where ids and results are, and what a run includes.
        config: configuration of the encoder, with max_len as exported.
        placement: where each contestant ran, in words.
        machine: hardware and versions.
        rows: one for each shape and contestant.
    """

    bundle: str
    contestants: tuple[str, ...]
    device: str
    precision: str
    tf32: bool
    residency: str
    config: Mapping[str, Any]
    placement: Mapping[str, str]
    machine: Machine
    rows: tuple[Measurement, ...]

    def row(self, contestant: str, batch_size: int, seq_len: int) -> Measurement:
        """The measurement of one contestant for one shape."""
        wanted = (contestant, batch_size, seq_len)
        return next(r for r in self.rows if (r.contestant, r.batch_size, r.seq_len) == wanted)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (batch_size, seq_len) that was measured."""
        return tuple(dict.fromkeys((row.batch_size, row.seq_len) for row in self.rows))

    @property
    def hardware(self) -> str:
        """What the model ran on."""
        if self.device == "cpu":
            return f"{self.machine.cpu}, {self.machine.cpus} threads"
        return self.machine.gpu or "an unknown GPU"

    @property
    def conditions(self) -> str:
        """Number format and versions in one line."""
        tools = [f"{name} {number}" for name, number in self.machine.versions.items()]
        return ", ".join((f"{self.precision} without TF32", *tools))

    @property
    def warning(self) -> str:
        """Why the numbers are not to be trusted; empty if nothing speaks against them."""
        worst = max(row.waited or 0.0 for row in self.rows)
        if worst <= _SOUND_WAIT:
            return ""
        return (
            f"Not to be trusted: up to {worst:.0%} of the time went by waiting for a CPU "
            "that other programs used."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `schema_version` changes if a field does."""
        return {"schema_version": _SCHEMA_VERSION, **dataclasses.asdict(self)}

    def to_csv(self) -> str:
        """The rows, with the names of the fields as the first line."""
        text = io.StringIO()
        names = [field.name for field in dataclasses.fields(Measurement)]
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in self.rows)
        return text.getvalue()


def run_benchmark(
    bundle: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    batch_sizes: Sequence[int],
    seq_lens: Sequence[int],
    against: Sequence[str] = (),
    device: str = "auto",
    progress: Progress | None = None,
) -> Benchmark:
    """Time a bundle, of any format, and PyTorch forms of the model it came from.

    Args:
        bundle: folder of the bundle.
        checkpoint: folder of the checkpoint it was exported from; needed for `against`.
        batch_sizes: numbers of sequences; every combination with a length is measured.
        seq_lens: numbers of tokens, up to the bundle's max_len.
        against: some of CONTESTANTS.
        device: "cpu", "cuda" or "auto", as for a session; the others follow the bundle.
        progress: called with (step, done, total).

    Returns:
        A row for each shape and contestant.

    Raises:
        ConfigError: an argument is outside its limits.
        SequenceTooLongError: a sequence length is over the bundle's max_len.
        CausalEncoderError: a contestant cannot run; the message is its own reason.
        ModuleNotFoundError: a contestant needs torch, which is not installed.
    """
    with open_bundle(bundle) as opened:
        manifest = opened.manifest
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}, expected one of {', '.join(DEVICES)}")
    shapes = _shapes(manifest, batch_sizes, seq_lens)
    rivals = _rivals(manifest, checkpoint, against)
    if rivals or manifest.format != "onnx":
        _need_torch()
    report: Progress = progress or (lambda *_: None)
    total = len(shapes) * (ROUNDS + 1)
    report("loading", 0, total)
    job = Job(
        contestant="bundle",
        bundle=os.fspath(bundle),
        checkpoint=None if checkpoint is None else os.fspath(checkpoint),
        device=device,
        threads=available_cpus(),
    )
    rows: list[Measurement] = []
    with contextlib.ExitStack() as stack:
        contestants = [stack.enter_context(entered(manifest.format, job))]
        loaded = [contestants[0].answer("loading")]
        for name in rivals:
            rival = dataclasses.replace(job, contestant=name, device=loaded[0]["device"])
            contestants.append(stack.enter_context(entered(name, rival)))
        loaded += [contestant.answer("loading") for contestant in contestants[1:]]
        for done, shape in zip(range(0, total, ROUNDS + 1), shapes, strict=True):
            measured = measure(contestants, example_ids(manifest, shape), done, total, report)
            rows += _compared(measured)
    report("done", total, total)
    return Benchmark(
        bundle=os.fspath(bundle),
        contestants=(manifest.format, *rivals),
        device=loaded[0]["device"],
        precision=manifest.precision,
        tf32=False,
        residency=_RESIDENCY[loaded[0]["device"]],
        config=dict(manifest.config),
        placement={
            c.name: answer["placement"] for c, answer in zip(contestants, loaded, strict=True)
        },
        machine=this_machine(loaded[0]["device"]),
        rows=tuple(rows),
    )


def usual_seq_lens(bundle: str | os.PathLike[str]) -> tuple[int, ...]:
    """The lengths to measure if none are asked for: some powers of two up to max_len."""
    with open_bundle(bundle) as opened:
        max_len = opened.manifest.max_len
    return tuple(n for n in USUAL_SEQ_LENS if n <= max_len) or (max_len,)


def _shapes(
    manifest: Manifest, batch_sizes: Sequence[int], seq_lens: Sequence[int]
) -> list[tuple[int, int]]:
    for kind, sizes in (("batch size", batch_sizes), ("sequence length", seq_lens)):
        if not sizes:
            raise ConfigError(f"no {kind} was given")
        for size in sizes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"{kind} is {size!r}, expected a whole number of at least 1")
    if max(seq_lens) > manifest.max_len:
        raise errors.sequence_too_long(max(seq_lens), manifest.max_len, manifest.position)
    return list(itertools.product(dict.fromkeys(batch_sizes), dict.fromkeys(seq_lens)))


def _rivals(manifest: Manifest, checkpoint: object, against: Sequence[str]) -> tuple[str, ...]:
    for name in against:
        if name not in CONTESTANTS:
            raise ConfigError(f"against is {name!r}, expected some of {', '.join(CONTESTANTS)}")
        if name == manifest.format:
            raise ConfigError(f"the bundle is {name} itself; leave {name} out of the contestants")
    if against and checkpoint is None:
        raise ConfigError(f"{', '.join(against)} needs the checkpoint the bundle came from")
    return tuple(dict.fromkeys(against))


def _need_torch() -> None:
    """Without it a contestant would fail in its process, where nobody can add the remedy."""
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


def example_ids(manifest: Manifest, shape: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Random ids that the bundle takes, the same at each call."""
    try:
        ids = np.random.default_rng(0).integers(0, manifest.vocab_size, shape, np.int64)
    except (MemoryError, ValueError) as error:
        raise ConfigError(f"{shape[0]} x {shape[1]} ids are too many: {error}") from error
    return check_batch(ids, manifest, "error")


def measure(
    contestants: Sequence[Contestant],
    ids: npt.NDArray[np.int64],
    done: int,
    total: int,
    report: Progress,
) -> list[Measurement]:
    """All contestants on one shape: cold run, warm-up, then turns in changing order."""
    batch_size, seq_len = ids.shape
    step = f"batch {batch_size}, sequence {seq_len}"
    turn = {"turn_s": TURN_S, "min_runs": MIN_RUNS}
    report(step, done, total)
    cold_ms = {}
    for contestant in contestants:
        cold_ms[contestant.name] = contestant.ask({"ids": ids.tolist()}, step)["cold_ms"]
        contestant.ask(turn, step)
    answers: dict[str, list[dict[str, Any]]] = {c.name: [] for c in contestants}
    for number in range(ROUNDS):
        report(step, done + 1 + number, total)
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            time.sleep(_SETTLE_S)
            answers[contestant.name].append(contestant.ask(turn, step))
    return [_summary(name, ids.shape, cold_ms[name], turns) for name, turns in answers.items()]


def _summary(
    name: str, shape: tuple[int, int], cold_ms: float, turns: Sequence[Mapping[str, Any]]
) -> Measurement:
    times_ms = [time_ms for turn in turns for time_ms in turn["times_ms"]]
    least, p50, p90, p99 = np.percentile(times_ms, (0, 50, 90, 99)).tolist()
    waits_ms = [turn["waited_ms"] for turn in turns]
    return Measurement(
        contestant=name,
        batch_size=shape[0],
        seq_len=shape[1],
        cold_ms=cold_ms,
        n=len(times_ms),
        min_ms=least,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        waited=None if None in waits_ms else sum(waits_ms) / sum(times_ms),
        ratio_to_bundle=None,
    )


def _compared(rows: Sequence[Measurement]) -> list[Measurement]:
    """The rows of one shape with their ratios to the first, the bundle's."""
    bundle, *rivals = rows
    with_ratio = (
        dataclasses.replace(rival, ratio_to_bundle=rival.p50_ms / bundle.p50_ms) for rival in rivals
    )
    return [bundle, *with_ratio]


def print_benchmark(benchmark: Benchmark, console: Console) -> None:
    """What a person reads: medians side by side, then every number, then the conditions."""
    console.print(latency_table(benchmark), detail_table(benchmark))
    for name, placement in benchmark.placement.items():
        console.print(f"{name}: {placement}", highlight=False, markup=False)
    console.print(benchmark.conditions, benchmark.residency, sep="\n", highlight=False)
    if benchmark.warning:
        console.print(benchmark.warning, style="yellow", highlight=False)


def latency_table(benchmark: Benchmark) -> Table:
    """One row a shape: the median of each contestant, and how it compares to the bundle."""
    bundle, *rivals = benchmark.contestants
    table = Table(title=f"Median milliseconds a run\n{benchmark.hardware}")
    if rivals:
        table.caption = f"in brackets: how many times as fast {bundle} is"
    for heading in ("batch", "sequence", bundle, *rivals):
        table.add_column(heading, justify="right")
    for shape in benchmark.shapes:
        cells = [_short(benchmark.row(bundle, *shape).p50_ms)]
        for rival in rivals:
            row = benchmark.row(rival, *shape)
            assert row.ratio_to_bundle is not None
            color = "green" if row.ratio_to_bundle >= 1 else "red"
            cells.append(f"{_short(row.p50_ms)} [{color}]({row.ratio_to_bundle:.2f}x)[/]")
        table.add_row(*map(str, shape), *cells)
    return table


def detail_table(benchmark: Benchmark) -> Table:
    """One row a measurement: its spread, its first run, and the number of runs."""
    table = Table("shape", "contestant", title="Milliseconds a run, in detail")
    for heading in ("min", "p50", "p90", "p99", "first", "runs"):
        table.add_column(heading, justify="right")
    for row in benchmark.rows:
        times_ms = (row.min_ms, row.p50_ms, row.p90_ms, row.p99_ms, row.cold_ms)
        table.add_row(
            f"{row.batch_size} x {row.seq_len}",
            row.contestant,
            *map(_short, times_ms),
            str(row.n),
            end_section=row.contestant == benchmark.contestants[-1],
        )
    return table


def _short(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
