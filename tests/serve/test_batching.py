"""Batches made of sequences of different lengths."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from causal_encoder.serve.batching import plan_batches

LIMIT = 4096  # positions of a batch, padding included

lengths_of_sequences = st.lists(st.integers(1, 5000), max_size=200) | st.lists(
    st.integers(1, 8), max_size=3000
)


def positions(batch: list[int], lengths: list[int]) -> int:
    return len(batch) * max(lengths[index] for index in batch)


@hypothesis.given(lengths_of_sequences)
def test_every_sequence_is_in_one_batch(lengths: list[int]) -> None:
    batches = plan_batches(lengths)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(batches)


@hypothesis.given(lengths_of_sequences)
def test_a_batch_is_bounded_or_is_a_single_sequence(lengths: list[int]) -> None:
    for batch in plan_batches(lengths):
        assert len(batch) == 1 or positions(batch, lengths) <= LIMIT


@hypothesis.given(lengths_of_sequences)
def test_lengths_never_rise_so_that_neighbours_share_a_batch(lengths: list[int]) -> None:
    order = [lengths[index] for batch in plan_batches(lengths) for index in batch]
    assert order == sorted(lengths, reverse=True)


@hypothesis.given(lengths_of_sequences)
def test_a_batch_is_closed_only_when_the_next_sequence_does_not_fit(lengths: list[int]) -> None:
    batches = plan_batches(lengths)
    for batch, following in itertools.pairwise(batches):
        assert positions([*batch, following[0]], lengths) > LIMIT


@hypothesis.given(lengths_of_sequences)
def test_the_plan_is_the_same_each_time(lengths: list[int]) -> None:
    assert plan_batches(lengths) == plan_batches(tuple(lengths))


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([], []),
        ([7], [[0]]),
        ([10**6], [[0]]),
        ([2, 9, 5], [[1, 2, 0]]),
        ([3, 3, 3], [[0, 1, 2]]),
        ([4096, 1], [[0], [1]]),
        ([2048, 2048], [[0, 1]]),
        ([2048, 2048, 2048], [[0, 1], [2]]),
        ([2049, 2048], [[0], [1]]),
        ([5000, 5000, 1], [[0], [1], [2]]),
    ],
)
def test_plans_written_by_hand(lengths: list[int], batches: list[list[int]]) -> None:
    assert plan_batches(lengths) == batches


def test_a_batch_can_be_full_to_the_last_position() -> None:
    assert [len(batch) for batch in plan_batches([1] * 4097)] == [4096, 1]
