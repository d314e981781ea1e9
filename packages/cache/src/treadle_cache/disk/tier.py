"""The disk tier: a shelf with a thread that writes, one that reads, and a policy for failures."""

import logging
import sqlite3
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from threading import Condition, Lock, Thread

from msgspec import Struct

from treadle_cache.disk.config import DiskConfig
from treadle_cache.disk.counters import Counters
from treadle_cache.disk.failures import DISK_ERRORS, Breaker, is_lock, needs_order, reason_of
from treadle_cache.disk.files import Files, RealFiles
from treadle_cache.disk.mirror import Mirror
from treadle_cache.disk.shelf import Figures, Limits, Outcome, Shelf
from treadle_cache.entries import Entry, EntryName, SlowTier
from treadle_core.clock import SystemClock
from treadle_core.errors import Unsupported
from treadle_core.ports import Clock

logger = logging.getLogger(__name__)

# Uses noted in one transaction; each may change a page or two of the index.
MAX_TOUCHED = 32

# Uses that wait to be noted; what comes beyond ages a little early.
MAX_TOUCHES_WAITING = 8192

# Entries that share the two transactions which each would need alone, and are found by others
# together: a second's writing on a slow disk.
BATCH_ENTRIES = 16
BATCH_BYTES = 32 << 20

# How often the index is asked what other processes have changed.
LOOK_SECONDS = 0.25

# An entry that is being read for longer than this is on a disk that hangs: nothing more is found
# there until it answers.
HANG_SECONDS = 2.0

# Longest that a clear holds up who calls it.
CLEAR_SECONDS = 0.3


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
        with self._changed:
            self.is_wanted = False
            if self._entries is not None:
                # The reader keeps it until the next one comes.
                nothing: list[Entry | None] = [None] * len(self.digests)
                self._entries = nothing

    def finish(self, entries: list[Entry | None]) -> None:
        """Deliver, unless something was delivered before. For the tier, which holds ``changed``."""
        if self._entries is None:
            self._entries = entries
            self._changed.notify_all()

    def give_up(self) -> None:
        """Deliver nothing. For the tier, which holds ``changed``."""
        self.is_wanted = False
        self.finish([None] * len(self.digests))


class DiskTier(SlowTier):
    """Entries in the files of a directory that other processes may share.

    What is put waits in memory until a thread has written it, and is found there meanwhile. What
    is written survives kill -9 at any moment: an entry is there whole or not at all. After a power
    cut the last entries may be missing or torn; a torn one is recognised by its checksum. Files are
    brought to the device when nothing waits to be written, after ``sync_bytes`` at the latest, and
    by ``close``.

    No thread but its own waits for the disk: what can be found is known in memory. What other
    processes add or remove shows here within a quarter of a second, as long as the disk answers;
    until then an entry that they have removed can be found, and comes out as a miss when it is
    read. One thread makes all look-ups and changes; :meth:`stats` may be called from any.

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
        # One at a time, so that news come in order.
        self._asking = Lock()
        # Guards all that follows.
        self._changed = Condition()
        self._mirror = Mirror()
        self._breaker = Breaker(config.max_failures, config.retry_seconds, self._clock)
        self._waiting = OrderedDict[bytes, _Waiting]()
        self._waiting_bytes = 0
        self._touched = OrderedDict[bytes, None]()
        self._unsynced = dict[bytes, int]()
        self._readings = deque[DiskReading]()
        self._current: DiskReading | None = None
        self._reading_since: float | None = None
        self._num_read = 0
        self._num_seen = 0
        self._num_clears = 0
        # Of them, how many the directory has been through.
        self._num_noted = 0
        # Until a clear is done, and for as long as it cannot be, nothing is looked up.
        self._must_clear = False
        # Whether the writer is to try to.
        self._may_clear = False
        self._must_remove = False
        self._must_look = False
        self._is_closed = False
        self._is_dead = False
        self._is_given_up = False
        self._open_shelf()
        self._threads = [
            Thread(target=self._write_all, name="treadle-disk-writer", daemon=True),
            Thread(target=self._read_all, name="treadle-disk-reader", daemon=True),
            Thread(target=self._follow, name="treadle-disk-follower", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _open_shelf(self) -> None:
        try:
            self._shelf.open()
            self._mirror.take(self._shelf.catalog.news(None, 0))
        except DISK_ERRORS as error:
            self._shelf.close()
            raise Unsupported(
                f"directory ({self._config.directory}) cannot hold the disk tier: {error}"
            ) from error

    # Putting

    def has_room(self, num_bytes: int) -> bool:
        """Whether ``put`` would take so many bytes without exceeding what may wait."""
        with self._changed:
            return self._is_off() or self._fits(num_bytes)

    def put(self, entry: Entry) -> None:
        """Keep an entry, later. Without room it is taken only if nothing else waits.

        This asks neither disk nor index: if another process has cleared a moment ago, the entry
        counts as put before that, and is not kept.
        """
        with self._changed:
            if self._is_off():
                self._counters.add("dropped")
            elif self._fits(entry.num_bytes) or self._is_waiting(entry.name.digest):
                # What was put after a clear that is not done yet is written after it.
                self._may_clear = self._must_clear
                self._enqueue(_Waiting(entry, None if self._must_clear else self._mirror.epoch))
            else:
                self._counters.add("dropped_full")

    def _is_off(self) -> bool:
        return self._is_closed or self._is_paused()

    def _fits(self, num_bytes: int) -> bool:
        is_small = self._waiting_bytes + num_bytes <= self._config.queue_bytes
        return is_small or not self._waiting

    def _is_waiting(self, digest: bytes) -> bool:
        waiting = self._waiting.get(digest)
        return waiting is not None and is_of(waiting, self._epoch)

    @property
    def _epoch(self) -> int | None:
        """The number that every clear changes, as far as it is known and counts."""
        return None if self._is_hidden() else self._mirror.epoch

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

    def _is_paused(self) -> bool:
        """Whether nothing is written after failures; one entry at a time may try again."""
        if not self._breaker.is_open:
            return False
        return bool(self._waiting) or not self._breaker.may_try()

    # Look-ups

    def count_blocks(self, digests: Sequence[bytes]) -> int:
        """How many of ``digests``, from the first on without a gap, are kept or being written."""
        found = self.present(digests)
        gaps = (place for place, digest in enumerate(digests) if digest not in found)
        return next(gaps, len(digests))

    def present(self, digests: Sequence[bytes]) -> set[bytes]:
        """Which of ``digests`` are kept or being written."""
        wanted = set(digests)
        with self._changed:
            found = {it for it in self._waiting.keys() & wanted if self._is_waiting(it)}
            return found if self._is_out_of_reach() else found | self._mirror.present(wanted)

    def checkpoints(self, parents: Sequence[bytes]) -> list[EntryName]:
        """Checkpoints that hang on any of ``parents``."""
        wanted = set(parents)
        with self._changed:
            names = [] if self._is_out_of_reach() else self._mirror.checkpoints(parents)
            ends = (it.entry.name for it in self._waiting.values() if is_of(it, self._epoch))
            names += [it for it in ends if it.kind == "checkpoint" and it.parent in wanted]
        return list({name.digest: name for name in names}.values())

    def num_bytes(self, digests: Sequence[bytes]) -> int:
        """Most bytes that reading those of ``digests`` gives which are kept or being written."""
        with self._changed:
            waiting = (self._waiting.get(digest) for digest in digests)
            num_bytes = sum(it.entry.num_bytes for it in waiting if it is not None)
            return num_bytes + self._mirror.num_bytes(digests)

    def _is_hidden(self) -> bool:
        """Whether what is on the disk is not to be found."""
        return self._must_clear or self._is_closed

    def _is_out_of_reach(self) -> bool:
        """Whether what is on the disk is not to be found, or could not be read now."""
        since = self._reading_since
        is_hanging = since is not None and self._clock.now() - since > HANG_SECONDS
        return is_hanging or self._is_hidden()

    # Following the index

    def _follow(self) -> None:
        """The thread that follows what other processes change."""
        try:
            while not self._is_closed:
                self._catch_up()
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, LOOK_SECONDS)
        except Exception:  # noqa: BLE001 — whatever it is, the engine goes on without this tier
            self._die()

    def _catch_up(self) -> int | None:
        """Ask the index what has changed; the epoch, or None if it cannot be asked."""
        with self._asking:
            with self._changed:
                epoch, number, num_clears = self._mirror.epoch, self._mirror.number, self._num_noted
            try:
                news = self._shelf.catalog.news(epoch, number)
            except DISK_ERRORS as error:
                self._note_unasked(error)
                return None
            with self._changed:
                if num_clears != self._num_noted:
                    # They may be from before the clear.
                    return None
                self._mirror.take(news)
                return news.epoch

    def _note_unasked(self, error: OSError | sqlite3.Error) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._count_index_error(error)
            if needs_order(error):
                # What it said holds no more.
                self._mirror.forget()

    def _count_index_error(self, error: OSError | sqlite3.Error) -> None:
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        self._counters.add("index_errors")
        self._counters.add(f"index_errors_{name.lower()}")

    # Reading

    def read(self, digests: Sequence[bytes]) -> DiskReading:
        """Begin to read entries, in the order given."""
        with self._changed:
            reading = DiskReading(self._changed, digests, self._epoch, self._num_clears)
            if self._is_out_of_reach():
                reading.give_up()
                return reading
            self._readings.append(reading)
            self._changed.notify_all()
        return reading

    def wait(self, seconds: float) -> None:
        """Block until some reading has finished, at most ``seconds``."""
        with self._changed:
            # One that finished since the last call counts: it may not have been looked at yet.
            self._changed.wait_for(
                lambda: self._num_read != self._num_seen or not self._is_reading(), seconds
            )
            self._num_seen = self._num_read

    def _is_reading(self) -> bool:
        return bool(self._readings) or not (self._current is None or self._current.done)

    def _read_all(self) -> None:
        """The reader thread."""
        try:
            while (reading := self._next_reading()) is not None:
                self._deliver(reading)
        except Exception:  # noqa: BLE001 — whatever it is, the engine goes on without this tier
            self._die()

    def _next_reading(self) -> DiskReading | None:
        with self._changed:
            self._changed.wait_for(lambda: self._readings or self._is_closed)
            self._current = self._readings.popleft() if self._readings else None
            return self._current

    def _give_up_readings(self) -> None:
        """Deliver nothing to anybody. With ``changed`` held."""
        for reading in (*self._readings, self._current):
            if reading is not None:
                reading.give_up()
        self._num_read += 1
        self._readings.clear()
        self._changed.notify_all()

    def _deliver(self, reading: DiskReading) -> None:
        started = self._clock.now()
        entries: list[Entry | None] = [self._read(reading, it) for it in reading.digests]
        self._counters.add("read_us", int((self._clock.now() - started) * 1e6))
        # Also, so that what could not be read is not found again.
        self._reading_since = self._clock.now()
        epoch = self._catch_up()
        self._reading_since = None
        is_cleared = reading.epoch is not None and epoch != reading.epoch
        with self._changed:
            if self._num_clears != reading.num_clears or is_cleared or not reading.is_wanted:
                entries = [None] * len(entries)
            self._current = None
            self._note_uses([entry.name.digest for entry in entries if entry is not None])
            self._num_read += 1
            reading.finish(entries)
            self._changed.notify_all()

    def _read(self, reading: DiskReading, digest: bytes) -> Entry | None:
        if not reading.is_wanted:
            return None
        with self._changed:
            waiting = self._waiting.get(digest)
        if waiting is not None and is_of(waiting, reading.epoch):
            self._counters.add("read_from_memory")
            return waiting.entry
        self._reading_since = self._clock.now()
        try:
            return self._shelf.read(digest)
        except DISK_ERRORS as error:
            self._counters.add(f"read_failures_{reason_of(error)}")
            return None
        finally:
            self._reading_since = None

    # Writing

    def _write_all(self) -> None:
        """The writer thread."""
        try:
            while (step := self._next_step()) is not None:
                step()
        except Exception:  # noqa: BLE001 — whatever it is, the engine goes on without this tier
            self._die()
        with self._changed:
            self._forget_work()
        # Here, because it may take as long as the disk likes.
        with suppress(*DISK_ERRORS):
            self._shelf.close()

    def _die(self) -> None:
        """Go on as an empty tier."""
        with self._changed:
            self._is_dead = True
        self._counters.add("threads_died")
        logger.exception(
            "disk tier: %s is not used any more; please report this", self._config.directory
        )
        self._stop()
        with self._changed:
            self._forget_work()

    def _forget_work(self) -> None:
        self._touched.clear()
        self._may_clear = self._must_remove = False
        self._forget_waiting()

    def _next_step(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_work() or self._must_look or self._is_closed)
            if self._is_given_up:
                return None
            if self._may_clear:
                return self._clear_patiently
            if sum(self._unsynced.values()) >= self._config.sync_bytes:
                return self._sync
            if self._touched:
                return self._touch
            if self._waiting or self._must_remove:
                return self._write_and_remove
            if self._unsynced:
                return self._sync
            return self._look if self._must_look and not self._is_closed else None

    def _has_work(self) -> bool:
        return bool(self._is_busy() or self._unsynced)

    def _is_busy(self) -> bool:
        """Whether there is something that ``flush`` waits for."""
        return bool(self._may_clear or self._waiting or self._touched or self._must_remove)

    def _write_and_remove(self) -> None:
        """A little of each, so that neither keeps the other waiting for long."""
        self._write()
        if self._must_remove:
            self._remove_cleared()

    def _write(self) -> None:
        """Write what has waited longest, which is found in memory until it is written."""
        with self._changed:
            batch = self._next_batch()
        if not batch:
            return
        started = self._clock.now()
        try:
            outcomes = self._write_batch(batch)
        except DISK_ERRORS as error:
            self._note_failure(batch[0], error)
            return
        self._counters.add("write_us", int((self._clock.now() - started) * 1e6))
        for waiting, outcome in outcomes:
            self._note_outcome(waiting, outcome)

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        num_bytes, most = 0, min(BATCH_BYTES, self._config.sync_bytes)
        for waiting in islice(self._waiting.values(), BATCH_ENTRIES):
            num_bytes += waiting.entry.num_bytes
            if batch and (num_bytes > most or waiting.epoch != batch[0].epoch):
                break
            batch.append(waiting)
        return batch

    def _write_batch(self, batch: list[_Waiting]) -> list[tuple[_Waiting, Outcome]]:
        """Write the first of a batch and as many more as go with it."""
        try:
            return self._write_in(batch, batch[0].epoch)
        except DISK_ERRORS as error:
            if not needs_order(error):
                raise
        self._counters.add("reopened")
        self._shelf.open()
        # The index may be a new one, with an epoch of its own.
        self._catch_up()
        return self._write_in(batch, None)

    def _write_in(self, batch: list[_Waiting], epoch: int | None) -> list[tuple[_Waiting, Outcome]]:
        gone: list[_Waiting] = []
        if epoch is None:
            epoch = self._shelf.catalog.figure("epoch")
            with self._changed:
                # A clear empties what waits before it changes the epoch: it is seen here or there.
                gone = [it for it in batch if self._waiting.get(it.entry.name.digest) is not it]
        kept = [it for it in batch if it not in gone]
        outcomes = self._shelf.write([it.entry for it in kept], epoch) if kept else []
        # Before they are forgotten here, so that they can be found all the time.
        self._catch_up()
        return [*((it, "cleared") for it in gone), *zip(kept, outcomes, strict=False)]

    def _note_outcome(self, waiting: _Waiting, outcome: Outcome) -> None:
        self._counters.add(outcome)
        with self._changed:
            if outcome == "written":
                num_bytes = waiting.entry.num_bytes
                self._counters.add("written_bytes", num_bytes)
                self._unsynced[waiting.entry.name.digest] = num_bytes
            is_new = self._breaker.succeeded()
            self._remove(waiting)
        if is_new:
            logger.info("disk tier: %s takes writes again", self._config.directory)

    def _note_failure(self, waiting: _Waiting, error: OSError | sqlite3.Error) -> None:
        reason = reason_of(error)
        self._counters.add(f"write_failures_{reason}")
        with self._changed:
            self._remove(waiting)
            is_new = self._breaker.failed()
            if self._breaker.is_open:
                self._counters.add("dropped", len(self._waiting))
                self._forget_waiting()
        if is_new:
            logger.warning(
                "disk tier: nothing is written to %s for %g s, after %d failures in a row: %s",
                self._config.directory,
                self._config.retry_seconds,
                self._config.max_failures,
                error,
            )

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

    def touch(self, digests: Sequence[bytes]) -> None:
        """Note a use of entries that were served from elsewhere, the first as the latest."""
        with self._changed:
            if not self._is_hidden():
                self._note_uses(digests)
                self._changed.notify_all()

    def _note_uses(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            # What is used again while it waits is noted once, in its last place.
            self._touched[digest] = None
            self._touched.move_to_end(digest)
        num_excess = len(self._touched) - MAX_TOUCHES_WAITING
        for _ in range(num_excess):
            self._touched.popitem(last=False)
            self._counters.add("touches_dropped")

    def _touch(self) -> None:
        with self._changed:
            digests = list(islice(self._touched, MAX_TOUCHED))
        try:
            self._shelf.touch(digests)
        except DISK_ERRORS as error:
            self._count_index_error(error)
        with self._changed:
            for digest in digests:
                self._touched.pop(digest, None)
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
        """Block until everything put before is written, or given up, and what is cleared is gone.

        What other processes have changed before shows then, too.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy())
        if not self._is_closed:
            self._catch_up()

    # Clearing

    def clear(self) -> None:
        """Forget everything; what was put before is not found after this returns.

        Here that holds at once. If the disk or another process is too slow, the directory is
        cleared by the writer thread later.
        """
        with self._changed:
            self._forget_waiting()
            self._touched.clear()
            self._give_up_readings()
            self._num_clears += 1
            if self._is_closed:
                return
            self._must_clear = True
        # In a thread, because any call to the disk may hang.
        thread = Thread(
            target=self._clear_in_haste,
            args=(self._num_clears,),
            name="treadle-disk-clear",
            daemon=True,
        )
        thread.start()
        thread.join(CLEAR_SECONDS)
        with self._changed:
            self._may_clear = self._must_clear and (self._may_clear or thread.is_alive())
            self._changed.notify_all()

    def _clear_in_haste(self, num_clears: int) -> None:
        try:
            epoch = self._shelf.clear(in_haste=True)
        except DISK_ERRORS as error:
            if is_lock(error) or needs_order(error):
                self._ask_to_clear()
            else:
                self._note_unclear(error)
        except Exception:  # noqa: BLE001 — whatever it is, the engine goes on without this tier
            self._die()
        else:
            self._note_clear(num_clears, epoch)

    def _ask_to_clear(self) -> None:
        with self._changed:
            self._may_clear = self._must_clear and not self._is_closed
            self._changed.notify_all()

    def _clear_patiently(self) -> None:
        num_clears = self._num_clears
        try:
            epoch = self._clear_or_reopen()
        except DISK_ERRORS as error:
            self._note_unclear(error)
        else:
            self._note_clear(num_clears, epoch)

    def _clear_or_reopen(self) -> int:
        try:
            return self._shelf.clear()
        except DISK_ERRORS as error:
            if not needs_order(error):
                raise
            self._shelf.open()
            return self._shelf.clear()

    def _note_clear(self, num_clears: int, epoch: int) -> None:
        with self._changed:
            self._num_noted += 1
            self._mirror.forget(epoch)
            self._must_remove = not self._is_closed
            if num_clears == self._num_clears:
                self._must_clear = self._may_clear = False
            self._changed.notify_all()

    def _note_unclear(self, error: OSError | sqlite3.Error) -> None:
        """Leave the directory alone until the next ``put``, or ``close``."""
        self._counters.add("clear_failures")
        with self._changed:
            self._breaker.failed()
            self._may_clear = False
            self._counters.add("dropped", len(self._waiting))
            self._forget_waiting()
        logger.warning(
            "disk tier: %s could not be cleared and is not used until it is: %s",
            self._config.directory,
            error,
        )

    def _remove_cleared(self) -> None:
        try:
            must_remove = self._shelf.remove_cleared()
        except DISK_ERRORS:
            # What is left goes when room is needed, or when the directory is next opened.
            self._counters.add("unlink_failures")
            must_remove = False
        with self._changed:
            self._must_remove = self._must_remove and must_remove
            self._changed.notify_all()

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
            figures["is_dead"] = int(self._is_dead)
            # What other processes have changed shows the next time.
            self._must_look = True
            self._changed.notify_all()
        figures["capacity_bytes"] = self._config.capacity_bytes
        seen = Figures() if self._is_hidden() else self._shelf.figures
        figures["num_entries"], figures["used_bytes"] = seen.num_entries, seen.used_bytes
        return figures

    def _look(self) -> None:
        with self._changed:
            self._must_look = False
        try:
            self._shelf.look()
        except DISK_ERRORS as error:
            self._count_index_error(error)

    def close(self) -> None:
        """Flush and end the threads, or give up what takes too long. Idempotent."""
        end = time.monotonic() + self._config.close_seconds
        with self._changed:
            if not self._is_closed:
                self._may_clear = self._must_clear
        self._stop()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._changed:
            is_late = any(thread.is_alive() for thread in self._threads) and not self._is_given_up
            num_given_up = self._give_up() if is_late else 0
        if is_late:
            logger.warning(
                "disk tier: %s did not answer within %g s; %d entries are not written",
                self._config.directory,
                self._config.close_seconds,
                num_given_up,
            )

    def _give_up(self) -> int:
        """Leave the threads to themselves; they end when the disk lets them."""
        num_waiting = len(self._waiting)
        self._is_given_up = True
        self._counters.add("given_up", num_waiting)
        self._unsynced.clear()
        self._forget_work()
        return num_waiting

    def _stop(self) -> None:
        with self._changed:
            self._is_closed = True
            self._give_up_readings()


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
