"""Any sequence of requests, aborts, faults and time leaves an engine consistent and its answers right."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from treadle_core.drafting import DraftRoom, VerifiedStep
from treadle_core.engine import Engine, EngineConfig
from treadle_core.errors import DuplicateRequest, InvalidRequest, OutOfMemory, QueueFull
from treadle_core.events import Event, Failed, Finished, Progress, TokenOut
from treadle_core.layers import FullAttention, ModelSpec, Recurrent, Window, why_no_drafts
from treadle_core.plan import Key
from treadle_core.prefix import PrefixKey
from treadle_core.request import Request, SamplingParams
from treadle_core.testing import (
    SMALL_SPEC,
    ByteTokenizer,
    EventChecker,
    Fault,
    ManualClock,
    RecordingStore,
    ScriptedConstraint,
    ScriptedRunner,
    WrongPlan,
    hashed,
)
from treadle_core.testing.drafting import (
    FailingDrafter,
    LastWrongDrafter,
    OracleDrafter,
    RandomDrafter,
    WrongDrafter,
)
from treadle_core.testing.fakes import END

# Hundreds of lives of an engine: some seconds, but on a busy machine a minute.
pytestmark = pytest.mark.timeout(300)

MARK = ord("Z")
ROW_MARK = ord("Y")
MOST_STEPS = 20_000

SCRIPT = hashed(40)


def letters(tokens: Sequence[int]) -> int:
    """One of five letters, and the end token now and then."""
    value = SCRIPT(tokens)
    return END if value == 0 else ord("a") + value % 5


def make_prompt(length: int, variant: int, mark: int | None) -> tuple[int, ...]:
    body = [ord("a") + (i * i + variant * (i + 1)) % 5 for i in range(length)]
    return (*body, mark) if mark is not None else tuple(body)


@dataclass(frozen=True)
class Expected:
    """What a request gets that runs to its end."""

    tokens: list[int]
    text: str
    reason: str


@dataclass(frozen=True)
class HostCode:
    """Code that a request brings along.

    Attributes:
        fails_after: Tokens after which its processor raises.
        completes_after: Tokens after which its constraint is complete.
    """

    fails_after: int | None = None
    completes_after: int | None = None

    def processors(self, prompt: tuple[int, ...]) -> tuple[Callable[..., Any], ...]:
        def watch(tokens: Sequence[int], logits: Any) -> Any:
            assert list(tokens) == unbounded(prompt, len(tokens))
            if len(tokens) == self.fails_after:
                raise ValueError("a processor's own mistake")
            return logits

        return (watch,) if self.completes_after is None else ()

    def constraint(self) -> Callable[[], Any] | None:
        if self.completes_after is None:
            return None
        return lambda: ScriptedConstraint(complete_after=self.completes_after)


@dataclass(frozen=True)
class Case:
    """A request and what its prompt was made of."""

    request: Request
    host: HostCode | None

    @property
    def prompt(self) -> tuple[int, ...]:
        assert isinstance(self.request.prompt, tuple)
        return self.request.prompt

    def expected(self) -> Expected:
        params, output = self.request.params, list[int]()
        while True:
            token = letters([*self.prompt, *output])
            early = len(output) < params.min_tokens and not params.ignore_eos
            output.append(0 if token == END and early else token)
            if output[-1] == END and not params.ignore_eos:
                return Expected(output, text_of(output), "stop")
            text = text_of(output)
            ends = [text.find(stop) for stop in params.stop if stop in text]
            if ends:
                return Expected(output, text[: min(ends)], "stop")
            if self.host is not None and len(output) == self.host.completes_after:
                return Expected(output, text, "stop")
            if len(output) == params.max_tokens:
                return Expected(output, text, "length")


def unbounded(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(letters([*prompt, *output]))
    return output


def text_of(tokens: Sequence[int]) -> str:
    return ByteTokenizer().decode(tokens)


def row_fails(key: Key, tokens: Sequence[int]) -> str | None:
    return "its logits are not finite" if ROW_MARK in tokens else None


lengths = st.sampled_from([1, 2, 3, 5, 12, 30, 62, 63, 64, 65, 100, 127, 129, 190])
marks = st.sampled_from([None] * 6 + [MARK, ROW_MARK])
# Long ones cross into the next group of rows while they decode.
prompts = st.one_of(
    st.builds(make_prompt, lengths, st.integers(0, 9), marks),
    st.builds(make_prompt, st.sampled_from([2030, 2047]), st.integers(0, 1), st.none()),
    st.builds(make_prompt, lengths, st.integers(0, 9), marks),
)
ids = st.sampled_from(["a", "b", "c", "d", "e"])
max_tokens = st.sampled_from([1, 2, 3, 5, 20, 40, 70, 100])
parameters = st.one_of(
    st.builds(SamplingParams, max_tokens=max_tokens, ignore_eos=st.just(True)),
    st.builds(SamplingParams, max_tokens=max_tokens),
    st.builds(SamplingParams, max_tokens=max_tokens, stop=st.sampled_from([("ab",), ("ca", "bb")])),
    st.builds(SamplingParams, max_tokens=st.just(100), min_tokens=st.sampled_from([1, 30, 90])),
)
host_codes = st.one_of(
    st.none(),
    st.none(),
    st.builds(HostCode, fails_after=st.sampled_from([None, 0, 3, 30])),
    st.builds(HostCode, completes_after=st.sampled_from([1, 4, 25])),
)
configs = st.builds(
    EngineConfig,
    max_num_seqs=st.integers(1, 5),
    max_queue=st.integers(1, 8),
    max_num_batched_tokens=st.sampled_from([6, 7, 16, 300, 8192]),
    prefill_step_size=st.sampled_from([4, 16, 128, 2048]),
    chunked_prefill_tokens=st.sampled_from([0, 4, 32]),
    max_decode_stall_ms=st.sampled_from([5.0, None]),
    policy=st.sampled_from(["fcfs", "priority"]),
    checkpoint_interval=st.sampled_from([16, 64]),
    # 512 bytes are 64 tokens.
    kv_memory_bytes=st.sampled_from([None, 512 * 4, 512 * 6, 512 * 7, 512 * 9, 512 * 12]),
)
fault_lists = st.one_of(
    st.just([]),
    st.builds(
        lambda where, skip: [Fault(where=where, skip=skip)],
        st.sampled_from(["submit", "wait"]),
        st.integers(0, 30),
    ),
    st.builds(
        lambda where, skip: [Fault(where=where, skip=skip, times=None, marked=MARK)],
        st.sampled_from(["submit", "wait"]),
        st.integers(0, 5),
    ),
)


stores = st.one_of(
    st.none(),
    st.builds(RecordingStore),
    st.builds(RecordingStore, delay=st.integers(1, 5), lost=st.booleans()),
)
HYBRID_SPEC = replace(
    SMALL_SPEC,
    layers=(
        FullAttention(heads=1, key_dim=1, value_dim=1, dtype="float32"),
        Recurrent(shapes=((1,),), dtypes=("float32",)),
    ),
)


WINDOW_SPEC = replace(
    SMALL_SPEC,
    layers=(
        FullAttention(heads=1, key_dim=1, value_dim=1, dtype="float32"),
        Window(heads=1, key_dim=1, value_dim=1, dtype="float32", size=16),
    ),
)
"""Rows that can take tokens back, and state that cannot be cut in a prefix store."""


def true_continuation(tokens: Sequence[int], num: int) -> list[int]:
    known = list(tokens)
    for _ in range(num):
        known.append(letters(known))
    return known[len(known) - num :]


class FickleController:
    """Asks for drafts in some steps and not in others, and settles for less than it asked for."""

    def __init__(self, num_tokens: int, rhythm: int) -> None:
        self.max_tokens = num_tokens
        self.rhythm = rhythm
        self.left: set[Key] = set()
        self.num_steps = 0

    def limits(self, rows: Sequence[DraftRoom]) -> list[int]:
        off = self.rhythm and self.num_steps % (self.rhythm + 1) == 0
        return [0 if off else min(row.most, self.max_tokens) for row in rows]

    def settle(self, rows: Sequence[DraftRoom]) -> list[int]:
        cut = self.rhythm and self.num_steps % 3 == 0
        return [row.most // 2 if cut else row.most for row in rows]

    def observe(self, step: VerifiedStep) -> None:
        assert step.seconds >= 0
        assert all(0 <= row.accepted <= row.drafted < step.width for row in step.rows)
        self.num_steps += 1

    def leave(self, key: Key) -> None:
        pass


DRAFTERS: dict[str, Callable[[], OracleDrafter]] = {
    "right": lambda: OracleDrafter(true_continuation),
    "wrong": lambda: WrongDrafter(true_continuation),
    "last wrong": lambda: LastWrongDrafter(true_continuation),
    "random": lambda: RandomDrafter(true_continuation),
    "failing": lambda: FailingDrafter(true_continuation, at=3),
}


class EngineRules(RuleBasedStateMachine):
    """What may happen to an engine, however it was made."""

    def begin(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        faults: list[Fault],
        store: RecordingStore | None,
        drafter: str | None,
        num_drafted: int,
        rhythm: int,
    ) -> None:
        self.config = config
        drafts = drafter is not None and not why_no_drafts(spec)
        self.drafter = DRAFTERS[drafter]() if drafter is not None and drafts else None
        self.store = store
        self.cuttable = spec is SMALL_SPEC
        self.clock = ManualClock(100.0)
        self.runner = ScriptedRunner(
            letters,
            spec=spec,
            faults=faults,
            row_fails=row_fails,
            clock=self.clock,
            prefill_cost=lambda num_tokens: 0.004 + 0.001 * num_tokens,
            decode_cost=lambda num_rows: 0.01,
            budget_bytes=config.kv_memory_bytes,
            max_draft_tokens=num_drafted if drafts else 0,
        )
        self.engine = Engine(
            self.runner,
            tokenizer=ByteTokenizer(),
            config=config,
            clock=self.clock,
            store=store,
            drafter=self.drafter,
            controller=FickleController(num_drafted, rhythm) if drafts else None,
        )
        self.checker = EventChecker()
        self.cases: dict[str, Case] = {}
        self.aborted: set[str] = set()
        self.deadlines: dict[str, float] = {}
        self.num_accepted = 0
        self.is_early = False

    @rule(
        id=ids,
        prompt=prompts,
        params=parameters,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-2, 2),
        salt=st.sampled_from([None, None, None, "tenant"]),
        deadline=st.sampled_from([None] * 12 + [0.05, 2.0]),
        host=host_codes,
    )
    def add(
        self,
        id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        n: int,
        priority: int,
        salt: str | None,
        deadline: float | None,
        host: HostCode | None,
    ) -> None:
        if host is not None:
            params = replace(params, min_tokens=0, ignore_eos=True)
        request = Request(
            id=id,
            prompt=prompt,
            params=params,
            n=n,
            priority=priority,
            cache_salt=salt,
            boundaries=tuple(cut for cut in (7, 60) if cut < len(prompt)),
            deadline=deadline,
            logits_processors=host.processors(prompt) if host else (),
            constraint=host.constraint() if host else None,
        )
        waiting = self.engine.stats().num_waiting
        refusal = self.refusal(request, waiting)
        if refusal is not None:
            with pytest.raises(refusal):
                self.engine.add(request)
            assert self.engine.stats().num_waiting == waiting
            return
        self.accept(request, host)

    @precondition(lambda self: self.engine.has_work)
    @rule(data=st.data(), really=st.sampled_from([True, False, False]))
    def abort(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        known = sorted(self.engine._unfinished)
        id = data.draw(st.sampled_from([*known, *known, *known, "a", "nobody"]))
        unfinished = self.is_unfinished(id)
        self.aborted.add(id)
        assert self.engine.abort(id) == unfinished
        assert not self.engine.abort(id)

    @precondition(lambda self: self.engine.has_work)
    @rule(times=st.sampled_from([1, 1, 2, 3, 10, 30]), seconds=st.sampled_from([0, 0, 0.01, 0.2]))
    def step(self, times: int, seconds: float) -> None:
        self.clock.advance(seconds)
        for _ in range(times):
            self.advance()

    @precondition(lambda self: self.engine.has_work)
    @rule(id=ids, length=lengths, steps=st.integers(0, 3), really=st.sampled_from([1, 0, 0, 0]))
    def replace_at_once(self, id: str, length: int, steps: int, really: int) -> None:
        """A client that gives up and comes back with the same id."""
        for back in range(2 * really):
            self.engine.abort(id)
            self.aborted.add(id)
            self.deliver()
            request = Request(
                id=id,
                prompt=make_prompt(length, back, None),
                params=SamplingParams(max_tokens=5, ignore_eos=True),
            )
            if self.refusal(request, self.engine.stats().num_waiting) is None:
                self.accept(request, None)
                for _ in range(steps):
                    self.advance()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.num_waiting + stats.num_running + stats.num_finished == self.num_accepted
        assert stats.num_running <= self.config.max_num_seqs
        assert stats.num_waiting <= self.config.max_queue + self.config.max_num_seqs
        budget = self.config.kv_memory_bytes
        assert budget is None or stats.kv_bytes <= budget

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None:
            return  # a rule failed, that is enough
        for _ in range(MOST_STEPS):
            if not self.engine.has_work:
                break
            self.advance()
            self.nothing_is_lost()
        self.checker.finish()
        assert not self.engine.has_work
        assert self.runner.num_live == 0
        assert self.engine.stats().num_waiting == self.engine.stats().num_running == 0
        assert self.engine.close() == []
        # One that failed was dropped with all it had.
        dropped = self.drafter is None or isinstance(self.drafter, FailingDrafter)
        assert dropped or not self.drafter.rows
        if self.store is not None:
            assert self.store.closed
            assert not self.store.open_tickets

    def accept(self, request: Request, host: HostCode | None) -> None:
        self.engine.add(request)
        # A predecessor's events come first, before its state is stored.
        self.is_early = True
        self.deliver()
        self.is_early = False
        self.checker.accepted(request)
        self.cases[request.id] = Case(request, host)
        self.aborted.discard(request.id)
        if request.deadline is not None:
            self.deadlines[request.id] = self.clock.now() + request.deadline
        self.num_accepted += request.n

    def advance(self) -> None:
        if not self.engine.has_work:
            return
        try:
            events = self.engine.step()
        except WrongPlan as error:
            raise AssertionError(str(error)) from error
        self.check(events)

    def deliver(self) -> None:
        """Take events that are due already, without letting the engine go on."""
        self.check(self.engine.flush())

    def check(self, events: list[Event]) -> None:
        self.checker.feed(events)
        for one in events:
            match one:
                case Finished():
                    self.check_finished(one)
                case Failed():
                    self.check_failed(one)
                case Progress():
                    assert one.total == len(self.cases[one.request_id].prompt)
                case TokenOut():
                    pass

    def check_finished(self, finished: Finished) -> None:
        key, case = (finished.request_id, finished.index), self.cases[finished.request_id]
        expected = case.expected()
        assert finished.usage.prompt_tokens == len(case.prompt)
        self.check_reuse(finished, case)
        self.check_drafts(finished, case)
        event(f"finished with {finished.reason}, preempted: {finished.usage.preemptions > 0}")
        if finished.reason == "abort":
            assert finished.request_id in self.aborted
            self.check_prefix(key, expected.tokens)
            return
        assert self.checker.tokens[key] == expected.tokens
        assert self.checker.text[key] == expected.text
        assert finished.reason == expected.reason
        assert ROW_MARK not in case.prompt

    def check_reuse(self, finished: Finished, case: Case) -> None:
        """What was computed can be found before its last event; what was found was there."""
        event(f"reused: {finished.usage.cached_tokens > 0}")
        assert finished.usage.cached_tokens < len(case.prompt)
        if self.store is None:
            assert finished.usage.cached_tokens == 0
            return
        tokens = (*case.prompt, *self.checker.tokens[finished.request_id, finished.index])
        found_later = self.is_early or finished.reason == "abort"
        if self.cuttable and self.runner.num_resets == 0 and not found_later:
            salt = case.request.cache_salt or ""
            found = self.store.find(PrefixKey(tokens=tokens, salt=salt), len(tokens))
            assert found.num_tokens >= len(tokens) - 1
            assert found.ticket is not None
            self.store.release(found.ticket)

    def check_drafts(self, finished: Finished, case: Case) -> None:
        """Every token came from a forward, and those that were saved are accounted for."""
        counters = finished.usage.drafts
        assert (counters is None) == (self.drafter is None)
        if counters is None:
            return
        event(f"accepted drafts: {counters.accepted > 0}, rejected: {counters.rejected > 0}")
        forwards = counters.verifications + sum(counters.bypassed.values())
        tokens = finished.usage.completion_tokens
        assert tokens == forwards + counters.forwards_saved
        assert counters.accepted <= counters.committed
        # The truth behind an end token that comes too early is not what the row gets.
        truthful = type(self.drafter) is OracleDrafter and not case.request.params.min_tokens
        if truthful and finished.reason == "length":
            assert counters.rejected == 0

    def check_failed(self, failed: Failed) -> None:
        key, case = (failed.request_id, failed.index), self.cases[failed.request_id]
        event(f"failed with {failed.code}")
        self.check_prefix(key, case.expected().tokens)
        if failed.code == "deadline_exceeded":
            assert self.clock.now() >= self.deadlines[failed.request_id]
        elif failed.code == "out_of_memory":
            assert not self.fits_alone(len(case.prompt) + len(self.checker.tokens[key]))
        else:
            assert failed.code == "step_failed"
            by_host = case.host is not None and case.host.fails_after is not None
            assert MARK in case.prompt or ROW_MARK in case.prompt or by_host

    def check_prefix(self, key: Key, tokens: list[int]) -> None:
        found = self.checker.tokens[key]
        assert found == tokens[: len(found)]

    def refusal(self, request: Request, waiting: int) -> type[Exception] | None:
        """Why the engine must not accept a request now."""
        assert isinstance(request.prompt, tuple)
        if self.is_unfinished(request.id):
            return DuplicateRequest
        if request.n > self.config.max_queue:
            return InvalidRequest
        if not self.fits_alone(len(request.prompt) + 1):
            return OutOfMemory
        if waiting + request.n > self.config.max_queue:
            return QueueFull
        return None

    def fits_alone(self, length: int) -> bool:
        return self.engine.scheduler.layout.fits_alone(length)

    def is_unfinished(self, id: str) -> bool:
        return id in self.engine._unfinished


class EngineMachine(EngineRules):
    """Engines of every kind; some of them draft."""

    @initialize(
        config=configs,
        spec=st.sampled_from(
            [SMALL_SPEC, WINDOW_SPEC, replace(SMALL_SPEC, batched=False), HYBRID_SPEC]
        ),
        faults=fault_lists,
        store=stores,
        drafter=st.sampled_from([None, None, *DRAFTERS]),
        num_drafted=st.integers(1, 5),
        rhythm=st.sampled_from([0, 0, 1, 4]),
    )
    def start(self, **made: Any) -> None:
        self.begin(**made)


class DraftingMachine(EngineRules):
    """Engines that draft, in steps with many tokens and answers that go on for a while."""

    @initialize(
        config=configs,
        spec=st.sampled_from([SMALL_SPEC, SMALL_SPEC, WINDOW_SPEC]),
        faults=fault_lists,
        store=stores,
        drafter=st.sampled_from(list(DRAFTERS)),
        num_drafted=st.integers(1, 5),
        rhythm=st.sampled_from([0, 1, 4]),
        prompts=st.lists(prompts, min_size=1, max_size=3),
        params=parameters,
    )
    def start(self, prompts: list[tuple[int, ...]], params: SamplingParams, **made: Any) -> None:
        self.begin(**made)
        params = replace(params, max_tokens=40, min_tokens=min(params.min_tokens, 30))
        for number, prompt in enumerate(prompts):
            request = Request(id=f"first {number}", prompt=prompt, params=params)
            if self.refusal(request, self.engine.stats().num_waiting) is None:
                self.accept(request, None)


TestEngineMachine = EngineMachine.TestCase
TestDraftingMachine = DraftingMachine.TestCase
TestDraftingMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestEngineMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
