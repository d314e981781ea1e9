"""A fingerprint notices every difference that changes what a model computes."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from treadle_core.mlx_runtime.fingerprint import fingerprint
from treadle_core.testing import zoo

PATH = "model.layers.1.self_attn.q_proj"


def weight_of(model: Any, path: str = PATH) -> Any:
    module = model
    for name in path.split("."):
        module = module[int(name)] if name.isdigit() else module[name]
    return module


def test_the_same_weights_have_the_same_fingerprint() -> None:
    assert fingerprint(zoo.build("llama")) == fingerprint(zoo.build("llama"))


@pytest.mark.parametrize("place", [(0, 0), (3, 5), (-1, -1)])
def test_one_bit_of_one_weight_counts(place: tuple[int, int]) -> None:
    model = zoo.build("llama")
    before = fingerprint(model)
    weight = weight_of(model).weight
    bits = weight.view(mx.uint32)
    bits[place] = bits[place] ^ 1
    weight_of(model).weight = bits.view(mx.float32)
    assert fingerprint(model) != before


def test_where_a_value_stands_counts() -> None:
    model = zoo.build("llama")
    before = fingerprint(model)
    weight = weight_of(model).weight
    for order in ([1, 0], [5, 1]):
        swapped = mx.array(weight)
        swapped[order[0]], swapped[order[1]] = weight[order[1]], weight[order[0]]
        weight_of(model).weight = swapped
        assert fingerprint(model) != before
    weight_of(model).weight = weight
    assert fingerprint(model) == before


def test_whose_a_weight_is_counts() -> None:
    model = zoo.build("llama")
    before = fingerprint(model)
    one, other = weight_of(model), weight_of(model, PATH.replace(".1.", ".0."))
    one.weight, other.weight = other.weight, one.weight
    assert fingerprint(model) != before


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_the_dtype_counts(dtype: mx.Dtype) -> None:
    model = zoo.build("llama")
    before = fingerprint(model)
    model.set_dtype(dtype)
    assert fingerprint(model) != before


def test_hyperparameters_count() -> None:
    """Which leave the weights as they are, but not what is computed from them."""
    assert fingerprint(zoo.build("llama")) != fingerprint(zoo.build("llama", rope_theta=5000.0))


def test_quantised_weights_count_too() -> None:
    model = zoo.build("llama")
    plain = fingerprint(model)
    mx.random.seed(0)
    quantised = zoo.build("llama")

    nn.quantize(quantised, group_size=32, bits=8)
    eight = fingerprint(quantised)
    assert eight != plain
    other = zoo.build("llama")
    nn.quantize(other, group_size=32, bits=4)
    assert fingerprint(other) not in (plain, eight)


def test_a_large_weight_is_read_in_pieces() -> None:
    """To the last word of it."""
    model = zoo.build("llama", vocab_size=70_000)
    before = fingerprint(model)
    table = weight_of(model, "model.embed_tokens")
    assert table.weight.size > 2**22
    changed = mx.array(table.weight)
    changed[-1, -1] += 1
    table.weight = changed
    assert fingerprint(model) != before
