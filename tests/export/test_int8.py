"""8-bit products: one scale a token, so a token depends on itself and what came before alone."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from causal_encoder.errors import ExportError
from causal_encoder.export import export_onnx, verify
from causal_encoder.export.artifact import OPTIMIZATION_LEVELS
from causal_encoder.export.int8 import quantize_matrix
from causal_encoder.export.prepare import prepare
from causal_encoder.export.trace import trace_onnx
from causal_encoder.model import CausalEncoder
from causal_encoder.serve import EncoderSession
from tests.bundles import operators_a_layer, random_ids, small_model


@pytest.fixture(scope="module")
def model() -> CausalEncoder:
    return small_model(num_layers=2, position="learned")


@pytest.fixture(scope="module")
def bundle(model: CausalEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "bundle"
    export_onnx(model, path, precision="int8")
    return path


def test_a_matrix_is_rounded_to_the_nearest_of_255_levels_a_channel() -> None:
    matrix = np.random.default_rng(0).normal(size=(30, 7)).astype(np.float32)
    values, scale = quantize_matrix(matrix)
    assert values.dtype == np.int8
    assert np.abs(values).max(axis=0).tolist() == [127] * 7
    step = np.abs(matrix).max(axis=0) / 127
    np.testing.assert_allclose(scale * 127, step, rtol=1e-6)
    assert (np.abs(values * step - matrix) <= 0.5001 * step).all()


def test_a_channel_of_zeros_stays_zero() -> None:
    for tiny in (0, 1e-45, 5e-45):
        values, scale = quantize_matrix(np.full((3, 2), tiny, np.float32))
        assert not values.any()
        assert np.isfinite(scale).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"norm": "post", "activation": "relu"},
        {"bias": False, "activation": "gelu_tanh", "position": "sinusoidal+learned"},
        {"num_layers": 1, "max_len": 1},
    ],
    ids=str,
)
def test_every_form_is_proven(fields: dict[str, Any], tmp_path: Path) -> None:
    config = small_model(**fields).config
    torch.manual_seed(0)
    model = CausalEncoder(config).eval()  # with initial weights: those of the other tests are harsh
    manifest = export_onnx(model, tmp_path / "b", precision="int8")
    assert manifest.precision == "int8"
    assert manifest.parity is not None
    assert manifest.parity["verdict"] == "proven"


@pytest.mark.parametrize("target", ["portable", "cpu"])
@pytest.mark.parametrize("value", [None, 0.0], ids=["equal", "zero"])
def test_equal_matrices_are_rounded_once(target: str, value: float | None, tmp_path: Path) -> None:
    """The exporter stores them once: layers that were copied, or that start at zero."""
    config = small_model(norm="post").config
    torch.manual_seed(0)
    model = CausalEncoder(config).eval()
    with torch.no_grad():
        if value is not None:
            model.get_parameter("blocks.0.attention.out.weight").fill_(value)
    first, second = model.blocks
    second.load_state_dict(first.state_dict())
    export_onnx(model, tmp_path / "b", precision="int8", target=target)
    onnx.checker.check_model(tmp_path / "b" / "model.onnx")


def test_verify_proves_it_again_and_finds_invariance_exact(
    bundle: Path, model: CausalEncoder
) -> None:
    report = verify(bundle, model, device="cpu")
    assert report.proven
    rows = {check.name: check for check in report.checks}
    for name in ("causality", "batch invariance", "padding invariance"):
        assert rows[name].measured == 0.0


def test_a_large_batch_mate_moves_no_bit(bundle: Path) -> None:
    session = EncoderSession(bundle, device="cpu")
    ids = random_ids(3, 9)
    together = session.run(ids)
    for row in range(3):
        np.testing.assert_array_equal(session.run(ids[row : row + 1])[0], together[row])


@pytest.mark.parametrize("level", OPTIMIZATION_LEVELS)
def test_a_bad_id_stays_nan_through_the_integers(level: str, bundle: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = OPTIMIZATION_LEVELS[level]
    session = onnxruntime.InferenceSession(
        bundle / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    for token in (-1, 13, 2**40):
        ids = random_ids(2, 8)
        ids[0, 3] = token
        (hidden,) = session.run(None, {"input_ids": ids})
        assert np.isnan(hidden[0, 3:]).all()
        assert np.isfinite(hidden[1]).all()


@pytest.mark.parametrize(
    ("target", "products"),
    [
        ("portable", {"MatMulInteger": 4, "Cast": 4, "Mul": 8}),
        ("cpu", {"MatMulIntegerToFloat": 4, "Mul": 4, "Loop": 1, "Gather": 1, "Identity": 1}),
    ],
)
def test_no_stored_matrix_is_multiplied_in_float(target: str, products: dict[str, int]) -> None:
    """And a layer has as many operators as ever: more of them is a regression."""
    assert operators_a_layer("int8", target) == products | {
        "LayerNormalization": 2,
        "ReduceMax": 4,
        "ReduceMin": 4,
        "Neg": 4,
        "Max": 4,
        "Add": 10,
        "Div": 4,
        "QuantizeLinear": 4,
        "Split": 1,
        "Attention": 1,
        "Gelu": 1,
    }


def test_the_fused_products_give_the_same_bits(model: CausalEncoder) -> None:
    """In one chunk, and as written, nothing else differs."""
    prepared, ids = prepare(model), random_ids(3, 9)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = OPTIMIZATION_LEVELS["none"]
    hidden = []
    for target in ("portable", "cpu"):
        with torch.no_grad():
            file = trace_onnx(prepared, 23, "int8", target).SerializeToString()
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        hidden += session.run(None, {"input_ids": ids})
    np.testing.assert_array_equal(*hidden)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"precision": "int8", "target": "cuda"}, "no int8 products on cuda"),
        ({"precision": "bf16", "target": "cpu"}, "no bf16 products on cpu"),
        ({"precision": "int8", "opset": 20}, "int8 for portable needs opset 23"),
        ({"target": "cpu", "opset": 18}, "fp32 for cpu needs opset 23"),
        ({"target": "tpu"}, "target is 'tpu', expected one of portable, cpu, cuda"),
    ],
    ids=str,
)
def test_what_no_provider_runs_is_refused(
    form: dict[str, Any], message: str, model: CausalEncoder, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        export_onnx(model, tmp_path / "b", **form)
    assert not (tmp_path / "b").exists()
