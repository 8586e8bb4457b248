"""Watches sessions run over the stand-in, in a process of its own that `watch` starts.

Each bundle is opened twice: as an EncoderSession, and bare with CUDA graphs on. The values
that come out are never looked at, because nothing computes them.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from causal_encoder.errors import CausalEncoderError, DeviceError
from causal_encoder.serve import EncoderSession
from causal_encoder.serve.bundle import open_bundle
from causal_encoder.serve.placement import CUDA_DRIVER, CUDA_OPTIONS, CUDA_PROVIDER

SHAPES = ((2, 8), (1, 3), (3, 5))
MEMORY = ("take", "give")  # kinds of events
CROWD = (4000, 9)  # too many ids for the memory of a session under stress
# What run_on_device is given in place of int64 (batch, sequence) on the device.
MISUSES: dict[str, tuple[Any, str]] = {
    "int32": (np.zeros((2, 8), np.int32), "cuda"),
    "float64": (np.zeros((2, 8)), "cuda"),
    "int32 on CPU": (np.zeros((2, 8), np.int32), "cpu"),
    "one axis": (np.zeros(8, np.int64), "cuda"),
    "on CPU": (np.zeros((2, 8), np.int64), "cpu"),
}
Event = tuple[str, str, int]  # kind, name, bytes, as stub.c tells them
_ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A bundle, and how to open it."""

    bundle: str
    device: str = "auto"
    gpu_memory_limit_bytes: int | None = None
    stress: bool = False


@dataclasses.dataclass(kw_only=True)
class Seen:
    """What a bundle did.

    Attributes:
        error: why an EncoderSession refused it; the rest is empty then.
        device, nodes: of its placement.
        options: of the CUDA provider, as ONNX Runtime reports them.
        runs: the events of one run with each of SHAPES, all in one session.
        executed: "provider type" of each node of the optimised graph.
        capture, replay: the events of the first and second run with CUDA graphs.
        unknown: functions of CUDA that stub.c should have but does not.
        held: bytes of device memory in use after each hundred runs of random shapes.
        crowded: errors of a batch that the memory limit has no room for.
        recovered: the events of a small run after those.
        misused: the error of run_on_device for each of MISUSES; "" if it answered.
    """

    error: str = ""
    device: str = ""
    nodes: dict[str, int] = dataclasses.field(default_factory=dict)
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    runs: list[list[Event]] = dataclasses.field(default_factory=list)
    executed: list[str] = dataclasses.field(default_factory=list)
    capture: list[Event] = dataclasses.field(default_factory=list)
    replay: list[Event] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    held: list[int] = dataclasses.field(default_factory=list)
    crowded: list[str] = dataclasses.field(default_factory=list)
    recovered: list[Event] = dataclasses.field(default_factory=list)
    misused: dict[str, str] = dataclasses.field(default_factory=dict)


def watch(environment: Mapping[str, str], requests: Sequence[Request]) -> list[Seen]:
    """Open and run every bundle in one process over the stand-in."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.cuda.probe"],
        input=json.dumps([dataclasses.asdict(request) for request in requests]),
        cwd=_ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, f"exit code {child.returncode}\n{child.stderr}"
    return [Seen(**fields) for fields in json.loads(child.stdout)]


def main() -> None:
    """What the process does: requests on standard input, what was seen on standard output."""
    requests = [Request(**fields) for fields in json.load(sys.stdin)]
    print(json.dumps([dataclasses.asdict(_see(request)) for request in requests]))


def _see(request: Request) -> Seen:
    seen = Seen()
    with _listening() as events:
        try:
            _run_session(request, seen, events)
        except CausalEncoderError as error:
            seen.error = str(error)
        if seen.device == "cuda" and not request.stress:
            _run_captured(request, seen, events)
        seen.unknown = sorted({name for kind, name, _ in events if kind == "unknown"})
    return seen


@contextlib.contextmanager
def _listening() -> Iterator[list[Event]]:
    """Everything the stand-in is asked to do inside the block, in order."""
    events: list[Event] = []

    def listen(kind: bytes, name: bytes, size_bytes: int) -> None:
        events.append((kind.decode(), name.decode(), size_bytes))

    signature = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    listener = signature(listen)
    library = ctypes.CDLL(CUDA_DRIVER)
    library.stub_listen(listener)
    try:
        yield events
    finally:
        library.stub_listen(None)  # it is called once more when the process ends


def _run_session(request: Request, seen: Seen, events: list[Event]) -> None:
    session = EncoderSession(
        request.bundle,
        request.device,
        gpu_memory_limit_bytes=request.gpu_memory_limit_bytes,
        check_finite=False,
    )
    seen.device = session.placement.device
    seen.nodes = dict(session.placement.nodes)
    seen.options = session._session.get_provider_options().get(CUDA_PROVIDER, {})
    for shape in SHAPES:
        start = len(events)
        hidden = session.run(np.zeros(shape, np.int64))
        assert hidden.shape == (*shape, session.manifest.d_model)
        seen.runs.append(events[start:])
    if request.stress:
        _stress(session, seen, events)


def _stress(session: EncoderSession, seen: Seen, events: list[Event]) -> None:
    random = np.random.default_rng(0)
    for _ in range(6):
        for shape in zip(random.integers(1, 64, 100), random.integers(1, 10, 100), strict=True):
            session.run(np.zeros(shape, np.int64))
        sizes = (size if kind == "take" else -size for kind, _, size in events if kind in MEMORY)
        seen.held.append(sum(sizes))
    for _ in range(3):
        try:
            session.run(np.zeros(CROWD, np.int64))
        except DeviceError as error:
            seen.crowded.append(str(error))
    start = len(events)
    session.run(np.zeros(SHAPES[0], np.int64))
    seen.recovered = events[start:]
    for name, (ids, device) in MISUSES.items():
        seen.misused[name] = ""
        try:
            session.run_on_device(onnxruntime.OrtValue.ortvalue_from_numpy(ids, device, 0))
        except Exception as error:  # noqa: BLE001  # ONNX Runtime has no public base class
            seen.misused[name] = str(error)


def _run_captured(request: Request, seen: Seen, events: list[Event]) -> None:
    with open_bundle(request.bundle) as bundle, tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = f"{folder}/profile"
        session = onnxruntime.InferenceSession(
            bundle.model_path,
            options,
            providers=[(CUDA_PROVIDER, CUDA_OPTIONS | {"enable_cuda_graph": "1"})],
            enable_fallback=0,
        )
        shape = (*SHAPES[0], bundle.manifest.d_model)
        binding = session.io_binding()
        ids = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(SHAPES[0], np.int64), "cuda", 0)
        hidden = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, "cuda", 0)
        binding.bind_ortvalue_input(bundle.manifest.inputs[0].name, ids)
        binding.bind_ortvalue_output(bundle.manifest.outputs[0].name, hidden)
        for run in (seen.capture, seen.replay):
            start = len(events)
            session.run_with_iobinding(binding)
            run += events[start:]
        profile = json.loads(Path(session.end_profiling()).read_text())
    seen.executed = [
        f"{event['args']['provider']} {event['args']['op_name']}"
        for event in profile
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]


if __name__ == "__main__":
    main()
