"""Which row of which buffer belongs to whom: pure bookkeeping that emits instructions.

Rows live in groups. A group is one buffer per layer of ``rows x capacity`` tokens; its rows are
``[decoding | prefilling | free]``. A sequence's group is chosen by length, so that one long
sequence does not make short ones pay for its capacity; a row that outgrows its group moves to the
next. What is allocated is counted in bytes and never exceeds the budget, the second copy of a
layer that a resize needs for a moment included.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from treadle_core.layers import LayerSpec, layer_bytes
from treadle_core.plan import Close, Instruction, Key, Move, Open, Promote, Resize, Transfer

GRANULARITY = 64
FIRST_CAPACITY = 256
FIRST_CLASS = 2048
CLASS_FACTOR = 4

Written = Callable[[Key], int]
"""Tokens of a sequence that are in its row."""


@dataclass(slots=True)
class Group:
    """Rows of one buffer: the first ``len(decoding)`` decode, the next ones prefill."""

    rows: int = 0
    capacity: int = 0
    decoding: list[Key] = field(default_factory=list[Key])
    prefilling: list[Key] = field(default_factory=list[Key])

    @property
    def num_used(self) -> int:
        """Rows that belong to somebody."""
        return len(self.decoding) + len(self.prefilling)

    def row(self, key: Key) -> int:
        """The row of ``key``."""
        if key in self.decoding:
            return self.decoding.index(key)
        return len(self.decoding) + self.prefilling.index(key)


class KvLayout:
    """Assigns rows, grows and shrinks buffers, and keeps the byte budget.

    Every method that changes something returns the instructions that make it so, or None when
    there is no room, in which case nothing changed. Nowhere is room for a row that is longer than
    the context.

    Args:
        layers: What each layer keeps.
        budget_bytes: Most bytes to allocate; None is no limit.
        max_rows: Most rows of a group.
        context_length: Most tokens of a row.
        slack: Tokens that a windowed layer's ring holds beyond its window.
        shared: Whether rows share buffers; otherwise each row is allocated for itself.
    """

    def __init__(
        self,
        layers: Iterable[LayerSpec],
        *,
        budget_bytes: int | None,
        max_rows: int,
        context_length: int,
        slack: int = 0,
        shared: bool = True,
    ) -> None:
        self._layers = tuple(layers)
        self._budget = budget_bytes
        self._max_rows = max_rows
        self._slack = slack
        self._shared = shared
        self._limits = class_limits(context_length) if shared else (context_length,)
        self._groups: dict[int, Group] = {}
        self._group_of: dict[Key, int] = {}
        self._reserved: dict[Key, int] = {}
        self._longest_alone = self._find_longest_alone(context_length)

    @property
    def groups(self) -> dict[int, Group]:
        """Groups that have rows, by their number."""
        return self._groups

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self._group_of)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buffers."""
        if not self._shared:
            lengths = map(round_up, self._reserved.values())
            return sum(sum(self._layer_sizes(1, length)) for length in lengths)
        groups = self._groups.values()
        return sum(sum(self._layer_sizes(group.rows, group.capacity)) for group in groups)

    def place(self, key: Key) -> tuple[int, int]:
        """Group and row of ``key``."""
        number = self._group_of[key]
        return number, self._groups[number].row(key)

    def holds(self, key: Key) -> bool:
        """Whether ``key`` has a row."""
        return key in self._group_of

    @property
    def longest_alone(self) -> int:
        """Most tokens of a row with nobody else there."""
        return self._longest_alone

    def fits_alone(self, length: int) -> bool:
        """Whether a row of ``length`` tokens could be allocated with nobody else there."""
        return length <= self._longest_alone

    def admit(self, key: Key, length: int, headroom: int) -> list[Instruction] | None:
        """A row for ``length`` tokens now, in a group where ``headroom`` more fit as well."""
        if length > self._limits[-1]:
            return None
        number = self._class_for(length, headroom)
        group = self._groups.get(number, Group())
        self._reserved[key] = length
        resize = self._ensure(number, group.num_used + 1, length)
        if resize is None:
            del self._reserved[key]
            return None
        group = self._groups[number]
        group.prefilling.append(key)
        self._group_of[key] = number
        return [*resize, Open(number, group.num_used - 1)]

    def promote(self, key: Key, written: Written) -> Promote:
        """The prefilled row joins the decoding rows of its group."""
        number, row = self.place(key)
        group = self._groups[number]
        to = len(group.decoding)
        other = group.prefilling[0]
        group.prefilling[row - to] = other
        group.prefilling.pop(0)
        group.decoding.append(key)
        return Promote(number, row, to, written(key), written(other))

    def extend(self, key: Key, length: int, written: Written) -> list[Instruction] | None:
        """Room for ``length`` tokens in the row of ``key``, in another group if need be."""
        if length > self._limits[-1]:
            return None
        number = self._group_of[key]
        group = self._groups[number]
        if self._shared and length > self._limits[number]:
            return self._transfer(key, length, written)
        before = self._reserved[key]
        self._reserved[key] = length
        resize = self._ensure(number, group.num_used, length)
        if resize is None:
            self._reserved[key] = before
        return resize

    def widen(self, number: int, length: int) -> list[Instruction]:
        """Columns for ``length`` tokens in a group's rows, if that costs nobody anything.

        Unlike :meth:`extend` it neither moves a row nor takes room from another group.
        """
        group = self._groups[number]
        length = min(length, self._limits[number])
        if not self._shared or length <= group.capacity:
            return []
        for rows, capacity in self._sizes(
            number, group.num_used, length, group.rows, group.capacity
        ):
            if self._fits(number, rows, capacity):
                return [self._resize(number, rows, capacity)]
        return []

    def release(self, key: Key, written: Written) -> list[Instruction]:
        """The row of ``key`` is free; the last rows move into the hole."""
        number = self._group_of.pop(key)
        self._reserved.pop(key)
        group = self._groups[number]
        row = group.row(key)
        moves = _fill_hole(group, row, written)
        instructions: list[Instruction] = [Close(number, row, moves)]
        if group.num_used == 0:
            del self._groups[number]
            instructions.append(Resize(number, 0, 0))
        return instructions

    def reset(self) -> None:
        """Forget every row and buffer."""
        self._groups.clear()
        self._group_of.clear()
        self._reserved.clear()

    def check_integrity(self) -> None:
        """Assert that rows, groups and bytes agree."""
        placed = [key for group in self._groups.values() for key in _members(group)]
        assert len(placed) == len(set(placed)), "a sequence has two rows"
        assert set(placed) == set(self._group_of) == set(self._reserved), "rows without owner"
        for number, group in self._groups.items():
            assert group.num_used, "an empty group keeps buffers"
            assert not self._shared or group.num_used <= group.rows, "more rows than allocated"
            for key in _members(group):
                assert self._group_of[key] == number
                assert not self._shared or self._reserved[key] <= group.capacity
        assert self._within_budget(), "the byte budget is exceeded"

    def _find_longest_alone(self, context_length: int) -> int:
        if self._budget is None:
            return context_length

        def size(num_blocks: int) -> int:
            sizes = self._layer_sizes(1, num_blocks * GRANULARITY)
            return sum(sizes) + (max(sizes, default=0) if self._shared else 0)

        blocks = range(1, round_up(context_length) // GRANULARITY + 1)
        return min(context_length, bisect_right(blocks, self._budget, key=size) * GRANULARITY)

    def _class_for(self, length: int, headroom: int) -> int:
        for number, limit in enumerate(self._limits):
            if length + headroom <= limit:
                return number
        return len(self._limits) - 1

    def _ensure(self, number: int, rows: int, length: int) -> list[Instruction] | None:
        if not self._shared:
            if not self._within_budget():
                return None
            self._groups.setdefault(number, Group())
            return []
        group = self._groups.get(number)
        if group is not None and rows <= group.rows and length <= group.capacity:
            return []
        old_rows, old_capacity = (group.rows, group.capacity) if group else (0, 0)
        for new_rows, new_capacity in self._sizes(number, rows, length, old_rows, old_capacity):
            if self._fits(number, new_rows, new_capacity):
                return [self._resize(number, new_rows, new_capacity)]
        return self._reclaim(number, rows, length)

    def _sizes(
        self, number: int, rows: int, length: int, old_rows: int, old_capacity: int
    ) -> list[tuple[int, int]]:
        """Sizes to try, roomy first: both doubled where they grow, then just what is needed."""
        limit = self._limits[number]
        roomy = max(old_capacity * 2, FIRST_CAPACITY)
        need = max(round_up(length), old_capacity)
        need_rows = max(rows, old_rows)
        wide = need if length <= old_capacity else max(need, min(limit, roomy))
        tall = need_rows if rows <= old_rows else max(rows, min(self._max_rows, old_rows * 2))
        return [(tall, wide), (need_rows, wide), (need_rows, need)]

    def _reclaim(self, number: int, rows: int, length: int) -> list[Instruction] | None:
        """Shrink every group to what it uses; all of it or nothing."""
        before = {n: (g.rows, g.capacity) for n, g in self._groups.items()}
        instructions: list[Instruction] = []
        for other, group in list(self._groups.items()):
            if other != number:
                tight = max(round_up(self._reserved[key]) for key in _members(group))
                if (group.num_used, tight) != (group.rows, group.capacity):
                    instructions.append(self._resize(other, group.num_used, tight))
        group = self._groups.get(number)
        members = _members(group) if group else []
        tight = max([round_up(length), *(round_up(self._reserved[key]) for key in members)])
        if self._fits(number, rows, tight):
            return [*instructions, self._resize(number, rows, tight)]
        for other, (old_rows, old_capacity) in before.items():
            self._groups[other].rows, self._groups[other].capacity = old_rows, old_capacity
        return None

    def _resize(self, number: int, rows: int, capacity: int) -> Resize:
        group = self._groups.setdefault(number, Group())
        group.rows, group.capacity = rows, capacity
        return Resize(number, rows, capacity)

    def _transfer(self, key: Key, length: int, written: Written) -> list[Instruction] | None:
        source = self._group_of[key]
        target = self._class_for(length, 0)
        used = self._groups[target].num_used if target in self._groups else 0
        resize = self._ensure(target, used + 1, length)
        if resize is None:
            return None
        row, size = self._groups[source].row(key), written(key)
        group = self._groups[target]
        to = len(group.decoding)
        moves: tuple[Move, ...] = ()
        if group.prefilling:
            first = group.prefilling.pop(0)
            moves = (Move(to, group.num_used + 1, written(first)),)
            group.prefilling.append(first)
        closing = self.release(key, written)
        group.decoding.append(key)
        self._group_of[key] = target
        self._reserved[key] = length
        return [*resize, Transfer(source, row, target, to, moves, size), *closing]

    def _fits(self, number: int, rows: int, capacity: int) -> bool:
        """Whether the budget holds a group of this size, and one more copy of any layer.

        The spare layer is what a later resize of any group needs while it copies.
        """
        if self._budget is None:
            return True
        sizes = self._layer_sizes(rows, capacity)
        total, spare = sum(sizes), max(sizes, default=0)
        for other, group in self._groups.items():
            if other != number:
                sizes = self._layer_sizes(group.rows, group.capacity)
                total, spare = total + sum(sizes), max(spare, *sizes)
        return total + spare <= self._budget

    def _within_budget(self) -> bool:
        return self._budget is None or self.allocated_bytes <= self._budget

    def _layer_sizes(self, rows: int, capacity: int) -> list[int]:
        return [layer_bytes(layer, rows, capacity, self._slack) for layer in self._layers]


def class_limits(context_length: int) -> tuple[int, ...]:
    """Largest row of each group: 2,048 tokens, then four times as many, up to the context."""
    limits: list[int] = []
    limit = FIRST_CLASS
    while limit < context_length:
        limits.append(limit)
        limit *= CLASS_FACTOR
    return (*limits, context_length)


def round_up(length: int, step: int = GRANULARITY) -> int:
    """``length`` rounded up to a multiple of ``step``."""
    return -(-length // step) * step


def _members(group: Group) -> list[Key]:
    return [*group.decoding, *group.prefilling]


def _fill_hole(group: Group, row: int, written: Written) -> tuple[Move, ...]:
    """Remove ``row`` from ``group`` and say which rows to copy where."""
    num_decoding = len(group.decoding)
    moves: list[Move] = []
    if row < num_decoding:
        last = group.decoding.pop()
        if row < num_decoding - 1:
            group.decoding[row] = last
            moves.append(Move(num_decoding - 1, row, written(last)))
        hole = num_decoding - 1
    else:
        hole = row
    if group.prefilling:
        last_row = num_decoding + len(group.prefilling) - 1
        mover = group.prefilling.pop()
        if row >= num_decoding and last_row == row:
            return tuple(moves)
        index = hole - len(group.decoding)
        if row < num_decoding:
            group.prefilling.insert(0, mover)
        else:
            group.prefilling[index] = mover
        moves.append(Move(last_row, hole, written(mover)))
    return tuple(moves)
