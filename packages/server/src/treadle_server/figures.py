"""All figures of a server as data, nested by the part that they are of.

They are of what the engine told last, so collecting them waits for no step, and they are still
there when the engine has ended.
"""

from importlib import metadata

import anyio
from msgspec import Struct

from treadle_core import Engine, EngineClosed, EngineStats
from treadle_core.ports import Clock
from treadle_server.cache_routes import CacheStats, cache_stats
from treadle_server.health import Watch
from treadle_server.media import FeatureFigures, MediaInput
from treadle_server.meters import Latencies, Measured, Meters, Tokens
from treadle_server.serving import Serving
from treadle_server.speculative_routes import SpeculativeStats, speculative_stats
from treadle_server.traffic import HttpFigures, Traffic

PACKAGES = (
    *("treadle-server", "treadle-core", "treadle-cache", "treadle-speculative"),
    *("treadle-multimodal", "mlx", "mlx-lm", "mlx-vlm"),
)


class ModelFigures(Struct, frozen=True, kw_only=True):
    """What is served.

    Attributes:
        names: What requests may call it.
        type: The architecture.
        context_length: Most tokens of a prompt and its answer.
        batched: Whether rows share a forward; otherwise they run one at a time.
        note: Why not, or why no state is kept; empty where there is nothing to say.
    """

    names: tuple[str, ...]
    type: str
    context_length: int
    batched: bool
    note: str


class EngineFigures(Struct, frozen=True, kw_only=True):
    """What the engine has done.

    Attributes:
        alive: Whether it runs.
        ready: Whether requests can be served: it runs, and advances or has nothing to do.
        trouble: Why not; null if they can.
        steps: Steps done.
        requests: Requests accepted.
        answers: Answers that ended, by how: ``stop``, ``length``, ``abort``, or an error's code.
        tokens: Tokens.
        seconds: Where the time went.
    """

    alive: bool
    ready: bool
    trouble: str | None
    steps: int
    requests: int
    answers: dict[str, int]
    tokens: Tokens
    seconds: Latencies


class SchedulerFigures(Struct, frozen=True, kw_only=True):
    """Who waits and who runs; each answer of a request counts.

    Attributes:
        policy: Order of the queue.
        waiting: Answers in the queue.
        max_waiting: Most of them.
        running: Answers that are being worked on.
        max_running: Most of them.
        preemptions: How often one had to give its row to others.
    """

    policy: str
    waiting: int
    max_waiting: int
    running: int
    max_running: int
    preemptions: int


class KvFigures(Struct, frozen=True, kw_only=True):
    """Live keys and values.

    Attributes:
        used_bytes: Bytes allocated.
        budget_bytes: Most of them; null is no limit.
    """

    used_bytes: int
    budget_bytes: int | None


class MediaFigures(Struct, frozen=True, kw_only=True):
    """Images, videos and audio.

    Attributes:
        kinds: What the model takes of them.
        why_none: Why it takes none; null if it takes some.
        encode_seconds: Time that went into encoding them.
        features: What is kept of that; null where nothing is.
    """

    kinds: tuple[str, ...]
    why_none: str | None
    encode_seconds: float
    features: FeatureFigures | None


class Figures(Struct, frozen=True, kw_only=True):
    """The reply of ``GET /status``.

    Attributes:
        versions: Of the packages that are installed, by name.
        started: When the server began, in seconds since 1970.
        uptime_seconds: How long ago that was.
        model: What is served; null once the engine has ended.
        engine: What the engine has done.
        scheduler: Who waits and who runs.
        kv: Live keys and values.
        cache: As ``GET /v1/cache/stats``; null once the engine has ended.
        speculative: As ``GET /v1/speculative/stats``.
        media: Images, videos and audio.
        http: HTTP requests.
    """

    versions: dict[str, str]
    started: int
    uptime_seconds: float
    model: ModelFigures | None
    engine: EngineFigures
    scheduler: SchedulerFigures
    kv: KvFigures
    cache: CacheStats | None
    speculative: SpeculativeStats
    media: MediaFigures
    http: HttpFigures


class Reporter:
    """Collects the figures.

    Args:
        serving: What is served.
        watch: Knows whether the engine advances.
        traffic: Has counted the HTTP requests.
        clock: Time.
    """

    def __init__(self, serving: Serving, watch: Watch, traffic: Traffic, clock: Clock) -> None:
        self._serving = serving
        self._watch = watch
        self._traffic = traffic
        self._clock = clock
        self._meters = Meters(clock)
        self._began = clock.now()
        self._versions: dict[str, str] = {}

    async def begin(self) -> None:
        """Count what the engine does from now on.

        Raises:
            EngineClosed: It does not run.
        """
        # Files are read for them.
        self._versions = await anyio.to_thread.run_sync(installed_versions)
        await self._serving.engine.call(lambda engine: engine.observe(self._meters))

    async def figures(self) -> Figures:
        """All of them, as of now.

        Raises:
            EngineClosed: The engine never ran.
        """
        engine = self._serving.engine
        stats = engine.stats
        if stats is None:
            raise EngineClosed(engine.death or "the engine has not begun")
        measured = self._meters.measured()
        return Figures(
            versions=self._versions,
            started=self._serving.created,
            uptime_seconds=self._clock.now() - self._began,
            model=self._model(),
            engine=self._engine(stats, measured),
            scheduler=self._scheduler(stats),
            kv=KvFigures(used_bytes=stats.kv_bytes, budget_bytes=stats.kv_budget_bytes),
            cache=await self._cache(),
            speculative=speculative_stats(stats),
            media=self._media(measured),
            http=self._traffic.figures(),
        )

    def _model(self) -> ModelFigures | None:
        try:
            engine: Engine = self._serving.engine.engine
        except EngineClosed:
            return None
        return ModelFigures(
            names=self._serving.names,
            type=engine.spec.model_type,
            context_length=engine.context_length,
            batched=engine.spec.batched,
            note=engine.spec.note,
        )

    def _engine(self, stats: EngineStats, measured: Measured) -> EngineFigures:
        trouble = self._watch.trouble
        return EngineFigures(
            alive=self._serving.engine.alive,
            ready=trouble is None,
            trouble=trouble,
            steps=stats.num_steps,
            requests=stats.num_requests,
            answers=measured.outcomes,
            tokens=measured.tokens,
            seconds=measured.latencies,
        )

    def _scheduler(self, stats: EngineStats) -> SchedulerFigures:
        config = self._serving.config.engine
        return SchedulerFigures(
            policy=config.policy,
            waiting=stats.num_waiting,
            max_waiting=config.max_queue,
            running=stats.num_running,
            max_running=config.max_num_seqs,
            preemptions=stats.num_preemptions,
        )

    async def _cache(self) -> CacheStats | None:
        try:
            return cache_stats(await self._serving.engine.prefix_stats())
        except EngineClosed:
            return None

    def _media(self, measured: Measured) -> MediaFigures:
        media = self._serving.media
        takes = isinstance(media, MediaInput)
        return MediaFigures(
            kinds=tuple(sorted(media.kinds)) if takes else (),
            why_none=None if takes else media.why,
            encode_seconds=measured.encode_seconds,
            features=media.features() if takes else None,
        )


def installed_versions() -> dict[str, str]:
    """Versions of the packages that matter, as far as they are installed."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
