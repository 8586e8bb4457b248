"""Reading ids and writing hidden vectors for the `run` command."""

import io
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from causal_encoder.errors import InvalidInputError
from causal_encoder.files import write_whole
from causal_encoder.serve import EncoderSession

Hidden = npt.NDArray[np.float32]


def parse_ids(text: str) -> list[list[int]]:
    """One sequence from words separated by spaces or commas, as a batch of one.

    Raises:
        InvalidInputError: a word is not a whole number.
    """
    ids = []
    for word in text.replace(",", " ").split():
        if re.fullmatch(r"[+-]?[0-9]{1,4000}", word):  # int() takes more: 1_0, other digits
            ids.append(int(word))
        else:
            shown = word if len(word) <= 40 else f"{word[:40]}.."
            raise InvalidInputError(f"--ids holds {shown!r}, expected whole numbers")
    return [ids]


def read_rows(path: str) -> Any:
    """Ids from a .npy array or from JSON lines, one list of ids a line.

    Args:
        path: a .npy file, a .jsonl file, or "-" for JSON lines on standard input.

    Returns:
        The array as it is, or a list of rows.

    Raises:
        InvalidInputError: the file cannot be read, or a line is not a list.
    """
    if path.endswith(".npy"):
        return _read_array(path)
    try:
        if path == "-":
            if sys.stdin is None:
                raise InvalidInputError("standard input is closed")
            return _parse_lines(sys.stdin, "standard input")
        with Path(path).open(encoding="utf-8") as lines:
            return _parse_lines(lines, path)
    except InvalidInputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a zero byte in the path
        source = "standard input" if path == "-" else path
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInputError(f"{source} cannot be read: {reason}") from error


def _read_array(path: str) -> npt.NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # NumPy evaluates the header, which can fail in every way
        raise InvalidInputError(f"{path} is not an array of integers: {error}") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise InvalidInputError(f"{path} is an archive of arrays; pass one of them alone")
    return array


def _parse_lines(lines: Iterable[str], source: str) -> list[list[Any]]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(
                f"{source}, line {number} is not JSON: {error}; write a list of ids, such as "
                "[5, 9, 2]"
            ) from error
        if not isinstance(row, list):
            raise InvalidInputError(
                f"{source}, line {number} is not a list of ids such as [5, 9, 2]"
            )
        rows.append(row)
    return rows


def encode(session: EncoderSession, rows: Any) -> Hidden | list[Hidden]:
    """Run rows in batches of bounded size.

    Returns:
        (B, T, D) for rows of one length, else one (len_i, D) array a row.
    """
    if isinstance(rows, np.ndarray) and (rows.ndim != 2 or 0 in rows.shape):
        return session.run(rows)  # an error, or the empty result
    hidden = session.encode(rows)
    if len({len(row) for row in hidden}) == 1:
        return np.stack(hidden)
    return hidden


def to_json(row: Hidden) -> str:
    """One row as JSON; each number in the fewest digits that give the same float32 again."""
    vectors = (", ".join(map(str, vector)) for vector in row)
    return f"[{', '.join(f'[{vector}]' for vector in vectors)}]"


def describe(hidden: Hidden | Sequence[Hidden]) -> str:
    """Type and shape of what `encode` returned, in words."""
    if isinstance(hidden, np.ndarray):
        return f"{hidden.dtype} {hidden.shape}"
    return f"float32, {len(hidden)} rows, {sum(map(len, hidden))} vectors in all"


def write_hidden(hidden: Hidden | Sequence[Hidden], path: Path | None) -> None:
    """Write .npy or .jsonl by the name of the file, or JSON lines to standard output.

    Raises:
        InvalidInputError: a .npy cannot hold rows of different lengths.
        CausalEncoderError: the file cannot be written.
    """
    if path is None:
        for row in hidden:
            sys.stdout.write(to_json(row) + "\n")
        sys.stdout.flush()  # a full disk must be an error now, not a remark at exit
    elif path.suffix == ".npy":
        if not isinstance(hidden, np.ndarray):
            if not hidden:
                raise InvalidInputError(f"there are no sequences to write to {path}")
            raise InvalidInputError(
                f"the sequences have different lengths, which {path} cannot hold; "
                "name an --output in .jsonl"
            )
        write_whole(path, lambda stream: np.save(stream, hidden))
    else:

        def write(stream: Any) -> None:
            text = io.TextIOWrapper(stream, encoding="utf-8")
            for row in hidden:
                text.write(to_json(row) + "\n")
            text.detach()

        write_whole(path, write)
