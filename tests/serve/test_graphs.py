"""Buckets of CUDA graphs, by value on CPU, where a replay is a run.

That graphs are captured and replayed on CUDA is seen in tests/cuda.
"""

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

import causal_encoder.serve.buckets as buckets_module
import causal_encoder.serve.graphs as graphs_module
from causal_encoder.errors import ConfigError, InputError
from causal_encoder.serve import EncoderSession
from causal_encoder.serve.buckets import Shape
from causal_encoder.serve.device import bound_run
from causal_encoder.serve.graphs import Bucket, GraphRunner, Hidden
from causal_encoder.serve.inputs import Ids

Reference = Callable[[object], npt.NDArray[np.float32]]
L = 24


class Watched(GraphRunner):
    """Counts what is captured and replayed, and by which threads."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.captured: list[Shape] = []
        self.replays = 0
        self.threads: set[int] = set()

    def _run(self, ids: Ids) -> Hidden:
        # On CUDA the result is a copy, here it is a view of a buffer that the next run fills.
        return super()._run(ids).copy()

    def _new_bucket(self, shape: Shape) -> Bucket:
        bucket = super()._new_bucket(shape)
        self.captured.append(shape)

        def replay() -> None:
            self.replays += 1
            self.threads.add(threading.get_ident())
            bucket.replay()

        return Bucket(ids=bucket.ids, hidden=bucket.hidden, replay=replay)


@pytest.fixture
def runner(session: EncoderSession) -> Watched:
    return Watched(session._session, session.manifest, "cpu")


def random_ids(batch: int, length: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(batch * 100 + length).integers(0, 37, (batch, length))


def test_every_shape_gives_the_numbers_of_the_model(runner: Watched, reference: Reference) -> None:
    for batch in range(1, 6):
        for length in range(1, L + 1):
            ids = random_ids(batch, length)
            hidden = runner.run(ids)
            assert hidden.flags.c_contiguous
            np.testing.assert_allclose(hidden, reference(ids), atol=1e-5)
    assert sorted(runner.captured) == [(b, t) for b in (1, 2, 4, 8) for t in (16, 24)]
    assert runner.replays == 5 * L + len(runner.captured)


def test_ids_of_the_run_before_do_not_stay_in_the_padding(runner: Watched) -> None:
    runner.run(np.full((2, 16), 36))
    alone = runner.run(random_ids(1, 3))
    runner.run(random_ids(2, 16))
    ids = np.concatenate([random_ids(1, 3), np.full((1, 3), 7)])
    np.testing.assert_allclose(runner.run(ids)[:1], alone, atol=1e-5)


def test_too_large_a_batch_runs_without_a_graph(
    runner: Watched, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets_module, "MAX_TOKENS", 64)
    ids = random_ids(5, 16)
    np.testing.assert_allclose(runner.run(ids), reference(ids), atol=1e-5)
    assert runner.captured == []


def test_past_the_last_bucket_runs_go_without_a_graph_and_the_first_keep_theirs(
    runner: Watched, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs_module, "MAX_BUCKETS", 2)
    for batch in (1, 2, 4, 1, 8):
        ids = random_ids(batch, 10)
        np.testing.assert_allclose(runner.run(ids), reference(ids), atol=1e-5)
    assert runner.captured == [(1, 16), (2, 16)]
    assert runner.replays == 3 + len(runner.captured)


def test_a_capture_that_fails_is_told_and_tried_again_under_another_id(
    runner: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> Bucket:
        raise MemoryError("no room")

    given = []
    options = graphs_module._run_options

    def watched_options(graph: int) -> onnxruntime.RunOptions:
        given.append(graph)
        return options(graph)

    monkeypatch.setattr(graphs_module, "_run_options", watched_options)
    with monkeypatch.context() as patch:
        patch.setattr(graphs_module, "Bucket", fail)
        with pytest.raises(MemoryError, match="no room"):
            runner.run(random_ids(1, 16))
    assert runner.run(random_ids(1, 16)).shape == (1, 16, 12)
    assert given == [1, 2]


def test_32_threads_share_the_buckets_and_each_gets_its_own_numbers(
    runner: Watched, reference: Reference
) -> None:
    shapes = [(batch, length) for batch in (1, 2, 3) for length in (1, 9, 16, 17, 24)]

    def work(number: int) -> float:
        worst = 0.0
        for turn in range(20):
            ids = random_ids(*shapes[(number + turn) % len(shapes)])
            worst = max(worst, float(np.abs(runner.run(ids) - reference(ids)).max()))
        return worst

    with ThreadPoolExecutor(32) as pool:
        assert max(pool.map(work, range(32))) < 1e-5
    assert len(runner.captured) == len(set(runner.captured)) == 6
    assert len(runner.threads) == 1  # ONNX Runtime captures anew for each thread


def test_no_two_sessions_run_at_once(
    session: EncoderSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one captures, a copy by another would make the capture fail."""
    running = 0
    most = 0

    def slow_run(*arguments: Any) -> onnxruntime.OrtValue:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.001)
        hidden = bound_run(*arguments)
        running -= 1
        return hidden

    monkeypatch.setattr(graphs_module, "bound_run", slow_run)
    monkeypatch.setattr(buckets_module, "MAX_TOKENS", 0)
    runners = [GraphRunner(session._session, session.manifest, "cpu") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: runners[number % 4].run(random_ids(1, 3)), range(40)))
    assert most == 1


def test_the_thread_ends_with_the_session(session: EncoderSession) -> None:
    runner = GraphRunner(session._session, session.manifest, "cpu")
    runner.run(random_ids(1, 3))
    (thread,) = runner._thread._threads
    del runner
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_session_on_cpu_takes_no_notice_of_cuda_graphs(bundle: Path) -> None:
    session = EncoderSession(bundle, "cpu", cuda_graphs=True, cuda_stream=1)
    assert session.run([[1, 2]]).shape == (1, 2, 12)
    assert session._graphs is None


def test_warming_up_runs_each_shape_and_refuses_what_a_run_refuses(
    session: EncoderSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    execute = session._execute

    def watched_execute(ids: Ids) -> Hidden:
        ran.append(ids.shape)
        return execute(ids)

    monkeypatch.setattr(session, "_execute", watched_execute)
    session.warm_up([(1, 16), (3, 5)])
    assert ran == [(1, 16), (3, 5)]
    with pytest.raises(InputError, match="over max_len"):
        session.warm_up([(1, L + 1)])
    for shape in ((2**62, 20), (2**40, 20), (-1, 3), (1.5, 2), "ab", None, (1,)):
        with pytest.raises(InputError):
            session.warm_up([shape])  # type: ignore[list-item]


@pytest.mark.parametrize("stream", [0, -1, 2**64, 1.5, True, "7"])
def test_a_stream_that_is_none_is_refused(stream: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cuda_stream is"):
        EncoderSession(tmp_path, "cpu", cuda_stream=stream)
