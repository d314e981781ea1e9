"""What the encoder gives does not depend on how its work is cut, joined or kept."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

import mlx_vlm
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from treadle_core import Engine, EngineConfig, Request, collect, run
from treadle_core.events import Event, Finished, TokenOut
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.pacing import FixedChunk
from treadle_multimodal.families import FAMILIES
from treadle_multimodal.features import FeatureCache
from treadle_multimodal.media import Media
from treadle_multimodal.prompt import Arrays, EncodedPrompt
from treadle_multimodal.testing import zoo
from treadle_multimodal.vlm.encoders import CALLINGS, Call, Encoder
from treadle_multimodal.vlm.encoding import AHEAD_TOKENS, Features, MediaEncoder
from treadle_multimodal.vlm.model import VlmModel

from .test_engine import NUM_TOKENS, REQUESTS, answers, expected, request
from .vlm import (
    DISTINCT,
    HEARING,
    QWEN,
    VIDEO,
    Reference,
    clip,
    difference,
    encoded,
    image,
    loaded,
    sound,
)

TILES = ("smolvlm", "idefics3", "internvl")
JOINING = (*QWEN, *TILES, "gemma3", "gemma4")
"""Families of which several images go into one call."""

LAYERS = {
    **dict.fromkeys(zoo.FAMILIES, 2),
    **dict.fromkeys(QWEN, 4),
}
"""Of each encoder; a call can stop behind each."""

FASTER = [family for family in DISTINCT if family != "qwen3_5"]
every_family = pytest.mark.parametrize("family", zoo.FAMILIES)
# Some of those that differ; Qwen3.5 goes through its tokens one by one, which takes its time.
some_families = pytest.mark.parametrize("family", ["qwen3_omni_moe", "pixtral", *FASTER])
every_plain_family = pytest.mark.parametrize("family", QWEN)

SAME_SIZE: tuple[Media, ...] = (image(1), image(2), image(3))


class CountingEncoder:
    """Counts the calls of an encoder, and the parts in each."""

    def __init__(self, family: str) -> None:
        self._inner = Encoder(loaded(family).model.model)
        self.calls: list[int] = []

    def parts(self, arrays: Arrays) -> list[Arrays]:
        return self._inner.parts(arrays)

    def may_join(self, one: Arrays, other: Arrays) -> bool:
        return self._inner.may_join(one, other)

    def call(self, placeholder: int, num_tokens: int, parts: Sequence[Arrays]) -> Call:
        self.calls.append(len(parts))
        return self._inner.call(placeholder, num_tokens, parts)


class TickingClock:
    """Goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def make(
    family: str, now: Callable[[], float] | None = None, capacity: int = 2**24
) -> tuple[MediaEncoder, CountingEncoder, FeatureCache[Features]]:
    counting, cache = CountingEncoder(family), FeatureCache[Features](capacity)
    made: Any = MediaEncoder(counting, cache, now or TickingClock())
    return made, counting, cache


def arrays_of(features: Features) -> list[np.ndarray[Any, Any]]:
    return [np.array(array) for array in features.arrays()]


def whole(family: str, prompt: EncodedPrompt) -> list[list[np.ndarray[Any, Any]]]:
    """Features of each item by calls of its own, a call in one piece."""
    encoder, _, _ = make(family, capacity=0)
    return [arrays_of(encoder.take(item)) for item in prompt.items]


def check(family: str, prompt: EncodedPrompt, encoder: MediaEncoder) -> None:
    for item, ours in zip(prompt.items, whole(family, prompt), strict=True):
        found = arrays_of(encoder.take(item))
        assert len(found) == len(ours)
        for one, other in zip(found, ours, strict=True):
            assert difference(one, other) < 1e-5


def piecemeal(encoder: MediaEncoder, prompt: EncodedPrompt) -> int:
    """Encode a prompt's first item as slowly as can be; how many times it took."""
    start, stop, times = prompt.segments[0].start, prompt.segments[0].end, 0
    while encoder.ready(prompt, 0, stop) < stop:
        assert encoder.ready(prompt, 0, stop) == start
        encoder.encode(prompt, start, 1e-9)
        times += 1
    return times


def check_with_mlx_vlm(
    family: str, prompt: EncodedPrompt, encoder: MediaEncoder, media: tuple[Media, ...]
) -> None:
    """Compare what was made of a prompt's one item."""
    embedded = np.array(Reference(family, "look", media).embeddings[0])
    where = [place for part in prompt.segments for place in range(part.start, part.end)]
    found = np.array(encoder.take(prompt.items[0]).embeddings)
    assert difference(found, embedded[where]) < 1e-5


class TestPieces:
    def test_the_encoder_of_every_family_is_known(self) -> None:
        assert set(CALLINGS) == set(FAMILIES)

    @every_family
    def test_a_short_while_is_a_layer_and_the_result_is_the_same(self, family: str) -> None:
        encoder, counting, cache = make(family)
        media = (image(0, 60, 60),)
        prompt = encoded(family, "look", media)

        times = piecemeal(encoder, prompt)

        assert times == LAYERS[family] * len(counting.calls)
        assert prompt.items[0].digest in cache
        check_with_mlx_vlm(family, prompt, encoder, media)

    def test_no_other_item_is_begun_when_a_piece_would_end_too_late(self) -> None:
        encoder, counting, _ = make("qwen2_vl")
        prompt = encoded("qwen2_vl", "look", SAME_SIZE)

        # Each piece takes a second, and so does each look at the clock between two of them.
        encoder.encode(prompt, prompt.segments[0].start, 3 * LAYERS["qwen2_vl"] + 0.5)

        assert counting.calls == [1]
        first, stop = prompt.segments[0], prompt.segments[-1].end
        assert encoder.ready(prompt, 0, stop) >= first.end

    @pytest.mark.parametrize("family", HEARING)
    def test_so_it_is_with_a_sound(self, family: str) -> None:
        encoder, counting, _ = make(family)
        media = (sound(0),)
        prompt = encoded(family, "look", media)

        times = piecemeal(encoder, prompt)

        assert times == 2
        assert counting.calls == [1]
        check_with_mlx_vlm(family, prompt, encoder, media)

    def test_what_a_piece_made_is_computed_with_it(self) -> None:
        def run() -> tuple[mx.array, tuple[mx.array, ...]]:
            made = mx.ones((512, 1024)) + mx.arange(1024)
            call.stop(made)
            return made + 1, ()

        call = Call(run)
        before = mx.get_active_memory()

        assert not call.advance()

        assert mx.get_active_memory() - before >= 512 * 1024 * 4
        assert call.advance()
        assert call.outputs[0][0, 2].item() == 4

    def test_what_an_encoder_raises_comes_out_of_the_piece_that_it_was_in(self) -> None:
        def run() -> tuple[mx.array, tuple[mx.array, ...]]:
            call.stop(mx.ones(1))
            raise ValueError("a broken layer")

        call = Call(run)

        assert not call.advance()
        with pytest.raises(ValueError, match="a broken layer"):
            call.advance()

    def test_a_model_s_parameters_keep_their_names(self, tmp_path: Path) -> None:
        model, _ = mlx_vlm.load(str(zoo.save_checkpoint("gemma4", tmp_path)))
        before = dict(tree_flatten(model.parameters()))

        Encoder(model)
        Encoder(model)

        after = dict(tree_flatten(model.parameters()))
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)

    @pytest.mark.parametrize("family", VIDEO)
    def test_a_video_is_encoded_by_its_frames(self, family: str) -> None:
        encoder, counting, _ = make(family)
        media = (clip(3, 6),)
        prompt = encoded(family, "look", media)

        times = piecemeal(encoder, prompt)

        frames = 6 if family == "gemma4" else 3  # pairs
        assert counting.calls == [1] * frames
        assert times == LAYERS[family] * frames
        check_with_mlx_vlm(family, prompt, encoder, media)

    @pytest.mark.parametrize("family", TILES)
    def test_an_image_is_encoded_by_its_tiles(self, family: str) -> None:
        encoder, counting, _ = make(family)
        media = (image(5, 150, 90),)
        prompt = encoded(family, "look", media)
        num_tiles = prompt.items[0].arrays["pixel_values"].shape[1]

        encoder.take(prompt.items[0])

        assert num_tiles > 1
        assert counting.calls == [1] * num_tiles
        check_with_mlx_vlm(family, prompt, encoder, media)

    def test_two_prompts_with_one_image_work_on_the_same(self) -> None:
        encoder, counting, _ = make("qwen2_vl")
        prompts = [encoded("qwen2_vl", text, (image(0),)) for text in ("one", "another")]

        turns = deque(prompts)
        while any(encoder.ready(p, 0, len(p.tokens)) < len(p.tokens) for p in prompts):
            encoder.encode(turns[0], turns[0].segments[0].start, 1e-9)
            turns.rotate()

        assert counting.calls == [1]


class TestTogether:
    @pytest.mark.parametrize("family", JOINING)
    def test_images_in_one_call_are_those_one_by_one(self, family: str) -> None:
        encoder, counting, cache = make(family, now=lambda: 0.0)
        prompt = encoded(family, "look", SAME_SIZE)
        encoder._speed = 1e-9  # fast

        encoder.encode(prompt, prompt.segments[0].start, 1.0)

        tiles = 1
        if family in TILES:
            tiles = prompt.items[0].arrays["pixel_values"].shape[1]
        assert counting.calls == [3 * tiles]
        assert cache.stats().misses == 3
        assert all(item.digest in cache for item in prompt.items)
        check(family, prompt, encoder)

    @every_plain_family
    def test_their_sizes_may_differ_where_patches_stand_in_a_row(self, family: str) -> None:
        encoder, counting, _ = make(family, now=lambda: 0.0)
        prompt = encoded(family, "look", (image(1, 60, 60), image(2, 150, 90), image(3, 56, 140)))
        encoder._speed = 1e-9

        encoder.encode(prompt, prompt.segments[0].start, 1.0)

        assert counting.calls == [3]
        check(family, prompt, encoder)

    def test_images_and_videos_are_not_joined(self) -> None:
        encoder, counting, _ = make("qwen3_vl", now=lambda: 0.0)
        prompt = encoded("qwen3_vl", "look", (image(1), clip(2, 2), image(3)))
        encoder._speed = 1e-9

        encoder.encode(prompt, prompt.segments[0].start, 1.0)

        assert counting.calls == [1, 1, 1]
        check("qwen3_vl", prompt, encoder)

    def test_frames_of_videos_are_joined(self) -> None:
        encoder, counting, _ = make("gemma4", now=lambda: 0.0)
        prompt = encoded("gemma4", "look", (clip(2, 2), clip(5, 3)))
        encoder._speed = 1e-9

        encoder.encode(prompt, prompt.segments[0].start, 1.0)

        assert counting.calls == [5]
        check("gemma4", prompt, encoder)

    def test_images_whose_patches_are_all_compared_go_alone(self) -> None:
        encoder, counting, _ = make("pixtral", now=lambda: 0.0)
        prompt = encoded("pixtral", "look", SAME_SIZE)
        encoder._speed = 1e-9

        encoder.encode(prompt, prompt.segments[0].start, 1.0)

        assert counting.calls == [1, 1, 1]
        check("pixtral", prompt, encoder)

    def test_tiles_of_other_sizes_are_not_joined(self) -> None:
        encoder = Encoder(loaded("smolvlm").model.model)
        small, large = (
            {"pixel_values": np.zeros((1, 2, 3, side, side), dtype=np.float32)}
            for side in (56, 112)
        )

        assert encoder.may_join(small, small)
        assert not encoder.may_join(small, large)
        assert not encoder.may_join(small, {"pixel_values": large["pixel_values"].astype(int)})

    @pytest.mark.parametrize(("fitting", "calls"), [(0.5, [1, 1, 1]), (2.5, [2, 1]), (9, [3])])
    def test_no_more_than_what_takes_as_long_as_there_is_time(
        self, fitting: float, calls: list[int]
    ) -> None:
        encoder, counting, _ = make("qwen2_vl", now=lambda: 0.0)
        prompt = encoded("qwen2_vl", "look", SAME_SIZE)
        size = sum(array.size for array in prompt.items[0].arrays.values())
        encoder._speed = 1.0 / (fitting * size)
        encoder._learn = lambda speed: None

        encoder.encode(prompt, prompt.segments[0].start, 1.0)

        assert counting.calls == calls

    def test_before_a_speed_is_known_it_is_one_at_a_time(self) -> None:
        encoder, counting, _ = make("qwen2_vl", now=lambda: 0.0)
        prompt = encoded("qwen2_vl", "look", SAME_SIZE)

        encoder.encode(prompt, prompt.segments[0].start, 1.0)

        assert counting.calls[0] == 1

    def test_what_is_kept_of_one_is_not_all_that_was_made_together(self) -> None:
        encoder, _, _ = make("qwen2_vl", now=lambda: 0.0)
        prompt = encoded("qwen2_vl", "look", SAME_SIZE)
        encoder._speed = 1e-9
        encoder.encode(prompt, prompt.segments[0].start, 1.0)
        kept = encoder.take(prompt.items[1])
        for item in (prompt.items[0], prompt.items[2]):
            encoder._held.pop(item.digest)
        encoder._cache.clear()
        mx.clear_cache()
        before = mx.get_active_memory()

        encoder._held.clear()
        size = kept.nbytes
        del kept

        assert before - mx.get_active_memory() < 2 * size


class TestHolding:
    @some_families
    def test_without_room_in_the_cache_each_item_is_encoded_once_for_a_row(
        self, family: str
    ) -> None:
        engine, model, counting = engine_of(family, feature_bytes=0)
        names = ["one", "text", "two", "repeated"]

        found = answers(engine, [request(family, name) for name in names])

        assert found == {name: expected(family, name) for name in names}
        prompts = [encoded(family, *REQUESTS[name]) for name in names]
        items = [{i.digest: i for i in prompt.items} for prompt in prompts]
        parts = sum(len(counting.parts(i.arrays)) for each in items for i in each.values())
        assert sum(counting.calls) == parts
        assert model.features.stats().used_bytes == 0
        assert_nothing_is_held(model)

    def test_what_comes_later_than_soon_is_not_encoded_yet(self) -> None:
        encoder, _, cache = make("qwen2_vl", now=lambda: 0.0)
        words = "w" * (AHEAD_TOKENS + 10)
        near, far = (encoded("qwen2_vl", "x", (image(n),)) for n in (1, 2))
        start = near.segments[0].start
        later = far.segments[0]
        moved = type(later)(
            start=later.start + len(words),
            length=later.length,
            item=1,
            offset=0,
            digest=later.digest,
        )
        prompt = EncodedPrompt(
            tokens=(*near.tokens, *[0] * len(words), *far.tokens),
            segments=(near.segments[0], moved),
            items=(near.items[0], far.items[0]),
        )

        encoder.encode(prompt, start, 100.0)

        assert near.items[0].digest in cache
        assert far.items[0].digest not in cache

    def test_a_reset_drops_what_was_begun_and_held(self) -> None:
        encoder, counting, _ = make("qwen2_vl", capacity=0)
        prompt = encoded("qwen2_vl", "look", (image(0),))
        start = prompt.segments[0].start
        encoder.encode(prompt, start, 1e-9)

        encoder.reset()
        while encoder.ready(prompt, 0, len(prompt.tokens)) < len(prompt.tokens):
            encoder.encode(prompt, start, 1e-9)

        assert counting.calls == [1, 1]
        encoder.reset()
        assert encoder.ready(prompt, 0, len(prompt.tokens)) == start


class Sliver(FixedChunk):
    """Chunks of few tokens, and no time to encode more than a piece."""

    def budget(self, num_decoding: int, limit: int, num_waiting: int = 0) -> int:
        return super().budget(1, limit)

    def observe_fused(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        raise AssertionError("nothing is fused here")

    def seconds(self, num_decoding: int) -> float:
        return 1e-9


def engine_of(
    family: str, *, chunk: int = 16, feature_bytes: int = 2**24, **config: Any
) -> tuple[Engine, VlmModel, CountingEncoder]:
    target, counting = loaded(family), CountingEncoder(family)
    axes = target.preprocessor.family.counts_axes
    model = VlmModel(target.model.model, counts_axes=axes, feature_bytes=feature_bytes)
    media: Any = MediaEncoder(counting, model.features)
    model._media = media
    runner = ModelRunner(model, target.base.runner.spec)
    engine = Engine(runner, config=EngineConfig(**config), chunk=Sliver(chunk))
    return engine, model, counting


def assert_nothing_is_held(model: VlmModel) -> None:
    assert not model.encoder._held
    assert not model.encoder._jobs


class TestEngine:
    @some_families
    def test_answers_are_the_same_when_it_is_done_layer_by_layer(self, family: str) -> None:
        engine, model, counting = engine_of(family)
        steps: list[float] = []

        for name in REQUESTS:
            engine.add(request(family, name))
        found: dict[str, list[int]] = {name: [] for name in REQUESTS}
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokenOut):
                    found[event.request_id].append(event.token)
            steps.append(engine.stats().num_steps)

        assert {k: tuple(v) for k, v in found.items()} == {
            name: expected(family, name) for name in REQUESTS
        }
        assert steps[-1] > LAYERS[family] * len(counting.calls)
        assert_nothing_is_held(model)

    def test_what_was_shown_is_let_go_while_its_row_goes_on(self) -> None:
        engine, model, _ = engine_of("qwen2_vl")

        engine.add(request("qwen2_vl", "one"))
        held: list[int] = []
        while engine.has_work:
            decodes = any(isinstance(event, TokenOut) for event in engine.step())
            held += [len(model.encoder._held)] if decodes else []

        assert held == [0] * NUM_TOKENS

    @pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
    def test_several_answers_to_one_prompt_with_media(self, family: str) -> None:
        engine, model, _ = engine_of(family)
        one = request(family, "two")
        several = Request(
            id="several",
            prompt=one.prompt,
            params=one.params,
            n=3,
            media=one.media,
            attachment=one.attachment,
        )

        completions = collect(run(engine, [several, request(family, "text")]))

        for index in range(3):
            assert tuple(completions["several", index].tokens) == expected(family, "two")
        assert tuple(completions["text", 0].tokens) == expected(family, "text")
        assert_nothing_is_held(model)

    @settings(max_examples=5, deadline=None)
    @given(data=st.data())
    def test_rows_come_and_go_in_any_order(self, data: st.DataObject) -> None:
        family = data.draw(st.sampled_from(["qwen2_vl", "smolvlm", "gemma3"]))
        engine, model, _ = engine_of(
            family,
            chunk=data.draw(st.sampled_from([3, 16, 64])),
            feature_bytes=data.draw(st.sampled_from([0, 2**24])),
            max_num_seqs=data.draw(st.integers(1, 4)),
        )
        names: dict[str, str] = {}
        aborted: set[str] = set()
        events: list[Event] = []
        for number in range(data.draw(st.integers(2, 5))):
            name = data.draw(st.sampled_from(sorted(REQUESTS)))
            names[str(number)] = name
            engine.add(request(family, name, str(number)))
            for _ in range(data.draw(st.integers(0, 12))):
                events += engine.step()
            if data.draw(st.integers(0, 3)) == 0:
                victim = str(data.draw(st.integers(0, number)))
                if engine.abort(victim):
                    aborted.add(victim)
        while engine.has_work:
            events += engine.step()
        engine.check_integrity()

        tokens = {identity: list[int]() for identity in names}
        for event in events:
            if isinstance(event, TokenOut):
                tokens[event.request_id].append(event.token)
        ended = [event.request_id for event in events if isinstance(event, Finished)]
        assert sorted(ended) == sorted(names)
        for identity, name in names.items():
            num = len(tokens[identity])
            assert num == NUM_TOKENS or identity in aborted
            assert tuple(tokens[identity]) == expected(family, name)[:num]
        assert_nothing_is_held(model)
