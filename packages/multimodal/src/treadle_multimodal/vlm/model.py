"""A vision model of mlx-vlm as the runtime calls it: text and media rows in one forward."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_vlm.models import cache as vlm_cache
from mlx_vlm.models.qwen3_5.language import LanguageModel as Qwen35LanguageModel
from mlx_vlm.models.qwen3_omni_moe.language import LanguageModel as Qwen3OmniLanguageModel
from mlx_vlm.models.qwen3_omni_moe.language import expand_deepstack_visual_embeds
from mlx_vlm.models.qwen3_vl_moe.language import LanguageModel as Qwen3VlMoeLanguageModel

from treadle_core.mlx_runtime.adapter import RowInput
from treadle_multimodal.features import FeatureCache
from treadle_multimodal.prompt import EncodedPrompt, Segment
from treadle_multimodal.vlm.encoders import Encoder
from treadle_multimodal.vlm.encoding import Features, MediaEncoder

DEFAULT_FEATURE_BYTES = 512 * 2**20

CUTTING = (Qwen3OmniLanguageModel, Qwen3VlMoeLanguageModel, Qwen35LanguageModel)
"""Models whose attention cuts masks to the columns that a cache's offset says are written."""


class Run:
    """Consecutive positions of one row's new tokens that are alike.

    Args:
        begin: First of them, counted from the row's first new token.
        end: The one after the last.
        segment: The item that stands there; None for text.
        blank: Whether their embeddings are zero.
        offset: Which of the item's features stands at ``begin``.
    """

    def __init__(
        self, begin: int, end: int, segment: Segment | None, blank: bool, offset: int
    ) -> None:
        self.begin = begin
        self.end = end
        self.segment = segment
        self.blank = blank
        self.offset = offset


class WholeMask:
    """A cache for attention that would cut its mask: rows share one that is wider than most need.

    Positions are given beside it, so that nothing else depends on its offset.

    Args:
        cache: What it stands for.
    """

    offset = 2**30

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def make_mask(self, *args: Any, **options: Any) -> Any:
        """As the cache has it."""
        return self._cache.make_mask(*args, **options)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As the cache has it."""
        return self._cache.update_and_fetch(keys, values)


class VlmModel:
    """One loaded vision model. For the thread that loaded it.

    Of a request nothing but what is encoded of its media is kept here, until a forward shows it:
    what a row is comes with each forward.

    Args:
        model: As mlx-vlm loads it.
        counts_axes: Whether its positions have three axes.
        feature_bytes: Most bytes of vision features that are kept for later chunks and requests.
    """

    def __init__(
        self, model: Any, *, counts_axes: bool, feature_bytes: int = DEFAULT_FEATURE_BYTES
    ) -> None:
        self.model: nn.Module = model
        self._vlm = model
        self._language: Any = model.language_model
        self._counts_axes = counts_axes
        # Others take the rows of items only, and where they stand.
        self._places_deepstack = isinstance(model.language_model, Qwen3OmniLanguageModel)
        self._cuts_masks = isinstance(model.language_model, CUTTING)
        self.features: FeatureCache[Features] = FeatureCache(feature_bytes)
        self._media = MediaEncoder(Encoder(model), self.features)

    @property
    def encoder(self) -> MediaEncoder:
        """Encodes media ahead of the forwards that show them."""
        return self._media

    def forward(
        self, tokens: mx.array, caches: list[Any], rows: Sequence[RowInput] = ()
    ) -> mx.array:
        """Logits ``[B, N, vocab]`` of ``tokens [B, N]``, lazily; the caches advance.

        Args:
            tokens: Token ids.
            caches: One for each layer.
            rows: The B rows, each with an :class:`EncodedPrompt` if it has media; empty where all
                of them are text that follows what the caches hold.
        """
        num_tokens = tokens.shape[1]
        options: dict[str, Any] = {}
        if self._counts_axes:
            options["position_ids"] = self._positions(tokens, caches, rows)
        if self._cuts_masks:
            caches = [adapted(cache) for cache in caches]
        runs = [list(runs_of(row, num_tokens)) for row in rows]
        if any(run.segment or run.blank for row_runs in runs for run in row_runs):
            options.update(self._embed(tokens, rows, runs))
            for row in rows:
                if row.prompt is not None:
                    self._media.shown(row.prompt, row.start + num_tokens)
        return self._language(tokens, cache=caches, **options).logits

    def new_cache(self) -> list[Any]:
        """Caches for one row: mlx-lm's own classes, which do the same, where there is one."""
        return [translated(cache) for cache in vlm_cache.make_prompt_cache(self._language)]

    def embeddings(
        self, prompt: EncodedPrompt, start: int = 0, stop: int | None = None
    ) -> mx.array:
        """Input embeddings ``[stop - start, hidden]`` of a part of a prompt."""
        tokens = prompt.tokens[start:stop]
        row = RowInput(start, prompt)
        runs = list(runs_of(row, len(tokens)))
        embedded: mx.array = self._embed(mx.array([tokens]), [row], [runs])["inputs_embeds"]
        return embedded[0]

    def _positions(self, tokens: mx.array, caches: list[Any], rows: Sequence[RowInput]) -> mx.array:
        """Positions ``[3, B, N]``, made on the host: nothing waits for a step in flight."""
        if not rows:
            return self._counted(tokens, caches)
        num_rows, num_tokens = tokens.shape
        found = np.empty((3, num_rows, num_tokens), dtype=np.int32)
        for index, row in enumerate(rows):
            found[:, index] = positions_of(row, num_tokens)
        return mx.array(found)

    def _counted(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Positions of text that follows what the caches hold."""
        num_rows, num_tokens = tokens.shape
        # Recurrent layers do not count.
        offset = next(cache.offset for cache in caches if not isinstance(cache, ArraysCache))
        start = offset[:, None] if isinstance(offset, mx.array) and offset.ndim else offset
        counted = start + mx.arange(num_tokens, dtype=mx.int32)[None]
        return mx.broadcast_to(counted[None], (3, num_rows, num_tokens))

    def _embed(
        self, tokens: mx.array, rows: Sequence[RowInput], runs: Sequence[Sequence[Run]]
    ) -> dict[str, Any]:
        """Embeddings ``[B, N, hidden]``, and what goes with them."""
        made = self._vlm.get_input_embeddings(tokens)
        text: mx.array = made.inputs_embeds
        embedded: list[mx.array] = []
        seen, looked = np.zeros(tokens.shape, dtype=bool), np.zeros(tokens.shape, dtype=bool)
        deepstack: list[tuple[mx.array, ...]] = []
        for index, (row, row_runs) in enumerate(zip(rows, runs, strict=True)):
            parts: list[mx.array] = []
            for run in row_runs:
                words = text[index, run.begin : run.end]
                if run.segment is None:
                    parts.append(mx.zeros_like(words) if run.blank else words)
                    continue
                features = self._media.take(row.prompt.items[run.segment.item])
                there = slice(run.offset, run.offset + run.end - run.begin)
                parts.append(features.embeddings[there])
                seen[index, run.begin : run.end] = True
                if features.deepstack:
                    deepstack.append(tuple(layer[there] for layer in features.deepstack))
                    looked[index, run.begin : run.end] = True
            embedded.append(mx.concatenate(parts))
        options: dict[str, Any] = {"inputs_embeds": mx.stack(embedded)}
        if deepstack:
            layers = [mx.concatenate(list(part)) for part in zip(*deepstack, strict=True)]
            masks = mx.array(looked)
            options["visual_pos_masks"] = masks
            options["deepstack_visual_embeds"] = (
                expand_deepstack_visual_embeds(masks, layers) if self._places_deepstack else layers
            )
        if made.per_layer_inputs is not None:
            # What stands for an item has none; the same id in a text keeps its own.
            words = mx.where(mx.array(seen), 0, tokens)
            options["per_layer_inputs"] = self._language.model.get_per_layer_inputs(words)
        return options


def positions_of(row: RowInput, num_tokens: int) -> Any:
    """Positions of a row's new tokens: ``[3, N]``, or ``[N]`` where all axes count alike."""
    prompt: EncodedPrompt | None = row.prompt
    counted = np.arange(row.start, row.start + num_tokens, dtype=np.int32)
    if prompt is None or prompt.positions is None:
        return counted
    inside = prompt.positions[:, row.start : row.start + num_tokens]
    behind = counted[inside.shape[1] :] + prompt.delta
    return np.concatenate([inside, np.broadcast_to(behind, (3, len(behind)))], axis=1)


def runs_of(row: RowInput, num_tokens: int) -> Iterator[Run]:
    """A row's new tokens, cut where text, items and blanks begin."""
    prompt: EncodedPrompt | None = row.prompt
    start, stop = row.start, row.start + num_tokens
    if prompt is None:
        yield Run(0, num_tokens, None, blank=False, offset=0)
        return
    segments = [part for part in prompt.segments if part.start < stop and part.end > start]
    blanks = [position for position in prompt.blanks if start <= position < stop]
    covered = {max(part.start, start): part for part in segments}
    cuts = {start, stop, *blanks, *(position + 1 for position in blanks), *covered}
    cuts.update(min(part.end, stop) for part in segments)
    for begin, end in pairwise(sorted(cuts)):
        segment = covered.get(begin)
        offset = 0 if segment is None else segment.offset + begin - segment.start
        yield Run(begin - start, end - start, segment, begin in blanks, offset)


def translated(cache: Any) -> Any:
    """mlx-lm's class for one of mlx-vlm's caches, which the runtime knows; others stay."""
    if type(cache) is vlm_cache.KVCache:
        return KVCache()
    if type(cache) is vlm_cache.RotatingKVCache:
        return RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
    if type(cache) is vlm_cache.ArraysCache:
        return ArraysCache(len(cache.cache))
    return cache


def adapted(cache: Any) -> Any:
    """A cache as layers of :data:`CUTTING` models take it; both have the same contents."""
    if isinstance(cache, ArraysCache):
        other = vlm_cache.ArraysCache(len(cache.cache))
        other.cache = cache.cache
        return other
    return WholeMask(cache)
