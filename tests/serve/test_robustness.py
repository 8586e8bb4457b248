"""One session under load: many threads, wrong values on the device, and too little memory."""

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import torch

from causal_encoder.errors import (
    DeviceError,
    InputError,
    SequenceTooLongError,
    TokenOutOfRangeError,
)
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


# Ids that the caller has put on the device.

IDS = np.arange(10).reshape(2, 5)


@pytest.mark.parametrize(
    "ids",
    [
        *(IDS.astype(kind) for kind in ("int32", "uint8", "uint64", "float64", "float32", "bool")),
        IDS[0],
        IDS[None],
        IDS[:, :0],
    ],
    ids=lambda ids: f"{ids.dtype} {ids.shape}",
)
def test_ids_on_the_device_of_another_type_or_rank_are_refused(
    session: EncoderSession, ids: npt.NDArray[Any]
) -> None:
    """Where a pointer is bound instead, int32 is read as int64 (onnxruntime issue 10299)."""
    with pytest.raises(InputError, match=r"expected tensor\(int64\)|two axes|0 tokens"):
        session.run_on_device(onnxruntime.OrtValue.ortvalue_from_numpy(ids))
    assert session.run(IDS).shape == (2, 5, 12)


@pytest.mark.parametrize(
    "ids",
    [
        np.ascontiguousarray(IDS.T).T,
        np.repeat(IDS, 3, axis=1)[:, ::3],
        IDS[:, ::-1].copy()[:, ::-1],
        np.repeat(IDS, 2, axis=0)[::2],
    ],
    ids=["transposed", "strided", "reversed", "every second row"],
)
def test_ids_on_the_device_that_are_not_contiguous_give_the_same_numbers_or_are_refused(
    session: EncoderSession, ids: npt.NDArray[np.int64]
) -> None:
    expected = session.run(IDS)
    value = onnxruntime.OrtValue.ortvalue_from_numpy(ids)
    np.testing.assert_array_equal(session.run_on_device(value).numpy(), expected)
    with pytest.raises(RuntimeError, match=r"[Cc]ontiguous"):
        onnxruntime.OrtValue.from_dlpack(torch.from_numpy(np.ascontiguousarray(IDS.T)).T)


def test_ids_on_the_device_may_be_dropped_by_the_caller_before_the_result_is_read(
    session: EncoderSession,
) -> None:
    expected = [session.run(ids_of(number)) for number in range(len(SHAPES))]
    results = [
        session.run_on_device(onnxruntime.OrtValue.ortvalue_from_numpy(ids_of(number)))
        for number in range(len(SHAPES))
    ]
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result.numpy(), wanted)


def test_ids_on_the_device_that_no_one_checked_are_never_answered_plausibly(
    session: EncoderSession,
) -> None:
    swapped = IDS.astype(">i8")  # an OrtValue knows no byte order: 1 becomes 2^56
    for ids, first_bad in ((swapped, 1), (IDS - 1, 0), (IDS + 37, 0)):
        value = onnxruntime.OrtValue.ortvalue_from_numpy(ids)
        hidden = session.run_on_device(value).numpy()
        assert np.isnan(hidden[0, first_bad:]).all()


# Too little memory.


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc/self/statm")
def test_too_little_memory_is_told_with_the_batch_and_the_session_works_on(
    bundle: Path, reference: Reference
) -> None:
    resource = pytest.importorskip("resource")
    session = EncoderSession(bundle, "cpu", threads=1)
    many = np.zeros((60_000, 24), np.int64)
    np.testing.assert_allclose(session.run(IDS), reference(IDS), atol=TOLERANCE)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, limits[1]))
    try:
        for _ in range(3):
            with pytest.raises(DeviceError, match="a batch of 60000 x 24") as told:
                session.run(many)
            assert "try a smaller one" in str(told.value)
            assert "\n" not in str(told.value)
            small = session.run(IDS)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    np.testing.assert_allclose(small, reference(IDS), atol=TOLERANCE)


# The same on a GPU; what can be seen without one is in tests/cuda.


@pytest.mark.gpu
def test_cuda_memory_stays_as_it_is_over_many_shapes(bundle: Path) -> None:
    session = EncoderSession(bundle, "cuda")
    free = []
    for _ in range(4):
        for number in range(2500):
            session.run(ids_of(number))
        free.append(torch.cuda.mem_get_info()[0])
    assert free[1] - free[-1] < GROWTH_LIMIT_BYTES


@pytest.mark.gpu
def test_too_little_memory_on_cuda_is_told_and_the_session_works_on(
    bundle: Path, reference: Reference
) -> None:
    session = EncoderSession(bundle, "cuda", gpu_memory_limit_bytes=2**24)
    for _ in range(3):
        with pytest.raises(DeviceError, match="a batch of 60000 x 24"):
            session.run(np.zeros((60_000, 24), np.int64))
        np.testing.assert_allclose(session.run(IDS), reference(IDS), atol=TOLERANCE)


@pytest.mark.gpu
def test_sessions_on_one_gpu_are_opened_and_used_by_many_threads_at_once(
    bundle: Path, reference: Reference
) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: EncoderSession(bundle, "cuda").run(IDS), range(16)))
    for hidden in results:
        np.testing.assert_allclose(hidden, reference(IDS), atol=TOLERANCE)


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
