"""Plans: exact, deterministic, within every bound, and fair to long and short prompts."""

from collections.abc import Sequence as Tokens

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from treadle_core.engine import Engine, EngineConfig
from treadle_core.errors import QueueFull
from treadle_core.events import Event, Failed, Finished, TokenOut
from treadle_core.kv_layout import KvLayout
from treadle_core.layers import FullAttention
from treadle_core.pacing import FixedChunk
from treadle_core.plan import (
    Close,
    Decode,
    Open,
    Plan,
    Prefill,
    Promote,
    Resize,
    Sampled,
    StepResult,
    Transfer,
)
from treadle_core.request import Request, SamplingParams
from treadle_core.scheduler import Limits, Scheduler
from treadle_core.sequence import Sequence, Status
from treadle_core.testing import (
    SMALL_SPEC,
    EventChecker,
    Fault,
    ManualClock,
    ScriptedRunner,
    expected_tokens,
    hashed,
    pump,
)
from treadle_core.waiting import WaitingQueue
from treadle_core.waiting import priority as by_priority

SCRIPT = hashed(250)
LAYER = FullAttention(heads=1, key_dim=1, value_dim=1, dtype="float32")


# One plan after the other


def make_scheduler(*, chunk: int = 64, **limits: int) -> Scheduler:
    layout = KvLayout([LAYER], budget_bytes=None, max_rows=8, context_length=4_096)
    return Scheduler(
        layout=layout, chunk=FixedChunk(chunk), queue=WaitingQueue(), limits=Limits(**limits)
    )


def make_sequence(order: int, length: int, max_tokens: int = 5) -> Sequence:
    prompt = tuple((order + i) % 250 for i in range(length))
    return Sequence(
        request=Request(id=f"r{order}", prompt=prompt, params=SamplingParams()),
        index=0,
        prompt=prompt,
        max_tokens=max_tokens,
        arrival=0.0,
        order=order,
        seed=order,
    )


def result_of(plan: Plan, token: int = 9) -> StepResult:
    sampled = {decode.key: (Sampled(token),) for decode in plan.decodes}
    return StepResult(number=plan.number, sampled=sampled, failures={}, seconds=0.0)


def take(scheduler: Scheduler, plan: Plan, token: int = 9) -> None:
    """Read a step, as the engine does."""
    for outcome in scheduler.apply(plan, result_of(plan, token)):
        for sampled in outcome.sampled:
            outcome.sequence.take(sampled.token)


def test_a_scheduler_without_work_plans_nothing() -> None:
    scheduler = make_scheduler()

    plan = scheduler.plan(0.0)

    assert not scheduler.has_work
    assert plan.is_empty
    assert not plan.has_work


def test_a_short_prompt_is_prefilled_and_decodes_in_its_first_plan() -> None:
    scheduler = make_scheduler()
    scheduler.add([make_sequence(1, 5)])

    plan = scheduler.plan(0.0)

    key = ("r1", 0)
    assert [setup.key for setup in plan.joins] == [key]
    assert plan.work == (
        Resize(0, 1, 256),
        Open(0, 0),
        Prefill(key=key, group=0, row=0, tokens=(1, 2, 3, 4), start=0),
        Promote(0, 0, 0, 4, 4),
    )
    assert plan.decodes == (Decode(key=key, group=0, row=0, start=4, num_output=0, token=5),)


def test_the_next_plan_feeds_the_token_that_is_still_in_flight() -> None:
    scheduler = make_scheduler()
    scheduler.add([make_sequence(1, 5)])
    scheduler.plan(0.0)

    plan = scheduler.plan(0.0)

    key = ("r1", 0)
    assert plan.work == ()
    assert plan.decodes == (Decode(key=key, group=0, row=0, start=5, num_output=1, token=None),)


def test_a_token_that_was_read_is_fed_by_its_id() -> None:
    scheduler = make_scheduler()
    scheduler.add([make_sequence(1, 5)])
    plan = scheduler.plan(0.0)
    take(scheduler, plan, token=42)

    assert scheduler.plan(0.0).decodes[0].token == 42


def test_a_row_leaves_once_its_last_token_is_in_flight() -> None:
    scheduler = make_scheduler()
    scheduler.add([make_sequence(1, 5, max_tokens=2)])
    first, second, third = (scheduler.plan(0.0) for _ in range(3))

    assert len(first.decodes) == len(second.decodes) == 1
    assert third.leaves == (("r1", 0),)
    assert third.work == (Close(0, 0, ()), Resize(0, 0, 0))
    assert not third.has_work
    assert scheduler.num_running == 1


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    scheduler = make_scheduler()
    scheduler.add([make_sequence(1, 1)])

    plan = scheduler.plan(0.0)

    assert plan.prefills == ()
    assert plan.decodes == (Decode(key=("r1", 0), group=0, row=0, start=0, num_output=0, token=1),)


def test_a_long_prompt_goes_in_chunks_that_follow_each_other() -> None:
    scheduler = make_scheduler(prefill_step_size=100)
    scheduler.add([make_sequence(1, 250)])

    plans = [scheduler.plan(0.0) for _ in range(3)]

    chunks = [(p.start, len(p.tokens)) for plan in plans for p in plan.prefills]
    assert chunks == [(0, 100), (100, 100), (200, 49)]
    assert [len(plan.decodes) for plan in plans] == [0, 0, 1]


def test_what_finishes_late_costs_one_row_of_one_step() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(1, 5)
    scheduler.add([sequence])
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    take(scheduler, first)

    scheduler.finish(sequence)
    third = scheduler.plan(0.0)

    assert third.decodes == ()
    assert third.leaves == (("r1", 0),)
    assert scheduler.apply(second, result_of(second)) == []
    assert not scheduler.has_work


def test_a_full_queue_takes_nothing() -> None:
    scheduler = make_scheduler(max_queue=2)
    scheduler.add([make_sequence(1, 5)])

    with pytest.raises(QueueFull):
        scheduler.add([make_sequence(2, 5), make_sequence(3, 5)])

    assert scheduler.num_waiting == 1


def test_after_a_failure_suspects_run_alone_until_they_get_a_token() -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(order, 4) for order in (1, 2, 3)]
    scheduler.add(sequences)
    plans = [scheduler.plan(0.0) for _ in range(4)]
    assert len(plans[-1].decodes) == 3
    for plan in plans[:-1]:
        take(scheduler, plan)

    assert scheduler.recover(plans[-1]) == []

    alone: list[list[str]] = []
    for _ in range(3):
        plan = scheduler.plan(0.0)
        alone.append([key[0] for key in plan.keys])
        take(scheduler, plan)
    assert alone == [["r1"], ["r2"], ["r3"]]
    assert not any(sequence.suspect for sequence in sequences)


def test_who_fails_alone_after_a_failure_is_guilty() -> None:
    scheduler = make_scheduler()
    first, second = make_sequence(1, 4), make_sequence(2, 4)
    scheduler.add([first, second])
    for plan in [scheduler.plan(0.0) for _ in range(2)]:
        take(scheduler, plan)
    scheduler.recover(scheduler.plan(0.0))

    assert scheduler.recover(scheduler.plan(0.0)) == [first]
    assert first.status is Status.WAITING


# Whole workloads


def make_request(
    id: str, length: int, *, max_tokens: int = 4, priority: int = 0, seed: int = 0
) -> Request:
    prompt = tuple((seed + 7 * i + i * i) % 250 for i in range(length))
    return Request(
        id=id, prompt=prompt, params=SamplingParams(max_tokens=max_tokens), priority=priority
    )


class Workload:
    """An engine whose steps are counted: in which step did who get what."""

    def __init__(self, config: EngineConfig | None = None, runner: ScriptedRunner | None = None):
        self.runner = runner or ScriptedRunner(SCRIPT)
        self.clock = ManualClock()
        self.engine = Engine(self.runner, config=config, clock=self.clock)
        self.checker = EventChecker()
        self.tokens_at: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)
            self.checker.accepted(request)
            self.requests[request.id] = request

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.note(self.engine.step())

    def finish(self, most: int = 5_000) -> None:
        """Run to the end; everybody gets what a runner alone gives."""
        pump(self.engine, most=most, each=self.note)
        self.checker.finish()
        assert self.runner.num_live == 0
        for id, request in self.requests.items():
            assert isinstance(request.prompt, tuple)
            found = self.checker.tokens[(id, 0)]
            assert found == expected_tokens(SCRIPT, request.prompt, len(found))

    def note(self, events: Tokens[Event]) -> None:
        self.checker.feed(events)
        for event in events:
            if isinstance(event, TokenOut):
                self.tokens_at.setdefault(event.request_id, []).append(len(self.runner.plans))

    def first_token(self, id: str) -> int:
        """The step that gave the first token."""
        return self.tokens_at[id][0]

    def chunks(self, id: str) -> list[int]:
        return [
            len(p.tokens) for plan in self.runner.plans for p in plan.prefills if p.key[0] == id
        ]

    def steps_with(self, id: str) -> list[int]:
        return [i for i, plan in enumerate(self.runner.plans) if id in {k[0] for k in plan.keys}]


CHUNKED = EngineConfig(prefill_step_size=64, chunked_prefill_tokens=32)


def test_a_decoding_row_gets_a_token_in_every_step_while_a_long_prompt_is_prefilled() -> None:
    workload = Workload(CHUNKED)
    workload.add(make_request("stream", 10, max_tokens=200))
    workload.step(5)
    workload.add(make_request("long", 2_000, seed=1))

    workload.finish()

    prefilling = workload.steps_with("long")
    streaming = workload.steps_with("stream")
    assert len(workload.chunks("long")) == -(-1_999 // 32)
    assert set(prefilling[:63]) <= set(streaming)
    # One token in each of them: the row decodes in every step from its first to its last.
    assert streaming == list(range(streaming[0], streaming[0] + 200))


def test_a_short_prompt_behind_a_long_one_does_not_wait_for_its_end() -> None:
    workload = Workload(CHUNKED)
    workload.add(make_request("stream", 10, max_tokens=200))
    workload.step(5)
    workload.add(make_request("long", 2_000, seed=1))
    workload.step(5)
    workload.add(make_request("short", 20, seed=2))
    arrival = len(workload.runner.plans)

    workload.finish()

    assert workload.first_token("short") <= arrival + 4
    assert workload.first_token("long") > workload.first_token("short") + 20


def test_a_short_prompt_behind_a_long_one_does_not_wait_even_if_nobody_decodes() -> None:
    workload = Workload(CHUNKED)
    workload.add(make_request("long", 2_000, seed=1))
    workload.step(3)
    workload.add(make_request("short", 20, seed=2))
    arrival = len(workload.runner.plans)

    workload.finish()

    assert workload.first_token("short") <= arrival + 4
    assert workload.first_token("long") > workload.first_token("short") + 20


def test_a_short_prompt_behind_several_long_ones_does_not_wait_for_their_ends() -> None:
    workload = Workload(CHUNKED)
    workload.add(make_request("stream", 10, max_tokens=400))
    workload.step(5)
    workload.add(*(make_request(f"long{i}", 2_000, seed=i) for i in range(3)))
    workload.step(5)
    workload.add(make_request("short", 20, seed=9))
    arrival = len(workload.runner.plans)

    workload.finish()

    assert workload.first_token("short") <= arrival + 10


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    workload = Workload(CHUNKED)
    workload.add(make_request("long", 1_000, seed=1))
    for number in range(200):
        workload.add(make_request(f"short{number}", 30, max_tokens=2, seed=number))
        workload.step()
        if "long" in workload.tokens_at:
            break

    # Alone it takes 16 to 32 steps; with a short one arriving in every step, twice as many.
    assert workload.first_token("long") <= 70
    workload.finish()


def test_many_prompts_at_once_get_their_first_tokens_one_after_the_other() -> None:
    workload = Workload(CHUNKED)
    workload.add(*(make_request(f"r{i}", 200, max_tokens=20, seed=i) for i in range(8)))

    workload.finish()

    firsts = [workload.first_token(f"r{i}") for i in range(8)]
    # 199 tokens in chunks of 64 with nobody decoding, in chunks of 32 afterwards.
    assert firsts[0] <= 5
    assert firsts == sorted(firsts)
    assert len(set(firsts)) == 8
    assert firsts[-1] <= 5 + 7 * 9


@pytest.mark.parametrize("num_prompts", [1, 2, 4, 8])
def test_steps_to_prefill_grow_no_faster_than_the_prompts(num_prompts: int) -> None:
    workload = Workload(EngineConfig(prefill_step_size=256, chunked_prefill_tokens=128))
    workload.add(*(make_request(f"r{i}", 1_000, max_tokens=1, seed=i) for i in range(num_prompts)))

    workload.finish()

    # Each takes four large chunks, or eight while others decode.
    assert len(workload.runner.plans) <= 2 + 9 * num_prompts
    assert workload.first_token("r0") <= 5


def test_short_prompts_share_a_step_when_somebody_decodes() -> None:
    workload = Workload(EngineConfig(chunked_prefill_tokens=100))
    workload.add(make_request("stream", 10, max_tokens=50))
    workload.step(2)
    workload.add(*(make_request(f"r{i}", 20, seed=i) for i in range(5)))
    before = len(workload.runner.plans)

    workload.finish()

    assert [workload.first_token(f"r{i}") for i in range(5)] == [before + 1] * 5


def test_at_most_max_num_seqs_have_rows() -> None:
    workload = Workload(EngineConfig(max_num_seqs=3, max_num_batched_tokens=64))
    workload.add(*(make_request(f"r{i}", 10 + i, max_tokens=5 + i, seed=i) for i in range(10)))

    workload.finish()

    assert max(len(plan.keys) for plan in workload.runner.plans) == 3


def test_equal_workloads_give_equal_plans() -> None:
    def run() -> list[Plan]:
        workload = Workload(EngineConfig(kv_memory_bytes=4_096, prefill_step_size=32))
        workload.add(*(make_request(f"r{i}", 20 + i, max_tokens=30, seed=i) for i in range(6)))
        workload.finish()
        return [replace(plan, joins=()) for plan in workload.runner.plans]

    assert run() == run()


configs = st.builds(
    EngineConfig,
    max_num_seqs=st.sampled_from([1, 2, 5]),
    max_num_batched_tokens=st.sampled_from([6, 7, 20, 64, 500]),
    prefill_step_size=st.sampled_from([1, 5, 64, 512]),
    chunked_prefill_tokens=st.sampled_from([0, 1, 16, 64]),
    max_decode_stall_ms=st.sampled_from([None, 20.0]),
    kv_memory_bytes=st.sampled_from([None, 2_048, 3_584, 8_192]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
sizes = st.tuples(
    st.sampled_from([1, 2, 10, 63, 64, 65, 100, 120]),
    st.sampled_from([1, 2, 8, 64]),
    st.integers(-1, 1),
    st.sampled_from([0, 0, 1, 5]),
)


@given(config=configs, workload=st.lists(sizes, min_size=1, max_size=8), batched=st.booleans())
@settings(deadline=None, max_examples=150)
def test_every_workload_ends_within_its_bounds(
    config: EngineConfig, workload: list[tuple[int, int, int, int]], batched: bool
) -> None:
    run = Workload(
        config,
        ScriptedRunner(
            SCRIPT,
            spec=replace(SMALL_SPEC, batched=batched),
            prefill_cost=lambda num_tokens: 0.01 + 0.0001 * num_tokens,
            decode_cost=lambda num_rows: 0.02,
            budget_bytes=config.kv_memory_bytes,
        ),
    )
    for number, (length, max_tokens, priority, steps) in enumerate(workload):
        run.add(
            make_request(
                f"r{number}", length, max_tokens=max_tokens, priority=priority, seed=number
            )
        )
        run.step(steps)

    run.finish(most=3_000)

    chunk = config.chunked_prefill_tokens
    for plan in run.runner.plans:
        chunks = [len(prefill.tokens) for prefill in plan.prefills]
        assert len(plan.decodes) <= config.max_num_seqs
        assert sum(chunks) + len(plan.decodes) <= config.max_num_batched_tokens
        assert all(size <= config.prefill_step_size for size in chunks)
        promoted = {p.key for p in plan.prefills} & {d.key for d in plan.decodes}
        if chunk and len(plan.decodes) > len(promoted):
            assert sum(chunks) <= chunk
    for number, (length, max_tokens, _, _) in enumerate(workload):
        end = run.checker.terminal[(f"r{number}", 0)]
        longest = run.engine.scheduler.layout.longest_alone
        if length + max_tokens - 1 <= longest:
            assert isinstance(end, Finished)
            assert end.usage.completion_tokens == max_tokens
        else:
            assert isinstance(end, Failed)
            assert end.code == "out_of_memory"
            # Every token that memory allowed was told.
            assert end.usage.completion_tokens == longest - length + 1


class Learning(FixedChunk):
    """Has to see what three rows take."""

    def fuses(self, num_decoding: int) -> bool:
        return num_decoding != 3


def test_a_step_says_whether_its_chunk_may_go_with_its_decode() -> None:
    layout = KvLayout([LAYER], budget_bytes=None, max_rows=8, context_length=4_096)
    limits = Limits(prefill_step_size=40, max_num_batched_tokens=60, max_num_seqs=8)
    chunk = Learning(30)
    scheduler = Scheduler(layout=layout, chunk=chunk, queue=WaitingQueue(), limits=limits)
    scheduler.add([make_sequence(order, 45) for order in range(1, 5)])

    plans = [scheduler.plan(0.0) for _ in range(20)]

    assert {len(plan.decodes) for plan in plans} >= {1, 2, 3}
    assert all(plan.fuses == (len(plan.decodes) != 3) for plan in plans)


class Eager(FixedChunk):
    """Says that beginning another chunk costs as much as very many tokens."""

    @property
    def overhead(self) -> int:
        return 10_000


def test_a_rest_that_is_prefilled_along_stays_within_the_step() -> None:
    layout = KvLayout([LAYER], budget_bytes=None, max_rows=8, context_length=4_096)
    limits = Limits(prefill_step_size=40, max_num_batched_tokens=60, max_num_seqs=8)
    scheduler = Scheduler(layout=layout, chunk=Eager(30), queue=WaitingQueue(), limits=limits)
    scheduler.add([make_sequence(order, 45 + order) for order in range(1, 5)])

    plans = [scheduler.plan(0.0) for _ in range(40)]

    chunks = [[len(p.tokens) for p in plan.prefills] for plan in plans]
    assert max(map(max, filter(None, chunks))) <= 40
    assert all(sum(c) + len(p.decodes) <= 60 for c, p in zip(chunks, plans, strict=True))
    assert sum(map(sum, chunks)) == 45 + 46 + 47 + 48


# Memory and priority


def test_the_youngest_makes_place_for_the_oldest() -> None:
    # Three rows of 64 tokens and a spare copy, or fewer of 128.
    config = EngineConfig(kv_memory_bytes=3 * 512 * 2)
    workload = Workload(config)
    workload.add(*(make_request(f"r{i}", 40, max_tokens=60, seed=i) for i in range(3)))

    workload.finish()

    ends = [workload.checker.terminal[(f"r{i}", 0)] for i in range(3)]
    preemptions = [end.usage.preemptions for end in ends]
    assert preemptions[0] == 0
    assert preemptions[2] >= 1
    order = sorted(range(3), key=lambda i: workload.tokens_at[f"r{i}"][-1])
    assert order == [0, 1, 2]


def test_the_least_urgent_makes_place() -> None:
    config = EngineConfig(kv_memory_bytes=3 * 512 * 2, policy="priority")
    workload = Workload(config)
    workload.add(make_request("urgent", 40, max_tokens=60, seed=1, priority=0))
    workload.add(make_request("patient", 40, max_tokens=60, seed=2, priority=9))
    workload.add(make_request("usual", 40, max_tokens=60, seed=3, priority=5))

    workload.finish()

    ends = {id: workload.checker.terminal[(id, 0)] for id in ("urgent", "usual", "patient")}
    assert ends["urgent"].usage.preemptions == 0
    assert ends["patient"].usage.preemptions >= 1
    last = {id: workload.tokens_at[id][-1] for id in ends}
    assert sorted(last, key=last.__getitem__) == ["urgent", "usual", "patient"]


def test_first_come_first_served_makes_place_by_age_alone() -> None:
    workload = Workload(EngineConfig(kv_memory_bytes=2 * 512 * 2))
    workload.add(make_request("first", 40, max_tokens=60, seed=1, priority=9))
    workload.add(make_request("second", 40, max_tokens=60, seed=2, priority=0))

    workload.finish()

    assert workload.checker.terminal[("first", 0)].usage.preemptions == 0
    assert workload.checker.terminal[("second", 0)].usage.preemptions >= 1


def test_urgent_requests_are_admitted_first() -> None:
    workload = Workload(EngineConfig(max_num_seqs=1, policy="priority"))
    workload.add(*(make_request(f"r{p}", 10, priority=p, seed=p) for p in (3, 1, 2, 0)))

    workload.finish()

    firsts = [workload.first_token(f"r{p}") for p in range(4)]
    assert firsts == sorted(firsts)


def test_waiting_makes_a_request_urgent_in_the_end() -> None:
    config = EngineConfig(max_num_seqs=1, policy="priority", ageing_seconds=5.0)
    workload = Workload(config)
    workload.add(make_request("running", 10, max_tokens=3), make_request("old", 10, priority=4))
    workload.clock.advance(20.5)
    workload.add(make_request("new", 10, priority=0))

    workload.finish()

    assert workload.first_token("old") < workload.first_token("new")


def test_a_row_moves_to_a_roomier_group_while_it_decodes() -> None:
    # It is let in with room for 256 tokens more and needs 300; there it meets a row that decodes
    # and one that is in the middle of its prompt.
    workload = Workload(EngineConfig(chunked_prefill_tokens=16))
    workload.add(
        make_request("growing", 1_780, max_tokens=300, seed=2),
        make_request("small", 10, max_tokens=330, seed=1),
    )
    workload.step(235)
    workload.add(make_request("large", 2_100, max_tokens=80, seed=3))
    workload.step(20)
    workload.add(make_request("larger", 3_000, max_tokens=5, seed=4))

    workload.finish()

    transfers = [t for plan in workload.runner.plans for t in plan.work if isinstance(t, Transfer)]
    assert [(t.group, t.to_group, t.length) for t in transfers] == [(0, 1, 2_048)]
    assert transfers[0].moves
    assert all(isinstance(end, Finished) for end in workload.checker.terminal.values())


def test_a_crash_in_the_middle_of_a_workload_changes_no_tokens() -> None:
    runner = ScriptedRunner(SCRIPT, faults=[Fault("wait", skip=25), Fault("submit", skip=60)])
    workload = Workload(EngineConfig(prefill_step_size=32, chunked_prefill_tokens=16), runner)
    workload.add(*(make_request(f"r{i}", 100 + i, max_tokens=20, seed=i) for i in range(5)))

    workload.finish()

    assert runner.num_resets == 2
    assert all(isinstance(end, Finished) for end in workload.checker.terminal.values())


def test_a_more_urgent_prompt_is_prefilled_first_whatever_its_length() -> None:
    # Keeps its order number, changes its priority.
    def with_priority(sequence: Sequence, priority: int) -> Sequence:
        sequence.request = replace(sequence.request, priority=priority)
        return sequence

    layout = KvLayout([LAYER], budget_bytes=None, max_rows=8, context_length=4_096)
    queue = WaitingQueue(by_priority)
    scheduler = Scheduler(layout=layout, chunk=FixedChunk(8), queue=queue, limits=Limits())
    patient = with_priority(make_sequence(2, 100), 50)
    urgent = with_priority(make_sequence(3, 300), -50)
    scheduler.add([make_sequence(1, 3, max_tokens=100)])
    scheduler.plan(0.0)
    scheduler.add([patient])
    scheduler.plan(0.0)
    scheduler.add([urgent])

    for _ in range(20):
        scheduler.plan(0.0)

    assert urgent.num_computed == 160
    assert patient.num_computed == 8


# Drafts


def decoding_rows(scheduler: Scheduler, *lengths: int) -> list[tuple[str, int]]:
    """Rows that have got their first token."""
    scheduler.add([make_sequence(i, length, max_tokens=500) for i, length in enumerate(lengths)])
    while len(scheduler.decoding) < len(lengths):
        take(scheduler, scheduler.plan(0.0))
    assert not any(s.num_in_flight for s in scheduler.sequences)
    return [s.key for s in scheduler.decoding]


def drafted(plan: Plan) -> list[int]:
    return [len(decode.draft) for decode in plan.decodes]


def test_a_plan_carries_drafts_and_columns_for_the_widest() -> None:
    scheduler = make_scheduler()
    one, other = decoding_rows(scheduler, 254, 20)

    plan = scheduler.plan(0.0, {one: (7, 8), other: (9,), ("nobody", 0): (1,)})

    assert plan.has_drafts
    assert drafted(plan) == [2, 1]
    assert plan.work == (Resize(0, 2, 512),)


def test_what_a_row_kept_of_its_draft_is_where_it_goes_on() -> None:
    scheduler = make_scheduler()
    (key,) = decoding_rows(scheduler, 20)
    plan = scheduler.plan(0.0, {key: (7, 8, 9)})
    start = plan.decodes[0].start
    result = StepResult(
        number=plan.number,
        sampled={key: (Sampled(7), Sampled(8), Sampled(5))},
        failures={},
        seconds=0.0,
    )
    (outcome,) = scheduler.apply(plan, result)
    for sampled in outcome.sampled:
        outcome.sequence.take(sampled.token)

    after = scheduler.plan(0.0).decodes[0]

    assert (after.start, after.token) == (start + 3, 5)


def test_drafts_leave_half_of_the_step_to_prompts() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=12)
    one, other = decoding_rows(scheduler, 5, 6)
    scheduler.add([make_sequence(9, 100)])

    plan = scheduler.plan(0.0, {one: (1, 2, 3, 4), other: (5, 6, 7)})

    assert drafted(plan) == [4, 1]
    num_prefill = sum(len(prefill.tokens) for prefill in plan.prefills)
    assert 0 < num_prefill <= 12 - 2 - 5


@pytest.mark.parametrize("most", [3, 4, 5])
def test_drafts_keep_no_prompt_waiting_however_small_the_step(most: int) -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=most)
    (key,) = decoding_rows(scheduler, 5)
    late = make_sequence(9, 20)
    scheduler.add([late])

    for _ in range(40):
        plan = scheduler.plan(0.0, {key: (1, 2, 3)})
        take(scheduler, plan)
        assert sum(len(p.tokens) for p in plan.prefills) + len(plan.decodes) <= most

    assert late.num_generated


def test_a_group_at_its_longest_drafts_no_further_than_its_columns() -> None:
    scheduler = make_scheduler(chunk=2_048)
    one, other = decoding_rows(scheduler, 4_090, 2_100)

    plan = scheduler.plan(0.0, {other: (1, 2, 3, 4, 5, 6, 7)})

    starts = {decode.key: decode.start for decode in plan.decodes}
    (draft,) = [decode.draft for decode in plan.decodes if decode.draft]
    assert starts[one] + 1 + len(draft) == 4_096


def test_after_a_step_that_failed_nobody_drafts() -> None:
    scheduler = make_scheduler()
    one, other = decoding_rows(scheduler, 20, 30)
    plan = scheduler.plan(0.0, {one: (1,), other: (2,)})
    scheduler.recover(plan)

    assert scheduler.decoding == []
    assert not scheduler.plan(0.0, {one: (1,)}).has_drafts
