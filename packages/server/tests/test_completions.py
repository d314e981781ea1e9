"""Plain completions: one prompt or several, texts or tokens, whole or streamed."""

from collections import defaultdict
from typing import Any

import pytest

BEGIN, END = 257, 258


def echo(tokens: Any) -> int:
    """Says the prompt again, in capitals."""
    start = list(tokens).index(BEGIN)
    said = bytes(tokens[:start]).upper()
    position = len(tokens) - start - 1
    return said[position] if position < len(said) else END


def ids(text: str) -> list[int]:
    return [*text.encode(), BEGIN]


PROMPTS = [
    ("ab", ["AB"]),
    (["ab", "cde"], ["AB", "CDE"]),
    (ids("ab"), ["AB"]),
    ([ids("ab"), ids("cde"), ids("f")], ["AB", "CDE", "F"]),
]


@pytest.mark.parametrize(("prompt", "answers"), PROMPTS)
@pytest.mark.parametrize("n", [1, 2])
async def test_every_prompt_gets_its_answers_in_order(
    serve: Any, prompt: Any, answers: list[str], n: int
) -> None:
    async with serve(echo) as served:
        reply = (await served.complete(prompt, n=n, best_of=n)).json()
    assert reply["object"] == "text_completion"
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(answers) * n))
    assert [choice["text"] for choice in reply["choices"]] == [a for a in answers for _ in range(n)]
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
    lengths = [len(answer) + 1 for answer in answers]
    assert reply["usage"] == {
        "prompt_tokens": sum(lengths),
        "completion_tokens": sum(lengths) * n,
        "total_tokens": sum(lengths) * (n + 1),
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(("prompt", "answers"), PROMPTS)
@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_serves_every_prompt_too(
    serve: Any, events: Any, prompt: Any, answers: list[str], n: int
) -> None:
    async with serve(echo) as served:
        options = {"include_usage": True}
        response = await served.complete(prompt, n=n, stream=True, stream_options=options)
        whole = (await served.complete(prompt, n=n)).json()
    found = events(response)
    assert found[-1] == "[DONE]"
    usage, chunks = found[-2], found[:-2]
    texts: dict[int, str] = defaultdict(str)
    finishes: dict[int, list[str]] = defaultdict(list)
    for chunk in chunks:
        assert (chunk["object"], chunk["usage"]) == ("text_completion", None)
        (choice,) = chunk["choices"]
        assert not finishes[choice["index"]], "text after the end"
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finishes[choice["index"]].append(choice["finish_reason"])
    expected = [answer for answer in answers for _ in range(n)]
    assert dict(texts) == dict(enumerate(expected))
    assert dict(finishes) == {index: ["stop"] for index in range(len(expected))}
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])


async def test_logprobs_are_parallel_lists(serve: Any, events: Any) -> None:
    async with serve(echo) as served:
        whole = (await served.complete("aé", logprobs=2)).json()["choices"][0]
        found = events(await served.complete("aé", logprobs=2, stream=True))
    # Upper case of bytes leaves é alone.
    logprobs = whole["logprobs"]
    assert whole["text"] == "Aé"
    assert logprobs["tokens"] == ["A", "token_id:195", "token_id:169", "<end>"]
    assert logprobs["token_logprobs"] == [0.0] * 4
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 4
    assert all(
        name in top for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    )
    pieces = [c["choices"][0]["logprobs"] for c in found[:-1] if c["choices"][0]["logprobs"]]
    for field, values in logprobs.items():
        assert [value for piece in pieces for value in piece[field]] == values


async def test_logprobs_zero_tells_the_chosen_token_only(serve: Any) -> None:
    async with serve(echo) as served:
        choice = (await served.complete("a", logprobs=0)).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == [{"A": 0.0}, {"<end>": 0.0}]


async def test_without_logprobs_there_are_none(serve: Any) -> None:
    async with serve(echo) as served:
        choice = (await served.complete("a")).json()["choices"][0]
    assert choice["logprobs"] is None
