"""What the server needs of a tokenizer, and how it is used off the event loop."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import anyio

from treadle_core import Unsupported
from treadle_core.ports import Tokenizer

T = TypeVar("T")

MAX_THREADS = 4
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


class TextWorkers:
    """Runs rendering and tokenising in threads, a few at a time."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(MAX_THREADS)

    async def run(self, function: Callable[[], T]) -> T:
        """The result of ``function``; a caller that is cancelled does not wait for it."""
        return await anyio.to_thread.run_sync(
            function, limiter=self._limiter, abandon_on_cancel=True
        )


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
