"""How many prompt tokens a step may prefill without making running streams wait too long."""

FORGETTING = 0.93
TELLING_SPREAD = 0.2
FIRST_CHUNK = 32
SMALLEST_CHUNK = 16
OUTLIER = 4.0
SHORTEST_STALL = 0.1
STALL_IN_STEPS = 2.0


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

    def budget(self, num_decoding: int, limit: int) -> int:
        """Prompt tokens for the next step, at most ``limit``."""
        return min(self._tokens, limit) if num_decoding else limit

    def observe(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        """A fixed chunk learns nothing."""


class AdaptiveChunk:
    """The chunk whose prefill makes running streams wait about ``max_stall_seconds`` longer.

    The cost of a chunk is measured, not assumed: ``fixed + per_token * tokens``. The fixed part is
    one pass over the weights. A chunk is never so small that most of its time goes there: halving
    it further would hardly shorten the stall and would double the work. Until a speed is known
    the chunk starts small, and it never more than doubles.

    Args:
        max_stall_seconds: How much longer a step may take because of prefill; None means twice a
            plain decode step, and at least 100 ms.
    """

    def __init__(self, max_stall_seconds: float | None = None) -> None:
        self._fixed_target = max_stall_seconds
        self._decode_seconds = 0.0
        self._cost = ChunkCost()
        self._largest = 0

    @property
    def overhead(self) -> int:
        """Tokens that cost as much as beginning another chunk."""
        return int(self._cost.fixed / self._cost.per_token) if self._cost.known else 0

    def budget(self, num_decoding: int, limit: int) -> int:
        """Prompt tokens for the next step, at most ``limit``."""
        if not num_decoding:
            return limit
        return max(1, min(self._wanted(), limit))

    def observe(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        """Learn from a chunk, or from a decode (``num_prefill`` is 0)."""
        if num_prefill == 0:
            weight = 1.0 if self._decode_seconds == 0.0 else 1.0 - FORGETTING
            seconds = min(seconds, OUTLIER * self._decode_seconds or seconds)
            self._decode_seconds += weight * (seconds - self._decode_seconds)
            return
        if self._cost.known:
            # A compilation, or a machine that was busy elsewhere, is not a speed.
            seconds = min(seconds, OUTLIER * self._cost.of(num_prefill))
        self._cost.add(num_prefill, seconds)
        if num_decoding:
            self._largest = max(num_prefill, int(self._largest * FORGETTING))

    @property
    def _target(self) -> float:
        if self._fixed_target is not None:
            return self._fixed_target
        return max(SHORTEST_STALL, STALL_IN_STEPS * self._decode_seconds)

    def _wanted(self) -> int:
        if not self._cost.known:
            return FIRST_CHUNK
        fitting = int((self._target - self._cost.fixed) / self._cost.per_token)
        growth = max(FIRST_CHUNK, 2 * self._largest)
        return min(max(SMALLEST_CHUNK, self.overhead, fitting), growth)


class ChunkCost:
    """A straight line through what recent chunks took, by least squares with forgetting.

    Chunks of one size say nothing about the fixed part; it is learnt while sizes differ and kept
    while they do not.
    """

    def __init__(self) -> None:
        self.fixed = 0.0
        self.per_token = 0.0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        """Whether a chunk was seen."""
        return self._weight > 0

    def of(self, num_tokens: int) -> float:
        """Seconds that a chunk is expected to take."""
        return self.fixed + self.per_token * num_tokens

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take a chunk in."""
        self._weight = FORGETTING * self._weight + 1.0
        self._x = FORGETTING * self._x + num_tokens
        self._y = FORGETTING * self._y + seconds
        self._xx = FORGETTING * self._xx + num_tokens * num_tokens
        self._xy = FORGETTING * self._xy + num_tokens * seconds
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x**2
        if variance > (TELLING_SPREAD * mean_x) ** 2:
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
            self.fixed = max(0.0, mean_y - max(slope, 0.0) * mean_x)
        # However the fit turns out, more tokens do take longer.
        self.fixed = min(self.fixed, 0.9 * mean_y)
        self.per_token = max((mean_y - self.fixed) / mean_x, 1e-9)
