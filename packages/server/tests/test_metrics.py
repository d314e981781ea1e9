"""Figures: what is scraped and shown is what happened, and nothing makes a scrape wait."""

import gc
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import httpx2
import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from treadle_core import (
    Engine,
    EngineConfig,
    EngineStats,
    Failed,
    Finished,
    Request,
    SamplingParams,
    TokenOut,
)
from treadle_core.testing.contracts import ObserverContract
from treadle_core.testing.drafting import FailingDrafter, RandomDrafter, SteadyController
from treadle_core.testing.fakes import END, ManualClock, RecordingObserver
from treadle_core.testing.scripted import Fault, ScriptedRunner, expected_tokens
from treadle_server.app import create_app
from treadle_server.compose import feature_figures
from treadle_server.figures import Figures
from treadle_server.media import FeatureFigures, MediaInput
from treadle_server.meters import Histogram, Meters
from treadle_server.settings import HttpConfig, ServeConfig

GUILTY = 7
SLOW = 6
KEY = "sk-figures"
LONG: dict[str, Any] = {"max_tokens": 700, "ignore_eos": True}


def spelling(tokens: Sequence[int]) -> int:
    """Letters that depend on the place alone, until a token of the prompt is slow."""
    if tokens[0] == SLOW:
        time.sleep(0.002)
    return 65 + len(tokens) * 7 % 26


def truth(tokens: Sequence[int], num: int) -> list[int]:
    return expected_tokens(spelling, tokens, num)


async def scrape(served: Any) -> dict[str, Metric]:
    """The families of a scrape, by name, as Prometheus' own parser reads them."""
    response = await served.client.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def samples(families: dict[str, Metric]) -> list[Sample]:
    return [sample for family in families.values() for sample in family.samples]


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The one sample of this name and these labels; 0 where nothing was counted yet."""
    found = [s.value for s in samples(families) if s.name == name and s.labels == labels]
    assert len(found) <= 1, found
    assert found or labels, f"{name} is not there"
    return found[0] if found else 0


def by_label(families: dict[str, Metric], name: str, label: str) -> dict[str, float]:
    return {s.labels[label]: s.value for s in samples(families) if s.name == name}


async def status(served: Any) -> Any:
    response = await served.client.get("/status")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    # Nothing is there that the Struct does not say.
    msgspec.json.decode(response.content, type=Figures)
    return response.json()


def terminal(observer: RecordingObserver) -> list[Finished | Failed]:
    return [event for event in observer.events if isinstance(event, Finished | Failed)]


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while True:
            if condition():
                return
            await anyio.sleep(0.005)


async def test_totals_agree_with_usage_after_hits_guesses_aborts_and_errors(
    serve: Any, visitor: Any
) -> None:
    cache = pytest.importorskip("treadle_cache")
    observer, replies = RecordingObserver(), list[Any]()
    runner = ScriptedRunner(
        spelling,
        max_draft_tokens=3,
        faults=[Fault(marked=GUILTY, times=None, skip=2)],
    )
    making = serve(
        runner,
        observers=[observer],
        store=cache.RamStore(cache.CacheConfig(capacity_bytes=2**20, block_size=4)),
        drafter=RandomDrafter(truth),
        controller=SteadyController(3),
    )
    async with making as served:

        async def ask(number: int) -> None:
            shared = list(range(10, 26))
            asked = {"max_tokens": 9 + number, "ignore_eos": True, "n": 1 + number % 2}
            replies.append(await served.complete([*shared, number], **asked))

        async def fail() -> None:
            replies.append(await served.complete([GUILTY, 8, 9], max_tokens=20, ignore_eos=True))

        # Rows beside a failing one begin again without what was reused.
        for failing in (0, 0, 2):
            async with anyio.create_task_group() as group:
                for number in range(4):
                    group.start_soon(ask, number)
                for _ in range(failing):
                    group.start_soon(fail)
        leaving = {"prompt": [SLOW, 8, 9], "max_tokens": 9000, "ignore_eos": True, "stream": True}
        visit = visitor(served.app, "/v1/completions", leaving)
        async with anyio.create_task_group() as group:
            group.start_soon(visit.visit)
            await visit.until(lambda: len(visit.messages) > 3)
            visit.leave()
        # What ended is told once its state is stored.
        await until(lambda: len(terminal(observer)) == 21)
        assert (await served.complete("x", max_tokens=0)).status_code == 400
        assert (await served.client.get("/nowhere/at/all")).status_code == 404
        seen, figures = await scrape(served), await status(served)

    good = [reply.json()["usage"] for reply in replies if reply.status_code == 200]
    ends = terminal(observer)
    first = [end for end in ends if end.index == 0]
    assert len(good) == 12
    told = {
        "prompt": sum(usage["prompt_tokens"] for usage in good),
        "cached": sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in good),
        "generated": sum(usage["completion_tokens"] for usage in good),
    }
    # What has no reply: those that failed, and the one whose client left.
    lost = [end for end in ends if isinstance(end, Failed) or end.reason == "abort"]
    assert len(lost) == 3
    assert value(seen, "treadle_prompt_tokens_total") == told["prompt"] + sum(
        end.usage.prompt_tokens for end in lost
    )
    assert value(seen, "treadle_cached_prompt_tokens_total") == told["cached"] + sum(
        end.usage.cached_tokens for end in lost
    )
    assert told["cached"] > 0
    generated = told["generated"] + sum(end.usage.completion_tokens for end in lost)
    assert value(seen, "treadle_generated_tokens_total") == generated
    assert generated == sum(isinstance(event, TokenOut) for event in observer.events)
    assert by_label(seen, "treadle_answers_total", "outcome") == {
        "length": 18,
        "abort": 1,
        "step_failed": 2,
    }
    assert value(seen, "treadle_requests_total") == len(first) == 15
    prefilled = sum(len(p.tokens) for plan, _ in observer.steps for p in plan.prefills)
    assert value(seen, "treadle_prefilled_tokens_total") == prefilled

    drafts = [end.usage.drafts for end in ends if end.usage.drafts is not None]
    details = [usage["completion_tokens_details"]["speculation"] for usage in good]
    for field in ("attempted", "accepted", "rejected"):
        told_here = sum(detail[field] for detail in details)
        assert value(seen, f"treadle_speculative_{field}_tokens_total") == sum(
            getattr(counters, field) for counters in drafts
        )
        assert 0 < told_here <= value(seen, f"treadle_speculative_{field}_tokens_total")
    saved = sum(counters.forwards_saved for counters in drafts)
    assert value(seen, "treadle_speculative_forwards_saved") == saved > 0
    assert value(seen, "treadle_speculative_active", method="oracle") == 1
    bypassed = sum(sum(counters.bypassed.values()) for counters in drafts)
    reasons = by_label(seen, "treadle_speculative_bypassed_total", "reason")
    assert sum(reasons.values()) == bypassed

    hits = value(seen, "treadle_prefix_cache_hits_total")
    misses = by_label(seen, "treadle_prefix_cache_misses_total", "reason")
    assert hits > 0
    assert hits + sum(misses.values()) >= len(ends)
    assert value(seen, "treadle_prefix_cache_used_bytes", tier="ram") > 0
    assert value(seen, "treadle_prefix_cache_capacity_bytes", tier="ram") == 2**20

    route = "/v1/completions"
    counted = {
        (s.labels["method"], s.labels["route"], s.labels["status"]): s.value
        for s in samples(seen)
        if s.name == "treadle_http_requests_total"
    }
    assert counted == {
        ("POST", route, "200"): 13,
        ("POST", route, "500"): 2,
        ("POST", route, "400"): 1,
        ("GET", "other", "404"): 1,
    }
    assert value(seen, "treadle_http_request_duration_seconds_count", route=route) == 16

    # The document says the same.
    assert figures["engine"]["answers"] == by_label(seen, "treadle_answers_total", "outcome")
    assert figures["engine"]["tokens"]["generated"] == generated
    assert figures["speculative"]["total"]["forwards_saved"] == saved
    assert figures["cache"]["hits"] == hits
    assert figures["scheduler"]["running"] == value(seen, "treadle_answers_running") == 0


async def test_latencies_are_those_that_clients_see(serve: Any) -> None:
    clock = ManualClock()
    runner = ScriptedRunner(
        spelling,
        clock=clock,
        prefill_cost=lambda num_tokens: 0.7 * (num_tokens > 0),
        decode_cost=lambda num_rows: 0.022,
    )
    config = ServeConfig(engine=EngineConfig(max_num_seqs=1))
    async with serve(runner, config=config, clock=clock) as served:
        await served.complete([8, 9, 10], max_tokens=11, ignore_eos=True, n=2)
        await served.until_idle()
        seen, figures = await scrape(served), await status(served)

    def at_most(name: str, bound: str) -> float:
        return by_label(seen, f"treadle_{name}_bucket", "le")[bound]

    gaps = figures["engine"]["seconds"]["between_tokens"]
    assert value(seen, "treadle_inter_token_latency_seconds_count") == gaps["count"] == 20
    assert gaps["sum"] == pytest.approx(20 * 0.022)
    assert at_most("inter_token_latency_seconds", "0.02") == 0
    assert at_most("inter_token_latency_seconds", "0.03") == 20
    # The second answer waits for the first one's row.
    assert value(seen, "treadle_queue_wait_seconds_count") == 2
    assert at_most("queue_wait_seconds", "0.005") == 1
    assert at_most("queue_wait_seconds", "1.0") == 2
    first = figures["engine"]["seconds"]["first_token"]
    assert value(seen, "treadle_time_to_first_token_seconds_count") == first["count"] == 2
    assert at_most("time_to_first_token_seconds", "0.75") == 1
    assert value(seen, "treadle_answer_duration_seconds_count") == 2


class TestMeters(ObserverContract):
    @pytest.fixture
    def observer(self) -> Meters:
        return Meters()


def test_a_histogram_counts_bounds_as_prometheus_does() -> None:
    histogram = Histogram((1.0, 2.0))
    for each in (0.0, 1.0, 1.5, 2.0, 2.5):
        histogram.add(each)

    found = histogram.distribution()

    assert (found.counts, found.count, found.sum) == ((2, 2, 1), 5, 7.0)


async def test_every_family_has_help_and_a_name_that_prometheus_likes(serve: Any) -> None:
    def letters(tokens: Sequence[int]) -> int:
        return END if len(tokens) > 20 else spelling(tokens)

    drafter = FailingDrafter(lambda tokens, num: expected_tokens(letters, tokens, num), at=1)
    runner = ScriptedRunner(letters, max_draft_tokens=3)
    making = serve(runner, drafter=drafter, controller=SteadyController(3))
    async with making as served:
        response = await served.complete(list(range(10, 18)))
        assert response.json()["choices"][0]["finish_reason"] == "stop"
        await served.chat("hi")
        await served.client.request("BREW", "/v1/chat/completions")
        await served.client.get("/v1/models/some-model-or-other")
        seen, figures = await scrape(served), await status(served)
        text = (await served.client.get("/metrics")).text

    assert len(seen) >= 30
    for name, family in seen.items():
        assert re.fullmatch(r"treadle_[a-z][a-z0-9_]*", name), name
        assert family.documentation.endswith("."), name
        if family.type == "counter":
            assert f"# TYPE {name}_total counter" in text
        if family.type == "histogram":
            assert name.endswith("_seconds")
    labels = {label for sample in samples(seen) for label in sample.labels} - {"le"}
    info = {s.name for s in samples(seen) if s.name.endswith("_info")}
    assert info == {"treadle_build_info", "treadle_model_info"}
    named = {label for s in samples(seen) if s.name in info for label in s.labels}
    assert labels - named == {"method", "route", "status", "outcome", "reason"}
    routes = by_label(seen, "treadle_http_request_duration_seconds_count", "route")
    assert set(routes) == {"/v1/completions", "/v1/chat/completions", "/v1/models/{id:path}"}
    counted = [s.labels for s in samples(seen) if s.name == "treadle_http_requests_total"]
    assert {"method": "other", "route": "/v1/chat/completions", "status": "405"} in counted
    # Guessing that failed shows.
    assert value(seen, "treadle_speculative_active", method="oracle") == 0
    assert value(seen, "treadle_speculative_failures_total") == 1
    assert "the drafter broke" in figures["speculative"]["failure"]


async def test_what_there_is_not_is_absent(serve: Any) -> None:
    async with serve() as served:
        await served.chat()
        seen, figures = await scrape(served), await status(served)

    assert not [name for name in seen if re.search("cache_(hits|miss)|speculative|media", name)]
    assert "treadle_kv_budget_bytes" not in seen
    assert not figures["cache"]["enabled"]
    assert figures["speculative"]["method"] is None
    assert figures["media"]["why_none"] == "the model takes text only"
    assert figures["model"]["names"] == ["default"]
    assert figures["versions"]["treadle-server"]
    assert figures["kv"]["budget_bytes"] is None


async def test_the_budget_and_preemptions_show(serve: Any) -> None:
    config = ServeConfig(engine=EngineConfig(kv_memory_bytes=2**16))
    observer = RecordingObserver()
    async with serve(ScriptedRunner(spelling), config=config, observers=[observer]) as served:
        async with anyio.create_task_group() as group:
            for number in range(6):
                prompt = [8, 9, 10 + number]
                group.start_soon(partial(served.complete, prompt, **LONG))
        await served.until_idle()
        seen, figures = await scrape(served), await status(served)

    preemptions = sum(end.usage.preemptions for end in terminal(observer))
    assert value(seen, "treadle_preemptions_total") == preemptions > 0
    assert figures["scheduler"]["preemptions"] == preemptions
    assert value(seen, "treadle_kv_budget_bytes") == figures["kv"]["budget_bytes"] == 2**16


class Freezer:
    """A script that blocks the owner thread until it is told to go on."""

    def __init__(self) -> None:
        self.frozen = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, tokens: Any) -> int:
        self.frozen.set()
        assert self.go_on.wait(10)
        return END


async def test_a_stalled_engine_is_scraped_at_once_and_shows(serve: Any) -> None:
    freezer = Freezer()
    config = ServeConfig(http=HttpConfig(stall_seconds=0.1))
    async with serve(ScriptedRunner(freezer), config=config) as served:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(served.chat)
                await anyio.to_thread.run_sync(freezer.frozen.wait)
                # Far less than the script would wait.
                with anyio.fail_after(5):
                    while (await status(served))["engine"]["ready"]:
                        pass
                    seen, figures = await scrape(served), await status(served)
                freezer.go_on.set()
        finally:
            freezer.go_on.set()

    assert value(seen, "treadle_engine_alive") == 1
    assert value(seen, "treadle_ready") == 0
    assert "no step was completed" in figures["engine"]["trouble"]
    assert value(seen, "treadle_http_requests_in_flight") == 2


class Deadly(RecordingObserver):
    """Ends the owner thread at the first step."""

    def stepped(self, plan: Any, result: Any) -> None:
        raise LookupError("no observer may do this")


async def test_an_engine_that_died_still_tells_its_figures(serve: Any) -> None:
    async with serve(observers=[Deadly()]) as served:
        assert (await served.chat()).status_code == 503
        with anyio.fail_after(5):
            seen, figures = await scrape(served), await status(served)

    assert value(seen, "treadle_engine_alive") == value(seen, "treadle_ready") == 0
    assert "no observer may" in figures["engine"]["trouble"]
    assert figures["model"] is figures["cache"] is None
    counted = [s.labels["status"] for s in samples(seen) if s.name == "treadle_http_requests_total"]
    assert counted == ["503"]


class Unborn:
    """An engine that never ran."""

    alive = False
    closing = False
    stats: EngineStats | None = None
    death = "the engine was not started"


@pytest.mark.parametrize("path", ["/metrics", "/status"])
async def test_an_engine_that_never_ran_is_a_503_in_the_apis_shape(path: str) -> None:
    engine: Any = Unborn()
    app = create_app(engine)
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get(path)

    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_closed"
    assert response.headers["retry-after"]


@pytest.mark.parametrize("path", ["/metrics", "/status"])
async def test_figures_need_the_key(serve: Any, path: str) -> None:
    config = ServeConfig(http=HttpConfig(api_key=KEY))
    async with serve(config=config) as served:
        refused = await served.client.get(path)
        assert refused.status_code == 401
        assert "treadle_" not in refused.text
        found = await served.client.get(path, headers={"authorization": f"Bearer {KEY}"})
        assert found.status_code == 200


async def test_two_servers_in_one_process_count_apart(serve: Any) -> None:
    async with serve() as one, serve() as other:
        await one.chat()
        await one.until_idle()
        assert value(await scrape(one), "treadle_requests_total") == 1
        assert value(await scrape(other), "treadle_requests_total") == 0


class Cache:
    """Vision features that others own."""

    def stats(self) -> FeatureFigures:
        return FeatureFigures(
            hits=5,
            misses=3,
            evicted=2,
            refused=1,
            num_items=1,
            used_bytes=640,
            capacity_bytes=1024,
        )


async def test_vision_features_show_as_long_as_they_are_kept(serve: Any) -> None:
    cache = Cache()
    media = MediaInput(
        kinds=frozenset({"image", "audio"}),
        parse=lambda part, name: None,
        prepare=lambda text, items, names: pytest.fail("nobody shows anything"),
        features=feature_figures(cache),
    )
    async with serve(media=lambda: media) as served:
        seen, figures = await scrape(served), await status(served)
        del cache
        gc.collect()
        later = await scrape(served)

    assert figures["media"]["kinds"] == ["audio", "image"]
    assert figures["media"]["features"]["misses"] == 3
    assert value(seen, "treadle_vision_cache_hits_total") == 5
    assert value(seen, "treadle_vision_cache_used_bytes") == 640
    assert value(seen, "treadle_media_encode_seconds_total") == 0
    assert not [name for name in later if "vision" in name]


def test_a_real_process_is_scraped(process: Any) -> None:
    asked = {"prompt": "The loom", "max_tokens": 5, "ignore_eos": True}
    before = scrape_of(process.url)
    usage = httpx2.post(f"{process.url}/v1/completions", json=asked, timeout=60).json()["usage"]
    after = scrape_of(process.url)

    assert usage["completion_tokens"] == 5
    name = "treadle_generated_tokens_total"
    assert value(after, name) - value(before, name) == 5
    assert value(after, "treadle_kv_budget_bytes") > 0
    found = httpx2.get(f"{process.url}/status").json()
    assert found["model"]["type"] == "llama"
    assert found["engine"]["ready"]
    assert found["uptime_seconds"] > 0


def scrape_of(url: str) -> dict[str, Metric]:
    text = httpx2.get(f"{url}/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_an_answer_under_an_id_used_before_begins_anew() -> None:
    clock = ManualClock()
    meters = Meters(clock)
    engine = Engine(ScriptedRunner(spelling), observers=[meters], clock=clock)
    for _ in range(2):
        clock.advance(100)
        engine.add(Request(id="a", prompt=(8, 9), params=SamplingParams(max_tokens=2)))
        while engine.has_work:
            engine.step()

    gaps = meters.measured().latencies.between_tokens
    assert (gaps.count, gaps.sum) == (2, 0.0)
