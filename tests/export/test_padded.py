"""Hidden rows with zero columns are faster and give the same, to the bit."""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from causal_encoder.export.padded import pad_hidden_rows
from causal_encoder.export.prepare import prepare
from causal_encoder.export.trace import trace_onnx
from causal_encoder.model import CausalEncoder
from tests.bundles import random_ids, small_model


def padded(model: CausalEncoder, precision: str = "fp32") -> tuple[bytes, onnx.ModelProto]:
    """The portable file, and the same graph after the pass."""
    with torch.no_grad():
        proto = trace_onnx(prepare(model), 23, precision, "portable")
    before = proto.SerializeToString()
    pad_hidden_rows(proto)
    onnx.checker.check_model(proto, full_check=True)
    return before, proto


def answer(file: bytes) -> npt.NDArray[np.float32]:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    hidden: npt.NDArray[np.float32] = session.run(None, {"input_ids": random_ids(3, 17)})[0]
    return hidden


def stored(proto: onnx.ModelProto) -> dict[str, npt.NDArray[Any]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "fields",
    [
        {"d_ff": 1024},
        {"d_ff": 2048, "activation": "relu", "norm": "post"},
        {"d_ff": 1024, "activation": "gelu_tanh", "bias": False},
        {"d_ff": 1024, "d_model": 1024, "num_layers": 1},
    ],
    ids=str,
)
def test_the_numbers_are_the_same_to_the_bit(fields: dict[str, Any], precision: str) -> None:
    before, proto = padded(small_model(**({"num_heads": 2} | fields)), precision)
    assert stored(proto).keys() - stored(onnx.ModelProto.FromString(before)).keys()
    np.testing.assert_array_equal(answer(proto.SerializeToString()), answer(before))


def test_what_is_added_is_zeros_after_the_end() -> None:
    model = small_model(d_ff=1024)
    _, proto = padded(model)
    wide = stored(proto)["blocks.0.up.weight.wider"]
    assert wide.shape == (12, 1040)
    weight = model.state_dict()["blocks.0.feed_forward.up.weight"]
    np.testing.assert_array_equal(wide[:, :1024], weight.T)
    assert not wide[:, 1024:].any()
    assert stored(proto)["blocks.1.down.weight.taller"].shape == (1040, 12)
    assert "blocks.0.up.weight" not in stored(proto)


@pytest.mark.parametrize("d_ff", [1023, 1025, 1536, 512])
def test_other_lengths_are_left_as_they_are(d_ff: int) -> None:
    before, proto = padded(small_model(d_ff=d_ff))
    assert proto.SerializeToString() == before


def test_a_file_for_cpu_has_them_in_float_alone() -> None:
    model = prepare(small_model(d_ff=1024))
    with torch.no_grad():
        assert "blocks.0.up.weight.wider" in stored(trace_onnx(model, 23, "fp32", "cpu"))
        assert stored(trace_onnx(model, 23, "int8", "cpu"))["blocks.0.up.weight"].shape[1] == 1024


def test_a_tensor_with_two_readers_is_widened_for_each_as_it_needs() -> None:
    model = small_model(d_model=1024, d_ff=1024, num_heads=2)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "up" in name or "down" in name:
                tensor.zero_()
    before, proto = padded(model)
    shapes = {array.shape for name, array in stored(proto).items() if name.endswith("er")}
    assert shapes == {(1024, 1040), (1040, 1024), (1040,)}
    np.testing.assert_array_equal(answer(proto.SerializeToString()), answer(before))
