"""What is counted of answers while an engine runs: an observer, and what it has seen as data."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from treadle_core import Event, Failed, Finished, Progress, SystemClock, Timings, TokenOut, Usage
from treadle_core.plan import Key, Plan, StepResult
from treadle_core.ports import Clock, Observer

TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
"""Bounds for what takes about a step."""

WAIT_SECONDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
"""Bounds for what takes as long as people wait."""

NEVER = -math.inf


class Distribution(Struct, frozen=True, kw_only=True):
    """How often a value was how large.

    Attributes:
        count: Number of values.
        sum: Of all of them.
        bounds: Upper ends of the ranges, themselves included, in ascending order.
        counts: Values in each range, and last those above all bounds.
    """

    count: int
    sum: float
    bounds: tuple[float, ...]
    counts: tuple[int, ...]


class Histogram:
    """Takes in one value after the other.

    Args:
        bounds: Upper ends of the ranges, in ascending order.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, as if it came so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def distribution(self) -> Distribution:
        """All values until now. May be called from any thread."""
        counts = tuple(self._counts)
        return Distribution(count=sum(counts), sum=self._sum, bounds=self._bounds, counts=counts)


class Tokens(Struct, frozen=True, kw_only=True):
    """Tokens since the start, all requests together.

    Attributes:
        prompt: In prompts of requests that ended; with ``n`` answers a prompt counts once.
        cached: Those of them whose computing was skipped.
        prefilled: Prompt tokens that were computed, again after a preemption or a failed step.
        generated: In answers, those that still run included.
    """

    prompt: int
    cached: int
    prefilled: int
    generated: int


class Latencies(Struct, frozen=True, kw_only=True):
    """Where the time went, in seconds.

    Attributes:
        queue: From the acceptance of an answer to its admission, or to its end in the queue.
        first_token: From acceptance to the first token, of answers that ended and had one.
        between_tokens: From one token of an answer to its next. Tokens that came together have
            nothing between them.
        answer: From acceptance to the end.
        step: What a step took.
    """

    queue: Distribution
    first_token: Distribution
    between_tokens: Distribution
    answer: Distribution
    step: Distribution


class Measured(Struct, frozen=True, kw_only=True):
    """What :class:`Meters` has seen.

    Attributes:
        outcomes: Answers that ended, by how: ``stop``, ``length``, ``abort``, or an error's code.
        tokens: Tokens.
        latencies: Times.
        encode_seconds: Time that went into encoding media.
    """

    outcomes: dict[str, int]
    tokens: Tokens
    latencies: Latencies
    encode_seconds: float


class Meters:
    """Counts what an engine tells, on its thread; others may read at any time.

    What is read while a step is told may have one half of it.

    Args:
        clock: Time.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._outcomes: dict[str, int] = {}
        self._prompt = self._cached = self._prefilled = self._generated = 0
        self._encode_seconds = 0.0
        self._last: dict[Key, float] = {}
        self._queue = Histogram(WAIT_SECONDS)
        self._first_token = Histogram(WAIT_SECONDS)
        self._between = Histogram(TOKEN_SECONDS)
        self._answer = Histogram(WAIT_SECONDS)
        self._step = Histogram(TOKEN_SECONDS)

    def measured(self) -> Measured:
        """All of it until now."""
        return Measured(
            outcomes=dict(self._outcomes),
            tokens=Tokens(
                prompt=self._prompt,
                cached=self._cached,
                prefilled=self._prefilled,
                generated=self._generated,
            ),
            latencies=Latencies(
                queue=self._queue.distribution(),
                first_token=self._first_token.distribution(),
                between_tokens=self._between.distribution(),
                answer=self._answer.distribution(),
                step=self._step.distribution(),
            ),
            encode_seconds=self._encode_seconds,
        )

    def accepted(self, request_id: str) -> None:
        """A request was accepted, which the engine counts itself."""

    def stepped(self, plan: Plan, result: StepResult) -> None:
        """A step was read."""
        self._step.add(result.seconds)
        self._encode_seconds += result.encode_seconds
        for prefill in plan.prefills:
            self._prefilled += len(prefill.tokens)

    def emitted(self, events: Iterable[Event]) -> None:
        """Events are about to be delivered, all of them now."""
        now, last = self._clock.now(), self._last
        # Most answers had their last token at the same moment.
        moments: dict[float, int] = {}
        for event in events:
            match event:
                case TokenOut():
                    key = (event.request_id, event.index)
                    before = last.get(key, NEVER)
                    moments[before] = moments.get(before, 0) + 1
                    last[key] = now
                case Finished():
                    self._end(event, event.reason)
                case Failed():
                    self._end(event, event.code)
                case Progress():
                    pass
        self._take(moments, now)

    def _take(self, moments: dict[float, int], now: float) -> None:
        """Count tokens that came now, by when the ones before them came."""
        for before, number in moments.items():
            self._generated += number
            if before != NEVER:
                self._between.add(now - before, number)

    def _end(self, event: Finished | Failed, outcome: str) -> None:
        self._last.pop((event.request_id, event.index), None)
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        if event.index == 0:
            self._prompt += event.usage.prompt_tokens
            self._cached += event.usage.cached_tokens
        self._time(event.timings, event.usage)

    def _time(self, timings: Timings, usage: Usage) -> None:
        self._queue.add(timings.queue)
        self._answer.add(timings.total)
        if usage.completion_tokens:
            self._first_token.add(timings.first_token)


if TYPE_CHECKING:
    _: type[Observer] = Meters
