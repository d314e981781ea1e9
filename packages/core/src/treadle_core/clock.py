"""Time as an argument."""

import time


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        return time.monotonic()
