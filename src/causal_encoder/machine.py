"""What this machine is: hardware and versions, for numbers that mean nothing without them."""

import contextlib
import dataclasses
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnxruntime

from causal_encoder import __version__
from causal_encoder.serve.cpu import available_cpus

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What the numbers were measured on.

    Attributes:
        cpu: model of the processor.
        cpus: number of CPUs this process may use, and threads of each contestant.
        gpu: model of the GPU; empty if it was not used or is not known.
        governor: how the first CPU chooses its frequency, for example "performance"; empty
            if the system does not tell.
        versions: of Python and of the packages that were measured.
    """

    cpu: str
    cpus: int
    gpu: str
    governor: str
    versions: Mapping[str, str]


def this_machine(device: str, packages: Iterable[str] = ("torch",)) -> Machine:
    """Describe the machine for something that runs on a device.

    Args:
        device: "cpu" or "cuda".
        packages: further packages whose versions count, if they are installed.
    """
    versions = {
        "causal-encoder": __version__,
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
    }
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return Machine(
        cpu=_value_in(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        cpus=available_cpus(),
        gpu=_value_in(gpus[0], "Model") if device == "cuda" and gpus else "",
        governor=_text_of(_GOVERNOR),
        versions=versions,
    )


def _text_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _value_in(path: Path, name: str) -> str:
    """The value of the first line `name: value`; empty if there is none."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
