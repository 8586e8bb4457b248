"""Readers, writers and kills: a bundle is there, whole, whenever somebody asks for it.

A writer replaces a bundle by two renames under the exclusive lock of the parent folder.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from causal_encoder.errors import BundleError
from causal_encoder.serve import EncoderSession, open_bundle


def moved_aside(bundle: Path) -> Path:
    """What a kill between the two renames leaves."""
    return bundle.rename(bundle.parent / f".{bundle.name}.previous")


@contextlib.contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """The lock of a writer; BlockingIOError while somebody else holds any."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def assert_free(folder: Path) -> None:
    with writer_lock(folder):
        pass


# A kill between the two renames.


def test_a_bundle_left_aside_is_put_back_by_the_next_reader(copy: Path) -> None:
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    left = moved_aside(copy)
    with open_bundle(copy) as found:
        assert found.folder == copy
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before
    assert not left.exists()
    assert_free(copy.parent)


def test_a_session_opens_a_bundle_left_aside(copy: Path) -> None:
    moved_aside(copy)
    assert EncoderSession(copy, "cpu").run([[1, 2]]).shape == (1, 2, 12)


@pytest.mark.parametrize("name", ["bündel", "with spaces", ".hidden", "v1.0"])
def test_a_bundle_of_any_name_is_put_back(copy: Path, name: str) -> None:
    renamed = copy.rename(copy.parent / name)
    moved_aside(renamed)
    with open_bundle(renamed):
        pass


def test_a_bundle_is_put_back_through_a_linked_folder_and_a_relative_path(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(copy.parent)
    moved_aside(copy)
    with open_bundle(tmp_path / "link" / copy.name):
        pass
    moved_aside(copy)
    monkeypatch.chdir(copy.parent)
    with open_bundle(copy.name):
        pass


def test_a_damaged_bundle_left_aside_is_put_back_and_refused(copy: Path) -> None:
    (moved_aside(copy) / "model.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match=r"model\.onnx has 0 bytes"), open_bundle(copy):
        pass
    assert copy.exists()


def test_the_new_bundle_is_read_and_the_old_one_left_where_both_are_there(copy: Path) -> None:
    old = shutil.copytree(copy, copy.parent / f".{copy.name}.previous")
    (old / "model.onnx").write_bytes(b"")
    with open_bundle(copy):
        assert (old / "model.onnx").read_bytes() == b""


def test_another_bundle_left_aside_is_none_of_ours(copy: Path) -> None:
    left = moved_aside(copy)
    with pytest.raises(BundleError, match="not a folder"), open_bundle(copy.parent / "other"):
        pass
    assert left.exists()


def test_many_readers_put_a_bundle_back_once(copy: Path) -> None:
    moved_aside(copy)
    failures: list[Exception] = []

    def read() -> None:
        try:
            with open_bundle(copy):
                pass
        except Exception as error:  # noqa: BLE001  # shown below
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert failures == []


# The lock.


def reading(bundle: Path) -> threading.Event:
    """A thread that opens a bundle and closes it again; set once it has done so."""
    done = threading.Event()

    def read() -> None:
        with open_bundle(bundle):
            pass
        done.set()

    threading.Thread(target=read, daemon=True).start()
    return done


def test_readers_share_and_a_writer_waits_for_them(copy: Path) -> None:
    with open_bundle(copy):
        assert reading(copy).wait(10)
        with pytest.raises(BlockingIOError):
            assert_free(copy.parent)
    assert_free(copy.parent)


def test_a_reader_waits_for_a_writer(copy: Path) -> None:
    with writer_lock(copy.parent):
        done = reading(copy)
        assert not done.wait(0.2)
    assert done.wait(10)


def test_a_reader_that_came_between_the_renames_waits_for_the_new_bundle(copy: Path) -> None:
    opened: list[Path] = []

    def read() -> None:
        with open_bundle(copy) as found:
            opened.append(found.folder)

    reader = threading.Thread(target=read)
    with writer_lock(copy.parent):
        old = moved_aside(copy)
        reader.start()
        time.sleep(0.1)
        shutil.copytree(old, copy)
        shutil.rmtree(old)
    reader.join(10)
    assert opened == [copy]
    assert list(copy.parent.iterdir()) == [copy]


def test_a_bundle_replaced_again_and_again_is_there_for_every_reader(copy: Path) -> None:
    shutil.copytree(copy, copy.parent / "new")
    writer = """
import fcntl, os, sys
os.chdir(sys.argv[1])
while True:
    lock = os.open(".", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename("bundle", ".bundle.previous")
    os.rename("new", "bundle")
    os.rename(".bundle.previous", "new")
    os.close(lock)
"""
    refusals = []
    process = subprocess.Popen([sys.executable, "-c", writer, copy.parent])
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            try:
                with open_bundle(copy):
                    pass
            except BundleError as error:
                refusals.append(str(error))
    finally:
        process.kill()
        process.wait()
    assert refusals == []


@pytest.mark.parametrize("broken", ["model.onnx", "manifest.json"])
def test_the_lock_is_freed_when_a_bundle_is_refused(copy: Path, broken: str) -> None:
    (copy / broken).unlink()
    with pytest.raises(BundleError), open_bundle(copy):
        pass
    assert_free(copy.parent)


def test_an_error_of_the_caller_passes_through_and_frees_the_lock(copy: Path) -> None:
    def use() -> None:
        with open_bundle(copy):
            shutil.rmtree(copy)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert_free(copy.parent)


def test_a_session_that_is_open_holds_no_lock(copy: Path) -> None:
    session = EncoderSession(copy, "cpu")
    assert_free(copy.parent)
    shutil.rmtree(copy)  # and no file either
    assert session.run([[1, 2]]).shape == (1, 2, 12)


def test_the_lock_dies_with_its_process(copy: Path) -> None:
    reader = """
import sys, time
from causal_encoder.serve import open_bundle
with open_bundle(sys.argv[1]):
    print("open", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", reader, copy], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        with pytest.raises(BlockingIOError):
            assert_free(copy.parent)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert_free(copy.parent)


def test_a_parent_folder_that_may_not_be_listed_is_no_hindrance(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def open_all_but_the_parent(path: Path, flags: int) -> int:
        if path == copy.parent:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_file(path, flags)

    monkeypatch.setattr(os, "open", open_all_but_the_parent)
    with open_bundle(copy):
        pass


def test_a_file_system_without_locks_is_no_hindrance(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with open_bundle(copy):
        pass
    moved_aside(copy)
    with open_bundle(copy):
        pass


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_no_open_file_is_left(copy: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with open_bundle(copy):
        pass
    before = count()
    for _ in range(5):
        with open_bundle(copy):
            pass
        with pytest.raises(BundleError), open_bundle(copy.parent):
            pass
    assert count() == before


def test_a_bundle_left_aside_in_a_folder_that_may_not_be_written_is_one_line(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved_aside(copy)

    def read_only(old: Path, _: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(old))

    monkeypatch.setattr(os, "rename", read_only)
    with pytest.raises(BundleError, match="Read-only file system"), open_bundle(copy):
        pass
