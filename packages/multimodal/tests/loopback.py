"""A server on loopback that says what a test wants, a resolver that leads there, and a recorder."""

import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from socket import gaierror
from typing import Any

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSListener
from httpcore2 import AsyncNetworkBackend, AsyncNetworkStream, ConnectError

from treadle_multimodal import FetchPolicy

HOST = "media.example"

Answer = Callable[[ByteStream], Awaitable[None]]


@dataclass
class Server:
    """A running server."""

    port: int = 0
    heads: list[bytes] = field(default_factory=list)
    closed: int = 0
    """Connections that are over."""

    @property
    def policy(self) -> FetchPolicy:
        """Allows loopback on the server's port."""
        return FetchPolicy(
            allow_http=True, allowed_ports=(self.port, 80, 443), allowed_networks=("127.0.0.0/8",)
        )

    def url(self, path: str = "/", host: str = HOST) -> str:
        return f"http://{host}:{self.port}{path}"


def body(data: bytes, *headers: str, status: str = "200 OK") -> Answer:
    """An answer with a true length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", *headers, "", ""]
    return raw("\r\n".join(lines).encode() + data)


def raw(data: bytes) -> Answer:
    """An answer as it stands."""

    async def answer(stream: ByteStream) -> None:
        await stream.send(data)

    return answer


def redirect(location: str, status: int = 302) -> Answer:
    return body(b"", f"Location: {location}", status=f"{status} Found")


def drip(data: bytes, seconds: float) -> Answer:
    """One byte at a time."""

    async def answer(stream: ByteStream) -> None:
        await stream.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode())
        for byte in data:
            await stream.send(bytes([byte]))
            await anyio.sleep(seconds)

    return answer


async def silence(stream: ByteStream) -> None:
    """No answer at all, until the client leaves."""
    await stream.receive()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that is about to happen."""
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110 — what it waits for happens in threads too
            await anyio.sleep(0.005)


@asynccontextmanager
async def serving(
    routes: Mapping[str, Answer], tls: ssl.SSLContext | None = None
) -> AsyncGenerator[Server]:
    """A server that answers each path as ``routes`` say."""
    server = Server()

    async def handle(stream: ByteStream) -> None:
        async with stream:
            try:
                head = await stream.receive()
                server.heads.append(head)
                await routes[head.split()[1].decode()](stream)
            except (anyio.BrokenResourceError, anyio.EndOfStream, ssl.SSLError):
                pass
            finally:
                server.closed += 1

    listener: Any = await anyio.create_tcp_listener(local_host="127.0.0.1")
    server.port = listener.extra(SocketAttribute.local_port)
    if tls is not None:
        listener = TLSListener(listener, tls, standard_compatible=False)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield server
        tasks.cancel_scope.cancel()


class FakeResolver:
    """Answers from a table; a host with several answers gives the next one each time.

    Args:
        answers: For each host its answers, each a list of addresses.
    """

    def __init__(self, answers: Mapping[str, Sequence[Sequence[str]]] | None = None) -> None:
        self._answers = {host: list(known) for host, known in (answers or {}).items()}
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        known = self._answers.get(host)
        if not known:
            raise gaierror(-2, "Name or service not known")
        return known.pop(0) if len(known) > 1 else known[0]


def to_loopback(*hosts: str) -> FakeResolver:
    return FakeResolver({host: [["127.0.0.1"]] for host in (HOST, *hosts)})


class RecordingNetwork(AsyncNetworkBackend):
    """Accepts no connection, and remembers where they were to go.

    Args:
        inner: Makes them after all, if given.
    """

    def __init__(self, inner: AsyncNetworkBackend | None = None) -> None:
        self._inner = inner
        self.addresses: list[tuple[str, int]] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 — the base class's signature
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> AsyncNetworkStream:
        self.addresses.append((host, port))
        if self._inner is None:
            raise ConnectError("the test accepts no connection")
        return await self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
