"""``kv_bits``: rows that share a forward equal mlx-lm's own run of each over its quantised caches."""

import random
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from treadle_core.errors import Unsupported
from treadle_core.layers import FullAttention, Quantised, flatten, state_layout
from treadle_core.mlx_runtime.groups import SlotGroup
from treadle_core.mlx_runtime.load import make_runner, quantised
from treadle_core.mlx_runtime.stores import QuantisedStore
from treadle_core.plan import Open, Resize
from treadle_core.testing import zoo

from .harness import (
    POISON,
    TOLERANCE,
    Driver,
    Script,
    Subject,
    deviation,
    play,
    poisoned,
    random_scripts,
    random_tokens,
    reference,
    subject,
)

HEAD_DIM = 64
ALL_FULL = ["llama", "qwen3", "moe"]
WORKS = [
    *ALL_FULL,
    "gemma3",
    "olmo3",
    "qwen3_next",
    "qwen3_5",
    "mamba2_hybrid",
    "granite_hybrid",
    "nemotron_h",
    "lfm2",
]
REFUSED = {
    "gemma2": r"batching raised ValueError: .+",
    "gpt_oss": r"full attention over quantised KV, in 2 of its 4 layers, raised ValueError: .+ sinks\.",
    "llama4": r"layers with ChunkedKVCache run one row at a time",
    "deepseek_v3": r"latent attention \(MLA\), in 3 layers, cannot be quantised",
    "deepseek_v32": r"latent attention \(MLA\), in 3 layers, cannot be quantised",
    "gpt_bigcode": r"batching raised ValueError: .+",
    "mamba2": r"it has no caches of full attention, only recurrent ones in 3 layers",
}

# These take the dimension of a head from the width.
WIDE: dict[str, dict[str, int]] = {
    "lfm2": {"hidden_size": 4 * HEAD_DIM, "block_dim": 4 * HEAD_DIM},
    "granite_hybrid": {"hidden_size": 4 * HEAD_DIM},
    "gpt_bigcode": {"n_embd": 4 * HEAD_DIM},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "mamba2": {},
}

# Their scans and rings add up in another order chunk by chunk. Now and then that decides which of two
# neighbouring numbers a key becomes, and later layers see it, in mlx-lm's own runs as well. The
# other families' layers give the same bits whatever runs beside a row.
ROUNDS = frozenset({"gemma3", "olmo3", "mamba2_hybrid", "granite_hybrid", "nemotron_h"})
ROUNDING = 1e-2
FLIPPED = 0.01
STEPS = 4


def options(family: str) -> dict[str, int]:
    """Heads of 64 numbers, whatever the family calls that."""
    return WIDE.get(family, {"head_dim": HEAD_DIM})


@cache
def wide(family: str) -> Subject:
    return subject(family, **options(family))


def own_caches(model: nn.Module, bits: int, group_size: int) -> list[Any]:
    """mlx-lm's quantised caches in place of its plain ones; the others are left alone."""
    return [_own_cache(cache, bits, group_size) for cache in make_prompt_cache(model)]


def _own_cache(cache: Any, bits: int, group_size: int) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_own_cache(part, bits, group_size) for part in cache.caches))
    return QuantizedKVCache(group_size, bits) if type(cache) is KVCache else cache


@cache
def own_run(target: Subject, bits: int, group_size: int, tokens: tuple[int, ...]) -> np.ndarray:
    """Logits of mlx-lm's own run over ``tokens`` alone, in one forward."""
    caches = own_caches(target.model.model, bits, group_size)
    return np.array(target.model.forward(mx.array([tokens]), caches))[0]


class StoredDriver(Driver):
    """Compares what a row holds when it leaves, too: number by number with mlx-lm's own caches."""

    def release(self, script: Script) -> None:
        if script.written and POISON not in script.tokens:
            self.compare_stored(script)
        super().release(script)

    def compare_stored(self, script: Script) -> None:
        number, row = self.layout.place(script.key)
        group = self.groups[number]
        assert isinstance(group, SlotGroup)
        stores = [store for store in group.stores if isinstance(store, QuantisedStore)]
        form = stores[0].form
        caches = own_caches(self.target.model.model, form.bits, form.group_size)
        self.target.model.forward(mx.array([script.tokens[: script.written]]), caches)
        for store, own in zip(stores, quantised_in(caches), strict=True):
            payload = store.read_state(row, script.written)
            keys, values = own.keys_and_values()
            for mine, other in ((payload[0], keys[0]), (payload[3], values[0])):
                steps = np.abs(numbers(mine, form.bits) - numbers(other, form.bits))
                if self.target.family in ROUNDS:
                    assert steps.max() <= STEPS
                    assert (steps > 0).mean() <= FLIPPED
                else:
                    assert not steps.any()


def quantised_in(caches: list[Any]) -> list[QuantizedKVCache]:
    """The quantised ones of a model's caches."""
    parts = [p for own in caches for p in (own.caches if isinstance(own, CacheList) else [own])]
    return [part for part in parts if isinstance(part, QuantizedKVCache)]


def numbers(packed: mx.array, bits: int) -> np.ndarray:
    """What 32-bit words are packed of."""
    octets = np.array(packed).view(np.uint8).astype(np.int32)
    return octets if bits == 8 else np.stack([octets & 15, octets >> 4])


def driver_of(target: Subject, bits: int, group_size: int = 64, **others: Any) -> StoredDriver:
    spec = quantised(target.spec, bits, group_size)
    expect = partial(own_run, target, bits, group_size)
    tolerance = ROUNDING if target.family in ROUNDS else TOLERANCE
    return StoredDriver(target, spec=spec, expect=expect, tolerance=tolerance, **others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "bits", "group_size"),
    [(family, bits, 64) for family in ALL_FULL for bits in (4, 8)]
    + [("llama", 4, 32), ("llama", 8, 32)]
    + [(family, 8 - 4 * (i % 2), 64) for i, family in enumerate(WORKS[len(ALL_FULL) :])],
)
def test_rows_that_join_and_leave_at_random_equal_mlx_lms_own_quantised_runs(
    family: str, bits: int, group_size: int
) -> None:
    rng = random.Random(f"{family} {bits} {group_size}")
    grows = Script(("grows", 0), random_tokens(rng, 80), 60, 7, 80)
    driver = driver_of(wide(family), bits, group_size)

    lengths = [1, 150, 2, *(rng.randint(1, 100) for _ in range(2))]
    play(driver, [grows, *random_scripts(rng, lengths, num_decoded=20)], rng)

    assert driver.obeyed >= {"Open", "Promote", "Close", "Resize", "Transfer"}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "bits"), [("llama", 4), ("gemma3", 8)])
def test_up_to_five_tokens_per_row_of_which_each_row_keeps_some_equal_its_own_run(
    family: str, bits: int
) -> None:
    rng = random.Random(f"{family} {bits} five")
    driver = driver_of(wide(family), bits, slack=4)

    play(driver, random_scripts(rng, [1, 31, 2, 60, 100], num_decoded=40), rng, num_tokens=5)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_whose_values_are_not_finite_disturb_no_row_before_or_after_them(bits: int) -> None:
    rng = random.Random(f"poison {bits}")
    driver = driver_of(poisoned("llama", head_dim=HEAD_DIM), bits, spoils=False)
    scripts = random_scripts(rng, [20, 1, 60, 5, 90, 33], num_decoded=30)
    for script in scripts[1::2]:
        position = rng.randrange(len(script.tokens))
        script.tokens = (*script.tokens[:position], POISON, *script.tokens[position + 1 :])

    play(driver, scripts, rng)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_eight_bits_are_near_the_exact_run_and_four_are_further(family: str) -> None:
    target, tokens = wide(family), random_tokens(random.Random(family), 120)

    exact = reference(target, tokens)
    eight, four = (deviation(own_run(target, bits, 64, tokens), exact) for bits in (8, 4))

    assert 1e-3 < eight < 0.1
    assert 4 * eight < four


@pytest.mark.parametrize("bits", [4, 8])
def test_the_buffers_are_those_of_mlx_lms_own_cache_bit_for_bit(bits: int) -> None:
    target, tokens = wide("llama"), random_tokens(random.Random(bits), 50)
    spec = quantised(target.spec, bits, 64)
    group = SlotGroup(target.model, spec.layers, slack=0, width_step=64)
    group.resize(Resize(0, 2, 64))
    group.open(Open(0, 0))
    caches = own_caches(target.model.model, bits, 64)

    for chunk in (tokens[:7], tokens[7:20], tokens[20:]):
        start = caches[0].offset
        mx.eval(group.prefill(0, chunk, start), target.model.forward(mx.array([chunk]), caches))

    for store, own in zip(group.stores, caches, strict=True):
        keys, values = own.keys_and_values()
        for mine, other in zip(store.read_state(0, len(tokens)), [*keys, *values], strict=True):
            assert mine.dtype == other.dtype
            assert mx.array_equal(mine, other)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (8, 32), (8, 64)])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2_hybrid", "qwen3_next"])
def test_what_is_allocated_is_what_was_counted(family: str, bits: int, group_size: int) -> None:
    driver = driver_of(wide(family), bits, group_size)
    rng = random.Random(family)
    for number in range(3):
        script = Script((str(number), 0), random_tokens(rng, 40), 40, 16, 40)
        driver.admit(script)
        while not script.is_prefilled:
            driver.prefill(script)
    held = sum(array.nbytes for group in driver.groups.values() for array in group.arrays())

    # State arrays grow with the rows, not with the rows that are allocated.
    unused = sum(g.rows - g.num_used for g in driver.layout.groups.values())
    parts = [part for layer in driver.spec.layers for part in flatten(layer)]
    states = sum(array.nbytes for array in driver.groups[0].arrays() if array.shape[0] == 3)
    others = not all(isinstance(part, FullAttention) for part in parts)
    assert held == driver.layout.allocated_bytes - others * unused * states // 3
    layout = state_layout(driver.spec)
    exact = state_layout(wide(family).spec)
    assert layout.token_bytes * 32 == exact.token_bytes * (bits + 64 // group_size)
    assert layout.format != exact.format


@pytest.mark.parametrize("family", WORKS)
@pytest.mark.parametrize("bits", [4, 8])
def test_full_attention_is_quantised_and_nothing_else(family: str, bits: int) -> None:
    model, config = zoo.build(family, **options(family)), zoo.config(family, **options(family))
    plain = make_runner(model, config)

    runner = make_runner(model, config, kv_bits=bits)

    for layer, before in zip(runner.spec.layers, plain.spec.layers, strict=True):
        for part, part_before in zip(flatten(layer), flatten(before), strict=True):
            is_full = isinstance(part, FullAttention)
            assert (part != part_before) is is_full
            assert not is_full or part.quantised == Quantised(bits, 64)


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_quantised_is_refused_by_kind_and_number(family: str) -> None:
    model, config = zoo.build(family, **options(family)), zoo.config(family, **options(family))

    sentence = rf"^kv_bits cannot be honoured for \w+: {REFUSED[family]}$"
    with pytest.raises(Unsupported, match=sentence):
        make_runner(model, config, kv_bits=8)


def test_every_family_works_or_is_refused() -> None:
    assert sorted([*WORKS, *REFUSED]) == sorted(zoo.FAMILIES)


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"kv_bits": 6}, "kv_bits: got 6, expected 4 or 8"),
        ({"kv_bits": 0}, "kv_bits: got 0, expected 4 or 8"),
        ({"kv_bits": 4, "kv_group_size": 16}, "kv_group_size: got 16, expected 32 or 64"),
        (
            {"kv_bits": 4, "kv_group_size": 64},
            "kv_bits cannot be honoured for llama: heads of 32, in 3 layers, are no multiple of 64",
        ),
        ({"kv_bits": 8, "max_kv_size": 100}, "max_kv_size and kv_bits exclude each other: .+"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_one_sentence(
    others: dict[str, int], sentence: str
) -> None:
    with pytest.raises(Unsupported, match=f"^{sentence}$"):
        make_runner(zoo.build("llama", head_dim=32), zoo.config("llama", head_dim=32), **others)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("family", ["llama", "mamba2_hybrid"])
def test_half_precision_is_proven_too(family: str, dtype: mx.Dtype, bits: int) -> None:
    model = zoo.build(family, **options(family))
    model.set_dtype(dtype)

    runner = make_runner(model, zoo.config(family, **options(family)), kv_bits=bits)

    assert runner.spec.batched


class Spoilt(nn.Module):
    """A llama that does something to its quantised caches that its own run does not show."""

    def __init__(self, spoil: Any) -> None:
        super().__init__()
        self.inner = zoo.build("llama", head_dim=HEAD_DIM)
        self.layers = self.inner.layers
        self._spoil = spoil

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        if hasattr(cache[0], "bits") and not isinstance(cache[0], QuantizedKVCache):
            self._spoil(cache)
        return self.inner(tokens, cache=cache)


def shift(caches: list[Any]) -> None:
    """Positions that are off by three."""
    for own in caches:
        own.offset = own.offset + 3


def halve(caches: list[Any]) -> None:
    """An attention that reads other numbers than were written."""
    for own in caches:
        own.group_size = 32


def refuse(caches: list[Any]) -> None:
    raise NotImplementedError("only plain arrays, please")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (shift, r"differs between batched and single rows by \d\S* of the logits' scale"),
        (halve, r"raised ValueError: .+"),
        (refuse, r"raised NotImplementedError: only plain arrays, please"),
    ],
)
def test_an_attention_that_is_wrong_over_quantised_slots_is_found_out(
    spoil: Any, says: str
) -> None:
    config = zoo.config("llama", head_dim=HEAD_DIM)
    assert make_runner(Spoilt(spoil), config).spec.batched

    with pytest.raises(Unsupported, match=rf"in 3 of its 3 layers, {says}$"):
        make_runner(Spoilt(spoil), config, kv_bits=8)
