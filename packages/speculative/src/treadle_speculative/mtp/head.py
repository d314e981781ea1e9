"""A head for multi-token prediction: one more decoder layer that guesses the token after the next.

For each position i it is given the model's hidden state there and the token that follows, i + 1, and
its own hidden state then leads to a guess of token i + 2 (DeepSeek-V3 technical report, section 2.2)::

    x       = fc([norm_embed(embed(token i + 1)), norm_hidden(hidden i)])
    hidden' = norm(layers(x))
    logits  = output(hidden')

The layers attend to what the head was given at the positions before. Embedding and output head are the
model's own. Fed its own hidden state and guess, the head guesses one token more, and so on; what it
hands on is normalised, like the model's own hidden states.

In a file (:mod:`treadle_speculative.mtp.files`) the tensors have the names of the attributes here.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList
from msgspec import Struct

from treadle_core.errors import InvalidRequest, Unsupported, describe
from treadle_core.mlx_runtime.split import SplitModel
from treadle_core.request import check_bool, check_int
from treadle_speculative.mtp.blocks import (
    KINDS,
    LIKE_MODEL,
    attention_layer,
    make_blocks,
)

MOST_LAYERS = 8
EPS = ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon")
DEFAULT_EPS = 1e-6


class HeadForm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a head is wired, as far as families differ.

    Attributes:
        num_layers: Decoder layers, one behind the other.
        hidden_first: Whether ``fc`` is given the hidden state before the embedding, not behind it.
        own_embedding: Whether it has an embedding of its own, ``embed_tokens``.
        own_output: Whether it has an output head of its own, ``lm_head``.
        layer: What its layers are: ``like_model``, ``dense`` or ``own``
            (:func:`treadle_speculative.mtp.blocks.make_blocks`).
        last_norm: Whether there is a ``norm`` behind them.
        place: Which of several heads it is, where their layers differ.
        pattern: What each of its layers is, where the family has several kinds.
    """

    num_layers: int = 1
    hidden_first: bool = False
    own_embedding: bool = False
    own_output: bool = False
    layer: str = LIKE_MODEL
    last_norm: bool = True
    place: int = 0
    pattern: str = ""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        check_int("num_layers", self.num_layers, 1, MOST_LAYERS)
        check_int("place", self.place, 0, MOST_LAYERS - 1)
        for name in ("hidden_first", "own_embedding", "own_output", "last_norm"):
            check_bool(name, getattr(self, name))
        if self.layer not in KINDS:
            raise InvalidRequest("layer", self.layer, ", ".join(KINDS))


class MtpHead(nn.Module):
    """A head over a model, with weights as its layers make them.

    The model is not one of its submodules: its weights are neither saved nor trained with the head.

    Args:
        base: The model.
        form: How it is wired.

    Attributes:
        form: How it is wired.

    Raises:
        Unsupported: No layer of the model can be made once more.
    """

    def __init__(self, base: SplitModel, form: HeadForm | None = None) -> None:
        super().__init__()
        self.form = form = form or HeadForm()
        self._base = base
        width = base.hidden_size
        eps = next((getattr(base.args, key) for key in EPS if hasattr(base.args, key)), DEFAULT_EPS)
        self._like = attention_layer(base)
        self.norm_embed = nn.RMSNorm(width, eps)
        self.norm_hidden = nn.RMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        blocks = make_blocks(
            base, form.layer, form.num_layers, place=form.place, pattern=form.pattern
        )
        self.layers, self._caches, self._window = blocks
        self._composite = isinstance(self.new_cache()[0], CacheList)
        self.norm: Any = nn.RMSNorm(width, eps) if form.last_norm else nn.Identity()
        if form.own_embedding:
            self.embed_tokens = nn.Embedding(base.vocab_size, width)
        if form.own_output:
            self.lm_head = nn.Linear(width, base.vocab_size, bias=False)
        self.set_dtype(base.dtype)
        self._check_layers()

    @property
    def base(self) -> SplitModel:
        """The model."""
        return self._base

    @property
    def num_caches(self) -> int:
        """How many caches it needs for a row."""
        return sum(make is not None for make in self._caches)

    @property
    def like(self) -> int:
        """Which of the model's layers its own are made like."""
        return self._like

    def __call__(
        self,
        hidden: mx.array,
        next_tokens: mx.array,
        cache: list[Any] | None = None,
        mask: Any = None,
    ) -> mx.array:
        """What the head makes of a stretch of positions.

        Args:
            hidden: ``[B, L, hidden]``, the model's hidden states there, or what this call gave for
                the positions before.
            next_tokens: ``[B, L]``, the token behind each of them.
            cache: As :meth:`new_cache` makes them; None attends to nothing before the stretch.
            mask: An attention mask in place of the cache's own (causal).

        Returns:
            ``[B, L, hidden]``, for :meth:`logits` and for the next call.
        """
        embed = self.embed_tokens if self.form.own_embedding else self._base.embed
        pair = [self.norm_embed(embed(next_tokens)), self.norm_hidden(hidden)]
        x = self.fc(mx.concatenate(pair[::-1] if self.form.hidden_first else pair, axis=-1))
        caches = iter(cache or [None] * self.num_caches)
        if mask is None:
            mask = self._mask(x, cache[0] if cache else None)
        for layer, make_cache in zip(self.layers, self._caches, strict=True):
            x = layer(x, mask, None if make_cache is None else next(caches))
        return self.norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits ``[..., vocab]`` of the token two behind each position."""
        output = self.lm_head if self.form.own_output else self._base.logits
        return output(hidden)

    def new_cache(self) -> list[Any]:
        """Caches of mlx-lm's for one row, one for each layer that attends."""
        return [make() for make in self._caches if make is not None]

    def _check_layers(self) -> None:
        """Call them as the head will; nothing is evaluated."""
        try:
            self(mx.zeros((1, 1, self._base.hidden_size)), mx.array([[0]]), self.new_cache())
        except Exception as error:
            kind = type(self.layers[0]).__name__
            raise Unsupported(
                f"no MTP head can be made for {self._base.name}: {kind} raised {describe(error)}"
            ) from error

    def _mask(self, x: mx.array, cache: Any) -> Any:
        inner = cache[0] if self._composite and cache is not None else cache
        return create_attention_mask(x, inner, window_size=self._window, return_array=True)
