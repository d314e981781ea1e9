"""``max_kv_size``: a query sees the first four tokens and the newest of the rest, and no more."""

import random
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from treadle_core.errors import Unsupported
from treadle_core.layers import Window
from treadle_core.mlx_runtime.load import KEPT_TOKENS, bounded, make_runner
from treadle_core.testing import zoo

from .harness import (
    Driver,
    Script,
    Subject,
    play,
    random_scripts,
    random_tokens,
    reference,
    subject,
)


class ExplicitCache:
    """Everything that a layer ever wrote, and a mask written out position by position.

    Args:
        size: Tokens that a query sees, itself and the kept ones included.
        keep: First tokens that every query sees.
    """

    def __init__(self, size: int, keep: int) -> None:
        self.size, self.keep = size, keep
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        def sees(query: int, position: int) -> bool:
            is_new = position > query - (self.size - self.keep)
            return position <= query and (is_new or position < self.keep)

        positions = range(num_tokens)
        return mx.array([[sees(query, position) for position in positions] for query in positions])


@cache
def brute_force(target: Subject, tokens: tuple[int, ...], size: int) -> np.ndarray:
    """Logits of one forward with full-length attention under explicit masks."""
    caches = [
        ExplicitCache(min(layer.size, size), layer.keep)
        if isinstance(layer, Window)
        else ExplicitCache(size, KEPT_TOKENS)
        for layer in target.spec.layers
    ]
    return np.array(target.model.forward(mx.array([tokens]), caches))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size", "slack"),
    [
        ("llama", 9, 0),
        ("llama", 30, 4),
        ("llama", 64, 1),
        ("llama", 90, 0),
        ("gemma3", 30, 2),
        ("gemma3", 70, 0),
        ("deepseek_v3", 9, 4),
        ("deepseek_v3", 64, 0),
    ],
)
def test_bounded_rows_equal_full_attention_under_the_mask_that_the_bound_means(
    family: str, size: int, slack: int
) -> None:
    rng = random.Random(f"{family} {size} {slack}")
    target = subject(family)
    driver = Driver(
        target,
        spec=bounded(target.spec, size),
        slack=slack,
        expect=lambda tokens: brute_force(target, tokens, size),
    )

    # By the harness's order of chunks: 1, 7, 64 and all at once, and 1 again.
    lengths = [size + 1, 3 * size, 2 * size + 80, 3 * size, 1]
    play(driver, random_scripts(rng, lengths, num_decoded=30), rng, num_tokens=slack + 1)


def test_the_bound_matters_from_the_first_token_beyond_it_on() -> None:
    target = subject("llama")
    tokens = tuple(range(40))

    unbounded, cut = reference(target, tokens), brute_force(target, tokens, 20)

    different = np.abs(unbounded - cut).max(axis=-1) > 1e-3
    assert not different[:20].any()
    assert different[20:].all()


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v32", "qwen3_next", "lfm2"])
def test_rows_shorter_than_the_bound_equal_unbounded_ones(family: str) -> None:
    rng = random.Random(family)
    target = subject(family)
    driver = Driver(target, spec=bounded(target.spec, 100))

    play(driver, random_scripts(rng, [1, 30, 64, 70], num_decoded=30), rng)


def test_a_long_row_takes_no_more_memory_than_the_bound() -> None:
    target = subject("llama")
    spec = bounded(target.spec, 50)
    driver = Driver(target, spec=spec, expect=lambda tokens: brute_force(target, tokens, 50))
    rng = random.Random("memory")
    script = Script(("long", 0), random_tokens(rng, 200), 200, 64, 200)

    driver.admit(script)
    while not script.is_prefilled:
        driver.prefill(script)
    group, _ = driver.layout.place(script.key)
    held = sum(array.nbytes for array in driver.groups[group].arrays())

    per_token = sum(
        2 * layer.heads * layer.key_dim * 4 for layer in spec.layers if isinstance(layer, Window)
    )
    assert held == driver.layout.allocated_bytes == 50 * per_token


@pytest.mark.parametrize("family", ["llama4", "gpt_bigcode", "gemma2"])
def test_a_bound_is_refused_where_rows_run_one_at_a_time(family: str) -> None:
    model, config = zoo.build(family), zoo.config(family)

    with pytest.raises(Unsupported, match=r"max_kv_size cannot be honoured for \w+: .+"):
        make_runner(model, config, max_kv_size=64)


@pytest.mark.parametrize("size", [1, 2 * KEPT_TOKENS])
def test_a_bound_that_leaves_nothing_beside_the_kept_tokens_is_refused(size: int) -> None:
    with pytest.raises(Unsupported, match=f"max_kv_size: got {size}, expected more than 8"):
        make_runner(zoo.build("llama"), zoo.config("llama"), max_kv_size=size)


def test_the_runner_keeps_what_was_asked_for() -> None:
    runner = make_runner(zoo.build("gemma3"), zoo.config("gemma3"), max_kv_size=40)

    kinds = [(layer.size, layer.keep) for layer in runner.spec.layers if isinstance(layer, Window)]
    assert kinds == [(zoo.SLIDING_WINDOW, 0), (40, KEPT_TOKENS)] * 2
