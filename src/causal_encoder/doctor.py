"""What stands between this installation and a bundle that runs, each with its fix.

Facts come from causal_encoder.doctor_facts; `diagnose` judges them and touches nothing.

CUDA is expected where ONNX Runtime is compiled with it and there is a sign of a GPU: files
of the NVIDIA driver, its library, or NVIDIA_VISIBLE_DEVICES naming one. Only there is CUDA
that does not work an error: onnxruntime-gpu on a machine without a GPU is in order.
"""

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from causal_encoder import __version__
from causal_encoder.doctor_facts import (
    CUDA_MAJOR,
    CUDNN_LIBRARY,
    BundleFacts,
    Facts,
    RuntimeFacts,
)

_GPU_PACKAGE = "onnxruntime-gpu"
_WHO_OBEYS = {
    "OMP_NUM_THREADS": "PyTorch obeys it, ONNX Runtime does not",
    "ORT_INTRA_OP_NUM_THREADS": "ONNX Runtime obeys it, but not in an EncoderSession",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        level: "ok", "note" (nothing is broken), "warning" (it works, not as it should) or
            "error" (it does not work).
        what: what was found.
        why: why that matters.
        fix: what to do about it; empty if there is nothing to do.
    """

    level: str
    what: str
    why: str
    fix: str = ""


def diagnose(facts: Facts) -> list[Finding]:
    """Judge an installation, and the bundle if there is one."""
    findings = [*_packages(facts)]
    if facts.runtime is not None:
        findings += _cpu_provider(facts, facts.runtime)
        findings += _cuda(facts, facts.runtime)
        findings += _cpus(facts, facts.runtime.cpus)
        if facts.runtime.bundle is not None:
            findings += _bundle(facts.runtime, facts.runtime.bundle)
    return findings


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing is broken."""
    return all(finding.level != "error" for finding in findings)


def to_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """Plain JSON values; the README documents them."""
    return {
        "ok": healthy(findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def _packages(facts: Facts) -> Iterator[Finding]:
    versions = {"python": facts.python, "causal-encoder": __version__, **facts.packages}
    yield Finding(
        "ok",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        "these versions decide what runs and which numbers come out",
    )
    if absent := [name for name in ("torch", "onnx") if name not in facts.packages]:
        yield Finding(
            "note",
            f"{' and '.join(absent)} not installed",
            "bundles run without; new, export and verify need them",
            "pip install 'causal-encoder[export]'",
        )
    owners = facts.runtime_packages
    if len(owners) > 1:
        yield Finding(
            "error",
            f"{' and '.join(owners)} are installed together",
            "they share one folder, and what loads is a mixture of them",
            f"pip uninstall -y {' '.join(owners)} && pip install {_runtime_requirement(facts)}",
        )
    if facts.runtime is None:
        yield Finding(
            "error",
            f"ONNX Runtime cannot be used: {facts.runtime_problem}",
            "no bundle runs without it",
            f"pip install --force-reinstall {_runtime_requirement(facts)}",
        )


def _runtime_requirement(facts: Facts) -> str:
    """The package of ONNX Runtime to keep, in the version that is installed."""
    fitting = "onnxruntime" if sys.platform == "darwin" else _GPU_PACKAGE
    owners = facts.runtime_packages or (fitting,)
    package = fitting if fitting in owners else owners[0]
    return f"{package}=={facts.packages[package]}" if package in facts.packages else package


def _cpu_provider(facts: Facts, runtime: RuntimeFacts) -> Iterator[Finding]:
    compiled = f"ONNX Runtime {runtime.version} is compiled with {', '.join(runtime.providers)}"
    if runtime.cpu_problem:
        yield Finding(
            "error",
            f"{compiled}, but did not run a node on CPU: {runtime.cpu_problem}",
            "no bundle runs here",
            f"pip install --force-reinstall {_runtime_requirement(facts)}",
        )
    else:
        yield Finding("ok", f"{compiled}, and ran a node on CPU", "sessions can run on CPU")


def _cuda(facts: Facts, runtime: RuntimeFacts) -> Iterator[Finding]:
    if "CUDA" not in runtime.providers:
        if runtime.gpu_sign:
            yield Finding(
                "warning",
                f"{runtime.gpu_sign} shows a GPU, but ONNX Runtime is compiled without CUDA",
                "every session runs on CPU",
                f"pip uninstall -y {' '.join(facts.runtime_packages)} "
                f"&& pip install '{_GPU_PACKAGE}[cuda,cudnn]'",
            )
        return
    if not runtime.gpu_sign:
        yield Finding(
            "note",
            "ONNX Runtime is compiled with CUDA, but nothing shows an NVIDIA GPU",
            "sessions run on CPU, as they should without a GPU",
        )
        yield from _libraries_for_later(runtime.missing)
        return
    if runtime.cuda and _major(runtime.cuda) != CUDA_MAJOR:
        yield Finding(
            "error",
            f"ONNX Runtime is built for CUDA {runtime.cuda}",
            f"this version of causal-encoder loads the libraries of CUDA {CUDA_MAJOR}",
            f"pip install --upgrade '{_GPU_PACKAGE}>=1.28'",
        )
        return
    if runtime.cuda_problem:
        yield Finding(
            "error",
            f"{runtime.gpu_sign} shows a GPU, but CUDA did not run a node: {runtime.cuda_problem}",
            "device='cuda' is refused, and 'auto' runs on CPU",
            "mend what the lines below name; else see that nvidia-smi lists the GPU, that the "
            "container was started with GPUs, and that CUDA_VISIBLE_DEVICES does not hide it",
        )
    else:
        yield Finding("ok", "CUDA ran a node", "sessions run on the GPU")
    for library, requirement in runtime.missing.items():
        yield _missing_library(library, requirement)
    yield from _cuda_versions(facts, runtime)


def _libraries_for_later(missing: Mapping[str, str]) -> Iterator[Finding]:
    packaged = {library: requirement for library, requirement in missing.items() if requirement}
    if packaged:
        requirements = " ".join(
            f"'{requirement}'" for requirement in dict.fromkeys(packaged.values())
        )
        yield Finding(
            "note",
            f"not found: {', '.join(packaged)}",
            "CUDA needs them where there is a GPU",
            f"there: pip install {requirements}",
        )


def _missing_library(library: str, requirement: str) -> Finding:
    if library == CUDNN_LIBRARY:
        return Finding(
            "note",
            f"{library} not found",
            "bundles do without it, other models may not",
            f"pip install '{requirement}'",
        )
    return Finding(
        "error",
        f"{library} not found",
        "ONNX Runtime's CUDA provider does not load without it",
        f"pip install '{requirement}'"
        if requirement
        else "install the NVIDIA driver, R580 or later; start a container with GPUs",
    )


def _cuda_versions(facts: Facts, runtime: RuntimeFacts) -> Iterator[Finding]:
    if not runtime.cuda:
        return
    if runtime.driver_cuda:
        pair = f"driver for CUDA {runtime.driver_cuda}, ONNX Runtime for CUDA {runtime.cuda}"
        if _major(runtime.driver_cuda) < _major(runtime.cuda):
            yield Finding(
                "error",
                pair,
                "a driver runs nothing that was built for a later major version",
                f"install a driver for CUDA {_major(runtime.cuda)} (CUDA 13: R580 or later)",
            )
        else:
            yield Finding(
                "ok", pair, "a driver runs what was built for its major version or before"
            )
    if "torch" not in facts.packages:
        return
    if not facts.torch_cuda:
        yield Finding(
            "note",
            f"torch {facts.packages['torch']} is built without CUDA",
            "sessions do without, but PyTorch is measured and compared on CPU",
            f"to compare on the GPU, install the build of torch for CUDA {_major(runtime.cuda)}",
        )
    elif _major(facts.torch_cuda) != _major(runtime.cuda):
        yield Finding(
            "warning",
            f"torch is built for CUDA {facts.torch_cuda}, ONNX Runtime for CUDA {runtime.cuda}",
            "in one process both get the cuDNN of the one that is loaded first",
            f"install the build of torch for CUDA {_major(runtime.cuda)} (CUDA 13: torch 2.11 or "
            "later)",
        )
    else:
        yield Finding(
            "ok",
            f"torch is built for CUDA {facts.torch_cuda}, ONNX Runtime for CUDA {runtime.cuda}",
            "they can share a process",
        )


def _major(version: str) -> int:
    return int(version.split(".")[0] or 0)


def _cpus(facts: Facts, cpus: int) -> Iterator[Finding]:
    if cpus < facts.host_cpus:
        yield Finding(
            "note",
            f"{cpus} of the {facts.host_cpus} CPUs may be used (container limit or affinity)",
            "more threads than that wait for each other",
            f"none for EncoderSession; other sessions need intra_op_num_threads = {cpus}",
        )
    else:
        yield Finding("ok", f"{cpus} CPUs, all of the machine", "sessions take one thread for each")
    for name, value in facts.thread_variables.items():
        threads = _number(value.strip())
        if threads == cpus:
            continue
        harmful = threads is None or threads > cpus
        yield Finding(
            "warning" if harmful else "note",
            f"{name} is {value!r}, and {cpus} CPUs may be used",
            _WHO_OBEYS[name],
            f"unset it, or set it to {cpus}",
        )


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def _bundle(runtime: RuntimeFacts, bundle: BundleFacts) -> Iterator[Finding]:
    if bundle.problem:
        what, _, fix = bundle.problem.partition("; ")
        yield Finding("error", what, "no session opens this bundle", fix or "export it again")
        return
    if bundle.format != "onnx":
        yield Finding(
            "note",
            f"{bundle.path} is whole, but holds a {bundle.format} model",
            "a session runs onnx alone",
            "load it with PyTorch, or causal-encoder export onnx",
        )
        return
    versions = (
        f"{bundle.path} has opset {bundle.opset} and IR {bundle.ir_version}; ONNX Runtime "
        f"{runtime.version} reads opset {runtime.highest_opset} and IR {runtime.highest_ir}"
    )
    too_new = (bundle.opset or 0) > runtime.highest_opset
    if too_new or (bundle.ir_version or 0) > runtime.highest_ir:
        yield Finding(
            "error",
            versions,
            "a runtime refuses files newer than itself",
            f"pip install --upgrade {_GPU_PACKAGE}, or export with an --opset it reads",
        )
    elif bundle.precision == "bf16" and runtime.cuda_problem:
        yield Finding(
            "error",
            f"{bundle.path} is bf16, and CUDA did not run a node: {runtime.cuda_problem}",
            "ONNX Runtime has no bf16 kernels for CPU",
            "mend CUDA, or causal-encoder export onnx --precision fp32 or fp16",
        )
    else:
        yield Finding("ok", f"{versions}; {bundle.precision}, whole", "a session can run it")
