"""``/v1/cache``: what the prefix store holds and did, and emptying it."""

from collections.abc import Callable

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle_core import AsyncEngine
from treadle_core.prefix import MissReason, PrefixStats
from treadle_server.errors import NoCache
from treadle_server.http import json_response


class CacheStats(Struct, frozen=True, kw_only=True):
    """The reply of ``GET /v1/cache/stats``; all counts are 0 where nothing is kept.

    Attributes:
        enabled: Whether prefixes are kept.
        hits: Lookups that found something.
        misses: Lookups that found nothing.
        miss_reasons: The same, by reason.
        hit_rate: Share of the lookups that found something; null before the first.
        matched_tokens: Prompt tokens of all hits.
        num_entries: What can be found in RAM.
        used_bytes: Bytes that are held in RAM.
        capacity_bytes: Most bytes there.
        evicted: Entries given up for room.
        details: Further figures by name; those of the disk begin with ``slow_``.
    """

    enabled: bool
    hits: int
    misses: int
    miss_reasons: dict[MissReason, int]
    hit_rate: float | None
    matched_tokens: int
    num_entries: int
    used_bytes: int
    capacity_bytes: int
    evicted: int
    details: dict[str, int | float]


class Cleared(Struct, frozen=True, kw_only=True):
    """The reply of ``DELETE /v1/cache``.

    Attributes:
        warming: Warm prompts that are computed again now.
    """

    cleared: bool = True
    warming: int = 0


def cache_stats(stats: PrefixStats | None) -> CacheStats:
    """The reply from the store's figures, None where there is no store."""
    found = PrefixStats() if stats is None else stats
    num_misses = sum(found.misses.values())
    asked = found.hits + num_misses
    return CacheStats(
        enabled=stats is not None,
        hits=found.hits,
        misses=num_misses,
        miss_reasons=found.misses,
        hit_rate=found.hits / asked if asked else None,
        matched_tokens=found.matched_tokens,
        num_entries=found.num_entries,
        used_bytes=found.used_bytes,
        capacity_bytes=found.capacity_bytes,
        evicted=found.evicted,
        details=found.details,
    )


class CacheRoutes:
    """Shows and empties the prefix store.

    Args:
        engine: Has the store.
        warm_again: Begins to compute the warm prompts again, and says how many there are.
    """

    def __init__(self, engine: AsyncEngine, warm_again: Callable[[], int]) -> None:
        self._engine = engine
        self._warm_again = warm_again

    async def stats(self, http: HttpRequest) -> Response:
        """The store's figures.

        Raises:
            EngineClosed: The engine has ended.
        """
        return json_response(cache_stats(await self._engine.prefix_stats()))

    async def clear(self, http: HttpRequest) -> Response:
        """Empty the store; nothing that was computed before the reply is found after it.

        Raises:
            NoCache: There is none.
            EngineClosed: The engine has ended.
        """
        if await self._engine.prefix_stats() is None:
            raise NoCache
        await self._engine.clear_prefixes()
        return json_response(Cleared(warming=self._warm_again()))
