"""Who is next: first come first served, or by priority with ageing; nobody starves."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_core.request import Request
from treadle_core.sequence import Sequence
from treadle_core.waiting import (
    AGEING_SECONDS,
    Policy,
    WaitingQueue,
    fcfs,
    priority,
    priority_with_ageing,
)


def make_sequence(order: int, *, priority: int = 0, arrival: float = 0.0) -> Sequence:
    request = Request(id=f"r{order}", prompt=(1,), priority=priority)
    return Sequence(
        request=request,
        index=0,
        prompt=(1,),
        max_tokens=1,
        arrival=arrival,
        order=order,
        seed=0,
    )


def drain(queue: WaitingQueue, now: float) -> list[int]:
    """Orders as they are served when all are served at once."""
    served: list[int] = []
    while (sequence := queue.peek(now)) is not None:
        queue.discard(sequence)
        served.append(sequence.order)
    return served


def make_queue(policy: Policy, *sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue(policy)
    for sequence in sequences:
        queue.push(sequence)
    return queue


def test_an_empty_queue_has_nobody_next() -> None:
    assert WaitingQueue().peek(0.0) is None
    assert len(WaitingQueue()) == 0


def test_first_come_is_first_served_whatever_the_priority() -> None:
    queue = make_queue(fcfs, make_sequence(2, priority=-5), make_sequence(1), make_sequence(3))

    assert drain(queue, 1_000.0) == [1, 2, 3]


def test_one_that_returns_to_the_queue_keeps_its_place() -> None:
    first, second = make_sequence(1), make_sequence(2)
    queue = make_queue(fcfs, first, second)
    queue.discard(first)

    queue.push(first)

    assert queue.peek(0.0) is first


def test_lower_priority_numbers_go_first_and_ties_in_order() -> None:
    queue = make_queue(
        priority,
        make_sequence(1, priority=3),
        make_sequence(2, priority=-1),
        make_sequence(3, priority=3),
        make_sequence(4, priority=0),
    )

    assert drain(queue, 0.0) == [2, 4, 1, 3]


def test_ten_seconds_of_waiting_count_as_one_step_of_priority() -> None:
    old = make_sequence(1, priority=2, arrival=0.0)
    new = make_sequence(2, priority=0, arrival=20.5)

    assert AGEING_SECONDS == 10.0
    assert make_queue(priority, old, new).peek(20.5) is old
    new.arrival = 19.5
    assert make_queue(priority, old, new).peek(20.5) is new


def test_looking_at_the_next_one_leaves_it_in_the_queue() -> None:
    queue = make_queue(fcfs, make_sequence(1))

    assert queue.peek(0.0) is queue.peek(0.0)
    assert len(queue) == 1


def test_discarding_is_idempotent_and_iterating_survives_it() -> None:
    sequences = [make_sequence(order) for order in range(3)]
    queue = make_queue(fcfs, *sequences)

    for sequence in queue:
        queue.discard(sequence)
        queue.discard(sequence)

    assert len(queue) == 0


@pytest.mark.parametrize(
    "make_policy", [lambda: fcfs, lambda: priority, lambda: priority_with_ageing(3.0)]
)
@given(
    patience=st.integers(-10, 10),
    rivals=st.lists(st.integers(-10, 10), min_size=1, max_size=5),
)
@settings(deadline=None, max_examples=40)
def test_nobody_starves_behind_a_stream_of_more_urgent_ones(
    make_policy: Callable[[], Policy], patience: int, rivals: list[int]
) -> None:
    # One newcomer a second, one served a second: the queue never empties.
    policy = make_policy()
    patient = make_sequence(0, priority=patience)
    queue = make_queue(policy, patient, *(make_sequence(i, priority=-10) for i in range(1, 6)))

    for second in range(1, 400):
        served = queue.peek(float(second))
        assert served is not None
        if served is patient:
            # Twenty steps of priority at most, and those who were there.
            assert second <= 20 * AGEING_SECONDS + 7
            return
        queue.discard(served)
        newcomer = make_sequence(
            5 + second, priority=rivals[second % len(rivals)], arrival=float(second)
        )
        queue.push(newcomer)
    raise AssertionError("it starved")


def test_the_least_urgent_is_the_one_that_the_policy_serves_last() -> None:
    aged = make_sequence(1, priority=3, arrival=0.0)
    urgent = make_sequence(2, priority=0, arrival=95.0)
    usual = make_sequence(3, priority=2, arrival=95.0)

    assert WaitingQueue(fcfs).least_urgent([aged, urgent, usual], 100.0) is usual
    assert WaitingQueue(priority).least_urgent([aged, urgent, usual], 100.0) is usual
    assert WaitingQueue(priority).least_urgent([aged, urgent], 100.0) is urgent
