"""Counters that several threads add to."""

from collections import Counter
from threading import Lock


class Counters:
    """Numbers by name; a name that nobody added to is 0."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values = Counter[str]()

    def add(self, name: str, value: int = 1) -> None:
        """Add to a number."""
        with self._lock:
            self._values[name] += value

    def __getitem__(self, name: str) -> int:
        """A number."""
        with self._lock:
            return self._values[name]

    def snapshot(self) -> dict[str, int]:
        """All numbers that are not 0."""
        with self._lock:
            return dict(self._values)
