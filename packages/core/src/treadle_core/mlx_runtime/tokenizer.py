"""A Hugging Face tokenizer behind the engine's port, chat template included. Any thread may use it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from treadle_core.errors import InvalidRequest


class ModelTokenizer:
    """Encodes, decodes and renders chats.

    Args:
        wrapper: mlx-lm's tokenizer.
        config: The checkpoint's config, for the end tokens it names.
        render: Renders chats, with the arguments of a template; by default the tokenizer does.
    """

    def __init__(
        self,
        wrapper: TokenizerWrapper,
        config: Mapping[str, Any],
        *,
        render: Callable[..., str] | None = None,
    ) -> None:
        self._wrapper = wrapper
        self._render = render
        # mlx-lm gives no public name to it.
        self._hf: Any = wrapper._tokenizer  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        self._size = len(self._hf)
        self._end_tokens = end_tokens(wrapper, self._hf, config)
        self._special = frozenset[int](self._hf.all_special_ids)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end an answer: those of tokenizer, config and generation config together."""
        return self._end_tokens

    @property
    def special_tokens(self) -> frozenset[int]:
        """Ids that decoding leaves out."""
        return self._special

    @property
    def vocab_size(self) -> int:
        """Ids below this can be decoded."""
        return self._size

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Every token and its id, special ones included."""
        return self._hf.get_vocab()

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`render_chat` works."""
        return self._render is not None or bool(self._hf.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; an opening token that the text begins with is not doubled.

        Raises:
            InvalidRequest: The text is no Unicode.
        """
        check_text(text)
        bos: Any = self._hf.bos_token
        add = not (bos and text.startswith(bos))
        return list(self._hf.encode(text, add_special_tokens=add, verbose=False))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered chat, which brings its own special tokens.

        Raises:
            InvalidRequest: The text is no Unicode.
        """
        check_text(text)
        return list(self._hf.encode(text, add_special_tokens=False, verbose=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens`` without special tokens; ids beyond the vocabulary add nothing."""
        known = [token for token in tokens if 0 <= token < self._size]
        text: Any = self._hf.decode(
            known, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def token_text(self, token: int) -> str:
        """How one token reads by itself, special tokens by their name."""
        if not 0 <= token < self._size:
            return ""
        text: Any = self._hf.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

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
        if not self.has_chat_template:
            raise InvalidRequest(
                "messages", len(messages), "nothing: the model has no chat template"
            )
        render = self._render or self._hf.apply_chat_template
        try:
            text: Any = render(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_args,
            )
        except InvalidRequest:
            raise
        except Exception as error:
            raise InvalidRequest(
                "messages", f"{len(messages)} messages", f"what the chat template accepts ({error})"
            ) from error
        return text


def end_tokens(wrapper: TokenizerWrapper, hf: Any, config: Mapping[str, Any]) -> frozenset[int]:
    """Every id that the tokenizer or the config calls an end."""
    text: Any = config.get("text_config")
    in_text: Any = text.get("eos_token_id") if isinstance(text, Mapping) else None
    sources = [hf.eos_token_id, config.get("eos_token_id"), in_text]
    return frozenset(wrapper.eos_token_ids).union(*map(token_ids, sources))


def check_text(text: str) -> None:
    """Raise InvalidRequest for text that no tokenizer takes: JSON can spell half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("prompt", text, "text without lone surrogates") from error


def token_ids(value: Any) -> frozenset[int]:
    """The ids of a config's entry, which is one id, a list of them, or missing."""
    if value is None:
        return frozenset()
    values: Any = value if isinstance(value, list | tuple) else [value]
    return frozenset(int(token) for token in values)
