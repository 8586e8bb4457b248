"""A file that a command writes is whole, or is what it was before."""

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from causal_encoder.errors import CausalEncoderError
from causal_encoder.files import write_whole


def hello(stream: BinaryIO) -> None:
    stream.write(b"hello")


def fail_with(error: BaseException) -> Callable[[BinaryIO], None]:
    def write(stream: BinaryIO) -> None:
        stream.write(b"half of it")
        raise error

    return write


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def test_a_new_file_has_what_was_written_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", hello)
    assert (tmp_path / "file").read_bytes() == b"hello"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_an_old_file_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a much longer content than the new one")
    write_whole(str(tmp_path / "file"), hello)
    assert (tmp_path / "file").read_bytes() == b"hello"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_reader_of_the_old_file_keeps_it_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with (tmp_path / "file").open("rb") as reader:
        write_whole(tmp_path / "file", hello)
        assert reader.read() == b"old"


def test_nothing_may_be_written_at_all(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", lambda _: None)
    assert (tmp_path / "file").read_bytes() == b""


def test_a_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path, umask: int) -> None:
    write_whole(tmp_path / "file", hello)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask
    assert os.umask(umask) == umask


@pytest.mark.parametrize("name", ["with spaces", "日本語.npy", ".hidden", "-o", "a'b\"c", "%s"])
def test_a_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    write_whole(tmp_path / name, hello)
    assert (tmp_path / name).read_bytes() == b"hello"


def test_a_path_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_whole("file", hello)
    assert (tmp_path / "file").read_bytes() == b"hello"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), MemoryError()], ids=repr)
def test_a_failure_passes_through_and_leaves_the_old_file(
    tmp_path: Path, error: BaseException
) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(type(error)):
        write_whole(tmp_path / "file", fail_with(error))
    assert (tmp_path / "file").read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_failure_leaves_no_file_where_there_was_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"):
        write_whole(tmp_path / "file", fail_with(ValueError("no")))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(CausalEncoderError, match="No space left on device") as caught:
        write_whole(tmp_path / "file", fail_with(full))
    assert str(tmp_path / "file") in str(caught.value)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_full_disk_is_told_though_numpy_gives_its_error_no_number(tmp_path: Path) -> None:
    # ndarray.tofile, and so numpy.save, raises this where a write stops short.
    short = OSError("1024 requested and 512 written")
    with pytest.raises(CausalEncoderError, match="1024 requested and 512 written"):
        write_whole(tmp_path / "file", fail_with(short))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/file", "No such file or directory"),
        ("file.txt/file", "Not a directory"),
        ("folder", "Is a directory"),
        ("x" * 300, "File name too long"),
    ],
    ids=["missing folder", "file as folder", "folder", "too long"],
)
def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file.txt").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CausalEncoderError, match=reason) as caught:
        write_whole(tmp_path / name, hello)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind the superuser")
def test_a_folder_that_may_not_be_written_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CausalEncoderError, match="Permission denied"):
        write_whole(tmp_path / "file", hello)
    tmp_path.chmod(0o700)


def test_a_device_or_pipe_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    # /dev/null and /dev/stdout are such files too: replacing one damages the machine.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        writer = threading.Thread(target=lambda: write_whole(pipe, hello))
        writer.start()
        writer.join(5)
        received.append(os.read(reader, 100) if not writer.is_alive() else b"")
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert received == [b"hello"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_standard_output_can_be_written_to_by_its_path_though_it_is_a_pipe(tmp_path: Path) -> None:
    stdout = tmp_path / "stdout"
    stdout.symlink_to("/proc/self/fd/1")  # what /dev/stdout is; that one is not put at risk
    program = (
        "import sys\nfrom causal_encoder.files import write_whole\n"
        "write_whole(sys.argv[1], lambda stream: stream.write(b'hello' * 100_000))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, stdout], capture_output=True, check=False
    )
    assert ended.stderr == b""
    assert ended.stdout == b"hello" * 100_000
    assert stdout.is_symlink()


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", hello)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"hello"
