"""Watches a session with CUDA graphs over the stand-in, in a process that `watch` starts."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnxruntime

from causal_encoder.errors import CausalEncoderError
from causal_encoder.serve import EncoderSession
from causal_encoder.serve.placement import CUDA_PROVIDER
from tests.cuda.probe import _ROOT, Event, _listening

# Each bucket anew, then each of them again in another order and with another shape in it.
SHAPES = ((1, 5), (2, 16), (1, 40), (4, 100), (1, 16), (4, 70), (2, 1), (1, 33))
LARGE = (64, 100)
LONG = ((1, 512), (8, 512))
THREADS, TURNS = 32, 8
STREAM = 4096


@dataclasses.dataclass(kw_only=True)
class Seen:
    """What a bundle did.

    Attributes:
        opening: the events of opening a session with graphs.
        runs: the events of a run with each of SHAPES, in one session.
        large: the events of a run that is too large for a graph.
        shared: whether a result has memory of another's.
        threads: the events of THREADS threads with TURNS runs each, in a fresh session.
        device: the events of run_on_device with graphs on.
        plain_device: the same without, on a tensor that has nothing but DLPack's methods.
        result: DLPack's device of that result.
        refused: the error of run_on_device for ids of another kind.
        long: the events of run_on_device with each of LONG.
        options: of the CUDA provider with a stream, as ONNX Runtime reports them.
        unknown: functions of CUDA that stub.c should have but does not.
    """

    opening: list[Event] = dataclasses.field(default_factory=list)
    runs: list[list[Event]] = dataclasses.field(default_factory=list)
    large: list[Event] = dataclasses.field(default_factory=list)
    shared: bool = False
    threads: list[Event] = dataclasses.field(default_factory=list)
    device: list[Event] = dataclasses.field(default_factory=list)
    plain_device: list[Event] = dataclasses.field(default_factory=list)
    result: list[int] = dataclasses.field(default_factory=list)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    long: list[list[Event]] = dataclasses.field(default_factory=list)
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: list[str] = dataclasses.field(default_factory=list)


class Tensor:
    """What a session sees of a tensor of torch or cupy on the GPU."""

    def __init__(self, value: onnxruntime.OrtValue) -> None:
        self.value = value

    def __dlpack__(self, **options: Any) -> object:
        return self.value.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.value.__dlpack_device__()


def watch(environment: Mapping[str, str], bundle: str) -> Seen:
    """Run a bundle in a process over the stand-in."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.cuda.graphs_probe", bundle],
        cwd=_ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, f"exit code {child.returncode}\n{child.stderr}"
    return Seen(**json.loads(child.stdout))


def main() -> None:
    """What the process does."""
    seen = Seen()
    with _listening() as events:
        _see_graphs(sys.argv[1], seen, events)
        _see_threads(sys.argv[1], seen, events)
        _see_device(sys.argv[1], seen, events)
        seen.unknown = sorted({name for kind, name, _ in events if kind == "unknown"})
    print(json.dumps(dataclasses.asdict(seen)))


def _open(bundle: str, **options: Any) -> EncoderSession:
    return EncoderSession(bundle, "cuda", check_finite=False, **options)


def _see_graphs(bundle: str, seen: Seen, events: list[Event]) -> None:
    start = len(events)
    session = _open(bundle, cuda_graphs=True)
    seen.opening = events[start:]
    results = []
    for shape in SHAPES:
        start = len(events)
        results.append(session.run(np.zeros(shape, np.int64)))
        seen.runs.append(events[start:])
        assert results[-1].shape == (*shape, session.manifest.d_model)
    seen.shared = any(
        np.shares_memory(a, b) for i, a in enumerate(results) for b in results[i + 1 :]
    )
    start = len(events)
    session.run(np.zeros(LARGE, np.int64))
    seen.large = events[start:]
    start = len(events)
    session.run_on_device(_on_device(SHAPES[0]))
    seen.device = events[start + 1 :]  # without the copy of the ids to the device


def _see_threads(bundle: str, seen: Seen, events: list[Event]) -> None:
    session = _open(bundle, cuda_graphs=True)

    def work(number: int) -> None:
        for turn in range(TURNS):
            session.run(np.zeros(SHAPES[(number + turn) % len(SHAPES)], np.int64))

    start = len(events)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    seen.threads = events[start:]


def _see_device(bundle: str, seen: Seen, events: list[Event]) -> None:
    session = _open(bundle, cuda_stream=STREAM)
    seen.options = session._session.get_provider_options()[CUDA_PROVIDER]
    ids = Tensor(_on_device(SHAPES[0]))
    start = len(events)
    hidden = session.run_on_device(ids)
    seen.plain_device = events[start:]
    seen.result = list(hidden.__dlpack_device__())
    for shape in LONG:
        long_ids = _on_device(shape)
        start = len(events)
        session.run_on_device(long_ids)
        seen.long.append(events[start:])
    for name, value in {
        "on CPU": onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((2, 8), np.int64)),
        "numpy": np.zeros((2, 8), np.int64),
        "int32": Tensor(_on_device((2, 8), np.int32)),
        "one axis": Tensor(_on_device((8,))),
        "too long": Tensor(_on_device((1, session.manifest.max_len + 1))),
        "empty": Tensor(_on_device((1, 0))),
    }.items():
        try:
            session.run_on_device(value)
        except CausalEncoderError as error:
            seen.refused[name] = f"{type(error).__name__}: {error}"


def _on_device(shape: tuple[int, ...], dtype: type = np.int64) -> onnxruntime.OrtValue:
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), "cuda", 0)


if __name__ == "__main__":
    main()
