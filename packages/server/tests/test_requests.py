"""What a request may say, and how it is told what it may not."""

import json
import threading
from typing import Any

import pytest
from msgspec.structs import fields
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from treadle_core import EngineConfig, InvalidRequest
from treadle_core.testing.scripted import ScriptedRunner
from treadle_server.openai.schema import CHAT, COMPLETION, ChatRequest, CompletionRequest
from treadle_server.settings import RequestDefaults, ServeConfig
from treadle_server.validation import decode

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def names(struct: type) -> set[str]:
    return {field.name for field in fields(struct)}


def test_every_field_that_openai_documents_is_accounted_for() -> None:
    chat = set(chat_create_params.CompletionCreateParamsBase.__annotations__)
    assert chat - names(ChatRequest) == set()
    plain = set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert plain - names(CompletionRequest) == set()


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "messages", "required"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role", "'king'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "None"),
        ({"messages": [{"role": "user", "content": "", "x": 1}]}, "messages[0].x", "know"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", "tool_calls"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id", "required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
            "messages[0].content[0].type",
            "'smell'",
        ),
        (
            {
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[]"}}],
                    },
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
            "JSON object",
        ),
        ({"messages": HI, "tempratur": 1}, "tempratur", "does not know"),
        ({"messages": HI, "stream_options": {"x": 1}, "stream": True}, "stream_options.x", "know"),
        ({"messages": HI, "stream_options": {}}, "stream_options", "stream"),
        ({"messages": HI, "temperature": "x"}, "temperature", "'x'"),
        ({"messages": HI, "temperature": True}, "temperature", "True"),
        ({"messages": HI, "temperature": -0.1}, "temperature", "-0.1"),
        ({"messages": HI, "top_p": 5}, "top_p", "5"),
        ({"messages": HI, "top_p": 0}, "top_p", "above 0"),
        ({"messages": HI, "min_p": 2}, "min_p", "2"),
        ({"messages": HI, "top_k": -1}, "top_k", "-1"),
        ({"messages": HI, "top_k": 1.5}, "top_k", "1.5"),
        ({"messages": HI, "repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"messages": HI, "presence_penalty": 2.1}, "presence_penalty", "2.1"),
        ({"messages": HI, "frequency_penalty": -3}, "frequency_penalty", "-3"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens", "1 to 32768"),
        ({"messages": HI, "max_tokens": -1}, "max_tokens", "-1"),
        ({"messages": HI, "max_tokens": 32769}, "max_tokens", "32768"),
        ({"messages": HI, "max_completion_tokens": 32769}, "max_completion_tokens", "32768"),
        (
            {"messages": HI, "max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens",
            "max_completion_tokens (4)",
        ),
        ({"messages": HI, "min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens (3)"),
        ({"messages": HI, "n": 0}, "n", "0"),
        ({"messages": HI, "n": 129}, "n", "129"),
        ({"messages": HI, "n": 10**30}, "n", "1024"),
        ({"messages": HI, "seed": 2**70}, "seed", str(2**70)),
        ({"messages": HI, "seed": 1.5}, "seed", "1.5"),
        ({"messages": HI, "stop": 5}, "stop", "5"),
        ({"messages": HI, "stop": ["a"] * 17}, "stop", "16"),
        ({"messages": HI, "stop": ["a", ""]}, "stop", "non-empty"),
        ({"messages": HI, "stop": ["a", 1]}, "stop[1]", "1"),
        ({"messages": HI, "stop_token_ids": [259]}, "stop_token_ids", "259"),
        ({"messages": HI, "logit_bias": {"1": None}}, "logit_bias[...]", "float"),
        ({"messages": HI, "logit_bias": {"1": True}}, "logit_bias[...]", "float"),
        ({"messages": HI, "logit_bias": {"1": "x"}}, "logit_bias[...]", "float"),
        ({"messages": HI, "logit_bias": {"1": 101}}, "logit_bias[1]", "101"),
        ({"messages": HI, "logit_bias": {"abc": 1}}, "logit_bias", "'abc'"),
        ({"messages": HI, "logit_bias": {"-1": 1}}, "logit_bias", "'-1'"),
        ({"messages": HI, "logit_bias": {"1_0": 1}}, "logit_bias", "'1_0'"),
        ({"messages": HI, "logit_bias": {"999999": 1}}, "logit_bias", "999999"),
        ({"messages": HI, "logit_bias": {"9" * 30: 1}}, "logit_bias", "9999"),
        ({"messages": HI, "top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"messages": HI, "logprobs": 5}, "logprobs", "5"),
        ({"messages": HI, "timeout": 0}, "timeout", "above 0"),
        ({"messages": HI, "priority": 1}, "priority", "--policy priority"),
        ({"messages": HI, "chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs", "tok"),
        ({"messages": HI, "chat_template_kwargs": {"chat_template": ""}}, None, "chat_template"),
        ({"messages": HI, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "self"),
        ({"messages": HI, "model": 5}, "model", "5"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
async def test_a_bad_chat_is_a_400_that_names_the_field(
    serve: Any, body: dict[str, Any], param: str | None, says: str
) -> None:
    async with serve() as served:
        response = await served.client.post(CHAT_PATH, json=body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert param is None or error["param"] == param
        assert says in error["message"]
        assert (await served.chat()).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x", "format": "wav"}),
        ("function_call", {"name": "f"}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("moderation", {}),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("response_format", {"type": "json_object"}),
        ("store", True),
        ("stream_options", {"include_obfuscation": True}),
        ("tool_choice", "required"),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("verbosity", "low"),
        ("web_search_options", {}),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(serve: Any, field: str, value: Any) -> None:
    async with serve() as served:
        response = await served.chat(stream=True, **{field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "unsupported_value"
    assert error["param"].startswith(field)
    assert "does not offer" in error["message"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.0.1/"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "file", "file": {}},
        {"type": "refusal", "refusal": "no"},
    ],
    ids=lambda part: part["type"],
)
async def test_parts_that_are_not_text_are_refused_where_they_stand(serve: Any, part: Any) -> None:
    content = [{"type": "text", "text": "look:"}, part]
    async with serve() as served:
        response = await served.client.post(
            CHAT_PATH, json={"messages": [{"role": "user", "content": content}]}
        )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[1]"


async def test_values_that_ask_for_nothing_are_accepted(serve: Any) -> None:
    asking_nothing: dict[str, Any] = {
        "audio": None,
        "function_call": "none",
        "functions": [],
        "logprobs": False,
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "response_format": {"type": "text"},
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "user": "u",
        "verbosity": "medium",
        "temperature": None,
        "stop": None,
        "n": None,
        "max_tokens": None,
        "stream": None,
        "stream_options": None,
    }
    async with serve("yes") as served:
        response = await served.chat(**asking_nothing)
        assert response.status_code == 200, response.text
        tools = [{"type": "function", "function": {"name": "f"}}]
        response = await served.chat(tools=tools, tool_choice="none")
        assert response.json()["choices"][0]["message"]["content"] == "yes"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'{"messages": "\xff"}',
        b'{"temperature": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"metadata": ' + b"[" * 100_000,
    ],
    ids=["empty", "cut", "no UTF-8", "no UTF-8 inside", "NaN", "half a pair", "deep"],
)
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
async def test_a_body_that_is_no_json_is_a_400(serve: Any, path: str, body: bytes) -> None:
    async with serve() as served:
        response = await served.client.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_number_beyond_a_double_is_told_so() -> None:
    with pytest.raises(InvalidRequest, match=r"temperature.*out of range"):
        decode(CHAT, b'{"messages": [], "temperature": 1e999}')


@pytest.mark.parametrize("body", ["null", "[]", "5", '"x"'])
def test_a_body_that_is_no_object_is_told_so(body: str) -> None:
    with pytest.raises(InvalidRequest, match=r"body.*object"):
        decode(COMPLETION, body.encode())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], 1]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [259]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "max_completion_tokens": 1}, "max_completion_tokens"),
        ({}, "prompt"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
async def test_a_bad_completion_is_a_400_that_names_the_field(
    serve: Any, fields: dict[str, Any], param: str
) -> None:
    async with serve() as served:
        response = await served.client.post(COMPLETION_PATH, json=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_a_chat_that_the_template_refuses_is_a_422(serve: Any) -> None:
    body = {"messages": [{"role": "assistant", "content": "I begin."}]}
    async with serve() as served:
        for stream in (False, True):
            response = await served.client.post(CHAT_PATH, json={**body, "stream": stream})
            assert response.status_code == 422
            assert response.json()["error"]["code"] == "chat_refused"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [99, 100, 101])
async def test_a_prompt_that_is_too_long_is_a_400_before_the_stream_begins(
    serve: Any, stream: bool, size: int
) -> None:
    config = ServeConfig(engine=EngineConfig(context_length=100))
    async with serve(config=config) as served:
        response = await served.complete([7] * (size - 1) + [257], stream=stream, max_tokens=50)
        if size < 100:
            assert response.status_code == 200
            return
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(size) in error["message"]
    assert "100" in error["message"]


async def test_max_tokens_is_cut_to_what_the_context_leaves(serve: Any) -> None:
    config = ServeConfig(engine=EngineConfig(context_length=100))
    async with serve("x" * 200, config=config) as served:
        reply = (await served.complete("a" * 89, max_tokens=50)).json()
    assert reply["usage"] == {
        "prompt_tokens": 90,
        "completion_tokens": 10,
        "total_tokens": 100,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert reply["choices"][0]["finish_reason"] == "length"


async def params_of(serve: Any, config: ServeConfig, **fields: Any) -> Any:
    """What reaches the engine of a chat's sampling."""
    runner = ScriptedRunner(lambda tokens: 258)
    async with serve(runner, config=config) as served:
        response = await served.chat(**fields)
        assert response.status_code == 200, response.text
    return next(setup for plan in runner.plans for setup in plan.joins)


async def test_without_a_word_sampling_is_openais(serve: Any) -> None:
    params = (await params_of(serve, ServeConfig())).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.repetition_penalty) == (0.0, 1.0)
    assert params.max_tokens == 32768
    assert params.seed is None


async def test_the_servers_defaults_come_before_openais_and_the_request_before_both(
    serve: Any,
) -> None:
    config = ServeConfig(
        defaults=RequestDefaults(
            max_tokens=77,
            default_temperature=0.5,
            default_top_p=0.6,
            default_top_k=7,
            default_min_p=0.1,
            default_presence_penalty=0.2,
            default_repetition_penalty=1.3,
        )
    )
    said: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 5,
    }
    params = (await params_of(serve, config)).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.6, 7, 0.1)
    assert (params.presence_penalty, params.repetition_penalty) == (0.2, 1.3)
    assert params.max_tokens == 77
    params = (await params_of(serve, config, **said)).params
    assert {name: getattr(params, name) for name in said} == said


async def test_every_sampling_field_of_a_request_reaches_the_engine(serve: Any) -> None:
    said: dict[str, Any] = {
        "max_completion_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.3,
        "top_p": 0.4,
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.5,
        "logit_bias": {"65": -100, "66": 1.5},
        "seed": 42,
        "stop": ["END", "stop"],
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
    }
    params = (await params_of(serve, ServeConfig(), **said)).params
    expected = {**said, "logit_bias": {65: -100.0, 66: 1.5}, "stop": ("END", "stop")}
    expected["stop_token_ids"] = (3, 4)
    expected["max_tokens"] = expected.pop("max_completion_tokens")
    assert {name: getattr(params, name) for name in expected} == expected


async def test_one_stop_string_needs_no_list(serve: Any) -> None:
    async with serve("one two three") as served:
        reply = (await served.chat(stop="two")).json()
    assert reply["choices"][0]["message"]["content"] == "one "
    assert reply["choices"][0]["finish_reason"] == "stop"


async def test_the_cap_also_bounds_the_default(serve: Any) -> None:
    config = ServeConfig(defaults=RequestDefaults(max_request_tokens=10))
    setup = await params_of(serve, config)
    assert setup.params.max_tokens == 10


async def test_roles_and_parts_reach_the_template_as_it_knows_them(serve: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}]},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}] * 2},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
    ]
    runner = ScriptedRunner(lambda tokens: 258)
    async with serve(runner) as served:
        response = await served.client.post(CHAT_PATH, json={"messages": messages})
    assert response.status_code == 200, response.text
    setup = next(setup for plan in runner.plans for setup in plan.joins)
    rendered = bytes(setup.prompt[:-1]).decode().split("\n")
    function = {"name": "f", "arguments": {"a": 1}}
    assert [json.loads(line) for line in rendered[:-1]] == [
        {"role": "system", "content": "be "},
        {"role": "user", "content": "aa", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
    ]
    assert rendered[-1] == "assistant:"


async def test_rendering_and_tokenising_stay_off_the_loop_and_off_the_owner_thread(
    serve: Any, tokenizer_type: Any
) -> None:
    threads: list[threading.Thread] = []

    class Traced(tokenizer_type):
        def render_chat(self, *messages: Any, **template_args: Any) -> str:
            threads.append(threading.current_thread())
            return super().render_chat(*messages, **template_args)

        def encode(self, text: str) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode(text)

    async with serve(tokenizer=Traced()) as served:
        await served.chat()
        await served.complete(["a", "b"])
    assert len(threads) == 3
    assert threading.main_thread() not in threads
    assert "treadle-engine" not in {thread.name for thread in threads}


async def test_template_arguments_of_the_request_win_over_the_servers(serve: Any) -> None:
    defaults = RequestDefaults(default_chat_template_kwargs={"thinking": True, "style": "dry"})
    setup = await params_of(
        serve,
        ServeConfig(defaults=defaults),
        chat_template_kwargs={"thinking": False},
        add_generation_prompt=False,
    )
    rendered = bytes(setup.prompt[:-1]).decode().split("\n")
    assert json.loads(rendered[-1]) == {"thinking": False, "style": "dry"}


async def test_priorities_are_taken_where_the_queue_has_them(serve: Any) -> None:
    config = ServeConfig(engine=EngineConfig(policy="priority"))
    async with serve(config=config) as served:
        assert (await served.chat(priority=-5)).status_code == 200
