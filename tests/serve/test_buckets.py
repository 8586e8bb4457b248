"""Buckets: which shape is padded to which, by the rule that the README states."""

import pytest

from causal_encoder.serve.buckets import MAX_TOKENS, Shape, bucket_of


@pytest.mark.parametrize(
    ("shape", "max_len", "bucket"),
    [
        ((1, 1), 1024, (1, 16)),
        ((1, 16), 1024, (1, 16)),
        ((1, 17), 1024, (1, 32)),
        ((3, 100), 1024, (4, 128)),
        ((1, 600), 1000, (1, 1000)),
        ((1, 1000), 1000, (1, 1000)),
        ((5, 3), 9, (8, 9)),
        ((1, 1), 1, (1, 1)),
        ((4, 1024), 1024, (4, 1024)),
        ((5, 1024), 1024, None),
        ((8, 513), 4096, None),
    ],
)
def test_a_bucket_is_the_next_power_of_two_up_to_max_len(
    shape: Shape, max_len: int, bucket: Shape | None
) -> None:
    assert bucket_of(shape, max_len) == bucket


def test_a_bucket_has_room_and_wastes_less_than_three_quarters() -> None:
    for batch in range(1, 40):
        for length in range(16, 300):
            bucket = bucket_of((batch, length), 300)
            if bucket is None:
                assert 4 * batch * length > MAX_TOKENS
                continue
            assert bucket[0] >= batch
            assert length <= bucket[1] <= 300
            assert bucket[0] * bucket[1] < 4 * batch * length
