"""Matrix products in 8-bit integers, with one scale a token.

    y = x W ~ (round(127 x / s_t) W_q) * s_t / 127 * s_n,  s_t = max |x_t|,  s_n = max |W_n| / 127

for token t and output channel n. The rows of x are scaled to -1..1, rounded to 8 bits and
multiplied with weights that were rounded once, when the model was exported. The usual scale
is one for the whole batch (ONNX `DynamicQuantizeLinear`), so that a later token or another
sequence changes every result. With a scale of its own a token depends on itself alone, and
causality and batch invariance stay what they are in fp32. Embedding, positions, norms,
softmax and the residual stream stay fp32.

The integers are unsigned with a fixed zero point of 128: ONNX Runtime's product of signed
with signed integers takes 10 times as long (AMD Zen 4). A row that is all NaN, as it is from
a bad id on, has the scale NaN and stays NaN.

Measured on 2 cores of an AMD EPYC (Zen 4), d_model 512, 8 heads, 2 layers, for target cpu, time
of the whole model against fp32: 0.43 at 1 x 16, 0.45 at 1 x 128, 0.46 at 1 x 512, 0.38 at 8 x 128,
0.49 at 8 x 512, 0.39 at 32 x 32. Of that, MatMulIntegerToFloat in place of `MatMulInteger`, `Cast`
and `Mul` bought 5 to 10 % (target cpu; the portable file is of ai.onnx alone).
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from causal_encoder.export.prepare import CONTRIB_DOMAIN

_LEVELS = 127  # on each side of the zero point
_ZERO_POINT = 128
_FUSED_CONSTANTS = {"int8.one": np.array(1, np.float32)}
_CONSTANTS: dict[str, npt.NDArray[Any]] = {
    "int8.axis": np.array([-1], np.int64),
    "int8.step": np.array(1 / _LEVELS, np.float32),
    "int8.zero_point": np.array(_ZERO_POINT, np.uint8),
    "int8.tiny": np.array(1e-30, np.float32),  # a row of zeros is divided by it
}


def quantize_products(proto: onnx.ModelProto, *, fused: bool) -> None:
    """Replace every product with a stored matrix of a traced fp32 graph by its 8-bit form.

    Args:
        proto: the graph.
        fused: let ONNX Runtime's MatMulIntegerToFloat multiply by the scales of the channels,
            while the integers are in the cache. The results are the same to the bit.
    """
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    matrices: set[str] = set()  # equal ones are one tensor, which several products read
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        if node.op_type == "MatMul" and node.input[1] in stored:
            matrices.add(node.input[1])
            nodes += _product(node, fused)
        else:
            nodes.append(node)
    for name in sorted(matrices):
        values, scale = quantize_matrix(numpy_helper.to_array(stored[name]))
        stored[name].CopyFrom(numpy_helper.from_array(values, name))
        proto.graph.initializer.append(numpy_helper.from_array(scale, f"{name}.scale"))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    for name, value in (_CONSTANTS | (_FUSED_CONSTANTS if fused else {})).items():
        proto.graph.initializer.append(numpy_helper.from_array(value, name))


def quantize_matrix(
    matrix: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """(in, out) float32 -> int8 values of -127..127, and s_n / 127 for each output channel."""
    largest = np.abs(matrix).max(axis=0)
    scale = (largest / _LEVELS).astype(np.float32)
    scale[scale == 0] = 1  # zeros, or so small that a step of them is no float32
    return np.rint(matrix / scale).astype(np.int8), scale / np.float32(_LEVELS)


def _product(node: onnx.NodeProto, fused: bool) -> list[onnx.NodeProto]:
    """The nodes that stand in for `node`, which multiplies x with a matrix."""
    (x, matrix), (y,) = node.input, node.output

    def make(operator: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(operator, inputs, [output], f"{output}.{operator}", **attributes)

    rounded, product = f"{y}.rounded", f"{y}.product"
    zero_point, scales = "int8.zero_point", f"{matrix}.scale"
    if fused:
        inputs = [rounded, matrix, "int8.one", scales, zero_point]
        multiply = [make("MatMulIntegerToFloat", inputs, product, domain=CONTRIB_DOMAIN)]
    else:
        multiply = [
            make("MatMulInteger", [rounded, matrix, zero_point], f"{y}.integers"),
            make("Cast", [f"{y}.integers"], f"{y}.floats", to=onnx.TensorProto.FLOAT),
            make("Mul", [f"{y}.floats", scales], product),
        ]
    return [
        make("ReduceMax", [x, "int8.axis"], f"{y}.highest"),
        make("ReduceMin", [x, "int8.axis"], f"{y}.lowest"),
        make("Neg", [f"{y}.lowest"], f"{y}.negated"),
        make("Max", [f"{y}.highest", f"{y}.negated"], f"{y}.largest"),
        make("Add", [f"{y}.largest", "int8.tiny"], f"{y}.scale"),
        make("Div", [x, f"{y}.scale"], f"{y}.unit"),
        make("QuantizeLinear", [f"{y}.unit", "int8.step", zero_point], rounded),
        *multiply,
        make("Mul", [product, f"{y}.scale"], y),
    ]
