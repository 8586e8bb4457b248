"""One session under load: many threads, and many calls in a memory that stays as it is."""

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from causal_encoder.errors import SequenceTooLongError, TokenOutOfRangeError
from causal_encoder.serve import EncoderSession

Reference = Callable[[object], npt.NDArray[np.float32]]
THREADS = 32
TURNS = 24
TOLERANCE = 1e-5  # against eager PyTorch; the largest seen here is 2e-6
SHAPES = [(batch, length) for batch in (1, 2, 3, 5, 8, 16) for length in (1, 2, 7, 8, 9, 16, 24)]
GROWTH_LIMIT_BYTES = (
    4 * 2**20
)  # 0.1 MiB was measured over 2,500 calls, 18 MiB with all results kept


def ids_of(number: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(number).integers(0, 37, SHAPES[number % len(SHAPES)])


@pytest.mark.parametrize("threads", [1, 2])
def test_32_threads_with_mixed_shapes_and_bad_input_each_get_their_own_numbers(
    bundle: Path, reference: Reference, threads: int
) -> None:
    session = EncoderSession(bundle, "cpu", threads=threads)
    expected = [reference(ids_of(number)) for number in range(len(SHAPES))]
    start = threading.Barrier(THREADS)

    def work(worker: int) -> float:
        start.wait(timeout=60)
        worst = 0.0
        for turn in range(TURNS):
            number = (7 * worker + turn) % len(SHAPES)
            ids = ids_of(number)
            if turn % 4 == 0:
                with pytest.raises(TokenOutOfRangeError, match=f"id {1000 + worker} at"):
                    session.run(np.where(ids == ids[0, 0], 1000 + worker, ids))
            if turn % 4 == 1:
                with pytest.raises(SequenceTooLongError, match=f"length {25 + worker} is over"):
                    session.run(np.zeros((1, 25 + worker), np.int64))
            if turn % 4 == 2:
                assert session.run(ids[:0]).shape == (0, ids.shape[1], 12)
            lengths = [1 + (worker + row) % ids.shape[1] for row in range(len(ids))]
            rows = session.encode([row[:length] for row, length in zip(ids, lengths, strict=True)])
            differences = [session.run(ids) - expected[number]]
            differences += [
                row - whole[:length]
                for row, whole, length in zip(rows, expected[number], lengths, strict=True)
            ]
            worst = max(worst, *(float(np.abs(each).max()) for each in differences))
        return worst

    with ThreadPoolExecutor(THREADS) as pool:
        assert max(pool.map(work, range(THREADS))) < TOLERANCE


# In a process of its own: memory that earlier tests have freed would hide a leak.
GROWTH = """
import sys
from pathlib import Path
import numpy as np
from causal_encoder.errors import InputError
from causal_encoder.serve import EncoderSession
from tests.serve.test_robustness import SHAPES

session = EncoderSession(sys.argv[1], "cpu", threads=2)
kept = []


def call(number):
    batch, length = SHAPES[number % len(SHAPES)]
    ids = np.full((batch, length), number % 37)
    results = [session.run(ids), *session.encode(list(ids))]
    if number % 5 == 0:
        try:
            session.run(ids + 37)
        except InputError as error:
            results.append(error)
    if sys.argv[2] == "leaks":
        kept.append(results)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def growth(calls):
    before = resident()
    for number in range(calls):
        call(number)
    return resident() - before


growth(500)  # the warm-up: every shape many times
print(growth(10_000))
"""


def growth_of(bundle: Path, variant: str) -> int:
    """Bytes of resident memory that 10,000 calls of mixed shapes add after 500."""
    result = subprocess.run(
        [sys.executable, "-c", GROWTH, str(bundle), variant],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    return int(result.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc/self/statm")
def test_thousands_of_calls_of_mixed_shapes_do_not_grow_the_process(bundle: Path) -> None:
    assert growth_of(bundle, "drops its results") < GROWTH_LIMIT_BYTES


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc/self/statm")
def test_the_same_measurement_catches_a_caller_that_keeps_every_result(bundle: Path) -> None:
    assert growth_of(bundle, "leaks") > 3 * GROWTH_LIMIT_BYTES
