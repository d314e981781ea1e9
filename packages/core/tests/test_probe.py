"""Which models may share a forward is proven at load, and a wrong batch is found out."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models import recurrent_gemma as recurrent

from treadle_core.layers import ModelSpec
from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.mlx_runtime.probe import (
    QUANTISED_TOLERANCE,
    TOLERANCES,
    check_batching,
    check_drafts,
    relative_difference,
    run_alone,
    run_wide,
    tolerance_of,
)
from treadle_core.testing import zoo

ALONE = {
    "gemma2": r"batching raised ValueError: .+ cannot be broadcast\.",
    "llama4": r"layers with ChunkedKVCache run one row at a time",
    "gpt_bigcode": r"batching raised ValueError: .+",
}


@pytest.mark.parametrize("family", [family for family in zoo.FAMILIES if family not in ALONE])
def test_rows_of_known_families_share_a_forward(family: str) -> None:
    runner = make_runner(zoo.build(family), zoo.config(family))

    assert (runner.spec.batched, runner.spec.note) == (True, "")


@pytest.mark.parametrize("family", ALONE)
def test_rows_of_other_families_run_alone_and_the_reason_is_a_sentence(family: str) -> None:
    runner = make_runner(zoo.build(family), zoo.config(family))

    assert not runner.spec.batched
    with pytest.raises(AssertionError, match=rf"^{ALONE[family]}$"):
        raise AssertionError(runner.spec.note)


class Wrapped(nn.Module):
    """A model that does something with its caches or logits that only shows in a batch."""

    def __init__(
        self,
        before: Callable[[list[Any]], Any] = lambda caches: None,
        after: Callable[[mx.array], mx.array] = lambda logits: logits,
        family: str = "llama",
    ) -> None:
        super().__init__()
        self.inner = zoo.build(family)
        self.layers = self.inner.layers
        self._before, self._after = before, after

    def make_cache(self) -> list[Any]:
        return [type(cache)() for cache in TextModel(self.inner).new_cache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        if tokens.shape[0] > 1:
            self._before(cache)
        logits = self.inner(tokens, cache=cache)
        return self._after(logits) if tokens.shape[0] > 1 else logits


def verdict(model: nn.Module) -> ModelSpec:
    text = TextModel(model)
    return check_batching(text, inspect(text, zoo.config("llama")))


def take_the_first_rows_offset(caches: list[Any]) -> None:
    for cache in caches:
        cache.offset = mx.broadcast_to(cache.offset[:1], cache.offset.shape)


def take_the_longest_rows_offset(caches: list[Any]) -> None:
    for cache in caches:
        cache.offset = mx.broadcast_to(mx.max(cache.offset), cache.offset.shape)


class Unmasked:
    """A cache that masks nothing."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.offset = inner.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.inner.update_and_fetch(keys, values)

    def make_mask(self, *args: Any, **options: Any) -> None:
        return None


def mask_nothing(caches: list[Any]) -> None:
    caches[:] = [Unmasked(cache) for cache in caches]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: Wrapped(take_the_first_rows_offset), id="offset of the first row"),
        pytest.param(lambda: Wrapped(take_the_longest_rows_offset), id="offset of the longest row"),
        pytest.param(lambda: Wrapped(mask_nothing), id="no mask"),
        pytest.param(lambda: Wrapped(after=lambda logits: logits[::-1]), id="rows mixed up"),
        pytest.param(lambda: Wrapped(after=lambda logits: logits * mx.nan), id="not a number"),
        pytest.param(lambda: Wrapped(after=lambda logits: logits[:1]), id="a row missing"),
    ],
)
def test_a_model_that_is_wrong_in_batches_only_runs_its_rows_alone(
    model: Callable[[], nn.Module],
) -> None:
    spec = verdict(model())

    assert not spec.batched
    assert spec.note


def test_a_model_that_raises_in_batches_runs_its_rows_alone_and_says_why() -> None:
    def refuse(caches: list[Any]) -> None:
        raise NotImplementedError("one at a time, please")

    spec = verdict(Wrapped(refuse))

    assert not spec.batched
    assert spec.note == "batching raised NotImplementedError: one at a time, please"


def test_a_wrapper_that_does_nothing_shares_a_forward() -> None:
    assert verdict(Wrapped()).batched


def test_half_precision_passes_and_a_wrong_position_does_not() -> None:
    model = zoo.build("llama")
    model.set_dtype(mx.bfloat16)
    wrong = Wrapped(take_the_first_rows_offset)
    wrong.inner.set_dtype(mx.bfloat16)

    assert verdict(model).batched
    assert not verdict(wrong).batched


def test_the_difference_is_relative_to_the_largest_logit() -> None:
    one, other = [mx.array([[10.0, -20.0]])], [mx.array([[10.0, -19.0]])]

    assert relative_difference(one, other) == pytest.approx(1 / 19)
    assert relative_difference(one, one) == 0
    assert relative_difference(one, other) > QUANTISED_TOLERANCE


def quantise(model: nn.Module, dtype: mx.Dtype) -> nn.Module:
    model.set_dtype(dtype)
    nn.quantize(
        model,
        group_size=32,
        bits=4,
        class_predicate=lambda _, part: (
            hasattr(part, "to_quantized") and part.weight.shape[-1] % 32 == 0
        ),
    )
    return model


on_a_cpu = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="a GPU may multiply float32 with fewer bits"
)


@on_a_cpu
@pytest.mark.parametrize(
    ("dtype", "expected"), [(mx.float32, 1e-3), (mx.float16, 0.05), (mx.bfloat16, 0.05)]
)
def test_full_precision_is_held_to_more_than_half(dtype: mx.Dtype, expected: float) -> None:
    plain = zoo.build("llama")
    plain.set_dtype(dtype)

    assert tolerance_of(TextModel(plain)) == expected
    assert tolerance_of(TextModel(quantise(zoo.build("llama"), dtype))) == expected


@on_a_cpu
def test_what_would_pass_for_rounding_in_half_precision_does_not_in_full() -> None:
    def off_by_a_little(logits: mx.array) -> mx.array:
        return logits * (1 + 2e-3)

    half = Wrapped(after=off_by_a_little)
    half.inner.set_dtype(mx.bfloat16)

    assert not verdict(Wrapped(after=off_by_a_little)).batched
    assert verdict(half).batched


def recurrent_gemma() -> nn.Module:
    """One of which a token's weight in the state is 1 where there is no state yet, else far less."""
    args = recurrent.ModelArgs(
        model_type="recurrent_gemma",
        attention_bias=False,
        conv1d_width=4,
        hidden_size=64,
        intermediate_size=128,
        logits_soft_cap=30.0,
        num_attention_heads=4,
        num_hidden_layers=3,
        num_key_value_heads=1,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        attention_window_size=16,
        vocab_size=320,
        block_types=["recurrent", "recurrent", "attention"],
    )
    model: Any = recurrent.Model(args)

    def redrawn(parameter: mx.array) -> mx.array:
        return 0.2 * mx.random.normal(parameter.shape, key=mx.random.key(3))

    model.update(tree_map(redrawn, model.parameters()))
    for layer in model.layers[:2]:
        # Of a state, about half stays from token to token.
        layer.temporal_block.rg_lru.recurrent_param = mx.full((64,), -1.5)
    return model


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_model_to_which_zeros_are_no_fresh_state_runs_its_rows_alone(dtype: mx.Dtype) -> None:
    model = recurrent_gemma()
    model.set_dtype(dtype)

    runner = make_runner(model, {"model_type": "recurrent_gemma"})

    assert not runner.spec.batched
    assert runner.spec.note.startswith("state of zeros is no fresh state: ")


def test_drafts_of_a_model_with_experts_in_few_bits_are_held_against_forwards_as_wide() -> None:
    model = TextModel(quantise(zoo.build("granite_hybrid"), mx.bfloat16))
    spec = inspect(model, zoo.config("granite_hybrid"))
    written, _ = run_wide(model, spec)

    assert relative_difference(written, run_alone(model)) > TOLERANCES[mx.bfloat16]
    assert check_drafts(model, spec) == ""
