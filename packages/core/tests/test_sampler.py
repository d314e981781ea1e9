"""Sampling, held against slow double-precision references written out for one row."""

import math
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from treadle_core.engine import choice_seed
from treadle_core.mlx_runtime.sampler import (
    Choice,
    DrawParams,
    Row,
    Sampler,
    keep_likely,
    mix_seed,
    noise,
)
from treadle_core.plan import Decode, Key, RowSetup
from treadle_core.request import SamplingParams
from treadle_core.testing import ScriptedConstraint, pack_mask

VOCAB = 50
ENDS = (3, 7)


class Recorder:
    """A processor that changes nothing and remembers what it was given."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, ...]] = []
        self.logits: list[np.ndarray] = []

    def __call__(self, tokens: Sequence[int], logits: mx.array) -> mx.array:
        self.tokens.append(tuple(tokens))
        self.logits.append(np.array(logits))
        return logits


class Rows:
    """Rows of a sampler and the tokens that they took.

    Args:
        vocab_size: Number of logits.
    """

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.sampler = Sampler(vocab_size)
        self.vocab_size = vocab_size
        self.setups: dict[str, RowSetup] = {}
        self.num_output: dict[str, int] = {}

    def join(self, name: str, params: SamplingParams, **more: Any) -> RowSetup:
        """A row joins; ``output`` in ``more`` is the list that it goes on with."""
        details = {"seed": 0, "end_tokens": (), "prompt": (1, 2, 2), "output": [], **more}
        setup = RowSetup(key=(name, 0), params=params, **details)
        self.sampler.join(setup)
        self.setups[name] = setup
        self.num_output[name] = len(setup.output)
        return setup

    def leave(self, name: str) -> None:
        """A row leaves."""
        self.sampler.leave((name, 0))

    def choose(self, logits: dict[str, np.ndarray]) -> Choice:
        """One step of these rows; nothing is read."""
        decodes: list[Decode] = []
        for row, name in enumerate(logits):
            num = self.num_output[name]
            start = len(self.setups[name].prompt) + num - 1
            decodes.append(
                Decode(key=(name, 0), group=0, row=row, start=start, num_output=num, token=None)
            )
            self.num_output[name] += 1
        stacked = mx.array(np.stack(list(logits.values())).astype(np.float32))
        return self.sampler.choose(stacked, decodes)

    def step(self, logits: dict[str, np.ndarray]) -> dict[str, int]:
        """One step of these rows, read at once."""
        sampled, failures = self.choose(logits).read()
        assert not failures
        tokens = {key[0]: sampled[key].token for key in sampled}
        for name, token in tokens.items():
            self.take(name, token)
        return tokens

    def take(self, name: str, token: int) -> None:
        """The host has read a token."""
        output: Any = self.setups[name].output
        output.append(token)


def random_logits(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 3.0, shape or (VOCAB,))


def reference_adjusted(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    allowed: Sequence[int] | None = None,
) -> np.ndarray:
    """Penalties, bias, end tokens, grammar: token by token, in this order."""
    found = logits.astype(np.float64).copy()
    for token in range(len(found)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
        count = list(output).count(token)
        found[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
        found[token] += params.logit_bias.get(token, 0.0)
        if token in ENDS and len(output) < params.min_tokens:
            found[token] = -math.inf
        if allowed is not None and token not in allowed:
            found[token] = -math.inf
    return found


def reference_kept(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Scaled logits after top-k, top-p of what it leaves, then min-p; -inf where dropped."""
    scaled = logits.astype(np.float64) / params.temperature
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    order = order[: params.top_k or len(order)]
    weights = [math.exp(scaled[token] - scaled[order[0]]) for token in order]
    total, before = sum(weights), 0.0
    kept = np.full(len(scaled), -np.inf)
    for token, weight in zip(order, weights, strict=True):
        if before / total < params.top_p and weight >= params.min_p * weights[0]:
            kept[token] = scaled[token]
        before += weight
    return kept


def probabilities(kept: np.ndarray) -> np.ndarray:
    weights = np.exp(kept - kept.max())
    return weights / weights.sum()


def gumbel(seed: int, position: int, vocab_size: int = VOCAB) -> np.ndarray:
    return np.array(noise(mx.array([mix_seed(seed)], dtype=mx.uint32), [position], vocab_size))[0]


def goodness_of_fit(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations chi-square lies above its mean (Wilson and Hilferty 1931)."""
    possible = expected > 0
    if counts[~possible].any():
        return math.inf
    counts, expected = counts[possible], expected[possible] * counts.sum()
    assert expected.min() > 5, "too few draws for the test"
    freedom = len(counts) - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


class TestAdjustment:
    """What is added to or taken from the logits before anything is drawn."""

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(repetition_penalty=1.7),
            SamplingParams(repetition_penalty=0.6),
            SamplingParams(presence_penalty=1.5),
            SamplingParams(presence_penalty=-2.0),
            SamplingParams(frequency_penalty=0.8),
            SamplingParams(frequency_penalty=-2.0),
            SamplingParams(logit_bias={0: 100.0, 5: -100.0, 49: 0.25}),
            SamplingParams(min_tokens=10),
            SamplingParams(min_tokens=5),
            SamplingParams(
                repetition_penalty=1.2,
                presence_penalty=0.5,
                frequency_penalty=0.3,
                logit_bias={2: 1.0, 4: -1.0, 7: 30.0},
                min_tokens=10,
            ),
        ],
    )
    @pytest.mark.parametrize("allowed", [None, [2, 3, 4, 7, 20, 49]])
    def test_logits_equal_the_reference(
        self, params: SamplingParams, allowed: list[int] | None
    ) -> None:
        rows, seen, output = Rows(), Recorder(), [4, 4, 9, 2, 4]
        constraint = ScriptedConstraint([allowed], vocab_size=VOCAB) if allowed else None
        rows.join(
            "a",
            params,
            end_tokens=ENDS,
            output=list(output),
            processors=(seen,),
            constraint=constraint,
        )
        logits = random_logits(1)
        logits[[1, 2, 4, 9]] = [2.5, -2.5, 1.5, -1.5]  # of prompt and answer, either sign

        rows.step({"a": logits})

        expected = reference_adjusted(logits, params, (1, 2, 2), output, allowed)
        np.testing.assert_allclose(seen.logits[0], expected, atol=1e-5)
        assert seen.tokens == [tuple(output)]

    def test_processors_run_in_order_on_each_others_results(self) -> None:
        rows, first, second = Rows(), Recorder(), Recorder()
        processors = (first, lambda _, logits: logits * 2, second)
        rows.join("a", SamplingParams(temperature=0.0), processors=processors)
        logits = random_logits(2)

        tokens = rows.step({"a": logits})

        np.testing.assert_allclose(second.logits[0], 2 * first.logits[0])
        assert tokens["a"] == logits.argmax()

    def test_what_a_processor_returns_is_what_the_token_is_chosen_from(self) -> None:
        rows = Rows()
        only_13 = lambda _, logits: mx.where(mx.arange(VOCAB) == 13, logits, -math.inf)  # noqa: E731
        rows.join("greedy", SamplingParams(temperature=0.0), processors=(only_13,))
        rows.join("drawn", SamplingParams(temperature=5.0), processors=(only_13,))

        tokens = rows.step({"greedy": random_logits(3), "drawn": random_logits(4)})

        assert tokens == {"greedy": 13, "drawn": 13}

    def test_end_tokens_are_forbidden_until_min_tokens_and_allowed_from_then_on(self) -> None:
        rows = Rows()
        rows.join("a", SamplingParams(temperature=0.0, min_tokens=2), end_tokens=ENDS)
        logits = np.zeros(VOCAB)
        logits[[7, 3, 11]] = [9.0, 8.0, 7.0]

        tokens = [rows.step({"a": logits})["a"] for _ in range(3)]

        assert tokens == [11, 11, 7]

    def test_penalties_count_tokens_that_the_host_has_not_read(self) -> None:
        rows, output = Rows(), []
        params = SamplingParams(temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5)
        rows.join("a", params, output=output)
        logits = np.zeros(VOCAB)
        logits[:4] = [4.0, 3.8, 2.2, 2.0]

        choices = [rows.choose({"a": logits}) for _ in range(6)]

        expected: list[int] = []
        for _ in choices:
            adjusted = reference_adjusted(logits, params, (1, 2, 2), expected)
            expected.append(int(adjusted.argmax()))
        assert [c.read()[0]["a", 0].token for c in choices] == expected
        assert len(set(expected)) > 2

    def test_counts_survive_changes_of_the_batch_and_a_new_start(self) -> None:
        params = SamplingParams(temperature=0.0, frequency_penalty=1.1, repetition_penalty=1.3)
        table = random_logits(5, 12, VOCAB) / 4
        alone = Rows()
        alone.join("a", params)
        expected = [alone.step({"a": logits})["a"] for logits in table]

        rows = Rows()
        rows.join("a", params)
        rows.join("b", params)
        found: list[int] = []
        for step, logits in enumerate(table):
            if step == 8:  # as after a preemption: a new row with the tokens so far
                rows.leave("a")
                rows.join("a", params, output=list(found))
            beside = {"b": random_logits(step)} if step % 3 else {}
            order = {"a": logits, **beside} if step % 2 else {**beside, "a": logits}
            found.append(rows.step(order)["a"])

        assert found == expected

    def test_a_new_row_under_an_old_name_starts_with_its_own_parameters_and_history(self) -> None:
        rows = Rows()
        params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
        logits = np.zeros(VOCAB)
        logits[:2] = [1.0, 0.5]
        rows.join("a", params, output=[])
        before = [rows.step({"a": logits})["a"] for _ in range(2)]

        rows.leave("a")
        rows.join("a", params, output=[])
        after = [rows.step({"a": logits})["a"] for _ in range(2)]

        assert before == after == [0, 1]


FILTERS = [
    SamplingParams(temperature=0.3, top_p=1.0),
    SamplingParams(temperature=3.0, top_p=1.0),
    SamplingParams(temperature=1.0, top_p=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_p=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_p=1.0, top_k=VOCAB),
    SamplingParams(temperature=1.0, top_p=1.0, top_k=10**9),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=2.0, top_p=0.95),
    SamplingParams(temperature=1.0, top_p=1.0, min_p=0.1),
    SamplingParams(temperature=1.0, top_p=1.0, min_p=1.0),
    SamplingParams(temperature=1.5, top_p=0.8, top_k=10, min_p=0.05),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=3, min_p=0.3),
]


class TestFilters:
    """Temperature, top-k, top-p and min-p, and the draw from what they leave."""

    @pytest.mark.parametrize("params", FILTERS)
    def test_tokens_are_drawn_from_the_reference_with_the_rows_own_noise(
        self, params: SamplingParams
    ) -> None:
        num = 200
        rows, table = Rows(), random_logits(6, num, VOCAB)
        for i in range(num):
            rows.join(f"{i}", params, seed=i)

        tokens = rows.step({f"{i}": table[i] for i in range(num)})

        for i in range(num):
            kept = reference_kept(table[i], params)
            assert tokens[f"{i}"] == (kept + gumbel(i, len((1, 2, 2)))).argmax()

    @pytest.mark.parametrize("params", FILTERS)
    def test_rows_with_other_filters_beside_it_change_nothing(self, params: SamplingParams) -> None:
        rows, table = Rows(), random_logits(7, len(FILTERS) + 1, VOCAB)
        for i, other in enumerate(FILTERS):
            rows.join(f"{i}", other, seed=i)
        rows.join("mine", params, seed=99)
        alone = Rows()
        alone.join("mine", params, seed=99)

        together = rows.step({**{f"{i}": table[i] for i in range(len(FILTERS))}, "mine": table[-1]})

        assert together["mine"] == alone.step({"mine": table[-1]})["mine"]

    def test_the_order_is_top_k_then_top_p_then_min_p(self) -> None:
        # Half of the weight of the first two, not of all: only with top-k first is 0 enough.
        logits = np.full(VOCAB, -20.0)
        logits[:4] = np.log([0.30, 0.25, 0.24, 0.21])
        params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)

        drawn = draw_many(logits, params, num_rows=100, num_steps=5, vocab_size=VOCAB)

        assert set(np.flatnonzero(drawn)) == {0}

    def test_temperature_comes_before_the_filters(self) -> None:
        logits = np.full(VOCAB, -50.0)
        logits[:2] = [1.0, 0.0]
        hot = SamplingParams(temperature=100.0, top_p=0.6)
        cold = SamplingParams(temperature=0.5, top_p=0.6)

        drawn = [draw_many(logits, p, 100, 5, VOCAB) for p in (hot, cold)]

        assert len(np.flatnonzero(drawn[0])) > 2
        assert set(np.flatnonzero(drawn[1])) == {0}

    @pytest.mark.parametrize("params", [{"min_p": 1e-9}, {"top_k": 10**6}])
    def test_a_filter_that_is_off_drops_nothing_of_a_large_vocabulary(
        self, params: dict[str, Any]
    ) -> None:
        vocab_size = 200_000
        own = SamplingParams(temperature=1.0, top_p=1.0, **params)
        setup = RowSetup(key=("a", 0), params=own, seed=0, end_tokens=(), prompt=(1,), output=[])
        logits = mx.linspace(0.0, 0.01, vocab_size)[None]

        kept = keep_likely(logits, DrawParams([Row(setup, vocab_size)]))

        assert mx.array_equal(kept, logits)

    def test_greedy_rows_take_the_first_of_the_most_likely(self) -> None:
        rows, logits = Rows(), np.zeros(VOCAB)
        logits[[20, 30]] = 5.0
        rows.join("greedy", SamplingParams(temperature=0.0, top_k=3, top_p=0.1, min_p=1.0))
        rows.join("drawn", SamplingParams(temperature=1.0))

        assert rows.step({"greedy": logits, "drawn": logits})["greedy"] == 20


def draw_many(
    logits: np.ndarray, params: SamplingParams, num_rows: int, num_steps: int, vocab_size: int
) -> np.ndarray:
    """How often each token is drawn by many seeds at several positions."""
    rows = Rows(vocab_size)
    names = [f"{i}" for i in range(num_rows)]
    for i, name in enumerate(names):
        rows.join(name, params, seed=i)
    counts = np.zeros(vocab_size, dtype=int)
    for _ in range(num_steps):
        tokens = rows.step(dict.fromkeys(names, logits))
        counts += np.bincount(list(tokens.values()), minlength=vocab_size)
    return counts


class TestDistribution:
    """Frequencies of many draws, by the chi-square test."""

    LOGITS = np.log(np.array([0.22, 0.18, 0.15, 0.12, 0.1, 0.08, 0.06, 0.04, 0.03, 0.02]))
    VARIANTS = (
        SamplingParams(temperature=1.0, top_p=1.0),
        SamplingParams(temperature=0.6, top_p=1.0),
        SamplingParams(temperature=1.0, top_p=1.0, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.0, top_p=1.0, min_p=0.3),
        SamplingParams(temperature=1.4, top_p=0.9, top_k=8, min_p=0.25),
    )

    @pytest.mark.parametrize("params", VARIANTS)
    def test_frequencies_are_those_of_the_filtered_distribution(
        self, params: SamplingParams
    ) -> None:
        counts = draw_many(self.LOGITS, params, num_rows=512, num_steps=50, vocab_size=10)

        expected = probabilities(reference_kept(self.LOGITS, params))
        assert counts.sum() == 25_600
        assert goodness_of_fit(counts, expected) < 4

    def test_the_test_tells_every_variant_from_every_other(self) -> None:
        drawn = [draw_many(self.LOGITS, p, 512, 50, vocab_size=10) for p in self.VARIANTS]

        for i, counts in enumerate(drawn):
            for j, other in enumerate(self.VARIANTS):
                expected = probabilities(reference_kept(self.LOGITS, other))
                assert (goodness_of_fit(counts, expected) < 4) == (i == j)

    def test_draws_of_one_seed_at_consecutive_positions_are_independent(self) -> None:
        num, vocab = 40_000, 5
        keys = mx.broadcast_to(mx.array([mix_seed(123)], dtype=mx.uint32), (num, 2))
        draws = np.array(mx.argmax(noise(keys, range(num), vocab), axis=-1))

        pairs = np.bincount(draws[:-1] * vocab + draws[1:], minlength=vocab * vocab)

        assert goodness_of_fit(pairs, np.full(vocab * vocab, 1 / vocab**2)) < 4

    def test_draws_of_consecutive_seeds_at_one_position_are_independent(self) -> None:
        num, vocab = 40_000, 5
        keys = mx.array([mix_seed(seed) for seed in range(num)], dtype=mx.uint32)
        draws = np.array(mx.argmax(noise(keys, [17] * num, vocab), axis=-1))

        pairs = np.bincount(draws[:-1] * vocab + draws[1:], minlength=vocab * vocab)

        assert goodness_of_fit(pairs, np.full(vocab * vocab, 1 / vocab**2)) < 4


MIXED = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=1.0, top_p=1.0),
    "filtered": SamplingParams(temperature=0.8, top_k=7, top_p=0.9, min_p=0.02),
    "penalised": SamplingParams(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6
    ),
    "penalised greedy": SamplingParams(temperature=0.0, frequency_penalty=1.5),
    "biased": SamplingParams(temperature=1.2, logit_bias={4: 5.0, 9: -100.0}),
    "bounded": SamplingParams(temperature=0.7, min_tokens=6),
    "grammar": SamplingParams(temperature=1.0),
    "processed": SamplingParams(temperature=1.0, top_k=5),
    "reporting": SamplingParams(temperature=1.0, logprobs=True, top_logprobs=4),
}


def join_mixed(rows: Rows, name: str, number: int) -> None:
    """One of the rows of MIXED, with everything that belongs to it."""
    more: dict[str, Any] = {"seed": 1000 + number, "end_tokens": ENDS, "prompt": range(number + 1)}
    if name == "grammar":
        allowed = [range(step, VOCAB, 3) for step in range(40)]
        more["constraint"] = ScriptedConstraint(allowed, vocab_size=VOCAB)
    if name == "processed":
        more["processors"] = (lambda tokens, logits: logits.at[len(tokens)].add(8.0),)
    rows.join(name, MIXED[name], **more)


class TestNeighbours:
    """A row's tokens are its own, whoever is beside it."""

    NUM_STEPS = 16

    def run_alone(self, name: str, number: int) -> list[int]:
        rows = Rows()
        join_mixed(rows, name, number)
        tokens: list[int] = []
        for step in range(self.NUM_STEPS):
            tokens += rows.step({name: random_logits(100 * number + step)}).values()
            self.advance(rows, name, tokens[-1])
        return tokens

    @staticmethod
    def advance(rows: Rows, name: str, token: int) -> None:
        constraint = rows.setups[name].constraint
        if constraint is not None:
            constraint.advance(token)

    @pytest.mark.parametrize("seed", range(3))
    def test_mixed_rows_that_come_and_go_equal_their_solo_runs(self, seed: int) -> None:
        rng = random.Random(seed)
        rows, waiting = Rows(), list(enumerate(MIXED))
        rng.shuffle(waiting)
        running: dict[str, int] = {}
        found: dict[str, list[int]] = {name: [] for name in MIXED}

        while waiting or running:
            while waiting and (not running or rng.random() < 0.5):
                number, name = waiting.pop()
                join_mixed(rows, name, number)
                running[name] = number
            order = rng.sample(list(running), len(running)) if rng.random() < 0.3 else list(running)
            logits = {n: random_logits(100 * running[n] + len(found[n])) for n in order}
            for name, token in rows.step(logits).items():
                found[name].append(token)
                self.advance(rows, name, token)
                if len(found[name]) == self.NUM_STEPS:
                    rows.leave(name)
                    del running[name]

        assert found == {name: self.run_alone(name, i) for i, name in enumerate(MIXED)}
        assert rows.sampler.num_rows == 0


class TestSeeds:
    """Randomness is a function of the seed and the position."""

    PARAMS = SamplingParams(temperature=1.0, top_p=1.0)

    def tokens_of(self, seed: int, positions: Sequence[int]) -> list[int]:
        rows = Rows()
        tokens: list[int] = []
        for position in positions:
            rows.join("a", self.PARAMS, seed=seed, prompt=range(position), output=[])
            tokens += rows.step({"a": np.zeros(VOCAB)}).values()
        return tokens

    def test_the_same_seed_and_position_give_the_same_token_in_any_order(self) -> None:
        forwards = self.tokens_of(5, range(1, 30))

        assert self.tokens_of(5, range(29, 0, -1)) == forwards[::-1]

    def test_prompt_and_answer_tokens_before_it_count_alike(self) -> None:
        rows = Rows()
        rows.join("a", self.PARAMS, seed=5, prompt=range(4), output=list(range(6)))

        assert list(rows.step({"a": np.zeros(VOCAB)}).values()) == self.tokens_of(5, [10])

    @pytest.mark.parametrize("other", [6, 5 + 2**32, 5 + 2**63, 2**64 - 1])
    def test_other_seeds_give_other_tokens(self, other: int) -> None:
        mine, others = (self.tokens_of(seed, range(1, 40)) for seed in (5, other))

        assert sum(a == b for a, b in zip(mine, others, strict=True)) < 8

    def test_every_choice_of_a_request_has_a_seed_of_its_own(self) -> None:
        seeds = [choice_seed(5, index) for index in range(128)]

        assert seeds[0] == 5
        assert len(set(seeds)) == 128
        first, second = (self.tokens_of(seed, range(1, 40)) for seed in seeds[:2])
        assert sum(a == b for a, b in zip(first, second, strict=True)) < 8

    def test_without_a_seed_one_is_drawn(self) -> None:
        assert choice_seed(None, 0) != choice_seed(None, 0)

    def test_all_bits_of_a_seed_count(self) -> None:
        # The first two numbers that SplitMix64 gives for seed 0 (Vigna's reference program).
        assert mix_seed(0) == (0xE220A839, 0x7B1DCDAF)
        assert mix_seed(0x9E3779B97F4A7C15) == (0x6E789E6A, 0xA1B965F4)
        keys = [mix_seed(1 << bit) for bit in range(64)]
        assert len({high for high, _ in keys}) == len({low for _, low in keys}) == 64

    def test_a_negative_seed_is_a_seed(self) -> None:
        assert self.tokens_of(choice_seed(-3, 0), [1, 2]) == self.tokens_of(2**64 - 3, [1, 2])


class TestFailures:
    """What cannot be sampled fails its row and nobody else's."""

    @staticmethod
    def raise_error(tokens: Sequence[int], logits: mx.array) -> mx.array:
        raise LookupError("no such rule")

    @pytest.mark.parametrize(
        ("more", "reason"),
        [
            ({"processors": (raise_error,)}, "LookupError: no such rule"),
            ({"processors": (lambda _, x: x[:-1],)}, r"shape \(49,\), expected \(50,\)"),
            ({"processors": (lambda _, x: None,)}, "."),
            ({"processors": (lambda _, x: x * math.nan,)}, "not finite"),
            ({"processors": (lambda _, x: x - math.inf,)}, "no token"),
            ({"processors": (lambda _, x: x + mx.ones((3, VOCAB)),)}, "shape"),
            ({"constraint": ScriptedConstraint(mask_error=KeyError("state"))}, "KeyError: 'state'"),
            ({"constraint": ScriptedConstraint([[1]], vocab_size=8)}, "has 1 bytes"),
            ({"constraint": ScriptedConstraint([[]], vocab_size=VOCAB)}, "allows no token"),
            ({"constraint": ScriptedConstraint([[VOCAB]], vocab_size=56)}, "no token"),
            ({"constraint": ScriptedConstraint([ENDS], vocab_size=VOCAB)}, "no token"),
        ],
    )
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_code_that_fails_ends_its_own_row(
        self, more: dict[str, Any], reason: str, temperature: float
    ) -> None:
        rows = Rows()
        params = SamplingParams(temperature=temperature, min_tokens=3, top_k=5)
        rows.join("guilty", params, end_tokens=ENDS, **more)
        rows.join("innocent", SamplingParams(temperature=0.0))
        logits = random_logits(8)

        sampled, failures = rows.choose({"guilty": logits, "innocent": logits}).read()

        assert list(failures) == [("guilty", 0)]
        assert_matches(failures["guilty", 0], reason)
        assert {key: s.token for key, s in sampled.items()} == {("innocent", 0): logits.argmax()}

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("params", [*MIXED.values()])
    def test_logits_that_are_not_finite_end_their_own_row(
        self, params: SamplingParams, value: float
    ) -> None:
        rows = Rows()
        rows.join("guilty", params, end_tokens=ENDS)
        rows.join("innocent", params, end_tokens=ENDS, seed=1)
        alone = Rows()
        alone.join("innocent", params, end_tokens=ENDS, seed=1)
        logits, bad = random_logits(9), random_logits(9)
        bad[17] = value

        sampled, failures = rows.choose({"guilty": bad, "innocent": logits}).read()
        after = rows.choose({"innocent": logits}).read()

        assert failures == {("guilty", 0): "the model's logits are not finite"}
        expected = [alone.choose({"innocent": logits}).read()[0] for _ in range(2)]
        assert [sampled, after[0]] == expected

    def test_the_models_fault_is_not_blamed_on_the_processors(self) -> None:
        rows = Rows()
        rows.join("a", SamplingParams(temperature=0.0), processors=(Recorder(),))

        _, failures = rows.choose({"a": random_logits(9) * math.nan}).read()

        assert failures == {("a", 0): "the model's logits are not finite"}

    @pytest.mark.parametrize("params", [*MIXED.values()])
    def test_tokens_that_the_model_itself_forbids_are_no_failure(
        self, params: SamplingParams
    ) -> None:
        rows = Rows()
        rows.join("a", params, end_tokens=ENDS)
        logits = random_logits(10)
        logits[10:] = -math.inf

        assert rows.step({"a": logits})["a"] < 10


class TestExtremes:
    """Values at the edges of what a request may ask for."""

    @pytest.mark.parametrize("temperature", [1e-3, 1e-7, 1e-38, 1e-44, 1e-300])
    @pytest.mark.parametrize("more", [{}, {"top_k": 9}, {"min_p": 0.1}])
    def test_a_tiny_temperature_is_greedy(self, temperature: float, more: dict[str, Any]) -> None:
        rows = Rows()
        for i in range(20):
            params = SamplingParams(temperature=temperature, top_p=1.0, **more)
            rows.join(f"{i}", params, seed=i)
        table = random_logits(11, 20, VOCAB) * 10

        tokens = rows.step({f"{i}": table[i] for i in range(20)})

        assert list(tokens.values()) == table.argmax(axis=-1).tolist()

    def test_large_logits_are_sampled_like_small_ones(self) -> None:
        params = SamplingParams(temperature=100.0, top_p=0.9, top_k=5)
        rows, logits = Rows(), np.linspace(-3e4, 3e4, VOCAB)
        rows.join("a", params)

        assert rows.step({"a": logits})["a"] == VOCAB - 1

    def test_a_bias_of_a_hundred_forces_or_forbids(self) -> None:
        rows = Rows()
        rows.join("forced", SamplingParams(temperature=1.0, logit_bias={31: 100.0}))
        rows.join("banned", SamplingParams(temperature=0.0, logit_bias={31: -100.0}))
        logits = np.zeros(VOCAB)
        logits[31] = 20.0

        assert rows.step({"forced": np.zeros(VOCAB), "banned": logits}) == {
            "forced": 31,
            "banned": 0,
        }

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
    def test_half_precision_logits_are_sampled_in_single(self, dtype: mx.Dtype) -> None:
        sampler = Sampler(VOCAB)
        key: Key = ("a", 0)
        params = SamplingParams(temperature=1.0, logprobs=True)
        sampler.join(
            RowSetup(key=key, params=params, seed=0, end_tokens=(), prompt=(1,), output=[])
        )
        decode = Decode(key=key, group=0, row=0, start=0, num_output=0, token=1)
        logits = mx.array(random_logits(12)[None]).astype(dtype)

        sampled, _ = sampler.choose(logits, [decode]).read()

        values = np.array(logits[0].astype(mx.float32)).astype(np.float64)
        expected = values[sampled[key].token] - np.log(np.exp(values).sum())
        assert sampled[key].logprob == pytest.approx(expected, abs=1e-5)

    def test_a_mask_of_many_bytes_is_read_bit_by_bit(self) -> None:
        vocab = 1003
        for token in (0, 7, 8, 511, 512, 1002):
            rows = Rows(vocab)
            constraint = ScriptedConstraint([[token]], vocab_size=vocab)
            rows.join("a", SamplingParams(temperature=0.0), constraint=constraint)
            assert len(pack_mask([token], vocab)) == 126
            assert rows.step({"a": random_logits(13, vocab)})["a"] == token


class TestLogprobs:
    """Log-probabilities come from the model's own logits, whatever the row's parameters do."""

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(temperature=0.0, logprobs=True, top_logprobs=5),
            SamplingParams(temperature=2.0, top_k=3, logprobs=True, top_logprobs=20),
            SamplingParams(temperature=0.0, logit_bias={9: 100.0}, logprobs=True, top_logprobs=1),
            SamplingParams(
                temperature=1.0, repetition_penalty=2.0, presence_penalty=2.0, logprobs=True
            ),
        ],
    )
    def test_they_equal_a_double_precision_reference(self, params: SamplingParams) -> None:
        rows = Rows()
        rows.join("silent", SamplingParams(temperature=1.0))
        rows.join("asks", params, output=[4, 4])
        rows.join("asks less", SamplingParams(logprobs=True, top_logprobs=2))
        logits = random_logits(14)

        choice = rows.choose(dict.fromkeys(rows.setups, logits))
        sampled, _ = choice.read()

        expected = logits - np.log(np.exp(logits).sum())
        mine = sampled["asks", 0]
        assert mine.logprob == pytest.approx(expected[mine.token], abs=1e-5)
        best = np.argsort(-expected)[: params.top_logprobs]
        assert [top.token for top in mine.top_logprobs] == best.tolist()
        assert [top.logprob for top in mine.top_logprobs] == pytest.approx(expected[best], abs=1e-5)
        assert sum(math.exp(top.logprob) for top in mine.top_logprobs) <= 1 + 1e-6
        assert sampled["silent", 0].logprob is None
        assert sampled["silent", 0].top_logprobs == ()
        assert len(sampled["asks less", 0].top_logprobs) == 2

    def test_more_alternatives_than_tokens_are_all_tokens(self) -> None:
        rows = Rows(vocab_size=6)
        rows.join("a", SamplingParams(temperature=0.0, logprobs=True, top_logprobs=20))

        sampled, _ = rows.choose({"a": np.arange(6.0)}).read()

        assert [top.token for top in sampled["a", 0].top_logprobs] == [5, 4, 3, 2, 1, 0]


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(AssertionError, match=pattern):
        raise AssertionError(text)
