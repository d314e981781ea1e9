"""Boundaries: what a chat shares with those that go on differently, whatever its template does."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from treadle_core import InvalidRequest
from treadle_core.layers import Recurrent
from treadle_core.testing import SMALL_SPEC, RecordingStore, ScriptedRunner
from treadle_server.openai.boundaries import SHORTEST, common, find_boundaries, moved

from .conftest import ChatByteTokenizer, Fixed

Chat = Sequence[Mapping[str, Any]]

STATEFUL = replace(
    SMALL_SPEC, layers=(*SMALL_SPEC.layers, Recurrent(shapes=((1,),), dtypes=("float32",)))
)

SYSTEM = {"role": "system", "content": "You weave. " * 10}
FIRST = {"role": "user", "content": "What is a treadle, and what does it move?"}
ANSWER = {"role": "assistant", "content": "A pedal; it moves the shafts of a loom."}
SECOND = {"role": "user", "content": "And who invented it?"}


def chatml(messages: Chat) -> str:
    turns = [f"<{message['role']}>{message['content']}</>\n" for message in messages]
    return "".join([*turns, "<assistant>"])


def thinking(messages: Chat) -> str:
    """The generation prompt opens a thought; later turns do not contain it."""
    return chatml(messages) + "<think>\n"


def merging(messages: Chat) -> str:
    """The instructions stand in the first user's turn, and turns have to alternate."""
    first, rest = "", list(messages)
    if rest[0]["role"] == "system":
        first = rest.pop(0)["content"] + "\n\n"
    roles = [message["role"] for message in rest]
    if not rest or roles != [("user", "assistant")[n % 2] for n in range(len(rest))]:
        raise InvalidRequest("messages", roles, "alternating turns")
    return chatml([{**rest[0], "content": first + rest[0]["content"]}, *rest[1:]])


def at_the_end(messages: Chat) -> str:
    """The instructions stand before the last question."""
    *before, last = [message for message in messages if message["role"] != "system"]
    said = "".join(message["content"] for message in messages if message["role"] == "system")
    return chatml([*before, {**last, "content": said + last["content"]}])


def boundaries(
    template: Callable[[Chat], str], messages: Chat
) -> tuple[str, tuple[int, ...], list[Chat]]:
    """The prompt, one token per character, its boundaries, and what was rendered for them."""
    asked: list[Chat] = []

    def render(other: Chat) -> list[int]:
        asked.append(other)
        return [ord(letter) for letter in template(other)]

    prompt = template(messages)
    return prompt, find_boundaries(messages, [ord(c) for c in prompt], render), asked


def test_a_first_question_branches_after_the_instructions() -> None:
    prompt, found, asked = boundaries(thinking, [SYSTEM, FIRST])
    assert [prompt[:num] for num in found] == [
        chatml([SYSTEM]).removesuffix("<assistant>") + "<user>",
        chatml([SYSTEM, FIRST]),
    ]
    assert len(asked) == 2


def test_a_later_question_branches_before_itself_too() -> None:
    prompt, found, asked = boundaries(thinking, [SYSTEM, FIRST, ANSWER, SECOND])
    assert [prompt[:num] for num in found] == [
        chatml([SYSTEM]).removesuffix("<assistant>") + "<user>",
        chatml([SYSTEM, FIRST, ANSWER]).removesuffix("<assistant>") + "<user>",
        chatml([SYSTEM, FIRST, ANSWER, SECOND]),
    ]
    assert len(asked) == 3


def test_instructions_inside_the_first_turn_are_found() -> None:
    prompt, found, _ = boundaries(merging, [SYSTEM, FIRST, ANSWER, SECOND])
    assert [prompt[:num] for num in found] == [
        f"<user>{SYSTEM['content']}\n\n",
        prompt[: prompt.index(SECOND["content"])],
        prompt[:-1],
    ]


async def test_a_prompt_that_comes_again_is_reused_but_for_its_last_token(serve: Any) -> None:
    class Plain(ChatByteTokenizer):
        """The next turn continues this prompt: its begin token comes at once."""

        def render_chat(self, messages: Chat, **options: Any) -> str:
            return chatml(messages)

    runner = ScriptedRunner(Fixed("hm"), spec=STATEFUL)
    async with serve(runner, store=RecordingStore(), tokenizer=Plain()) as served:
        replies = [(await served.chat(messages=[FIRST])).json()["usage"] for _ in range(2)]
    prompt_tokens = replies[0]["prompt_tokens"]
    found = [usage["prompt_tokens_details"]["cached_tokens"] for usage in replies]
    assert found == [0, prompt_tokens - 1]


def test_instructions_before_the_last_question_are_shared_by_nobody() -> None:
    prompt, found, _ = boundaries(at_the_end, [SYSTEM, FIRST, ANSWER, SECOND])
    assert prompt[: found[-1]].endswith(f"{ANSWER['content']}</>\n<user>{SYSTEM['content']}")
    assert all(SYSTEM["content"] not in prompt[:num] for num in found[:-1])


@pytest.mark.parametrize("first", ["x marks the spot", "  xylophone", "y", "xy"])
def test_a_question_never_shares_its_beginning_with_its_stand_in(first: str) -> None:
    question = {"role": "user", "content": first}
    prompt, found, _ = boundaries(chatml, [SYSTEM, question])
    assert prompt[: found[0]].endswith("<user>")


def test_a_template_that_refuses_everything_else_gives_no_boundary() -> None:
    def stubborn(messages: Chat) -> str:
        if messages != [SYSTEM, FIRST]:
            raise InvalidRequest("messages", messages, "exactly one chat")
        return chatml(messages)

    assert boundaries(stubborn, [SYSTEM, FIRST])[1] == ()


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM],
        [FIRST],
        [ANSWER],
        [SYSTEM, SYSTEM, ANSWER, FIRST],
        [FIRST, ANSWER],
        [SYSTEM, FIRST, ANSWER, SYSTEM, SECOND, SECOND],
        [{"role": "tool", "content": "42"}],
        [{"role": "user", "content": ""}],
    ],
)
@pytest.mark.parametrize("template", [chatml, thinking, merging, at_the_end])
def test_boundaries_are_ascending_inside_the_prompt_and_shared(
    template: Callable[[Chat], str], messages: Chat
) -> None:
    try:
        prompt, found, asked = boundaries(template, messages)
    except (InvalidRequest, ValueError):
        return  # The chat itself cannot be rendered.
    assert list(found) == sorted(set(found))
    assert all(SHORTEST <= num < len(prompt) for num in found)
    assert len(asked) <= 3


def test_what_two_prompts_share_is_counted_in_tokens() -> None:
    assert common([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common([1, 2], [1, 2, 3]) == common([1, 2, 3], [1, 2]) == 2
    assert common([], [1]) == common([2], [1]) == 0


async def test_a_stateful_model_keeps_states_at_the_boundaries_of_a_chat(serve: Any) -> None:
    store = RecordingStore()
    async with serve(ScriptedRunner(Fixed("hm"), spec=STATEFUL), store=store) as served:
        assert (await served.chat(messages=[SYSTEM, FIRST])).status_code == 200
        kept = [len(tokens) for tokens in store.inserted]
        other = {"role": "user", "content": "Who else?"}
        reply = (await served.chat(messages=[SYSTEM, other])).json()
    instructions = json.dumps(SYSTEM, sort_keys=True) + '\n{"content": "'
    assert kept[0] == len(instructions)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == len(instructions)


async def test_where_states_can_be_cut_no_other_chat_is_rendered(
    serve: Any, tokenizer_type: Any
) -> None:
    class Counting(tokenizer_type):
        num_rendered = 0

        def render_chat(self, *args: Any, **options: Any) -> str:
            self.num_rendered += 1
            return super().render_chat(*args, **options)

    counted: list[int] = []
    for runner in (ScriptedRunner(Fixed("hm")), ScriptedRunner(Fixed("hm"), spec=STATEFUL)):
        tokenizer = Counting()
        async with serve(runner, store=RecordingStore(), tokenizer=tokenizer) as served:
            await served.chat(messages=[SYSTEM, FIRST, ANSWER, SECOND])
        counted.append(tokenizer.num_rendered)
    assert counted == [1, 4]


def test_boundaries_move_with_media_that_take_the_places_of_what_was_written() -> None:
    written = b"be brief.see <i> or <i>?answer.next"
    tokens = written.replace(b"<i>", b"(i i i i)")
    nums = [written.index(word) for word in (b"see", b" or", b"answer", b"next")]
    assert moved(nums, written, tokens) == tuple(
        tokens.index(word) for word in (b"see", b"answer", b"next")
    )
    assert moved(nums, written, written) == tuple(nums)
