"""Publishing: a reader finds the old bundle or the new one, whatever happens."""

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import causal_encoder.export.publish as publish_module
from causal_encoder.errors import ExportError
from causal_encoder.export import Report, export_torchscript, verify
from causal_encoder.export.checks import FILE_CHECKS, RUN_CHECKS, Finding
from causal_encoder.serve import open_bundle
from tests.bundles import EXPORTERS, small_model

OLD, NEW = small_model(position="learned"), small_model(position="sinusoidal")


def position_of(bundle: Path) -> str:
    with open_bundle(bundle) as opened:
        return opened.manifest.position


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_manifest_holds_the_report_made_before_publishing(tmp_path: Path) -> None:
    manifest = export_torchscript(OLD, tmp_path / "bundle")
    assert manifest.parity is not None
    assert manifest.parity["verdict"] == "proven"
    names = [row["name"] for row in manifest.parity["checks"]]
    about_onnx = ("attention", "stored once", "settings")
    assert names == [name for name in FILE_CHECKS | RUN_CHECKS if name not in about_onnx]
    assert manifest.tools["torch"] == torch.__version__
    with open_bundle(tmp_path / "bundle") as opened:
        assert opened.manifest == manifest


def test_parent_folders_are_made_and_nothing_is_left_beside_the_bundle(tmp_path: Path) -> None:
    export_torchscript(OLD, tmp_path / "a" / "b" / "bundle")
    assert names_in(tmp_path / "a" / "b") == ["bundle"]
    assert names_in(tmp_path / "a" / "b" / "bundle") == ["manifest.json", "model.pt"]


def test_a_bundle_is_replaced_only_if_that_was_asked_for(tmp_path: Path) -> None:
    export_torchscript(OLD, tmp_path / "bundle")
    with pytest.raises(ExportError, match=r"exists; pass force=True \(--force\)"):
        export_torchscript(NEW, tmp_path / "bundle")
    assert position_of(tmp_path / "bundle") == "learned"
    export_torchscript(NEW, tmp_path / "bundle", force=True)
    assert position_of(tmp_path / "bundle") == "sinusoidal"
    assert names_in(tmp_path) == ["bundle"]


@pytest.mark.parametrize("kind", ["torchscript", "program"])  # for onnx see test_onnx.py
def test_no_weight_is_stored_twice_and_a_second_export_leaves_no_more_than_the_first(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one that two layers share stored more than twice."""
    unverified = Report(format=kind, device="cpu", checks=())
    monkeypatch.setattr(publish_module, "verify_prepared", lambda *_: unverified)
    model = small_model(d_model=96, d_ff=1000, position="sinusoidal+learned")
    model.blocks[1] = model.blocks[0]
    weights = sum(4 * tensor.numel() for tensor in model.state_dict().values())
    sizes = []
    for _ in range(2):
        EXPORTERS[kind](model, tmp_path / "bundle", force=True)
        assert names_in(tmp_path) == ["bundle"]
        found = {path.name: path.stat().st_size for path in (tmp_path / "bundle").iterdir()}
        assert sum(found.values()) < 1.05 * weights + 2**16
        sizes.append(found)
    assert sizes[0] == sizes[1]


def empty_folder(target: Path) -> None:
    target.mkdir()


def folder_of_a_user(target: Path) -> None:
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")


def bundle_with_a_users_file(target: Path) -> None:
    export_torchscript(OLD, target)
    (target / "notes.txt").write_text("mine")


def plain_file(target: Path) -> None:
    target.write_text("mine")


def folder_with_a_foreign_manifest(target: Path) -> None:
    target.mkdir()
    (target / "manifest.json").write_text('{"name": "a web application"}')


@pytest.mark.parametrize(
    "make",
    [
        empty_folder,
        folder_of_a_user,
        bundle_with_a_users_file,
        plain_file,
        folder_with_a_foreign_manifest,
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_what_is_not_a_bundle_is_never_replaced(
    make: Callable[[Path], None], force: bool, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    make(target)
    before = names_in(target) if target.is_dir() else target.read_text()
    with pytest.raises(ExportError, match="is not a bundle; choose another path"):
        export_torchscript(NEW, target, force=force)
    assert (names_in(target) if target.is_dir() else target.read_text()) == before
    assert names_in(tmp_path) == ["target"]


def test_a_damaged_bundle_may_be_replaced(tmp_path: Path) -> None:
    export_torchscript(OLD, tmp_path / "bundle")
    (tmp_path / "bundle" / "model.pt").unlink()
    export_torchscript(NEW, tmp_path / "bundle", force=True)
    assert position_of(tmp_path / "bundle") == "sinusoidal"


def test_a_link_to_a_bundle_stays_a_link(tmp_path: Path) -> None:
    export_torchscript(OLD, tmp_path / "real")
    (tmp_path / "current").symlink_to("real")
    export_torchscript(NEW, tmp_path / "current", force=True)
    assert (tmp_path / "current").is_symlink()
    assert position_of(tmp_path / "real") == "sinusoidal"


def test_a_refuted_export_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_torchscript(OLD, tmp_path / "bundle")
    monkeypatch.setitem(RUN_CHECKS, "parity", lambda _: Finding(detail="off by one"))
    with pytest.raises(ExportError, match="not published, because parity is refuted: off by one"):
        export_torchscript(NEW, tmp_path / "bundle", force=True)
    assert position_of(tmp_path / "bundle") == "learned"
    assert names_in(tmp_path) == ["bundle"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("step", ["write_bytes", "write_text", "fsync", "rename"])
def test_the_true_error_is_shown_and_the_old_bundle_stays(
    step: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_torchscript(OLD, tmp_path / "bundle")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "the disk")

    with monkeypatch.context() as patch:
        patch.setattr(Path if step.startswith("write") else os, step, fail)
        with pytest.raises(ExportError, match=f"the disk: {os.strerror(number)}"):
            export_torchscript(NEW, tmp_path / "bundle", force=True)
    assert position_of(tmp_path / "bundle") == "learned"
    assert names_in(tmp_path) == ["bundle"]


def test_a_failure_between_the_two_renames_puts_the_old_bundle_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_torchscript(OLD, tmp_path / "bundle")
    rename = os.rename

    def fail_on_the_new(source: Path, target: Path) -> None:
        if str(source).endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error", str(source))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_on_the_new)
        with pytest.raises(ExportError, match="Input/output error"):
            export_torchscript(NEW, tmp_path / "bundle", force=True)
    assert position_of(tmp_path / "bundle") == "learned"
    assert names_in(tmp_path) == ["bundle"]


def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(ExportError) as caught:  # /proc takes no folders, not even from root
        export_torchscript(NEW, "/proc/bundle")
    assert "\n" not in str(caught.value)
    assert "/proc" in str(caught.value)


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    import torch
    import causal_encoder.export.publish as publish
    from causal_encoder.export import export_torchscript
    from tests.bundles import small_model

    torch.set_num_threads(1)

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def die_in_the_middle(path, content):
        path.open("wb").write(bytes(content)[:1000])
        die()

    def rename(source, target, real=os.rename):
        if os.environ["MOMENT"] == "before the renames":
            die()
        real(source, target)
        if os.environ["MOMENT"] == "between the renames":
            die()

    patches = {
        "while the model is written": lambda: setattr(Path, "write_bytes", die_in_the_middle),
        "before the manifest": lambda: setattr(publish, "_write_manifest", die),
        "before verification": lambda: setattr(publish, "verify_prepared", die),
        "before the renames": lambda: setattr(os, "rename", rename),
        "between the renames": lambda: setattr(os, "rename", rename),
        "before the old one is removed": lambda: setattr(
            publish.shutil, "rmtree", lambda path, **_: die() if ".partial" in str(path) and
            Path(path).exists() else None
        ),
    }
    model = small_model(position="sinusoidal")
    for moment, patch in patches.items():
        child = os.fork()
        if child == 0:
            os.environ["MOMENT"] = moment
            patch()
            export_torchscript(model, Path(sys.argv[1]) / moment / "bundle", force=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(moment, os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, flush=True)
    """
)


def test_a_kill_at_any_moment_leaves_a_whole_bundle(tmp_path: Path) -> None:
    moments = {
        "while the model is written": "learned",
        "before the manifest": "learned",
        "before verification": "learned",
        "before the renames": "learned",
        "between the renames": "learned",
        "before the old one is removed": "sinusoidal",
    }
    for moment in moments:
        export_torchscript(OLD, tmp_path / moment / "bundle")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert result.stdout.splitlines() == [f"{moment} True" for moment in moments], result.stderr
    for moment, expected in moments.items():
        assert len(names_in(tmp_path / moment)) == 2, "the kill came too early or too late"
        assert position_of(tmp_path / moment / "bundle") == expected, moment
        export_torchscript(NEW, tmp_path / moment / "bundle", force=True)
        assert names_in(tmp_path / moment) == ["bundle"], "the next export cleans up"


def export_once(path: str, position: str, force: bool, results: Any) -> None:
    torch.set_num_threads(1)
    try:
        export_torchscript(small_model(position=position), path, force=force)
        results.put((position, "published"))
    except ExportError as error:
        results.put((position, str(error)))


@pytest.mark.parametrize("force", [False, True])
def test_of_two_exports_at_once_one_wins_whole(force: bool, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    target = str(tmp_path / "bundle")
    children = [
        context.Process(target=export_once, args=(target, position, force, results))
        for position in ("learned", "none")
    ]
    for child in children:
        child.start()
    outcome = dict(results.get(timeout=120) for _ in children)
    for child in children:
        child.join()
    winners = [position for position, result in outcome.items() if result == "published"]
    assert len(winners) == (2 if force else 1), outcome
    assert position_of(tmp_path / "bundle") in winners
    assert names_in(tmp_path) == ["bundle"]


def test_the_folder_of_a_running_export_is_not_cleaned_away(tmp_path: Path) -> None:
    with publish_module._staging(tmp_path / "bundle") as running:
        export_torchscript(OLD, tmp_path / "bundle")
        assert running.exists()
    assert names_in(tmp_path) == ["bundle"]


def test_an_interrupt_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(publish_module, "verify_prepared", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_torchscript(OLD, tmp_path / "bundle")
    assert names_in(tmp_path) == []


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        export_torchscript(OLD, tmp_path / "bundle")
    finally:
        os.umask(mask)
    assert (tmp_path / "bundle").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "bundle" / "model.pt").stat().st_mode & 0o777 == 0o644


def test_verifying_later_changes_nothing_on_disk(tmp_path: Path) -> None:
    export_torchscript(OLD, tmp_path / "bundle")
    before = {
        p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "bundle").iterdir()
    }
    assert verify(tmp_path / "bundle", OLD).proven
    after = {
        p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "bundle").iterdir()
    }
    assert after == before


def test_the_manifest_is_plain_json_with_the_documented_fields(tmp_path: Path) -> None:
    export_torchscript(OLD, tmp_path / "bundle")
    fields = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert fields["schema_version"] == 1
    assert fields["max_len"] == fields["config"]["max_len"] == 17
    assert fields["inputs"] == [
        {"name": "input_ids", "dtype": "int64", "axes": ["batch", "sequence"]}
    ]
    assert fields["outputs"] == [
        {"name": "hidden", "dtype": "float32", "axes": ["batch", "sequence", 12]}
    ]
    assert set(fields["files"]) == {"model.pt"}
