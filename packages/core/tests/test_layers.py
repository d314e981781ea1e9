"""Bytes of each kind of layer, and what a bounded cache makes of it."""

import pytest
from msgspec.structs import replace

from treadle_core.layers import (
    Composite,
    FullAttention,
    LayerSpec,
    ModelSpec,
    Opaque,
    Quantised,
    Recurrent,
    Window,
    bound,
    grows,
    layer_bytes,
    quantise,
    ring_size,
    state_layout,
)
from treadle_core.prefix import TokenArray

FULL = FullAttention(heads=2, key_dim=4, value_dim=3, dtype="bfloat16")
LATENT = FullAttention(heads=1, key_dim=32, value_dim=8, dtype="float16")
WINDOW = Window(heads=2, key_dim=4, value_dim=3, dtype="float32", size=100, keep=4)
RECURRENT = Recurrent(shapes=((3, 5), (2,)), dtypes=("float32", "bfloat16"))
EIGHT, FOUR = Quantised(8, 64), Quantised(4, 32)
WIDE = FullAttention(heads=2, key_dim=64, value_dim=128, dtype="float16")
OPAQUE = Opaque(bytes_per_token=11)


@pytest.mark.parametrize(
    ("layer", "capacity", "slack", "expected"),
    [
        (FULL, 64, 0, 3 * 64 * 2 * 7 * 2),
        (FULL, 64, 9, 3 * 64 * 2 * 7 * 2),
        (LATENT, 64, 0, 3 * 64 * 40 * 2),
        (quantise(WIDE, EIGHT), 64, 0, 3 * 64 * 2 * (192 + 3 * 2 * 2)),
        (quantise(WIDE, FOUR), 64, 0, 3 * 64 * 2 * (96 + 6 * 2 * 2)),
        (quantise(Composite((WIDE, RECURRENT)), FOUR), 64, 0, 3 * (64 * 2 * 120 + 64)),
        (WINDOW, 64, 0, 3 * 64 * 2 * 7 * 4),
        (WINDOW, 4_096, 0, 3 * 100 * 2 * 7 * 4),
        (WINDOW, 4_096, 7, 3 * 107 * 2 * 7 * 4),
        (RECURRENT, 64, 0, 3 * (15 * 4 + 2 * 2)),
        (RECURRENT, 4_096, 7, 2 * 3 * (15 * 4 + 2 * 2)),
        (Composite((FULL, RECURRENT)), 64, 0, 3 * (64 * 2 * 7 * 2 + 64)),
        (OPAQUE, 64, 0, 3 * 64 * 11),
    ],
)
def test_bytes_of_three_rows(layer: LayerSpec, capacity: int, slack: int, expected: int) -> None:
    assert layer_bytes(layer, 3, capacity, slack) == expected


@pytest.mark.parametrize("layer", [FULL, WINDOW, RECURRENT, Composite((FULL, WINDOW)), OPAQUE])
def test_no_rows_take_no_bytes(layer: LayerSpec) -> None:
    assert layer_bytes(layer, 0, 4_096, 0) == 0


def test_a_ring_holds_the_window_and_the_slack() -> None:
    assert ring_size(WINDOW, 0) == 100
    assert ring_size(WINDOW, 7) == 107


def test_a_latent_layer_is_known_by_its_unequal_dims() -> None:
    assert LATENT.latent
    assert not FULL.latent
    assert not FullAttention(1, 8, 8, "float32").latent


def test_a_bounded_full_layer_becomes_a_window() -> None:
    assert bound(FULL, 512, 4) == Window(2, 4, 3, "bfloat16", 512, 4)
    assert bound(Composite((FULL, RECURRENT)), 512, 4) == Composite(
        (Window(2, 4, 3, "bfloat16", 512, 4), RECURRENT)
    )


def test_a_window_is_never_longer_than_the_bound() -> None:
    assert bound(WINDOW, 2 * WINDOW.size, 4) == WINDOW
    assert bound(WINDOW, WINDOW.size - 1, 4).size == WINDOW.size - 1


@pytest.mark.parametrize("layer", [WIDE, quantise(WIDE, EIGHT), quantise(WIDE, FOUR)])
def test_bytes_of_a_token_are_those_of_its_arrays(layer: FullAttention) -> None:
    assert layer.token_bytes == sum(array.token_bytes for array in layer.arrays)


def test_a_quantised_layer_keeps_words_scales_and_biases_of_keys_and_of_values() -> None:
    layer = quantise(WIDE, FOUR)

    spec = ModelSpec(layers=(layer, RECURRENT), vocab_size=1, context_length=1)
    keys = [TokenArray(2, 8, "uint32"), TokenArray(2, 2, "float16"), TokenArray(2, 2, "float16")]
    values = [TokenArray(2, 16, "uint32"), TokenArray(2, 4, "float16"), TokenArray(2, 4, "float16")]
    assert list(state_layout(spec).tokens) == [*keys, *values]


def test_layouts_of_other_bits_and_groups_are_told_apart() -> None:
    forms = [None, EIGHT, FOUR, Quantised(8, 32), Quantised(4, 64)]

    layers = [replace(WIDE, quantised=form) for form in forms]
    specs = [ModelSpec(layers=(layer,), vocab_size=1, context_length=1) for layer in layers]

    assert len({state_layout(spec).format for spec in specs}) == len(forms)


@pytest.mark.parametrize("layer", [WINDOW, RECURRENT, OPAQUE])
def test_only_full_attention_is_quantised(layer: LayerSpec) -> None:
    assert quantise(layer, EIGHT) == layer
    parts = Composite((WIDE, RECURRENT))
    assert quantise(parts, EIGHT) == Composite((replace(WIDE, quantised=EIGHT), RECURRENT))


@pytest.mark.parametrize("layer", [RECURRENT, OPAQUE])
def test_other_layers_are_bounded_already_or_not_ours_to_bound(layer: LayerSpec) -> None:
    assert bound(layer, 512, 4) == layer


def test_a_window_wider_than_the_bound_is_narrowed() -> None:
    assert bound(WINDOW, 50, 2) == Window(2, 4, 3, "float32", size=50, keep=4)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (FULL, True),
        (WINDOW, True),
        (OPAQUE, True),
        (RECURRENT, False),
        (Composite((RECURRENT, RECURRENT)), False),
        (Composite((RECURRENT, FULL)), True),
    ],
)
def test_state_grows_unless_it_is_recurrent(layer: LayerSpec, expected: bool) -> None:
    assert grows(layer) is expected
