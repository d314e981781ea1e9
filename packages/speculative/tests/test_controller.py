"""The controller on simulated machines: hardly ever behind plain decoding, mostly near the best."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from treadle_core.drafting import DraftController, DraftRoom, Verified, VerifiedStep
from treadle_core.errors import InvalidRequest
from treadle_core.plan import Key
from treadle_core.testing.drafting import A, B, DraftControllerContract
from treadle_speculative.controller import (
    AdaptiveController,
    ControllerConfig,
    FixedController,
    expected_tokens,
)

MOST = 7
Cost = Callable[[int, int], float]
Right = Callable[[Key, int], float]


def cpu(rows: int, width: int) -> float:
    """SmolLM2 on two cores: 105 ms for a forward, 2.5 ms for each token more."""
    return 0.105 + 0.0025 * (rows * width - 1)


def gpu(rows: int, width: int) -> float:
    """Nothing for the first 16 tokens, then a share for each."""
    return 0.02 * (1 if rows * width <= 16 else 1 + (rows * width - 16) / 48)


def flat(rows: int, width: int) -> float:
    """As long as a forward is at most 8 tokens wide, whatever the rows."""
    return 0.02 * (1 if width <= 8 else width / 4)


def steep(rows: int, width: int) -> float:
    """Each token of width costs nearly half a forward."""
    return 0.02 * (1 + 0.4 * (width - 1))


MACHINES = {"cpu": cpu, "gpu": gpu, "flat": flat, "steep": steep}


class Simulation:
    """Rows that decode on a machine, with measured times that are off by a tenth and more.

    Args:
        controller: Decides.
        cost: Seconds of a forward by rows and width.
        right: Probability that the next draft token of a row is right, by row and step.
        coverage: Probability that the drafter has something for a row.
        waiting: Seconds that a step without look-ahead takes longer.
        drafting: Seconds that a draft token takes, for all rows.
        reading: Seconds that the drafter takes to read a row before it drafts for it.
        piece: The most of it that it does at once.
        noise: Standard deviation of measured times; one in a hundred is three times too long.
        seed: Of everything random.
    """

    def __init__(
        self,
        controller: DraftController,
        cost: Cost,
        right: Right,
        *,
        coverage: float = 1.0,
        waiting: float = 0.0,
        drafting: float = 0.0,
        reading: float = 0.0,
        piece: float = float("inf"),
        noise: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.controller = controller
        self.seconds = 0.0
        self.plain_seconds = 0.0
        self.widths: list[int] = []
        self._cost, self._right, self._coverage = cost, right, coverage
        self._waiting, self._drafting, self._noise = waiting, drafting, noise
        self._reading, self._piece = reading, piece
        self._unread: dict[Key, float] = {}
        self._random = random.Random(seed)

    def run(self, keys: list[Key], steps: int) -> "Simulation":
        for _ in range(steps):
            self.step(keys)
        return self

    def answer(self, num: int, length: int = 64, name: str = "r") -> "Simulation":
        """So many rows together, each until it has its tokens."""
        left = dict.fromkeys(keys_of(num, name), length)
        while left:
            rows = self.step(list(left), left)
            for row in rows:
                left[row.key] -= len(row.tokens)
                if left[row.key] <= 0:
                    del left[row.key]
                    self.controller.leave(row.key)
        return self

    def step(self, keys: list[Key], left: dict[Key, int] | None = None) -> list[Verified]:
        most = [MOST if left is None else min(MOST, left[key] - 1) for key in keys]
        limits = self.controller.limits([DraftRoom(*pair) for pair in zip(keys, most, strict=True)])
        asked, lengths = any(limits), [0] * len(keys)
        asking = {key for key, limit in zip(keys, limits, strict=True) if limit}
        drafting, pending = self._read(asking)
        if asked:
            found = [
                n if key not in pending and self._random.random() < self._coverage else 0
                for key, n in zip(keys, limits, strict=True)
            ]
            rooms = [DraftRoom(key, n) for key, n in zip(keys, found, strict=True)]
            lengths = self.controller.settle(rooms)
            drafting += self._drafting * max(limits) * (asking > pending)
        seconds = self._cost(len(keys), 1 + max(lengths)) + asked * self._waiting
        rows = [
            replace(self._verify(key, n), asked=key in asking, pending=key in pending)
            for key, n in zip(keys, lengths, strict=True)
        ]
        self.seconds += seconds + drafting
        # What plain decoding of as many tokens takes, were they spread as evenly.
        tokens = sum(len(row.tokens) for row in rows)
        self.plain_seconds += self._cost(len(keys), 1) * tokens / len(keys)
        self.widths.append(1 + max(lengths))
        self.controller.observe(
            VerifiedStep(
                rows=tuple(rows),
                width=self.widths[-1],
                asked=asked,
                seconds=self._measured(seconds),
                draft_seconds=drafting,
            )
        )
        return rows

    def _read(self, keys: set[Key]) -> tuple[float, set[Key]]:
        """What reading takes in this step, and the rows that are not read to their end yet."""
        total = 0.0
        for key in sorted(keys):
            lacking = self._unread.setdefault(key, self._reading)
            seconds = min(lacking, self._piece - total)
            self._unread[key] = lacking - seconds
            total += seconds
        return total, {key for key in keys if self._unread[key] > 1e-9}

    @property
    def gain(self) -> float:
        """How much faster than plain decoding: 1 is as fast."""
        return self.plain_seconds / self.seconds

    def _verify(self, key: Key, drafted: int) -> Verified:
        accepted, right = 0, self._right(key, len(self.widths))
        while accepted < drafted and self._random.random() < right:
            accepted += 1
        tokens = tuple(range(accepted + 1))
        return Verified(key=key, drafted=drafted, accepted=accepted, tokens=tokens)

    def _measured(self, seconds: float) -> float:
        measured = seconds * max(0.2, 1 + self._noise * self._random.gauss(0, 1))
        return measured * (3 if self._random.random() < 0.01 else 1)


def keys_of(num: int, name: str = "r") -> list[Key]:
    return [(f"{name}{i}", 0) for i in range(num)]


def always(rate: float) -> Right:
    return lambda key, step: rate


def best_gain(
    cost: Cost, rows: int, rate: float, *, waiting: float = 0, drafting: float = 0
) -> float:
    """With the best width all the time."""
    plain = cost(rows, 1)
    return max(
        1.0,
        *(
            expected_tokens(rate, k) * plain / (cost(rows, k + 1) + waiting + drafting * k)
            for k in range(1, MOST + 1)
        ),
    )


class TestAdaptive(DraftControllerContract):
    @pytest.fixture
    def controller(self) -> DraftController:
        return AdaptiveController()


class TestFixed(DraftControllerContract):
    @pytest.fixture
    def controller(self) -> DraftController:
        return FixedController(3)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("machine", MACHINES)
def test_drafts_that_are_always_wrong_cost_next_to_nothing(machine: str, rows: int) -> None:
    for seed in range(2):
        run = Simulation(
            AdaptiveController(), MACHINES[machine], always(0.0), waiting=0.001, seed=seed
        ).run(keys_of(rows), 300)
        assert run.gain > 0.98


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_drafts_that_are_always_right_are_used_to_the_full(machine: str, rows: int) -> None:
    cost = MACHINES[machine]
    run = Simulation(AdaptiveController(), cost, always(1.0)).run(keys_of(rows), 400)

    assert run.widths[-20:].count(MOST + 1) >= 18
    assert run.gain > 0.93 * best_gain(cost, rows, 1.0)


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_in_between_it_is_near_the_best_and_not_behind_plain(
    machine: str, rows: int, rate: float
) -> None:
    cost, gains = MACHINES[machine], list[float]()
    for seed in range(2):
        gains.append(
            Simulation(AdaptiveController(), cost, always(rate), waiting=0.0005, seed=seed)
            .run(keys_of(rows), 300)
            .gain
        )

    assert sum(gains) / 2 > 0.98
    assert min(gains) > 0.96
    assert sum(gains) / 2 > 0.85 * best_gain(cost, rows, rate, waiting=0.0005)


def test_with_exact_times_it_is_never_behind_plain() -> None:
    for cost in MACHINES.values():
        for rows in (1, 8):
            for rate in (0.0, 0.1, 0.3):
                run = Simulation(AdaptiveController(), cost, always(rate), noise=0.0)
                assert run.run(keys_of(rows), 300).gain > (0.97 if rate else 0.98)


def test_many_short_wrong_answers_cost_as_little_as_a_long_one() -> None:
    """What a new row begins with is what the rows before it have shown."""
    run = Simulation(AdaptiveController(), steep, always(0.0))
    for number in range(60):
        run.run(keys_of(2, f"answer{number}-"), 15)
        for key in keys_of(2, f"answer{number}-"):
            run.controller.leave(key)

    assert run.gain > 0.975


def test_a_new_row_is_no_better_than_those_before_it() -> None:
    run = Simulation(AdaptiveController(), cpu, always(0.0), noise=0.0).run([A], 200)
    rejected = Verified(key=B, drafted=1, accepted=0, tokens=(0,))
    run.controller.observe(VerifiedStep(rows=(rejected,), width=2, asked=True, seconds=cpu(1, 2)))

    assert run.controller.limits([DraftRoom(B, MOST)]) == [0]


def test_waiting_for_a_drafter_that_has_nothing_costs_next_to_nothing() -> None:
    """Each time that it is asked, the step gives up its look-ahead: 6 % on a CPU."""
    run = Simulation(AdaptiveController(), cpu, always(1.0), coverage=0.0, waiting=0.006)

    assert run.run(keys_of(1), 600).gain > 0.98


def test_rare_drafts_that_are_right_are_worth_waiting_for() -> None:
    run = Simulation(AdaptiveController(), cpu, always(0.9), coverage=0.3, waiting=0.003)

    assert run.run(keys_of(1), 400).gain > 1.5

    # A wide forward is dear here, but only steps with a draft have one.
    dear = Simulation(AdaptiveController(), steep, always(0.9), coverage=0.3)
    assert dear.run(keys_of(1), 400).gain > 1.12


def test_a_drafter_that_takes_longer_than_it_saves_is_not_asked() -> None:
    run = Simulation(AdaptiveController(), gpu, always(0.5), drafting=0.012).run(keys_of(1), 400)

    assert run.gain > 0.97
    assert run.widths[-100:].count(1) > 90


def test_a_drafter_that_takes_little_is_asked_for_as_much_as_pays() -> None:
    cost, drafting = flat, 0.004
    run = Simulation(AdaptiveController(), cost, always(0.8), drafting=drafting)
    best = best_gain(cost, 1, 0.8, drafting=drafting)

    assert run.run(keys_of(1), 400).gain > 0.92 * best


def by_answer(run: Simulation, rows: int, num: int, **options: Any) -> list[float]:
    """How much faster each of ``num`` rounds of answers is than plain decoding."""
    gains: list[float] = []
    for number in range(num):
        plain, seconds = run.plain_seconds, run.seconds
        run.answer(rows, name=f"answer{number}-", **options)
        gains.append((run.plain_seconds - plain) / (run.seconds - seconds))
    return gains


@pytest.mark.parametrize("pieces", [1, 5])
@pytest.mark.parametrize("reading", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("machine", ["cpu", "steep"])
def test_a_drafter_that_is_always_wrong_and_has_to_read_costs_little(
    machine: str, rows: int, reading: float, pieces: int
) -> None:
    """Answers of 64 tokens, prompts that take up to four steps each."""
    cost = MACHINES[machine]
    step = cost(rows, 1)
    run = Simulation(
        AdaptiveController(),
        cost,
        always(0.0),
        waiting=0.01 * step,
        drafting=0.05 * step,
        reading=reading * step,
        piece=reading * step / pieces,
    )
    gains = by_answer(run, rows, 10)

    # What learning costs.
    assert min(gains[:4]) > 0.84
    # Reading one row is all that an answer loses, and few of them do.
    assert min(gains[4:]) > 0.96 - reading / 64
    assert sum(gains[4:]) / 6 > 0.98


@pytest.mark.parametrize("reading", [16.0, 60.0])
def test_long_prompts_are_not_read_to_their_end_to_learn_that_it_is_in_vain(reading: float) -> None:
    step = cpu(8, 1)
    run = Simulation(AdaptiveController(), cpu, always(0.0), reading=reading * step, piece=4 * step)
    gains = by_answer(run, 8, 10)

    assert min(gains) > 0.6
    assert sum(gains) / 10 > 0.94
    assert sum(gains[4:]) / 6 > 0.98


@pytest.mark.parametrize(
    ("rows", "reading", "least"), [(1, 1.0, 2.2), (1, 4.0, 1.9), (8, 0.25, 1.5), (8, 1.0, 1.3)]
)
@pytest.mark.parametrize("pieces", [1, 5])
def test_reading_is_not_taken_for_drafting(
    rows: int, reading: float, least: float, pieces: int
) -> None:
    """It comes once, and drafts that are mostly right pay for it."""
    step = cpu(rows, 1)
    run = Simulation(
        AdaptiveController(),
        cpu,
        always(0.8),
        drafting=0.02 * step,
        reading=reading * step,
        piece=rows * reading * step / pieces,
    )

    gains = by_answer(run, rows, 8)

    assert run.gain > least
    assert min(gains[1:]) > 0.8 * least


def test_reading_that_takes_more_than_it_saves_is_left() -> None:
    """Drafts are mostly right, but half an answer's time goes by before the first."""
    step = cpu(8, 1)
    run = Simulation(AdaptiveController(), cpu, always(0.8), drafting=0.3 * step, reading=4 * step)

    assert sum(by_answer(run, 8, 12)[4:]) / 8 > 0.97


def test_a_row_that_copies_is_found_beside_one_that_does_not() -> None:
    """Nothing is drafted for the first any more when the other joins."""
    old, new = ("old", 0), ("new", 0)
    run = Simulation(AdaptiveController(), flat, lambda key, step: 0.95 * (key == new))
    run.run([old], 300)

    run.run([old, new], 200)

    assert max(run.controller.limits([DraftRoom(old, 0), DraftRoom(new, MOST)])) > 2


def test_it_is_off_for_many_rows_and_on_for_few_of_them() -> None:
    def crowded(rows: int, width: int) -> float:
        return 0.02 * max(1.0, rows * width / 10)

    run = Simulation(AdaptiveController(), crowded, always(0.6))
    run.run(keys_of(16), 60).run(keys_of(2), 60)
    many = run.run(keys_of(16), 60).widths[-40:]
    few = run.run(keys_of(2), 60).widths[-40:]

    assert many.count(1) >= 34
    assert few.count(1) <= 10
    assert run.gain > 1.1


def test_numbers_of_rows_may_change_with_every_step() -> None:
    run = Simulation(AdaptiveController(), cpu, always(0.9))
    for step in range(200):
        run.step(keys_of(1 + step * 7 % 24))

    assert run.gain > 1.8


def test_it_comes_back_when_drafts_become_right_and_goes_when_they_do_not() -> None:
    """A copy in the middle of prose."""
    run = Simulation(AdaptiveController(), cpu, lambda key, step: 0.95 * (300 <= step < 400))
    run.run(keys_of(1), 300)
    assert run.widths[-100:].count(1) > 90
    run.run(keys_of(1), 100)
    assert run.widths[-50:].count(1) < 5
    run.run(keys_of(1), 100)
    assert run.widths[-60:].count(1) > 40
    assert run.gain > 1.2


def test_each_row_gets_as_much_as_its_own_drafts_deserve() -> None:
    run = Simulation(AdaptiveController(), flat, lambda key, step: 0.95 if key == A else 0.02)
    run.run([A, B], 200)

    limits = run.controller.limits([DraftRoom(A, MOST), DraftRoom(B, MOST)])

    assert limits == [MOST, 1]
    run.controller.leave(B)
    assert run.controller.limits([DraftRoom(A, MOST), DraftRoom(B, MOST)])[1] > 1


def test_a_short_draft_of_one_row_is_not_worth_a_wide_forward_for_many() -> None:
    run = Simulation(AdaptiveController(), steep, always(0.8))
    run.run(keys_of(8), 100)
    rooms = [DraftRoom(key, 0) for key in keys_of(8)]

    assert run.controller.settle([*rooms[:-1], DraftRoom(rooms[-1].key, 3)]) == [0] * 8
    assert max(run.controller.settle([DraftRoom(room.key, 3) for room in rooms])) >= 1


def test_a_long_draft_is_first_tried_short() -> None:
    run = Simulation(AdaptiveController(), cpu, always(1.0), noise=0.0).run(keys_of(1), 8)

    assert run.widths[:6] == [1, 1, 2, 3, 5, 8]


def test_decisions_follow_from_what_was_measured() -> None:
    runs = [
        Simulation(AdaptiveController(), gpu, always(0.6), seed=4).run(keys_of(3), 100)
        for _ in range(2)
    ]

    assert runs[0].widths == runs[1].widths


def test_rows_without_room_do_not_draft() -> None:
    run = Simulation(AdaptiveController(), flat, always(1.0)).run([A, B], 50)
    rooms = [DraftRoom(A, 2), DraftRoom(B, 0)]

    assert run.controller.limits(rooms) == [2, 0]
    assert run.controller.limits([DraftRoom(A, 0)]) == [0]
    assert run.controller.settle([DraftRoom(A, 0)]) == [0]


def test_a_fixed_number_is_drafted_whether_it_pays_or_not() -> None:
    run = Simulation(FixedController(3), steep, always(0.0)).run(keys_of(2), 20)

    assert run.widths == [4] * 20
    assert run.controller.limits([DraftRoom(A, 2), DraftRoom(B, 9)]) == [2, 3]
    assert run.controller.max_tokens == 3


def test_the_bound_is_the_configured_one() -> None:
    controller = AdaptiveController(ControllerConfig(max_draft_tokens=2))
    run = Simulation(controller, flat, always(1.0)).run(keys_of(1), 60)

    assert controller.max_tokens == 2
    assert max(run.widths) == 3


def test_expected_tokens_add_up() -> None:
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.7, 0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_draft_tokens": 0}, "max_draft_tokens"),
        ({"max_draft_tokens": 32}, "max_draft_tokens"),
        ({"margin": -0.1}, "margin"),
        ({"probe_share": 0.0}, "probe_share"),
        ({"probe_share": float("nan")}, "probe_share"),
    ],
)
def test_options_are_checked(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ControllerConfig(**options)

    assert caught.value.field == field
