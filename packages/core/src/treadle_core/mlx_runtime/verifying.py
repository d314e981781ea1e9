"""A step with drafts: every position of every row as a lane of its own, and what the rows keep.

A row that was fed its last token and k draft tokens has ``1 + k`` lanes. Each is sampled exactly as
plain decoding would if the draft before it had been generated; the row keeps what it would have
chosen anyway, by :func:`~treadle_core.mlx_runtime.acceptance.accept_equal`. An engine that was told
to be lossy keeps the rest of the draft too.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from treadle_core.errors import describe
from treadle_core.mlx_runtime.acceptance import (
    PADDING,
    Accept,
    Verdict,
    accept_equal,
    accept_unverified,
    count_leading,
)
from treadle_core.mlx_runtime.sampler import (
    Batch,
    Choice,
    Row,
    Sampler,
    apply_mask,
    replace_rows,
    run_host_code,
)
from treadle_core.plan import Decode, Key, Sampled


class Lanes:
    """Positions of a step, row by row.

    Args:
        decodes: The rows.

    Attributes:
        decodes: Each lane as plain decoding would have planned it.
        rows: The row of each lane.
        first: The first lane of each row.
        width: Lanes of the longest row.
    """

    def __init__(self, decodes: Sequence[Decode]) -> None:
        self.decodes: list[Decode] = []
        self.rows: list[int] = []
        self.first: list[int] = []
        self.drafts = [decode.draft for decode in decodes]
        self.width = 1 + max(map(len, self.drafts))
        for row, decode in enumerate(decodes):
            self.first.append(len(self.decodes))
            self.rows += [row] * (1 + len(decode.draft))
            self.decodes += [_lane(decode, place) for place in range(1 + len(decode.draft))]

    def grid(self) -> mx.array:
        """Lanes ``[rows, width]``; a short row's last one again and again."""
        lengths = [len(draft) for draft in self.drafts]
        pairs = zip(self.first, lengths, strict=True)
        return mx.array(
            [[first + min(i, length) for i in range(self.width)] for first, length in pairs]
        )

    def padded_drafts(self) -> mx.array:
        """Draft tokens ``[rows, width - 1]``."""
        most = self.width - 1
        rows = [[*draft, *[PADDING] * (most - len(draft))] for draft in self.drafts]
        return mx.array(rows, dtype=mx.int32)


class DraftChoice:
    """The tokens of a step with drafts on the device, and what reading them gives.

    Args:
        keys: The rows.
        lanes: Their positions.
        choice: What each lane chose.
        verdict: What each row keeps of it.
    """

    def __init__(self, keys: Sequence[Key], lanes: Lanes, choice: Choice, verdict: Verdict) -> None:
        self._keys = keys
        self._lanes = lanes
        self._choice = choice
        self._verdict = verdict

    @property
    def tokens(self) -> mx.array:
        """What is there when the step is done."""
        return self._verdict.tokens

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate."""
        return [*self._choice.arrays(), self._verdict.tokens]

    def num_kept(self) -> list[int]:
        """Wait for the tokens; how many of those that were fed each row are its own from now on."""
        kept: Any = mx.sum(self._verdict.tokens != PADDING, axis=1).tolist()
        return kept

    def read_rows(self) -> tuple[dict[Key, tuple[Sampled, ...]], dict[Key, str]]:
        """Wait for the tokens; the tokens of each row, and failures after them."""
        kept: Any = self._verdict.tokens.tolist()
        outcomes = self._choice.outcomes()
        sampled: dict[Key, tuple[Sampled, ...]] = {}
        failures: dict[Key, str] = {}
        for key, first, tokens in zip(self._keys, self._lanes.first, kept, strict=True):
            found: list[Sampled] = []
            for outcome, token in zip(outcomes[first:], tokens, strict=False):
                if token == PADDING:
                    break
                if isinstance(outcome, str):
                    failures[key] = outcome
                    break
                found.append(outcome)
            if found:
                sampled[key] = tuple(found)
        return sampled, failures


def verify(
    sampler: Sampler,
    logits: mx.array,
    decodes: Sequence[Decode],
    *,
    accept: Accept = accept_equal,
    lossy: bool = False,
) -> DraftChoice:
    """The next tokens of each row.

    Args:
        sampler: Has the rows.
        logits: ``[lanes, vocab]``: of each row's last token and its draft, in the order of
            ``decodes``.
        decodes: The rows.
        accept: Which rule keeps drafts.
        lossy: Keep them by no rule, as far as they may stand where they do.
    """
    lanes = Lanes(decodes)
    keys = tuple(decode.key for decode in decodes)
    rows = sampler.batch_of(keys)
    batch = Batch([keys[row] for row in lanes.rows], [rows.rows[row] for row in lanes.rows])
    _count_drafts(rows, batch, lanes)
    logits = logits.astype(mx.float32)
    adjusted = sampler.adjust(batch, logits, lanes.decodes)
    adjusted, failures, lengths = _ask_host(rows, lanes, adjusted, logits.shape[-1])
    choice = sampler.pick(batch, logits, adjusted, lanes.decodes, failures)
    choices, drafts = mx.take(choice.report, lanes.grid()), lanes.padded_drafts()
    if lossy:
        allowed = _allowed(adjusted, lanes, drafts)
        verdict = accept_unverified(choices, drafts, count_leading(allowed, mx.array(lengths)))
        choice = _as_kept(choice, lanes, verdict, logits)
    else:
        verdict = accept(choices, drafts, mx.array(lengths))
        choice = choice if accept is accept_equal else _as_kept(choice, lanes, verdict, logits)
    _count_kept(rows, verdict)
    return DraftChoice(keys, lanes, choice, verdict)


def _allowed(adjusted: mx.array, lanes: Lanes, drafts: mx.array) -> mx.array:
    """Which draft tokens ``[rows, width - 1]`` no mask forbids."""
    places = mx.take(adjusted, lanes.grid()[:, :-1], axis=0)
    tokens = mx.maximum(drafts, 0)[:, :, None]
    return mx.isfinite(mx.take_along_axis(places, tokens, axis=-1)[:, :, 0])


def _as_kept(choice: Choice, lanes: Lanes, verdict: Verdict, logits: mx.array) -> Choice:
    """``choice`` with what the rows keep, which need not be what their lanes chose."""
    rows = mx.array(lanes.rows)
    places = mx.array([lane - lanes.first[row] for lane, row in enumerate(lanes.rows)])
    kept = verdict.tokens[rows, places]
    taken = kept >= 0
    report, tokens = (mx.where(taken, kept, each) for each in (choice.report, choice.tokens))
    found = Choice(choice.batch, tokens, report, choice.failures)
    found.add_logprobs(logits)
    return found


def _lane(decode: Decode, place: int) -> Decode:
    if place == 0:
        return decode
    return replace(decode, start=decode.start + place, num_output=decode.num_output + place)


def _count_drafts(rows: Batch, batch: Batch, lanes: Lanes) -> None:
    """Penalties at a position count the draft before it."""
    if rows.counts is None:
        return
    slot = {row: i for i, row in enumerate(rows.penalised)}
    counts = mx.take(rows.counts, mx.array([slot[lanes.rows[i]] for i in batch.penalised]), axis=0)
    pairs = [
        (place, token)
        for place, lane in enumerate(batch.penalised)
        for token in lanes.drafts[lanes.rows[lane]][: lane - lanes.first[lanes.rows[lane]]]
    ]
    if pairs:
        places, tokens = (mx.array(list(column)) for column in zip(*pairs, strict=True))
        counts = counts.at[places, tokens].add(1)
    batch.counts = counts


def _count_kept(rows: Batch, verdict: Verdict) -> None:
    """What was committed counts from now on."""
    if rows.counts is None:
        return
    kept = mx.take(verdict.tokens, rows.index["penalised"], axis=0)
    slots = mx.arange(kept.shape[0])[:, None]
    added = (kept >= 0).astype(rows.counts.dtype)
    rows.counts = rows.counts.at[slots, mx.maximum(kept, 0)].add(added)


def _ask_host(
    rows: Batch, lanes: Lanes, logits: mx.array, vocab_size: int
) -> tuple[mx.array, dict[int, str], list[int]]:
    """Logits after the rows' own code, whose code raised, and how far each draft can be judged."""
    failures: dict[int, str] = {}
    values: dict[int, mx.array] = {}
    lengths = [len(draft) for draft in lanes.drafts]
    for row in rows.hosted:
        walk = _Walk(rows.rows[row], lanes.first[row], lanes.drafts[row], vocab_size)
        lengths[row] = walk.go(logits)
        failures |= walk.failures
        values |= walk.values
    if values:
        logits = replace_rows(logits, mx.array(list(values)), mx.stack(list(values.values())))
    return logits, failures, lengths


class _Walk:
    """A row's own code along its draft; its grammar is where it was in the end.

    Args:
        row: The row.
        first: Its first lane.
        draft: Its draft.
        vocab_size: Number of logits.

    Attributes:
        values: Logits of its lanes, as far as the draft is legal.
        failures: What its code raised, by lane.
    """

    def __init__(self, row: Row, first: int, draft: tuple[int, ...], vocab_size: int) -> None:
        self.values: dict[int, mx.array] = {}
        self.failures: dict[int, str] = {}
        self._row = row
        self._first = first
        self._draft = draft
        self._vocab_size = vocab_size
        self._advanced = 0

    def go(self, logits: mx.array) -> int:
        """Ask for every lane.

        Returns:
            Draft tokens that the row can keep. One that is illegal, or that completes the answer,
            is not among them: what the row chooses in its place says the same.
        """
        for place, token in enumerate((*self._draft, None)):
            lane = self._first + place
            try:
                goes_on = self._ask(lane, logits[lane], token)
            except Exception as error:  # noqa: BLE001 — a request's own code may raise anything
                self.failures[lane] = describe(error)
                goes_on = False
            if not goes_on:
                self._go_back()
                return place
        raise AssertionError("the last lane has no draft token")

    def _ask(self, lane: int, logits: mx.array, token: int | None) -> bool:
        """Take a lane's logits in, and its draft token; whether the draft can go on behind it."""
        setup = self._row.setup
        if token is None:
            self.values[lane] = run_host_code(setup, logits, self._vocab_size)
            return False
        assert not setup.processors, "rows with processors get no drafts"
        packed: bytes | None = setup.constraint.mask()
        self.values[lane] = apply_mask(packed, logits, self._vocab_size)
        if packed is not None and not packed[token // 8] >> token % 8 & 1:
            return False
        return self._advance(token)

    def _advance(self, token: int) -> bool:
        try:
            complete = self._row.setup.constraint.advance(token)
        except Exception:  # noqa: BLE001 — it raises again when the answer takes the token
            return False
        self._advanced += 1
        return not complete

    def _go_back(self) -> None:
        if not self._advanced:
            return
        try:
            self._row.setup.constraint.rollback(self._advanced)
        except Exception as error:  # noqa: BLE001 — a grammar that is somewhere else ends its row
            self.failures[self._first] = describe(error)
