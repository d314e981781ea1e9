"""Small pieces of HTTP: JSON replies, bounded bodies, the API key, and noticing who left."""

import hmac
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle_core import TreadleError
from treadle_server.errors import BodyTooLarge, Reply, Unauthorized, reply_to, reply_to_surprise

T = TypeVar("T")

CLIENT_LEFT = 499

logger = logging.getLogger("treadle.server")
encoder = msgspec.json.Encoder()


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A reply with ``value`` as JSON."""
    return Response(
        encoder.encode(value),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def error_response(reply: Reply) -> Response:
    """A reply that says what went wrong."""
    return json_response(reply.body, reply.status, reply.headers)


def explain(error: Exception, what: str) -> Reply:
    """The reply to an exception, which is logged if it is the server's fault.

    Args:
        error: Foreseen or not; one that was not is logged with its trace, and not told.
        what: What failed, for the log.
    """
    if not isinstance(error, TreadleError):
        logger.error("%s failed", what, exc_info=error)
        return reply_to_surprise()
    reply = reply_to(error)
    if reply.status >= 500:
        logger.error("%s failed: %s", what, error)
    return reply


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body.

    Raises:
        BodyTooLarge: It is longer than ``limit``; what exceeds it was not kept.
        ClientDisconnect: The client left before its end.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(limit)
    return bytes(body)


@asynccontextmanager
async def beside(
    task: Callable[[anyio.CancelScope], Coroutine[Any, Any, None]],
) -> AsyncGenerator[None]:
    """Run ``task`` while the body runs; it may cancel the body through the scope it is given.

    An exception of the body comes out as it is, not in a group.
    """
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(task, group.cancel_scope)
            yield
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        raise sole(errors) from None


def sole(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception in a group, or the group if there are several."""
    if len(errors.exceptions) > 1:
        return errors
    error = next(iter(errors.exceptions))
    if isinstance(error, BaseExceptionGroup):
        return sole(error)  # pyright: ignore[reportUnknownArgumentType]
    return error


async def while_connected(
    receive: Receive, send: Send, work: Callable[[Send], Awaitable[None]]
) -> bool:
    """Do ``work``, and cancel it when the client leaves before the response is complete.

    Args:
        receive: The request's channel, its body read already.
        send: The response's channel.
        work: Sends the response through the channel that it is given.

    Returns:
        Whether the response is complete; False means that the client left.
    """
    complete = False

    async def watched(message: Message) -> None:
        nonlocal complete
        await send(message)
        complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def watch(scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        # After a complete response this is how servers say that there is nothing more to come.
        if not complete:
            scope.cancel()

    async with beside(watch):
        await work(watched)
    return complete


async def unless_left(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """The result of ``work``, which is cancelled when the client leaves.

    Args:
        receive: The request's channel, its body read already.
        work: Sends nothing.

    Raises:
        ClientDisconnect: The client left.
    """

    async def watch(scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise ClientDisconnect

    async with beside(watch):
        return await work()


class ApiKey:
    """Lets requests through that carry the key; ``/health`` needs none.

    Args:
        app: The application behind.
        key: The key.
        open_paths: Paths that need no key.
    """

    def __init__(self, app: ASGIApp, key: str, open_paths: frozenset[str]) -> None:
        self._app = app
        self._key = key.encode()
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        if scope["type"] == "lifespan" or scope["path"] in self._open or self._admits(scope):
            await self._app(scope, receive, send)
            return
        await error_response(reply_to(Unauthorized()))(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        headers = dict[bytes, bytes](scope["headers"])
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        bearer = token.strip() if scheme.lower() == b"bearer" else b""
        offered = (bearer, headers.get(b"x-api-key", b""))
        # Both are compared, always: the time taken tells nothing.
        found = [hmac.compare_digest(key, self._key) for key in offered]
        return any(found)


class Surprises:
    """The last resort: an exception that nobody foresaw is logged, and answered without details."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and answer in its place if it raises."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:  # noqa: BLE001 — one request's surprise is not the others'
            reply = explain(error, f"{scope['method']} {scope['path']}")
            if not started:
                await error_response(reply)(scope, receive, send)
