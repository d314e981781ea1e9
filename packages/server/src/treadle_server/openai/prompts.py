"""From a chat to the prompt that the engine gets: the same for requests and for warm prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from treadle_server.errors import ChatRefused
from treadle_server.openai.boundaries import PLACEHOLDERS, common, find_boundaries
from treadle_server.openai.messages import encode, render, template_messages
from treadle_server.openai.schema import ChatRequest
from treadle_server.serving import Serving


class Prompt(Struct, frozen=True, kw_only=True):
    """A rendered chat.

    Attributes:
        tokens: Its token ids.
        boundaries: Numbers of them after which other chats may go on differently, where the engine
            has a use for that.
    """

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()


def template_arguments(serving: Serving, wire: ChatRequest) -> dict[str, Any]:
    """What the template gets beside the messages: the chat's own win."""
    defaults = serving.config.defaults.default_chat_template_kwargs
    return {**defaults, **(wire.chat_template_kwargs or {})}


async def chat_prompt(serving: Serving, wire: ChatRequest) -> Prompt:
    """The prompt of a chat that was checked.

    Raises:
        InvalidRequest: A message has content that is not offered, or the prompt is too long.
        ChatRefused: The model's template refuses the chat.
    """
    tokenizer, arguments = serving.tokenizer, template_arguments(serving, wire)
    rendered = await serving.text_work(lambda: render(tokenizer, wire, arguments))
    tokens = serving.check_size("messages", rendered)
    if not serving.keeps_checkpoints:
        return Prompt(tokens=tokens)

    def render_other(messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        return encode(tokenizer, messages, wire, arguments)

    messages = template_messages(wire)
    boundaries = await serving.text_work(lambda: find_boundaries(messages, tokens, render_other))
    return Prompt(tokens=tokens, boundaries=boundaries)


async def warm_prompt(serving: Serving, wire: ChatRequest) -> Prompt:
    """What is worth computing of a chat before anybody asks for it.

    A chat that ends with a question is a prompt like any other. One that does not is the beginning
    of chats: what they share with each other is left of it.

    Raises:
        InvalidRequest: As :func:`chat_prompt`.
        ChatRefused: The chats that begin like this have nothing in common.
    """
    messages = template_messages(wire)
    if messages[-1]["role"] in ("user", "tool"):
        return await chat_prompt(serving, wire)
    tokenizer, arguments = serving.tokenizer, template_arguments(serving, wire)

    def render_shared() -> tuple[int, ...]:
        one, other = (
            encode(tokenizer, [*messages, {"role": "user", "content": said}], wire, arguments)
            for said in PLACEHOLDERS
        )
        return tuple(one[: common(one, other)])

    tokens = serving.check_size("messages", await serving.text_work(render_shared))
    if not tokens:
        raise ChatRefused("messages", f"{len(messages)} messages", "a beginning that chats share")
    return Prompt(tokens=tokens)
