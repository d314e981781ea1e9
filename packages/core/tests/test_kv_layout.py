"""Rows and bytes: exact instructions, and contents that survive any sequence of them."""

import sys
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from treadle_core.kv_layout import KvLayout, class_limits, round_up
from treadle_core.layers import FullAttention, LayerSpec, Recurrent, Window, layer_bytes
from treadle_core.plan import Close, Instruction, Key, Move, Open, Promote, Resize, Transfer
from treadle_core.testing.rows import SimulatedRows

# Eight bytes per token.
LAYER = FullAttention(heads=1, key_dim=1, value_dim=1, dtype="float32")
A, B, C, D, E = (("abcde"[i], 0) for i in range(5))


def make_layout(
    *,
    layers: Sequence[LayerSpec] = (LAYER,),
    budget: int | None = None,
    max_rows: int = 8,
    context: int = 32_768,
    shared: bool = True,
) -> KvLayout:
    return KvLayout(
        layers, budget_bytes=budget, max_rows=max_rows, context_length=context, shared=shared
    )


class Lengths(dict[Key, int]):
    """Tokens written by key, as a scheduler would tell them."""

    def __call__(self, key: Key) -> int:
        return self[key]


def decoding(layout: KvLayout, written: Lengths, *keys: Key, length: int = 10) -> None:
    """Admit rows and let them decode."""
    for key in keys:
        assert layout.admit(key, length, 0) is not None
        written[key] = length
        layout.promote(key, written)


# Classes


def test_groups_are_four_times_as_roomy_as_the_one_before() -> None:
    assert class_limits(32_768) == (2_048, 8_192, 32_768)
    assert class_limits(10_000) == (2_048, 8_192, 10_000)
    assert class_limits(2_048) == (2_048,)
    assert class_limits(100) == (100,)


@pytest.mark.parametrize(
    ("length", "rounded"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128), (128, 128)]
)
def test_lengths_round_up_to_whole_blocks(length: int, rounded: int) -> None:
    assert round_up(length) == rounded


def test_the_group_is_chosen_by_length_and_headroom() -> None:
    layout = make_layout()

    layout.admit(A, 2_000, 48)
    layout.admit(B, 2_000, 49)
    layout.admit(C, 8_192, 1)
    layout.admit(D, 32_768, 256)

    assert [layout.place(key)[0] for key in (A, B, C, D)] == [0, 1, 2, 2]


# Admission


def test_the_first_row_gets_a_buffer_of_the_first_capacity() -> None:
    layout = make_layout()

    assert layout.admit(A, 10, 20) == [Resize(0, 1, 256), Open(0, 0)]


def test_a_long_first_row_gets_whole_blocks_and_no_more() -> None:
    layout = make_layout()

    assert layout.admit(A, 300, 20) == [Resize(0, 1, 320), Open(0, 0)]


def test_rows_double_when_more_are_needed() -> None:
    layout = make_layout()

    found = [layout.admit(key, 10, 0) for key in (A, B, C, D, E)]

    assert found == [
        [Resize(0, 1, 256), Open(0, 0)],
        [Resize(0, 2, 256), Open(0, 1)],
        [Resize(0, 4, 256), Open(0, 2)],
        [Open(0, 3)],
        [Resize(0, 8, 256), Open(0, 4)],
    ]


def test_rows_do_not_double_beyond_the_most_rows() -> None:
    layout = make_layout(max_rows=3)

    found = [layout.admit(key, 10, 0) for key in (A, B, C)]

    assert found[2] == [Resize(0, 3, 256), Open(0, 2)]


def test_capacity_doubles_when_a_longer_row_joins() -> None:
    layout = make_layout()
    layout.admit(A, 10, 0)

    assert layout.admit(B, 257, 0) == [Resize(0, 2, 512), Open(0, 1)]
    assert layout.admit(C, 1_500, 0) == [Resize(0, 4, 1_536), Open(0, 2)]


def test_capacity_does_not_double_beyond_the_group() -> None:
    layout = make_layout(context=600)
    layout.admit(A, 400, 0)

    assert layout.admit(B, 460, 0) == [Resize(0, 2, 600), Open(0, 1)]


def test_a_row_that_fits_only_tightly_is_admitted_tightly() -> None:
    # One row of 192 tokens and a spare one: 3,072 bytes; 256 would take 4,096.
    layout = make_layout(budget=3_072)

    assert layout.admit(A, 130, 0) == [Resize(0, 1, 192), Open(0, 0)]


def test_no_room_changes_nothing() -> None:
    layout = make_layout(budget=3_072)
    layout.admit(A, 130, 0)

    assert layout.admit(B, 10, 0) is None
    assert not layout.holds(B)
    assert layout.num_rows == 1
    assert layout.allocated_bytes == 1_536
    layout.check_integrity()


def test_what_fits_alone_includes_the_spare_copy_of_the_largest_layer() -> None:
    layout = make_layout(layers=[LAYER, FullAttention(2, 1, 1, "float32")], budget=64 * 8 * 5)

    assert layout.fits_alone(64)
    assert not layout.fits_alone(65)


def test_without_a_budget_everything_fits_that_is_no_longer_than_the_context() -> None:
    assert make_layout().fits_alone(32_768)
    assert not make_layout().fits_alone(32_769)


@pytest.mark.parametrize("budget", [None, 10**6])
def test_a_row_that_would_outgrow_the_context_stays_where_it_is(budget: int | None) -> None:
    layout, written = make_layout(context=100, budget=budget), Lengths()
    decoding(layout, written, A, B, length=99)

    assert layout.extend(A, 100, written) == []
    assert layout.extend(A, 101, written) is None
    assert layout.admit(C, 101, 0) is None

    assert [layout.place(key) for key in (A, B)] == [(0, 0), (0, 1)]
    assert not layout.fits_alone(101)
    layout.check_integrity()


# Promotion and release


def test_a_promoted_row_trades_places_with_the_first_prefilling_row() -> None:
    layout, written = make_layout(), Lengths({A: 5, B: 7, C: 9})
    for key in (A, B, C):
        layout.admit(key, 10, 0)

    assert layout.promote(C, written) == Promote(0, 2, 0, 9, 5)
    assert layout.groups[0].decoding == [C]
    assert layout.groups[0].prefilling == [B, A]
    assert layout.promote(B, written) == Promote(0, 1, 1, 7, 7)
    assert layout.groups[0].prefilling == [A]


def test_the_last_row_leaves_without_moves() -> None:
    layout, written = make_layout(), Lengths()
    decoding(layout, written, A, B)

    assert layout.release(B, written) == [Close(0, 1, ())]


def test_the_last_decoding_row_fills_the_hole() -> None:
    layout, written = make_layout(), Lengths()
    decoding(layout, written, A, B, C)
    written[C] = 33

    assert layout.release(A, written) == [Close(0, 0, (Move(2, 0, 33),))]
    assert layout.groups[0].decoding == [C, B]


def test_the_last_prefilling_row_follows_into_the_second_hole() -> None:
    layout, written = make_layout(), Lengths()
    decoding(layout, written, A, B, C)
    for key, length in ((D, 4), (E, 6)):
        layout.admit(key, 10, 0)
        written[key] = length
    written[C] = 33

    assert layout.release(A, written) == [Close(0, 0, (Move(2, 0, 33), Move(4, 2, 6)))]
    assert layout.groups[0].decoding == [C, B]
    assert layout.groups[0].prefilling == [E, D]


def test_a_prefilling_row_is_replaced_by_the_last_one() -> None:
    layout, written = make_layout(), Lengths()
    decoding(layout, written, A)
    for key, length in ((B, 2), (C, 4), (D, 6)):
        layout.admit(key, 10, 0)
        written[key] = length

    assert layout.release(B, written) == [Close(0, 1, (Move(3, 1, 6),))]
    assert layout.groups[0].prefilling == [D, C]


def test_the_last_decoding_row_leaves_a_hole_for_a_prefilling_row() -> None:
    layout, written = make_layout(), Lengths()
    decoding(layout, written, A)
    layout.admit(B, 10, 0)
    written[B] = 2

    assert layout.release(A, written) == [Close(0, 0, (Move(1, 0, 2),))]
    assert layout.place(B) == (0, 0)


def test_the_last_row_of_a_group_takes_the_buffer_with_it() -> None:
    layout, written = make_layout(), Lengths()
    decoding(layout, written, A)

    assert layout.release(A, written) == [Close(0, 0, ()), Resize(0, 0, 0)]
    assert layout.groups == {}
    assert layout.allocated_bytes == 0


# Growth


def test_a_row_grows_in_place_while_its_group_has_room() -> None:
    layout, written = make_layout(), Lengths()
    decoding(layout, written, A)

    assert layout.extend(A, 256, written) == []
    assert layout.extend(A, 257, written) == [Resize(0, 1, 512)]


def test_a_row_that_outgrows_its_group_moves_to_the_next() -> None:
    layout, written = make_layout(), Lengths()
    decoding(layout, written, A, B, length=2_048)

    assert layout.extend(A, 2_049, written) == [
        Resize(1, 1, 2_112),
        Transfer(0, 0, 1, 0, (), 2_048),
        Close(0, 0, (Move(1, 0, 2_048),)),
    ]
    assert layout.place(A) == (1, 0)
    assert layout.place(B) == (0, 0)


def test_a_transferred_row_makes_place_among_the_prefilling_ones() -> None:
    layout, written = make_layout(), Lengths()
    decoding(layout, written, C, length=5_000)
    decoding(layout, written, A, length=2_048)
    for key, length in ((D, 40), (E, 60)):
        layout.admit(key, 4_000, 0)
        written[key] = length

    assert layout.extend(A, 2_049, written) == [
        Transfer(0, 0, 1, 1, (Move(1, 3, 40),), 2_048),
        Close(0, 0, ()),
        Resize(0, 0, 0),
    ]
    assert layout.groups[1].decoding == [C, A]
    assert layout.groups[1].prefilling == [E, D]


def test_a_transfer_that_finds_no_room_changes_nothing() -> None:
    layout, written = make_layout(budget=2_048 * 8 * 2), Lengths()
    decoding(layout, written, A, length=2_048)

    assert layout.extend(A, 2_049, written) is None
    assert layout.place(A) == (0, 0)
    layout.check_integrity()


def test_room_is_reclaimed_from_groups_that_use_less_than_they_have() -> None:
    # Group 0 has four rows of 256 tokens for three of 64, so 64 * 3 remain of 1,024.
    layout, written = make_layout(budget=(4 * 256 + 4 * 256) * 8), Lengths()
    decoding(layout, written, A, B, C)
    assert layout.groups[0].rows == 4

    found = layout.admit(D, 2_000 // 4 + 256, 2_000)

    assert found == [Resize(0, 3, 64), Resize(1, 1, 768), Open(1, 0)]
    layout.check_integrity()


# Rows of their own


def test_rows_of_their_own_need_no_buffers() -> None:
    layout, written = make_layout(shared=False), Lengths()

    assert layout.admit(A, 5_000, 100) == [Open(0, 0)]
    written[A] = 5_000
    layout.promote(A, written)
    assert layout.extend(A, 20_000, written) == []
    assert layout.allocated_bytes == round_up(20_000) * 8


def test_rows_of_their_own_keep_the_budget() -> None:
    layout, written = make_layout(shared=False, budget=192 * 8), Lengths()
    decoding(layout, written, A, length=128)

    assert layout.admit(B, 65, 0) is None
    assert layout.admit(C, 64, 0) == [Open(0, 1)]
    assert layout.extend(A, 129, written) is None
    layout.check_integrity()


def test_refusing_the_first_row_of_its_own_leaves_nothing_behind() -> None:
    layout = make_layout(shared=False, budget=64 * 8)

    assert layout.admit(A, 65, 0) is None
    assert layout.groups == {}
    layout.check_integrity()


# Any sequence


LAYERS: tuple[LayerSpec, ...] = (
    LAYER,
    FullAttention(heads=2, key_dim=2, value_dim=1, dtype="bfloat16"),
    Window(heads=1, key_dim=1, value_dim=1, dtype="float32", size=128),
    Recurrent(shapes=((3, 2),), dtypes=("float32",)),
)
lengths = st.sampled_from([1, 10, 63, 64, 65, 200, 256, 257, 900, 2_000, 2_047, 2_048, 2_049])
keys = st.sampled_from([(f"r{i}", 0) for i in range(9)])


class Buffers:
    """What the instructions make of the rows, and what it costs at any moment."""

    def __init__(self, budget: int | None, shared: bool) -> None:
        self.groups: dict[int, SimulatedRows] = {}
        self.budget = budget
        self.shared = shared

    def carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, change: Instruction) -> None:
        match change:
            case Resize(group, 0, _):
                assert self.groups.pop(group).num_used == 0
            case Resize(group):
                self._spend(change)
                self._group(group).resize(change)
            case Open(group):
                self._group(group).open(change)
            case Promote(group):
                self.groups[group].promote(change)
            case Close(group):
                self.groups[group].close(change)
            case Transfer(group, row, to_group):
                contents = self.groups[group].take(row, change.length)
                self.groups[to_group].insert(change, contents)

    def _group(self, number: int) -> SimulatedRows:
        return self.groups.setdefault(number, SimulatedRows(shared=self.shared))

    def _spend(self, change: Resize) -> None:
        """Each layer is copied in its turn, the old one going when the new one is there."""
        used = sum(
            layer_bytes(layer, len(group.cells), group.capacity, 0)
            for layer in LAYERS
            for group in self.groups.values()
        )
        old = self.groups.get(change.group, SimulatedRows())
        for layer in LAYERS:
            used += layer_bytes(layer, change.rows, change.capacity, 0)
            assert self.budget is None or used <= self.budget, f"{used} of {self.budget} bytes"
            used -= layer_bytes(layer, len(old.cells), old.capacity, 0)


class LayoutMachine(RuleBasedStateMachine):
    @initialize(budget=st.sampled_from([None, 20_000, 50_000, 200_000]), shared=st.booleans())
    def start(self, budget: int | None, shared: bool) -> None:
        self.budget = budget
        self.layout = make_layout(layers=LAYERS, budget=budget, context=9_000, shared=shared)
        self.buffers = Buffers(budget, shared)
        self.written = Lengths()
        self.reserved: dict[Key, int] = {}
        self.serial: dict[Key, int] = {}
        self.decoding: set[Key] = set()
        self.counter = 0

    @rule(key=keys, length=lengths, headroom=st.sampled_from([0, 1, 64, 256]))
    def admit(self, key: Key, length: int, headroom: int) -> None:
        if self.layout.holds(key):
            return
        before = self.state()
        instructions = self.layout.admit(key, length, headroom)
        if instructions is None:
            assert self.state() == before
            assert self.reserved or not self.layout.fits_alone(length)
            return
        assert self.reserved or self.layout.fits_alone(length) or self.budget is None
        self.buffers.carry_out(instructions)
        self.counter += 1
        self.reserved[key], self.written[key], self.serial[key] = length, 0, self.counter

    @precondition(lambda self: set(self.reserved) - self.decoding)
    @rule(data=st.data(), part=st.sampled_from([0.3, 1.0]))
    def prefill(self, data: st.DataObject, part: float) -> None:
        key = data.draw(st.sampled_from(sorted(set(self.reserved) - self.decoding)))
        left = self.reserved[key] - self.written[key]
        self.write(key, int(left * part))

    @precondition(lambda self: set(self.reserved) - self.decoding)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(set(self.reserved) - self.decoding)))
        self.buffers.carry_out([self.layout.promote(key, self.written)])
        self.decoding.add(key)

    @precondition(lambda self: self.decoding)
    @rule(data=st.data(), by=st.sampled_from([1, 1, 64, 300, 2_048]))
    def extend(self, data: st.DataObject, by: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.decoding)))
        length = min(self.written[key] + by, 9_000)
        before = self.state()
        instructions = self.layout.extend(key, length, self.written)
        if instructions is None:
            assert self.state() == before
            return
        self.buffers.carry_out(instructions)
        self.reserved[key] = length
        self.write(key, length - self.written[key])

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.reserved)))
        self.buffers.carry_out(self.layout.release(key, self.written))
        del self.reserved[key], self.written[key]
        self.decoding.discard(key)

    @rule()
    def reset(self) -> None:
        self.layout.reset()
        self.buffers.groups.clear()
        self.reserved.clear()
        self.written.clear()
        self.decoding.clear()

    @invariant()
    def rows_hold_what_was_written(self) -> None:
        self.layout.check_integrity()
        assert self.layout.num_rows == len(self.reserved)
        for key in self.reserved:
            group, row = self.layout.place(key)
            found = self.buffers.groups[group].read(row, self.written[key])
            assert found == self.contents(key), f"{key}: row {row} of group {group}"
            assert (row < self.buffers.groups[group].num_decoding) == (key in self.decoding)

    @invariant()
    def buffers_agree(self) -> None:
        assert set(self.buffers.groups) == set(self.layout.groups)
        for number, group in self.layout.groups.items():
            held = self.buffers.groups[number]
            assert (held.num_decoding, held.num_used) == (len(group.decoding), group.num_used)
            if self.buffers.shared:
                assert (len(held.cells), held.capacity) == (group.rows, group.capacity)
                assert group.rows <= 9

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None:
            return  # a rule failed, that is enough
        for key in list(self.reserved):
            self.buffers.carry_out(self.layout.release(key, self.written))
            del self.reserved[key]
            self.rows_hold_what_was_written()
        assert self.layout.allocated_bytes == 0
        assert self.buffers.groups == {}

    def write(self, key: Key, num_tokens: int) -> None:
        group, row = self.layout.place(key)
        start = self.written[key]
        self.written[key] += num_tokens
        self.buffers.groups[group].write(row, start, tuple(self.contents(key)[start:]))

    def contents(self, key: Key) -> list[int]:
        """Numbers that no other row ever holds."""
        first = self.serial[key] * 100_000
        return list(range(first, first + self.written[key]))

    def state(self) -> object:
        groups = self.layout.groups.items()
        rows = {n: (g.rows, g.capacity, [*g.decoding], [*g.prefilling]) for n, g in groups}
        return rows, dict(self.layout._reserved), dict(self.layout._group_of)


TestLayoutMachine = LayoutMachine.TestCase
TestLayoutMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
