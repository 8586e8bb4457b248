"""Every command takes paths that are not ASCII, of folders and of files.

`diff` and the exported formats have such paths in their own tests.
"""

from pathlib import Path

import numpy as np
from click.testing import CliRunner

from causal_encoder.cli import main

SIZES = ("--vocab-size", 9, "--d-model", 4, "--num-heads", 1, "--num-layers", 1, "--max-len", 3)


def done(*arguments: object) -> str:
    """Run a command in this process; what it prints."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr or result.exception
    return result.stdout


def test_commands_take_paths_that_are_not_ascii(tmp_path: Path) -> None:
    home = tmp_path / "a b é日本 🙂"
    done("new", home / "модель", *SIZES)
    for kind in ("onnx", "torchscript"):
        assert str(home / kind) in done("export", kind, home / "модель", home / kind)
        assert str(home / kind) in done("inspect", home / kind)
    done("verify", home / "torchscript", home / "модель", "--json", home / "отчёт.json")
    assert "proven" in (home / "отчёт.json").read_text()
    np.save(home / "входы.npy", np.array([[1, 2], [8, 0]]))
    (home / "входы.jsonl").write_text("[1, 2]\n[8]\n")
    run = ("run", home / "onnx", "--device", "cpu")
    done(*run, "--input", home / "входы.npy", "--output", home / "выходы.npy")
    done(*run, "--input", home / "входы.jsonl", "--output", home / "выходы.jsonl")
    assert np.load(home / "выходы.npy").shape == (2, 2, 4)
    assert len((home / "выходы.jsonl").read_text().splitlines()) == 2
    done("plot", "positions", home / "модель", "-o", home / "таблица.png")
    assert (home / "таблица.png").read_bytes().startswith(b"\x89PNG")
