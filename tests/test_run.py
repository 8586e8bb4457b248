"""Reading ids and writing hidden vectors for the `run` command."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from causal_encoder import run as road
from causal_encoder.errors import CausalEncoderError, InvalidInputError
from causal_encoder.serve import EncoderSession

Hidden = npt.NDArray[np.float32]


def refused(path: Path) -> str:
    """The reason why ids are not read, which is one line and names the file."""
    with pytest.raises(InvalidInputError) as caught:
        road.read_rows(str(path))
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


# --ids.


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("5 9 2", [5, 9, 2]),
        ("5,9,2", [5, 9, 2]),
        (" 5,\t9 ,\n2, ", [5, 9, 2]),
        ("7", [7]),
        ("-1 +2", [-1, 2]),
        ("007", [7]),
        (str(2**70), [2**70]),
        ("", []),
        (" , ", []),
    ],
)
def test_ids_are_words_between_spaces_or_commas(text: str, ids: list[int]) -> None:
    assert road.parse_ids(text) == [ids]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("5 x 2", "x"),
        ("1.5", "1.5"),
        ("1e3", "1e3"),
        ("0x10", "0x10"),
        ("5 - 2", "-"),
        ("[5", "[5"),
        ("5;9", "5;9"),
        ("None", "None"),
        ("nan", "nan"),
        ("--5", "--5"),
        ("+-5", "+-5"),
        ("5 ²", "²"),
        ("1_0 x", "1_0"),
        ("½", "½"),
    ],
)
def test_the_first_word_that_is_no_whole_number_is_named(text: str, word: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        road.parse_ids(text)
    assert repr(word) in str(caught.value)
    assert "whole numbers" in str(caught.value)


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        road.parse_ids("1" * 5000)


# .npy.


@pytest.mark.parametrize("kind", ["int64", "int32", "uint8", ">i4", "<u2"])
def test_an_array_is_read_as_it_is(tmp_path: Path, kind: str) -> None:
    ids = np.array([[1, 2], [3, 4]], kind)
    np.save(tmp_path / "ids.npy", ids)
    rows = road.read_rows(str(tmp_path / "ids.npy"))
    assert rows.dtype == ids.dtype
    np.testing.assert_array_equal(rows, ids)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickled_objects_are_refused_and_never_run(tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "exploded")
    np.save(tmp_path / "array.npy", np.array([bomb], object), allow_pickle=True)
    (tmp_path / "plain.npy").write_bytes(pickle.dumps(bomb))
    for name in ("array.npy", "plain.npy"):
        assert "not an array of integers" in refused(tmp_path / name)
    assert not (tmp_path / "exploded").exists()


def test_an_array_cut_at_any_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(12).reshape(3, 4))
    content = path.read_bytes()
    for length in [*range(0, 130, 3), *range(130, len(content), 10), len(content) - 1]:
        path.write_bytes(content[:length])
        refused(path)


def _npy(header: str) -> bytes:
    padded = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + bytes(96)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"[[1, 2]]\n",
        b"\x93NUMPY",
        b"\x93NUMPY\x09\x00",
        _npy(""),
        _npy("{"),
        _npy("("),
        _npy("1"),
        _npy("{'descr': '<i8', 'fortran_order': False}"),
        _npy("{'descr': ',i8', 'fortran_order': False, 'shape': (3, 4)}"),
        _npy("{'descr': '<08', 'fortran_order': False, 'shape': (3, 4)}"),
        _npy("{'descr': '|O', 'fortran_order': False, 'shape': (3, 4)}"),
        _npy("{'descr': '<i8', B'fortran_order': False, 'shape': (3, 4)}"),
        _npy("{'descr': '<i8', 'fortran_order': False, 'shape': (-3, 4)}"),
        _npy("{'descr': '<i8', 'fortran_order': False, 'shape': (3, 5)}"),
        _npy("{'descr': '<i8', 'fortran_order': False, 'shape': (10**9, 4)}"),
        _npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,)}"),
        _npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000000000,)}"),
        _npy("{'descr': '<i8', 'fortran_order': False, 'shape': (4294967296, 4294967296)}"),
    ],
    ids=lambda content: repr(content[10:80].decode("latin1").strip() or content[:10]),
)
def test_a_damaged_array_is_refused_whatever_it_makes_numpy_raise(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "ids.npy").write_bytes(content)
    refused(tmp_path / "ids.npy")


@pytest.mark.filterwarnings("ignore")  # NumPy on odd headers
def test_an_array_with_any_byte_of_its_header_changed_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(12).reshape(3, 4))
    content = path.read_bytes()
    escaped = set()
    for position in range(75):  # then come spaces
        for value in (0, 40, 44, 48, 66, 92, content[position] ^ 1):
            damaged = bytearray(content)
            damaged[position] = value
            path.write_bytes(damaged)
            try:
                road.read_rows(str(path))
            except CausalEncoderError:
                pass
            except Exception as error:  # noqa: BLE001  # each kind is shown below
                escaped.add(type(error).__name__)
    assert escaped == set()


def test_an_archive_of_arrays_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", ids=np.array([[1, 2]]))
    path = (tmp_path / "ids.npz").rename(tmp_path / "ids.npy")
    refused(path)


# JSON lines.


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("[5, 9]\n[7]\n", [[5, 9], [7]]),
        ("[5, 9]\n[7]", [[5, 9], [7]]),
        ("[5, 9]\r\n[7]\r\n", [[5, 9], [7]]),
        ("\n[5]\n\n  \n[7]\n\n", [[5], [7]]),
        ("  [5]  \n", [[5]]),
        ("[]\n", [[]]),
        ("", []),
        ("\n\n", []),
        ("[1.5, true, null]\n", [[1.5, True, None]]),  # the session refuses what is inside
    ],
)
def test_a_line_is_a_row(tmp_path: Path, text: str, rows: list[Any]) -> None:
    (tmp_path / "ids.jsonl").write_bytes(text.encode())
    assert road.read_rows(str(tmp_path / "ids.jsonl")) == rows


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("5 9", "not JSON"),
        ("[5, 9", "not JSON"),
        ("[5,]", "not JSON"),
        ("[5] [9]", "not JSON"),
        ("['5']", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[" + "1" * 5000 + "]", "not JSON"),
        ("5", "not a list"),
        ("null", "not a list"),
        ("true", "not a list"),
        ('"5 9"', "not a list"),
        ('{"ids": [5]}', "not a list"),
    ],
    ids=lambda text: text[:12],
)
def test_a_line_that_is_no_list_is_named_by_its_number(
    tmp_path: Path, line: str, reason: str
) -> None:
    (tmp_path / "ids.jsonl").write_text(f"[1]\n\n{line}\n[2]\n")
    message = refused(tmp_path / "ids.jsonl")
    assert "line 3" in message
    assert reason in message


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_bytes(b"[1]\n\xff\xfe\n")
    assert "utf-8" in refused(tmp_path / "ids.jsonl")


@pytest.mark.parametrize("name", ["ids.npy", "ids.jsonl", "ids"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    assert "No such file" in refused(tmp_path / name)
    assert "No such file" in refused(tmp_path / "missing" / name)


@pytest.mark.parametrize("name", ["ids.npy", "ids.jsonl"])
def test_a_folder_is_not_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    refused(tmp_path / name)


@pytest.mark.parametrize("name", ["ids.npy", "ids.jsonl"])
def test_a_path_with_a_zero_byte_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError):
        road.read_rows(f"a\0{name}")


def test_standard_input_is_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("[5, 9]\n[7]\n"))
    assert road.read_rows("-") == [[5, 9], [7]]


@pytest.mark.parametrize("content", [b"[1]\n5\n", b"[1]\nx\n", b"\xff\n"], ids=repr)
def test_a_mistake_on_standard_input_is_told_of_standard_input(
    monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    with pytest.raises(InvalidInputError, match="standard input"):
        road.read_rows("-")


# Running.


class Session:
    """Stands in for a session: the vector of a token is the token, four times."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def run(self, ids: Any) -> Hidden:
        self.calls.append("run")
        return np.repeat(np.asarray(ids, np.float32)[..., None], 4, axis=-1)

    def encode(self, rows: Any) -> list[Hidden]:
        self.calls.append("encode")
        return [np.repeat(np.asarray(row, np.float32)[:, None], 4, axis=1) for row in rows]


def encode(rows: Any) -> Any:
    session: Any = Session()
    found: EncoderSession = session
    return road.encode(found, rows)


@pytest.mark.parametrize("rows", [[[1, 2], [3, 4]], np.array([[1, 2], [3, 4]])], ids=type)
def test_rows_of_one_length_come_back_as_one_array(rows: Any) -> None:
    hidden = encode(rows)
    assert isinstance(hidden, np.ndarray)
    assert hidden.shape == (2, 2, 4)
    assert hidden[:, :, 0].tolist() == [[1, 2], [3, 4]]


def test_rows_of_different_lengths_come_back_one_by_one() -> None:
    hidden = encode([[1, 2], [3]])
    assert [row.shape for row in hidden] == [(2, 4), (1, 4)]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (4,), (2, 3, 4), ()])
def test_an_array_that_is_no_list_of_rows_is_left_to_the_session(shape: tuple[int, ...]) -> None:
    session: Any = Session()
    road.encode(session, np.zeros(shape, np.int64))
    assert session.calls == ["run"]


# Writing.


def test_an_array_is_written_as_npy_bit_for_bit(tmp_path: Path) -> None:
    hidden = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    road.write_hidden(hidden, tmp_path / "hidden.npy")
    again = np.load(tmp_path / "hidden.npy")
    assert again.dtype == np.float32
    np.testing.assert_array_equal(again, hidden)


@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "rectangular"])
def test_json_lines_are_one_row_a_line_bit_for_bit(tmp_path: Path, ragged: bool) -> None:
    generator = np.random.default_rng(0)
    lengths = (3, 1, 2) if ragged else (2, 2, 2)
    rows = [generator.normal(size=(n, 4)).astype(np.float32) for n in lengths]
    road.write_hidden(rows if ragged else np.stack(rows), tmp_path / "hidden.jsonl")
    lines = (tmp_path / "hidden.jsonl").read_text().splitlines()
    assert len(lines) == 3
    for line, row in zip(lines, rows, strict=True):
        np.testing.assert_array_equal(np.array(json.loads(line), np.float32), row)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.1, "0.1"),
        (1 / 3, "0.33333334"),
        (-2, "-2.0"),
        (1e-45, "1e-45"),
        (3.4028235e38, "3.4028235e+38"),
    ],
)
def test_a_number_is_written_in_the_fewest_digits_that_give_it_again(
    number: float, text: str
) -> None:
    row = np.array([[number, -0.0]], np.float32)
    assert road.to_json(row) == f"[[{text}, -0.0]]"
    again = np.array(json.loads(road.to_json(row)), np.float32)
    assert again.tobytes() == row.tobytes()


def test_every_kind_of_float32_comes_back_bit_for_bit() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, (8, 4000), np.uint32)
    row = bits.view(np.float32)
    row = np.where(np.isfinite(row), row, np.float32(0))
    assert np.array(json.loads(road.to_json(row)), np.float32).tobytes() == row.tobytes()


@pytest.mark.parametrize(
    ("hidden", "text"),
    [
        (np.zeros((2, 3, 4), np.float32), "float32 (2, 3, 4)"),
        (np.zeros((0, 3, 4), np.float32), "float32 (0, 3, 4)"),
        (
            [np.zeros((2, 4), np.float32), np.zeros((1, 4), np.float32)],
            "float32, 2 rows, 3 vectors",
        ),
        ([], "float32, 0 rows, 0 vectors"),
    ],
    ids=["array", "empty array", "rows", "no rows"],
)
def test_a_result_is_described_by_type_and_shape(hidden: Any, text: str) -> None:
    assert road.describe(hidden).startswith(text)


def test_without_a_file_the_lines_go_to_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    road.write_hidden([np.ones((2, 4), np.float32), np.zeros((1, 4), np.float32)], None)
    assert capsys.readouterr().out == f"{[[1.0] * 4] * 2}\n{[[0.0] * 4]}\n"


def test_rows_of_different_lengths_do_not_fit_an_array_and_the_old_file_stays(
    tmp_path: Path,
) -> None:
    path = tmp_path / "hidden.npy"
    path.write_bytes(b"old")
    rows = [np.ones((2, 4), np.float32), np.ones((1, 4), np.float32)]
    with pytest.raises(InvalidInputError, match="different lengths") as caught:
        road.write_hidden(rows, path)
    assert ".jsonl" in str(caught.value)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_no_rows_at_all_are_an_empty_file_of_lines(tmp_path: Path) -> None:
    road.write_hidden([], tmp_path / "hidden.jsonl")
    assert (tmp_path / "hidden.jsonl").read_bytes() == b""


def test_no_rows_at_all_are_not_called_rows_of_different_lengths(tmp_path: Path) -> None:
    try:
        road.write_hidden([], tmp_path / "hidden.npy")
    except InvalidInputError as error:
        reason = str(error)
    else:
        reason = ""
    assert "different lengths" not in reason


@pytest.mark.parametrize("name", ["hidden.npy", "hidden.jsonl"])
def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "missing" / name
    with pytest.raises(CausalEncoderError, match="No such file") as caught:
        road.write_hidden(np.ones((1, 1, 4), np.float32), path)
    assert str(path) in str(caught.value)
