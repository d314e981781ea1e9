"""The prefill chunk follows the measured speed: it converges, grows in steps, shrinks in time."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_core.pacing import (
    FIRST_CHUNK,
    FIRST_CHUNK_ALONE,
    LONGEST_CHUNK_SECONDS,
    SHORTEST_STALL,
    SMALLEST_CHUNK,
    SMALLEST_CHUNK_ALONE,
    SMALLEST_DEEP_CHUNK,
    AdaptiveChunk,
    FixedChunk,
)

LIMIT = 8_192


class Machine:
    """A machine on which a chunk takes ``fixed + per_token * tokens`` seconds."""

    def __init__(self, *, fixed: float = 0.0, per_token: float = 1e-3, decode: float = 0.02):
        self.fixed = fixed
        self.per_token = per_token
        self.decode = decode

    def cost(self, num_tokens: int) -> float:
        return self.fixed + self.per_token * num_tokens

    def run(self, chunk: AdaptiveChunk, steps: int, limit: int = LIMIT) -> list[int]:
        """Steps that prefill as much as they may beside four decoding rows."""
        budgets: list[int] = []
        for _ in range(steps):
            budget = chunk.budget(4, limit)
            budgets.append(budget)
            chunk.observe(4, budget, self.cost(budget))
            chunk.observe(4, 0, self.decode)
        return budgets


def test_a_fixed_chunk_is_fixed_while_somebody_decodes() -> None:
    chunk = FixedChunk(100)
    chunk.observe(4, 100, 1_000.0)

    assert chunk.budget(1, LIMIT) == 100
    assert chunk.budget(1, 60) == 60
    assert chunk.budget(0, LIMIT) == LIMIT
    assert chunk.overhead == 0


def test_with_nobody_decoding_a_chunk_takes_about_a_second() -> None:
    machine, chunk = Machine(per_token=1e-3), AdaptiveChunk(0.1)
    assert chunk.budget(0, LIMIT) == FIRST_CHUNK_ALONE
    machine.run(chunk, 5)

    assert chunk.budget(0, LIMIT) == pytest.approx(LONGEST_CHUNK_SECONDS / 1e-3, abs=1)
    assert chunk.budget(0, 7) == 7


def test_a_chunk_with_nobody_decoding_is_not_tiny_however_slow_the_machine() -> None:
    machine, chunk = Machine(per_token=1.0), AdaptiveChunk(0.1)
    machine.run(chunk, 5)

    assert chunk.budget(0, LIMIT) == SMALLEST_CHUNK_ALONE


def test_until_a_speed_is_known_the_chunk_is_small() -> None:
    chunk = AdaptiveChunk(0.1)

    assert chunk.budget(1, LIMIT) == FIRST_CHUNK
    assert chunk.budget(1, 5) == 5
    assert chunk.overhead == 0


def test_the_chunk_at_most_doubles() -> None:
    budgets = Machine(per_token=1e-6).run(AdaptiveChunk(0.1), 12)

    assert budgets[0] == FIRST_CHUNK
    assert all(b <= 2 * max(a, FIRST_CHUNK) for a, b in pairwise(budgets))
    assert budgets[:6] == [32, 64, 128, 256, 512, 1024]
    assert budgets[-1] == LIMIT


@pytest.mark.parametrize("per_token", [1e-4, 5e-4, 1e-3])
@pytest.mark.parametrize("fixed", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("target", [0.1, 0.15, 0.5])
def test_the_chunk_converges_to_the_stall_that_was_asked_for(
    per_token: float, fixed: float, target: float
) -> None:
    machine, chunk = Machine(per_token=per_token, fixed=fixed), AdaptiveChunk(target)

    budgets = machine.run(chunk, 60)

    for budget in budgets[-10:]:
        assert machine.cost(budget) == pytest.approx(target, rel=0.1)


def test_the_chunk_is_learnt_from_prompts_that_nobody_waits_for_too() -> None:
    machine, chunk = Machine(per_token=1e-3), AdaptiveChunk(0.1)
    chunk.observe(0, 2_000, machine.cost(2_000))

    # The first chunk beside others does not jump to what it could be.
    assert machine.run(chunk, 3) == [32, 64, pytest.approx(100, abs=1)]


def test_the_chunk_shrinks_while_tokens_become_slower() -> None:
    machine, chunk = Machine(per_token=1e-4, fixed=0.01), AdaptiveChunk(0.1)
    before = machine.run(chunk, 30)[-1]
    for _ in range(200):
        machine.per_token *= 1.01
        assert machine.cost(machine.run(chunk, 1)[0]) <= 0.2

    assert before == pytest.approx(900, rel=0.05)
    assert machine.run(chunk, 1)[0] == pytest.approx(0.09 / machine.per_token, rel=0.2)


def test_the_chunk_shrinks_when_tokens_become_slower() -> None:
    machine, chunk = Machine(per_token=1e-4), AdaptiveChunk(0.1)
    before = machine.run(chunk, 30)[-1]
    machine.per_token = 5e-4

    budgets = machine.run(chunk, 60)

    assert before == pytest.approx(1_000, rel=0.05)
    assert budgets[-1] == pytest.approx(200, rel=0.1)
    assert machine.cost(budgets[15]) <= 0.2


def test_the_stall_is_kept_over_long_prompts_one_after_the_other() -> None:
    # The deeper in its prompt, the slower a token is.
    machine, chunk, stalls = Machine(fixed=0.01), AdaptiveChunk(0.1), list[float]()
    for _ in range(6):
        position = 0
        while position < 40_000:
            machine.per_token = 1e-4 + 1.5e-8 * position
            budget = machine.run(chunk, 1)[0]
            stalls.append(machine.cost(budget))
            position += budget

    # The first chunk of a prompt is as large as the last one's speed allows.
    stalls.sort()
    assert stalls[len(stalls) // 2] == pytest.approx(0.1, rel=0.2)
    assert stalls[int(0.95 * len(stalls))] <= 0.2


def test_a_chunk_that_shares_its_forward_costs_what_the_step_takes_longer() -> None:
    chunk, machine = AdaptiveChunk(0.1), Machine(fixed=0.05, per_token=1e-3)
    machine.run(chunk, 40)
    apart, alone = chunk.budget(4, LIMIT), chunk.budget(0, LIMIT)

    for _ in range(40):
        budget = chunk.budget(4, LIMIT)
        # The pass over the weights is paid for by the decoding rows.
        chunk.observe_fused(4, budget, machine.decode + machine.per_token * budget)
        chunk.observe(4, 0, machine.decode)

    assert apart == pytest.approx(50, rel=0.2)
    assert chunk.budget(4, LIMIT) == pytest.approx(100, rel=0.1)
    # Where nobody decodes nothing is shared.
    assert chunk.budget(0, LIMIT) == alone


class Crowded(Machine):
    """A machine on which each decoding row takes its time, and a chunk beside them most of its."""

    def __init__(self) -> None:
        super().__init__(fixed=0.09, per_token=3e-3)

    def decode_of(self, rows: int) -> float:
        return 0.016 * rows

    def step(self, chunk: AdaptiveChunk, rows: int, left: int, waiting: int = 0) -> int:
        """One step with a chunk, fused where it may be; how many tokens it had."""
        tokens = min(left, chunk.budget(rows, LIMIT, waiting))
        if chunk.fuses(rows):
            chunk.observe_fused(rows, tokens, self.decode_of(rows) + self.cost(tokens))
        else:
            chunk.observe(rows, tokens, self.cost(tokens))
            chunk.observe(rows, 0, self.decode_of(rows))
        return tokens


def test_where_every_step_has_a_chunk_it_is_still_known_what_the_rows_take() -> None:
    """Prompts that come at once, one row more with each: never a step that only decodes."""
    machine, chunk, steps = Crowded(), AdaptiveChunk(), 0
    for rows in range(1, 9):
        left = 33
        while left:
            left -= machine.step(chunk, rows, left, waiting=8 - rows)
            steps += 1

    assert steps <= 24
    assert chunk.budget(8, LIMIT) == pytest.approx(
        (1.5 * machine.decode_of(8) - 0.09) / 3e-3, abs=5
    )


def test_after_most_rows_have_left_a_chunk_is_not_what_they_would_have_waited_for() -> None:
    machine, chunk = Crowded(), AdaptiveChunk()
    for _ in range(30):
        machine.step(chunk, 8, 10_000)
    before = chunk.budget(8, LIMIT)

    for _ in range(30):
        machine.step(chunk, 2, 10_000)

    assert before >= 30
    assert chunk.budget(2, LIMIT) <= SMALLEST_CHUNK


def test_what_rows_take_is_learnt_apart_where_their_number_is_another() -> None:
    chunk = AdaptiveChunk()
    assert not chunk.fuses(1)

    chunk.observe(4, 0, 0.06)

    assert [rows for rows in range(1, 20) if chunk.fuses(rows)] == list(range(2, 9))
    # All at once, not a little with each step.
    chunk.observe(12, 0, 0.18)
    chunk.observe_fused(12, 200, 0.18 + 0.2)
    assert chunk.budget(12, LIMIT) == pytest.approx(1.5 * 0.18 / 1e-3, rel=0.02)


def test_the_chunk_grows_again_when_tokens_become_faster() -> None:
    machine, chunk = Machine(per_token=1e-3), AdaptiveChunk(0.1)
    machine.run(chunk, 40)
    machine.per_token = 1e-4

    assert machine.run(chunk, 100)[-1] == pytest.approx(1_000, rel=0.1)


def test_a_single_slow_step_does_not_collapse_the_chunk() -> None:
    machine, chunk = Machine(per_token=1e-4), AdaptiveChunk(0.1)
    before = machine.run(chunk, 40)[-1]
    chunk.observe(4, before, 30.0)

    assert machine.run(chunk, 1)[0] >= before / 2
    assert machine.run(chunk, 60)[-1] == pytest.approx(before, rel=0.1)


def test_a_machine_too_slow_for_the_stall_still_makes_progress() -> None:
    budgets = Machine(per_token=1.0).run(AdaptiveChunk(0.001), 20)

    assert set(budgets[1:]) == {SMALLEST_CHUNK}


def test_a_chunk_is_not_so_small_that_it_is_all_overhead() -> None:
    # A pass over the weights takes longer than the stall: about as many tokens as cost the same.
    machine, chunk = Machine(fixed=0.2, per_token=1e-3), AdaptiveChunk(0.1)
    for size in (32, 2_000, 64, 1_000):
        chunk.observe(0, size, machine.cost(size))

    assert chunk.overhead == pytest.approx(200, rel=0.05)
    machine.run(chunk, 5)
    assert chunk.budget(4, LIMIT) >= 150


def test_without_a_target_one_and_a_half_decode_steps_are_the_stall() -> None:
    slow, quick = AdaptiveChunk(), AdaptiveChunk()

    slow_budgets = Machine(decode=0.4, per_token=1e-3).run(slow, 60)
    quick_budgets = Machine(decode=0.001, per_token=1e-3).run(quick, 60)

    assert slow_budgets[-1] == pytest.approx(600, rel=0.1)
    assert quick_budgets[-1] == pytest.approx(SHORTEST_STALL / 1e-3, rel=0.1)


def test_the_stall_grows_with_the_queue_as_far_as_a_chunk_at_most_doubles() -> None:
    chunk, machine = AdaptiveChunk(), Machine(decode=0.4, per_token=1e-3)
    machine.run(chunk, 60)

    assert chunk.budget(4, LIMIT, 0) == pytest.approx(600, rel=0.1)
    for num_waiting in (1, 4, 8, 400):
        assert chunk.budget(4, LIMIT, num_waiting) == pytest.approx(1200, rel=0.1)


def test_the_stall_is_doubled_while_somebody_waits_and_fourfold_in_a_crowd() -> None:
    chunk, machine = AdaptiveChunk(), Machine(decode=0.4, per_token=1e-3)
    machine.run(chunk, 60)
    chunk.observe(4, 3_000, machine.cost(3_000))

    budgets = [chunk.budget(4, LIMIT, num_waiting) for num_waiting in (0, 1, 8, 12, 16, 400)]

    sizes = (600, 1200, 1200, 1800, 2400, 2400)
    assert budgets == [pytest.approx(size, rel=0.1) for size in sizes]


def test_deep_in_a_long_prompt_a_chunk_shrinks_before_streams_wait_four_steps() -> None:
    machine, chunk = Machine(fixed=0.1, decode=0.13), AdaptiveChunk()
    for position in range(0, 6_000, 16):
        machine.per_token = 3e-3 + 6e-6 * position
        budget = machine.run(chunk, 1)[0]
        if position > 100:
            assert budget >= SMALLEST_DEEP_CHUNK
            assert budget == SMALLEST_DEEP_CHUNK or machine.cost(budget) <= 3 * machine.decode


def test_a_stall_that_was_asked_for_is_kept_however_many_wait() -> None:
    chunk = AdaptiveChunk(0.1)
    Machine(per_token=1e-3).run(chunk, 60)

    assert chunk.budget(4, LIMIT, 400) == chunk.budget(4, LIMIT)


@given(
    target=st.one_of(st.none(), st.floats(1e-4, 10.0)),
    observed=st.lists(
        st.tuples(
            st.integers(0, 300),
            st.sampled_from([0, 1, 2, 16, 31, 500, 8_000]),
            st.one_of(st.just(0.0), st.floats(0.0, 100.0)),
        ),
        max_size=30,
    ),
    limit=st.integers(1, LIMIT),
    num_decoding=st.integers(0, 300),
)
@settings(deadline=None, max_examples=300)
def test_whatever_was_observed_the_chunk_is_within_its_bounds(
    target: float | None,
    observed: list[tuple[int, int, float]],
    limit: int,
    num_decoding: int,
) -> None:
    chunk = AdaptiveChunk(target)
    for decoding, prefill, seconds in observed:
        chunk.observe(decoding, prefill, seconds)

    assert 1 <= chunk.budget(num_decoding, limit) <= limit
    assert chunk.overhead >= 0
