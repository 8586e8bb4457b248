"""Layers for ONNX Runtime's CPU provider, a chunk of the sequence at a time (`--target cpu`).

In a causal layer a row needs, of all other rows, only the keys and values of those before it.
So each layer becomes a `Loop` over chunks of rows that carries the keys and values it has made
so far, as a language model reads a long prompt. The provider's `Attention` otherwise multiplies
all queries with all keys and masks half of the scores away; here a chunk meets the keys up to
its own end alone. And what a layer makes on its way, such as the scores and the wide rows of
the feed-forward part, is there for one chunk at a time: memory grows with the length instead of
its square, and what one operator writes the next one finds in the cache.

All chunks have the same number of rows, at most CHUNK: a short sequence is one chunk, and for
the sake of the last chunk a long one is padded by fewer rows than it has chunks. Rows on the
right change nothing for a causal model, and are cut off in the end.

Measured on 2 cores of an AMD EPYC (Zen 4) against the portable graph, d_model 512, 8 heads, 2
layers, fp32: 0.61 of the time at 1 x 4096, 0.79 at 1 x 2048, 0.87 at 1 x 1024, 0.93 at 8 x 512, no
clear difference at 8 x 128 and 32 x 32, and 0.1 ms more at 1 x 16; 122 MiB in place of 768 at 1 x
4096. A loop around attention alone took 217 MiB, and copied the keys of every chunk once more.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx
from onnx import NodeProto, TypeProto, helper, parser

# Rows of a chunk. 128 and 384 were within the noise of 256; 64 and 512 were slower somewhere.
CHUNK = 256
_INPUT, _OUTPUT = "chunks_of_input", "chunks_of_output"  # (chunks, B, rows, D)
_COUNT, _GO_ON, _NO_KEYS = "chunk_count", "chunk_go_on", "chunk_no_keys"


@dataclass(frozen=True)
class _Layer:
    """Consecutive nodes of the graph: one value enters them and one leaves them."""

    nodes: list[NodeProto]
    input: str
    output: str


def chunk_layers(proto: onnx.ModelProto) -> None:
    """Put a loop over chunks in place of every layer of a traced graph."""
    graph = proto.graph
    types = {
        value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)
    }
    before, layers = _split(graph)
    heads = next(a.i for a in _attention(layers[0]).attribute if a.name == "q_num_heads")
    width = graph.output[0].type.tensor_type.shape.dim[2].dim_value
    nodes = [*before, *_cut(layers[0].input, width, heads)]
    chunks = _INPUT
    for index, layer in enumerate(layers):
        made = _OUTPUT if layer is layers[-1] else f"{_OUTPUT}.{index}"
        rows = helper.make_tensor_type_proto(types[layer.output], [None, None, width])
        head = [None, heads, None, width // heads]
        cache = helper.make_tensor_type_proto(types[layer.input], head)
        nodes.append(_loop(layer, f"layer.{index}", chunks, made, rows, cache))
        chunks = made
    nodes += _join(layers[-1].output, width)
    outside = {name for node in nodes for name in node.output}
    values = [value for value in graph.value_info if value.name in outside]
    graph.ClearField("node")
    graph.node.extend(nodes)
    graph.ClearField("value_info")
    graph.value_info.extend(values)


def _split(graph: onnx.GraphProto) -> tuple[list[NodeProto], list[_Layer]]:
    """The nodes before the first layer, and the layers.

    A layer begins at the last value before its attention that everything passes through:
    with pre-norm the residual stream, with post-norm the norm of the layer before.
    """
    nodes = list(graph.node)
    starts: list[tuple[int, str]] = []
    latest = (0, graph.input[0].name)
    for index, alone in enumerate(_alone_after(graph)):
        if nodes[index].op_type == "Attention":
            starts.append(latest)
        if alone:
            latest = (index + 1, alone)
    ends = [*starts[1:], (len(nodes), graph.output[0].name)]
    return nodes[: starts[0][0]], [
        _Layer(nodes[start:end], entering, leaving)
        for (start, entering), (end, leaving) in zip(starts, ends, strict=True)
    ]


def _alone_after(graph: onnx.GraphProto) -> Iterator[str]:
    """For each node, the one value that is still to be read after it, or "" if there are more."""
    last_read = {name: index for index, node in enumerate(graph.node) for name in node.input}
    alive = {value.name for value in graph.input}
    for index, node in enumerate(graph.node):
        alive.update(node.output)
        alive = {name for name in alive if last_read.get(name, -1) > index}
        yield next(iter(alive)) if len(alive) == 1 else ""


def _attention(layer: _Layer) -> NodeProto:
    (attention,) = (node for node in layer.nodes if node.op_type == "Attention")
    return attention


def _cut(whole: str, width: int, heads: int) -> list[NodeProto]:
    """(B, T, D) -> how many chunks there are, (chunks, B, rows, D), and no keys or values yet."""
    return _nodes(
        f"""
cut (whole) => ({_COUNT}, {_GO_ON}, {_INPUT}, {_NO_KEYS})
{{
    chunk_zero = Constant<value_ints: ints = [0]>()
    chunk_one = Constant<value_ints: ints = [1]>()
    chunk_most = Constant<value_ints: ints = [{CHUNK}]>()
    chunk_width = Constant<value_ints: ints = [{width}]>()
    chunk_length = Shape<start: int = 1, end: int = 2>(whole)
    chunk_last = Sub(chunk_length, chunk_one)
    chunk_full = Div(chunk_last, chunk_most)
    chunk_counted = Add(chunk_full, chunk_one)
    chunk_raised = Add(chunk_last, chunk_counted)
    chunk_rows = Div(chunk_raised, chunk_counted)
    chunk_padded_length = Mul(chunk_rows, chunk_counted)
    chunk_missing = Sub(chunk_padded_length, chunk_length)
    chunk_pads = Concat<axis: int = 0>(chunk_zero, chunk_missing)
    chunk_padded = Pad(whole, chunk_pads, , chunk_one)
    chunk_shape = Concat<axis: int = 0>(chunk_zero, chunk_counted, chunk_rows, chunk_width)
    chunk_by_batch = Reshape(chunk_padded, chunk_shape)
    {_INPUT} = Transpose<perm: ints = [1, 0, 2, 3]>(chunk_by_batch)
    {_COUNT} = Squeeze(chunk_counted)
    {_GO_ON} = Equal({_COUNT}, {_COUNT})
    chunk_batch = Shape<start: int = 0, end: int = 1>(whole)
    chunk_heads = Constant<value_ints: ints = [{heads}]>()
    chunk_head_size = Constant<value_ints: ints = [{width // heads}]>()
    chunk_keys_shape = Concat<axis: int = 0>(chunk_batch, chunk_heads, chunk_zero, chunk_head_size)
    chunk_no_floats = ConstantOfShape(chunk_keys_shape)
    {_NO_KEYS} = CastLike(chunk_no_floats, whole)
}}
""",
        whole=whole,
    )


def _join(whole: str, width: int) -> list[NodeProto]:
    """(chunks, B, rows, D) -> (B, T, D)."""
    return _nodes(
        f"""
join ({_OUTPUT}, chunk_zero, chunk_one, chunk_length) => (whole)
{{
    chunk_joined_by_batch = Transpose<perm: ints = [1, 0, 2, 3]>({_OUTPUT})
    chunk_joined_shape = Constant<value_ints: ints = [0, -1, {width}]>()
    chunk_joined = Reshape(chunk_joined_by_batch, chunk_joined_shape)
    whole = Slice(chunk_joined, chunk_zero, chunk_length, chunk_one)
}}
""",
        whole=whole,
    )


def _nodes(text: str, **names: str) -> list[NodeProto]:
    """The nodes of a function in the language of onnx.parser, some of their values renamed."""
    function = parser.parse_function(f'<domain: "", opset_import: ["": 23]>{text}')
    for node in function.node:
        _rename(node, names)
    return list(function.node)


def _loop(
    layer: _Layer, name: str, chunks: str, made: str, rows: TypeProto, cache: TypeProto
) -> NodeProto:
    """The layer as a loop: chunks of rows in, chunks of rows out, keys and values carried on."""
    position, go_on, went_on = (f"{name}.{value}" for value in ("chunk", "go_on", "went_on"))
    inner = {value: f"{value}.chunk" for value in (layer.input, layer.output)}
    past = [f"{name}.past_keys", f"{name}.past_values"]
    present = [f"{name}.keys", f"{name}.values"]
    attention = _attention(layer)
    del attention.output[1:]
    attention.input.extend(["", *past])
    attention.output.extend(present)
    for node in layer.nodes:
        _rename(node, inner)

    whole_number = helper.make_tensor_type_proto(onnx.TensorProto.INT64, [])
    truth = helper.make_tensor_type_proto(onnx.TensorProto.BOOL, [])
    body = helper.make_graph(
        [
            helper.make_node("Gather", [chunks, position], [inner[layer.input]], axis=0),
            *layer.nodes,
            helper.make_node("Identity", [go_on], [went_on]),
        ],
        name,
        _values({position: whole_number, go_on: truth} | dict.fromkeys(past, cache)),
        _values({went_on: truth} | dict.fromkeys(present, cache) | {inner[layer.output]: rows}),
    )
    carried, last = [_NO_KEYS, _NO_KEYS], [f"{value}.last" for value in present]
    return helper.make_node("Loop", [_COUNT, _GO_ON, *carried], [*last, made], name, body=body)


def _values(types: dict[str, TypeProto]) -> list[onnx.ValueInfoProto]:
    return [helper.make_value_info(name, type_) for name, type_ in types.items()]


def _rename(node: NodeProto, names: dict[str, str]) -> None:
    for values in (node.input, node.output):
        values[:] = [names.get(name, name) for name in values]
