"""Locks on folders, and undoing a replacement that was cut off.

A bundle is replaced by two renames under an exclusive lock on its parent folder: the old
bundle moves aside, the new one moves in. Readers hold a shared lock, so they see one
whole bundle. A kill between the renames leaves the old bundle aside; `restore` puts it
back. The kernel frees a lock with its process, and no lock file is left anywhere.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl


def aside(target: Path) -> Path:
    """Where the old bundle waits while `target` is replaced."""
    return target.parent / f".{target.name}.previous"


@contextlib.contextmanager
def locked(folder: Path, *, exclusive: bool) -> Iterator[None]:
    """Hold the advisory lock of a folder.

    Where there are no such locks, or the folder may not be opened, this does nothing: the
    renames are atomic all the same, and only simultaneous writers lose their protection.
    """
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def restore(target: Path) -> None:
    """Put the old bundle back if its replacement was cut off between the two renames."""
    if aside(target).exists() and not target.exists():
        with locked(target.parent, exclusive=True):
            put_back(target)


def put_back(target: Path) -> None:
    """As `restore`, for a caller that holds the exclusive lock of the parent."""
    if aside(target).exists() and not target.exists():
        os.rename(aside(target), target)
