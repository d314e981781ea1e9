"""For tests: entries made from a number, and a file system that somebody watches."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from treadle_cache.disk.files import Found, RealFiles
from treadle_cache.entries import Entry, EntryKind, EntryName

Call = Literal[
    "make_directory",
    "create",
    "write",
    "close",
    "sync",
    "rename",
    "unlink",
    "remove_directory",
    "read",
    "stat",
    "scan",
    "free_bytes",
]

T = TypeVar("T")

CHANGES: frozenset[Call] = frozenset(
    {"make_directory", "create", "write", "close", "rename", "unlink", "remove_directory", "sync"}
)
"""Calls that change something."""

ROOT = b"r" * 32


def digest_of(number: int) -> bytes:
    """The digest of the entry of a number."""
    return number.to_bytes(32, "big")


def digests(numbers: Sequence[int]) -> list[bytes]:
    """The digests of the entries of some numbers."""
    return [digest_of(number) for number in numbers]


def make_entry(
    number: int, *, parent: bytes = ROOT, kind: EntryKind = "block", num_bytes: int = 3000
) -> Entry:
    """An entry whose contents follow from its number and size: two arrays of different dtypes."""
    random = np.random.default_rng(number)
    halves = (
        np.frombuffer(random.bytes(num_bytes // 12 * 6), np.uint16).reshape(3, -1),
        np.frombuffer(random.bytes(num_bytes // 8 * 4), np.uint32).view(np.float32),
    )
    name = EntryName(
        kind=kind, root=ROOT, digest=digest_of(number), parent=parent, num_tokens=32 + number
    )
    return Entry(name=name, arrays=halves)


def same_entry(left: Entry | None, right: Entry | None) -> bool:
    """Whether two entries are equal, bit for bit."""
    if left is None or right is None:
        return left is right
    return left.name == right.name and [_key(it) for it in left.arrays] == [
        _key(it) for it in right.arrays
    ]


def _key(array: NDArray[Any]) -> tuple[object, ...]:
    return array.dtype, array.shape, array.tobytes()


class WatchedFiles(RealFiles):
    """The real file system, with somebody told of each call.

    Args:
        before: Told the call and its path before it is made; what it raises, the call raises.
        after: Told after it was made.
        max_written: Most bytes that one write takes.
        free: Bytes that the file system says are free; None asks the real one.
    """

    def __init__(
        self,
        before: Callable[[Call, Path], None] | None = None,
        after: Callable[[Call, Path], None] | None = None,
        max_written: int | None = None,
        free: Callable[[], int] | None = None,
    ) -> None:
        self._before = before
        self._after = after
        self._max_written = max_written
        self._free = free
        self._open: dict[int, Path] = {}

    def make_directory(self, path: Path) -> None:
        """As the real one."""
        self._tell("make_directory", path, lambda: super(WatchedFiles, self).make_directory(path))

    def create(self, path: Path) -> int:
        """As the real one."""
        descriptor = self._tell("create", path, lambda: super(WatchedFiles, self).create(path))
        self._open[descriptor] = path
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        """As the real one, of at most ``max_written`` bytes."""
        if self._max_written is not None:
            buffers = [buffers[0].cast("B")[: self._max_written]]
        return self._tell(
            "write",
            self._open[descriptor],
            lambda: super(WatchedFiles, self).write(descriptor, buffers),
        )

    def close(self, descriptor: int) -> None:
        """As the real one, whose file is closed even if somebody raises."""
        path = self._open.pop(descriptor)
        try:
            self._tell("close", path, lambda: None)
        finally:
            super().close(descriptor)

    def sync(self, path: Path) -> None:
        """As the real one."""
        self._tell("sync", path, lambda: super(WatchedFiles, self).sync(path))

    def rename(self, source: Path, target: Path) -> None:
        """As the real one."""
        self._tell("rename", target, lambda: super(WatchedFiles, self).rename(source, target))

    def unlink(self, path: Path) -> None:
        """As the real one."""
        self._tell("unlink", path, lambda: super(WatchedFiles, self).unlink(path))

    def remove_directory(self, path: Path) -> None:
        """As the real one."""
        self._tell(
            "remove_directory", path, lambda: super(WatchedFiles, self).remove_directory(path)
        )

    def read(self, path: Path, num_bytes: int = -1) -> bytes:
        """As the real one."""
        return self._tell("read", path, lambda: super(WatchedFiles, self).read(path, num_bytes))

    def stat(self, path: Path) -> Found:
        """As the real one."""
        return self._tell("stat", path, lambda: super(WatchedFiles, self).stat(path))

    def scan(self, path: Path) -> Iterator[Found]:
        """As the real one."""
        return self._tell("scan", path, lambda: super(WatchedFiles, self).scan(path))

    def free_bytes(self, path: Path) -> int:
        """As the real one, unless it was told what to say."""
        real = super().free_bytes
        return self._tell("free_bytes", path, self._free or (lambda: real(path)))

    def _tell(self, call: Call, path: Path, make: Callable[[], T]) -> T:
        if self._before is not None:
            self._before(call, path)
        result = make()
        if self._after is not None:
            self._after(call, path)
        return result
