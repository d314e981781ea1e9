"""A model of mlx-lm in two halves: everything up to its last norm, and the output head."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from treadle_core.errors import Unsupported, describe
from treadle_core.mlx_runtime.adapter import RowInput

BODIES = ("model", "backbone", "transformer")
EMBEDDINGS = ("embed_tokens", "embeddings", "word_embeddings", "wte")
PROBE = ((3, 1, 4), (9, 2))


class SplitModel:
    """A text model whose hidden states can be had: a model adapter of two halves.

    The model's code is not changed; its parts are called one after the other. That they make up
    the whole is proven when it is split: both give the same logits, bit for bit.

    Args:
        model: An mlx-lm model.
        make_cache: Makes its own caches for one row; mlx-lm's by default.

    Attributes:
        model: The whole model.
        name: Its architecture, as mlx-lm calls it.
        embedding: The module that embeds token ids.
        output: The module that gives logits; None where the embedding does.
        args: What its layers are made from.
        layers: Its decoder layers.
        dtype: Of its hidden states.
        hidden_size: Their width.
        vocab_size: Number of logits.

    Raises:
        Unsupported: It has no such halves.
    """

    def __init__(
        self, model: nn.Module, make_cache: Callable[[nn.Module], list[Any]] = make_prompt_cache
    ) -> None:
        self.model = model
        self._make_cache = make_cache
        text: Any = getattr(model, "language_model", model)
        self.name = type(model).__module__.split(".")[-1]
        self._body = self._part(text, BODIES)
        self.embedding = self._part(self._body, EMBEDDINGS)
        self.output: Any = getattr(text, "lm_head", None)
        self.args: Any = getattr(text, "args", None)
        self.layers: list[nn.Module] = list(getattr(self._body, "layers", []))
        self.dtype, self.hidden_size, self.vocab_size = self._prove()

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings ``[..., hidden]`` of token ids."""
        return self.embedding(tokens)

    def hidden(
        self, tokens: mx.array, caches: list[Any], rows: Sequence[RowInput] = ()
    ) -> mx.array:
        """Hidden states ``[B, N, hidden]`` behind the last norm, lazily; the caches advance."""
        del rows
        return self._body(tokens, cache=caches)

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits ``[..., vocab]`` of hidden states."""
        return self.embedding.as_linear(hidden) if self.output is None else self.output(hidden)

    def forward(
        self, tokens: mx.array, caches: list[Any], rows: Sequence[RowInput] = ()
    ) -> mx.array:
        """Logits ``[B, N, vocab]`` of ``tokens [B, N]``, lazily; the caches advance."""
        return self.logits(self.hidden(tokens, caches, rows))

    def new_cache(self) -> list[Any]:
        """The model's own caches for one row."""
        return self._make_cache(self.model)

    def _part(self, module: Any, names: Sequence[str]) -> Any:
        for name in names:
            part = getattr(module, name, None)
            if isinstance(part, nn.Module):
                return part
        raise self._refusal(f"{type(module).__name__} has none of {', '.join(names)}")

    def _prove(self) -> tuple[mx.Dtype, int, int]:
        """Compare with the whole model, with fresh caches and behind a few tokens."""
        try:
            mine, whole = self.new_cache(), self.new_cache()
            hidden = [self.hidden(mx.array([list(chunk)]), mine) for chunk in PROBE]
            logits = mx.concatenate([self.logits(part) for part in hidden], axis=1)
            expected = [self.model(mx.array([list(chunk)]), cache=whole) for chunk in PROBE]
            same = mx.array_equal(logits, mx.concatenate(expected, axis=1))
        except Exception as error:
            raise self._refusal(f"its halves raised {describe(error)}") from error
        if not same:
            raise self._refusal("its last norm and output head do not give its logits")
        return hidden[0].dtype, hidden[0].shape[-1], logits.shape[-1]

    def _refusal(self, reason: str) -> Unsupported:
        return Unsupported(f"hidden states of {self.name} cannot be read: {reason}")


class HiddenTap:
    """A split model that keeps the hidden states of its last forward: an adapter around one.

    Args:
        split: The model.
    """

    def __init__(self, split: SplitModel) -> None:
        self.model = split.model
        self._split = split
        self._last: mx.array | None = None

    def forward(
        self, tokens: mx.array, caches: list[Any], rows: Sequence[RowInput] = ()
    ) -> mx.array:
        """Logits ``[B, N, vocab]`` of ``tokens [B, N]``, lazily; the caches advance."""
        self._last = self._split.hidden(tokens, caches, rows)
        return self._split.logits(self._last)

    def new_cache(self) -> list[Any]:
        """The model's own caches for one row."""
        return self._split.new_cache()

    @property
    def encoder(self) -> None:
        """It reads tokens alone."""
        return None

    def take(self) -> mx.array:
        """The hidden states ``[B, N, hidden]`` of the forward before, once."""
        hidden, self._last = self._last, None
        assert hidden is not None, "no forward since the last one was taken"
        return hidden
