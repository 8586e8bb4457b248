"""The arrows between the rooms, and the size of each room."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("model", "export", "serve")
# room -> the rooms it may import; everyone may import causal_encoder.errors.
ARROWS = {"model": {"model"}, "serve": {"serve"}, "export": {"export", "model", "serve"}}
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))]
COMMANDS = sorted((ROOT / "src" / "causal_encoder").glob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Full names of everything a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_room_imports_only_what_its_arrows_allow(path: Path) -> None:
    for name in imported_modules(path):
        if name.startswith("causal_encoder."):
            room = name.split(".")[1]
            assert room in ARROWS[path.parent.name] | {"errors", "__version__"}, name


@pytest.mark.parametrize("path", sorted((ROOT / "serve").glob("*.py")), ids=lambda path: path.name)
def test_serving_names_no_training_library(path: Path) -> None:
    tops = {name.split(".")[0] for name in imported_modules(path)}
    assert tops <= set(sys.stdlib_module_names) | {"numpy", "onnxruntime", "causal_encoder"}


def test_errors_imports_nothing_of_ours() -> None:
    names = imported_modules(ROOT / "src" / "causal_encoder" / "errors.py")
    assert not any(name.startswith("causal_encoder") for name in names)


@pytest.mark.parametrize("path", SOURCES + COMMANDS, ids=lambda path: path.name)
def test_a_file_stays_one_readable_room(path: Path) -> None:
    limit = 300 if path.name == "encoder.py" else 30 if path.name == "__init__.py" else 450
    assert len(path.read_text().splitlines()) <= limit


def test_help_loads_neither_torch_nor_the_runtime() -> None:
    program = (
        "import sys; from causal_encoder import cli; "
        "print(sorted({'torch', 'onnx', 'onnxruntime', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": ""},
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "room", ["causal_encoder.model", "causal_encoder.export", "causal_encoder.serve"]
)
def test_the_public_names_of_a_room_are_sorted_and_there(room: str) -> None:
    module = __import__(room, fromlist=["__all__"])
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
