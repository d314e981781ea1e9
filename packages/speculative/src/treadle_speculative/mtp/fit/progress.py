"""How far a fit is: a bar in place on a terminal, else a line now and then."""

import time
from collections.abc import Callable
from typing import TextIO

BAR = 24
PLAIN_SECONDS = 10.0


class ProgressBar:
    """A bar with some words.

    Args:
        out: Where.
        clock: Gives the time in seconds.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._live = out.isatty()
        self._width = 0
        self._shown = float("-inf")
        self._what = ""
        self._began = (0.0, 0)

    def show(self, what: str, done: int, total: int, words: str = "") -> None:
        """So many are done; time left is judged by those since the first time this was called.

        Args:
            what: What is being done.
            done: How many of them are.
            total: How many there are.
            words: What else to say.
        """
        now = self._clock()
        if what != self._what:
            self._what, self._began, self._shown = what, (now, done), float("-inf")
        if not (self._live or done == total or now - self._shown >= PLAIN_SECONDS):
            return
        self._shown = now
        since, before = self._began
        left = (now - since) * (total - done) / (done - before) if done > before else None
        self._write(" ".join(filter(None, (line(what, done, total), words, said(left)))))

    def note(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        self._out.write(text + "\n")
        self._out.flush()

    def clear(self) -> None:
        """Take the bar away."""
        if self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._out.flush()
            self._width = 0

    def _write(self, text: str) -> None:
        if self._live:
            self._out.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._out.write(text + "\n")
        self._out.flush()


def line(what: str, done: int, total: int) -> str:
    """A bar, and the numbers beside it."""
    full = BAR * done // max(1, total)
    return f"{what} [{'#' * full}{'.' * (BAR - full)}] {done}/{total}"


def said(left: float | None) -> str:
    """Time left for people."""
    if left is None:
        return ""
    minutes, seconds = divmod(round(left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"
