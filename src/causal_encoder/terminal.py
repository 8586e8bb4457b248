"""How every command behaves on a terminal: errors, progress, JSON."""

import contextlib
import errno
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from causal_encoder.errors import CausalEncoderError
from causal_encoder.files import write_whole

_EXTRA_OF = {
    "torch": "export",
    "onnx": "export",
    "onnxscript": "export",
    "safetensors": "export",
    "matplotlib": "plot",
}


class Commands(click.Group):
    """The one place where the library's errors become one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a terminal that knows ASCII alone gets escapes for the rest."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            with _warnings_from_logs():
                return super().invoke(ctx)
        except CausalEncoderError as error:
            raise click.ClickException(" ".join(str(error).split())) from error
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader went away: click ends quietly
            raise click.ClickException(
                f"{error.filename or 'output'}: {error.strerror or error}"
            ) from error
        except ModuleNotFoundError as error:
            extra = _EXTRA_OF.get((error.name or "").split(".")[0])
            if extra is None:
                raise
            raise click.ClickException(
                f"this command needs {error.name}, which is not installed; "
                f"pip install 'causal-encoder[{extra}]'"
            ) from error


class _WarnOnce(logging.Handler):
    """Shows what the library logs as warnings of the command, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if text not in self.shown:
            self.shown.add(text)
            click.echo(f"Warning: {text}", err=True)


@contextlib.contextmanager
def _warnings_from_logs() -> Iterator[None]:
    logger, handler = logging.getLogger("causal_encoder"), _WarnOnce()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, nothing in a pipe."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=None)

        def update(step: str, done: int, total: int) -> None:
            bar.update(task, description=step, completed=done, total=total)

        yield update


def write_json(path: str, value: dict[str, Any]) -> None:
    """Into the file, or to standard output for -."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: str, text: str) -> None:
    """Into the file, or to standard output for -."""
    if path == "-":
        click.echo(text, nl=False)
    else:
        write_whole(path, lambda stream: stream.write(text.encode()))


def positive_list(text: str, option: str) -> tuple[int, ...]:
    """The numbers of an option such as 1,8; each once, in the order given."""
    parts = [part.strip() for part in text.split(",")]
    # int() takes more: 1_0, other digits.
    numbers = tuple(int(part) for part in parts if re.fullmatch("[0-9]{1,4000}", part))
    if len(numbers) < len(parts) or min(numbers) < 1:
        raise click.BadParameter(
            f"{text!r} is not a comma-separated list of whole numbers from 1 on", param_hint=option
        )
    return tuple(dict.fromkeys(numbers))
