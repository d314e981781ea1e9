"""What both generating routes do around their own rendering: the reply's header, and the reply."""

import math
import time
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, contextmanager

import anyio

from treadle_core import DeadlineExceeded, Request
from treadle_server.openai.answering import Answering
from treadle_server.openai.sampling import include_usage
from treadle_server.openai.schema import Generation
from treadle_server.openai.shapes import Header, Shape
from treadle_server.serving import Serving, new_id


class TimeLimit:
    """The time that a request may take, its preparation included; it runs from now on.

    Args:
        seconds: None is no limit.

    Attributes:
        seconds: See above.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._begun = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds until now."""
        return time.monotonic() - self._begun

    @contextmanager
    def preparing(self, request_id: str) -> Generator[None]:
        """Cancel the body when the time is over.

        Raises:
            DeadlineExceeded: It was cancelled.
        """
        left = math.inf if self.seconds is None else self.seconds - self.elapsed
        with anyio.move_on_after(left) as scope:
            yield
        if scope.cancelled_caught:
            reason = f"its prompt was not ready after {self.seconds:g} seconds"
            raise DeadlineExceeded(request_id, reason)


def make_header(serving: Serving, wire: Generation, prefix: str) -> Header:
    """What every reply to a request says.

    Args:
        serving: The engine and its settings.
        wire: The request.
        prefix: How its id begins.

    Raises:
        UnknownModel: The request asks for a model that is not served.
    """
    return Header(
        id=new_id(prefix),
        created=int(time.time()),
        model=serving.model_name(wire.model),
        usage=include_usage(wire),
    )


def reply(
    serving: Serving,
    wire: Generation,
    requests: Sequence[Request],
    shape: Shape,
    held: AsyncExitStack | None = None,
) -> Answering:
    """The answers to ``requests``, whole or as the stream that the client asked for.

    Args:
        serving: The engine and its settings.
        wire: What the client asked for.
        requests: One for each prompt.
        shape: Writes the answers.
        held: To be closed after the last of them.
    """
    http = serving.config.http
    return Answering(
        serving.dispatcher,
        requests,
        shape,
        stream=bool(wire.stream),
        usage=include_usage(wire),
        interval=http.stream_interval,
        heartbeat_seconds=http.heartbeat_seconds,
        held=held or AsyncExitStack(),
    )
