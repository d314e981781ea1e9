"""``/v1/speculative``: who guesses tokens ahead, and what came of it."""

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle_core import AsyncEngine, Engine, EngineStats
from treadle_core.events import BypassReason, DraftCounters
from treadle_server.http import json_response


class Speculated(Struct, frozen=True, kw_only=True):
    """How guessing went, for an answer or for all.

    Attributes:
        attempted: Guesses that were verified.
        accepted: Those that became part of an answer.
        rejected: Those that did not.
        acceptance_rate: Accepted of attempted; null before there was one.
        forwards_saved: Forwards that would have been needed on top.
        bypassed: Forwards of an answer without a guess, by reason.
    """

    attempted: int
    accepted: int
    rejected: int
    acceptance_rate: float | None
    forwards_saved: int
    bypassed: dict[BypassReason, int]


class SpeculativeStats(Struct, frozen=True, kw_only=True):
    """The reply of ``GET /v1/speculative/stats``; all counts are 0 where nobody guesses.

    Attributes:
        method: Who guesses; null where nobody does.
        failure: Why that was switched off; null while it works.
        lossy: Whether guesses are kept unverified, so that answers are not the model's own.
        lossy_tokens: Guesses that were.
        held_bytes: Memory held for guessing, a draft model's keys and values included.
        failures: How often guessing was switched off.
        total: How it went, for all answers, those that still run included.
    """

    method: str | None
    failure: str | None
    lossy: bool
    lossy_tokens: int
    held_bytes: int
    failures: int
    total: Speculated


def speculated(drafts: DraftCounters) -> Speculated:
    """Counters as replies show them."""
    return Speculated(
        attempted=drafts.attempted,
        accepted=drafts.accepted,
        rejected=drafts.rejected,
        acceptance_rate=drafts.acceptance_rate,
        forwards_saved=drafts.forwards_saved,
        bypassed=drafts.bypassed,
    )


def speculative_stats(stats: EngineStats) -> SpeculativeStats:
    """The reply from the engine's figures."""
    drafts = DraftCounters() if stats.drafts is None else stats.drafts
    return SpeculativeStats(
        method=stats.drafter,
        failure=stats.draft_failure,
        lossy=stats.lossy,
        lossy_tokens=drafts.lossy,
        held_bytes=stats.draft_bytes,
        failures=drafts.failures,
        total=speculated(drafts),
    )


class SpeculativeRoutes:
    """Shows what speculation does.

    Args:
        engine: Speculates, or does not.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def stats(self, http: HttpRequest) -> Response:
        """The figures.

        Raises:
            EngineClosed: The engine has ended.
        """
        return json_response(speculative_stats(await self._engine.call(Engine.stats)))
