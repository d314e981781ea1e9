"""Costs are what was measured, and between and beyond that a guess that never falls with width."""

import pytest

from treadle_speculative.costs import BRIEFLY, LONGEST, StepCosts, bucket


def measured(*steps: tuple[int, int, float]) -> StepCosts:
    costs = StepCosts()
    for rows, width, seconds in steps:
        costs.add(rows, width, seconds)
    return costs


def test_nothing_is_known_before_anything_was_measured() -> None:
    costs = StepCosts()

    assert (costs.of(1, 0), costs.of(1, 4), costs.drafting(1), costs.deepest(1)) == (0, 0, 0, 0)
    assert costs.plain_age(1) == float("inf")


def test_a_straight_line_joins_what_was_measured_and_goes_on_beyond() -> None:
    costs = measured((1, 1, 1.0), (1, 3, 2.0), (1, 5, 2.2))

    assert costs.of(1, 1) == 1.0
    assert costs.of(1, 2) == pytest.approx(1.5)
    assert costs.of(1, 4) == pytest.approx(2.1)
    assert costs.of(1, 9) == pytest.approx(3.4)
    assert costs.deepest(1) == 4


def test_a_wider_forward_never_takes_less() -> None:
    costs = measured((1, 1, 1.0), (1, 3, 2.0), (1, 5, 1.5))

    assert costs.of(1, 5) == 2.0


def test_waiting_and_looking_ahead_are_told_apart() -> None:
    costs = measured((1, 0, 1.0), (1, 1, 1.1))

    assert costs.of(1, 0) == 1.0
    assert costs.of(1, 1) == 1.1
    assert measured((1, 1, 1.1)).of(1, 0) == 1.1
    assert measured((1, 0, 1.0)).of(1, 1) == 1.0
    assert measured((1, 4, 2.0)).of(1, 0) == 2.0
    assert measured((1, 0, 1.0), (1, 1, 0.9)).of(1, 1) == 1.0


def test_other_numbers_of_rows_stand_in_and_each_row_adds_its_token() -> None:
    costs = measured((2, 1, 1.0), (2, 3, 1.2))

    assert costs.of(4, 1) == 1.0
    assert costs.of(4, 3) == pytest.approx(1.4)
    costs.add(4, 1, 5.0)
    assert costs.of(4, 3) == pytest.approx(5.4)


def test_measurements_that_are_far_off_change_nothing_until_they_are_many() -> None:
    costs = measured(*[(1, 1, 1.0)] * 10, *[(1, 1, 100.0)] * 4)
    assert costs.of(1, 1) == 1.0

    costs.add(1, 1, 100.0)
    assert costs.of(1, 1) == 100.0


def test_the_first_run_of_a_shape_is_forgotten_at_the_second() -> None:
    costs = measured((1, 1, 9.0), (1, 1, 1.0))

    assert costs.of(1, 1) == 1.0


def test_what_was_seen_once_is_not_believed_for_long() -> None:
    costs = measured((1, 1, 1.0), (1, 8, 50.0))
    for _ in range(2 * BRIEFLY):
        costs.add(1, 1, 1.0)
    assert costs.of(1, 8) == 50.0
    costs.add(1, 1, 1.0)
    assert costs.of(1, 8) == 1.0

    often = measured((1, 1, 1.0), *[(1, 8, 50.0)] * 10, *[(1, 1, 1.0)] * (LONGEST - 1))
    assert often.of(1, 8) == 50.0
    often.add(1, 1, 1.0)
    often.add(1, 1, 1.0)
    assert often.of(1, 8) == 1.0


def test_the_age_counts_steps_of_so_many_rows() -> None:
    costs = measured((1, 0, 1.0), (1, 0, 1.0), (1, 3, 1.0), (2, 0, 1.0), (1, 3, 1.0))

    assert costs.plain_age(1) == 2
    assert costs.plain_age(2) == float("inf")


def test_drafting_is_taken_from_the_nearest_number_of_rows() -> None:
    costs = StepCosts()
    costs.add_drafting(1, 0.1)
    costs.add_drafting(8, 0.8)

    assert costs.drafting(2) == 0.1
    assert costs.drafting(7) == 0.8


def test_many_rows_count_in_steps_of_an_eighth() -> None:
    assert [bucket(rows) for rows in range(9)] == list(range(9))
    assert [bucket(rows) for rows in (16, 17, 18, 31, 32, 35, 36)] == [16, 16, 18, 30, 32, 32, 36]
