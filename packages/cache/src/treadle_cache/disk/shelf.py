"""A directory of entries: its files and its index, used from any thread, without one of its own.

Writing an entry goes through these states, and whoever dies leaves one of them:

    row WRITING, room made | file in temp | file in entries | row READY

Room is made before the first, so that the limit holds at every instant, over processes too: a row
counts from the moment it is there. A file without a row, or with a row whose owner has died, is
adopted or removed when the directory is next put in order.
"""

import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Literal

from msgspec import Struct

from treadle_cache.disk.catalog import (
    Catalog,
    Change,
    IndexGone,
    Row,
    State,
    is_damage,
    open_catalog,
)
from treadle_cache.disk.counters import Counters
from treadle_cache.disk.files import (
    Files,
    Found,
    remove_tree,
    tree_bytes,
    unlink_if_there,
    write_all,
)
from treadle_cache.disk.format import (
    SEAL_END,
    Damaged,
    Encoded,
    Head,
    UnsupportedArray,
    decode,
    decode_head,
    encode,
    head_length,
)
from treadle_cache.disk.layout import (
    CLEARED_PREFIX,
    INDEX_NAME,
    INDEX_SUFFIXES,
    Layout,
    digest_of,
    owner_of,
)
from treadle_cache.disk.locks import HeldLock, is_held, locked, try_lock
from treadle_cache.entries import Entry, EntryName

INDEX_SLACK_BYTES = 256 << 10
"""Room that is kept for what the index grows by between two looks at its size."""

# Entries removed in one change, which holds up other processes.
CLEARED_AT_ONCE = 32

# A head of sixty arrays has some five thousand bytes.
HEAD_GUESS_BYTES = 16 << 10

Outcome = Literal["written", "duplicate", "cleared", "no_room", "no_free_space", "unsupported"]
"""What became of an entry. ``duplicate``: it is there, or another process is writing it.
``cleared``: a clear came in between. ``no_room``: it does not fit the limit. ``no_free_space``:
nor what is left to others. ``unsupported``: a dtype that cannot be written."""


class Limits(Struct, frozen=True, kw_only=True):
    """What a shelf may take; see DiskConfig.

    Attributes:
        capacity_bytes: Most bytes of all files.
        min_free_bytes: Bytes of the file system left to others.
        quarantine_bytes: Most bytes of damaged files.
    """

    capacity_bytes: int
    min_free_bytes: int
    quarantine_bytes: int


class Figures(Struct, frozen=True, kw_only=True):
    """What is in a directory.

    Attributes:
        num_entries: Entries that can be found.
        used_bytes: Bytes of all files.
    """

    num_entries: int = 0
    used_bytes: int = 0


class Shelf:
    """An open directory. Methods raise OSError and sqlite3.Error unless they say otherwise.

    Args:
        directory: Where; made if it is not there.
        limits: What it may take; None changes nothing for the limits' sake.
        files: The file system.
        now: Microseconds since the epoch.
        counters: What happens is counted there.
    """

    def __init__(
        self,
        directory: Path,
        limits: Limits | None,
        files: Files,
        now: Callable[[], int],
        counters: Counters,
    ) -> None:
        self._layout = Layout(directory)
        self._limits = limits
        self._files = files
        self._now = now
        self._counters = counters
        self._owner = token_hex(8)
        self._held: HeldLock | None = None
        self._catalog: Catalog | None = None
        # Held while entries are written, so that the index is not put in order meanwhile.
        self._writing = Lock()
        self._figures = Figures()
        # Of the last look at the folders.
        self._overhead = 0
        self._are_names_synced = False

    # Opening

    def open(self) -> None:
        """Put the directory in order and open its index; also to begin again after a failure."""
        with self._writing:
            self._open()

    def close(self) -> None:
        """Close the index and give up what was begun."""
        with self._writing:
            self._let_go()

    @property
    def catalog(self) -> Catalog:
        """The open index.

        Raises:
            IndexGone: It is not open, or not at its place any more.
        """
        catalog = self._catalog
        if catalog is None or not catalog.is_current():
            raise IndexGone("the index is not open, or was removed or replaced")
        return catalog

    def _open(self) -> None:
        self._let_go()
        for folder in (self._layout.entries, self._layout.temp, self._layout.quarantine):
            self._files.make_directory(folder)
        with locked(self._layout.lock):
            self._held = try_lock(self._layout.owner(self._owner))
            try:
                self._begin()
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                self._set_index_aside()
                self._begin()

    def _begin(self) -> None:
        self._catalog = open_catalog(self._layout.index)
        self._put_in_order(self._catalog)

    @property
    def figures(self) -> Figures:
        """What there was when it was last looked at. Asks nobody, and never raises."""
        return self._figures

    def look(self) -> None:
        """Look at what other processes have changed."""
        with self.catalog.changing() as change:
            self._overhead_bytes()
            self._look(change)

    def _look(self, change: Change) -> None:
        used_bytes = change.figure("num_bytes") + self._overhead
        self._figures = Figures(num_entries=change.figure("num_ready"), used_bytes=used_bytes)

    def _let_go(self) -> None:
        self._figures = Figures()
        self._close_catalog()
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def _close_catalog(self) -> None:
        catalog, self._catalog = self._catalog, None
        if catalog is not None:
            with suppress(sqlite3.Error):
                catalog.close()

    def _set_index_aside(self) -> None:
        self._counters.add("index_rebuilt")
        self._close_catalog()
        for suffix in INDEX_SUFFIXES:
            path = self._layout.root / f"{INDEX_NAME}{suffix}"
            with suppress(FileNotFoundError):
                self._quarantine(path, f"{INDEX_NAME}{suffix}")

    # Putting in order

    def _put_in_order(self, catalog: Catalog) -> None:
        for item in list(self._files.scan(self._layout.root)):
            if item.name.startswith(CLEARED_PREFIX):
                remove_tree(self._files, self._layout.root / item.name)
        # Files first: one that is seen had its row before, unless its writer died.
        found = self._scan_entries()
        with catalog.changing() as change:
            self._check_rows(change, found)
            self._check_orphans(change, found)
            change.recount()
            self._remove_stale()
            self._overhead_bytes()
            self._shrink(change)
            self._look(change)

    def _scan_entries(self) -> dict[bytes, Found]:
        """All entry files by digest. Files with other names are put away."""
        found: dict[bytes, Found] = {}
        for folder in list(self._files.scan(self._layout.entries)):
            path = self._layout.entries / folder.name
            if not folder.is_directory:
                self._put_away(path, "foreign")
                continue
            for item in list(self._files.scan(path)):
                digest = digest_of(folder.name, item.name)
                if digest is None or item.is_directory:
                    self._put_away(path / item.name, "foreign")
                else:
                    found[digest] = item
        return found

    def _check_rows(self, change: Change, found: dict[bytes, Found]) -> None:
        """Keep the rows that are right, and take their files out of ``found``."""
        epoch = change.figure("epoch")
        for row in change.rows():
            digest = row.name.digest
            if row.owner is not None and self._is_alive(row.owner):
                found.pop(digest, None)
            elif row.epoch != epoch:
                found.pop(digest, None)
                self._remove_cleared(change, digest)
            elif row.state == State.WRITING:
                change.remove(digest)
            elif self._has_size(found.get(digest), digest, row.num_bytes):
                found.pop(digest, None)
            else:
                self._counters.add("rows_dropped")
                change.remove(digest)

    def _has_size(self, item: Found | None, digest: bytes, num_bytes: int) -> bool:
        if item is None:
            try:
                item = self._files.stat(self._layout.entry(digest))
            except OSError:
                return False
        return item.num_bytes == num_bytes

    def _remove_cleared(self, change: Change, digest: bytes) -> None:
        try:
            unlink_if_there(self._files, self._layout.entry(digest))
        except OSError:
            self._counters.add("unlink_failures")
        else:
            change.remove(digest)

    def _check_orphans(self, change: Change, found: dict[bytes, Found]) -> None:
        """Adopt the files in ``found``, or put them away."""
        epoch = change.figure("epoch")
        for digest, item in found.items():
            path = self._layout.entry(digest)
            try:
                head = read_head(self._files, path)
                _check_head(head, digest, item)
            except Damaged as error:
                self._put_away(path, error.reason)
            except FileNotFoundError:
                continue  # Evicted by another process since it was seen.
            except OSError:
                self._counters.add("orphans_unreadable")
            else:
                self._counters.add("orphans_adopted")
                change.add(
                    Row(
                        name=head.name,
                        num_bytes=item.num_bytes,
                        used=item.modified_ns // 1000,
                        state=State.READY,
                        owner=None,
                        epoch=epoch,
                    )
                )

    def _remove_stale(self) -> None:
        """Remove what dead owners were writing."""
        for item in list(self._files.scan(self._layout.temp)):
            owner = owner_of(item.name)
            if owner != self._owner and self._is_alive(owner):
                continue
            if item.name == self._layout.owner(self._owner).name:
                continue
            self._counters.add("stale_removed")
            with suppress(FileNotFoundError):
                self._files.unlink(self._layout.temp / item.name)

    def _is_alive(self, owner: str) -> bool:
        """Whether another process, or another shelf of this one, still writes as ``owner``."""
        return owner != self._owner and is_held(self._layout.owner(owner))

    # Room

    def _overhead_bytes(self) -> int:
        """Bytes of files that have no row: index and quarantine."""
        total = 0
        for item in self._files.scan(self._layout.root):
            if item.name == self._layout.quarantine.name:
                total += tree_bytes(self._files, self._layout.root / item.name)
            elif not item.is_directory:
                total += item.num_bytes
        self._overhead = total
        return total

    def _shrink(self, change: Change) -> None:
        """Evict what is too much: the index grows too, while a process stands still that reads."""
        if self._limits is not None:
            self._make_room(change, self._limits, 0, b"", 0)

    def _make_room(
        self, change: Change, limits: Limits, num_bytes: int, keep: bytes, begun: int
    ) -> Outcome | None:
        """Evict until ``num_bytes`` more fit; None when they do. Never evicts ``keep``.

        ``begun`` bytes count already, but the file system does not know of them yet.
        """
        ours = change.figure("num_bytes")
        budget = limits.capacity_bytes - INDEX_SLACK_BYTES - self._overhead_bytes() - num_bytes
        free = self._files.free_bytes(self._layout.root) - limits.min_free_bytes
        free -= num_bytes + begun
        if budget < 0 and num_bytes:
            return "no_room"
        if free + ours < 0:
            if num_bytes:
                return "no_free_space"
            # Others have filled the file system: evicting all would not help.
            free = 0
        while ours > budget or free < 0:
            victim = self._victim(change, keep)
            if victim is None:
                return "no_room"
            # Rolled back if the file stays: its bytes go on counting.
            self._unlink_entry(victim.name.digest)
            change.remove(victim.name.digest)
            ours -= victim.num_bytes
            free += victim.num_bytes
        return None

    def _victim(self, change: Change, keep: bytes) -> Row | None:
        """What goes next: what was cleared, then what was not used for longest."""
        cleared = change.cleared(1)
        if cleared:
            return cleared[0]
        victim = change.oldest(keep)
        if victim is not None:
            self._counters.add("evicted")
        return victim

    # Writing

    def write(self, entries: Sequence[Entry], epoch: int) -> list[Outcome]:
        """Write entries that were put in ``epoch``: the first, and as many more as go with it.

        Returns:
            What became of the first so many of them. After an exception nothing of any is left, as
            far as that can be.
        """
        encoded = [_encoded(entry) for entry in entries]
        with self._writing:
            outcomes = self._set_all_aside(entries, encoded, epoch)
            files = [
                (entry.name.digest, it)
                for entry, it, outcome in zip(entries, encoded, outcomes, strict=False)
                if it is not None and outcome is None
            ]
            if not files:
                return [outcome for outcome in outcomes if outcome is not None]
            results = self._write_files(files)
        return _joined(outcomes, results)

    def touch(self, digests: list[bytes]) -> None:
        """Note a use of entries, the first of them as the latest."""
        with self.catalog.changing() as change:
            change.touch(digests, self._now())
            self._shrink(change)

    def _set_all_aside(
        self, entries: Sequence[Entry], encoded: Sequence[Encoded | None], epoch: int
    ) -> list[Outcome | None]:
        """Set entries aside until one has no room beside those before it; None for each that is."""
        outcomes: list[Outcome | None] = []
        begun = 0
        with self.catalog.changing() as change:
            if change.figure("epoch") != epoch:
                return ["cleared"] * len(entries)
            for entry, it in zip(entries, encoded, strict=True):
                if it is None:
                    outcomes.append("unsupported")
                    continue
                outcome = self._set_aside(change, entry.name, it.num_bytes, begun)
                if outcome in {"no_room", "no_free_space"} and begun:
                    break
                begun += it.num_bytes if outcome is None else 0
                outcomes.append(outcome)
        return outcomes

    def _set_aside(
        self, change: Change, name: EntryName, num_bytes: int, begun: int
    ) -> Outcome | None:
        """Make room for an entry and count its bytes from now on; or say why not.

        ``begun`` bytes were set aside before in this change, and are not written yet.
        """
        row = change.find(name.digest)
        epoch = change.figure("epoch")
        if row is not None and row.epoch == epoch and self._is_kept(row):
            change.touch([name.digest], self._now())
            return "duplicate"
        if row is not None:
            # What is there of it goes first: its bytes are counted anew.
            self._unlink_entry(name.digest)
            change.remove(name.digest)
        if self._limits is not None:
            refusal = self._make_room(change, self._limits, num_bytes, name.parent, begun)
            if refusal is not None:
                return refusal
        change.add(
            Row(
                name=name,
                num_bytes=num_bytes,
                used=change.next_use(self._now()),
                state=State.WRITING,
                owner=self._owner,
                epoch=epoch,
            )
        )
        return None

    def _is_kept(self, row: Row) -> bool:
        if row.owner is not None:
            return row.state == State.WRITING and self._is_alive(row.owner)
        return row.state == State.READY and self._has_size(None, row.name.digest, row.num_bytes)

    def _write_file(self, digest: bytes, encoded: Encoded) -> None:
        temp, target = self._layout.unfinished(self._owner, digest), self._layout.entry(digest)
        descriptor = self._files.create(temp)
        try:
            write_all(self._files, descriptor, encoded.buffers())
        finally:
            self._files.close(descriptor)
        try:
            self._files.rename(temp, target)
        except FileNotFoundError:
            # The first of its folder, or a clear has just taken the folder away.
            self._files.make_directory(target.parent)
            self._files.rename(temp, target)

    def _write_files(self, files: Sequence[tuple[bytes, Encoded]]) -> list[Outcome]:
        """Write what was set aside, up to the first that fails; raises if that is the very first."""
        num_written = 0
        with self._giving_up([digest for digest, _ in files]):
            for digest, encoded in files:
                try:
                    self._write_file(digest, encoded)
                except OSError:
                    if not num_written:
                        raise
                    break
                num_written += 1
            return self._finish([digest for digest, _ in files], num_written)

    def _finish(self, digests: Sequence[bytes], num_written: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        with self.catalog.changing() as change:
            for digest in digests[:num_written]:
                is_ready = change.mark_ready(digest, self._owner)
                if not is_ready:
                    # Cleared meanwhile. Its row keeps the file from being adopted.
                    self._take_back(change, digest)
                outcomes.append("written" if is_ready else "cleared")
            for digest in digests[num_written:]:
                self._take_back(change, digest)
            self._shrink(change)
            self._look(change)
        return outcomes

    def _take_back(self, change: Change, digest: bytes) -> None:
        unlink_if_there(self._files, self._layout.unfinished(self._owner, digest))
        self._unlink_entry(digest)
        change.remove_of(digest, self._owner)

    @contextmanager
    def _giving_up(self, digests: Sequence[bytes]) -> Generator[None]:
        """Remove what is there of entries if the body fails."""
        try:
            yield
        except (OSError, sqlite3.Error):
            with suppress(OSError, sqlite3.Error):
                for digest in digests:
                    unlink_if_there(self._files, self._layout.unfinished(self._owner, digest))
                with self.catalog.changing() as change:
                    for digest in digests:
                        self._take_back(change, digest)
            raise

    def sync(self, digests: list[bytes]) -> None:
        """Bring written files, and their names, to the device. One that is gone is left out."""
        paths = [self._layout.entry(digest) for digest in digests]
        for path in (*paths, *dict.fromkeys(path.parent for path in paths)):
            with suppress(FileNotFoundError):
                self._files.sync(path)

    # Reading

    def read(self, digest: bytes) -> Entry | None:
        """An entry, or None for one that is gone or damaged, which is counted and put away."""
        if not self.catalog.has(digest):
            self._counters.add("missing")
            return None
        path = self._layout.entry(digest)
        try:
            data = self._files.read(path)
            entry = decode(data, digest)
        except FileNotFoundError:
            self._counters.add("missing")
            self._drop(digest, None)
            return None
        except Damaged as error:
            self._drop(digest, error.reason)
            return None
        self._counters.add("read")
        self._counters.add("read_bytes", len(data))
        return entry

    def _drop(self, digest: bytes, reason: str | None) -> None:
        """Remove the row of an entry that cannot be read, and put its file away if damaged."""
        path = self._layout.entry(digest)
        with self.catalog.changing() as change:
            if reason is not None:
                self._put_away(path, reason)
            elif self._is_there(change, digest):
                return
            change.remove(digest)

    def _is_there(self, change: Change, digest: bytes) -> bool:
        """Whether a file that was missing was cleared or written anew meanwhile."""
        row = change.find(digest)
        return row is not None and (row.epoch != change.figure("epoch") or self._is_kept(row))

    # Quarantine

    def _put_away(self, path: Path, reason: str) -> None:
        """Quarantine or remove a file that is no entry."""
        self._counters.add(f"damaged_{reason}")
        try:
            self._quarantine(path, f"{reason}-{path.name}")
        except FileNotFoundError:
            return
        except OSError:
            self._counters.add("unlink_failures")

    def _quarantine(self, path: Path, name: str) -> None:
        item = self._files.stat(path)
        if item.is_directory:
            remove_tree(self._files, path)
            return
        limit = self._quarantine_limit()
        if item.num_bytes > limit:
            self._files.unlink(path)
            return
        self._trim_quarantine(limit - item.num_bytes)
        self._files.rename(path, self._layout.quarantine / name)
        self._counters.add("quarantined")

    def _quarantine_limit(self) -> int:
        if self._limits is None:
            return 0
        return min(self._limits.quarantine_bytes, self._limits.capacity_bytes // 8)

    def _trim_quarantine(self, num_bytes: int) -> None:
        """Remove the oldest until at most ``num_bytes`` are left."""
        items = sorted(self._files.scan(self._layout.quarantine), key=lambda it: it.modified_ns)
        total = sum(item.num_bytes for item in items)
        for item in items:
            if total <= num_bytes:
                return
            unlink_if_there(self._files, self._layout.quarantine / item.name)
            total -= item.num_bytes

    # Clearing

    def clear(self, *, in_haste: bool = False) -> int:
        """Make sure that nothing is found any more, and return the new epoch.

        That holds for what other processes are writing too, and for whoever opens the directory
        later. The files are left to :meth:`remove_cleared`, and count until then.

        Args:
            in_haste: Raise rather than wait long for others; otherwise it may take long.
        """
        catalog = self.catalog
        with catalog.changing_in_haste() if in_haste else catalog.changing() as change:
            epoch = change.start_epoch()
            try:
                self._take_away()
            except OSError as error:
                failure = error
            else:
                failure = None
            self._look(change)
        # Only now: the epoch has changed all the same.
        if failure is not None:
            raise failure
        return epoch

    def _take_away(self) -> None:
        """Move the entries, so that they are not adopted if the index is lost."""
        with suppress(FileNotFoundError):
            self._files.rename(self._layout.entries, self._layout.cleared(token_hex(8)))
        self._files.make_directory(self._layout.entries)

    def remove_cleared(self) -> bool:
        """Remove some files of what was cleared; whether there may be more."""
        folders = self._cleared_folders()
        if folders and not self._are_names_synced:
            # Otherwise a power cut could bring the entries back.
            self._files.sync(self._layout.root)
            self._are_names_synced = True
        with self.catalog.changing() as change:
            rows = change.cleared(CLEARED_AT_ONCE)
            for row in rows:
                self._unlink_entry(row.name.digest, folders)
                change.remove(row.name.digest)
            self._look(change)
        if rows:
            return True
        for folder in folders:
            remove_tree(self._files, folder)
        self._are_names_synced = False
        return False

    def _cleared_folders(self) -> list[Path]:
        return [
            self._layout.root / item.name
            for item in self._files.scan(self._layout.root)
            if item.name.startswith(CLEARED_PREFIX)
        ]

    def _unlink_entry(self, digest: bytes, folders: Sequence[Path] | None = None) -> None:
        """Remove the file of an entry, wherever a clear may have moved it."""
        path = self._layout.entry(digest)
        unlink_if_there(self._files, path)
        for folder in self._cleared_folders() if folders is None else folders:
            unlink_if_there(self._files, folder / path.relative_to(self._layout.entries))


def _encoded(entry: Entry) -> Encoded | None:
    try:
        return encode(entry)
    except UnsupportedArray:
        return None


def _joined(outcomes: Sequence[Outcome | None], results: Sequence[Outcome]) -> list[Outcome]:
    """``outcomes`` with each None replaced by the next result, as far as these reach."""
    joined: list[Outcome] = []
    left = iter(results)
    for known in outcomes:
        outcome = known or next(left, None)
        if outcome is None:
            # What comes after a file that could not be written is left for the next time.
            break
        joined.append(outcome)
    return joined


def read_head(files: Files, path: Path) -> Head:
    """The head of a file.

    Raises:
        Damaged: It has none, or it has changed.
        OSError: It cannot be read.
    """
    data = files.read(path, HEAD_GUESS_BYTES)
    length = head_length(data[:SEAL_END])
    if length > len(data):
        data = files.read(path, length)
    return decode_head(data)


def _check_head(head: Head, digest: bytes, item: Found) -> None:
    if head.name.digest != digest:
        raise Damaged("misplaced")
    if head.num_bytes != item.num_bytes:
        raise Damaged("truncated")
