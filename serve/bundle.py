"""Bundles: the checks made before anything in one is run.

A bundle is a folder with one exported model and `manifest.json`, which names every other
file with its size and SHA-256. Writing bundles lives in causal_encoder.export.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from causal_encoder.errors import BundleError
from causal_encoder.serve.folder import locked, restore
from causal_encoder.serve.manifest import MANIFEST_FILE, MODEL_FILES, Manifest, parse_manifest

CHECKPOINT_FILE = "config.json"
_MANIFEST_LIMIT_BYTES = 4 * 2**20  # ours are about 10 KiB
_CHUNK_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle whose files were found whole."""

    folder: Path
    manifest: Manifest

    @property
    def model_path(self) -> Path:
        """The model file."""
        return self.folder / MODEL_FILES[self.manifest.format]


@contextlib.contextmanager
def open_bundle(path: str | os.PathLike[str]) -> Iterator[Bundle]:
    """Check every file of a bundle and keep it from being replaced inside the block.

    Raises:
        BundleError: a file is missing, added, changed, or of an unknown version.
    """
    try:
        folder = Path(path).resolve()
        restore(folder)
    except (OSError, ValueError, RuntimeError) as error:  # a link to itself, a zero byte, ..
        raise BundleError(f"{path} cannot be opened: {error}") from error
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder.parent, exclusive=False))
            if not folder.is_dir():
                raise BundleError(
                    f"{path} is not a folder; a bundle is a folder with {MANIFEST_FILE} and a model"
                )
            manifest = read_manifest(folder)
            _check_files(folder, manifest)
        except OSError as error:
            raise BundleError(f"{error.filename or folder}: {error.strerror}") from error
        yield Bundle(folder=folder, manifest=manifest)


def check_runtime(bundle: Bundle, installed: str) -> None:
    """Refuse a bundle that was never tested with a runtime as old as this one.

    Args:
        bundle: an opened bundle.
        installed: version of the ONNX Runtime in use.

    Raises:
        BundleError: names both versions and how to upgrade.
    """
    needed = bundle.manifest.min_onnxruntime
    if needed is not None and _release(installed) < _release(needed):
        raise BundleError(
            f"{bundle.folder} needs ONNX Runtime {needed} or later, {installed} is installed; "
            f"pip install --upgrade 'onnxruntime-gpu>={needed}' (onnxruntime, where that is "
            "installed)"
        )


def read_manifest(folder: Path) -> Manifest:
    """Parse and check manifest.json.

    Raises:
        BundleError: it is missing, edited, or of another schema.
        OSError: it cannot be read.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        if (folder / CHECKPOINT_FILE).exists():
            raise BundleError(
                f"{folder} is a checkpoint, not a bundle; pass the folder with {MANIFEST_FILE}"
            )
        raise BundleError(
            f"{path} is missing, so {folder} is not a bundle; pass another folder, or export again"
        )
    _check_regular(path)
    if path.stat().st_size > _MANIFEST_LIMIT_BYTES:
        raise BundleError(f"{path} is over {_MANIFEST_LIMIT_BYTES} bytes")
    return parse_manifest(path.read_bytes(), path)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _release(version: str) -> tuple[int, ...]:
    """(1, 31, 1) of "1.31.1" and of "1.31.1.dev20261101": by number, not by letter."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Names first, then sizes, then hashes: the cheap reason is found before the dear one."""
    found = {entry.name for entry in folder.iterdir()} - {MANIFEST_FILE}
    for name in sorted(set(manifest.files) - found):
        raise BundleError(f"{folder / name} is missing; copy or export the bundle again")
    for name in sorted(found - set(manifest.files)):
        raise BundleError(f"{folder / name} is not part of the bundle; remove it")
    for name, expected in manifest.files.items():
        _check_regular(folder / name)
        size = (folder / name).stat().st_size
        if size != expected.size_bytes:
            raise BundleError(
                f"{folder / name} has {size} bytes, expected {expected.size_bytes}; "
                "copy or export the bundle again"
            )
    for name, expected in manifest.files.items():
        if sha256_of(folder / name) != expected.sha256:
            raise BundleError(
                f"{folder / name} was changed: its SHA-256 is not the one in {MANIFEST_FILE}; "
                "copy or export the bundle again"
            )


def _check_regular(path: Path) -> None:
    """A link could lead out of the folder, to a file that was never hashed."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise BundleError(f"{path} is not a regular file; copy the file itself into the bundle")
