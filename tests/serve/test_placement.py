"""Where a session runs, and that nothing but the truth is said about it.

These tests hold on machines with and without a GPU: what CUDA needs is taken away, or a
session is put in place that says where its nodes are.
"""

import contextlib
import ctypes
import dataclasses
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from causal_encoder.errors import BundleError, DeviceError
from causal_encoder.serve import EncoderSession, Placement, placement
from causal_encoder.serve.placement import gpu_sign
from tests.bundles import reseal

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@dataclasses.dataclass
class Node:
    op_type: str
    name: str


@dataclasses.dataclass
class Subgraph:
    """The nodes that a session has put on one provider."""

    ep_name: str
    nodes: list[Node]

    def get_nodes(self) -> list[Node]:
        return self.nodes


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime is built for CUDA, and no library can be loaded."""

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(ctypes, "CDLL", missing)


class OnCuda:
    """A session on CPU that claims to have its nodes elsewhere."""

    def __init__(self, session: Any, subgraphs: Sequence[Subgraph]) -> None:
        self.session = session
        self.subgraphs = subgraphs

    def get_provider_graph_assignment_info(self) -> Sequence[Subgraph]:
        return self.subgraphs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


def refuse_kernels(*_: Any, **__: Any) -> None:
    """Opens a model as ONNX Runtime opens bf16 on CPU."""
    raise type("NotImplemented", (Exception,), {})("Could not find an implementation for Add(14)")


class Runtime:
    """Stands in for onnxruntime.InferenceSession where CUDA seems to work."""

    def __init__(self, *subgraphs: Subgraph) -> None:
        self.subgraphs = subgraphs
        self.opened: list[Any] = []
        self.reason: Exception | None = None
        self.open_on_cpu: Callable[..., Any] = onnxruntime.InferenceSession

    def __call__(self, path: str, options: Any, providers: Sequence[Any], **others: Any) -> Any:
        self.opened.append((providers, others))
        if providers != [CPU] and self.reason is not None:
            raise self.reason
        session = self.open_on_cpu(path, options, providers=[CPU])
        return session if providers == [CPU] else OnCuda(session, self.subgraphs)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    """CUDA seems to work, and a session has its nodes where the test says."""

    def install(*subgraphs: Subgraph) -> Runtime:
        runtime = Runtime(*subgraphs)
        monkeypatch.setattr(placement, "cuda_problem", lambda: None)
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
        monkeypatch.setattr(onnxruntime, "InferenceSession", runtime)
        return runtime

    return install


@pytest.fixture
def gpu_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something shows a GPU."""
    monkeypatch.setattr(placement, "gpu_sign", lambda _: "/dev/nvidia0")


def warnings_in(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]


# CPU.


def test_cpu_has_every_node_on_cpu_and_says_nothing(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = EncoderSession(bundle, "cpu").placement
    assert (found.requested, found.device, found.reason) == ("cpu", "cpu", "")
    assert set(found.nodes) == {CPU}
    assert found.nodes[CPU] > 10
    assert found.off_device == ()
    assert caplog.records == []


@pytest.mark.usefixtures("no_libraries")
def test_cpu_looks_for_no_library(bundle: Path) -> None:
    assert EncoderSession(bundle, "cpu").placement.device == "cpu"


def test_a_placement_cannot_be_changed(session: EncoderSession) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        session.placement.device = "cuda"  # type: ignore[misc]


# CUDA that is not there.


@pytest.mark.usefixtures("no_libraries")
def test_cuda_without_its_libraries_is_refused_and_the_first_missing_one_is_named(
    bundle: Path,
) -> None:
    with pytest.raises(DeviceError) as caught:
        EncoderSession(bundle, "cuda")
    message = str(caught.value)
    assert "\n" not in message
    assert "not found" in message
    if sys.platform == "linux":
        assert "libcuda.so.1" in message
        assert "driver" in message


@pytest.mark.skipif(sys.platform != "linux", reason="names of libraries on Linux")
@pytest.mark.parametrize(
    "library", ["libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10"]
)
def test_cuda_without_one_of_its_libraries_is_refused_with_the_command_that_installs_it(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    def load(name: str) -> None:
        if name == library:
            raise OSError(name)

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None)
    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(DeviceError, match=library) as caught:
        EncoderSession(bundle, "cuda")
    assert "pip install" in str(caught.value)


def test_cuda_with_a_runtime_that_was_built_without_it_is_refused_with_the_remedy(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    with pytest.raises(DeviceError, match="built without CUDA") as caught:
        EncoderSession(bundle, "cuda")
    assert "onnxruntime-gpu" in str(caught.value)


@pytest.mark.usefixtures("no_libraries", "gpu_expected")
def test_auto_takes_cpu_where_cuda_cannot_work_and_says_why_once(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = EncoderSession(bundle).placement
    assert (found.requested, found.device) == ("auto", "cpu")
    assert set(found.nodes) == {CPU}
    assert "not found" in found.reason
    (line,) = warnings_in(caplog)
    assert line == f"/dev/nvidia0 shows a GPU, but the session is running on CPU: {found.reason}"


@pytest.mark.usefixtures("no_libraries")
def test_auto_takes_cpu_without_a_warning_where_no_gpu_is_expected(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "gpu_sign", lambda _: "")
    with caplog.at_level(logging.INFO):
        found = EncoderSession(bundle).placement
    assert found.device == "cpu"
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.INFO,
        f"running on CPU: {found.reason}",
    )


@pytest.mark.usefixtures("gpu_expected")
def test_auto_takes_cpu_without_a_warning_where_the_runtime_knows_no_cuda(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    found = EncoderSession(bundle, "auto").placement
    assert found.device == "cpu"
    assert "built without CUDA" in found.reason
    assert warnings_in(caplog) == []


@pytest.mark.usefixtures("no_libraries")
def test_auto_gives_the_same_numbers_on_cpu(bundle: Path, session: EncoderSession) -> None:
    np.testing.assert_array_equal(EncoderSession(bundle).run([[1, 2]]), session.run([[1, 2]]))


@pytest.mark.usefixtures("no_libraries")
def test_nothing_is_printed(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    EncoderSession(bundle, "cpu").run([[1]])
    EncoderSession(bundle, "auto").run([[1]])
    with pytest.raises(DeviceError):
        EncoderSession(bundle, "cuda")
    assert capfd.readouterr().out == ""


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are looked for on Linux only")
def test_what_onnx_runtime_prints_while_it_looks_is_not_shown(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load(name: str) -> None:
        if name == "libcurand.so.10":
            raise OSError(name)

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print("Failed to load libx"))
    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(DeviceError):
        EncoderSession(bundle, "cuda")
    assert "Failed to load" not in "".join(capfd.readouterr())


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are looked for on Linux only")
def test_opening_in_two_threads_at_once_leaves_standard_output_as_it_was(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_looks, second_looks, first_is_done = (threading.Event() for _ in range(3))

    def look() -> None:
        # The first thread comes out while the second is inside.
        if not first_looks.is_set():
            first_looks.set()
            second_looks.wait(1)
        else:
            second_looks.set()
            first_is_done.wait(1)

    def load(name: str) -> None:
        if name == "libcurand.so.10":
            raise OSError(name)

    def open_first() -> None:
        with contextlib.suppress(DeviceError):
            EncoderSession(bundle, "cuda")
        first_is_done.set()

    def open_second() -> None:
        first_looks.wait(1)
        with contextlib.suppress(DeviceError):
            EncoderSession(bundle, "cuda")

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "preload_dlls", look)
    monkeypatch.setattr(ctypes, "CDLL", load)
    # Put back afterwards, whatever happens here.
    out, err = sys.stdout, sys.stderr
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    threads = [threading.Thread(target=target) for target in (open_first, open_second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.stdout is out
    assert sys.stderr is err


# CUDA that is there, but does not take every node.


def test_cuda_with_every_node_on_cuda_is_what_was_asked_for(
    bundle: Path, pretend: Callable[..., Runtime]
) -> None:
    runtime = pretend(Subgraph(CUDA, [Node("MatMul", "a"), Node("Add", "b")]))
    found = EncoderSession(bundle, "cuda").placement
    assert found == Placement(
        requested="cuda", device="cuda", reason="", nodes={CUDA: 2}, off_device=()
    )
    ((providers, others),) = runtime.opened
    assert [name for name, _ in providers] == [CUDA], "no provider to fall back to"
    assert others == {"enable_fallback": 0}


def test_auto_takes_cuda_where_it_works(bundle: Path, pretend: Callable[..., Runtime]) -> None:
    pretend(Subgraph(CUDA, [Node("MatMul", "a")]))
    found = EncoderSession(bundle, "auto").placement
    assert (found.requested, found.device) == ("auto", "cuda")
    assert found.reason


def test_a_node_left_on_cpu_makes_cuda_refuse_and_is_named(
    bundle: Path, pretend: Callable[..., Runtime]
) -> None:
    pretend(
        Subgraph(CUDA, [Node("MatMul", "node_matmul_1"), Node("Add", "node_add_1")]),
        Subgraph(CPU, [Node("Attention", "node_attention_7")]),
    )
    with pytest.raises(DeviceError, match="Attention node_attention_7") as caught:
        EncoderSession(bundle, "cuda")
    assert "1 node" in str(caught.value)
    assert "node_matmul_1" not in str(caught.value)


def test_of_many_nodes_left_on_cpu_the_first_are_named_and_all_counted(
    bundle: Path, pretend: Callable[..., Runtime]
) -> None:
    pretend(Subgraph(CPU, [Node("Add", f"node_{i}") for i in range(1000)]))
    with pytest.raises(DeviceError, match="1000 nodes") as caught:
        EncoderSession(bundle, "cuda")
    assert "Add node_0" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.usefixtures("gpu_expected")
def test_auto_takes_cpu_whole_where_cuda_leaves_a_node_behind(
    bundle: Path, pretend: Callable[..., Runtime], caplog: pytest.LogCaptureFixture
) -> None:
    pretend(Subgraph(CUDA, [Node("MatMul", "a")]), Subgraph(CPU, [Node("Attention", "b")]))
    session = EncoderSession(bundle, "auto")
    assert session.placement.device == "cpu"
    assert set(session.placement.nodes) == {CPU}
    assert "Attention b" in session.placement.reason
    (line,) = warnings_in(caplog)
    assert "Attention b" in line
    assert session.run([[1, 2]]).shape == (1, 2, 12)


@pytest.mark.usefixtures("gpu_expected")
def test_an_error_while_cuda_starts_is_the_reason_in_one_line(
    bundle: Path, pretend: Callable[..., Runtime], caplog: pytest.LogCaptureFixture
) -> None:
    runtime = pretend()
    runtime.reason = RuntimeError("CUDA failure 35: driver is too old\n at file.cc:12\n")
    with pytest.raises(DeviceError) as caught:
        EncoderSession(bundle, "cuda")
    assert str(caught.value) == "CUDA cannot be used: CUDA failure 35: driver is too old"
    session = EncoderSession(bundle, "auto")
    assert session.placement.device == "cpu"
    assert "CUDA failure 35" in session.placement.reason
    assert len(warnings_in(caplog)) == 1


def test_an_error_without_a_text_is_named_by_its_type(
    bundle: Path, pretend: Callable[..., Runtime]
) -> None:
    pretend().reason = MemoryError()
    with pytest.raises(DeviceError, match="MemoryError"):
        EncoderSession(bundle, "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda", "auto"])
@pytest.mark.parametrize("content", [b"", b"not a model"], ids=repr)
def test_a_model_that_cannot_be_read_is_no_fault_of_the_device(
    copy: Path, pretend: Callable[..., Runtime], device: str, content: bytes
) -> None:
    """Its hash fits, as after an export that went wrong."""
    (copy / "model.onnx").write_bytes(content)
    reseal(copy)
    pretend().reason = RuntimeError("protobuf parsing failed")
    with pytest.raises(BundleError, match=r"model\.onnx"):
        EncoderSession(copy, device)


def test_a_model_that_the_cpu_reads_but_has_no_kernels_for_is_the_fault_of_the_device(
    bundle: Path, pretend: Callable[..., Runtime]
) -> None:
    runtime = pretend()
    runtime.reason = RuntimeError("out of memory")
    runtime.open_on_cpu = refuse_kernels
    with pytest.raises(DeviceError, match="out of memory"):
        EncoderSession(bundle, "cuda")


@pytest.mark.parametrize(("limit", "option"), [(None, None), (2**30, str(2**30))])
def test_cuda_is_opened_in_full_precision_with_a_memory_limit_if_asked(
    bundle: Path, pretend: Callable[..., Runtime], limit: int | None, option: str | None
) -> None:
    runtime = pretend(Subgraph(CUDA, [Node("MatMul", "a")]))
    EncoderSession(bundle, "cuda", gpu_memory_limit_bytes=limit)
    (([(_, options)], _),) = runtime.opened
    assert options["use_tf32"] == "0"
    assert options["arena_extend_strategy"] == "kSameAsRequested"
    assert options.get("gpu_mem_limit") == option


@pytest.mark.usefixtures("no_libraries")
def test_a_damaged_bundle_is_refused_before_a_device_is_looked_for(copy: Path) -> None:
    (copy / "model.onnx").write_bytes(b"")
    for device in ("auto", "cpu", "cuda"):
        with pytest.raises(BundleError):
            EncoderSession(copy, device)


# What shows a GPU.


def test_without_a_sign_of_a_gpu_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_loads", lambda _: False)
    for value in ("", "none", "void"):
        assert gpu_sign({"NVIDIA_VISIBLE_DEVICES": value}, str(tmp_path)) == ""
    assert gpu_sign({}, str(tmp_path)) == ""


def test_a_container_asked_for_gpus_the_driver_and_its_files_are_signs_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"NVIDIA_VISIBLE_DEVICES": "all"}
    monkeypatch.setattr(placement, "_loads", lambda _: False)
    assert gpu_sign(asked, str(tmp_path)) == "NVIDIA_VISIBLE_DEVICES=all"
    monkeypatch.setattr(placement, "_loads", lambda _: True)
    assert gpu_sign(asked, str(tmp_path)) == "libcuda.so.1"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert gpu_sign(asked, str(tmp_path)) == "/dev/nvidia0"
    (tmp_path / "proc" / "driver" / "nvidia").mkdir(parents=True)
    assert gpu_sign(asked, str(tmp_path)) == "/proc/driver/nvidia"


# CUDA itself.


@pytest.mark.gpu
def test_cuda_equals_the_trained_model_over_changing_shapes(
    bundle: Path, reference: Callable[[object], npt.NDArray[np.float32]]
) -> None:
    session = EncoderSession(bundle, "cuda")
    assert set(session.placement.nodes) == {CUDA}
    generator = np.random.default_rng(0)
    for _ in range(30):
        ids = generator.integers(0, 37, (generator.integers(1, 9), generator.integers(1, 25)))
        np.testing.assert_allclose(session.run(ids), reference(ids), atol=1e-5)
    rows = [[1, 2, 3], [4], list(range(24))]
    for row, hidden in zip(rows, session.encode(rows), strict=True):
        np.testing.assert_allclose(hidden, reference([row])[0], atol=1e-5)
    assert session.run(np.zeros((0, 5), int)).shape == (0, 5, 12)


@pytest.mark.gpu
def test_cuda_answers_after_a_refusal(bundle: Path) -> None:
    session = EncoderSession(bundle, "cuda")
    for ids in ([[-1]], [[37]], np.zeros((1, 25), int)):
        with pytest.raises(ValueError, match=r"outside|over max_len"):
            session.run(ids)
        assert session.run([[1, 2]]).shape == (1, 2, 12)
