"""Drafter and controller as an engine uses them: who is asked for how much, and what came of it."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from treadle_core.drafting import (
    DraftController,
    Drafter,
    DraftRoom,
    DraftTally,
    GuardedDrafter,
    Verified,
    VerifiedStep,
    count,
)
from treadle_core.events import BypassReason, DraftCounters
from treadle_core.plan import Decode, Key, Plan
from treadle_core.ports import Clock
from treadle_core.sequence import Sequence as Row


class Asked(Struct, frozen=True, kw_only=True):
    """What a drafter was asked for a step.

    Attributes:
        offered: Draft tokens that it had for each row that it was asked for.
        drafts: As much of them as is to be verified, for rows that have any.
        pending: Rows that it still works on.
        seconds: What that took.
    """

    offered: Mapping[Key, int]
    drafts: Mapping[Key, tuple[int, ...]]
    pending: frozenset[Key]
    seconds: float


class Speculation:
    """Keeps drafter, controller and counters in step with the rows of an engine.

    Args:
        drafter: Proposes; dropped for good when it raises.
        controller: Decides how much of it is worth a forward.
        longest: The longest draft that the runner verifies.
        vocab_size: Draft tokens are below this.
        clock: Time.
        lossy: Whether drafts are kept unverified.
    """

    def __init__(
        self,
        drafter: Drafter,
        controller: DraftController,
        *,
        longest: int,
        vocab_size: int,
        clock: Clock,
        lossy: bool = False,
    ) -> None:
        self._drafter = GuardedDrafter(drafter, vocab_size)
        self._controller = controller
        self._longest = longest
        self._clock = clock
        self._lossy = lossy
        self._tally = DraftTally()
        self._joined: set[Key] = set()
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why the drafter was switched off; None while it works."""
        return self._failure

    @property
    def name(self) -> str:
        """What the drafter is called."""
        return self._drafter.name

    @property
    def held_bytes(self) -> int:
        """Memory that the drafter holds for rows."""
        return self._drafter.held_bytes

    @property
    def total(self) -> DraftCounters:
        """What came of all drafts."""
        return self._tally.total

    def counters(self, key: Key) -> DraftCounters:
        """What came of an answer's drafts so far."""
        return self._tally.of(key)

    def end(self, key: Key) -> None:
        """An answer ended and was told its counters."""
        self._tally.pop(key)

    def follow(self, plan: Plan) -> None:
        """Rows leave and join as the plan says that is about to be submitted."""
        for key in plan.leaves:
            self._leave(key)
        for setup in plan.joins:
            self._joined.add(setup.key)
            self._drafter.join(setup)

    def reset(self) -> None:
        """Every row is gone."""
        self._drafter.reset()
        for key in list(self._joined):
            self._controller.leave(key)
        self._joined.clear()

    def close(self) -> None:
        """Nobody drafts any more; the drafter's memory is free."""
        self.reset()
        self._drafter.close()

    def wants_drafts(self, rows: Sequence[Row]) -> bool:
        """Whether asking the drafter for the next step of these rows is worth it."""
        if not rows or self._failure is not None:
            return False
        return any(self._controller.limits(self._rooms(rows)))

    def ask(self, rows: Sequence[Row]) -> Asked:
        """Drafts for rows whose tokens have all been read."""
        started = self._clock.now()
        rooms = self._rooms(rows)
        limits = self._controller.limits(rooms)
        keys = [room.key for room in rooms]
        proposals = self._drafter.propose(_rooms_of(keys, limits))
        tokens = [
            up_to_end(proposal.tokens, row.end_tokens)
            for proposal, row in zip(proposals, rows, strict=True)
        ]
        lengths = self._controller.settle(_rooms_of(keys, map(len, tokens)))
        self._note_failure()
        pairs = zip(keys, proposals, strict=True)
        settled = [draft[:length] for draft, length in zip(tokens, lengths, strict=True)]
        offered = zip(keys, map(len, tokens), limits, strict=True)
        return Asked(
            offered={key: length for key, length, limit in offered if limit},
            drafts={key: draft for key, draft in zip(keys, settled, strict=True) if draft},
            pending=frozenset(key for key, proposal in pairs if proposal.pending),
            seconds=self._clock.now() - started,
        )

    def count(
        self, row: Row, decode: Decode, taken: Sequence[int], asked: Asked | None
    ) -> Verified:
        """Take in how a row came out of a step, before it is told whether it ended.

        Args:
            row: The row, with the step's tokens in its output.
            decode: What was planned for it.
            taken: Tokens that the step added to its answer.
            asked: What the drafter was asked for the step, if it was.
        """
        verified = Verified(
            key=row.key,
            drafted=len(decode.draft),
            accepted=count_equal(taken, decode.draft),
            tokens=tuple(taken),
            pending=asked is not None and row.key in asked.pending,
            asked=asked is not None and row.key in asked.offered,
        )
        if decode.draft:
            self._tally.add(row.key, count(verified, lossy=self._lossy))
        else:
            self._tally.bypass(row.key, self._reason(row, decode, asked))
        return verified

    def observe(
        self, rows: Sequence[Verified], asked: Asked | None, *, width: int, seconds: float | None
    ) -> None:
        """A step was read.

        Args:
            rows: How its rows came out.
            asked: What the drafter was asked for it, if it was.
            width: Tokens per row of its widest forward.
            seconds: What it took, drafting included; None if that would tell nothing.
        """
        if asked is not None:
            self._drafter.observe(rows)
            self._note_failure()
        if seconds is None or not rows:
            return
        drafting = asked.seconds if asked is not None else 0.0
        self._controller.observe(
            VerifiedStep(
                rows=tuple(rows),
                width=width,
                asked=asked is not None,
                seconds=max(0.0, seconds - drafting),
                draft_seconds=drafting,
            )
        )

    def _leave(self, key: Key) -> None:
        self._joined.discard(key)
        self._drafter.leave(key)
        self._controller.leave(key)

    def _rooms(self, rows: Sequence[Row]) -> list[DraftRoom]:
        return [DraftRoom(row.key, self._room(row, row.num_generated)) for row in rows]

    def _room(self, row: Row, num_generated: int) -> int:
        """Draft tokens that a row can use: the model adds one token to every draft."""
        if row.request.logits_processors:
            return 0
        return max(0, min(self._longest, row.max_tokens - num_generated - 1))

    def _reason(self, row: Row, decode: Decode, asked: Asked | None) -> BypassReason:
        """Why a row decoded without a draft."""
        if self._failure is not None:
            return "failed"
        if row.request.logits_processors:
            return "unsupported"
        if self._room(row, decode.num_output) == 0:
            return "no_room"
        if asked is None or row.key not in asked.offered:
            return "off"
        if row.key in asked.drafts:
            return "no_room"
        if row.key in asked.pending:
            return "pending"
        return "off" if asked.offered[row.key] else "no_draft"

    def _note_failure(self) -> None:
        if self._failure is None and self._drafter.failure is not None:
            self._failure = self._drafter.failure
            self._tally.fail()


def count_equal(tokens: Sequence[int], draft: Sequence[int]) -> int:
    """How far a draft equals what a row got."""
    number = 0
    for token, drafted in zip(tokens, draft, strict=False):
        if token != drafted:
            break
        number += 1
    return number


def up_to_end(draft: tuple[int, ...], ends: Sequence[int]) -> tuple[int, ...]:
    """A draft without what it has behind a token that ends the answer: nobody would get that."""
    last = next((place for place, token in enumerate(draft) if token in ends), len(draft))
    return draft[: last + 1]


def _rooms_of(keys: Sequence[Key], lengths: Iterable[int]) -> list[DraftRoom]:
    return [DraftRoom(key, length) for key, length in zip(keys, lengths, strict=True)]
