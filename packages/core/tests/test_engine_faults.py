"""Failing steps: who caused it ends with the reason, everybody else goes on from their own tokens."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest

from treadle_core.engine import Engine, EngineConfig
from treadle_core.events import Failed, Finished
from treadle_core.plan import Key
from treadle_core.request import Request, SamplingParams
from treadle_core.testing import (
    EventChecker,
    Fault,
    ListConstraint,
    ScriptedConstraint,
    ScriptedRunner,
    answers,
    expected_tokens,
    hashed,
    pump,
)

MARK = 255
SCRIPT = hashed(250)

Where = Literal["submit", "wait"]
everywhere = pytest.mark.parametrize("where", ["submit", "wait"])


def make_request(number: int, *, marked: bool = False, max_tokens: int = 6) -> Request:
    prompt = tuple((number * 31 + i * 7) % 250 for i in range(4 + number))
    return Request(
        id=f"r{number}",
        prompt=(*prompt, MARK) if marked else prompt,
        params=SamplingParams(max_tokens=max_tokens),
    )


def run_requests(
    runner: ScriptedRunner, requests: Sequence[Request], config: EngineConfig | None = None
) -> EventChecker:
    """Run requests to their ends; nothing may be left behind."""
    engine, checker = Engine(runner, config=config), EventChecker()
    for request in requests:
        engine.add(request)
        checker.accepted(request)
    pump(engine, checker, most=300)
    checker.finish()
    assert runner.num_live == 0
    return checker


def assert_undisturbed(checker: EventChecker, request: Request) -> None:
    """The request got the tokens that it gets alone, and ended by itself."""
    assert isinstance(request.prompt, tuple)
    assert request.params.max_tokens is not None
    expected = expected_tokens(SCRIPT, request.prompt, request.params.max_tokens)
    assert checker.tokens[(request.id, 0)] == expected
    terminal = checker.terminal[(request.id, 0)]
    assert isinstance(terminal, Finished)
    assert terminal.reason == "length"


# A step that fails


@everywhere
@pytest.mark.parametrize("num_requests", [1, 3, 8])
@pytest.mark.parametrize("skip", range(8))
def test_a_step_that_fails_once_costs_nobody_a_token(
    where: Where, num_requests: int, skip: int
) -> None:
    runner = ScriptedRunner(SCRIPT, faults=[Fault(where, skip=skip)])
    requests = [make_request(i, max_tokens=12) for i in range(num_requests)]

    checker = run_requests(runner, requests)

    assert runner.num_resets == 1
    for request in requests:
        assert_undisturbed(checker, request)


@everywhere
@pytest.mark.parametrize("num_requests", [1, 3, 8])
def test_a_model_that_always_fails_ends_every_request_with_the_reason(
    where: Where, num_requests: int
) -> None:
    runner = ScriptedRunner(SCRIPT, faults=[Fault(where, times=None)])
    requests = [make_request(i) for i in range(num_requests)]

    checker = run_requests(runner, requests)

    for request in requests:
        failed = checker.terminal[(request.id, 0)]
        assert isinstance(failed, Failed)
        assert failed.code == "step_failed"
        reason = "ScriptedFailure: the device is on fire"
        assert failed.message == f"request {request.id} failed: {reason}"
        assert failed.usage.completion_tokens == 0
    # Each is tried twice at most, with others and alone.
    assert runner.num_resets <= 2 * num_requests


@everywhere
@pytest.mark.parametrize("num_requests", [1, 3, 8])
@pytest.mark.parametrize("skip", range(6))
def test_only_the_request_that_makes_steps_fail_fails(
    where: Where, num_requests: int, skip: int
) -> None:
    fault = Fault(where, marked=MARK, skip=skip, times=None)
    runner = ScriptedRunner(SCRIPT, faults=[fault])
    guilty = num_requests // 2
    requests = [make_request(i, marked=i == guilty, max_tokens=12) for i in range(num_requests)]

    checker = run_requests(runner, requests)

    for number, request in enumerate(requests):
        if number != guilty:
            assert_undisturbed(checker, request)
    failed = checker.terminal[(f"r{guilty}", 0)]
    assert isinstance(failed, Failed)
    assert failed.code == "step_failed"
    prompt = requests[guilty].prompt
    assert isinstance(prompt, tuple)
    found = checker.tokens[(f"r{guilty}", 0)]
    assert found == expected_tokens(SCRIPT, prompt, len(found))


@everywhere
def test_all_requests_that_make_steps_fail_fail(where: Where) -> None:
    runner = ScriptedRunner(SCRIPT, faults=[Fault(where, marked=MARK, times=None)])
    requests = [make_request(i, marked=i in (1, 4, 5)) for i in range(6)]

    checker = run_requests(runner, requests)

    failed = [key[0] for key, end in checker.terminal.items() if isinstance(end, Failed)]
    assert sorted(failed) == ["r1", "r4", "r5"]


@everywhere
def test_a_request_that_turns_bad_while_it_decodes_is_the_one_that_fails(where: Where) -> None:
    bad, good = (1, 2, 3), (9, 8, 7, 6)
    script = answers({bad: [10, 11, MARK, 12, 13, 14, 15], good: [20, 21, 22, 23, 24, 25, 26]})
    runner = ScriptedRunner(script, faults=[Fault(where, marked=MARK, times=None)])
    params = SamplingParams(max_tokens=7)
    requests = [
        Request(id="bad", prompt=bad, params=params),
        Request(id="good", prompt=good, params=params),
    ]

    checker = run_requests(runner, requests)

    assert isinstance(checker.terminal[("bad", 0)], Failed)
    assert checker.tokens[("bad", 0)] == [10, 11, MARK]
    assert isinstance(checker.terminal[("good", 0)], Finished)
    assert checker.tokens[("good", 0)] == [20, 21, 22, 23, 24, 25, 26]


@everywhere
@pytest.mark.parametrize("skip", range(4))
def test_nobody_is_blamed_for_the_step_of_the_suspect_before_it(where: Where, skip: int) -> None:
    # Both run alone after the first failure. While "bad" gets the token that turns it bad, "good",
    # a suspect as well, is in the step that follows the one that fails for it.
    bad, good = (1, 2, 3), (9, 8, 7, 6)
    script = answers({bad: [10, 11, MARK, 12, 13], good: [20, 21, 22, 23, 24]})
    faults = [Fault("wait", skip=skip), Fault(where, marked=MARK, times=None)]
    runner = ScriptedRunner(script, faults=faults)
    params = SamplingParams(max_tokens=5)
    requests = [
        Request(id="bad", prompt=bad, params=params),
        Request(id="good", prompt=good, params=params),
    ]

    checker = run_requests(runner, requests)

    assert isinstance(checker.terminal[("bad", 0)], Failed)
    assert isinstance(checker.terminal[("good", 0)], Finished)
    assert checker.tokens[("good", 0)] == [20, 21, 22, 23, 24]


def test_a_step_that_fails_to_submit_while_the_one_before_fails_too_is_one_failure() -> None:
    runner = ScriptedRunner(SCRIPT, faults=[Fault("wait", skip=1), Fault("submit", skip=1)])
    request = make_request(0)

    checker = run_requests(runner, [request])

    assert_undisturbed(checker, request)


@everywhere
@pytest.mark.parametrize("skip", [0, 3, 9, 14])
def test_a_failure_in_the_middle_of_long_prompts_loses_nothing(where: Where, skip: int) -> None:
    runner = ScriptedRunner(SCRIPT, faults=[Fault(where, skip=skip)])
    config = EngineConfig(prefill_step_size=8, chunked_prefill_tokens=8)
    requests = [
        Request(
            id=f"r{i}",
            prompt=tuple((i + 3 * j) % 250 for j in range(40 + i)),
            params=SamplingParams(max_tokens=9),
        )
        for i in range(3)
    ]

    checker = run_requests(runner, requests, config)

    for request in requests:
        assert_undisturbed(checker, request)


@everywhere
def test_requests_accepted_after_a_failure_run_as_usual(where: Where) -> None:
    runner = ScriptedRunner(SCRIPT, faults=[Fault(where, skip=1, marked=MARK, times=None)])
    engine, checker = Engine(runner), EventChecker()
    bad, late = make_request(0, marked=True), make_request(1)
    for request in (bad, late):
        engine.add(request)
        checker.accepted(request)
        pump(engine, checker)

    assert isinstance(checker.terminal[("r0", 0)], Failed)
    assert_undisturbed(checker, late)


@everywhere
@pytest.mark.parametrize("steps", range(6))
def test_an_abort_after_a_failure_ends_the_request_once(where: Where, steps: int) -> None:
    runner = ScriptedRunner(SCRIPT, faults=[Fault(where, skip=1)])
    engine, checker = Engine(runner), EventChecker()
    for number in range(2):
        engine.add(make_request(number))
        checker.accepted(make_request(number))
    for _ in range(steps):
        checker.feed(engine.step())

    assert engine.abort("r0")
    pump(engine, checker)

    aborted = checker.terminal[("r0", 0)]
    assert isinstance(aborted, Finished)
    assert aborted.reason == "abort"
    assert_undisturbed(checker, make_request(1))


# A row that fails


@pytest.mark.parametrize("num_requests", [1, 3, 8])
@pytest.mark.parametrize("after", [0, 1, 4, 11])
def test_a_row_that_fails_by_itself_disturbs_nobody(num_requests: int, after: int) -> None:
    guilty = num_requests - 1
    prompt_length = 5 + guilty

    def row_fails(key: Key, tokens: Sequence[int]) -> str | None:
        bad = MARK in tokens and len(tokens) >= prompt_length + after
        return "its logits are not finite" if bad else None

    runner = ScriptedRunner(SCRIPT, row_fails=row_fails)
    requests = [make_request(i, marked=i == guilty, max_tokens=12) for i in range(num_requests)]

    checker = run_requests(runner, requests)

    assert runner.num_resets == 0
    for request in requests[:guilty]:
        assert_undisturbed(checker, request)
    failed = checker.terminal[(f"r{guilty}", 0)]
    assert isinstance(failed, Failed)
    assert failed.message == f"request r{guilty} failed: its logits are not finite"
    assert failed.usage.completion_tokens == after


@pytest.mark.parametrize("after", [0, 2])
def test_a_processor_that_raises_ends_its_own_request_only(after: int) -> None:
    def processor(tokens: Sequence[int], logits: Any) -> Any:
        if len(tokens) == after:
            raise KeyError("no such table")
        return logits

    runner = ScriptedRunner(SCRIPT)
    good, bad = make_request(0), make_request(1)
    bad = Request(id="bad", prompt=bad.prompt, logits_processors=(processor,))

    checker = run_requests(runner, [bad, good])

    failed = checker.terminal[("bad", 0)]
    assert isinstance(failed, Failed)
    assert failed.message == "request bad failed: KeyError: 'no such table'"
    assert len(checker.tokens[("bad", 0)]) == after
    assert_undisturbed(checker, good)


def test_a_constraint_whose_mask_raises_ends_its_own_request_only() -> None:
    runner = ScriptedRunner(SCRIPT)
    error = ValueError("not a grammar")
    bad = Request(
        id="bad",
        prompt=(1, 2),
        constraint=lambda: ScriptedConstraint(mask_error=error, error_after=3),
    )
    good = make_request(0)

    checker = run_requests(runner, [bad, good])

    failed = checker.terminal[("bad", 0)]
    assert isinstance(failed, Failed)
    assert failed.message == "request bad failed: ValueError: not a grammar"
    assert len(checker.tokens[("bad", 0)]) == 3
    assert_undisturbed(checker, good)


def test_a_constraint_that_refuses_a_token_ends_its_own_request_only() -> None:
    runner = ScriptedRunner(SCRIPT)
    error = ValueError("cannot follow")
    bad = Request(
        id="bad",
        prompt=(1, 2),
        constraint=lambda: ScriptedConstraint(advance_error=error, error_after=2),
    )
    good = make_request(0)

    checker = run_requests(runner, [bad, good])

    failed = checker.terminal[("bad", 0)]
    assert isinstance(failed, Failed)
    assert failed.message == "request bad failed: ValueError: cannot follow"
    assert failed.code == "step_failed"
    assert_undisturbed(checker, good)


def test_a_constraint_that_allows_nothing_ends_its_own_request_only() -> None:
    runner = ScriptedRunner(SCRIPT)
    bad = Request(id="bad", prompt=(1, 2), constraint=lambda: ScriptedConstraint([set()]))
    good = make_request(0)

    checker = run_requests(runner, [bad, good])

    failed = checker.terminal[("bad", 0)]
    assert isinstance(failed, Failed)
    assert "allows no token" in failed.message
    assert_undisturbed(checker, good)


@everywhere
@pytest.mark.parametrize("skip", range(5))
def test_a_constraint_is_not_advanced_twice_when_a_step_is_repeated(
    where: Where, skip: int
) -> None:
    runner = ScriptedRunner(SCRIPT, faults=[Fault(where, skip=skip)])
    request = Request(
        id="choice", prompt=(1, 2), constraint=lambda: ListConstraint([[5, 6, 7, 8], [5, 9]])
    )

    checker = run_requests(runner, [request, make_request(0)])

    finished = checker.terminal[("choice", 0)]
    assert isinstance(finished, Finished)
    assert finished.reason == "stop"
    assert checker.tokens[("choice", 0)] == [5, 6, 7, 8]
    assert_undisturbed(checker, make_request(0))
