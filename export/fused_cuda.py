"""Rewrites of the traced graph for ONNX Runtime's CUDA provider (`--target cuda`).

Every operator is a kernel launch, and for small batches launching is what takes the time.
Launches of a layer, its 4 matrix products among them, over the stand-in of tests/cuda:

| activation | norm | portable | here |
|---|---|---|---|
| gelu | pre | 14 | 10 |
| gelu_tanh | pre | 14 | 10 |
| relu | pre | 15 | 11 |
| gelu | post | 10 | 10 |

Where one long sequence would leave much of the GPU idle, such as 512 tokens of batch 1 with two
heads, flash attention splits it, which is 3 launches more a layer in fp16 and bf16.

Besides the products these are attention, its Split and bias, the activation with its bias
(two for ReLU), and two norms. ONNX Runtime finds some of it by itself at load, but not the
norms whose sum is read again: in a pre-norm model, all but the last.

The operators are of com.microsoft, which has them for CPU as well, where they gain nothing.
SkipLayerNormalization takes its statistics in float32 in every precision (since ONNX Runtime
1.28 at the latest), as LayerNormalization does, but the variance as the mean of squares less the
square of the mean, which loses digits where a row's mean is far larger than its deviation.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import NodeProto, helper

from causal_encoder.export.prepare import CONTRIB_DOMAIN

_BIAS_GELU = {b"none": "BiasGelu", b"tanh": "FastGelu"}


def fuse_residual_norms(proto: onnx.ModelProto) -> None:
    """LayerNormalization(residual + (product + bias)) -> SkipLayerNormalization.

    Saves a launch for each of the two additions before a norm, so 4 a layer. Where the sum
    is read again, as the residual of what follows, it is the node's fourth output. The
    product is the first input: so the sums are made and rounded in the order they had.
    """
    made_by, uses = _producers(proto), _uses(proto)
    fused: dict[str, NodeProto | None] = {}
    for norm in proto.graph.node:
        total = made_by.get(norm.input[0])
        if norm.op_type != "LayerNormalization" or total is None or total.op_type != "Add":
            continue
        residual, branch = total.input
        product, bias = _biased_product(made_by, branch)
        if not product:
            continue  # of embedding and positions, whose addition refuses a too long sequence
        gamma, *beta = norm.input[1:]
        again = ["", "", total.output[0]] if uses[total.output[0]] > 1 else []
        fused[norm.output[0]] = _node(
            "SkipLayerNormalization",
            [product, residual, gamma, *(beta or [""]), bias],
            [norm.output[0], *again],
            name=norm.name,
            epsilon=_attribute(norm, "epsilon"),
        )
        fused[total.output[0]] = None
        if bias:
            fused[branch] = None
    _replace(proto, fused)


def fuse_bias_gelus(proto: onnx.ModelProto) -> None:
    """Gelu(product + bias) -> BiasGelu, or FastGelu for the tanh approximation.

    Saves a launch a layer. ONNX Runtime does it by itself for the exact form alone.
    """
    made_by = _producers(proto)
    fused: dict[str, NodeProto | None] = {}
    for gelu in proto.graph.node:
        if gelu.op_type != "Gelu":
            continue
        product, bias = _biased_product(made_by, gelu.input[0])
        if bias:
            kind = _BIAS_GELU[_attribute(gelu, "approximate")]
            fused[gelu.output[0]] = _node(kind, [product, bias], gelu.output, name=gelu.name)
            fused[gelu.input[0]] = None
    _replace(proto, fused)


def _biased_product(made_by: Mapping[str, NodeProto], value: str) -> tuple[str, str]:
    """The product and the bias of a linear layer; empty where there is none."""
    node = made_by.get(value)
    if node is not None and node.op_type == "MatMul":
        return value, ""
    if node is None or node.op_type != "Add" or node.input[1] in made_by:
        return "", ""  # a bias is a tensor of the file, which no node makes
    product, _ = _biased_product(made_by, node.input[0])
    return product, node.input[1] if product else ""


def _producers(proto: onnx.ModelProto) -> Mapping[str, NodeProto]:
    return {name: node for node in proto.graph.node for name in node.output if name}


def _uses(proto: onnx.ModelProto) -> Counter[str]:
    graph = proto.graph
    return Counter(name for node in graph.node for name in node.input) + Counter(
        output.name for output in graph.output
    )


def _attribute(node: NodeProto, name: str) -> Any:
    (value,) = (helper.get_attribute_value(a) for a in node.attribute if a.name == name)
    return value


def _node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> NodeProto:
    while not inputs[-1]:  # trailing inputs that are not there are left out
        inputs = inputs[:-1]
    return helper.make_node(kind, inputs, outputs, domain=CONTRIB_DOMAIN, **attributes)


def _replace(proto: onnx.ModelProto, fused: Mapping[str, NodeProto | None]) -> None:
    """Put other nodes, or none, in place of the nodes that make some values."""
    graph = proto.graph
    kept = [fused.get(node.output[0], node) for node in graph.node]
    nodes = [node for node in kept if node is not None]
    made = {name for node in nodes for name in node.output}
    gone = {name for node in graph.node for name in node.output} - made
    values = [value for value in graph.value_info if value.name not in gone]
    graph.ClearField("node")
    graph.node.extend(nodes)
    graph.ClearField("value_info")
    graph.value_info.extend(values)
