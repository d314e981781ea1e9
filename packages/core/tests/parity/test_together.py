"""A model that raises in the middle of a forward, beside all else that may happen to its rows.

Chunks share forwards with decodes, drafts are verified, bytes run out, prompts are restored, requests
are aborted, their own code raises: every answer is still that of its request alone.
"""

import gc
import random
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import pytest
from greenlet import greenlet

from treadle_core import Completion, Engine, EngineConfig, Request, SamplingParams, collect
from treadle_core.drafting import DraftRoom, Proposal, VerifiedStep
from treadle_core.layers import layer_bytes
from treadle_core.mlx_runtime import fusing
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.mlx_runtime.twins import twin
from treadle_core.pacing import FixedChunk
from treadle_core.plan import Key
from treadle_core.testing import RecordingStore, ScriptedConstraint, zoo
from treadle_core.testing.drafting import OracleDrafter, SteadyController, other_than

SLACK = 3
SHARED = tuple(range(40, 110))


@pytest.fixture(autouse=True)
def calm() -> None:
    """No fuse is lit when a test begins."""
    Fuse.left = -1


class Fuse:
    """Mixed into a layer of a model: raises once when as many of its calls as were set are left."""

    left = -1
    blown = 0

    def __call__(self, x: mx.array) -> mx.array:
        Fuse.left -= 1
        if Fuse.left == 0:
            Fuse.blown += 1
            raise RuntimeError("the device is gone")
        return super().__call__(x)  # type: ignore[misc]


class Refuses:
    """A logits processor that raises at one place of the answer."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __call__(self, tokens: Any, logits: mx.array) -> mx.array:
        if len(tokens) == self._place:
            raise ValueError("no more")
        return 2.0 * logits


class Knows(OracleDrafter):
    """Guesses the answers that the requests get alone, more or less."""

    def __init__(self, answers: Mapping[Key, Completion], rng: random.Random) -> None:
        super().__init__(lambda tokens, num: [])
        self._answers = answers
        self._rng = rng

    def propose(self, rooms: Sequence[DraftRoom]) -> list[Proposal]:
        return [self._guess(room.key, room.most) for room in rooms]

    def _guess(self, key: Key, most: int) -> Proposal:
        start = len(self.rows[key].output)
        known = self._answers[key].tokens[start : start + self._rng.randint(0, most)]
        return Proposal(tuple(t if self._rng.random() < 0.7 else other_than(t) for t in known))


class Sometimes(SteadyController):
    """Asks for drafts in some steps."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(SLACK)
        self._rng = rng
        self._on = True

    def asks(self) -> bool:
        return self._on

    def observe(self, step: VerifiedStep) -> None:
        self._on ^= self._rng.random() < 0.2


def make_request(rng: random.Random, number: int) -> Request:
    prompt = tuple(rng.randrange(256) for _ in range(rng.choice([1, 2, 17, 64, 90])))
    if rng.random() < 0.5:
        prompt = SHARED[: rng.randint(1, 70)] + prompt[:20]
    params: dict[str, Any] = {"max_tokens": rng.randint(1, 16), "temperature": 0.0}
    if rng.random() < 0.5:
        params |= {"temperature": rng.choice([0.5, 1.5]), "seed": number, "top_k": 20}
    if rng.random() < 0.3:
        params |= {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    own: dict[str, Any] = {"n": rng.choice([1, 1, 2])}
    kind = rng.random()
    if kind < 0.3:
        allowed = [sorted(rng.sample(range(256), 40)) for _ in range(16)]
        after = rng.choice([None, 5])
        own["constraint"] = lambda: ScriptedConstraint(
            allowed, complete_after=after, vocab_size=zoo.VOCAB_SIZE
        )
    elif kind < 0.45:
        own["logits_processors"] = (Refuses(rng.choice([-1, 0, 4])),)
    return Request(id=f"r{number}", prompt=prompt, params=SamplingParams(**params), **own)


def alone(runner: Any, request: Request) -> dict[Key, Completion]:
    engine = Engine(runner, chunk=FixedChunk(10**6))
    engine.add(request)
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
    return collect(events)


def fused_model(family: str) -> Any:
    """A model that can be made to raise in the middle of a forward."""
    model: Any = zoo.build(family)
    model.layers[-2].input_layernorm = twin(model.layers[-2].input_layernorm, Fuse)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_whatever_happens_at_once_every_answer_is_that_of_its_request_alone(
    family: str, seed: int
) -> None:
    rng = random.Random(f"{family} {seed}")
    requests = [make_request(rng, number) for number in range(8)]
    plain = make_runner(zoo.build(family), zoo.config(family))
    expected = {k: c for request in requests for k, c in alone(plain, request).items()}
    runner = make_runner(fused_model(family), zoo.config(family), slack=SLACK)
    sizes = [layer_bytes(layer, 1, 128, SLACK) for layer in runner.spec.layers]
    # A row that is stored at the end of its prompt has no last chunk beside its first token.
    store = RecordingStore() if seed else None
    engine = Engine(
        runner,
        config=EngineConfig(max_num_seqs=6, kv_memory_bytes=3 * sum(sizes) + max(sizes)),
        chunk=FixedChunk(rng.choice([5, 16, 64])),
        store=store,
        drafter=Knows(expected, rng),
        controller=Sometimes(rng),
    )
    waiting, aborted, events, blown = list(requests), set[str](), list[Any](), Fuse.blown

    while waiting or engine.has_work:
        if waiting and rng.random() < 0.5:
            engine.add(waiting.pop())
        if rng.random() < 0.02:
            request_id = rng.choice(requests).id
            aborted |= {request_id} if engine.abort(request_id) else set()
        if rng.random() < 0.02:
            engine.clear_prefixes()
        if Fuse.left < 0 and rng.random() < 0.05:
            Fuse.left = rng.randint(1, 6)
        events += engine.step()
        engine.check_integrity()

    assert Fuse.blown > blown
    assert store is None or not store.open_tickets
    for key, completion in collect(events).items():
        answer = expected[key]
        ended_early = key[0] in aborted or "the device is gone" in str(completion.error)
        tokens = answer.tokens[: len(completion.tokens)] if ended_early else answer.tokens
        assert completion.tokens == tokens, key
        assert ended_early or completion.reason == answer.reason, key
    assert engine.scheduler.layout.allocated_bytes == 0


def test_a_forward_that_was_given_up_leaves_nothing_behind() -> None:
    runner = make_runner(fused_model("llama"), zoo.config("llama"))
    engine = Engine(runner, chunk=FixedChunk(8))
    params = SamplingParams(max_tokens=40, temperature=0.0)
    engine.add(Request(id="decodes", prompt=(1, 2, 3), params=params))
    for _ in range(4):
        engine.step()
    engine.add(Request(id="joins", prompt=SHARED, params=params))
    # The chunk's forward is past the layer when the decode's comes to it.
    Fuse.left, blown = 2, Fuse.blown
    while Fuse.blown == blown:
        engine.step()
    gc.collect()

    named = (it for it in vars(fusing).values() if isinstance(it, type) and it is not greenlet)
    forwards = {it for it in named if issubclass(it, greenlet)}
    assert forwards
    assert not [it for it in gc.get_objects() if type(it) in forwards]
