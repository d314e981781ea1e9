"""What is counted of HTTP requests."""

from collections.abc import Sequence

from msgspec import Struct
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle_core.ports import Clock
from treadle_server.http import CLIENT_LEFT
from treadle_server.meters import WAIT_SECONDS, Distribution, Histogram

ELSEWHERE = "other"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Answered(Struct, frozen=True, kw_only=True):
    """Requests that were answered alike.

    Attributes:
        method: ``other`` for one that nobody needs.
        route: The pattern of the path; ``other`` where there is none.
        status: 499 for a client that left before the answer began.
        count: How many.
    """

    method: str
    route: str
    status: int
    count: int


class HttpFigures(Struct, frozen=True, kw_only=True):
    """HTTP requests since the start.

    Attributes:
        in_flight: Those that run, the one that asks included.
        answered: The others.
        seconds: From a request to the end of its answer, by route.
    """

    in_flight: int
    answered: tuple[Answered, ...]
    seconds: dict[str, Distribution]


class Traffic:
    """Counts HTTP requests. For the event loop's thread."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._answered: dict[tuple[str, str, int], int] = {}
        self._seconds: dict[str, Histogram] = {}

    def begin(self) -> None:
        """A request came."""
        self._in_flight += 1

    def end(self, method: str, route: str, status: int, seconds: float) -> None:
        """It was answered.

        Args:
            method: Of the request.
            route: The pattern of its path.
            status: Of the answer.
            seconds: What it took.
        """
        self._in_flight -= 1
        key = (method if method in METHODS else ELSEWHERE, route, status)
        self._answered[key] = self._answered.get(key, 0) + 1
        self._seconds.setdefault(route, Histogram(WAIT_SECONDS)).add(seconds)

    def figures(self) -> HttpFigures:
        """All until now."""
        return HttpFigures(
            in_flight=self._in_flight,
            answered=tuple(
                Answered(method=method, route=route, status=status, count=count)
                for (method, route, status), count in self._answered.items()
            ),
            seconds={route: times.distribution() for route, times in self._seconds.items()},
        )


class Counted:
    """Counts the requests that it passes on.

    Args:
        app: The application behind.
        traffic: Where they are counted.
        routes: Known paths.
        clock: Time.
    """

    def __init__(
        self, app: ASGIApp, traffic: Traffic, routes: Sequence[BaseRoute], clock: Clock
    ) -> None:
        self._app = app
        self._traffic = traffic
        self._routes = routes
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began = self._clock.now()
        self._traffic.begin()
        try:
            await self._app(scope, receive, watched)
        finally:
            seconds = self._clock.now() - began
            route = route_of(scope, self._routes)
            self._traffic.end(scope["method"], route, status, seconds)


def route_of(scope: Scope, routes: Sequence[BaseRoute]) -> str:
    """The pattern of a request's path, whatever its method; never the path itself."""
    for route in routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            return route.path
    return ELSEWHERE
