"""A prefix store that outlives its process in one file."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from treadle_core.ports import PrefixStore, RowReader, StoredRow
from treadle_core.prefix import Prefix, PrefixKey, PrefixStats, StateLayout

LONGEST_SAVE_SECONDS = 20.0
LONGEST_LOAD_SECONDS = 60.0
PROGRESS_SECONDS = 5.0

GoesOn = Callable[[int, int], bool]
"""Told of how many states how many are loaded; whether to go on."""

logger = logging.getLogger("treadle.server")


class SavingStore:
    """A store that is loaded when its model is known, and saved when it is closed.

    A save that takes too long is given up, and leaves the file as it was. So is a load, which keeps
    what it has by then; after one that was stopped nothing is saved.

    Args:
        inner: The store.
        path: The file.
        load: Fills it from the file as long as it is told to; returns how many entries were added.
        save: Writes the file; returns how many entries are in it.
        seconds: Most time that saving may take.
        load_seconds: Most time that loading may take.
        stops: Whether loading is to stop, because nobody wants to use the store any more.
    """

    def __init__(
        self,
        inner: PrefixStore,
        path: Path,
        load: Callable[[GoesOn], int],
        save: Callable[[], int],
        seconds: float = LONGEST_SAVE_SECONDS,
        load_seconds: float = LONGEST_LOAD_SECONDS,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        self._inner = inner
        self._path = path
        self._load = load
        self._save = save
        self._seconds = seconds
        self._load_seconds = load_seconds
        self._stops = stops
        self._attached = False

    @property
    def generation(self) -> int:
        """As the inner store's."""
        return self._inner.generation

    @property
    def busy(self) -> bool:
        """As the inner store's."""
        return self._inner.busy

    def attach(self, fingerprint: str, layout: StateLayout) -> None:
        """Serve one model from now on, and read what was saved for it.

        Raises:
            Unsupported: As the inner store.
        """
        self._inner.attach(fingerprint, layout)
        if self._path.exists():
            logger.info("states of prompts are loaded from %s", self._path)
        loading = _Loading(self._load_seconds, self._stops)
        num_loaded = self._load(loading.goes_on)
        if loading.is_stopped:
            logger.info("loading states of prompts was stopped")
            return
        if loading.is_late:
            logger.warning("loading states of prompts was given up after %g s", self._load_seconds)
        logger.info("%d states of prompts were loaded", num_loaded)
        self._attached = True

    def find(self, key: PrefixKey, limit: int) -> Prefix:
        """As the inner store."""
        return self._inner.find(key, limit)

    def longest(self, key: PrefixKey, limit: int) -> int:
        """As the inner store."""
        return self._inner.longest(key, limit)

    def poll(self, ticket: int) -> Prefix | None:
        """As the inner store."""
        return self._inner.poll(ticket)

    def wait(self, seconds: float) -> None:
        """As the inner store."""
        self._inner.wait(seconds)

    def prefetch(self, key: PrefixKey, limit: int) -> int | None:
        """As the inner store."""
        return self._inner.prefetch(key, limit)

    def load(self, ticket: int) -> StoredRow:
        """As the inner store."""
        return self._inner.load(ticket)

    def release(self, ticket: int) -> None:
        """As the inner store."""
        self._inner.release(ticket)

    def insert(self, key: PrefixKey, row: RowReader, generation: int) -> None:
        """As the inner store."""
        self._inner.insert(key, row, generation)

    def clear(self) -> None:
        """Forget everything, what was saved too: it must not come back after a crash."""
        self._inner.clear()
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s could not be removed: %s", self._path, error)

    def stats(self) -> PrefixStats:
        """As the inner store."""
        return self._inner.stats()

    def close(self) -> None:
        """Save, and close the inner store. Idempotent."""
        if self._attached:
            self._attached = False
            self._save_in_time()
        self._inner.close()

    def _save_in_time(self) -> None:
        """Save in a thread, which the end of the process ends too."""
        saving = threading.Thread(target=self._try_save, name="treadle-save", daemon=True)
        saving.start()
        saving.join(self._seconds)
        if saving.is_alive():
            logger.warning("saving was given up after %g s", self._seconds)

    def _try_save(self) -> None:
        try:
            num_saved = self._save()
        except Exception as error:  # noqa: BLE001 — once given up, the store empties under it
            logger.warning("the states of prompts were not saved: %s", error)
            return
        logger.info("%d states of prompts were saved", num_saved)


class _Loading:
    """Says how far loading is, and when it is to end.

    Attributes:
        is_stopped: Whether it ended because it was to stop.
        is_late: Whether it ended because it took too long.
    """

    def __init__(self, seconds: float, stops: Callable[[], bool]) -> None:
        self._end = time.monotonic() + seconds
        self._told = time.monotonic()
        self._stops = stops
        self.is_stopped = False
        self.is_late = False

    def goes_on(self, done: int, total: int) -> bool:
        """Told of how many states how many are loaded; whether to go on."""
        now = time.monotonic()
        if now >= self._told + PROGRESS_SECONDS:
            self._told = now
            logger.info("%d of %d states of prompts are loaded", done, total)
        self.is_stopped = self._stops()
        self.is_late = now >= self._end
        return not (self.is_stopped or self.is_late)
