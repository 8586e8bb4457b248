"""What doctor finds out about an installation, on this one and on broken ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest

from causal_encoder.doctor_facts import gather, probe_model
from tests.serve.test_runtime_version import write_bundle

TRAP = "raise SystemExit('this must not be imported')"


def package(folder: Path, name: str, program: str) -> Path:
    """A package that runs a program when it is imported."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(program)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """One in which the packages of a folder hide the installed ones."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(folder), *([inherited] if inherited else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def doctor(folder: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of the command, run as a user runs it, with the packages of a folder."""
    program = "from causal_encoder.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json", *arguments],
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert result.stderr == ""
    report: dict[str, Any] = json.loads(result.stdout)
    assert result.returncode == (0 if report["ok"] else 1)
    return report


def errors(report: dict[str, Any]) -> dict[str, str]:
    """What is broken, and the fix of each."""
    return {
        finding["what"]: finding["fix"]
        for finding in report["findings"]
        if finding["level"] == "error"
    }


def test_this_installation_runs_a_node_on_cpu_and_reads_what_we_export() -> None:
    facts = gather()
    runtime = facts.runtime
    assert runtime is not None, facts.runtime_problem
    assert (runtime.version, runtime.cpu_problem) == (onnxruntime.__version__, "")
    assert "CPU" in runtime.providers
    assert 1 <= runtime.cpus <= facts.host_cpus
    assert runtime.highest_ir >= 10
    assert runtime.highest_opset >= 23
    if runtime.version == "1.31.1":
        assert (runtime.highest_ir, runtime.highest_opset) == (13, 26)
    assert set(facts.packages) >= {"numpy", "torch", "onnx", *facts.runtime_packages}


def test_the_probe_is_a_model_that_onnx_finds_valid() -> None:
    proto = onnx.load_from_string(probe_model(9, 21))
    onnx.checker.check_model(proto, full_check=True)
    assert (proto.ir_version, proto.opset_import[0].version) == (9, 21)
    assert [node.op_type for node in proto.graph.node] == ["Abs"]


def test_torch_and_onnx_are_looked_at_but_not_imported(tmp_path: Path) -> None:
    package(tmp_path, "torch", TRAP)
    package(tmp_path, "onnx", TRAP)
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n"
    )
    program = "from causal_encoder.doctor_facts import gather; print(gather().torch_cuda)"
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment(tmp_path), capture_output=True, text=True
    )
    assert (result.stdout, result.stderr) == ("13.0\n", "")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise ImportError('libonnxruntime.so: file too short')", "ImportError: libonnxruntime"),
        ("import os; os.abort()", "SIGABRT"),
        ("", "AttributeError: module 'onnxruntime' has no attribute"),  # a half uninstalled one
    ],
    ids=["does not import", "crashes", "is empty"],
)
def test_a_runtime_that_cannot_be_used_is_one_finding(
    program: str, reason: str, tmp_path: Path
) -> None:
    ((what, fix),) = errors(doctor(package(tmp_path, "onnxruntime", program))).items()
    assert what.startswith("ONNX Runtime cannot be used: ")
    assert reason in what
    assert fix.startswith("pip install --force-reinstall onnxruntime")


def test_a_second_package_of_the_runtime_is_found(tmp_path: Path) -> None:
    information = tmp_path / "onnxruntime_openvino-1.24.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: onnxruntime-openvino\nVersion: 1.24.1\n")
    (information / "top_level.txt").write_text("onnxruntime\n")
    ((what, fix),) = errors(doctor(tmp_path)).items()
    assert "onnxruntime-openvino" in what
    assert what.endswith(" are installed together")
    assert "pip uninstall -y " in fix
    assert "openvino" not in fix.partition(" && ")[2]


def test_a_bundle_is_opened_and_its_hashes_checked(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", "1.28.0")
    assert doctor(tmp_path, str(bundle))["findings"][-1]["level"] == "ok"
    (bundle / "model.onnx").write_bytes(b"not a modem")
    ((what, fix),) = errors(doctor(tmp_path, str(bundle))).items()
    assert what.startswith(f"{bundle / 'model.onnx'} was changed: its SHA-256 ")
    assert fix == "copy or export the bundle again"


def test_a_bundle_for_a_newer_runtime_is_an_error_with_the_upgrade(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", "99.0.0")
    ((what, fix),) = errors(doctor(tmp_path, str(bundle))).items()
    assert f"needs ONNX Runtime 99.0.0 or later, {onnxruntime.__version__} is installed" in what
    assert fix.startswith("pip install --upgrade 'onnxruntime-gpu>=99.0.0'")


ODD_ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "no home": {"HOME": None},
    "no path": {"PATH": ""},
    "libraries looked for anywhere": {"LD_LIBRARY_PATH": "::/dev/null:/missing:\udcff"},
    "threads without end": {"OMP_NUM_THREADS": "9" * 5000},
    "threads in other digits": {"OMP_NUM_THREADS": "²"},
    "a line break": {"NVIDIA_VISIBLE_DEVICES": "a\nb"},
    "another terminal": {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"},
}


def lines_of_doctor(*arguments: str, **changes: str | None) -> list[str]:
    """What the command prints, as a user runs it; it never fails but by a finding."""
    changed = os.environ | {name: value for name, value in changes.items() if value is not None}
    kept = {name: value for name, value in changed.items() if changes.get(name, "") is not None}
    program = "from causal_encoder.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, "doctor", *arguments],
        env=kept,
        capture_output=True,
        encoding="utf-8",
    )
    assert result.stderr == ""
    assert result.returncode in (0, 1)
    return result.stdout.splitlines()


@pytest.mark.parametrize("case", ODD_ENVIRONMENTS)
def test_an_odd_environment_gives_a_line_a_finding(case: str) -> None:
    for line in lines_of_doctor(**ODD_ENVIRONMENTS[case]):
        assert line.split()[0] in ("ok", "note", "warning", "error")


@pytest.mark.skipif(sys.platform != "linux", reason="names of libraries on Linux")
def test_something_else_under_the_name_of_the_driver_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"not a library")
    before = lines_of_doctor()
    assert lines_of_doctor(LD_LIBRARY_PATH=str(tmp_path)) == before


def test_what_is_no_whole_bundle_is_an_error_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    (tmp_path / "loop").symlink_to("loop")
    names = ("file", "checkpoint", "damaged", "loop", "missing", "a\nbreak", "x" * 300, "\udcff")
    for name in names:
        *_, line = lines_of_doctor(str(tmp_path / name))
        assert line.startswith(f"error    {tmp_path}"), name


@pytest.mark.parametrize("program", ["raise SystemExit(0)", "import sys; sys.stdout.close()"])
def test_a_runtime_that_ends_the_process_is_an_error(tmp_path: Path, program: str) -> None:
    package(tmp_path, "onnxruntime", program)
    (what,) = errors(doctor(tmp_path))
    assert what.startswith("ONNX Runtime cannot be used: ")


def test_a_torch_without_its_version_is_no_hindrance(tmp_path: Path) -> None:
    package(tmp_path, "torch", TRAP)
    assert doctor(tmp_path)["ok"]
