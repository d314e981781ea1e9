"""The figures in Prometheus' text format.

Names and labels are fixed here. A label is a method, the pattern of a route, a status, a tier, or a
word that the code has for a reason or a figure: there are only so many of each.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from treadle_server.cache_routes import CacheStats
from treadle_server.figures import (
    EngineFigures,
    Figures,
    KvFigures,
    MediaFigures,
    ModelFigures,
    SchedulerFigures,
)
from treadle_server.media import FeatureFigures
from treadle_server.meters import Distribution
from treadle_server.speculative_routes import SpeculativeStats
from treadle_server.traffic import HttpFigures

LabelT = TypeVar("LabelT", bound=str)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SLOW = "slow_"
"""What the names of a disk tier's figures begin with."""


class FigureCollector(Collector):
    """Figures of one moment as metric families.

    Args:
        figures: Those.
    """

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """All families."""
        return families(self._figures)


def exposition(figures: Figures) -> bytes:
    """Figures as a scraper reads them."""
    registry = CollectorRegistry()
    registry.register(FigureCollector(figures))
    return generate_latest(registry)


def families(figures: Figures) -> Iterator[Metric]:
    """All families, in order; those of a part that there is not are absent."""
    versions = {name.replace("-", "_"): version for name, version in figures.versions.items()}
    yield InfoMetricFamily("treadle_build", "Versions of the packages.", value=versions)
    yield gauge("treadle_start_time_seconds", "When the server began, since 1970.", figures.started)
    if figures.model is not None:
        yield model_family(figures.model)
    yield from engine_families(figures.engine)
    yield from scheduler_families(figures.scheduler)
    yield from kv_families(figures.kv)
    if figures.cache is not None and figures.cache.enabled:
        yield from cache_families(figures.cache)
    if figures.speculative.method is not None:
        yield from speculative_families(figures.speculative, figures.speculative.method)
    if figures.media.kinds:
        yield from media_families(figures.media)
    yield from http_families(figures.http)


def model_family(model: ModelFigures) -> Metric:
    """What is served."""
    shown = {"name": model.names[0], "type": model.type}
    return InfoMetricFamily("treadle_model", "The model that is served.", value=shown)


def engine_families(engine: EngineFigures) -> Iterator[Metric]:
    """What the engine has done."""
    tokens, seconds = engine.tokens, engine.seconds
    yield gauge("treadle_engine_alive", "1 while the engine's thread runs.", engine.alive)
    yield gauge("treadle_ready", "1 while /ready would not complain of the engine.", engine.ready)
    yield counter("treadle_steps_total", "Steps done.", engine.steps)
    yield counter("treadle_requests_total", "Requests that the engine accepted.", engine.requests)
    yield counters(
        "treadle_answers_total",
        "Answers that ended, by how: stop, length, abort, or an error's code.",
        "outcome",
        engine.answers,
    )
    yield counter(
        "treadle_prompt_tokens_total", "Tokens in prompts of requests that ended.", tokens.prompt
    )
    yield counter(
        "treadle_cached_prompt_tokens_total", "Those that were not computed again.", tokens.cached
    )
    yield counter(
        "treadle_prefilled_tokens_total",
        "Prompt tokens computed, again after preemptions and failed steps.",
        tokens.prefilled,
    )
    yield counter(
        "treadle_generated_tokens_total", "Tokens generated, as they come.", tokens.generated
    )
    yield histogram(
        "treadle_queue_wait_seconds",
        "From the acceptance of an answer to its admission.",
        seconds.queue,
    )
    yield histogram(
        "treadle_time_to_first_token_seconds",
        "From the acceptance of an answer to its first token, told at its end.",
        seconds.first_token,
    )
    yield histogram(
        "treadle_inter_token_latency_seconds",
        "From one token of an answer to its next.",
        seconds.between_tokens,
    )
    yield histogram(
        "treadle_answer_duration_seconds",
        "From the acceptance of an answer to its end.",
        seconds.answer,
    )
    yield histogram("treadle_step_duration_seconds", "What a step took.", seconds.step)


def scheduler_families(scheduler: SchedulerFigures) -> Iterator[Metric]:
    """Who waits and who runs."""
    yield gauge("treadle_answers_waiting", "Answers in the queue.", scheduler.waiting)
    yield gauge("treadle_answers_waiting_limit", "Most of them.", scheduler.max_waiting)
    yield gauge("treadle_answers_running", "Answers being worked on.", scheduler.running)
    yield gauge("treadle_answers_running_limit", "Most of them.", scheduler.max_running)
    yield counter(
        "treadle_preemptions_total",
        "Times that an answer gave its row to others.",
        scheduler.preemptions,
    )


def kv_families(kv: KvFigures) -> Iterator[Metric]:
    """Live keys and values."""
    yield gauge("treadle_kv_used_bytes", "Live keys and values, allocated.", kv.used_bytes)
    if kv.budget_bytes is not None:
        yield gauge("treadle_kv_budget_bytes", "Most live keys and values.", kv.budget_bytes)


def cache_families(cache: CacheStats) -> Iterator[Metric]:
    """What the prefix store holds and did."""
    yield counter("treadle_prefix_cache_hits_total", "Lookups that found something.", cache.hits)
    yield counters(
        "treadle_prefix_cache_misses_total",
        "Lookups that found nothing, by reason.",
        "reason",
        cache.miss_reasons,
    )
    yield counter(
        "treadle_prefix_cache_matched_tokens_total",
        "Prompt tokens of all hits.",
        cache.matched_tokens,
    )
    yield counter(
        "treadle_prefix_cache_evictions_total",
        "Entries in RAM given up for room.",
        cache.evicted,
    )
    disk = {
        name.removeprefix(SLOW): value
        for name, value in cache.details.items()
        if name.startswith(SLOW)
    }
    yield from tier_families(cache, disk)
    if disk:
        yield from disk_families(disk)
    rest = UnknownMetricFamily(
        "treadle_prefix_cache_detail",
        "Further figures of the prefix store by name, as in /v1/cache/stats.",
        labels=["part", "name"],
    )
    for name, value in cache.details.items():
        if not name.startswith(SLOW):
            rest.add_metric(["store", name], value)
    for name, value in disk.items():
        if name not in TIER and name not in DISK:
            rest.add_metric(["disk", name], value)
    yield rest


TIER = {
    "num_entries": ("treadle_prefix_cache_entries", "What can be found, by tier."),
    "used_bytes": ("treadle_prefix_cache_used_bytes", "Bytes held, by tier."),
    "capacity_bytes": ("treadle_prefix_cache_capacity_bytes", "Most bytes, by tier."),
}
"""Figures of a tier, as gauges."""

DISK = {
    "read": ("treadle_disk_cache_reads_total", "Entries read from disk."),
    "read_bytes": ("treadle_disk_cache_read_bytes_total", "Bytes read from disk."),
    "read_seconds": ("treadle_disk_cache_read_seconds_total", "Time that reading took."),
    "written": ("treadle_disk_cache_writes_total", "Entries written to disk."),
    "written_bytes": ("treadle_disk_cache_written_bytes_total", "Bytes written to disk."),
    "write_seconds": ("treadle_disk_cache_write_seconds_total", "Time that writing took."),
    "evicted": ("treadle_disk_cache_evictions_total", "Entries on disk given up for room."),
}
"""Counters of the disk tier; one that it does not name yet is 0."""


def tier_families(cache: CacheStats, disk: Mapping[str, float]) -> Iterator[Metric]:
    """What each tier holds."""
    ram = {
        "num_entries": cache.num_entries,
        "used_bytes": cache.used_bytes,
        "capacity_bytes": cache.capacity_bytes,
    }
    for field, (name, help) in TIER.items():
        family = GaugeMetricFamily(name, help, labels=["tier"])
        family.add_metric(["ram"], ram[field])
        if field in disk:
            family.add_metric(["disk"], disk[field])
        yield family


def disk_families(disk: Mapping[str, float]) -> Iterator[Metric]:
    """What the disk tier did."""
    for field, (name, help) in DISK.items():
        yield counter(name, help, disk.get(field, 0))


def speculative_families(stats: SpeculativeStats, method: str) -> Iterator[Metric]:
    """What came of guessing."""
    total = stats.total
    yield gauges(
        "treadle_speculative_active",
        "1 while somebody guesses, 0 once that failed.",
        "method",
        {method: stats.failure is None},
    )
    yield counter(
        "treadle_speculative_attempted_tokens_total", "Guesses verified.", total.attempted
    )
    yield counter(
        "treadle_speculative_accepted_tokens_total",
        "Guesses that became part of an answer.",
        total.accepted,
    )
    yield counter(
        "treadle_speculative_rejected_tokens_total", "Guesses that did not.", total.rejected
    )
    yield counter(
        "treadle_speculative_lossy_tokens_total",
        "Guesses kept without being verified.",
        stats.lossy_tokens,
    )
    yield gauge(
        "treadle_speculative_forwards_saved",
        "Forwards of an answer that plain decoding would have needed on top.",
        total.forwards_saved,
    )
    yield counters(
        "treadle_speculative_bypassed_total",
        "Forwards of an answer without a guess, by reason.",
        "reason",
        total.bypassed,
    )
    yield counter(
        "treadle_speculative_failures_total", "Times that guessing was given up.", stats.failures
    )
    yield gauge("treadle_speculative_held_bytes", "Memory for guessing.", stats.held_bytes)


def media_families(media: MediaFigures) -> Iterator[Metric]:
    """Images, videos and audio."""
    yield counter(
        "treadle_media_encode_seconds_total",
        "Time that encoding media took.",
        media.encode_seconds,
    )
    if media.features is not None:
        yield from feature_families(media.features)


def feature_families(features: FeatureFigures) -> Iterator[Metric]:
    """What is kept of what the encoder made."""
    yield counter("treadle_vision_cache_hits_total", "Look-ups that found features.", features.hits)
    yield counter("treadle_vision_cache_misses_total", "Look-ups that found none.", features.misses)
    yield counter(
        "treadle_vision_cache_evictions_total", "Features given up for room.", features.evicted
    )
    yield counter(
        "treadle_vision_cache_refused_total",
        "Features larger than the whole cache.",
        features.refused,
    )
    yield gauge("treadle_vision_cache_entries", "Features that are kept.", features.num_items)
    yield gauge("treadle_vision_cache_used_bytes", "Their bytes.", features.used_bytes)
    yield gauge("treadle_vision_cache_capacity_bytes", "Most bytes.", features.capacity_bytes)


def http_families(http: HttpFigures) -> Iterator[Metric]:
    """HTTP requests."""
    yield gauge("treadle_http_requests_in_flight", "HTTP requests that run.", http.in_flight)
    answered = CounterMetricFamily(
        "treadle_http_requests_total",
        "HTTP requests answered; status 499 is a client that left.",
        labels=["method", "route", "status"],
    )
    for one in http.answered:
        answered.add_metric([one.method, one.route, str(one.status)], one.count)
    yield answered
    seconds = HistogramMetricFamily(
        "treadle_http_request_duration_seconds",
        "From an HTTP request to the end of its answer.",
        labels=["route"],
    )
    for route, distribution in http.seconds.items():
        seconds.add_metric([route], buckets(distribution), distribution.sum)
    yield seconds


def counter(name: str, help: str, value: float) -> Metric:
    """A counter without labels."""
    return CounterMetricFamily(name, help, value=value)


def counters(name: str, help: str, label: str, values: Mapping[LabelT, float]) -> Metric:
    """Counters, by one label."""
    return filled(CounterMetricFamily(name, help, labels=[label]), values)


def gauge(name: str, help: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, help, value=value)


def gauges(name: str, help: str, label: str, values: Mapping[LabelT, float]) -> Metric:
    """Gauges, by one label."""
    return filled(GaugeMetricFamily(name, help, labels=[label]), values)


def filled(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[LabelT, float]
) -> Metric:
    """A family with a sample for each value of its label."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def histogram(name: str, help: str, distribution: Distribution) -> Metric:
    """A histogram without labels."""
    return HistogramMetricFamily(
        name, help, buckets=buckets(distribution), sum_value=distribution.sum
    )


def buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """How many values were at most each bound, as Prometheus counts."""
    found: list[tuple[str, float]] = []
    number = 0
    names = (*map(str, distribution.bounds), "+Inf")
    for name, count in zip(names, distribution.counts, strict=True):
        number += count
        found.append((name, number))
    return found
