"""The model's own head guesses what the model will say.

The head is told the model's hidden states as they are computed and has a slot of its own for each
row. When a row asks, the head sees the positions that were committed since, guesses the next
token, and goes on from its own hidden state and guess. What it writes for guesses lies behind the
row's length, so what is not kept is overwritten.

Each token is drawn with the row's own parameters and with the noise of (seed, position), which the
model chooses the token of that position with: where they think alike they choose alike, and the
answer stays that of plain decoding, token for token (:mod:`treadle_core.mlx_runtime.acceptance`).
"""

from collections.abc import Sequence
from typing import Any

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


class MtpDrafter:
    """Proposes what a head says, for all rows together. It has to be told hidden states.

    Args:
        head: The head, evaluated.
        context_length: Most tokens of a row.
    """

    def __init__(self, head: MtpHead, *, context_length: int) -> None:
        self._head = head
        self._context_length = context_length
        self._slots = HeadSlots(head, context_length=context_length)
        self._sampler = Sampler(head.base.vocab_size)
        self._rows: dict[Key, HeadRow] = {}

    @property
    def name(self) -> str:
        """What it is called in counters and status."""
        return "mtp"

    @property
    def held_bytes(self) -> int:
        """Its slots, and the hidden states that wait."""
        return self._slots.allocated_bytes + sum(r.waiting_bytes for r in self._rows.values())

    def take_share(self, budget_bytes: int, spec: ModelSpec) -> int:
        """Take as much of the engine's KV budget as gives both room for as many tokens.

        Returns:
            What is left.
        """
        own = bytes_of(self._slots.layers, TYPICAL_LENGTH)
        share = budget_bytes * own // (own + bytes_of(spec.layers, TYPICAL_LENGTH))
        self._slots = HeadSlots(self._head, context_length=self._context_length, budget_bytes=share)
        return budget_bytes - share

    def join(self, setup: RowSetup) -> None:
        """A row begins to run; what the model computes of it from now on is heard."""
        self.leave(setup.key)
        params = replace(setup.params, logprobs=False, top_logprobs=0)
        # Grammars and processors are where the answer is, not where the draft is: the verification
        # follows it with them.
        mine = replace(setup, params=params, constraint=None, processors=(), attachment=None)
        self._rows[setup.key] = HeadRow(mine)
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
            row = self._rows.get(heard.key)
            if row is None:
                continue
            stop = heard.start + heard.num_tokens
            row.hear(Piece(heard.start, stop, states.hidden, lane, 0))
            if row.due >= MOST_WAITING:
                self._see(heard.key, row, row.due)

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

    def _written(self, key: Key) -> int:
        return self._rows[key].length

    def _prepare(self, key: Key, most: int) -> bool:
        """Whether the head can draft for a row, once it has seen the few positions that are due."""
        row = self._rows[key]
        if row.barred or not row.is_ready:
            return False
        if row.due > WIDEST:
            self._see(key, row, row.due - 1)
        return not row.barred and self._reserve(key, row, most + WIDEST)

    def _make_room(self, prepared: dict[Key, int]) -> dict[Key, int]:
        """Columns for all that is fed to the groups of these rows; the rows that are left.

        Every row of a group is fed, also one that did not ask. One that finds no room loses its slot,
        and one that outgrows its group has others beside it then.
        """
        width = max(prepared.values(), default=0) + WIDEST
        done: set[Key] = set()
        while True:
            ready = {key: most for key, most in prepared.items() if not self._rows[key].barred}
            groups = self._slots.groups_of(list(ready))
            fresh = [key for members in groups.values() for key in members if key not in done]
            if not fresh:
                return ready
            for key in fresh:
                self._reserve(key, self._rows[key], width)
            done.update(fresh)

    def _reserve(self, key: Key, row: HeadRow, more: int) -> bool:
        """Columns behind those that are written; a row that finds none is given up."""
        if self._slots.reserve(key, row.length + more, self._written):
            return True
        self._slots.release(key, self._written)
        row.bar()
        return False

    def _see(self, key: Key, row: HeadRow, num: int) -> None:
        """Show the head a stretch of one row."""
        if not self._reserve(key, row, max(num, row.total - row.seen) + WIDEST):
            return
        start, first = row.length, row.seen
        pieces = row.take(num)
        hidden = [
            p.hidden[p.lane : p.lane + 1, p.offset : p.offset + p.stop - p.start] for p in pieces
        ]
        joined = hidden[0] if len(hidden) == 1 else mx.concatenate(hidden, axis=1)
        out = self._slots.feed_row(key, row.tokens(first + 1, row.seen + 1), joined, start)
        row.tip = mx.contiguous(out[0, -1])
        # Now and not with the next proposal: what is left lazy keeps the model's arrays alive.
        mx.async_eval(row.tip, self._slots.arrays())

    def _draw(self, ready: dict[Key, int]) -> dict[Key, list[int]]:
        """Drafts of so many tokens for each row.

        Each token is read before the next is computed: the head is so short that submitting further
        steps would copy its buffers, which the one before still holds.
        """
        self._forget_drafts(ready)
        keys = tuple(ready)
        drafts: dict[Key, list[int]] = {key: [] for key in keys}
        hidden = self._catch_up(keys)
        for place in range(max(ready.values())):
            if place:
                hidden = self._go_on(keys, drafts, hidden, place - 1)
            logits = self._head.logits(mx.stack([hidden[key] for key in keys]))
            decodes = [self._decode(key, drafts[key]) for key in keys]
            tokens = self._sampler.choose(logits, decodes).tokens
            mx.eval(tokens, list(hidden.values()), self._slots.arrays())
            if place == 0:
                for key in keys:
                    self._rows[key].tip = hidden[key]
            chosen: Any = tokens.tolist()
            for key, token in zip(keys, chosen, strict=True):
                drafts[key].append(token)
        return {key: draft[: ready[key]] for key, draft in drafts.items()}

    def _forget_drafts(self, ready: dict[Key, int]) -> None:
        """Penalties count what was drawn; what was not accepted must count no more."""
        for key in ready:
            setup = self._rows[key].setup
            if setup.params.has_penalties:
                self._sampler.leave(key)
                self._sampler.join(setup)

    def _decode(self, key: Key, draft: Sequence[int]) -> Decode:
        """What the next token of a row is drawn for, behind its draft so far."""
        row = self._rows[key]
        return Decode(
            key=key,
            group=0,
            row=0,
            start=row.total + len(draft) - 1,
            num_output=len(row.setup.output) + len(draft),
            token=None,
        )

    def _catch_up(self, keys: Sequence[Key]) -> dict[Key, mx.array]:
        """Show the head what is due of each row; what it makes of the last position of each."""
        found: dict[Key, mx.array] = {}
        for number, members in self._slots.groups_of(keys).items():
            asking = set(keys) & set(members)
            fresh = {key: self._rows[key].due for key in members if key in asking}
            width = max(fresh.values())
            if width:
                found |= self._feed(number, members, fresh, width)
        for key in keys:
            if key not in found:
                tip = self._rows[key].tip
                assert tip is not None, "a row that is ready has a tip"
                found[key] = tip
        return found

    def _feed(
        self, number: int, members: Sequence[Key], fresh: dict[Key, int], width: int
    ) -> dict[Key, mx.array]:
        """One forward over a group's rows: what is due of some, padding for the others."""
        starts = [self._rows[key].length for key in members]
        tokens: list[list[int]] = []
        lanes: list[list[Piece]] = []
        for key in members:
            row, num = self._rows[key], fresh.get(key, 0)
            first = row.seen
            lanes.append(row.take(num))
            known = row.tokens(first + 1, first + 1 + num)
            tokens.append([*known, *[0] * (width - num)])
        out = self._slots.feed(number, mx.array(tokens), _gathered(lanes, width), starts)
        return {
            key: out[place, fresh[key] - 1]
            for place, key in enumerate(members)
            if fresh.get(key, 0)
        }

    def _go_on(
        self,
        keys: Sequence[Key],
        drafts: dict[Key, list[int]],
        hidden: dict[Key, mx.array],
        place: int,
    ) -> dict[Key, mx.array]:
        """Feed the head its own guesses and hidden states."""
        found: dict[Key, mx.array] = {}
        for number, members in self._slots.groups_of(keys).items():
            nothing = mx.zeros_like(next(iter(hidden.values())))
            given = mx.stack([hidden.get(key, nothing) for key in members])[:, None]
            tokens = [[drafts[key][place] if key in drafts else 0] for key in members]
            starts = [self._rows[key].length + place * (key in drafts) for key in members]
            out = self._slots.feed(number, mx.array(tokens), given, starts)
            found |= {key: out[i, 0] for i, key in enumerate(members) if key in drafts}
        return found


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
