"""A client that leaves ends its request at once, in both modes and in every phase."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from treadle_core import Engine, EngineConfig
from treadle_core.testing.scripted import ScriptedRunner
from treadle_server.settings import ServeConfig

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
STEP_SECONDS = 0.01
CHUNK = 32


def slowly(tokens: Sequence[int]) -> int:
    time.sleep(STEP_SECONDS)
    return 65


def slow_prefill(num_tokens: int) -> float:
    time.sleep(STEP_SECONDS)
    return STEP_SECONDS


def runner() -> ScriptedRunner:
    return ScriptedRunner(slowly, prefill_cost=slow_prefill)


CONFIG = ServeConfig(engine=EngineConfig(prefill_step_size=CHUNK, max_num_seqs=4))
LONG_PREFILL = {"prompt": "p" * 20_000}
LONG_DECODE = {"prompt": "p", "max_tokens": 20_000, "ignore_eos": True}


async def steps(served: Any) -> int:
    return (await served.engine.call(Engine.stats)).num_steps


async def leaves_nothing(served: Any, before: int) -> None:
    """The engine is idle, and it became so within the step that ran and the one ahead of it."""
    await served.until_idle(1.0)
    assert await steps(served) - before <= 4


async def until_busy(served: Any, num_steps: int) -> None:
    target = await steps(served) + num_steps
    with anyio.fail_after(5):
        # Each call is answered between two steps.
        while await steps(served) < target:
            pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("body", [LONG_PREFILL, LONG_DECODE], ids=["prefill", "decode"])
async def test_leaving_ends_the_request_within_a_step(
    serve: Any, visitor: Any, body: dict[str, Any], stream: bool, n: int
) -> None:
    async with serve(runner(), config=CONFIG) as served:
        visit = visitor(served.app, COMPLETION_PATH, {**body, "stream": stream, "n": n})
        async with anyio.create_task_group() as group:
            group.start_soon(visit.visit)
            await until_busy(served, 5)
            before = await steps(served)
            visit.leave()
            await leaves_nothing(served, before)
            with anyio.fail_after(1):
                await visit.done.wait()
        assert (await served.engine.call(Engine.stats)).num_finished == n


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_a_request_of_several_prompts_ends_all_of_them(
    serve: Any, visitor: Any, stream: bool
) -> None:
    body = {**LONG_DECODE, "prompt": ["a", "b", "c", "d", "e", "f"], "stream": stream}
    async with serve(runner(), config=CONFIG) as served:
        visit = visitor(served.app, COMPLETION_PATH, body)
        async with anyio.create_task_group() as group:
            group.start_soon(visit.visit)
            await until_busy(served, 5)
            before = await steps(served)
            visit.leave()
            await leaves_nothing(served, before)


async def test_leaving_the_queue_leaves_it(serve: Any, visitor: Any) -> None:
    config = ServeConfig(engine=EngineConfig(max_num_seqs=1, max_num_batched_tokens=64))
    async with serve(runner(), config=config) as served:
        runs = visitor(served.app, COMPLETION_PATH, LONG_DECODE)
        waits = visitor(served.app, COMPLETION_PATH, LONG_DECODE)
        async with anyio.create_task_group() as group:
            group.start_soon(runs.visit)
            await until_busy(served, 3)
            group.start_soon(waits.visit)
            await until_busy(served, 3)
            assert (await served.engine.call(Engine.stats)).num_waiting == 1
            waits.leave()
            with anyio.fail_after(1):
                await waits.done.wait()
            await until_busy(served, 1)
            stats = await served.engine.call(Engine.stats)
            assert (stats.num_waiting, stats.num_running) == (0, 1)
            runs.leave()


async def test_who_stays_gets_everything_while_others_leave(
    serve: Any, visitor: Any, events: Any
) -> None:
    async def guest(served: Any, number: int) -> None:
        visit = visitor(served.app, COMPLETION_PATH, {**LONG_DECODE, "stream": number % 2 == 0})
        async with anyio.create_task_group() as group:
            group.start_soon(visit.visit)
            await anyio.sleep(0.01 * number)
            visit.leave()

    async with serve(ScriptedRunner(), config=CONFIG) as served:
        asked = {"prompt": [9, 8, 7], "max_tokens": 150, "ignore_eos": True, "stream": True}
        alone = events(await served.client.post(COMPLETION_PATH, json=asked))
        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(guest, served, number)
            crowded = events(await served.client.post(COMPLETION_PATH, json=asked))
        await served.until_idle()

    def text(found: Any) -> str:
        return "".join(chunk["choices"][0]["text"] for chunk in found[:-1])

    assert text(crowded) == text(alone)
    assert len(text(alone)) > 0


async def test_leaving_while_the_body_is_sent_is_nobodys_error(serve: Any, visitor: Any) -> None:
    async with serve() as served:
        visit = visitor(served.app, CHAT_PATH, {})
        visit.leave()
        visit._asked = True
        await visit.visit()
    assert [message.get("status") for message in visit.messages[:1]] == [499]


async def test_only_who_left_is_logged_as_gone(
    serve: Any, visitor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="treadle.server")
    async with serve(runner(), config=CONFIG) as served:
        for stream in (False, True):
            await served.complete("p", max_tokens=3, stream=stream)
        assert caplog.messages == []
        visit = visitor(served.app, COMPLETION_PATH, LONG_DECODE)
        async with anyio.create_task_group() as group:
            group.start_soon(visit.visit)
            await until_busy(served, 3)
            visit.leave()
        assert [message.partition(": ")[2] for message in caplog.messages] == ["the client left"]
