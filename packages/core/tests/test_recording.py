"""Recurrent parts of a model are seen at work, run again over fewer tokens, and stay what they are."""

from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache

from treadle_core.errors import Unsupported
from treadle_core.layers import ModelSpec
from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.fingerprint import fingerprint
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.mlx_runtime.probe import (
    check_drafts,
    relative_difference,
    run_alone,
    run_wide,
    take_back,
    went_back,
)
from treadle_core.mlx_runtime.recording import Call, RecordedCache, Recorder, record_inputs
from treadle_core.testing import zoo

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}

# What mlx-lm has besides the zoo's: other scans, parts that ignore lengths, two parts of one state.
OTHERS: dict[str, dict[str, Any]] = {
    "mamba": {
        **SMALL,
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "jamba": {
        **SMALL,
        **HEADS,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
    },
    "rwkv7": {
        **SMALL,
        "norm_eps": 1e-5,
        "head_dim": 16,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "plamo2": {
        **SMALL,
        **HEADS,
        "hidden_size_per_head": 8,
        "mamba_d_state": 8,
        "mamba_num_heads": 4,
    },
}


def build(family: str, **settings: Any) -> tuple[TextModel, ModelSpec]:
    settings["model_type"] = family
    module = import_module(f"mlx_lm.models.{family}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(settings))
    # Some begin with zeros, and then their state would not show in the logits.
    parameters = tree_flatten(model.parameters())
    weights = [(name, w + 0.3 * mx.random.normal(w.shape)) for name, w in parameters]
    model.load_weights(weights)
    mx.eval(model.parameters())
    text = TextModel(model.eval())
    return text, inspect(text, settings)


@pytest.mark.parametrize("family", OTHERS)
def test_rows_of_other_families_keep_some_of_what_they_were_fed(family: str) -> None:
    model, spec = build(family, **OTHERS[family])

    written, group = run_wide(model, spec)

    assert relative_difference(written, run_alone(model)) < 1e-4

    assert relative_difference([take_back(group)], [went_back(model)]) < 1e-4


@pytest.mark.parametrize("family", OTHERS)
def test_it_would_show_if_rows_went_on_from_all_that_they_were_fed(family: str) -> None:
    model, spec = build(family, **OTHERS[family])
    _, group = run_wide(model, spec)
    keep, group.keep = group.keep, lambda kept: keep([3] * len(kept))

    assert relative_difference([take_back(group)], [went_back(model)]) > 1e-2


def test_a_model_whose_states_nobody_is_seen_to_write_refuses_drafts_when_it_is_loaded() -> None:
    """One part of it takes two caches of a layer at once."""
    settings = {
        **SMALL,
        **HEADS,
        "model_type": "baichuan_m1",
        "rope_theta": 10000.0,
        "sliding_window": 16,
        "sliding_window_layers": [1],
        "conv_window": 2,
        "rms_norm_eps": 1e-5,
    }
    model, spec = build("baichuan_m1", **settings)

    assert "no part of the model was seen to write recurrent state" in check_drafts(model, spec)
    with pytest.raises(Unsupported, match=r"^no drafts can be verified with baichuan_m1: "):
        make_runner(model.model, settings, slack=3)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2_hybrid", "nemotron_h"])
def test_a_recorded_model_is_the_same_model(family: str) -> None:
    model = zoo.build(family)
    before = dict(tree_flatten(model.parameters()))
    identity, logits = fingerprint(model), zoo.reference_logits(model, [1, 2, 3])

    record_inputs(model)
    parts = [id(part) for _, part in model.named_modules()]
    record_inputs(model)

    assert [id(part) for _, part in model.named_modules()] == parts
    assert any(isinstance(part, Recorder) for part in model.modules())
    assert fingerprint(model) == identity
    assert mx.array_equal(zoo.reference_logits(model, [1, 2, 3]), logits)
    after = dict(tree_flatten(model.parameters()))
    assert all(after[name] is weight for name, weight in before.items())
    model.load_weights([(name, weight * 2) for name, weight in before.items()])
    assert not mx.array_equal(zoo.reference_logits(model, [1, 2, 3]), logits)


def test_a_model_of_attention_alone_is_left_as_it_is() -> None:
    model = zoo.build("llama")

    runner = make_runner(model, zoo.config("llama"), slack=3)

    assert runner.max_draft_tokens == 3
    assert not any(isinstance(part, Recorder) for part in model.modules())


class Part(nn.Module):
    """Adds what it is given to the first array of a state, and counts tokens in the second."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        if inner is not None:
            self.inner = inner

    def __call__(self, x: mx.array, other: Any = None, *, cache: Any = None) -> mx.array:
        if "inner" in self:
            return self.inner(x, other, cache=cache)
        cache[0] = cache[0] + x.sum(axis=1)
        cache[1] = cache[1] + x.shape[1]
        return x


class Parts(nn.Module):
    """A part within a part, twice in the same model, and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = Part(Part())
        self.again = self.outer
        self.rest = [nn.Linear(2, 2), {"deep": Part()}]


def state(rows: int) -> RecordedCache:
    cache = RecordedCache(2)
    cache.cache = [mx.zeros((rows, 2)), mx.zeros((rows, 1))]
    return cache


def test_the_innermost_part_that_is_given_a_state_is_noted_with_all_that_it_was_given() -> None:
    parts, cache = Parts(), state(3)
    record_inputs(parts)
    cache.calls = []
    x = mx.arange(24.0).reshape(3, 4, 2)

    parts.again(x, "other", cache=cache)
    parts.rest[1]["deep"](x, cache=cache)

    assert parts.again is parts.outer
    assert len(cache.calls) == 2
    for rows, num in (([0, 1, 2], 2), ([2], 1), ([0, 2], 3)):
        once = state(len(rows))
        for call in cache.calls:
            call.again(once, (3, 4), rows, num)
        assert once.calls is None
        assert once[1].tolist() == [[2 * num]] * len(rows)
        assert mx.array_equal(once[0], 2 * x[mx.array(rows), :num].sum(axis=1))


def test_nothing_is_noted_for_caches_that_do_not_want_to_know() -> None:
    parts = Parts()
    record_inputs(parts)
    quiet, own = state(1), ArraysCache(2)
    own.cache = [mx.zeros((1, 2)), mx.zeros((1, 1))]

    for cache in (quiet, own):
        parts.outer(mx.ones((1, 1, 2)), cache=cache)

    assert quiet.calls is None
    assert quiet[1].item() == own[1].item() == 1


def test_arguments_are_cut_by_rows_and_tokens_as_far_as_they_have_them() -> None:
    seen: list[Any] = []
    call = Call(
        lambda *args, **options: seen.extend([*args, *options.values()]),
        (mx.ones((3, 4, 2)), mx.ones((3,)), mx.ones((7, 4)), None, "word"),
        {"mask": mx.ones((3, 4)), "scale": 2.0},
    )

    call.again(state(2), (3, 4), [0, 2], 3)

    shapes = [value.shape if isinstance(value, mx.array) else value for value in seen]
    assert shapes == [(2, 3, 2), (2,), (7, 4), None, "word", (2, 3), 2.0]
