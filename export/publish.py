"""Publishing: from a written model file to a verified bundle that appears in one step.

Everything is written into a hidden folder beside the target, verified there, and moved
into place by renaming it. See causal_encoder.serve.folder for the locks and for what a
kill leaves behind; a hidden folder whose process died is removed by the next export.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from causal_encoder.errors import CausalEncoderError, ExportError
from causal_encoder.export.artifact import Facts, facts_of_archive, read_facts
from causal_encoder.export.prepare import (
    INPUT,
    MIN_ONNXRUNTIME,
    exact_arithmetic,
    in_a_line,
    output_of,
    tool_versions,
)
from causal_encoder.export.trace import ARCHIVES
from causal_encoder.export.verify import Progress, verify_prepared
from causal_encoder.model import CausalEncoder, fingerprint
from causal_encoder.serve.buckets import Shape
from causal_encoder.serve.bundle import sha256_of
from causal_encoder.serve.folder import aside, locked, put_back, restore
from causal_encoder.serve.manifest import MANIFEST_FILE, MODEL_FILES, File, Manifest

if sys.platform != "win32":
    import fcntl


def publish(
    model: CausalEncoder,
    format: str,  # noqa: A002  # the word of the manifest and of the command
    precision: str,
    target: str,
    path: str | os.PathLike[str],
    write: Callable[[Path], Facts],
    *,
    warm_up: tuple[Shape, ...] = (),
    force: bool,
    progress: Progress | None,
) -> Manifest:
    """Write, verify, seal and publish a bundle.

    Args:
        model: the prepared model that `write` exports.
        format: "onnx", "torchscript" or "program".
        precision: type of the weights in the file.
        target: what the graph is written for.
        path: folder of the bundle.
        write: writes the model file to the path it is given, and tells what it traced.
        warm_up: shapes for the manifest.
        force: replace an existing bundle.
        progress: see export_onnx.

    Returns:
        The published manifest.

    Raises:
        ExportError: the target is taken, verification failed, or writing failed.
    """
    try:
        place = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a link to itself, a zero byte, ..
        raise ExportError(f"{path} cannot be written: {error}") from error
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        restore(place)
        _check_target(place, force)
        with _staging(place) as folder:
            traced = _written(write, folder / MODEL_FILES[format])
            manifest = _describe(folder, format, precision, target, warm_up, model)
            _write_manifest(folder, manifest)
            device = "auto" if precision == "bf16" else "cpu"
            report = verify_prepared(folder, model, device, progress, traced)
            if report.verdict == "refuted":
                raise ExportError(f"not published, because {report.first_failure}")
            manifest = dataclasses.replace(manifest, parity=report.to_dict())
            _write_manifest(folder, manifest)
            _flush(folder)
            _move_into_place(folder, place, force)
    except OSError as error:
        raise ExportError(f"{error.filename or place}: {error.strerror or error}") from error
    return manifest


def publish_archive(
    model: CausalEncoder,
    format: str,  # noqa: A002
    path: str | os.PathLike[str],
    *,
    force: bool,
    progress: Progress | None,
) -> Manifest:
    """As `publish`, for the formats that are one archive of torch: see ARCHIVES."""

    def write(path: Path) -> Facts:
        # In memory first: a full disk is then Python's own error, which names itself, and
        # torch never has to open a path, which it cannot do everywhere if it is not ASCII.
        archive = ARCHIVES[format](model)
        path.write_bytes(archive)
        return facts_of_archive(io.BytesIO(archive), format)

    return publish(model, format, "fp32", "portable", path, write, force=force, progress=progress)


def _written(write: Callable[[Path], Facts], path: Path) -> Facts:
    try:
        with exact_arithmetic():
            return write(path)
    except (OSError, CausalEncoderError):
        raise
    except Exception as error:  # the exporters of torch raise what they like
        raise ExportError(f"torch could not export: {in_a_line(error)}") from error


def _describe(
    folder: Path,
    format: str,  # noqa: A002
    precision: str,
    target: str,
    warm_up: tuple[Shape, ...],
    model: CausalEncoder,
) -> Manifest:
    facts = read_facts(folder / MODEL_FILES[format], format)
    return Manifest(
        format=format,
        config=model.config.to_dict(),
        precision=precision,
        target=target,
        inputs=(INPUT,),
        outputs=(output_of(model.config),),
        operators=dict(sorted(facts.operators.items())),
        opset=facts.opset,
        ir_version=facts.ir_version,
        min_onnxruntime=MIN_ONNXRUNTIME if format == "onnx" else None,
        tools=tool_versions(),
        checkpoint_sha256=fingerprint(model),
        files={
            entry.name: File(size_bytes=entry.stat().st_size, sha256=sha256_of(entry))
            for entry in sorted(folder.iterdir())
        },
        warm_up=warm_up,
        parity=None,
    )


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")


def _check_target(target: Path, force: bool) -> None:
    """Only a bundle may be replaced, and only if that was asked for."""
    if not os.path.lexists(target):
        return
    if not _is_bundle(target):
        raise ExportError(f"{target} exists and is not a bundle; choose another path")
    if not force:
        raise ExportError(
            f"{target} exists; pass force=True (--force) to replace it, or choose another path"
        )


def _is_bundle(folder: Path) -> bool:
    """A folder with a manifest, of any version and even if damaged, and no foreign file."""
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
        ours = MODEL_FILES[manifest["format"]] in manifest["files"] and "digest" in manifest
        known = {MANIFEST_FILE, *manifest["files"]}
        return ours and all(p.name in known and p.is_file() for p in folder.iterdir())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A hidden folder beside the target, gone afterwards; dead ones are removed first."""
    prefix, suffix = f".{target.name}.", ".partial"
    ours = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}" + re.escape(suffix))
    with locked(target.parent, exclusive=True):
        for entry in target.parent.iterdir():
            if ours.fullmatch(entry.name):
                _remove_if_dead(entry)
        if os.path.lexists(aside(target)):  # a replacement was cut off after it was done
            if not _is_bundle(aside(target)):
                raise ExportError(f"{aside(target)} is in the way and is not a bundle; remove it")
            if target.exists():
                shutil.rmtree(aside(target), ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=target.parent))
        alive = os.open(folder, os.O_RDONLY) if sys.platform != "win32" else None
        if sys.platform != "win32" and alive is not None:
            with contextlib.suppress(OSError):  # as in serve.folder.locked
                fcntl.flock(alive, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # already moved, if all went well
        if alive is not None:
            os.close(alive)


def _remove_if_dead(folder: Path) -> None:
    """A living export holds the lock of its folder until it ends, however it ends."""
    if sys.platform == "win32":
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _flush(folder: Path) -> None:
    """Onto the disk before the rename makes it visible; readable as the umask says."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _move_into_place(folder: Path, target: Path, force: bool) -> None:
    with locked(target.parent, exclusive=True):
        put_back(target)
        _check_target(target, force)  # again: another export may have been faster
        if not target.exists():
            os.rename(folder, target)
            return
        os.rename(target, aside(target))
        try:
            os.rename(folder, target)
        except OSError:
            os.rename(aside(target), target)
            raise
        # Renamed before it is deleted, so that no half of it is ever put back.
        os.rename(aside(target), folder)
        shutil.rmtree(folder, ignore_errors=True)
