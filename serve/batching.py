"""Grouping sequences of different lengths into batches with little padding."""

from collections.abc import Sequence

# A batch of this many positions already keeps two cores busy; a larger one only needs
# more memory, and a longer longest row.
_BATCH_TOKENS = 4096


def plan_batches(lengths: Sequence[int]) -> list[list[int]]:
    """Sort by length and cut the order into batches.

    Args:
        lengths: number of tokens of each sequence.

    Returns:
        Indices into `lengths`, each exactly once, longest sequences first. A batch has at
        most 4096 positions, padding included, or is a single sequence.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        if not batches or (len(batches[-1]) + 1) * longest > _BATCH_TOKENS:
            batches.append([])
        batches[-1].append(index)
    return batches
