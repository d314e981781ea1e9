"""Fetching over loopback: what is connected to, what is refused, and when it ends."""

import gzip
import ssl
import time

import anyio
import httpcore2
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")
trustme = pytest.importorskip("trustme")

from treadle_multimodal import (
    Fetcher,
    FetchPolicy,
    MediaError,
    MediaForbidden,
    MediaLimits,
    MediaTimeout,
    MediaTooLarge,
    MediaUnavailable,
    SystemResolver,
    UnsupportedMedia,
)

from .loopback import (
    HOST,
    FakeResolver,
    RecordingNetwork,
    Server,
    body,
    drip,
    raw,
    redirect,
    serving,
    silence,
    to_loopback,
    until,
)

MAX_BYTES = 1000

LIMITS = MediaLimits(fetch_seconds=5.0, max_redirects=3)


def fetcher(server: Server, resolver: FakeResolver | None = None) -> Fetcher:
    return Fetcher(server.policy, LIMITS, resolver=resolver or to_loopback())


async def test_a_file_arrives_with_its_type() -> None:
    async with serving({"/a": body(b"abc", "Content-Type: Image/PNG; q=1")}) as server:
        fetched = await fetcher(server).fetch(server.url("/a"), MAX_BYTES)

    assert (fetched.data, fetched.media_type) == (b"abc", "image/png")
    head = server.heads[0].decode().lower()
    assert f"host: {HOST}:{server.port}\r\n" in head
    assert "accept-encoding: identity\r\n" in head
    assert "cookie" not in head


async def test_the_pieces_are_counted_and_the_counter_may_end_it() -> None:
    def refuse(num_bytes: int) -> None:
        raise MediaTooLarge("bytes", num_bytes, "no more")

    async with serving({"/a": body(b"abc")}) as server:
        counts: list[int] = []
        await fetcher(server).fetch(server.url("/a"), MAX_BYTES, counts.append)
        assert sum(counts) == 3
        with pytest.raises(MediaTooLarge, match="no more"):
            await fetcher(server).fetch(server.url("/a"), MAX_BYTES, refuse)


async def test_the_connection_goes_to_the_checked_address_whatever_the_name_says_next() -> None:
    resolver = FakeResolver({HOST: [["8.8.8.8"], ["127.0.0.1"], ["10.0.0.1"]]})
    network = RecordingNetwork()
    policy = FetchPolicy(allow_http=True)

    with pytest.raises(MediaUnavailable):
        await Fetcher(policy, LIMITS, resolver=resolver, network=network).fetch(
            f"http://{HOST}/", MAX_BYTES
        )

    assert resolver.asked == [HOST]
    assert network.addresses == [("8.8.8.8", 80)]


@pytest.mark.parametrize(
    "answers",
    [
        ["127.0.0.1"],
        ["8.8.8.8", "10.0.0.1"],
        ["10.0.0.1", "8.8.8.8"],
        ["::1"],
        ["fe80::1%eth0"],
        ["::ffff:169.254.169.254"],
        ["64:ff9b::7f00:1"],
        ["not an address"],
    ],
)
async def test_a_name_with_an_address_that_is_not_public_is_not_connected_to(
    answers: list[str],
) -> None:
    network = RecordingNetwork()
    resolver = FakeResolver({HOST: [answers]})

    with pytest.raises(MediaForbidden, match="a host with public addresses only"):
        await Fetcher(FetchPolicy(), LIMITS, resolver=resolver, network=network).fetch(
            f"https://{HOST}/", MAX_BYTES
        )

    assert network.addresses == []


async def test_localhost_by_the_machines_own_resolver_is_refused() -> None:
    network = RecordingNetwork()
    fetching = Fetcher(FetchPolicy(), LIMITS, resolver=SystemResolver(), network=network)

    with pytest.raises(MediaForbidden):
        await fetching.fetch("https://localhost/", MAX_BYTES)

    assert network.addresses == []


async def test_the_next_address_is_tried_when_one_does_not_answer() -> None:
    async with serving({"/": body(b"abc")}) as server:
        resolver = FakeResolver({HOST: [["127.0.0.2", "127.0.0.1"]]})
        network = RecordingNetwork(httpcore2.AnyIOBackend())
        fetching = Fetcher(server.policy, LIMITS, resolver=resolver, network=network)
        fetched = await fetching.fetch(server.url(), MAX_BYTES)

    assert fetched.data == b"abc"
    assert [address for address, _ in network.addresses] == ["127.0.0.2", "127.0.0.1"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_followed(status: int) -> None:
    async with serving({"/a": redirect("../b", status), "/b": body(b"abc")}) as server:
        fetched = await fetcher(server).fetch(server.url("/a"), MAX_BYTES)

    assert fetched.data == b"abc"
    assert len(server.heads) == 2


@pytest.mark.parametrize(
    "location",
    [
        "http://10.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "//192.168.0.1/",
        "http://0x7f.1/",
        "http://2130706433/",
        "http://internal.example/",
        "ftp://media.example/",
        "file:///etc/passwd",
        "http://user@media.example/",
        "http://media.example:22/",
    ],
)
async def test_a_redirect_to_what_the_policy_forbids_is_not_followed(location: str) -> None:
    resolver = FakeResolver({HOST: [["127.0.0.1"]], "internal.example": [["10.9.8.7"]]})
    network = RecordingNetwork(httpcore2.AnyIOBackend())
    async with serving({"/a": redirect(location)}) as server:
        fetching = Fetcher(server.policy, LIMITS, resolver=resolver, network=network)
        with pytest.raises(MediaForbidden):
            await fetching.fetch(server.url("/a"), MAX_BYTES)

    assert network.addresses == [("127.0.0.1", server.port)]


async def test_a_host_that_turns_private_is_caught_at_the_redirect() -> None:
    resolver = FakeResolver({HOST: [["127.0.0.1"], ["10.0.0.1"]]})
    async with serving({"/a": redirect("/b"), "/b": body(b"abc")}) as server:
        with pytest.raises(MediaForbidden):
            await fetcher(server, resolver).fetch(server.url("/a"), MAX_BYTES)

    assert len(server.heads) == 1


async def test_redirects_are_limited() -> None:
    async with serving({"/a": redirect("/a")}) as server:
        with pytest.raises(MediaUnavailable, match="at most 3 redirects"):
            await fetcher(server).fetch(server.url("/a"), MAX_BYTES)

    assert len(server.heads) == 4


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (body(b"x" * 1001), MediaTooLarge, "got 1001, expected at most 1000"),
        (
            raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"),
            MediaTooLarge,
            "got 99999999999, expected at most 1000",
        ),
        (raw(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000), MediaTooLarge, "expected at most 1000"),
        (
            raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000),
            MediaTooLarge,
            "expected at most 1000",
        ),
        (
            body(gzip.compress(b"\0" * 900_000), "Content-Encoding: gzip"),
            UnsupportedMedia,
            "content-encoding: got 'gzip', expected a body that is not compressed",
        ),
        (
            body(b"abc", "Content-Encoding: identity", "Content-Encoding: br"),
            UnsupportedMedia,
            "got 'identity, br'",
        ),
        (
            raw(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nabc"),
            MediaUnavailable,
            "RemoteProtocolError",
        ),
        (
            raw(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 9\r\n\r\nabc"),
            MediaUnavailable,
            "RemoteProtocolError",
        ),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nabc"), MediaUnavailable, "Remote"),
        (raw(b"SSH-2.0-OpenSSH_9.6\r\n"), MediaUnavailable, "RemoteProtocolError"),
        (raw(b""), MediaUnavailable, "RemoteProtocolError"),
        (raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000), MediaUnavailable, "RemoteProtocolError"),
        (body(b"no", status="404 Not Found"), MediaUnavailable, "status 200, not 404"),
        (body(b"no", status="206 Partial"), MediaUnavailable, "status 200, not 206"),
        (body(b"", status="500 Oops"), MediaUnavailable, "status 200, not 500"),
        (body(b"", status="304 Not Modified"), MediaUnavailable, "status 200, not 304"),
        (
            body(b"", "Location: http://[", status="302 Found"),
            MediaError,
            "location: got 'http://[",
        ),
    ],
)
async def test_an_answer_is_refused(answer: object, error: type[MediaError], message: str) -> None:
    async with serving({"/a": answer}) as server:  # type: ignore[dict-item]
        with pytest.raises(error) as caught:
            await fetcher(server).fetch(server.url("/a"), MAX_BYTES)

    assert message in str(caught.value)


async def test_a_file_of_exactly_the_limit_is_taken() -> None:
    async with serving({"/a": body(b"x" * MAX_BYTES)}) as server:
        fetched = await fetcher(server).fetch(server.url("/a"), MAX_BYTES)

    assert len(fetched.data) == MAX_BYTES


@pytest.mark.parametrize("answer", [silence, drip(b"x" * 900, 0.02), redirect("/slow")])
async def test_the_deadline_is_for_all_of_it(answer: object) -> None:
    limits = MediaLimits(fetch_seconds=0.3)
    routes = {"/a": answer, "/slow": silence}
    async with serving(routes) as server:  # type: ignore[arg-type]
        start = time.monotonic()
        with pytest.raises(MediaTimeout, match=r"an answer within 0\.3 seconds"):
            await Fetcher(server.policy, limits, resolver=to_loopback()).fetch(
                server.url("/a"), MAX_BYTES
            )

    assert 0.25 < time.monotonic() - start < 2.0


async def test_a_resolver_that_does_not_answer_runs_into_the_deadline() -> None:
    class Silent:
        async def resolve(self, host: str, port: int) -> list[str]:
            await anyio.sleep_forever()
            return []

    fetching = Fetcher(FetchPolicy(), MediaLimits(fetch_seconds=0.1), resolver=Silent())
    with pytest.raises(MediaTimeout):
        await fetching.fetch(f"https://{HOST}/", MAX_BYTES)


async def test_an_unknown_host_is_unavailable() -> None:
    fetching = Fetcher(FetchPolicy(), LIMITS, resolver=FakeResolver())
    with pytest.raises(MediaUnavailable, match="Name or service not known") as caught:
        await fetching.fetch(f"https://{HOST}/", MAX_BYTES)

    assert caught.value.code == "media_unavailable"
    assert caught.value.retryable


async def test_a_refused_connection_is_unavailable() -> None:
    async with serving({}) as server:
        pass
    with pytest.raises(MediaUnavailable, match="ConnectError"):
        await fetcher(server).fetch(server.url(), MAX_BYTES)


async def test_cancelling_closes_the_connection() -> None:
    async with serving({"/a": silence}) as server:
        with anyio.move_on_after(0.2) as scope:
            await fetcher(server).fetch(server.url("/a"), MAX_BYTES)
        assert scope.cancelled_caught
        await until(lambda: server.closed == 1)


class Authority:
    """A certificate authority of the test, and contexts of both sides."""

    def __init__(self, *hosts: str) -> None:
        authority = trustme.CA()
        self.names: list[str | None] = []
        self.server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert(*hosts).configure_cert(self.server)
        self.server.sni_callback = lambda _socket, name, _context: self.names.append(name)
        self.client = ssl.create_default_context()
        authority.configure_trust(self.client)


async def test_the_certificate_is_checked_against_the_host_of_the_url() -> None:
    authority = Authority(HOST)
    async with serving({"/a": body(b"abc")}, tls=authority.server) as server:
        fetching = Fetcher(
            server.policy,
            LIMITS,
            resolver=to_loopback("other.example"),
            ssl_context=authority.client,
        )
        fetched = await fetching.fetch(f"https://{HOST}:{server.port}/a", MAX_BYTES)
        with pytest.raises(MediaUnavailable, match="Hostname mismatch"):
            await fetching.fetch(f"https://other.example:{server.port}/a", MAX_BYTES)
        with pytest.raises(MediaUnavailable, match="IP address mismatch"):
            await fetching.fetch(f"https://127.0.0.1:{server.port}/a", MAX_BYTES)

    assert fetched.data == b"abc"
    assert authority.names[:2] == [HOST, "other.example"]


async def test_an_authority_that_is_not_trusted_is_refused() -> None:
    authority = Authority(HOST)
    async with serving({"/a": body(b"abc")}, tls=authority.server) as server:
        with pytest.raises(MediaUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await fetcher(server).fetch(f"https://{HOST}:{server.port}/a", MAX_BYTES)
