"""Masks, held against a simulation of what each column holds and each query may see."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from treadle_core.mlx_runtime.masks import Positions, kept_mask, ring_mask, row_mask, slot_mask


def sees(query: int, position: int, size: int | None = None, keep: int = 0) -> bool:
    """Whether a query may look at a position."""
    if not 0 <= position <= query:
        return False
    return size is None or position > query - (size - keep) or position < keep


def ring_contents(num_written: int, columns: int, keep: int) -> list[int]:
    """The position in each column after so many writes, -1 where there is none."""
    held = [-1] * columns
    for position in range(num_written):
        column = position if position < keep else keep + (position - keep) % (columns - keep)
        held[column] = position
    return held


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_a_slot_shows_each_query_its_own_row_up_to_itself(
    num_tokens: int, window: int | None
) -> None:
    starts, width = [0, 5, 2, 13], 17

    mask = slot_mask(Positions(starts, num_tokens), width, window)

    expected = [
        [[sees(start + n, column, window) for column in range(width)] for n in range(num_tokens)]
        for start in starts
    ]
    assert np.array_equal(np.array(mask), np.array(expected)[:, None])


@pytest.mark.parametrize("num_tokens", [1, 2, 4])
@pytest.mark.parametrize(
    ("size", "keep", "slack"), [(6, 0, 3), (1, 0, 3), (9, 4, 3), (12, 4, 5), (7, 6, 3)]
)
def test_a_ring_shows_each_query_the_newest_and_the_kept(
    num_tokens: int, size: int, keep: int, slack: int
) -> None:
    ring = size + slack
    starts = [*range(2 * ring + 3), 100]

    mask = ring_mask(Positions(starts, num_tokens), ring, ring, size=size, keep=keep)

    for row, start in enumerate(starts):
        held = ring_contents(start + num_tokens, ring, keep)
        expected = [[sees(start + n, p, size, keep) for p in held] for n in range(num_tokens)]
        assert np.array(mask)[row, 0].tolist() == expected, f"start {start}"
        assert [sum(query) for query in expected] == [
            min(start + n + 1, size) for n in range(num_tokens)
        ]


@pytest.mark.parametrize("keep", [0, 4])
def test_what_a_rejected_draft_left_in_a_ring_is_not_seen(keep: int) -> None:
    size, slack = 9, 3
    ring = size + slack

    for start, kept in itertools.product(range(40), range(1, slack + 2)):
        held = ring_contents(start + slack + 1, ring, keep)  # all of the draft was written
        overwritten = ring_contents(start + kept, ring, keep)  # this much of it was kept
        visible = [p for p in overwritten if sees(start + kept, p, size, keep)]
        assert set(visible) <= set(held), "the draft overwrote what the next query needs"

        mask = ring_mask(Positions([start + kept]), ring, ring, size=size, keep=keep)

        next_column = ring_contents(start + kept + 1, ring, keep).index(start + kept)
        seen = {held[c] for c in np.flatnonzero(np.array(mask)) if c != next_column}
        assert seen == set(visible)


def test_the_first_columns_of_a_ring_are_masked_as_in_all_of_it() -> None:
    positions = Positions([0, 3, 6], 2)

    all_of_it = ring_mask(positions, 20, 20, size=16, keep=4)
    first = ring_mask(positions, 8, 20, size=16, keep=4)

    assert np.array_equal(np.array(first), np.array(all_of_it)[..., :8])
    assert not np.array(all_of_it)[..., 8:].any()


@pytest.mark.parametrize("offset", [0, 1, 7])
@pytest.mark.parametrize("num_tokens", [2, 5])
@pytest.mark.parametrize("window", [None, 3, 6])
def test_a_row_in_order_is_causal_within_the_window(
    offset: int, num_tokens: int, window: int | None
) -> None:
    total = offset + num_tokens

    mask = row_mask(num_tokens, offset, window, return_array=True)

    expected = [[sees(offset + n, p, window) for p in range(total)] for n in range(num_tokens)]
    assert np.array(mask).tolist() == expected


@pytest.mark.parametrize(
    ("num_tokens", "offset", "window", "expected"),
    [(1, 9, None, None), (1, 9, 10, None), (4, 3, None, "causal"), (4, 3, 7, "causal")],
)
def test_a_mask_that_hides_nothing_special_is_no_array(
    num_tokens: int, offset: int, window: int | None, expected: str | None
) -> None:
    assert row_mask(num_tokens, offset, window, return_array=False) == expected


def test_columns_in_any_order_are_masked_by_the_position_that_they_hold() -> None:
    start, num_tokens, size, keep = 12, 3, 9, 4
    held = [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14]

    mask = kept_mask(start, num_tokens, held, size=size, keep=keep)

    expected = [[sees(start + n, p, size, keep) for p in held] for n in range(num_tokens)]
    assert np.array(mask).tolist() == expected


def test_a_model_that_changes_its_offset_in_place_changes_nobody_elses() -> None:
    positions = Positions([3, 4])
    first, second = positions.fresh_offset(), positions.fresh_offset()

    first += 10

    assert second.tolist() == positions.offset.tolist() == [3, 4]
    assert mx.array_equal(positions.query, mx.array([[3], [4]]))
