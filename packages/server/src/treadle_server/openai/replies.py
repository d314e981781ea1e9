"""Replies as they are sent. Fields that OpenAI always sends are there, null where we have nothing."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from treadle_core import Usage
from treadle_server.speculative_routes import Speculated, speculated

Role = Literal["assistant"]


class PromptDetails(Struct, frozen=True, kw_only=True):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(Struct, frozen=True, kw_only=True):
    """Of the answer's tokens, where some were guessed ahead.

    Attributes:
        accepted_prediction_tokens: Guesses that became part of the answer.
        rejected_prediction_tokens: Guesses that did not; they are not counted elsewhere.
        lossy_prediction_tokens: Accepted guesses that nobody verified; only of a lossy server.
        speculation: How guessing went.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    lossy_prediction_tokens: int | UnsetType = UNSET
    speculation: Speculated


class UsageReply(Struct, frozen=True, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


def usage_reply(usage: Usage) -> UsageReply:
    """Token counts as OpenAI writes them."""
    return UsageReply(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=completion_details(usage),
    )


def completion_details(usage: Usage) -> CompletionDetails | UnsetType:
    """What speculation did; nothing where it is off."""
    if usage.drafts is None:
        return UNSET
    return CompletionDetails(
        accepted_prediction_tokens=usage.drafts.accepted,
        rejected_prediction_tokens=usage.drafts.rejected,
        lossy_prediction_tokens=usage.drafts.lossy or UNSET,
        speculation=speculated(usage.drafts),
    )


class TopLogprob(Struct, frozen=True, kw_only=True):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """A token of the answer."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities of a chat's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities of a completion's tokens, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatMessage(Struct, frozen=True, kw_only=True):
    """What the model says."""

    content: str
    role: Role = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The reply of ``/v1/chat/completions``."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    object: Literal["chat.completion"] = "chat.completion"


class Delta(Struct, frozen=True, kw_only=True):
    """What a chunk adds to a message."""

    role: Role | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """What a chunk adds to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Struct, frozen=True, kw_only=True):
    """A chunk of a streamed chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageReply | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One answer of a completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(Struct, frozen=True, kw_only=True):
    """The reply of ``/v1/completions``, or a chunk of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model that is served."""

    id: str
    created: int
    context_length: int
    owned_by: str = "treadle"
    object: Literal["model"] = "model"


class ModelList(Struct, frozen=True, kw_only=True):
    """The reply of ``/v1/models``."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
