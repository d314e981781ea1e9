"""Checks of the event protocol, for tests that drive an engine."""

from collections.abc import Callable, Iterable
from typing import assert_never

from treadle_core.engine import Engine
from treadle_core.events import Event, Failed, Finished, Progress, Terminal, TokenOut
from treadle_core.plan import Key
from treadle_core.request import Request


class EventChecker:
    """Follows events and asserts what every engine promises.

    Events belong to accepted answers, nothing follows a terminal event, and usage counts what was
    emitted.

    Attributes:
        tokens: Tokens of each answer, in order.
        text: Text of each answer, joined.
        terminal: How each answer ended.
        progress: Prompt tokens that each answer last reported as prefilled.
    """

    def __init__(self) -> None:
        self.tokens: dict[Key, list[int]] = {}
        self.text: dict[Key, str] = {}
        self.terminal: dict[Key, Terminal] = {}
        self.progress: dict[Key, int] = {}

    @property
    def open(self) -> set[Key]:
        """Accepted answers without a terminal event."""
        return set(self.tokens) - set(self.terminal)

    def accepted(self, request: Request) -> None:
        """An engine accepted ``request``; its id may have been used before."""
        for index in range(request.n):
            key = (request.id, index)
            assert key not in self.open, f"{key} was accepted twice"
            self.terminal.pop(key, None)
            self.progress.pop(key, None)
            self.tokens[key] = []
            self.text[key] = ""

    def feed(self, events: Iterable[Event]) -> None:
        """Take events in, in order of delivery."""
        for event in events:
            self._take(event)

    def finish(self) -> None:
        """Assert that every accepted answer has ended."""
        assert not self.open, f"no terminal event for {sorted(self.open)}"

    def _take(self, event: Event) -> None:
        key = (event.request_id, event.index)
        assert key in self.tokens, f"an event for {key}, which nobody accepted: {event}"
        assert key not in self.terminal, f"after the terminal event of {key}: {event}"
        match event:
            case TokenOut():
                self.tokens[key].append(event.token)
                self.text[key] += event.text
            case Progress():
                assert not self.tokens[key], f"progress after the first token: {event}"
                told = self.progress.get(key, 0)
                assert told < event.prefilled < event.total, f"no progress since {told}: {event}"
                self.progress[key] = event.prefilled
            case Finished():
                self.text[key] += event.text
                self._end(key, event)
            case Failed():
                assert event.code, f"a failure without a code: {event}"
                assert event.message, f"a failure without a reason: {event}"
                self._end(key, event)
            case _:
                assert_never(event)

    def _end(self, key: Key, event: Terminal) -> None:
        counted, emitted = event.usage.completion_tokens, len(self.tokens[key])
        assert counted == emitted, f"{key}: usage counts {counted} tokens, {emitted} were emitted"
        timings = event.timings
        parts = (timings.queue, timings.prefill, timings.first_token, timings.decode)
        assert all(0 <= part <= timings.total for part in parts), f"{key}: {timings}"
        self.terminal[key] = event


def pump(
    engine: Engine,
    checker: EventChecker | None = None,
    *,
    most: int = 10_000,
    each: Callable[[list[Event]], None] = lambda events: None,
) -> list[Event]:
    """Step an engine until it has nothing to do, checking it after each step.

    Args:
        engine: The engine.
        checker: Follows the events too.
        most: Steps after which it is taken to be stuck.
        each: Called with the events of each step.

    Returns:
        All events.
    """
    found: list[Event] = []
    for _ in range(most):
        if not engine.has_work:
            return found
        events = engine.step()
        engine.check_integrity()
        if checker is not None:
            checker.feed(events)
        found += events
        each(events)
    raise AssertionError(f"still at work after {most} steps: {engine.stats()}")
