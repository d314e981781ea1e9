"""Drafts as data, the port of whoever makes them, and of whoever decides how many are worth it.

Speculative decoding (Leviathan et al. 2023, Chen et al. 2023): a drafter guesses the next tokens of
a row, one forward of the model looks at all of them, and the row keeps those that the model
itself would have chosen. A step with drafts goes like this::

    most      = controller.limits(rows)      # 0 everywhere: a plain step, with look-ahead
    proposals = drafter.propose(most)        # each row from its own committed tokens
    lengths   = controller.settle(proposals) # how much of them one forward should verify
    …                                        # the step; each row accepts its own number
    drafter.observe(verified); controller.observe(step)

Nothing here touches arrays; :mod:`treadle_core.mlx_runtime.acceptance` is the part that does.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from treadle_core.errors import describe
from treadle_core.events import BypassReason, DraftCounters
from treadle_core.layers import ModelSpec
from treadle_core.plan import Key, RowSetup

T = TypeVar("T")


class DraftRoom(Struct, frozen=True):
    """A row of a step, and the most draft tokens that it can take (or has been offered)."""

    key: Key
    most: int


class Proposal(Struct, frozen=True):
    """What a row's next tokens might be.

    A guess: the row keeps the part of it that equals what the row samples anyway, so that its
    output is that of plain decoding, token for token. It may be cut short for any reason. Whoever
    *draws* a guess does best with the row's own noise, as
    :mod:`treadle_core.mlx_runtime.acceptance` says.

    Attributes:
        tokens: The draft; empty where there is none.
        pending: Whether the drafter works on the row and cannot draft for it yet: it is worth
            asking again.
    """

    tokens: tuple[int, ...] = ()
    pending: bool = False


NO_PROPOSAL = Proposal()
PENDING = Proposal(pending=True)


class Verified(Struct, frozen=True, kw_only=True):
    """How a row's draft came out.

    Attributes:
        key: The row.
        drafted: Draft tokens that the forward looked at.
        accepted: Those of them that are part of the answer now.
        tokens: All tokens that the step added to the answer: the accepted ones, then usually one
            that the model chose itself. Fewer where the answer ended among them.
        pending: Whether the drafter was asked, and still works on the row.
        asked: Whether the drafter was asked for the row, in a step that asked it at all.
    """

    key: Key
    drafted: int
    accepted: int
    tokens: tuple[int, ...]
    pending: bool = False
    asked: bool = True


class VerifiedStep(Struct, frozen=True, kw_only=True):
    """A decode step as the controller learns from it.

    Attributes:
        rows: All rows of the step, those without a draft too.
        width: Tokens per row that the forward was padded to; 1 is a plain step.
        asked: Whether the step waited for its drafter, and so gave up its look-ahead.
        seconds: From the end of the step before to the end of this one, drafting excluded.
        draft_seconds: What drafting took.
    """

    rows: tuple[Verified, ...]
    width: int
    asked: bool
    seconds: float
    draft_seconds: float = 0.0


class Drafter(Protocol):
    """Guesses the next tokens of rows. Used from the engine's thread alone.

    Deterministic: the same calls get the same answers, and a row's proposals do not depend on the
    rows beside it, but for when they begin. It ought not to raise; one that does is switched off for good
    (:class:`GuardedDrafter`) and the rows decode plainly.
    """

    @property
    def name(self) -> str:
        """What it is called in counters and status."""
        ...

    @property
    def held_bytes(self) -> int:
        """Memory that it holds for its rows, as well as it knows."""
        ...

    def join(self, setup: RowSetup) -> None:
        """A row begins to run, new or after a preemption, with the output that it has already.

        ``setup.output`` is a live view that holds committed tokens only; rejected drafts never
        appear in it.
        """
        ...

    def leave(self, key: Key) -> None:
        """Forget a row; one that it does not know is none of its business."""
        ...

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Proposal]:
        """One proposal per row, in their order, each of at most ``room.most`` tokens.

        Args:
            rooms: Rows that joined, and whose committed tokens are all in their views.
        """
        ...

    def observe(self, verified: Sequence[Verified]) -> None:
        """How the last proposals came out. Their committed tokens are in the rows' views."""
        ...

    def reset(self) -> None:
        """Forget every row."""
        ...


@runtime_checkable
class TakesMemory(Protocol):
    """A drafter whose rows have live KV of their own, which the engine's budget pays for."""

    def take_share(self, budget_bytes: int, spec: ModelSpec) -> int:
        """Take its part of the bytes for live KV, once, before any row joins.

        Args:
            budget_bytes: For both.
            spec: The engine's model.

        Returns:
            What is left for the engine.

        Raises:
            Unsupported: It is too little.
        """
        ...


class HeardRow(Struct, frozen=True):
    """A row of a forward: it was fed ``num_tokens`` tokens at ``[start, …)``.

    Some of them may have been a draft, of which the row's output tells later what it kept.
    """

    key: Key
    start: int
    num_tokens: int


class HiddenStates(Struct, frozen=True):
    """What the model made of the tokens of one forward, on the device, perhaps not computed yet.

    Attributes:
        rows: The rows, in order.
        hidden: ``[rows, width, hidden]``; what lies beyond a row's tokens is padding.
    """

    rows: tuple[HeardRow, ...]
    hidden: Any


class HiddenListener(Protocol):
    """Is told the hidden states of every forward. Used from the engine's thread alone.

    A drafter that builds on them is one. It is told while a step is being submitted, so it must
    neither wait for that step nor take long; one that raises is told nothing any more.
    """

    def hear(self, states: HiddenStates) -> None:
        """Hidden states of rows that joined before, or that it does not know."""
        ...


class DraftController(Protocol):
    """Decides how many tokens are drafted and verified. Asking it changes nothing."""

    @property
    def max_tokens(self) -> int:
        """The longest draft that it will ever ask for."""
        ...

    def limits(self, rows: Sequence[DraftRoom]) -> list[int]:
        """The most tokens to draft for each row; 0 everywhere means that no drafter is asked.

        Args:
            rows: All rows of the step, with what they have room for.
        """
        ...

    def settle(self, rows: Sequence[DraftRoom]) -> list[int]:
        """How many of the tokens that were drafted are verified.

        One forward is as wide as its longest draft, for every row: a short draft of one row may
        not be worth it.

        Args:
            rows: All rows of the step, with the lengths of their proposals.
        """
        ...

    def observe(self, step: VerifiedStep) -> None:
        """What a step brought and took, plain steps included."""
        ...

    def leave(self, key: Key) -> None:
        """Forget a row; one that it does not know is none of its business."""
        ...


def count(verified: Verified, *, lossy: bool = False) -> DraftCounters:
    """The counters of one verification; nothing where nothing was drafted.

    Args:
        verified: It.
        lossy: Whether the draft was kept unverified.
    """
    if verified.drafted == 0:
        return DraftCounters()
    return DraftCounters(
        verifications=1,
        attempted=verified.drafted,
        accepted=verified.accepted,
        committed=len(verified.tokens),
        lossy=verified.accepted if lossy else 0,
    )


class DraftTally:
    """Counters by answer while it runs, and of all there ever were."""

    def __init__(self) -> None:
        self._total = DraftCounters()
        self._by_key: dict[Key, DraftCounters] = {}
        self._bypassed: dict[BypassReason, int] = {}
        self._bypassed_by_key: dict[Key, dict[BypassReason, int]] = {}

    @property
    def total(self) -> DraftCounters:
        """Of all answers, ended ones included."""
        return self._total + DraftCounters(bypassed=self._bypassed)

    def bypass(self, key: Key, reason: BypassReason) -> None:
        """Count a forward of a row without a draft; cheap, as it is done for every token."""
        mine = self._bypassed_by_key.setdefault(key, {})
        mine[reason] = mine.get(reason, 0) + 1
        self._bypassed[reason] = self._bypassed.get(reason, 0) + 1

    def add(self, key: Key, counters: DraftCounters) -> None:
        """Count something for an answer."""
        self._total += counters
        self._by_key[key] = self._by_key.get(key, DraftCounters()) + counters

    def fail(self) -> None:
        """A drafter was switched off."""
        self._total = replace(self._total, failures=self._total.failures + 1)

    def of(self, key: Key) -> DraftCounters:
        """Of one answer so far."""
        counters = self._by_key.get(key, DraftCounters())
        return counters + DraftCounters(bypassed=self._bypassed_by_key.get(key, {}))

    def pop(self, key: Key) -> DraftCounters:
        """Of an answer that ended; it is forgotten, the total is not."""
        counters = self.of(key)
        self._by_key.pop(key, None)
        self._bypassed_by_key.pop(key, None)
        return counters


class GuardedDrafter:
    """A drafter that never raises: the one inside is dropped as soon as it does, or misbehaves.

    Args:
        inner: The drafter.
        vocab_size: Draft tokens have to be below this: others would be fed to the model.
    """

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self._inner: Drafter | None = inner
        self._name = inner.name
        self._vocab_size = vocab_size
        self._failure: str | None = None

    @property
    def name(self) -> str:
        """The name of the drafter inside."""
        return self._name

    @property
    def failure(self) -> str | None:
        """Why it was switched off; None while it works."""
        return self._failure

    @property
    def held_bytes(self) -> int:
        """What the drafter inside holds; nothing once it was dropped."""
        return self._ask(lambda inner: inner.held_bytes, 0)

    def join(self, setup: RowSetup) -> None:
        """A row begins to run."""
        self._ask(lambda inner: inner.join(setup), None)

    def leave(self, key: Key) -> None:
        """Forget a row."""
        self._ask(lambda inner: inner.leave(key), None)

    def propose(self, rooms: Sequence[DraftRoom]) -> list[Proposal]:
        """What the drafter inside proposes, checked; nothing once it failed."""
        nothing = [NO_PROPOSAL] * len(rooms)
        return self._ask(lambda inner: self._checked(inner.propose(rooms), rooms), nothing)

    def observe(self, verified: Sequence[Verified]) -> None:
        """How the last proposals came out."""
        self._ask(lambda inner: inner.observe(verified), None)

    def reset(self) -> None:
        """Forget every row. A drafter that failed stays off."""
        self._ask(lambda inner: inner.reset(), None)

    def close(self) -> None:
        """Forget every row, and the drafter inside with all that it holds."""
        self.reset()
        self._inner = None

    def _ask(self, call: Callable[[Drafter], T], otherwise: T) -> T:
        if self._inner is None:
            return otherwise
        try:
            return call(self._inner)
        except Exception as error:  # noqa: BLE001 — a drafter may raise anything, and rows go on
            self._failure = describe(error)
            self._inner = None
            return otherwise

    def _checked(self, proposals: Sequence[Proposal], rooms: Sequence[DraftRoom]) -> list[Proposal]:
        for room, proposal in zip(rooms, proposals, strict=True):
            self._check(proposal, room)
        return list(proposals)

    def _check(self, proposal: Proposal, room: DraftRoom) -> None:
        tokens = proposal.tokens
        if len(tokens) > room.most:
            raise ValueError(f"{len(tokens)} tokens were drafted, at most {room.most} were asked")
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"token {token} was drafted, ids are below {self._vocab_size}")
