"""Fetching over HTTP: from a host that was checked, within a byte limit and a deadline.

A host is resolved once for each hop; the addresses are checked, and the connection goes to one of
them, whatever the name resolves to by then. The certificate is checked against the host.
"""

import ssl
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from socket import SOCK_STREAM
from typing import Any, Protocol
from urllib.parse import urljoin

import anyio
import httpcore2
from anyio import to_thread
from httpcore2 import AnyIOBackend, AsyncNetworkBackend, AsyncNetworkStream
from msgspec import Struct

from treadle_core.errors import describe
from treadle_multimodal.addresses import parse_address
from treadle_multimodal.encoding import check_bytes
from treadle_multimodal.errors import MediaError, MediaTimeout, MediaUnavailable, UnsupportedMedia
from treadle_multimodal.limits import MediaLimits
from treadle_multimodal.policy import FetchPolicy, Target, check_addresses, check_url

CONNECT_SECONDS = 5.0
MAX_ADDRESSES = 4
REDIRECTS = (301, 302, 303, 307, 308)

# No encoding but identity: what is counted is what is kept.
HEADERS = (
    (b"Accept", b"*/*"),
    (b"Accept-Encoding", b"identity"),
    (b"Connection", b"close"),
    (b"User-Agent", b"treadle"),
)


class Resolver(Protocol):
    """From host names to addresses."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """The addresses of ``host``, most wanted first.

        Raises:
            OSError: It has none.
        """
        ...


class SystemResolver:
    """The machine's own resolver."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """The addresses of ``host``, most wanted first.

        Raises:
            OSError: It has none.
        """
        found = await anyio.getaddrinfo(host, port, type=SOCK_STREAM)
        return [str(sockaddr[0]) for *_, sockaddr in found]


class PinnedBackend(AsyncNetworkBackend):
    """Connects to given addresses, whatever host is asked for.

    Args:
        inner: Makes the connections.
        addresses: Tried in order.
    """

    def __init__(self, inner: AsyncNetworkBackend, addresses: Sequence[str]) -> None:
        self._inner = inner
        self._addresses = addresses

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 — the base class's signature
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> AsyncNetworkStream:
        """A connection to the first address that accepts one.

        Raises:
            httpcore2.ConnectError: None does.
            httpcore2.ConnectTimeout: The last one takes longer than ``timeout``.
        """
        failure: Exception = httpcore2.ConnectError(f"{host} has no address")
        for address in self._addresses:
            try:
                return await self._inner.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure


class Fetched(Struct, frozen=True, kw_only=True):
    """A file as it was received.

    Attributes:
        data: The body.
        media_type: As the server says, without parameters; empty where it does not.
    """

    data: bytes
    media_type: str


class Fetcher:
    """Fetches what a policy allows. Holds no connection between calls.

    Args:
        policy: Which hosts, addresses, ports and schemes.
        limits: Seconds and redirects of one call.
        resolver: Finds addresses; the machine's resolver by default.
        network: Makes connections to addresses; anyio's by default.
        ssl_context: Trusted authorities; the machine's by default.
    """

    def __init__(
        self,
        policy: FetchPolicy,
        limits: MediaLimits,
        *,
        resolver: Resolver | None = None,
        network: AsyncNetworkBackend | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._resolver = resolver or SystemResolver()
        self._network = network or AnyIOBackend()
        self._ssl_context = ssl_context

    async def fetch(
        self, url: str, max_bytes: int, on_bytes: Callable[[int], None] = lambda _: None
    ) -> Fetched:
        """The file at ``url``.

        Args:
            url: Where it is.
            max_bytes: Most bytes of it.
            on_bytes: Called with the size of each piece; may raise to give up.

        Raises:
            MediaForbidden: The policy does not allow the URL, or one that it redirects to.
            MediaTooLarge: It has more bytes.
            MediaTimeout: It took too long.
            MediaUnavailable: There is none, or the connection failed.
            UnsupportedMedia: It is compressed for transfer.
        """
        with anyio.move_on_after(self._limits.fetch_seconds):
            return await self._follow(url, max_bytes, on_bytes)
        raise MediaTimeout("url", url, f"an answer within {self._limits.fetch_seconds:g} seconds")

    async def _follow(self, url: str, max_bytes: int, on_bytes: Callable[[int], None]) -> Fetched:
        location = url
        for _ in range(self._limits.max_redirects + 1):
            target = check_url(location, self._policy)
            async with self._get(target) as response:
                if response.status not in REDIRECTS:
                    return await _receive(response, target, max_bytes, on_bytes)
                location = _redirect(response, target)
        limit = f"at most {self._limits.max_redirects} redirects"
        raise MediaUnavailable("url", url, limit)

    @asynccontextmanager
    async def _get(self, target: Target) -> AsyncGenerator[httpcore2.Response]:
        network = PinnedBackend(self._network, await self._addresses(target))
        ssl_context = await self._trusted() if target.scheme == "https" else None
        with map_http_errors(target):
            async with (
                httpcore2.AsyncConnectionPool(ssl_context, network_backend=network) as pool,
                pool.stream(
                    "GET",
                    target.url,
                    headers=list(HEADERS),
                    extensions={"timeout": {"connect": CONNECT_SECONDS}},
                ) as response,
            ):
                yield response

    async def _trusted(self) -> ssl.SSLContext:
        """The trusted authorities; the machine's are read once, which takes tens of milliseconds."""
        if self._ssl_context is None:
            self._ssl_context = await to_thread.run_sync(httpcore2.default_ssl_context)
        return self._ssl_context

    async def _addresses(self, target: Target) -> Sequence[str]:
        found: Sequence[str] = (target.host,)
        if parse_address(target.host) is None:
            with map_http_errors(target):
                found = await self._resolver.resolve(target.host, target.port)
        return check_addresses(target, tuple(found), self._policy)[:MAX_ADDRESSES]


@contextmanager
def map_http_errors(target: Target) -> Generator[None]:
    """Turn what a resolver or a connection raises into MediaUnavailable."""
    try:
        yield
    except (
        OSError,
        httpcore2.NetworkError,
        httpcore2.ProtocolError,
        httpcore2.TimeoutException,
    ) as error:
        limit = f"a host that answers ({describe(error)})"
        raise MediaUnavailable("url", target.url, limit) from error


async def _receive(
    response: httpcore2.Response,
    target: Target,
    max_bytes: int,
    on_bytes: Callable[[int], None],
) -> Fetched:
    """The body of a final response, counted while it arrives."""
    if response.status != 200:
        raise MediaUnavailable("url", target.url, f"status 200, not {response.status}")
    encoding = _header(response, b"content-encoding").lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMedia("content-encoding", encoding, "a body that is not compressed")
    length = _header(response, b"content-length")
    check_bytes(int(length) if length.isdecimal() else 0, max_bytes)
    data = bytearray()
    async with aclosing(response.aiter_stream()) as pieces:
        async for piece in pieces:
            check_bytes(len(data) + len(piece), max_bytes)
            on_bytes(len(piece))
            data += piece
    media_type = _header(response, b"content-type").partition(";")[0].strip().lower()
    return Fetched(data=bytes(data), media_type=media_type)


def _redirect(response: httpcore2.Response, target: Target) -> str:
    """Where a redirect leads."""
    location = _header(response, b"location")
    try:
        return urljoin(target.url, location)
    except ValueError:
        raise MediaError("location", location, "a URL") from None


def _header(response: httpcore2.Response, name: bytes) -> str:
    """The headers of a name, joined; empty where there is none."""
    found = [value for key, value in response.headers if key.lower() == name]
    return b", ".join(found).decode("latin-1")
