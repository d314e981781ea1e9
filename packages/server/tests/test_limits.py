"""Limits of the queue, of time and of size, and what a client is told at each."""

import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from treadle_core import Engine, EngineConfig
from treadle_core.testing.scripted import ScriptedRunner
from treadle_server.openai.sampling import MAX_TOKEN_IDS
from treadle_server.settings import HttpConfig, RequestDefaults, ServeConfig
from treadle_server.tokenizer import MAX_THREADS, TextWorkers
from treadle_server.validation import MAX_LISTS

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


async def true(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    with anyio.fail_after(10):
        while True:
            if condition():
                return
            await anyio.sleep(0.005)


async def until(served: Any, *, running: int, waiting: int) -> None:
    """Wait until so many requests run, and so many wait."""
    with anyio.fail_after(10):
        while True:
            stats = await served.engine.call(Engine.stats)
            if (stats.num_running, stats.num_waiting) == (running, waiting):
                return
            await anyio.sleep(0.005)


async def test_a_list_of_prompts_is_taken_whole_or_not_at_all(serve: Any) -> None:
    config = ServeConfig(engine=EngineConfig(max_num_seqs=1, max_queue=4))
    async with serve(ScriptedRunner(slowly), config=config) as served:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: served.complete("x", max_tokens=10_000))
            await until(served, running=1, waiting=0)
            group.start_soon(lambda: served.complete(["x"] * 2, max_tokens=10_000))
            await until(served, running=1, waiting=2)
            response = await served.complete(["x"] * 4, stream=True)
            assert response.status_code == 429
            await until(served, running=1, waiting=2)
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


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "x" * 20_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "x" * 20_000]}, "prompt"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "x" * 20_000}]}, "messages"),
    ],
)
async def test_a_text_that_is_much_too_long_is_not_looked_through(
    serve: Any, tokenizer_type: Any, path: str, body: Any, field: str
) -> None:
    lengths: list[int] = []

    class Watched(tokenizer_type):
        def encode(self, text: str) -> list[int]:
            lengths.append(len(text))
            return super().encode(text)

        encode_rendered = encode

    config = ServeConfig(engine=EngineConfig(context_length=100))
    async with serve(config=config, tokenizer=Watched()) as served:
        response = await served.client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == field
    assert "at least 545 tokens do not fit, the context is 100 tokens" in error["message"]
    assert max(lengths) == 800


async def test_a_text_of_few_tokens_is_encoded_however_long_it_is(
    serve: Any, tokenizer_type: Any
) -> None:
    class Runs(tokenizer_type):
        def encode(self, text: str) -> list[int]:
            return super().encode(text[::200])

    config = ServeConfig(engine=EngineConfig(context_length=101))
    async with serve(config=config, tokenizer=Runs()) as served:
        reply = (await served.complete("x" * 19_800, max_tokens=1)).json()
        assert reply["usage"]["prompt_tokens"] == 100
        assert (await served.complete("x" * 20_001)).status_code == 400


async def test_work_of_callers_who_left_still_counts() -> None:
    workers, gate, started = TextWorkers(), threading.Event(), list[int]()

    def work() -> None:
        started.append(1)
        assert gate.wait(10)

    scopes: list[anyio.CancelScope] = []

    async def leave() -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await workers.run(work)

    async with anyio.create_task_group() as callers:
        for _ in range(MAX_THREADS):
            callers.start_soon(leave)
        await true(lambda: len(started) == MAX_THREADS)
        for scope in scopes:
            scope.cancel()
        await anyio.sleep(0.05)
        callers.start_soon(workers.run, work)
        await anyio.sleep(0.1)
        assert len(started) == MAX_THREADS
        gate.set()


def slow_tokenizer(kind: Any) -> Any:
    """One that takes its time for each text, and counts them."""

    class Slow(kind):
        num_encoded = 0

        def encode(self, text: str) -> list[int]:
            self.num_encoded += 1
            time.sleep(0.02)
            return super().encode(text)

    return Slow()


async def test_prompts_that_nobody_waits_for_are_not_encoded(
    serve: Any, tokenizer_type: Any, visitor: Any
) -> None:
    slow = slow_tokenizer(tokenizer_type)
    async with serve(tokenizer=slow) as served:
        visit = visitor(served.app, "/v1/completions", {"prompt": ["x"] * 200})
        async with anyio.create_task_group() as group:
            group.start_soon(visit.visit)
            await true(lambda: slow.num_encoded > 0)
            visit.leave()
    assert slow.num_encoded < 150


async def test_prompts_that_take_too_long_to_encode_are_a_504(
    serve: Any, tokenizer_type: Any
) -> None:
    slow = slow_tokenizer(tokenizer_type)
    async with serve(tokenizer=slow) as served:
        response = await served.complete(["x"] * 200, timeout=0.2)
    assert response.status_code == 504
    assert "its prompt was not ready after 0.2 seconds" in response.json()["error"]["message"]
    assert slow.num_encoded < 100


async def test_a_body_of_very_many_lists_is_refused_at_once(serve: Any) -> None:
    async with serve() as served:
        content = b'{"prompt":[' + b"[]," * MAX_LISTS + b"[]]}"
        response = await served.client.post("/v1/completions", content=content)
        assert response.status_code == 400
        assert "500000 opening brackets" in response.json()["error"]["message"]
        response = await served.complete([7] * 2_000_000)
        assert response.json()["error"]["code"] == "context_length_exceeded"
        response = await served.chat(stop_token_ids=[7] * (MAX_TOKEN_IDS + 1), max_tokens=1)
        assert response.json()["error"]["param"] == "stop_token_ids"


async def test_long_names_are_not_sent_back(serve: Any) -> None:
    async with serve() as served:
        for fields in ({"model": "x" * 5000}, {"x" * 5000: 1}):
            assert len((await served.chat(**fields)).content) < 800


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
