"""Sends the answers to one request: whole, or as a stream. The client's leaving ends both."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from treadle_core import Event, Request
from treadle_server import sse
from treadle_server.generation import Answer, Dispatcher, Ending, Item, total
from treadle_server.http import explain, json_response, while_connected
from treadle_server.openai.shapes import Shape, Whole

logger = logging.getLogger("treadle.server")


class Chunks:
    """The protocol of a stream, without its transport: events in, chunks out.

    Args:
        shape: Writes the chunks.
        num_prompts: Prompts of the request.
        n: Answers of each.
        interval: Tokens per chunk.
        usage: Whether token counts come last.
    """

    def __init__(
        self, shape: Shape, *, num_prompts: int, n: int, interval: int = 1, usage: bool = False
    ) -> None:
        self._shape = shape
        self._n = n
        self._usage = usage
        self._answers = [Answer(interval) for _ in range(num_prompts * n)]

    def opening(self) -> Iterator[object]:
        """Chunks before the first event."""
        for index in range(len(self._answers)):
            chunk = self._shape.opening(index)
            if chunk is not None:
                yield chunk

    def feed(self, index: int, event: Event) -> Iterator[object]:
        """Chunks that an event makes due.

        Raises:
            TreadleError: The answer failed.
        """
        answer = self._answers[index]
        answer.take(event)
        if answer.due:
            text, tokens = answer.collect()
            yield self._shape.piece(index, text, tokens)
        if answer.ending is not None:
            yield self._shape.ending(index, answer.ending.reason)

    def closing(self) -> Iterator[object]:
        """Chunks after the last event."""
        if self._usage:
            usages = [ending.usage for ending in endings(self._answers)]
            yield self._shape.usage(total(usages, self._n))


class Answering(Response):
    """The response to a request for answers.

    Errors before the first byte are raised, so that they get their own status. Later ones are an
    event of the stream, which then ends without its ``[DONE]``.

    Args:
        dispatcher: Makes the answers.
        requests: One for each prompt, all with the same number of answers.
        shape: Writes them.
        stream: Whether they are sent as they come.
        usage: Whether a stream ends with token counts.
        interval: Tokens per chunk of a stream.
        heartbeat_seconds: After so long without a chunk, a stream gets a comment.
        held: What the requests hold; closed when they have ended.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        requests: Sequence[Request],
        shape: Shape,
        *,
        stream: bool,
        usage: bool,
        interval: int,
        heartbeat_seconds: float,
        held: AsyncExitStack,
    ) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._requests = requests
        self._shape = shape
        self._stream = stream
        self._usage = usage
        self._interval = interval
        self._heartbeat = heartbeat_seconds
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the requests and send what comes."""

        async def work(send: Send) -> None:
            async with self._dispatcher.open_all(self._requests) as events:
                if self._stream:
                    await self._send_stream(events, send)
                else:
                    await (await self._whole(events))(scope, receive, send)

        async with self._held:
            if not await while_connected(receive, send, work):
                logger.info("%s: the client left", self._requests[0].id)

    async def _whole(self, events: MemoryObjectReceiveStream[Item]) -> Response:
        n = self._requests[0].n
        answers = [Answer() for request in self._requests for _ in range(request.n)]
        async for index, event in events:
            answers[index].take(event)
        done = endings(answers)
        wholes: list[Whole] = []
        for answer, ending in zip(answers, done, strict=True):
            text, tokens = answer.collect()
            wholes.append(Whole(text=text, tokens=tokens, reason=ending.reason))
        reply = self._shape.whole(wholes, total([ending.usage for ending in done], n))
        return json_response(reply, headers={"x-request-id": self._requests[0].id})

    async def _send_stream(self, events: MemoryObjectReceiveStream[Item], send: Send) -> None:
        chunks = Chunks(
            self._shape,
            num_prompts=len(self._requests),
            n=self._requests[0].n,
            interval=self._interval,
            usage=self._usage,
        )
        stream = sse.EventStream(send)
        await stream.start(self._requests[0].id)
        try:
            await stream.write(spelled(chunks.opening()))
            await self._pass_on(events, chunks, stream)
            await stream.end(spelled(chunks.closing()) + sse.DONE)
        except Exception as error:  # noqa: BLE001 — the status is sent: the stream has to tell it
            await stream.end(sse.event(explain(error, self._requests[0].id).body))

    async def _pass_on(
        self, events: MemoryObjectReceiveStream[Item], chunks: Chunks, stream: sse.EventStream
    ) -> None:
        while True:
            item: Item | None = None
            try:
                with anyio.move_on_after(self._heartbeat - stream.quiet_seconds):
                    item = await events.receive()
            except anyio.EndOfStream:
                return
            if item is not None:
                await stream.write(spelled(chunks.feed(*item)))
            # Events that make no chunk, such as a prompt's progress, do not put it off.
            if stream.quiet_seconds >= self._heartbeat:
                await stream.write(sse.COMMENT)


def endings(answers: Sequence[Answer]) -> list[Ending]:
    """How all answers ended.

    Raises:
        RuntimeError: One did not.
    """
    found = [answer.ending for answer in answers if answer.ending is not None]
    if len(found) != len(answers):
        raise RuntimeError(f"the engine ended {len(found)} of {len(answers)} answers")
    return found


def spelled(chunks: Iterator[object]) -> bytes:
    """Chunks as events."""
    return b"".join(sse.event(chunk) for chunk in chunks)
