"""Reuse of prompts, as clients of a real process see it."""

import json
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from treadle_core.mlx_runtime.gguf import find_demo_model
from treadle_core.testing import zoo

from .conftest import needs_cache

SYSTEM: Any = {"role": "system", "content": "You are a weaver, and you answer in short sentences."}
QUESTION: Any = {"role": "user", "content": "What does a treadle move, and why is it pressed?"}
OTHER: Any = {"role": "user", "content": "How many shafts has a simple loom?"}

GREEDY: Any = {"model": "default", "temperature": 0, "max_tokens": 12}

BLOCK = 32
"""Prompts that other tests of the same server ask may begin alike, as the template does."""


@pytest.fixture(scope="module")
def client(checkpoint: Path, tmp_path_factory: Any, launch: Any) -> Generator[openai.OpenAI]:
    """A client of a tiny model that nobody else asks."""
    log = tmp_path_factory.mktemp("log") / "stderr"
    with launch(log, "--model", str(checkpoint)) as server, client_of(server) as made:
        yield made


@pytest.fixture
def demo(tmp_path_factory: pytest.TempPathFactory, launch: Any) -> Generator[openai.OpenAI]:
    """A client of SmolLM2."""
    if find_demo_model() is None:
        pytest.skip("the demo model is not installed")
    log = tmp_path_factory.mktemp("log") / "stderr"
    with launch(log) as server, client_of(server) as made:
        yield made


def client_of(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def cached(reply: Any) -> int:
    return reply.usage.prompt_tokens_details.cached_tokens


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, Any]:
    """Text and usage of a streamed chat."""
    chunks: list[Any] = list(
        client.chat.completions.create(
            **GREEDY, **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]), chunks[-1]


@needs_cache
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_real_model_answers_a_repeated_chat_alike(demo: openai.OpenAI) -> None:
    check_repeated(demo)


@needs_cache
def test_a_repeated_chat_is_reused_and_answered_alike(client: openai.OpenAI) -> None:
    check_repeated(client)


def check_repeated(client: openai.OpenAI) -> None:
    messages = [SYSTEM, QUESTION]
    first = client.chat.completions.create(**GREEDY, messages=messages)
    again = client.chat.completions.create(**GREEDY, messages=messages)
    text, last = streamed(client, messages=messages)
    assert first.usage is not None
    assert again.usage is not None
    assert cached(first) < BLOCK
    assert cached(again) >= 32
    assert cached(last) == cached(again) < first.usage.prompt_tokens
    assert first.usage.prompt_tokens == again.usage.prompt_tokens == last.usage.prompt_tokens
    assert again.choices[0].message.content == first.choices[0].message.content == text


@needs_cache
def test_the_next_turn_and_another_question_reuse_what_they_share(client: openai.OpenAI) -> None:
    system = {"role": "system", "content": "Count the threads. " * 20}
    first = client.chat.completions.create(**GREEDY, messages=[system, QUESTION])
    said: Any = {"role": "assistant", "content": first.choices[0].message.content}
    turn = client.chat.completions.create(**GREEDY, messages=[system, QUESTION, said, OTHER])
    branch = client.chat.completions.create(**GREEDY, messages=[system, OTHER])
    assert first.usage is not None
    assert cached(first) < BLOCK
    assert cached(turn) >= first.usage.prompt_tokens // 32 * 32
    assert 32 <= cached(branch) < cached(turn)


@needs_cache
def test_completions_report_what_they_reused(client: openai.OpenAI) -> None:
    prompts = ["one two three four " * 20, "five six seven eight " * 20]
    first = client.completions.create(**GREEDY, prompt=prompts)
    again = client.completions.create(**GREEDY, prompt=prompts)
    chunks: list[Any] = list(
        client.completions.create(
            **GREEDY, prompt=prompts, stream=True, stream_options={"include_usage": True}
        )
    )
    assert cached(first) < BLOCK
    assert cached(again) == cached(chunks[-1]) >= 2 * 64
    assert [c.text for c in again.choices] == [c.text for c in first.choices]


@needs_cache
def test_a_prompt_with_several_answers_is_counted_once(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Warp and weft. " * 20}, QUESTION]
    first = client.chat.completions.create(**GREEDY, messages=messages, n=3)
    again = client.chat.completions.create(**GREEDY, messages=messages, n=3)
    _, last = streamed(client, messages=messages, n=3)
    assert cached(first) < BLOCK
    assert again.usage is not None
    assert 64 <= cached(again) < again.usage.prompt_tokens
    assert cached(last) == cached(again)


@needs_cache
def test_tenants_do_not_share(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "A secret of ours. " * 20}, QUESTION]

    def ask(salt: str | None) -> int:
        more: Any = {} if salt is None else {"extra_body": {"cache_salt": salt}}
        return cached(client.chat.completions.create(**GREEDY, messages=messages, **more))

    assert [ask("one"), ask("two")] == [0, 0]
    assert ask(None) < BLOCK
    assert min(ask("one"), ask("two"), ask(None)) >= 64
    with pytest.raises(openai.BadRequestError) as caught:
        ask("")
    assert caught.value.param == "cache_salt"


@needs_cache
def test_completions_of_tenants_do_not_share(client: openai.OpenAI) -> None:
    def ask(salt: str) -> int:
        body = {"cache_salt": salt}
        return cached(client.completions.create(**GREEDY, prompt="a b c d " * 20, extra_body=body))

    assert [ask("one"), ask("two")] == [0, 0]
    assert ask("one") >= 64


def chat(url: str, *messages: Any, **fields: Any) -> dict[str, Any]:
    body = {**GREEDY, "messages": messages, **fields}
    response = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def cached_in(reply: dict[str, Any]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@needs_cache
@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_windowed_and_recurrent_models_reuse_up_to_the_ends_of_messages(
    family: str, tmp_path: Path, launch: Any
) -> None:
    model = zoo.save_checkpoint(family, tmp_path / family)
    with launch(tmp_path / "stderr", "--model", str(model)) as server:
        alone = chat(server.url, SYSTEM, OTHER, cache_salt="for nobody else")
        first = chat(server.url, SYSTEM, QUESTION)
        again = chat(server.url, SYSTEM, QUESTION)
        branch = chat(server.url, SYSTEM, OTHER)
        said = {"role": "assistant", "content": "The shafts."}
        turn = chat(server.url, SYSTEM, QUESTION, said, OTHER)
    assert cached_in(first) == 0
    assert cached_in(again) == again["usage"]["prompt_tokens"] - 1
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert cached_in(branch) >= len(SYSTEM["content"])
    assert cached_in(turn) >= len(SYSTEM["content"]) + len(QUESTION["content"])
    assert branch["choices"][0]["message"] == alone["choices"][0]["message"]


def test_a_disabled_cache_reuses_nothing(checkpoint: Path, tmp_path: Path, launch: Any) -> None:
    words = ["--model", str(checkpoint), "--disable-prefix-cache"]
    with launch(tmp_path / "stderr", *words) as server:
        assert [cached_in(chat(server.url, SYSTEM, QUESTION)) for _ in range(2)] == [0, 0]


@needs_cache
def test_what_is_on_disk_is_reused_by_the_next_process(
    checkpoint: Path, tmp_path: Path, launch: Any
) -> None:
    folder = tmp_path / "ssd"
    words = ["--model", str(checkpoint), "--ssd-cache-dir", str(folder), "--cache-memory-mb", "8"]
    replies: list[dict[str, Any]] = []
    for number in range(2):
        with launch(tmp_path / f"stderr{number}", *words) as server:
            replies.append(chat(server.url, SYSTEM, QUESTION))
            server.popen.terminate()
            assert server.popen.wait(20) == 0
    assert [cached_in(reply) >= 64 for reply in replies] == [False, True]
    assert replies[0]["choices"][0]["message"] == replies[1]["choices"][0]["message"]


@needs_cache
def test_quantised_states_are_reused(checkpoint: Path, tmp_path: Path, launch: Any) -> None:
    model = zoo.save_checkpoint("qwen3", tmp_path / "model", head_dim=32)
    words = ["--kv-cache-quantization", "--kv-cache-quantization-group-size", "32"]
    more = ["--kv-cache-min-quantize-tokens", "0", "--paged-cache-block-size", "16"]
    with launch(tmp_path / "stderr", "--model", str(model), *words, *more) as server:
        found = [cached_in(chat(server.url, SYSTEM, QUESTION)) for _ in range(2)]
    assert found[0] == 0
    assert found[1] >= 64


def refusal(*words: str, prelude: str = "") -> str:
    """What ``treadle serve`` says when it does not start."""
    program = (
        f"import sys; {prelude}\nfrom treadle_server.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "serve", "--port", "0", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert ended.stderr.startswith("treadle: ")
    assert ended.stderr.count("\n") == 1
    return ended.stderr


@needs_cache
def test_a_directory_that_cannot_be_used_is_refused_at_the_start(
    checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    said = refusal("--model", str(checkpoint), "--ssd-cache-dir", str(file))
    assert str(file) in said


@needs_cache
def test_quantisation_that_the_model_cannot_have_is_refused_at_the_start(checkpoint: Path) -> None:
    said = refusal("--model", str(checkpoint), "--kv-cache-quantization")
    assert "64" in said


@pytest.mark.parametrize(
    "words", [["--cache-memory-mb", "5"], ["--checkpoint-interval", "9"], ["--ssd-cache-dir", "d"]]
)
def test_a_cache_option_without_the_cache_package_is_refused(
    words: list[str], checkpoint: Path
) -> None:
    absent = json.dumps("treadle_cache")
    hide = (
        "import importlib.machinery as m; find = m.PathFinder.find_spec; "
        f"m.PathFinder.find_spec = lambda name, *a: None if name == {absent} else find(name, *a)"
    )
    said = refusal("--model", str(checkpoint), *words, prelude=hide)
    assert words[0].removeprefix("--").replace("-", "_") in said
    assert "treadle-server[cache]" in said


@needs_cache
def test_warm_prompts_are_computed_before_the_server_says_that_it_is_ready(
    checkpoint: Path, tmp_path: Path, launch: Any
) -> None:
    file = tmp_path / "warm.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in ([SYSTEM], [SYSTEM, QUESTION])))
    words = ["--model", str(checkpoint), "--warm-prompts", str(file)]
    with launch(tmp_path / "stderr", *words) as server:
        for _ in range(200):
            if httpx2.get(f"{server.url}/ready").status_code == 200:
                break
            time.sleep(0.05)
        assert cached_in(chat(server.url, SYSTEM, OTHER)) >= 64
        asked = chat(server.url, SYSTEM, QUESTION)
        assert cached_in(asked) >= asked["usage"]["prompt_tokens"] // 32 * 32 - 32
        assert httpx2.delete(f"{server.url}/v1/cache").json()["warming"] == 2
    assert "Traceback" not in (tmp_path / "stderr").read_text()


@needs_cache
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('[{"role": "user", "content": "hi"}]\n{"prompt": "hi"}', "line 2"),
        ('[[{"role": "user",\n"content": 3}]]', "line 1"),
        (f'[[{json.dumps(OTHER)}],\n[{{"role": "user", "content": "{"x" * 5000}"}}]]', "line 2"),
    ],
)
def test_a_bad_file_of_warm_prompts_is_refused_at_the_start(
    content: str, says: str, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "warm.json"
    file.write_text(content)
    said = refusal("--model", str(checkpoint), "--warm-prompts", str(file))
    assert f"{file}, {says}: " in said
