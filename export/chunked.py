"""Causal attention for ONNX Runtime's CPU provider, chunk by chunk.

The provider's `Attention` multiplies all queries with all keys, masks half of the scores
away and keeps H x T x T of them. Here a long sequence is cut into chunks of queries, each of
which sees the keys up to its own end alone: half of the arithmetic is never done, and the
scores that are kept at a time grow with T instead of with its square. A short sequence takes
the one plain operator, which is faster there, so one file is right and fast for both.

Measured on an AMD EPYC (Zen 4), d_model 512, 8 heads, 2 layers, fp32, processor time of the
whole model against one plain operator a layer: 0.95 at T = 512, 0.85 at 1024, 0.67 at 4096.
Chunks of 64 rows were no faster than 128 anywhere; 256 are slower than 128 up to 1024 and
faster from 2048 on. Keys and values in (B, H, T, K) order gained nothing over (B, T, D).
"""

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

DOMAIN = "causal_encoder"
CHUNKED_ATTENTION = "ChunkedAttention"
PLAIN_UP_TO = 256  # one plain operator is faster up to this length
_SMALL_CHUNK = 128
_LARGE_CHUNK = 256
_SMALL_UP_TO = 1024


# The first chunks begin at 0, C, 2C, ..; the last one at T - C, so that all have C rows, and
# of the rows that it has in common with the one before it only one copy is kept.
# `seen` has C rows and T + C columns: column T - s + j tells, for the chunk at s, whether its
# row i may see key j, which is j <= s + i. Its last s + C columns are the mask of that chunk.
# The width of the values is written down because ONNX Runtime's shape inference, which does
# not see it behind the slice, takes it for 0 and warns of that at every run.
def _function(d_model: int) -> onnx.FunctionProto:
    return parser.parse_function(f"""
<domain: "{DOMAIN}", opset_import: ["": 23]>
{CHUNKED_ATTENTION} <num_heads> (q, k, v) => (y)
{{
    axis = Constant<value_ints: ints = [1]>()
    length_1 = Shape<start: int = 1, end: int = 2>(q)
    length = Squeeze(length_1)
    plain_up_to = Constant<value_int: int = {PLAIN_UP_TO}>()
    is_long = Greater(length, plain_up_to)
    y = If(is_long) <
        then_branch = chunked () => (y_chunked) {{
            zero = Constant<value_int: int = 0>()
            one = Constant<value_int: int = 1>()
            first = Constant<value_ints: ints = [0]>()
            end = Constant<value_ints: ints = [{2**63 - 1}]>()
            small = Constant<value_int: int = {_SMALL_CHUNK}>()
            large = Constant<value_int: int = {_LARGE_CHUNK}>()
            small_up_to = Constant<value_int: int = {_SMALL_UP_TO}>()
            is_very_long = Greater(length, small_up_to)
            chunk = Where(is_very_long, large, small)
            chunk_1 = Unsqueeze(chunk, first)
            last_start = Sub(length, chunk)
            last_index = Sub(length, one)
            full_chunks = Div(last_index, chunk)
            chunks = Add(full_chunks, one)

            row = Range(zero, chunk, one)
            row_2 = Unsqueeze(row, axis)
            columns = Add(length, chunk)
            column = Range(zero, columns, one)
            offset = Sub(column, length)
            seen = LessOrEqual(offset, row_2)
            open = Constant<value_float: float = 0.0>()
            masked = Constant<value: tensor = float {{0}}>()
            masks_float = Where(seen, open, masked)
            masks = CastLike(masks_float, q)

            always = Equal(one, one)
            y_stacked = Loop(chunks, always) <
                body = step (int64 index, bool go_on) => (go_on_out, y_chunk) {{
                    wide = Constant<value_ints: ints = [0, 0, {d_model}]>()
                    full_start = Mul(index, chunk)
                    start = Min(full_start, last_start)
                    start_1 = Unsqueeze(start, first)
                    stop_1 = Add(start_1, chunk_1)
                    q_chunk = Slice(q, start_1, stop_1, axis)
                    k_seen = Slice(k, first, stop_1, axis)
                    v_slice = Slice(v, first, stop_1, axis)
                    v_seen = Reshape(v_slice, wide)
                    mask_start = Sub(length_1, start_1)
                    mask = Slice(masks, mask_start, end, axis)
                    y_chunk = Attention<
                        q_num_heads: int = @num_heads, kv_num_heads: int = @num_heads,
                        softmax_precision: int = {onnx.TensorProto.FLOAT}
                    >(q_chunk, k_seen, v_seen, mask)
                    go_on_out = Identity(go_on)
                }}
            >
            y_by_batch = Transpose<perm: ints = [1, 0, 2, 3]>(y_stacked)
            width = Shape<start: int = 2>(q)
            keep = Constant<value_ints: ints = [0, -1]>()
            shape = Concat<axis: int = 0>(keep, width)
            y_rows = Reshape(y_by_batch, shape)
            done = Mul(full_chunks, chunk)
            done_1 = Unsqueeze(done, first)
            y_head = Slice(y_rows, first, done_1, axis)
            minus_rest = Sub(done_1, length_1)
            y_tail = Slice(y_rows, minus_rest, end, axis)
            y_chunked = Concat<axis: int = 1>(y_head, y_tail)
        }},
        else_branch = plain () => (y_plain) {{
            y_plain = Attention<
                is_causal: int = 1, q_num_heads: int = @num_heads, kv_num_heads: int = @num_heads,
                softmax_precision: int = {onnx.TensorProto.FLOAT}
            >(q, k, v)
        }}
    >
}}
""")


def chunk_attention(proto: onnx.ModelProto) -> None:
    """Let every `Attention` node of a traced graph call the function above instead."""
    for node in proto.graph.node:
        if node.op_type == "Attention":
            (num_heads,) = (a.i for a in node.attribute if a.name == "q_num_heads")
            node.CopyFrom(
                helper.make_node(
                    CHUNKED_ATTENTION,
                    node.input,
                    node.output[:1],
                    node.name,
                    domain=DOMAIN,
                    num_heads=num_heads,
                )
            )
    d_model = proto.graph.output[0].type.tensor_type.shape.dim[2].dim_value
    function = _function(d_model)
    _set_masked_to_minus_infinity(function)
    proto.functions.append(function)
    proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def _set_masked_to_minus_infinity(function: onnx.FunctionProto) -> None:
    """The language of onnx.parser has no word for infinity."""
    (branches,) = (node for node in function.node if node.op_type == "If")
    (chunked,) = (a.g for a in branches.attribute if a.name == "then_branch")
    (constant,) = (node for node in chunked.node if node.output[0] == "masked")
    value = numpy_helper.from_array(np.array(-np.inf, np.float32))
    constant.attribute[0].t.CopyFrom(value)
