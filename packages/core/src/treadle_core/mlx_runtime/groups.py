"""The rows of one group and the forwards over them: batched in slots, or one row at a time."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import mlx.core as mx

from treadle_core.layers import Composite, FullAttention, LayerSpec, flatten
from treadle_core.mlx_runtime.adapter import ModelAdapter, RowInput, cache_arrays
from treadle_core.mlx_runtime.host import (
    check_state,
    check_tokens,
    pack_caches,
    to_device,
    to_host,
    unpack_caches,
)
from treadle_core.mlx_runtime.masks import Positions
from treadle_core.mlx_runtime.stores import (
    AttentionStore,
    CompositeView,
    Payload,
    QuantisedStore,
    Store,
    make_store,
)
from treadle_core.plan import Arrangement, Close, Move, Open, Promote, Resize, Transfer
from treadle_core.ports import RowReader, StoredRow
from treadle_core.prefix import HostArray


class RowGroup(Protocol):
    """Rows ``[decoding | prefilling]`` of one group."""

    def resize(self, change: Resize) -> None:
        """Change the allocation."""
        ...

    def open(self, change: Open) -> None:
        """An empty row joins."""
        ...

    def promote(self, change: Promote) -> None:
        """A prefilled row begins to decode."""
        ...

    def close(self, change: Close) -> None:
        """A row leaves."""
        ...

    def insert(self, change: Transfer, source: Any) -> None:
        """A row arrives from ``source``, a group of the same kind, and goes on decoding."""
        ...

    def prefill(self, row: int, tokens: Sequence[int], start: int, prompt: Any = None) -> mx.array:
        """Write tokens at ``[start, ...)`` of a row, lazily.

        Args:
            row: Which row.
            tokens: Token ids.
            start: Position of the first.
            prompt: What the model is given of the row's prompt besides token ids.

        Returns:
            Logits ``[1, N, vocab]``; whoever does not evaluate them does not pay for them.
        """
        ...

    def decode(
        self, tokens: mx.array, starts: Sequence[int], prompts: Sequence[Any] = ()
    ) -> mx.array:
        """Feed ``tokens [n, N]`` to the decoding rows, at their own positions.

        Args:
            tokens: Token ids.
            starts: Position of each row's first.
            prompts: What the model is given of each row's prompt besides token ids; empty where
                all of them are text.

        Returns:
            Logits ``[n, N, vocab]``.
        """
        ...

    def keep(self, kept: Sequence[int]) -> None:
        """Of the N tokens that :meth:`decode` just fed each row, only the first ``kept`` count.

        Without it all of them do. Nothing may happen to the rows in between.
        """
        ...

    def arrays(self) -> list[mx.array]:
        """Everything that a prefill wrote, to be evaluated."""
        ...

    def reader(self, row: int, length: int) -> RowReader:
        """The row's state after ``length`` tokens, to be copied from before anything changes."""
        ...

    def restore(self, row: int, stored: StoredRow) -> None:
        """Fill an empty row with its first tokens, and wait for that."""
        ...


class SlotGroup:
    """Rows that share one buffer per layer and one forward.

    Args:
        model: The model.
        layers: What each of its caches keeps.
        slack: Tokens a ring holds beyond its window: one less than the widest forward.
        width_step: Attention looks at the longest row rounded up to this. Fine where masked
            columns cost as much as others, coarse where they are skipped.
    """

    def __init__(
        self, model: ModelAdapter, layers: Sequence[LayerSpec], *, slack: int, width_step: int
    ) -> None:
        self._model = model
        self._layers = layers
        self._width_step = width_step
        self._stores: list[Store] = [
            make_store(part, slack) for layer in layers for part in flatten(layer)
        ]
        self._capacity = 0
        self._num_used = 0
        # Per row, how many columns may hold something, of its owner or of one before.
        self._touched: list[int] = []

    def resize(self, change: Resize) -> None:
        """Reallocate each layer's buffer; the used rows keep their contents."""
        self._capacity = change.capacity
        # A layer may keep its buffer (a ring is as long as its window), and what is in it.
        kept = self._touched[: change.rows]
        self._touched = [*kept, *[0] * (change.rows - len(kept))]
        for store in self._stores:
            store.resize(change.rows, change.capacity, self._num_used)
            # One layer at a time: lazily, every old buffer would live until the last new one.
            mx.eval(store.arrays())

    def open(self, change: Open) -> None:
        """An empty row joins at the end."""
        assert change.row == self._num_used, "rows are opened at the end"
        self._num_used += 1
        self._hand_over(change.row, 0)
        for store in self._stores:
            store.open(change.row)

    def promote(self, change: Promote) -> None:
        """Make ``change.to`` the newest decoding row."""
        swap = change.row != change.to
        pairs = [(change.row, change.row_length), (change.to, change.to_length)] if swap else []
        for store in self._stores:
            mine, other = _read(store, pairs) if swap else ([], [])
            store.promote(change.row, change.to, mine, other)
        if swap:
            self._hand_over(change.to, change.row_length)
            self._hand_over(change.row, change.to_length)

    def close(self, change: Close) -> None:
        """Free the row and fill its hole."""
        for store in self._stores:
            store.close(change.row, change.moves, _read_sources(store, change.moves))
        for move in change.moves:
            self._hand_over(move.target, move.length)
        self._num_used -= 1

    def insert(self, change: Transfer, source: "SlotGroup") -> None:
        """A row of ``source`` goes on as the newest decoding row here."""
        for store, other in zip(self._stores, source.stores, strict=True):
            moved = _read_sources(store, change.moves)
            for move, payload in zip(change.moves, moved, strict=True):
                store.relocate(move, payload)
            (state,) = _read(other, [(change.row, change.length)])
            store.insert(change.to, state)
        for move in change.moves:
            self._hand_over(move.target, move.length)
        self._hand_over(change.to, change.length)
        self._num_used += 1

    def prefill(self, row: int, tokens: Sequence[int], start: int, prompt: Any = None) -> mx.array:
        """Write a chunk into its row through a view; no copy, no padding."""
        assert start + len(tokens) <= self._capacity, "a chunk exceeds its row"
        self._touched[row] = max(self._touched[row], start + len(tokens))
        views = [store.row_view(row, start) for store in self._stores]
        chunk, rows = mx.array([list(tokens)]), [RowInput(start, prompt)]
        logits = self._model.forward(chunk, self._nest(views), rows)
        self._commit(views)
        return logits

    def decode(
        self, tokens: mx.array, starts: Sequence[int], prompts: Sequence[Any] = ()
    ) -> mx.array:
        """One forward over the decoding rows."""
        positions = Positions(list(starts), tokens.shape[1])
        # A scatter beyond the buffer would be memory corruption, not an error.
        assert positions.longest <= self._capacity, "a row outgrew its buffer"
        for row, start in enumerate(starts):
            self._touched[row] = max(self._touched[row], start + tokens.shape[1])
        step = self._width_step
        width = min(self._capacity, -(-positions.longest // step) * step)
        views = [store.batch_view(positions, width) for store in self._stores]
        logits = self._model.forward(tokens, self._nest(views), _row_inputs(starts, prompts))
        self._commit(views)
        return logits

    def keep(self, kept: Sequence[int]) -> None:
        """Lower the rows' lengths, which is for the caller; take recurrent state back."""
        for store in self._stores:
            store.keep(kept)

    def reader(self, row: int, length: int) -> "SlotReader":
        """The row's state, in parts that can be cut and parts that cannot."""
        return SlotReader(self._stores, row, length)

    def restore(self, row: int, stored: StoredRow) -> None:
        """Write each layer, one at a time: their copies together would be a second row."""
        length = stored.num_tokens
        self._touched[row] = max(self._touched[row], length)
        state, index = iter(stored.state()), 0
        for store in self._stores:
            if is_cuttable(store):
                numbers = range(index, index + store.num_arrays)
                arrays = [to_device(stored.tokens(number))[None] for number in numbers]
                index = numbers.stop
            else:
                arrays = [to_device(next(state)) for _ in range(store.num_arrays)]
            store.write_state(row, length, arrays)
            mx.eval(store.arrays())

    @property
    def stores(self) -> list[Store]:
        """Each layer's state, composite layers part by part."""
        return self._stores

    def arrays(self) -> list[mx.array]:
        """All buffers."""
        return [array for store in self._stores for array in store.arrays()]

    def _hand_over(self, row: int, length: int) -> None:
        """A row belongs to somebody else, who has ``length`` tokens in it: clear the rest.

        The owner before may have left values that are not finite, known or not yet.
        """
        for store in self._stores:
            store.clear(row, length, self._touched[row])
        self._touched[row] = length

    def _nest(self, views: list[Any]) -> list[Any]:
        flat = iter(views)
        nested: list[Any] = []
        for layer in self._layers:
            if isinstance(layer, Composite):
                nested.append(CompositeView([next(flat) for _ in layer.parts]))
            else:
                nested.append(next(flat))
        return nested

    def _commit(self, views: list[Any]) -> None:
        for store, view in zip(self._stores, views, strict=True):
            store.commit(view)


class SlotReader:
    """A row of slots, rings and recurrent state.

    Args:
        stores: What each layer holds.
        row: Which row.
        length: Tokens in it.
    """

    def __init__(self, stores: Sequence[Store], row: int, length: int) -> None:
        self._cuttable = [store for store in stores if is_cuttable(store)]
        self._others = [store for store in stores if not is_cuttable(store)]
        self._row = row
        self.num_tokens = length
        self._state: Payload | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of what cannot be cut."""
        return sum(array.nbytes for array in self._read_state())

    def tokens(self, start: int, stop: int) -> list[HostArray]:
        """Copies of tokens ``[start, stop)`` of the layers that can be cut.

        Raises:
            ValueError: They are not finite.
        """
        read = [store.read_tokens(self._row, start, stop) for store in self._cuttable]
        arrays = [array for part in read for array in part]
        mx.eval(arrays)
        check_tokens(arrays)
        return [to_host(array)[0] for array in arrays]

    def state(self) -> list[HostArray]:
        """Copies of what the other layers keep.

        Raises:
            ValueError: Some of it is not a number.
        """
        arrays = self._read_state()
        mx.eval(arrays)
        check_state(arrays)
        return [to_host(array) for array in arrays]

    def _read_state(self) -> Payload:
        if self._state is None:
            read = [store.read_state(self._row, self.num_tokens) for store in self._others]
            self._state = [array for part in read for array in part]
        return self._state


class SoloGroup:
    """Rows that each own the model's own cache: correct for any model, one forward per row.

    Args:
        model: The model.
    """

    def __init__(self, model: ModelAdapter) -> None:
        self._model = model
        self._rows: list[list[Any]] = []

    def resize(self, change: Resize) -> None:
        """Nothing: each cache grows by itself."""

    def open(self, change: Open) -> None:
        """A fresh cache."""
        self._rows.append(self._model.new_cache())

    def promote(self, change: Promote) -> None:
        """Trade places."""
        rows = self._rows
        rows[change.row], rows[change.to] = rows[change.to], rows[change.row]

    def close(self, change: Close) -> None:
        """Follow the moves and drop what is left over at the end."""
        for move in change.moves:
            self._rows[move.target] = self._rows[move.source]
        self._rows.pop()

    def insert(self, change: Transfer, source: Any) -> None:
        """Never needed: there is one solo group, without a limit of its own."""
        raise AssertionError("rows of their own do not move between groups")

    def prefill(self, row: int, tokens: Sequence[int], start: int, prompt: Any = None) -> mx.array:
        """Write a chunk into the row's own cache."""
        chunk, rows = mx.array([list(tokens)]), [RowInput(start, prompt)]
        return self._model.forward(chunk, self._rows[row], rows)

    def decode(
        self, tokens: mx.array, starts: Sequence[int], prompts: Sequence[Any] = ()
    ) -> mx.array:
        """One forward per row."""
        rows = [
            self._model.forward(tokens[row : row + 1], self._rows[row], [inputs])
            for row, inputs in enumerate(_row_inputs(starts, prompts))
        ]
        return mx.concatenate(rows)

    def keep(self, kept: Sequence[int]) -> None:
        """Never needed: rows of their own get no drafts."""
        raise AssertionError("rows of their own cannot take tokens back")

    def reader(self, row: int, length: int) -> "SoloReader":
        """The row's own caches, whole."""
        return SoloReader(self._rows[row], length)

    def restore(self, row: int, stored: StoredRow) -> None:
        """Fill fresh caches."""
        unpack_caches(self._rows[row], stored.state())

    def arrays(self) -> list[mx.array]:
        """The arrays of every row's cache."""
        return [array for caches in self._rows for cache in caches for array in cache_arrays(cache)]


class SoloReader:
    """The model's own caches of one row.

    Args:
        caches: They.
        length: Tokens in them.
    """

    def __init__(self, caches: list[Any], length: int) -> None:
        self._packed = pack_caches(caches)
        self.num_tokens = length

    @property
    def state_bytes(self) -> int:
        """Bytes of all that the caches hold."""
        return sum(array.nbytes for array in self._packed)

    def tokens(self, start: int, stop: int) -> list[HostArray]:
        """Nothing can be cut."""
        del start, stop
        return []

    def state(self) -> list[HostArray]:
        """Copies of all that the caches hold."""
        return self._packed


def arrange(
    groups: dict[int, RowGroup], change: Arrangement, new_group: Callable[[], RowGroup]
) -> None:
    """Carry out what a layout of rows decided.

    Args:
        groups: The groups by number; those that are new or empty come and go.
        change: What to do.
        new_group: Makes a group.
    """
    match change:
        case Resize(group, rows, _):
            if rows == 0:
                groups.pop(group, None)
                return
            if group not in groups:
                groups[group] = new_group()
            groups[group].resize(change)
        case Open(group):
            if group not in groups:
                groups[group] = new_group()
            groups[group].open(change)
        case Promote(group):
            groups[group].promote(change)
        case Close(group):
            groups[group].close(change)
        case Transfer(group, _, to_group):
            groups[to_group].insert(change, groups[group])


def is_cuttable(store: Store) -> TypeGuard[AttentionStore | QuantisedStore]:
    """Whether a layer's state can be cut at any token."""
    known = isinstance(store, AttentionStore | QuantisedStore)
    return known and isinstance(store.spec, FullAttention)


def _row_inputs(starts: Sequence[int], prompts: Sequence[Any]) -> list[RowInput]:
    pairs = zip(starts, prompts or [None] * len(starts), strict=True)
    return [RowInput(start, prompt) for start, prompt in pairs]


def _read(store: Store, rows: Sequence[tuple[int, int]]) -> list[Payload]:
    """Evaluated copies of one layer's rows.

    A lazy one would be a held view and cost a buffer copy; those of all layers at once would be
    more memory than the layout has set aside.
    """
    payloads = [store.read(row, length) for row, length in rows]
    if payloads:
        mx.eval(payloads)
    return payloads


def _read_sources(store: Store, moves: Sequence[Move]) -> list[Payload]:
    return _read(store, [(move.source, move.length) for move in moves])
