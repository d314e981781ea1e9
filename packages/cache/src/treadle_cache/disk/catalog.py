"""The index of a directory, in SQLite: which entries its files are, and when each was last used.

Rows may disagree with the files, which are the truth; whoever finds a difference mends the rows.
"""

import sqlite3
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from enum import IntEnum
from pathlib import Path
from secrets import randbits
from threading import Lock
from typing import Any

from msgspec import Struct, ValidationError, convert

from treadle_cache.entries import EntryName

SCHEMA_VERSION = 3

# One more page of the log costs no more than reading it; a short log keeps the byte limit tight.
LOG_PAGES = 64
PAGE_BYTES = 4096

# Changes that are kept for those who follow them; whoever is further behind reads all rows.
JOURNAL_ROWS = 1024

# A day.
FAR_MICROSECONDS = 86_400_000_000

READ_TIMEOUT_SECONDS = 1.0
WRITE_TIMEOUT_SECONDS = 30.0
# For changes that somebody waits for who must not wait long.
HASTE_TIMEOUT_SECONDS = 0.2

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE entries (
    digest BLOB PRIMARY KEY,
    kind TEXT NOT NULL,
    root BLOB NOT NULL,
    parent BLOB NOT NULL,
    num_tokens INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    used INTEGER NOT NULL,
    state INTEGER NOT NULL,
    owner TEXT,
    epoch INTEGER NOT NULL,
    num_children INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX entries_by_parent ON entries (parent, kind);
CREATE INDEX entries_by_use ON entries (epoch, used);
CREATE INDEX leaves_by_use ON entries (epoch, used) WHERE state = 1 AND num_children = 0;
CREATE TABLE figures (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO figures VALUES ('num_bytes', 0), ('num_ready', 0), ('epoch', {{epoch}});
CREATE TABLE journal (number INTEGER PRIMARY KEY, digest BLOB NOT NULL);
CREATE TRIGGER journal_grown AFTER INSERT ON journal BEGIN
    DELETE FROM journal WHERE number <= new.number - {JOURNAL_ROWS};
END;
CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
    UPDATE figures SET value = value + new.num_bytes WHERE name = 'num_bytes';
END;
CREATE TRIGGER entry_added_ready AFTER INSERT ON entries WHEN new.state = 1 BEGIN
    UPDATE figures SET value = value + 1 WHERE name = 'num_ready';
    INSERT INTO journal (digest) VALUES (new.digest);
END;
CREATE TRIGGER entry_added_child AFTER INSERT ON entries BEGIN
    UPDATE entries SET num_children = num_children + 1
    WHERE digest = new.parent AND epoch = new.epoch;
END;
CREATE TRIGGER entry_removed AFTER DELETE ON entries BEGIN
    UPDATE figures SET value = value - old.num_bytes WHERE name = 'num_bytes';
END;
CREATE TRIGGER entry_removed_ready AFTER DELETE ON entries WHEN old.state = 1 BEGIN
    UPDATE figures SET value = value - 1 WHERE name = 'num_ready'
    AND old.epoch = (SELECT value FROM figures WHERE name = 'epoch');
    INSERT INTO journal (digest) VALUES (old.digest);
END;
CREATE TRIGGER entry_removed_child AFTER DELETE ON entries BEGIN
    UPDATE entries SET num_children = num_children - 1
    WHERE digest = old.parent AND epoch = old.epoch;
END;
CREATE TRIGGER entry_changed AFTER UPDATE OF state ON entries BEGIN
    UPDATE figures SET value = value + (new.state = 1) - (old.state = 1) WHERE name = 'num_ready';
    INSERT INTO journal (digest) VALUES (new.digest);
END;
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""


# An entry of an earlier epoch was cleared; its file may still be there.
_CURRENT = "(SELECT value FROM figures WHERE name = 'epoch')"
IS_FOUND = f"state = 1 AND epoch = {_CURRENT}"

# What may pass, or what another index would meet as well.
_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
}


class IndexGone(sqlite3.OperationalError):
    """The index is not open, or somebody has removed or replaced its file."""


class State(IntEnum):
    """Where a row stands.

    WRITING: its bytes are set aside, its file is on its way. READY: its file is there.
    """

    WRITING = 0
    READY = 1


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error says that the index is damaged, so that another should be made."""
    if isinstance(error, IndexGone):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & 0xFF not in _PASSING


class Row(Struct, frozen=True, kw_only=True):
    """An entry as the index knows it.

    Attributes:
        name: Which.
        num_bytes: Bytes of its file.
        used: When it was last used, in microseconds since the epoch.
        state: Where it stands.
        owner: Who is writing it; None for nobody.
        epoch: The epoch that it belongs to; of an earlier one, it was cleared.
    """

    name: EntryName
    num_bytes: int
    used: int
    state: State
    owner: str | None
    epoch: int


class Kept(Struct, frozen=True):
    """An entry with a file, as far as look-ups need to know it.

    Attributes:
        digest: Its digest.
        num_bytes: Bytes of its file.
        checkpoint: Its name, if it is a checkpoint.
    """

    digest: bytes
    num_bytes: int
    checkpoint: EntryName | None


class News(Struct, frozen=True, kw_only=True):
    """What an index says that somebody does not know yet.

    Attributes:
        epoch: The epoch that it is about.
        number: Number of the last change in it.
        is_all: Whether it is everything, and not what has changed since.
        gone: Digests that may have been known and have no file any more.
        kept: Entries that may not have been known.
    """

    epoch: int
    number: int
    is_all: bool
    gone: tuple[bytes, ...]
    kept: tuple[Kept, ...]


class Catalog:
    """An open index. For any thread; a look-up never waits for a change.

    Every method may raise sqlite3.Error.

    Args:
        path: The file.
        inode: That of the file, to notice when another takes its place.
        reader: Connection for look-ups.
        writer: Connection for changes.
    """

    def __init__(
        self, path: Path, inode: int, reader: sqlite3.Connection, writer: sqlite3.Connection
    ) -> None:
        self._path = path
        self._inode = inode
        self._reader = reader
        self._writer = writer
        self._reading = Lock()
        self._changing = Lock()

    def is_current(self) -> bool:
        """Whether the file at its path is still the one that is open."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        """Close the connections."""
        with self._reading, self._changing:
            self._reader.close()
            self._writer.close()

    # Look-ups

    def has(self, digest: bytes) -> bool:
        """Whether a digest has a file."""
        query = f"SELECT count(*) FROM entries WHERE {IS_FOUND} AND digest = ?"
        with self._reading, _damage_translated():
            (count,) = self._reader.execute(query, (digest,)).fetchone()
            return bool(count)

    def news(self, epoch: int | None, number: int) -> News:
        """What has changed since change ``number`` of ``epoch``; all of it for another epoch."""
        with self._reading, _damage_translated(), _snapshot(self._reader) as reader:
            current = _figure(reader, "epoch")
            first, last = _journal_ends(reader)
            is_all = epoch != current or not first - 1 <= number <= last
            return News(
                epoch=current,
                number=last,
                is_all=is_all,
                gone=() if is_all else _gone(reader, number),
                kept=_kept(reader, _EVERY if is_all else _SINCE, () if is_all else (number,)),
            )

    def rows(self) -> list[Row]:
        """All rows, the least recently used first."""
        with self._reading:
            return _rows(self._reader)

    def figure(self, name: str) -> int:
        """``num_bytes`` of all rows, ``num_ready`` entries, or the ``epoch`` that clears change."""
        with self._reading, _damage_translated():
            return _figure(self._reader, name)

    # Changes

    @contextmanager
    def changing(self) -> Generator["Change"]:
        """A transaction: all of it, or none if the body raises. One at a time, over processes."""
        with self._changing, _transaction(self._writer) as change:
            yield change

    @contextmanager
    def changing_in_haste(self) -> Generator["Change"]:
        """As :meth:`changing`, for one who would rather have an error than wait for others."""
        # Not the writer's connection: whoever uses that may be waiting for the disk.
        with (
            closing(_connect(self._path, HASTE_TIMEOUT_SECONDS)) as connection,
            _transaction(connection) as change,
        ):
            yield change


class Change:
    """An open transaction.

    Args:
        connection: Where it is open.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def find(self, digest: bytes) -> Row | None:
        """The row of a digest."""
        return _find(self._connection, digest)

    def rows(self) -> list[Row]:
        """All rows, the least recently used first."""
        return _rows(self._connection)

    def figure(self, name: str) -> int:
        """As :meth:`Catalog.figure`."""
        return _figure(self._connection, name)

    def add(self, row: Row) -> None:
        """Add a row for a digest that has none."""
        name = row.name
        self._connection.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, "
            "(SELECT count(*) FROM entries WHERE parent = ? AND epoch = ?))",
            (
                name.digest,
                name.kind,
                name.root,
                name.parent,
                name.num_tokens,
                row.num_bytes,
                row.used,
                int(row.state),
                row.owner,
                row.epoch,
                name.digest,
                row.epoch,
            ),
        )

    def remove(self, digest: bytes) -> None:
        """Remove a row, if it is there."""
        self._connection.execute("DELETE FROM entries WHERE digest = ?", (digest,))

    def remove_of(self, digest: bytes, owner: str) -> None:
        """Remove a row if ``owner`` was writing it."""
        self._connection.execute(
            "DELETE FROM entries WHERE digest = ? AND owner = ?", (digest, owner)
        )

    def mark_ready(self, digest: bytes, owner: str) -> bool:
        """Say that the file of a row is there, if the row still says that ``owner`` writes it."""
        cursor = self._connection.execute(
            f"UPDATE entries SET state = {State.READY:d}, owner = NULL "
            f"WHERE digest = ? AND owner = ? AND state = {State.WRITING:d} AND epoch = {_CURRENT}",
            (digest, owner),
        )
        return cursor.rowcount == 1

    def start_epoch(self) -> int:
        """Start another epoch, and return it: no row is found any more, each counts its bytes."""
        epoch = _new_epoch()
        self._connection.execute("UPDATE figures SET value = 0 WHERE name = 'num_ready'")
        self._connection.execute("UPDATE figures SET value = ? WHERE name = 'epoch'", (epoch,))
        return epoch

    def cleared(self, most: int) -> list[Row]:
        """Rows of earlier epochs that nobody is writing."""
        found: list[Row] = []
        # Each side can use the order of the index, which "!=" cannot.
        for side in "<>":
            values = self._connection.execute(
                f"SELECT {_COLUMNS} FROM entries "
                f"WHERE epoch {side} {_CURRENT} AND owner IS NULL LIMIT ?",
                (most - len(found),),
            )
            found += [_row(it) for it in values.fetchall()]
        return found

    def touch(self, digests: Sequence[bytes], now: int) -> None:
        """Note a use of ``digests``, the first of them as the latest."""
        last = self.next_use(now, len(digests))
        self._connection.executemany(
            "UPDATE entries SET used = ? WHERE digest = ?",
            [(last - place, digest) for place, digest in enumerate(digests)],
        )

    def next_use(self, now: int, step: int = 1) -> int:
        """A moment after the latest use of any row, if there is one; ``now`` otherwise."""
        (last,) = self._connection.execute(
            f"SELECT max(used) FROM entries WHERE epoch = {_CURRENT}"
        ).fetchone()
        # A clock that was put back for good, or a damaged row, is not followed.
        if not isinstance(last, int) or last > now + FAR_MICROSECONDS:
            return now
        return max(now, last + step)

    def recount(self) -> None:
        """Make the figures equal to what the rows say."""
        self._connection.execute(
            "UPDATE figures SET value = (SELECT coalesce(sum(num_bytes), 0) FROM entries) "
            "WHERE name = 'num_bytes'"
        )
        self._connection.execute(
            f"UPDATE figures SET value = "
            f"(SELECT count(*) FROM entries WHERE {IS_FOUND}) WHERE name = 'num_ready'"
        )
        count = (
            "(SELECT count(*) FROM entries AS child "
            "WHERE child.parent = entries.digest AND child.epoch = entries.epoch)"
        )
        self._connection.execute(
            f"UPDATE entries SET num_children = {count} WHERE num_children != {count}"
        )

    def oldest(self, keep: bytes) -> Row | None:
        """The least recently used entry on which none hangs, ``keep`` aside."""
        values = self._connection.execute(
            f"SELECT {_COLUMNS} FROM entries WHERE {IS_FOUND} AND num_children = 0 "
            "AND digest != ? ORDER BY used LIMIT 1",
            (keep,),
        ).fetchone()
        return None if values is None else _row(values)


_NAME_FIELDS = ("digest", "kind", "root", "parent", "num_tokens")
_ROW_FIELDS = ("num_bytes", "used", "state", "owner", "epoch")
_COLUMNS = ", ".join((*_NAME_FIELDS, *_ROW_FIELDS))


def open_catalog(path: Path) -> Catalog:
    """Open the index at ``path``; an empty one is made if there is none.

    Raises:
        sqlite3.DatabaseError: It cannot be used, or has another version.
    """
    writer = _connect(path, WRITE_TIMEOUT_SECONDS)
    try:
        with _damage_translated():
            _check(writer)
        reader = _connect(path, READ_TIMEOUT_SECONDS)
        return Catalog(path, path.stat().st_ino, reader, writer)
    except BaseException:
        writer.close()
        raise


_SINCE = (
    f"SELECT DISTINCT entries.{', entries.'.join(_NAME_FIELDS)}, num_bytes FROM journal "
    f"CROSS JOIN entries ON entries.digest = journal.digest WHERE number > ? AND {IS_FOUND}"
)
_EVERY = f"SELECT {', '.join(_NAME_FIELDS)}, num_bytes FROM entries WHERE {IS_FOUND}"


@contextmanager
def _snapshot(connection: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    """One state of the index for several queries."""
    connection.execute("BEGIN")
    try:
        yield connection
    finally:
        connection.rollback()


def _journal_ends(connection: sqlite3.Connection) -> tuple[int, int]:
    """The first and the last number of the journal; ``(1, 0)`` while it has none."""
    first, last = connection.execute("SELECT min(number), max(number) FROM journal").fetchone()
    return (1, 0) if first is None else (first, last)


def _gone(connection: sqlite3.Connection, number: int) -> tuple[bytes, ...]:
    found = connection.execute(
        "SELECT DISTINCT digest FROM journal WHERE number > ? AND NOT EXISTS "
        f"(SELECT 1 FROM entries WHERE entries.digest = journal.digest AND {IS_FOUND})",
        (number,),
    )
    return tuple([digest for (digest,) in found.fetchall()])


def _kept(
    connection: sqlite3.Connection, query: str, values: tuple[object, ...]
) -> tuple[Kept, ...]:
    found = connection.execute(query, values).fetchall()
    return tuple(
        [
            Kept(digest, num_bytes, _name(digest, kind, *rest) if kind == "checkpoint" else None)
            for digest, kind, *rest, num_bytes in found
        ]
    )


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[Change]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        with _damage_translated():
            yield Change(connection)
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


def _connect(path: Path, timeout: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=timeout, isolation_level=None, check_same_thread=False
    )
    try:
        with _damage_translated():
            connection.execute("PRAGMA journal_mode = WAL")
        # kill -9 costs nothing here. A power cut may damage the index; then it is made anew from
        # the files, which would cost a hundred times less than waiting for the device each time.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        # A process that is stopped while it reads makes the log grow; afterwards it is cut again.
        connection.execute(f"PRAGMA journal_size_limit = {LOG_PAGES * PAGE_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if version == 0 and num_tables == 0:
        connection.executescript(_SCHEMA.format(epoch=_new_epoch()))
    elif version != SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f"index version {version}, expected {SCHEMA_VERSION}")
    if _schema_of(connection) != _expected_schema():
        raise sqlite3.DatabaseError("the index has other tables")
    (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if answer != "ok":
        raise sqlite3.DatabaseError(f"the index is damaged: {answer}")


def _schema_of(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return connection.execute("SELECT name, sql FROM sqlite_schema ORDER BY name").fetchall()


def _expected_schema() -> list[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.executescript(_SCHEMA.format(epoch=0))
        return _schema_of(connection)


def _new_epoch() -> int:
    """A number that no earlier index of the directory has had."""
    return randbits(62)


def _find(connection: sqlite3.Connection, digest: bytes) -> Row | None:
    values = connection.execute(
        f"SELECT {_COLUMNS} FROM entries WHERE digest = ?", (digest,)
    ).fetchone()
    return None if values is None else _row(values)


def _rows(connection: sqlite3.Connection) -> list[Row]:
    found = connection.execute(f"SELECT {_COLUMNS} FROM entries ORDER BY used")
    return [_row(values) for values in found.fetchall()]


def _figure(connection: sqlite3.Connection, name: str) -> int:
    found = connection.execute("SELECT value FROM figures WHERE name = ?", (name,)).fetchone()
    if found is None or not isinstance(found[0], int):
        raise sqlite3.DatabaseError(f"the index has no {name}")
    return found[0]


def _row(values: tuple[Any, ...]) -> Row:
    name, rest = _name(*values[:5]), dict(zip(_ROW_FIELDS, values[5:], strict=True))
    with _damage_translated():
        return convert({"name": name, **rest}, Row)


def _name(*values: object) -> EntryName:
    with _damage_translated():
        return convert(dict(zip(_NAME_FIELDS, values, strict=True)), EntryName)


@contextmanager
def _damage_translated() -> Generator[None]:
    """A value that a row cannot have means that the index is damaged."""
    try:
        yield
    except (ValidationError, UnicodeDecodeError) as error:
        # The latter comes from messages of SQLite that quote the damage.
        raise sqlite3.DatabaseError(f"the index is damaged: {error}") from error
