"""The calls to the file system that the tier makes, as a port, and the real ones."""

import os
from collections.abc import Iterator, Sequence
from errno import EIO
from pathlib import Path
from typing import Protocol

from msgspec import Struct

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600

# What one call of writev takes; POSIX allows 16, Linux and macOS have 1024.
MAX_BUFFERS = 1024


class Found(Struct, frozen=True, kw_only=True):
    """An item of a directory.

    Attributes:
        name: Its name.
        is_directory: Whether it is a directory.
        num_bytes: Its size; 0 for a directory.
        modified_ns: When it was last written, in nanoseconds since the epoch.
        inode: What tells it from another file of its name.
    """

    name: str
    is_directory: bool
    num_bytes: int
    modified_ns: int
    inode: int


class Files(Protocol):
    """Calls to the file system; each raises OSError when it fails."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and those above it, unless they are there."""
        ...

    def create(self, path: Path) -> int:
        """Open an empty file for writing, and return its descriptor."""
        ...

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        """Write as many bytes of ``buffers`` as one call takes, and return their number."""
        ...

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        ...

    def sync(self, path: Path) -> None:
        """Bring a file or the names in a directory to the device."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Put ``source`` in the place of ``target``, at once."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        ...

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        ...

    def read(self, path: Path, num_bytes: int = -1) -> bytes:
        """The first ``num_bytes`` of a file; all of it for -1."""
        ...

    def stat(self, path: Path) -> Found:
        """What is at ``path``."""
        ...

    def scan(self, path: Path) -> Iterator[Found]:
        """What is in a directory; nothing if there is none. Links are not followed."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written to the file system of ``path``."""
        ...


class RealFiles:
    """The file system of this machine."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and those above it, unless they are there."""
        path.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Open an empty file for writing, and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        """Write as many bytes of ``buffers`` as one call takes, and return their number."""
        return os.writev(descriptor, buffers[:MAX_BUFFERS])

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def sync(self, path: Path) -> None:
        """Bring a file or the names in a directory to the device."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Put ``source`` in the place of ``target``, at once."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()

    def read(self, path: Path, num_bytes: int = -1) -> bytes:
        """The first ``num_bytes`` of a file; all of it for -1."""
        with path.open("rb", buffering=0) as file:
            return file.read(num_bytes)

    def stat(self, path: Path) -> Found:
        """What is at ``path``."""
        return _found(path.name, path.lstat())

    def scan(self, path: Path) -> Iterator[Found]:
        """What is in a directory; nothing if there is none. Links are not followed."""
        try:
            items = os.scandir(path)
        except FileNotFoundError:
            return
        with items:
            for item in items:
                try:
                    yield _found(item.name, item.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue  # Another process removed it meanwhile.

    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written to the file system of ``path``."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


def write_all(files: Files, descriptor: int, buffers: Sequence[memoryview]) -> None:
    """Write all bytes of ``buffers``, in as many calls as that takes."""
    left = [buffer for buffer in buffers if buffer.nbytes]
    while left:
        written = files.write(descriptor, left)
        if not written:
            raise OSError(EIO, "nothing was written")
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left:
            left[0] = left[0].cast("B")[written:]


def unlink_if_there(files: Files, path: Path) -> bool:
    """Remove a file; whether there was one."""
    try:
        files.unlink(path)
    except FileNotFoundError:
        return False
    return True


def remove_tree(files: Files, path: Path) -> None:
    """Remove a directory and what is in it, unless another process did."""
    for item in list(files.scan(path)):
        if item.is_directory:
            remove_tree(files, path / item.name)
        else:
            unlink_if_there(files, path / item.name)
    try:
        files.remove_directory(path)
    except FileNotFoundError:
        return


def tree_bytes(files: Files, path: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(
        tree_bytes(files, path / item.name) if item.is_directory else item.num_bytes
        for item in files.scan(path)
    )


def _found(name: str, status: os.stat_result) -> Found:
    is_directory = (status.st_mode & 0o170000) == 0o040000
    return Found(
        name=name,
        is_directory=is_directory,
        num_bytes=0 if is_directory else status.st_size,
        modified_ns=status.st_mtime_ns,
        inode=status.st_ino,
    )
