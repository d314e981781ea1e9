"""The head's own keys and values, in slots like the model's."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from treadle_core.kv_layout import KvLayout
from treadle_core.layers import LayerSpec, layer_bytes
from treadle_core.mlx_runtime.adapter import PROBE_TOKENS, RowInput, describe_cache
from treadle_core.mlx_runtime.groups import RowGroup, SlotGroup, arrange
from treadle_core.mlx_runtime.runner import default_width_step
from treadle_core.plan import Arrangement, Key
from treadle_speculative.mtp.head import MtpHead

MOST_ROWS = 65_536
SPARE_COLUMNS = 64
"""Columns of a row beyond its context: a draft near the end of it is written before it is cut."""


class HeadModel:
    """Heads as a model of tokens: which of them, and the hidden states beside them, are given before.

    What it makes of them stands where a model's logits would.

    Args:
        heads: The heads.

    Attributes:
        model: The first of them.
    """

    def __init__(self, heads: Sequence[MtpHead]) -> None:
        self.model: nn.Module = heads[0]
        self._heads = heads
        self._given: tuple[int, mx.array] | None = None

    def give(self, place: int, hidden: mx.array) -> None:
        """For the next forward: which head, and ``[B, N, hidden]``."""
        self._given = place, hidden

    @property
    def encoder(self) -> None:
        """It reads tokens alone."""
        return None

    def forward(
        self, tokens: mx.array, caches: list[Any], rows: Sequence[RowInput] = ()
    ) -> mx.array:
        """``[B, N, hidden]``, lazily; the caches advance."""
        del rows
        assert self._given is not None, "hidden states go with the tokens"
        (place, hidden), self._given = self._given, None
        start = sum(head.num_caches for head in self._heads[:place])
        head = self._heads[place]
        return head(hidden, tokens, caches[start : start + head.num_caches])

    def new_cache(self) -> list[Any]:
        """Caches of mlx-lm's for one row."""
        return [cache for head in self._heads for cache in head.new_cache()]


class HeadSlots:
    """A slot for each row, left-aligned: column j is position ``origin + j`` of the row.

    Each head has keys and values of its own there, and has written as many columns as it has seen.

    Args:
        heads: The heads.
        context_length: Most tokens of a row.
        budget_bytes: Most bytes; None is no limit.
    """

    def __init__(
        self,
        heads: Sequence[MtpHead],
        *,
        context_length: int,
        budget_bytes: int | None = None,
    ) -> None:
        self.layers = tuple(layer for head in heads for layer in inspect_head(head))
        self._model = HeadModel(heads)
        self._layout = KvLayout(
            self.layers,
            budget_bytes=budget_bytes,
            max_rows=MOST_ROWS,
            context_length=context_length + SPARE_COLUMNS,
        )
        self._groups: dict[int, RowGroup] = {}

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots."""
        return self._layout.allocated_bytes

    def holds(self, key: Key) -> bool:
        """Whether a row has a slot."""
        return self._layout.holds(key)

    def reserve(self, key: Key, length: int, written: Callable[[Key], int]) -> bool:
        """Room for ``length`` columns of a row, which gets a slot if it has none.

        Args:
            key: The row.
            length: Columns.
            written: Columns of any row that hold something.

        Returns:
            Whether there is that room; if not, nothing changed.
        """
        if self._layout.holds(key):
            changes = self._layout.extend(key, length, written)
        else:
            changes = self._layout.admit(key, length, 0)
        if changes is None:
            return False
        self._arrange(changes)
        number, place = self._layout.place(key)
        if place >= len(self._layout.groups[number].decoding):
            self._arrange([self._layout.promote(key, written)])
        return True

    def release(self, key: Key, written: Callable[[Key], int]) -> None:
        """Free a row's slot, if it has one."""
        if self._layout.holds(key):
            self._arrange(self._layout.release(key, written))

    def reset(self) -> None:
        """Free every slot."""
        self._layout.reset()
        self._groups.clear()

    def groups_of(self, keys: Sequence[Key]) -> dict[int, list[Key]]:
        """Every row of the groups that ``keys`` are in, by group, in the order of their slots."""
        numbers = sorted({self._layout.place(key)[0] for key in keys})
        return {number: list(self._layout.groups[number].decoding) for number in numbers}

    def feed_row(
        self, place: int, key: Key, tokens: Sequence[int], hidden: mx.array, start: int
    ) -> mx.array:
        """Write a stretch of one row.

        Args:
            place: Which head's.
            key: The row.
            tokens: The token that goes with each position.
            hidden: ``[1, N, hidden]``.
            start: The first column.

        Returns:
            What the head makes of it, ``[1, N, hidden]``, lazily.
        """
        number, row = self._layout.place(key)
        self._model.give(place, hidden)
        return self._groups[number].prefill(row, tokens, start)

    def feed(
        self, place: int, number: int, tokens: mx.array, hidden: mx.array, starts: Sequence[int]
    ) -> mx.array:
        """Write ``[n, N]`` positions of a head to all rows of a group, each from its own column on."""
        self._model.give(place, hidden)
        return self._groups[number].decode(tokens, starts)

    def arrays(self) -> list[mx.array]:
        """All buffers, to be evaluated."""
        return [array for group in self._groups.values() for array in group.arrays()]

    def _arrange(self, changes: Sequence[Any]) -> None:
        for change in changes:
            arranged: Arrangement = change
            arrange(self._groups, arranged, self._new_group)

    def _new_group(self) -> RowGroup:
        return SlotGroup(self._model, self.layers, slack=0, width_step=default_width_step())


def inspect_head(head: MtpHead) -> tuple[LayerSpec, ...]:
    """What each of its layers keeps, found by running it on a few tokens."""
    caches = head.new_cache()
    tokens = mx.array([list(range(1, PROBE_TOKENS + 1))])
    out = head(mx.ones((1, PROBE_TOKENS, head.base.hidden_size), head.base.dtype), tokens, caches)
    mx.eval(out, [cache.state for cache in caches])
    return tuple(describe_cache(cache) for cache in caches)


def bytes_of(layers: Sequence[LayerSpec], length: int) -> int:
    """What one row of a length takes."""
    return sum(layer_bytes(layer, 1, length, 0) for layer in layers)
