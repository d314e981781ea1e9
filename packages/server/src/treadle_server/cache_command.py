"""``treadle cache``: look at the directory of an SSD cache, check it, empty it, make it smaller."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import msgspec
from msgspec import Struct

from treadle_core import Unsupported
from treadle_server.errors import CacheUnusable

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Name(Protocol):
    """Which entry it is."""

    @property
    def kind(self) -> str: ...
    @property
    def root(self) -> bytes: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def num_tokens(self) -> int: ...


class Info(Protocol):
    """An entry: its name, the bytes of its file, and when it was last used."""

    @property
    def name(self) -> Name: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def used(self) -> float: ...


class Listing(Protocol):
    """What is in a directory."""

    @property
    def entries(self) -> Sequence[Info]: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def quarantine_bytes(self) -> int: ...


class Verified(Protocol):
    """What checking every file said."""

    @property
    def num_damaged(self) -> dict[Any, int]: ...
    @property
    def num_missing(self) -> int: ...


class Care(Protocol):
    """What can be done with a directory. All of it may raise OSError and sqlite3.Error."""

    def list_entries(self, directory: str | Path) -> Listing:
        """What is in it."""
        ...

    def verify(self, directory: str | Path) -> Verified:
        """Whether every file is as it was written."""
        ...

    def clear(self, directory: str | Path) -> object:
        """Empty it."""
        ...

    def collect(self, directory: str | Path, capacity_bytes: int) -> object:
        """Put it in order and make it fit."""
        ...


class Entry(Struct, frozen=True, kw_only=True):
    """An entry as ``--json`` writes it; digests are hexadecimal, times seconds since 1970."""

    kind: str
    digest: str
    parent: str
    root: str
    num_tokens: int
    num_bytes: int
    used: float


class Report(Struct, frozen=True, kw_only=True):
    """The reply of ``ls``."""

    num_entries: int
    used_bytes: int
    quarantine_bytes: int
    entries: tuple[Entry, ...]


class Task(Struct, frozen=True, kw_only=True):
    """What to do.

    Attributes:
        action: ``ls``, ``verify``, ``clear`` or ``gc``.
        directory: The cache's.
        max_bytes: For ``gc``, most bytes that are left.
        as_json: Write JSON, not lines for people.
    """

    action: str
    directory: str
    max_bytes: int
    as_json: bool = False


def care_for(task: Task, care: Care, out: TextIO) -> bool:
    """Do it and say what came of it.

    Returns:
        Whether all is well: False if files are damaged or missing.

    Raises:
        Unsupported: There is no such directory.
        CacheUnusable: It cannot be read or changed.
    """
    if not Path(task.directory).is_dir():
        raise Unsupported(f"ssd_cache_dir: {task.directory} is not a directory")
    try:
        return act(task, care, out)
    except (OSError, sqlite3.Error) as error:
        raise CacheUnusable(task.directory, error) from error


def act(task: Task, care: Care, out: TextIO) -> bool:
    """The same, with the errors of files and of the index."""
    match task.action:
        case "ls":
            report = as_report(care.list_entries(task.directory))
            write(task, report, listed(report, time.time()), out)
        case "verify":
            found = care.verify(task.directory)
            write(task, found, figures(found), out)
            return not (found.num_damaged or found.num_missing)
        case "clear":
            cleared = care.clear(task.directory)
            write(task, cleared, figures(cleared), out)
        case _:
            collected = care.collect(task.directory, task.max_bytes)
            write(task, collected, figures(collected), out)
    return True


def write(task: Task, result: object, lines: Iterator[str], out: TextIO) -> None:
    """The result, as it was asked for."""
    if task.as_json:
        lines = iter([msgspec.json.encode(result).decode()])
    for line in lines:
        out.write(line + "\n")


def as_report(listing: Listing) -> Report:
    """A listing in plain data."""
    entries = tuple(
        Entry(
            kind=entry.name.kind,
            digest=entry.name.digest.hex(),
            parent=entry.name.parent.hex(),
            root=entry.name.root.hex(),
            num_tokens=entry.name.num_tokens,
            num_bytes=entry.num_bytes,
            used=entry.used,
        )
        for entry in listing.entries
    )
    return Report(
        num_entries=len(entries),
        used_bytes=listing.used_bytes,
        quarantine_bytes=listing.quarantine_bytes,
        entries=entries,
    )


def listed(report: Report, now: float) -> Iterator[str]:
    """A listing for people, the most recently used first."""
    for entry in report.entries:
        used = datetime.fromtimestamp(min(entry.used, now), tz=UTC)
        yield (
            f"{entry.digest[:16]}  {entry.kind:<10}  {entry.num_tokens:>8} tokens  "
            f"{size(entry.num_bytes):>10}  used {used:%Y-%m-%d %H:%M:%S} UTC  "
            f"of {entry.root[:8]}"
        )
    yield f"{report.num_entries} entries, {size(report.used_bytes)} with all files"
    if report.quarantine_bytes:
        yield f"{size(report.quarantine_bytes)} of damaged files in quarantine"


def figures(result: object) -> Iterator[str]:
    """Every field of a result, one per line; of a list, every item."""
    fields: dict[str, Any] = msgspec.to_builtins(result)
    for name, value in fields.items():
        label = name.removeprefix("num_").removesuffix("_bytes").replace("_", " ")
        if isinstance(value, list):
            yield from (f"{label}: {item}" for item in cast("list[str]", value))
        elif isinstance(value, dict):
            counts = cast("dict[str, int]", value)
            yield f"{label}: {', '.join(f'{n} {reason}' for reason, n in counts.items()) or 0}"
        else:
            yield f"{label}: {size(value) if name.endswith('_bytes') else value}"


def size(num_bytes: float) -> str:
    """A number of bytes for people."""
    for unit in UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {UNITS[-1]}"
