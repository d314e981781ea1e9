"""One answer in the making, and the table of its states. All state changes are in this file."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from treadle_core.plan import Key
from treadle_core.request import Request


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.PREFILL, Status.FINISHED}),
    Status.PREFILL: frozenset({Status.DECODE, Status.WAITING, Status.FINISHED}),
    Status.DECODE: frozenset({Status.WAITING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and progress of one answer.

    ``[0, num_computed)`` of its tokens are in the KV, counting steps that were submitted and not
    read yet. ``num_in_flight`` sampled tokens exist on the device only. Behind a draft that was not
    read yet, the KV may hold up to ``num_drafted`` tokens more.

    Attributes:
        request: The request it answers.
        index: Which of the request's answers it is.
        prompt: Prompt token ids.
        max_tokens: Bound on ``output``, from the request and the context.
        arrival: When it was accepted, in the clock's seconds.
        order: Counts acceptances; the tie-break of every policy.
        seed: 64-bit seed of its randomness.
        output: Generated token ids that the host has read.
        deadline: When it fails, in the clock's seconds.
        suspect: A step that it was part of failed; it has to run alone once.
        computed: Stretches of its prompt that were computed for it, disjoint and in order.
        num_restored: Most tokens that came from a store at once.
        num_saved: Tokens of its row that were handed to the prefix store, or came from there.
        generation: The prefix store's, when computing what the row holds began.
        ticket: What it waits for, from a slower tier of the prefix store.
        prefetched: What is read ahead for it, by a ticket, until it gets its row.
        cold: Reuse nothing for it: a step that restored something failed.
        num_looks: How often its prompt was looked up again since it got its row.
        waits_until: When it stops waiting for ``ticket``, in the clock's seconds.
    """

    request: Request
    index: int
    prompt: Tokens[int]
    max_tokens: int
    arrival: float
    order: int
    seed: int
    end_tokens: tuple[int, ...] = ()
    deadline: float | None = None
    output: list[int] = field(default_factory=list[int])
    status: Status = Status.WAITING
    num_computed: int = 0
    num_in_flight: int = 0
    num_drafted: int = 0
    num_preemptions: int = 0
    suspect: bool = False
    constraint: Any = None
    epoch: int = 0
    computed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    num_saved: int = 0
    generation: int = 0
    ticket: int | None = None
    prefetched: int | None = None
    cold: bool = False
    num_restored: int = 0
    num_looks: int = 0
    waits_until: float = 0.0

    @property
    def key(self) -> Key:
        """Identity of the answer."""
        return (self.request.id, self.index)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, in flight included."""
        return len(self.prompt) + len(self.output) + self.num_in_flight

    @property
    def num_to_prefill(self) -> int:
        """Tokens still to be written before the last one can be decoded."""
        return self.num_tokens - 1 - self.num_computed

    @property
    def num_generated(self) -> int:
        """Generated tokens, in flight included."""
        return len(self.output) + self.num_in_flight

    @property
    def wants_token(self) -> bool:
        """Whether another token may be sampled for it."""
        return self.num_generated < self.max_tokens

    @property
    def synchronous(self) -> bool:
        """Whether choosing a token needs the token before on the host."""
        return bool(self.request.logits_processors) or self.request.constraint is not None

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens ``[start, stop)`` of prompt and output."""
        length = len(self.prompt)
        if stop <= length:
            return tuple(self.prompt[start:stop])
        head = tuple(self.prompt[start:length]) if start < length else ()
        return head + tuple(self.output[max(0, start - length) : stop - length])

    def take(self, token: int) -> None:
        """The host has read a token that a step in flight gave, or one more of the same step."""
        if self.num_in_flight:
            self.num_in_flight -= 1
        self.output.append(token)
        self.suspect = False

    def accept(self, num: int) -> None:
        """A step with a draft was read: its forward wrote ``num`` tokens that the row keeps.

        That is one for each token which it gave. They are written even where the answer ends
        before the last of those, and then the row is further than the answer.
        """
        self.num_computed += max(0, num - 1)
        self.num_drafted = 0

    @property
    def num_cached(self) -> int:
        """Prompt tokens that came from a store and were never computed for it."""
        limit = min(self.num_restored, len(self.prompt))
        return limit - sum(min(b, limit) - a for a, b in self.computed if a < limit)

    def computes(self, start: int, stop: int) -> None:
        """Tokens ``[start, stop)`` are computed, perhaps not for the first time."""
        stop = min(stop, len(self.prompt))
        if start >= stop:
            return
        apart: list[tuple[int, int]] = []
        for begin, end in self.computed:
            if end < start or begin > stop:
                apart.append((begin, end))
            else:
                start, stop = min(start, begin), max(stop, end)
        self.computed = sorted([*apart, (start, stop)])

    def move_to(self, status: Status) -> None:
        """Change state, along the table only."""
        assert status in TRANSITIONS[self.status], f"{self.key}: {self.status} -> {status}"
        self.status = status

    def restart(self) -> None:
        """Back to the queue: the KV is gone, the tokens stay; what is in flight is forgotten."""
        self.move_to(Status.WAITING)
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_drafted = 0
        self.num_saved = 0
        self.num_looks = 0
        self.epoch += 1
