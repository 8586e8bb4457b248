"""README.md is true: its examples run, and its command reference is what --help says.

`python -m tests.test_readme` rewrites the command reference.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from causal_encoder.cli import main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
START, END = "<!-- commands -->", "<!-- /commands -->"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def commands(
    command: click.Command, parent: click.Context | None, name: str
) -> Iterator[click.Context]:
    """The contexts of every command that does something, in order."""
    context = click.Context(
        command, parent=parent, info_name=name, terminal_width=100, max_content_width=100
    )
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            yield from commands(command.commands[child], context, child)
    else:
        yield context


def reference() -> str:
    """The command reference as Markdown."""
    blocks = [
        f"```text\n{context.command.get_help(context)}\n```"
        for context in commands(main, None, "causal-encoder")
    ]
    return "\n\n".join(blocks)


def test_the_command_reference_is_what_help_says() -> None:
    text = README.read_text()
    written = text[text.index(START) + len(START) : text.index(END)].strip()
    assert written == reference(), "run `make readme`"


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs_as_it_stands(number: int, tmp_path: Path) -> None:
    if EXAMPLES[number].startswith("# On a GPU"):
        pytest.skip("needs a CUDA device")
    result = subprocess.run(
        [sys.executable, "-c", EXAMPLES[number]], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_every_linked_file_is_there() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / name).read_text()):
            assert (ROOT / link).exists(), f"{name} links to {link}"


def test_every_module_is_on_the_code_map() -> None:
    text = README.read_text()
    code_map = text[text.index("## Code map") :]
    for room in ("model", "export", "serve"):
        for path in (ROOT / room).glob("*.py"):
            assert path.name == "__init__.py" or path.name in code_map, path


if __name__ == "__main__":
    old = README.read_text()
    before, after = old[: old.index(START)], old[old.index(END) :]
    README.write_text(f"{before}{START}\n\n{reference()}\n\n{after}")
