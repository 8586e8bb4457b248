"""The commands as their users see them: exit codes, and what is on which stream.

Most run in this process; a few in a process of their own, where nothing is caught that a
terminal would show. V = 20, L = 10, D = 8 throughout.
"""

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from onnx import numpy_helper

from causal_encoder import __version__
from causal_encoder.cli import main
from causal_encoder.model import load_checkpoint
from causal_encoder.serve import EncoderSession, open_bundle, placement
from tests.bundles import tampered

DONE, REFUSED, USAGE, CANNOT_CHECK = 0, 1, 2, 3
SMALL = ("--vocab-size", 20, "--d-model", 8, "--num-heads", 2, "--num-layers", 1, "--max-len", 10)

# Put before the command, this makes an install without the extras of it.
WITHOUT_EXTRAS = """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnx", "onnxscript", "safetensors", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


@dataclasses.dataclass(frozen=True)
class Printed:
    """How a command ended and what it printed."""

    exit_code: int
    out: str
    err: str


def invoke(*arguments: object, stdin: str | bytes | None = None) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def done(*arguments: object, stdin: str | bytes | None = None) -> Result:
    """Run a command that succeeds."""
    result = invoke(*arguments, stdin=stdin)
    assert result.exit_code == DONE, result.stderr or result.exception
    return result


def refused(*arguments: object, code: int = REFUSED, stdin: str | bytes | None = None) -> str:
    """Run a command that is refused by one line; that line."""
    result = invoke(*arguments, stdin=stdin)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


def misused(*arguments: object) -> str:
    """Run a command that is used wrongly; the explanation."""
    result = invoke(*arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == USAGE
    assert result.stdout == ""
    assert result.stderr.startswith("Usage: ")
    return result.stderr


def process(
    *arguments: object, before: str = "", stdin: str | None = None, **environment: str
) -> Printed:
    """Run a command in a process of its own."""
    program = f"import sys\n{before}\nfrom causal_encoder.cli import main\nmain()"
    ended = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        input=stdin if stdin is not None else "",
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )
    return Printed(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """What `export` said of each format; made together with `home`."""
    folder = tmp_path_factory.mktemp("cli")
    done("new", folder / "ckpt", *SMALL)
    done("new", folder / "other", *SMALL, "--seed", 1)
    kinds = ("onnx", "torchscript", "program")
    return {kind: done("export", kind, folder / "ckpt", folder / kind) for kind in kinds}


@pytest.fixture(scope="session")
def home(exports: dict[str, Result]) -> Path:
    """A folder with two checkpoints and a bundle of each format, all made by commands."""
    return Path(exports["onnx"].stdout.partition(": ")[0]).parent


@pytest.fixture(scope="session")
def ckpt(home: Path) -> Path:
    return home / "ckpt"


@pytest.fixture(scope="session")
def bundle(home: Path) -> Path:
    """The ONNX bundle; not to be changed."""
    return home / "onnx"


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A copy of the ONNX bundle to damage."""
    return shutil.copytree(bundle, tmp_path / "home" / "copy")


@pytest.fixture
def untouched(tmp_path: Path) -> Iterator[Path]:
    """A folder that must be the same after the test."""
    folder = tmp_path / "mine"
    (folder / "photos").mkdir(parents=True)
    (folder / "notes.txt").write_text("important")
    before = sorted(folder.rglob("*"))
    yield folder
    assert sorted(folder.rglob("*")) == before
    assert (folder / "notes.txt").read_text() == "important"


def expected(ckpt: Path, ids: list[list[int]]) -> npt.NDArray[np.float32]:
    """What the trained model says."""
    with torch.no_grad():
        hidden: npt.NDArray[np.float32] = load_checkpoint(ckpt)(torch.tensor(ids)).numpy()
    return hidden


# Help.


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


@pytest.mark.parametrize("path", [*commands(main)], ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...]) -> None:
    result = done(*path, "--help")
    assert result.stdout.startswith(f"Usage: main {' '.join(path)}")
    assert result.stderr == ""


def test_the_commands_are_those_of_the_contract() -> None:
    assert set(commands(main)) >= {
        ("new",),
        ("export", "onnx"),
        ("export", "torchscript"),
        ("export", "program"),
        ("verify",),
        ("run",),
        ("bench",),
        ("inspect",),
        ("plot", "positions"),
    }


def test_the_exit_codes_are_in_the_help() -> None:
    text = " ".join(done("--help").stdout.split())
    for part in ("0 done", "1 refused", "2 wrong usage", "3 could not be checked"):
        assert part in text


def test_the_version_is_told() -> None:
    assert __version__ in done("--version").stdout


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom causal_encoder.cli import main\n"
        "main(['export', 'onnx', '--help'], standalone_mode=False)\n"
        "print([n for n in ('torch', 'onnx', 'onnxruntime', 'numpy') if n in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.endswith("[]\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("export", "tflite", "ckpt", "bundle"),
        ("export", "onnx", "ckpt"),
        ("export", "torchscript", "ckpt", "bundle", "--opset", 18),
        ("export", "program", "ckpt", "bundle", "--opset", 18),
        ("export", "onnx", "ckpt", "bundle", "--opset", 17),
        ("export", "onnx", "ckpt", "bundle", "--opset", 24),
        ("export", "onnx", "ckpt", "bundle", "--opset", "x"),
        ("export", "onnx", "ckpt", "bundle", "--max-len", "x"),
        ("export", "onnx", "ckpt", "bundle", "--warm-up", "128"),
        ("export", "onnx", "ckpt", "bundle", "--warm-up", "1x"),
        ("export", "onnx", "ckpt", "bundle", "--warm-up", "-1x2"),
        ("export", "onnx", "ckpt", "bundle", "--warm-up", "9" * 5000 + "x4"),
        ("export", "onnx", "ckpt", "bundle", "--warm-up", "\u0661x4"),
        ("export", "onnx", "ckpt", "bundle", "--nonsense"),
        ("new",),
        ("new", "ckpt"),
        ("new", "ckpt", "--vocab-size", "many"),
        ("new", "ckpt", "--vocab-size", 5, "--position", "rotary"),
        ("verify", "bundle"),
        ("verify", "bundle", "ckpt", "--device", "tpu"),
        ("run", "bundle"),
        ("run", "bundle", "--ids", "1", "--input", "ids.npy"),
        ("run", "bundle", "--ids", "1", "--output", "hidden.csv"),
        ("run", "bundle", "--ids", "1", "--output", "hidden"),
        ("run", "bundle", "--ids", "1", "--output", "hidden.NPY"),
        ("run", "bundle", "--ids", "1", "--overflow", "wrap"),
        ("run", "bundle", "--ids", "1", "--device", "CUDA"),
        ("run", "bundle", "extra", "--ids", "1"),
        ("bench", "bundle", "--plot", "latency.xyz"),
        ("inspect",),
        ("inspect", "bundle", "--json", "extra"),
    ],
    ids=lambda arguments: ascii(" ".join(map(str, arguments)))[1:80],
)
def test_wrong_usage_ends_with_2_and_the_usage(arguments: tuple[object, ...]) -> None:
    assert "Error: " in misused(*arguments)


def test_wrong_usage_is_told_before_anything_is_read(tmp_path: Path) -> None:
    assert "--output" in misused("run", tmp_path / "missing", "--ids", "1", "--output", "x.csv")
    assert "--ids" in misused("run", tmp_path / "missing")


@pytest.mark.parametrize("option", ["--input", "--output"])
def test_a_folder_in_place_of_a_file_is_wrong_usage(
    bundle: Path, tmp_path: Path, option: str
) -> None:
    (tmp_path / "folder.npy").mkdir()
    given = ("--ids", "1") if option == "--output" else ()
    assert "directory" in misused("run", bundle, *given, option, tmp_path / "folder.npy")


# new.


def test_new_makes_a_checkpoint_that_the_seed_decides(tmp_path: Path) -> None:
    result = done("new", tmp_path / "a", *SMALL, "--position", "learned", "--seed", 3)
    done("new", tmp_path / "b", *SMALL, "--position", "learned", "--seed", 3)
    done("new", tmp_path / "c", *SMALL, "--position", "learned", "--seed", 4)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]
    config = load_checkpoint(tmp_path / "a").config
    assert (config.vocab_size, config.d_model, config.max_len) == (20, 8, 10)
    assert config.position == "learned"
    count = sum(p.numel() for p in load_checkpoint(tmp_path / "a").parameters())
    assert f"{count:,} parameters" in result.stdout
    assert result.stderr == ""


def test_new_overwrites_nothing(ckpt: Path, untouched: Path) -> None:
    for path in (ckpt, untouched, untouched / "notes.txt"):
        assert f"{path} exists" in refused("new", path, *SMALL)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--vocab-size", 0, "vocab_size"),
        ("--d-model", -8, "d_model"),
        ("--num-heads", 3, "num_heads"),
        ("--num-layers", 0, "num_layers"),
        ("--max-len", 0, "max_len"),
    ],
)
def test_new_refuses_a_size_that_cannot_be(
    tmp_path: Path, option: str, value: int, named: str
) -> None:
    line = refused("new", tmp_path / "ckpt", *SMALL, option, value)
    assert named in line
    assert str(value) in line
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize("vocab_size", [10**14, 10**17, 2**70], ids=["memory", "size", "number"])
def test_new_refuses_a_model_that_fits_no_machine(tmp_path: Path, vocab_size: int) -> None:
    assert len(refused("new", tmp_path / "ckpt", *SMALL, "--vocab-size", vocab_size)) < 300
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**20])
def test_new_refuses_a_seed_that_torch_does_not_take(tmp_path: Path, seed: int) -> None:
    result = invoke("new", tmp_path / "ckpt", *SMALL, "--seed", seed)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (REFUSED, USAGE)
    assert "seed" in result.stderr


def test_new_under_a_file_is_one_line(untouched: Path) -> None:
    assert "cannot be written" in refused("new", untouched / "notes.txt" / "ckpt", *SMALL)


# export.


@pytest.mark.parametrize("kind", ["onnx", "torchscript", "program"])
def test_export_makes_a_proven_bundle_and_says_so_in_one_line(
    exports: dict[str, Result], home: Path, kind: str
) -> None:
    (line,) = exports[kind].stdout.splitlines()
    for part in (str(home / kind), kind, "max_len 10", "checks proven"):
        assert part in line
    assert exports[kind].stderr == ""
    with open_bundle(home / kind) as opened:
        assert opened.manifest.format == kind
        assert opened.manifest.parity is not None
        assert opened.manifest.parity["verdict"] == "proven"


def test_export_makes_the_folders_above_and_leaves_nothing_beside(
    ckpt: Path, tmp_path: Path
) -> None:
    done("export", "torchscript", ckpt, tmp_path / "new" / "folder" / "bundle")
    assert list((tmp_path / "new").rglob("*bundle*")) == [tmp_path / "new" / "folder" / "bundle"]
    assert list((tmp_path / "new" / "folder").iterdir()) == [tmp_path / "new/folder/bundle"]


def test_export_takes_opset_max_len_and_shapes(ckpt: Path, tmp_path: Path) -> None:
    shapes = ("--warm-up", "1x3", "--warm-up", "8x2")
    done("export", "onnx", ckpt, tmp_path / "b", "--opset", 18, "--max-len", 3, *shapes)
    with open_bundle(tmp_path / "b") as opened:
        assert (opened.manifest.opset, opened.manifest.max_len) == (18, 3)
        assert opened.manifest.warm_up == ((1, 3), (8, 2))
    assert "1x3, 8x2" in done("inspect", tmp_path / "b").stdout


def test_export_replaces_a_bundle_only_if_forced(home: Path, copy: Path) -> None:
    before = (copy / "manifest.json").read_bytes()
    line = refused("export", "onnx", home / "other", copy)
    assert f"{copy} exists" in line
    assert "--force" in line
    assert (copy / "manifest.json").read_bytes() == before
    done("export", "torchscript", home / "other", copy, "--force")
    with open_bundle(copy) as opened:
        assert opened.manifest.format == "torchscript"
    assert list(copy.parent.iterdir()) == [copy]


@pytest.mark.parametrize("flags", [(), ("--force",)], ids=["plain", "forced"])
def test_export_never_touches_a_folder_or_file_that_is_no_bundle(
    ckpt: Path, untouched: Path, flags: tuple[str, ...]
) -> None:
    for path in (untouched, untouched / "photos", untouched / "notes.txt"):
        line = refused("export", "torchscript", ckpt, path, *flags)
        assert "not a bundle" in line
        assert str(path) in line


def test_export_over_the_checkpoint_itself_is_refused(home: Path, tmp_path: Path) -> None:
    ckpt = shutil.copytree(home / "ckpt", tmp_path / "ckpt")
    assert "not a bundle" in refused("export", "torchscript", ckpt, ckpt, "--force")
    load_checkpoint(ckpt)


def test_export_over_a_bundle_with_a_file_of_yours_is_refused(ckpt: Path, copy: Path) -> None:
    (copy / "notes.txt").write_text("important")
    assert "not a bundle" in refused("export", "torchscript", ckpt, copy, "--force")
    assert (copy / "notes.txt").read_text() == "important"


@pytest.mark.parametrize("kind", ["onnx", "torchscript", "program"])
def test_export_of_a_checkpoint_that_is_not_there_is_one_line(tmp_path: Path, kind: str) -> None:
    line = refused("export", kind, tmp_path / "missing", tmp_path / "bundle")
    assert str(tmp_path / "missing") in line
    assert "not a folder" in line
    assert list(tmp_path.iterdir()) == []


def test_export_of_a_damaged_checkpoint_is_one_line(home: Path, tmp_path: Path) -> None:
    ckpt = shutil.copytree(home / "ckpt", tmp_path / "ckpt")
    weights = (ckpt / "model.safetensors").read_bytes()
    (ckpt / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    line = refused("export", "torchscript", ckpt, tmp_path / "bundle")
    assert "model.safetensors" in line
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("max_len", [0, -1])
def test_export_refuses_a_max_len_that_cannot_be(ckpt: Path, tmp_path: Path, max_len: int) -> None:
    line = refused("export", "torchscript", ckpt, tmp_path / "b", "--max-len", max_len)
    assert "max_len" in line
    assert not (tmp_path / "b").exists()


def test_export_refuses_to_raise_the_max_len_of_a_learned_table(tmp_path: Path) -> None:
    done("new", tmp_path / "ckpt", *SMALL, "--position", "learned")
    line = refused("export", "onnx", tmp_path / "ckpt", tmp_path / "b", "--max-len", 11)
    assert "11" in line
    assert "learned" in line


def test_export_under_a_file_is_one_line(ckpt: Path, untouched: Path) -> None:
    line = refused("export", "torchscript", ckpt, untouched / "notes.txt" / "bundle")
    assert str(untouched / "notes.txt") in line


# verify.


@pytest.mark.parametrize("kind", ["onnx", "torchscript", "program"])
def test_verify_proves_a_bundle_against_its_checkpoint(home: Path, ckpt: Path, kind: str) -> None:
    result = done("verify", home / kind, ckpt, "--device", "cpu")
    rows = result.stdout.count(" proven ")
    assert result.stdout.splitlines()[-1] == f"proven: {rows} checks"
    stored = [line for line in result.stdout.splitlines() if "stored once" in line]
    assert [line.count(" bytes ") for line in stored] == ([2] if kind == "onnx" else [])
    assert "refuted" not in result.stdout
    assert result.stderr == ""


def test_verify_against_other_weights_is_refuted_by_the_name_of_the_check(
    home: Path, bundle: Path
) -> None:
    result = invoke("verify", bundle, home / "other", "--device", "cpu")
    assert result.exit_code == REFUSED
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: source is refuted")
    assert "refuted" in result.stdout


def test_verify_against_another_architecture_names_what_differs(
    bundle: Path, tmp_path: Path
) -> None:
    done("new", tmp_path / "wide", *SMALL, "--d-model", 16)
    result = invoke("verify", bundle, tmp_path / "wide")
    assert result.exit_code == REFUSED
    assert result.stderr.startswith("Error: source is refuted: d_model is 8 in the bundle, 16")


def test_verify_on_a_device_that_is_not_here_ends_with_3(
    ckpt: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "causal_encoder.serve.placement.cuda_problem", lambda: "libcuda.so.1 not found"
    )
    line = refused("verify", bundle, ckpt, "--device", "cuda", code=CANNOT_CHECK)
    assert "could not be checked here" in line
    assert "libcuda.so.1" in line


@pytest.mark.parametrize("kind", ["torchscript", "program"])
def test_verify_of_a_format_that_cuda_does_not_apply_to_is_wrong_usage(
    home: Path, ckpt: Path, kind: str
) -> None:
    text = misused("verify", home / kind, ckpt, "--device", "cuda")
    assert f"a {kind} bundle" in text
    assert "--device cpu" in text


def test_verify_writes_json_alone_to_standard_output(home: Path, ckpt: Path, bundle: Path) -> None:
    result = done("verify", bundle, ckpt, "--device", "cpu", "--json", "-")
    report = json.loads(result.stdout)
    assert report["verdict"] == "proven"
    assert (report["format"], report["device"]) == ("onnx", "cpu")
    assert {"name", "passed", "measured", "limit", "detail"} == set(report["checks"][0])
    assert "proven: " in result.stderr.splitlines()[-1], "a person still gets the table"
    refuted = invoke("verify", bundle, home / "other", "--device", "cpu", "--json", "-")
    assert refuted.exit_code == REFUSED
    assert json.loads(refuted.stdout)["verdict"] == "refuted"


def test_verify_writes_the_same_json_to_a_file(ckpt: Path, bundle: Path, tmp_path: Path) -> None:
    done("verify", bundle, ckpt, "--device", "cpu", "--json", tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "proven"
    assert list(tmp_path.iterdir()) == [tmp_path / "report.json"]


def test_verify_that_could_not_write_its_report_says_so_before_it_verifies(
    ckpt: Path, bundle: Path, tmp_path: Path
) -> None:
    text = misused("verify", bundle, ckpt, "--device", "cpu", "--json", tmp_path / "no" / "r.json")
    assert "there is no folder" in text
    assert "make it first" in text


def test_no_output_goes_into_a_bundle_which_it_would_make_invalid(ckpt: Path, copy: Path) -> None:
    for arguments in (
        ("verify", copy, ckpt, "--json", copy / "manifest.json"),
        ("run", copy, "--ids", "1", "--output", copy / "h.npy"),
        ("bench", copy, "--csv", copy / "rows.csv"),
        ("plot", "positions", ckpt, "-o", copy / "p.png"),
    ):
        assert "is in a bundle" in misused(*arguments)
    done("inspect", copy)


def test_verify_changes_nothing(ckpt: Path, copy: Path) -> None:
    before = {path: path.read_bytes() for path in copy.iterdir()}
    done("verify", copy, ckpt, "--device", "cpu")
    assert {path: path.read_bytes() for path in copy.iterdir()} == before
    assert list(copy.parent.iterdir()) == [copy]


def test_verify_of_a_bundle_or_checkpoint_that_is_not_there_is_one_line(
    ckpt: Path, bundle: Path, tmp_path: Path
) -> None:
    assert str(tmp_path / "no") in refused("verify", tmp_path / "no", ckpt)
    assert str(tmp_path / "no") in refused("verify", bundle, tmp_path / "no")


def test_a_bundle_and_a_checkpoint_in_each_others_place_are_called_by_name(
    ckpt: Path, bundle: Path, tmp_path: Path
) -> None:
    checkpoint_asked: list[tuple[object, ...]] = [
        ("verify", bundle, bundle),
        ("export", "onnx", bundle, tmp_path / "b"),
        ("plot", "positions", bundle, "-o", tmp_path / "p.png"),
    ]
    for arguments in checkpoint_asked:
        line = refused(*arguments)
        assert f"{bundle} is a bundle, not a checkpoint; pass the folder with config.json" in line
    bundle_asked: list[tuple[object, ...]] = [
        ("verify", ckpt, ckpt),
        ("run", ckpt, "--ids", "1"),
        ("inspect", ckpt),
        ("diff", bundle, ckpt),
    ]
    for arguments in bundle_asked:
        line = refused(*arguments)
        assert f"{ckpt} is a checkpoint, not a bundle; pass the folder with manifest.json" in line


def test_verify_refutes_a_bundle_whose_weights_were_changed_though_its_hashes_fit(
    ckpt: Path, bundle: Path, tmp_path: Path
) -> None:
    result = invoke("verify", poisoned(bundle, tmp_path / "p", 0.5), ckpt, "--device", "cpu")
    assert result.exit_code == REFUSED
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: weights is refuted")


# inspect.


def test_inspect_shows_everything_that_is_known(home: Path) -> None:
    for kind in ("onnx", "torchscript", "program"):
        result = done("inspect", home / kind)
        with open_bundle(home / kind) as opened:
            manifest = opened.manifest
        words = "".join(result.stdout.split())
        for part in (str(home / kind), kind, "input_ids", "max_len", "vocab_size=20", "parity:"):
            assert part in words
        for name, file in manifest.files.items():
            assert name in words
            assert file.sha256 in words
        assert result.stderr == ""


def test_inspect_as_json_is_the_manifest(bundle: Path) -> None:
    assert done("inspect", bundle, "--json").stdout == (bundle / "manifest.json").read_text()


@pytest.mark.parametrize("name", ["model[v2]", "[bold]x", "a[b", "🙂 [red]", "日本 語"])
def test_inspect_shows_the_path_as_it_was_given(bundle: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(bundle, tmp_path / name)
    assert "".join(name.split()) in "".join(done("inspect", tmp_path / name).stdout.split())


def test_inspect_shows_a_path_with_a_slash_before_a_bracket(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "a[" / "b]")
    assert "a[/b]" in "".join(done("inspect", tmp_path / "a[" / "b]").stdout.split())


def test_inspect_keeps_a_long_path_on_one_line(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / ("long " * 40)
    shutil.copytree(bundle, path)
    assert str(path) in done("inspect", path).stdout


# run.


def lines(text: str) -> list[npt.NDArray[np.float32]]:
    return [np.array(json.loads(line), np.float32) for line in text.splitlines()]


def test_run_of_ids_prints_one_line_of_json(ckpt: Path, bundle: Path) -> None:
    result = done("run", bundle, "--ids", "5 9 2", "--device", "cpu")
    (hidden,) = lines(result.stdout)
    np.testing.assert_allclose(hidden, expected(ckpt, [[5, 9, 2]])[0], atol=1e-5)
    assert result.stderr == ""


def test_run_of_an_array_writes_an_array(ckpt: Path, bundle: Path, tmp_path: Path) -> None:
    ids = [[1, 2, 3], [4, 5, 6]]
    np.save(tmp_path / "ids.npy", np.array(ids, np.int32))
    result = done("run", bundle, "--input", tmp_path / "ids.npy", "--output", tmp_path / "h.npy")
    assert result.stdout == f"{tmp_path / 'h.npy'}: float32 (2, 3, 8)\n"
    hidden = np.load(tmp_path / "h.npy")
    assert hidden.dtype == np.float32
    np.testing.assert_allclose(hidden, expected(ckpt, ids), atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h.npy", "ids.npy"]


def test_run_of_lines_writes_lines_in_their_order(ckpt: Path, bundle: Path, tmp_path: Path) -> None:
    rows = [[1], [2, 3, 4], [5, 6]]
    (tmp_path / "ids.jsonl").write_text("".join(f"{row}\n" for row in rows))
    result = done(
        "run", bundle, "--input", tmp_path / "ids.jsonl", "--output", tmp_path / "h.jsonl"
    )
    assert result.stdout == f"{tmp_path / 'h.jsonl'}: float32, 3 rows, 6 vectors in all\n"
    found = lines((tmp_path / "h.jsonl").read_text())
    for row, hidden in zip(rows, found, strict=True):
        np.testing.assert_allclose(hidden, expected(ckpt, [row])[0], atol=1e-5)


def test_run_of_standard_input(ckpt: Path, bundle: Path) -> None:
    result = done("run", bundle, "--input", "-", "--device", "cpu", stdin="[5, 9]\n[2]\n")
    first, second = lines(result.stdout)
    np.testing.assert_allclose(first, expected(ckpt, [[5, 9]])[0], atol=1e-5)
    np.testing.assert_allclose(second, expected(ckpt, [[2]])[0], atol=1e-5)


def test_run_of_lines_of_one_length_writes_an_array(bundle: Path, tmp_path: Path) -> None:
    done("run", bundle, "--input", "-", "--output", tmp_path / "h.npy", stdin="[5, 9]\n[2, 3]\n")
    assert np.load(tmp_path / "h.npy").shape == (2, 2, 8)


def test_run_of_an_empty_array_writes_an_empty_array(bundle: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.zeros((0, 5), np.int64))
    done("run", bundle, "--input", tmp_path / "ids.npy", "--output", tmp_path / "h.npy")
    assert np.load(tmp_path / "h.npy").shape == (0, 5, 8)


def test_run_of_no_lines_prints_no_lines(bundle: Path) -> None:
    for text in ("", "\n\n"):
        assert done("run", bundle, "--input", "-", stdin=text).stdout == ""


def test_run_replaces_an_old_output(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "h.npy").write_bytes(b"old")
    done("run", bundle, "--ids", "1 2", "--output", tmp_path / "h.npy")
    assert np.load(tmp_path / "h.npy").shape == (1, 2, 8)


def test_run_that_cuts_says_so_on_standard_error(ckpt: Path, bundle: Path) -> None:
    ids = list(range(12))
    result = done(
        "run", bundle, "--ids", " ".join(map(str, ids)), "--overflow", "truncate", "--device", "cpu"
    )
    (hidden,) = lines(result.stdout)
    np.testing.assert_allclose(hidden, expected(ckpt, [ids[:10]])[0], atol=1e-5)
    (line,) = result.stderr.splitlines()
    assert line.startswith("Warning: ")
    assert "12 tokens" in line
    assert "10" in line


@pytest.mark.parametrize(
    ("ids", "parts"),
    [
        ("", ["0 tokens"]),
        ("1 x", ["'x'", "whole numbers"]),
        ("1 2.0", ["'2.0'"]),
        ("²", ["'²'"]),
        ("--5", ["'--5'"]),
        ("1 20", ["id 20", "(row 0, column 1)", "0..19"]),
        ("-1", ["id -1", "0..19"]),
        (f"1 {2**40}", [f"id {2**40}", "column 1"]),
        (f"1 {2**63}", [f"id {2**63}", "column 1"]),
        (f"1 {2**70}", [f"id {2**70}", "column 1"]),
        ("1 " * 11, ["11", "max_len 10", "sinusoidal", "--max-len"]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_run_refuses_ids_in_one_line(bundle: Path, ids: str, parts: list[str]) -> None:
    line = refused("run", bundle, f"--ids={ids}", "--device", "cpu")
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("5\n", ["line 1", "not a list"]),
        ("[1]\n{}\n", ["line 2", "not a list"]),
        ("[1]\nnope\n", ["line 2", "not JSON"]),
        ("[1]\n[]\n", ["sequence 1", "0 tokens"]),
        ("[1]\n[1, true]\n", ["sequence 1", "bool"]),
        ("[1]\n[1.0]\n", ["sequence 1", "float64"]),
        ("[1]\n[null]\n", ["sequence 1", "object"]),
        ('[1]\n["5"]\n', ["sequence 1", "U1"]),
        ("[1]\n[[1]]\n", ["sequence 1", "one axis"]),
        ("[1]\n[[1], 2]\n", ["sequence 1"]),
        (f"[1]\n{'[' * 500}1{']' * 500}\n", ["sequence 1"]),
        ("[1]\n[20]\n", ["id 20", "row 1"]),
        (f"[1]\n[{2**70}]\n", [f"id {2**70}", "row 1"]),
        (f"[1]\n{[1] * 11}\n", ["11", "max_len 10"]),
    ],
    ids=lambda value: str(value)[:24],
)
def test_run_refuses_lines_in_one_line(bundle: Path, text: str, parts: list[str]) -> None:
    line = refused("run", bundle, "--input", "-", "--device", "cpu", stdin=text)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("ids", "parts"),
    [
        (np.zeros((2, 3)), ["float64", "expected integers"]),
        (np.zeros((2, 3), bool), ["bool"]),
        (np.zeros(3, int), ["shape (3,)", "two axes"]),
        (np.zeros((1, 2, 3), int), ["shape (1, 2, 3)"]),
        (np.zeros((), int), ["shape ()"]),
        (np.zeros((2, 0), int), ["0 tokens"]),
        (np.zeros((2, 11), int), ["11", "max_len 10"]),
        (np.full((2, 3), 2**63, np.uint64), [f"id {2**63}", "row 0"]),
        (np.array([["a"]]), ["U1"]),
    ],
    ids=lambda value: f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else "",
)
def test_run_refuses_an_array_in_one_line(
    bundle: Path, tmp_path: Path, ids: npt.NDArray[Any], parts: list[str]
) -> None:
    np.save(tmp_path / "ids.npy", ids)
    line = refused("run", bundle, "--input", tmp_path / "ids.npy", "--device", "cpu")
    for part in parts:
        assert part in line


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_run_refuses_files_that_hold_no_ids_in_one_line(bundle: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "whole.npy", np.zeros((2, 3), int))
    content = (tmp_path / "whole.npy").read_bytes()
    bomb = Bomb(tmp_path / "exploded")
    np.save(tmp_path / "objects.npy", np.array([bomb], object), allow_pickle=True)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(bomb))
    (tmp_path / "cut.npy").write_bytes(content[:-5])
    (tmp_path / "cut header.npy").write_bytes(content[:40])
    (tmp_path / "damaged.npy").write_bytes(content.replace(b"}", b"{"))
    (tmp_path / "huge.npy").write_bytes(content.replace(b"(2, 3)", b"(999999999999999,)", 1))
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "latin.jsonl").write_bytes(b"[1] \xff\n")
    for path in [*sorted(tmp_path.iterdir()), tmp_path / "missing.npy", tmp_path / "missing.jsonl"]:
        if path.name != "whole.npy":
            line = refused("run", bundle, "--input", path, "--device", "cpu")
            assert str(path) in line
    assert not (tmp_path / "exploded").exists()


def test_run_of_rows_of_different_lengths_into_an_array_is_refused_and_leaves_no_file(
    bundle: Path, tmp_path: Path
) -> None:
    arguments = ("run", bundle, "--input", "-", "--device", "cpu", "--output", tmp_path / "h.npy")
    line = refused(*arguments, stdin="[1]\n[2, 3]\n")
    assert "different lengths" in line
    assert ".jsonl" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["h.npy", "h.jsonl"])
def test_run_that_fails_leaves_the_old_output(bundle: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"old")
    refused("run", bundle, "--ids", "99", "--device", "cpu", "--output", tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / name]


@pytest.mark.parametrize("name", ["h.npy", "h.jsonl"])
def test_run_into_a_folder_that_is_not_there_is_wrong_usage(
    bundle: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "missing" / name
    text = misused("run", bundle, "--ids", "1", "--device", "cpu", "--output", path)
    assert "there is no folder" in text


def test_run_of_another_format_names_the_command_that_helps(home: Path) -> None:
    for kind in ("torchscript", "program"):
        line = refused("run", home / kind, "--ids", "1")
        assert kind in line
        assert "causal-encoder export onnx" in line


def test_run_on_cuda_that_is_not_there_is_refused(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "causal_encoder.serve.placement.cuda_problem", lambda: "libcuda.so.1 not found"
    )
    assert "libcuda.so.1" in refused("run", bundle, "--ids", "1", "--device", "cuda")


def poisoned(bundle: Path, copy: Path, factor: float) -> Path:
    """A copy whose token embedding was multiplied, with hashes that fit."""

    def edit(proto: onnx.ModelProto) -> None:
        (tensor,) = (t for t in proto.graph.initializer if t.name == "token_embedding")
        content = numpy_helper.to_array(tensor) * np.float32(factor)
        tensor.CopyFrom(numpy_helper.from_array(content, tensor.name))

    return tampered(bundle, copy, edit)


def test_run_of_weights_that_overflow_is_one_line_and_prints_no_nan(
    bundle: Path, tmp_path: Path
) -> None:
    line = refused("run", poisoned(bundle, tmp_path / "p", np.nan), "--ids", "1", "--device", "cpu")
    assert "NaN" in line
    assert "verify the bundle" in line


# Damaged bundles, whatever the command.

DAMAGE: dict[str, Callable[[Path], object]] = {
    "model cut": lambda folder: os.truncate(folder / "model.onnx", 100),
    "model gone": lambda folder: (folder / "model.onnx").unlink(),
    "manifest gone": lambda folder: (folder / "manifest.json").unlink(),
    "manifest cut": lambda folder: os.truncate(folder / "manifest.json", 100),
    "manifest empty": lambda folder: os.truncate(folder / "manifest.json", 0),
    "stray file": lambda folder: (folder / "stray").touch(),
    "all gone": lambda folder: shutil.rmtree(folder),
}


@pytest.mark.parametrize("command", ["run", "inspect", "inspect --json", "verify"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_bundle_is_one_line_that_names_it(
    ckpt: Path, copy: Path, command: str, damage: str
) -> None:
    DAMAGE[damage](copy)
    rest = {
        "run": ("--ids", "1", "--device", "cpu"),
        "verify": (ckpt, "--device", "cpu"),
        "inspect": (),
        "inspect --json": ("--json",),
    }[command]
    assert str(copy) in refused(command.split()[0], copy, *rest)


@pytest.mark.parametrize("command", ["run", "inspect", "verify", "export"])
def test_a_path_that_cannot_be_a_bundle_is_one_line(
    ckpt: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (Path("/"), tmp_path / "loop", tmp_path / ("x" * 300)):
        arguments: dict[str, tuple[object, ...]] = {
            "run": ("run", path, "--ids", "1"),
            "inspect": ("inspect", path),
            "verify": ("verify", path, ckpt),
            "export": ("export", "torchscript", ckpt, path),
        }
        refused(*arguments[command])


def test_a_path_that_cannot_be_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (Path("/"), tmp_path / "loop", tmp_path / ("x" * 300)):
        refused("export", "torchscript", path, tmp_path / "bundle")
    refused("new", tmp_path / ("x" * 300), *SMALL)


@pytest.mark.parametrize("command", ["run", "inspect", "verify"])
def test_a_bundle_left_aside_by_a_kill_is_put_back_by_the_next_command(
    ckpt: Path, copy: Path, command: str
) -> None:
    copy.rename(copy.parent / f".{copy.name}.previous")
    rest = {"run": ("--ids", "1"), "inspect": (), "verify": (ckpt, "--device", "cpu")}[command]
    done(command, copy, *rest)
    assert list(copy.parent.iterdir()) == [copy]


# What the library logs.


@pytest.fixture
def dead_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something shows a GPU, and CUDA does not work."""
    cuda = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: cuda)
    monkeypatch.setattr(placement, "gpu_sign", lambda _: "/dev/nvidia0")
    monkeypatch.setattr(placement, "cuda_problem", lambda: "libcublas.so.13 not found")


@pytest.mark.slow
@pytest.mark.usefixtures("dead_gpu")
def test_a_gpu_that_is_not_used_is_told_once_however_many_sessions_open(bundle: Path) -> None:
    said = (
        "Warning: /dev/nvidia0 shows a GPU, but the session is running on CPU: "
        "CUDA cannot be used: libcublas.so.13 not found\n"
    )
    assert done("run", bundle, "--ids", "1").stderr == said
    assert done("diff", bundle, bundle, "--json").stderr == said


def test_without_a_gpu_nothing_is_said_of_the_cpu(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "gpu_sign", lambda _: "")
    monkeypatch.setattr(placement, "cuda_problem", lambda: "libcuda.so.1 not found")
    assert done("run", bundle, "--ids", "1").stderr == ""


# Names that are not UTF-8.

ODD = os.fsdecode(b"x\xff")


@pytest.mark.slow
def test_a_name_that_is_not_utf_8_is_printed_with_an_escape(
    ckpt: Path, bundle: Path, tmp_path: Path
) -> None:
    """In processes of their own, where standard output is a real one."""
    missing, output = tmp_path / ODD / "missing", tmp_path / f"{ODD}.npy"
    commands: list[tuple[object, ...]] = [
        ("run", missing, "--ids", "1"),
        ("run", bundle, "--input", missing),
        ("run", bundle, "--ids", "1", "--output", output),
        ("run", bundle, "--ids", ODD),
        ("inspect", missing),
        ("verify", missing, ckpt),
        ("export", "onnx", missing, tmp_path / "b"),
        ("doctor", missing),
        ("new", tmp_path / ODD, *SMALL),
    ]
    for arguments in commands:
        printed = process(*arguments)
        assert "\\udcff" in printed.out + printed.err, printed
        assert "Traceback" not in printed.err
        assert len(printed.err.splitlines()) <= 1


@pytest.mark.parametrize("kind", ["onnx", "torchscript", "program"])
def test_a_folder_whose_name_is_not_utf_8_is_used_or_refused_with_a_reason(
    home: Path, ckpt: Path, tmp_path: Path, kind: str
) -> None:
    odd = tmp_path / ODD
    shutil.copytree(home / kind, odd / "bundle")
    shutil.copytree(ckpt, odd / "ckpt")
    for arguments in (
        ("run", odd / "bundle", "--ids", "1", "--device", "cpu"),
        ("verify", odd / "bundle", ckpt, "--device", "cpu"),
        ("verify", home / kind, odd / "ckpt", "--device", "cpu"),
        ("export", kind, ckpt, odd / "new"),
    ):
        result = invoke(*arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        if result.exit_code != DONE:
            (line,) = result.stderr.splitlines()
            assert "UTF-8" in line or "export onnx" in line


# In a process of its own.


def test_a_refusal_is_one_line_on_standard_error_and_no_traceback(bundle: Path) -> None:
    printed = process("run", bundle, "--ids", "99", "--device", "cpu")
    assert printed.exit_code == REFUSED
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("Error: id 99 at (row 0, column 0)")


def test_a_run_prints_json_lines_and_nothing_else(ckpt: Path, bundle: Path) -> None:
    printed = process("run", bundle, "--input", "-", stdin="[1, 2]\n[3]\n")
    assert printed.exit_code == DONE
    first, second = lines(printed.out)
    np.testing.assert_allclose(first, expected(ckpt, [[1, 2]])[0], atol=1e-5)
    np.testing.assert_allclose(second, expected(ckpt, [[3]])[0], atol=1e-5)
    assert "Traceback" not in printed.err


def test_a_cut_is_told_on_standard_error_alone(bundle: Path) -> None:
    ids = "1 " * 11
    printed = process("run", bundle, "--ids", ids, "--overflow", "truncate", "--device", "cpu")
    assert printed.exit_code == DONE
    (hidden,) = lines(printed.out)
    assert hidden.shape == (10, 8)
    (line,) = printed.err.splitlines()
    assert line.startswith("Warning: ")


@pytest.mark.slow
def test_verify_in_a_pipe_writes_json_alone_to_standard_output(ckpt: Path, bundle: Path) -> None:
    printed = process("verify", bundle, ckpt, "--device", "cpu", "--json", "-")
    assert printed.exit_code == DONE
    assert json.loads(printed.out)["verdict"] == "proven"
    assert "\x1b" not in printed.err, "no progress bar in a pipe"


@pytest.mark.slow
def test_export_in_a_pipe_prints_one_line_and_shows_no_bar(ckpt: Path, tmp_path: Path) -> None:
    printed = process("export", "torchscript", ckpt, tmp_path / "bundle")
    assert printed.exit_code == DONE
    assert len(printed.out.splitlines()) == 1
    assert "\x1b" not in printed.err


def test_run_and_inspect_work_without_torch_and_onnx(ckpt: Path, bundle: Path) -> None:
    printed = process("run", bundle, "--ids", "5 9", "--device", "cpu", before=WITHOUT_EXTRAS)
    assert printed.exit_code == DONE, printed.err
    np.testing.assert_allclose(lines(printed.out)[0], expected(ckpt, [[5, 9]])[0], atol=1e-5)
    printed = process("inspect", bundle, "--json", before=WITHOUT_EXTRAS)
    assert printed.exit_code == DONE, printed.err
    assert json.loads(printed.out)["format"] == "onnx"
    assert process("inspect", bundle, before=WITHOUT_EXTRAS).exit_code == DONE


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "onnx", "ckpt", "bundle"),
        ("export", "torchscript", "ckpt", "bundle"),
        ("export", "program", "ckpt", "bundle"),
        ("verify", "bundle", "ckpt"),
        ("new", "ckpt", "--vocab-size", "5"),
    ],
    ids=" ".join,
)
def test_what_needs_an_extra_says_how_to_install_it(arguments: tuple[str, ...]) -> None:
    printed = process(*arguments, before=WITHOUT_EXTRAS)
    assert printed.exit_code == REFUSED
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("Error: ")
    assert "pip install 'causal-encoder[export]'" in line


def test_help_works_without_the_extras() -> None:
    for arguments in (("--help",), ("export", "onnx", "--help"), ("plot", "positions", "--help")):
        assert process(*arguments, before=WITHOUT_EXTRAS).exit_code == DONE


def test_a_reader_that_goes_away_is_no_traceback(bundle: Path) -> None:
    program = "import sys\nfrom causal_encoder.cli import main\nmain()"
    rows = "[1, 2, 3]\n" * 2000
    with subprocess.Popen(
        [sys.executable, "-c", program, "run", bundle, "--input", "-", "--device", "cpu"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdin.write(rows)
        running.stdin.close()
        assert running.stdout.readline().startswith("[[")
        running.stdout.close()
        assert "Traceback" not in running.stderr.read()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize("command", ["run", "inspect", "inspect --json"])
def test_a_full_disk_behind_standard_output_is_told_without_a_traceback(
    bundle: Path, command: str
) -> None:
    name, *flags = command.split()
    rest = ("--ids", "1", "--device", "cpu") if name == "run" else flags
    program = "import sys\nfrom causal_encoder.cli import main\nmain()"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program, name, bundle, *rest],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode != DONE
    assert ended.stderr.startswith("Error: ")
    assert "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["run", "inspect"])
def test_a_terminal_that_knows_ascii_alone_is_no_hindrance(
    bundle: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(bundle, tmp_path / "bündel")
    rest = ("--ids", "99", "--device", "cpu") if name == "run" else ()
    printed = process(name, tmp_path / "bündel", *rest, PYTHONIOENCODING="ascii")
    assert printed.exit_code == (REFUSED if name == "run" else DONE)
    assert "Traceback" not in printed.err


def test_the_same_numbers_come_from_the_command_and_from_the_session(bundle: Path) -> None:
    (hidden,) = lines(done("run", bundle, "--ids", "7 7 7", "--device", "cpu").stdout)
    np.testing.assert_array_equal(hidden, EncoderSession(bundle, "cpu").run([[7, 7, 7]])[0])
