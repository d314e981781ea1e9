"""Drafts change how fast an answer comes, and nothing else: exactly, or in distribution."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_core.mlx_runtime import acceptance
from treadle_core.mlx_runtime.acceptance import (
    COIN,
    DRAFT,
    PADDING,
    PLAIN,
    RESIDUAL,
    Verdict,
    accept_equal,
    accept_residual,
    accept_unverified,
    gumbel,
    tagged,
    uniform,
)
from treadle_core.mlx_runtime.sampler import NOT_FINITE, NOTHING_ALLOWED, mix_seed, noise

NEVER = -math.inf
NAN = math.nan
Floats = np.ndarray[Any, np.dtype[np.float64]]


def lists(array: mx.array) -> Any:
    return array.tolist()


def ids(values: Any) -> mx.array:
    return mx.array(np.array(values, dtype=np.int32))


def seed_keys(seeds: range | list[int]) -> mx.array:
    return mx.array([mix_seed(seed) for seed in seeds], dtype=mx.uint32)


class TestEqual:
    def test_each_row_keeps_its_own_number(self) -> None:
        choices = ids([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
        drafts = ids([[1, 2, 3], [9, 2, 3], [1, 9, 3], [1, 2, 9]])

        verdict = accept_equal(choices, drafts, ids([3, 3, 3, 3]))

        assert lists(verdict.accepted) == [3, 0, 1, 2]
        assert lists(verdict.tokens) == [
            [1, 2, 3, 4],
            [1, PADDING, PADDING, PADDING],
            [1, 2, PADDING, PADDING],
            [1, 2, 3, PADDING],
        ]

    def test_padding_is_never_kept_even_where_it_is_right(self) -> None:
        choices = ids([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
        drafts = ids([[1, 2], [1, 2], [1, 2]])

        verdict = accept_equal(choices, drafts, ids([0, 1, 2]))

        assert lists(verdict.accepted) == [0, 1, 2]
        assert lists(verdict.tokens) == [[1, PADDING, PADDING], [1, 2, PADDING], [1, 2, 3]]

    def test_a_plain_step_is_a_step_without_drafts(self) -> None:
        verdict = accept_equal(ids([[4], [5]]), mx.zeros((2, 0), dtype=mx.int32), ids([0, 0]))

        assert lists(verdict.accepted) == [0, 0]
        assert lists(verdict.tokens) == [[4], [5]]

    def test_a_failure_counts_where_it_would_have_happened_and_not_behind_a_rejection(self) -> None:
        choices = ids([[1, NOTHING_ALLOWED, 3], [1, NOT_FINITE, 3], [NOT_FINITE, 2, 3]])
        drafts = ids([[1, 2], [9, 2], [1, 2]])

        verdict = accept_equal(choices, drafts, ids([2, 2, 2]))

        assert lists(verdict.tokens) == [
            [1, NOTHING_ALLOWED, PADDING],
            [1, PADDING, PADDING],
            [NOT_FINITE, PADDING, PADDING],
        ]

    @settings(deadline=None, max_examples=40)
    @given(st.data())
    def test_speculative_is_plain_token_for_token(self, data: st.DataObject) -> None:
        """A model that answers any history; drafts of any quality, of any length."""
        vocab, wanted = 3, 12
        rows = data.draw(st.integers(1, 4))

        def model(row: int, history: list[int]) -> int:
            return hash((row, *history)) % vocab

        plain = [continued(model, row, wanted) for row in range(rows)]
        outputs: list[list[int]] = [[] for _ in range(rows)]
        while any(len(output) < wanted for output in outputs):
            lengths = [data.draw(st.integers(0, 4)) for _ in range(rows)]
            width = 1 + max(lengths)
            drafts = [[data.draw(st.integers(0, vocab - 1)) for _ in range(width - 1)]] * rows
            choices = [
                [model(row, outputs[row] + drafts[row][:place]) for place in range(width)]
                for row in range(rows)
            ]
            verdict = accept_equal(ids(choices), ids(drafts).reshape(rows, width - 1), ids(lengths))
            for row, tokens in enumerate(lists(verdict.tokens)):
                outputs[row] += [token for token in tokens if token != PADDING]

        assert [output[:wanted] for output in outputs] == plain


def continued(model: Callable[[int, list[int]], int], row: int, num: int) -> list[int]:
    output: list[int] = []
    for _ in range(num):
        output.append(model(row, output))
    return output


class TestNoise:
    KEYS = seed_keys([1, 2, 3])
    PLACES = mx.array([7, 8, 2**31 + 5])

    def test_plain_noise_is_that_of_plain_decoding(self) -> None:
        ours = gumbel(tagged(self.KEYS, self.PLACES, PLAIN), 11)

        assert mx.array_equal(ours, noise(self.KEYS, [7, 8, 2**31 + 5], 11))

    def test_purposes_positions_and_seeds_have_noise_of_their_own(self) -> None:
        found = {
            (seed, place, purpose): tuple(
                lists(tagged(seed_keys([seed]), mx.array([place]), purpose)[0])
            )
            for seed in range(8)
            for place in range(64)
            for purpose in (PLAIN, COIN, RESIDUAL, DRAFT)
        }

        assert len(set(found.values())) == len(found)

    def test_coins_are_uniform_and_independent_of_draws(self) -> None:
        keys = seed_keys(range(4_000))
        places = mx.zeros((4_000, 2), dtype=mx.int32) + mx.array([3, 4])
        coins = np.array(uniform(keys, places, COIN))
        drawn = np.array(gumbel(tagged(keys, places[:, 0], RESIDUAL), 2))

        assert coins.min() >= 0
        assert coins.max() < 1
        assert abs(coins.mean() - 0.5) < 0.02
        assert abs(np.corrcoef(coins[:, 0], coins[:, 1])[0, 1]) < 0.06
        assert abs(np.corrcoef(coins[:, 0], drawn[:, 0] - drawn[:, 1])[0, 1]) < 0.06


# The rule once more, for one row, in plain numpy: the sentence of the paper and nothing else.


class Luck:
    """The random numbers of one row, as the device draws them."""

    def __init__(self, key: mx.array, position: int, width: int, vocab: int) -> None:
        places = mx.arange(position, position + width)
        self.coins = np.array(uniform(key, places[None], COIN))[0]
        keys = mx.repeat(key, width, axis=0)
        self.residual = np.array(gumbel(tagged(keys, places, RESIDUAL), vocab))
        self.plain = np.array(gumbel(tagged(keys, places, PLAIN), vocab))


def softmax(logits: Floats) -> Floats:
    if not math.isfinite(logits.max()):
        return np.zeros_like(logits)
    weights = np.exp(logits - logits.max())
    # What the device takes for 0 is 0 here too.
    return (weights / weights.sum()).astype(np.float32).astype(np.float64)


def reference(logits: Floats, draft: list[int], draft_logits: Floats, luck: Luck) -> list[int]:
    """The tokens that one row commits, the last of them possibly a failure."""
    for i, token in enumerate(draft):
        p, q = softmax(logits[i]), softmax(draft_logits[i])
        if p[token] > 0 and (q[token] == 0 or luck.coins[i] < min(1.0, p[token] / q[token])):
            continue
        rest = np.maximum(p - q, 0.0)
        weights = rest if rest.sum() > 0 else p
        return [*draft[:i], pick(weights, logits[i], luck.residual[i])]
    last = len(draft)
    return [*draft, pick(softmax(logits[last]), logits[last], luck.plain[last])]


def pick(weights: Floats, logits: Floats, drawn: Floats) -> int:
    if not math.isfinite(logits.max()):
        return NOTHING_ALLOWED if logits.max() == NEVER else NOT_FINITE
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(weights) + drawn))


PALETTE = [NEVER, NEVER, -1e9, -60.0, -3.0, -1.0, 0.0, 0.0, 1.0, 2.0, 60.0]


class TestResidual:
    @settings(deadline=None, max_examples=80)
    @given(
        st.integers(1, 4),
        st.integers(0, 3),
        st.integers(2, 4),
        st.booleans(),
        st.integers(0, 2**32),
    )
    def test_it_does_what_the_paper_says(
        self, rows: int, most: int, vocab: int, same: bool, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        logits = rng.choice(PALETTE, (rows, most + 1, vocab)).astype(np.float32)
        draft_logits = rng.choice(PALETTE, (rows, most, vocab)).astype(np.float32)
        if same:
            draft_logits = logits[:, :most]
        drafts = rng.integers(0, vocab, (rows, most))
        lengths = rng.integers(0, most + 1, rows)
        positions = rng.integers(0, 100_000, rows)
        keys = seed_keys([seed + row for row in range(rows)])

        verdict = accept_residual(
            mx.array(logits),
            ids(drafts),
            ids(lengths),
            mx.array(draft_logits),
            keys,
            ids(positions),
        )

        for row, length in enumerate(lengths):
            luck = Luck(keys[row : row + 1], int(positions[row]), most + 1, vocab)
            draft = [int(token) for token in drafts[row][:length]]
            expected = reference(
                logits[row].astype(np.float64), draft, draft_logits[row].astype(np.float64), luck
            )
            assert lists(verdict.tokens[row]) == expected + [PADDING] * (most + 1 - len(expected))
            assert verdict.accepted[row].item() == len(expected) - 1

    def test_a_row_without_a_draft_gets_plain_decodings_token(self) -> None:
        logits = mx.random.normal((64, 3, 9), key=mx.random.key(1))
        keys, positions = seed_keys(range(64)), mx.arange(64)
        relative = logits[:, 0] - mx.max(logits[:, 0], axis=-1, keepdims=True)
        plain = mx.argmax(relative + noise(keys, list(range(64)), 9), axis=-1)

        for width in (1, 3):
            verdict = accept_residual(
                logits[:, :width],
                mx.zeros((64, width - 1), dtype=mx.int32),
                mx.zeros((64,), dtype=mx.int32),
                mx.zeros((64, width - 1, 9)),
                keys,
                positions,
            )
            assert mx.array_equal(verdict.tokens[:, 0], plain)
            assert not lists(mx.any(verdict.accepted > 0))

    def test_huge_logits_are_drawn_from_like_others(self) -> None:
        draws = [
            one_row([[1e9, 1e9]], [], np.zeros((0, 2)), seed).tokens.item() for seed in range(40)
        ]

        assert 10 <= sum(draws) <= 30

    def test_rows_do_not_depend_on_each_other(self) -> None:
        """Each of a batch of four gets what it gets alone and with one other."""
        logits = mx.random.normal((4, 4, 6), key=mx.random.key(2)) * 2
        draft_logits = mx.random.normal((4, 3, 6), key=mx.random.key(3)) * 2
        drafts, lengths = ids([[1, 2, 3], [0, 4, 5], [2, 2, 2], [3, 1, 0]]), ids([3, 0, 1, 2])
        for seed in range(40):
            parts = (
                logits,
                drafts,
                lengths,
                draft_logits,
                seed_keys(range(seed, seed + 4)),
                ids([5, 9, 2, 7]),
            )
            together = accept_residual(*parts)
            for size in (1, 2):
                for start in range(0, 4, size):
                    some = accept_residual(*(part[start : start + size] for part in parts))
                    assert mx.array_equal(some.tokens, together.tokens[start : start + size])
                    assert mx.array_equal(some.accepted, together.accepted[start : start + size])

    @pytest.mark.parametrize("seed", range(20))
    def test_what_is_certain_is_kept_and_what_is_forbidden_is_not(self, seed: int) -> None:
        certain, other = [0.0, NEVER, NEVER], [NEVER, 0.0, 0.0]
        cases = {
            "p = q = 1": (certain, 0, certain, 1, 0),
            "p > 0, q = 0": (certain, 0, other, 1, 0),
            "p = 0, q > 0": (certain, 1, other, 0, 0),
            "p = 0, q = 0": (certain, 1, certain, 0, 0),
            "q has nothing": (certain, 0, [NEVER] * 3, 1, 0),
        }
        for name, (p, token, q, accepted, first) in cases.items():
            verdict = one_row([p, certain], [token], [q], seed)
            assert verdict.accepted.item() == accepted, name
            assert verdict.tokens[0, 0].item() == first, name

    def test_a_failure_counts_where_it_would_have_happened_and_not_behind_a_rejection(self) -> None:
        zero, nothing, broken = [0.0, NEVER], [NEVER, NEVER], [NAN, 0.0]
        for bad, code in (
            (nothing, NOTHING_ALLOWED),
            (broken, NOT_FINITE),
            ([math.inf, 0], NOT_FINITE),
        ):
            behind = one_row([zero, bad, zero], [1, 0], [[0.0, 0.0], zero], 1)
            assert lists(behind.tokens) == [[0, PADDING, PADDING]]
            reached = one_row([zero, bad, zero], [0, 0], [zero, zero], 1)
            assert lists(reached.tokens) == [[0, code, PADDING]]
            at_the_end = one_row([zero, bad], [0], [zero], 1)
            assert lists(at_the_end.tokens) == [[0, code]]

    def test_half_precision_is_as_good_as_any(self) -> None:
        logits = mx.random.normal((2, 3, 5), key=mx.random.key(4)).astype(mx.bfloat16)
        drafted = mx.random.normal((2, 2, 5), key=mx.random.key(5)).astype(mx.bfloat16)
        rest = (seed_keys([1, 2]), ids([1, 1]))

        half = accept_residual(logits, ids([[1, 2], [3, 4]]), ids([2, 2]), drafted, *rest)
        full = accept_residual(
            logits.astype(mx.float32),
            ids([[1, 2], [3, 4]]),
            ids([2, 2]),
            drafted.astype(mx.float32),
            *rest,
        )

        assert mx.array_equal(half.tokens, full.tokens)


def one_row(logits: Any, draft: list[int], draft_logits: Any, seed: int) -> Verdict:
    most, vocab = len(draft), len(logits[0])
    return accept_residual(
        mx.array([logits], dtype=mx.float32),
        ids(draft).reshape(1, most),
        ids([most]),
        mx.array(np.array(draft_logits, dtype=np.float32)).reshape(1, most, vocab),
        seed_keys([seed]),
        ids([3]),
    )


class TestUnverified:
    def test_what_was_drafted_is_kept_whatever_the_row_chose(self) -> None:
        choices = ids([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
        drafts = ids([[7, 8], [7, 8], [7, 8]])

        verdict = accept_unverified(choices, drafts, ids([2, 1, 0]))

        assert lists(verdict.accepted) == [2, 1, 0]
        assert lists(verdict.tokens) == [[7, 8, 3], [7, 2, PADDING], [1, PADDING, PADDING]]

    def test_a_row_fails_where_it_can_choose_nothing(self) -> None:
        choices = ids([[1, NOT_FINITE, 3], [NOTHING_ALLOWED, 2, 3]])

        verdict = accept_unverified(choices, ids([[7, 8], [7, 8]]), ids([2, 2]))

        assert lists(verdict.tokens) == [
            [7, NOT_FINITE, PADDING],
            [NOTHING_ALLOWED, PADDING, PADDING],
        ]


# Statistics: rows that each answer with three tokens of a model whose next token depends on the
# last one, drafted by another such model. 64 answers are possible; how often each one comes is
# compared with the model's own probabilities.

VOCAB, ANSWER, SAMPLES = 4, 3, 24_000
MODEL = np.log(
    np.array(
        [
            [0.5, 0.3, 0.15, 0.05],
            [0.05, 0.05, 0.1, 0.8],
            [0.25, 0.25, 0.25, 0.25],
            [0.4, 0.1, 0.4, 0.1],
        ]
    )
)
DRAFTER = np.log(
    np.array(
        [[0.2, 0.5, 0.1, 0.2], [0.3, 0.3, 0.3, 0.1], [0.7, 0.1, 0.1, 0.1], [0.1, 0.4, 0.1, 0.4]]
    )
)
Rule = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array], Verdict]
Draw = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


def drawn(state: mx.array, keys: mx.array, place: mx.array) -> tuple[mx.array, mx.array]:
    """A draft token of each row and the logits that it was drawn from."""
    logits = mx.array(DRAFTER.astype(np.float32))[state]
    return mx.argmax(logits + gumbel(tagged(keys, place, DRAFT), VOCAB), axis=-1), logits


def guessed(state: mx.array, keys: mx.array, place: mx.array) -> tuple[mx.array, mx.array]:
    """The drafter's favourite, which is a q of one."""
    logits = mx.array(DRAFTER.astype(np.float32))[state]
    token = mx.argmax(logits, axis=-1)
    return token, mx.where(mx.arange(VOCAB)[None] == token[:, None], 0.0, NEVER)


def answers(rule: Rule, draw: Draw, batch: int, lengths: list[int]) -> tuple[Floats, float]:
    """How often each answer came, and how much of the drafts was kept.

    Rows are told apart by seed and by how much is drafted for them: ``lengths``, in turn.
    """
    model = mx.array(MODEL.astype(np.float32))
    keys = seed_keys(range(1_000 * batch, 1_000 * batch + SAMPLES))
    rows, most = mx.arange(SAMPLES), max(1, *lengths)
    lengths_now = ids([lengths[row % batch] for row in range(SAMPLES)])
    answer = mx.zeros((SAMPLES, ANSWER + most + 1), dtype=mx.int32)
    num, state = mx.zeros((SAMPLES,), dtype=mx.int32), mx.zeros((SAMPLES,), dtype=mx.int32)
    kept = tried = 0
    for _ in range(ANSWER):
        place = num + 10
        tokens, logits, draft_logits = [], [model[state]], []
        last = state
        for depth in range(most):
            last, q = draw(last, keys, place + depth)
            tokens.append(last)
            draft_logits.append(q)
            logits.append(model[last])
        drafts = mx.stack(tokens, axis=1).astype(mx.int32)
        verdict = rule(
            mx.stack(logits, axis=1),
            drafts,
            lengths_now,
            mx.stack(draft_logits, axis=1),
            keys,
            place,
        )
        open_ = num < ANSWER
        kept += int(mx.sum(verdict.accepted * open_).item())
        tried += int(mx.sum(mx.minimum(verdict.accepted + 1, lengths_now) * open_).item())
        for i in range(most + 1):
            new = verdict.tokens[:, i]
            take = (new != PADDING) & open_ & (num < ANSWER)
            answer[rows, num] = mx.where(take, new, answer[rows, num])
            num = num + take
        state = answer[rows, num - 1]
    weights = VOCAB ** np.arange(ANSWER)[::-1]
    index = np.array(answer)[:, :ANSWER] @ weights
    return np.bincount(index, minlength=VOCAB**ANSWER).astype(np.float64), kept / max(tried, 1)


def chi_square(counts: Floats) -> float:
    p = np.exp(MODEL)
    joint = p[0][:, None, None] * p[:, :, None] * p[None, :, :]
    expected = counts.sum() * joint.reshape(-1)
    return float(((counts - expected) ** 2 / expected).sum())


def bound(degrees: int, sigmas: float = 4.0) -> float:
    """Chi-square at so many standard deviations, by Wilson and Hilferty (1931)."""
    return degrees * (1 - 2 / (9 * degrees) + sigmas * math.sqrt(2 / (9 * degrees))) ** 3


LIMIT = bound(VOCAB**ANSWER - 1)


def equal_rule(
    logits: mx.array,
    drafts: mx.array,
    lengths: mx.array,
    draft_logits: mx.array,
    keys: mx.array,
    positions: mx.array,
) -> Verdict:
    columns = [
        mx.argmax(logits[:, i] + gumbel(tagged(keys, positions + i, PLAIN), VOCAB), axis=-1)
        for i in range(logits.shape[1])
    ]
    return accept_equal(mx.stack(columns, axis=1).astype(mx.int32), drafts, lengths)


def coupled(state: mx.array, keys: mx.array, place: mx.array) -> tuple[mx.array, mx.array]:
    """Drawn with the noise that the row itself will choose with."""
    logits = mx.array(DRAFTER.astype(np.float32))[state]
    return mx.argmax(logits + gumbel(tagged(keys, place, PLAIN), VOCAB), axis=-1), logits


@pytest.mark.parametrize(("batch", "lengths"), [(1, [2]), (2, [3, 1]), (4, [0, 1, 2, 3])])
@pytest.mark.parametrize(
    ("rule", "draw"),
    [
        (accept_residual, drawn),
        (accept_residual, guessed),
        (equal_rule, guessed),
        (equal_rule, coupled),
    ],
    ids=["drawn", "guessed", "equal", "coupled"],
)
def test_answers_have_the_models_distribution(
    rule: Rule, draw: Draw, batch: int, lengths: list[int]
) -> None:
    counts, _ = answers(rule, draw, batch, lengths)

    assert counts.sum() == SAMPLES
    assert chi_square(counts) < LIMIT


def test_sampled_output_is_plain_decodings_whatever_was_drafted() -> None:
    """Not in distribution: the same answers, row by row, so their counts are equal."""
    plain, _ = answers(equal_rule, guessed, 1, [0])
    guesses, _ = answers(equal_rule, guessed, 1, [2])
    draws, _ = answers(equal_rule, coupled, 1, [3])

    assert np.array_equal(guesses, plain)
    assert np.array_equal(draws, plain)


def test_both_rules_keep_as_many_guesses() -> None:
    """A guess is kept with its probability under p, by either rule."""
    _, residual = answers(accept_residual, guessed, 1, [2])
    _, equal = answers(equal_rule, guessed, 1, [2])

    assert abs(residual - equal) < 0.01


def test_a_drafter_that_shares_the_rows_noise_is_nearly_as_good_as_the_residual_rule() -> None:
    _, residual = answers(accept_residual, drawn, 1, [2])
    _, with_same_noise = answers(equal_rule, coupled, 1, [2])
    _, with_other_noise = answers(equal_rule, drawn, 1, [2])

    found = (residual, with_same_noise, with_other_noise)
    assert found == pytest.approx((0.55, 0.53, 0.23), abs=0.01)


def without_residual(
    logits: mx.array, drafts: mx.array, lengths: mx.array, draft_logits: mx.array, *rest: mx.array
) -> Verdict:
    """In place of what was rejected, draws from p itself: favours what q favours."""
    right = accept_residual(logits, drafts, lengths, draft_logits, *rest)
    keys, positions = rest
    rows, vocab = mx.arange(drafts.shape[0]), logits.shape[-1]
    drawn_keys = tagged(keys, positions + right.accepted, RESIDUAL)
    again = mx.argmax(logits[rows, right.accepted] + gumbel(drawn_keys, vocab), axis=-1)
    rejected = right.accepted < lengths
    place = mx.arange(logits.shape[1])[None] == right.accepted[:, None]
    return Verdict(
        right.accepted, mx.where(place & rejected[:, None], again[:, None], right.tokens)
    )


def with_quotient_upside_down(
    logits: mx.array, drafts: mx.array, lengths: mx.array, draft_logits: mx.array, *rest: mx.array
) -> Verdict:
    """Keeps with min(1, q / p)."""
    swapped = accept_residual(
        mx.concatenate([draft_logits, logits[:, -1:]], axis=1),
        drafts,
        lengths,
        logits[:, :-1],
        *rest,
    )
    return swapped


def as_if_guessed(
    logits: mx.array, drafts: mx.array, lengths: mx.array, draft_logits: mx.array, *rest: mx.array
) -> Verdict:
    """Takes what was drawn for a guess: the same token is seen as if it had always been chosen."""
    certain = mx.where(mx.arange(VOCAB)[None, None] == drafts[:, :, None], 0.0, NEVER)
    kept = accept_residual(logits, drafts, lengths, draft_logits, *rest)
    other = accept_residual(logits, drafts, lengths, certain, *rest)
    first = kept.accepted > other.accepted
    return Verdict(
        mx.where(first, kept.accepted, other.accepted),
        mx.where(first[:, None], kept.tokens, other.tokens),
    )


def drawn_with_the_coin(
    state: mx.array, keys: mx.array, place: mx.array
) -> tuple[mx.array, mx.array]:
    """A draft drawn with the number that then decides whether it is kept."""
    logits = mx.array(DRAFTER.astype(np.float32))[state]
    until = mx.cumsum(mx.softmax(logits, axis=-1), axis=-1)
    coin = uniform(keys, place[:, None], COIN)
    return mx.minimum(mx.sum(until <= coin, axis=-1), VOCAB - 1), logits


def left_out_when_unlikely(
    logits: mx.array, drafts: mx.array, lengths: mx.array, draft_logits: mx.array, *rest: mx.array
) -> Verdict:
    """Cuts the draft before a token that the drafter finds unlikely, after having drawn it."""
    chance = mx.take_along_axis(mx.softmax(draft_logits, axis=-1), drafts[:, :, None], axis=-1)
    sure = acceptance.count_leading(chance[:, :, 0] >= 0.3, lengths)
    return accept_residual(logits, drafts, sure, draft_logits, *rest)


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize(
    ("rule", "draw"),
    [
        (without_residual, drawn),
        (without_residual, guessed),
        (with_quotient_upside_down, drawn),
        (as_if_guessed, drawn),
        (accept_residual, drawn_with_the_coin),
        (left_out_when_unlikely, drawn),
    ],
    ids=["p again", "p again, guess", "q over p", "as if guessed", "same coin", "left out"],
)
def test_the_statistics_tell_a_wrong_rule(rule: Rule, draw: Draw, batch: int) -> None:
    counts, _ = answers(rule, draw, batch, [2, 1, 3, 2][:batch])

    assert chi_square(counts) > 2 * LIMIT


def test_guesses_may_be_cut_wherever_one_likes() -> None:
    """With the equal rule nothing about a draft can do harm: here it is cut by what it says."""

    def cut(logits: mx.array, drafts: mx.array, lengths: mx.array, *rest: mx.array) -> Verdict:
        short = acceptance.count_leading(drafts < 2, lengths)
        return equal_rule(logits, drafts, short, *rest)

    counts, _ = answers(cut, drawn, 1, [2])
    plain, _ = answers(equal_rule, guessed, 1, [1])

    assert np.array_equal(counts, plain)
