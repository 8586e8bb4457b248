"""Which device a session runs on, and proof that it does.

ONNX Runtime answers a missing CUDA library with a log line and a CPU session, and
`get_available_providers()` lists what was compiled in, not what works. So the libraries
are looked for first, and afterwards every node is counted where it was placed.
"""

import contextlib
import ctypes
import dataclasses
import io
import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import onnxruntime

from causal_encoder.errors import DeviceError

DEVICES = ("auto", "cpu", "cuda")
CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
# TF32 would round fp32 products to 10 bits of mantissa, and ONNX Runtime's default is on. The
# arena grows by what is asked of it, where the default doubles it each time.
CUDA_OPTIONS = {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
# What libonnxruntime_providers_cuda.so of the CUDA 13 builds links to: the driver, and these
# libraries with the pip requirement that brings each.
CUDA_DRIVER = "libcuda.so.1"
CUDA_LIBRARIES = {
    "libcudart.so.13": "nvidia-cuda-runtime~=13.0",
    "libcublasLt.so.13": "nvidia-cublas~=13.0",
    "libcublas.so.13": "nvidia-cublas~=13.0",
    "libcurand.so.10": "nvidia-curand~=10.0",
}

# Two threads redirecting at once would leave the redirection of the first in place.
_redirecting = threading.Lock()

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a session runs.

    Attributes:
        requested: the device asked for: "auto", "cpu" or "cuda".
        device: the device in use: "cpu" or "cuda".
        reason: why `auto` chose it; empty if it was asked for by name.
        nodes: number of graph nodes on each execution provider.
        off_device: "Type name" of each node that is not on the device; empty on success.
    """

    requested: str
    device: str
    reason: str
    nodes: Mapping[str, int]
    off_device: tuple[str, ...]


def cuda_problem() -> str | None:
    """Why CUDA cannot be used here, or None if nothing stands against it."""
    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        return (
            f"onnxruntime {onnxruntime.__version__} was built without CUDA; "
            "install onnxruntime-gpu in its place"
        )
    if sys.platform != "linux":
        return None  # other names there; placement is proven after loading all the same
    if not _loads(CUDA_DRIVER):
        return f"{CUDA_DRIVER} not found; install the NVIDIA driver (in a container: run with GPUs)"
    if missing := missing_libraries(CUDA_LIBRARIES):
        return f"{missing[0]} not found; pip install 'onnxruntime-gpu[cuda,cudnn]'"
    return None


def gpu_sign(environment: Mapping[str, str], root: str = "/") -> str:
    """What shows that a GPU is meant to be here, or empty.

    A file of the NVIDIA driver, the driver's library, or a container that was asked for
    GPUs. Whether they work is another question.
    """
    for file in ("proc/driver/nvidia", "dev/nvidia0"):
        if os.path.exists(os.path.join(root, file)):  # noqa: PTH110, PTH118  # never raises
            return f"/{file}"
    if _loads(CUDA_DRIVER):
        return CUDA_DRIVER
    visible = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    return f"NVIDIA_VISIBLE_DEVICES={visible}" if visible not in ("", "none", "void") else ""


def missing_libraries(names: Iterable[str]) -> list[str]:
    """Those of some CUDA libraries that are neither in a wheel nor known to the loader."""
    # Loads the libraries of the nvidia-* wheels; prints its misses, which we name ourselves.
    with (
        _redirecting,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        onnxruntime.preload_dlls()
    return [name for name in names if not _loads(name)]


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def open_on(
    device: str,
    model: str | bytes,
    options: onnxruntime.SessionOptions,
    cuda_options: Mapping[str, Any],
) -> tuple[onnxruntime.InferenceSession, Placement]:
    """Open a model on the device and prove that it runs there.

    Args:
        device: "cpu", "cuda", or "auto", which takes CUDA where it truly works.
        model: the .onnx file, or its content.
        options: session options; recording of node placement is switched on in them.
        cuda_options: options of the CUDA provider.

    Raises:
        DeviceError: "cuda" was asked for and a library is missing or a node stayed on CPU.
        Exception: ONNX Runtime's own, if no device can load the model.
    """
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if device == "cpu":
        return _open_on_cpu(device, "", model, options)
    try:
        return _open_on_cuda(device, model, options, cuda_options)
    except DeviceError as error:
        if device == "cuda":
            raise
        _log_cpu(error)
        return _open_on_cpu(device, str(error), model, options)


def _log_cpu(reason: DeviceError) -> None:
    """A warning where CUDA is expected, by the rule of `causal-encoder doctor`."""
    sign = gpu_sign(os.environ)
    if sign and CUDA_PROVIDER in onnxruntime.get_available_providers():
        _logger.warning("%s shows a GPU, but the session is running on CPU: %s", sign, reason)
    else:
        _logger.info("running on CPU: %s", reason)


def _open_on_cpu(
    requested: str, reason: str, model: str | bytes, options: onnxruntime.SessionOptions
) -> tuple[onnxruntime.InferenceSession, Placement]:
    # A pattern keeps a plan and a block of memory for each shape seen: with it 4096 tokens of a
    # model of width 512 took 389 MB in place of 225, and no shape was over 3 % faster.
    options.enable_mem_pattern = False
    session = onnxruntime.InferenceSession(
        model, options, providers=[CPU_PROVIDER], enable_fallback=0
    )
    return session, _placement(session, requested, "cpu", reason)


def _open_on_cuda(
    requested: str,
    model: str | bytes,
    options: onnxruntime.SessionOptions,
    cuda_options: Mapping[str, Any],
) -> tuple[onnxruntime.InferenceSession, Placement]:
    if problem := cuda_problem():
        raise DeviceError(f"CUDA cannot be used: {problem}")
    try:
        session = onnxruntime.InferenceSession(
            model,
            options,
            providers=[(CUDA_PROVIDER, dict(cuda_options))],
            enable_fallback=0,
        )
    except Exception as error:  # ONNX Runtime has no public base class for its errors
        _check_readable(model, options)
        raise DeviceError(f"CUDA cannot be used: {first_line(error)}") from error
    placement = _placement(session, requested, "cuda", "CUDA works here")
    if placement.off_device:
        raise DeviceError(
            f"{len(placement.off_device)} nodes are not on CUDA but on another provider: "
            f"{', '.join(placement.off_device[:5])}; export the model again, with the default opset"
        )
    return session, placement


def _check_readable(model: str | bytes, options: onnxruntime.SessionOptions) -> None:
    """Raise ONNX Runtime's own error for a model that is at fault itself, not the device."""
    try:
        _open_on_cpu("cpu", "", model, options)
    except Exception as error:
        # NotImplemented: it was read, and the CPU has no kernel for it, as for bf16.
        if type(error).__name__ != "NotImplemented":
            raise


def _placement(
    session: onnxruntime.InferenceSession, requested: str, device: str, reason: str
) -> Placement:
    provider = CUDA_PROVIDER if device == "cuda" else CPU_PROVIDER
    nodes: Counter[str] = Counter()
    off_device = []
    for subgraph in session.get_provider_graph_assignment_info():
        for node in subgraph.get_nodes():
            nodes[subgraph.ep_name] += 1
            if subgraph.ep_name != provider:
                off_device.append(f"{node.op_type} {node.name}")
    return Placement(
        requested=requested,
        device=device,
        reason=reason if requested == "auto" else "",
        nodes=dict(nodes),
        off_device=tuple(off_device),
    )


def first_line(error: Exception) -> str:
    """ONNX Runtime's reason without the source position and the lines after it."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return re.sub(r"/\S+\.(cc|cu|h):\d+ ", "", line)
