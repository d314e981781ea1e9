"""How many prompt tokens a step may prefill without making running streams wait too long."""

NEWEST = 0.3
NEWEST_IF_SLOWER = 0.6
TELLING_DIFFERENCE = 0.2
FIRST_CHUNK = 32
SMALLEST_CHUNK = 16
SMALLEST_DEEP_CHUNK = 4
FIRST_CHUNK_ALONE = 256
SMALLEST_CHUNK_ALONE = 64
LONGEST_CHUNK_SECONDS = 1.0
OUTLIER = 2.5
SHORTEST_STALL = 0.08
STALL_IN_STEPS = 1.5
LONGEST_STRETCH = 1.25
LONGEST_STRETCH_DEEP = 1.6
SOMEBODY_WAITS = 2.0
CROWDED = 4.0
FORGOTTEN = 0.05
LEAST_SHARE = 0.05
SIMILAR = 2


class FixedChunk:
    """A fixed number of prompt tokens per step while rows decode.

    Args:
        tokens: That number.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    @property
    def overhead(self) -> int:
        """A fixed chunk counts tokens alone."""
        return 0

    def budget(self, num_decoding: int, limit: int, num_waiting: int = 0) -> int:
        """Prompt tokens for the next step, at most ``limit``."""
        return min(self._tokens, limit) if num_decoding else limit

    def fuses(self, num_decoding: int) -> bool:
        """Nothing has to be learnt."""
        return True

    def seconds(self, num_decoding: int) -> float:
        """How long a step may do something in place of a chunk."""
        return SHORTEST_STALL if num_decoding else LONGEST_CHUNK_SECONDS

    def observe(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        """A fixed chunk learns nothing."""

    def observe_fused(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        """A fixed chunk learns nothing."""


class AdaptiveChunk:
    """The chunk whose prefill makes running streams wait about ``max_stall_seconds`` longer.

    The cost of a chunk is measured, not assumed: ``fixed + per_token * tokens``. The fixed part is
    one pass over the weights. A chunk is never so small that most of its time goes there: halving
    it further would hardly shorten the stall and would double the work. Until a speed is known
    the chunk starts small, and it never more than doubles.

    Where chunk and decode share a forward, what the decode would have taken alone cannot be seen.
    A step runs them apart whenever the rows are more than twice as many as they were when it was
    last seen, or fewer than half: what was known of few rows would make a chunk beside many look
    too dear to ever grow.

    Args:
        max_stall_seconds: How much longer a step may take because of prefill; None means one and
            a half plain decode steps, at least 80 ms. While a prompt waits for its turn it is
            twice that, for each further chunk of the prompt before it would keep it waiting; and
            up to four times while more prompts wait than rows decode: then most of those who
            would notice are in the queue.
    """

    def __init__(self, max_stall_seconds: float | None = None) -> None:
        self._fixed_target = max_stall_seconds
        self._decode_seconds = 0.0
        self._rows_seen = 0
        self._alone = ChunkCost()
        self._fused = ChunkCost()
        self._largest = 0

    @property
    def overhead(self) -> int:
        """Tokens that cost as much as beginning another chunk."""
        return int(self._alone.fixed / self._alone.per_token) if self._alone.known else 0

    @property
    def _cost(self) -> "ChunkCost":
        """Of a chunk beside decoding rows, beyond what their step takes anyway."""
        return self._fused if self._fused.known else self._alone

    def budget(self, num_decoding: int, limit: int, num_waiting: int = 0) -> int:
        """Prompt tokens for the next step, at most ``limit``."""
        if num_decoding:
            wanted = self._wanted(self._target(num_waiting / num_decoding))
        else:
            wanted = self._wanted_alone()
        return max(1, min(wanted, limit))

    def fuses(self, num_decoding: int) -> bool:
        """Whether it is known what the decode of so many rows takes, from that of similar many."""
        return (
            self._rows_seen <= SIMILAR * num_decoding and num_decoding <= SIMILAR * self._rows_seen
        )

    def seconds(self, num_decoding: int) -> float:
        """How long a step may do something in place of a chunk."""
        return self._target(0.0) if num_decoding else LONGEST_CHUNK_SECONDS

    def observe(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        """Learn from a chunk, or from a decode (``num_prefill`` is 0)."""
        if num_prefill == 0:
            self._learn_decode(num_decoding, seconds)
            return
        self._alone.learn(num_prefill, seconds)
        if num_decoding:
            self._note_size(num_prefill)

    def observe_fused(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        """Learn from a chunk that shared its forward: what it cost beyond a plain decode."""
        self._fused.learn(num_prefill, max(seconds - self._decode_seconds, LEAST_SHARE * seconds))
        self._note_size(num_prefill)

    def _learn_decode(self, num_rows: int, seconds: float) -> None:
        if self._rows_seen:
            # More rows may take as much longer as they are more.
            usual = self._decode_seconds * max(1.0, num_rows / self._rows_seen)
            seconds = min(seconds, OUTLIER * usual or seconds)
        weight = NEWEST if self.fuses(num_rows) else 1.0
        self._decode_seconds += weight * (seconds - self._decode_seconds)
        self._rows_seen = num_rows

    def _note_size(self, num_prefill: int) -> None:
        self._largest = max(num_prefill, int(self._largest * (1 - FORGOTTEN)))

    def _target(self, crowd: float) -> float:
        if self._fixed_target is not None:
            return self._fixed_target
        usual = max(SHORTEST_STALL, STALL_IN_STEPS * self._decode_seconds)
        return usual * (min(max(crowd, SOMEBODY_WAITS), CROWDED) if crowd else 1.0)

    def _wanted_alone(self) -> int:
        """A large chunk: no stream waits for it, but an abort or an arrival does."""
        if not self._alone.known:
            return FIRST_CHUNK_ALONE
        fitting = int((LONGEST_CHUNK_SECONDS - self._alone.fixed) / self._alone.per_token)
        return max(SMALLEST_CHUNK_ALONE, fitting)

    def _wanted(self, target: float) -> int:
        if not self._cost.known:
            return FIRST_CHUNK
        fitting = int((target - self._cost.fixed) / self._cost.per_token)
        growth = max(FIRST_CHUNK, 2 * self._largest)
        return min(max(self._smallest(target), self._floor(target), fitting), growth)

    def _smallest(self, target: float) -> int:
        """Deep in a long prompt even a few tokens take long: fewer, before streams stutter."""
        if self._fixed_target is not None:
            return SMALLEST_CHUNK
        stretched = (LONGEST_STRETCH_DEEP * target - self._cost.fixed) / self._cost.per_token
        return min(SMALLEST_CHUNK, max(SMALLEST_DEEP_CHUNK, int(stretched)))

    def _floor(self, target: float) -> int:
        """A chunk of which half the time is overhead, if that does not stretch the stall much."""
        if self._fixed_target is not None:
            return self.overhead
        stretched = (LONGEST_STRETCH * target - self._cost.fixed) / self._cost.per_token
        return min(self.overhead, int(stretched))


class ChunkCost:
    """What a chunk costs: ``fixed + per_token * tokens``, both following the recent past.

    Two chunks in a row of different sizes tell the fixed part from the rest. Chunks of one size do
    not, and a long prompt makes every chunk slower than the one before, so all other changes are
    put down to the tokens.
    """

    def __init__(self) -> None:
        self.fixed = 0.0
        self.per_token = 0.0
        self._told_apart = False
        self._last: tuple[int, float] | None = None
        self._usual = 0.0

    @property
    def known(self) -> bool:
        """Whether a chunk was seen."""
        return self._last is not None

    def of(self, num_tokens: int) -> float:
        """Seconds that a chunk is expected to take."""
        return self.fixed + self.per_token * num_tokens

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take a chunk in, whose time may be wrong."""
        # A compilation, or a machine that was busy elsewhere, is not a speed.
        self.add(num_tokens, min(seconds, OUTLIER * self.of(num_tokens)) if self.known else seconds)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take a chunk in."""
        first, last = self._last is None, self._last or (num_tokens, seconds)
        self._last = (num_tokens, seconds)
        slope = self._compare(last, self._last)
        rate = max(seconds - self.fixed, 0.1 * seconds) / num_tokens
        if first or slope is not None:
            self.per_token = max(rate if slope is None else slope, 1e-9)
            self._usual = num_tokens
            return
        # A short rest of a prompt says little about the tokens.
        newest = NEWEST_IF_SLOWER if rate > self.per_token else NEWEST
        weight = newest * min(1.0, num_tokens / self._usual)
        self._usual += NEWEST * (num_tokens - self._usual)
        self.per_token = max(self.per_token + weight * (rate - self.per_token), 1e-9)

    def _compare(self, one: tuple[int, float], other: tuple[int, float]) -> float | None:
        """Learn the fixed part from two chunks; the first time, return what a token costs too."""
        (small, less), (large, more) = sorted((one, other))
        if large - small <= TELLING_DIFFERENCE * large:
            return None
        slope = max(more - less, 0.0) / (large - small)
        fixed = min(max(0.0, less - slope * small), 0.9 * less)
        if self._told_apart:
            self.fixed += NEWEST * (fixed - self.fixed)
            return None
        self._told_apart = True
        self.fixed = fixed
        return (less - fixed) / small
