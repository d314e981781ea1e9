"""An engine that drafts: who is asked, what is measured, what is counted, what is refused."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from treadle_core import Completion, Engine, Request, SamplingParams, Unsupported, collect
from treadle_core.drafting import PENDING, DraftRoom, Proposal
from treadle_core.layers import ModelSpec, Recurrent
from treadle_core.testing import (
    SMALL_SPEC,
    ByteTokenizer,
    ManualClock,
    RecordingStore,
    ScriptedRunner,
    expected_tokens,
    hashed,
)
from treadle_core.testing.drafting import (
    FailingDrafter,
    OracleDrafter,
    SteadyController,
    WrongDrafter,
)

SCRIPT = hashed(200)
RECURRENT = replace(SMALL_SPEC, layers=(Recurrent(shapes=((1,),), dtypes=("float32",)),))
ALONE = replace(SMALL_SPEC, batched=False)


def truth(tokens: Sequence[int], num: int) -> list[int]:
    return expected_tokens(SCRIPT, tokens, num)


class Rhythm(SteadyController):
    """Asks for drafts, or not, as it is told for each time it is asked."""

    def __init__(self, num_tokens: int, *told: bool) -> None:
        super().__init__(num_tokens)
        self.told = list(told)

    def asks(self) -> bool:
        return self.told[min(len(self.steps), len(self.told) - 1)]


def engine_of(
    drafter: Any,
    controller: Any,
    spec: ModelSpec = SMALL_SPEC,
    *,
    longest: int = 3,
    store: RecordingStore | None = None,
    **options: Any,
) -> Engine:
    clock = ManualClock(5.0)
    runner = ScriptedRunner(
        SCRIPT,
        spec=spec,
        clock=clock,
        prefill_cost=lambda num: 10.0,
        decode_cost=lambda num: 0.25,
        max_draft_tokens=longest,
    )
    return Engine(
        runner,
        tokenizer=ByteTokenizer(),
        clock=clock,
        drafter=drafter,
        controller=controller,
        store=store,
        **options,
    )


def answer(engine: Engine, max_tokens: int, stop: Sequence[int] = (), **more: Any) -> Completion:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=tuple(stop))
    engine.add(Request(id="a", prompt=(1, 2, 3), params=params, **more))
    return finish(engine)


def finish(engine: Engine) -> Completion:
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    return collect(events)["a", 0]


def test_right_drafts_make_few_forwards_of_many_tokens() -> None:
    controller = Rhythm(3, True)
    engine = engine_of(OracleDrafter(truth), controller)

    found = answer(engine, 14)

    assert found.tokens == truth((1, 2, 3), 14)
    assert found.usage is not None
    drafts = found.usage.drafts
    assert drafts is not None
    # The first token has no draft; three times four tokens; and the last has no room for one.
    assert (drafts.verifications, drafts.attempted, drafts.accepted) == (3, 9, 9)
    assert drafts.bypassed == {"off": 1, "no_room": 1}
    assert engine.stats().drafts == drafts
    assert controller.left == [("a", 0)]


def test_the_controller_hears_what_steps_take_and_nothing_of_prompts() -> None:
    controller = Rhythm(3, True)

    answer(engine_of(WrongDrafter(truth), controller), 4)

    assert [step.seconds for step in controller.steps] == [0.25] * len(controller.steps)
    assert [step.width for step in controller.steps] == [3, 2]
    assert all(step.asked for step in controller.steps)
    assert [row.accepted for step in controller.steps for row in step.rows] == [0, 0]


def test_rows_that_the_drafter_was_not_asked_for_are_told_apart() -> None:
    class FirstOnly(SteadyController):
        def limits(self, rows: Sequence[DraftRoom]) -> list[int]:
            return [2 * (row.key[0] == "a") for row in rows]

    controller = FirstOnly(2)
    engine = engine_of(WrongDrafter(truth), controller)
    engine.add(Request(id="b", prompt=(4, 5), params=SamplingParams(max_tokens=6)))

    answer(engine, 6)

    asked = {
        (row.key[0], row.asked) for step in controller.steps if step.asked for row in step.rows
    }
    assert asked == {("a", True), ("b", False)}
    total = engine.stats().drafts
    assert total is not None
    assert set(total.bypassed) == {"off", "no_room"}


def test_a_step_that_fills_the_pipeline_is_not_measured() -> None:
    controller = Rhythm(1, True, False)

    answer(engine_of(WrongDrafter(truth), controller), 8)

    # First token, one draft, five plain steps of which one fills the pipeline, and the last.
    assert [step.asked for step in controller.steps] == [True, False, False, False, False, False]


def test_rows_that_never_pipeline_are_measured_all_the_same() -> None:
    controller = Rhythm(3, False)

    found = answer(
        engine_of(WrongDrafter(truth), controller), 6, logits_processors=(lambda tokens, x: x,)
    )

    # All but the first token, which came behind the prompt, and the one after it.
    assert len(controller.steps) == 4
    assert found.usage is not None
    assert found.usage.drafts is not None
    assert found.usage.drafts.bypassed == {"unsupported": 6}


def test_a_drafter_that_raises_is_dropped_and_the_answer_goes_on() -> None:
    engine = engine_of(FailingDrafter(truth, at=1), Rhythm(3, True))

    found = answer(engine, 20)

    assert found.tokens == truth((1, 2, 3), 20)
    total = engine.stats().drafts
    assert total is not None
    assert (total.verifications, total.failures) == (1, 1)
    assert total.bypassed["failed"] > 10


@pytest.mark.parametrize(
    ("spec", "why"), [(ALONE, "its rows run one at a time"), (SMALL_SPEC, "was loaded for none")]
)
def test_a_model_that_verifies_no_drafts_refuses_a_drafter(spec: ModelSpec, why: str) -> None:
    with pytest.raises(Unsupported, match=rf"^no drafts can be verified with scripted: .*{why}$"):
        engine_of(OracleDrafter(truth), Rhythm(3, True), spec, longest=0)


@pytest.mark.parametrize("place", range(5))
def test_nothing_is_verified_behind_an_end_and_the_whole_answer_is_stored(place: int) -> None:
    store = RecordingStore()
    engine = engine_of(OracleDrafter(truth), Rhythm(3, True), RECURRENT, store=store)
    expected = truth((1, 2, 3), 4 + place)

    found = answer(engine, 30, stop=expected[-1:])

    assert found.tokens == expected
    assert found.usage is not None
    assert found.usage.drafts is not None
    assert found.usage.drafts.rejected == 0
    # Where the end was drafted, the row has fed it already.
    whole = [1, 2, 3, *expected]
    assert list(max(store.inserted, key=len)) in (whole, whole[:-1])


def test_an_answer_that_ends_within_what_was_accepted_stores_no_state_of_more_tokens() -> None:
    store = RecordingStore()
    engine = engine_of(OracleDrafter(truth), Rhythm(3, True), RECURRENT, store=store)
    ends = truth((1, 2, 3), 6)
    text = ByteTokenizer().decode(ends[4:6])
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=(text,))
    engine.add(Request(id="a", prompt=(1, 2, 3), params=params))

    found = finish(engine)

    assert found.reason == "stop"
    assert found.tokens == ends
    assert store.inserted == [(1, 2)]


def test_an_abort_while_a_draft_is_verified_stores_no_state_of_more_tokens() -> None:
    store = RecordingStore()
    engine = engine_of(OracleDrafter(truth), Rhythm(3, True), RECURRENT, store=store)
    params = SamplingParams(max_tokens=30, temperature=0.0)
    engine.add(Request(id="a", prompt=(1, 2, 3), params=params))
    events = [event for _ in range(3) for event in engine.step()]

    engine.abort("a")
    while engine.has_work:
        events += engine.step()

    # Of the step in flight nothing was told, and it is not known how far the row is.
    found = collect(events)["a", 0]
    assert found.tokens == truth((1, 2, 3), len(found.tokens))
    assert store.inserted == [(1, 2)]


@pytest.mark.parametrize(
    "given", [(OracleDrafter(truth), None), (None, Rhythm(3, True))], ids=["drafter", "controller"]
)
def test_a_drafter_without_its_controller_is_refused(given: tuple[Any, Any]) -> None:
    with pytest.raises(Unsupported, match="need each other"):
        engine_of(*given)


def test_nobody_counts_drafts_where_nobody_drafts() -> None:
    engine = engine_of(None, None)

    found = answer(engine, 3)

    assert found.usage is not None
    assert found.usage.drafts is None
    assert engine.stats().drafts is None


def test_a_lossy_engine_says_what_was_drafted_and_that_it_does() -> None:
    engine = engine_of(WrongDrafter(truth), Rhythm(3, True), lossy=True)

    found = answer(engine, 9)

    assert found.tokens != truth((1, 2, 3), 9)
    stats = engine.stats()
    assert stats.lossy
    assert stats.drafter == "oracle"
    assert stats.drafts is not None
    assert stats.drafts.accepted == stats.drafts.attempted == stats.drafts.lossy == 6
    assert found.usage is not None
    assert found.usage.drafts is not None
    assert found.usage.drafts.lossy == 6


def test_an_engine_is_not_lossy_by_accident() -> None:
    engine = engine_of(WrongDrafter(truth), Rhythm(3, True))

    found = answer(engine, 9)

    assert found.tokens == truth((1, 2, 3), 9)
    stats = engine.stats()
    assert not stats.lossy
    assert stats.drafts is not None
    assert stats.drafts.lossy == 0
    assert not any(plan.lossy for plan in engine_plans(engine))
    with pytest.raises(Unsupported, match="lossy means nothing without a drafter"):
        engine_of(None, None, lossy=True)


def engine_plans(engine: Engine) -> list[Any]:
    runner: Any = engine._runner
    return runner.plans


class Slow(OracleDrafter):
    """Has to read a row before it can draft for it: three times it is asked in vain."""

    def __init__(self) -> None:
        super().__init__(truth)
        self._left = 3

    def propose(self, rooms: Sequence[DraftRoom]) -> list[Proposal]:
        self._left -= 1
        return super().propose(rooms) if self._left < 0 else [PENDING] * len(rooms)


def test_a_row_that_the_drafter_still_reads_decodes_plainly() -> None:
    controller = Rhythm(3, True)
    engine = engine_of(Slow(), controller)

    found = answer(engine, 12)

    assert found.tokens == truth((1, 2, 3), 12)
    assert found.usage is not None
    assert found.usage.drafts is not None
    assert found.usage.drafts.bypassed["pending"] == 3
    assert [row.pending for step in controller.steps for row in step.rows][:4] == [
        *[True] * 3,
        False,
    ]
