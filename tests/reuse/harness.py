"""Engines over tiny models and prefix stores, whose every logit is held against the model's own run."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from treadle_cache import CacheConfig, RamStore, TieredStore
from treadle_cache.disk import DiskConfig, DiskTier, Files
from treadle_core import Engine, EngineConfig, Finished, Request, SamplingParams
from treadle_core.layers import state_layout
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.ports import PrefixStore
from treadle_core.testing import zoo

TOLERANCE = 1e-4
BLOCK = 8
# The last ones keep their full attention in so many bits.
FAMILIES = [*sorted(zoo.FAMILIES), "llama/4", "llama/8", "qwen3_next/8"]


@cache
def model_of(family: str) -> Any:
    name, _, bits = family.partition("/")
    return zoo.build(name, head_dim=64) if bits else zoo.build(name)


@cache
def has_state(family: str) -> bool:
    """Whether some of its layers cannot be cut, or it runs one row at a time."""
    return state_layout(runner_of(family).spec).has_state


@cache
def expected_logits(family: str, tokens: tuple[int, ...]) -> np.ndarray:
    model, bits = model_of(family), family.partition("/")[2]
    caches = make_prompt_cache(model)
    if bits:
        caches = [
            QuantizedKVCache(64, int(bits)) if type(own) is KVCache else own for own in caches
        ]
    return np.array(model(mx.array([tokens]), cache=caches)[0])


def ram_store(**options: Any) -> RamStore:
    return RamStore(CacheConfig(capacity_bytes=256 << 20, block_size=BLOCK, **options))


def tiered_store(
    directory: Path, *, ram_bytes: int = 256 << 20, files: Files | None = None
) -> TieredStore:
    disk = DiskConfig(directory=str(directory), capacity_bytes=256 << 20, min_free_bytes=0)
    ram = RamStore(CacheConfig(capacity_bytes=ram_bytes, block_size=BLOCK))
    return TieredStore(ram, DiskTier(disk, files=files))


def runner_of(family: str) -> ModelRunner:
    """A runner over a family, or over one with wide heads and quantised KV: ``llama/4``."""
    name, _, bits = family.partition("/")
    return make_runner(model_of(family), zoo.config(name), kv_bits=int(bits) if bits else None)


class Session:
    """An engine over one family, fed with requests whose answers are decided beforehand."""

    def __init__(self, family: str, store: PrefixStore, **options: Any) -> None:
        self.family = family
        self.store = store
        options = {"max_num_seqs": 4, "checkpoint_interval": 16, **options}
        runner = runner_of(family)
        self.engine = Engine(runner, config=EngineConfig(**options), store=store)
        self.logits: dict[str, list[np.ndarray]] = {}
        self.finished: dict[str, Finished] = {}

    def add(self, id: str, prompt: Sequence[int], answer: Sequence[int], **options: Any) -> None:
        """Queue ``prompt``; its tokens will be ``answer``, and the logits are remembered."""
        self.logits[id] = []
        self.engine.add(
            Request(
                id=id,
                prompt=tuple(prompt),
                params=SamplingParams(max_tokens=len(answer), temperature=0, ignore_eos=True),
                logits_processors=(forced(answer, self.logits[id]),),
                **options,
            )
        )

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.engine.has_work and not until():
            for event in self.engine.step():
                if isinstance(event, Finished):
                    self.finished[event.request_id] = event
            self.engine.check_integrity()

    def check(self, id: str, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Hold every logit against the model's own run; returns the number of reused tokens."""
        tokens = (*prompt, *answer)
        expected = expected_logits(self.family, tokens[:-1])
        found = np.stack(self.logits[id])
        scale = np.abs(expected).max()
        error = np.abs(found - expected[len(prompt) - 1 :]).max() / scale
        assert error < TOLERANCE, f"{self.family}: {id} is off by {error:.2g}"
        return self.finished[id].usage.cached_tokens

    def ask(self, id: str, prompt: Sequence[int], answer: Sequence[int], **options: Any) -> int:
        self.add(id, prompt, answer, **options)
        self.run()
        return self.check(id, prompt, answer)


def forced(answer: Sequence[int], seen: list[np.ndarray]) -> Callable[..., Any]:
    def processor(tokens: Sequence[int], logits: Any) -> Any:
        seen.append(np.array(logits, dtype=np.float32).reshape(-1))
        bonus = np.zeros(seen[-1].shape, dtype=np.float32)
        bonus[answer[len(tokens)]] = 1e6
        return logits + mx.array(bonus).reshape(logits.shape)

    return processor


def tokens(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 250) for _ in range(length))


def full_blocks(length: int) -> int:
    return length - length % BLOCK
