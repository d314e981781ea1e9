"""Media are encoded ahead of the chunks that show them, a bounded while in each step."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from treadle_core.engine import Engine, EngineConfig
from treadle_core.events import Failed, Finished
from treadle_core.pacing import FixedChunk
from treadle_core.plan import Encode, Plan, Prefill
from treadle_core.prefix import MediaSpan
from treadle_core.request import Request, SamplingParams
from treadle_core.testing import (
    SMALL_SPEC,
    EventChecker,
    ManualClock,
    RecordingStore,
    ScriptedEncoder,
    ScriptedRunner,
    expected_tokens,
    hashed,
    pump,
)

SCRIPT = hashed(250)
STALL = FixedChunk(1).seconds(1)
CHUNK = 16


class RecordingChunk(FixedChunk):
    """A fixed chunk that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(CHUNK)
        self.told: list[tuple[int, int, float]] = []

    def observe_fused(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        raise AssertionError("nothing is fused here")

    def observe(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        self.told.append((num_decoding, num_prefill, seconds))


def make_request(
    id: str, length: int, spans: Sequence[MediaSpan] = (), *, max_tokens: int = 5
) -> Request:
    media = tuple(spans)
    return Request(
        id=id,
        prompt=tuple((length + i) % 250 for i in range(length)),
        params=SamplingParams(max_tokens=max_tokens),
        media=media,
        attachment=media or None,
    )


class Workload:
    """An engine with an encoder, stepped by hand, every plan kept."""

    def __init__(
        self,
        encoder: Any,
        *,
        store: RecordingStore | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.chunk = RecordingChunk()
        self.runner = ScriptedRunner(
            SCRIPT,
            spec=replace(SMALL_SPEC, media=True),
            encoder=encoder,
            prefill_cost=lambda num: 0.001 * num,
            decode_cost=lambda rows: 0.01,
            clock=ManualClock(),
        )
        self.engine = Engine(self.runner, chunk=self.chunk, store=store, config=config)
        self.checker = EventChecker()
        self.requests: dict[str, Request] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)
            self.checker.accepted(request)
            self.requests[request.id] = request

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.checker.feed(self.engine.step())

    def finish(self) -> None:
        """Run to the end; whoever did not fail must have the script's tokens."""
        pump(self.engine, self.checker, most=5_000)
        self.checker.finish()
        for id, request in self.requests.items():
            if isinstance(self.checker.terminal[(id, 0)], Finished):
                assert isinstance(request.prompt, tuple)
                found = self.checker.tokens[(id, 0)]
                assert found == expected_tokens(SCRIPT, request.prompt, len(found))

    def work(self, id: str) -> list[tuple[str, int]]:
        """What was done for a prompt: chunks and encodings, and where each began."""
        kinds = {Prefill: "chunk", Encode: "encode"}
        items = (item for plan in self.runner.plans for item in plan.work)
        return [
            (kinds[type(item)], item.start)
            for item in items
            if isinstance(item, Prefill | Encode) and item.key[0] == id
        ]


def test_a_chunk_ends_where_something_has_to_be_encoded() -> None:
    workload = Workload(ScriptedEncoder({b"a": 1, b"b": 1}))
    workload.add(make_request("stream", 4, max_tokens=60))
    workload.step(3)

    spans = [MediaSpan(5, 20, b"a"), MediaSpan(25, 6, b"b"), MediaSpan(31, 3, b"a")]
    workload.add(make_request("r", 45, spans))
    workload.finish()

    assert workload.work("r") == [
        ("chunk", 0),
        ("encode", 5),
        ("chunk", 5),
        ("chunk", 21),
        ("encode", 25),
        ("chunk", 25),
        ("chunk", 41),
    ]


def test_what_takes_long_is_done_in_several_steps_in_each_of_which_streams_get_a_token() -> None:
    encoder = ScriptedEncoder({b"a": 10}, piece_seconds=0.4 * STALL)
    workload = Workload(encoder)
    workload.add(make_request("stream", 4, max_tokens=60))
    workload.step(3)
    workload.add(make_request("r", 30, [MediaSpan(0, 20, b"a")]))

    workload.finish()

    encoding = [plan for plan in workload.runner.plans if plan.encodes]
    assert [item.seconds for plan in encoding for item in plan.encodes] == [STALL] * 5
    assert all(decodes_alone(plan, "stream") for plan in encoding)
    assert encoder.num_pieces == 10


def test_a_chunk_and_what_is_encoded_in_one_step_share_its_time() -> None:
    workload = Workload(ScriptedEncoder({b"a": 10}, piece_seconds=0.4 * STALL))
    workload.add(make_request("stream", 4, max_tokens=60))
    workload.step(3)
    short = 3 * CHUNK // 4
    workload.add(make_request("r", 30, [MediaSpan(0, 20, b"a")]), make_request("text", short + 1))

    workload.finish()

    (shared,) = [plan for plan in workload.runner.plans if plan.encodes and plan.prefills]
    assert [len(prefill.tokens) for prefill in shared.prefills] == [short]
    assert [item.seconds for item in shared.encodes] == [pytest.approx(STALL / 4)]


def decodes_alone(plan: Plan, id: str) -> bool:
    return not plan.prefills and [decode.key[0] for decode in plan.decodes] == [id]


def test_where_nobody_decodes_there_is_more_time() -> None:
    encoder = ScriptedEncoder({b"a": 10}, piece_seconds=0.4 * STALL)
    workload = Workload(encoder)
    workload.add(make_request("r", 30, [MediaSpan(0, 20, b"a")]))

    workload.finish()

    assert workload.work("r") == [("encode", 0), ("chunk", 0)]


def test_pacing_never_hears_of_what_encoding_took() -> None:
    workload = Workload(ScriptedEncoder({b"a": 4}, piece_seconds=STALL))
    workload.add(make_request("stream", 4, max_tokens=40))
    workload.add(make_request("r", 70, [MediaSpan(20, 40, b"a")]))

    workload.finish()

    assert len([kind for kind, _ in workload.work("r") if kind == "encode"]) == 4
    for _, num_tokens, seconds in workload.chunk.told:
        assert seconds == pytest.approx(0.001 * num_tokens if num_tokens else 0.01)


class Noting:
    """Calls ``note`` whenever something is encoded."""

    def __init__(self, inner: ScriptedEncoder) -> None:
        self._inner = inner
        self.note: Callable[[], None] = lambda: None
        self.ready = inner.ready
        self.take_seconds = inner.take_seconds
        self.release = inner.release
        self.reset = inner.reset

    def encode(self, prompt: Sequence[MediaSpan], start: int, seconds: float) -> None:
        self.note()
        self._inner.encode(prompt, start, seconds)


def test_no_token_waits_on_the_device_while_something_is_encoded() -> None:
    """Nor does the end of an answer that is stored in the same step."""
    encoder = Noting(ScriptedEncoder({b"a": 20}, piece_seconds=STALL))
    workload = Workload(encoder, store=RecordingStore())
    stream = ("stream", 0)
    workload.add(make_request("stream", 4, max_tokens=12))
    workload.step(3)
    seen: list[tuple[int, bool]] = []

    def note() -> None:
        decoded = sum(len(plan.decodes) for plan in workload.runner.plans[:-1])
        assert len(workload.checker.tokens[stream]) == min(decoded, 12)
        seen.append((decoded, stream in workload.checker.terminal))

    encoder.note = note
    workload.add(make_request("r", 30, [MediaSpan(0, 20, b"a")]))
    workload.finish()

    assert len(seen) > 9
    assert seen[-1] == (12, True)
    assert all(ended == (decoded >= 12) for decoded, ended in seen)


def test_a_text_prompt_beside_it_does_not_wait_for_the_whole_of_it() -> None:
    workload = Workload(ScriptedEncoder({b"a": 50}, piece_seconds=STALL))
    workload.add(make_request("stream", 4, max_tokens=200))
    workload.step(3)
    workload.add(make_request("r", 30, [MediaSpan(0, 20, b"a")]))
    workload.step(5)
    workload.add(make_request("text", 20))
    arrival = len(workload.runner.plans)

    workload.finish()

    text = [i for i, plan in enumerate(workload.runner.plans) if ("text", 0) in plan.keys]
    assert text[0] <= arrival + 2
    assert workload.checker.terminal[("text", 0)].index == 0


def test_what_cannot_be_encoded_fails_its_request_alone() -> None:
    workload = Workload(ScriptedEncoder({b"bad": 1, b"a": 1}, broken=[b"bad"]))
    workload.add(make_request("stream", 4, max_tokens=30))
    workload.step(3)
    workload.add(make_request("r", 30, [MediaSpan(3, 20, b"bad")]))
    workload.add(make_request("other", 31, [MediaSpan(3, 20, b"a")]))

    workload.finish()

    failed = workload.checker.terminal[("r", 0)]
    assert isinstance(failed, Failed)
    assert "cannot encode" in failed.message
    for id in ("stream", "other"):
        assert isinstance(workload.checker.terminal[(id, 0)], Finished)


def test_an_aborted_row_is_not_encoded_further() -> None:
    encoder = ScriptedEncoder({b"a": 50}, piece_seconds=STALL, keeps=False)
    workload = Workload(encoder)
    workload.add(make_request("stream", 4, max_tokens=20))
    workload.add(make_request("r", 30, [MediaSpan(0, 20, b"a")]))
    workload.step(6)
    done = encoder.num_pieces

    workload.engine.abort("r")
    workload.finish()

    assert 0 < done < 50
    assert encoder.num_pieces == done
    assert encoder.ready([MediaSpan(0, 20, b"a")], 0, 20) == 0


def test_a_row_that_was_given_up_is_encoded_again_where_nothing_was_kept() -> None:
    encoder = ScriptedEncoder({b"a": 1, b"b": 1, b"c": 1}, keeps=False)
    config = EngineConfig(max_num_seqs=4, kv_memory_bytes=8 * 700)
    workload = Workload(encoder, config=config)
    spans = {name: [MediaSpan(10, 50, name.encode())] for name in "abc"}
    for number, (name, media) in enumerate(spans.items()):
        workload.add(make_request(name, 100 + number, media, max_tokens=300))

    workload.finish()

    usages = [workload.checker.terminal[(name, 0)].usage for name in spans]
    assert sum(usage.preemptions for usage in usages if usage) > 0
    assert encoder.num_pieces > 3


def test_what_a_stored_prefix_covers_is_not_encoded() -> None:
    encoder = ScriptedEncoder({b"a": 1, b"b": 1}, keeps=False)
    workload = Workload(encoder, store=RecordingStore())
    first = make_request("first", 40, [MediaSpan(5, 20, b"a")])
    workload.add(first)
    workload.finish()
    assert encoder.num_pieces == 1

    media = (MediaSpan(5, 20, b"a"), MediaSpan(50, 6, b"b"))
    prompt = (*first.prompt, *range(30))
    workload.add(replace(first, id="second", prompt=prompt, media=media, attachment=media))
    workload.finish()

    assert workload.work("second")[0] == ("chunk", 40)
    assert encoder.num_pieces == 2

    workload.add(replace(workload.requests["second"], id="third"))
    workload.finish()

    assert workload.work("third") == []
    assert encoder.num_pieces == 2


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_mix_of_text_and_media_gets_the_tokens_of_each_request_alone(
    data: st.DataObject,
) -> None:
    digests = [bytes([65 + i]) for i in range(4)]
    pieces = {digest: data.draw(st.integers(1, 6)) for digest in digests}
    workload = Workload(ScriptedEncoder(pieces, piece_seconds=0.3 * STALL))
    for number in range(data.draw(st.integers(1, 6))):
        spans, at = list[MediaSpan](), data.draw(st.integers(0, 9))
        while data.draw(st.booleans()) and at < 60:
            length = data.draw(st.integers(1, 20))
            spans.append(MediaSpan(at, length, data.draw(st.sampled_from(digests))))
            at += length + data.draw(st.integers(0, 5))
        workload.add(make_request(str(number), 90 + number, spans))
        workload.step(data.draw(st.integers(0, 4)))
        if data.draw(st.integers(0, 5)) == 0:
            workload.engine.abort(str(data.draw(st.integers(0, number))))
        workload.engine.check_integrity()

    workload.finish()

    assert workload.engine.stats().num_finished == len(workload.requests)
