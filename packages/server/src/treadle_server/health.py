"""``/health``: the process answers. ``/ready``: the engine advances, or has nothing to do.

Requests are served while the warm prompts are computed at the start, but ``/ready`` waits for them.
"""

from collections.abc import Callable

import anyio
from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle_core import AsyncEngine, Engine, EngineClosed, EngineStats
from treadle_core.ports import Clock
from treadle_server.http import json_response


class Health(Struct, frozen=True, kw_only=True):
    """The reply of both routes."""

    status: str
    reason: str | None = None


class Watch:
    """Asks the owner thread again and again whether it advances.

    Args:
        engine: The engine.
        clock: Time.
        stall_seconds: After so long without a step, while work waits, it is not ready.
    """

    def __init__(self, engine: AsyncEngine, clock: Clock, stall_seconds: float) -> None:
        self._engine = engine
        self._clock = clock
        self._stall = stall_seconds
        self._advanced = clock.now()

    async def run(self, scope: anyio.CancelScope) -> None:
        """Watch until cancelled, or until the engine ends."""
        num_steps = -1
        try:
            while True:
                # The owner thread answers between two steps; if it is stuck in one, so are we.
                stats = await self._engine.call(Engine.stats)
                if idle(stats) or stats.num_steps != num_steps:
                    self._advanced = self._clock.now()
                num_steps = stats.num_steps
                await anyio.sleep(min(1.0, self._stall / 4))
        except EngineClosed:
            return

    @property
    def trouble(self) -> str | None:
        """Why requests cannot be served, or None."""
        if not self._engine.alive:
            return self._engine.death
        still = self._clock.now() - self._advanced
        if still > self._stall:
            return f"no step was completed for {still:.0f} s, though there is work"
        return None


def idle(stats: EngineStats) -> bool:
    """Whether there is nothing to do."""
    return not (stats.num_waiting or stats.num_running)


class HealthRoutes:
    """Tells supervisors how the server is.

    Args:
        watch: Knows whether the engine advances.
        warming: How far the warm prompts are; None once they are computed.
    """

    def __init__(self, watch: Watch, warming: Callable[[], str | None] = lambda: None) -> None:
        self._watch = watch
        self._warming = warming

    async def health(self, http: HttpRequest) -> Response:
        """200: the process is alive. It looks at nothing else, so it never waits."""
        return json_response(Health(status="ok"))

    async def ready(self, http: HttpRequest) -> Response:
        """200 if requests can be served, else 503 with the reason."""
        trouble = self._watch.trouble
        if trouble is not None:
            return json_response(Health(status="not ready", reason=trouble), 503)
        warming = self._warming()
        if warming is not None:
            return json_response(Health(status="warming", reason=warming), 503)
        return json_response(Health(status="ready"))
