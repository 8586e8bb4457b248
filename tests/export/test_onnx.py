"""The ONNX file: its shape, and what it does in a runtime that knows nothing of us."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper

import causal_encoder.export.onnx as onnx_module
from causal_encoder.errors import CausalEncoderError, ExportError
from causal_encoder.export import export_onnx
from causal_encoder.export.checks import FILE_CHECKS, RUN_CHECKS
from causal_encoder.export.prepare import prepare
from causal_encoder.export.subject import open_subject
from causal_encoder.export.trace import trace_onnx
from causal_encoder.serve import EncoderSession, open_bundle
from tests.bundles import POSITIONS, small_model, tampered
from tests.export.conftest import Exported

Ids = npt.NDArray[np.int64]
Hidden = npt.NDArray[np.float32]
LEVELS = {
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def bare_session(bundle: Path, level: str = "all") -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(
        bundle / "model.onnx", options, providers=["CPUExecutionProvider"]
    )


def answer(session: onnxruntime.InferenceSession, ids: Ids) -> Hidden | None:
    """What the bare file gives for some ids; None if it refuses them."""
    try:
        (hidden,) = session.run(None, {"input_ids": ids})
    except Exception:  # noqa: BLE001  # ONNX Runtime has no public base class for its errors
        return None
    return hidden


def refused_or_nan_from(session: onnxruntime.InferenceSession, ids: Ids, at: int) -> bool:
    """Whether row 0 gives an error, or NaN at position `at` and every later one."""
    hidden = answer(session, ids)
    return hidden is None or (hidden.shape[1] > at and bool(np.isnan(hidden[0, at:]).all()))


def test_the_file_names_its_axes_and_its_limits(exported: Callable[[str, str], Exported]) -> None:
    _, bundle = exported("onnx", "sinusoidal")
    proto = onnx.load(bundle / "model.onnx")
    onnx.checker.check_model(proto, full_check=True)
    (given,), (made,) = proto.graph.input, proto.graph.output
    assert [dim.dim_param for dim in given.type.tensor_type.shape.dim] == ["batch", "sequence"]
    assert [dim.dim_param or dim.dim_value for dim in made.type.tensor_type.shape.dim] == [
        "batch",
        "sequence",
        12,
    ]
    assert (given.name, made.name) == ("input_ids", "hidden")
    props = {prop.key: prop.value for prop in proto.metadata_props}
    assert props["causal_encoder.max_len"] == "17"
    assert props["causal_encoder.vocab_size"] == "13"
    assert props["causal_encoder.precision"] == "fp32"
    assert proto.ir_version == 10


def frozen(*sizes: int, seen: bool) -> Callable[[onnx.ModelProto], None]:
    """Reshape before the output to constant sizes; the declared axes of the file stay open.

    Where the sizes are not to be seen by shape inference, zero times an id is added to them.
    """

    def edit(proto: onnx.ModelProto) -> None:
        constants = {"sizes": sizes, "nothing": [0]}
        proto.graph.initializer.extend(
            numpy_helper.from_array(np.array(value, np.int64), name)
            for name, value in constants.items()
        )
        proto.graph.node[-1].output[0] = "unfrozen"
        proto.graph.node.extend(
            [
                helper.make_node("ReduceMin", ["input_ids"], ["an_id"], keepdims=0),
                helper.make_node("Mul", ["an_id", "nothing"], ["no_id"]),
                helper.make_node("Add", ["sizes", "no_id"], ["same_sizes"]),
                helper.make_node(
                    "Reshape", ["unfrozen", "sizes" if seen else "same_sizes"], ["hidden"]
                ),
            ]
        )

    return edit


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
@pytest.mark.parametrize(
    "sizes",
    [(2, -1, 12), (8, -1, 12), (1, -1, 12), (-1, 1, 12), (-1, 2, 12), (-1, 17, 12)],
    ids=["batch 2", "batch 8", "batch 1", "length 1", "length 2", "max_len"],
)
def test_sizes_frozen_inside_the_graph_are_found_though_its_axes_look_open(
    sizes: tuple[int, ...],
    seen: bool,
    exported: Callable[[str, str], Exported],
    tmp_path: Path,
) -> None:
    model, bundle = exported("onnx", "sinusoidal")
    edit = frozen(*sizes, seen=seen)
    with open_bundle(tampered(bundle, tmp_path / "copy", edit)) as opened, torch.no_grad():
        subject = open_subject(opened, prepare(model), "cpu")
        axes = FILE_CHECKS["axes"](subject)
        assert axes is not None
        assert axes.detail == ""
        with pytest.raises(CausalEncoderError) as caught:  # which verify turns into a finding
            RUN_CHECKS["parity"](subject)
    expected = "the manifest says" if seen else "could not run a batch|returned shape"
    assert re.search(expected, str(caught.value))


@pytest.mark.parametrize("position", POSITIONS)
def test_attention_is_one_operator_a_layer_and_nothing_is_left_over(
    position: str, exported: Callable[[str, str], Exported]
) -> None:
    _, bundle = exported("onnx", position)
    operators = [node.op_type for node in onnx.load(bundle / "model.onnx").graph.node]
    assert operators.count("Attention") == 2
    assert set(operators) == {
        "Shape", "Clip", "Gather", "Slice", "Add", "LayerNormalization", "MatMul", "Split",
        "Attention", "Gelu",
    }  # fmt: skip


def test_no_tensor_is_stored_twice(exported: Callable[[str, str], Exported]) -> None:
    model, bundle = exported("onnx", "learned")
    parameters = sum(4 * parameter.numel() for parameter in model.parameters())
    guards = 4 * 2 * model.config.d_model
    assert (bundle / "model.onnx").stat().st_size <= 1.05 * (parameters + guards) + 2**16


def test_the_file_holds_no_path_of_the_machine_that_made_it(
    exported: Callable[[str, str], Exported],
) -> None:
    _, bundle = exported("onnx", "sinusoidal")
    content = (bundle / "model.onnx").read_bytes()
    assert b".py" not in content
    assert str(Path.cwd()).encode() not in content


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_bad_id_is_never_answered_by_the_bare_file(
    position: str, level: str, exported: Callable[[str, str], Exported]
) -> None:
    _, bundle = exported("onnx", position)
    session = bare_session(bundle, level)
    good = np.arange(24).reshape(2, 12) % 13
    (expected,) = session.run(None, {"input_ids": good})
    powers = [
        sign * 2**power + step
        for power in (31, 32, 40, 63)
        for sign in (-1, 1)
        for step in (-1, 0, 1)
    ]
    for token in (-1, -13, -14, 13, 14, *(t for t in powers if -(2**63) <= t < 2**63)):
        for column in (0, 5, 11):
            ids = good.copy()
            ids[0, column] = token
            assert refused_or_nan_from(session, ids, column), f"id {token} at column {column}"
            hidden = answer(session, ids)
            if hidden is not None:
                assert np.array_equal(hidden[1], expected[1]), "another row of the batch changed"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_sequence_over_max_len_is_never_answered_by_the_bare_file(
    position: str, level: str, exported: Callable[[str, str], Exported]
) -> None:
    _, bundle = exported("onnx", position)
    session = bare_session(bundle, level)
    for length in (18, 19, 34, 36, 100):
        ids = np.zeros((1, length), np.int64)
        assert refused_or_nan_from(session, ids, 17), f"length {length}"


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("position", POSITIONS)
def test_the_guards_hold_for_one_position_and_one_id(
    position: str, opset: int, tmp_path: Path
) -> None:
    export_onnx(
        small_model(position=position, max_len=1, vocab_size=1, num_layers=1),
        tmp_path / "bundle",
        opset=opset,
    )
    for level in LEVELS:
        session = bare_session(tmp_path / "bundle", level)
        (hidden,) = session.run(None, {"input_ids": np.zeros((3, 1), np.int64)})
        assert np.isfinite(hidden).all()
        for length in range(2, 51):
            ids = np.zeros((1, length), np.int64)
            assert refused_or_nan_from(session, ids, 1), f"{level}, length {length}"
        for token in (-1, 1, 2**40):
            assert refused_or_nan_from(session, np.array([[token]]), 0), f"{level}, id {token}"


@pytest.mark.parametrize("opset", [17, 24, 27, 28, 0, -1])
def test_an_opset_that_was_not_tested_is_refused(opset: int, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"opset {opset} is outside 18..23"):
        export_onnx(small_model(), tmp_path / "bundle", opset=opset)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(1, 25)], "warm_up has shape 1x25, expected .* 1 to max_len 24"),
        ([(1, 0)], "shape 1x0"),
        ([(0, 1)], "shape 0x1"),
        ([(2**63, 1)], "shape 9223372036854775808x1, which padded .* over the 4096 tokens"),
        ([(129, 24)], "shape 129x24, which padded"),
        ([(1, 1)] * 33, "warm_up has 33 shapes, expected at most 32"),
        ([(1, 2, 3)], "warm_up holds no pairs"),
        ([("1", 2)], "warm_up holds no pairs"),
        ("1x2", "warm_up holds no pairs"),
        (None, "warm_up holds no pairs"),
    ],
    ids=str,
)
def test_shapes_that_no_session_could_capture_are_refused(
    shapes: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        export_onnx(small_model(max_len=24), tmp_path / "bundle", warm_up=shapes)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("form", [{"target": "cpu"}, {"precision": "int8"}], ids=str)
def test_shapes_for_a_file_that_never_runs_on_cuda_are_refused(
    form: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="warm_up is for CUDA graphs"):
        export_onnx(small_model(), tmp_path / "bundle", warm_up=[(1, 1)], **form)


def test_a_graph_that_is_no_valid_onnx_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(*arguments: Any) -> onnx.ModelProto:
        proto = trace_onnx(*arguments)
        proto.graph.node.append(proto.graph.node[0])
        return proto

    monkeypatch.setattr(onnx_module, "trace_onnx", twice)
    with pytest.raises(ExportError, match=r"no valid ONNX, please report it: .*SSA"):
        export_onnx(small_model(), tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_large_weights_go_to_one_file_beside_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_module, "SINGLE_FILE_LIMIT_BYTES", 10_000)
    model = small_model(d_model=24)
    sizes = []
    for _ in range(2):  # onnx appends to a data file that is there (onnx issue 6655)
        manifest = export_onnx(model, tmp_path / "bundle", force=True)
        sizes.append({name: file.size_bytes for name, file in manifest.files.items()})
        assert set(manifest.files) == {"model.onnx", "model.onnx.data"}
        parameters = sum(4 * parameter.numel() for parameter in model.parameters())
        assert manifest.files["model.onnx.data"].size_bytes < 1.5 * parameters
    assert sizes[0] == sizes[1]
    assert manifest.parity is not None
    assert manifest.parity["verdict"] == "proven"
    (tmp_path / "bundle").rename(tmp_path / "moved elsewhere")
    assert EncoderSession(tmp_path / "moved elsewhere", "cpu").run([[1, 2]]).shape == (1, 2, 24)


def test_the_same_model_gives_the_same_file(
    exported: Callable[[str, str], Exported], tmp_path: Path
) -> None:
    _, bundle = exported("onnx", "sinusoidal")
    with open_bundle(bundle) as opened:
        first = opened.manifest.files
    assert export_onnx(small_model(position="sinusoidal"), tmp_path / "again").files == first
