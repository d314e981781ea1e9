"""What the tier costs over a plain copy of the same bytes."""

import os
import shutil
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from treadle_cache.disk.config import DiskConfig
from treadle_cache.disk.tier import DiskTier
from treadle_cache.entries import Entry, EntryName

ARRAYS_PER_ENTRY = 48


def measure_disk(
    directory: str | None = None,
    *,
    num_entries: int = 94,
    entry_bytes: int = 1_500_000,
    num_runs: int = 5,
) -> dict[str, float]:
    """Write and read entries through a tier, and copy and read as many bytes plainly.

    The plain copy is ``shutil.copyfile`` of one file after the other, without fsync. Writing takes
    from the first ``put`` to the end of ``flush``; what the tier brings to the device after that,
    while nothing waits, is ``ssd_close_seconds``. Reading is one request for all entries, from a
    tier that was opened anew. All of it is in the system's cache. A first run is
    not counted; each figure is the median of the others, each ratio is taken within a run.

    Args:
        directory: Where to work, in a folder that is removed; None for the system's choice.
        num_entries: Entries per run.
        entry_bytes: Bytes of each.
        num_runs: Runs that count; each measures all, in turn.

    Returns:
        Figures by name: rates in bytes per second, and the two ratios.
    """
    entries = make_entries(num_entries, entry_bytes)
    total = sum(entry.num_bytes for entry in entries)
    samples: list[dict[str, float]] = []
    for _ in range(num_runs + 1):
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            seconds = _measure_once(Path(folder), entries)
        samples.append(_figures(total, seconds))
    return {name: statistics.median(sample[name] for sample in samples[1:]) for name in samples[0]}


def _figures(total: int, seconds: dict[str, float]) -> dict[str, float]:
    return {
        "ssd_bytes": float(total),
        "ssd_copy_bytes_per_second": total / seconds["copy"],
        "ssd_write_bytes_per_second": total / seconds["write"],
        "ssd_read_bytes_per_second": total / seconds["read"],
        "ssd_write_ratio": seconds["copy"] / seconds["write"],
        "ssd_read_ratio": seconds["copy"] / seconds["read"],
        "ssd_put_seconds": seconds["put"],
        "ssd_close_seconds": seconds["close"],
    }


def make_entries(num_entries: int, entry_bytes: int) -> list[Entry]:
    """A chain of blocks with random contents."""
    random = np.random.default_rng(7)
    digests = [random.bytes(32) for _ in range(num_entries + 1)]
    count = entry_bytes // ARRAYS_PER_ENTRY // 2
    return [
        Entry(
            name=EntryName(
                kind="block",
                root=digests[0],
                digest=digest,
                parent=parent,
                num_tokens=32 * (place + 1),
            ),
            arrays=tuple(
                random.integers(0, 1 << 16, count, np.uint16) for _ in range(ARRAYS_PER_ENTRY)
            ),
        )
        for place, (parent, digest) in enumerate(pairwise(digests))
    ]


def _measure_once(folder: Path, entries: list[Entry]) -> dict[str, float]:
    return {**_measure_copy(folder, entries), **_measure_tier(folder, entries)}


def _measure_copy(folder: Path, entries: list[Entry]) -> dict[str, float]:
    sources = [folder / f"source-{number}" for number in range(len(entries))]
    for source, entry in zip(sources, entries, strict=True):
        source.write_bytes(b"".join(array.tobytes() for array in entry.arrays))
    # Otherwise writing the sources back would slow what is measured after.
    os.sync()
    start = time.perf_counter()
    for number, source in enumerate(sources):
        shutil.copyfile(source, folder / f"copy-{number}")
    seconds = time.perf_counter() - start
    os.sync()
    return {"copy": seconds}


def _measure_tier(folder: Path, entries: list[Entry]) -> dict[str, float]:
    total = sum(entry.num_bytes for entry in entries)
    config = DiskConfig(
        directory=str(folder / "tier"), capacity_bytes=2 * total + (8 << 20), min_free_bytes=0
    )
    tier = DiskTier(config)
    start = time.perf_counter()
    for entry in entries:
        tier.put(entry)
    put = time.perf_counter()
    tier.flush()
    flushed = time.perf_counter()
    tier.close()
    closed = time.perf_counter()
    tier = DiskTier(config)
    begin = time.perf_counter()
    found = tier.read([entry.name.digest for entry in entries]).result()
    end = time.perf_counter()
    tier.close()
    assert None not in found, "an entry was not read back"
    return {
        "put": put - start,
        "write": flushed - start,
        "close": closed - flushed,
        "read": end - begin,
    }
