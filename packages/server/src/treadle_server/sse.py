"""Server-sent events: how they are spelled, and a response made of them."""

import anyio
import msgspec
from starlette.types import Send

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # A proxy that buffers would deliver the stream in one piece at its end.
    (b"x-accel-buffering", b"no"),
)
COMMENT = b": still working\n\n"
DONE = b"data: [DONE]\n\n"

encoder = msgspec.json.Encoder()


def event(value: object) -> bytes:
    """One event with ``value`` as JSON; JSON has no raw line breaks, so one line holds it."""
    return b"data: " + encoder.encode(value) + b"\n\n"


class EventStream:
    """A response of events. Start it, send, and end it.

    Args:
        send: The ASGI channel.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._written = 0.0

    @property
    def quiet_seconds(self) -> float:
        """Since when nothing was sent."""
        return anyio.current_time() - self._written

    async def start(self, request_id: str) -> None:
        """Send the status line and headers."""
        headers = [*HEADERS, (b"x-request-id", request_id.encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._written = anyio.current_time()

    async def write(self, data: bytes) -> None:
        """Send events, or a comment; nothing if there is nothing."""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._written = anyio.current_time()

    async def end(self, data: bytes = b"") -> None:
        """Send the last bytes."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
