"""Engines over tiny models and prefix stores, whose every logit is held against the model's own run."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from treadle_cache import CacheConfig, RamStore, TieredStore
from treadle_cache.disk import DiskConfig, DiskTier, Files
from treadle_core import Engine, EngineConfig, Finished, Request, SamplingParams
from treadle_core.layers import state_layout
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.ports import PrefixStore
from treadle_core.testing import zoo

TOLERANCE = 1e-4
BLOCK = 8
FAMILIES = sorted(zoo.FAMILIES)


@cache
def model_of(family: str) -> Any:
    return zoo.build(family)


@cache
def has_state(family: str) -> bool:
    """Whether some of its layers cannot be cut, or it runs one row at a time."""
    return state_layout(make_runner(model_of(family), zoo.config(family)).spec).has_state


@cache
def expected_logits(family: str, tokens: tuple[int, ...]) -> np.ndarray:
    return np.array(zoo.reference_logits(model_of(family), tokens))


def ram_store(**options: Any) -> RamStore:
    return RamStore(CacheConfig(capacity_bytes=256 << 20, block_size=BLOCK, **options))


def tiered_store(
    directory: Path, *, ram_bytes: int = 256 << 20, files: Files | None = None
) -> TieredStore:
    disk = DiskConfig(directory=str(directory), capacity_bytes=256 << 20, min_free_bytes=0)
    ram = RamStore(CacheConfig(capacity_bytes=ram_bytes, block_size=BLOCK))
    return TieredStore(ram, DiskTier(disk, files=files))


class Session:
    """An engine over one family, fed with requests whose answers are decided beforehand."""

    def __init__(self, family: str, store: PrefixStore, **options: Any) -> None:
        self.family = family
        self.store = store
        options = {"max_num_seqs": 4, "checkpoint_interval": 16, **options}
        runner = make_runner(model_of(family), zoo.config(family))
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
