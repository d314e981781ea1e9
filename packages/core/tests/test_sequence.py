"""One answer in the making: its tokens by position, and its states along the table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_core.request import Request, SamplingParams
from treadle_core.sequence import TRANSITIONS, Sequence, Status
from treadle_core.testing import ScriptedConstraint


def make_sequence(
    prompt: tuple[int, ...] = (1, 2, 3), *, max_tokens: int = 5, request: Request | None = None
) -> Sequence:
    return Sequence(
        request=request or Request(id="r", prompt=prompt, params=SamplingParams()),
        index=0,
        prompt=prompt,
        max_tokens=max_tokens,
        arrival=0.0,
        order=1,
        seed=7,
    )


def test_a_new_sequence_waits_with_all_but_one_token_to_prefill() -> None:
    sequence = make_sequence()

    assert sequence.status is Status.WAITING
    assert sequence.key == ("r", 0)
    assert (sequence.num_tokens, sequence.num_to_prefill, sequence.num_generated) == (3, 2, 0)
    assert sequence.wants_token


def test_tokens_in_flight_count_as_generated() -> None:
    sequence = make_sequence(max_tokens=2)
    sequence.output.append(9)
    sequence.num_in_flight = 1

    assert (sequence.num_tokens, sequence.num_generated) == (5, 2)
    assert not sequence.wants_token


@given(st.data())
def test_tokens_are_those_of_prompt_and_output_joined(data: st.DataObject) -> None:
    prompt = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)))
    output = data.draw(st.lists(st.integers(10, 19), max_size=6))
    sequence = make_sequence(prompt)
    sequence.output.extend(output)
    joined = (*prompt, *output)
    stop = data.draw(st.integers(0, len(joined)))
    start = data.draw(st.integers(0, stop))

    assert sequence.tokens(start, stop) == joined[start:stop]


@pytest.mark.parametrize("start", list(Status))
@pytest.mark.parametrize("end", list(Status))
def test_states_change_along_the_table_only(start: Status, end: Status) -> None:
    sequence = make_sequence()
    sequence.status = start

    if end in TRANSITIONS[start]:
        sequence.move_to(end)
        assert sequence.status is end
    else:
        with pytest.raises(AssertionError, match="->"):
            sequence.move_to(end)
        assert sequence.status is start


def test_every_state_can_end_but_the_last() -> None:
    assert all(Status.FINISHED in ends for start, ends in TRANSITIONS.items() if ends)
    assert TRANSITIONS[Status.FINISHED] == frozenset()


def test_a_restart_keeps_the_tokens_and_forgets_what_is_in_flight() -> None:
    sequence = make_sequence()
    sequence.output.extend([7, 8])
    sequence.status = Status.DECODE
    sequence.num_computed, sequence.num_in_flight = 5, 1

    sequence.restart()

    assert sequence.status is Status.WAITING
    assert sequence.output == [7, 8]
    assert (sequence.num_computed, sequence.num_in_flight, sequence.epoch) == (0, 0, 1)
    assert sequence.num_to_prefill == 4


def test_host_code_makes_a_sequence_synchronous() -> None:
    plain = Request(id="r", prompt=(1,))
    processed = Request(id="r", prompt=(1,), logits_processors=(lambda tokens, logits: logits,))
    constrained = Request(id="r", prompt=(1,), constraint=ScriptedConstraint)

    assert not make_sequence(request=plain).synchronous
    assert make_sequence(request=processed).synchronous
    assert make_sequence(request=constrained).synchronous
