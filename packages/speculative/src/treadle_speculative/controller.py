"""How many tokens to draft: what a wider forward costs, measured, against what it brings.

A forward over ``rows`` rows is as wide as its longest draft. If a row keeps each next draft token
with probability a, a draft of k tokens brings ``1 + a + … + a**k`` tokens on average (Leviathan et
al. 2023, equation 1). So the widths are compared by expected tokens per second; where none beats
plain decoding, nothing is drafted, and now and then a short draft tells whether that has changed.
"""

from collections.abc import Sequence
from functools import lru_cache

from msgspec import Struct

from treadle_core.drafting import DraftRoom, Verified, VerifiedStep
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
ENOUGH = 4
ASSUMED_TOKENS = 128.0
LEARNING_STEPS = 32
GRACE_STEPS = 64
MOST_CREDIT_STEPS = 256
DEAR_STEPS = 0.05


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
        probe_share: Most time that looking for a change may cost while drafting is off, as a share; as
            much again for reading rows where the drafter has to.
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


class Reading:
    """What it takes to read a row before the first draft for it, and how long that is of use.

    Both follow the recent past.

    Attributes:
        seconds: For reading one row.
        tokens: That a row goes on for once it is read.
        paid: Seconds that may be lost with reading where it promises nothing.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = ASSUMED_TOKENS
        self.paid = 0.0
        self._sum = self._num = 0.0
        self._written = 0.0
        self._lives = 1.0
        self._began: dict[Key, float] = {}

    def add(self, num: int, seconds: float) -> None:
        """So many rows were read to their end, in the last of so many seconds."""
        kept = KEPT_BY_ROW**num
        self._sum = kept * self._sum + seconds
        self._num = kept * self._num + num
        self.seconds = self._sum / max(1.0, self._num)
        self.paid = max(0.0, self.paid - seconds)

    def pay(self, seconds: float) -> None:
        """So much more may be lost, up to the reading of a row."""
        self.paid = min(self.paid + seconds, self.seconds)

    def write(self, tokens: float) -> None:
        """Rows went on by so many tokens each."""
        self._written += tokens

    def begin(self, key: Key) -> None:
        """A row is read."""
        self._began[key] = self._written

    def end(self, key: Key) -> None:
        """A row is over; nothing if it was not read."""
        began = self._began.pop(key, None)
        if began is not None:
            self._lives = KEPT_BY_ROW * self._lives + 1
            self.tokens += (self._written - began - self.tokens) / self._lives


class AdaptiveController:
    """Drafts as much as pays, for the rows that run now, by measured costs and acceptance.

    Acceptance is estimated by row; a row that is new begins with what all rows have shown lately.
    Costs belong to the number of rows. Both are only ever measured, so the controller needs no
    knowledge of machine, model or drafter.

    A drafter may have to read a row before it can draft for it. That is paid from what drafting has
    saved, a few seconds in advance: where prompts are long and answers short, rows that are new are
    not begun any more. As long as little is known of the drafter, few are begun, and where it promises
    nothing, one at a time, as seldom as its reading takes long.

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
        self._num_answers = 0
        self._credit = 0.0
        self._reading = Reading()
        self._begun: frozenset[Key] = frozenset()

    @property
    def max_tokens(self) -> int:
        """The longest draft that it will ever ask for."""
        return self._config.max_draft_tokens

    def limits(self, rows: Sequence[DraftRoom]) -> list[int]:
        """Drafts of the width that promises most; none where plain decoding does."""
        num = len(rows)
        if not any(row.most for row in rows):
            return [0] * num
        plain = self._costs.of(num, 0)
        width, gain = self._best_width(self._prospects(rows), plain, drafted=False)
        if self._costs.plain_age(num) > self._refresh_after(gain):
            return [0] * num
        unread = self._to_read(rows, plain, gain if width > 1 else 0.0)
        read = [row if row.key in self._rows else DraftRoom(row.key, 0) for row in rows]
        prospects = self._prospects(read)
        if len(unread) < sum(1 for row in rows if row.most and row.key not in self._rows):
            # Those that are left have to be worth a wider forward by themselves.
            width, _ = self._best_width(prospects, plain, drafted=False)
        if width == 1 and self._probe_is_due(num):
            width = 2
        return [
            min(row.most, max(1, width - 1)) if row.key in unread else prospect.length(width)
            for row, prospect in zip(rows, prospects, strict=True)
        ]

    def settle(self, rows: Sequence[DraftRoom]) -> list[int]:
        """As much of the drafts as pays, now that they are there."""
        num = len(rows)
        if not any(row.most for row in rows):
            return [0] * num
        prospects = self._prospects(rows)
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
            self._reading.write(1.0)
            self._reading.pay(self._config.probe_share * step.seconds)
            self._earn(self._config.probe_share * step.seconds, num)
            return
        self._balance(step)
        self._learn_drafting(step)
        for row in step.rows:
            if row.asked and not row.pending:
                self._learn_row(row)
        self._begun = frozenset(row.key for row in step.rows if row.pending)
        if not self._begun or any(row.drafted for row in step.rows):
            self._back_off(any(row.accepted for row in step.rows))

    def leave(self, key: Key) -> None:
        """Forget a row; what all have shown stays."""
        self._rows.pop(key, None)
        self._reading.end(key)

    def _learn_row(self, row: Verified) -> None:
        if row.key not in self._rows:
            seen = self._all
            self._rows[row.key] = Acceptance(KEPT_BY_ROW, seen.rate, seen.coverage)
            self._reading.begin(row.key)
        self._rows[row.key].add(row.drafted, row.accepted)
        self._all.add(row.drafted, row.accepted)
        self._num_answers += 1

    def _learn_drafting(self, step: VerifiedStep) -> None:
        """Tell what drafting takes from what reading new rows does, which comes but once."""
        num = len(step.rows)
        depth = max((row.drafted for row in step.rows), default=0)
        unread = [row for row in step.rows if row.asked and row.key not in self._rows]
        if unread:
            read = sum(not row.pending for row in unread)
            drafting = depth * self._costs.drafting(num)
            self._reading.add(read, max(0.0, step.draft_seconds - drafting))
        elif depth and not any(row.pending for row in step.rows):
            self._costs.add_drafting(num, step.draft_seconds / depth)

    def _to_read(self, rows: Sequence[DraftRoom], plain: float, gain: float) -> set[Key]:
        """Rows that the drafter is asked for though it may have to read them first.

        Args:
            rows: The rows of the step.
            plain: Seconds of the step without drafts.
            gain: What drafting for all of them promises, as a share.
        """
        unread = [row for row in rows if row.most and row.key not in self._rows]
        most = self._num_to_read(len(rows), plain, gain) if unread else 0
        if most >= len(unread):
            return {row.key for row in unread}
        # What was begun is gone on with, and an answer that is nearly over is not worth it.
        unread.sort(key=lambda row: (row.key not in self._begun, -row.most))
        return {row.key for row in unread[:most]}

    def _num_to_read(self, num: int, plain: float, gain: float) -> int:
        """How many rows may be read: all where it pays, else as many as finding out may cost."""
        reading, learning = self._reading, self._num_answers < ENOUGH
        most = max(1, self._num_answers) if learning else num
        grace = (LEARNING_STEPS if learning else GRACE_STEPS) * plain
        dear = reading.seconds > DEAR_STEPS * plain
        if dear and self._credit <= -grace:
            return 0
        saved = reading.tokens * plain * gain / (1 + gain) / num
        if self._num_answers and saved > reading.seconds:
            return most
        if not self._probe_is_due(num):
            return 0
        if not dear:
            return min(most, int(DEAR_STEPS * plain / reading.seconds) if reading.seconds else num)
        return int(bool(self._begun) or reading.paid >= reading.seconds)

    def _balance(self, step: VerifiedStep) -> None:
        """Set what a step saved against what it took, reading included."""
        num = len(step.rows)
        tokens = sum(len(row.tokens) for row in step.rows) / max(1, num)
        self._reading.write(tokens)
        self._earn(tokens * self._costs.of(num, 0) - step.seconds - step.draft_seconds, num)

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
        if self._num_answers < ENOUGH:
            return True
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

    def _prospects(self, rows: Sequence[DraftRoom]) -> list[Prospect]:
        return [self._prospect(row) for row in rows]

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
