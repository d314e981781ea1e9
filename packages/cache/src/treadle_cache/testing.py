"""Helpers for tests of prefix stores: layouts, and a slow tier in memory."""

from collections.abc import Sequence

from treadle_cache.entries import Entry, EntryName
from treadle_core.prefix import StateLayout, TokenArray


def layout_of(*dtypes: str, has_state: bool = False, heads: int = 2, dim: int = 4) -> StateLayout:
    """A layout with one token array per dtype."""
    return StateLayout(
        tokens=tuple(TokenArray(heads, dim, dtype) for dtype in dtypes),
        has_state=has_state,
        format=f"{','.join(dtypes)}/{heads}x{dim}{'+state' if has_state else ''}",
    )


class FakeReading:
    """A reading of a :class:`FakeSlowTier`. It sees what is there when it is done.

    Attributes:
        digests: What was asked for.
        cancelled: Whether nobody wants it any more.
    """

    def __init__(self, tier: "FakeSlowTier", digests: Sequence[bytes]) -> None:
        self._tier = tier
        self._entries: list[Entry | None] | None = None
        self.digests = tuple(digests)
        self.cancelled = False

    @property
    def done(self) -> bool:
        """Whether :meth:`result` returns at once."""
        return self._entries is not None

    def result(self) -> list[Entry | None]:
        """The entries, None for each that is gone or damaged."""
        self.finish()
        assert self._entries is not None
        return self._entries

    @property
    def num_bytes(self) -> int:
        """Bytes that were read, and not taken out of the result."""
        return sum(entry.num_bytes for entry in self._entries or () if entry is not None)

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self.cancelled = True

    def finish(self) -> None:
        """Read now."""
        if self._entries is None:
            wanted = () if self.cancelled else self.digests
            self._entries = [self._tier.take(digest) for digest in wanted]


class FakeSlowTier:
    """A slow tier in memory that reads when it is told to, and fails where it is told to.

    Args:
        delayed: Whether readings wait for :meth:`finish` or :meth:`wait`.

    Attributes:
        entries: What is kept, by digest.
        damaged: Digests of entries that can be found and not be read.
        readings: All readings, in order.
        room: Bytes that may wait to be written; None for any number. What is put stays in it.
        touched: What was touched, in order.
        num_puts: How many entries were handed in.
        num_dropped: How many of them had no room.
        closed: Whether it was closed.
    """

    def __init__(self, *, delayed: bool = False) -> None:
        self._delayed = delayed
        self.entries: dict[bytes, Entry] = {}
        self.damaged: set[bytes] = set()
        self.readings: list[FakeReading] = []
        self.room: int | None = None
        self.touched: list[bytes] = []
        self.num_puts = 0
        self.num_dropped = 0
        self.closed = False

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes fit into ``room``."""
        return self.room is None or num_bytes <= self.room

    def put(self, entry: Entry) -> None:
        """Keep a copy, if there is room."""
        self.num_puts += 1
        if not self.has_room(entry.num_bytes):
            self.num_dropped += 1
            return
        if self.room is not None:
            self.room -= entry.num_bytes
        arrays = tuple([array.copy() for array in entry.arrays])
        self.entries[entry.name.digest] = Entry(name=entry.name, arrays=arrays)

    def touch(self, digests: Sequence[bytes]) -> None:
        """Note it."""
        self.touched.extend(digests)

    def count_blocks(self, digests: Sequence[bytes]) -> int:
        """How many are kept, without a gap."""
        absent = (n for n, digest in enumerate(digests) if digest not in self.entries)
        return next(absent, len(digests))

    def present(self, digests: Sequence[bytes]) -> set[bytes]:
        """Which are kept."""
        return self.entries.keys() & set(digests)

    def checkpoints(self, parents: Sequence[bytes]) -> list[EntryName]:
        """Checkpoints that hang on any of ``parents``."""
        names = [entry.name for entry in self.entries.values()]
        return [name for name in names if name.kind == "checkpoint" and name.parent in parents]

    def num_bytes(self, digests: Sequence[bytes]) -> int:
        """Bytes of those that are kept."""
        kept = (self.entries.get(digest) for digest in digests)
        return sum(entry.num_bytes for entry in kept if entry is not None)

    def read(self, digests: Sequence[bytes]) -> FakeReading:
        """Begin to read."""
        reading = FakeReading(self, digests)
        self.readings.append(reading)
        if not self._delayed:
            reading.finish()
        return reading

    def take(self, digest: bytes) -> Entry | None:
        """An entry, as a reading gets it."""
        return None if digest in self.damaged else self.entries.get(digest)

    def finish(self) -> None:
        """Finish every reading."""
        for reading in self.readings:
            reading.finish()

    def wait(self, seconds: float) -> None:
        """Finish the oldest reading that is wanted, and those that are not."""
        for reading in self.readings:
            if reading.cancelled:
                reading.finish()
        wanted = (
            reading for reading in self.readings if not reading.done and not reading.cancelled
        )
        reading = next(wanted, None)
        if reading is not None:
            reading.finish()

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()

    def flush(self) -> None:
        """Do nothing: everything is written at once."""

    def stats(self) -> dict[str, int | float]:
        """How many entries are kept."""
        return {"num_entries": len(self.entries)}

    def close(self) -> None:
        """Note it."""
        self.closed = True
