"""Requests of every kind in one batch get the tokens that they get alone, whatever happens."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from treadle_core import Completion, Engine, EngineConfig, Request, SamplingParams, collect
from treadle_core.layers import layer_bytes
from treadle_core.mlx_runtime.adapter import TextModel
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.pacing import FixedChunk
from treadle_core.testing import ListConstraint, ScriptedConstraint, zoo

from .harness import Subject, random_tokens, subject

FAMILIES = ["llama", "gpt_oss", "qwen3_next", "gpt_bigcode"]
NUM_TOKENS = 20
WORD = b"treadle"

SAMPLED = SamplingParams(temperature=1.0, top_p=1.0, seed=11, max_tokens=NUM_TOKENS)


def favour_length(tokens: Sequence[int], logits: mx.array) -> mx.array:
    """A processor whose effect depends on how many tokens there are."""
    return logits.at[len(tokens)].add(6.0)


def every_third(vocab_size: int = zoo.VOCAB_SIZE) -> ScriptedConstraint:
    """A grammar that allows other tokens at each position."""
    allowed = [range(i % 3, vocab_size, 3) for i in range(NUM_TOKENS)]
    return ScriptedConstraint(allowed, vocab_size=vocab_size)


def one_word() -> ListConstraint:
    """A grammar that leaves no choice."""
    return ListConstraint([tuple(WORD)], vocab_size=zoo.VOCAB_SIZE)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 1.0, "seed": 1},
    "filtered": {"temperature": 1.3, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 2},
    "repeats less": {"temperature": 0.8, "repetition_penalty": 1.4, "seed": 3},
    "varied": {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 1.5},
    "biased": {"temperature": 1.0, "logit_bias": {65: 8.0, 66: 7.0, 67: -100.0}, "seed": 4},
    "reporting": {"temperature": 1.0, "seed": 5, "logprobs": True, "top_logprobs": 3},
    "processed": {"temperature": 1.0, "seed": 6},
    "grammar": {"temperature": 1.0, "seed": 7},
    "word": {"temperature": 0.0},
}
EXTRAS: dict[str, dict[str, Any]] = {
    "processed": {"logits_processors": (favour_length,)},
    "grammar": {"constraint": every_third},
    "word": {"constraint": one_word},
}


def request_of(kind: str, prompt: tuple[int, ...]) -> Request:
    """A request of one of the kinds."""
    params = SamplingParams(max_tokens=NUM_TOKENS, **KINDS[kind])
    return Request(id=kind, prompt=prompt, params=params, **EXTRAS.get(kind, {}))


def engine_of(target: Subject, chunk: int = 16, **config: Any) -> Engine:
    """An engine of its own over the tiny model."""
    runner = ModelRunner(target.model, target.spec)
    return Engine(runner, config=EngineConfig(**config), chunk=FixedChunk(chunk))


def finish(engine: Engine, events: list[Any] | None = None) -> dict[str, Completion]:
    """Run to the end."""
    found = list(events or [])
    while engine.has_work:
        found += engine.step()
        engine.check_integrity()
    return {
        f"{key[0]}" if key[1] == 0 else f"{key[0]}/{key[1]}": c for key, c in collect(found).items()
    }


def answers_alone(target: Subject, prompts: dict[str, tuple[int, ...]]) -> dict[str, Completion]:
    """Each kind's answer with nobody else there."""
    found: dict[str, Completion] = {}
    for kind, prompt in prompts.items():
        engine = engine_of(target)
        engine.add(request_of(kind, prompt))
        found |= finish(engine)
    return found


def prompts_of(family: str, longest: int = 60) -> dict[str, tuple[int, ...]]:
    """A prompt per kind."""
    rng = random.Random(family)
    return {kind: random_tokens(rng, rng.randint(1, longest)) for kind in KINDS}


def assert_same(found: dict[str, Completion], expected: dict[str, Completion]) -> None:
    """Tokens and reasons are equal, log-probabilities up to rounding."""
    assert {k: found[k].tokens for k in expected} == {k: c.tokens for k, c in expected.items()}
    assert {k: found[k].reason for k in expected} == {k: c.reason for k, c in expected.items()}
    for kind, completion in expected.items():
        assert found[kind].logprobs == pytest.approx(completion.logprobs, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_kind_in_one_batch_equal_their_solo_runs(family: str) -> None:
    rng = random.Random(family)
    target, prompts = subject(family), prompts_of(family)
    engine = engine_of(target, max_num_seqs=7)
    events: list[Any] = []

    for kind in rng.sample(list(KINDS), len(KINDS)):
        engine.add(request_of(kind, prompts[kind]))
        for _ in range(rng.randint(0, 4)):
            events += engine.step()
    together = finish(engine, events)

    assert_same(together, answers_alone(target, prompts))
    assert bytes(together["word"].tokens) == WORD
    assert {token % 3 for token in together["grammar"].tokens[1::3]} == {1}
    assert len(set(together["varied"].tokens)) > len(set(together["greedy"].tokens))
    assert 65 in together["biased"].tokens
    assert 67 not in together["biased"].tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next"])
def test_rows_of_every_kind_that_are_preempted_equal_their_solo_runs(family: str) -> None:
    target = subject(family)
    prompts = {kind: random_tokens(random.Random(kind), 50) for kind in KINDS}
    sizes = [layer_bytes(layer, 5, 64, 0) for layer in target.spec.layers]
    engine = engine_of(target, kv_memory_bytes=sum(sizes) + max(sizes))
    for kind, prompt in prompts.items():
        engine.add(request_of(kind, prompt))

    together = finish(engine)

    assert_same(together, answers_alone(target, prompts))
    usages = [completion.usage for completion in together.values()]
    assert sum(usage.preemptions > 0 for usage in usages if usage) >= 3


def tokens_of(make: Callable[[], Engine], *requests: Request) -> dict[str, list[int]]:
    """Tokens of requests in an engine of their own."""
    engine = make()
    for request in requests:
        engine.add(request)
    return {name: completion.tokens for name, completion in finish(engine).items()}


class TestSeeds:
    PROMPT = tuple(range(40, 60))

    def tokens(self, params: SamplingParams, n: int = 1) -> dict[str, list[int]]:
        request = Request(id="a", prompt=self.PROMPT, params=params, n=n)
        return tokens_of(lambda: engine_of(subject("llama")), request)

    def test_a_new_engine_gives_a_seed_the_same_tokens(self) -> None:
        assert self.tokens(SAMPLED) == self.tokens(SAMPLED)

    def test_choices_of_one_request_differ_and_the_first_is_that_of_a_single_one(self) -> None:
        several, single = self.tokens(SAMPLED, n=4), self.tokens(SAMPLED)

        assert several["a"] == single["a"]
        assert len({tuple(tokens) for tokens in several.values()}) == 4

    def test_requests_without_a_seed_differ(self) -> None:
        unseeded = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=NUM_TOKENS)

        assert self.tokens(unseeded) != self.tokens(unseeded)

    def test_the_same_seed_twice_in_a_batch_gives_the_same_tokens_twice(self) -> None:
        requests = [Request(id=name, prompt=self.PROMPT, params=SAMPLED) for name in "ab"]

        found = tokens_of(lambda: engine_of(subject("llama")), *requests)

        assert found["a"] == found["b"]


class TestFailures:
    """A request that cannot go on ends alone."""

    @staticmethod
    def fail_later(tokens: Sequence[int], logits: mx.array) -> mx.array:
        if len(tokens) == 3:
            raise LookupError("lost")
        return logits

    def test_a_processor_that_fails_ends_its_request_and_no_other(self) -> None:
        target = subject("llama")
        prompts = prompts_of("llama")
        engine = engine_of(target)
        guilty = Request(
            id="guilty", prompt=(1, 2), params=SAMPLED, logits_processors=(self.fail_later,)
        )
        for request in [guilty, *(request_of(kind, prompt) for kind, prompt in prompts.items())]:
            engine.add(request)

        together = finish(engine)

        assert together["guilty"].reason == "error"
        assert "LookupError: lost" in str(together["guilty"].error)
        assert len(together["guilty"].tokens) == 3
        assert_same(together, answers_alone(target, prompts))

    @pytest.mark.parametrize("ended", ["by its failure", "by an abort"])
    @pytest.mark.parametrize("family", ["llama", "gpt_oss"])
    def test_a_row_that_became_nan_in_its_last_step_does_not_fail_the_next_one(
        self, family: str, ended: str
    ) -> None:
        prompt, answer = self.varied_answer(family)
        target = self.poisoned_at(family, answer[3])
        engine = engine_of(target, chunk=64)
        running = SamplingParams(temperature=0.0, max_tokens=30)
        events: list[Any] = []

        engine.add(Request(id="before", prompt=tuple(range(10)), params=running))
        events += engine.step()
        params = SamplingParams(temperature=0.0, max_tokens=5)
        engine.add(Request(id="guilty", prompt=prompt, params=params))
        for _ in range(5):  # the last one, which is not read yet, made NaN of the row
            events += engine.step()
        if ended == "by an abort":
            engine.abort("guilty")
        engine.add(Request(id="after", prompt=tuple(range(12)), params=running))
        together = finish(engine, events)

        assert together["guilty"].tokens == answer[:4]
        assert together["guilty"].reason == ("error" if ended == "by its failure" else "abort")
        for name, length in (("before", 10), ("after", 12)):
            alone = zoo.greedy(target.model.model, range(length), 30)
            assert together[name].tokens == alone

    @staticmethod
    def varied_answer(family: str) -> tuple[tuple[int, ...], list[int]]:
        """A prompt whose fourth answer token is new to it and to the other requests."""
        rng = random.Random(family)
        model = subject(family).model.model
        ordinary = {
            *range(12),
            *zoo.greedy(model, range(10), 30),
            *zoo.greedy(model, range(12), 30),
        }
        while True:
            prompt = random_tokens(rng, 40)
            answer = zoo.greedy(model, prompt, 4)
            if answer[3] not in {*answer[:3], *prompt, *ordinary}:
                return prompt, answer

    @staticmethod
    def poisoned_at(family: str, token: int) -> Subject:
        """The family's model, which makes NaN of everything from ``token`` on."""
        model = zoo.build(family)
        weights = dict(tree_flatten(model.parameters()))
        embedding = weights["model.embed_tokens.weight"]
        embedding[token] = float("nan")
        model.load_weights([("model.embed_tokens.weight", embedding)], strict=False)
        return Subject(family, TextModel(model), subject(family).spec)
