"""Every situation that doctor judges, and what it prints."""

import dataclasses
import json
from typing import Any

import pytest
from click.testing import CliRunner

from causal_encoder import doctor_facts
from causal_encoder.cli import main
from causal_encoder.doctor import Finding, diagnose, healthy, to_dict
from causal_encoder.doctor_facts import BundleFacts, Facts, RuntimeFacts

LIBRARIES = {
    "libcuda.so.1": "",
    "libcudart.so.13": "nvidia-cuda-runtime~=13.0",
    "libcublas.so.13": "nvidia-cublas~=13.0",
    "libcudnn.so.9": "nvidia-cudnn-cu13~=9.0",
}
RUNTIME = RuntimeFacts(
    version="1.31.1",
    cuda="13.0",
    providers=("CUDA", "CPU"),
    cpu_problem="",
    cuda_problem="",
    gpu_sign="/dev/nvidia0",
    missing={},
    driver_cuda="13.1",
    highest_ir=13,
    highest_opset=26,
    cpus=8,
    bundle=None,
)
GPU_SERVER = Facts(
    python="3.12.1",
    packages={"numpy": "2.4.6", "onnxruntime-gpu": "1.31.1", "torch": "2.13.0", "onnx": "1.23.2"},
    runtime_packages=("onnxruntime-gpu",),
    runtime=RUNTIME,
    runtime_problem="",
    torch_cuda="13.0",
    host_cpus=8,
    thread_variables={},
)
BUNDLE = BundleFacts(path="b", format="onnx", precision="fp32", opset=23, ir_version=10)


def changed(facts: Facts = GPU_SERVER, **changes: Any) -> Facts:
    """Facts with other values, those of the runtime among them."""
    names = {field.name for field in dataclasses.fields(RuntimeFacts)}
    inner = {name: value for name, value in changes.items() if name in names}
    outer = {name: value for name, value in changes.items() if name not in names}
    if inner:
        assert facts.runtime is not None
        outer["runtime"] = dataclasses.replace(facts.runtime, **inner)
    return dataclasses.replace(facts, **outer)


LAPTOP = changed(
    gpu_sign="", missing=LIBRARIES, driver_cuda="", cuda_problem="libcuda.so.1 not found"
)
SITUATIONS = {
    "gpu server": GPU_SERVER,
    "laptop": LAPTOP,
    "libraries missing": changed(missing=LIBRARIES, cuda_problem="libcudart.so.13 not found"),
    "gpu asleep": changed(cuda_problem="no CUDA-capable device is detected"),
    "two packages": changed(runtime_packages=("onnxruntime", "onnxruntime-gpu")),
    "no runtime": changed(runtime=None, runtime_problem="ModuleNotFoundError: onnxruntime"),
    "cpu broken": changed(cpu_problem="illegal instruction"),
    "plain runtime": changed(providers=("CPU",), cuda="", runtime_packages=("onnxruntime",)),
    "cuda 12 runtime": changed(cuda="12.8", missing=LIBRARIES),
    "old driver": changed(driver_cuda="12.4", cuda_problem="driver version is insufficient"),
    "torch for cuda 12": changed(torch_cuda="12.8"),
    "torch for cpu": changed(torch_cuda=""),
    "serving only": changed(packages={"numpy": "2.4.6", "onnxruntime-gpu": "1.31.1"}),
    "container": changed(cpus=2, host_cpus=64),
    "threads": changed(thread_variables={"OMP_NUM_THREADS": "64"}),
    "damaged bundle": changed(bundle=BundleFacts(path="b", problem="b/x is missing; copy it")),
    "bf16 on a laptop": changed(LAPTOP, bundle=dataclasses.replace(BUNDLE, precision="bf16")),
    "bundle": changed(bundle=BUNDLE),
}


def found(facts: Facts, level: str) -> list[Finding]:
    return [finding for finding in diagnose(facts) if finding.level == level]


@pytest.mark.parametrize("facts", SITUATIONS.values(), ids=SITUATIONS)
def test_every_finding_is_one_line_that_says_what_and_why_and_the_fix(facts: Facts) -> None:
    for finding in diagnose(facts):
        assert finding.level in ("ok", "note", "warning", "error")
        assert finding.what
        assert finding.why
        assert "\n" not in finding.what + finding.why + finding.fix
        assert finding.fix or finding.level in ("ok", "note")
        assert not (finding.fix and finding.level == "ok")


@pytest.mark.parametrize("name", ["gpu server", "bundle"])
def test_a_gpu_server_in_order_has_nothing_to_repair(name: str) -> None:
    assert {finding.level for finding in diagnose(SITUATIONS[name])} == {"ok"}


@pytest.mark.parametrize(
    "name", ["laptop", "serving only", "container", "torch for cpu", "threads", "plain runtime"]
)
def test_what_works_is_no_error(name: str) -> None:
    assert healthy(diagnose(SITUATIONS[name]))


@pytest.mark.parametrize(
    "name",
    ["libraries missing", "gpu asleep", "two packages", "no runtime", "cpu broken",
     "cuda 12 runtime", "old driver", "damaged bundle", "bf16 on a laptop"],
)  # fmt: skip
def test_what_does_not_work_is_an_error(name: str) -> None:
    assert not healthy(diagnose(SITUATIONS[name]))


def test_the_gpu_runtime_on_a_laptop_is_a_note_that_names_what_a_gpu_would_need() -> None:
    gpu, libraries = found(LAPTOP, "note")
    assert "nothing shows an NVIDIA GPU" in gpu.what
    assert libraries.what == "not found: libcudart.so.13, libcublas.so.13, libcudnn.so.9"
    assert libraries.fix == (
        "there: pip install 'nvidia-cuda-runtime~=13.0' 'nvidia-cublas~=13.0' "
        "'nvidia-cudnn-cu13~=9.0'"
    )


def test_where_a_gpu_is_each_missing_library_is_an_error_with_its_package() -> None:
    fixes = {
        finding.what: finding.fix for finding in found(SITUATIONS["libraries missing"], "error")
    }
    assert fixes["libcublas.so.13 not found"] == "pip install 'nvidia-cublas~=13.0'"
    assert fixes["libcudart.so.13 not found"] == "pip install 'nvidia-cuda-runtime~=13.0'"
    assert "NVIDIA driver" in fixes["libcuda.so.1 not found"]


def test_a_missing_cudnn_is_a_note_because_bundles_do_without_it() -> None:
    (note,) = found(SITUATIONS["libraries missing"], "note")
    assert (note.what, note.fix) == (
        "libcudnn.so.9 not found",
        "pip install 'nvidia-cudnn-cu13~=9.0'",
    )
    assert "bundles do without it" in note.why


def test_a_gpu_that_does_not_answer_is_named_with_the_reason() -> None:
    (error,) = found(SITUATIONS["gpu asleep"], "error")
    assert error.what == (
        "/dev/nvidia0 shows a GPU, but CUDA did not run a node: no CUDA-capable device is detected"
    )
    assert "nvidia-smi" in error.fix


def test_two_packages_in_one_folder_are_repaired_by_commands_that_keep_the_gpu_one() -> None:
    (error,) = found(SITUATIONS["two packages"], "error")
    assert error.what == "onnxruntime and onnxruntime-gpu are installed together"
    assert error.fix == (
        "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu==1.31.1"
    )


def test_a_runtime_that_does_not_load_is_reinstalled_and_nothing_else_is_guessed() -> None:
    findings = diagnose(SITUATIONS["no runtime"])
    assert findings[-1].what == ("ONNX Runtime cannot be used: ModuleNotFoundError: onnxruntime")
    assert findings[-1].fix == "pip install --force-reinstall onnxruntime-gpu==1.31.1"


def test_a_runtime_without_cuda_beside_a_gpu_is_a_warning() -> None:
    (warning,) = found(SITUATIONS["plain runtime"], "warning")
    assert warning.what.startswith("/dev/nvidia0 shows a GPU")
    assert warning.fix == (
        "pip uninstall -y onnxruntime && pip install 'onnxruntime-gpu[cuda,cudnn]'"
    )


def test_a_runtime_for_another_cuda_is_not_given_libraries_of_this_one() -> None:
    (error,) = found(SITUATIONS["cuda 12 runtime"], "error")
    assert error.what == "ONNX Runtime is built for CUDA 12.8"
    assert "nvidia-" not in error.fix


@pytest.mark.parametrize(("driver", "fits"), [("12.9", False), ("13.0", True), ("14.2", True)])
def test_a_driver_runs_its_own_major_version_and_older_ones(driver: str, fits: bool) -> None:
    level = "ok" if fits else "error"
    findings = found(changed(driver_cuda=driver), level)
    assert f"driver for CUDA {driver}, ONNX Runtime for CUDA 13.0" in {f.what for f in findings}


def test_torch_for_another_cuda_is_a_warning_and_a_cpu_build_a_note() -> None:
    (warning,) = found(SITUATIONS["torch for cuda 12"], "warning")
    assert warning.what == "torch is built for CUDA 12.8, ONNX Runtime for CUDA 13.0"
    (note,) = found(SITUATIONS["torch for cpu"], "note")
    assert note.what == "torch 2.13.0 is built without CUDA"


def test_a_serving_install_is_told_what_exporting_needs() -> None:
    (note,) = found(SITUATIONS["serving only"], "note")
    assert note.what == "torch and onnx not installed"
    assert note.fix == "pip install 'causal-encoder[export]'"


def test_a_container_limit_is_compared_with_the_machine() -> None:
    (note,) = found(SITUATIONS["container"], "note")
    assert note.what == "2 of the 64 CPUs may be used (container limit or affinity)"
    assert "intra_op_num_threads = 2" in note.fix


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "ORT_INTRA_OP_NUM_THREADS"])
@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("9", "warning"),
        ("many", "warning"),
        ("-1", "warning"),
        ("9" * 5000, "warning"),
        ("7", "note"),
    ],
    ids=lambda value: value[:9],
)
def test_a_number_of_threads_that_is_not_the_number_of_cpus_is_named(
    name: str, value: str, level: str
) -> None:
    (finding,) = found(changed(thread_variables={name: value}), level)
    assert finding.what == f"{name} is {value!r}, and 8 CPUs may be used"
    assert finding.fix == "unset it, or set it to 8"


def test_a_number_of_threads_that_fits_is_no_finding() -> None:
    facts = changed(thread_variables={"OMP_NUM_THREADS": "8"})
    assert diagnose(facts) == diagnose(GPU_SERVER)


def test_a_bundle_that_does_not_open_is_an_error_with_the_remedy_of_the_refusal() -> None:
    (error,) = found(SITUATIONS["damaged bundle"], "error")
    assert (error.what, error.fix) == ("b/x is missing", "copy it")


@pytest.mark.parametrize(
    ("bundle", "version"),
    [
        (dataclasses.replace(BUNDLE, opset=27), "opset 27"),
        (dataclasses.replace(BUNDLE, ir_version=14), "IR 14"),
    ],
)
def test_a_bundle_newer_than_the_runtime_is_an_error(bundle: BundleFacts, version: str) -> None:
    (error,) = found(changed(bundle=bundle), "error")
    assert version in error.what
    assert "ONNX Runtime 1.31.1 reads opset 26 and IR 13" in error.what


def test_a_bundle_of_the_newest_versions_the_runtime_reads_is_in_order() -> None:
    newest = dataclasses.replace(BUNDLE, opset=26, ir_version=13)
    assert healthy(diagnose(changed(bundle=newest)))


def test_a_bf16_bundle_needs_cuda_that_works() -> None:
    bundle = dataclasses.replace(BUNDLE, precision="bf16")
    (error,) = found(SITUATIONS["bf16 on a laptop"], "error")
    assert error.what.startswith("b is bf16, and CUDA did not run a node")
    assert healthy(diagnose(changed(bundle=bundle)))
    assert healthy(diagnose(changed(LAPTOP, bundle=dataclasses.replace(bundle, precision="fp16"))))


def test_a_bundle_of_another_format_is_a_note() -> None:
    bundle = BundleFacts(path="b", format="torchscript", precision="fp32")
    (note,) = found(changed(bundle=bundle), "note")
    assert note.what == "b is whole, but holds a torchscript model"


def test_the_json_form_is_stable() -> None:
    assert to_dict([Finding("error", "a", "b", "c"), Finding("ok", "d", "e")]) == {
        "ok": False,
        "findings": [
            {"level": "error", "what": "a", "why": "b", "fix": "c"},
            {"level": "ok", "what": "d", "why": "e", "fix": ""},
        ],
    }


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_command_prints_a_line_a_finding_and_exits_1_if_something_is_broken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_facts, "gather", lambda _: SITUATIONS[name])
    findings = diagnose(SITUATIONS[name])
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == (0 if healthy(findings) else 1)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) == len(findings)
    for line, finding in zip(lines, findings, strict=True):
        fix = f"; fix: {finding.fix}" if finding.fix else ""
        assert line == f"{finding.level:<9}{finding.what} ({finding.why}){fix}"
    as_json = CliRunner().invoke(main, ["doctor", "--json"])
    assert json.loads(as_json.stdout) == to_dict(findings)
    assert as_json.exit_code == result.exit_code
