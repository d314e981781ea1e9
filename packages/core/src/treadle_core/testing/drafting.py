"""Conformance suites for drafters and their controllers, and drafters that know the answer.

Subclass a suite as those of :mod:`treadle_core.testing.contracts`.
"""

import random
from collections.abc import Callable, Sequence

from treadle_core.drafting import (
    NO_PROPOSAL,
    DraftController,
    Drafter,
    DraftRoom,
    Proposal,
    Verified,
    VerifiedStep,
)
from treadle_core.plan import Key, RowSetup
from treadle_core.request import SamplingParams

Continuation = Callable[[Sequence[int], int], list[int]]
"""``continuation(tokens, num)``: the ``num`` tokens that truly follow prompt and output so far."""

A, B, C = ("a", 0), ("b", 0), ("c", 0)


class OracleDrafter:
    """Knows what comes next, and drafts exactly that.

    Attributes:
        rows: The rows that joined and have not left.
        verified: What it was told, in order.

    Args:
        continuation: What truly comes next.
    """

    def __init__(self, continuation: Continuation) -> None:
        self.rows: dict[Key, RowSetup] = {}
        self.verified: list[Verified] = []
        self._continuation = continuation

    @property
    def name(self) -> str:
        """What it is called in counters and status."""
        return "oracle"

    @property
    def held_bytes(self) -> int:
        """Nothing worth counting."""
        return 0

    def join(self, setup: RowSetup) -> None:
        """A row begins to run."""
        self.rows[setup.key] = setup

    def leave(self, key: Key) -> None:
        """Forget a row."""
        self.rows.pop(key, None)

    def propose(self, rooms: Sequence[DraftRoom]) -> list[Proposal]:
        """The truth, or what a subclass makes of it."""
        return [self._propose(self.rows[room.key], room.most) for room in rooms]

    def observe(self, verified: Sequence[Verified]) -> None:
        """Keep what was told."""
        self.verified += verified

    def reset(self) -> None:
        """Forget every row."""
        self.rows.clear()

    def bend(self, truth: list[int], row: RowSetup) -> list[int]:
        """The draft for a row that goes on with ``truth``."""
        del row
        return truth

    def _propose(self, row: RowSetup, most: int) -> Proposal:
        if most == 0:
            return NO_PROPOSAL
        truth = self._continuation([*row.prompt, *row.output], most)
        return Proposal(tuple(self.bend(truth, row)))


class WrongDrafter(OracleDrafter):
    """Drafts something else in every place: every draft token is rejected."""

    def bend(self, truth: list[int], row: RowSetup) -> list[int]:
        """Each token's neighbour."""
        del row
        return [other_than(token) for token in truth]


class LastWrongDrafter(OracleDrafter):
    """Is right but for the last place: the longest draft that is not accepted whole."""

    def bend(self, truth: list[int], row: RowSetup) -> list[int]:
        """The truth, with another end."""
        del row
        return [*truth[:-1], *(other_than(token) for token in truth[-1:])]


class RandomDrafter(OracleDrafter):
    """Is right in some places, wrong in others, and drafts less than it may, as it happens.

    What happens to a row depends on its own tokens alone.

    Args:
        continuation: What truly comes next.
        rate: How often a token is right.
        seed: Of its randomness.
    """

    def __init__(self, continuation: Continuation, *, rate: float = 0.7, seed: int = 0) -> None:
        super().__init__(continuation)
        self._rate = rate
        self._seed = seed

    def bend(self, truth: list[int], row: RowSetup) -> list[int]:
        """Some of the truth."""
        tokens = (*row.prompt, *row.output)
        chance = random.Random(f"{self._seed} {row.key} {tokens}")
        draft = truth[: chance.randint(0, len(truth))]
        return [t if chance.random() < self._rate else other_than(t) for t in draft]


class FailingDrafter(OracleDrafter):
    """Raises when it is asked for the n-th time, counted from 0.

    Args:
        continuation: What truly comes next.
        at: That n.
    """

    def __init__(self, continuation: Continuation, *, at: int = 0) -> None:
        super().__init__(continuation)
        self._left = at

    def propose(self, rooms: Sequence[DraftRoom]) -> list[Proposal]:
        """The truth, until it raises."""
        if self._left == 0:
            raise RuntimeError("the drafter broke")
        self._left -= 1
        return super().propose(rooms)


class SteadyController:
    """Asks for the same number of tokens in every step, and takes what it gets.

    Attributes:
        max_tokens: That number.
        steps: What it was told, in order.
        left: The rows that left, in order.

    Args:
        num_tokens: How many.
    """

    def __init__(self, num_tokens: int) -> None:
        self.max_tokens = num_tokens
        self.steps: list[VerifiedStep] = []
        self.left: list[Key] = []

    def limits(self, rows: Sequence[DraftRoom]) -> list[int]:
        """As many as there is room for."""
        return [min(row.most, self.max_tokens) if self.asks() else 0 for row in rows]

    def settle(self, rows: Sequence[DraftRoom]) -> list[int]:
        """All of what was proposed."""
        return [row.most for row in rows]

    def observe(self, step: VerifiedStep) -> None:
        """Keep what was told."""
        self.steps.append(step)

    def leave(self, key: Key) -> None:
        """Keep who left."""
        self.left.append(key)

    def asks(self) -> bool:
        """Whether anything is drafted in the next step; for subclasses to change."""
        return True


def other_than(token: int) -> int:
    """Another token id, within any vocabulary that ``token`` is in and that has two."""
    return token - 1 if token else 1


def draft_row(
    key: Key, prompt: Sequence[int], output: list[int], *, seed: int = 0, temperature: float = 0.0
) -> RowSetup:
    """What a drafter is told about a row; ``output`` is the view that the caller extends."""
    return RowSetup(
        key=key,
        params=SamplingParams(temperature=temperature),
        seed=seed,
        end_tokens=(),
        prompt=prompt,
        output=output,
    )


class DrafterContract:
    """Fixtures: ``make_drafter``, makes fresh ones, all alike; ``vocab_size``."""

    PROMPTS = ((5, 6, 7, 5, 6, 7, 5, 6), (1, 2, 3, 4, 1, 2), (9,))

    def test_it_has_a_name(self, make_drafter: Callable[[], Drafter]) -> None:
        """Counters and status show it."""
        assert make_drafter().name

    def test_there_is_a_proposal_for_each_row_within_its_room(
        self, make_drafter: Callable[[], Drafter], vocab_size: int
    ) -> None:
        """In the rows' order, and of tokens that exist."""
        drafter, outputs = self._joined(make_drafter)
        for step in range(6):
            rooms = [DraftRoom(key, (step + i) % 5) for i, key in enumerate(outputs)]
            proposals = drafter.propose(rooms)
            assert len(proposals) == len(rooms)
            for room, proposal in zip(rooms, proposals, strict=True):
                assert len(proposal.tokens) <= room.most
                assert all(0 <= token < vocab_size for token in proposal.tokens)
            _commit(drafter, outputs, proposals, accept=step % 3)

    def test_no_room_means_no_draft(self, make_drafter: Callable[[], Drafter]) -> None:
        """For one row among others too."""
        drafter, _ = self._joined(make_drafter)

        proposals = drafter.propose([DraftRoom(A, 0), DraftRoom(B, 3)])

        assert proposals[0].tokens == ()

    def test_the_same_calls_get_the_same_answers(self, make_drafter: Callable[[], Drafter]) -> None:
        """From another drafter of the same kind."""
        histories: list[list[tuple[int, ...]]] = []
        for _ in range(2):
            drafter, outputs = self._joined(make_drafter)
            histories.append(self._history(drafter, outputs, list(outputs)))

        assert histories[0] == histories[1]

    def test_rows_do_not_depend_on_each_other(self, make_drafter: Callable[[], Drafter]) -> None:
        """A row alone gets what it gets among others."""
        drafter, outputs = self._joined(make_drafter)
        together = self._history(drafter, outputs, [A, B, C])
        for i, key in enumerate((A, B, C)):
            alone = make_drafter()
            output: list[int] = []
            alone.join(draft_row(key, self.PROMPTS[i], output))
            assert self._history(alone, {key: output}, [key]) == together[i::3]

    def test_a_row_that_comes_back_goes_on(self, make_drafter: Callable[[], Drafter]) -> None:
        """After a preemption, with its output, it gets what it would have got."""
        stayed, outputs = self._joined(make_drafter)
        self._history(stayed, outputs, [A, B, C])
        expected = _tokens(stayed.propose([DraftRoom(A, 4)]))

        back = make_drafter()
        back.join(draft_row(A, self.PROMPTS[0], list(outputs[A])))
        stayed.leave(A)
        stayed.join(draft_row(A, self.PROMPTS[0], list(outputs[A])))

        assert _tokens(back.propose([DraftRoom(A, 4)])) == expected
        assert _tokens(stayed.propose([DraftRoom(A, 4)])) == expected

    def test_rejected_drafts_leave_no_trace(self, make_drafter: Callable[[], Drafter]) -> None:
        """What was committed counts, and not what was proposed on the way."""
        asked, outputs = self._joined(make_drafter)
        quiet, same = self._joined(make_drafter)
        for step in range(8):
            proposals = asked.propose([DraftRoom(key, 4) for key in outputs])
            _commit(asked, outputs, proposals, accept=0, token=3 + step % 2)
            nothing = [NO_PROPOSAL] * len(same)
            _commit(quiet, same, nothing, accept=0, token=3 + step % 2)

        rooms = [DraftRoom(key, 4) for key in outputs]
        assert _tokens(asked.propose(rooms)) == _tokens(quiet.propose(rooms))

    def test_a_reused_key_is_a_new_row(self, make_drafter: Callable[[], Drafter]) -> None:
        """What the one before held is forgotten, with and without saying goodbye."""
        drafter, outputs = self._joined(make_drafter)
        self._history(drafter, outputs, [A, B, C])
        fresh = make_drafter()
        fresh.join(draft_row(A, self.PROMPTS[1], []))
        for leaves in (True, False):
            if leaves:
                drafter.leave(A)
            drafter.join(draft_row(A, self.PROMPTS[1], []))
            rooms = [DraftRoom(A, 4)]
            assert _tokens(drafter.propose(rooms)) == _tokens(fresh.propose(rooms))

    def test_leaving_gives_the_memory_back(self, make_drafter: Callable[[], Drafter]) -> None:
        """One by one, or all at once; who is unknown may leave as well."""
        empty = make_drafter().held_bytes
        for all_at_once in (True, False):
            drafter, outputs = self._joined(make_drafter)
            drafter.propose([DraftRoom(key, 4) for key in outputs])
            drafter.leave(("nobody", 7))
            if all_at_once:
                drafter.reset()
            else:
                for key in outputs:
                    drafter.leave(key)
            assert drafter.held_bytes == empty

    def test_nobody_may_ask(self, make_drafter: Callable[[], Drafter]) -> None:
        """Empty calls are calls."""
        drafter = make_drafter()

        assert list(drafter.propose([])) == []
        drafter.observe([])
        drafter.reset()

    def _joined(self, make_drafter: Callable[[], Drafter]) -> tuple[Drafter, dict[Key, list[int]]]:
        drafter, outputs = make_drafter(), {A: list[int](), B: list[int](), C: list[int]()}
        for (key, output), prompt in zip(outputs.items(), self.PROMPTS, strict=True):
            drafter.join(draft_row(key, prompt, output))
        return drafter, outputs

    def _history(
        self, drafter: Drafter, outputs: dict[Key, list[int]], keys: list[Key]
    ) -> list[tuple[int, ...]]:
        """What some rows are proposed while they commit some of it."""
        found: list[tuple[int, ...]] = []
        for step in range(6):
            proposals = drafter.propose([DraftRoom(key, 3) for key in keys])
            found += _tokens(proposals)
            chosen = {key: outputs[key] for key in keys}
            _commit(drafter, chosen, proposals, accept=step % 3)
        return found


class DraftControllerContract:
    """Fixture: ``controller``, fresh."""

    def test_limits_are_within_room_and_bound(self, controller: DraftController) -> None:
        """Whatever was observed before, and before anything was."""
        for step in _steps():
            for num in (0, 1, 2, 9, 64):
                rows = [DraftRoom((str(i), 0), i % 7) for i in range(num)]
                for lengths in (controller.limits(rows), controller.settle(rows)):
                    assert len(lengths) == num
                    for row, length in zip(rows, lengths, strict=True):
                        assert 0 <= length <= min(row.most, controller.max_tokens)
            controller.observe(step)

    def test_asking_changes_nothing(self, controller: DraftController) -> None:
        """It is asked again when a step is planned again."""
        rows = [DraftRoom(A, 4), DraftRoom(B, 2), DraftRoom(C, 0)]
        for step in _steps():
            before = controller.limits(rows), controller.settle(rows)
            for _ in range(3):
                assert (controller.limits(rows), controller.settle(rows)) == before
            controller.observe(step)

    def test_rows_may_leave_whenever_they_like(self, controller: DraftController) -> None:
        """Known or not, and be back under the same name."""
        for step in _steps():
            controller.leave(A)
            controller.observe(step)
            controller.leave(("nobody", 0))
            assert len(controller.limits([DraftRoom(A, 3)])) == 1


def _steps() -> list[VerifiedStep]:
    """Steps of any kind: plain, waited for in vain, drafted for some, free of cost, endless."""
    steps: list[VerifiedStep] = []
    for number in range(40):
        drafted = number % 5
        accepted = min(drafted, number % 3)
        tokens = tuple(range(accepted + 1))
        rows = [Verified(key=A, drafted=drafted, accepted=accepted, tokens=tokens)]
        if number % 4:
            rows.append(Verified(key=B, drafted=0, accepted=0, tokens=(1,)))
        steps.append(
            VerifiedStep(
                rows=tuple(rows),
                width=drafted + 1,
                asked=drafted > 0 or number % 2 == 0,
                seconds=(0.1, 0.0, 1e-9, 1e6)[number % 4],
                draft_seconds=(0.0, 0.01)[number % 2],
            )
        )
    return steps


def _tokens(proposals: Sequence[Proposal]) -> list[tuple[int, ...]]:
    return [proposal.tokens for proposal in proposals]


def _commit(
    drafter: Drafter,
    outputs: dict[Key, list[int]],
    proposals: Sequence[Proposal],
    *,
    accept: int,
    token: int = 8,
) -> None:
    """Each row keeps some of its draft, and gets ``token`` on top."""
    verified: list[Verified] = []
    for (key, output), proposal in zip(outputs.items(), proposals, strict=True):
        kept = proposal.tokens[:accept]
        output += [*kept, token]
        verified.append(
            Verified(
                key=key,
                drafted=len(proposal.tokens),
                accepted=len(kept),
                tokens=(*kept, token),
            )
        )
    drafter.observe(verified)
