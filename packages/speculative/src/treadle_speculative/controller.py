"""How many tokens to draft: what a wider forward costs, measured, against what it brings.

A forward over ``rows`` rows is as wide as its longest draft. If a row keeps each next draft token
with probability a, a draft of k tokens brings ``1 + a + … + a**k`` tokens on average (Leviathan et
al. 2023, equation 1). So the widths are compared by expected tokens per second; where none beats
plain decoding, nothing is drafted, and now and then a short draft tells whether that has changed.
"""

from collections.abc import Sequence
from functools import lru_cache

from msgspec import Struct

from treadle_core.drafting import DraftRoom, VerifiedStep
from treadle_core.plan import Key
from treadle_core.request import check_float, check_int
from treadle_speculative.costs import StepCosts

KEPT_BY_ROW = 0.9
KEPT_BY_ALL = 0.98
ASSUMED_WEIGHT = 3.0
FIRST_GUESS = 0.5
LEAST_CHANCE = 0.02
RATE_STEPS = 256
FIRST_WAIT = 4
LONGEST_WAIT = 32
SOONEST_REFRESH = 8
LATEST_REFRESH = 128
MOST_TOKENS = 31
GRACE_STEPS = 64
MOST_CREDIT_STEPS = 256


class FixedController:
    """The same number for every row, as long as the draft reaches.

    Args:
        num_tokens: That number.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    @property
    def max_tokens(self) -> int:
        """That number."""
        return self._num_tokens

    def limits(self, rows: Sequence[DraftRoom]) -> list[int]:
        """That number, or what a row has room for."""
        return [min(self._num_tokens, row.most) for row in rows]

    def settle(self, rows: Sequence[DraftRoom]) -> list[int]:
        """All that was drafted."""
        return [min(self._num_tokens, row.most) for row in rows]

    def observe(self, step: VerifiedStep) -> None:
        """It learns nothing."""

    def leave(self, key: Key) -> None:
        """It knows no rows."""


class ControllerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the adaptive controller.

    Attributes:
        max_draft_tokens: The longest draft. On Metal a forward of up to 8 tokens per row uses the
            decode kernel, and so costs little more than one.
        margin: Drafting has to promise at least this much more tokens per second, as a share:
            measured times are not exact.
        probe_share: Most time that looking for a change may cost while drafting is off, as a share.
    """

    max_draft_tokens: int = 7
    margin: float = 0.03
    probe_share: float = 0.005

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        check_int("max_draft_tokens", self.max_draft_tokens, 1, MOST_TOKENS)
        check_float("margin", self.margin, 0.0, 1.0)
        check_float("probe_share", self.probe_share, 0.0, 1.0, exclusive_low=True)


class Acceptance:
    """How often the next draft token was kept, and how often there was a draft at all.

    Both follow the recent past: each verification makes all before it count a little less, and so
    does what was assumed at first.

    Args:
        kept: What is left of the weight of the past at each verification.
        rate: What to assume of the next draft token.
        coverage: What to assume of whether there is a draft.
    """

    def __init__(self, kept: float, rate: float, coverage: float) -> None:
        self._kept = kept
        self._tried = self._asked = ASSUMED_WEIGHT
        self._accepted = ASSUMED_WEIGHT * rate
        self._drafted = ASSUMED_WEIGHT * coverage

    @property
    def rate(self) -> float:
        """Probability that the next draft token is kept, if those before it are."""
        return self._accepted / self._tried

    @property
    def coverage(self) -> float:
        """Probability that a step that asks for a draft gets to verify one."""
        return self._drafted / self._asked

    def add(self, drafted: int, accepted: int) -> None:
        """Take a verification in; ``drafted`` is 0 where the drafter was asked in vain."""
        self._drafted = self._kept * self._drafted + (drafted > 0)
        self._asked = self._kept * self._asked + 1
        if drafted:
            # What stood behind the first token that was not kept tells nothing.
            self._accepted = self._kept * self._accepted + accepted
            self._tried = self._kept * self._tried + min(accepted + 1, drafted)


class Prospect(Struct, frozen=True):
    """What to expect of a row.

    Attributes:
        most: Draft tokens that it can take, or has, and that are worth looking at.
        chance: Probability that there are any.
        tokens: What a verification of 0, 1, 2 … draft tokens is expected to bring.
    """

    most: int
    chance: float
    tokens: tuple[float, ...]

    def length(self, width: int) -> int:
        """Its share of a width."""
        return min(self.most, width - 1)


class AdaptiveController:
    """Drafts as much as pays, for the rows that run now, by measured costs and acceptance.

    Acceptance is estimated by row; a row that is new begins with what all rows have shown lately.
    Costs belong to the number of rows. Both are only ever measured, so the controller needs no
    knowledge of machine, model or drafter.

    A drafter may have to read a row before it can draft for it. That is paid from what drafting has
    saved, a few seconds in advance: where prompts are long and answers short, rows that are new are
    not begun any more.

    Args:
        config: Options.
    """

    def __init__(self, config: ControllerConfig | None = None) -> None:
        self._config = config or ControllerConfig()
        self._costs = StepCosts()
        self._all = Acceptance(KEPT_BY_ALL, FIRST_GUESS, FIRST_GUESS)
        self._rows: dict[Key, Acceptance] = {}
        self._steps_since_draft = 0
        self._wait = FIRST_WAIT
        self._credit = 0.0
        self._catches_up = False

    @property
    def max_tokens(self) -> int:
        """The longest draft that it will ever ask for."""
        return self._config.max_draft_tokens

    def limits(self, rows: Sequence[DraftRoom]) -> list[int]:
        """Drafts of the width that promises most; none where plain decoding does."""
        num = len(rows)
        plain = self._costs.of(num, 0)
        rows = self._affordable(rows, plain)
        if not any(row.most for row in rows):
            return [0] * num
        prospects = [self._prospect(row) for row in rows]
        width, gain = self._best_width(prospects, plain, drafted=False)
        if self._costs.plain_age(num) > self._refresh_after(gain):
            return [0] * num
        if width == 1 and self._probe_is_due(num):
            width = 2
        return [prospect.length(width) for prospect in prospects]

    def settle(self, rows: Sequence[DraftRoom]) -> list[int]:
        """As much of the drafts as pays, now that they are there."""
        num = len(rows)
        if not any(row.most for row in rows):
            return [0] * num
        prospects = [self._prospect(row) for row in rows]
        width, _ = self._best_width(prospects, self._costs.of(num, 1), drafted=True)
        if width == 1 and self._probe_is_due(num):
            width = 2
        return [prospect.length(width) for prospect in prospects]

    def observe(self, step: VerifiedStep) -> None:
        """Learn what a step took, and how its drafts came out."""
        num = len(step.rows)
        self._costs.add(num, step.width if step.asked else 0, step.seconds)
        if not step.asked:
            self._steps_since_draft += 1
            self._earn(self._config.probe_share * step.seconds, num)
            return
        pending = any(row.pending for row in step.rows)
        self._balance(step, pending=pending)
        for row in step.rows:
            if row.pending:
                continue
            if row.key not in self._rows:
                seen = self._all
                self._rows[row.key] = Acceptance(KEPT_BY_ROW, seen.rate, seen.coverage)
            self._rows[row.key].add(row.drafted, row.accepted)
            self._all.add(row.drafted, row.accepted)
        depth = max((row.drafted for row in step.rows), default=0)
        if depth and not pending:
            self._costs.add_drafting(num, step.draft_seconds / depth)
        if depth or not pending:
            self._back_off(any(row.accepted for row in step.rows))

    def leave(self, key: Key) -> None:
        """Forget a row; what all have shown stays."""
        self._rows.pop(key, None)

    def _affordable(self, rows: Sequence[DraftRoom], plain: float) -> Sequence[DraftRoom]:
        """Rows without those that the drafter would first have to read, if that does not pay."""
        if not self._catches_up or self._credit > -GRACE_STEPS * plain:
            return rows
        return [row if row.key in self._rows else DraftRoom(row.key, 0) for row in rows]

    def _balance(self, step: VerifiedStep, *, pending: bool) -> None:
        """Set what a step saved against what it took, reading included."""
        num = len(step.rows)
        self._catches_up |= pending
        saved = sum(len(row.tokens) for row in step.rows) / max(1, num) * self._costs.of(num, 0)
        self._earn(saved - step.seconds - step.draft_seconds, num)

    def _earn(self, seconds: float, num: int) -> None:
        most = MOST_CREDIT_STEPS * self._costs.of(num, 0)
        self._credit = min(max(self._credit + seconds, -most), most)

    def _back_off(self, worked: bool) -> None:
        """Look again later and later while nothing comes of it."""
        if worked:
            self._wait = FIRST_WAIT
        elif self._steps_since_draft:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        self._steps_since_draft = 0

    def _probe_is_due(self, num: int) -> bool:
        """Whether enough steps went by without a draft that one more may be lost."""
        plain = self._costs.of(num, 0)
        loss = self._costs.of(num, 2) + self._costs.drafting(num) - plain
        affordable = loss / (self._config.probe_share * plain) if plain else 0.0
        return self._steps_since_draft >= max(self._wait, affordable)

    def _refresh_after(self, gain: float) -> float:
        """After how many steps plain decoding is measured again: often where it is a near thing."""
        return min(max(gain / self._config.probe_share, SOONEST_REFRESH), LATEST_REFRESH)

    def _best_width(
        self, rows: Sequence[Prospect], plain: float, *, drafted: bool
    ) -> tuple[int, float]:
        """The width with the most expected tokens per second, and the share that it gains.

        Args:
            rows: The rows of the step.
            plain: Seconds of the step without drafts.
            drafted: Whether the drafts are there, so that only the forward is left to be paid.
        """
        num = len(rows)
        if plain <= 0.0:
            return 1, 0.0
        best, most = 1, (1 + self._config.margin) * num / plain
        deepest = min(self._deepest(num), max(row.most for row in rows))
        for width in range(2, deepest + 2):
            speed = self._speed(rows, width, drafted=drafted)
            if speed > most:
                best, most = width, speed
        return best, most * plain / num - 1

    def _deepest(self, num: int) -> int:
        """Where costs are not known yet, drafts grow by doubling."""
        return min(self._config.max_draft_tokens, 2 * self._costs.deepest(num) or 1)

    def _speed(self, rows: Sequence[Prospect], width: int, *, drafted: bool) -> float:
        """Expected tokens per second of steps of this width."""
        num, tokens, nobody = len(rows), 0.0, 1.0
        for row in rows:
            length = row.most if row.most < width else width - 1
            chance = (1.0 if drafted else row.chance) if length else 0.0
            tokens += 1 + chance * (row.tokens[length] - 1)
            nobody *= 1 - chance
        seconds = self._costs.of(num, width)
        if not drafted:
            seconds += (width - 1) * self._costs.drafting(num)
            seconds += nobody * (self._costs.of(num, 1) - seconds)
        return tokens / max(seconds, 1e-9)

    def _prospect(self, row: DraftRoom) -> Prospect:
        known = self._rows.get(row.key, self._all)
        tokens = outlook(round(known.rate * RATE_STEPS), self._config.max_draft_tokens)
        return Prospect(min(row.most, len(tokens) - 1), known.coverage, tokens)


@lru_cache(maxsize=2 * RATE_STEPS)
def outlook(rate_steps: int, max_tokens: int) -> tuple[float, ...]:
    """Expected tokens by length of the draft, as far as its last token has a chance.

    One draft token is always among them, to keep the rate honest.
    """
    rate = rate_steps / RATE_STEPS
    tokens = [1.0, 1.0 + rate]
    while len(tokens) <= max_tokens and rate ** len(tokens) >= LEAST_CHANCE:
        tokens.append(expected_tokens(rate, len(tokens)))
    return tuple(tokens)


def expected_tokens(rate: float, length: int) -> float:
    """Tokens that a verification of ``length`` draft tokens brings, each kept at ``rate``."""
    if rate >= 1.0:
        return length + 1.0
    return (1 - rate ** (length + 1)) / (1 - rate)
