"""The model's own heads guess what the model will say.

The first head is told the model's hidden states as they are computed. When a row asks, it sees the
positions that were committed since, and guesses the next token; each head behind it is given the
hidden states that the one before it made, with the tokens one further on, and guesses one token
more. Beyond the last, that one goes on from its own hidden state and guess. Each head has keys and
values of its own, in one slot for each row. What they write for guesses lies behind what they have
seen, so what is not kept is overwritten.

Each token is drawn with the row's own parameters and with the noise of (seed, position), which the
model chooses the token of that position with: where they think alike they choose alike, and the
answer stays that of plain decoding, token for token (:mod:`treadle_core.mlx_runtime.acceptance`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from msgspec.structs import replace

from treadle_core.drafting import (
    NO_PROPOSAL,
    DraftRoom,
    HiddenStates,
    Proposal,
    Verified,
)
from treadle_core.layers import ModelSpec
from treadle_core.mlx_runtime.sampler import Sampler
from treadle_core.plan import Decode, Key, RowSetup
from treadle_speculative.mtp.head import MtpHead
from treadle_speculative.mtp.rows import HeadRow, Piece
from treadle_speculative.mtp.slots import HeadSlots, bytes_of

MOST_WAITING = 64
"""Positions of a row that wait for the head; as many at once cost it little more than one."""

WIDEST = 8
"""Positions of a row that are seen together with other rows' and with the first guess."""

TYPICAL_LENGTH = 4_096


Rows = tuple[HeadRow, ...]
"""A row as each head has it, in their order."""


class MtpDrafter:
    """Proposes what heads say, for all rows together. It has to be told hidden states.

    Args:
        heads: The heads, evaluated, in their order.
        context_length: Most tokens of a row.
    """

    def __init__(self, *heads: MtpHead, context_length: int) -> None:
        self._heads = heads
        self._context_length = context_length
        self._slots = HeadSlots(heads, context_length=context_length)
        self._sampler = Sampler(heads[0].base.vocab_size)
        self._rows: dict[Key, Rows] = {}

    @property
    def name(self) -> str:
        """What it is called in counters and status."""
        return "mtp"

    @property
    def held_bytes(self) -> int:
        """Its slots, and the hidden states that wait."""
        waiting = sum(row.waiting_bytes for rows in self._rows.values() for row in rows)
        return self._slots.allocated_bytes + waiting

    def take_share(self, budget_bytes: int, spec: ModelSpec) -> int:
        """Take as much of the engine's KV budget as gives both room for as many tokens.

        Returns:
            What is left.
        """
        own = bytes_of(self._slots.layers, TYPICAL_LENGTH)
        share = budget_bytes * own // (own + bytes_of(spec.layers, TYPICAL_LENGTH))
        self._slots = HeadSlots(
            self._heads, context_length=self._context_length, budget_bytes=share
        )
        return budget_bytes - share

    def join(self, setup: RowSetup) -> None:
        """A row begins to run; what the model computes of it from now on is heard."""
        self.leave(setup.key)
        params = replace(setup.params, logprobs=False, top_logprobs=0)
        # Grammars and processors are where the answer is, not where the draft is: the verification
        # follows it with them.
        mine = replace(setup, params=params, constraint=None, processors=(), attachment=None)
        self._rows[setup.key] = tuple(HeadRow(mine, 1 + i) for i in range(len(self._heads)))
        self._sampler.join(mine)

    def leave(self, key: Key) -> None:
        """Forget a row and free its slot."""
        self._slots.release(key, self._written)
        self._rows.pop(key, None)
        self._sampler.leave(key)

    def reset(self) -> None:
        """Forget every row."""
        self._slots.reset()
        self._rows.clear()
        self._sampler.clear()

    def observe(self, verified: Sequence[Verified]) -> None:
        """Nothing: what was accepted is in the rows' views."""

    def hear(self, states: HiddenStates) -> None:
        """Keep hidden states until the head sees them; many at once, such as a prompt's, now."""
        for lane, heard in enumerate(states.rows):
            rows = self._rows.get(heard.key)
            if rows is None:
                continue
            stop = heard.start + heard.num_tokens
            rows[0].hear(Piece(heard.start, stop, states.hidden, lane, 0))
            for row in rows[1:]:
                if row.origin != rows[0].origin:
                    # Their slots are one, and begin with the same position.
                    row.begin(rows[0].origin)
            for place, row in enumerate(rows):
                if row.due >= MOST_WAITING:
                    self._see(heard.key, place, row.due)

    def propose(self, rooms: Sequence[DraftRoom]) -> list[Proposal]:
        """Drafts for the rows whose last token the head can follow."""
        asking = {room.key: room.most for room in rooms if room.most}
        prepared = {key: most for key, most in asking.items() if self._prepare(key, most)}
        ready = self._make_room(prepared)
        drafts = self._draw(ready) if ready else {}
        return [
            Proposal(tuple(drafts[room.key])) if room.key in drafts else NO_PROPOSAL
            for room in rooms
        ]

    def _first(self, key: Key) -> HeadRow:
        """A row as the first head has it; the others follow."""
        return self._rows[key][0]

    def _written(self, key: Key) -> int:
        return self._first(key).length

    def _prepare(self, key: Key, most: int) -> bool:
        """Whether a draft can be made for a row, once the few positions are seen that are due."""
        first = self._first(key)
        if first.barred or not first.is_ready:
            return False
        for place, row in enumerate(self._rows[key]):
            if row.due > WIDEST:
                self._see(key, place, row.due - 1)
        return not first.barred and self._reserve(key, most + WIDEST)

    def _make_room(self, prepared: dict[Key, int]) -> dict[Key, int]:
        """Columns for all that is fed to the groups of these rows; the rows that are left.

        Every row of a group is fed, also one that did not ask. One that finds no room loses its slot,
        and one that outgrows its group has others beside it then.
        """
        width = max(prepared.values(), default=0) + WIDEST
        done: set[Key] = set()
        while True:
            ready = {key: most for key, most in prepared.items() if not self._first(key).barred}
            groups = self._slots.groups_of(list(ready))
            fresh = [key for members in groups.values() for key in members if key not in done]
            if not fresh:
                return ready
            for key in fresh:
                self._reserve(key, width)
            done.update(fresh)

    def _reserve(self, key: Key, more: int) -> bool:
        """Columns behind those that are written; a row that finds none is given up."""
        # What is due of a head is up to as much more than of the one before it, and a guess.
        more += (len(self._heads) - 1) * (WIDEST + 1)
        if self._slots.reserve(key, self._written(key) + more, self._written):
            return True
        self._slots.release(key, self._written)
        for row in self._rows[key]:
            row.bar()
        return False

    def _see(self, key: Key, place: int, num: int) -> None:
        """Show a head a stretch of one row; the next one hears what it makes of it."""
        row, first = self._rows[key][place], self._first(key)
        if first.barred or not self._reserve(key, max(num, first.total - first.seen) + WIDEST):
            return
        start, seen = row.length, row.seen
        pieces = row.take(num)
        hidden = [
            p.hidden[p.lane : p.lane + 1, p.offset : p.offset + p.stop - p.start] for p in pieces
        ]
        joined = hidden[0] if len(hidden) == 1 else mx.concatenate(hidden, axis=1)
        tokens = row.tokens(seen + row.ahead, row.seen + row.ahead)
        out = self._slots.feed_row(place, key, tokens, joined, start)
        row.tip = mx.contiguous(out[0, -1])
        self._hand_on(key, place, Piece(seen, row.seen, out, 0, 0))
        # Now and not with the next proposal: what is left lazy keeps the model's arrays alive.
        mx.async_eval(row.tip, out, self._slots.arrays())

    def _hand_on(self, key: Key, place: int, piece: Piece) -> None:
        """The next head hears what one made of committed positions, if there is a next one."""
        if place + 1 < len(self._heads) and piece.start < piece.stop:
            self._rows[key][place + 1].hear(piece)

    def _draw(self, ready: dict[Key, int]) -> dict[Key, list[int]]:
        """Drafts of so many tokens for each row.

        Each token is read before the next is computed: a head is so short that submitting further
        steps would copy its buffers, which the one before still holds.
        """
        self._forget_drafts(ready)
        keys = tuple(ready)
        drafts: dict[Key, list[int]] = {key: [] for key in keys}
        guessed: dict[Key, Piece] = {}
        hidden: dict[Key, mx.array] = {}
        for place in range(max(ready.values())):
            if place < len(self._heads):
                hidden, guessed = self._next_head(place, keys, drafts, guessed)
            else:
                hidden = self._go_on(keys, drafts, hidden, place)
            head = self._heads[min(place, len(self._heads) - 1)]
            logits = head.logits(mx.stack([hidden[key] for key in keys]))
            decodes = [self._decode(key, drafts[key]) for key in keys]
            tokens = self._sampler.choose(logits, decodes).tokens
            mx.eval(tokens, list(hidden.values()), self._slots.arrays())
            if place == 0:
                for key in keys:
                    self._first(key).tip = hidden[key]
            chosen: Any = tokens.tolist()
            for key, token in zip(keys, chosen, strict=True):
                drafts[key].append(token)
        return {key: draft[: ready[key]] for key, draft in drafts.items()}

    def _forget_drafts(self, ready: dict[Key, int]) -> None:
        """Penalties count what was drawn; what was not accepted must count no more."""
        for key in ready:
            setup = self._first(key).setup
            if setup.params.has_penalties:
                self._sampler.leave(key)
                self._sampler.join(setup)

    def _decode(self, key: Key, draft: Sequence[int]) -> Decode:
        """What the next token of a row is drawn for, behind its draft so far."""
        row = self._first(key)
        return Decode(
            key=key,
            group=0,
            row=0,
            start=row.total + len(draft) - 1,
            num_output=len(row.setup.output) + len(draft),
            token=None,
        )

    def _next_head(
        self,
        place: int,
        keys: Sequence[Key],
        drafts: dict[Key, list[int]],
        guessed: dict[Key, Piece],
    ) -> tuple[dict[Key, mx.array], dict[Key, Piece]]:
        """Show a head what is due of each row, then what the guesses so far add.

        Args:
            place: Which head.
            keys: The rows.
            drafts: What was guessed of each: one token by each head before.
            guessed: What the head before made of positions that wait for a guess with this one.

        Returns:
            What it makes of the last position of each row, and of all that a guess led to.
        """
        found: dict[Key, mx.array] = {}
        more: dict[Key, Piece] = {}
        for number, members in self._slots.groups_of(keys).items():
            lanes: dict[Key, Stretch] = {
                key: self._stretch(self._rows[key][place], drafts[key], guessed.get(key))
                for key in members
                if key in drafts
            }
            width = max(len(lane.tokens) for lane in lanes.values())
            out = self._feed(place, number, members, lanes, width) if width else None
            for row, key in enumerate(members):
                lane = lanes.get(key)
                if lane is None or out is None or not lane.tokens:
                    continue
                found[key] = out[row, len(lane.tokens) - 1]
                seen = Piece(lane.start, lane.start + len(lane.tokens), out, row, 0)
                self._hand_on(key, place, seen.cut(lane.start, lane.committed))
                more[key] = seen.cut(lane.committed, seen.stop)
        for key in keys:
            if key not in found:
                assert place == 0, "every head but the first has a guess to see"
                tip = self._first(key).tip
                assert tip is not None, "a row that is ready has a tip"
                found[key] = tip
        return found, more

    def _stretch(self, row: HeadRow, draft: Sequence[int], guessed: Piece | None) -> "Stretch":
        """All that a head has to see of a row; what is committed of it counts as seen."""
        start = row.seen
        pieces = [*row.take(row.due), *row.waiting()]
        committed = row.seen
        # The first head's guess is for the token behind the last position that was heard.
        stop = row.total - 1
        pieces = [piece.cut(start, stop) for piece in pieces if piece.start < stop]
        if guessed is not None and guessed.start < stop:
            pieces.append(guessed)
        ahead = start + row.ahead
        known = row.tokens(ahead, row.total)
        tokens = [*known, *draft[max(0, ahead - row.total) :]][: stop - start]
        return Stretch(start, committed, pieces, tokens)

    def _feed(
        self,
        place: int,
        number: int,
        members: Sequence[Key],
        lanes: dict[Key, "Stretch"],
        width: int,
    ) -> mx.array:
        """One forward of a head over a group's rows, with padding for those that see less."""
        starts: list[int] = []
        tokens: list[list[int]] = []
        for key in members:
            row, lane = self._rows[key][place], lanes.get(key)
            starts.append(row.length if lane is None else lane.start - row.origin)
            own = lane.tokens if lane is not None else []
            tokens.append([*own, *[0] * (width - len(own))])
        pieces = [lanes[key].pieces if key in lanes else [] for key in members]
        return self._slots.feed(place, number, mx.array(tokens), _gathered(pieces, width), starts)

    def _go_on(
        self,
        keys: Sequence[Key],
        drafts: dict[Key, list[int]],
        hidden: dict[Key, mx.array],
        place: int,
    ) -> dict[Key, mx.array]:
        """Feed the last head its own guesses and hidden states."""
        found: dict[Key, mx.array] = {}
        last = len(self._heads) - 1
        for number, members in self._slots.groups_of(keys).items():
            nothing = mx.zeros_like(next(iter(hidden.values())))
            given = mx.stack([hidden.get(key, nothing) for key in members])[:, None]
            tokens = [[drafts[key][-1] if key in drafts else 0] for key in members]
            # Behind the last position that it was shown, which the first head has seen too.
            starts = [
                self._first(key).length + place - last - 1
                if key in drafts
                else self._rows[key][last].length
                for key in members
            ]
            out = self._slots.feed(last, number, mx.array(tokens), given, starts)
            found |= {key: out[i, 0] for i, key in enumerate(members) if key in drafts}
        return found


class Stretch(NamedTuple):
    """Positions of a row that a head is shown.

    Attributes:
        start: The first.
        committed: The first whose token is a guess.
        pieces: Their hidden states.
        tokens: The token that goes with each.
    """

    start: int
    committed: int
    pieces: list[Piece]
    tokens: list[int]


def _gathered(lanes: Sequence[Sequence[Piece]], width: int) -> mx.array:
    """Hidden states ``[rows, width, hidden]`` from wherever they are; zeros where there are none.

    Zeros and not another row's: what a row is padded with is in its slot, and has to be finite.
    """
    sources = {id(piece.hidden): piece.hidden for pieces in lanes for piece in pieces}
    size = next(iter(sources.values())).shape[-1]
    flat = [source.reshape(-1, size) for source in sources.values()]
    first: dict[int, int] = {}
    total = 0
    for name, source in sources.items():
        first[name] = total
        total += source.shape[0] * source.shape[1]
    index: list[list[int]] = []
    for pieces in lanes:
        own = [
            first[id(piece.hidden)] + piece.lane * piece.hidden.shape[1] + piece.offset + i
            for piece in pieces
            for i in range(piece.stop - piece.start)
        ]
        index.append([*own, *[total] * (width - len(own))])
    everything = mx.concatenate([*flat, mx.zeros((1, size), flat[0].dtype)])
    return mx.take(everything, mx.array(index), axis=0)
