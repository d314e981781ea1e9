"""What one layer holds for the rows of a group: slots, rings and recurrent state.

Rows are left-aligned and have their own lengths. A new token is a scatter at per-row positions,
in place because MLX donates the buffer; joining, leaving and rolling back never touch the other
rows. Views of a store are what the model sees in place of its own caches, for one forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from treadle_core.layers import (
    Composite,
    FullAttention,
    LayerSpec,
    Opaque,
    Quantised,
    Recurrent,
    Window,
    ring_size,
)
from treadle_core.mlx_runtime.fusing import wait_for_other_writes
from treadle_core.mlx_runtime.masks import Positions, kept_mask, ring_mask, row_mask, slot_mask
from treadle_core.mlx_runtime.recording import Call, RecordedCache
from treadle_core.plan import Move
from treadle_core.prefix import TokenArray

DTYPES = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "int32": mx.int32,
    "uint32": mx.uint32,
    "uint8": mx.uint8,
}

Payload = list[mx.array]
"""A row's state as arrays of its own."""

Packed = tuple[mx.array, ...]
"""Packed numbers, scales and biases."""


class Store(Protocol):
    """One layer's state for the rows of a group ``[decoding | prefilling]``."""

    @property
    def num_arrays(self) -> int:
        """Arrays of a row's state."""
        ...

    def resize(self, rows: int, capacity: int, used: int) -> None:
        """Change the allocation; the first ``used`` rows keep their contents."""
        ...

    def open(self, row: int) -> None:
        """An empty row joins at the end."""
        ...

    def read(self, row: int, length: int) -> Payload:
        """Lazy copies of the first ``length`` tokens of a row; evaluate before writing."""
        ...

    def write(self, row: int, payload: Payload) -> None:
        """Put what :meth:`read` gave into a row."""
        ...

    def read_state(self, row: int, length: int) -> Payload:
        """Lazy copies of what the layer keeps after ``length`` tokens, whatever its buffers' size."""
        ...

    def write_state(self, row: int, length: int, payload: Payload) -> None:
        """Put what :meth:`read_state` gave into a row that is being prefilled."""
        ...

    def promote(self, row: int, to: int, mine: Payload, other: Payload) -> None:
        """Rows ``row`` and ``to`` trade places; ``to`` is the newest decoding row from now on."""
        ...

    def close(self, row: int, moves: tuple[Move, ...], payloads: list[Payload]) -> None:
        """Row ``row`` leaves; ``payloads`` are what the sources of ``moves`` held."""
        ...

    def relocate(self, move: Move, payload: Payload) -> None:
        """A prefilling row gets another number."""
        ...

    def insert(self, to: int, payload: Payload) -> None:
        """A row arrives from another group as the newest decoding row ``to``."""
        ...

    def clear(self, row: int, start: int, stop: int) -> None:
        """Zero what tokens ``[start, stop)`` left in a row that does not hold them any more.

        Masked columns must hold finite values: zero attention times NaN is NaN.
        """
        ...

    def row_view(self, row: int, start: int) -> Any:
        """A cache for prefilling one row from position ``start``."""
        ...

    def batch_view(self, positions: Positions, width: int) -> Any:
        """A cache for one forward over the first rows of the group."""
        ...

    def commit(self, view: Any) -> None:
        """Take over what a view's forward wrote."""
        ...

    def keep(self, kept: Sequence[int]) -> None:
        """Of the tokens that the forward just committed fed each row, only so many count."""
        ...

    def arrays(self) -> list[mx.array]:
        """The buffers, to be evaluated."""
        ...


class RewrittenRows(ABC):
    """The half of a store whose rows move by being written at their new place."""

    @abstractmethod
    def write(self, row: int, payload: Payload) -> None:
        """Put a row's state into a row."""

    def promote(self, row: int, to: int, mine: Payload, other: Payload) -> None:
        """Swap the two rows."""
        if row != to:
            self.write(to, mine)
            self.write(row, other)

    def close(self, row: int, moves: tuple[Move, ...], payloads: list[Payload]) -> None:
        """Fill the hole."""
        for move, payload in zip(moves, payloads, strict=True):
            self.write(move.target, payload)

    def relocate(self, move: Move, payload: Payload) -> None:
        """Write the row at its new place."""
        self.write(move.target, payload)

    def insert(self, to: int, payload: Payload) -> None:
        """Write the row."""
        self.write(to, payload)

    def keep(self, kept: Sequence[int]) -> None:
        """All that was written stays: what lies behind a row's length is overwritten."""
        del kept


class AttentionStore(RewrittenRows):
    """Keys and values of a full or windowed layer: ``[rows, heads, columns, dim]`` each."""

    def __init__(self, spec: FullAttention | Window, slack: int) -> None:
        self.spec = spec
        self._slack = slack
        self.keys = mx.zeros((0,))
        self.values = mx.zeros((0,))
        self.rows = 0
        self.columns = 0

    @property
    def num_arrays(self) -> int:
        """Keys and values."""
        return 2

    def resize(self, rows: int, capacity: int, used: int) -> None:
        """Allocate ``rows x columns`` and keep what is there."""
        columns = self._columns(capacity)
        if (rows, columns) == (self.rows, self.columns):
            return
        heads, dtype, kept = self.spec.heads, self.spec.dtype, min(used, self.rows, rows)
        keys = TokenArray(heads, self.spec.key_dim, dtype)
        values = TokenArray(heads, self.spec.value_dim, dtype)
        self.keys = regrown(self.keys, keys, rows, columns, kept)
        self.values = regrown(self.values, values, rows, columns, kept)
        self.rows, self.columns = rows, columns

    def open(self, row: int) -> None:
        """Nothing: what a row held before is masked by its length."""

    def read(self, row: int, length: int) -> Payload:
        """Copies of the row's used columns."""
        used = min(length, self.columns)
        return [mx.contiguous(b[row : row + 1, :, :used]) for b in (self.keys, self.values)]

    def write(self, row: int, payload: Payload) -> None:
        """Put keys and values into the row."""
        keys, values = payload
        used = keys.shape[2]
        if used:
            self.keys[row : row + 1, :, :used] = keys
            self.values[row : row + 1, :, :used] = values

    def read_tokens(self, row: int, start: int, stop: int) -> Payload:
        """Lazy copies of tokens ``[start, stop)`` of a row of full attention."""
        return [mx.contiguous(b[row : row + 1, :, start:stop]) for b in (self.keys, self.values)]

    def read_state(self, row: int, length: int) -> Payload:
        """Copies of the tokens that may still be seen, in the order of their positions."""
        if isinstance(self.spec, FullAttention):
            return self.read_tokens(row, 0, length)
        index = mx.array(self._ring_columns(length), dtype=mx.int32)
        return [mx.take(b[row : row + 1], index, axis=2) for b in (self.keys, self.values)]

    def write_state(self, row: int, length: int, payload: Payload) -> None:
        """Put them back, each into its column."""
        if isinstance(self.spec, FullAttention):
            self.write(row, payload)
            return
        columns = self._ring_columns(length)
        for column, begin, end in runs(list(range(len(columns))), columns):
            there = slice(column, column + end - begin)
            self.keys[row : row + 1, :, there] = payload[0][:, :, begin:end]
            self.values[row : row + 1, :, there] = payload[1][:, :, begin:end]

    def clear(self, row: int, start: int, stop: int) -> None:
        """Zero the columns of those tokens."""
        start, stop = min(start, self.columns), min(stop, self.columns)
        if start < stop:
            self.keys[row : row + 1, :, start:stop] = 0
            self.values[row : row + 1, :, start:stop] = 0

    def row_view(self, row: int, start: int) -> "SlotRow | RingRow":
        """A view that writes the row in place."""
        if isinstance(self.spec, Window):
            return RingRow(self, row, start)
        return SlotRow(self, row, start)

    def batch_view(self, positions: Positions, width: int) -> "SlotBatch | RingBatch":
        """A view that scatters one step's tokens."""
        if isinstance(self.spec, Window):
            return RingBatch(self, positions, width)
        return SlotBatch(self, positions, width)

    def commit(self, view: "SlotRow | RingRow | SlotBatch | RingBatch") -> None:
        """Take the buffers that the view's forward made."""
        view.finish()

    def arrays(self) -> list[mx.array]:
        """Both buffers."""
        return [self.keys, self.values]

    def _ring_columns(self, length: int) -> list[int]:
        """Columns of what the token after ``length`` others sees of them, by position."""
        assert isinstance(self.spec, Window)
        return ring_columns(visible_before(length, self.spec), self.spec.keep, self.columns)

    def _columns(self, capacity: int) -> int:
        if isinstance(self.spec, Window):
            return min(capacity, ring_size(self.spec, self._slack))
        return capacity


class AttentionView:
    """Attributes that some models read or tie to other arrays.

    mlx-lm's models set ``keys`` to make the evaluation of one cache imply another's. A group
    evaluates all of its buffers, so there is nothing to tie.
    """

    def __init__(self, store: AttentionStore, rows: slice, columns: int) -> None:
        self._store = store
        self._rows = rows
        self._seen = columns

    @property
    def keys(self) -> mx.array:
        """Keys of the rows, up to the columns that the forward looks at."""
        return self._store.keys[self._rows, :, : self._seen]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        del value

    @property
    def values(self) -> mx.array:
        """Values of the rows, up to the columns that the forward looks at."""
        return self._store.values[self._rows, :, : self._seen]

    @values.setter
    def values(self, value: mx.array) -> None:
        del value


class SlotRow(AttentionView):
    """One row of a full-attention layer, written and read through a view of the buffer."""

    def __init__(self, store: AttentionStore, row: int, start: int) -> None:
        super().__init__(store, slice(row, row + 1), start)
        self._row = row
        self.offset = start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write ``[1, heads, N, dim]`` behind what is there; return all of the row."""
        store, row, start = self._store, self._row, self.offset
        stop = start + keys.shape[2]
        assert stop <= store.columns, f"row {row}: {stop} tokens exceed {store.columns} columns"
        store.keys[row : row + 1, :, start:stop] = keys
        store.values[row : row + 1, :, start:stop] = values
        self.offset = self._seen = stop
        wait_for_other_writes()
        return store.keys[row : row + 1, :, :stop], store.values[row : row + 1, :, :stop]

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """As mlx-lm's own cache answers it."""
        return row_mask(num_tokens, self.offset, window_size, return_array)

    def finish(self) -> None:
        """The buffers were written already."""


class SlotBatch(AttentionView):
    """The first rows of a full-attention layer, N new tokens each at their own positions."""

    def __init__(self, store: AttentionStore, positions: Positions, width: int) -> None:
        self._positions = positions
        self._width = min(width, store.columns)
        super().__init__(store, slice(0, len(positions.starts)), self._width)
        self.offset = positions.fresh_offset()
        # mlx-vlm's models look here for the longest row's length; they would wait for the array.
        self._offset = max(positions.starts)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Scatter ``[rows, heads, N, dim]``; return the columns up to the longest row."""
        store, rows, width = self._store, keys.shape[0], self._width
        columns = self._positions.query
        store.keys = scatter_rows(store.keys, columns, keys)
        store.values = scatter_rows(store.values, columns, values)
        wait_for_other_writes()
        return store.keys[:rows, :, :width], store.values[:rows, :, :width]

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Causal within each row's own length."""
        return slot_mask(self._positions, self._width, window_size)

    def finish(self) -> None:
        """The buffers were written already."""


class RingRow(AttentionView):
    """One row of a windowed layer while it is prefilled.

    A chunk may be longer than the window, so attention sees the window's worth of tokens before
    it in order, then the chunk; the ring gets the chunk's end when the forward is done.
    """

    def __init__(self, store: AttentionStore, row: int, start: int) -> None:
        assert isinstance(store.spec, Window)
        super().__init__(store, slice(row, row + 1), min(start, store.columns))
        self._row, self._start, self._spec = row, start, store.spec
        self._held = list(visible_before(start, self._spec))
        self._new: tuple[mx.array, mx.array] | None = None
        self.offset = start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep ``[1, heads, N, dim]`` for later; return the window before it and itself."""
        self._new = (keys, values)
        self.offset = self._start + keys.shape[2]
        if not self._held:
            return keys, values
        index = mx.array(self._ring_columns(self._held))
        row = slice(self._row, self._row + 1)
        old_keys = mx.take(self._store.keys[row], index, axis=2)
        old_values = mx.take(self._store.values[row], index, axis=2)
        return (
            mx.concatenate([old_keys, keys], axis=2),
            mx.concatenate([old_values, values], axis=2),
        )

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Causal within the window."""
        spec = self._spec
        # A single query sees all that is held; some models take no array mask for it.
        if spec.keep and num_tokens > 1:
            held = [*self._held, *range(self._start, self._start + num_tokens)]
            return kept_mask(self._start, num_tokens, held, size=spec.size, keep=spec.keep)
        window = min(window_size or spec.size, spec.size)
        return row_mask(num_tokens, len(self._held), window, return_array)

    def finish(self) -> None:
        """Write the newest tokens of the chunk into the ring, run by run."""
        assert self._new is not None, "the model did not use this layer's cache"
        keys, values = self._new
        stop, keep = self._start + keys.shape[2], self._spec.keep
        cycle = self._store.columns - keep
        first = max(self._start, stop - cycle)
        positions = [*range(self._start, min(keep, stop)), *range(max(first, keep), stop)]
        for column, begin, end in runs(positions, self._ring_columns(positions)):
            here, there = (
                slice(begin - self._start, end - self._start),
                slice(column, column + end - begin),
            )
            row = slice(self._row, self._row + 1)
            self._store.keys[row, :, there] = keys[:, :, here]
            self._store.values[row, :, there] = values[:, :, here]

    def _ring_columns(self, positions: list[int]) -> list[int]:
        return ring_columns(positions, self._spec.keep, self._store.columns)


class RingBatch(AttentionView):
    """The first rows of a windowed layer, N new tokens each; column = position modulo ring."""

    def __init__(self, store: AttentionStore, positions: Positions, width: int) -> None:
        assert isinstance(store.spec, Window)
        self._positions, self._spec = positions, store.spec
        self._columns = min(width, store.columns)
        super().__init__(store, slice(0, len(positions.starts)), self._columns)
        self.offset = positions.fresh_offset()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Scatter ``[rows, heads, N, dim]`` into the ring; return its used columns."""
        store, rows, keep = self._store, keys.shape[0], self._spec.keep
        query = self._positions.query
        cyclic = keep + mx.remainder(query - keep, store.columns - keep)
        columns = mx.where(query < keep, query, cyclic) if keep else cyclic
        store.keys = scatter_rows(store.keys, columns, keys)
        store.values = scatter_rows(store.values, columns, values)
        return store.keys[:rows, :, : self._columns], store.values[:rows, :, : self._columns]

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Within the window of each row's own position."""
        spec = self._spec
        size = min(window_size or spec.size, spec.size)
        return ring_mask(
            self._positions, self._columns, self._store.columns, size=size, keep=spec.keep
        )

    def finish(self) -> None:
        """The buffers were written already."""


class QuantisedStore(RewrittenRows):
    """Keys and values of a full-attention layer as quantised numbers.

    Each of them is three buffers ``[rows, heads, columns, dim']``: packed numbers, scales and
    biases. A token is quantised when it is written, and only copied from then on.
    """

    def __init__(self, spec: FullAttention) -> None:
        assert spec.quantised is not None
        self.spec = spec
        self.form = spec.quantised
        self.buffers = [mx.zeros((0,)) for _ in spec.arrays]
        self.rows = 0
        self.columns = 0

    @property
    def num_arrays(self) -> int:
        """Three of the keys, three of the values."""
        return len(self.buffers)

    def resize(self, rows: int, capacity: int, used: int) -> None:
        """Allocate ``rows x capacity`` and keep what is there."""
        if (rows, capacity) == (self.rows, self.columns):
            return
        kept = min(used, self.rows, rows)
        kinds = zip(self.buffers, self.spec.arrays, strict=True)
        self.buffers = [regrown(old, kind, rows, capacity, kept) for old, kind in kinds]
        self.rows, self.columns = rows, capacity

    def open(self, row: int) -> None:
        """Nothing: what a row held before is masked by its length."""

    def read(self, row: int, length: int) -> Payload:
        """Copies of the row's used columns."""
        return self.read_tokens(row, 0, length)

    def write(self, row: int, payload: Payload) -> None:
        """Put what was read into the row."""
        self.put(row, 0, payload)

    def read_tokens(self, row: int, start: int, stop: int) -> Payload:
        """Lazy copies of tokens ``[start, stop)`` of a row."""
        return [mx.contiguous(b[row : row + 1, :, start:stop]) for b in self.buffers]

    def read_state(self, row: int, length: int) -> Payload:
        """Copies of the row's tokens."""
        return self.read_tokens(row, 0, length)

    def write_state(self, row: int, length: int, payload: Payload) -> None:
        """Put them back."""
        self.put(row, 0, payload)

    def put(self, row: int, start: int, parts: Payload) -> None:
        """Write quantised tokens behind the first ``start`` of a row."""
        stop = start + parts[0].shape[2]
        assert stop <= self.columns, f"row {row}: {stop} tokens exceed {self.columns} columns"
        if start < stop:
            for buffer, part in zip(self.buffers, parts, strict=True):
                buffer[row : row + 1, :, start:stop] = part

    def scatter(self, columns: mx.array, parts: Payload) -> None:
        """Write quantised tokens at ``columns [n, N]`` of the first n rows."""
        pairs = zip(self.buffers, parts, strict=True)
        self.buffers = [scatter_rows(buffer, columns, part) for buffer, part in pairs]

    def packed(self, keys: mx.array, values: mx.array) -> Payload:
        """Keys and values as this store keeps them."""
        bits, group_size = self.form.bits, self.form.group_size
        return [
            part
            for array in (keys, values)
            for part in mx.quantize(array, group_size=group_size, bits=bits)
        ]

    def cut(self, rows: slice, columns: int) -> tuple[Packed, Packed]:
        """Keys and values of some rows, up to a column."""
        found = tuple(buffer[rows, :, :columns] for buffer in self.buffers)
        return found[:3], found[3:]

    def clear(self, row: int, start: int, stop: int) -> None:
        """Zero the columns of those tokens, scales and biases included."""
        start, stop = min(start, self.columns), min(stop, self.columns)
        if start < stop:
            for buffer in self.buffers:
                buffer[row : row + 1, :, start:stop] = 0

    def row_view(self, row: int, start: int) -> "QuantisedRow":
        """A view that writes the row in place."""
        return QuantisedRow(self, row, start)

    def batch_view(self, positions: Positions, width: int) -> "QuantisedBatch":
        """A view that scatters one step's tokens."""
        return QuantisedBatch(self, positions, width)

    def commit(self, view: "QuantisedRow | QuantisedBatch") -> None:
        """Nothing: the view wrote the buffers."""

    def arrays(self) -> list[mx.array]:
        """All buffers."""
        return self.buffers


class QuantisedView:
    """What mlx-lm's attention asks a quantised cache for; ``keys`` as in :class:`AttentionView`.

    Attributes:
        bits: Of a number; an attention that finds this attribute takes the quantised path.
        group_size: Numbers that share a scale and a bias.
    """

    def __init__(self, store: QuantisedStore, rows: slice, columns: int) -> None:
        self.bits = store.form.bits
        self.group_size = store.form.group_size
        self._store = store
        self._rows = rows
        self._seen = columns

    @property
    def keys(self) -> Packed:
        """Keys of the rows, up to the columns that the forward looks at."""
        return self._store.cut(self._rows, self._seen)[0]

    @keys.setter
    def keys(self, value: Packed) -> None:
        del value

    @property
    def values(self) -> Packed:
        """Values of the rows, up to the columns that the forward looks at."""
        return self._store.cut(self._rows, self._seen)[1]

    @values.setter
    def values(self, value: Packed) -> None:
        del value


class QuantisedRow(QuantisedView):
    """One row of a quantised layer, written and read through a view of the buffers."""

    def __init__(self, store: QuantisedStore, row: int, start: int) -> None:
        super().__init__(store, slice(row, row + 1), start)
        self._row = row
        self.offset = start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Quantise ``[1, heads, N, dim]`` behind what is there; return all of the row."""
        self._store.put(self._row, self.offset, self._store.packed(keys, values))
        self.offset = self._seen = self.offset + keys.shape[2]
        return self._store.cut(self._rows, self._seen)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """As mlx-lm's own cache answers it."""
        return row_mask(num_tokens, self.offset, window_size, return_array)


class QuantisedBatch(QuantisedView):
    """The first rows of a quantised layer, N new tokens each at their own positions."""

    def __init__(self, store: QuantisedStore, positions: Positions, width: int) -> None:
        self._positions = positions
        super().__init__(store, slice(0, len(positions.starts)), min(width, store.columns))
        self.offset = positions.fresh_offset()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Quantise and scatter ``[rows, heads, N, dim]``; return columns up to the longest row."""
        self._store.scatter(self._positions.query, self._store.packed(keys, values))
        return self._store.cut(self._rows, self._seen)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Causal within each row's own length."""
        return slot_mask(self._positions, self._seen, window_size)


class StateStore:
    """Recurrent state: arrays with exactly the decoding rows, and one set per prefilling row.

    The whole state is rewritten by each step anyway, so a join may concatenate. What a forward of
    several tokens began with is held until it is known how many of them count, or something else
    happens to the rows.
    """

    def __init__(self, spec: Recurrent) -> None:
        self._spec = spec
        self._decoding: Payload = []
        self._before: Before | None = None
        self._num_decoding = 0
        self._prefilling: dict[int, Payload] = {}

    @property
    def num_arrays(self) -> int:
        """Arrays of a row's state."""
        return len(self._spec.shapes)

    def resize(self, rows: int, capacity: int, used: int) -> None:
        """Nothing: state does not grow."""

    def open(self, row: int) -> None:
        """Start from zeros."""
        self._prefilling[row] = blank_state(self._spec)

    def read(self, row: int, length: int) -> Payload:
        """Copies of the row's state."""
        if row in self._prefilling:
            return self._prefilling[row]
        return [mx.contiguous(array[row : row + 1]) for array in self._decoding]

    def write(self, row: int, payload: Payload) -> None:
        """Replace the row's state."""
        if row >= self._num_decoding:
            self._prefilling[row] = payload
            return
        self._before = None
        for array, value in zip(self._decoding, payload, strict=True):
            array[row : row + 1] = value

    def read_state(self, row: int, length: int) -> Payload:
        """Copies of the row's state."""
        return [mx.contiguous(array) for array in self.read(row, length)]

    def write_state(self, row: int, length: int, payload: Payload) -> None:
        """Replace the row's state."""
        self.write(row, payload)

    def promote(self, row: int, to: int, mine: Payload, other: Payload) -> None:
        """The prefilled state becomes the last decoding row."""
        state = self._prefilling.pop(row)
        if row != to:
            self._prefilling[row] = self._prefilling.pop(to)
        self._append(state)

    def close(self, row: int, moves: tuple[Move, ...], payloads: list[Payload]) -> None:
        """Drop the row's state and follow the moves."""
        last = self._num_decoding - 1
        self._prefilling.pop(row, None)
        if row <= last:
            self._before = None
            if row < last:
                self.write(row, payloads[0])
            self._decoding = [array[:last] for array in self._decoding] if last else []
            self._num_decoding = last
        for move in moves:
            if move.source in self._prefilling:
                self._prefilling[move.target] = self._prefilling.pop(move.source)

    def relocate(self, move: Move, payload: Payload) -> None:
        """Renumber the prefilling row's state."""
        self._prefilling[move.target] = self._prefilling.pop(move.source)

    def insert(self, to: int, payload: Payload) -> None:
        """Append to the decoding rows; a prefilling row in that place was moved before."""
        self._append(payload)

    def clear(self, row: int, start: int, stop: int) -> None:
        """Nothing: a new row starts from zeros of its own."""

    def row_view(self, row: int, start: int) -> "StateView":
        """The prefilling row's own state."""
        return StateView(self._prefilling[row], row)

    def batch_view(self, positions: Positions, width: int) -> "StateView":
        """The decoding rows' state."""
        view = StateView(self._decoding, None)
        if positions.num_tokens > 1:
            view.calls = []
            self._before = Before(self._decoding, view.calls, positions.num_tokens)
        else:
            self._before = None
        return view

    def commit(self, view: "StateView") -> None:
        """Keep the new state."""
        if view.row is None:
            self._decoding = view.state_arrays()
        else:
            self._prefilling[view.row] = view.state_arrays()

    def keep(self, kept: Sequence[int]) -> None:
        """Go back to where rows were that keep less than all, and on from there.

        Raises:
            RuntimeError: No part of the model was seen to write the state.
        """
        before, self._before = self._before, None
        assert before is not None, "there is no state to go back to"
        for num, rows in before.rows_by_count(kept).items():
            state = before.advanced(rows, num)
            if len(rows) == self._num_decoding:
                self._decoding = state
            else:
                for array, value in zip(self._decoding, state, strict=True):
                    array[mx.array(rows)] = value

    def arrays(self) -> list[mx.array]:
        """All state arrays."""
        before = self._before.state if self._before is not None else []
        prefilling = (array for state in self._prefilling.values() for array in state)
        return [*self._decoding, *before, *prefilling]

    def _append(self, state: Payload) -> None:
        self._before = None
        if self._num_decoding:
            pairs = zip(self._decoding, state, strict=True)
            self._decoding = [mx.concatenate(list(pair)) for pair in pairs]
        else:
            self._decoding = state
        self._num_decoding += 1


class StateView(RecordedCache):
    """mlx-lm's own recurrent cache over a store's arrays; some models ask for its class."""

    def __init__(self, state: Payload, row: int | None) -> None:
        super().__init__(len(state))
        self.cache = list(state)
        self.row = row

    def state_arrays(self) -> Payload:
        """What a forward left; a copy, where that is a view of something longer."""
        return [mx.contiguous(array) for array in self.cache]


class Before:
    """The state of decoding rows before a forward of several tokens.

    Args:
        state: It.
        calls: The parts of the model that wrote what came after, as the forward notes them.
        num_tokens: Tokens per row.
    """

    def __init__(self, state: Payload, calls: list[Call], num_tokens: int) -> None:
        self.state = state
        self._calls = calls
        self._num_tokens = num_tokens

    def rows_by_count(self, kept: Sequence[int]) -> dict[int, list[int]]:
        """Rows that keep less than all, by how much."""
        found: dict[int, list[int]] = {}
        for row, num in enumerate(kept):
            assert 0 < num <= self._num_tokens, f"row {row} keeps {num} of {self._num_tokens}"
            if num < self._num_tokens:
                found.setdefault(num, []).append(row)
        return found

    def advanced(self, rows: list[int], num: int) -> Payload:
        """The state of some rows after ``num`` tokens.

        All of them at once need no padding, which some models would take for tokens.
        """
        if not self._calls:
            raise RuntimeError("no part of the model was seen to write recurrent state")
        shape = (self.state[0].shape[0], self._num_tokens)
        some = len(rows) < shape[0]
        index = mx.array(rows)
        view = StateView([mx.take(a, index, axis=0) if some else a for a in self.state], None)
        for call in self._calls:
            call.again(view, shape, rows, num)
        return view.state_arrays()


class CompositeView:
    """What a model sees of a composite layer: its caches by index."""

    def __init__(self, views: list[Any]) -> None:
        self.views = views

    def __getitem__(self, index: int) -> Any:
        """One of the caches."""
        return self.views[index]


def make_store(spec: LayerSpec, slack: int) -> Store:
    """The store for one kind of layer."""
    match spec:
        case FullAttention(quantised=Quantised()):
            return QuantisedStore(spec)
        case FullAttention() | Window():
            return AttentionStore(spec, slack)
        case Recurrent():
            return StateStore(spec)
        case Composite() | Opaque():
            raise TypeError(f"{type(spec).__name__} has no store of its own")


def blank_state(spec: Recurrent) -> Payload:
    """What a row's recurrent state is before its first token."""
    pairs = zip(spec.shapes, spec.dtypes, strict=True)
    return [mx.zeros((1, *shape), DTYPES[dtype]) for shape, dtype in pairs]


def regrown(old: mx.array, kind: TokenArray, rows: int, columns: int, kept_rows: int) -> mx.array:
    """A buffer of ``rows x columns`` zeros, with what the first ``kept_rows`` of ``old`` held."""
    new = mx.zeros((rows, kind.heads, columns, kind.dim), DTYPES[kind.dtype])
    kept = min(old.shape[2], columns) if kept_rows else 0
    if kept:
        new[:kept_rows, :, :kept] = old[:kept_rows, :, :kept]
    return new


def scatter_rows(buffer: mx.array, columns: mx.array, values: mx.array) -> mx.array:
    """Write ``values [n, H, N, D]`` at ``columns [n, N]`` of the first n rows of ``buffer``."""
    rows, heads = values.shape[:2]
    if rows == buffer.shape[0]:
        return mx.put_along_axis(buffer, columns[:, None, :, None], values, axis=2)
    row = mx.arange(rows)[:, None, None]
    head = mx.arange(heads)[None, :, None]
    buffer[row, head, columns[:, None, :]] = values
    return buffer


def ring_columns(positions: Iterable[int], keep: int, columns: int) -> list[int]:
    """Where a ring of ``columns`` keeps each of ``positions``; the first ``keep`` stay."""
    return [p if p < keep else keep + (p - keep) % (columns - keep) for p in positions]


def visible_before(start: int, spec: Window) -> range | list[int]:
    """Positions before ``start`` that the query at ``start`` sees."""
    newest = range(max(spec.keep, start - (spec.size - spec.keep) + 1), start)
    if not spec.keep:
        return range(max(0, start - spec.size + 1), start)
    return [*range(min(spec.keep, start)), *newest]


def runs(positions: list[int], columns: list[int]) -> list[tuple[int, int, int]]:
    """Consecutive stretches as (first column, first position, position after the last)."""
    found: list[tuple[int, int, int]] = []
    for position, column in zip(positions, columns, strict=True):
        if found:
            begin_column, begin, end = found[-1]
            if position == end and column == begin_column + end - begin:
                found[-1] = (begin_column, begin, end + 1)
                continue
        found.append((column, position, position + 1))
    return found
