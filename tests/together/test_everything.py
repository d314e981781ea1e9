"""Everything that the packages have, at once: each answer is the one that its request gets alone.

A seed draws the requests, what they share, when they come and go, and the engine: drafter and
controller, tiers of the prefix store, memory, chunks, and steps that fail.
"""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from treadle_cache import CacheConfig, RamStore, TieredStore
from treadle_cache.disk import DiskConfig, DiskTier
from treadle_core import Completion, Engine, EngineConfig, Request, SamplingParams, collect
from treadle_core.drafting import DraftController, Drafter, DraftRoom, TakesMemory, VerifiedStep
from treadle_core.errors import Unsupported
from treadle_core.events import Event, Failed, Finished
from treadle_core.layers import layer_bytes
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.plan import Key, Plan, StepResult
from treadle_core.ports import PendingStep, PrefixStore
from treadle_core.testing import ByteTokenizer, ListConstraint, zoo
from treadle_core.testing.drafting import RandomDrafter
from treadle_speculative import (
    AdaptiveController,
    DraftModelDrafter,
    FixedController,
    NgramDrafter,
)
from treadle_speculative.mtp import MtpDrafter, MtpHead

LETTERS = 256
LONGEST_DRAFT = 5
MOST_STEPS = 20_000
MOST_ERROR = 1e-3

Answers = dict[Key, Completion]


class Broken(RuntimeError):
    """A step that was made to fail."""


class BrokenStep:
    """A step that fails when it is read."""

    def settle(self) -> None:
        """Nothing to wait for."""

    def wait(self) -> StepResult:
        """Fail."""
        raise Broken


class FlakyRunner:
    """A runner whose steps fail now and then, when they are submitted or when they are read.

    Args:
        inner: Does the work.
        rng: Decides.
        rate: How many of its steps fail.
    """

    def __init__(self, inner: ModelRunner, rng: random.Random, rate: float) -> None:
        self._inner = inner
        self._rng = rng
        self._rate = rate
        self.num_failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, plan: Plan) -> PendingStep:
        luck = self._rng.random()
        self.num_failed += luck < self._rate
        if luck < self._rate / 2:
            raise Broken
        step = self._inner.submit(plan)
        return BrokenStep() if luck < self._rate else step


class MoodyController:
    """Asks for drafts of any length, or none, and takes any part of them."""

    max_tokens = LONGEST_DRAFT

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def limits(self, rows: Sequence[DraftRoom]) -> list[int]:
        most = self._rng.choice([0, 0, 1, 3, LONGEST_DRAFT])
        return [self._rng.randint(0, min(row.most, most)) for row in rows]

    def settle(self, rows: Sequence[DraftRoom]) -> list[int]:
        return [self._rng.randint(0, row.most) for row in rows]

    def observe(self, step: VerifiedStep) -> None:
        """Nothing to learn."""

    def leave(self, key: Key) -> None:
        """It knows no rows."""


class Numbers:
    """A vocabulary that all models here share."""

    def __init__(self) -> None:
        self.vocabulary = {str(token): token for token in range(LETTERS)}
        self.special_tokens = frozenset[int]()


class Ended(Struct):
    """What became of a run.

    Attributes:
        answers: What was answered.
        aborted: Whose requests were.
        num_ends: Last events by answer.
        num_failed_steps: Steps that were made to fail.
        engine: Closed by now.
    """

    answers: Answers
    aborted: set[str]
    num_ends: dict[Key, int]
    num_failed_steps: int
    engine: Engine


@cache
def model_of(family: str) -> Any:
    return zoo.build(family)


def runner_of(family: str, slack: int = 0) -> ModelRunner:
    return make_runner(model_of(family), zoo.config(family), slack=slack)


def draw_requests(rng: random.Random, num: int, vocab_size: int) -> list[Request]:
    """Requests that have beginnings in common, and repeat themselves."""
    roots = [draw_tokens(rng, 3, 60) for _ in range(4)]
    found: list[Request] = []
    for number in range(num):
        root = rng.choice(roots)
        prompt = root[: rng.randint(0, len(root))] + draw_tokens(rng, 1, 25) * rng.randint(1, 3)
        found.append(
            Request(
                id=str(number),
                prompt=prompt,
                params=draw_params(rng),
                n=rng.choice([1, 1, 1, 2]),
                priority=rng.randint(0, 3),
                cache_salt=rng.choice([None, None, "tenant"]),
                boundaries=tuple({rng.randint(1, len(prompt)) for _ in range(rng.randint(0, 2))}),
                constraint=draw_constraint(rng, vocab_size),
            )
        )
    return found


def draw_tokens(rng: random.Random, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.randrange(LETTERS) for _ in range(rng.randint(low, high)))


def draw_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 30),
        temperature=rng.choice([0.0, 0.0, 0.8, 1.2]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 0, 20]),
        min_p=rng.choice([0.0, 0.02]),
        seed=rng.randrange(1 << 30),
        ignore_eos=rng.random() < 0.7,
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        logprobs=rng.random() < 0.3,
        logit_bias={rng.randrange(LETTERS): 5.0} if rng.random() < 0.2 else {},
        stop=(chr(rng.randrange(97, 123)),) if rng.random() < 0.2 else (),
    )


def draw_constraint(rng: random.Random, vocab_size: int) -> Any:
    if rng.random() < 0.8:
        return None
    choices = [draw_tokens(rng, 4, 15) for _ in range(3)]
    choices.append(choices[0][:3] + choices[1])
    return lambda: ListConstraint(choices, vocab_size)


def alone(family: str, requests: Sequence[Request]) -> Answers:
    """What each is answered by an engine that has nothing else, and nobody else."""
    runner, found = runner_of(family), Answers()
    for request in requests:
        engine = Engine(runner, tokenizer=ByteTokenizer(), config=EngineConfig(max_num_seqs=1))
        engine.add(request)
        found.update(collect(drain(engine)))
    return found


def drain(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return events


def draw_drafter(
    rng: random.Random, runner: ModelRunner, requests: Sequence[Request], truth: Answers
) -> tuple[Drafter | None, DraftController | None]:
    longest = runner.max_draft_tokens
    if not longest:
        return None, None

    known = [
        (*request.prompt, *truth[request.id, index].tokens)
        for request in requests
        for index in range(request.n)
        if not isinstance(request.prompt, str)
    ]

    def truly(tokens: Sequence[int], num: int) -> list[int]:
        for whole in known:
            if whole[: len(tokens)] == tuple(tokens):
                return list(whole[len(tokens) :][:num])
        return []

    kinds = {
        "knowing": lambda: RandomDrafter(truly, seed=rng.randrange(1000)),
        "ngram": NgramDrafter,
        "draft_model": lambda: DraftModelDrafter(runner_of("llama", longest), Numbers(), Numbers()),
        "mtp": lambda: untrained_head(runner),
    }
    controllers = (
        MoodyController(rng),
        AdaptiveController(),
        FixedController(rng.randint(1, longest)),
    )
    return kinds[rng.choice(sorted(kinds))](), rng.choice(controllers)


def untrained_head(runner: ModelRunner) -> Drafter:
    try:
        base = runner.split()
        drafter = MtpDrafter(MtpHead(base), context_length=runner.spec.context_length)
    except Unsupported:
        return NgramDrafter()
    runner.listen(drafter, base)
    return drafter


def draw_store(rng: random.Random, runner: ModelRunner, folder: Path) -> PrefixStore | None:
    if not runner.spec.storable or rng.random() < 0.2:
        return None
    capacity, block = rng.choice([100_000, 400_000, 64 << 20]), rng.choice([4, 8, 32])
    ram = RamStore(CacheConfig(capacity_bytes=capacity, block_size=block))
    if rng.random() < 0.4:
        return ram
    return TieredStore(
        ram,
        DiskTier(DiskConfig(directory=str(folder), capacity_bytes=64 << 20, min_free_bytes=0)),
    )


def draw_config(
    rng: random.Random, runner: ModelRunner, slack: int, *, bounded: bool
) -> EngineConfig:
    row = sum(layer_bytes(layer, 1, 128, slack) for layer in runner.spec.layers)
    return EngineConfig(
        max_num_seqs=rng.choice([2, 4, 8]),
        kv_memory_bytes=int(row * rng.choice([1.5, 3, 5]))
        if bounded and rng.random() < 0.5
        else None,
        checkpoint_interval=rng.choice([8, 16, 64]),
        chunked_prefill_tokens=rng.choice([0, 3, 7, 16]),
        prefill_step_size=rng.choice([5, 32, 2048]),
        policy=rng.choice(["fcfs", "priority"]),
    )


def together(rng: random.Random, engine: Engine, requests: Sequence[Request]) -> Ended:
    """Let them come one after the other while others run, and some go; each twice."""
    todo = [*requests, *(replace(request, id=f"{request.id} again") for request in requests)]
    leaving: list[tuple[int, str]] = []
    aborted: set[str] = set()
    events: list[Event] = []
    num_steps = 0
    while todo or engine.has_work:
        if todo and (not engine.has_work or rng.random() < 0.4):
            request = todo.pop(0)
            engine.add(request)
            if rng.random() < 0.1:
                leaving.append((num_steps + rng.randint(0, 12), request.id))
        for due, id in leaving:
            if due == num_steps and engine.abort(id):
                aborted.add(id)
        if rng.random() < 0.01:
            engine.clear_prefixes()
        events += engine.step()
        engine.check_integrity()
        num_steps += 1
        assert num_steps < MOST_STEPS, "the engine does not come to an end"
    ends = [event for event in events if isinstance(event, Finished | Failed)]
    keys = [(event.request_id, event.index) for event in ends]
    return Ended(collect(events), aborted, {key: keys.count(key) for key in keys}, 0, engine)


def run(family: str, seed: int, folder: Path) -> tuple[Ended, Sequence[Request], Answers]:
    rng = random.Random(seed)
    requests = draw_requests(rng, rng.randint(6, 10), runner_of(family).spec.vocab_size)
    truth = alone(family, requests)
    slack = rng.choice([0, 3, LONGEST_DRAFT])
    runner = runner_of(family, slack)
    drafter, controller = draw_drafter(rng, runner, requests, truth)
    flaky: Any = FlakyRunner(runner, rng, rng.choice([0.0, 0.0, 0.02]))
    engine = Engine(
        flaky,
        tokenizer=ByteTokenizer(),
        config=draw_config(rng, runner, slack, bounded=not isinstance(drafter, TakesMemory)),
        store=draw_store(rng, runner, folder),
        drafter=drafter,
        controller=controller,
    )
    try:
        ended = together(rng, engine, requests)
    finally:
        engine.close()
    ended.num_failed_steps = flaky.num_failed
    return ended, requests, truth


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(zoo.FAMILIES))
def test_each_answer_is_the_one_that_its_request_gets_alone(family: str, tmp_path: Path) -> None:
    # Each family meets another mixture.
    seed = 100 + sorted(zoo.FAMILIES).index(family)
    ended, requests, truth = run(family, seed, tmp_path)
    for request in requests:
        for id in (request.id, f"{request.id} again"):
            for index in range(request.n):
                assert ended.num_ends[id, index] == 1
                check(ended, (id, index), truth[request.id, index])


def check(ended: Ended, key: Key, expected: Completion) -> None:
    found = ended.answers[key]
    if key[0] in ended.aborted or found.error is not None:
        # Only steps that fail fail an answer; what it was told until then stands.
        assert key[0] in ended.aborted or ended.num_failed_steps
        assert found.tokens == expected.tokens[: len(found.tokens)]
        return
    assert (found.tokens, found.text, found.reason) == (
        expected.tokens,
        expected.text,
        expected.reason,
    )
    assert found.logprobs == pytest.approx(expected.logprobs, abs=MOST_ERROR)
