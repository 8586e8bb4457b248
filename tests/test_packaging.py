"""What a user installs: the wheel made from the sdist, outside this repository."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from causal_encoder.export.publish import MIN_ONNXRUNTIME

ROOT = Path(__file__).parents[1]


def test_the_oldest_runtime_that_installs_is_the_one_that_bundles_ask_for() -> None:
    """Not older than 1.28: bind_input took any type before (onnxruntime PR 28839)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runtimes = [each for each in project["dependencies"] if each.startswith("onnxruntime")]
    assert len(runtimes) == 2
    for requirement in runtimes:
        (floor,) = re.findall(r">=([\d.]+);", requirement)
        assert f"{floor}.0" == MIN_ONNXRUNTIME
        assert tuple(map(int, floor.split("."))) >= (1, 28)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `python -m build` does it: the sdist from the sources, the wheel from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "build", "--no-isolation", "--outdir", out, ROOT],
        check=True,
        capture_output=True,
    )
    with tarfile.open(next(out.glob("*.tar.gz"))) as sdist:
        assert any(name.endswith("causal_encoder/model/encoder.py") for name in sdist.getnames())
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_source_file_and_nothing_generic(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"causal_encoder"}
    sources = {"__init__", "cli", "errors"}
    expected = {f"causal_encoder/{name}.py" for name in sources} | {"causal_encoder/py.typed"}
    for room in ("model", "export", "serve"):
        expected |= {f"causal_encoder/{room}/{path.name}" for path in (ROOT / room).glob("*.py")}
    assert expected <= set(names)


@pytest.mark.slow
def test_the_wheel_works_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel],
        check=True,
        capture_output=True,
    )
    environment = os.environ | {"PYTHONPATH": str(site)}

    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-W", "ignore", *arguments],
            cwd=tmp_path,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    where = run("-c", "import causal_encoder.model.encoder as m; print(m.__file__)").strip()
    assert Path(where).is_relative_to(site)
    command = ("-c", "from causal_encoder.cli import main; main()")
    run(*command, "new", "ckpt", "--vocab-size", "20", "--d-model", "8", "--max-len", "9",
        "--num-heads", "2", "--num-layers", "1")  # fmt: skip
    run(*command, "export", "onnx", "ckpt", "bundle")
    assert run(*command, "run", "bundle", "--ids", "1 2 3").startswith("[[")
