"""A RAM store in one file: contents first, then a footer that says what and where they are.

    magic . contents of all entries . footer (msgpack) . length of the footer . its digest . magic

The footer comes last, so that a file is written in one pass; a file that was cut off has none. Every
entry has a digest of its contents, so that one that was damaged is left out by itself.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from io import BufferedReader
from math import prod
from pathlib import Path
from struct import Struct as Packing
from typing import IO

import msgspec
import numpy as np
from msgspec import Struct

from treadle_cache.index import Indexed
from treadle_core.prefix import HostArray

MAGIC = b"TREADLE1"
DIGEST_BYTES = 32
TRAILER = Packing(f"<Q{DIGEST_BYTES}s{len(MAGIC)}s")


class ArrayShape(Struct, frozen=True, array_like=True):
    """Shape and dtype of an array."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what is no array of numbers.

        Raises:
            ValueError: It is none.
        """
        if np.dtype(self.dtype).kind not in "biuf" or any(size < 0 for size in self.shape):
            raise ValueError(f"an array of {self.dtype}{list(self.shape)}")

    @property
    def num_bytes(self) -> int:
        """Bytes of such an array."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class SavedEntry(Struct, frozen=True, kw_only=True):
    """An entry of a file.

    Attributes:
        entry: What the index says of it.
        arrays: Shapes of its arrays.
        offset: Where its contents begin; its arrays follow each other.
        digest: Digest of its contents.
    """

    entry: Indexed
    arrays: tuple[ArrayShape, ...]
    offset: int
    digest: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of its contents."""
        return sum(array.num_bytes for array in self.arrays)


class Footer(Struct, frozen=True, kw_only=True):
    """What a file has.

    Attributes:
        fingerprint: Digest of the model that computed it.
        format: How its states are kept.
        block_size: Tokens per block.
        entries: The most recently used first.
    """

    fingerprint: str
    format: str
    block_size: int
    entries: tuple[SavedEntry, ...]


class DamagedFile(Exception):
    """A file, or an entry of it, is not what was written."""


def write(
    path: Path, footer: Footer, contents: Iterable[tuple[Indexed, Sequence[HostArray]]]
) -> None:
    """Write a file in place of ``path``, whole or not at all.

    Args:
        path: Where.
        footer: All but the entries.
        contents: The entries.

    Raises:
        OSError: It could not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, footer, contents)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    _sync(path.parent)


class SavedFile:
    """A file that is being read, until it is closed.

    Args:
        path: Where it is.

    Raises:
        OSError: It could not be opened.
        DamagedFile: It is not what was written.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        try:
            self._footer, self._end = _read_footer(self._file)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close it."""
        self._file.close()

    @property
    def footer(self) -> Footer:
        """What it has."""
        return self._footer

    def arrays(self, saved: SavedEntry) -> list[HostArray]:
        """The contents of an entry.

        Raises:
            OSError: They could not be read.
            DamagedFile: They are not what was written.
        """
        if saved.offset < 0 or saved.offset + saved.num_bytes > self._end:
            raise DamagedFile("an entry is outside of the file")
        self._file.seek(saved.offset)
        digest = _Digest()
        arrays = [self._read(array, digest) for array in saved.arrays]
        if digest.value != saved.digest:
            raise DamagedFile("an entry has another digest")
        return arrays

    def _read(self, wanted: ArrayShape, digest: "_Digest") -> HostArray:
        array = np.empty(wanted.shape, np.dtype(wanted.dtype))
        data = _bytes_of(array)
        if self._file.readinto(data) != len(data):
            raise DamagedFile("the file ends within an entry")
        digest.update(data)
        return array


class _Digest:
    def __init__(self) -> None:
        self._digest = blake2b(digest_size=DIGEST_BYTES)

    def update(self, data: memoryview) -> None:
        self._digest.update(data)

    @property
    def value(self) -> bytes:
        return self._digest.digest()


def _write(
    file: IO[bytes], footer: Footer, contents: Iterable[tuple[Indexed, Sequence[HostArray]]]
) -> None:
    file.write(MAGIC)
    entries = tuple(_write_entries(file, contents))
    data = msgspec.msgpack.encode(msgspec.structs.replace(footer, entries=entries))
    file.write(data)
    file.write(TRAILER.pack(len(data), _digest_of(data), MAGIC))


def _write_entries(
    file: IO[bytes], contents: Iterable[tuple[Indexed, Sequence[HostArray]]]
) -> Iterator[SavedEntry]:
    offset = len(MAGIC)
    for entry, arrays in contents:
        digest = _Digest()
        for array in arrays:
            data = _bytes_of(array)
            digest.update(data)
            file.write(data)
        shapes = tuple([ArrayShape(array.dtype.str, array.shape) for array in arrays])
        saved = SavedEntry(entry=entry, arrays=shapes, offset=offset, digest=digest.value)
        offset += saved.num_bytes
        yield saved


def _read_footer(file: BufferedReader) -> tuple[Footer, int]:
    """The footer, and where it begins."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TRAILER.size))
    trailer = file.read(TRAILER.size)
    if len(trailer) < TRAILER.size:
        raise DamagedFile("the file is too short")
    length, digest, magic = TRAILER.unpack(trailer)
    start = size - TRAILER.size - length
    if magic != MAGIC or start < len(MAGIC):
        raise DamagedFile("the file is none of ours, or was cut off")
    file.seek(start)
    data = file.read(length)
    if _digest_of(data) != digest:
        raise DamagedFile("the footer has another digest")
    try:
        return msgspec.msgpack.decode(data, type=Footer), start
    except msgspec.MsgspecError as error:
        raise DamagedFile("the footer is of another version") from error


def _digest_of(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _bytes_of(array: HostArray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _sync(folder: Path) -> None:
    """Make the rename last; not every file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
