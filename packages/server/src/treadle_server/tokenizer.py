"""What the server needs of a tokenizer, and how it is used off the event loop."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import anyio

from treadle_core import PromptTooLong, Unsupported
from treadle_core.ports import Tokenizer

T = TypeVar("T")

MAX_THREADS = 4

CHARS_PER_TOKEN = 8
"""Most texts have fewer."""

CUT_TOKENS = 256
"""By so many a text's beginning may have more than it has within the text: a word is cut."""

REPLACEMENT = "\ufffd"


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that also renders chats. Any thread may use it."""

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered chat, which brings its own special tokens."""
        ...

    def token_text(self, token: int) -> str:
        """How one token reads by itself."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> str:
        """A chat as the text that the model was trained on.

        Raises:
            InvalidRequest: There is no template, or it refuses these messages.
        """
        ...


def chat_tokenizer(tokenizer: Tokenizer | None) -> ChatTokenizer:
    """``tokenizer``, if it does all that the server needs.

    Raises:
        Unsupported: It does not.
    """
    if not isinstance(tokenizer, ChatTokenizer):
        raise Unsupported("the engine's tokenizer cannot render chats, so it cannot be served")
    return tokenizer


class BoundedTokenizer:
    """Encodes text that a context may have room for; what is much longer is not looked through.

    Encoding takes hundreds of bytes and some microseconds for a character, and cannot be stopped.

    Args:
        tokenizer: Encodes.
        context_length: Most tokens of a prompt and its answer.
    """

    def __init__(self, tokenizer: ChatTokenizer, context_length: int) -> None:
        self._tokenizer = tokenizer
        self._context_length = context_length

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text.

        Raises:
            PromptTooLong: Its beginning has more tokens than there is room for.
        """
        return self._encode(self._tokenizer.encode, text)

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered chat.

        Raises:
            PromptTooLong: Its beginning has more tokens than there is room for.
        """
        return self._encode(self._tokenizer.encode_rendered, text)

    def check_rendered(self, text: str) -> None:
        """Look only whether there may be room for a rendered chat that another will encode.

        Raises:
            PromptTooLong: Its beginning has more tokens than there is room for.
        """
        self._check(self._tokenizer.encode_rendered, text)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """As the inner tokenizer."""
        return self._tokenizer.render_chat(messages, **options)

    def _encode(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        self._check(encode, text)
        return encode(text)

    def _check(self, encode: Callable[[str], list[int]], text: str) -> None:
        limit = self._context_length
        size = CHARS_PER_TOKEN * limit
        while size < len(text):
            length = len(encode(text[:size])) - CUT_TOKENS
            if length >= limit:
                raise PromptTooLong(length, limit, at_least=True)
            size *= 2


class TextWorkers:
    """Runs rendering and tokenising in threads, a few at a time."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(MAX_THREADS)

    async def run(self, function: Callable[[], T]) -> T:
        """The result of ``function``, which is waited for even if the caller is cancelled.

        Who asks and leaves again and again would else have any number of them run.
        """
        return await anyio.to_thread.run_sync(function, limiter=self._limiter)


class TokenNames:
    """How tokens are called in log-probabilities.

    Args:
        tokenizer: Tells how a token reads.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}

    def name(self, token: int) -> str:
        """The token's text; ``token_id:N`` where it has none, or only a part of a character."""
        name = self._names.get(token)
        if name is None:
            text = self._tokenizer.token_text(token)
            readable = bool(text) and REPLACEMENT not in text
            name = self._names[token] = text if readable else f"token_id:{token}"
        return name

    def utf8(self, token: int) -> list[int] | None:
        """The bytes of the token's text; None where the text is not whole."""
        text = self._tokenizer.token_text(token)
        return None if REPLACEMENT in text else list(text.encode())
