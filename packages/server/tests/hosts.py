"""A media host on loopback that misbehaves as a test wants, in threads of its own."""

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], None]

PATIENCE = 20.0
"""Nobody waits longer than this for a host that says nothing."""


class Host:
    """A running host.

    Attributes:
        url: Where.
        port: Its port.
        arrived: Set when a request for ``/silence`` arrives.
        left: Set when the client of one has gone.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.arrived = threading.Event()
        self.left = threading.Event()

    def silence(self, handler: BaseHTTPRequestHandler) -> None:
        """No answer at all, until the client leaves."""
        self.arrived.set()
        handler.connection.settimeout(PATIENCE)
        if handler.connection.recv(1) == b"":
            self.left.set()


def body(data: bytes, status: int = 200, **headers: str) -> Answer:
    """An answer; its length is true unless ``headers`` say another."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        said = {"Content-Length": str(len(data))} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        for name, value in said.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def redirect(location: str) -> Answer:
    return body(b"", 302, Location=location)


def drip(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b"x")
        time.sleep(0.1)


def endless(handler: BaseHTTPRequestHandler) -> None:
    """A body without a length that does not end."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100_000):
        handler.wfile.write(b"x" * 65536)


@contextmanager
def hosting(routes: Callable[[Host], Mapping[str, Answer]]) -> Generator[Host]:
    """A host that answers each path as ``routes`` say."""
    answers: dict[str, Answer] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.close_connection = True
            try:
                answers[self.path](self)
            except OSError:
                pass

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    host = Host(server.server_address[1])
    answers.update(routes(host))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield host
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
