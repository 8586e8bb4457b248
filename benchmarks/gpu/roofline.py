"""The least time a GPU needs for a forward pass: its arithmetic or its memory traffic.

Counted for the graph of `--target cuda` with pre-norm and GELU. A multiply-add is 2 FLOP.
Shapes: B batch, T sequence length, D d_model, F d_ff.
"""

import dataclasses

from causal_encoder.model import EncoderConfig

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
# One H200: what large matrix products reach of 989 TFLOP/s on tensor cores, and the stated
# peak without them, as TF32 is off; what large copies reach of 4.8 TB/s.
PEAK_FLOPS = {"fp32": 67e12, "fp16": 790e12, "bf16": 790e12}
PEAK_BYTES_PER_S = 4.3e12
# Vectors of D and of F that a token brings into and out of the kernels of a layer.
TRAFFIC_D = {
    "product with q, k and v": 1 + 3,
    "bias of q, k and v": 3 + 3,
    "split": 3 + 3,
    "attention": 3 + 1,
    "product out": 1 + 1,
    "norm with residual and sum": 2 + 2,
    "product up": 1,
    "product down": 1,
    "second norm": 2 + 2,
}
TRAFFIC_F = {"product up": 1, "activation with bias": 1 + 1, "product down": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floor:
    """The least time of a pass.

    Attributes:
        flop, moved_bytes: what it computes, and what goes to and from memory.
        floor_ms: the longer of the two at the peak rates.
        bound: "FLOP" or "bytes", whichever takes longer.
        launches: kernels of a pass, matrix products among them.
    """

    flop: int
    moved_bytes: int
    floor_ms: float
    bound: str
    launches: int


def floor(config: EncoderConfig, precision: str, batch: int, length: int) -> Floor:
    """The least time of a pass over (batch, length) ids."""
    flop = count_flop(config, batch, length)
    moved_bytes = count_bytes(config, batch, length, ELEMENT_BYTES[precision])
    compute_ms = flop / PEAK_FLOPS[precision] * 1e3
    memory_ms = moved_bytes / PEAK_BYTES_PER_S * 1e3
    return Floor(
        flop=flop,
        moved_bytes=moved_bytes,
        floor_ms=max(compute_ms, memory_ms),
        bound="FLOP" if compute_ms > memory_ms else "bytes",
        launches=10 * config.num_layers + 4 + (precision != "fp32"),
    )


def count_flop(config: EncoderConfig, batch: int, length: int) -> int:
    """Matrix products and causal attention, which computes the lower triangle alone."""
    width, inner = config.d_model, config.d_ff
    products = 2 * (4 * width * width + 2 * width * inner) * batch * length
    attention = 4 * width * batch * length * (length + 1) // 2
    return config.num_layers * (products + attention)


def count_bytes(config: EncoderConfig, batch: int, length: int, element_bytes: int) -> int:
    """Weights once, what goes between kernels, and both ends; nothing of it kept in a cache."""
    width, inner, tokens = config.d_model, config.d_ff, batch * length
    weights = config.num_layers * (4 * width * width + 2 * width * inner + 9 * width + inner)
    between = config.num_layers * (
        sum(TRAFFIC_D.values()) * width + sum(TRAFFIC_F.values()) * inner
    )
    # Ids; embedding, positions and their sum; first and last norm; the float32 result.
    ends = tokens * (8 + element_bytes * width * (2 + 2 + 2 + 1) + 4 * width)
    return element_bytes * (weights + length * width + tokens * between) + ends
