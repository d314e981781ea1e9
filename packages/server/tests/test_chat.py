"""Chat completions: whole and streamed, chunk by chunk."""

import time
from typing import Any

import pytest

from treadle_server.settings import HttpConfig, ServeConfig

CHAT_PATH = "/v1/chat/completions"


def chunks_of(events: Any, response: Any) -> list[Any]:
    """The chunks of a stream that ended well."""
    found = events(response)
    assert found[-1] == "[DONE]"
    return found[:-1]


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


async def test_a_whole_answer_has_openais_shape(serve: Any) -> None:
    async with serve("Hello.") as served:
        response = await served.chat(model="default")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    reply = response.json()
    assert reply.pop("id") == response.headers["x-request-id"]
    assert reply.pop("created") > 1_700_000_000
    prompt = len('{"content": "hi", "role": "user"}\nassistant:') + 1
    assert reply == {
        "object": "chat.completion",
        "model": "default",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": 7,
            "total_tokens": prompt + 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_stream_is_role_then_text_then_one_finish_then_done(
    serve: Any, events: Any
) -> None:
    async with serve("Hey") as served:
        response = await served.chat(stream=True)
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-cache"
    chunks = chunks_of(events, response)
    heads = [{key: chunk[key] for key in ("id", "object", "created", "model")} for chunk in chunks]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["object"] == "chat.completion.chunk"
    assert heads[0]["id"] == response.headers["x-request-id"]
    assert [chunk["choices"] for chunk in chunks] == [
        [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        *(
            [
                {
                    "index": 0,
                    "delta": {"content": letter},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ]
            for letter in "Hey"
        ),
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
    ]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 20])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_length_stop_counts_exactly(
    serve: Any, events: Any, stream: bool, max_tokens: int
) -> None:
    async with serve("x" * 100) as served:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        response = await served.chat(stream=stream, max_tokens=max_tokens, **options)
    if stream:
        chunks = chunks_of(events, response)
        assert text_of(chunks) == "x" * max_tokens
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        usage = chunks[-1]["usage"]
    else:
        assert response.json()["choices"][0]["finish_reason"] == "length"
        usage = response.json()["usage"]
    assert usage["completion_tokens"] == max_tokens


async def test_with_usage_the_last_chunk_has_it_and_no_choices(serve: Any, events: Any) -> None:
    async with serve("Hey") as served:
        response = await served.chat(stream=True, stream_options={"include_usage": True})
        whole = (await served.chat()).json()
    chunks = chunks_of(events, response)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
async def test_without_asking_there_is_no_usage_chunk(
    serve: Any, events: Any, options: Any
) -> None:
    async with serve("Hey") as served:
        chunks = chunks_of(events, await served.chat(stream=True, **options))
    assert all(chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("interval", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("Grüße, 世界! 👩‍👩‍👧 done", None),
        (b"cut \xf0\x9f\x91", None),
        ("one two END three", "END"),
        ("almost EN", "END"),
        ("", None),
    ],
)
async def test_joined_deltas_equal_the_whole_answer(
    serve: Any, events: Any, interval: int, text: Any, stop: str | None
) -> None:
    config = ServeConfig(http=HttpConfig(stream_interval=interval))
    async with serve(fixed(text), config=config) as served:
        whole = (await served.chat(stop=stop)).json()["choices"][0]["message"]["content"]
        chunks = chunks_of(events, await served.chat(stop=stop, stream=True))
    assert text_of(chunks) == whole
    expected = text.decode(errors="replace") if isinstance(text, bytes) else text
    assert whole == expected.partition(stop or "\0")[0]
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["stop"]
    tokens = len(expected.encode())
    assert len(chunks) <= 2 + -(-(tokens + 1) // interval) + 1


def fixed(text: Any) -> Any:
    said = text.encode() if isinstance(text, str) else text

    def script(tokens: Any) -> int:
        position = len(tokens) - list(tokens).index(257) - 1
        return said[position] if position < len(said) else 258

    return script


async def test_an_interval_gathers_tokens_and_drops_none(serve: Any, events: Any) -> None:
    config = ServeConfig(http=HttpConfig(stream_interval=4))
    async with serve("abcdefghij", config=config) as served:
        chunks = chunks_of(events, await served.chat(stream=True))
    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert pieces == ["", "abcd", "efgh", "ij", None]


async def test_each_of_n_answers_has_its_own_index_and_finish(serve: Any, events: Any) -> None:
    async with serve("ab") as served:
        whole = (await served.chat(n=3)).json()
        chunks = chunks_of(
            events,
            await served.chat(n=3, stream=True, stream_options={"include_usage": True}),
        )
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in whole["choices"]} == {"ab"}
    assert [text_of(chunks, index) for index in range(3)] == ["ab"] * 3
    finishes = [c["choices"][0]["index"] for c in chunks[:-1] if c["choices"][0]["finish_reason"]]
    assert sorted(finishes) == [0, 1, 2]
    roles = [c["choices"][0]["index"] for c in chunks[:-1] if "role" in c["choices"][0]["delta"]]
    assert roles == [0, 1, 2]
    # The prompt counts once, the answers each.
    assert whole["usage"]["completion_tokens"] == 9
    assert whole["usage"] == chunks[-1]["usage"]
    assert (
        whole["usage"]["prompt_tokens"] == len('{"content": "hi", "role": "user"}\nassistant:') + 1
    )


@pytest.mark.parametrize("interval", [1, 3])
async def test_logprobs_come_for_every_token(serve: Any, events: Any, interval: int) -> None:
    config = ServeConfig(http=HttpConfig(stream_interval=interval))
    async with serve(fixed("é!"), config=config) as served:
        whole = (await served.chat(logprobs=True, top_logprobs=2)).json()
        chunks = chunks_of(events, await served.chat(logprobs=True, top_logprobs=2, stream=True))
    content = whole["choices"][0]["logprobs"]["content"]
    names = [entry["token"] for entry in content]
    assert names == ["token_id:195", "token_id:169", "!", "<end>"]
    assert [entry["bytes"] for entry in content] == [None, None, [33], list(b"<end>")]
    assert len(content) == whole["usage"]["completion_tokens"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    streamed = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content


async def test_logprobs_without_alternatives_have_an_empty_list(serve: Any) -> None:
    async with serve("a") as served:
        reply = (await served.chat(logprobs=True)).json()
    assert [e["top_logprobs"] for e in reply["choices"][0]["logprobs"]["content"]] == [[], []]


async def test_a_quiet_stream_is_kept_alive_with_comments(serve: Any, visitor: Any) -> None:
    config = ServeConfig(http=HttpConfig(heartbeat_seconds=0.05))
    async with serve(slow_start(0.3), config=config) as served:
        visit = visitor(
            served.app, CHAT_PATH, {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        )
        await visit.visit()
    assert 2 <= visit.text.count(": still working\n\n") <= 8
    assert visit.text.endswith("data: [DONE]\n\n")
    # Comments stand between events, never inside one.
    assert all(block.startswith((":", "data: ")) for block in visit.text.strip().split("\n\n"))


def slow_start(seconds: float) -> Any:
    def script(tokens: Any) -> int:
        if tokens[-1] == 257:
            time.sleep(seconds)
            return 65
        return 258

    return script


async def test_two_applications_do_not_know_each_other(serve: Any) -> None:
    one = ServeConfig(http=HttpConfig(served_model_name=("one",), api_key="k1"))
    two = ServeConfig(http=HttpConfig(served_model_name=("two",)))
    async with (
        serve("1", config=one, headers={"x-api-key": "k1"}) as first,
        serve("2", config=two) as second,
    ):
        assert (await first.chat()).json()["choices"][0]["message"]["content"] == "1"
        assert (await second.chat()).json()["choices"][0]["message"]["content"] == "2"
        assert (await first.chat(model="two")).status_code == 404
        assert (await second.chat(model="two")).status_code == 200


async def test_models_are_known_by_any_of_their_names(serve: Any) -> None:
    config = ServeConfig(http=HttpConfig(served_model_name=("org/big", "small")))
    async with serve(config=config) as served:
        for asked, told in [("org/big", "org/big"), ("small", "small"), ("default", "org/big")]:
            reply = await served.chat(model=asked)
            assert (reply.status_code, reply.json()["model"]) == (200, told)
        for stream in (False, True):
            missing = await served.chat(model="gpt-5", stream=stream)
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "model_not_found"
            assert "org/big" in missing.json()["error"]["message"]
        listed = (await served.client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["org/big", "small"]
        assert listed["object"] == "list"
        card = (await served.client.get("/v1/models/org/big")).json()
        assert (card["id"], card["object"], card["context_length"]) == ("org/big", "model", 32768)
        assert (await served.client.get("/v1/models/other")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/models/", 405, "method_not_allowed"),
        ("GET", CHAT_PATH, 405, "method_not_allowed"),
        ("GET", "/health/", 404, "not_found"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_wrong_paths_and_methods_have_openais_errors_too(
    serve: Any, method: str, path: str, status: int, code: str
) -> None:
    async with serve() as served:
        response = await served.client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert path in response.json()["error"]["message"]
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/octet-stream"])
async def test_json_is_read_whatever_it_is_called(serve: Any, kind: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    async with serve() as served:
        response = await served.client.post(CHAT_PATH, content=body, headers={"content-type": kind})
    assert response.status_code == 200
