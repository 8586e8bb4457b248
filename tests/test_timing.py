"""What turns say, on turns with known answers."""

import dataclasses

import numpy as np
import pytest

from causal_encoder.timing import (
    Measurement,
    Turn,
    compared,
    crossover,
    faster,
    is_stable,
    ratio_interval,
    summary,
)


def turns(*rounds_ms: list[float], waited_ms: float | None = 0.0) -> list[Turn]:
    return [
        Turn(times_ms=times_ms, waited_ms=waited_ms, scratch_mib=float(number))
        for number, times_ms in enumerate(rounds_ms)
    ]


def row(seq_len: int, low: float, high: float) -> Measurement:
    measured = summary("eager", (8, seq_len), 1.0, turns([1.0]))
    return dataclasses.replace(measured, ratio=(low + high) / 2, ratio_low=low, ratio_high=high)


def test_the_summary_is_over_the_runs_of_all_turns() -> None:
    times_ms = [float(n) for n in range(1, 102)]
    found = summary("onnx fp32", (2, 3), 40.0, turns(times_ms[::2], times_ms[1::2]))
    assert (found.batch_size, found.seq_len, found.cold_ms) == (2, 3, 40.0)
    assert (found.n, found.rounds) == (101, 2)
    assert (found.min_ms, found.mean_ms, found.p50_ms) == (1, 51, 51)
    assert (found.p10_ms, found.p90_ms, found.p95_ms, found.p99_ms) == (11, 91, 96, 100)
    assert found.scratch_mib == 1
    assert found.ratio is None


def test_waiting_is_a_share_of_the_time() -> None:
    assert summary("a", (1, 1), 1.0, turns([10.0], [30.0], waited_ms=1.0)).waited == 0.05


@pytest.mark.parametrize(("waited_ms", "stable"), [(0.5, True), (0.6, False), (None, True)])
def test_numbers_that_waited_for_cpus_are_not_stable(waited_ms: float | None, stable: bool) -> None:
    rounds = turns([10.0], [10.0], [10.0], waited_ms=waited_ms)
    assert summary("a", (1, 1), 1.0, rounds).stable is stable


def test_what_the_system_does_not_tell_is_none() -> None:
    silent = [Turn(times_ms=[1.0], waited_ms=None, scratch_mib=None)]
    found = summary("a", (1, 1), 1.0, silent)
    assert found.waited is None
    assert found.scratch_mib is None


@pytest.mark.parametrize(
    ("medians", "stable"),
    [
        ([1.0, 1.0], False),  # too few
        ([1.0, 1.0, 1.0], True),
        ([1.0, 1.04, 1.05], True),
        ([1.0, 1.05, 1.051], False),
        ([1.051, 1.0, 1.0], False),
        ([9.0, 1.0, 1.0, 1.0], True),  # the last three count
        ([1.0, 1.0, 1.0, 9.0], False),
    ],
)
def test_stable_means_that_the_last_three_medians_are_within_five_percent(
    medians: list[float], stable: bool
) -> None:
    # A few slow runs in a turn move its mean and not its median.
    assert is_stable(turns(*([median, median, 50.0] for median in medians))) is stable


def test_rounds_that_are_all_alike_leave_no_doubt_about_the_ratio() -> None:
    rounds = [np.array([3.0, 4.0, 5.0])] * 5
    assert ratio_interval(rounds, [times / 2 for times in rounds]) == (2.0, 2.0)


def test_a_slow_minute_of_the_machine_falls_out_of_the_ratio() -> None:
    slowness = [1.0, 5.0, 1.0, 2.0, 9.0]
    base = [slow * np.ones(4) for slow in slowness]
    assert ratio_interval([1.5 * times for times in base], base) == (1.5, 1.5)


def test_the_interval_holds_the_spread_between_rounds_not_between_runs() -> None:
    runs = np.linspace(0.5, 1.5, 101)  # wide, and the same in each round
    base = [runs] * 5
    low, high = ratio_interval([runs] * 5, base)
    assert (low, high) == (1, 1)
    low, high = ratio_interval([runs * level for level in (0.8, 0.9, 1.0, 1.1, 1.2)], base)
    assert 0.8 <= low < 0.9
    assert 1.1 < high <= 1.2


def test_the_interval_is_the_same_each_time_and_holds_the_truth() -> None:
    random = np.random.default_rng(3)
    base = [random.normal(1.0, 0.02, 50) for _ in range(9)]
    rounds = [random.normal(1.3, 0.02, 50) for _ in range(9)]
    low, high = ratio_interval(rounds, base)
    assert ratio_interval(rounds, base) == (low, high)
    assert low < 1.3 < high
    assert high - low < 0.05


def test_one_round_gives_an_interval_of_one_point() -> None:
    found = compared(row(1, 1, 1), turns([4.0]), turns([2.0]))
    assert (found.ratio, found.ratio_low, found.ratio_high) == (2, 2, 2)


@pytest.mark.parametrize(
    ("low", "high", "winner"),
    [(1.1, 1.3, "onnx"), (0.8, 0.9, "eager"), (0.9, 1.1, None), (1.0, 1.2, None), (0.8, 1.0, None)],
)
def test_faster_is_who_the_whole_interval_speaks_for(
    low: float, high: float, winner: str | None
) -> None:
    assert faster(row(1, low, high), "onnx") == winner


BASE, RIVAL, NEITHER = (1.2, 1.3), (0.8, 0.9), (0.9, 1.1)


@pytest.mark.parametrize(
    ("intervals", "seq_len", "text"),
    [
        ([BASE, BASE, BASE], None, "onnx is faster than eager at every measured length at batch 8"),
        ([RIVAL, RIVAL], None, "eager is faster than onnx at every measured length at batch 8"),
        ([BASE, RIVAL, RIVAL], 64, "eager overtakes onnx from sequence 64 at batch 8"),
        ([RIVAL, RIVAL, BASE], 256, "onnx overtakes eager from sequence 256 at batch 8"),
        (
            [BASE, NEITHER, RIVAL],
            256,
            "eager overtakes onnx from sequence 256 at batch 8 (no clear difference at 64)",
        ),
        (
            [BASE, RIVAL, BASE],
            64,
            "eager overtakes onnx from sequence 64 and onnx overtakes eager from sequence 256 "
            "at batch 8",
        ),
        (
            [NEITHER, BASE, NEITHER],
            None,
            "onnx is faster than eager at every measured length but 16, 256 at batch 8 "
            "(no clear difference there)",
        ),
        (
            [NEITHER],
            None,
            "neither onnx nor eager is clearly faster at any measured length at batch 8",
        ),
    ],
)
def test_where_two_change_places_is_said_in_words(
    intervals: list[tuple[float, float]], seq_len: int | None, text: str
) -> None:
    rows = [row(n, *interval) for n, interval in zip((16, 64, 256), intervals, strict=False)]
    found = crossover("onnx", rows[::-1])
    assert (found.seq_len, found.text) == (seq_len, text)
    assert (found.contestant, found.batch_size) == ("eager", 8)
