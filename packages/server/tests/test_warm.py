"""Warm prompts: their file, and that they are computed while requests are served."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from treadle_core import PromptTooLong, TreadleError, Unsupported
from treadle_core.testing import RecordingStore, ScriptedRunner
from treadle_server.errors import BadWarmPrompt
from treadle_server.warm import WarmChat, parse, read_warm_prompts

from .conftest import Fixed

SYSTEM = {"role": "system", "content": "You weave. " * 10}
HI = {"role": "user", "content": "hi"}
CHAT = json.dumps([SYSTEM, HI])
OBJECT = json.dumps({"messages": [SYSTEM], "cache_salt": "s"})


def lines_of(content: str) -> list[tuple[int, int]]:
    """The line and the number of messages of each chat."""
    found = parse("f", content.encode())
    return [(chat.line, len(chat.wire.messages)) for chat in found]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", []),
        ("\n \n", []),
        (CHAT, [(1, 2)]),
        (OBJECT, [(1, 1)]),
        (f"{CHAT}\n\n{OBJECT}\n", [(1, 2), (3, 1)]),
        (f"\r\n{OBJECT}\r\n{CHAT}", [(2, 1), (3, 2)]),
        (f"[{CHAT},{OBJECT}]", [(1, 2), (1, 1)]),
        (f"[\n{CHAT},\n\n{CHAT}\n]", [(2, 2), (4, 2)]),
        (json.dumps([[SYSTEM, HI], {"messages": [HI]}], indent=1), [(2, 2), (12, 1)]),
        (json.dumps([SYSTEM, HI], indent=1), [(1, 2)]),
        (json.dumps({"messages": [HI]}, indent=1), [(1, 1)]),
    ],
)
def test_a_file_of_chats_is_read_in_every_form(
    content: str, expected: list[tuple[int, int]]
) -> None:
    assert lines_of(content) == expected


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ("{", 1, "JSON"),
        ("[\n[\n", 3, "JSON"),
        (f"[\n{CHAT},\n{{]", 3, "JSON"),
        (f"{CHAT}\n{CHAT}\n{{", 3, "JSON"),
        (f"{CHAT}\n3", 2, "object"),
        ('"hi"', 1, "object"),
        ("[]", 1, "at least one message"),
        (f"[\n{CHAT},\n[]]", 3, "at least one message"),
        (f"{CHAT}\n" + '{"messages": []}', 2, "at least one message"),
        (f"{CHAT}\n" + '{"messages": [], "x": 1}', 2, "x"),
        (f"[\n{CHAT},\n" + '{"prompt": "hi"}]', 3, "prompt"),
        ('[{"role": "king", "content": ""}]', 1, "king"),
        (f"{CHAT}\n" + '[{"role": "user", "content": [{"type": "image_url"}]}]', 2, "images"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', 1, "tool calls"),
        ('{"messages": [{"role": "user"}]}', 1, "content"),
    ],
)
def test_a_file_with_something_else_is_refused_with_its_line(
    content: str, line: int, says: str
) -> None:
    with pytest.raises(BadWarmPrompt, match=rf"f, line {line}: .*{says}"):
        list(parse("f", content.encode()))


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(BadWarmPrompt, match="line 1"):
        list(parse("f", b'[[{"role": "user", "content": "\xff"}]]'))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"nothing\.json"):
        read_warm_prompts(str(tmp_path / "nothing.json"))
    assert read_warm_prompts(None) == ()


def chats(*messages: Any) -> tuple[WarmChat, ...]:
    return tuple(parse("f", json.dumps(list(messages)).encode()))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(10):
        while True:
            if await condition():
                return
            await anyio.sleep(0.01)


async def until_ready(served: Any) -> None:
    async def ready() -> bool:
        return (await served.client.get("/ready")).status_code == 200

    await until(ready)


def cached(reply: Any) -> int:
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_request_that_begins_like_a_warm_prompt_reuses_it(serve: Any) -> None:
    store = RecordingStore()
    warm = chats([SYSTEM], [SYSTEM, {"role": "user", "content": "known"}])
    async with serve(store=store, warm=warm) as served:
        await until_ready(served)
        shared = json.dumps(SYSTEM, sort_keys=True) + '\n{"content": "'
        assert tuple(shared.encode()) in store.inserted
        assert cached(await served.chat(messages=[SYSTEM, HI])) >= len(shared)
        known = await served.chat(messages=[SYSTEM, {"role": "user", "content": "known"}])
        assert cached(known) == known.json()["usage"]["prompt_tokens"] - 1


async def test_requests_are_served_while_warm_prompts_are_computed(serve: Any) -> None:
    warm = chats(*[[{"role": "user", "content": f"{number}"}] for number in range(20)])
    runner = ScriptedRunner(Fixed("hm", seconds=0.02))
    async with serve(runner, store=RecordingStore(), warm=warm) as served:
        ready = await served.client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "warming")
        assert "of 20 warm prompts" in ready.json()["reason"]
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.chat()).status_code == 200
        assert (await served.client.get("/ready")).status_code == 503
        await until_ready(served)


async def test_a_clear_forgets_everything_and_warms_again(serve: Any) -> None:
    store = RecordingStore()
    async with serve(store=store, warm=chats([SYSTEM])) as served:
        await until_ready(served)
        asked = {"role": "user", "content": "something long and private " * 4}
        await served.chat(messages=[asked])
        num_warmed = len(store.inserted)
        for path in ("/v1/cache", "/v1/cache/prefix"):
            reply = await served.client.delete(path)
            assert (reply.status_code, reply.json()) == (200, {"cleared": True, "warming": 1})
            # It stays ready: requests are served as before, only slower for a while.
            assert (await served.client.get("/ready")).status_code == 200
        assert cached(await served.chat(messages=[asked])) <= len(b'{"content": "')

        async def warmed() -> bool:
            return store.inserted[0] in store.inserted[num_warmed:]

        await until(warmed)
        assert cached(await served.chat(messages=[SYSTEM, HI])) >= len(SYSTEM["content"])


async def test_a_warm_prompt_that_the_template_refuses_is_told_with_its_line(serve: Any) -> None:
    warm = tuple(
        parse(
            "f", b'[[{"role": "user", "content": "a"}],\n[{"role": "assistant", "content": "b"}]]'
        )
    )
    with pytest.raises(BadWarmPrompt, match=r"line 2: .*a user begins"):
        async with serve(store=RecordingStore(), warm=warm):
            pass


async def test_a_warm_prompt_that_is_too_long_is_told(serve: Any) -> None:
    with pytest.raises(TreadleError, match="line 1") as caught:
        async with serve(
            store=RecordingStore(), warm=chats([{"role": "user", "content": "x" * 40_000}])
        ):
            pass
    assert isinstance(caught.value.__cause__, PromptTooLong)
