"""An engine over a scripted runner: accepting, ending, aborting, counting."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from treadle_core.answer import Answer
from treadle_core.engine import Engine, EngineConfig, choice_seed
from treadle_core.errors import (
    DuplicateRequest,
    EngineClosed,
    InvalidRequest,
    OutOfMemory,
    PromptTooLong,
    QueueFull,
    Unsupported,
)
from treadle_core.events import (
    Event,
    Failed,
    Finished,
    Progress,
    Timings,
    TokenLogprob,
    TokenOut,
    Usage,
)
from treadle_core.layers import Recurrent
from treadle_core.request import Request, SamplingParams
from treadle_core.sequence import Sequence as Row
from treadle_core.testing import (
    SMALL_SPEC,
    ByteTokenizer,
    EventChecker,
    ListConstraint,
    ManualClock,
    RecordingObserver,
    RecordingStore,
    ScriptedConstraint,
    ScriptedRunner,
    answers,
    expected_tokens,
    hashed,
    pump,
)
from treadle_core.testing.fakes import BEGIN, END, PAD, VOCAB_SIZE

PROMPT = (1, 2, 3)
SCRIPT = hashed(250)
STATEFUL = replace(
    SMALL_SPEC, layers=(*SMALL_SPEC.layers, Recurrent(shapes=((1,),), dtypes=("float32",)))
)


def make_engine(
    answer: Sequence[int] | str | None = None,
    *,
    runner: ScriptedRunner | None = None,
    config: EngineConfig | None = None,
    clock: ManualClock | None = None,
    tokenizer: ByteTokenizer | None = None,
) -> Engine:
    """An engine whose answer to PROMPT is known, or scripted by hash."""
    if runner is None:
        known = list(answer.encode() if isinstance(answer, str) else answer or ())
        runner = ScriptedRunner(answers({PROMPT: known}) if known else SCRIPT)
    return Engine(
        runner, tokenizer=tokenizer or ByteTokenizer(), config=config, clock=clock or ManualClock()
    )


def make_request(
    id: str = "r", *, prompt: tuple[int, ...] | str = PROMPT, n: int = 1, **params: Any
) -> Request:
    return Request(id=id, prompt=prompt, n=n, params=SamplingParams(**params))


def run(engine: Engine, *requests: Request) -> EventChecker:
    checker = EventChecker()
    for request in requests:
        engine.add(request)
        checker.accepted(request)
    pump(engine, checker, most=2_000)
    checker.finish()
    return checker


def finished(checker: EventChecker, id: str = "r", index: int = 0) -> Finished:
    terminal = checker.terminal[(id, index)]
    assert isinstance(terminal, Finished), terminal
    return terminal


def failed(checker: EventChecker, id: str = "r") -> Failed:
    terminal = checker.terminal[(id, 0)]
    assert isinstance(terminal, Failed), terminal
    return terminal


def texts(events: Sequence[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, TokenOut | Finished)]


# How an answer ends


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 20])
def test_an_answer_of_full_length_has_exactly_max_tokens(max_tokens: int) -> None:
    checker = run(make_engine(), make_request(max_tokens=max_tokens))

    assert checker.tokens[("r", 0)] == expected_tokens(SCRIPT, PROMPT, max_tokens)
    assert finished(checker).reason == "length"
    assert finished(checker).stop is None
    assert finished(checker).usage == Usage(prompt_tokens=3, completion_tokens=max_tokens)


def test_an_answer_ends_with_the_models_own_end_token() -> None:
    checker = run(make_engine([65, 66, END, 67]), make_request())

    assert checker.tokens[("r", 0)] == [65, 66, END]
    assert checker.text[("r", 0)] == "AB"
    assert (finished(checker).reason, finished(checker).stop) == ("stop", None)
    assert finished(checker).usage.completion_tokens == 3


def test_end_tokens_can_be_ignored() -> None:
    checker = run(make_engine([65, END, 67, 68]), make_request(max_tokens=4, ignore_eos=True))

    assert checker.tokens[("r", 0)] == [65, END, 67, 68]
    assert checker.text[("r", 0)] == "ACD"
    assert finished(checker).reason == "length"


def test_an_end_token_as_the_last_possible_one_is_a_stop() -> None:
    checker = run(make_engine([65, END]), make_request(max_tokens=2))

    assert finished(checker).reason == "stop"


def test_a_stop_token_is_named_and_gives_no_text() -> None:
    checker = run(make_engine([65, 66, 67, 68]), make_request(stop_token_ids=(70, 67)))

    assert checker.tokens[("r", 0)] == [65, 66, 67]
    assert checker.text[("r", 0)] == "AB"
    assert (finished(checker).reason, finished(checker).stop) == ("stop", 67)


def test_a_stop_token_ends_an_answer_that_ignores_end_tokens() -> None:
    request = make_request(stop_token_ids=(66,), ignore_eos=True)

    checker = run(make_engine([65, END, 66]), request)

    assert checker.tokens[("r", 0)] == [65, END, 66]
    assert finished(checker).stop == 66


def test_a_stop_string_across_tokens_is_cut_off_the_text() -> None:
    checker = run(make_engine("Hello there, you"), make_request(stop=("here",)))

    assert checker.text[("r", 0)] == "Hello t"
    assert checker.tokens[("r", 0)] == list(b"Hello there")
    assert (finished(checker).reason, finished(checker).stop) == ("stop", "here")
    assert finished(checker).usage.completion_tokens == 11


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_is_none() -> None:
    engine = make_engine("a<b<<c")
    engine.add(make_request(max_tokens=6, stop=("<<<",)))

    assert texts(pump(engine)) == ["a", "", "<b", "", "", "<<c", ""]


def test_held_back_text_comes_with_the_terminal_event() -> None:
    engine = make_engine("ab<<")
    engine.add(make_request(max_tokens=4, stop=("<<<",)))

    assert texts(pump(engine)) == ["a", "b", "", "", "<<"]


def test_held_back_text_comes_before_an_end_token_too() -> None:
    checker = run(make_engine([*b"ab<<", END]), make_request(stop=("<<<",)))

    assert checker.text[("r", 0)] == "ab<<"
    assert (finished(checker).reason, finished(checker).stop) == ("stop", None)


def test_a_stop_string_found_in_the_last_text_is_the_reason() -> None:
    # The tokenizer gives "Ax" only with the token after it: 0xE2 begins a character.
    class Merging(ByteTokenizer):
        def decode(self, tokens: Sequence[int]) -> str:
            return super().decode([b for t in tokens for b in ([65, 120, 0xE2] if t == 9 else [t])])

    engine = make_engine([66, 9], tokenizer=Merging())

    checker = run(engine, make_request(max_tokens=2, stop=("x",)))

    assert checker.text[("r", 0)] == "BA"
    assert (finished(checker).reason, finished(checker).stop) == ("stop", "x")


def test_an_aborted_answer_is_aborted_whatever_its_last_text_holds() -> None:
    class Merging(ByteTokenizer):
        def decode(self, tokens: Sequence[int]) -> str:
            return super().decode([b for t in tokens for b in ([65, 120, 0xE2] if t == 9 else [t])])

    engine, checker = make_engine([66, 9, 67, 68], tokenizer=Merging()), EventChecker()
    request = make_request(max_tokens=9, stop=("x",))
    engine.add(request)
    checker.accepted(request)
    while len(checker.tokens[("r", 0)]) < 2:
        checker.feed(engine.step())

    engine.abort("r")
    pump(engine, checker)

    assert checker.text[("r", 0)] == "BA"
    assert (finished(checker).reason, finished(checker).stop) == ("abort", None)


def test_an_answer_fills_the_context_and_no_more() -> None:
    runner = ScriptedRunner(SCRIPT, spec=replace(SMALL_SPEC, context_length=10))

    checker = run(make_engine(runner=runner), make_request(max_tokens=None))

    assert finished(checker).reason == "length"
    assert finished(checker).usage == Usage(prompt_tokens=3, completion_tokens=7)


def test_max_tokens_beyond_the_context_ends_there() -> None:
    engine = make_engine(config=EngineConfig(context_length=8))

    checker = run(engine, make_request(max_tokens=100))

    assert engine.context_length == 8
    assert finished(checker).usage.completion_tokens == 5


def test_a_prompt_one_short_of_the_context_gets_one_token() -> None:
    engine = make_engine(config=EngineConfig(context_length=4))

    assert finished(run(engine, make_request())).usage.completion_tokens == 1


# Characters


def test_characters_of_several_tokens_come_whole() -> None:
    engine = make_engine("né👩‍👩‍👧!")
    engine.add(make_request(max_tokens=len("né👩‍👩‍👧!".encode())))

    found = [text for text in texts(pump(engine)) if text]

    assert found == ["n", "é", "👩", "\u200d", "👩", "\u200d", "👧", "!"]


def test_a_character_cut_by_max_tokens_ends_in_one_replacement() -> None:
    checker = run(make_engine("a👩"), make_request(max_tokens=4))

    assert checker.text[("r", 0)] == "a\ufffd"


def test_rows_do_not_share_characters() -> None:
    first, second = (1, 1), (2, 2)
    runner = ScriptedRunner(answers({first: "🎈é".encode(), second: "ñ🎈".encode()}))

    checker = run(
        make_engine(runner=runner),
        make_request("a", prompt=first, max_tokens=6),
        make_request("b", prompt=second, max_tokens=6),
    )

    assert checker.text == {("a", 0): "🎈é", ("b", 0): "ñ🎈"}


# min_tokens


@pytest.mark.parametrize("min_tokens", [1, 2, 3])
def test_end_tokens_are_masked_until_min_tokens(min_tokens: int) -> None:
    # Where the end token is masked, the scripted runner takes token 0.
    def script(tokens: Sequence[int]) -> int:
        return END

    checker = run(make_engine(runner=ScriptedRunner(script)), make_request(min_tokens=min_tokens))

    assert checker.tokens[("r", 0)] == [0] * min_tokens + [END]


def test_stop_tokens_are_masked_until_min_tokens() -> None:
    request = make_request(min_tokens=2, stop_token_ids=(66,))

    checker = run(make_engine([65, 66, 66, 66]), request)

    assert checker.tokens[("r", 0)] == [65, 0, 0, 0, 0][:2] + checker.tokens[("r", 0)][2:]
    assert finished(checker).usage.completion_tokens > 2


def test_stop_strings_count_from_min_tokens_on() -> None:
    checker = run(make_engine("ababab"), make_request(min_tokens=3, stop=("ab",)))

    # The third token begins nothing that counts; "ab" of the fourth and... fifth does.
    assert checker.text[("r", 0)] == "ab"
    assert finished(checker).usage.completion_tokens == 4


# Several answers


def test_each_of_n_answers_has_its_index_and_its_end() -> None:
    checker = run(make_engine(), make_request(n=3, max_tokens=4))

    assert set(checker.terminal) == {("r", 0), ("r", 1), ("r", 2)}
    assert [finished(checker, index=i).usage.completion_tokens for i in range(3)] == [4, 4, 4]


def test_each_of_n_answers_has_a_seed_of_its_own() -> None:
    runner = ScriptedRunner(SCRIPT)

    run(make_engine(runner=runner), make_request(n=3, seed=-5))

    seeds = [setup.seed for plan in runner.plans for setup in plan.joins]
    assert seeds == [choice_seed(-5, 0), choice_seed(-5, 1), choice_seed(-5, 2)]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_request_without_a_seed_draws_one() -> None:
    runner = ScriptedRunner(SCRIPT)

    run(make_engine(runner=runner), make_request("a"), make_request("b"))

    seeds = [setup.seed for plan in runner.plans for setup in plan.joins]
    assert seeds[0] != seeds[1]


def test_each_of_n_answers_has_a_constraint_of_its_own() -> None:
    request = Request(
        id="r", prompt=PROMPT, n=3, constraint=lambda: ListConstraint([[65, 66], [65, 67, 68]])
    )

    checker = run(make_engine(), request)

    assert [checker.tokens[("r", i)] for i in range(3)] == [[65, 66]] * 3


# Host code


def test_a_complete_constraint_ends_the_answer() -> None:
    request = Request(
        id="r", prompt=PROMPT, constraint=lambda: ScriptedConstraint(complete_after=3)
    )

    checker = run(make_engine("abcdef"), request)

    assert checker.text[("r", 0)] == "abc"
    assert (finished(checker).reason, finished(checker).stop) == ("stop", None)


def test_processors_see_exactly_the_generated_tokens_and_are_asked_once_each() -> None:
    seen: list[tuple[int, ...]] = []

    def processor(tokens: tuple[int, ...], logits: Any) -> Any:
        seen.append(tokens)
        return logits

    request = Request(
        id="r",
        prompt=PROMPT,
        params=SamplingParams(max_tokens=3),
        logits_processors=(processor,),
    )

    checker = run(make_engine("abcdef"), request, make_request("other", max_tokens=9))

    assert seen == [(), (97,), (97, 98)]
    assert checker.text[("r", 0)] == "abc"


def test_processors_are_called_in_order() -> None:
    def prefer(token: int, bonus: float) -> Any:
        def processor(tokens: tuple[int, ...], logits: Any) -> Any:
            return [value + bonus * (i == token) for i, value in enumerate(logits)]

        return processor

    request = Request(
        id="r",
        prompt=PROMPT,
        params=SamplingParams(max_tokens=1),
        logits_processors=(prefer(70, 5.0), prefer(71, 4.0)),
    )

    assert run(make_engine("a"), request).tokens[("r", 0)] == [70]


def test_logprobs_reach_the_events_of_requests_that_ask() -> None:
    engine = make_engine([65, 66])
    engine.add(make_request(max_tokens=1, logprobs=True, top_logprobs=2))

    token = next(event for event in pump(engine) if isinstance(event, TokenOut))

    assert token.logprob == 0.0
    assert token.top_logprobs == (TokenLogprob(65, 0.0), TokenLogprob(0, -9.0))


# What is refused


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (make_request(prompt=(1, VOCAB_SIZE)), "prompt"),
        (make_request(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
        (make_request(stop_token_ids=(1, VOCAB_SIZE)), "stop_token_ids"),
        (make_request(n=5), "n"),
    ],
)
def test_what_the_model_cannot_honour_is_refused_by_name(request_: Request, field: str) -> None:
    engine = make_engine(config=EngineConfig(max_queue=4))

    with pytest.raises(InvalidRequest) as refused:
        engine.add(request_)

    assert refused.value.field == field
    assert not engine.has_work


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    engine = make_engine(config=EngineConfig(context_length=3))

    with pytest.raises(PromptTooLong) as refused:
        engine.add(make_request())

    assert (refused.value.length, refused.value.limit) == (3, "at most 2 tokens")
    assert not engine.has_work


def test_without_a_tokenizer_text_is_refused_and_tokens_give_no_text() -> None:
    engine = Engine(ScriptedRunner(SCRIPT), clock=ManualClock())

    with pytest.raises(InvalidRequest, match="has no tokenizer"):
        engine.add(make_request(prompt="hello"))
    with pytest.raises(InvalidRequest, match="there is no tokenizer"):
        engine.add(make_request(stop=("x",)))
    checker = run(engine, make_request(max_tokens=4))

    assert checker.tokens[("r", 0)] == expected_tokens(SCRIPT, PROMPT, 4)
    assert checker.text[("r", 0)] == ""


def test_text_is_encoded_with_the_opening_token_once() -> None:
    runner = ScriptedRunner(SCRIPT)
    engine = make_engine(runner=runner, tokenizer=ByteTokenizer(opens=True))

    checker = run(engine, make_request(prompt="hi", max_tokens=2))

    assert runner.plans[0].joins[0].prompt == (BEGIN, 104, 105)
    assert finished(checker).usage.prompt_tokens == 3


def test_a_text_of_no_tokens_is_refused() -> None:
    class Deaf(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return []

    with pytest.raises(InvalidRequest, match="at least one token"):
        make_engine(tokenizer=Deaf()).add(make_request(prompt="hello"))


def test_a_prompt_whose_kv_exceeds_the_budget_is_refused_at_once() -> None:
    # A row of 128 tokens and its spare copy: 2,048 bytes.
    engine = make_engine(config=EngineConfig(kv_memory_bytes=2_048))

    with pytest.raises(OutOfMemory, match="the KV of 128 tokens exceeds the budget of 2048 bytes"):
        engine.add(make_request(prompt=(1,) * 128))
    engine.add(make_request(prompt=(1,) * 127))


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    engine = make_engine()
    engine.add(make_request(n=2, max_tokens=3))

    with pytest.raises(DuplicateRequest):
        engine.add(make_request())
    pump(engine)
    engine.add(make_request())

    assert engine.stats().num_requests == 2


def test_a_full_queue_takes_all_answers_of_a_request_or_none() -> None:
    engine = make_engine(config=EngineConfig(max_num_seqs=1, max_queue=3))
    engine.add(make_request("a", n=2))

    with pytest.raises(QueueFull) as refused:
        engine.add(make_request("b", n=2))

    assert (refused.value.waiting, refused.value.limit) == (2, 3)
    assert engine.stats().num_waiting == 2
    assert not engine.abort("b")
    assert engine.has_room
    engine.add(make_request("b"))
    assert not engine.has_room


def test_at_most_max_num_seqs_run_and_the_rest_finish_in_order() -> None:
    runner = ScriptedRunner(SCRIPT)
    engine = make_engine(runner=runner, config=EngineConfig(max_num_seqs=2, max_queue=4))
    refused = 0
    for number in range(20):
        try:
            engine.add(make_request(f"r{number}", prompt=(number,) * 4, max_tokens=5))
        except QueueFull:
            refused += 1

    events = pump(engine)

    ended = [event.request_id for event in events if isinstance(event, Finished)]
    assert refused == 16
    assert ended == ["r0", "r1", "r2", "r3"]
    assert max(len(plan.decodes) for plan in runner.plans) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_queue", 0),
        ("max_num_batched_tokens", 1),
        ("prefill_step_size", 0),
        ("chunked_prefill_tokens", -1),
        ("max_decode_stall_ms", 0.0),
        ("max_decode_stall_ms", float("nan")),
        ("ageing_seconds", 0),
        ("policy", "lifo"),
        ("kv_memory_bytes", 1),
        ("kv_memory_bytes", 1.5),
        ("context_length", 1),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        EngineConfig(**{field: value})

    assert refused.value.field == field


def test_a_step_too_small_for_its_rows_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"max_num_batched_tokens \(4\) must exceed"):
        EngineConfig(max_num_seqs=4, max_num_batched_tokens=4)


# Abort


def test_an_unknown_request_is_not_aborted() -> None:
    assert make_engine().abort("nobody") is False


def test_a_waiting_request_is_aborted_before_it_runs() -> None:
    runner = ScriptedRunner(SCRIPT)
    engine, checker = make_engine(runner=runner), EventChecker()
    engine.add(make_request())
    checker.accepted(make_request())

    assert engine.abort("r") is True
    assert engine.abort("r") is False
    pump(engine, checker)

    assert finished(checker).reason == "abort"
    assert finished(checker).usage == Usage(prompt_tokens=3, completion_tokens=0)
    assert runner.plans == []


def test_a_request_is_aborted_in_the_middle_of_its_prompt() -> None:
    runner = ScriptedRunner(SCRIPT)
    config = EngineConfig(prefill_step_size=4)
    engine, checker = make_engine(runner=runner, config=config), EventChecker()
    request = make_request(prompt=(5,) * 40)
    engine.add(request)
    checker.accepted(request)
    for _ in range(3):
        checker.feed(engine.step())
    assert runner.num_rows == 1

    assert engine.abort("r") is True
    pump(engine, checker)

    assert finished(checker).reason == "abort"
    assert checker.tokens[("r", 0)] == []
    assert runner.num_live == 0


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_request_is_aborted_while_it_decodes(steps: int) -> None:
    runner = ScriptedRunner(SCRIPT)
    engine, checker = make_engine(runner=runner), EventChecker()
    engine.add(make_request(max_tokens=50))
    checker.accepted(make_request())
    for _ in range(steps):
        checker.feed(engine.step())
    told = list(checker.tokens[("r", 0)])

    assert engine.abort("r") is True
    assert engine.abort("r") is False
    pump(engine, checker)

    assert checker.tokens[("r", 0)] == told == expected_tokens(SCRIPT, PROMPT, len(told))
    assert finished(checker).reason == "abort"
    assert runner.num_live == 0


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("victim", ["early", "late"])
@pytest.mark.parametrize("steps", range(14))
def test_a_request_is_aborted_between_any_two_steps(steps: int, victim: str, reuse: bool) -> None:
    runner = ScriptedRunner(SCRIPT)
    config = EngineConfig(prefill_step_size=8, chunked_prefill_tokens=8)
    engine, checker = make_engine(runner=runner, config=config), EventChecker()
    requests = {
        "early": make_request("early", max_tokens=30),
        "late": make_request("late", prompt=(5,) * 40, max_tokens=30),
    }
    engine.add(requests["early"])
    checker.accepted(requests["early"])
    for _ in range(3):
        checker.feed(engine.step())
    engine.add(requests["late"])
    checker.accepted(requests["late"])
    for _ in range(steps):
        checker.feed(engine.step())

    assert engine.abort(victim)
    checker.feed(engine.flush())
    assert finished(checker, victim).reason == "abort"
    if reuse:
        requests[victim] = make_request(victim, prompt=(7,) * 20, max_tokens=30)
        engine.add(requests[victim])
        checker.accepted(requests[victim])
    else:
        del requests[victim]
    pump(engine, checker)

    for id, request in requests.items():
        assert isinstance(request.prompt, tuple)
        assert checker.tokens[(id, 0)] == expected_tokens(SCRIPT, request.prompt, 30)
    assert runner.num_live == 0


def test_a_finished_request_is_not_aborted() -> None:
    engine = make_engine()
    run(engine, make_request(max_tokens=1))

    assert engine.abort("r") is False


def test_abort_ends_the_answers_that_have_not_ended() -> None:
    engine, checker = make_engine(config=EngineConfig(max_num_seqs=1)), EventChecker()
    request = make_request(n=3, max_tokens=4)
    engine.add(request)
    checker.accepted(request)
    while ("r", 0) not in checker.terminal:
        checker.feed(engine.step())

    assert engine.abort("r") is True
    pump(engine, checker)

    assert [finished(checker, index=i).reason for i in range(3)] == ["length", "abort", "abort"]


def test_an_aborted_id_can_be_used_at_once_and_aborted_again() -> None:
    runner = ScriptedRunner(SCRIPT)
    engine = make_engine(runner=runner)
    engine.add(make_request())
    engine.step()
    engine.abort("r")
    engine.add(make_request(prompt=(7, 7, 7, 7)))
    engine.abort("r")
    engine.add(make_request(prompt=(8, 8), max_tokens=2))

    events = pump(engine)

    ended = [event.reason for event in events if isinstance(event, Finished)]
    assert ended == ["abort", "abort", "length"]
    tokens = [event.token for event in events if isinstance(event, TokenOut)]
    assert tokens[-2:] == expected_tokens(SCRIPT, (8, 8), 2)
    assert runner.num_live == 0


def test_a_reused_id_is_not_told_of_its_predecessors_progress() -> None:
    engine = make_engine(config=EngineConfig(prefill_step_size=8))
    engine.add(make_request(prompt=(5,) * 100))
    engine.step()
    engine.step()
    engine.abort("r")
    engine.add(make_request(prompt=(6,) * 50, max_tokens=1))

    events = pump(engine)

    end = next(i for i, event in enumerate(events) if isinstance(event, Finished))
    progress = [event for event in events[end:] if isinstance(event, Progress)]
    assert [event.total for event in progress] == [50] * len(progress)
    assert [event.prefilled for event in progress] == [8, 16, 24, 32, 40, 48]


# Progress, timings, figures


def test_long_prompts_report_their_progress() -> None:
    engine = make_engine(config=EngineConfig(prefill_step_size=8))
    engine.add(make_request(prompt=(5,) * 20, max_tokens=1))

    progress = [event for event in pump(engine) if isinstance(event, Progress)]

    assert progress == [
        Progress(request_id="r", index=0, prefilled=8, total=20),
        Progress(request_id="r", index=0, prefilled=16, total=20),
    ]


def test_progress_is_not_told_again_after_a_preemption() -> None:
    # Two rows of 64 tokens and a spare copy, or one of 128: the second has to make place.
    runner = ScriptedRunner(SCRIPT, budget_bytes=2_048)
    config = EngineConfig(kv_memory_bytes=2_048, prefill_step_size=16)
    engine = make_engine(runner=runner, config=config)
    engine.add(make_request("a", prompt=(1,) * 40, max_tokens=50))
    engine.add(make_request("b", prompt=(2,) * 40, max_tokens=40))

    events = pump(engine)

    ends = {event.request_id: event for event in events if isinstance(event, Finished)}
    assert ends["b"].usage.preemptions == 1
    told = [e.prefilled for e in events if isinstance(e, Progress) and e.request_id == "b"]
    assert told == sorted(set(told))


def test_timings_say_where_the_time_went() -> None:
    clock = ManualClock(50.0)
    runner = ScriptedRunner(
        SCRIPT,
        clock=clock,
        prefill_cost=lambda num_tokens: 0.25 * num_tokens,
        decode_cost=lambda num_rows: 1.0,
    )
    engine, checker = make_engine(runner=runner, clock=clock), EventChecker()
    request = make_request(prompt=(1,) * 9, max_tokens=4)
    engine.add(request)
    checker.accepted(request)
    clock.advance(3.0)

    pump(engine, checker)

    # Queue 3, prefill of 8 tokens 2, then a second for each of four tokens.
    assert finished(checker).timings == Timings(
        queue=3.0, prefill=3.0, first_token=6.0, decode=3.0, total=9.0
    )


def test_a_reused_id_waits_in_the_queue_for_itself() -> None:
    clock = ManualClock()
    engine = make_engine(clock=clock)
    engine.add(make_request("early", max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.add(make_request("late", prompt=(5,) * 9))
    # The step that lets it in is planned, and put off for the events that are due.
    engine.step()
    engine.abort("late")
    engine.flush()
    request = make_request("late", prompt=(6,) * 9, max_tokens=1)
    engine.add(request)
    engine.step()
    clock.advance(5.0)

    late = [event for event in pump(engine) if event.request_id == "late"]

    end = late[-1]
    assert isinstance(end, Finished)
    assert end.timings.queue == 5.0


def test_a_request_that_never_ran_spent_its_time_in_the_queue() -> None:
    clock = ManualClock()
    engine, checker = make_engine(clock=clock), EventChecker()
    engine.add(make_request())
    checker.accepted(make_request())
    clock.advance(2.0)
    engine.abort("r")

    pump(engine, checker)

    assert finished(checker).timings == Timings(
        queue=2.0, prefill=0.0, first_token=2.0, decode=0.0, total=2.0
    )


def test_figures_add_up() -> None:
    clock = ManualClock(7.0)
    engine = make_engine(clock=clock)
    assert engine.stats().last_step is None
    engine.add(make_request("a", max_tokens=4))
    engine.add(make_request("b", max_tokens=6, n=2))
    engine.add(make_request("c"))
    engine.abort("c")

    pump(engine)

    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.kv_bytes) == (0, 0, 0)
    assert (stats.num_requests, stats.num_finished, stats.num_failed) == (3, 4, 0)
    assert (stats.prompt_tokens, stats.completion_tokens) == (12, 16)
    assert stats.last_step == 7.0


def test_observers_are_told_everything_in_order() -> None:
    observer, runner = RecordingObserver(), ScriptedRunner(SCRIPT)
    engine = Engine(runner, observers=[observer], clock=ManualClock())
    engine.add(make_request("a", max_tokens=2))

    events = pump(engine)

    assert observer.requests == ["a"]
    assert observer.events == events
    assert [plan for plan, _ in observer.steps] == [p for p in runner.plans if p.has_work]
    assert [sorted(r.sampled) for _, r in observer.steps[:2]] == [[("a", 0)], [("a", 0)]]


def test_an_observer_that_comes_later_is_told_the_rest() -> None:
    first, later = RecordingObserver(), RecordingObserver()
    engine = Engine(ScriptedRunner(SCRIPT), observers=[first], clock=ManualClock())
    engine.add(make_request("a", max_tokens=2))
    engine.observe(later)
    engine.add(make_request("b", max_tokens=2))

    events = pump(engine)

    assert (first.requests, later.requests) == (["a", "b"], ["b"])
    assert first.events == later.events == events


def test_the_next_step_is_submitted_before_the_last_ones_tokens_are_read() -> None:
    runner = ScriptedRunner(SCRIPT)

    run(make_engine(runner=runner), make_request(max_tokens=10))

    fed = [decode.token for plan in runner.plans for decode in plan.decodes]
    assert fed.count(None) >= 8


def test_requests_with_host_code_are_not_looked_ahead() -> None:
    runner = ScriptedRunner(SCRIPT)
    request = Request(
        id="r",
        prompt=PROMPT,
        params=SamplingParams(max_tokens=5),
        logits_processors=(lambda tokens, logits: logits,),
    )

    run(make_engine(runner=runner), request)

    fed = [decode.token for plan in runner.plans for decode in plan.decodes]
    assert fed == [3, *expected_tokens(SCRIPT, PROMPT, 4)]


# Deadlines


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_a_deadline_ends_a_request_in_any_state(steps: int) -> None:
    clock, runner = ManualClock(100.0), ScriptedRunner(SCRIPT)
    config = EngineConfig(prefill_step_size=8)
    engine, checker = make_engine(runner=runner, config=config, clock=clock), EventChecker()
    request = Request(id="r", prompt=(1,) * 20, params=SamplingParams(max_tokens=99), deadline=2.5)
    engine.add(request)
    checker.accepted(request)
    for _ in range(steps):
        checker.feed(engine.step())
    clock.advance(2.4)
    checker.feed(engine.step())
    assert not checker.terminal
    clock.advance(0.2)

    pump(engine, checker)

    assert failed(checker).code == "deadline_exceeded"
    assert failed(checker).message == "request r failed: its deadline of 2.5 s passed"
    assert runner.num_live == 0


def test_what_was_over_of_a_deadline_at_acceptance_counts() -> None:
    clock = ManualClock()
    engine = Engine(ScriptedRunner(SCRIPT), clock=clock)
    engine.add(Request(id="late", prompt=(1,), deadline=2.5, elapsed=2.0))
    engine.add(Request(id="too late", prompt=(1,), deadline=2.5, elapsed=3.0))
    clock.advance(0.25)
    assert [event.request_id for event in engine.step() if isinstance(event, Failed)] == [
        "too late"
    ]
    clock.advance(0.5)
    (ended,) = [event for event in pump(engine) if isinstance(event, Failed)]
    assert ended.message == "request late failed: its deadline of 2.5 s passed"


def test_a_deadline_spares_the_neighbours() -> None:
    clock = ManualClock()
    engine, checker = make_engine(clock=clock), EventChecker()
    hasty = Request(id="hasty", prompt=(9, 9), params=SamplingParams(max_tokens=99), deadline=1)
    for request in (hasty, make_request(max_tokens=30)):
        engine.add(request)
        checker.accepted(request)
    checker.feed(engine.step())
    clock.advance(1.0)

    pump(engine, checker)

    assert failed(checker, "hasty").code == "deadline_exceeded"
    assert checker.tokens[("r", 0)] == expected_tokens(SCRIPT, PROMPT, 30)


def test_every_deadline_is_kept_whichever_comes_first() -> None:
    clock = ManualClock()
    engine = make_engine(clock=clock)
    for id, deadline in (("c", 3.0), ("a", 1.0), ("d", None), ("b", 2.0)):
        params = SamplingParams(max_tokens=None)
        engine.add(Request(id=id, prompt=PROMPT, params=params, deadline=deadline))

    ended: list[tuple[float, str]] = []
    for _ in range(8):
        events = engine.step()
        ended += [(clock.now(), event.request_id) for event in events if isinstance(event, Failed)]
        clock.advance(0.5)

    assert ended == [(1.0, "a"), (2.0, "b"), (3.0, "c")]
    assert engine.abort("d")


# Memory


def test_a_row_that_makes_place_goes_on_from_its_own_tokens() -> None:
    # Two rows of 64 tokens and a spare copy, or one of 128.
    runner = ScriptedRunner(SCRIPT, budget_bytes=2_048)
    engine = make_engine(runner=runner, config=EngineConfig(kv_memory_bytes=2_048))
    first = make_request("a", prompt=(1,) * 40, max_tokens=50)
    second = make_request("b", prompt=(2,) * 40, max_tokens=40)

    checker = run(engine, first, second)

    assert checker.tokens[("a", 0)] == expected_tokens(SCRIPT, (1,) * 40, 50)
    assert checker.tokens[("b", 0)] == expected_tokens(SCRIPT, (2,) * 40, 40)
    assert finished(checker, "a").usage.preemptions == 0
    assert finished(checker, "b").usage.preemptions == 1
    assert engine.stats().num_preemptions == 1


def test_a_request_that_outgrows_the_budget_alone_fails_alone() -> None:
    # At most 128 tokens in one row.
    runner = ScriptedRunner(SCRIPT, budget_bytes=2_048)
    engine = make_engine(runner=runner, config=EngineConfig(kv_memory_bytes=2_048))
    greedy = make_request("greedy", prompt=(1,) * 100, max_tokens=100)
    modest = make_request("modest", prompt=(2,) * 20, max_tokens=30)

    checker = run(engine, greedy, modest)

    assert failed(checker, "greedy").code == "out_of_memory"
    assert (
        "more than 128 tokens exceeds the budget of 2048 bytes" in failed(checker, "greedy").message
    )
    # All tokens that the row had room for, and the one that followed them.
    assert checker.tokens[("greedy", 0)] == expected_tokens(SCRIPT, (1,) * 100, 29)
    assert checker.tokens[("modest", 0)] == expected_tokens(SCRIPT, (2,) * 20, 30)
    assert finished(checker, "modest").reason == "length"


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_an_answer_may_end_with_the_last_token_that_memory_allows(reason: str) -> None:
    prompt = (1,) * 100
    body = expected_tokens(SCRIPT, prompt, 28)
    script = answers({prompt: [*body, END if reason == "stop" else 7]})
    runner = ScriptedRunner(script, budget_bytes=2_048)
    engine = make_engine(runner=runner, config=EngineConfig(kv_memory_bytes=2_048))
    max_tokens = 29 if reason == "length" else 90

    checker = run(engine, make_request(prompt=prompt, max_tokens=max_tokens))

    assert finished(checker).reason == reason
    assert finished(checker).usage.completion_tokens == 29


# Closing


def test_closing_ends_everything_and_frees_the_model() -> None:
    runner = ScriptedRunner(SCRIPT)
    config = EngineConfig(max_num_seqs=1)
    engine, checker = make_engine(runner=runner, config=config), EventChecker()
    for id in ("a", "b"):
        engine.add(make_request(id, max_tokens=50))
        checker.accepted(make_request(id))
    for _ in range(4):
        checker.feed(engine.step())

    checker.feed(engine.close())

    assert finished(checker, "a").reason == finished(checker, "b").reason == "abort"
    assert runner.closed
    assert engine.close() == []
    with pytest.raises(EngineClosed):
        engine.add(make_request())
    with pytest.raises(EngineClosed):
        engine.step()
    assert engine.abort("a") is False


def test_closing_an_idle_engine_tells_nothing() -> None:
    runner = ScriptedRunner(SCRIPT)

    assert make_engine(runner=runner).close() == []
    assert runner.closed


def test_nothing_of_a_request_is_kept_after_its_end() -> None:
    def live() -> int:
        gc.collect()
        return sum(isinstance(found, Row | Answer) for found in gc.get_objects())

    engine, before = make_engine(), live()
    for round in range(3):
        run(engine, *(make_request(f"{round}-{i}", max_tokens=3 + i) for i in range(5)))

    assert live() == before
    assert not engine.has_work


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_tokenizer_that_cannot_decode_an_answer_fails_it_alone(at: int) -> None:
    class Picky(ByteTokenizer):
        def decode(self, tokens: Sequence[int]) -> str:
            if 0xE2 in tokens:
                raise ValueError("what is this?")
            return super().decode(tokens)

    bad = [65] * at + [0xE2]
    runner = ScriptedRunner(answers({PROMPT: bad, (9, 9): b"hello"}))
    engine = make_engine(runner=runner, tokenizer=Picky())

    checker = run(
        engine,
        make_request(max_tokens=at + 1),
        make_request("other", prompt=(9, 9), max_tokens=5),
    )

    assert failed(checker).code == "step_failed"
    assert failed(checker).message == "request r failed: ValueError: what is this?"
    assert failed(checker).usage.completion_tokens == at
    assert checker.text[("other", 0)] == "hello"


def test_a_context_beyond_the_models_is_refused_at_start() -> None:
    with pytest.raises(Unsupported, match="context_length: got 32769, the model has 32768"):
        make_engine(config=EngineConfig(context_length=32_769))


def test_special_tokens_add_no_text() -> None:
    checker = run(make_engine([65, PAD, 66, BEGIN]), make_request(max_tokens=4))

    assert checker.text[("r", 0)] == "AB"


def test_boundaries_are_of_use_where_states_cannot_be_cut() -> None:
    plain, stateful = ScriptedRunner(SCRIPT), ScriptedRunner(SCRIPT, spec=STATEFUL)
    assert not Engine(plain).keeps_checkpoints
    assert not Engine(stateful).keeps_checkpoints
    assert not Engine(plain, store=RecordingStore()).keeps_checkpoints
    assert Engine(stateful, store=RecordingStore()).keeps_checkpoints
