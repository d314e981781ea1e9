"""The engine: accepts requests, steps, and tells what happened. Synchronous, one thread."""

import secrets
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from treadle_core.answer import Answer
from treadle_core.clock import SystemClock
from treadle_core.drafting import DraftController, Drafter, TakesMemory, Verified
from treadle_core.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineClosed,
    InvalidRequest,
    OutOfMemory,
    PromptTooLong,
    StepFailed,
    Unsupported,
    describe,
)
from treadle_core.events import DraftCounters, Event, Failed, FinishReason, Terminal
from treadle_core.kv_layout import KvLayout
from treadle_core.layers import ModelSpec, state_layout, why_no_drafts
from treadle_core.pacing import AdaptiveChunk, FixedChunk
from treadle_core.plan import Plan, Sampled, StepResult
from treadle_core.ports import (
    ChunkPolicy,
    Clock,
    Observer,
    PendingStep,
    PrefixStore,
    Runner,
    Tokenizer,
)
from treadle_core.prefix import PrefixStats
from treadle_core.request import Request, check_float, check_int
from treadle_core.reuse import Reuse
from treadle_core.scheduler import NO_DRAFTS, Limits, Scheduler
from treadle_core.sequence import Sequence
from treadle_core.speculation import Asked, Speculation
from treadle_core.waiting import AGEING_SECONDS, WaitingQueue, fcfs, priority_with_ageing

POLICIES = ("fcfs", "priority")
LONGEST_WAIT = 0.05


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of an engine. Names follow the field's usage.

    Attributes:
        max_num_seqs: Most sequences that run at once.
        max_queue: Most sequences that wait; one more is refused with QueueFull.
        max_num_batched_tokens: Most tokens of a step, decode and prefill together.
        prefill_step_size: Most prompt tokens of one step.
        chunked_prefill_tokens: Prompt tokens per step while others decode; 0 adapts the number
            to ``max_decode_stall_ms``.
        max_decode_stall_ms: How much longer than a plain decode step a step may take because of
            prefill, when the chunk adapts; None means one and a half decode steps, at least
            80 ms, and up to four times that while more prompts wait than rows decode.
        policy: ``fcfs`` or ``priority``.
        ageing_seconds: Under ``priority``, waiting this long counts as one step of priority.
        kv_memory_bytes: Most bytes of live KV, that of a draft model included; None is no limit.
        context_length: Most tokens of prompt and answer; None takes the model's.
        checkpoint_interval: With a prefix store, and layers whose state cannot be cut, tokens
            between the checkpoints of a long prefill.
    """

    max_num_seqs: int = 256
    max_queue: int = 1024
    max_num_batched_tokens: int = 8192
    prefill_step_size: int = 2048
    chunked_prefill_tokens: int = 0
    max_decode_stall_ms: float | None = None
    policy: str = "fcfs"
    ageing_seconds: float = AGEING_SECONDS
    kv_memory_bytes: int | None = None
    context_length: int | None = None
    checkpoint_interval: int = 1024

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
            Unsupported: Two fields contradict each other.
        """
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_queue", self.max_queue, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 2)
        check_int("prefill_step_size", self.prefill_step_size, 1)
        check_int("chunked_prefill_tokens", self.chunked_prefill_tokens, 0)
        check_int("checkpoint_interval", self.checkpoint_interval, 1)
        if self.max_decode_stall_ms is not None:
            stall = self.max_decode_stall_ms
            check_float("max_decode_stall_ms", stall, 0.0, 1e9, exclusive_low=True)
        check_float("ageing_seconds", self.ageing_seconds, 0.0, 1e9, exclusive_low=True)
        if self.policy not in POLICIES:
            raise InvalidRequest("policy", self.policy, " or ".join(POLICIES))
        for field in ("kv_memory_bytes", "context_length"):
            value = getattr(self, field)
            if value is not None:
                check_int(field, value, 2)
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise Unsupported(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must exceed max_num_seqs "
                f"({self.max_num_seqs}), or prompts could never be prefilled beside full rows"
            )


class EngineStats(Struct, frozen=True, kw_only=True):
    """What an engine is doing now, and has done.

    Attributes:
        num_waiting: Sequences in the queue.
        num_running: Sequences with a row.
        kv_bytes: Bytes of live KV allocated.
        kv_budget_bytes: Most of them; None is no limit.
        num_steps: Steps read.
        num_requests: Requests accepted.
        num_finished: Answers that ended, failures included.
        num_failed: Answers that failed.
        prompt_tokens: Prompt tokens of the answers that ended.
        completion_tokens: Tokens generated by the answers that ended.
        num_preemptions: How often a running sequence had to give its row to others.
        last_step: When a step was last read, in the clock's seconds; None before the first.
        drafts: What speculation did for all answers; None where nobody drafts.
        drafter: What the drafter is called; None where nobody drafts.
        draft_failure: Why it was switched off; None while it works.
        draft_bytes: Bytes that it holds for its rows.
        lossy: Whether drafts are kept unverified, so that answers are not the model's own.
    """

    num_waiting: int
    num_running: int
    kv_bytes: int
    num_steps: int
    num_requests: int
    num_finished: int
    num_failed: int
    prompt_tokens: int
    completion_tokens: int
    last_step: float | None
    kv_budget_bytes: int | None = None
    num_preemptions: int = 0
    drafts: DraftCounters | None = None
    drafter: str | None = None
    draft_failure: str | None = None
    draft_bytes: int = 0
    lossy: bool = False


class InFlight(NamedTuple):
    """A step that was submitted and not read yet.

    Attributes:
        plan: What was submitted.
        step: What it gives.
        steady: Whether the time since the step before is what such steps take: it was submitted
            behind another one, or never could be.
        asked: What the drafter was asked for it, if it was.
    """

    plan: Plan
    step: PendingStep
    steady: bool
    asked: Asked | None


class Engine:
    """Continuous batching over one model. Made and used on one thread.

    Each accepted request gets, for each of its ``n`` answers, exactly one terminal event, whatever
    fails. A step that fails is retried with one answer at a time; the one that fails alone is the
    one that ends with an error, and the others go on from their own tokens.

    Args:
        runner: The model.
        tokenizer: Text in and out; None accepts token prompts only and gives no text.
        config: Options.
        clock: Time.
        observers: Are told what happens.
        chunk: How much to prefill beside decoding rows; by default as ``config`` says.
        store: Keeps the state of prefixes; None computes every prompt. The engine owns it.
        drafter: Guesses tokens ahead, which the model verifies; None decodes one at a time.
        controller: Decides how much is drafted; goes with the drafter.
        lossy: Keep drafts without verifying them. Answers are then not the model's own: they say
            what the drafter guessed wherever it guessed.

    Raises:
        Unsupported: An option cannot be honoured for this model, or a drafter has no controller.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        clock: Clock | None = None,
        observers: Tokens[Observer] = (),
        chunk: ChunkPolicy | None = None,
        store: PrefixStore | None = None,
        drafter: Drafter | None = None,
        controller: DraftController | None = None,
        lossy: bool = False,
    ) -> None:
        self._lossy = lossy
        self._config = config or EngineConfig()
        self._runner = runner
        self._tokenizer = tokenizer
        self._clock = clock or SystemClock()
        self._observers = tuple(observers)
        spec = runner.spec
        self._context = self._config.context_length or spec.context_length
        if self._context > spec.context_length:
            raise Unsupported(
                f"context_length: got {self._context}, the model has {spec.context_length}"
            )
        self._speculation = self._speculate(drafter, controller)
        self._store = store
        self._reuse = self._attach(store) if store is not None else None
        self._scheduler = Scheduler(
            reuse=self._reuse,
            encoder=runner.encoder,
            layout=KvLayout(
                spec.layers,
                budget_bytes=self._config.kv_memory_bytes,
                max_rows=self._config.max_num_seqs,
                context_length=self._context,
                slack=runner.max_draft_tokens,
                shared=spec.batched,
            ),
            chunk=chunk or make_chunk_policy(self._config),
            queue=make_queue(self._config),
            limits=Limits(
                max_num_seqs=self._config.max_num_seqs,
                max_queue=self._config.max_queue,
                max_num_batched_tokens=self._config.max_num_batched_tokens,
                prefill_step_size=self._config.prefill_step_size,
            ),
        )
        self._answers: dict[tuple[str, int], Answer] = {}
        self._unfinished: dict[str, int] = {}
        self._flight: deque[InFlight] = deque()
        self._asked: Asked | None = None
        self._reads_first = False
        self._planned: Plan | None = None
        self._events: list[Event] = []
        self._held: list[tuple[int, Terminal]] = []
        self._order = 0
        self._totals = [0, 0, 0, 0, 0]
        self._num_steps = 0
        self._last_step: float | None = None
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Text in and out."""
        return self._tokenizer

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""
        return self._runner.spec

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self._context

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` would do something."""
        return bool(
            self._scheduler.has_work or self._planned or self._flight or self._events or self._held
        )

    @property
    def has_room(self) -> bool:
        """Whether the queue takes one more sequence."""
        return self._scheduler.num_waiting < self._config.max_queue

    @property
    def scheduler(self) -> Scheduler:
        """Queue and rows, for those who look inside."""
        return self._scheduler

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether states are stored that cannot be cut later, so that boundaries are of use."""
        return self._reuse is not None and self._reuse.keeps_checkpoints

    def observe(self, observer: Observer) -> None:
        """Tell one more observer what happens from now on, behind those there are."""
        self._observers = (*self._observers, observer)

    def add(self, request: Request) -> None:
        """Accept a request, or raise and change nothing.

        Raises:
            EngineClosed: After :meth:`close`.
            InvalidRequest: A field cannot be honoured (its subclasses say which and why).
            OutOfMemory: The prompt's KV does not fit in the budget, even alone.
            QueueFull: Try again later.
        """
        if self._closed:
            raise EngineClosed
        if request.id in self._unfinished:
            raise DuplicateRequest(request.id)
        prompt = self._encode(request)
        self._check(request, prompt)
        answers = [self._answer(request, prompt, index) for index in range(request.n)]
        self._scheduler.add([answer.sequence for answer in answers])
        # A predecessor's last events come before anything of a new request of the same id.
        self._tell(self._scheduler.number + 1, request.id)
        for answer in answers:
            self._answers[answer.sequence.key] = answer
        self._unfinished[request.id] = request.n
        self._totals[0] += 1
        for observer in self._observers:
            observer.accepted(request.id)
        if self._reuse is not None:
            # All of its answers begin alike.
            self._reuse.prefetch(answers[0].sequence)

    def abort(self, request_id: str) -> bool:
        """End every unfinished answer of a request with reason ``abort``; idempotent.

        Returns:
            Whether there was one.
        """
        answers = [a for key, a in self._answers.items() if key[0] == request_id]
        for answer in answers:
            self._finish(answer, "abort")
        return bool(answers)

    def step(self) -> list[Event]:
        """Advance by one step and return what became known.

        Without work it returns at once; while rows only wait for a slower tier, within 50 ms.
        """
        if self._closed:
            raise EngineClosed
        # How far a row is after a draft is known when the step was read.
        self._reads_first = self._scheduler.must_read_first
        if self._reads_first or any(f.plan.has_drafts for f in self._flight):
            self._read_all()
        self._ask_drafter()
        plan = self._next_plan()
        if self._flight and (plan.delays_streams or plan.has_first_tokens):
            # What the streams have coming must not wait for the chunk, nor for the step that is
            # read at once. And if the step failed that is read here, the plan is void.
            self._read_all()
            if self._events or self._planned is None:
                return self.flush()
        self._planned = None
        if self._held and plan.delays_streams:
            # Whoever ended must not wait for somebody else's chunk.
            before, plan = plan.split()
            if not self._submit(before):
                self._drop(plan)
                return self.flush()
            if self._events:
                self._planned = plan
                return self.flush()
        self._submit(plan)
        # One step of look-ahead; but nobody's first token waits for the step after it.
        look_ahead = plan.has_work and not plan.has_first_tokens
        while len(self._flight) > look_ahead:
            self._read_one()
        if self._store is not None and not plan.has_work and self._scheduler.is_waiting_for_state:
            self._store.wait(LONGEST_WAIT)
        return self.flush()

    def flush(self) -> list[Event]:
        """Events that are due without another step, such as those of an abort."""
        events, self._events = self._events, []
        for observer in self._observers:
            observer.emitted(events)
        return events

    def close(self) -> list[Event]:
        """Abort what is unfinished, free the model, and return the last events. Idempotent."""
        if self._closed:
            return []
        for request_id in list(self._unfinished):
            self.abort(request_id)
        self._closed = True
        self._flight.clear()
        if self._planned is not None:
            self._drop(self._planned)
        self._tell(self._scheduler.number + 1)
        self._runner.close()
        if self._speculation is not None:
            self._speculation.close()
        if self._store is not None:
            self._store.close()
        return self.flush()

    def stats(self) -> EngineStats:
        """Figures of this moment and totals."""
        requests, finished, failed, prompt, completion = self._totals
        speculation = self._speculation
        return EngineStats(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            kv_bytes=self._scheduler.layout.allocated_bytes,
            kv_budget_bytes=self._config.kv_memory_bytes,
            num_steps=self._num_steps,
            num_requests=requests,
            num_finished=finished,
            num_failed=failed,
            prompt_tokens=prompt,
            completion_tokens=completion,
            last_step=self._last_step,
            num_preemptions=self._scheduler.num_preemptions,
            drafts=speculation.total if speculation is not None else None,
            drafter=speculation.name if speculation is not None else None,
            draft_failure=speculation.failure if speculation is not None else None,
            draft_bytes=speculation.held_bytes if speculation is not None else 0,
            lossy=self._lossy,
        )

    def prefix_stats(self) -> PrefixStats | None:
        """Figures of the prefix store, or None without one. May be called from any thread."""
        return None if self._store is None else self._store.stats()

    def clear_prefixes(self) -> None:
        """Forget every stored state: no later lookup finds anything that was computed until now.

        Requests that run go on, and what they hold already stays theirs.
        """
        if self._store is not None:
            self._store.clear()

    def check_integrity(self) -> None:
        """Assert that queue, rows and answers agree."""
        self._scheduler.check_integrity()
        alive = {sequence.key for sequence in self._scheduler.sequences}
        assert alive == set(self._answers), "answers and sequences differ"
        counted = sum(self._unfinished.values())
        assert counted == len(self._answers), f"{counted} unfinished, {len(self._answers)} known"

    def _attach(self, store: PrefixStore) -> Reuse:
        """Let the store and the runner know of each other."""
        spec = self._runner.spec
        if not spec.storable:
            raise Unsupported(f"no state of {spec.model_type} can be stored: {spec.note}")
        layout = state_layout(spec)
        store.attach(self._runner.fingerprint, layout)
        self._runner.use(store)
        return Reuse(store, layout, checkpoint_interval=self._config.checkpoint_interval)

    def _speculate(
        self, drafter: Drafter | None, controller: DraftController | None
    ) -> Speculation | None:
        if drafter is None and controller is None:
            if self._lossy:
                raise Unsupported("lossy means nothing without a drafter")
            return None
        if drafter is None or controller is None:
            raise Unsupported("a drafter and a controller need each other: one of them is missing")
        spec = self._runner.spec
        if self._runner.max_draft_tokens == 0:
            why = why_no_drafts(spec) or "it was loaded for none"
            raise Unsupported(f"no drafts can be verified with {spec.model_type}: {why}")
        budget = self._config.kv_memory_bytes
        if isinstance(drafter, TakesMemory) and budget is not None:
            left = drafter.take_share(budget, spec)
            self._config = replace(self._config, kv_memory_bytes=left)
        return Speculation(
            drafter,
            controller,
            longest=self._runner.max_draft_tokens,
            vocab_size=spec.vocab_size,
            clock=self._clock,
            lossy=self._lossy,
        )

    def _encode(self, request: Request) -> tuple[int, ...]:
        if not isinstance(request.prompt, str):
            return request.prompt
        if self._tokenizer is None:
            raise InvalidRequest(
                "prompt", request.prompt, "token ids: this engine has no tokenizer"
            )
        tokens = tuple(self._tokenizer.encode(request.prompt))
        if not tokens:
            raise InvalidRequest("prompt", request.prompt, "text of at least one token")
        return tokens

    def _check(self, request: Request, prompt: tuple[int, ...]) -> None:
        vocab_size = self._runner.spec.vocab_size
        if request.n > self._config.max_queue:
            limit = f"at most {self._config.max_queue}, the size of the queue"
            raise InvalidRequest("n", request.n, limit)
        if len(prompt) >= self._context:
            raise PromptTooLong(len(prompt), self._context)
        if request.boundaries and max(request.boundaries) > len(prompt):
            limit = f"at most {len(prompt)}, the tokens of the prompt"
            raise InvalidRequest("boundaries", max(request.boundaries), limit)
        largest = max(prompt)
        if largest >= vocab_size:
            raise InvalidRequest("prompt", largest, f"token ids below {vocab_size}")
        for field in ("logit_bias", "stop_token_ids"):
            for token in getattr(request.params, field):
                if token >= vocab_size:
                    raise InvalidRequest(field, token, f"token ids below {vocab_size}")
        if request.media and not self._runner.spec.media:
            raise InvalidRequest(
                "media", f"{len(request.media)} spans", "none: the model reads text"
            )
        if request.params.stop and self._tokenizer is None:
            raise InvalidRequest("stop", request.params.stop, "nothing: there is no tokenizer")
        if not self._scheduler.layout.fits_alone(len(prompt) + 1):
            budget = self._config.kv_memory_bytes
            raise OutOfMemory(
                request.id, f"the KV of {len(prompt)} tokens exceeds the budget of {budget} bytes"
            )

    def _answer(self, request: Request, prompt: tuple[int, ...], index: int) -> Answer:
        now, params = self._clock.now(), request.params
        begun = now - request.elapsed
        room = self._context - len(prompt)
        self._order += 1
        ends = frozenset(params.stop_token_ids)
        if self._tokenizer is not None and not params.ignore_eos:
            ends |= self._tokenizer.end_tokens
        sequence = Sequence(
            request=request,
            index=index,
            prompt=prompt,
            max_tokens=min(params.max_tokens or room, room),
            arrival=now,
            order=self._order,
            seed=choice_seed(params.seed, index),
            end_tokens=tuple(sorted(ends)),
            deadline=None if request.deadline is None else begun + request.deadline,
            constraint=request.constraint() if request.constraint else None,
        )
        return Answer(sequence, self._tokenizer, ends, self._counters_of(sequence))

    def _counters_of(self, sequence: Sequence) -> Callable[[], DraftCounters] | None:
        speculation = self._speculation
        return None if speculation is None else lambda: speculation.counters(sequence.key)

    def _ask_drafter(self) -> None:
        """Get drafts for the next plan where that is worth giving up the look-ahead."""
        self._asked = None
        speculation, scheduler = self._speculation, self._scheduler
        if speculation is None or self._planned is not None:
            return
        if speculation.wants_drafts(scheduler.decoding):
            self._read_all()
            # Some may have ended with what was read, and a step that failed leaves none.
            rows = scheduler.decoding
            self._asked = speculation.ask(rows) if rows else None

    def _next_plan(self) -> Plan:
        """The plan that an earlier call left, or a new one."""
        if self._planned is None:
            self._expire()
            drafts = self._asked.drafts if self._asked is not None else NO_DRAFTS
            plan = self._scheduler.plan(self._clock.now(), drafts)
            self._planned = replace(plan, lossy=True) if self._lossy and plan.has_drafts else plan
            self._end_doomed()
        return self._planned

    def _submit(self, plan: Plan) -> bool:
        """Start a step; whether that went well."""
        if plan.is_empty:
            return True
        now = self._clock.now()
        for setup in plan.joins:
            answer = self._answers.get(setup.key)
            # It may have ended, and its id been used again, since the plan was made.
            if answer is not None and answer.sequence.output is setup.output:
                answer.admit(now)
        if self._speculation is not None:
            self._speculation.follow(plan)
        try:
            step = self._runner.submit(plan)
        except Exception as error:  # noqa: BLE001 — whatever a model raises must not end the engine
            self._read_all()
            self._drop(plan)
            self._recover(plan, [], error)
            return False
        self._drop(plan)
        self._tell(plan.number)
        if plan.has_work:
            steady = bool(self._flight) or self._reads_first or self._asked is not None
            self._flight.append(InFlight(plan, step, steady, self._asked))
        return True

    def _drop(self, plan: Plan) -> None:
        """What a plan restored is in its row now, or nowhere."""
        for ticket in plan.tickets:
            assert self._reuse is not None
            self._reuse.release(ticket)

    def _tell(self, number: int, request_id: str | None = None) -> None:
        """Whatever was to be stored by plans up to this one can be found: tell who ended.

        Args:
            number: The plan's number.
            request_id: Tell of this request alone.
        """
        held, self._held = self._held, []
        for due, event in held:
            if due <= number and request_id in (None, event.request_id):
                self._events.append(event)
            else:
                self._held.append((due, event))

    def _read_all(self) -> None:
        while self._flight:
            self._read_one()

    def _read_one(self) -> None:
        flown = self._flight.popleft()
        try:
            result = flown.step.wait()
        except Exception as error:  # noqa: BLE001 — see _submit
            lost = [later.plan for later in self._flight]
            self._flight.clear()
            self._recover(flown.plan, lost, error)
            return
        self._num_steps += 1
        before, self._last_step = self._last_step, self._clock.now()
        for observer in self._observers:
            observer.stepped(flown.plan, result)
        self._report_progress(flown.plan)
        verified = self._take(flown, result)
        if self._speculation is not None:
            self._speculation.observe(
                verified,
                flown.asked,
                width=1 + max((len(d.draft) for d in flown.plan.decodes), default=0),
                seconds=_seconds(flown, before, self._last_step),
            )

    def _take(self, flown: InFlight, result: StepResult) -> list[Verified]:
        """Hand a step's tokens to their answers; how its drafts came out."""
        now = self._clock.now()
        decodes = {d.key: d for d in flown.plan.decodes} if self._speculation is not None else {}
        verified: list[Verified] = []
        for outcome in self._scheduler.apply(flown.plan, result):
            answer = self._answers[outcome.sequence.key]
            taken, failure = self._take_tokens(answer, outcome.sampled, now)
            if self._speculation is not None:
                row = outcome.sequence
                decode = decodes[row.key]
                verified.append(self._speculation.count(row, decode, taken, flown.asked))
            if failure is not None:
                self._fail(answer, failure, now)
            elif answer.reason is not None:
                self._finish(answer, answer.reason)
            elif outcome.failure is not None:
                self._fail(answer, outcome.failure, now, keep=False)
        return verified

    def _take_tokens(
        self, answer: Answer, sampled: Tokens[Sampled], now: float
    ) -> tuple[list[int], str | None]:
        """Give an answer its tokens one by one until it ends.

        Returns:
            Those that are part of it, and what its grammar raised at the next.
        """
        taken: list[int] = []
        for one in sampled:
            answer.sequence.take(one.token)
            try:
                event = answer.take(one, now)
            except Exception as error:  # noqa: BLE001 — a request's grammar may raise anything
                answer.sequence.output.pop()  # never told, so it does not count
                return taken, describe(error)
            self._events.append(event)
            taken.append(one.token)
            if answer.reason is not None:
                break
        return taken, None

    def _fail(self, answer: Answer, message: str, now: float, *, keep: bool = True) -> None:
        self._scheduler.finish(answer.sequence, keep=keep)
        failure = StepFailed(answer.sequence.request.id, message)
        self._end(answer, answer.fail(failure, now))

    def _finish(self, answer: Answer, reason: FinishReason) -> None:
        """End an answer well; a tokenizer that cannot decode its rest fails it alone."""
        now = self._clock.now()
        stored = self._scheduler.finish(answer.sequence)
        try:
            event: Terminal = answer.finish(reason, now)
        except Exception as error:  # noqa: BLE001 — a tokenizer may raise anything
            event = answer.fail(StepFailed(answer.sequence.request.id, describe(error)), now)
        self._end(answer, event, stored=stored)

    def _report_progress(self, plan: Plan) -> None:
        alive = self._scheduler.alive(plan)
        for prefill in plan.prefills:
            if prefill.key in alive:
                answer = self._answers[prefill.key]
                event = answer.prefill(prefill.start + len(prefill.tokens))
                self._events += [event] if event is not None else []

    def _recover(self, failed: Plan, lost: list[Plan], error: Exception) -> None:
        self._runner.reset()
        if self._speculation is not None:
            self._speculation.reset()
        if self._planned is not None:
            self._drop(self._planned)
            self._scheduler.discard(self._planned)
            self._planned = None
        # All rows are gone: nothing more will be stored of those who ended.
        self._tell(self._scheduler.number + 1)
        now = self._clock.now()
        for sequence in self._scheduler.recover(failed, lost):
            self._scheduler.finish(sequence)
            answer = self._answers[sequence.key]
            failure = StepFailed(sequence.request.id, describe(error))
            self._end(answer, answer.fail(failure, now))

    def _expire(self) -> None:
        now = self._clock.now()
        for sequence in self._scheduler.expired(now):
            stored = self._scheduler.finish(sequence)
            answer = self._answers[sequence.key]
            waited = f"its deadline of {sequence.request.deadline:g} s passed"
            event = answer.fail(DeadlineExceeded(sequence.request.id, waited), now)
            self._end(answer, event, stored=stored)

    def _end_doomed(self) -> None:
        now = self._clock.now()
        for sequence in self._scheduler.take_doomed():
            self._scheduler.finish(sequence)
            answer = self._answers[sequence.key]
            reason = (
                f"the KV of more than {self._scheduler.layout.longest_alone} tokens exceeds the "
                f"budget of {self._config.kv_memory_bytes} bytes"
            )
            self._end(answer, answer.fail(OutOfMemory(sequence.request.id, reason), now))

    def _end(self, answer: Answer, event: Terminal, *, stored: bool = False) -> None:
        """Tell the last event of an answer, once its state can be found.

        Args:
            answer: Which.
            event: Its last.
            stored: Whether the next plan stores its state.
        """
        key = answer.sequence.key
        del self._answers[key]
        self._unfinished[key[0]] -= 1
        if self._unfinished[key[0]] == 0:
            del self._unfinished[key[0]]
        usage = answer.usage()
        if self._speculation is not None:
            self._speculation.end(key)
        self._totals[1] += 1
        self._totals[2] += isinstance(event, Failed)
        self._totals[3] += usage.prompt_tokens
        self._totals[4] += usage.completion_tokens
        if stored:
            self._held.append((self._scheduler.number + 1, event))
        elif self._planned is not None and key in self._planned.saved:
            self._held.append((self._planned.number, event))
        else:
            self._events.append(event)


def _seconds(flown: InFlight, before: float | None, now: float) -> float | None:
    """What a step took since the one before it; None where other things happened in between.

    A plain step that had to fill the pipeline is longer than the ones that follow it.
    """
    usual = flown.steady and not flown.plan.delays_streams
    return now - before if usual and before is not None else None


def make_chunk_policy(config: EngineConfig) -> ChunkPolicy:
    """The prefill chunk that the configuration asks for."""
    if config.chunked_prefill_tokens:
        return FixedChunk(config.chunked_prefill_tokens)
    stall = config.max_decode_stall_ms
    return AdaptiveChunk(None if stall is None else stall / 1000)


def make_queue(config: EngineConfig) -> WaitingQueue:
    """The waiting queue that the configuration asks for."""
    if config.policy == "priority":
        return WaitingQueue(priority_with_ageing(config.ageing_seconds))
    return WaitingQueue(fcfs)


def choice_seed(seed: int | None, index: int) -> int:
    """The seed of one of a request's answers; drawn when the request gives none."""
    if seed is None:
        return secrets.randbits(64)
    return (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
