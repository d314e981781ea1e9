"""Requests as they arrive. Every documented field is here; one that is not is refused by name.

Limits are not checked here but where the values are used, so that each is written down once.
"""

from typing import Any, ClassVar

import msgspec
from msgspec import Struct


class TextPart(
    Struct, frozen=True, kw_only=True, tag="text", tag_field="type", forbid_unknown_fields=True
):
    """A piece of a message's text."""

    text: str


class Member(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part that is an image, a video or audio, or something in one.

    Whoever reads media looks at the values; here is what may be said. None is "not said".
    """


class ImageReference(Member, frozen=True, kw_only=True):
    """Where an image is."""

    url: str
    detail: str | None = None


class VideoReference(Member, frozen=True, kw_only=True):
    """Where a video is, and which frames of it are taken."""

    url: str
    fps: float | None = None
    max_frames: int | None = None


class AudioReference(Member, frozen=True, kw_only=True):
    """Where audio is."""

    url: str


class Base64Source(Member, frozen=True, kw_only=True, tag="base64", tag_field="type"):
    """A file in the request, as Anthropic's clients write it."""

    data: str
    media_type: str | None = None


class UrlSource(Member, frozen=True, kw_only=True, tag="url", tag_field="type"):
    """A file elsewhere, as Anthropic's clients write it."""

    url: str


Source = Base64Source | UrlSource


class ImageUrlPart(Member, frozen=True, kw_only=True, tag="image_url", tag_field="type"):
    """An image, as OpenAI's clients write it."""

    kind: ClassVar[str] = "image"
    image_url: str | ImageReference | None = None
    detail: str | None = None


class InputImagePart(Member, frozen=True, kw_only=True, tag="input_image", tag_field="type"):
    """The same, as they write it elsewhere."""

    kind: ClassVar[str] = "image"
    image_url: str | ImageReference | None = None
    detail: str | None = None


class ImagePart(Member, frozen=True, kw_only=True, tag="image", tag_field="type"):
    """The same, as templates and Anthropic's clients write it."""

    kind: ClassVar[str] = "image"
    image: str | ImageReference | None = None
    source: Source | None = None
    detail: str | None = None


class VideoUrlPart(Member, frozen=True, kw_only=True, tag="video_url", tag_field="type"):
    """A video."""

    kind: ClassVar[str] = "video"
    video_url: str | VideoReference | None = None
    fps: float | None = None
    max_frames: int | None = None


class VideoPart(Member, frozen=True, kw_only=True, tag="video", tag_field="type"):
    """A video."""

    kind: ClassVar[str] = "video"
    video: str | VideoReference | None = None
    source: Source | None = None
    fps: float | None = None
    max_frames: int | None = None


class AudioUrlPart(Member, frozen=True, kw_only=True, tag="audio_url", tag_field="type"):
    """Audio."""

    kind: ClassVar[str] = "audio"
    audio_url: str | AudioReference | None = None


class AudioPart(Member, frozen=True, kw_only=True, tag="audio", tag_field="type"):
    """Audio."""

    kind: ClassVar[str] = "audio"
    audio: str | AudioReference | None = None
    source: Source | None = None


class InputAudio(Member, frozen=True, kw_only=True):
    """Audio in the request."""

    data: str
    format: str | None = None


class InputAudioPart(Member, frozen=True, kw_only=True, tag="input_audio", tag_field="type"):
    """Audio, as OpenAI's clients write it."""

    kind: ClassVar[str] = "audio"
    input_audio: InputAudio | None = None


class FilePart(Struct, frozen=True, kw_only=True, tag="file", tag_field="type"):
    """A document; refused."""


class RefusalPart(Struct, frozen=True, kw_only=True, tag="refusal", tag_field="type"):
    """An assistant's refusal; refused."""


MediaPart = (
    ImageUrlPart
    | InputImagePart
    | ImagePart
    | VideoUrlPart
    | VideoPart
    | AudioUrlPart
    | AudioPart
    | InputAudioPart
)

Part = TextPart | MediaPart | FilePart | RefusalPart
Content = str | list[Part]


class SystemMessage(
    Struct, frozen=True, kw_only=True, tag="system", tag_field="role", forbid_unknown_fields=True
):
    """Instructions."""

    content: Content
    name: str | None = None


class DeveloperMessage(
    Struct, frozen=True, kw_only=True, tag="developer", tag_field="role", forbid_unknown_fields=True
):
    """Instructions, by their newer name."""

    content: Content
    name: str | None = None


class UserMessage(
    Struct, frozen=True, kw_only=True, tag="user", tag_field="role", forbid_unknown_fields=True
):
    """What the user said."""

    content: Content
    name: str | None = None


class ToolMessage(
    Struct, frozen=True, kw_only=True, tag="tool", tag_field="role", forbid_unknown_fields=True
):
    """What a tool returned."""

    content: Content
    tool_call_id: str
    name: str | None = None


class Function(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that was called; ``arguments`` is JSON in a string."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call that an assistant made earlier in the chat."""

    id: str
    function: Function
    type: str = "function"
    index: int | None = None


class AssistantMessage(
    Struct, frozen=True, kw_only=True, tag="assistant", tag_field="role", forbid_unknown_fields=True
):
    """What the model said earlier."""

    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: Any = None
    function_call: Any = None
    annotations: Any = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stream is to look."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Generation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of completion. None is "not said" throughout."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Local extensions.
    cache_salt: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    timeout: float | None = None


class ChatRequest(Generation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Documented, and without an effect on the answer: accepted whatever they say.
    metadata: Any = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    # Documented, and not offered: accepted only with a value that asks for nothing.
    audio: Any = None
    function_call: Any = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    moderation: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    response_format: dict[str, Any] | None = None
    store: bool | None = None
    tool_choice: Any = None
    tools: list[Any] | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    # Local extensions.
    add_generation_prompt: bool | None = None
    video_fps: float | None = None
    video_max_frames: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Generation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    # Documented, and not offered: accepted only with a value that asks for nothing.
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)
