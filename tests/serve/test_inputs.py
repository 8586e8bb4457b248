"""What a session takes and refuses: V = 37, L = 24, D = 12.

Every test goes through EncoderSession; nothing that is refused may reach ONNX Runtime.
"""

import array
import warnings
from collections import UserList, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from causal_encoder.errors import (
    CausalEncoderError,
    EmptySequenceError,
    InputError,
    InvalidInputError,
    SequenceTooLongError,
    TokenOutOfRangeError,
)
from causal_encoder.serve import EncoderSession
from tests.bundles import reseal

Reference = Callable[[object], npt.NDArray[np.float32]]

IDS = [[3, 1, 4, 1, 5, 9], [2, 6, 5, 36, 0, 8]]
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def refused(error: type[InputError], call: Callable[[Any], object], ids: Any) -> str:
    """The reason of a refusal: one line of the class that was announced."""
    with pytest.raises(InputError) as caught:
        call(ids)
    assert type(caught.value) is error
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, CausalEncoderError)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Taken.


@pytest.mark.parametrize("order", ["<", ">"], ids=["little-endian", "big-endian"])
@pytest.mark.parametrize("kind", INTEGERS)
def test_every_integer_type_and_byte_order_gives_the_same_numbers(
    session: EncoderSession, reference: Reference, kind: str, order: str
) -> None:
    ids = np.array(IDS).astype(order + np.dtype(kind).str[1:])
    hidden = session.run(ids)
    assert hidden.dtype == np.float32
    assert hidden.shape == (2, 6, 12)
    np.testing.assert_allclose(hidden, reference(IDS), atol=1e-5)
    for row, expected in zip(session.encode(list(ids)), reference(IDS), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-5)


def _memory_mapped(folder: Path) -> npt.NDArray[Any]:
    np.save(folder / "ids.npy", np.array(IDS))
    mapped: npt.NDArray[Any] = np.load(folder / "ids.npy", mmap_mode="r")
    return mapped


def _read_only() -> npt.NDArray[Any]:
    ids = np.array(IDS)
    ids.flags.writeable = False
    return ids


def _unaligned() -> npt.NDArray[Any]:
    content = b"x" + np.array(IDS).tobytes()
    ids = np.frombuffer(content, np.dtype(np.int64), offset=1).reshape(2, 6)
    assert not ids.flags.aligned
    return ids


LAYOUTS: dict[str, Callable[[Path], Any]] = {
    "strided": lambda _: np.repeat(np.array(IDS), 3, axis=1)[:, ::3],
    "reversed": lambda _: np.array(IDS)[:, ::-1].copy()[:, ::-1],
    "transposed": lambda _: np.ascontiguousarray(np.array(IDS).T).T,
    "Fortran order": lambda _: np.asfortranarray(IDS),
    "read-only": lambda _: _read_only(),
    "unaligned": lambda _: _unaligned(),
    "memory-mapped": _memory_mapped,
    "lists": lambda _: IDS,
    "tuples": lambda _: tuple(map(tuple, IDS)),
    "list of tuples": lambda _: [tuple(row) for row in IDS],
    "list of arrays": lambda _: [np.array(row, np.uint8) for row in IDS],
    "array of bytes": lambda _: np.frombuffer(bytes(IDS[0] + IDS[1]), np.uint8).reshape(2, 6),
    "list of array.array": lambda _: [array.array("H", row) for row in IDS],
    "list of memoryviews": lambda _: [memoryview(array.array("i", row)) for row in IDS],
    "deques": lambda _: deque(map(deque, IDS)),
    "UserLists": lambda _: UserList(map(UserList, IDS)),
    "NumPy scalars": lambda _: [[np.int16(i) for i in row] for row in IDS],
    "torch tensor": lambda _: torch.tensor(IDS, dtype=torch.int32),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_in_memory_does_not_matter(
    session: EncoderSession, reference: Reference, tmp_path: Path, layout: str
) -> None:
    ids = LAYOUTS[layout](tmp_path)
    np.testing.assert_allclose(session.run(ids), reference(IDS), atol=1e-5)
    for row, expected in zip(session.encode(list(ids)), reference(IDS), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_the_callers_array_is_left_as_it_was(session: EncoderSession) -> None:
    ids = np.array(IDS)
    session.run(ids)
    session.encode(list(ids))
    assert ids.tolist() == IDS
    assert ids.flags.writeable


@pytest.mark.parametrize("length", [1, 2, 23, 24])
def test_every_length_up_to_max_len_is_taken(
    session: EncoderSession, reference: Reference, length: int
) -> None:
    ids = np.arange(2 * length).reshape(2, length) % 37
    np.testing.assert_allclose(session.run(ids), reference(ids), atol=1e-5)


def test_the_first_and_the_last_id_are_taken(session: EncoderSession) -> None:
    first, last = session.run([[0], [36]])
    assert not np.allclose(first, last)


@pytest.mark.parametrize("length", [1, 24])
@pytest.mark.parametrize("kind", ["int64", "uint8", ">i2"])
def test_an_empty_batch_gives_an_empty_result(
    session: EncoderSession, length: int, kind: str
) -> None:
    hidden = session.run(np.zeros((0, length), kind))
    assert hidden.shape == (0, length, 12)
    assert hidden.dtype == np.float32


# Refused: type and rank.


class Items:
    """A sequence to NumPy, though it is of no class that Python knows as one."""

    def __init__(self, *items: object) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        return self.items[index]


WRONG_TYPES: dict[str, tuple[Any, str]] = {
    "float64": (np.array(IDS, np.float64), "float64"),
    "float32": (np.array(IDS, np.float32), "float32"),
    "whole floats in a list": ([[1.0, 2.0]], "float64"),
    "one float among integers": ([[1, 2.0]], "float64"),
    "complex": (np.array([[1j]]), "complex128"),
    "bool": (np.array([[True, False]]), "bool"),
    "bools in a list": ([[True, False]], "bool"),
    "a bool among integers": ([[5, True]], "bool"),
    "a NumPy bool among integers": ([[5, np.True_]], "bool"),
    "a bool in a later row": ([[5, 6], [7, False]], "bool"),
    "a bool in a tuple": (((5, True),), "bool"),
    "a row of bools beside a row of integers": ([np.array([True]), np.array([1])], "bool"),
    "a bool in a deque": ([deque([5, True])], "bool"),
    "a bool in a deque of deques": (deque([deque([5]), deque([False])]), "bool"),
    "a bool in a UserList": (UserList([UserList([5, True])]), "bool"),
    "a bool in a class with items": ([Items(5, True)], "bool"),
    "a bool in an array of another library": ([[torch.tensor(True), 5]], "bool"),
    "strings": ([["5", "9"]], "U1"),
    "an array of strings": (np.array([["5"]]), "U1"),
    "bytes in a list": ([[b"5"]], "S1"),
    "None in a list": ([[1, None]], "object"),
    "an array of objects": (np.array([[1, 2]], object), "object"),
    "dates": (np.zeros((1, 1), "M8[s]"), "datetime64"),
    "durations": (np.zeros((1, 1), "m8[s]"), "timedelta64"),
    "records": (np.zeros((1, 1), "i4,i4"), "i4"),
    "an empty array of floats": (np.zeros((0, 3)), "float64"),
    "floats of no length": (np.zeros((3, 0)), "float64"),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_what_is_not_integers_is_refused_by_its_type(session: EncoderSession, case: str) -> None:
    ids, named = WRONG_TYPES[case]
    message = refused(InvalidInputError, session.run, ids)
    assert named in message
    assert "expected integers" in message


@pytest.mark.parametrize("case", [case for case in WRONG_TYPES if "empty" not in case])
def test_encode_refuses_the_same_types_and_names_the_row(
    session: EncoderSession, case: str
) -> None:
    ids, named = WRONG_TYPES[case]
    message = refused(InvalidInputError, session.encode, list(ids))
    assert named in message
    assert message.startswith("sequence ")


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (None, "NoneType"),
        ("5 9 2", "str"),
        (b"592", "bytes"),
        ({1, 2}, "object"),
        ({0: [1]}, "object"),
        (object(), "object"),
        (len, "object"),
        ((i for i in [[1]]), "object"),
    ],
    ids=["None", "str", "bytes", "set", "dict", "object", "function", "generator"],
)
def test_what_is_no_array_at_all_is_refused(session: EncoderSession, ids: Any, named: str) -> None:
    message = refused(InvalidInputError, session.run, ids)
    assert named in message
    assert "expected integers" in message


BYTES: tuple[Any, ...] = (b"59", bytearray(b"59"), memoryview(b"59"))


@pytest.mark.parametrize("content", BYTES, ids=lambda value: type(value).__name__)
def test_bytes_of_text_are_not_ids(session: EncoderSession, content: Any) -> None:
    for ids in (content, [content]):
        message = refused(InvalidInputError, session.run, ids)
        assert "expected integers" in message
    message = refused(InvalidInputError, session.encode, [[1], content])
    assert message.startswith("sequence 1: ")
    assert type(content).__name__ in message
    assert session.run([np.frombuffer(b"\5\11", np.uint8)]).shape == (1, 2, 12), "the remedy"


def test_a_mask_is_refused_and_not_lost(session: EncoderSession, reference: Reference) -> None:
    ids = np.ma.masked_array(np.array(IDS), np.array([[0, 0, 0, 0, 1, 1], [0] * 6]))
    for form in (ids, list(ids), [ids[1], ids[0]]):
        for call in (session.run, session.encode):
            message = refused(InvalidInputError, call, form)
            assert "mask" in message
            assert "filled" in message
    np.testing.assert_allclose(
        session.run(ids.filled(0))[0, :4], reference([IDS[0][:4]])[0], atol=1e-5
    )


@pytest.mark.parametrize(
    ("ids", "shape"),
    [
        (5, "()"),
        (np.int64(5), "()"),
        (2**70, "()"),
        (deque(), "(0,)"),
        ([1, 2, 3], "(3,)"),
        (np.arange(3), "(3,)"),
        ([[[1]]], "(1, 1, 1)"),
        (np.zeros((2, 3, 4), int), "(2, 3, 4)"),
        (np.zeros((0, 3, 4), int), "(0, 3, 4)"),
        ([], "(0,)"),
        ((), "(0,)"),
        (np.zeros(0, int), "(0,)"),
        (np.zeros((1,) * 20, int), "(1, 1,"),
    ],
    ids=repr,
)
def test_another_number_of_axes_than_two_is_refused_by_shape(
    session: EncoderSession, ids: Any, shape: str
) -> None:
    message = refused(InvalidInputError, session.run, ids)
    assert f"shape {shape}" in message
    assert "two axes" in message


def test_rows_of_different_lengths_are_sent_to_encode(session: EncoderSession) -> None:
    for ids in ([[1, 2], [3]], [[1], 2], [[1], [[2]]], [[], [1]], [np.arange(2), np.arange(3)]):
        assert "encode" in refused(InvalidInputError, session.run, ids)


def test_lists_nested_without_end_are_refused(session: EncoderSession) -> None:
    deep: list[Any] = [1]
    for _ in range(3000):
        deep = [deep]
    endless: list[Any] = []
    endless.append(endless)
    for ids in (deep, endless):
        refused(InvalidInputError, session.run, ids)
        refused(InvalidInputError, session.encode, ids)


def test_an_object_that_fails_to_become_an_array_is_refused_with_its_reason(
    session: EncoderSession,
) -> None:
    class Broken:
        def __array__(self, dtype: object = None, copy: object = None) -> object:
            raise RuntimeError("lives on another device\nand more")

    message = refused(InvalidInputError, session.run, Broken())
    assert "lives on another device" in message


# Refused: empty, too long, out of range.


@pytest.mark.parametrize(
    "ids", [[[]], [[], []], ((),), np.zeros((3, 0), int), np.zeros((0, 0), np.uint8)], ids=repr
)
def test_sequences_without_tokens_are_refused(session: EncoderSession, ids: Any) -> None:
    assert "0 tokens" in refused(EmptySequenceError, session.run, ids)


@pytest.mark.parametrize("length", [25, 26, 48, 5000])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_sequence_over_max_len_is_refused_with_both_numbers_and_the_remedy(
    session: EncoderSession, batch: int, length: int
) -> None:
    ids = np.zeros((batch, length), np.int64)
    message = refused(SequenceTooLongError, session.run, ids)
    for part in (str(length), "max_len 24", "sinusoidal", "--max-len", "truncate"):
        assert part in message


def test_a_learned_table_cannot_be_made_longer_and_the_message_does_not_offer_it(
    copy: Path, session: EncoderSession
) -> None:
    reseal(copy, config={**session.manifest.config, "position": "learned"})
    learned = EncoderSession(copy, "cpu")
    message = refused(SequenceTooLongError, learned.run, np.zeros((1, 25), int))
    assert "learned" in message
    assert "--max-len" not in message


@pytest.mark.parametrize(
    "token", [-1, -37, -(2**31), -(2**63), 37, 38, 255, 2**31, 2**40, 2**63 - 1]
)
@pytest.mark.parametrize(("row", "column"), [(0, 0), (1, 2), (2, 4)])
def test_an_id_out_of_range_is_refused_with_its_place(
    session: EncoderSession, token: int, row: int, column: int
) -> None:
    ids = np.full((3, 5), 7, np.int64)
    ids[row, column] = token
    for form in (ids, ids.tolist(), ids.astype(">i8")):
        message = refused(TokenOutOfRangeError, session.run, form)
        assert f"id {token} at (row {row}, column {column}) is outside 0..36" in message
        message = refused(TokenOutOfRangeError, session.encode, list(form))
        assert f"id {token} at (row {row}, column {column}) is outside 0..36" in message


@pytest.mark.parametrize("token", [37, 2**63, 2**63 + 5, 2**64 - 1, 2**64 - 37])
def test_an_unsigned_id_is_not_wrapped_around(session: EncoderSession, token: int) -> None:
    ids = np.array([[1, token]], np.uint64)
    for form in (ids, ids.astype(">u8")):
        message = refused(TokenOutOfRangeError, session.run, form)
        assert f"id {token} at (row 0, column 1)" in message
        message = refused(TokenOutOfRangeError, session.encode, list(form))
        assert f"id {token} at (row 0, column 1)" in message


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_the_largest_number_of_a_narrow_type_is_not_wrapped_around(
    session: EncoderSession, kind: str
) -> None:
    for token in (np.iinfo(kind).min, np.iinfo(kind).max):
        if token == 0:
            continue
        message = refused(TokenOutOfRangeError, session.run, np.array([[token]], kind))
        assert f"id {token} at" in message


@pytest.mark.parametrize(
    "row",
    [[1, 2**63], [2**64], [1, 2**70], [-(2**63) - 1], [-1, 2**63], [2**63, -1, 5], [10**400]],
    ids=lambda row: " ".join(f"{token:.4g}" if token < 2**99 else "huge" for token in row),
)
def test_an_integer_too_large_for_any_array_is_out_of_range_too(
    session: EncoderSession, row: list[int]
) -> None:
    first = next(i for i in row if not 0 <= i < 37)
    for call in (session.run, session.encode):
        message = refused(TokenOutOfRangeError, call, [row])
        assert f"id {first} at (row 0, column {row.index(first)})" in message


def test_the_first_bad_id_in_reading_order_is_named(session: EncoderSession) -> None:
    message = refused(TokenOutOfRangeError, session.run, [[1, 2, 3], [4, 40, -1]])
    assert "id 40 at (row 1, column 1)" in message


@pytest.mark.parametrize("ids", [[[99]], [[-1]], np.zeros((1, 25), int), [[]], None], ids=repr)
def test_after_a_refusal_the_session_works_on(
    session: EncoderSession, reference: Reference, ids: Any
) -> None:
    with pytest.raises(InputError):
        session.run(ids)
    np.testing.assert_allclose(session.run(IDS), reference(IDS), atol=1e-5)


# The order of the checks: type, rank, T = 0, T > max_len, ids.


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (np.zeros((1, 25)), InvalidInputError),
        (np.zeros((1, 0)), InvalidInputError),
        (np.full((1, 3), -1.0), InvalidInputError),
        (np.full(3, -1), InvalidInputError),
        (np.zeros((1, 25, 0), int), InvalidInputError),
        (np.zeros((0, 0), int), EmptySequenceError),
        (np.full((1, 25), -1), SequenceTooLongError),
        (np.full((1, 25), 37), SequenceTooLongError),
        (np.zeros((0, 25), int), SequenceTooLongError),
        (np.full((1, 24), 37), TokenOutOfRangeError),
    ],
)
def test_the_checks_are_made_in_the_documented_order(
    session: EncoderSession, ids: npt.NDArray[Any], error: type[InputError]
) -> None:
    refused(error, session.run, ids)


@pytest.mark.parametrize(
    ("rows", "error", "named"),
    [
        ([[99], [0] * 25, [], [1.5]], InvalidInputError, "sequence 3"),
        ([[99], [0] * 25, [], [[1]]], InvalidInputError, "sequence 3"),
        ([[99], [0] * 25, []], EmptySequenceError, "sequence 2"),
        ([[99], [0] * 25], SequenceTooLongError, "25"),
        ([[5], [99]], TokenOutOfRangeError, "row 1"),
    ],
)
def test_encode_makes_each_check_over_all_rows_before_the_next(
    session: EncoderSession, rows: list[Any], error: type[InputError], named: str
) -> None:
    assert named in refused(error, session.encode, rows)


# Rows of different lengths.


def test_one_row_for_encode_is_told_from_a_list_of_them(session: EncoderSession) -> None:
    assert "as in encode([[5, 9], [7]])" in refused(InvalidInputError, session.encode, [5, 9])


def test_a_row_that_is_nested_too_deep_is_not_sent_where_it_came_from(
    session: EncoderSession,
) -> None:
    said = refused(InvalidInputError, session.encode, [[[1, 2], [3]]])
    assert said.startswith("sequence 0: ids are not a rectangular array")
    assert said.endswith("; pass a flat list of ids for each sequence")


def test_rows_of_different_lengths_are_for_encode(session: EncoderSession) -> None:
    assert refused(InvalidInputError, session.run, [[5, 9], [7]]) == (
        "ids are not a rectangular array of integers (their rows differ in length); pass rows of "
        "different lengths to encode"
    )


def test_encode_equals_running_each_row_alone_in_the_order_given(
    session: EncoderSession, reference: Reference
) -> None:
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 37, length) for length in generator.integers(1, 25, 60)]
    results = session.encode(rows)
    assert len(results) == len(rows)
    for row, hidden in zip(rows, results, strict=True):
        assert hidden.shape == (len(row), 12)
        assert hidden.dtype == np.float32
        np.testing.assert_allclose(hidden, session.run([row])[0], atol=1e-5)
        np.testing.assert_allclose(hidden, reference([row])[0], atol=1e-5)


def test_encode_of_more_rows_than_one_batch_holds(
    session: EncoderSession, reference: Reference
) -> None:
    rows = [[i % 37] * (1 + i % 24) for i in range(700)]
    for row, hidden in zip(rows, session.encode(rows), strict=True):
        np.testing.assert_allclose(hidden, reference([row])[0], atol=1e-5)


@pytest.mark.parametrize("rows", [[], (), np.zeros((0, 5), np.int64)], ids=repr)
def test_encode_of_nothing_is_nothing(session: EncoderSession, rows: Any) -> None:
    assert session.encode(rows) == []


def test_encode_of_one_row_as_long_as_it_may_be(
    session: EncoderSession, reference: Reference
) -> None:
    (hidden,) = session.encode([list(range(24))])
    np.testing.assert_allclose(hidden, reference([list(range(24))])[0], atol=1e-5)


def test_encode_takes_any_iterable_and_rows_of_mixed_kinds(
    session: EncoderSession, reference: Reference
) -> None:
    rows: tuple[Any, ...] = (
        [1, 2],
        (3,),
        np.array([4, 5, 6], ">u2"),
        range(7),
        torch.tensor([8, 9]),
        np.arange(20)[::2],
    )
    once: Any = iter(rows)
    for row, hidden in zip(rows, session.encode(once), strict=True):
        np.testing.assert_allclose(hidden, reference([list(row)])[0], atol=1e-5)


def test_results_are_arrays_of_their_own(session: EncoderSession) -> None:
    rows = session.encode([[1, 2, 3], [1, 2, 3], [4]])
    assert not any(np.shares_memory(rows[i], rows[j]) for i in range(3) for j in range(i))
    for row in rows:
        assert row.flags.owndata, "a view would keep the padded batch alive"
    rows[0][:] = 0
    np.testing.assert_array_equal(rows[1], session.encode([[1, 2, 3]])[0])
    first = session.run([[1, 2]])
    first[:] = 0
    assert session.run([[1, 2]]).any()


@pytest.mark.parametrize("empty", [[], (), np.zeros(0, np.int64), deque(), range(0)], ids=repr)
def test_an_empty_row_is_named(session: EncoderSession, empty: Any) -> None:
    message = refused(EmptySequenceError, session.encode, [[1], [2, 3], empty, [4]])
    assert "sequence 2" in message


@pytest.mark.parametrize("row", [5, [[1, 2]], np.zeros((2, 2), int), np.int64(3)], ids=repr)
def test_a_row_that_is_not_one_sequence_is_named_by_its_shape(
    session: EncoderSession, row: Any
) -> None:
    message = refused(InvalidInputError, session.encode, [[1], row])
    assert "sequence 1" in message
    assert f"shape {np.asarray(row).shape}" in message


@pytest.mark.parametrize("rows", [None, 5, "5 9", b"59", np.array(3)], ids=repr)
def test_rows_that_are_no_list_are_refused(session: EncoderSession, rows: Any) -> None:
    refused(InvalidInputError, session.encode, rows)


@pytest.mark.parametrize("row", [None, "5 9", b"59", [1, None], [[1], [2, 3]]], ids=repr)
def test_a_row_that_is_no_sequence_of_ids_is_named(session: EncoderSession, row: Any) -> None:
    message = refused(InvalidInputError, session.encode, [[1], row])
    assert message.startswith("sequence 1: ")


# overflow="truncate".


@pytest.mark.parametrize("length", [25, 30, 1000])
def test_truncating_keeps_the_first_max_len_tokens_and_warns_where_it_was_called(
    cutting_session: EncoderSession, reference: Reference, length: int
) -> None:
    ids = np.arange(2 * length).reshape(2, length) % 37
    with pytest.warns(UserWarning, match=f"{length} tokens was cut to its first 24") as caught:
        hidden = cutting_session.run(ids)
    np.testing.assert_allclose(hidden, reference(ids[:, :24]), atol=1e-5)
    assert [warning.filename for warning in caught] == [__file__]


def test_truncating_rows_warns_for_each_that_was_cut_where_it_was_called(
    cutting_session: EncoderSession, reference: Reference
) -> None:
    rows = [[1, 2], list(range(30)), [3], list(range(26))]
    with pytest.warns(UserWarning, match="was cut") as caught:
        results = cutting_session.encode(rows)
    assert [len(hidden) for hidden in results] == [2, 24, 1, 24]
    for row, hidden in zip(rows, results, strict=True):
        np.testing.assert_allclose(hidden, reference([row[:24]])[0], atol=1e-5)
    assert [warning.filename for warning in caught] == [__file__, __file__]
    assert ["30" in str(caught[0].message), "26" in str(caught[1].message)] == [True, True]


def test_nothing_is_said_when_nothing_is_cut(cutting_session: EncoderSession) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cutting_session.run(np.zeros((1, 24), int)).shape == (1, 24, 12)
        assert len(cutting_session.encode([[1], [0] * 24])) == 2


def test_an_id_that_was_cut_off_is_not_looked_at(cutting_session: EncoderSession) -> None:
    ids = np.zeros((1, 25), int)
    ids[0, 24] = 99
    with pytest.warns(UserWarning, match="was cut"):
        assert cutting_session.run(ids).shape == (1, 24, 12)


def test_truncating_lets_no_other_mistake_pass(cutting_session: EncoderSession) -> None:
    ids = np.zeros((1, 25), int)
    ids[0, 23] = 99
    with pytest.warns(UserWarning, match="was cut"):
        message = refused(TokenOutOfRangeError, cutting_session.run, ids)
    assert "column 23" in message
    refused(InvalidInputError, cutting_session.run, np.zeros((1, 25)))
    refused(EmptySequenceError, cutting_session.run, [[]])


def test_an_empty_batch_is_cut_too(cutting_session: EncoderSession) -> None:
    with pytest.warns(UserWarning, match="was cut"):
        assert cutting_session.run(np.zeros((0, 25), int)).shape == (0, 24, 12)
