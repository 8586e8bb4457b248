"""The shapes that CUDA graphs are captured for; graphs.py captures and replays them."""

Shape = tuple[int, int]  # batch, sequence length

MIN_LENGTH = 16
# With more, computing the padding costs more than launching: by the peak of an H200, 4096
# tokens through a layer of width 512 take some 35 microseconds, as 10 launches take 20 to 30.
MAX_TOKENS = 4096
# A bucket keeps its activations as long as the session: ONNX Runtime drops no CUDA graph.
MAX_BUCKETS = 32


def bucket_of(shape: Shape, max_len: int) -> Shape | None:
    """The shape that a batch is padded to: powers of two, T from 16 to L.

    None if it is too large for a graph to pay, see MAX_TOKENS.
    """
    rows, length = map(_power_of_two, shape)
    bucket = rows, min(max(length, MIN_LENGTH), max_len)
    return bucket if bucket[0] * bucket[1] <= MAX_TOKENS else None


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least the number."""
    return 1 << (number - 1).bit_length()
