"""Drafts as data: counters add up, a failing drafter is dropped, and the fakes keep the contract."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from treadle_core.drafting import (
    PENDING,
    Drafter,
    DraftRoom,
    DraftTally,
    GuardedDrafter,
    Proposal,
    Verified,
    count,
)
from treadle_core.events import DraftCounters
from treadle_core.testing.drafting import (
    A,
    B,
    DrafterContract,
    FailingDrafter,
    LastWrongDrafter,
    OracleDrafter,
    RandomDrafter,
    WrongDrafter,
    draft_row,
)

VOCAB = 50


def truth(tokens: Sequence[int], num: int) -> list[int]:
    """Each token is the sum of the two before it."""
    known = [0, *tokens]
    for _ in range(num):
        known.append((known[-1] + known[-2]) % VOCAB)
    return known[len(known) - num :]


KINDS: dict[str, Callable[[], Drafter]] = {
    "right": lambda: OracleDrafter(truth),
    "wrong": lambda: WrongDrafter(truth),
    "last wrong": lambda: LastWrongDrafter(truth),
    "random": lambda: RandomDrafter(truth),
    "guarded": lambda: GuardedDrafter(OracleDrafter(truth), VOCAB),
    "failed": lambda: GuardedDrafter(FailingDrafter(truth), VOCAB),
}


class TestFakes(DrafterContract):
    @pytest.fixture(params=KINDS)
    def make_drafter(self, request: Any) -> Callable[[], Drafter]:
        return KINDS[request.param]

    @pytest.fixture
    def vocab_size(self) -> int:
        return VOCAB


def proposed(drafter: Drafter, most: int = 4) -> tuple[int, ...]:
    drafter.join(draft_row(A, (1, 2, 3), [5]))
    return drafter.propose([DraftRoom(A, most)])[0].tokens


def test_the_fakes_are_right_where_they_say() -> None:
    expected = tuple(truth((1, 2, 3, 5), 4))

    assert proposed(OracleDrafter(truth)) == expected
    assert all(a != b for a, b in zip(proposed(WrongDrafter(truth)), expected, strict=True))
    last = proposed(LastWrongDrafter(truth))
    assert last[:-1] == expected[:-1]
    assert last[-1] != expected[-1]
    assert proposed(LastWrongDrafter(truth), 0) == ()


def test_the_random_fake_is_sometimes_right() -> None:
    rights: list[bool] = []
    drafter = RandomDrafter(truth, rate=0.7)
    for start in range(300):
        drafter.join(draft_row(A, (start % VOCAB, start // VOCAB), []))
        tokens = drafter.propose([DraftRoom(A, 4)])[0].tokens
        expected = truth((start % VOCAB, start // VOCAB), 4)
        rights += [a == b for a, b in zip(tokens, expected, strict=False)]

    assert 0.65 < sum(rights) / len(rights) < 0.75
    assert len(rights) < 300 * 4


def test_a_drafter_that_raises_is_switched_off_and_said_so() -> None:
    drafter = GuardedDrafter(FailingDrafter(truth, at=1), VOCAB)

    assert proposed(drafter)
    assert drafter.failure is None
    assert drafter.propose([DraftRoom(A, 4)]) == [Proposal()]
    assert drafter.failure == "RuntimeError: the drafter broke"
    # From here on it is not asked again, whatever is called.
    drafter.leave(A)
    drafter.reset()
    drafter.observe([])
    assert proposed(drafter) == ()
    assert drafter.held_bytes == 0
    assert drafter.name == "oracle"


class FailingOnce(OracleDrafter):
    """Raises the first time."""

    asked = 0

    def propose(self, rooms: Sequence[DraftRoom]) -> list[Proposal]:
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError
        return super().propose(rooms)


def test_a_drafter_that_failed_once_is_not_trusted_again() -> None:
    inner = FailingOnce(truth)
    drafter = GuardedDrafter(inner, VOCAB)

    assert proposed(drafter) == proposed(drafter) == ()
    assert inner.asked == 1
    assert drafter.failure == "RuntimeError"


class Careless(OracleDrafter):
    """Proposes what it is given."""

    def __init__(self, *proposals: Proposal) -> None:
        super().__init__(truth)
        self._proposals = list(proposals)

    def propose(self, rooms: Sequence[DraftRoom]) -> list[Proposal]:
        return self._proposals


@pytest.mark.parametrize(
    "proposals",
    [
        [Proposal((1, 2, 3))],
        [Proposal((VOCAB,))],
        [Proposal((-1,))],
        [],
        [Proposal(), Proposal()],
    ],
    ids=["too long", "unknown", "negative", "none", "too many"],
)
def test_what_the_model_could_not_verify_is_a_failure(proposals: list[Proposal]) -> None:
    drafter = GuardedDrafter(Careless(*proposals), VOCAB)

    assert drafter.propose([DraftRoom(A, 2)]) == [Proposal()]
    assert drafter.failure is not None
    assert drafter.failure.startswith("ValueError: ")


def test_a_row_that_the_drafter_still_reads_is_no_failure() -> None:
    drafter = GuardedDrafter(Careless(PENDING), VOCAB)

    assert drafter.propose([DraftRoom(A, 2)]) == [PENDING]
    assert drafter.failure is None


def test_counters_are_of_tokens_and_forwards() -> None:
    counted = count(Verified(key=A, drafted=4, accepted=3, tokens=(1, 2, 3, 4)))

    assert (counted.attempted, counted.accepted, counted.rejected) == (4, 3, 1)
    assert (counted.verifications, counted.committed, counted.forwards_saved) == (1, 4, 3)
    assert counted.acceptance_rate == 0.75


def test_an_answer_that_ended_inside_a_draft_saved_less() -> None:
    counted = count(Verified(key=A, drafted=4, accepted=2, tokens=(1, 2)))

    assert counted.forwards_saved == 1


def test_a_plain_row_of_a_step_counts_as_bypassed_alone() -> None:
    assert count(Verified(key=A, drafted=0, accepted=0, tokens=(1,))) == DraftCounters()
    assert DraftCounters().acceptance_rate is None


def test_adding_counters_changes_neither() -> None:
    one, other = DraftCounters(bypassed={"off": 1}), DraftCounters(bypassed={"off": 1})

    assert (one + other).bypassed == {"off": 2}
    assert one == other == DraftCounters(bypassed={"off": 1})


def test_a_tally_counts_by_answer_and_in_total() -> None:
    tally = DraftTally()
    tally.add(A, count(Verified(key=A, drafted=2, accepted=1, tokens=(1, 2))))
    tally.bypass(A, "off")
    tally.bypass(B, "off")
    tally.bypass(A, "no_draft")
    tally.fail()

    before = tally.total
    assert tally.of(A).bypassed == {"off": 1, "no_draft": 1}
    assert tally.of(B).attempted == 0
    popped = tally.pop(A)
    assert (popped.attempted, popped.accepted, popped.failures) == (2, 1, 0)
    assert tally.pop(A) == DraftCounters()
    assert tally.total == before
    assert tally.total.bypassed == {"off": 2, "no_draft": 1}
    assert (tally.total.attempted, tally.total.failures) == (2, 1)
