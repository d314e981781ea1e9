"""From a chat to the prompt that the engine gets: the same for requests and for warm prompts."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from treadle_core import InvalidRequest
from treadle_core.prefix import MediaSpan
from treadle_server.errors import ChatRefused, NotOffered
from treadle_server.media import MediaInput, NoMedia
from treadle_server.openai.boundaries import PLACEHOLDERS, common, find_boundaries, moved
from treadle_server.openai.messages import (
    KIND_NAMES,
    chat_too_long,
    encode,
    media_parts,
    members,
    render,
    template_messages,
    write,
)
from treadle_server.openai.schema import ChatRequest, MediaPart
from treadle_server.serving import Serving


class Prompt(Struct, frozen=True, kw_only=True):
    """A rendered chat.

    Attributes:
        tokens: Its token ids.
        boundaries: Numbers of them after which other chats may go on differently, where the engine
            has a use for that.
        media: Where media stand in it.
        attachment: What the model is given besides token ids.
    """

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    attachment: Any = None


def template_arguments(serving: Serving, wire: ChatRequest) -> dict[str, Any]:
    """What the template gets beside the messages: the chat's own win."""
    defaults = serving.config.defaults.default_chat_template_kwargs
    return {**defaults, **(wire.chat_template_kwargs or {})}


async def chat_prompt(serving: Serving, wire: ChatRequest, held: AsyncExitStack) -> Prompt:
    """The prompt of a chat that was checked.

    Args:
        serving: The engine and its settings.
        wire: The chat.
        held: To be closed when the prompt is needed no more.

    Raises:
        InvalidRequest: A message has content that is not offered, or the prompt is too long.
        ChatRefused: The model's template refuses the chat.
    """
    parts = media_parts(wire)
    if parts:
        return await media_prompt(serving, wire, parts, held)
    tokenizer, arguments = serving.prompt_tokenizer, template_arguments(serving, wire)
    rendered = await serving.text_work(lambda: render(tokenizer, wire, arguments))
    tokens = serving.check_size("messages", rendered)
    if not serving.keeps_checkpoints:
        return Prompt(tokens=tokens)

    def render_other(messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        return encode(tokenizer, messages, wire, arguments)

    messages = template_messages(wire)
    boundaries = await serving.text_work(lambda: find_boundaries(messages, tokens, render_other))
    return Prompt(tokens=tokens, boundaries=boundaries)


async def media_prompt(
    serving: Serving,
    wire: ChatRequest,
    parts: Sequence[tuple[str, MediaPart]],
    held: AsyncExitStack,
) -> Prompt:
    """The prompt of a chat with media, which are fetched last, when all else is in order.

    Raises:
        InvalidRequest: Media or other content cannot be used, or the prompt is too long.
        ChatRefused: The model's template refuses the chat.
    """
    media = check_media(serving, parts)
    tokenizer, arguments = serving.prompt_tokenizer, template_arguments(serving, wire)

    def prepare() -> tuple[str, list[Any]]:
        wanted = [media.parse(members(part, wire, where), where) for where, part in parts]
        messages = template_messages(wire)
        try:
            text = write(tokenizer, messages, wire, arguments)
        except InvalidRequest as error:
            raise ChatRefused(error.field, error.value, error.limit) from error
        with chat_too_long():
            tokenizer.check_rendered(text)
        return text, wanted

    text, wanted = await serving.text_work(prepare)
    names = [where for where, _ in parts]
    prompt = await held.enter_async_context(media.prepare(text, wanted, names))
    tokens = serving.check_size("messages", prompt.tokens)
    made = Prompt(tokens=tokens, media=prompt.media, attachment=prompt)
    if not serving.keeps_checkpoints:
        return made

    def render_other(messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        return encode(tokenizer, messages, wire, arguments)

    def find() -> tuple[int, ...]:
        # Media are left as they are written: nobody prepares them for chats that were not sent.
        written = tokenizer.encode_rendered(text)
        return moved(
            find_boundaries(template_messages(wire), written, render_other), written, tokens
        )

    return replace(made, boundaries=await serving.text_work(find))


def check_media(serving: Serving, parts: Sequence[tuple[str, MediaPart]]) -> MediaInput:
    """Who reads a chat's media.

    Raises:
        NotOffered: Nobody does, or not all of their kinds.
    """
    media = serving.media
    for where, part in parts:
        if isinstance(media, NoMedia):
            raise NotOffered(where, f"{KIND_NAMES[part.kind]}: {media.why}")
        if part.kind not in media.kinds:
            takes = " and ".join(KIND_NAMES[kind] for kind in sorted(media.kinds))
            raise NotOffered(where, f"{KIND_NAMES[part.kind]}: the model takes {takes}")
    assert isinstance(media, MediaInput), "there are no parts"
    return media


def refuse_media(wire: ChatRequest) -> None:
    """Refuse media where only text can be computed ahead.

    Raises:
        NotOffered: There are.
    """
    for where, part in media_parts(wire):
        raise NotOffered(where, f"{KIND_NAMES[part.kind]} in warm prompts")


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
        async with AsyncExitStack() as held:
            return await chat_prompt(serving, wire, held)
    tokenizer, arguments = serving.prompt_tokenizer, template_arguments(serving, wire)

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
