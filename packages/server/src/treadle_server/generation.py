"""From an HTTP request's engine requests to one stream of events, and the answers they add up to."""

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from msgspec import Struct

from treadle_core import (
    AsyncEngine,
    EngineClosed,
    Event,
    Failed,
    Finished,
    Progress,
    Request,
    TokenOut,
    TreadleError,
    Usage,
)
from treadle_server.errors import AnswerFailed
from treadle_server.http import sole

Item = tuple[int, Event]
"""An event, and the number of the answer that it belongs to, counted over all requests."""


class Token(Struct, frozen=True, kw_only=True):
    """A token with its log-probabilities, for requests that ask.

    Attributes:
        token: The token id.
        logprob: Its log-probability.
        top: Most likely tokens and theirs, most likely first.
        offset: Where in the answer's text it begins.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


class Ending(Struct, frozen=True, kw_only=True):
    """How an answer ended well: ``stop`` or ``length``, and what it took."""

    reason: str
    usage: Usage


class Intake:
    """Whether the engine has accepted one of the requests."""

    def __init__(self) -> None:
        self.settled = anyio.Event()
        self.error: TreadleError | None = None


class Dispatcher:
    """Submits requests to an engine, and knows which of them have not ended.

    Args:
        engine: Runs them.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._open: set[str] = set()

    @asynccontextmanager
    async def open_all(
        self, requests: Sequence[Request]
    ) -> AsyncGenerator[MemoryObjectReceiveStream[Item]]:
        """Submit requests together; the body reads the events of all of them.

        All are accepted before the body begins, or none goes on. Leaving the body aborts what is
        unfinished. The stream ends after the last terminal event.

        Args:
            requests: Their answers are numbered through, in order.

        Raises:
            TreadleError: One was not accepted.
        """
        ids = {request.id for request in requests}
        self._open |= ids
        try:
            async with follow_together(self._engine, requests) as events:
                yield events
        finally:
            self._open -= ids

    async def abort_all(self) -> None:
        """End all requests; whoever waits for them is told.

        Raises:
            EngineClosed: The engine has ended, and they with it.
        """
        for request_id in list(self._open):
            await self._engine.abort(request_id)


@asynccontextmanager
async def follow_together(
    engine: AsyncEngine, requests: Sequence[Request]
) -> AsyncGenerator[MemoryObjectReceiveStream[Item]]:
    """One stream of the events of several requests; see :meth:`Dispatcher.open_all`."""
    send, receive = anyio.create_memory_object_stream[Item](math.inf)
    intakes = [Intake() for _ in requests]
    try:
        with send, receive:
            async with anyio.create_task_group() as group:
                group.start_soon(follow_all, engine, requests, intakes, send)
                await accepted(intakes)
                yield receive
                group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        raise sole(errors) from None


async def follow_all(
    engine: AsyncEngine,
    requests: Sequence[Request],
    intakes: Sequence[Intake],
    send: MemoryObjectSendStream[Item],
) -> None:
    """Pass the events of all requests on, and close ``send`` after the last."""
    first = 0
    with send:
        async with anyio.create_task_group() as group:
            for request, intake in zip(requests, intakes, strict=True):
                group.start_soon(follow, engine, request, first, intake, send)
                first += request.n


async def follow(
    engine: AsyncEngine,
    request: Request,
    first: int,
    intake: Intake,
    send: MemoryObjectSendStream[Item],
) -> None:
    """Pass a request's events on, its answers numbered from ``first``."""
    try:
        async with engine.open(request) as events:
            intake.settled.set()
            async for event in events:
                send.send_nowait((first + event.index, event))
    except TreadleError as error:
        if intake.settled.is_set():
            raise
        intake.error = error
        intake.settled.set()


async def accepted(intakes: Sequence[Intake]) -> None:
    """Wait until the engine has decided on all requests.

    Raises:
        TreadleError: It refused one.
    """
    for intake in intakes:
        await intake.settled.wait()
    for intake in intakes:
        if intake.error is not None:
            raise intake.error


def settle(event: Finished | Failed) -> Ending:
    """How an answer ended, if it ended well.

    Raises:
        AnswerFailed: The engine says that it failed.
        EngineClosed: It was aborted, though its client is still there.
    """
    if isinstance(event, Failed):
        raise AnswerFailed(event.code, event.message)
    if event.reason == "abort":
        raise EngineClosed("the request was aborted on the server's side")
    return Ending(reason=event.reason, usage=event.usage)


class Answer:
    """One answer as it grows: pieces that were not passed on yet, and how it ended.

    Args:
        interval: Tokens after which pieces are due to be passed on.
    """

    def __init__(self, interval: int = 1) -> None:
        self.ending: Ending | None = None
        self._interval = interval
        self._pending = 0
        self._length = 0
        self._text: list[str] = []
        self._tokens: list[Token] = []

    def take(self, event: Event) -> None:
        """Take an event in.

        Raises:
            AnswerFailed: The engine says that it failed.
            EngineClosed: It was aborted.
        """
        match event:
            case Progress():
                pass
            case TokenOut():
                self._add(event)
            case Finished():
                self.ending = settle(event)
                self._text.append(event.text)
            case Failed():
                settle(event)

    @property
    def due(self) -> bool:
        """Whether there is something to pass on, and it is time."""
        waited = self._pending >= self._interval or self.ending is not None
        return waited and bool(self._tokens or any(self._text))

    def collect(self) -> tuple[str, list[Token]]:
        """Text and tokens since the last call."""
        text, tokens = "".join(self._text), self._tokens
        self._text, self._tokens, self._pending = [], [], 0
        return text, tokens

    def _add(self, event: TokenOut) -> None:
        if event.logprob is not None:
            self._tokens.append(
                Token(
                    token=event.token,
                    logprob=event.logprob,
                    top=tuple((top.token, top.logprob) for top in event.top_logprobs),
                    offset=self._length,
                )
            )
        self._text.append(event.text)
        self._length += len(event.text)
        self._pending += 1


def total(usages: Sequence[Usage], n: int) -> Usage:
    """What all answers took together; a prompt with ``n`` answers counts once.

    Args:
        usages: Of all answers, those of one prompt side by side.
        n: Answers of each prompt.
    """
    prompts = usages[::n]
    drafts = [usage.drafts for usage in usages if usage.drafts is not None]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in prompts),
        drafts=sum(drafts[1:], drafts[0]) if drafts else None,
    )
