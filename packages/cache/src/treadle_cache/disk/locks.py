"""Locks between processes; the system gives them back when their holder dies, however it dies."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class HeldLock:
    """A lock on a file that is held until it is released.

    Args:
        descriptor: The open file.
        path: Where it is.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    def release(self) -> None:
        """Remove the file and give the lock back."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def try_lock(path: Path) -> HeldLock | None:
    """Take the lock of a file, which is made if it is not there; None if somebody holds it.

    Raises:
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return HeldLock(descriptor, path)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock of a file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold the lock of a file, and wait for it if need be.

    Raises:
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
