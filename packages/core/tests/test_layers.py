"""Bytes of each kind of layer, and what a bounded cache makes of it."""

import pytest

from treadle_core.layers import (
    Composite,
    FullAttention,
    LayerSpec,
    Opaque,
    Recurrent,
    Window,
    bound,
    grows,
    layer_bytes,
    ring_size,
)

FULL = FullAttention(heads=2, key_dim=4, value_dim=3, dtype="bfloat16")
LATENT = FullAttention(heads=1, key_dim=32, value_dim=8, dtype="float16")
WINDOW = Window(heads=2, key_dim=4, value_dim=3, dtype="float32", size=100, keep=4)
RECURRENT = Recurrent(shapes=((3, 5), (2,)), dtypes=("float32", "bfloat16"))
OPAQUE = Opaque(bytes_per_token=11)


@pytest.mark.parametrize(
    ("layer", "capacity", "slack", "expected"),
    [
        (FULL, 64, 0, 3 * 64 * 2 * 7 * 2),
        (FULL, 64, 9, 3 * 64 * 2 * 7 * 2),
        (LATENT, 64, 0, 3 * 64 * 40 * 2),
        (WINDOW, 64, 0, 3 * 64 * 2 * 7 * 4),
        (WINDOW, 4_096, 0, 3 * 100 * 2 * 7 * 4),
        (WINDOW, 4_096, 7, 3 * 107 * 2 * 7 * 4),
        (RECURRENT, 64, 0, 3 * (15 * 4 + 2 * 2)),
        (RECURRENT, 4_096, 7, 3 * (15 * 4 + 2 * 2)),
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
