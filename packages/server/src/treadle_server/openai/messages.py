"""From the messages of a chat to what a chat template takes."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, assert_never, cast

import msgspec

from treadle_core import InvalidRequest, PromptTooLong
from treadle_server.errors import ChatRefused, NotOffered
from treadle_server.openai.schema import (
    AssistantMessage,
    ChatRequest,
    Content,
    DeveloperMessage,
    FilePart,
    MediaPart,
    Message,
    Part,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from treadle_server.tokenizer import BoundedTokenizer

# Arguments that would change what rendering does, or replace the model's template by another.
RESERVED_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def check_chat(wire: ChatRequest) -> None:
    """Refuse what a chat asks for and nobody does here, and what no template can render.

    Raises:
        InvalidRequest: With the field.
    """
    if not wire.messages:
        raise InvalidRequest("messages", wire.messages, "at least one message")
    check_tools(wire)
    wanted = {
        "audio": wire.audio is not None,
        "moderation": wire.moderation is not None,
        "prediction": wire.prediction is not None,
        "reasoning_effort": wire.reasoning_effort is not None,
        "web_search_options": wire.web_search_options is not None,
        "modalities": wire.modalities not in (None, ["text"]),
        "response_format": wire.response_format not in (None, {"type": "text"}),
        "store": bool(wire.store),
        "verbosity": wire.verbosity not in (None, "medium"),
    }
    for field, asked in wanted.items():
        if asked:
            raise NotOffered(field, OFFERED_INSTEAD.get(field, "it"))
    for key in wire.chat_template_kwargs or ():
        check_template_argument(key)


OFFERED_INSTEAD = {
    "audio": "spoken answers",
    "modalities": "other modalities than text",
    "moderation": "moderation",
    "prediction": "predicted outputs",
    "reasoning_effort": "a choice of reasoning effort",
    "response_format": "other response formats than text",
    "store": "storing of answers",
    "verbosity": "a choice of verbosity",
    "web_search_options": "web search",
}


def check_tools(wire: ChatRequest) -> None:
    """Refuse tools, unless the chat says that none may be called.

    Raises:
        NotOffered: A tool might have to be called.
    """
    for field, offered, choice in (
        ("tools", wire.tools, wire.tool_choice),
        ("functions", wire.functions, wire.function_call),
    ):
        if offered and choice != "none":
            raise NotOffered(field, "tool calls")
    if wire.tool_choice not in (None, "none", "auto"):
        raise NotOffered("tool_choice", "tool calls")
    if wire.function_call not in (None, "none", "auto"):
        raise NotOffered("function_call", "tool calls")


def check_template_argument(key: str) -> None:
    """Refuse an argument that is not the template's own.

    Raises:
        InvalidRequest: It would change what rendering does.
    """
    if key in RESERVED_ARGUMENTS:
        raise InvalidRequest("chat_template_kwargs", key, "arguments of the chat template only")


def render(
    tokenizer: BoundedTokenizer, wire: ChatRequest, template_args: Mapping[str, Any]
) -> tuple[int, ...]:
    """The chat's token ids. Takes a while for a long one: call it in a worker thread.

    Raises:
        InvalidRequest: A message has content that is not offered.
        ChatRefused: The model's template refuses the chat.
        PromptTooLong: The context has no room for it by far.
    """
    messages = template_messages(wire)
    try:
        with chat_too_long():
            tokens = tuple(encode(tokenizer, messages, wire, template_args))
    except PromptTooLong:
        raise
    except InvalidRequest as error:
        raise ChatRefused(error.field, error.value, error.limit) from error
    if not tokens:
        raise ChatRefused("messages", f"{len(messages)} messages", "a chat that renders to text")
    return tokens


@contextmanager
def chat_too_long() -> Generator[None]:
    """Name the field of a chat in the error about a prompt that is too long."""
    try:
        yield
    except PromptTooLong as error:
        error.field = "messages"
        raise


def encode(
    tokenizer: BoundedTokenizer,
    messages: Sequence[Mapping[str, Any]],
    wire: ChatRequest,
    template_args: Mapping[str, Any],
) -> list[int]:
    """The token ids of ``messages``, everything else as in ``wire``.

    Raises:
        InvalidRequest: The model's template refuses them.
    """
    return tokenizer.encode_rendered(write(tokenizer, messages, wire, template_args))


def write(
    tokenizer: BoundedTokenizer,
    messages: Sequence[Mapping[str, Any]],
    wire: ChatRequest,
    template_args: Mapping[str, Any],
) -> str:
    """The text of ``messages``, everything else as in ``wire``.

    Raises:
        InvalidRequest: The model's template refuses them.
    """
    generate = wire.add_generation_prompt is not False
    return tokenizer.render_chat(messages, add_generation_prompt=generate, **template_args)


def template_messages(wire: ChatRequest) -> list[dict[str, Any]]:
    """A chat's messages as templates know them.

    Raises:
        InvalidRequest: One has content that is not offered.
    """
    return [
        template_message(message, f"messages[{number}]")
        for number, message in enumerate(wire.messages)
    ]


def template_message(message: Message, where: str) -> dict[str, Any]:
    """A message as templates know it; fields that were not said are left out."""
    match message:
        case SystemMessage() | DeveloperMessage():
            found: dict[str, Any] = {"role": "system", "content": text(message.content, where)}
        case UserMessage():
            found = {"role": "user", "content": shown(message.content, where)}
        case ToolMessage():
            found = {
                "role": "tool",
                "content": text(message.content, where),
                "tool_call_id": message.tool_call_id,
            }
        case AssistantMessage():
            found = assistant(message, where)
        case _:
            assert_never(message)
    if message.name is not None:
        found["name"] = message.name
    return found


def assistant(message: AssistantMessage, where: str) -> dict[str, Any]:
    """An assistant's earlier turn.

    Raises:
        InvalidRequest: It has something that cannot be rendered, or nothing at all.
    """
    for field in ("audio", "function_call"):
        if getattr(message, field) is not None:
            raise NotOffered(f"{where}.{field}", "audio or function_call in messages")
    if message.content is None and not message.tool_calls and message.refusal is None:
        raise InvalidRequest(f"{where}.content", None, "text, or tool_calls beside it")
    said = message.content if message.content is not None else message.refusal or ""
    found: dict[str, Any] = {"role": "assistant", "content": text(said, where)}
    if message.reasoning_content is not None:
        found["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        found["tool_calls"] = [
            tool_call(call, f"{where}.tool_calls[{number}]")
            for number, call in enumerate(message.tool_calls)
        ]
    return found


def tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    """An earlier call, with its arguments as an object: templates write them in their own way.

    Raises:
        InvalidRequest: The arguments are not a JSON object.
    """
    spelled = call.function.arguments
    try:
        arguments = msgspec.json.decode(spelled or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        field = f"{where}.function.arguments"
        raise InvalidRequest(field, spelled, "a JSON object in a string") from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


def text(content: Content, where: str) -> str:
    """The text of a message, its parts joined.

    Raises:
        NotOffered: A part is not text.
    """
    if isinstance(content, str):
        return content
    return "".join(
        part_text(part, f"{where}.content[{number}]") for number, part in enumerate(content)
    )


def shown(content: Content, where: str) -> str | list[dict[str, str]]:
    """What a user says: text, or parts if media are among it, each in its place.

    Raises:
        NotOffered: A part is neither.
    """
    if isinstance(content, str) or not any(isinstance(part, MediaPart) for part in content):
        return text(content, where)
    return [
        {"type": part.kind}
        if isinstance(part, MediaPart)
        else {"type": "text", "text": part_text(part, f"{where}.content[{number}]")}
        for number, part in enumerate(content)
    ]


def media_parts(wire: ChatRequest) -> list[tuple[str, MediaPart]]:
    """The media that users show in a chat, in order, and where in the request they stand."""
    return [
        (f"messages[{number}].content[{index}]", part)
        for number, message in enumerate(wire.messages)
        if isinstance(message, UserMessage) and not isinstance(message.content, str)
        for index, part in enumerate(message.content)
        if isinstance(part, MediaPart)
    ]


def members(part: MediaPart, wire: ChatRequest, where: str) -> dict[str, object]:
    """A media part as it was written, with what the request says for all parts of its kind.

    Raises:
        NotOffered: It asks for less than the model can see.
    """
    said: dict[str, object] = msgspec.to_builtins(part)
    for place in (said, *said.values()):
        if isinstance(place, dict) and cast("dict[str, object]", place).get("detail") == "low":
            raise NotOffered(f"{where}.detail", "a low detail of images")
    if part.kind == "video":
        defaults = {"fps": wire.video_fps, "max_frames": wire.video_max_frames}
        said = {**{key: value for key, value in defaults.items() if value is not None}, **said}
    return said


KIND_NAMES = {"image": "images", "video": "videos", "audio": "audio"}


def part_text(part: Part, where: str) -> str:
    """The text of a part.

    Raises:
        NotOffered: It is not text.
    """
    match part:
        case TextPart():
            return part.text
        case FilePart():
            raise NotOffered(where, "files")
        case RefusalPart():
            raise NotOffered(where, "refusal parts")
        case _:
            raise NotOffered(where, f"{KIND_NAMES[part.kind]} elsewhere than in user messages")
