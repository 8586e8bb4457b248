"""Damage to ONNX graphs, drawn from a seed: what a fuzzer does to a bundle whose hashes fit.

Every function of `GRAPH_MUTATIONS` edits a parsed model in place.

Two changes are left out, because ONNX Runtime 1.31.1 does not survive them and no caller can
help that: a `Split` whose `num_outputs` is below the number of its outputs (SIGABRT, an assertion
of std::vector while the graph is loaded), and an `Attention` with 0 heads for keys and values
(SIGFPE, a division by zero).
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import onnx
from onnx import TensorProto, helper

Draw = random.Random
Mutation = Callable[[onnx.ModelProto, Draw], None]

_INTS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 5, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
_FLOATS = (float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e-45, 3.4e38)
_DEADLY = {"num_outputs": (-(2**63), -(2**31), -2, -1, 0, 1, 2), "kv_num_heads": (0,)}
_TEXTS = ("", "tanh", "none", "x", "\0", "é" * 100)
_OPERATORS = (
    "Add", "Sub", "MatMul", "Gather", "Slice", "Shape", "Cast", "Relu", "Softmax", "Reshape",
    "Transpose", "Expand", "Concat", "Attention", "Gelu", "LayerNormalization", "Split", "Clip",
    "Identity", "NonZero", "Dropout", "If", "Loop", "DoesNotExist", "",
)  # fmt: skip


def changed_attribute(proto: onnx.ModelProto, draw: Draw) -> None:
    """One attribute of one node gets another value of its type, or another type."""
    node = draw.choice([node for node in proto.graph.node if node.attribute])
    name = draw.choice(node.attribute).name
    values: tuple[Any, ...] = (*_INTS, *_FLOATS, *_TEXTS, [], [1, 2], [2**40])
    _set_attribute(node, name, draw.choice(values))


def changed_whole_number(proto: onnx.ModelProto, draw: Draw) -> None:
    """An integer attribute gets another integer: heads, axes, types, flags."""
    integers = [
        (node, attribute.name)
        for node in proto.graph.node
        for attribute in node.attribute
        if attribute.type == onnx.AttributeProto.INT
    ]
    node, name = draw.choice(integers)
    _set_attribute(node, name, draw.choice(_INTS))


def added_attribute(proto: onnx.ModelProto, draw: Draw) -> None:
    """A node gets an attribute that it may or may not know."""
    node = draw.choice(proto.graph.node)
    names = ("axis", "scale", "softcap", "is_causal", "q_num_heads", "keepdims", "end", "x")
    values: tuple[Any, ...] = (*_INTS, *_FLOATS)
    _set_attribute(node, draw.choice(names), draw.choice(values))


def dropped_node(proto: onnx.ModelProto, draw: Draw) -> None:
    """A node is gone, and what it made is missing."""
    del proto.graph.node[draw.randrange(len(proto.graph.node))]


def bridged_node(proto: onnx.ModelProto, draw: Draw) -> None:
    """A node is gone, and its first input takes the place of what it made."""
    node = draw.choice(proto.graph.node)
    node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output[:1]))


def repeated_node(proto: onnx.ModelProto, draw: Draw) -> None:
    """A node is there twice, and makes the same names twice."""
    place = draw.randrange(len(proto.graph.node))
    proto.graph.node.insert(place, proto.graph.node[place])


def shuffled_nodes(proto: onnx.ModelProto, draw: Draw) -> None:
    """The nodes are no longer in the order in which they can run."""
    nodes = list(proto.graph.node)
    draw.shuffle(nodes)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def swapped_inputs(proto: onnx.ModelProto, draw: Draw) -> None:
    """Two inputs of a node change places."""
    node = draw.choice([node for node in proto.graph.node if len(node.input) > 1])
    one, two = draw.sample(range(len(node.input)), 2)
    node.input[one], node.input[two] = node.input[two], node.input[one]


def rewired_input(proto: onnx.ModelProto, draw: Draw) -> None:
    """An input of a node comes from anywhere: a cycle, a weight, the ids, nothing."""
    node = draw.choice(proto.graph.node)
    made = [name for other in proto.graph.node for name in other.output]
    names = [*made, *(t.name for t in proto.graph.initializer), "input_ids", "", "nowhere"]
    node.input[draw.randrange(len(node.input))] = draw.choice(names)


def fewer_inputs(proto: onnx.ModelProto, draw: Draw) -> None:
    """A node loses inputs from the end."""
    node = draw.choice(proto.graph.node)
    del node.input[draw.randrange(len(node.input)) :]


def other_operator(proto: onnx.ModelProto, draw: Draw) -> None:
    """A node is of another type, with the attributes it had or without."""
    node = draw.choice(proto.graph.node)
    node.op_type = draw.choice(_OPERATORS)
    node.domain = draw.choice(("", "", "", "com.microsoft", "nowhere"))
    if draw.random() < 0.7:
        del node.attribute[:]


def other_shape_of_a_weight(proto: onnx.ModelProto, draw: Draw) -> None:
    """A weight has other dimensions than its bytes."""
    tensor = draw.choice(proto.graph.initializer)
    dims: list[int] = list(tensor.dims) or [1]
    dims[draw.randrange(len(dims))] = draw.choice(_INTS)
    _set_dims(tensor, draw.choice((dims, [*dims, 1], dims[:-1], [], [2**32, 2**32])))


def same_bytes_in_another_shape(proto: onnx.ModelProto, draw: Draw) -> None:
    """A weight has other dimensions that hold as many numbers."""
    tensor = draw.choice([tensor for tensor in proto.graph.initializer if len(tensor.dims) == 2])
    rows, columns = tensor.dims
    shapes = ([columns, rows], [rows * columns], [1, rows * columns], [rows, columns, 1])
    _set_dims(tensor, draw.choice(shapes))


def other_type_of_a_weight(proto: onnx.ModelProto, draw: Draw) -> None:
    """A weight claims to be of another type, or of none there is."""
    tensor = draw.choice(proto.graph.initializer)
    tensor.data_type = draw.choice((*range(24), 99, 2**31 - 1, -1))


def other_bytes_of_a_weight(proto: onnx.ModelProto, draw: Draw) -> None:
    """A weight has other numbers: random bits, NaN and infinities among them."""
    tensor = draw.choice(proto.graph.initializer)
    tensor.raw_data = draw.randbytes(len(tensor.raw_data))


def other_length_of_a_weight(proto: onnx.ModelProto, draw: Draw) -> None:
    """A weight has more or fewer bytes than its dimensions say."""
    tensor = draw.choice(proto.graph.initializer)
    size = len(tensor.raw_data)
    tensor.raw_data = draw.randbytes(draw.choice((0, 1, size - 1, size // 2, size + 1, 2 * size)))


def dropped_weight(proto: onnx.ModelProto, draw: Draw) -> None:
    """A weight is missing, or has another's name."""
    initializers = proto.graph.initializer
    place = draw.randrange(len(initializers))
    if draw.random() < 0.5:
        del initializers[place]
    else:
        initializers[place].name = draw.choice(initializers).name


def other_constant(proto: onnx.ModelProto, draw: Draw) -> None:
    """A whole number that the graph computes with: a limit, an index, an axis."""
    whole = [t for t in proto.graph.initializer if t.data_type == TensorProto.INT64]
    value = draw.choice(_INTS)
    draw.choice(whole).raw_data = value.to_bytes(8, "little", signed=True)


def other_interface(proto: onnx.ModelProto, draw: Draw) -> None:
    """The input or the output has another type, size, name or number of axes."""
    value = draw.choice((proto.graph.input[0], proto.graph.output[0]))
    tensor = value.type.tensor_type
    change = draw.choice(("type", "size", "more axes", "fewer axes", "name", "gone"))
    if change == "type":
        tensor.elem_type = draw.choice(range(24))
    elif change == "size":
        draw.choice(tensor.shape.dim).dim_value = draw.choice(_INTS)
    elif change == "more axes":
        tensor.shape.dim.add(dim_param="more")
    elif change == "fewer axes":
        del tensor.shape.dim[-1]
    elif change == "name":
        value.name = draw.choice(("", "x", "hidden", "input_ids"))
    else:
        del (proto.graph.input if value is proto.graph.input[0] else proto.graph.output)[:]


def other_result(proto: onnx.ModelProto, draw: Draw) -> None:
    """A last node makes something else of the output, behind the shape that is declared."""
    last = next(node for node in proto.graph.node if "hidden" in node.output)
    last.output[:] = [name if name != "hidden" else "before" for name in last.output]
    extra = draw.choice(
        (
            helper.make_node("Transpose", ["before"], ["hidden"], perm=[1, 0, 2]),
            helper.make_node("Concat", ["before", "before"], ["hidden"], axis=draw.choice((0, 1))),
            helper.make_node("ReduceMax", ["before"], ["hidden"], keepdims=draw.choice((0, 1))),
            helper.make_node("NonZero", ["before"], ["hidden"]),
            helper.make_node("Cast", ["before"], ["hidden"], to=draw.choice((7, 10, 11))),
        )
    )
    proto.graph.node.append(extra)
    if extra.op_type == "Cast":
        proto.graph.output[0].type.tensor_type.elem_type = extra.attribute[0].i


def other_versions(proto: onnx.ModelProto, draw: Draw) -> None:
    """The operator set, the format version, or the domain is another."""
    if draw.random() < 0.5:
        proto.opset_import[0].version = draw.choice((-1, 0, 1, 6, 11, 17, 22, 24, 99, 2**40))
    elif draw.random() < 0.5:
        proto.ir_version = draw.choice((-1, 0, 1, 3, 4, 9, 11, 14, 2**40))
    else:
        proto.opset_import[0].domain = draw.choice(("com.microsoft", "nowhere"))


GRAPH_MUTATIONS: Mapping[str, Mutation] = {
    function.__name__.replace("_", " "): function
    for function in (
        changed_attribute, changed_whole_number, added_attribute, dropped_node, bridged_node,
        repeated_node, shuffled_nodes, swapped_inputs, rewired_input, fewer_inputs, other_operator,
        other_shape_of_a_weight, same_bytes_in_another_shape, other_type_of_a_weight,
        other_bytes_of_a_weight, other_length_of_a_weight, dropped_weight, other_constant,
        other_interface, other_result, other_versions,
    )
}  # fmt: skip


def damaged_bytes(content: bytes, draw: Draw) -> bytes:
    """Flipped bits, a cut, random bytes in the middle, or a piece that is repeated."""
    changed = bytearray(content)
    place = draw.randrange(len(content))
    kind = draw.choice(("flip", "flip", "flips", "cut", "random", "repeat", "insert"))
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else 20):
            changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del changed[place:]
    elif kind == "random":
        piece = draw.randbytes(min(len(content) - place, draw.randint(1, 64)))
        changed[place : place + len(piece)] = piece
    elif kind == "repeat":
        changed += changed[place:]
    else:
        changed[place:place] = draw.randbytes(draw.randint(1, 16))
    return bytes(changed)


def _set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    if isinstance(value, int) and value in _DEADLY.get(name, ()):
        value = 7
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    kind = onnx.AttributeProto.INTS if value == [] else None
    node.attribute.extend([*kept, helper.make_attribute(name, value, attr_type=kind)])


def _set_dims(tensor: TensorProto, dims: list[int]) -> None:
    del tensor.dims[:]
    tensor.dims.extend(dims)
