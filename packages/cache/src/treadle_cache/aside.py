"""Calls that may block for long, made in a thread of their own."""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

T = TypeVar("T")

ASK_SECONDS = 0.05


class GivenUp(Exception):
    """Whoever waited for a call has given it up; it may still be under way."""


class _Value(NamedTuple, Generic[T]):
    value: T


class Aside:
    """A thread that makes one call after the other. A context manager, which waits for nothing.

    Nothing that a call uses may be touched by others after it was given up.
    """

    def __init__(self) -> None:
        self._calls = SimpleQueue[Callable[[], None] | None]()
        # So that the end of the process ends it too.
        Thread(target=self._run, name="treadle-aside", daemon=True).start()

    def __enter__(self) -> Self:
        """The thread itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let it end when its calls have."""
        self._calls.put(None)

    def call(self, work: Callable[[], T], goes_on: Callable[[], bool]) -> T:
        """What ``work`` returns or raises.

        Args:
            work: Called in the thread.
            goes_on: Asked every now and then whether to wait on.

        Raises:
            GivenUp: It said no.
        """
        done = SimpleQueue[_Value[T] | Exception]()
        self._calls.put(lambda: done.put(_attempt(work)))
        while True:
            try:
                result = done.get(timeout=ASK_SECONDS)
            except Empty:
                if not goes_on():
                    raise GivenUp from None
                continue
            if isinstance(result, Exception):
                raise result
            return result.value

    def later(self, work: Callable[[], None]) -> None:
        """Have ``work`` called after all else, whoever waits for it or not."""
        self._calls.put(work)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _attempt(work: Callable[[], T]) -> _Value[T] | Exception:
    try:
        return _Value(work())
    except Exception as error:  # noqa: BLE001 — raised again where it is waited for
        return error
