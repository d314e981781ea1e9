"""Limits of the queue, of time and of size, and what a client is told at each."""

import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from treadle_core import Engine, EngineConfig
from treadle_core.testing.scripted import ScriptedRunner
from treadle_server.settings import HttpConfig, RequestDefaults, ServeConfig

CHAT_PATH = "/v1/chat/completions"


def slowly(tokens: Any) -> int:
    time.sleep(0.005)
    return 65


async def test_a_full_queue_is_a_429_and_the_others_are_served(serve: Any) -> None:
    config = ServeConfig(engine=EngineConfig(max_num_seqs=2, max_queue=4))
    statuses: list[int] = []
    async with serve(ScriptedRunner(slowly), config=config) as served:

        async def ask(stream: bool) -> None:
            response = await served.complete("x", max_tokens=20, stream=stream)
            statuses.append(response.status_code)
            if response.status_code == 429:
                error = response.json()["error"]
                assert error["type"] == "rate_limit_error"
                assert error["code"] == "queue_full"
                assert int(response.headers["retry-after"]) >= 1
                assert "4" in error["message"]

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(ask, number % 2 == 0)
        assert (await served.complete("x", max_tokens=1)).status_code == 200
    assert sorted(set(statuses)) == [200, 429]
    assert 4 <= statuses.count(200) <= 8


async def test_a_list_of_prompts_is_taken_whole_or_not_at_all(serve: Any) -> None:
    config = ServeConfig(engine=EngineConfig(max_num_seqs=1, max_queue=4))
    async with serve(ScriptedRunner(slowly), config=config) as served:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: served.complete("x", max_tokens=100))
            await anyio.sleep(0.05)
            group.start_soon(lambda: served.complete(["x"] * 2, max_tokens=100))
            await anyio.sleep(0.05)
            response = await served.complete(["x"] * 4, stream=True)
            assert response.status_code == 429
            await anyio.sleep(0.05)
            stats = await served.engine.call(Engine.stats)
            assert (stats.num_running, stats.num_waiting) == (1, 2)
            group.cancel_scope.cancel()
        await served.until_idle()


async def test_more_prompts_than_the_queue_could_ever_hold_is_a_400(serve: Any) -> None:
    config = ServeConfig(engine=EngineConfig(max_queue=4))
    async with serve(config=config) as served:
        assert (await served.complete(["x"] * 5)).status_code == 400
        assert (await served.complete(["x"] * 3, n=2)).status_code == 400
        assert (await served.complete(["x"] * 2, n=2)).status_code == 200


@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/completions"])
async def test_a_body_beyond_the_limit_is_a_413_with_its_length_told(serve: Any, path: str) -> None:
    config = ServeConfig(http=HttpConfig(max_body_bytes=1000))
    async with serve(config=config) as served:
        response = await served.client.post(path, content=b"x" * 1001)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert "1000" in response.json()["error"]["message"]
        assert (await served.client.post(path, content=b"x" * 1000)).status_code == 400


@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/completions"])
async def test_a_body_beyond_the_limit_is_a_413_without_its_length_told(
    serve: Any, path: str
) -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while read < 1_000_000:
            read += 100
            yield b"x" * 100

    config = ServeConfig(http=HttpConfig(max_body_bytes=1000))
    async with serve(config=config) as served:
        response = await served.client.post(path, content=endless())
    assert response.status_code == 413
    assert read <= 1200


async def test_a_body_of_the_limit_is_read(serve: Any) -> None:
    config = ServeConfig(http=HttpConfig(max_body_bytes=1000))
    frame = len(b'{"prompt":""}')
    async with serve(config=config) as served:
        content = b'{"prompt":"' + b"x" * (1000 - frame) + b'"}'
        assert (await served.client.post("/v1/completions", content=content)).status_code == 200


async def test_a_request_that_takes_too_long_is_a_504(serve: Any) -> None:
    async with serve(ScriptedRunner(slowly)) as served:
        response = await served.complete("x", max_tokens=10_000, timeout=0.1)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert "0.1 s" in response.json()["error"]["message"]
        await served.until_idle()


async def test_the_servers_timeout_holds_for_who_says_nothing(serve: Any, events: Any) -> None:
    config = ServeConfig(defaults=RequestDefaults(timeout=0.1))
    async with serve(ScriptedRunner(slowly), config=config) as served:
        assert (await served.complete("x", max_tokens=10_000)).status_code == 504
        found = events(await served.complete("x", max_tokens=10_000, stream=True))
        assert found[-1]["error"]["code"] == "deadline_exceeded"
        patient = await served.complete("x", max_tokens=60, timeout=30)
        assert patient.status_code == 200


async def test_a_prompt_whose_kv_can_never_fit_is_a_503(serve: Any) -> None:
    config = ServeConfig(engine=EngineConfig(kv_memory_bytes=8 * 64))
    async with serve(config=config) as served:
        for stream in (False, True):
            response = await served.complete("x" * 5000, stream=stream)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "out_of_memory"
