"""treadle-cache under mlx-lm's own ``generate_step``: a second question about the same text.

Run it with a model directory or a Hub repository::

    uv run python examples/prefix_cache_with_mlx_lm.py MODEL

The store needs two things: a reader, which copies what a prompt cache holds, and a way to fill a
fresh prompt cache. Both are a few lines for models whose layers all keep plain keys and values.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

from treadle_cache import CacheConfig, RamStore
from treadle_core.mlx_runtime.fingerprint import fingerprint
from treadle_core.mlx_runtime.host import to_device, to_host
from treadle_core.prefix import HostArray, PrefixKey, StateLayout, TokenArray


class PromptCacheReader:
    """The first ``num_tokens`` tokens of an mlx-lm prompt cache, for a store to copy."""

    state_bytes = 0

    def __init__(self, caches: Sequence[Any], num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._caches = caches

    def tokens(self, start: int, stop: int) -> list[HostArray]:
        """Keys and values of each layer, ``[heads, stop - start, dim]``."""
        arrays = [
            mx.contiguous(array[0, :, start:stop])
            for cache in self._caches
            for array in (cache.keys, cache.values)
        ]
        mx.eval(arrays)
        return [np.array(to_host(array)) for array in arrays]

    def state(self) -> list[HostArray]:
        """Nothing: every layer can be cut at any token."""
        return []


def layout_of(model: Any) -> StateLayout:
    """What the model's prompt cache consists of, found by running two tokens through it."""
    caches = make_prompt_cache(model)
    if not all(type(cache) is KVCache for cache in caches):
        raise SystemExit("this example is for models whose layers all keep plain keys and values")
    mx.eval(model(mx.array([[1, 2]]), cache=caches))
    arrays = [array for cache in caches for array in (cache.keys, cache.values)]
    names = [str(array.dtype).removeprefix("mlx.core.") for array in arrays]
    shapes = [(array.shape[1], array.shape[3]) for array in arrays]
    tokens = tuple(TokenArray(*shape, name) for shape, name in zip(shapes, names, strict=True))
    return StateLayout(tokens=tokens, has_state=False, format=f"mlx-lm {shapes} {names}")


def fill(caches: Sequence[Any], store: RamStore, key: PrefixKey) -> int:
    """Put the longest stored prefix of ``key`` into a fresh prompt cache; how long it is."""
    found = store.find(key, len(key.tokens) - 1)
    if found.ticket is None:
        return 0
    row = store.load(found.ticket)
    for number, cache in enumerate(caches):
        keys, values = (to_device(row.tokens(2 * number + part))[None] for part in (0, 1))
        cache.update_and_fetch(keys, values)
        mx.eval(cache.state)
    store.release(found.ticket)
    return found.num_tokens


def answer(
    model: Any, store: RamStore, prompt: list[int], num_tokens: int
) -> tuple[list[int], int]:
    """Greedy tokens after ``prompt``, and how many of its tokens were reused."""
    caches = make_prompt_cache(model)
    key = PrefixKey(tokens=tuple(prompt))
    reused = fill(caches, store, key)
    steps = generate_step(
        mx.array(prompt[reused:]), model, max_tokens=num_tokens, prompt_cache=caches
    )
    output = [int(token) for token, _ in steps]
    store.insert(key, PromptCacheReader(caches, len(prompt)), store.generation)
    return output, reused


def main(reference: str) -> None:
    """Ask two questions about one text, and the first one again."""
    model, tokenizer = load(reference)[:2]
    store = RamStore(CacheConfig(capacity_bytes=1 << 30))
    store.attach(fingerprint(model), layout_of(model))
    text = "The treadle is the pedal that keeps a loom moving. " * 40
    for question in ("What is a treadle?", "What does it move?", "What is a treadle?"):
        prompt = tokenizer.encode(text + question)
        started = time.perf_counter()
        output, reused = answer(model, store, prompt, 12)
        seconds = time.perf_counter() - started
        print(
            f"{len(prompt)} tokens, {reused} reused, {seconds:.2f} s: {tokenizer.decode(output)!r}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:2])
