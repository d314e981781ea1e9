"""Lists of prompts in, answers in their order out, whatever the queue holds."""

import pytest

from treadle_core.batch import Completion, collect, generate_batch, run
from treadle_core.engine import Engine, EngineConfig
from treadle_core.errors import InvalidRequest, OutOfMemory, PromptTooLong, StepFailed
from treadle_core.events import Usage
from treadle_core.request import Request, SamplingParams
from treadle_core.testing import (
    ByteTokenizer,
    Fault,
    ManualClock,
    RecordingObserver,
    ScriptedRunner,
    answers,
    expected_tokens,
    hashed,
    pump,
)

SCRIPT = hashed(250)


def make_engine(runner: ScriptedRunner | None = None, **config: int) -> Engine:
    return Engine(
        runner or ScriptedRunner(SCRIPT),
        tokenizer=ByteTokenizer(),
        config=EngineConfig(**config),
        clock=ManualClock(),
    )


def test_more_prompts_than_the_queue_holds_are_answered_in_their_order() -> None:
    observer = RecordingObserver()
    config = EngineConfig(max_num_seqs=2, max_queue=3)
    engine = Engine(ScriptedRunner(SCRIPT), config=config, observers=[observer])
    prompts = [(i, i + 1, i * i % 250) for i in range(25)]

    found = generate_batch(engine, prompts, SamplingParams(max_tokens=4))

    assert observer.requests == [f"batch-{i}" for i in range(25)]
    assert [c.tokens for c in found] == [expected_tokens(SCRIPT, p, 4) for p in prompts]
    assert {c.reason for c in found} == {"length"}
    assert not engine.has_work


def test_prompts_may_be_text_tuples_or_lists() -> None:
    runner = ScriptedRunner(answers({tuple(b"hi"): b"yes", (1, 2): b"no!"}))

    found = generate_batch(
        make_engine(runner), ["hi", (1, 2), [1, 2]], SamplingParams(max_tokens=3)
    )

    assert [completion.text for completion in found] == ["yes", "no!", "no!"]


def test_each_prompt_may_have_parameters_of_its_own() -> None:
    params = [SamplingParams(max_tokens=n) for n in (1, 2, 3)]

    found = generate_batch(make_engine(), [(1,), (2,), (3,)], params)

    assert [len(completion.tokens) for completion in found] == [1, 2, 3]


def test_parameters_and_prompts_have_to_be_as_many() -> None:
    with pytest.raises(ValueError, match="shorter"):
        generate_batch(make_engine(), [(1,), (2,)], [SamplingParams()])


def test_no_prompts_give_no_answers() -> None:
    engine = make_engine()

    assert generate_batch(engine, []) == []
    assert not engine.has_work


def test_an_answer_tells_all_that_the_events_told() -> None:
    runner = ScriptedRunner(answers({(1, 2): b"ab<"}))
    params = SamplingParams(max_tokens=9, stop=("<",), logprobs=True, top_logprobs=2)

    [found] = generate_batch(make_engine(runner), [(1, 2)], params)

    assert (found.text, found.reason, found.stop, found.error) == ("ab", "stop", "<", None)
    assert found.tokens == list(b"ab<")
    assert found.logprobs == [0.0, 0.0, 0.0]
    assert [len(top) for top in found.top_logprobs] == [2, 2, 2]
    assert found.usage == Usage(prompt_tokens=2, completion_tokens=3)
    assert found.timings is not None


def test_a_failed_answer_carries_its_error() -> None:
    runner = ScriptedRunner(SCRIPT, faults=[Fault(marked=99, times=None)])

    found = generate_batch(make_engine(runner), [(1,), (99,), (3,)], SamplingParams(max_tokens=2))

    assert [completion.reason for completion in found] == ["length", "error", "length"]
    error = found[1].error
    assert isinstance(error, StepFailed)
    assert str(error) == "request batch-1 failed: ScriptedFailure: the device is on fire"


@pytest.mark.parametrize(
    ("bad", "kind"),
    [((1, 999), InvalidRequest), ((1,) * 60, PromptTooLong), ((), InvalidRequest)],
)
def test_a_prompt_that_is_refused_leaves_nothing_behind(
    bad: tuple[int, ...], kind: type[Exception]
) -> None:
    runner = ScriptedRunner(SCRIPT)
    engine = make_engine(runner, max_num_seqs=1, max_queue=2, context_length=50)
    prompts = [(1,), (2,), (3,), (4,), bad, (5,)]

    with pytest.raises(kind):
        generate_batch(engine, prompts, SamplingParams(max_tokens=4))

    assert engine.stats().num_waiting == engine.stats().num_running == 0
    assert pump(engine) == []
    assert runner.num_live == 0
    found = generate_batch(engine, prompts[:4], SamplingParams(max_tokens=4))
    assert [c.tokens for c in found] == [expected_tokens(SCRIPT, p, 4) for p in prompts[:4]]


def test_a_prompt_too_large_for_memory_leaves_nothing_behind() -> None:
    engine = make_engine(kv_memory_bytes=2_048)

    with pytest.raises(OutOfMemory):
        generate_batch(engine, [(1, 2), (1,) * 200])

    assert len(generate_batch(engine, [(1, 2)], SamplingParams(max_tokens=1))) == 1


def test_running_requests_gives_all_their_events() -> None:
    requests = [
        Request(id="a", prompt=(1, 2), params=SamplingParams(max_tokens=2)),
        Request(id="b", prompt=(3,), params=SamplingParams(max_tokens=3), n=2),
    ]

    found = collect(run(make_engine(), requests))

    assert sorted(found) == [("a", 0), ("b", 0), ("b", 1)]
    assert found[("a", 0)].tokens == expected_tokens(SCRIPT, (1, 2), 2)
    assert found[("b", 1)].tokens == expected_tokens(SCRIPT, (3,), 3)


def test_collecting_nothing_gives_nothing() -> None:
    assert collect([]) == {}
    assert Completion(tokens=[], text="", reason="", logprobs=[], top_logprobs=[]).usage is None
