"""Sampled answers have the model's distribution, whoever drafts and however many rows run beside.

The token at each place of each answer is held against the probabilities that the model gives it
there, computed once more in numpy from mlx-lm's own logits: after penalties, temperature, top-k and
top-p. Summed by the token before, what was counted less what was expected has a known covariance,
and its square in those units is a chi-square. Seeds are fixed, so a test does not fail by chance.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from treadle_core import Engine, EngineConfig, Request, SamplingParams, collect
from treadle_core.drafting import Drafter
from treadle_core.mlx_runtime.acceptance import Accept, Verdict, accept_equal
from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.testing import zoo
from treadle_core.testing.drafting import OracleDrafter, SteadyController
from treadle_speculative import DraftModelDrafter

VOCAB, LENGTH, DRAFTED = 12, 125, 3
FEWEST = 5.0
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
PROMPT = (1, 4, 9)
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.4, "top_k": 6},
    {"temperature": 1.2, "presence_penalty": 0.8, "repetition_penalty": 1.3},
    {"temperature": 1.3, "top_p": 0.95, "top_k": 9, "frequency_penalty": 0.02},
]
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Words:
    """The vocabulary of both models."""

    def __init__(self) -> None:
        self.vocabulary = {str(token): token for token in range(VOCAB)}
        self.special_tokens = frozenset[int]()


@cache
def model() -> Any:
    return zoo.build("llama", **SMALL)


@cache
def small_model() -> Any:
    """One that thinks much like the model, and not quite."""
    found = zoo.build("llama", seed=7, **SMALL)
    own: dict[str, mx.array] = dict(tree_flatten(found.parameters()))
    mixed = [
        (path, 0.95 * weight + 0.2 * own[path])
        for path, weight in tree_flatten(model().parameters())
    ]
    found.load_weights(mixed)
    return found


@cache
def favourite() -> tuple[int, ...]:
    """What the small model thinks likeliest behind each token alone."""
    logits = [zoo.reference_logits(small_model(), [token])[-1] for token in range(VOCAB)]
    return tuple(int(mx.argmax(row).item()) for row in logits)


def guess(tokens: Sequence[int], num: int) -> list[int]:
    found = [tokens[-1]]
    for _ in range(num):
        found.append(favourite()[found[-1]])
    return found[1:]


def runner_of(network: Any, accept: Accept = accept_equal) -> ModelRunner:
    text = TextModel(network)
    return ModelRunner(
        text, inspect(text, zoo.config("llama", **SMALL)), slack=DRAFTED, accept=accept
    )


def guesser() -> Drafter:
    return OracleDrafter(guess)


def drawer() -> Drafter:
    return DraftModelDrafter(runner_of(small_model()), Words(), Words())


def answers(
    drafter: Drafter,
    batch: int,
    num_tokens: int,
    *,
    accept: Accept = accept_equal,
    lossy: bool = False,
) -> tuple[list[tuple[SamplingParams, list[int]]], float]:
    """What rows of every kind answered, and how much of the drafts was kept."""
    engine = Engine(
        runner_of(model(), accept),
        config=EngineConfig(max_num_seqs=batch),
        drafter=drafter,
        controller=SteadyController(DRAFTED),
        lossy=lossy,
    )
    requests = {
        f"r{i}": SamplingParams(max_tokens=LENGTH, seed=i, ignore_eos=True, **KINDS[i % len(KINDS)])
        for i in range(-(-num_tokens // LENGTH))
    }
    for id, params in requests.items():
        engine.add(Request(id=id, prompt=PROMPT, params=params))
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
    drafts = engine.stats().drafts
    assert drafts is not None
    assert engine.stats().draft_failure is None
    found = [(requests[key[0]], list(one.tokens)) for key, one in collect(events).items()]
    return found, drafts.acceptance_rate or 0.0


def probabilities(params: SamplingParams, answer: list[int]) -> Floats:
    """``[len(answer), vocab]``: what each token of an answer is drawn from, by the definitions."""
    logits = zoo.reference_logits(model(), [*PROMPT, *answer[:-1]])[len(PROMPT) - 1 :]
    scores = np.array(logits).astype(np.float64)
    counts = np.zeros_like(scores)
    counts[1:] = np.cumsum(np.eye(VOCAB)[answer[:-1]], axis=0)
    seen = (counts > 0) | np.isin(np.arange(VOCAB), PROMPT)
    by = params.repetition_penalty
    scores = np.where(seen, np.where(scores > 0, scores / by, scores * by), scores)
    scores -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    weights = softmax(scores / params.temperature)
    order = np.argsort(-weights, axis=-1)
    ranked = np.take_along_axis(weights, order, axis=-1)
    if params.top_k:
        ranked[:, params.top_k :] = 0.0
    before = np.cumsum(ranked, axis=-1) - ranked
    ranked[before >= params.top_p * ranked.sum(axis=-1, keepdims=True)] = 0.0
    kept = np.zeros_like(weights)
    np.put_along_axis(kept, order, ranked, axis=-1)
    return kept / kept.sum(axis=-1, keepdims=True)


def softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def chi_square(found: list[tuple[SamplingParams, list[int]]]) -> tuple[float, float]:
    """Chi-square of answers against the model, and the most that it may be."""
    surplus = np.zeros((VOCAB, VOCAB))
    covariance = np.zeros((VOCAB, VOCAB, VOCAB))
    for params, answer in found:
        expected = probabilities(params, answer)
        counted = np.eye(VOCAB)[answer]
        if counted[expected == 0].any():
            return math.inf, 0.0  # a token that the row's filters forbid
        for before in range(VOCAB):
            places = np.array([PROMPT[-1], *answer[:-1]]) == before
            p = expected[places]
            surplus[before] += (counted[places] - p).sum(axis=0)
            covariance[before] += np.diag(p.sum(axis=0)) - p.T @ p
    statistic, degrees = 0.0, 0
    for d, matrix in zip(surplus, covariance, strict=True):
        values, vectors = np.linalg.eigh(matrix)
        common = values > FEWEST
        statistic += float(((vectors.T @ d)[common] ** 2 / values[common]).sum())
        degrees += int(common.sum())
    return statistic, bound(degrees)


def bound(degrees: int, sigmas: float = 4.0) -> float:
    """Chi-square at so many standard deviations, by Wilson and Hilferty (1931)."""
    return degrees * (1 - 2 / (9 * degrees) + sigmas * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("batch", "make_drafter", "num_tokens"),
    [
        (1, drawer, 750),
        (2, drawer, 1_500),
        (4, drawer, 2_500),
        (16, guesser, 16_000),
    ],
)
def test_answers_have_the_models_distribution(
    batch: int, make_drafter: Any, num_tokens: int
) -> None:
    found, kept = answers(make_drafter(), batch, num_tokens)

    statistic, most = chi_square(found)
    assert statistic < most
    assert 0.03 < kept < 0.95


def nearly(choices: mx.array, drafts: mx.array, lengths: mx.array) -> Verdict:
    """Keeps what is next to what the row chose."""
    near = mx.abs(choices[:, :-1] - drafts) <= 1
    taken = mx.concatenate([mx.where(near, drafts, choices[:, :-1]), choices[:, -1:]], axis=1)
    return accept_equal(taken, drafts, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("make_drafter", [guesser, drawer])
@pytest.mark.parametrize("rule", ["nearly", "lossy"])
def test_the_statistics_tell_a_rule_that_is_wrong(rule: str, make_drafter: Any) -> None:
    options: dict[str, Any] = {"lossy": True} if rule == "lossy" else {"accept": nearly}
    found, kept = answers(make_drafter(), 16, 2_000, **options)

    statistic, most = chi_square(found)
    assert kept > 0.1
    assert statistic > 2 * most
