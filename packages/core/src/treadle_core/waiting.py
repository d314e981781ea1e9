"""The waiting queue: who is next is a policy, given as an argument."""

from collections.abc import Callable, Iterable, Iterator

from treadle_core.sequence import Sequence

Policy = Callable[[Sequence, float], tuple[float, int]]
"""``policy(sequence, now)``: the smallest is served next; ties never happen (order is unique)."""


def fcfs(sequence: Sequence, now: float) -> tuple[float, int]:
    """First come, first served."""
    del now
    return (0.0, sequence.order)


def priority_with_ageing(seconds: float) -> Policy:
    """Lowest priority number first, and one step earlier for every ``seconds`` of waiting."""

    def policy(sequence: Sequence, now: float) -> tuple[float, int]:
        waited = now - sequence.arrival
        return (sequence.request.priority - waited / seconds, sequence.order)

    return policy


AGEING_SECONDS = 10.0
priority = priority_with_ageing(AGEING_SECONDS)


class WaitingQueue:
    """Sequences that wait, ordered by a policy when they are asked for.

    Args:
        policy: Who is next.
    """

    def __init__(self, policy: Policy = fcfs) -> None:
        self._policy = policy
        self._members: dict[tuple[str, int], Sequence] = {}

    def __len__(self) -> int:
        """Sequences waiting."""
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no particular order."""
        return iter(list(self._members.values()))

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._members[sequence.key] = sequence

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is here."""
        self._members.pop(sequence.key, None)

    def rank(self, sequence: Sequence, now: float) -> tuple[float, int]:
        """How urgent a sequence is by the policy, waiting or not; smallest first."""
        return self._policy(sequence, now)

    def peek(self, now: float) -> Sequence | None:
        """Who is next."""
        return min(self._members.values(), key=lambda s: self._policy(s, now), default=None)

    def least_urgent(self, sequences: Iterable[Sequence], now: float) -> Sequence:
        """Who of these would be served last; they need not be here."""
        return max(sequences, key=lambda s: self._policy(s, now))
