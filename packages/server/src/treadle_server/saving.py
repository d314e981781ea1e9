"""A prefix store that outlives its process in one file."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from treadle_core.ports import PrefixStore, RowReader, StoredRow
from treadle_core.prefix import Prefix, PrefixKey, PrefixStats, StateLayout

LONGEST_SAVE_SECONDS = 20.0

logger = logging.getLogger("treadle.server")


class SavingStore:
    """A store that is loaded when its model is known, and saved when it is closed.

    A save that takes too long is given up, and leaves the file as it was.

    Args:
        inner: The store.
        path: The file.
        load: Fills it from the file; returns how many entries were added.
        save: Writes the file; returns how many entries are in it.
        seconds: Most time that saving may take.
    """

    def __init__(
        self,
        inner: PrefixStore,
        path: Path,
        load: Callable[[], int],
        save: Callable[[], int],
        seconds: float = LONGEST_SAVE_SECONDS,
    ) -> None:
        self._inner = inner
        self._path = path
        self._load = load
        self._save = save
        self._seconds = seconds
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
        logger.info("%d states of prompts were loaded", self._load())
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
