"""The graph of `--target cuda`: what is fused, and that it computes the same, on CPU."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from causal_encoder.export import export_onnx
from causal_encoder.export.prepare import CONTRIB_DOMAIN, prepare
from causal_encoder.export.trace import trace_onnx
from causal_encoder.export.wrapper import OnnxEncoder
from causal_encoder.model import CausalEncoder
from causal_encoder.serve import open_bundle
from tests.bundles import POSITIONS, operators_a_layer, small_model

Hidden = npt.NDArray[np.float32]
V, L, LAYERS = 13, 9, 2
SIZES = {"vocab_size": V, "d_model": 8, "num_heads": 2, "num_layers": LAYERS, "max_len": L}
FUSED = {"gelu": "BiasGelu", "gelu_tanh": "FastGelu", "relu": ""}
Traced = Callable[[str, str], onnx.ModelProto]
every_variant = pytest.mark.parametrize(
    ("activation", "norm"), list(itertools.product(FUSED, ("pre", "post")))
)


def model_of(position: str, activation: str, norm: str) -> CausalEncoder:
    """The same weights for every position scheme, and a learned table where there is one."""
    fields = {"activation": activation, "norm": norm}
    model = prepare(small_model(**SIZES, position=position, **fields))
    shared = small_model(**SIZES, position="none", **fields).state_dict()
    model.load_state_dict(shared, strict=False)
    return model


@pytest.fixture(scope="module")
def traced() -> Traced:
    """(activation, norm) -> the graph of a model, traced once, a second each."""
    cache: dict[tuple[str, str], onnx.ModelProto] = {}

    def get(activation: str, norm: str) -> onnx.ModelProto:
        key = activation, norm
        if key not in cache:
            cache[key] = trace_onnx(model_of("none", *key), 23, "fp32", "cuda")
        return cache[key]

    return get


def operators(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in proto.graph.node)


def with_positions_of(proto: onnx.ModelProto, model: CausalEncoder) -> onnx.ModelProto:
    """The graph with another table, which is all that a position scheme is in it."""
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    (table,) = (t for t in copy.graph.initializer if t.name == "position_table")
    values = OnnxEncoder(model, 23, torch.float32).position_table.numpy()
    table.CopyFrom(numpy_helper.from_array(values, table.name))
    del copy.graph.value_info[:]  # the table without positions has one column
    return copy


def runner(proto: onnx.ModelProto) -> Callable[[npt.NDArray[np.int64]], Hidden]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda ids: session.run(None, {"input_ids": ids})[0]


@every_variant
@pytest.mark.parametrize("position", POSITIONS)
def test_it_computes_what_the_model_computes_at_every_length(
    position: str, activation: str, norm: str, traced: Traced
) -> None:
    model = model_of(position, activation, norm)
    run = runner(with_positions_of(traced(activation, norm), model))
    double = CausalEncoder(model.config, torch.float64).eval()
    double.load_state_dict(model.state_dict())
    ids = np.random.default_rng(5).integers(0, V, (3, L))
    with torch.no_grad():
        eager, expected = (m(torch.from_numpy(ids)).numpy() for m in (model, double))
    limit = 4 * np.abs(eager - expected).max() + 1e-6
    for length in range(1, L + 1):
        error = np.abs(run(ids[:, :length]) - expected[:, :length]).max()
        assert error <= limit, f"length {length}"


@every_variant
@pytest.mark.parametrize("position", POSITIONS)
def test_a_bad_id_is_nan_from_there_on_and_too_long_is_not_answered(
    position: str, activation: str, norm: str, traced: Traced
) -> None:
    model = model_of(position, activation, norm)
    run = runner(with_positions_of(traced(activation, norm), model))
    for token in (-1, V, 2**40):
        ids = np.ones((2, L), np.int64)
        ids[1, 4] = token
        hidden = run(ids)
        assert np.isfinite(hidden[0]).all()
        assert np.isnan(hidden[1, 4:]).all()
    assert np.isnan(run(np.ones((1, L + 1), np.int64))[:, L:]).all()
    with pytest.raises(Exception, match=r"Add|broadcast"):
        run(np.ones((1, L + 2), np.int64))


@every_variant
def test_a_layer_has_as_many_operators_as_ever(activation: str, norm: str, traced: Traced) -> None:
    proto = traced(activation, norm)
    onnx.checker.check_model(proto, full_check=True)
    fused = FUSED[activation]
    expected = {
        "Shape": 1, "Clip": 1, "Gather": 1, "Slice": 1,
        # One of embedding and positions, then the bias of q, k and v, and that before a ReLU.
        "Add": 1 + LAYERS * (1 if fused else 2),
        "MatMul": 4 * LAYERS, "Split": LAYERS, "Attention": LAYERS,
        fused or "Relu": LAYERS,
        "SkipLayerNormalization": 2 * LAYERS,
        "LayerNormalization": 1 if norm == "pre" else 0,
    }  # fmt: skip
    assert operators(proto) == Counter(expected)


@every_variant
def test_the_sum_is_an_output_where_it_is_read_again(
    activation: str, norm: str, traced: Traced
) -> None:
    norms = [n for n in traced(activation, norm).graph.node if n.op_type.startswith("Skip")]
    with_sum = 2 * LAYERS - 1 if norm == "pre" else 0  # the final norm's is read by no one
    assert [len(node.output) for node in norms] == [4] * with_sum + [1] * (2 * LAYERS - with_sum)


def test_the_portable_graph_has_as_many_operators_a_layer_as_ever() -> None:
    proto = trace_onnx(model_of("none", "gelu", "pre"), 23, "fp32", "portable")
    assert {entry.domain for entry in proto.opset_import} == {""}
    assert operators_a_layer("fp32", "portable") == {
        "LayerNormalization": 2,
        "MatMul": 4,
        "Add": 6,
        "Split": 1,
        "Attention": 1,
        "Gelu": 1,
    }


def test_the_domain_is_imported_and_no_value_is_declared_that_is_gone(traced: Traced) -> None:
    proto = traced("gelu", "pre")
    assert {entry.domain: entry.version for entry in proto.opset_import} == {
        "": 23,
        CONTRIB_DOMAIN: 1,
    }
    assert {n.domain for n in proto.graph.node if n.op_type in ("BiasGelu", "Attention")} == {
        CONTRIB_DOMAIN,
        "",
    }
    made = {name for node in proto.graph.node for name in node.output}
    stored = {tensor.name for tensor in proto.graph.initializer}
    assert {value.name for value in proto.graph.value_info} <= made | stored


@pytest.mark.parametrize(
    ("precision", "fields", "expected"),
    [
        pytest.param("fp16", {}, {"SkipLayerNormalization": 2, "BiasGelu": 1, "Add": 2}, id="fp16"),
        pytest.param(
            "fp32",
            {"bias": False, "final_norm": False, "activation": "gelu_tanh", "position": "none"},
            {"SkipLayerNormalization": 1, "LayerNormalization": 1, "Gelu": 1, "Add": 2},
            id="no bias, no final norm",
        ),
        pytest.param(
            "fp32",
            {"norm": "post", "final_norm": True, "activation": "relu", "num_layers": 2},
            {"SkipLayerNormalization": 4, "LayerNormalization": 1, "Relu": 2, "Add": 5},
            id="post-norm with a final norm",
        ),
    ],
)
def test_a_bundle_passes_every_check(
    precision: str, fields: Mapping[str, Any], expected: Mapping[str, int], tmp_path: Path
) -> None:
    model = small_model(**(SIZES | {"num_layers": 1} | dict(fields)))
    manifest = export_onnx(model, tmp_path / "bundle", precision=precision, target="cuda")
    assert manifest.parity is not None
    assert (manifest.target, manifest.parity["verdict"]) == ("cuda", "proven")
    with open_bundle(tmp_path / "bundle") as opened:
        proto = onnx.load(opened.model_path)
    assert expected.items() <= operators(proto).items()


def test_the_rewrites_are_the_same_each_time(traced: Traced) -> None:
    again = trace_onnx(model_of("none", "gelu", "pre"), 23, "fp32", "cuda")
    first = traced("gelu", "pre")
    assert again.SerializeToString(deterministic=True) == first.SerializeToString(
        deterministic=True
    )
