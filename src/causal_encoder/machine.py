"""What this machine is: hardware and versions, for numbers that mean nothing without them."""

import contextlib
import dataclasses
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnxruntime

from causal_encoder import __version__
from causal_encoder.serve.cpu import available_cpus


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What the numbers were measured on.

    Attributes:
        cpu: model of the processor.
        cpus: number of CPUs this process may use, and threads of each contestant.
        gpu: model of the GPU; empty if it was not used or is not known.
        versions: of Python and of the packages that were measured.
    """

    cpu: str
    cpus: int
    gpu: str
    versions: Mapping[str, str]


def this_machine(device: str) -> Machine:
    """Describe the machine for something that runs on `device`, "cpu" or "cuda"."""
    versions = {
        "causal-encoder": __version__,
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
    }
    with contextlib.suppress(PackageNotFoundError):
        versions["torch"] = version("torch")
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return Machine(
        cpu=_value_in(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        cpus=available_cpus(),
        gpu=_value_in(gpus[0], "Model") if device == "cuda" and gpus else "",
        versions=versions,
    )


def _value_in(path: Path, name: str) -> str:
    """The value of the first line `name: value`; empty if there is none."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
