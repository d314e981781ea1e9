"""``treadle serve``: load, listen, say so, and stop cleanly."""

import logging
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import anyio
import uvicorn

from treadle_core import AsyncEngine, EngineClosed
from treadle_server.app import create_app
from treadle_server.errors import CannotListen
from treadle_server.generation import Dispatcher
from treadle_server.http import beside
from treadle_server.media import Media, text_only
from treadle_server.settings import ServeConfig
from treadle_server.warm import WarmChat

GRACE_SECONDS = 5
KEEP_ALIVE_SECONDS = 30
BACKLOG = 2048


class Server(uvicorn.Server):
    """A uvicorn server that tells when it listens, and ends long requests when it stops.

    Args:
        config: Its options.
        listening: Called once.
        dispatcher: Ends the requests that run longer than the grace.
    """

    def __init__(
        self, config: uvicorn.Config, listening: Callable[[], None], dispatcher: Dispatcher
    ) -> None:
        super().__init__(config)
        self._listening = listening
        self._dispatcher = dispatcher

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen.

        Raises:
            CannotListen: Somebody else does, since a moment ago.
        """
        try:
            await super().startup(sockets=sockets)
        except OSError as error:
            raise CannotListen(self.config.host, self.config.port, error) from None
        self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to listen, and wait for what runs: a while, then its clients are told."""
        async with beside(self._end_grace):
            await super().shutdown(sockets=sockets)

    async def _end_grace(self, scope: anyio.CancelScope) -> None:
        await anyio.sleep(GRACE_SECONDS)
        with suppress(EngineClosed):
            await self._dispatcher.abort_all()


def serve(
    config: ServeConfig,
    engine: AsyncEngine,
    bound: socket.socket,
    warm: Sequence[WarmChat] = (),
    media: Callable[[], Media] = text_only,
) -> None:
    """Serve on a bound socket until a signal ends it.

    It is not listened to before the model is there.

    Raises:
        TreadleError: The model cannot be loaded, or the address is taken meanwhile.
        KeyboardInterrupt: It was ended by Ctrl-C.
    """
    logging.basicConfig(
        level=config.http.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    anyio.run(serve_on, config, engine, bound, warm, media)


async def serve_on(
    config: ServeConfig,
    engine: AsyncEngine,
    bound: socket.socket,
    warm: Sequence[WarmChat],
    media: Callable[[], Media],
) -> None:
    """The same, on an event loop."""
    app = create_app(engine, config, warm=warm, media=media)
    options = uvicorn.Config(
        app,
        host=config.http.host,
        port=config.http.port,
        log_config=None,
        # The lifespan is entered here, so that its errors come out as they are.
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2 * GRACE_SECONDS,
        backlog=BACKLOG,
    )
    async with app.router.lifespan_context(app):
        server = Server(options, lambda: announce(config.http.host, bound), app.state.dispatcher)
        with terminable():
            await server.serve(sockets=[bound])


@contextmanager
def listener(host: str, port: int) -> Generator[socket.socket]:
    """A socket bound to an address, so that a taken one is noticed before anything is loaded.

    Raises:
        CannotListen: Nothing can listen there.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(host, port, error) from None
    with bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError as error:
            raise CannotListen(host, port, error) from None
        yield bound


def announce(host: str, bound: socket.socket) -> None:
    """Say where the server is, in one line that programs may wait for."""
    port = bound.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    sys.stdout.write(f"Treadle is ready on http://{shown}:{port}\n")
    sys.stdout.flush()


@contextmanager
def terminable() -> Generator[None]:
    """Let SIGTERM end the serving only, not the process: the engine has to be closed after it.

    uvicorn raises the signal again when it is done.
    """

    def ignore(number: int, frame: FrameType | None) -> None:
        pass

    before = signal.signal(signal.SIGTERM, ignore)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
