"""Answers with drafts are the plain answers, token for token, whoever drafts and however well."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from treadle_core import Completion, Engine, EngineConfig, Request, SamplingParams, collect
from treadle_core.drafting import DraftController
from treadle_core.mlx_runtime.load import bounded
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.pacing import FixedChunk
from treadle_core.testing import ScriptedConstraint, zoo
from treadle_core.testing.drafting import (
    LastWrongDrafter,
    OracleDrafter,
    RandomDrafter,
    SteadyController,
    WrongDrafter,
)

from .harness import SOLO, TOLERANCE, Subject, random_tokens, reference, subject

DRAFTED = ("llama", "qwen3", "moe", "gemma3", "gpt_oss", "deepseek_v3")
RECURRENT = ("qwen3_next", "mamba2_hybrid", "nemotron_h", "lfm2")
LENGTHS = (1, 33, 64, 17, 70, 5)
VOCAB = zoo.VOCAB_SIZE


class Always(SteadyController):
    """Asks for drafts in every step, or in every other one."""

    def __init__(self, num_tokens: int, *, sometimes: bool = False) -> None:
        super().__init__(num_tokens)
        self.sometimes = sometimes

    def asks(self) -> bool:
        return not (self.sometimes and len(self.steps) % 2)


def even_tokens() -> ScriptedConstraint:
    """Every other token is even, and the answer is complete after 13."""
    allowed = [range(0, VOCAB, 2) if place % 2 else None for place in range(40)]
    return ScriptedConstraint(allowed, complete_after=13, vocab_size=VOCAB)


def requests_of(family: str) -> list[Request]:
    """Rows of every kind, of all lengths."""
    rng = random.Random(family)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {
            "temperature": 1.0,
            "seed": 5,
            "top_k": 40,
            "min_tokens": 9,
            "stop_token_ids": tuple(range(0, VOCAB, 3)),
            "presence_penalty": 0.5,
        },
        {"temperature": 0.9, "seed": 8, "min_p": 0.02, "logit_bias": {7: 3.0}},
        {"temperature": 0.0},
    ]
    return [
        Request(
            id=f"r{i}",
            prompt=random_tokens(rng, length),
            params=SamplingParams(max_tokens=28 - i, logprobs=True, top_logprobs=5, **kind),
            constraint=even_tokens if i == 4 else None,
            logits_processors=(lambda tokens, logits: logits,) if i == 5 else (),
        )
        for i, (length, kind) in enumerate(zip(LENGTHS, kinds, strict=True))
    ]


def engine_of(
    target: Subject, drafter: OracleDrafter | None, controller: DraftController | None, k: int
) -> Engine:
    return Engine(
        ModelRunner(target.model, target.spec, slack=k),
        config=EngineConfig(max_num_seqs=4, max_num_batched_tokens=256),
        chunk=FixedChunk(16),
        drafter=drafter,
        controller=controller,
    )


def play(engine: Engine, requests: Sequence[Request], every: int) -> dict[str, Completion]:
    """Run requests that arrive one after the other."""
    waiting, events = list(requests), list[Any]()
    for number in range(10_000):
        if waiting and number % every == 0:
            engine.add(waiting.pop(0))
        if not waiting and not engine.has_work:
            break
        events += engine.step()
        engine.check_integrity()
    return {key[0]: completion for key, completion in collect(events).items()}


def target_of(family: str) -> Subject:
    """The family's model; with ``bounded`` in its name, rows forget what is far back."""
    target = subject(family.removesuffix(" bounded"))
    if family.endswith(" bounded"):
        return Subject(family, target.model, bounded(target.spec, 24))
    return target


@cache
def plain(family: str) -> dict[str, Completion]:
    return play(engine_of(target_of(family), None, None, 0), requests_of(family), every=3)


def continuation(family: str) -> Callable[[Sequence[int], int], list[int]]:
    """What plain decoding gave; nothing sensible behind an end."""
    known = [
        [*request.prompt, *plain(family)[request.id].tokens] for request in requests_of(family)
    ]

    def go_on(tokens: Sequence[int], num: int) -> list[int]:
        for each in known:
            if each[: len(tokens)] == list(tokens):
                return [*each[len(tokens) :], *[1] * num][:num]
        raise AssertionError("a row has tokens that plain decoding did not give")

    return go_on


def check(family: str, found: dict[str, Completion]) -> None:
    for request in requests_of(family):
        expected, completion = plain(family)[request.id], found[request.id]
        assert completion.tokens == expected.tokens, request.id
        assert completion.reason == expected.reason
        scale = float(np.abs(reference(subject(family.split()[0]), tuple(request.prompt))).max())
        near = TOLERANCE * scale
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=near)
        for mine, others in zip(completion.top_logprobs, expected.top_logprobs, strict=True):
            pairs = [[item.logprob for item in tops] for tops in (mine, others)]
            assert pairs[0] == pytest.approx(pairs[1], abs=near)


KINDS = {
    "right": OracleDrafter,
    "wrong": WrongDrafter,
    "last wrong": LastWrongDrafter,
    "random": RandomDrafter,
}


CASES = [
    *product([*DRAFTED, "llama bounded", "deepseek_v3 bounded"], KINDS, [1, 3, 7]),
    *((family, kind, 3 + place % 2) for place, kind in enumerate(KINDS) for family in RECURRENT),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind", "k"), CASES)
def test_rows_that_join_and_leave_get_their_plain_answers(family: str, kind: str, k: int) -> None:
    drafter = KINDS[kind](continuation(family))
    controller = Always(k, sometimes=k == 3)
    engine = engine_of(target_of(family), drafter, controller, k)

    found = play(engine, requests_of(family), every=3)

    check(family, found)
    total = engine.stats().drafts
    assert total is not None
    assert total.attempted > 5
    # Two answers end before their limit, and what was drafted behind the end was in vain.
    assert total.rejected <= 2 * k or kind != "right"
    assert total.accepted == 0 or kind != "wrong"
    assert found["r5"].usage is not None
    assert found["r5"].usage.drafts is not None
    assert set(found["r5"].usage.drafts.bypassed) <= {"unsupported", "off"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2_hybrid"])
def test_long_answers_of_recurrent_rows_stay_the_plain_ones(family: str) -> None:
    """Two hundred tokens, while short rows come and go beside them."""
    rng = random.Random(family)
    requests = [
        Request(
            id=f"r{i}",
            prompt=random_tokens(rng, 3 + 5 * i % 17),
            params=SamplingParams(temperature=0.0, max_tokens=200 if i < 2 else 7),
        )
        for i in range(16)
    ]
    expected = play(engine_of(subject(family), None, None, 0), requests, every=5)
    known = [[*request.prompt, *expected[request.id].tokens] for request in requests]

    def go_on(tokens: Sequence[int], num: int) -> list[int]:
        (found,) = (each for each in known if each[: len(tokens)] == list(tokens))
        return found[len(tokens) :][:num]

    engine = engine_of(subject(family), RandomDrafter(go_on), Always(5), 5)
    found = play(engine, requests, every=3)

    assert {id: answer.tokens for id, answer in found.items()} == {
        id: answer.tokens for id, answer in expected.items()
    }
    total = engine.stats().drafts
    assert total is not None
    assert min(total.accepted, total.rejected) > 50


def long_requests(family: str) -> list[Request]:
    """Greedy rows: two of 200 tokens, and short ones that come and go beside them."""
    rng = random.Random(family)
    greedy = {"temperature": 0.0, "logprobs": True}
    return [
        Request(
            id=f"long{i}" if i % 3 == 0 else f"short{i}",
            prompt=random_tokens(rng, 3 + 11 * i % 40),
            params=SamplingParams(max_tokens=200 if i % 3 == 0 else 5 + i, **greedy),
        )
        for i in range(6)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "k"),
    [
        ("llama", "random", 5),
        ("gemma3", "last wrong", 4),
        ("gpt_oss", "random", 3),
        ("deepseek_v3", "last wrong", 2),
        ("llama bounded", "random", 4),
    ],
)
def test_two_hundred_tokens_with_rows_coming_and_going_are_the_plain_ones(
    family: str, kind: str, k: int
) -> None:
    requests = long_requests(family)
    expected = play(engine_of(target_of(family), None, None, 0), requests, every=6)
    known = [[*r.prompt, *expected[r.id].tokens, *[1] * k] for r in requests]

    def go_on(tokens: Sequence[int], num: int) -> list[int]:
        whole = next(each for each in known if each[: len(tokens)] == list(tokens))
        return whole[len(tokens) :][:num]

    engine = engine_of(target_of(family), KINDS[kind](go_on), Always(k), k)

    found = play(engine, requests, every=6)

    for request in requests:
        assert found[request.id].tokens == expected[request.id].tokens, request.id
        scale = float(np.abs(reference(subject(family.split()[0]), tuple(request.prompt))).max())
        assert found[request.id].logprobs == pytest.approx(
            expected[request.id].logprobs, abs=TOLERANCE * scale
        )
    total = engine.stats().drafts
    assert total is not None
    assert total.accepted > 100


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_right_drafts_save_forwards_whatever_the_batch(num_rows: int) -> None:
    family = "llama"
    drafter = OracleDrafter(continuation(family))
    engine = engine_of(subject(family), drafter, Always(4), 4)

    requests = requests_of(family)[:num_rows]
    found = play(engine, requests, every=1)

    for request in requests:
        assert found[request.id].tokens == plain(family)[request.id].tokens
        usage = found[request.id].usage
        assert usage is not None
        assert usage.drafts is not None
        forwards = usage.completion_tokens - usage.drafts.forwards_saved
        assert forwards <= 1 + -(-usage.completion_tokens // 5) + 1


@pytest.mark.parametrize("k", [2, 5])
def test_a_lossy_engine_keeps_drafts_but_for_what_a_row_forbids(k: int) -> None:
    """Whoever asked for ten tokens at least, or for a grammar, gets them all the same."""
    target = subject("llama")
    drafter = WrongDrafter(lambda tokens, num: [20 + len(tokens) % 7] * num)
    engine = Engine(
        ModelRunner(target.model, target.spec, slack=k),
        drafter=drafter,
        controller=Always(k),
        lossy=True,
    )
    ends = tuple(range(15, 30))
    kinds: dict[str, dict[str, Any]] = {
        "free": {},
        "long": {"min_tokens": 10, "stop_token_ids": ends},
        "even": {},
    }
    requests = [
        Request(
            id=id,
            prompt=(5, 6, 7),
            params=SamplingParams(
                max_tokens=20, temperature=0.0, logprobs=True, top_logprobs=20, **params
            ),
            constraint=even_tokens if id == "even" else None,
        )
        for id, params in kinds.items()
    ]

    found = play(engine, requests, every=1)

    free = found["free"]
    assert free.usage is not None
    assert free.usage.drafts is not None
    assert free.usage.drafts.lossy == free.usage.drafts.attempted > 10
    # What was kept is what the reply says, with the probability that the model gives it.
    for token, logprob, top in zip(free.tokens, free.logprobs, free.top_logprobs, strict=True):
        known = {each.token: each.logprob for each in top}
        assert logprob == known.get(token, logprob)
        assert token in known or logprob <= min(known.values())
    assert not set(found["long"].tokens[:9]) & set(ends)
    assert len(found["long"].tokens) >= 10
    assert all(token % 2 == 0 for token in found["even"].tokens[1::2])


@pytest.mark.parametrize("family", sorted(SOLO - {"gemma2"}))
def test_models_that_cannot_take_tokens_back_verify_no_drafts(family: str) -> None:
    target = subject(family)

    assert ModelRunner(target.model, target.spec, slack=4).max_draft_tokens == 0
