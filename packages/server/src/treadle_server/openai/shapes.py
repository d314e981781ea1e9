"""How answers are written: as a chat or as a plain completion, whole or in chunks."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from treadle_core import Usage
from treadle_server.generation import Token
from treadle_server.openai.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    TokenLogprob,
    TopLogprob,
    UsageReply,
    usage_reply,
)
from treadle_server.tokenizer import TokenNames


class Header(Struct, frozen=True, kw_only=True):
    """What every reply to a request says.

    Attributes:
        id: The request's id, also the engine's.
        created: When it arrived, in seconds since 1970.
        model: The model's name.
        usage: Whether chunks have a usage field.
    """

    id: str
    created: int
    model: str
    usage: bool = False


class Whole(Struct, frozen=True, kw_only=True):
    """An answer that has ended."""

    text: str
    tokens: Sequence[Token]
    reason: str


class Shape(Protocol):
    """Writes the answers to one request."""

    def opening(self, index: int) -> object | None:
        """The chunk that opens an answer, if there is one."""
        ...

    def piece(self, index: int, text: str, tokens: Sequence[Token]) -> object:
        """A chunk that adds to an answer."""
        ...

    def ending(self, index: int, reason: str) -> object:
        """The chunk that ends an answer."""
        ...

    def usage(self, usage: Usage) -> object:
        """The chunk after all answers that tells what they took."""
        ...

    def whole(self, answers: Sequence[Whole], usage: Usage) -> object:
        """All answers in one reply."""
        ...


class ChatShape:
    """Writes chats.

    Args:
        header: What every reply says.
        names: What tokens are called.
        logprobs: Whether the request asked for log-probabilities.
    """

    def __init__(self, header: Header, names: TokenNames, *, logprobs: bool) -> None:
        self._header = header
        self._names = names
        self._logprobs = logprobs

    def opening(self, index: int) -> ChatChunk:
        """The chunk with the role."""
        return self._chunk(index, Delta(role="assistant", content=""))

    def piece(self, index: int, text: str, tokens: Sequence[Token]) -> ChatChunk:
        """A chunk with text."""
        return self._chunk(index, Delta(content=text), logprobs=self._written(tokens))

    def ending(self, index: int, reason: str) -> ChatChunk:
        """The chunk with the finish reason."""
        return self._chunk(index, Delta(), reason=reason)

    def usage(self, usage: Usage) -> ChatChunk:
        """The chunk with token counts and no choices."""
        return self._reply([], usage_reply(usage))

    def whole(self, answers: Sequence[Whole], usage: Usage) -> ChatCompletion:
        """The reply to a chat that is not streamed."""
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(content=answer.text),
                logprobs=self._written(answer.tokens),
                finish_reason=answer.reason,
            )
            for index, answer in enumerate(answers)
        ]
        return ChatCompletion(
            id=self._header.id,
            created=self._header.created,
            model=self._header.model,
            choices=choices,
            usage=usage_reply(usage),
        )

    def _chunk(
        self,
        index: int,
        delta: Delta,
        *,
        logprobs: ChatLogprobs | None = None,
        reason: str | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)
        return self._reply([choice], None if self._header.usage else UNSET)

    def _reply(
        self, choices: list[ChatChunkChoice], usage: UsageReply | UnsetType | None
    ) -> ChatChunk:
        return ChatChunk(
            id=self._header.id,
            created=self._header.created,
            model=self._header.model,
            choices=choices,
            usage=usage,
        )

    def _written(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return ChatLogprobs(content=[chat_token(token, self._names) for token in tokens])


class CompletionShape:
    """Writes plain completions.

    Args:
        header: What every reply says.
        names: What tokens are called.
        logprobs: Whether the request asked for log-probabilities.
    """

    def __init__(self, header: Header, names: TokenNames, *, logprobs: bool) -> None:
        self._header = header
        self._names = names
        self._logprobs = logprobs

    def opening(self, index: int) -> None:
        """Completions open with their first text."""

    def piece(self, index: int, text: str, tokens: Sequence[Token]) -> Completion:
        """A chunk with text."""
        return self._chunk(CompletionChoice(index=index, text=text, logprobs=self._written(tokens)))

    def ending(self, index: int, reason: str) -> Completion:
        """The chunk with the finish reason."""
        return self._chunk(CompletionChoice(index=index, text="", finish_reason=reason))

    def usage(self, usage: Usage) -> Completion:
        """The chunk with token counts and no choices."""
        return self._reply([], usage_reply(usage))

    def whole(self, answers: Sequence[Whole], usage: Usage) -> Completion:
        """The reply to a completion that is not streamed."""
        choices = [
            CompletionChoice(
                index=index,
                text=answer.text,
                logprobs=self._written(answer.tokens),
                finish_reason=answer.reason,
            )
            for index, answer in enumerate(answers)
        ]
        return self._reply(choices, usage_reply(usage))

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return self._reply([choice], None if self._header.usage else UNSET)

    def _reply(
        self, choices: list[CompletionChoice], usage: UsageReply | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._header.id,
            created=self._header.created,
            model=self._header.model,
            choices=choices,
            usage=usage,
        )

    def _written(self, tokens: Sequence[Token]) -> CompletionLogprobs | None:
        if not self._logprobs:
            return None
        return CompletionLogprobs(
            tokens=[self._names.name(token.token) for token in tokens],
            token_logprobs=[finite(token.logprob) for token in tokens],
            top_logprobs=[top_by_name(token, self._names) for token in tokens],
            text_offset=[token.offset for token in tokens],
        )


def chat_token(token: Token, names: TokenNames) -> TokenLogprob:
    """A token of a chat."""
    return TokenLogprob(
        token=names.name(token.token),
        logprob=finite(token.logprob),
        bytes=names.utf8(token.token),
        top_logprobs=[
            TopLogprob(token=names.name(top), logprob=finite(logprob), bytes=names.utf8(top))
            for top, logprob in token.top
        ],
    )


def top_by_name(token: Token, names: TokenNames) -> dict[str, float]:
    """The most likely tokens by name, and the chosen one among them."""
    found: dict[str, float] = {}
    for top, logprob in (*token.top, (token.token, token.logprob)):
        # Two ids may read alike: the likelier one keeps the name.
        found.setdefault(names.name(top), finite(logprob))
    return found


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold; OpenAI writes the hopeless ones like this."""
    return max(logprob, -9999.0)
