"""An entry as bytes of a file: safetensors, with the entry's name and checksums in the metadata.

    length of the head | head: JSON, padded with spaces | the arrays, one after the other
                         {"__metadata__":{"treadle":"1","seal":"...", ...}, "0000": ...}

The seal covers length and head, so that a head can be trusted alone; the head has the checksum of
the arrays. The library reads such files; they are written and read here so that no array is copied.
"""

from collections.abc import Sequence
from math import prod
from struct import pack
from typing import Literal

import numpy as np
from msgspec import DecodeError, Raw, Struct, ValidationError, json
from xxhash import xxh3_64_hexdigest, xxh3_128

from treadle_cache.entries import Entry, EntryKind, EntryName
from treadle_core.prefix import HostArray

FORMAT_VERSION = "1"
SUFFIX = ".safetensors"

LENGTH_BYTES = 8
HEAD_ALIGNMENT = 8
MAX_HEAD_BYTES = 16 << 20

_MARK = b'{"__metadata__":{"treadle":"'
_START = _MARK + FORMAT_VERSION.encode() + b'","seal":"'
_NO_SEAL = "0" * 16
SEAL_START = LENGTH_BYTES + len(_START)
SEAL_END = SEAL_START + len(_NO_SEAL)
_NO_CHECKSUM = "0" * 32
_CHECKSUM_START = SEAL_END + len(b'","checksum":"')
_CHECKSUM_END = _CHECKSUM_START + len(_NO_CHECKSUM)

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}

Reason = Literal["truncated", "checksum", "foreign", "version", "misplaced"]
"""What is wrong with a file: it ends early; its bytes have changed; it is no file of ours; it has
another version; it is another entry than its name says."""


class Damaged(Exception):
    """A file is not the entry that it should be.

    Args:
        reason: Why.
    """

    def __init__(self, reason: Reason) -> None:
        self.reason: Reason = reason
        super().__init__(reason)


class UnsupportedArray(Exception):
    """A dtype that the format does not have.

    Args:
        dtype: Its name.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        super().__init__(f"arrays of {dtype} cannot be written")


class _Metadata(Struct, frozen=True, kw_only=True):
    treadle: str
    seal: str
    checksum: str
    kind: EntryKind
    root: str
    digest: str
    parent: str
    num_tokens: str


class _Array(Struct, frozen=True, kw_only=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Head(Struct, frozen=True, kw_only=True):
    """What a file says about itself.

    Attributes:
        name: The entry.
        num_bytes: Bytes of the whole file.
        start: Where its arrays begin.
        checksum: Of the arrays' bytes.
        arrays: dtype, shape and interval of each array, the interval counted from ``start``.
    """

    name: EntryName
    num_bytes: int
    start: int
    checksum: str
    arrays: tuple[_Array, ...]


class Encoded(Struct, frozen=True, kw_only=True):
    """A file to be written.

    Attributes:
        head: Length and head, without checksum and seal.
        arrays: The arrays' bytes in order; views of them.
        num_bytes: Bytes of the whole file.
    """

    head: bytes
    arrays: tuple[memoryview, ...]
    num_bytes: int

    def buffers(self) -> tuple[memoryview, ...]:
        """The file's bytes in order.

        Reads every array for its checksum: what is written right after comes from the processor's
        cache.
        """
        checksum = xxh3_128()
        for data in self.arrays:
            checksum.update(data)
        head = bytearray(self.head)
        head[_CHECKSUM_START:_CHECKSUM_END] = checksum.hexdigest().encode()
        head[SEAL_START:SEAL_END] = xxh3_64_hexdigest(bytes(head)).encode()
        return memoryview(head), *self.arrays


def encode(entry: Entry) -> Encoded:
    """The file of an entry.

    Raises:
        UnsupportedArray: A dtype has no code.
    """
    items: dict[str, _Array] = {}
    arrays: list[memoryview] = []
    offset = 0
    for number in _file_order(entry.arrays):
        array = entry.arrays[number]
        data, end = _bytes_of(array), offset + array.nbytes
        arrays.append(data)
        code = _CODES[array.dtype]
        items[f"{number:04d}"] = _Array(dtype=code, shape=array.shape, data_offsets=(offset, end))
        offset = end
    head = _head(entry.name, items)
    return Encoded(head=head, arrays=tuple(arrays), num_bytes=len(head) + offset)


def head_length(data: bytes) -> int:
    """Bytes of length and head, from the file's first bytes.

    Raises:
        Damaged: It is not a file of this format and version.
    """
    if len(data) < SEAL_END:
        raise Damaged("truncated")
    if data[LENGTH_BYTES:SEAL_START] != _START:
        ours = data[LENGTH_BYTES : LENGTH_BYTES + len(_MARK)] == _MARK
        raise Damaged("version" if ours else "foreign")
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if length > MAX_HEAD_BYTES:
        raise Damaged("checksum")
    return LENGTH_BYTES + length


def decode_head(data: bytes) -> Head:
    """What a file says about itself, from at least its first ``head_length`` bytes.

    Raises:
        Damaged: It is not a file of this format, or its head has changed.
    """
    start = head_length(data)
    if len(data) < start:
        raise Damaged("truncated")
    head = bytearray(data[:start])
    seal = bytes(head[SEAL_START:SEAL_END])
    head[SEAL_START:SEAL_END] = _NO_SEAL.encode()
    if xxh3_64_hexdigest(bytes(head)).encode() != seal:
        raise Damaged("checksum")
    try:
        return _parse_head(head[LENGTH_BYTES:], start)
    except (DecodeError, ValidationError, ValueError, KeyError) as error:
        # Its seal is right and its contents are not what this version writes.
        raise Damaged("foreign") from error


def decode(data: bytes, digest: bytes) -> Entry:
    """The entry of a file; its arrays are views of ``data``.

    Raises:
        Damaged: It is not the entry ``digest``, whole.
    """
    head = decode_head(data)
    if head.name.digest != digest:
        raise Damaged("misplaced")
    if len(data) != head.num_bytes:
        raise Damaged("truncated")
    if xxh3_128(memoryview(data)[head.start :]).hexdigest() != head.checksum:
        raise Damaged("checksum")
    return Entry(name=head.name, arrays=tuple(_view(data, head.start, it) for it in head.arrays))


def _file_order(arrays: Sequence[HostArray]) -> list[int]:
    """Wide elements first, as the library does: then each array starts on its own boundary."""
    return sorted(range(len(arrays)), key=lambda number: -arrays[number].dtype.itemsize)


def _bytes_of(array: HostArray) -> memoryview:
    if array.dtype not in _CODES:
        raise UnsupportedArray(array.dtype.str)
    data = array.data
    return data if data.c_contiguous else np.ascontiguousarray(array).data


def _head(name: EntryName, items: dict[str, _Array]) -> bytes:
    metadata = _Metadata(
        treadle=FORMAT_VERSION,
        seal=_NO_SEAL,
        checksum=_NO_CHECKSUM,
        kind=name.kind,
        root=name.root.hex(),
        digest=name.digest.hex(),
        parent=name.parent.hex(),
        num_tokens=str(name.num_tokens),
    )
    head = json.encode({"__metadata__": metadata, **items})
    head += b" " * (-len(head) % HEAD_ALIGNMENT)
    return pack("<Q", len(head)) + head


def _parse_head(data: bytearray, start: int) -> Head:
    fields = json.decode(data, type=dict[str, Raw])
    metadata = json.decode(fields.pop("__metadata__"), type=_Metadata)
    arrays = tuple(json.decode(fields[key], type=_Array) for key in sorted(fields))
    return Head(
        name=EntryName(
            kind=metadata.kind,
            root=bytes.fromhex(metadata.root),
            digest=bytes.fromhex(metadata.digest),
            parent=bytes.fromhex(metadata.parent),
            num_tokens=int(metadata.num_tokens),
        ),
        num_bytes=start + max((array.data_offsets[1] for array in arrays), default=0),
        start=start,
        checksum=metadata.checksum,
        arrays=arrays,
    )


def _view(data: bytes, start: int, array: _Array) -> HostArray:
    low, _ = array.data_offsets
    dtype = np.dtype(_DTYPES[array.dtype])
    view = np.frombuffer(data, dtype, prod(array.shape), start + low)
    return view.reshape(array.shape)
