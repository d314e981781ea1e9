"""When the model, or we, fail: who is told, what, and who is not disturbed."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import anyio
import openai
import pytest

from treadle_core.testing.fakes import RecordingObserver
from treadle_core.testing.scripted import Fault, ScriptedRunner

GUILTY = 7
COMPLETION_PATH = "/v1/completions"


def counts_up(tokens: Sequence[int]) -> int:
    return 65 + len(tokens) % 26


def failing(**fault: Any) -> ScriptedRunner:
    return ScriptedRunner(counts_up, faults=[Fault(marked=GUILTY, times=None, **fault)])


def prompt(*, guilty: bool, number: int = 0) -> list[int]:
    return [GUILTY if guilty else 8, 9, 100 + number]


@pytest.mark.parametrize("where", ["submit", "wait"])
async def test_only_the_request_that_breaks_the_model_fails(serve: Any, where: str) -> None:
    asked = {"max_tokens": 30, "ignore_eos": True}
    found: dict[int, Any] = {}
    async with serve(failing(where=where, skip=3)) as served:

        async def ask(number: int) -> None:
            guilty = number == 2
            found[number] = await served.complete(prompt(guilty=guilty, number=number), **asked)

        alone = (await served.complete(prompt(guilty=False, number=1), **asked)).json()
        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(ask, number)
        for number, response in found.items():
            if number == 2:
                assert response.status_code == 500
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("server_error", "step_failed")
                assert "the device is on fire" in error["message"]
                assert response.headers["x-should-retry"] == "false"
            else:
                assert response.status_code == 200, response.text
                assert response.json()["usage"]["completion_tokens"] == 30
        assert found[1].json()["choices"] == alone["choices"]
        assert (await served.complete(prompt(guilty=False), **asked)).status_code == 200


async def test_a_failure_in_a_stream_is_an_error_event_and_no_done(serve: Any, events: Any) -> None:
    asked = {"max_tokens": 30, "stream": True, "stream_options": {"include_usage": True}}
    async with serve(failing(skip=5)) as served:
        response = await served.complete(prompt(guilty=True), **asked)
        assert response.status_code == 200
        found = events(response)
        again = events(await served.complete(prompt(guilty=False), **asked))
    assert list(found[-1]) == ["error"]
    assert found[-1]["error"]["code"] == "step_failed"
    assert "[DONE]" not in found
    chunks = found[:-1]
    assert len(chunks) >= 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(chunks)
    assert again[-1] == "[DONE]"


async def test_the_official_client_raises_its_errors_for_failures(serve: Any) -> None:
    async with serve(failing(skip=5)) as served:
        client = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="x", max_retries=0, http_client=served.client
        )
        asked: Any = {"model": "default", "prompt": prompt(guilty=True), "max_tokens": 30}
        stream = await client.completions.create(**asked, stream=True)
        with pytest.raises(openai.APIError, match="on fire") as caught:
            _ = [chunk async for chunk in stream]
        assert caught.value.code == "step_failed"
        with pytest.raises(openai.InternalServerError, match="on fire"):
            await client.completions.create(**asked)


async def test_the_models_failures_are_in_the_log(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(failing()) as served:
        with caplog.at_level(logging.ERROR, logger="treadle.server"):
            for stream in (False, True):
                await served.complete(prompt(guilty=True), max_tokens=5, stream=stream)
            await served.complete(prompt(guilty=False), max_tokens=0)
    assert len(caplog.records) == 2
    assert all("the device is on fire" in record.getMessage() for record in caplog.records)


async def test_one_failed_answer_fails_a_request_of_several(serve: Any, events: Any) -> None:
    prompts = [prompt(guilty=False), prompt(guilty=True)]
    async with serve(failing()) as served:
        assert (await served.complete(prompts, max_tokens=5)).status_code == 500
        found = events(await served.complete(prompts, max_tokens=5, stream=True))
        assert found[-1]["error"]["code"] == "step_failed"
        await served.until_idle()


async def test_an_abort_by_somebody_else_is_no_finish_reason(
    serve: Any, visitor: Any, events: Any
) -> None:
    def slowly(tokens: Sequence[int]) -> int:
        time.sleep(0.005)
        return 65

    observer = RecordingObserver()
    async with serve(ScriptedRunner(slowly), observers=[observer]) as served:
        body = {"prompt": "x", "max_tokens": 10_000, "ignore_eos": True}
        streams = visitor(served.app, COMPLETION_PATH, {**body, "stream": True})
        whole = visitor(served.app, COMPLETION_PATH, body)
        async with anyio.create_task_group() as group:
            group.start_soon(streams.visit)
            group.start_soon(whole.visit)
            await streams.until(lambda: streams.text.count("data: ") > 3)
            assert len(observer.requests) == 2
            for request_id in observer.requests:
                assert await served.engine.abort(request_id)
    assert whole.messages[0]["status"] == 503
    assert '"abort"' not in streams.text
    assert "[DONE]" not in streams.text
    assert '"engine_closed"' in streams.text.split("data: ")[-1]


async def test_whoever_stops_the_server_can_end_what_runs(serve: Any, visitor: Any) -> None:
    def slowly(tokens: Sequence[int]) -> int:
        time.sleep(0.005)
        return 65

    async with serve(ScriptedRunner(slowly)) as served:
        body = {"prompt": ["x", "y"], "max_tokens": 10_000, "stream": True}
        visit = visitor(served.app, COMPLETION_PATH, body)
        async with anyio.create_task_group() as group:
            group.start_soon(visit.visit)
            await visit.until(lambda: visit.text.count("data: ") > 3)
            await served.app.state.dispatcher.abort_all()
        await served.until_idle()
    assert '"engine_closed"' in visit.text.split("data: ")[-1]


async def test_a_surprise_is_logged_with_its_trace_and_says_nothing_to_the_client(
    serve: Any, tokenizer_type: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(tokenizer_type):
        def render_chat(self, *messages: Any, **template_args: Any) -> str:
            raise LookupError("secret/path/of/the/server")

    async with serve(tokenizer=Broken()) as served:
        with caplog.at_level(logging.ERROR, logger="treadle.server"):
            response = await served.chat(stream=True)
        assert (await served.complete()).status_code == 200
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal")
    assert "secret" not in response.text
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "secret/path" in str(record.exc_info[1])


async def test_a_surprise_in_a_stream_ends_it_with_an_error_event(
    serve: Any, events: Any, tokenizer_type: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(tokenizer_type):
        def token_text(self, token: int) -> str:
            raise LookupError("secret/path/of/the/server")

    async with serve(tokenizer=Broken()) as served:
        with caplog.at_level(logging.ERROR, logger="treadle.server"):
            found = events(await served.chat(stream=True, logprobs=True))
        await served.until_idle()
    assert found[-1]["error"]["code"] == "internal"
    assert "secret" not in str(found)
    assert len(caplog.records) == 1
