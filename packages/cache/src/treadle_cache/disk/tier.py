"""The disk tier: a shelf with a thread that writes, one that reads, and a policy for failures."""

import logging
import sqlite3
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Condition, Thread

from msgspec import Struct

from treadle_cache.disk.config import DiskConfig
from treadle_cache.disk.counters import Counters
from treadle_cache.disk.failures import DISK_ERRORS, Breaker, needs_order, reason_of
from treadle_cache.disk.files import Files, RealFiles
from treadle_cache.disk.shelf import Limits, Outcome, Shelf
from treadle_cache.entries import Entry, EntryName, SlowTier
from treadle_core.clock import SystemClock
from treadle_core.errors import Unsupported
from treadle_core.ports import Clock

logger = logging.getLogger(__name__)

# Uses noted in one transaction; each may change a page or two of the index.
MAX_TOUCHED = 32


class _Waiting(Struct, frozen=True):
    """An entry that is not written yet, and the epoch in which it was put, if it was known."""

    entry: Entry
    epoch: int | None


class DiskReading:
    """Entries that the reader thread reads.

    Args:
        changed: Told when it is done.
        digests: Which.
        epoch: The epoch in which it was asked for, if it was known.
        num_clears: How often the tier had been cleared then.
    """

    def __init__(
        self, changed: Condition, digests: Sequence[bytes], epoch: int | None, num_clears: int
    ) -> None:
        self._changed = changed
        self._entries: list[Entry | None] | None = None
        self.digests = tuple(digests)
        self.epoch = epoch
        self.num_clears = num_clears
        self.is_wanted = True

    @property
    def done(self) -> bool:
        """Whether :meth:`result` returns at once."""
        return self._entries is not None

    def result(self) -> list[Entry | None]:
        """The entries in the order asked for, None for each that is gone or damaged. Blocks."""
        with self._changed:
            while self._entries is None:
                self._changed.wait()
            return self._entries

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self.is_wanted = False

    def finish(self, entries: list[Entry | None]) -> None:
        """Deliver. For the tier, which holds ``changed``."""
        self._entries = entries
        self._changed.notify_all()

    def give_up(self) -> None:
        """Deliver nothing. For the tier, which holds ``changed``."""
        self.finish([None] * len(self.digests))


class DiskTier(SlowTier):
    """Entries in the files of a directory that other processes may share.

    What is put waits in memory until a thread has written it, and is found there meanwhile. What
    is written survives kill -9 at any moment: an entry is there whole or not at all. After a power
    cut the last entries may be missing or torn; a torn one is recognised by its checksum. Files are
    brought to the device when nothing waits to be written, after ``sync_bytes`` at the latest, and
    by ``close``.

    No method raises. What fails is a miss and counted; when writing fails again and again, nothing
    is written until a later attempt succeeds.

    Args:
        config: Where, and how much.
        files: The file system.
        clock: For the pause after failures.
        now: Seconds since the epoch, by which entries are ordered.

    Raises:
        Unsupported: The directory cannot be made or opened.
    """

    def __init__(
        self,
        config: DiskConfig,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._counters = Counters()
        self._shelf = Shelf(
            Path(config.directory),
            limits_of(config),
            files or RealFiles(),
            lambda: int(now() * 1e6),
            self._counters,
        )
        self._open_shelf()
        # Guards all that follows.
        self._changed = Condition()
        self._breaker = Breaker(config.max_failures, config.retry_seconds, self._clock)
        self._waiting = OrderedDict[bytes, _Waiting]()
        self._waiting_bytes = 0
        self._touched = deque[bytes]()
        self._unsynced = dict[bytes, int]()
        self._readings = deque[DiskReading]()
        self._num_open = 0
        self._num_read = 0
        self._num_seen = 0
        self._num_clears = 0
        self._must_clear = False
        self._is_closed = False
        self._threads = [
            Thread(target=self._write_all, name="treadle-disk-writer", daemon=True),
            Thread(target=self._read_all, name="treadle-disk-reader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _open_shelf(self) -> None:
        try:
            self._shelf.open()
        except DISK_ERRORS as error:
            self._shelf.close()
            raise Unsupported(
                f"directory ({self._config.directory}) cannot hold the disk tier: {error}"
            ) from error

    # Putting

    def put(self, entry: Entry) -> None:
        """Keep an entry, later; blocks while too much is waiting to be written."""
        self._retry_clear()
        epoch = self._epoch()
        with self._changed:
            self._changed.wait_for(lambda: self._takes(entry.num_bytes))
            if self._is_closed or self._must_clear or self._is_paused():
                self._counters.add("dropped")
            else:
                self._enqueue(_Waiting(entry, epoch))

    def _enqueue(self, new: _Waiting) -> None:
        digest = new.entry.name.digest
        old = self._waiting.get(digest)
        if old is not None and is_of(old, new.epoch):
            return
        if old is not None:
            # Another process has cleared since: the old one will not be written.
            self._remove(old)
        self._waiting[digest] = new
        self._waiting_bytes += new.entry.num_bytes
        self._changed.notify_all()

    def _takes(self, num_bytes: int) -> bool:
        """Whether an entry need not wait, be it that it is dropped."""
        fits = self._waiting_bytes + num_bytes <= self._config.queue_bytes
        return fits or not self._waiting or self._is_closed or self._is_paused()

    def _is_paused(self) -> bool:
        """Whether nothing is written after failures; one entry at a time may try again."""
        if not self._breaker.is_open:
            return False
        return bool(self._waiting) or not self._breaker.may_try()

    def _epoch(self) -> int | None:
        """The number that every clear changes; None while the index cannot be read."""
        try:
            return self._shelf.catalog.figure("epoch")
        except DISK_ERRORS:
            self._counters.add("index_errors")
            return None

    # Look-ups

    def count_blocks(self, digests: Sequence[bytes]) -> int:
        """How many of ``digests``, from the first on without a gap, are kept or being written."""
        found = self.present(digests)
        gaps = (place for place, digest in enumerate(digests) if digest not in found)
        return next(gaps, len(digests))

    def present(self, digests: Sequence[bytes]) -> set[bytes]:
        """Which of ``digests`` are kept or being written."""
        waiting = self._names_waiting()
        found = {digest for digest in digests if digest in waiting}
        try:
            kept = set[bytes]() if self._must_clear else self._shelf.catalog.present(digests)
        except DISK_ERRORS:
            self._counters.add("index_errors")
            return found
        return found | kept

    def checkpoints(self, parents: Sequence[bytes]) -> list[EntryName]:
        """Checkpoints that hang on any of ``parents``."""
        wanted = set(parents)
        names = {
            digest: name
            for digest, name in self._names_waiting().items()
            if name.kind == "checkpoint" and name.parent in wanted
        }
        try:
            kept = [] if self._must_clear else self._shelf.catalog.checkpoints(parents)
        except DISK_ERRORS:
            self._counters.add("index_errors")
            kept = []
        names.update((name.digest, name) for name in kept)
        return list(names.values())

    def _names_waiting(self) -> dict[bytes, EntryName]:
        epoch = self._epoch()
        with self._changed:
            return {
                digest: waiting.entry.name
                for digest, waiting in self._waiting.items()
                if is_of(waiting, epoch)
            }

    # Reading

    def read(self, digests: Sequence[bytes]) -> DiskReading:
        """Begin to read entries, in the order given."""
        reading = DiskReading(self._changed, digests, self._epoch(), self._num_clears)
        with self._changed:
            if self._is_closed or self._must_clear:
                reading.give_up()
                return reading
            self._readings.append(reading)
            self._num_open += 1
            self._changed.notify_all()
        return reading

    def wait(self, seconds: float) -> None:
        """Block until some reading has finished, at most ``seconds``."""
        with self._changed:
            # One that finished since the last call counts: it may not have been looked at yet.
            self._changed.wait_for(
                lambda: self._num_read != self._num_seen or not self._num_open, seconds
            )
            self._num_seen = self._num_read

    def _read_all(self) -> None:
        """The reader thread."""
        try:
            while (reading := self._next_reading()) is not None:
                self._deliver(reading)
        finally:
            # Whatever ended it, nobody is left waiting.
            self._stop()
            with self._changed:
                while self._readings:
                    self._readings.popleft().give_up()
                self._num_open = 0

    def _next_reading(self) -> DiskReading | None:
        with self._changed:
            self._changed.wait_for(lambda: self._readings or self._is_closed)
            return self._readings[0] if self._readings else None

    def _deliver(self, reading: DiskReading) -> None:
        started = self._clock.now()
        entries: list[Entry | None] = [self._read(reading, it) for it in reading.digests]
        self._counters.add("read_us", int((self._clock.now() - started) * 1e6))
        is_cleared = reading.epoch is not None and self._epoch() != reading.epoch
        with self._changed:
            if self._num_clears != reading.num_clears or is_cleared:
                entries = [None] * len(entries)
            if self._readings and self._readings[0] is reading:
                self._readings.popleft()
            if not self._is_closed:
                found = (entry.name.digest for entry in entries if entry is not None)
                self._touched.extend(found)
            self._num_open -= 1
            self._num_read += 1
            reading.finish(entries)

    def _read(self, reading: DiskReading, digest: bytes) -> Entry | None:
        if not reading.is_wanted:
            return None
        with self._changed:
            waiting = self._waiting.get(digest)
        if waiting is not None and is_of(waiting, reading.epoch):
            self._counters.add("read_from_memory")
            return waiting.entry
        try:
            return self._shelf.read(digest)
        except DISK_ERRORS as error:
            self._counters.add(f"read_failures_{reason_of(error)}")
            return None

    # Writing

    def _write_all(self) -> None:
        """The writer thread."""
        try:
            while (step := self._next_step()) is not None:
                step()
        finally:
            # Whatever ended it, nobody is left waiting.
            self._stop()
            with self._changed:
                self._touched.clear()
                self._forget_waiting()

    def _next_step(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._touched or self._unsynced or self._is_closed
            )
            if sum(self._unsynced.values()) >= self._config.sync_bytes:
                return self._sync
            if self._touched:
                return self._touch
            if self._waiting:
                return self._write
            return self._sync if self._unsynced else None

    def _write(self) -> None:
        """Write what has waited longest, which is found in memory until it is written."""
        with self._changed:
            if not self._waiting:
                return
            waiting = next(iter(self._waiting.values()))
        started = self._clock.now()
        try:
            outcome = self._write_one(waiting)
        except DISK_ERRORS as error:
            self._note_failure(waiting, error)
        else:
            self._counters.add("write_us", int((self._clock.now() - started) * 1e6))
            self._note_outcome(waiting, outcome)

    def _write_one(self, waiting: _Waiting) -> Outcome:
        try:
            return self._write_in(waiting, waiting.epoch)
        except DISK_ERRORS as error:
            if not needs_order(error):
                raise
        self._counters.add("reopened")
        self._shelf.open()
        # The index may be a new one, with an epoch of its own.
        return self._write_in(waiting, None)

    def _write_in(self, waiting: _Waiting, epoch: int | None) -> Outcome:
        if epoch is not None:
            return self._shelf.write(waiting.entry, epoch)
        epoch = self._shelf.catalog.figure("epoch")
        with self._changed:
            # A clear empties what waits before it changes the epoch, so it is seen here or there.
            if self._waiting.get(waiting.entry.name.digest) is not waiting:
                return "cleared"
        return self._shelf.write(waiting.entry, epoch)

    def _note_outcome(self, waiting: _Waiting, outcome: Outcome) -> None:
        self._counters.add(outcome)
        with self._changed:
            if outcome == "written":
                num_bytes = waiting.entry.num_bytes
                self._counters.add("written_bytes", num_bytes)
                self._unsynced[waiting.entry.name.digest] = num_bytes
            if self._breaker.succeeded():
                logger.info("disk tier: %s takes writes again", self._config.directory)
            self._remove(waiting)

    def _note_failure(self, waiting: _Waiting, error: OSError | sqlite3.Error) -> None:
        reason = reason_of(error)
        self._counters.add(f"write_failures_{reason}")
        with self._changed:
            self._remove(waiting)
            if self._breaker.failed():
                logger.warning(
                    "disk tier: nothing is written to %s for %g s, after %d failures in a row: %s",
                    self._config.directory,
                    self._config.retry_seconds,
                    self._config.max_failures,
                    error,
                )
            if self._breaker.is_open:
                self._counters.add("dropped", len(self._waiting))
                self._forget_waiting()

    def _remove(self, waiting: _Waiting) -> None:
        digest = waiting.entry.name.digest
        if self._waiting.get(digest) is waiting:
            del self._waiting[digest]
            self._waiting_bytes -= waiting.entry.num_bytes
        self._changed.notify_all()

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0
        self._changed.notify_all()

    def _touch(self) -> None:
        with self._changed:
            digests = [self._touched[n] for n in range(min(MAX_TOUCHED, len(self._touched)))]
        try:
            self._shelf.touch(digests)
        except DISK_ERRORS:
            self._counters.add("index_errors")
        with self._changed:
            for _ in range(min(len(digests), len(self._touched))):
                self._touched.popleft()
            self._changed.notify_all()

    def _sync(self) -> None:
        with self._changed:
            digests = list(self._unsynced)
            self._unsynced.clear()
        try:
            self._shelf.sync(digests)
        except DISK_ERRORS:
            self._counters.add("sync_failures")

    def flush(self) -> None:
        """Block until everything put before is written, or given up."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._touched))

    # Clearing

    def clear(self) -> None:
        """Forget everything; what was put before is not found after this returns."""
        with self._changed:
            self._forget_waiting()
            self._touched.clear()
            self._num_clears += 1
            # Until it is done, and for as long as it cannot be, nothing is looked up.
            self._must_clear = True
        self._clear_shelf()

    def _retry_clear(self) -> None:
        if self._must_clear and self._breaker.may_try():
            self._clear_shelf()

    def _clear_shelf(self) -> None:
        try:
            self._clear_or_reopen()
        except DISK_ERRORS as error:
            self._counters.add("clear_failures")
            with self._changed:
                self._breaker.failed()
            logger.warning(
                "disk tier: %s could not be cleared and is not used until it is: %s",
                self._config.directory,
                error,
            )
        else:
            self._must_clear = False

    def _clear_or_reopen(self) -> None:
        try:
            self._shelf.clear()
        except DISK_ERRORS as error:
            if not needs_order(error):
                raise
            self._shelf.open()
            self._shelf.clear()

    # The rest

    def stats(self) -> dict[str, int | float]:
        """Counters by name."""
        figures: dict[str, int | float] = dict(self._counters.snapshot())
        for name in ("read", "write"):
            figures[f"{name}_seconds"] = figures.pop(f"{name}_us", 0) / 1e6
        with self._changed:
            figures["num_waiting"] = len(self._waiting)
            figures["waiting_bytes"] = self._waiting_bytes
            figures["is_paused"] = int(self._breaker.is_open)
        figures["capacity_bytes"] = self._config.capacity_bytes
        try:
            figures["num_entries"] = self._shelf.catalog.figure("num_ready")
            figures["used_bytes"] = self._shelf.used_bytes()
        except DISK_ERRORS:
            figures["num_entries"] = figures["used_bytes"] = 0
        return figures

    def close(self) -> None:
        """Flush and end the threads. Idempotent."""
        if self._must_clear and not self._is_closed:
            self._clear_shelf()
        self._stop()
        for thread in self._threads:
            thread.join()
        try:
            self._shelf.close()
        except DISK_ERRORS:
            self._counters.add("index_errors")

    def _stop(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def limits_of(config: DiskConfig) -> Limits:
    """What a shelf may take under ``config``."""
    return Limits(
        capacity_bytes=config.capacity_bytes,
        min_free_bytes=config.min_free_bytes,
        quarantine_bytes=config.quarantine_bytes,
    )


def is_of(waiting: _Waiting, epoch: int | None) -> bool:
    """Whether an entry was put in ``epoch``, as far as both are known."""
    return None in (waiting.epoch, epoch) or waiting.epoch == epoch
