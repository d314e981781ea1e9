"""Stores hold what was written, where it was written, through every change of rows and size."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from treadle_core.layers import (
    Composite,
    FullAttention,
    Opaque,
    Quantised,
    Recurrent,
    Window,
    flatten,
)
from treadle_core.mlx_runtime.masks import Positions
from treadle_core.mlx_runtime.recording import Call
from treadle_core.mlx_runtime.stores import (
    AttentionStore,
    QuantisedStore,
    StateStore,
    StateView,
    make_store,
    runs,
    scatter_rows,
    visible_before,
)
from treadle_core.plan import Move

FULL = FullAttention(heads=2, key_dim=4, value_dim=3, dtype="float32")
WIDE = FullAttention(heads=2, key_dim=64, value_dim=32, dtype="float32")
STATE = Recurrent(shapes=((2, 3), (5,)), dtypes=("float32", "float16"))


def window(size: int, keep: int = 0) -> Window:
    return Window(heads=2, key_dim=4, value_dim=3, dtype="float32", size=size, keep=keep)


def tokens_as_values(row: int, positions: Sequence[int], dim: int) -> mx.array:
    """``[1, heads, positions, dim]`` that tells row, head, position and dimension."""
    position = mx.array(list(positions), dtype=mx.float32)[None, None, :, None]
    head = mx.arange(2)[None, :, None, None]
    return 1000.0 * row + 100.0 * head + position + 0.1 * mx.arange(dim)


def noise(row: int, start: int, length: int, dim: int) -> mx.array:
    """``[1, heads, length, dim]`` of a row's tokens, the same whatever the chunks."""
    everything = mx.random.normal((1, 2, 16, dim), key=mx.random.key(1000 * row + dim))
    return everything[:, :, start : start + length]


def written_in_chunks(store: AttentionStore, row: int, chunks: Sequence[int]) -> None:
    """Write consecutive chunks into a row through row views."""
    start = 0
    for length in chunks:
        positions = range(start, start + length)
        view = store.row_view(row, start)
        view.update_and_fetch(
            tokens_as_values(row, positions, 4), tokens_as_values(row, positions, 3)
        )
        store.commit(view)
        start += length


def positions_in(store: AttentionStore, row: int, head: int = 0) -> list[int]:
    """What the columns of a row hold, as positions."""
    keys = np.array(store.keys[row, head, :, 0]) - 100 * head
    values = np.array(store.values[row, head, :, 0]) - 100 * head
    assert np.array_equal(keys, values)
    return [int(key) % 1000 for key in keys]


class TestSlots:
    def store(self, rows: int = 3, capacity: int = 8) -> AttentionStore:
        store = AttentionStore(FULL, slack=0)
        store.resize(rows, capacity, 0)
        return store

    def test_a_row_holds_its_tokens_from_the_left_whatever_the_chunks(self) -> None:
        store = self.store()

        written_in_chunks(store, 1, [3, 1, 4])

        assert positions_in(store, 1) == positions_in(store, 1, head=1) == list(range(8))
        assert positions_in(store, 0) == positions_in(store, 2) == [0] * 8

    def test_prefill_sees_what_the_row_holds_and_itself(self) -> None:
        store = self.store()
        written_in_chunks(store, 1, [3])

        view = store.row_view(1, 3)
        keys, values = view.update_and_fetch(
            tokens_as_values(1, [3, 4], 4), tokens_as_values(1, [3, 4], 3)
        )

        assert view.offset == 5
        assert mx.array_equal(keys, tokens_as_values(1, range(5), 4))
        assert mx.array_equal(values, tokens_as_values(1, range(5), 3))

    @pytest.mark.parametrize("num_rows", [2, 3])
    def test_decode_writes_each_row_at_its_own_position(self, num_rows: int) -> None:
        store = self.store()
        lengths = [5, 2, 4]
        for row, length in enumerate(lengths):
            written_in_chunks(store, row, [length])

        view = store.batch_view(Positions(lengths[:num_rows], 2), width=8)
        new = [
            mx.concatenate(
                [tokens_as_values(r, [lengths[r], lengths[r] + 1], dim) for r in range(num_rows)]
            )
            for dim in (4, 3)
        ]
        keys, values = view.update_and_fetch(*new)
        store.commit(view)

        assert view.offset.tolist() == lengths[:num_rows]
        assert keys.shape == (num_rows, 2, 8, 4)
        assert values.shape == (num_rows, 2, 8, 3)
        for row, length in enumerate(lengths):
            stop = length + 2 if row < num_rows else length
            assert positions_in(store, row)[:stop] == list(range(stop))

    def test_a_chunk_beyond_the_row_is_refused_before_it_corrupts_memory(self) -> None:
        view = self.store(capacity=8).row_view(0, 7)

        with pytest.raises(AssertionError, match="9 tokens exceed 8 columns"):
            view.update_and_fetch(tokens_as_values(0, [7, 8], 4), tokens_as_values(0, [7, 8], 3))

    @pytest.mark.parametrize(("rows", "capacity"), [(5, 16), (2, 16), (5, 6), (2, 6)])
    def test_used_rows_survive_a_change_of_size_and_new_columns_are_zero(
        self, rows: int, capacity: int
    ) -> None:
        store = self.store(rows=4)
        for row in range(3):
            written_in_chunks(store, row, [5])

        store.resize(rows, capacity, used=2)

        assert store.keys.shape == (rows, 2, capacity, 4)
        assert store.values.shape == (rows, 2, capacity, 3)
        for row in range(2):
            assert positions_in(store, row) == [0, 1, 2, 3, 4] + [0] * (capacity - 5)
        assert not store.keys[2:].any()

    def test_a_copy_of_a_row_is_not_changed_by_later_writes(self) -> None:
        store = self.store()
        written_in_chunks(store, 0, [4])
        copy = store.read(0, 3)
        mx.eval(copy)

        store.clear(0, 0, 8)
        mx.eval(store.arrays())

        assert mx.array_equal(copy[0], tokens_as_values(0, range(3), 4))
        assert mx.array_equal(copy[1], tokens_as_values(0, range(3), 3))

    def test_clearing_zeroes_those_columns_of_that_row_only(self) -> None:
        store = self.store()
        for row in range(3):
            written_in_chunks(store, row, [8])

        store.clear(1, 3, 6)
        store.clear(2, 5, 100)

        assert positions_in(store, 0) == list(range(8))
        assert positions_in(store, 1, head=1)[:3] == [0, 1, 2]
        assert not store.keys[1, :, 3:6].any()
        assert not store.values[1, :, 3:6].any()
        assert store.keys[1, :, 6:].all()
        assert store.keys[2, :, :5].any()
        assert not store.keys[2, :, 5:].any()

    def test_a_model_that_ties_the_keys_to_other_arrays_changes_nothing(self) -> None:
        store = self.store()
        written_in_chunks(store, 0, [4])
        view = store.row_view(0, 4)

        view.keys = mx.depends(view.keys, view.values)
        view.values = mx.zeros_like(view.values)

        assert mx.array_equal(view.keys, tokens_as_values(0, range(4), 4))
        assert positions_in(store, 0)[:4] == [0, 1, 2, 3]


class TestQuantisedSlots:
    def store(self, rows: int = 3, capacity: int = 8, bits: int = 8) -> QuantisedStore:
        store = QuantisedStore(replace(WIDE, quantised=Quantised(bits, 32)))
        store.resize(rows, capacity, 0)
        return store

    def written(self, store: QuantisedStore, row: int, chunks: Sequence[int]) -> None:
        """Write consecutive chunks into a row through row views."""
        start = 0
        for length in chunks:
            view = store.row_view(row, start)
            view.update_and_fetch(*(noise(row, start, length, dim) for dim in (64, 32)))
            store.commit(view)
            start += length

    def expected(self, store: QuantisedStore, row: int, length: int) -> list[mx.array]:
        """The row's tokens, quantised at once."""
        return store.packed(*(noise(row, 0, length, dim) for dim in (64, 32)))

    def assert_holds(self, store: QuantisedStore, row: int, length: int) -> None:
        expected = self.expected(store, row, length)
        for array, other in zip(store.read(row, length), expected, strict=True):
            assert array.dtype == other.dtype
            assert mx.array_equal(array, other)

    @pytest.mark.parametrize("bits", [4, 8])
    def test_a_row_holds_its_tokens_quantised_whatever_the_chunks(self, bits: int) -> None:
        store = self.store(bits=bits)

        self.written(store, 1, [3, 1, 4])

        self.assert_holds(store, 1, 8)
        words = [buffer.shape[-1] for buffer in store.buffers]
        assert words == [64 * bits // 32, 2, 2, 32 * bits // 32, 1, 1]
        assert not any(buffer[::2].any() for buffer in store.buffers)

    @pytest.mark.parametrize("num_rows", [2, 3])
    def test_decode_writes_each_row_at_its_own_position(self, num_rows: int) -> None:
        store = self.store()
        lengths = [5, 2, 4]
        for row, length in enumerate(lengths):
            self.written(store, row, [length])

        view = store.batch_view(Positions(lengths[:num_rows], 2), width=7)
        new = [
            mx.concatenate([noise(row, lengths[row], 2, dim) for row in range(num_rows)])
            for dim in (64, 32)
        ]
        keys, values = view.update_and_fetch(*new)
        store.commit(view)

        assert (view.bits, view.group_size) == (8, 32)
        assert view.offset.tolist() == lengths[:num_rows]
        assert [part.shape for part in keys] == [(num_rows, 2, 7, n) for n in (16, 2, 2)]
        assert [part.shape for part in values] == [(num_rows, 2, 7, n) for n in (8, 1, 1)]
        for row, length in enumerate(lengths):
            self.assert_holds(store, row, length + 2 if row < num_rows else length)

    def test_a_chunk_beyond_the_row_is_refused_before_it_corrupts_memory(self) -> None:
        view = self.store(capacity=8).row_view(0, 7)

        with pytest.raises(AssertionError, match="9 tokens exceed 8 columns"):
            view.update_and_fetch(noise(0, 7, 2, 64), noise(0, 7, 2, 32))

    @pytest.mark.parametrize(("rows", "capacity"), [(5, 16), (2, 16), (5, 6), (2, 6)])
    def test_used_rows_survive_a_change_of_size_and_new_columns_are_zero(
        self, rows: int, capacity: int
    ) -> None:
        store = self.store(rows=4)
        for row in range(3):
            self.written(store, row, [5])

        store.resize(rows, capacity, used=2)

        for row in range(2):
            self.assert_holds(store, row, 5)
        for buffer in store.buffers:
            assert buffer.shape[:3] == (rows, 2, capacity)
            assert not buffer[:, :, 5:].any()
            assert not buffer[2:].any()

    def test_rows_move_and_trade_places_as_they_are(self) -> None:
        store, other = self.store(), self.store()
        for row in range(3):
            self.written(store, row, [4])
        self.written(other, 1, [6])

        store.promote(2, 0, store.read(2, 4), store.read(0, 4))
        for array, expected in zip(store.read(0, 4), self.expected(store, 2, 4), strict=True):
            assert mx.array_equal(array, expected)
        store.close(1, (Move(2, 1, 4),), [store.read(2, 4)])
        for array, expected in zip(store.read(1, 4), self.expected(store, 0, 4), strict=True):
            assert mx.array_equal(array, expected)
        store.insert(1, other.read(1, 6))
        self.assert_holds(store, 1, 6)

    def test_tokens_that_were_read_are_written_back_bit_for_bit(self) -> None:
        store, other = self.store(), self.store()
        self.written(store, 1, [8])
        state = store.read_tokens(1, 0, 5)
        mx.eval(state)

        store.clear(1, 0, 8)
        other.write_state(2, 5, state)

        assert store.num_arrays == len(state) == 6
        assert not any(buffer[1].any() for buffer in store.buffers)
        for array, expected in zip(other.read(2, 5), self.expected(store, 1, 5), strict=True):
            assert mx.array_equal(array, expected)

    def test_clearing_zeroes_those_columns_of_that_row_only(self) -> None:
        store = self.store()
        for row in range(3):
            self.written(store, row, [8])

        store.clear(1, 3, 6)
        store.clear(2, 5, 100)

        self.assert_holds(store, 0, 8)
        self.assert_holds(store, 1, 3)
        self.assert_holds(store, 2, 5)
        for buffer in store.buffers:
            assert not buffer[1, :, 3:6].any()
            assert buffer[1, :, 6:].any()
            assert not buffer[2, :, 5:].any()

    def test_a_model_that_ties_the_keys_to_other_arrays_changes_nothing(self) -> None:
        store = self.store()
        self.written(store, 0, [4])
        view = store.row_view(0, 4)

        view.keys = mx.depends(list(view.keys), list(view.values))
        view.values = ()

        assert [part.shape for part in view.keys] == [(1, 2, 4, n) for n in (16, 2, 2)]
        assert [part.shape for part in view.values] == [(1, 2, 4, n) for n in (8, 1, 1)]
        self.assert_holds(store, 0, 4)


class TestRings:
    @pytest.mark.parametrize("chunks", [[1] * 29, [29], [3, 20, 6], [7, 7, 7, 7, 1]])
    @pytest.mark.parametrize(("keep", "slack"), [(0, 0), (0, 2), (4, 0), (4, 2)])
    def test_a_ring_holds_the_newest_tokens_and_the_kept_ones(
        self, chunks: list[int], keep: int, slack: int
    ) -> None:
        store = AttentionStore(window(10, keep), slack)
        store.resize(2, 64, 0)

        written_in_chunks(store, 1, chunks)

        held = positions_in(store, 1)
        assert len(held) == 10 + slack
        assert held[:keep] == list(range(keep))
        assert sorted(held[keep:]) == list(range(29 - (10 + slack - keep), 29))
        assert positions_in(store, 1, head=1) == held

    @pytest.mark.parametrize("keep", [0, 4])
    def test_decode_and_prefill_put_a_token_into_the_same_column(self, keep: int) -> None:
        stores = [AttentionStore(window(10, keep), 2) for _ in range(2)]
        for store in stores:
            store.resize(1, 64, 0)

        written_in_chunks(stores[0], 0, [40])
        for position in range(40):
            view = stores[1].batch_view(Positions([position]), width=64)
            view.update_and_fetch(
                tokens_as_values(0, [position], 4), tokens_as_values(0, [position], 3)
            )
            stores[1].commit(view)

        assert positions_in(stores[0], 0) == positions_in(stores[1], 0)

    @pytest.mark.parametrize("keep", [0, 4])
    @pytest.mark.parametrize("start", [0, 2, 5, 9, 10, 11, 27])
    def test_prefill_sees_the_window_before_it_in_order_and_itself(
        self, start: int, keep: int
    ) -> None:
        store = AttentionStore(window(10, keep), 0)
        store.resize(1, 64, 0)
        written_in_chunks(store, 0, [start] if start else [])
        chunk = range(start, start + 3)

        view = store.row_view(0, start)
        keys, _ = view.update_and_fetch(
            tokens_as_values(0, chunk, 4), tokens_as_values(0, chunk, 3)
        )

        before = [p for p in range(start) if p > start - (10 - keep) or p < keep]
        assert [int(key) for key in np.array(keys[0, 0, :, 0])] == [*before, *chunk]

    def test_a_ring_in_a_small_buffer_grows_with_it_up_to_its_size(self) -> None:
        store = AttentionStore(window(100), 2)

        sizes: list[int] = []
        for capacity in (64, 128, 256, 64):
            store.resize(1, capacity, used=0)
            sizes.append(store.keys.shape[2])

        assert sizes == [64, 102, 102, 64]

    def test_a_ring_that_grows_keeps_each_token_in_its_column(self) -> None:
        store = AttentionStore(window(20), 0)
        store.resize(1, 16, 0)
        written_in_chunks(store, 0, [14])

        store.resize(2, 64, used=1)

        assert positions_in(store, 0)[:14] == list(range(14))

    def test_a_layer_that_the_model_did_not_use_is_noticed(self) -> None:
        store = AttentionStore(window(10), 0)
        store.resize(1, 64, 0)

        with pytest.raises(AssertionError, match="did not use this layer's cache"):
            store.commit(store.row_view(0, 0))


class TestStates:
    def state(self, value: float) -> list[mx.array]:
        return [mx.full((1, 2, 3), value), mx.full((1, 5), value, dtype=mx.float16)]

    def opened(self, *values: float) -> StateStore:
        """A store whose prefilling rows hold these values."""
        store = StateStore(STATE)
        for row, value in enumerate(values):
            store.open(row)
            view = store.row_view(row, 0)
            view.cache = self.state(value)
            store.commit(view)
        return store

    def decoding(self, *values: float) -> StateStore:
        """A store whose decoding rows hold these values."""
        store = self.opened(*values)
        for row in range(len(values)):
            store.promote(row, row, [], [])
        return store

    @staticmethod
    def values(store: StateStore, num_decoding: int, prefilling: Sequence[int] = ()) -> list[float]:
        view = store.batch_view(Positions([0] * max(num_decoding, 1)), 64)
        found = view.cache[0][:, 0, 0].tolist() if num_decoding else []
        return [*found, *(store.row_view(row, 0).cache[1][0, 0].item() for row in prefilling)]

    def test_a_new_row_starts_from_zeros_of_the_right_types(self) -> None:
        store = StateStore(STATE)

        store.open(0)

        state = store.row_view(0, 0).cache
        assert [a.shape for a in state] == [(1, 2, 3), (1, 5)]
        assert [a.dtype for a in state] == [mx.float32, mx.float16]
        assert not any(a.any() for a in state)

    def test_a_promoted_row_is_the_last_that_decodes_and_trades_places(self) -> None:
        store = self.opened(1, 2, 3)

        store.promote(2, 0, [], [])

        assert self.values(store, 1, prefilling=[1, 2]) == [3, 2, 1]

    def test_a_decoding_row_that_leaves_is_replaced_by_the_last_one(self) -> None:
        store = self.decoding(1, 2, 3)

        store.close(0, (Move(2, 0, 9),), [store.read(2, 9)])

        assert self.values(store, 2) == [3, 2]

    def test_when_a_decoding_row_leaves_a_prefilling_one_closes_the_gap(self) -> None:
        store = self.opened(1, 2, 3, 4)
        store.promote(0, 0, [], [])
        store.promote(1, 1, [], [])

        moves = (Move(1, 0, 9), Move(3, 1, 9))
        store.close(0, moves, [store.read(1, 9), store.read(3, 9)])

        assert self.values(store, 1, prefilling=[1, 2]) == [2, 4, 3]

    def test_a_prefilling_row_that_leaves_is_replaced_by_the_last_one(self) -> None:
        store = self.opened(1, 2, 3)

        store.close(0, (Move(2, 0, 9),), [store.read(2, 9)])

        assert self.values(store, 0, prefilling=[0, 1]) == [3, 2]

    def test_the_last_row_that_leaves_takes_its_state_along(self) -> None:
        store = self.decoding(1)

        store.close(0, (), [])

        assert store.arrays() == []

    def test_a_row_from_another_group_decodes_last_and_a_prefilling_one_makes_room(self) -> None:
        source, store = self.decoding(7), self.opened(1, 2)
        store.promote(0, 0, [], [])

        store.relocate(Move(1, 2, 9), store.read(1, 9))
        store.insert(1, source.read(0, 9))

        assert self.values(store, 2, prefilling=[2]) == [1, 7, 2]

    def test_a_row_that_is_read_is_not_changed_by_the_next_step(self) -> None:
        store = self.decoding(1, 2)
        copy = store.read(1, 9)

        view = store.batch_view(Positions([0, 0]), 64)
        view.cache = [array + 10 for array in view.cache]
        store.commit(view)

        assert copy[0].tolist() == self.state(2)[0].tolist()
        assert self.values(store, 2) == [11, 12]

    def wide(self, store: StateStore, num_rows: int, num_tokens: int) -> None:
        """A forward whose layer adds 1 to the state for each token."""

        def layer(tokens: mx.array, cache: StateView) -> None:
            cache.cache = [array + tokens.shape[1] for array in cache.cache]

        view = store.batch_view(Positions([0] * num_rows, num_tokens), 64)
        tokens = mx.zeros((num_rows, num_tokens))
        layer(tokens, view)
        assert view.calls is not None
        view.calls.append(Call(layer, (tokens, view), {}))
        store.commit(view)

    @pytest.mark.parametrize("kept", [(3, 3), (1, 1), (2, 3), (3, 1), (1, 2)])
    def test_rows_go_on_from_as_many_tokens_as_they_keep(self, kept: tuple[int, int]) -> None:
        store = self.decoding(10, 20)

        self.wide(store, 2, 3)
        store.keep(kept)

        assert self.values(store, 2) == [10 + kept[0], 20 + kept[1]]

    def test_what_it_began_with_is_held_until_it_is_known_how_much_counts(self) -> None:
        store = self.decoding(1, 2)
        at_rest = sum(array.nbytes for array in store.arrays())

        self.wide(store, 2, 3)
        assert sum(array.nbytes for array in store.arrays()) == 2 * at_rest
        store.keep([2, 2])

        assert sum(array.nbytes for array in store.arrays()) == at_rest

    def test_without_a_word_all_tokens_count(self) -> None:
        store = self.decoding(1, 2)

        self.wide(store, 2, 3)
        self.wide(store, 2, 2)
        store.keep([1, 2])

        assert self.values(store, 2) == [1 + 3 + 1, 2 + 3 + 2]

    @pytest.mark.parametrize(
        "change",
        [
            lambda store: store.close(0, (Move(1, 0, 9),), [store.read(1, 9)]),
            lambda store: store.insert(2, store.read(0, 9)),
            lambda store: store.write(1, store.read(0, 9)),
            lambda store: store.batch_view(Positions([0, 0]), 64),
        ],
        ids=["a row leaves", "a row comes", "a row is written", "a step follows"],
    )
    def test_nothing_is_taken_back_behind_a_change(self, change: Any) -> None:
        store = self.decoding(1, 2)
        self.wide(store, 2, 3)

        change(store)

        with pytest.raises(AssertionError, match="there is no state to go back to"):
            store.keep([1, 1])

    @pytest.mark.parametrize("kept", [(0, 1), (1, 4)])
    def test_a_row_keeps_at_least_one_token_and_at_most_all(self, kept: tuple[int, int]) -> None:
        store = self.decoding(1, 2)
        self.wide(store, 2, 3)

        with pytest.raises(AssertionError, match=r"keeps [04] of 3"):
            store.keep(kept)

    def test_a_layer_that_nobody_was_seen_to_write_takes_nothing_back(self) -> None:
        store = self.decoding(1, 2)
        store.commit(store.batch_view(Positions([0, 0], 3), 64))

        with pytest.raises(RuntimeError, match="no part of the model was seen"):
            store.keep([1, 3])


def test_runs_are_stretches_in_which_position_and_column_advance_together() -> None:
    positions = [0, 1, 2, 6, 7, 8, 9]
    columns = [0, 1, 2, 3, 4, 3, 4]

    assert runs(positions, columns) == [(0, 0, 3), (3, 6, 8), (3, 8, 10)]
    assert runs([], []) == []


@pytest.mark.parametrize(
    ("start", "size", "keep", "expected"),
    [
        (0, 4, 0, []),
        (2, 4, 0, [0, 1]),
        (9, 4, 0, [6, 7, 8]),
        (9, 1, 0, []),
        (2, 6, 4, [0, 1]),
        (5, 6, 4, [0, 1, 2, 3, 4]),
        (9, 6, 4, [0, 1, 2, 3, 8]),
    ],
)
def test_what_is_visible_before_a_position(
    start: int, size: int, keep: int, expected: list[int]
) -> None:
    assert list(visible_before(start, window(size, keep))) == expected


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_rows_are_written_at_their_columns_and_the_others_left_alone(
    rows: int, num_tokens: int
) -> None:
    before = np.random.default_rng(1).normal(size=(4, 2, 9, 3)).astype(np.float32)
    new = np.random.default_rng(2).normal(size=(rows, 2, num_tokens, 3)).astype(np.float32)
    starts = np.array([5, 0, 6, 3])[:rows]
    columns = starts[:, None] + np.arange(num_tokens)

    after = scatter_rows(mx.array(before), mx.array(columns), mx.array(new))

    for row, start in enumerate(starts):
        before[row, :, start : start + num_tokens] = new[row]
    assert np.array_equal(np.array(after), before)


def test_a_quantised_layer_has_a_store_of_its_own_kind() -> None:
    assert isinstance(make_store(replace(WIDE, quantised=Quantised(4, 32)), 0), QuantisedStore)
    assert isinstance(make_store(WIDE, 0), AttentionStore)


def test_composite_layers_are_stored_part_by_part_and_unknown_ones_not_at_all() -> None:
    composite = Composite((FULL, STATE))

    assert flatten(composite) == (FULL, STATE)
    assert flatten(FULL) == (FULL,)
    for spec in (composite, Opaque(8)):
        with pytest.raises(TypeError, match="has no store of its own"):
            make_store(spec, 0)
