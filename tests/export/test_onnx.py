"""The ONNX file: its shape, and what it does in a runtime that knows nothing of us."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

import causal_encoder.export.onnx as onnx_module
from causal_encoder.errors import ExportError
from causal_encoder.export import export_onnx, verify
from causal_encoder.serve import EncoderSession
from tests.bundles import POSITIONS, small_model
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


@pytest.mark.parametrize("opset", [17, 24, 0, -1])
def test_an_opset_that_was_not_tested_is_refused(opset: int, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"opset {opset} is outside 18..23"):
        export_onnx(small_model(), tmp_path / "bundle", opset=opset)
    assert not (tmp_path / "bundle").exists()


def test_large_weights_go_to_one_file_beside_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_module, "SINGLE_FILE_LIMIT_BYTES", 10_000)
    model = small_model(d_model=24)
    for _ in range(2):  # onnx appends to a data file that is there
        manifest = export_onnx(model, tmp_path / "bundle", force=True)
        assert set(manifest.files) == {"model.onnx", "model.onnx.data"}
        parameters = sum(4 * parameter.numel() for parameter in model.parameters())
        assert manifest.files["model.onnx.data"].size_bytes < 1.5 * parameters
    assert verify(tmp_path / "bundle", model, device="cpu").proven
    (tmp_path / "bundle").rename(tmp_path / "moved elsewhere")
    assert EncoderSession(tmp_path / "moved elsewhere", "cpu").run([[1, 2]]).shape == (1, 2, 24)


def test_the_same_model_gives_the_same_file(tmp_path: Path) -> None:
    first = export_onnx(small_model(), tmp_path / "a").files
    assert export_onnx(small_model(), tmp_path / "b").files == first
