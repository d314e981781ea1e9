"""A model behind the few calls that the runtime makes, and what it is, as data."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from msgspec import Struct

from treadle_core.layers import (
    Composite,
    FullAttention,
    LayerSpec,
    ModelSpec,
    Opaque,
    Recurrent,
    Window,
)
from treadle_core.ports import Encoder

DEFAULT_CONTEXT = 8192
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
)
PROBE_TOKENS = 3


class RowInput(Struct, frozen=True):
    """A row of one forward, for models to which it is more than tokens.

    Attributes:
        start: Position of its first new token.
        prompt: What its prompt is besides token ids, as the model's own package made it; None for
            a prompt of text.
    """

    start: int
    prompt: Any = None


class ModelAdapter(Protocol):
    """One loaded model, as the runtime calls it."""

    model: nn.Module
    """All of its weights are in here."""

    @property
    def encoder(self) -> Encoder | None:
        """Encodes media ahead of the forwards that show them; None where the model reads text."""
        ...

    def forward(
        self, tokens: mx.array, caches: list[Any], rows: Sequence[RowInput] = ()
    ) -> mx.array:
        """Logits ``[B, N, vocab]`` of ``tokens [B, N]``, lazily; the caches advance.

        Args:
            tokens: Token ids.
            caches: One for each layer.
            rows: The B rows; empty where all of them are text that follows what the caches hold.
        """
        ...

    def new_cache(self) -> list[Any]:
        """The model's own caches for one row."""
        ...


class TextModel:
    """A text model of mlx-lm.

    Args:
        model: An mlx-lm model (or anything called as ``model(tokens, cache=caches)``).
        make_cache: Makes its own caches for one row; mlx-lm's by default.
        vocab_size: How many logits it is to give, where that is not the model's own number: what
            it has more is cut off, what it has less can never be chosen.
    """

    def __init__(
        self,
        model: nn.Module,
        make_cache: Callable[[nn.Module], list[Any]] = make_prompt_cache,
        *,
        vocab_size: int | None = None,
    ) -> None:
        self.model = model
        self._make_cache = make_cache
        self._vocab_size = vocab_size

    @property
    def encoder(self) -> None:
        """It reads text."""
        return None

    def forward(
        self, tokens: mx.array, caches: list[Any], rows: Sequence[RowInput] = ()
    ) -> mx.array:
        """Logits ``[B, N, vocab]`` of ``tokens [B, N]``, lazily; the caches advance."""
        del rows
        logits = self.model(tokens, cache=caches)
        return logits if self._vocab_size is None else resized(logits, self._vocab_size)

    def new_cache(self) -> list[Any]:
        """The model's own caches for one row."""
        return self._make_cache(self.model)


def resized(logits: mx.array, vocab_size: int) -> mx.array:
    """``logits [..., n]`` of ``vocab_size`` tokens; those that are missing have no chance."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    widths = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return mx.pad(logits, widths, constant_values=-float("inf"))


def context_length(config: dict[str, Any]) -> int:
    """The longest sequence that a checkpoint's config names, text part included."""
    text: Any = config.get("text_config")
    for source in (config, text if isinstance(text, dict) else {}):
        for key in CONTEXT_KEYS:
            value: Any = source.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return DEFAULT_CONTEXT


def inspect(model: ModelAdapter, config: dict[str, Any]) -> ModelSpec:
    """What each layer keeps, found by running a few tokens through the model's own caches."""
    caches = model.new_cache()
    logits = model.forward(mx.array([list(range(1, PROBE_TOKENS + 1))]), caches)
    mx.eval(logits, [cache.state for cache in caches])
    layers = tuple(describe_cache(cache) for cache in caches)
    opaque = sorted({type(c).__name__ for c, s in zip(caches, layers, strict=True) if is_opaque(s)})
    return ModelSpec(
        layers=layers,
        vocab_size=logits.shape[-1],
        context_length=context_length(config),
        batched=not opaque,
        note=f"layers with {', '.join(opaque)} run one row at a time" if opaque else "",
        model_type=str(config.get("model_type", type(model.model).__module__.split(".")[-1])),
    )


def describe_cache(cache: Any) -> LayerSpec:
    """The spec of one of the model's own caches after a few tokens.

    Only the exact classes are known; whatever derives from them may behave differently.
    """
    kind: Any = type(cache)
    if kind is KVCache and cache.keys is not None:
        return FullAttention(*_attention(cache))
    if kind is RotatingKVCache and cache.keys is not None:
        return Window(*_attention(cache), cache.max_size, cache.keep)
    if kind is ArraysCache and all(isinstance(a, mx.array) for a in cache.cache):
        shapes = tuple(tuple(a.shape[1:]) for a in cache.cache)
        return Recurrent(shapes, tuple(_dtype(a) for a in cache.cache))
    if kind is CacheList:
        parts = tuple(describe_cache(part) for part in cache.caches)
        if not any(isinstance(part, Opaque | Composite) for part in parts):
            return Composite(parts)
    return Opaque(bytes_per_token=token_bytes(cache))


def token_bytes(cache: Any) -> int:
    """Bytes that a token takes in a cache of unknown class, or a share of all it holds."""
    arrays = cache_arrays(cache)
    # Keys and values are allocated by hundreds of tokens at a time: [1, heads, allocated, dim].
    if arrays and all(array.ndim == 4 for array in arrays):
        return sum(array.nbytes // array.shape[2] for array in arrays)
    return -(-sum(array.nbytes for array in arrays) // PROBE_TOKENS)


def cache_arrays(cache: Any) -> list[mx.array]:
    """Every array in the state of one of the model's own caches."""
    found: list[mx.array] = []
    pending: list[Any] = [cache.state]
    while pending:
        item = pending.pop()
        if isinstance(item, mx.array):
            found.append(item)
        elif isinstance(item, list | tuple):
            pending.extend(item)  # pyright: ignore[reportUnknownArgumentType]
    return found


def is_opaque(spec: LayerSpec) -> bool:
    """Whether only the model understands the layer's cache."""
    return isinstance(spec, Opaque)


def _attention(cache: Any) -> tuple[int, int, int, str]:
    heads, key_dim = cache.keys.shape[1], cache.keys.shape[3]
    return heads, key_dim, cache.values.shape[3], _dtype(cache.keys)


def _dtype(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")
