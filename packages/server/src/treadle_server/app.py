"""The application: routes, what stands before them, and what becomes of errors."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from treadle_core import AsyncEngine, SystemClock, TreadleError
from treadle_core.ports import Clock
from treadle_server.cache_routes import CacheRoutes
from treadle_server.errors import reply_to_status
from treadle_server.figures import Reporter
from treadle_server.health import HealthRoutes, Watch
from treadle_server.http import CLIENT_LEFT, ApiKey, Surprises, beside, error_response, explain
from treadle_server.media import Media, text_only
from treadle_server.openai.chat import ChatCompletions
from treadle_server.openai.completions import Completions
from treadle_server.openai.models import Models
from treadle_server.serving import Serving
from treadle_server.settings import ServeConfig
from treadle_server.speculative_routes import SpeculativeRoutes
from treadle_server.status_routes import StatusRoutes
from treadle_server.traffic import Counted, Traffic
from treadle_server.warm import WarmChat, Warmer

OPEN_PATHS = frozenset({"/health"})

Handler = Callable[[Request, Exception], Awaitable[Response]]


def create_app(
    engine: AsyncEngine,
    config: ServeConfig | None = None,
    *,
    clock: Clock | None = None,
    warm: Sequence[WarmChat] = (),
    media: Callable[[], Media] = text_only,
) -> Starlette:
    """An application that serves ``engine``. Any number of them may exist.

    Its lifespan enters the engine, which loads the model, and leaves it. Its state has the
    ``dispatcher``, through which whoever stops the server can end what still runs.

    Args:
        engine: Not entered yet.
        config: What the server was told; the parts about loading are for whoever made the engine.
        clock: Time, for the watch over the engine and for figures.
        warm: Chats to compute at the start; see :mod:`treadle_server.warm`.
        media: What the model does with media; called when the engine runs.
    """
    config = config or ServeConfig()
    clock = clock or SystemClock()
    serving = Serving(engine, config, media)
    watch = Watch(engine, clock, config.http.stall_seconds)
    warmer = Warmer(serving, warm)
    traffic = Traffic()
    reporter = Reporter(serving, watch, traffic, clock)
    routes = make_routes(serving, watch, warmer, reporter)
    counted = Middleware(Counted, traffic=traffic, routes=routes, clock=clock)
    app = Starlette(
        routes=routes,
        middleware=[counted, *make_middleware(config.http.api_key)],
        exception_handlers=make_handlers(),
        lifespan=make_lifespan(serving, watch, warmer, reporter),
    )
    app.router.redirect_slashes = False
    app.state.dispatcher = serving.dispatcher
    return app


def make_routes(serving: Serving, watch: Watch, warmer: Warmer, reporter: Reporter) -> list[Route]:
    """All paths."""
    health = HealthRoutes(watch, lambda: warmer.progress)
    models, cache = Models(serving), CacheRoutes(serving.engine, warmer.again)
    speculative, status = SpeculativeRoutes(serving.engine), StatusRoutes(reporter)
    chat, completions = ChatCompletions(serving), Completions(serving)
    return [
        Route("/health", health.health),
        Route("/ready", health.ready),
        Route("/status", status.status),
        Route("/metrics", status.metrics),
        Route("/v1/cache/stats", cache.stats),
        Route("/v1/cache", cache.clear, methods=["DELETE"]),
        Route("/v1/cache/prefix", cache.clear, methods=["DELETE"]),
        Route("/v1/speculative/stats", speculative.stats),
        Route("/v1/models", models.get_all),
        Route("/v1/models/{id:path}", models.get_one),
        Route("/v1/chat/completions", chat.post, methods=["POST"]),
        Route("/v1/completions", completions.post, methods=["POST"]),
    ]


def make_middleware(api_key: str | None) -> list[Middleware]:
    """What every request passes before it comes to its route."""
    surprises = [Middleware(Surprises)]
    if api_key is None:
        return surprises
    return [*surprises, Middleware(ApiKey, key=api_key, open_paths=OPEN_PATHS)]


def make_handlers() -> dict[int | type[Exception], Handler]:
    """What becomes of exceptions that a route raises."""

    async def foreseen(http: Request, error: Exception) -> Response:
        return error_response(explain(error, f"{http.method} {http.url.path}"))

    async def refused(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = f"{error.detail}: {http.method} {http.url.path}"
        response = error_response(reply_to_status(error.status_code, detail))
        response.headers.update(error.headers or {})
        return response

    async def left(http: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)

    return {TreadleError: foreseen, HTTPException: refused, ClientDisconnect: left}


def make_lifespan(
    serving: Serving, watch: Watch, warmer: Warmer, reporter: Reporter
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """What surrounds the serving of requests."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with serving.engine:
            # Raises now, not at the first request, if the tokenizer cannot serve chats.
            _ = serving.tokenizer
            await reporter.begin()
            await warmer.prepare()
            async with beside(watch.run), beside(warmer.run):
                yield

    return lifespan
