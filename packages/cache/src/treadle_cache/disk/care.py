"""What people do with the directory of a tier: look, check, empty, make smaller.

All of it may be done while servers use the directory. Each function raises OSError or sqlite3.Error
when the directory cannot be used; one that does not exist is empty, and stays away.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from msgspec import Struct

from treadle_cache.disk.catalog import IS_FOUND
from treadle_cache.disk.counters import Counters
from treadle_cache.disk.files import Files, Found, RealFiles, tree_bytes
from treadle_cache.disk.format import Damaged, Reason, decode
from treadle_cache.disk.layout import Layout, digest_of
from treadle_cache.disk.shelf import Limits, Shelf, read_head
from treadle_cache.entries import EntryName

QUARANTINE_BYTES = 64 << 20


class EntryInfo(Struct, frozen=True, kw_only=True):
    """An entry in a directory.

    Attributes:
        name: Which.
        num_bytes: Bytes of its file.
        used: When it was last used, in seconds since the epoch; when it was written for an entry
            that the index does not know.
    """

    name: EntryName
    num_bytes: int
    used: float


class Listing(Struct, frozen=True, kw_only=True):
    """What is in a directory.

    Attributes:
        entries: Its entries, the most recently used first. Files that are none are left out.
        used_bytes: Bytes of all files: entries, index, quarantine and what is being written.
        quarantine_bytes: Bytes of damaged files among them.
    """

    entries: tuple[EntryInfo, ...] = ()
    used_bytes: int = 0
    quarantine_bytes: int = 0


class Verified(Struct, frozen=True, kw_only=True):
    """What checking every file said. Nothing was changed.

    Attributes:
        num_good: Files that are the entry they should be, every byte of it.
        num_damaged: Other files, by what is wrong with them.
        num_orphaned: Good files that the index does not know.
        num_missing: Entries of the index that have no file.
        num_bytes: Bytes that were read.
        damaged: Paths of the damaged files.
    """

    num_good: int = 0
    num_damaged: dict[Reason, int] = {}
    num_orphaned: int = 0
    num_missing: int = 0
    num_bytes: int = 0
    damaged: tuple[str, ...] = ()


class Cleared(Struct, frozen=True, kw_only=True):
    """What a clear removed.

    Attributes:
        num_entries: Entries that could be found before.
        freed_bytes: By how much all files have shrunk.
    """

    num_entries: int = 0
    freed_bytes: int = 0


class Collected(Struct, frozen=True, kw_only=True):
    """What putting a directory in order and making it smaller did.

    Attributes:
        num_evicted: Entries removed for room.
        num_adopted: Files that the index did not know and does now.
        num_damaged: Files that were no entries, quarantined or removed.
        num_stale: Files that a dead process had left unfinished.
        num_entries: Entries that are left.
        used_bytes: Bytes of all files now.
        freed_bytes: By how much they have shrunk.
    """

    num_evicted: int = 0
    num_adopted: int = 0
    num_damaged: int = 0
    num_stale: int = 0
    num_entries: int = 0
    used_bytes: int = 0
    freed_bytes: int = 0


def list_entries(directory: str | Path) -> Listing:
    """The entries of a directory, as their files say."""
    files, layout = RealFiles(), Layout(Path(directory))
    used = _last_uses(layout)
    entries: list[EntryInfo] = []
    for path, item in _entry_files(files, layout):
        try:
            name = read_head(files, path).name
        except (Damaged, FileNotFoundError):
            continue
        last = used.get(name.digest, item.modified_ns / 1e9)
        entries.append(EntryInfo(name=name, num_bytes=item.num_bytes, used=last))
    return Listing(
        entries=tuple(sorted(entries, key=lambda entry: -entry.used)),
        used_bytes=tree_bytes(files, layout.root),
        quarantine_bytes=tree_bytes(files, layout.quarantine),
    )


def verify(directory: str | Path) -> Verified:
    """Read every file and compare its checksums. Changes nothing."""
    files, layout = RealFiles(), Layout(Path(directory))
    reasons, damaged = Counter[Reason](), list[str]()
    good, num_bytes = set[bytes](), 0
    for path, _ in _entry_files(files, layout):
        try:
            data = files.read(path)
            num_bytes += len(data)
            good.add(decode(data, digest_of(path.parent.name, path.name) or b"").name.digest)
        except FileNotFoundError:
            continue  # Evicted meanwhile.
        except Damaged as error:
            reasons[error.reason] += 1
            damaged.append(str(path))
    # Read last, so that an entry that was written meanwhile is no orphan.
    known = _last_uses(layout)
    return Verified(
        num_good=len(good),
        num_damaged=dict(reasons),
        num_orphaned=len(good - known.keys()),
        num_missing=sum(not layout.entry(digest).exists() for digest in known),
        num_bytes=num_bytes,
        damaged=tuple(sorted(damaged)),
    )


def clear(directory: str | Path) -> Cleared:
    """Remove all entries, those too that servers are writing or have waiting."""
    root = Path(directory)
    if not root.is_dir():
        return Cleared()
    before = tree_bytes(RealFiles(), root)
    with closing(_shelf(root, None, Counters())) as shelf:
        shelf.open()
        num_entries = shelf.catalog.figure("num_ready")
        shelf.clear()
        while shelf.remove_cleared():
            pass
    return Cleared(
        num_entries=num_entries, freed_bytes=max(0, before - tree_bytes(RealFiles(), root))
    )


def collect(directory: str | Path, capacity_bytes: int) -> Collected:
    """Put a directory in order and evict entries until all its files fit ``capacity_bytes``."""
    root = Path(directory)
    if not root.is_dir():
        return Collected()
    limits = Limits(
        capacity_bytes=capacity_bytes, min_free_bytes=0, quarantine_bytes=QUARANTINE_BYTES
    )
    counters = Counters()
    before = tree_bytes(RealFiles(), root)
    with closing(_shelf(root, limits, counters)) as shelf:
        shelf.open()
        num_entries = shelf.catalog.figure("num_ready")
    after = tree_bytes(RealFiles(), root)
    counts = counters.snapshot()
    return Collected(
        num_evicted=counts.get("evicted", 0),
        num_adopted=counts.get("orphans_adopted", 0),
        num_damaged=sum(n for name, n in counts.items() if name.startswith("damaged_")),
        num_stale=counts.get("stale_removed", 0),
        num_entries=num_entries,
        used_bytes=after,
        freed_bytes=max(0, before - after),
    )


def _shelf(root: Path, limits: Limits | None, counters: Counters) -> Shelf:
    return Shelf(root, limits, RealFiles(), lambda: time.time_ns() // 1000, counters)


def _entry_files(files: Files, layout: Layout) -> Iterator[tuple[Path, Found]]:
    """Every file below ``entries``, foreign ones too."""
    for folder in files.scan(layout.entries):
        if folder.is_directory:
            for item in files.scan(layout.entries / folder.name):
                if not item.is_directory:
                    yield layout.entries / folder.name / item.name, item
        else:
            yield layout.entries / folder.name, folder


def _last_uses(layout: Layout) -> dict[bytes, float]:
    """When each entry of the index was last used, in seconds; none if it cannot be read."""
    # Not mode=ro: such a connection leaves the files of the log behind when it closes.
    query = f"SELECT digest, used FROM entries WHERE {IS_FOUND}"
    try:
        with closing(
            sqlite3.connect(f"{layout.index.absolute().as_uri()}?mode=rw", uri=True)
        ) as db:
            return {digest: used / 1e6 for digest, used in db.execute(query)}
    except sqlite3.Error:
        return {}
