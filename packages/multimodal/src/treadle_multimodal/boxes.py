"""What an MP4 or QuickTime file says of its samples, before FFmpeg makes room for them.

FFmpeg keeps some bytes for each sample, once for each edit that shows it. How many there are is a
number in the file, and need not take bytes of it: a file of a kilobyte can ask for gigabytes.
"""

import re
from collections.abc import Iterator
from struct import unpack_from

from treadle_multimodal.errors import BrokenMedia, MediaTooLarge, UnsupportedMedia
from treadle_multimodal.sources import Kind

INDEX_BYTES = 48
"""What FFmpeg keeps of a sample, rounded up."""

MAX_EDITS = 1024

# Names that stand before counts. Sizes and offsets of a file that is accepted have no such bytes.
_TABLES = re.compile(b"stsz|stz2|trun|elst|cmov")

_LONG_SIZE = 1
_TO_THE_END = 0
_HEAD = 8


def check_samples(data: bytes, kind: Kind, max_bytes: int) -> None:
    """Refuse a file that lists more samples than it can hold, or than there is room for.

    Args:
        data: The file.
        kind: For errors.
        max_bytes: Most bytes of what FFmpeg keeps of samples.

    Raises:
        BrokenMedia: It lists more samples than it has bytes.
        MediaTooLarge: They, or their edits, are too many.
        UnsupportedMedia: The list is compressed.
    """
    num_samples, num_edits = 0, 1
    for start, stop in _outside_samples(data):
        for found in _TABLES.finditer(data, start, stop):
            name, place = found[0], found.end()
            if name == b"cmov":
                raise UnsupportedMedia(kind, "a compressed list of samples", "a list as it is")
            count = _number(data, place + (8 if name in (b"stsz", b"stz2") else 4))
            if name == b"elst":
                num_edits = max(num_edits, count)
            else:
                num_samples += count
    if num_samples > len(data):
        found_samples = f"{num_samples} samples in {len(data)} bytes"
        raise BrokenMedia(kind, found_samples, f"an undamaged {kind} file")
    if num_edits > MAX_EDITS:
        raise MediaTooLarge(kind, f"{num_edits} edits", f"at most {MAX_EDITS}")
    most = max_bytes // INDEX_BYTES // num_edits
    if num_samples > most:
        edits = f" in {num_edits} edits" if num_edits > 1 else ""
        raise MediaTooLarge(kind, f"{num_samples} samples{edits}", f"at most {most}")


def _outside_samples(data: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of the outermost boxes, without those that hold the samples themselves."""
    start = 0
    while start + _HEAD <= len(data):
        size, name = _number(data, start), data[start + 4 : start + _HEAD]
        if size == _LONG_SIZE:
            size = _number(data, start + 8) << 32 | _number(data, start + 12)
        elif size == _TO_THE_END:
            size = len(data) - start
        if size < _HEAD:
            return
        if name != b"mdat":
            yield start, min(start + size, len(data))
        start += size


def _number(data: bytes, place: int) -> int:
    """Four bytes as a number; 0 where there are not so many."""
    return int(unpack_from(">I", data, place)[0]) if place + 4 <= len(data) else 0
