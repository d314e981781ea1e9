"""Liveness never waits; readiness tells the truth about the owner thread."""

import threading
import time
from typing import Any

import anyio
import pytest

from treadle_core import EngineStats
from treadle_core.testing.fakes import ManualClock, RecordingObserver
from treadle_core.testing.scripted import ScriptedRunner
from treadle_server.health import Watch
from treadle_server.http import beside
from treadle_server.settings import HttpConfig, ServeConfig


class Freezer:
    """A script that blocks the owner thread until it is told to go on."""

    def __init__(self) -> None:
        self.frozen = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, tokens: Any) -> int:
        self.frozen.set()
        assert self.go_on.wait(10)
        return 258


class Deadly(RecordingObserver):
    """Ends the owner thread at the first step."""

    def stepped(self, plan: Any, result: Any) -> None:
        raise LookupError("no observer may do this")


async def timed(served: Any, path: str) -> tuple[int, float]:
    start = time.perf_counter()
    response = await served.client.get(path)
    return response.status_code, time.perf_counter() - start


async def test_a_frozen_owner_thread_leaves_health_quick_and_turns_readiness(serve: Any) -> None:
    freezer = Freezer()
    config = ServeConfig(http=HttpConfig(stall_seconds=0.2))
    async with serve(ScriptedRunner(freezer), config=config) as served:
        assert (await timed(served, "/ready"))[0] == 200
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(served.chat)
                await anyio.to_thread.run_sync(freezer.frozen.wait)
                ready = []
                for _ in range(12):
                    status, seconds = await timed(served, "/health")
                    assert (status, seconds < 0.2) == (200, True)
                    status, seconds = await timed(served, "/ready")
                    assert seconds < 0.2
                    ready.append(status)
                    await anyio.sleep(0.05)
                assert ready[0] == 200
                assert ready[-1] == 503
                reason = (await served.client.get("/ready")).json()["reason"]
                assert "no step was completed" in reason
                freezer.go_on.set()
        finally:
            freezer.go_on.set()
        await served.until_idle()
        await anyio.sleep(0.1)
        assert (await timed(served, "/ready"))[0] == 200


async def test_readiness_stays_off_when_the_waiting_clients_have_left(
    serve: Any, visitor: Any
) -> None:
    freezer = Freezer()
    config = ServeConfig(http=HttpConfig(stall_seconds=0.1))
    async with serve(ScriptedRunner(freezer), config=config) as served:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        visit = visitor(served.app, "/v1/chat/completions", body)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(visit.visit)
                await anyio.to_thread.run_sync(freezer.frozen.wait)
                visit.leave()
            await anyio.sleep(0.3)
            assert (await timed(served, "/ready"))[0] == 503
        finally:
            freezer.go_on.set()


async def test_health_is_quick_beside_a_long_prefill(serve: Any) -> None:
    def slow(num_tokens: int) -> float:
        time.sleep(0.6)
        return 0.6

    async with (
        serve(ScriptedRunner(lambda tokens: 258, prefill_cost=slow)) as served,
        anyio.create_task_group() as group,
    ):
        group.start_soon(lambda: served.complete("x" * 3000))
        for _ in range(10):
            status, seconds = await timed(served, "/health")
            assert (status, seconds < 0.3) == (200, True)
            await anyio.sleep(0.05)


class Spinning:
    """An engine whose thread answers, has work, and never completes a step."""

    alive = True
    death = None

    async def call(self, function: Any) -> EngineStats:
        return EngineStats(
            num_waiting=1,
            num_running=0,
            kv_bytes=0,
            num_steps=7,
            num_requests=1,
            num_finished=0,
            num_failed=0,
            prompt_tokens=0,
            completion_tokens=0,
            last_step=None,
        )


async def test_an_engine_that_turns_without_advancing_is_not_ready() -> None:
    clock = ManualClock()
    engine: Any = Spinning()
    watch = Watch(engine, clock, 0.04)
    async with beside(watch.run):
        await anyio.sleep(0.05)
        assert watch.trouble is None
        clock.advance(1)
        await anyio.sleep(0.05)
        assert watch.trouble == "no step was completed for 1 s, though there is work"


async def test_a_long_idle_time_is_not_a_stall(serve: Any) -> None:
    config = ServeConfig(http=HttpConfig(stall_seconds=0.1))
    async with serve(config=config) as served:
        await served.chat()
        await anyio.sleep(0.4)
        assert (await timed(served, "/ready"))[0] == 200


async def test_an_engine_that_died_is_a_503_everywhere_but_at_health(serve: Any) -> None:
    async with serve(observers=[Deadly()]) as served:
        assert (await timed(served, "/ready"))[0] == 200
        # Who is being served when it happens is told, too.
        response = await served.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_closed"
        assert (await timed(served, "/health"))[0] == 200
        status = await served.client.get("/ready")
        assert status.status_code == 503
        assert "no observer may" in status.json()["reason"]
        for stream in (False, True):
            response = await served.chat(stream=stream)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_closed"
            assert response.headers["retry-after"]
        assert (await served.client.get("/v1/models")).status_code == 503


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_may_ask_with_head(serve: Any, path: str) -> None:
    async with serve() as served:
        assert (await served.client.head(path)).status_code == 200
