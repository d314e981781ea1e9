"""Real processes, real sockets, and OpenAI's own client."""

import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from treadle_core.mlx_runtime.gguf import find_demo_model

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(process: Any) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_official_client_lists_the_model(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny-llama"
    assert client.models.retrieve("tiny-llama").id == "tiny-llama"


def test_the_official_client_chats(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny-llama", messages=HI, max_tokens=12, temperature=0
    )
    (choice,) = reply.choices
    assert choice.finish_reason in ("length", "stop")
    assert reply.usage is not None
    # Bytes, and one token for each of the template's three marks.
    assert reply.usage.prompt_tokens == len("user\nhi\nassistant\n") + 3
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details is not None
    # Other tests may have asked the same server the same.
    assert 0 <= reply.usage.prompt_tokens_details.cached_tokens < reply.usage.prompt_tokens
    assert reply._request_id == reply.id


def test_the_official_client_streams_the_same_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="default", messages=HI, max_tokens=24, seed=5)
    chunks = list(
        client.chat.completions.create(
            model="default",
            messages=HI,
            max_tokens=24,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    finishes = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert finishes.count(None) == len(finishes) - 1
    assert finishes[-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    streamed, asked = chunks[-1].usage, whole.usage
    assert streamed is not None
    assert asked is not None
    # Both count alike; what was reused depends on who asked before.
    assert streamed.prompt_tokens == asked.prompt_tokens
    assert streamed.completion_tokens == asked.completion_tokens
    assert streamed.total_tokens == asked.total_tokens


def test_the_official_stream_helper_accepts_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="default",
        messages=HI,
        max_tokens=8,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"258": 100},
        extra_body={"min_tokens": 4},
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].finish_reason == "stop"


def test_the_official_client_gets_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="default", messages=HI, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert sum(2.71828**top.logprob for top in entry.top_logprobs) <= 1


def test_the_official_client_gets_n_answers(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="default", messages=HI, max_tokens=16, n=3, seed=1, temperature=1.5
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) == 3
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 48


def test_the_official_client_completes(client: openai.OpenAI) -> None:
    for prompt in ("ab", ["ab", "cd"], [97, 98], [[97, 98], [99]]):
        reply = client.completions.create(
            model="default", prompt=prompt, max_tokens=4, temperature=0, logprobs=1
        )
        expected = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        assert len(reply.choices) == expected
        for choice in reply.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs is not None
            assert len(choice.logprobs.token_logprobs) == 4
        chunks = client.completions.create(
            model="default", prompt=prompt, max_tokens=4, temperature=0, stream=True
        )
        texts = [""] * expected
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in reply.choices]


def test_logit_bias_and_penalties_change_the_answer(client: openai.OpenAI) -> None:
    def answer(**more: Any) -> list[str]:
        reply = client.completions.create(
            model="default", prompt="abc", max_tokens=20, temperature=0, logprobs=0, **more
        )
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        return logprobs.tokens

    plain = answer()
    assert answer(logit_bias={"65": 100}) == ["A"] * 20
    letter = next(token for token in plain if len(token) == 1)
    assert letter not in answer(logit_bias={str(ord(letter)): -100})
    assert len(set(answer(frequency_penalty=2.0, presence_penalty=2.0))) > len(set(plain))


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"model": "gpt-5"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        (
            {"messages": [{"role": "user", "content": "x" * 5000}]},
            openai.BadRequestError,
            "messages",
        ),
        ({"extra_body": {"guided_json": {}}}, openai.BadRequestError, "guided_json"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_raises_its_errors(
    client: openai.OpenAI, fields: dict[str, Any], error: Any, param: str, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "default", "messages": HI, "stream": stream, **fields}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**asked)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


async def test_the_official_asynchronous_client_streams(process: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{process.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="default", messages=HI, max_tokens=5, temperature=0, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"


def connect(url: str) -> socket.socket:
    address = httpx2.URL(url)
    return socket.create_connection((address.host, address.port))


def post(url: str, path: str, body: Any) -> socket.socket:
    """A connection on which a request was sent, and nothing read."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    connection = connect(url)
    connection.sendall(head.encode() + content)
    return connection


def reset(connection: socket.socket) -> None:
    """Close with a RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def tokens_of(client: openai.OpenAI) -> str:
    chunks = client.completions.create(
        model="default",
        prompt="the one who stays",
        max_tokens=100,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_others_leaving_in_every_way_do_not_change_a_stream(
    process: Any, client: openai.OpenAI
) -> None:
    alone = tokens_of(client)
    luck = random.Random(7)
    stop = threading.Event()

    def guest(number: int) -> int:
        visits = 0
        while not stop.is_set():
            body = {
                "prompt": "z" * luck.choice([3, 30, 300, 2000]),
                "max_tokens": 1000,
                "stream": luck.random() < 0.7,
                "n": luck.choice([1, 1, 2]),
            }
            connection = post(process.url, "/v1/completions", body)
            time.sleep(luck.random() * 0.2)
            visits += 1
            if luck.random() < 0.6:
                reset(connection)
            else:
                connection.close()
        return visits

    with ThreadPoolExecutor(12) as pool:
        guests = [pool.submit(guest, number) for number in range(12)]
        try:
            crowded = tokens_of(client)
        finally:
            stop.set()
        assert sum(each.result() for each in guests) >= 30
    assert crowded == alone
    assert process.popen.poll() is None
    assert tokens_of(client) == alone
    assert "Traceback" not in process.log.read_text()


def test_many_streams_at_once_each_get_their_own_answer(process: Any) -> None:
    def ask(number: int) -> str:
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none") as client:
            chunks = client.completions.create(
                model="default",
                prompt=f"number {number}",
                max_tokens=10 + 3 * number,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            return "".join(chunk.choices[0].text for chunk in chunks)

    alone = [ask(number) for number in range(10)]
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(ask, range(10)))
    assert together == alone


def test_a_body_that_is_too_large_is_answered_while_it_is_sent(process: Any) -> None:
    with connect(process.url) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{"
        )
        connection.settimeout(5)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_health_and_readiness_answer(process: Any) -> None:
    assert httpx2.get(f"{process.url}/health").json() == {"status": "ok", "reason": None}
    assert httpx2.get(f"{process.url}/ready").status_code == 200


def treadle(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MLX_DISABLE_COMPILE": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "treadle_server", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=env,
        **more,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("media", [[], ["--mllm"]])
def test_a_model_that_is_not_there_is_one_sentence_and_no_open_port(media: list[str]) -> None:
    if media and find_spec("treadle_multimodal") is None:
        pytest.skip("treadle-multimodal is not installed")
    port = free_port()
    start = time.monotonic()
    ended = treadle("serve", "nobody/nothing", "--port", str(port), "--offline", *media)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("treadle: cannot load nobody/nothing: it is not on this machine")
    assert ended.stderr.count("\n") == 1
    assert time.monotonic() - start < 30
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_server_cleanly(
    checkpoint: Path, tmp_path: Path, launch: Any, number: signal.Signals, status: int
) -> None:
    config = tmp_path / "treadle.toml"
    config.write_text(f"model = '{checkpoint}'\nserved-model-name = 'configured'\n")
    log = tmp_path / "stderr"
    with launch(log, "--config", str(config)) as server:
        models = httpx2.get(f"{server.url}/v1/models").json()["data"]
        assert [card["id"] for card in models] == ["configured"]
        server.popen.send_signal(number)
        assert server.popen.wait(20) == status
    assert "Traceback" not in log.read_text()


def test_run_answers_on_stdout_and_counts_on_stderr(checkpoint: Path) -> None:
    words = ["run", "-", "--model", str(checkpoint), "--raw", "--max-tokens", "5"]
    ended = treadle(*words, input="abc")
    assert ended.returncode == 0
    assert ended.stdout != ""
    assert ended.stderr.startswith("3 prompt tokens, 5 generated tokens, first token after ")


def test_run_ends_quietly_with_its_reader(checkpoint: Path) -> None:
    words = ["run", "x", "--model", str(checkpoint), "--max-tokens", "3000"]
    with subprocess.Popen(
        [sys.executable, "-m", "treadle_server", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "MLX_DISABLE_COMPILE": "1"},
    ) as popen:
        assert popen.stdout is not None
        assert popen.stderr is not None
        popen.stdout.read(1)
        popen.stdout.close()
        assert popen.stderr.read() == b""
        assert popen.wait(20) == 0


def test_run_is_interrupted_with_status_130(checkpoint: Path) -> None:
    words = ["run", "x", "--model", str(checkpoint), "--max-tokens", "4000"]
    with subprocess.Popen(
        [sys.executable, "-m", "treadle_server", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "MLX_DISABLE_COMPILE": "1"},
    ) as popen:
        assert popen.stdout is not None
        assert popen.stderr is not None
        popen.stdout.read(1)
        popen.send_signal(signal.SIGINT)
        assert popen.wait(20) == 130
        assert b"Traceback" not in popen.stderr.read()


def test_reading_options_imports_neither_mlx_nor_the_hubs_code() -> None:
    program = (
        "import sys; import treadle_server.cli; "
        "print([m for m in ('mlx', 'mlx_lm', 'huggingface_hub', 'transformers') "
        "if m in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_demo_model_knows_the_capital_of_france() -> None:
    if find_demo_model() is None:
        pytest.skip("the demo model is not installed")
    ended = treadle("run", "What is the capital of France?", "--max-tokens", "20")
    assert ended.returncode == 0, ended.stderr
    assert "Paris" in ended.stdout
