"""How many prompt tokens a step may prefill without making running streams wait too long."""

SMOOTHING = 0.3
FIRST_CHUNK = 32
SMALLEST_CHUNK = 8


class FixedChunk:
    """A fixed number of prompt tokens per step while rows decode.

    Args:
        tokens: That number.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def budget(self, num_decoding: int, limit: int) -> int:
        """Prompt tokens for the next step, at most ``limit``."""
        return min(self._tokens, limit) if num_decoding else limit

    def observe(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        """A fixed chunk learns nothing."""


class AdaptiveChunk:
    """A chunk that takes about ``max_stall_seconds`` more than a step without one.

    The cost of a step is measured, not assumed: seconds of a step that only decodes, and seconds
    per prompt token beyond that. Both follow the recent past, so the chunk shrinks as a long
    prompt's attention grows. Until a speed is known the chunk starts small and at most doubles.

    Args:
        max_stall_seconds: How much longer a step may take because of prefill.
    """

    def __init__(self, max_stall_seconds: float) -> None:
        self._target = max_stall_seconds
        self._decode_seconds: float | None = None
        self._token_seconds: float | None = None
        self._last_chunk = 0

    def budget(self, num_decoding: int, limit: int) -> int:
        """Prompt tokens for the next step, at most ``limit``."""
        if not num_decoding:
            return limit
        if self._token_seconds is None:
            return min(FIRST_CHUNK, limit)
        wanted = int(self._target / max(self._token_seconds, 1e-9))
        grown = max(FIRST_CHUNK, 2 * self._last_chunk)
        return max(1, min(max(SMALLEST_CHUNK, min(wanted, grown)), limit))

    def observe(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        """Learn from a step of this many decoding rows and prompt tokens."""
        if num_prefill == 0:
            if num_decoding:
                self._decode_seconds = _smooth(self._decode_seconds, seconds)
            return
        base = (self._decode_seconds or 0.0) if num_decoding else 0.0
        per_token = max(seconds - base, 0.1 * seconds) / num_prefill
        self._token_seconds = _smooth(self._token_seconds, per_token)
        if num_decoding:
            self._last_chunk = num_prefill


def _smooth(before: float | None, value: float) -> float:
    if before is None:
        return value
    return before + SMOOTHING * (value - before)
