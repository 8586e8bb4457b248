"""Locks on folders, and undoing a replacement that was cut off.

A bundle is replaced by two renames under an exclusive lock on its parent folder: the old
bundle moves aside, the new one moves in. Readers hold a shared lock, so they see one
whole bundle. A kill between the renames leaves the old bundle aside; `restore` puts it
back. The kernel frees a lock with its process, and no lock file is left anywhere.
"""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl


LOCK_TIMEOUT_S = 60.0


def aside(target: Path) -> Path:
    """Where the old bundle waits while `target` is replaced."""
    return target.parent / f".{target.name}.previous"


@contextlib.contextmanager
def locked(folder: Path, *, exclusive: bool) -> Iterator[None]:
    """Hold the advisory lock of a folder.

    Where there are no such locks, or the folder may not be opened, this does nothing: the
    renames are atomic all the same, and only simultaneous writers lose their protection.

    Raises:
        TimeoutError: another process, or this one, has held the lock for a minute.
    """
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            descriptor = None
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
            if descriptor is not None:
                _wait_for(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, folder)
        yield


def _wait_for(descriptor: int, kind: int, folder: Path) -> None:
    """Poll, because a blocking wait for a lock of one's own would never end."""
    if sys.platform == "win32":
        return
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT, "a bundle in it is still being opened or replaced", str(folder)
                ) from None
            time.sleep(0.005)
        except OSError:
            return  # no locks on this file system


def restore(target: Path) -> None:
    """Put the old bundle back if its replacement was cut off between the two renames."""
    if aside(target).exists() and not target.exists():
        with locked(target.parent, exclusive=True):
            put_back(target)


def put_back(target: Path) -> None:
    """As `restore`, for a caller that holds the exclusive lock of the parent."""
    if aside(target).exists() and not target.exists():
        os.rename(aside(target), target)
