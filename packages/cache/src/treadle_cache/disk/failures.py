"""When to stop writing after failures, and when to try again."""

import sqlite3
from errno import EACCES, EDQUOT, ENOENT, ENOSPC, ENOTDIR, EPERM, EROFS

from treadle_cache.disk.catalog import IndexGone, is_damage
from treadle_core.ports import Clock

DISK_ERRORS = (OSError, sqlite3.Error)

_REASONS = {
    ENOSPC: "disk_full",
    EDQUOT: "disk_full",
    EACCES: "permission",
    EPERM: "permission",
    EROFS: "permission",
    ENOENT: "directory_gone",
    ENOTDIR: "directory_gone",
}


def reason_of(error: OSError | sqlite3.Error) -> str:
    """What failed, as the name of a counter."""
    if isinstance(error, IndexGone):
        return "directory_gone"
    if isinstance(error, sqlite3.Error):
        return "index"
    return _REASONS.get(error.errno or 0, "other")


def needs_order(error: OSError | sqlite3.Error) -> bool:
    """Whether the directory must be put in order before the next attempt."""
    if isinstance(error, IndexGone):
        return True
    if isinstance(error, sqlite3.Error):
        return is_damage(error)
    return reason_of(error) == "directory_gone"


def is_lock(error: OSError | sqlite3.Error) -> bool:
    """Whether somebody held a lock for too long."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class Breaker:
    """Counts failures in a row; open means that nothing is tried. Not for several threads at once.

    Args:
        max_failures: Failures in a row that open it.
        retry_seconds: How long it stays open before one attempt is let through.
        clock: Time.
    """

    def __init__(self, max_failures: int, retry_seconds: float, clock: Clock) -> None:
        self._max_failures = max_failures
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._failures = 0
        self._retry_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether writing has been given up for now."""
        return self._retry_at is not None

    def may_try(self) -> bool:
        """Whether an attempt may be made now."""
        return self._retry_at is None or self._clock.now() >= self._retry_at

    def succeeded(self) -> bool:
        """Note a success; whether it closed the breaker."""
        was_open = self.is_open
        self._failures, self._retry_at = 0, None
        return was_open

    def failed(self) -> bool:
        """Note a failure; whether it opened the breaker."""
        was_open = self.is_open
        self._failures += 1
        if self._failures >= self._max_failures:
            self._retry_at = self._clock.now() + self._retry_seconds
        return self.is_open and not was_open
