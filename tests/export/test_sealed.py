"""Bundles on a real disk: data files that lead elsewhere, killed commands, a full disk."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from causal_encoder.errors import BundleError
from causal_encoder.export import export_onnx, export_torchscript, verify
from causal_encoder.model import save_checkpoint
from causal_encoder.serve import EncoderSession, open_bundle
from tests.bundles import reseal, small_model
from tests.export.conftest import Exported
from tests.opener import Opener

ROOT = Path(__file__).parents[2]
DATA = "model.onnx.data"


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    opener = Opener()
    yield opener
    opener.close()


@pytest.fixture
def split(exported: Callable[[str, str], Exported], tmp_path: Path) -> Path:
    """A bundle with its weights in a file beside the graph, alone in a folder."""
    _, bundle = exported("onnx", "learned")
    folder = shutil.copytree(bundle, tmp_path / "home" / "bundle")
    proto = onnx.load(folder / "model.onnx")
    onnx.save_model(
        proto,
        folder / "model.onnx",
        save_as_external_data=True,
        location=DATA,
        size_threshold=64,
    )
    reseal(folder)
    return folder


def change_entries(bundle: Path, every: bool, **entries: str | None) -> None:
    """Edit where the graph says its weights are, and make the hashes fit; None removes."""
    proto = onnx.load(bundle / "model.onnx", load_external_data=False)
    outside = [tensor for tensor in proto.graph.initializer if tensor.external_data]
    for tensor in outside if every else outside[:1]:
        fields = {entry.key: entry.value for entry in tensor.external_data} | entries
        del tensor.external_data[:]
        for key, value in fields.items():
            if value is not None:
                tensor.external_data.add(key=key, value=value)
    (bundle / "model.onnx").write_bytes(proto.SerializeToString())
    reseal(bundle)


@pytest.mark.parametrize(
    "location",
    ["../outside", "../../home/outside", "sub/../../outside", "{home}/outside",
       "/dev/zero", "/proc/self/mem",
     "", ".", "..", "nowhere", "file://model.onnx.data", "*/_ORT_MEM_ADDR_/*", "model.onnx",
     "manifest.json"],
)  # fmt: skip
def test_weights_are_read_from_the_data_file_of_the_bundle_or_not_at_all(
    location: str, split: Path, opener: Opener
) -> None:
    shutil.copy(split / DATA, split.parent / "outside")
    change_entries(split, every=True, location=location.format(home=split.parent))
    found = opener.open(split)
    assert found["outcome"] == "BundleError", found
    assert "model.onnx" in found["detail"]


@pytest.mark.parametrize("target", ["../outside", "{home}/outside", "model.onnx", "nowhere"])
def test_a_linked_data_file_is_refused_even_if_its_hash_fits(
    target: str, split: Path, opener: Opener
) -> None:
    (split / DATA).rename(split.parent / "outside")
    (split / DATA).symlink_to(target.format(home=split.parent))
    if (split / DATA).exists():
        reseal(split)
    found = opener.open(split)
    assert found["outcome"] == "BundleError", found
    assert f"{DATA} is not a regular file" in found["detail"]


def test_a_hard_linked_data_file_is_as_good_as_a_copy(split: Path, opener: Opener) -> None:
    os.link(split / DATA, split.parent / "outside")
    assert opener.open(split) == {"outcome": "answered", "detail": ""}


def test_a_hard_linked_data_file_is_verified_like_a_copy(
    split: Path, exported: Callable[[str, str], Exported]
) -> None:
    os.link(split / DATA, split.parent / "outside")
    report = verify(split, exported("onnx", "learned")[0], device="cpu")
    assert report.first_failure == ""


def test_weights_outside_the_bundle_are_not_read_to_verify_them(
    split: Path, exported: Callable[[str, str], Exported]
) -> None:
    shutil.copy(split / DATA, split.parent / "outside")
    change_entries(split, every=False, location="../outside")
    with pytest.raises(BundleError, match="outside of the bundle"):
        verify(split, exported("onnx", "learned")[0], device="cpu")


@pytest.mark.parametrize("field", ["offset", "length"])
@pytest.mark.parametrize(
    "value",
    ["-1", "-4096", str(-(2**63)), str(2**31), str(2**40), str(2**62), str(2**63 - 1), str(2**63),
     str(2**64 - 1), str(2**64), "9" * 40, "x", "1.5", "1e3", " 1", ""],
)  # fmt: skip
def test_weights_outside_the_data_file_are_refused(
    field: str, value: str, split: Path, opener: Opener
) -> None:
    change_entries(split, every=False, **{field: value})
    found = opener.open(split)
    assert found["outcome"] == "BundleError", found


def test_weights_that_reach_one_byte_over_the_end_are_refused(split: Path, opener: Opener) -> None:
    size = (split / DATA).stat().st_size
    (split / DATA).write_bytes((split / DATA).read_bytes()[:-1])
    reseal(split)
    assert opener.open(split)["outcome"] == "BundleError"
    change_entries(split, every=False, offset=str(size - 1))
    assert opener.open(split)["outcome"] == "BundleError"


@pytest.mark.parametrize("kind", ["onnx", "torchscript", "program"])
def test_a_file_of_any_format_cut_at_any_length_is_refused_by_name(
    kind: str, exported: Callable[[str, str], Exported], split: Path, tmp_path: Path
) -> None:
    """By its size, before a parser can say that it understands nothing."""
    bundle = split
    if kind != "onnx":
        bundle = shutil.copytree(exported(kind, "learned")[1], tmp_path / "copy")
    for path in sorted(bundle.glob("model.*")):
        content = path.read_bytes()
        size = len(content)
        for length in sorted({0, 1, *range(size // 20, size, size // 20), size - 1}):
            path.write_bytes(content[:length])
            with pytest.raises(BundleError) as caught, open_bundle(bundle):
                pass
            assert str(caught.value).startswith(f"{path} has {length} bytes, expected {size}")
        path.write_bytes(content)
    with open_bundle(bundle):
        pass


def zeros(bundle: Path) -> None:
    (bundle / DATA).write_bytes(bytes((bundle / DATA).stat().st_size))


def extra(bundle: Path) -> None:
    shutil.copy(bundle / DATA, bundle / "model.onnx.data.1")


def missing(bundle: Path) -> None:
    (bundle / DATA).unlink()


def renamed(bundle: Path) -> None:
    (bundle / DATA).rename(bundle / "weights.bin")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (zeros, f"{DATA} was changed"),
        (extra, r"model\.onnx\.data\.1 is not part of the bundle"),
        (missing, f"{DATA} is missing"),
        (renamed, f"{DATA} is missing"),
    ],
)
def test_a_damaged_data_file_is_named(
    damage: Callable[[Path], None], words: str, split: Path
) -> None:
    damage(split)
    with pytest.raises(BundleError, match=words):
        EncoderSession(split, "cpu")


KILLS = 6


@pytest.mark.slow
def test_a_command_killed_at_any_moment_never_loses_the_old_bundle(tmp_path: Path) -> None:
    new = small_model(position="sinusoidal", d_model=24, max_len=64)
    save_checkpoint(new, tmp_path / "ckpt")
    old = small_model(position="learned")
    random_moments = random.Random(0)
    moments = [0.0, *(random_moments.uniform(0.0, 1.0) for _ in range(KILLS - 1))]

    def run(number: int) -> int:
        home = tmp_path / str(number)
        process = subprocess.Popen(
            [sys.executable, "-c", "from causal_encoder.cli import main; main()", "export",
             "torchscript", "--force", str(tmp_path / "ckpt"), str(home / "bundle")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        give_up = time.monotonic() + 60
        while not list(home.glob(".bundle.*.partial")) and process.poll() is None:
            assert time.monotonic() < give_up
            time.sleep(0.001)
        time.sleep(moments[number])
        process.kill()
        return process.wait()

    for number in range(KILLS):
        export_torchscript(old, tmp_path / str(number) / "bundle")
    with ThreadPoolExecutor(KILLS) as pool:
        codes = list(pool.map(run, range(KILLS)))
    assert set(codes) <= {0, -signal.SIGKILL}
    assert codes[0] == -signal.SIGKILL
    for number in range(KILLS):
        home = tmp_path / str(number)
        with open_bundle(home / "bundle") as opened:
            found = opened.manifest.position
        if codes[number] == 0:
            assert found == "sinusoidal"
        assert found in {"learned", "sinusoidal"}
        export_torchscript(old, home / "bundle", force=True)
        assert [path.name for path in home.iterdir()] == ["bundle"], "litter stays"


FULL = textwrap.dedent(
    """
    import json, shutil, sys, warnings
    from pathlib import Path
    import torch
    import causal_encoder.export.onnx as onnx_module
    from causal_encoder.errors import ExportError
    from causal_encoder.serve import open_bundle
    from tests.bundles import EXPORTERS, small_model

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    disk = Path(sys.argv[1])
    old, new = small_model(position="learned"), small_model(d_model=96, num_layers=1)
    EXPORTERS["torchscript"](old, disk / "bundle")
    cases = [("torchscript", free) for free in (0, 4096, 65536, 262144)]
    cases += [("program", 65536), ("onnx", 65536), ("onnx with a data file", 65536)]
    for kind, free in cases:
        if kind == "onnx with a data file":
            onnx_module.SINGLE_FILE_LIMIT_BYTES = 10_000
        with (disk / "filler").open("wb", buffering=0) as filler:
            filler.write(bytes(shutil.disk_usage(disk).free - free))
        try:
            EXPORTERS[kind.split()[0]](new, disk / "bundle", force=True)
            error = "published"
        except ExportError as caught:
            error = str(caught)
        except BaseException as caught:
            error = f"not ours: {type(caught).__name__}: {caught}"
        (disk / "filler").unlink()
        names = sorted(path.name for path in disk.iterdir())
        with open_bundle(disk / "bundle") as opened:
            position = opened.manifest.position
        print(json.dumps([kind, free, error, names, position]), flush=True)
    """
)


@pytest.mark.slow
def test_a_disk_that_is_really_full_is_named_and_the_old_bundle_stays(tmp_path: Path) -> None:
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=600k none "$0" && exec "$@"']
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("no unshare command")
    if subprocess.run([*mount, str(disk), "true"], capture_output=True, check=False).returncode:
        pytest.skip("no small file system may be mounted here")
    result = subprocess.run(
        [*mount, str(disk), sys.executable, "-c", FULL, str(disk)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    cases: list[list[Any]] = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(cases) == 7
    for kind, free, error, names, position in cases:
        assert "No space left on device" in error, (kind, free, error)
        assert str(disk) in error, (kind, free, error)
        assert "\n" not in error, (kind, free, error)
        assert names == ["bundle"], (kind, free)
        assert position == "learned", (kind, free)


@pytest.mark.slow
@pytest.mark.skipif(
    os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 20 * 2**30,
    reason="takes over 12 GiB of memory",
)
def test_a_model_of_over_2_gib_is_exported_and_runs(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 8 * 2**30:
        pytest.skip("takes 5 GiB of disk")
    model = small_model(
        vocab_size=600_000, d_model=1024, num_heads=8, d_ff=64, num_layers=1, max_len=2
    )
    try:
        manifest = export_onnx(model, tmp_path / "bundle")
        hidden = EncoderSession(tmp_path / "bundle", "cpu").run([[0, 599_999], [599_999, 1]])
    finally:
        shutil.rmtree(tmp_path / "bundle", ignore_errors=True)  # pytest would keep it
    assert manifest.files[DATA].size_bytes > 2 * 2**30
    assert manifest.files["model.onnx"].size_bytes < 2**20
    assert manifest.parity is not None
    assert manifest.parity["verdict"] == "proven"
    assert hidden.shape == (2, 2, 1024)
    assert np.isfinite(hidden).all()
