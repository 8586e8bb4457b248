"""Latency of bundles over batch sizes and sequence lengths, beside other ways to run them.

What makes the comparison fair: every contestant gets the same ids, device, number of
threads and float32 precision without TF32. Each has its own process, and for each shape
they take short turns, so that a slow minute of the machine falls on all of them. The
first run of a shape (compilation, growing memory) is reported apart, then comes a turn
that is not counted. Waiting for a CPU that other programs used is measured too.

A shape is measured until it is stable: at least ROUNDS rounds, one turn of each contestant
a round, until for every contestant the medians of its last three turns are within 5 % of
each other; at most three times ROUNDS. What did not become stable is marked.
"""

import contextlib
import dataclasses
import datetime
import importlib.util
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from causal_encoder import timing
from causal_encoder.contestant import Contestant, entered
from causal_encoder.errors import ConfigError, SequenceTooLongError
from causal_encoder.machine import Machine, this_machine
from causal_encoder.runners import OPENVINO, Job
from causal_encoder.serve import Manifest, open_bundle
from causal_encoder.serve.cpu import available_cpus
from causal_encoder.serve.inputs import check_batch
from causal_encoder.serve.placement import DEVICES
from causal_encoder.timing import Crossover, Measurement, Turn

RIVALS = ("eager", "torchscript", "compile", "naive", *OPENVINO)
USUAL_SEQ_LENS = (16, 64, 256, 1024)
ROUNDS = 5
TURN_S = 0.35
MIN_RUNS = 3  # of a turn, however long a run takes
# Threads that ended their work spin for some milliseconds before they sleep.
_SETTLE_S = 0.02
_SCHEMA_VERSION = 2
_RESIDENCY = {
    "cpu": "ids and result in main memory; the checks a bundle or PyTorch model makes included",
    "cuda": "ids and result stay on the GPU, no copies; the clock is read after synchronising",
}

# Called with (step, steps done, steps in all).
Progress = Callable[[str, int, int], None]
Folder = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """Who took part.

    Attributes:
        name: unique; of a bundle its format, precision and target, of a rival its own.
        kind: "bundle" or one of RIVALS.
        bundle: folder of the bundle; None for a rival.
        precision: type of the weights.
        placement: where it ran, in words.
    """

    name: str
    kind: str
    bundle: str | None
    precision: str
    placement: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The result of `run_benchmark`.

    Attributes:
        date: the day, UTC, as 2026-11-30.
        contestants: in the order of the rows; the first is the base of every ratio.
        device: "cpu" or "cuda", where all of them ran.
        tf32: whether float32 products were rounded to TF32; never.
        residency: where ids and results are, and what a run includes.
        method: when measuring stopped and what the intervals are, in words.
        config: configuration of the encoder, with max_len as the first bundle has it.
        machine: hardware and versions.
        rows: one for each shape and contestant.
        crossovers: for each rival of the base and batch size, who is faster where.
    """

    date: str
    contestants: tuple[Entry, ...]
    device: str
    tf32: bool
    residency: str
    method: str
    config: Mapping[str, Any]
    machine: Machine
    rows: tuple[Measurement, ...]
    crossovers: tuple[Crossover, ...]

    def row(self, contestant: str, batch_size: int, seq_len: int) -> Measurement:
        """The measurement of one contestant for one shape."""
        wanted = (contestant, batch_size, seq_len)
        return next(r for r in self.rows if (r.contestant, r.batch_size, r.seq_len) == wanted)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the contestants, the base first."""
        return tuple(entry.name for entry in self.contestants)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (batch_size, seq_len) that was measured."""
        return tuple(dict.fromkeys((row.batch_size, row.seq_len) for row in self.rows))

    @property
    def hardware(self) -> str:
        """What the model ran on."""
        if self.device == "cpu":
            governor = f", governor {self.machine.governor}" * bool(self.machine.governor)
            return f"{self.machine.cpu}, {self.machine.cpus} threads{governor}"
        return self.machine.gpu or "an unknown GPU"

    @property
    def conditions(self) -> str:
        """Number formats and versions in one line."""
        precisions = "/".join(dict.fromkeys(entry.precision for entry in self.contestants))
        tools = [f"{name} {number}" for name, number in self.machine.versions.items()]
        return ", ".join((precisions + " without TF32" * (self.device == "cuda"), *tools))

    @property
    def warning(self) -> str:
        """Why the numbers are not to be trusted; empty if nothing speaks against them."""
        worst = max(row.waited or 0.0 for row in self.rows)
        if worst <= timing.SOUND_WAIT:
            return ""
        return (
            f"Not to be trusted: up to {worst:.0%} of the time went by waiting for a CPU "
            "that other programs used."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `schema_version` changes if a field does."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "warning": self.warning,
            **dataclasses.asdict(self),
        }


def run_benchmark(
    bundles: Sequence[Folder],
    checkpoint: Folder | None = None,
    *,
    batch_sizes: Sequence[int],
    seq_lens: Sequence[int],
    against: Sequence[str] = (),
    device: str = "auto",
    progress: Progress | None = None,
) -> Benchmark:
    """Time bundles of one model, of any formats and precisions, and rivals of them.

    Args:
        bundles: folders of bundles with one configuration; the first is the base of ratios.
        checkpoint: folder of the checkpoint the first was exported from; needed for all
            rivals but those of OpenVINO.
        batch_sizes: numbers of sequences; every combination with a length is measured.
        seq_lens: numbers of tokens, up to the smallest max_len of the bundles.
        against: some of RIVALS.
        device: "cpu", "cuda" or "auto", as for a session; the others follow the first bundle.
        progress: called with (step, done, total).

    Returns:
        A row for each shape and contestant.

    Raises:
        ConfigError: an argument is outside its limits.
        SequenceTooLongError: a sequence length is over a bundle's max_len.
        CausalEncoderError: a contestant cannot run; the message is its own reason.
        ModuleNotFoundError: a contestant needs torch, which is not installed.
    """
    manifests = _manifests(bundles)
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}, expected one of {', '.join(DEVICES)}")
    shapes = _shapes(bundles, manifests, batch_sizes, seq_lens)
    rivals = _rivals(manifests, checkpoint, against)
    _check_installed(rivals, manifests)
    report: Progress = progress or (lambda *_: None)
    total = len(shapes) * (most_rounds() + 1)
    report("loading", 0, total)
    names = (*bundle_names(bundles, manifests), *rivals)
    jobs = _jobs(bundles, manifests, checkpoint, rivals, device)
    rows: list[Measurement] = []
    with contextlib.ExitStack() as stack:
        contestants = [stack.enter_context(entered(names[0], jobs[0]))]
        loaded = [contestants[0].answer("loading")]
        used_device = loaded[0]["device"]
        for name, job in zip(names[1:], jobs[1:], strict=True):
            follower = dataclasses.replace(job, device=used_device)
            contestants.append(stack.enter_context(entered(name, follower)))
        loaded += [contestant.answer("loading") for contestant in contestants[1:]]
        # From the smallest on: memory that a process keeps was needed by the shapes before.
        by_size = sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
        for done, shape in zip(range(0, total, most_rounds() + 1), by_size, strict=True):
            rows += measure(contestants, example_ids(manifests[0], shape), done, total, report)
    report("done", total, total)
    rows.sort(key=lambda row: shapes.index((row.batch_size, row.seq_len)))
    packages = ("torch", "openvino") if set(rivals) & set(OPENVINO) else ("torch",)
    lower = {"openvino-bf16": "bf16"}
    precisions = (
        *(manifest.precision for manifest in manifests),
        *(lower.get(rival, "fp32") for rival in rivals),
    )
    return Benchmark(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        contestants=tuple(
            Entry(
                name=name,
                kind=job.contestant,
                bundle=job.bundle if job.contestant == "bundle" else None,
                precision=precision,
                placement=answer["placement"],
            )
            for name, job, precision, answer in zip(names, jobs, precisions, loaded, strict=True)
        ),
        device=used_device,
        tf32=False,
        residency=_RESIDENCY[used_device],
        method=_method(),
        config=dict(manifests[0].config),
        machine=this_machine(used_device, packages),
        rows=tuple(rows),
        crossovers=crossovers(names, rows),
    )


def usual_seq_lens(bundles: Sequence[Folder]) -> tuple[int, ...]:
    """The lengths to measure if none are asked for: some powers of two up to max_len."""
    max_len = min(manifest.max_len for manifest in _manifests(bundles))
    return tuple(n for n in USUAL_SEQ_LENS if n <= max_len) or (max_len,)


def most_rounds() -> int:
    """After so many rounds a shape is given up as unstable."""
    return 3 * ROUNDS


def _method() -> str:
    return (
        f"Turns of {TURN_S:g} s and at least {MIN_RUNS} runs; at least {ROUNDS} rounds, until for "
        f"every contestant the medians of its last {timing.STABLE_ROUNDS} rounds are within "
        f"{100 * timing.STABLE_SPREAD:g} % of each other, at most {most_rounds()}. "
        f"{timing.INTERVAL_WORDS}"
    )


def _manifests(bundles: Sequence[Folder]) -> list[Manifest]:
    """Of bundles that can be compared."""
    if not bundles:
        raise ConfigError("no bundle was given")
    manifests = []
    for bundle in bundles:
        with open_bundle(bundle) as opened:
            manifests.append(opened.manifest)
    if len({Path(bundle).resolve() for bundle in bundles}) < len(bundles):
        raise ConfigError("a bundle was given twice; name each once")
    first = manifests[0].config
    for bundle, manifest in zip(bundles, manifests, strict=True):
        for name in first.keys() | manifest.config.keys():
            ours, other = first.get(name), manifest.config.get(name)
            if name != "max_len" and ours != other:
                raise ConfigError(
                    f"{name} is {ours} in {bundles[0]} and {other} in {bundle}; only bundles of "
                    "one configuration can be compared"
                )
    return manifests


def bundle_names(bundles: Sequence[Folder], manifests: Sequence[Manifest]) -> tuple[str, ...]:
    """What each is, with its folder's name where two are the same, or else its path."""
    plain = [_kind(manifest) for manifest in manifests]
    folders = [
        f"{name} ({Path(at).resolve().name})" for name, at in zip(plain, bundles, strict=True)
    ]
    paths = [f"{name} ({os.fspath(at)})" for name, at in zip(plain, bundles, strict=True)]
    uses = Counter(plain) + Counter(folders)
    choices = zip(plain, folders, paths, strict=True)
    return tuple(next((n for n in names[:2] if uses[n] == 1), names[2]) for names in choices)


def _kind(manifest: Manifest) -> str:
    target = f" for {manifest.target}" if manifest.target != "portable" else ""
    return f"{manifest.format} {manifest.precision}{target}"


def _shapes(
    bundles: Sequence[Folder],
    manifests: Sequence[Manifest],
    batch_sizes: Sequence[int],
    seq_lens: Sequence[int],
) -> list[tuple[int, int]]:
    for kind, sizes in (("batch size", batch_sizes), ("sequence length", seq_lens)):
        if not sizes:
            raise ConfigError(f"no {kind} was given")
        for size in sizes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"{kind} is {size!r}, expected a whole number of at least 1")
    shortest = min(range(len(manifests)), key=lambda number: manifests[number].max_len)
    max_len = manifests[shortest].max_len
    if max(seq_lens) > max_len:
        longer = "" if "learned" in manifests[0].position else ", or export with a larger --max-len"
        raise SequenceTooLongError(
            f"sequence length {max(seq_lens)} is over max_len {max_len} of {bundles[shortest]}; "
            f"measure lengths up to {max_len} (--seq-len){longer}"
        )
    return list(itertools.product(dict.fromkeys(batch_sizes), dict.fromkeys(seq_lens)))


def _rivals(
    manifests: Sequence[Manifest], checkpoint: object, against: Sequence[str]
) -> tuple[str, ...]:
    for name in against:
        if name not in RIVALS:
            raise ConfigError(f"against is {name!r}, expected some of {', '.join(RIVALS)}")
        if name in {manifest.format for manifest in manifests}:
            raise ConfigError(f"a bundle is {name} itself; leave {name} out of the contestants")
    if checkpoint is None and (needy := [name for name in against if name not in OPENVINO]):
        raise ConfigError(f"{', '.join(needy)} needs the checkpoint the bundle came from")
    if set(against) & set(OPENVINO) and _plain_onnx(manifests) is None:
        raise ConfigError("openvino runs a portable fp32 onnx bundle; name one to measure it")
    return tuple(dict.fromkeys(against))


def _plain_onnx(manifests: Sequence[Manifest]) -> int | None:
    """The number of the bundle that OpenVINO runs, the first portable one in fp32 ONNX."""
    kinds = [_kind(manifest) for manifest in manifests]
    return kinds.index("onnx fp32") if "onnx fp32" in kinds else None


def _check_installed(rivals: Sequence[str], manifests: Sequence[Manifest]) -> None:
    """Without it a contestant would fail in its process, where nobody can add the remedy."""
    if set(rivals) & set(OPENVINO) and importlib.util.find_spec("openvino") is None:
        raise ConfigError("openvino is not installed; pip install openvino")
    needed = ["onnxscript"] if "naive" in rivals else []
    if set(rivals) - set(OPENVINO) or any(manifest.format != "onnx" for manifest in manifests):
        needed.insert(0, "torch")
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _jobs(
    bundles: Sequence[Folder],
    manifests: Sequence[Manifest],
    checkpoint: Folder | None,
    rivals: Sequence[str],
    device: str,
) -> list[Job]:
    """What each contestant loads, in their order."""
    first = Job(
        contestant="bundle",
        bundle=os.fspath(bundles[0]),
        checkpoint=None if checkpoint is None else os.fspath(checkpoint),
        device=device,
        threads=available_cpus(),
    )
    jobs = [dataclasses.replace(first, bundle=os.fspath(bundle)) for bundle in bundles]
    for rival in rivals:
        number = _plain_onnx(manifests) if rival in OPENVINO else 0
        jobs.append(dataclasses.replace(jobs[number or 0], contestant=rival))
    return jobs


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
    most: int | None = None,
) -> list[Measurement]:
    """All contestants on one shape: cold run, warm-up, then turns in changing order.

    Args:
        contestants: loaded; the first is the base of the ratios.
        ids: (B, T).
        done: steps done before; each round is one, as is what comes before the rounds.
        total: steps in all.
        report: called with (step, done, total).
        most: number of rounds at which to stop in any case; most_rounds() if not given.
    """
    batch_size, seq_len = ids.shape
    step = f"batch {batch_size}, sequence {seq_len}"
    turn = {"turn_s": TURN_S, "min_runs": MIN_RUNS}
    report(step, done, total)
    cold_ms = {}
    for contestant in contestants:
        cold_ms[contestant.name] = contestant.ask({"ids": ids.tolist()}, step)["cold_ms"]
        contestant.ask(turn, step)
    turns: dict[str, list[Turn]] = {contestant.name: [] for contestant in contestants}
    for number in range(most or most_rounds()):
        report(step, done + 1 + number, total)
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            time.sleep(_SETTLE_S)
            turns[contestant.name].append(Turn(**contestant.ask(turn, step)))
        if number + 1 >= ROUNDS and all(map(timing.is_stable, turns.values())):
            break
    rows = [timing.summary(name, ids.shape, cold_ms[name], taken) for name, taken in turns.items()]
    base = turns[contestants[0].name]
    rivals = [timing.compared(row, turns[row.contestant], base) for row in rows[1:]]
    return [rows[0], *rivals]


def crossovers(names: Sequence[str], rows: Sequence[Measurement]) -> tuple[Crossover, ...]:
    """One for each batch size and contestant but the first, which is the base."""
    base, *rivals = names
    found = []
    for batch_size in dict.fromkeys(row.batch_size for row in rows):
        for rival in rivals:
            both = [
                row
                for row in rows
                if row.batch_size == batch_size and row.contestant in (base, rival)
            ]
            verdict = timing.crossover(base, [row for row in both if row.contestant == rival])
            if not all(row.stable for row in both):
                verdict = dataclasses.replace(verdict, text=f"{verdict.text} {timing.UNSTABLE}")
            found.append(verdict)
    return tuple(found)
