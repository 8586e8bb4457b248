"""Reading ids and writing hidden vectors for the `run` command."""

import io
import json
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
    words = text.replace(",", " ").split()
    try:
        return [[int(word) for word in words]]
    except ValueError:
        word = next(word for word in words if not word.lstrip("+-").isdigit())
        raise InvalidInputError(f"--ids holds {word!r}, expected whole numbers") from None


def read_rows(path: str) -> Any:
    """Ids from a .npy array or from JSON lines, one list of ids a line.

    Args:
        path: a .npy file, a .jsonl file, or "-" for JSON lines on standard input.

    Returns:
        The array as it is, or a list of rows.

    Raises:
        InvalidInputError: the file cannot be read, or a line is not a list.
    """
    try:
        if path.endswith(".npy"):
            return np.load(path, allow_pickle=False)
        if path == "-":
            return _parse_lines(sys.stdin, "standard input")
        with Path(path).open(encoding="utf-8") as lines:
            return _parse_lines(lines, path)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidInputError(f"{path} cannot be read: {reason or error}") from error
    except ValueError as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{path} is not an array of integers: {error}") from error


def _parse_lines(lines: Iterable[str], source: str) -> list[list[Any]]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"{source}, line {number} is not JSON: {error}") from error
        if not isinstance(row, list):
            raise InvalidInputError(f"{source}, line {number} is not a list of ids")
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


def write_hidden(hidden: Hidden | Sequence[Hidden], path: Path | None) -> None:
    """Write .npy or .jsonl by the name of the file, or JSON lines to standard output.

    Raises:
        InvalidInputError: a .npy cannot hold rows of different lengths.
        CausalEncoderError: the file cannot be written.
    """
    if path is None:
        for row in hidden:
            sys.stdout.write(json.dumps(row.tolist()) + "\n")
    elif path.suffix == ".npy":
        if not isinstance(hidden, np.ndarray):
            raise InvalidInputError(
                f"the sequences have different lengths, which {path} cannot hold; "
                "name an --output in .jsonl"
            )
        write_whole(path, lambda stream: np.save(stream, hidden))
    else:

        def write(stream: Any) -> None:
            text = io.TextIOWrapper(stream, encoding="utf-8")
            for row in hidden:
                text.write(json.dumps(row.tolist()) + "\n")
            text.detach()

        write_whole(path, write)
