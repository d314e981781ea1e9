"""The engine behind an event loop: streams, cancellation, failures; the loop is never blocked."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream
from blockbuster import BlockBuster, blockbuster_ctx
from msgspec.structs import replace

from treadle_core.engine import Engine, EngineConfig
from treadle_core.errors import DuplicateRequest, EngineClosed, InvalidRequest, QueueFull
from treadle_core.events import Event, Failed, Finished, TokenOut
from treadle_core.loop import AsyncEngine
from treadle_core.plan import Plan, StepResult
from treadle_core.ports import PrefixStore
from treadle_core.request import Request, SamplingParams
from treadle_core.testing import (
    ByteTokenizer,
    EventChecker,
    Fault,
    RecordingObserver,
    RecordingStore,
    ScriptedRunner,
    expected_tokens,
    hashed,
)
from treadle_core.testing.scripted import ScriptedStep

SCRIPT = hashed(250)
PATIENCE = 20.0


@pytest.fixture(autouse=True)
def no_blocking() -> Iterator[BlockBuster]:
    """Fail a test that blocks the event loop."""
    with blockbuster_ctx("treadle_core") as blockbuster:
        yield blockbuster


class GatedRunner(ScriptedRunner):
    """Steps wait for a gate; the owner thread tells when it stands there."""

    def __init__(self) -> None:
        super().__init__(SCRIPT)
        self.entered = threading.Event()
        self.gate = threading.Event()

    def submit(self, plan: Plan) -> ScriptedStep:
        self.entered.set()
        assert self.gate.wait(PATIENCE), "nobody opened the gate"
        return super().submit(plan)


class DeadlyObserver(RecordingObserver):
    """Breaks its promise not to raise after some steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def stepped(self, plan: Plan, result: StepResult) -> None:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("no more")


def make_request(id: str = "r", *, length: int = 5, n: int = 1, **params: Any) -> Request:
    prompt = tuple((len(id) + ord(id[-1]) + 7 * i) % 250 for i in range(length))
    return Request(id=id, prompt=prompt, n=n, params=SamplingParams(**params))


def make_engine(
    runner: ScriptedRunner | None = None, observer: RecordingObserver | None = None, **config: Any
) -> AsyncEngine:
    return AsyncEngine(
        lambda: Engine(
            runner or ScriptedRunner(SCRIPT),
            config=EngineConfig(**config),
            observers=[observer] if observer else [],
        )
    )


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenOut)]


def expected(request: Request) -> list[int]:
    assert isinstance(request.prompt, tuple)
    assert request.params.max_tokens is not None
    return expected_tokens(SCRIPT, request.prompt, request.params.max_tokens)


async def idle(engine: AsyncEngine) -> None:
    """Wait until the owner thread has nothing to do."""
    while await engine.call(lambda inner: inner.has_work):
        pass


# Streams


async def test_a_request_gets_its_events_in_order() -> None:
    request = make_request(max_tokens=12)

    async with make_engine() as engine:
        events = await engine.generate(request)

    assert tokens_of(events) == expected(request)
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length"
    assert len(events) == 13


async def test_text_arrives_as_text() -> None:
    runner = ScriptedRunner(lambda tokens: b"hello, you"[len(tokens) - 2])

    async with AsyncEngine(lambda: Engine(runner, tokenizer=ByteTokenizer())) as engine:
        events = await engine.generate(
            Request(id="r", prompt="ab", params=SamplingParams(stop=(",",)))
        )

    assert (
        "".join(event.text for event in events if isinstance(event, TokenOut | Finished)) == "hello"
    )


async def test_tokens_are_delivered_while_the_engine_goes_on() -> None:
    runner = ScriptedRunner(SCRIPT)

    async with make_engine(runner) as engine, engine.open(make_request(max_tokens=50)) as events:
        first = await anext(events)
        rest = [event async for event in events]

    assert isinstance(first, TokenOut)
    assert len(rest) == 50


async def test_many_concurrent_requests_get_their_own_tokens() -> None:
    requests = [make_request(f"r{i}", length=1 + i % 9, max_tokens=1 + i % 13) for i in range(60)]
    found: dict[str, list[Event]] = {}
    checker = EventChecker()

    async def ask(request: Request) -> None:
        found[request.id] = await engine.generate(request)

    async with make_engine(max_num_seqs=8) as engine, anyio.create_task_group() as tasks:
        for request in requests:
            checker.accepted(request)
            tasks.start_soon(ask, request)

    for request in requests:
        checker.feed(found[request.id])
        assert tokens_of(found[request.id]) == expected(request)
    checker.finish()


async def test_all_answers_of_a_request_come_through_one_stream() -> None:
    async with make_engine() as engine:
        events = await engine.generate(make_request(n=3, max_tokens=4))

    ends = [event for event in events if isinstance(event, Finished)]
    assert sorted(event.index for event in ends) == [0, 1, 2]
    assert isinstance(events[-1], Finished)


async def test_a_failing_step_reaches_the_stream_as_a_failure() -> None:
    runner = ScriptedRunner(SCRIPT, faults=[Fault("wait", marked=99, times=None)])
    bad = Request(id="bad", prompt=(1, 99))
    good = make_request("good", max_tokens=9)
    found: dict[str, list[Event]] = {}

    async def ask(request: Request) -> None:
        found[request.id] = await engine.generate(request)

    async with make_engine(runner) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, bad)
        tasks.start_soon(ask, good)

    assert isinstance(found["bad"][-1], Failed)
    assert found["bad"][-1].code == "step_failed"
    assert tokens_of(found["good"]) == expected(good)


async def test_everything_of_the_engine_happens_on_the_owner_thread() -> None:
    names: list[str] = []

    def factory() -> Engine:
        names.append(threading.current_thread().name)
        return Engine(ScriptedRunner(SCRIPT))

    async with AsyncEngine(factory) as engine:
        names.append(await engine.call(lambda inner: threading.current_thread().name))

    assert names == ["treadle-engine", "treadle-engine"]


async def test_figures_are_there_without_waiting() -> None:
    engine = make_engine()
    assert engine.stats is None

    async with engine:
        await engine.generate(make_request(max_tokens=3))
        await idle(engine)
        stats = engine.stats

    assert stats is not None
    assert (stats.num_requests, stats.num_finished, stats.completion_tokens) == (1, 1, 3)


async def test_the_event_loop_runs_while_a_step_takes_long() -> None:
    runner = GatedRunner()
    found: list[Event] = []

    async def ask() -> None:
        found.extend(await engine.generate(make_request(max_tokens=2)))

    async with make_engine(runner) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.to_thread.run_sync(runner.entered.wait)
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        assert engine.alive
        assert found == []
        runner.gate.set()

    assert len(found) == 3


# What is refused


async def test_a_refused_request_raises_and_leaves_nothing_behind() -> None:
    async with make_engine(context_length=4) as engine:
        with pytest.raises(InvalidRequest):
            await engine.generate(make_request(length=5))
        events = await engine.generate(make_request(length=3, max_tokens=1))

    assert len(events) == 2


async def test_a_full_queue_is_told_to_the_one_who_asks() -> None:
    def fill(engine: Engine) -> None:
        engine.add(make_request("running", max_tokens=None))
        engine.step()
        engine.add(make_request("waiting"))

    async with make_engine(max_num_seqs=1, max_queue=1) as engine:
        await engine.call(fill)
        with pytest.raises(QueueFull, match="1 waiting, at most 1"):
            await engine.generate(make_request("refused"))
        assert await engine.abort("running") is True
        events = await engine.generate(make_request("accepted", max_tokens=2))

    assert len(events) == 3


async def test_an_id_in_use_is_refused_and_its_stream_goes_on() -> None:
    request = make_request(max_tokens=600)
    async with make_engine() as engine, engine.open(request) as events:
        with pytest.raises(DuplicateRequest):
            await engine.generate(make_request())
        found = [event async for event in events]

    assert tokens_of(found) == expected(request)


async def test_an_id_in_use_by_somebody_else_is_refused_and_not_aborted() -> None:
    observer = RecordingObserver()
    async with make_engine(observer=observer) as engine:
        await engine.call(lambda inner: inner.add(make_request(max_tokens=600)))
        with pytest.raises(DuplicateRequest):
            await engine.generate(make_request(max_tokens=1))
        await idle(engine)

    ends = [event for event in observer.events if isinstance(event, Finished)]
    assert [end.reason for end in ends] == ["length"]


# Leaving


async def test_leaving_early_aborts_the_request() -> None:
    runner, observer = ScriptedRunner(SCRIPT), RecordingObserver()
    async with make_engine(runner, observer) as engine:
        async with engine.open(make_request(max_tokens=None)) as events:
            await anext(events)
        await idle(engine)

        assert runner.num_live == 0
        assert engine.alive
    assert isinstance(observer.events[-1], Finished)
    assert observer.events[-1].reason == "abort"


async def divide_by_zero(engine: AsyncEngine) -> None:
    async with engine.open(make_request(max_tokens=None)) as events:
        await anext(events)
        _ = 1 / 0


async def test_leaving_by_an_exception_aborts_the_request() -> None:
    runner = ScriptedRunner(SCRIPT)
    async with make_engine(runner) as engine:
        with pytest.raises(ZeroDivisionError):
            await divide_by_zero(engine)
        await idle(engine)

        assert runner.num_live == 0


async def test_a_cancelled_request_is_aborted_and_its_neighbour_goes_on() -> None:
    runner = ScriptedRunner(SCRIPT)
    neighbour = make_request("neighbour", max_tokens=300)
    found: list[Event] = []

    async def ask() -> None:
        found.extend(await engine.generate(neighbour))

    async with make_engine(runner) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        with anyio.CancelScope() as scope:
            async with engine.open(make_request(max_tokens=None)) as events:
                async for _ in events:
                    scope.cancel()
        assert scope.cancelled_caught

    assert tokens_of(found) == expected(neighbour)


async def test_a_request_cancelled_while_it_is_submitted_is_aborted() -> None:
    runner, observer = GatedRunner(), RecordingObserver()
    async with make_engine(runner, observer) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.generate, make_request("first", max_tokens=1))
        await anyio.to_thread.run_sync(runner.entered.wait)
        # The owner thread is in a step: the next request is submitted, and not answered yet.
        async with anyio.create_task_group() as others:
            others.start_soon(engine.generate, make_request("late", max_tokens=None))
            await anyio.wait_all_tasks_blocked()
            others.cancel_scope.cancel()
        runner.gate.set()
        await idle(engine)

        assert runner.num_live == 0
    ends = {event.request_id: event for event in observer.events if isinstance(event, Finished)}
    assert {id: end.reason for id, end in ends.items()} == {"first": "length", "late": "abort"}


async def test_an_abort_gives_the_stream_its_terminal_events() -> None:
    async with make_engine() as engine:
        async with engine.open(make_request(n=2, max_tokens=None)) as events:
            found = [await anext(events)]
            assert await engine.abort("r") is True
            found += [event async for event in events]
        assert await engine.abort("r") is False
        assert await engine.abort("nobody") is False

    ends = [event for event in found if isinstance(event, Finished)]
    assert [(end.index, end.reason) for end in ends] == [(0, "abort"), (1, "abort")]


async def test_an_id_can_be_used_again_right_after_its_stream_was_left() -> None:
    async with make_engine() as engine:
        for _ in range(20):
            async with engine.open(make_request(max_tokens=None)) as events:
                await anext(events)
            request = make_request(length=9, max_tokens=3)

            found = await engine.generate(request)

            assert tokens_of(found) == expected(request)
            assert isinstance(found[-1], Finished)
            assert found[-1].reason == "length"


# Beginning and ending


async def test_what_the_factory_raises_is_raised_where_the_engine_is_entered() -> None:
    def factory() -> Engine:
        raise ValueError("no such model")

    engine = AsyncEngine(factory)

    with pytest.raises(ValueError, match="no such model"):
        async with engine:
            raise AssertionError("it was entered")
    assert not engine.alive
    assert engine.death == "the engine did not start: ValueError: no such model"
    with pytest.raises(EngineClosed, match="no such model"):
        await engine.generate(make_request())


async def test_an_engine_that_was_not_started_takes_nothing() -> None:
    engine = make_engine()

    assert not engine.alive
    with pytest.raises(EngineClosed, match="not started"):
        await engine.generate(make_request())
    with pytest.raises(EngineClosed, match="not started"):
        _ = engine.engine


async def test_starting_can_be_cancelled() -> None:
    started, go_on = threading.Event(), threading.Event()
    entered: list[bool] = []
    runner = ScriptedRunner(SCRIPT)

    def factory() -> Engine:
        started.set()
        assert go_on.wait(PATIENCE)
        return Engine(runner)

    async def start(engine: AsyncEngine) -> None:
        async with engine:
            entered.append(True)

    engine = AsyncEngine(factory)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start, engine)
        await anyio.to_thread.run_sync(started.wait)
        tasks.cancel_scope.cancel()
        go_on.set()

    assert entered == []
    assert runner.closed
    assert not engine.alive


async def test_leaving_the_engine_ends_every_stream() -> None:
    runner = ScriptedRunner(SCRIPT)
    found: dict[str, list[Event]] = {"a": [], "b": []}

    async def ask(id: str, ready: Callable[[], None]) -> None:
        async with engine.open(make_request(id, max_tokens=None)) as events:
            found[id].append(await anext(events))
            ready()
            found[id] += [event async for event in events]

    async with anyio.create_task_group() as tasks:
        async with make_engine(runner) as engine:
            ready = [anyio.Event(), anyio.Event()]
            for id, event in zip("ab", ready, strict=True):
                tasks.start_soon(ask, id, event.set)
            for event in ready:
                await event.wait()
        assert not engine.alive
        assert engine.death == "the engine is closed"

    assert runner.closed
    for events in found.values():
        assert isinstance(events[-1], Finished)
        assert events[-1].reason == "abort"
    with pytest.raises(EngineClosed):
        await engine.generate(make_request())


async def test_cancelling_the_engines_owner_ends_every_stream() -> None:
    runner = ScriptedRunner(SCRIPT)
    found: list[Event] = []
    handed_over: list[AsyncEngine] = []
    entered = anyio.Event()

    async def own() -> None:
        async with make_engine(runner) as engine:
            handed_over.append(engine)
            entered.set()
            await anyio.sleep_forever()

    async def ask(ready: anyio.Event) -> None:
        async with handed_over[0].open(make_request(max_tokens=None)) as events:
            found.append(await anext(events))
            ready.set()
            found.extend([event async for event in events])

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as streams, anyio.create_task_group() as owners:
            owners.start_soon(own)
            await entered.wait()
            ready = anyio.Event()
            streams.start_soon(ask, ready)
            await ready.wait()
            owners.cancel_scope.cancel()

    assert isinstance(found[-1], Finished | Failed)
    assert runner.closed


async def test_the_death_of_the_owner_thread_fails_every_open_stream() -> None:
    requests = [make_request(id, n=2, max_tokens=None) for id in ("a", "b")]
    found: dict[str, list[Event]] = {}

    async def ask(request: Request) -> None:
        found[request.id] = await engine.generate(request)

    with anyio.fail_after(PATIENCE):
        async with make_engine(observer=DeadlyObserver(20)) as engine:
            async with anyio.create_task_group() as tasks:
                for request in requests:
                    tasks.start_soon(ask, request)
            assert not engine.alive
            assert engine.death == "the engine stopped: RuntimeError: no more"
            with pytest.raises(EngineClosed, match="no more"):
                await engine.generate(make_request("late"))
            with pytest.raises(EngineClosed, match="no more"):
                await engine.call(lambda inner: inner.stats())
            with pytest.raises(EngineClosed, match="no more"):
                _ = engine.engine

    for events in found.values():
        ends = [event for event in events if isinstance(event, Failed | Finished)]
        assert [(end.index, type(end)) for end in ends] == [(0, Failed), (1, Failed)]
        for end in ends:
            assert isinstance(end, Failed)
            assert end.code == "engine_closed"
            assert end.message == "the engine stopped: RuntimeError: no more"


async def test_a_call_that_waits_when_the_owner_thread_dies_is_told() -> None:
    runner = GatedRunner()
    raised: list[str] = []

    async def call() -> None:
        try:
            await engine.call(lambda inner: inner.stats())
        except EngineClosed as error:
            raised.append(str(error))

    with anyio.fail_after(PATIENCE):
        async with make_engine(runner, DeadlyObserver(0)) as engine:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.generate, make_request(max_tokens=None))
                await anyio.to_thread.run_sync(runner.entered.wait)
                tasks.start_soon(call)
                await anyio.wait_all_tasks_blocked()
                runner.gate.set()

    assert raised == ["the engine stopped: RuntimeError: no more"]


async def test_what_a_call_raises_is_raised_to_the_caller_only() -> None:
    def fail(engine: Engine) -> None:
        raise LookupError("not here")

    async with make_engine() as engine:
        with pytest.raises(LookupError, match="not here"):
            await engine.call(fail)
        events = await engine.generate(make_request(max_tokens=2))

    assert len(events) == 3


async def test_an_exit_on_the_owner_thread_is_no_exit_of_the_caller() -> None:
    def leave(engine: Engine) -> None:
        raise SystemExit(3)

    async with make_engine() as engine:
        with pytest.raises(EngineClosed, match="SystemExit: 3"):
            await engine.call(leave)
        events = await engine.generate(make_request(max_tokens=2))

    assert len(events) == 3


async def test_an_engine_is_entered_once() -> None:
    engine = make_engine()
    async with engine:
        with pytest.raises(EngineClosed, match="once"):
            await engine.__aenter__()
        assert len(await engine.generate(make_request(max_tokens=2))) == 3

    with pytest.raises(EngineClosed, match="once"):
        await engine.__aenter__()


async def test_a_reader_that_closes_its_stream_disturbs_nobody() -> None:
    runner = ScriptedRunner(SCRIPT)
    neighbour = make_request("neighbour", max_tokens=100)

    async with make_engine(runner) as engine:
        async with engine.open(neighbour) as events, engine.open(make_request("rude")) as stream:
            assert isinstance(stream, MemoryObjectReceiveStream)
            stream.close()
            found = [event async for event in events]
        await idle(engine)

        assert runner.num_live == 0
    assert tokens_of(found) == expected(neighbour)


async def test_a_factory_that_exits_is_told_and_nobody_waits_for_ever() -> None:
    def factory() -> Engine:
        raise SystemExit(3)

    with anyio.fail_after(PATIENCE), pytest.raises(EngineClosed, match="SystemExit"):
        async with AsyncEngine(factory):
            pass


async def test_a_factory_that_makes_no_engine_is_told() -> None:
    not_an_engine: Any = object()

    with anyio.fail_after(PATIENCE), pytest.raises(AttributeError, match="stats"):
        async with AsyncEngine(lambda: not_an_engine):
            pass


async def test_a_command_that_exits_fails_for_its_caller_alone() -> None:
    def leave(engine: Engine) -> None:
        raise SystemExit(3)

    with anyio.fail_after(PATIENCE):
        async with make_engine() as engine:
            with pytest.raises(EngineClosed, match="SystemExit"):
                await engine.call(leave)
            events = await engine.generate(make_request(max_tokens=3))

    assert isinstance(events[-1], Finished)


# Prefixes


def make_storing_engine(store: PrefixStore) -> AsyncEngine:
    return AsyncEngine(lambda: Engine(ScriptedRunner(SCRIPT), store=store))


def cached_tokens(events: list[Event]) -> int:
    (ending,) = [event for event in events if isinstance(event, Finished)]
    return ending.usage.cached_tokens


async def test_nothing_that_was_computed_before_a_clear_is_found_after_it() -> None:
    request = make_request("one", length=40, max_tokens=3)
    running = make_request("two", length=40, max_tokens=500)
    again = [
        replace(other, id=f"{other.id} again", params=SamplingParams(max_tokens=1))
        for other in (request, running)
    ]

    async with make_storing_engine(RecordingStore()) as engine:
        await engine.generate(request)
        async with engine.open(running) as events:
            # It has computed its prompt, and will be done with its answer after the clear.
            await anext(events)
            await engine.clear_prefixes()
            async for _ in events:
                pass
        found = [cached_tokens(await engine.generate(other)) for other in again]
        repeated = [
            cached_tokens(await engine.generate(replace(other, id="third"))) for other in again
        ]

    assert found == [0, 0]
    assert repeated == [39, 39]


async def test_figures_of_the_store_are_there_without_waiting_for_a_step() -> None:
    async with make_storing_engine(RecordingStore()) as engine:
        await engine.generate(make_request("one", length=40, max_tokens=3))
        stats = await engine.prefix_stats()
        assert stats is not None
        assert stats.num_entries > 0
        await engine.clear_prefixes()
        stats = await engine.prefix_stats()
        assert stats is not None
        assert stats.num_entries == 0
    with pytest.raises(EngineClosed):
        await engine.prefix_stats()


async def test_without_a_store_there_is_nothing_to_count_or_clear() -> None:
    async with make_engine() as engine:
        assert await engine.prefix_stats() is None
        await engine.clear_prefixes()
