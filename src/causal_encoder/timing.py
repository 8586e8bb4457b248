"""What the runs of a benchmark say: percentiles, ratios with an interval, stability, crossovers.

Runs within one turn are correlated: they share the caches and the clock rate of that moment.
So turns, not runs, are what repeats here. A contestant is stable when its last turns agree,
and the interval of a ratio comes from resampling whole rounds, which both contestants share.
"""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

UNSTABLE = "*"  # beside what rests on measurements that are not stable
STABLE_ROUNDS = 3
STABLE_SPREAD = 0.05
SOUND_WAIT = 0.05  # more waiting for a CPU than this makes numbers unsound
RESAMPLES = 1000
_SEED = 0
_INTERVAL = (2.5, 97.5)
INTERVAL_WORDS = (
    f"Intervals: 95 %, percentile bootstrap of the ratio of medians, {RESAMPLES} resamples of "
    "whole rounds, the same rounds for both contestants, fixed seed."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a contestant.

    Attributes:
        times_ms: each run.
        waited_ms: how long it waited for a CPU that other programs used; None if unknown.
        scratch_mib: peak of resident memory above what was resident after loading, since the
            first run of the shape; None if unknown.
    """

    times_ms: Sequence[float]
    waited_ms: float | None
    scratch_mib: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Latency of one contestant for one shape, in milliseconds a run.

    Attributes:
        contestant: its name.
        batch_size, seq_len: the shape of the ids.
        cold_ms: the first run of this shape in the contestant's process.
        n: number of timed runs; their fastest, mean and percentiles follow.
        rounds: number of turns the runs come from.
        stable: whether the medians of the last turns agree, see `is_stable`, and `waited` is
            at most SOUND_WAIT.
        scratch_mib: peak of resident memory above what was resident after loading, in MiB;
            None where the system does not tell, and on CUDA.
        waited: share of the time spent waiting for a CPU that other programs used, 0 to 1;
            near 0 if the measurement is sound, None if the system does not tell.
        ratio: p50 as a multiple of the base's, over 1 if the base is faster; None for the
            base itself.
        ratio_low, ratio_high: the 95 % interval of it, see `ratio_interval`.
    """

    contestant: str
    batch_size: int
    seq_len: int
    cold_ms: float
    n: int
    min_ms: float
    mean_ms: float
    p10_ms: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    rounds: int
    stable: bool
    scratch_mib: float | None
    waited: float | None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crossover:
    """Who is faster at one batch size, the base or a rival, and from which length on.

    Attributes:
        contestant: the rival.
        batch_size: number of sequences.
        seq_len: the first measured length at which the faster one changes; None if it never
            does.
        text: the same in words.
    """

    contestant: str
    batch_size: int
    seq_len: int | None
    text: str


def summary(
    name: str, shape: tuple[int, ...], cold_ms: float, turns: Sequence[Turn]
) -> Measurement:
    """The numbers of one contestant for one shape, not yet compared with the base's."""
    times_ms = np.concatenate([turn.times_ms for turn in turns])
    least, p10, p50, p90, p95, p99 = np.percentile(times_ms, (0, 10, 50, 90, 95, 99)).tolist()
    waits_ms = [turn.waited_ms for turn in turns if turn.waited_ms is not None]
    waited = sum(waits_ms) / float(times_ms.sum()) if len(waits_ms) == len(turns) else None
    scratches_mib = [turn.scratch_mib for turn in turns if turn.scratch_mib is not None]
    return Measurement(
        contestant=name,
        batch_size=shape[0],
        seq_len=shape[1],
        cold_ms=cold_ms,
        n=len(times_ms),
        min_ms=least,
        mean_ms=float(times_ms.mean()),
        p10_ms=p10,
        p50_ms=p50,
        p90_ms=p90,
        p95_ms=p95,
        p99_ms=p99,
        rounds=len(turns),
        stable=is_stable(turns) and (waited or 0.0) <= SOUND_WAIT,
        scratch_mib=max(scratches_mib, default=None),
        waited=waited,
    )


def is_stable(turns: Sequence[Turn]) -> bool:
    """Whether the medians of the last STABLE_ROUNDS turns are within STABLE_SPREAD."""
    medians = [float(np.median(turn.times_ms)) for turn in turns[-STABLE_ROUNDS:]]
    return len(medians) == STABLE_ROUNDS and max(medians) <= min(medians) * (1 + STABLE_SPREAD)


def compared(row: Measurement, turns: Sequence[Turn], base: Sequence[Turn]) -> Measurement:
    """The row with the ratio of its median to the base's; both took the same rounds."""
    own, other = ([np.asarray(turn.times_ms) for turn in side] for side in (turns, base))
    low, high = ratio_interval(own, other)
    ratio = float(np.median(np.concatenate(own)) / np.median(np.concatenate(other)))
    return dataclasses.replace(row, ratio=ratio, ratio_low=low, ratio_high=high)


def ratio_interval(
    rounds_ms: Sequence[npt.NDArray[np.float64]], base_ms: Sequence[npt.NDArray[np.float64]]
) -> tuple[float, float]:
    """The 95 % interval of the ratio of medians, by a bootstrap over whole rounds.

    Each resample draws as many rounds as there were, with replacement and the same ones for
    both sides, and takes the ratio of the medians of all their runs.

    Args:
        rounds_ms: the runs of each round.
        base_ms: the base's runs in the same rounds.
    """
    count = len(rounds_ms)
    drawn = np.random.default_rng(_SEED).integers(0, count, (RESAMPLES, count))
    # The order of rounds does not matter, and of few rounds there are few choices.
    picks, which = np.unique(np.sort(drawn, axis=1), axis=0, return_inverse=True)
    ratios = [
        np.median(np.concatenate([rounds_ms[i] for i in pick]))
        / np.median(np.concatenate([base_ms[i] for i in pick]))
        for pick in picks
    ]
    low, high = np.percentile(np.array(ratios)[which.ravel()], _INTERVAL).tolist()
    return low, high


def faster(row: Measurement, base: str) -> str | None:
    """Who is faster, the base or the row's contestant; None if the interval holds 1."""
    assert row.ratio_low is not None
    assert row.ratio_high is not None
    if row.ratio_low > 1:
        return base
    return row.contestant if row.ratio_high < 1 else None


def crossover(base: str, rows: Sequence[Measurement]) -> Crossover:
    """Where base and rival change places.

    Args:
        base: name of the base.
        rows: a rival's rows of one batch size.
    """
    rival, batch_size = rows[0].contestant, rows[0].batch_size
    found = [(row.seq_len, faster(row, base)) for row in sorted(rows, key=lambda r: r.seq_len)]
    decided = [(seq_len, winner) for seq_len, winner in found if winner is not None]
    changes = [after for before, after in pairwise(decided) if before[1] != after[1]]
    unclear = ", ".join(str(seq_len) for seq_len, winner in found if winner is None)
    loser_to = {base: rival, rival: base}
    if not decided:
        text = f"neither {base} nor {rival} is clearly faster at any measured length"
    elif not changes:
        winner = decided[0][1]
        text = f"{winner} is faster than {loser_to[winner]} at every measured length"
        text += f" but {unclear}" * bool(unclear)
    else:
        text = " and ".join(
            f"{winner} overtakes {loser_to[winner]} from sequence {seq_len}"
            for seq_len, winner in changes
        )
    text += f" at batch {batch_size}"
    if decided and unclear:
        text += (
            f" (no clear difference at {unclear})" if changes else " (no clear difference there)"
        )
    return Crossover(
        contestant=rival,
        batch_size=batch_size,
        seq_len=changes[0][0] if changes else None,
        text=text,
    )
