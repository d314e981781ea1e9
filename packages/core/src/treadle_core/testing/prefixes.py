"""A prefix store in plain Python, and rows to fill it with."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from treadle_core.ports import RowReader
from treadle_core.prefix import (
    HostArray,
    Prefix,
    PrefixKey,
    PrefixStats,
    StateLayout,
    TokenArray,
    host_dtype,
)

WINDOW = 4
"""Tokens that the window of a :class:`KeyedRow` keeps."""

STATE_HEADS, STATE_DIM = 2, 3

_Word = int | tuple[bytes, int]


class TokenRow:
    """A row whose state says which tokens it is the state of, and nothing else.

    It reads and is read as :class:`treadle_core.ports.RowReader` and
    :class:`treadle_core.ports.StoredRow`.

    Args:
        layout: What a row consists of.
        row: The tokens in it.
    """

    def __init__(self, layout: StateLayout, row: Sequence[int]) -> None:
        self._layout = layout
        self._row = list(row)

    @property
    def num_tokens(self) -> int:
        """Tokens in the row."""
        return len(self._row)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state that cannot be cut."""
        return sum(array.nbytes for array in self.state())

    def tokens(self, start: int, stop: int) -> list[HostArray]:
        """Every element of a token is its id."""
        assert 0 <= start <= stop <= len(self._row), f"tokens [{start}, {stop}) of {self._row}"
        ids = np.array(self._row[start:stop])
        return [
            np.ascontiguousarray(
                np.broadcast_to(ids[None, :, None], (array.heads, stop - start, array.dim))
            ).astype(host_dtype(array.dtype))
            for array in self._layout.tokens
        ]

    def state(self) -> list[HostArray]:
        """All tokens, where the layout has state."""
        return [np.array(self._row, dtype=np.int32)] if self._layout.has_state else []


class KeyedRow:
    """A live row whose state is a function of the key's tokens, media and salt.

    What it gives for a token depends on all tokens up to it, as in a model, and its numbers are
    exact in every dtype.

    Args:
        key: Its tokens.
        layout: What it consists of.
        failure: Raised by every reading; None reads well.

    Attributes:
        reads: Ranges of tokens that were read, in order.
        num_state_reads: How often the state was read.
    """

    def __init__(
        self, key: PrefixKey, layout: StateLayout, failure: Exception | None = None
    ) -> None:
        self._layout = layout
        self._failure = failure
        self._seeds = _seeds(key)
        self.reads: list[tuple[int, int]] = []
        self.num_state_reads = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that are in it."""
        return len(self._seeds)

    @property
    def state_bytes(self) -> int:
        """Bytes of :meth:`state`."""
        return sum(array.nbytes for array in self._state())

    def tokens(self, start: int, stop: int) -> list[HostArray]:
        """The token arrays of ``[start, stop)``."""
        self.reads.append((start, stop))
        if self._failure is not None:
            raise self._failure
        return [
            _numbers(self._seeds[start:stop], index, array)
            for index, array in enumerate(self._layout.tokens)
        ]

    def state(self) -> list[HostArray]:
        """A window over the last tokens and a recurrent state, where the layout has any."""
        self.num_state_reads += 1
        if self._failure is not None:
            raise self._failure
        return self._state()

    def _state(self) -> list[HostArray]:
        if not self._layout.has_state:
            return []
        window = TokenArray(STATE_HEADS, STATE_DIM, "bfloat16")
        recurrent = TokenArray(STATE_HEADS, STATE_DIM, "float32")
        return [
            _numbers(self._seeds[-WINDOW:], 1000, window),
            _numbers(self._seeds[-1:], 1001, recurrent),
        ]


def tokens_of(
    num_tokens: int, arrays: Sequence[HostArray], state: Sequence[HostArray]
) -> list[int]:
    """The tokens that a row of :class:`TokenRow` contents holds, all its arrays agreeing."""
    found = [state[0].tolist()] if state else []
    for array in arrays:
        assert array.shape[1] == num_tokens, f"{array.shape[1]} tokens for {num_tokens}"
        if array.size:
            ids = array[0, :, 0]
            assert (array == ids[None, :, None]).all(), "a token's elements differ"
            found.append([int(token) for token in ids])
    assert found, "nothing says which tokens these are"
    assert all(tokens == found[0] for tokens in found), f"arrays disagree: {found}"
    return found[0]


@dataclass
class _Ticket:
    tokens: tuple[int, ...]
    arrays: list[HostArray]
    state: list[HostArray]
    polls: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class _Loaded:
    """A ticket as a :class:`treadle_core.ports.StoredRow`."""

    def __init__(self, ticket: _Ticket) -> None:
        self._ticket = ticket
        self.num_tokens = ticket.num_tokens

    def tokens(self, index: int) -> HostArray:
        """Tokens of one array."""
        return self._ticket.arrays[index][:, : self.num_tokens]

    def state(self) -> list[HostArray]:
        """The state stored with them."""
        return self._ticket.state


class RecordingStore:
    """A :class:`treadle_core.ports.PrefixStore` without bounds, which remembers what was asked.

    Args:
        delay: How often a prefix is polled in vain before it is ready.
        lost: Whether a prefix that is waited for turns out to be gone.

    Attributes:
        inserted: Tokens of each insertion.
        found: Length of each match.
        open_tickets: Tickets that were not released yet.
        closed: Whether :meth:`close` was called.
        is_behind: What it says of itself.
    """

    def __init__(self, *, delay: int = 0, lost: bool = False) -> None:
        self.inserted: list[tuple[int, ...]] = []
        self.found: list[int] = []
        self.open_tickets: dict[int, _Ticket] = {}
        self.closed = False
        self.is_behind = False
        self._delay = delay
        self._lost = lost
        self._generation = 0
        self._entries: dict[tuple[str, tuple[_Word, ...]], _Ticket] = {}
        self._next = 0
        self._layout: StateLayout | None = None

    @property
    def generation(self) -> int:
        """Counts clears."""
        return self._generation

    @property
    def busy(self) -> bool:
        """Whether :attr:`is_behind` was set."""
        return self.is_behind

    @property
    def layout(self) -> StateLayout:
        """What it was attached with."""
        assert self._layout is not None, "used before it was attached"
        return self._layout

    def attach(self, fingerprint: str, layout: StateLayout) -> None:
        """Serve one model."""
        assert fingerprint, "a model without a fingerprint"
        assert self._layout is None, "attached twice"
        self._layout = layout

    def find(self, key: PrefixKey, limit: int) -> Prefix:
        """The longest prefix, at any token where the layout allows."""
        best, length = self._search(key, limit)
        self.found.append(length)
        if best is None:
            return Prefix(miss="no_block")
        self._next += 1
        self.open_tickets[self._next] = _Ticket(
            key.tokens[:length], best.arrays, best.state, self._delay
        )
        return Prefix(num_tokens=length, ticket=self._next, ready=self._delay == 0)

    def _search(self, key: PrefixKey, limit: int) -> tuple[_Ticket | None, int]:
        assert limit <= len(key.tokens), f"limit {limit} of {len(key.tokens)} tokens"
        best: _Ticket | None = None
        length = 0
        wanted = _words(key)[:limit]
        for (salt, words), entry in self._entries.items():
            common = _common(words, wanted) if salt == key.salt else 0
            if self.layout.has_state and common < len(words):
                continue
            if common > length:
                best, length = entry, common
        return best, length

    def longest(self, key: PrefixKey, limit: int) -> int:
        """How long the longest prefix is, without a ticket."""
        return self._search(key, limit)[1]

    def poll(self, ticket: int) -> Prefix | None:
        """Whether it is there now."""
        held = self.open_tickets[ticket]
        held.polls -= 1
        if held.polls > 0:
            return None
        if self._lost:
            del self.open_tickets[ticket]
            return Prefix(miss="damaged")
        return Prefix(num_tokens=held.num_tokens, ticket=ticket)

    def wait(self, seconds: float) -> None:
        """Nothing moves by itself here."""

    def prefetch(self, key: PrefixKey, limit: int) -> int:
        """Nothing to fetch; the ticket is one to be released all the same."""
        self._next += 1
        self.open_tickets[self._next] = _Ticket((), [], [])
        return self._next

    def load(self, ticket: int) -> _Loaded:
        """What a ticket holds."""
        held = self.open_tickets[ticket]
        assert held.polls <= 0, "loaded before it was ready"
        return _Loaded(held)

    def release(self, ticket: int) -> None:
        """Let go; exactly once."""
        del self.open_tickets[ticket]

    def insert(self, key: PrefixKey, row: RowReader, generation: int) -> None:
        """Keep everything."""
        assert row.num_tokens == len(key.tokens), f"{row.num_tokens} tokens for {key}"
        if generation != self._generation:
            return
        self.inserted.append(key.tokens)
        arrays = row.tokens(0, row.num_tokens)
        self._entries[key.salt, _words(key)] = _Ticket(key.tokens, arrays, row.state())

    def clear(self) -> None:
        """Forget everything."""
        self._generation += 1
        self._entries.clear()

    def stats(self) -> PrefixStats:
        """How many entries there are."""
        return PrefixStats(num_entries=len(self._entries))

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True


def _words(key: PrefixKey) -> tuple[_Word, ...]:
    """What stands at each position: a token, or a place of a media item."""
    words: list[_Word] = list(key.tokens)
    for span in key.media:
        for position in range(span.start, min(span.end, len(words))):
            words[position] = (span.digest, position - span.start)
    return tuple(words)


def _common(one: Sequence[_Word], other: Sequence[_Word]) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def _seeds(key: PrefixKey) -> list[int]:
    """A number per position that stands for everything up to it."""
    parent = blake2b(key.salt.encode(), digest_size=8).digest()
    seeds: list[int] = []
    for position, token in enumerate(key.tokens):
        seen = blake2b(parent + token.to_bytes(8, "little"), digest_size=8)
        for span in sorted(key.media):
            if span.start <= position < span.end:
                seen.update(span.digest + (position - span.start).to_bytes(8, "little"))
        parent = seen.digest()
        seeds.append(int.from_bytes(parent[:4], "little"))
    return seeds


def _numbers(seeds: Sequence[int], index: int, array: TokenArray) -> HostArray:
    """``[heads, len(seeds), dim]`` of small multiples of 1/16."""
    seed = np.asarray(seeds, np.uint64)[None, :, None]
    head = np.arange(array.heads, dtype=np.uint64)[:, None, None]
    column = np.arange(array.dim, dtype=np.uint64)[None, None, :]
    mixed = (seed + head * 977 + column * 131 + (index + 1) * 7919) * 2654435761
    values = ((mixed >> 7) % 255).astype(np.float32) / 16 - 8
    if array.dtype == "bfloat16":
        return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))
    return np.ascontiguousarray(values.astype(host_dtype(array.dtype)))
