"""Choosing the next token of every row in one call, each row by its own parameters.

The order is penalties, logit bias, end-token mask (``min_tokens``), grammar mask, the request's
own processors, temperature, top-k, top-p, min-p, then a draw with Gumbel noise. The noise of a
token depends on the request's seed and the token's position alone, so a seeded request gets the
same tokens whatever runs beside it, after a preemption, and after a restart.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from treadle_core.errors import describe
from treadle_core.events import TokenLogprob
from treadle_core.plan import Decode, Key, RowSetup, Sampled
from treadle_core.request import SamplingParams

NEGATIVE_INFINITY = -float("inf")
NOT_FINITE = -1
NOTHING_ALLOWED = -2
FAILURES = {
    NOT_FINITE: "the model's logits are not finite",
    NOTHING_ALLOWED: "no token is allowed: masks and processors forbid every one",
}
# Below this, temperature is greedy for all purposes, and a quotient could overflow.
COLDEST = 1e-30


class Row:
    """One answer's sampling state; device arrays only for what it uses.

    Attributes:
        setup: What it brought along.
        key: Two 32-bit halves of the mixed seed.
        bias: ``[vocab]`` to add to its logits, or None.
        end_mask: ``[vocab]`` that forbids its end tokens, or None.
        seen: ``[vocab]`` whether the prompt contains the token, or None.
        counts: ``[vocab]`` occurrences in the answer, or None.
    """

    def __init__(self, setup: RowSetup, vocab_size: int) -> None:
        params = setup.params
        self.setup = setup
        self.key = mix_seed(setup.seed)
        self.bias = _spread(params.logit_bias, vocab_size) if params.logit_bias else None
        self.end_mask: mx.array | None = None
        if params.min_tokens and setup.end_tokens:
            self.end_mask = _spread(dict.fromkeys(setup.end_tokens, NEGATIVE_INFINITY), vocab_size)
        self.seen: mx.array | None = None
        self.counts: mx.array | None = None
        if params.has_penalties:
            self.seen = _count(setup.prompt, vocab_size) > 0
            self.counts = _count(setup.output, vocab_size)

    @property
    def asks_host(self) -> bool:
        """Whether Python code of the request takes part."""
        return bool(self.setup.processors) or self.setup.constraint is not None


class Batch:
    """Parameters of the rows of a step as arrays, kept while the rows stay the same."""

    def __init__(self, keys: Sequence[Key], rows: Sequence[Row]) -> None:
        params = [row.setup.params for row in rows]
        self.keys = keys
        self.rows = rows
        self.drawn = _index(rows, lambda p: not p.greedy)
        self.penalised = _index(rows, lambda p: p.has_penalties)
        self.reporting = _index(rows, lambda p: p.logprobs)
        self.num_top = max((p.top_logprobs for p in params if p.logprobs), default=0)
        self.biased = [i for i, row in enumerate(rows) if row.bias is not None]
        self.bounded = [i for i, row in enumerate(rows) if row.end_mask is not None]
        self.hosted = [i for i, row in enumerate(rows) if row.asks_host]
        self.index = {name: mx.array(i) for name, i in self._lists().items() if i}
        self.draw = DrawParams([rows[i] for i in self.drawn]) if self.drawn else None
        self.seen: mx.array | None = None
        self.counts: mx.array | None = None
        if self.penalised:
            penalised = [rows[i] for i in self.penalised]
            self.seen = mx.stack([row.seen for row in penalised if row.seen is not None])
            self.counts = mx.stack([row.counts for row in penalised if row.counts is not None])
            self.repetition = _column(p.setup.params.repetition_penalty for p in penalised)
            self.presence = _column(p.setup.params.presence_penalty for p in penalised)
            self.frequency = _column(p.setup.params.frequency_penalty for p in penalised)
        if self.biased:
            self.bias = mx.stack([row.bias for row in rows if row.bias is not None])

    def retire(self) -> None:
        """Hand the counts back to the rows, before another batch takes over."""
        if self.counts is not None:
            for slot, i in enumerate(self.penalised):
                self.rows[i].counts = self.counts[slot]

    def _lists(self) -> dict[str, list[int]]:
        return {
            "drawn": self.drawn,
            "penalised": self.penalised,
            "reporting": self.reporting,
            "biased": self.biased,
        }


class DrawParams:
    """Parameters of the rows that draw, as columns ``[rows, 1]``.

    Attributes:
        filtered: Parameters of the rows among them that leave unlikely tokens out, if any.
        filtered_rows: Which rows those are.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        params = [row.setup.params for row in rows]
        self.temperature = _column(max(p.temperature, COLDEST) for p in params)
        self.top_k = mx.array([[p.top_k or 2**31 - 1] for p in params], dtype=mx.int32)
        self.top_p = _column(p.top_p for p in params)
        self.min_p = _column(p.min_p for p in params)
        self.keys = mx.array([row.key for row in rows], dtype=mx.uint32)
        filtered = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
        self.filtered_rows = mx.array(filtered, dtype=mx.int32)
        self.filtered: DrawParams | None = None
        if filtered:
            everyone = len(filtered) == len(rows)
            self.filtered = self if everyone else DrawParams([rows[i] for i in filtered])


class Choice:
    """A step's tokens on the device, and what reading them gives.

    Args:
        batch: The rows, or lanes.
        tokens: ``[rows]`` ids to feed to the next step.
        report: The same, or in their place why there is none.
        failures: Rows whose own code raised, by their place in the batch.
    """

    def __init__(
        self, batch: Batch, tokens: mx.array, report: mx.array, failures: dict[int, str]
    ) -> None:
        self.batch = batch
        self.tokens = tokens
        self.report = report
        self.failures = failures
        self._logprobs: mx.array | None = None
        self._top: tuple[mx.array, mx.array] | None = None

    def add_logprobs(self, logits: mx.array) -> None:
        """Add log-probabilities for the rows that ask, from the model's own logits."""
        batch = self.batch
        if not batch.reporting:
            return
        rows = batch.index["reporting"]
        chosen = mx.take(logits, rows, axis=0)
        logprobs = chosen - mx.logsumexp(chosen, axis=-1, keepdims=True)
        taken = mx.take(self.tokens, rows)[:, None]
        self._logprobs = mx.take_along_axis(logprobs, taken, axis=-1)[:, 0]
        if batch.num_top:
            best = mx.argsort(-logprobs, axis=-1)[:, : batch.num_top]
            self._top = (best, mx.take_along_axis(logprobs, best, axis=-1))

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate."""
        found = [self.report, self.tokens]
        if self._logprobs is not None:
            found.append(self._logprobs)
        return [*found, *(self._top or ())]

    def read(self) -> tuple[dict[Key, Sampled], dict[Key, str]]:
        """Wait for the tokens; sampled tokens and failures by row."""
        failures: dict[Key, str] = {}
        sampled: dict[Key, Sampled] = {}
        for key, outcome in zip(self.batch.keys, self.outcomes(), strict=True):
            if isinstance(outcome, str):
                failures[key] = outcome
            else:
                sampled[key] = outcome
        return sampled, failures

    def read_rows(self) -> tuple[dict[Key, tuple[Sampled, ...]], dict[Key, str]]:
        """What :meth:`read` gives, with the one token of each row as a sequence."""
        sampled, failures = self.read()
        return {key: (one,) for key, one in sampled.items()}, failures

    def outcomes(self) -> list[Sampled | str]:
        """Wait for the tokens; each place's token, or why there is none."""
        values: Any = self.report.tolist()
        logprobs = self._read_logprobs()
        found: list[Sampled | str] = []
        for place, token in enumerate(values):
            # What the model did wrong is the cause of what the row's own code then raised.
            if token == NOT_FINITE or (token in FAILURES and place not in self.failures):
                found.append(FAILURES[token])
            elif place in self.failures:
                found.append(self.failures[place])
            else:
                logprob, top = logprobs.get(place, (None, ()))
                found.append(Sampled(token, logprob, top))
        return found

    def _read_logprobs(self) -> dict[int, tuple[float, tuple[TokenLogprob, ...]]]:
        if self._logprobs is None:
            return {}
        values: Any = self._logprobs.tolist()
        ids: Any = self._top[0].tolist() if self._top else [[] for _ in values]
        tops: Any = self._top[1].tolist() if self._top else [[] for _ in values]
        found: dict[int, tuple[float, tuple[TokenLogprob, ...]]] = {}
        for slot, i in enumerate(self.batch.reporting):
            num = self.batch.rows[i].setup.params.top_logprobs
            pairs = zip(ids[slot][:num], tops[slot][:num], strict=True)
            top = tuple(TokenLogprob(token, logprob) for token, logprob in pairs)
            found[i] = (values[slot], top)
        return found


class Sampler:
    """Sampling state of all rows, and one vectorised choice per step.

    Args:
        vocab_size: Number of logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[Key, Row] = {}
        self._batch: Batch | None = None

    @property
    def num_rows(self) -> int:
        """Rows with sampling state."""
        return len(self._rows)

    def join(self, setup: RowSetup) -> None:
        """A row joins, with its history."""
        self._rows[setup.key] = Row(setup, self._vocab_size)

    def leave(self, key: Key) -> None:
        """Forget a row."""
        self._rows.pop(key, None)

    def clear(self) -> None:
        """Forget every row."""
        self._rows.clear()
        self._batch = None

    def choose(self, logits: mx.array, decodes: Sequence[Decode]) -> Choice:
        """The next token of each row.

        Args:
            logits: ``[rows, vocab]``, in the order of ``decodes``.
            decodes: The rows.
        """
        batch = self.batch_of(tuple(decode.key for decode in decodes))
        logits = logits.astype(mx.float32)
        adjusted = self.adjust(batch, logits, decodes)
        adjusted, failures = self._ask_host(batch, adjusted) if batch.hosted else (adjusted, {})
        choice = self.pick(batch, logits, adjusted, decodes, failures)
        if batch.counts is not None:
            slots = mx.arange(len(batch.penalised))
            taken = mx.take(choice.tokens, batch.index["penalised"])
            batch.counts = batch.counts.at[slots, taken].add(1)
        return choice

    def pick(
        self,
        batch: Batch,
        logits: mx.array,
        adjusted: mx.array,
        decodes: Sequence[Decode],
        failures: dict[int, str],
    ) -> Choice:
        """The best token of each row, or one drawn.

        Args:
            batch: The rows, or lanes.
            logits: The model's own, ``[rows, vocab]``.
            adjusted: What is sampled from.
            decodes: What was planned.
            failures: Rows whose own code raised, by their place.
        """
        tokens = mx.argmax(adjusted, axis=-1).astype(mx.int32)
        if batch.draw is not None:
            tokens = self._draw(batch, batch.draw, adjusted, tokens, decodes)
        # One sum per row finds NaN and infinity anywhere in it.
        total = mx.sum(logits, axis=-1)
        finite = mx.isfinite(total) | (total == NEGATIVE_INFINITY)
        taken = mx.take_along_axis(adjusted, tokens[:, None], axis=-1)[:, 0]
        report = mx.where(mx.isfinite(taken), tokens, NOTHING_ALLOWED)
        choice = Choice(batch, tokens, mx.where(finite, report, NOT_FINITE), failures)
        choice.add_logprobs(logits)
        return choice

    def batch_of(self, keys: tuple[Key, ...]) -> Batch:
        """The rows of a step, with their parameters as arrays."""
        batch = self._batch
        rows = [self._rows[key] for key in keys]
        if batch is not None:
            same = batch.keys == keys and all(a is b for a, b in zip(batch.rows, rows, strict=True))
            if same:
                return batch
            batch.retire()
        self._batch = Batch(keys, rows)
        return self._batch

    def adjust(self, batch: Batch, logits: mx.array, decodes: Sequence[Decode]) -> mx.array:
        """Logits after penalties, bias and end-token mask."""
        if batch.penalised:
            rows = batch.index["penalised"]
            logits = replace_rows(logits, rows, penalise(batch, mx.take(logits, rows, axis=0)))
        if batch.biased:
            logits = logits.at[batch.index["biased"]].add(batch.bias)
        return self._forbid_ends(batch, logits, decodes)

    def _forbid_ends(self, batch: Batch, logits: mx.array, decodes: Sequence[Decode]) -> mx.array:
        early = [
            i
            for i in batch.bounded
            if decodes[i].num_output < batch.rows[i].setup.params.min_tokens
        ]
        if not early:
            return logits
        masks = [batch.rows[i].end_mask for i in early]
        return logits.at[mx.array(early)].add(mx.stack([m for m in masks if m is not None]))

    def _ask_host(self, batch: Batch, logits: mx.array) -> tuple[mx.array, dict[int, str]]:
        """Logits after grammar masks and processors, and whose code raised."""
        failures: dict[int, str] = {}
        changed: list[int] = []
        values: list[mx.array] = []
        for i in batch.hosted:
            row = batch.rows[i]
            try:
                value = run_host_code(row.setup, logits[i], self._vocab_size)
            except Exception as error:  # noqa: BLE001 — a request's own code may raise anything
                failures[i] = describe(error)
            else:
                changed.append(i)
                values.append(value)
        if changed:
            logits = replace_rows(logits, mx.array(changed), mx.stack(values))
        return logits, failures

    def _draw(
        self,
        batch: Batch,
        draw: DrawParams,
        logits: mx.array,
        greedy: mx.array,
        decodes: Sequence[Decode],
    ) -> mx.array:
        rows = batch.index["drawn"]
        everyone = len(batch.drawn) == len(batch.keys)
        chosen = logits if everyone else mx.take(logits, rows, axis=0)
        # Relative to the best, so that no temperature makes it overflow.
        scaled = (chosen - mx.max(chosen, axis=-1, keepdims=True)) / draw.temperature
        scaled = self._filter(draw, scaled)
        positions = [decodes[i].start + 1 for i in batch.drawn]
        tokens = mx.argmax(scaled + noise(draw.keys, positions, self._vocab_size), axis=-1)
        tokens = tokens.astype(mx.int32)
        return tokens if everyone else replace_rows(greedy, rows, tokens)

    def _filter(self, draw: DrawParams, logits: mx.array) -> mx.array:
        """Leave out unlikely tokens, in the rows that ask: the others need no sort."""
        if draw.filtered is None:
            return logits
        if draw.filtered is draw:
            return keep_likely(logits, draw)
        rows = draw.filtered_rows
        return replace_rows(logits, rows, keep_likely(mx.take(logits, rows, axis=0), draw.filtered))


def penalise(batch: Batch, logits: mx.array) -> mx.array:
    """Repetition (prompt and answer), presence and frequency penalties (answer), per row."""
    assert batch.counts is not None
    assert batch.seen is not None
    present = batch.counts > 0
    seen = batch.seen | present
    repeated = mx.where(logits > 0, logits / batch.repetition, logits * batch.repetition)
    logits = mx.where(seen, repeated, logits)
    return logits - batch.presence * present - batch.frequency * batch.counts


def keep_likely(logits: mx.array, draw: DrawParams) -> mx.array:
    """Top-k, then top-p of what it leaves, then min-p, with one sort; the rest is -infinity.

    What is kept is always a beginning of the tokens by likelihood, so its least likely member is a
    threshold; tokens that tie with it are kept too.

    Args:
        logits: ``[rows, vocab]``, temperature applied.
        draw: Parameters of these rows.
    """
    ranked = -mx.sort(-logits, axis=-1)
    rank = mx.arange(logits.shape[-1], dtype=mx.int32)[None]
    within = mx.where(rank < draw.top_k, ranked, NEGATIVE_INFINITY)
    probabilities = mx.softmax(within, axis=-1)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    # A sum of many small float32 numbers may reach 1 early: off has to mean off.
    likely = (before < draw.top_p) | (draw.top_p >= 1.0)
    keep = (rank < draw.top_k) & likely & (probabilities >= draw.min_p * probabilities[:, :1])
    # The most likely token always stays, whatever rounding says.
    last = mx.maximum(mx.sum(keep, axis=-1, keepdims=True) - 1, 0)
    threshold = mx.take_along_axis(ranked, last, axis=-1)
    return mx.where(logits >= threshold, logits, NEGATIVE_INFINITY)


def noise(keys: mx.array, positions: Sequence[int], vocab_size: int) -> mx.array:
    """Gumbel noise ``[rows, vocab]``, a function of each row's key and position alone."""
    counter = mx.array(list(positions), dtype=mx.uint32)
    keys = mx.stack([keys[:, 0], mx.bitwise_xor(keys[:, 1], counter)], axis=1)
    draw: Callable[[mx.array], mx.array] = mx.vmap(
        lambda key: mx.random.gumbel((vocab_size,), key=key)
    )
    return draw(keys)


def run_host_code(setup: RowSetup, logits: mx.array, vocab_size: int) -> mx.array:
    """Apply a row's grammar mask and processors to its logits ``[vocab]``.

    Raises:
        Exception: Whatever the request's code raises.
        ValueError: It returned something that is not a row of logits, or forbids every token.
    """
    if setup.constraint is not None:
        logits = apply_mask(setup.constraint.mask(), logits, vocab_size)
    for processor in setup.processors:
        logits = mx.array(processor(tuple(setup.output), logits))
        if logits.shape != (vocab_size,):
            raise ValueError(
                f"a logits processor returned shape {logits.shape}, expected ({vocab_size},)"
            )
    if setup.processors:
        # Evaluated here, so that an error in it is this row's and nobody else's.
        largest: Any = mx.max(logits.astype(mx.float32)).item()
        if largest == NEGATIVE_INFINITY:
            raise ValueError("the logits processors allow no token")
        if not math.isfinite(largest):
            raise ValueError("a logits processor returned values that are not finite")
    return logits.astype(mx.float32)


def apply_mask(packed: bytes | None, logits: mx.array, vocab_size: int) -> mx.array:
    """Logits ``[vocab]`` under a grammar's mask.

    Raises:
        ValueError: The mask is too short, or allows nothing.
    """
    if packed is None:
        return logits
    return mx.where(unpack_mask(packed, vocab_size), logits, NEGATIVE_INFINITY)


def unpack_mask(packed: bytes, vocab_size: int) -> mx.array:
    """Booleans ``[vocab]`` from a bit mask.

    Raises:
        ValueError: The mask is too short, or allows nothing.
    """
    if len(packed) * 8 < vocab_size:
        raise ValueError(f"the mask has {len(packed)} bytes, {vocab_size} tokens need more")
    if packed.count(0) == len(packed):
        raise ValueError("the grammar allows no token")
    # On the host, in a few microseconds: this is done for every token of every such row.
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=vocab_size, bitorder="little")
    return mx.array(bits == 1)


def mix_seed(seed: int) -> tuple[int, int]:
    """Two 32-bit words from a 64-bit seed, by the finaliser of SplitMix64 (Steele et al. 2014)."""
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z >> 32, z & 0xFFFFFFFF


def _index(rows: Sequence[Row], wanted: Callable[[SamplingParams], bool]) -> list[int]:
    return [i for i, row in enumerate(rows) if wanted(row.setup.params)]


def _column(values: Any) -> mx.array:
    return mx.array([[float(value)] for value in values], dtype=mx.float32)


def replace_rows(array: mx.array, rows: mx.array, values: mx.array) -> mx.array:
    """``array`` with some rows replaced; the argument itself is left alone."""
    copy = array + 0
    copy[rows] = values
    return copy


def _spread(values: dict[int, float], vocab_size: int) -> mx.array:
    dense = mx.zeros((vocab_size,), dtype=mx.float32)
    known = {token: value for token, value in values.items() if token < vocab_size}
    if known:
        dense[mx.array(list(known))] = mx.array(list(known.values()), dtype=mx.float32)
    return dense


def _count(tokens: Sequence[int], vocab_size: int) -> mx.array:
    counts = mx.zeros((vocab_size,), dtype=mx.int32)
    known = [token for token in tokens if token < vocab_size]
    return counts.at[mx.array(known)].add(1) if known else counts
