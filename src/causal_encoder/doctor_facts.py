"""The facts of an installation, gathered for causal_encoder.doctor to judge.

A child process imports ONNX Runtime, loads its providers and opens the bundle, so that a
library that crashes, or writes to the terminal by itself, does no harm here. torch is never
imported: its version file says what it was built for.
"""

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from causal_encoder.errors import CausalEncoderError

CUDA_MAJOR = 13  # of the libraries that serve/placement.py names
CUDNN_LIBRARY, CUDNN_REQUIREMENT = "libcudnn.so.9", "nvidia-cudnn-cu13~=9.0"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "ORT_INTRA_OP_NUM_THREADS")
# An ONNX graph of one node, y = Abs(x) on one float.
_GRAPH = (
    b'\n\x0b\n\x01x\x12\x01y"\x03Abs\x12\x01g'
    b"Z\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01"
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01"
)
_OLD_IR, _OLD_OPSET = 8, 13  # any runtime with the interface used here reads these
_ORT_LOG_FATAL = 4  # the exceptions carry the same text


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleFacts:
    """What is known of a bundle: why it cannot be opened, or what it needs.

    Attributes:
        path: as it was given.
        problem: the reason of the refusal; empty if it opens.
        format, precision, opset, ir_version: as in the manifest.
    """

    path: str
    problem: str = ""
    format: str = ""
    precision: str = ""
    opset: int | None = None
    ir_version: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeFacts:
    """What ONNX Runtime can do here.

    Attributes:
        version: of onnxruntime.
        cuda: the CUDA version it was built for, as "13.0"; empty without CUDA.
        providers: short names of the execution providers compiled in.
        cpu_problem, cuda_problem: why a node did not run there; empty if one did.
        gpu_sign: what shows that a GPU is meant to be here; empty without such a sign.
        missing: CUDA libraries that cannot be loaded, with the pip requirement that brings
            each; empty for the driver, which none brings.
        driver_cuda: the newest CUDA version the driver takes; empty without a driver.
        highest_ir, highest_opset: versions of the newest ONNX file it reads.
        cpus: CPUs that this process may use.
        bundle: facts of the bundle, if one was named.
    """

    version: str
    cuda: str
    providers: tuple[str, ...]
    cpu_problem: str
    cuda_problem: str
    gpu_sign: str
    missing: Mapping[str, str]
    driver_cuda: str
    highest_ir: int
    highest_opset: int
    cpus: int
    bundle: BundleFacts | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that is judged.

    Attributes:
        python: version of the interpreter.
        packages: versions of those packages that matter and are installed.
        runtime_packages: the packages that bring the module onnxruntime.
        runtime: what ONNX Runtime can do here; None if it cannot be loaded.
        runtime_problem: why it cannot.
        torch_cuda: the CUDA version torch was built for; empty for a CPU build.
        host_cpus: CPUs of the machine.
        thread_variables: those of THREAD_VARIABLES that are set.
    """

    python: str
    packages: Mapping[str, str]
    runtime_packages: tuple[str, ...]
    runtime: RuntimeFacts | None
    runtime_problem: str
    torch_cuda: str
    host_cpus: int
    thread_variables: Mapping[str, str]


def gather(bundle: Path | None = None) -> Facts:
    """Look at this installation and machine, and at a bundle if one is named."""
    owners = importlib.metadata.packages_distributions().get("onnxruntime", [])
    runtime_packages = tuple(sorted({name.lower().replace("_", "-") for name in owners}))
    runtime, problem = _examine_in_child(bundle)
    return Facts(
        python=platform.python_version(),
        packages=_versions(("numpy", *runtime_packages, "torch", "onnx")),
        runtime_packages=runtime_packages,
        runtime=runtime,
        runtime_problem=problem,
        torch_cuda=_torch_cuda(),
        host_cpus=os.cpu_count() or 1,
        thread_variables={
            name: os.environ[name] for name in THREAD_VARIABLES if os.environ.get(name)
        },
    )


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _torch_cuda() -> str:
    spec = importlib.util.find_spec("torch")  # finds the folder, imports nothing
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    match = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, flags=re.MULTILINE)
    return match[1] if match else ""


def _examine_in_child(bundle: Path | None) -> tuple[RuntimeFacts | None, str]:
    """What the child found, or how it ended."""
    program = "from causal_encoder import doctor_facts; doctor_facts.main()"
    child = subprocess.run(  # noqa: S603  # this interpreter, and the line above
        [sys.executable, "-P", "-c", program, *([str(bundle)] if bundle else [])],
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        check=False,
    )
    if child.returncode < 0:
        return None, f"importing or loading it ended with {signal.Signals(-child.returncode).name}"
    if child.returncode > 0:
        return None, (child.stderr.strip().splitlines() or ["its process failed"])[-1]
    try:  # the libraries may have written to standard output too, but before
        fields = json.loads(child.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return None, "its process ended without an answer"
    bundle_fields = fields.pop("bundle")
    return RuntimeFacts(
        **fields | {"providers": tuple(fields["providers"])},
        bundle=BundleFacts(**bundle_fields) if bundle_fields else None,
    ), ""


def main() -> None:
    """What the child runs: examine, and print the facts as one line of JSON."""
    facts = _examine(sys.argv[1] if len(sys.argv) > 1 else None)
    print(json.dumps(dataclasses.asdict(facts)))


def _examine(bundle: str | None) -> RuntimeFacts:
    import onnxruntime

    from causal_encoder.serve import placement
    from causal_encoder.serve.cpu import available_cpus

    providers = onnxruntime.get_available_providers()
    has_cuda = placement.CUDA_PROVIDER in providers
    return RuntimeFacts(
        version=onnxruntime.__version__,
        cuda=str(getattr(onnxruntime, "cuda_version", "") or "") if has_cuda else "",
        providers=tuple(name.removesuffix("ExecutionProvider") for name in providers),
        cpu_problem=_problem_on("cpu", probe_model(_OLD_IR, _OLD_OPSET)),
        cuda_problem=_problem_on("cuda", probe_model(_OLD_IR, _OLD_OPSET)),
        gpu_sign=placement.gpu_sign(os.environ),
        missing=_missing_libraries() if has_cuda and sys.platform == "linux" else {},
        driver_cuda=_driver_cuda(),
        highest_ir=_highest(_OLD_IR, lambda version: probe_model(version, _OLD_OPSET)),
        highest_opset=_highest(_OLD_OPSET, lambda version: probe_model(_OLD_IR, version)),
        cpus=available_cpus(),
        bundle=None if bundle is None else _examine_bundle(bundle, onnxruntime.__version__),
    )


def probe_model(ir_version: int, opset: int) -> bytes:
    """An ONNX file of one node; both versions are below 128, one byte each."""
    return b"".join(
        (
            b"\x08" + bytes([ir_version]),
            b"\x3a" + bytes([len(_GRAPH)]) + _GRAPH,
            b"\x42\x02\x10" + bytes([opset]),
        )
    )


def _problem_on(device: str, model: bytes) -> str:
    """Why the one node does not run on a device; empty if it does."""
    import numpy as np
    import onnxruntime

    from causal_encoder.serve import placement

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = _ORT_LOG_FATAL
    try:
        session, _ = placement.open_on(device, model, options, placement.CUDA_OPTIONS)
        session.run(None, {"x": np.ones(1, np.float32)})
    except Exception as error:  # noqa: BLE001  # ONNX Runtime has no public base class
        return placement.first_line(error).removeprefix("CUDA cannot be used: ")
    return ""


def _highest(known: int, model: Callable[[int], bytes]) -> int:
    """The last version that is read, going up from one that is known to be."""
    while not _problem_on("cpu", model(known + 1)):
        known += 1
    return known


def _missing_libraries() -> dict[str, str]:
    from causal_encoder.serve import placement

    wanted = {
        placement.CUDA_DRIVER: "",
        **placement.CUDA_LIBRARIES,
        CUDNN_LIBRARY: CUDNN_REQUIREMENT,
    }
    return {name: wanted[name] for name in placement.missing_libraries(wanted)}


def _driver_cuda() -> str:
    from causal_encoder.serve import placement

    version = ctypes.c_int(0)
    try:
        status = ctypes.CDLL(placement.CUDA_DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # not there, or something else under its name
        return ""
    return "" if status else f"{version.value // 1000}.{version.value % 1000 // 10}"


def _examine_bundle(path: str, runtime_version: str) -> BundleFacts:
    from causal_encoder.serve.bundle import check_runtime, open_bundle

    try:
        with open_bundle(path) as opened:
            check_runtime(opened, runtime_version)
    except (CausalEncoderError, OSError) as error:
        return BundleFacts(path=path, problem=str(error))
    manifest = opened.manifest
    return BundleFacts(
        path=path,
        format=manifest.format,
        precision=manifest.precision,
        opset=manifest.opset,
        ir_version=manifest.ir_version,
    )
