"""Answers of a pipelined engine equal mlx-lm's own loop over each prompt alone."""

import math
import random
from collections import deque
from collections.abc import Sequence as Tokens
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec import Struct

from treadle_core import Completion, Engine, EngineConfig, Request, SamplingParams, collect
from treadle_core.layers import layer_bytes
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.pacing import FixedChunk
from treadle_core.plan import Instruction, Key, Plan, StepResult, Transfer
from treadle_core.ports import PendingStep
from treadle_core.scheduler import Limits, Scheduler
from treadle_core.sequence import Sequence
from treadle_core.testing import zoo
from treadle_core.waiting import WaitingQueue, fcfs

from .harness import (
    CONTEXT,
    PROMISED,
    TOLERANCE,
    NarrowLayout,
    Subject,
    random_tokens,
    reference,
    subject,
)

CLEAR_GAP = 1e-3
NUM_TOKENS = 16
NUM_TOP = 5
LENGTHS = (1, 2, 300, 17, 33, 64, 65)


class Greedy(Struct, frozen=True):
    """What mlx-lm's own loop makes of a prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: Any
    scale: float

    @property
    def logprobs(self) -> np.ndarray:
        """Log-probabilities ``[tokens, vocab]`` in double precision."""
        logits = self.logits.astype(np.float64)
        top = logits.max(axis=-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))

    @property
    def smallest_gap(self) -> float:
        """How far the second best token ever was from the best, as a part of the scale."""
        second, best = np.sort(self.logits, axis=-1)[:, -2:].T
        return float((best - second).min() / self.scale)


@cache
def greedy(target: Subject, prompt: tuple[int, ...]) -> Greedy:
    """The model's own continuation, and its logits where each token was chosen."""
    tokens = tuple(zoo.greedy(target.model.model, prompt, NUM_TOKENS))
    logits = reference(target, prompt + tokens[:-1])
    return Greedy(prompt, tokens, logits[len(prompt) - 1 :], float(np.abs(logits).max()))


@cache
def clear_answers(family: str, lengths: tuple[int, ...] = LENGTHS) -> list[Greedy]:
    """An answer per prompt length, none of which is a matter of rounding."""
    rng = random.Random(f"{family} {lengths}")
    found: list[Greedy] = []
    for length in lengths:
        answer = greedy(subject(family), random_tokens(rng, length))
        while answer.smallest_gap < CLEAR_GAP:
            answer = greedy(subject(family), random_tokens(rng, length))
        found.append(answer)
    return found


def engine_of(
    target: Subject,
    *,
    runner: Any = None,
    chunk: int = 10**6,
    **config: Any,
) -> Engine:
    """An engine over the tiny model; it has no tokenizer, so nothing ends an answer early."""
    return Engine(
        runner or ModelRunner(target.model, target.spec),
        config=EngineConfig(**config),
        chunk=FixedChunk(chunk),
    )


def request_of(name: str, answer: Greedy, num_tokens: int = NUM_TOKENS, **more: Any) -> Request:
    """A greedy request that reports log-probabilities."""
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, logprobs=True, top_logprobs=NUM_TOP
    )
    return Request(id=name, prompt=answer.prompt, params=params, **more)


def drain(engine: Engine) -> dict[str, Completion]:
    """Run to the end."""
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    return {key[0]: completion for key, completion in collect(events).items()}


def check(completion: Completion, answer: Greedy, num_tokens: int | None = None) -> None:
    """Tokens are those of the model's own loop, and log-probabilities those of its logits."""
    num = len(completion.tokens) if num_tokens is None else num_tokens
    assert tuple(completion.tokens) == answer.tokens[:num]
    for step, (token, logprob, top) in enumerate(
        zip(completion.tokens, completion.logprobs, completion.top_logprobs, strict=True)
    ):
        expected = answer.logprobs[step]
        best = np.sort(expected)[::-1][:NUM_TOP]
        tolerance = TOLERANCE * answer.scale
        assert logprob == pytest.approx(expected[token], abs=tolerance)
        assert [item.logprob for item in top] == pytest.approx(best, abs=tolerance)
        assert [expected[item.token] for item in top] == pytest.approx(best, abs=tolerance)
        assert len({item.token for item in top}) == NUM_TOP


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 64, 10**6])
@pytest.mark.parametrize("family", PROMISED)
def test_requests_that_come_and_go_at_random_get_the_models_own_tokens_and_logprobs(
    family: str, chunk: int
) -> None:
    rng = random.Random(f"{family} {chunk}")
    answers = clear_answers(family)
    engine = engine_of(subject(family), chunk=chunk, max_num_seqs=6, max_num_batched_tokens=512)
    lengths = {f"r{i}": rng.randint(1, NUM_TOKENS) for i in range(len(answers))}
    waiting = [(f"r{i}", answer) for i, answer in enumerate(answers)]
    rng.shuffle(waiting)
    events: list[Any] = []

    while waiting or engine.has_work:
        while waiting and rng.random() < 0.4:
            name, answer = waiting.pop()
            engine.add(request_of(name, answer, lengths[name]))
        if rng.random() < 0.03:
            engine.abort(rng.choice(list(lengths)))
        events += engine.step()
        engine.check_integrity()

    completions = collect(events)
    for i, answer in enumerate(answers):
        completion = completions[f"r{i}", 0]
        complete = None if completion.reason == "abort" else lengths[f"r{i}"]
        check(completion, answer, complete)
    assert sum(c.reason == "length" for c in completions.values()) >= len(answers) // 2


class Recorder:
    """A logits processor that changes nothing and remembers what it was given."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, ...]] = []
        self.logits: list[np.ndarray] = []

    def __call__(self, tokens: Tokens[int], logits: mx.array) -> mx.array:
        self.tokens.append(tuple(tokens))
        self.logits.append(np.array(logits))
        return logits


@pytest.mark.parametrize("family", PROMISED)
def test_a_processor_sees_the_models_own_logits_and_exactly_the_generated_tokens(
    family: str,
) -> None:
    answers = [clear_answers(family)[i] for i in (0, 3, 5)]
    recorders = [Recorder() for _ in answers]
    engine = engine_of(subject(family), chunk=7)
    for i, (answer, recorder) in enumerate(zip(answers, recorders, strict=True)):
        engine.add(request_of(f"seen{i}", answer, logits_processors=(recorder,)))
        engine.add(request_of(f"plain{i}", answer))

    completions = drain(engine)

    for i, (answer, recorder) in enumerate(zip(answers, recorders, strict=True)):
        check(completions[f"seen{i}"], answer, NUM_TOKENS)
        check(completions[f"plain{i}"], answer, NUM_TOKENS)
        assert recorder.tokens == [answer.tokens[:num] for num in range(NUM_TOKENS)]
        seen = np.stack(recorder.logits)
        assert np.abs(seen - answer.logits).max() < TOLERANCE * answer.scale


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_rows_that_are_preempted_go_on_with_the_models_own_tokens(family: str) -> None:
    target = subject(family)
    answers = clear_answers(family, (50, 60, 55, 58))
    sizes = [layer_bytes(layer, len(answers), 64, 0) for layer in target.spec.layers]
    engine = engine_of(target, kv_memory_bytes=sum(sizes) + max(sizes))
    for i, answer in enumerate(answers):
        engine.add(request_of(f"r{i}", answer))

    completions = drain(engine)

    for i, answer in enumerate(answers):
        check(completions[f"r{i}"], answer, NUM_TOKENS)
    assert sum(c.usage.preemptions for c in completions.values() if c.usage) > 0


class CrampedLayout(NarrowLayout):
    """A narrow layout that leaves no row any room to grow in its first group."""

    def admit(self, key: Key, length: int, headroom: int) -> list[Instruction] | None:
        return super().admit(key, length, 0)


class NarrowLoop:
    """The engine's loop over groups of a few dozen tokens, so that rows change groups.

    Args:
        target: The model.
        chunk: Prompt tokens per step beside decoding rows.
    """

    def __init__(self, target: Subject, chunk: int) -> None:
        self.runner = ModelRunner(target.model, target.spec)
        limits = (64, 128, CONTEXT)
        self.scheduler = Scheduler(
            layout=CrampedLayout(target.spec.layers, limits=limits, budget_bytes=None, max_rows=8),
            chunk=FixedChunk(chunk),
            queue=WaitingQueue(fcfs),
            limits=Limits(max_num_seqs=5),
        )
        self.flight: deque[tuple[Plan, PendingStep]] = deque()
        self.plans: list[Plan] = []

    def add(self, number: int, answer: Greedy) -> Sequence:
        """Queue a greedy request without an end."""
        params = SamplingParams(temperature=0.0)
        sequence = Sequence(
            request=Request(id=f"r{number}", prompt=answer.prompt, params=params),
            index=0,
            prompt=answer.prompt,
            max_tokens=len(answer.tokens),
            arrival=0.0,
            order=number,
            seed=0,
        )
        self.scheduler.add([sequence])
        return sequence

    def step(self) -> None:
        """Submit a step before the one before is read."""
        plan = self.scheduler.plan(0.0)
        if not plan.is_empty:
            pending = self.runner.submit(plan)
            if plan.has_work:
                self.flight.append((plan, pending))
                self.plans.append(plan)
        while len(self.flight) > plan.has_work:
            read, step = self.flight.popleft()
            for outcome in self.scheduler.apply(read, step.wait()):
                sequence = outcome.sequence
                sequence.take(outcome.sampled[0].token)
                if len(sequence.output) == sequence.max_tokens:
                    self.scheduler.finish(sequence)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "chunk"), [("llama", 1), ("llama", 16), ("gpt_oss", 16), ("qwen3_next", 7)]
)
def test_rows_that_decode_in_several_groups_and_change_them_get_the_models_own_tokens(
    family: str, chunk: int
) -> None:
    rng = random.Random(f"{family} {chunk}")
    answers = [*clear_answers(family), *clear_answers(family, (50, 60, 55, 58))]
    loop = NarrowLoop(subject(family), chunk)
    waiting = rng.sample(list(enumerate(answers)), len(answers))
    sequences: dict[int, Sequence] = {}

    while waiting or loop.scheduler.has_work or loop.flight:
        if waiting and rng.random() < 0.3:
            number, answer = waiting.pop()
            sequences[number] = loop.add(number, answer)
        loop.step()

    assert {i: tuple(s.output) for i, s in sequences.items()} == {
        i: answer.tokens for i, answer in enumerate(answers)
    }
    assert any(isinstance(change, Transfer) for plan in loop.plans for change in plan.work)
    assert max(len({d.group for d in plan.decodes}) for plan in loop.plans) >= 2
    assert loop.runner.num_rows == 0


class FaultyRunner:
    """A model runner of which one step fails, once.

    Args:
        inner: Does the work.
        step: Which step.
        stage: ``before`` its graph is built, ``after``, or when it is ``read``.
    """

    def __init__(self, inner: ModelRunner, step: int, stage: str) -> None:
        self.inner = inner
        self.left = step
        self.stage = stage
        self.num_resets = 0

    @property
    def spec(self) -> Any:
        return self.inner.spec

    @property
    def max_draft_tokens(self) -> int:
        return self.inner.max_draft_tokens

    @property
    def encoder(self) -> None:
        return None

    def submit(self, plan: Plan) -> PendingStep:
        self.left -= 1
        if self.left == 0 and self.stage == "before":
            raise RuntimeError("the device is gone")
        pending = self.inner.submit(plan)
        if self.left == 0 and self.stage == "after":
            raise RuntimeError("the device is gone")
        return FaultyStep() if self.left == 0 else pending

    def reset(self) -> None:
        self.num_resets += 1
        self.inner.reset()

    def close(self) -> None:
        self.inner.close()


class FaultyStep:
    """A step that cannot be read."""

    def wait(self) -> StepResult:
        raise RuntimeError("the device is gone")


@pytest.mark.parametrize("stage", ["before", "after", "read"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next", "llama4"])
def test_after_a_fault_every_row_goes_on_with_the_models_own_tokens(
    family: str, stage: str
) -> None:
    target = subject(family)
    answers = [clear_answers(family)[i] for i in (0, 3, 6)]
    runner = FaultyRunner(ModelRunner(target.model, target.spec), step=9, stage=stage)
    engine = engine_of(target, runner=runner, chunk=7)
    for i, answer in enumerate(answers):
        engine.add(request_of(f"r{i}", answer))

    completions = drain(engine)

    assert runner.num_resets == 1
    for i, answer in enumerate(answers):
        check(completions[f"r{i}"], answer, NUM_TOKENS)


@pytest.mark.parametrize(
    "family", ["llama", "moe", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2_hybrid", "llama4"]
)
def test_other_tokens_in_the_rows_beside_it_change_no_bit_of_a_row(family: str) -> None:
    rng = random.Random(family)
    lengths = [40, 5, 70, 1]
    mine = random_tokens(rng, 33)

    def run_beside(neighbours: list[tuple[int, ...]]) -> Completion:
        engine = engine_of(subject(family), chunk=16)
        params = SamplingParams(
            temperature=0.9, top_p=0.95, seed=7, max_tokens=24, logprobs=True, top_logprobs=20
        )
        engine.add(Request(id="mine", prompt=mine, params=params))
        for i, prompt in enumerate(neighbours):
            other = SamplingParams(temperature=1.0, top_k=i, max_tokens=10 + 5 * i)
            engine.add(Request(id=f"n{i}", prompt=prompt, params=other))
        return drain(engine)["mine"]

    first, second = (run_beside([random_tokens(rng, n) for n in lengths]) for _ in range(2))

    assert first.tokens == second.tokens
    assert first.logprobs == second.logprobs
    assert first.top_logprobs == second.top_logprobs
    assert all(math.isfinite(logprob) for logprob in first.logprobs)
