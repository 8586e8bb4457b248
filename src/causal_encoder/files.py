"""Writing a command's output so that a file is whole or not there."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from causal_encoder.errors import CausalEncoderError


def write_whole(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Write beside the file and move onto it; an old file stays if anything fails.

    Args:
        path: the file.
        write: writes the content into the stream it is given.

    Raises:
        CausalEncoderError: the file cannot be written; names the reason.
    """
    try:
        if _is_device_or_pipe(Path(path)):  # written to, never replaced
            with Path(path).open("wb", buffering=0) as stream:
                write(stream)
            return
        target = Path(path).resolve()  # a link stays a link to the file that is written
    except (OSError, ValueError, RuntimeError) as error:
        raise CausalEncoderError(f"{path} cannot be written: {_reason(error)}") from error
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                write(stream)
            mask = os.umask(0)
            os.umask(mask)
            Path(temporary).chmod(0o666 & ~mask)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:  # NumPy raises it with a text alone
        raise CausalEncoderError(f"{path} cannot be written: {_reason(error)}") from error


def _is_device_or_pipe(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _reason(error: Exception) -> str:
    return str((isinstance(error, OSError) and error.strerror) or error)
