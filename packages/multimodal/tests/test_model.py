"""Vision models in our runtime give what mlx-vlm's own run of one request gives."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_vlm import stream_generate

from treadle_core.layers import FullAttention, Recurrent, Window
from treadle_core.mlx_runtime.adapter import RowInput
from treadle_core.mlx_runtime.groups import SoloGroup
from treadle_core.plan import Open
from treadle_multimodal.media import Media
from treadle_multimodal.testing import zoo
from treadle_multimodal.vlm.model import VlmModel

from .vlm import (
    DISTINCT,
    MIXING,
    QWEN,
    TOLERANCE,
    VIDEO,
    Reference,
    Rows,
    chat,
    clip,
    difference,
    encoded,
    image,
    loaded,
)

every_family = pytest.mark.parametrize("family", zoo.FAMILIES)
every_distinct_family = pytest.mark.parametrize("family", DISTINCT)

CONTINUATION = (70, 105, 33, 9, 120, 41)

TEXT: tuple[str, tuple[Media, ...]] = ("a text without any picture", ())
ONE: tuple[str, tuple[Media, ...]] = ("what is this?", (image(0),))
REPEATED: tuple[str, tuple[Media, ...]] = (
    "the same twice",
    (image(3, 150, 90), image(4, 60, 60), image(3, 150, 90)),
)
REQUESTS = [
    TEXT,
    ONE,
    ("compare", (image(1, 120, 50), image(2))),
    ("text again, to have another length", ()),
    REPEATED,
]


@cache
def reference(family: str, text: str, number: int) -> np.ndarray[Any, Any]:
    """mlx-vlm's logits for one of the requests."""
    assert REQUESTS[number][0] == text
    return Reference(family, *REQUESTS[number]).logits(CONTINUATION)


def check(rows: Rows, family: str, numbers: Sequence[int], widths: Sequence[int]) -> None:
    """Decode the continuation, so many tokens at a time, and compare every row."""
    fed = [(prompt.tokens[-1], *CONTINUATION) for prompt in rows.prompts]
    found, start = list[np.ndarray[Any, Any]](), 0
    for width in widths:
        found.append(rows.decode([tokens[start : start + width] for tokens in fed]))
        start += width
    together = np.concatenate(found, axis=1)
    for row, number in enumerate(numbers):
        expected = reference(family, REQUESTS[number][0], number)[:start]
        assert difference(together[row], expected) < TOLERANCE, (row, number)


class TestLogits:
    @pytest.mark.parametrize(
        ("family", "chunk"),
        [
            *((family, chunk) for family in DISTINCT for chunk in (8, 17, 64, 1024)),
            *((family, 17) for family in zoo.FAMILIES if family not in DISTINCT),
        ],
    )
    def test_rows_with_and_without_media_decode_together(self, family: str, chunk: int) -> None:
        rows = Rows(family)
        for request in REQUESTS:
            rows.join(encoded(family, *request), chunk)

        check(rows, family, range(len(REQUESTS)), [1] * (1 + len(CONTINUATION)))

    @every_distinct_family
    def test_several_tokens_at_a_time(self, family: str) -> None:
        rows = Rows(family)
        for request in REQUESTS:
            rows.join(encoded(family, *request), 32)

        check(rows, family, range(len(REQUESTS)), [3, 1, 2])

    @every_distinct_family
    def test_the_order_of_rows_does_not_matter(self, family: str) -> None:
        rows, order = Rows(family), [4, 0, 2, 1]
        for number in order:
            rows.join(encoded(family, *REQUESTS[number]), 1024)

        check(rows, family, order, [1, 1])

    @every_distinct_family
    def test_a_prompt_may_be_cut_anywhere(self, family: str) -> None:
        """Before, inside and behind each of its images: all of its cuts, one prompt each."""
        prompt = encoded(family, *ONE)
        expected = reference(family, ONE[0], 1)[:1]
        # Qwen3.5 goes through its tokens one by one, which takes its time.
        step = 5 if family == "qwen3_5" else 1

        for cut in range(1, len(prompt.tokens) - 1, step):
            rows = Rows(family, capacity=128, num_rows=1)
            rows.join(prompt, cut)
            assert difference(rows.decode([[prompt.tokens[-1]]])[0], expected) < TOLERANCE, cut

    @pytest.mark.parametrize("family", VIDEO)
    @pytest.mark.parametrize("chunk", [8, 1024])
    def test_videos(self, family: str, chunk: int) -> None:
        requests = [("look", (clip(0, 2), clip(7, 3, 120, 60))), TEXT, ("see", (clip(3, 1),))]
        rows = Rows(family)
        for request in requests:
            rows.join(encoded(family, *request), chunk)

        found = [rows.decode([[prompt.tokens[-1]] for prompt in rows.prompts])]
        found += [rows.decode([[token]] * len(requests)) for token in CONTINUATION]

        for row, request in enumerate(requests):
            expected = Reference(family, *request).logits(CONTINUATION)
            assert difference(np.concatenate(found, axis=1)[row], expected) < TOLERANCE

    @pytest.mark.parametrize("family", MIXING)
    def test_images_and_videos_in_one_prompt(self, family: str) -> None:
        request = ("look", (clip(0, 2), image(1), clip(2, 3)))
        rows = Rows(family)
        rows.join(encoded(family, *request), 16)

        found = rows.decode([[rows.prompts[0].tokens[-1], *CONTINUATION]])[0]

        assert difference(found, Reference(family, *request).logits(CONTINUATION)) < TOLERANCE

    @every_distinct_family
    def test_a_prompt_that_ends_with_a_placeholder(self, family: str) -> None:
        """Its last token is fed by the decode of all rows, beside text."""
        rows, prompt = Rows(family), encoded(family, *ONE)
        end = prompt.segments[0].end
        rows.join(encoded(family, *TEXT), 64)
        rows.join(prompt, 64, end - 1)

        for token in prompt.tokens[end - 1 :]:
            found = rows.decode([[65], [token]])[1]

        assert difference(found, reference(family, ONE[0], 1)[:1]) < TOLERANCE

    @every_distinct_family
    def test_a_placeholder_that_a_text_row_generates_is_a_word(self, family: str) -> None:
        """Also in the step in which the row beside it is fed one that stands for its image."""
        prompt = encoded(family, *ONE)
        end, placeholder = prompt.segments[0].end, prompt.items[0].placeholder
        rows = Rows(family)
        rows.join(encoded(family, *TEXT), 64, len(encoded(family, *TEXT).tokens))
        rows.join(prompt, 64, end - 1)

        found = rows.decode([[placeholder], [prompt.tokens[end - 1]]])[0]

        expected = Reference(family, *TEXT).logits([placeholder])[1:]
        assert difference(found, expected) < TOLERANCE

    @every_distinct_family
    def test_rows_of_their_own_caches(self, family: str) -> None:
        """As a model of which the runtime does not know every layer is run."""
        group = SoloGroup(loaded(family).model)
        prompts = [encoded(family, *request) for request in REQUESTS]
        for row, prompt in enumerate(prompts):
            group.open(Open(0, row))
            for start in range(0, len(prompt.tokens) - 1, 16):
                stop = min(start + 16, len(prompt.tokens) - 1)
                group.prefill(row, prompt.tokens[start:stop], start, prompt)
                mx.eval(group.arrays())

        starts = [len(prompt.tokens) - 1 for prompt in prompts]
        fed = mx.array([[prompt.tokens[-1], *CONTINUATION[:2]] for prompt in prompts])
        found = np.array(group.decode(fed, starts, prompts))

        for number, (text, _) in enumerate(REQUESTS):
            assert difference(found[number], reference(family, text, number)[:3]) < TOLERANCE

    @every_distinct_family
    def test_text_without_rows_follows_the_caches(self, family: str) -> None:
        model = loaded(family).model
        prompt = encoded(family, *TEXT)
        caches = model.new_cache()

        mx.eval(model.forward(mx.array([prompt.tokens[:-1]]), caches))
        found = np.array(model.forward(mx.array([[prompt.tokens[-1]]]), caches)[0])

        assert difference(found, reference(family, TEXT[0], 0)[:1]) < TOLERANCE

    @every_family
    def test_greedy_tokens_are_those_of_mlx_vlm_s_own_generation(self, family: str) -> None:
        target, (text, media) = loaded(family), REPEATED
        preprocessor = target.preprocessor
        steps = stream_generate(
            target.model.model,
            preprocessor._processor,
            preprocessor.render(chat(text, media)),
            [item.image for item in media],
            max_tokens=8,
            temperature=0.0,
        )
        # The last step comes once more, with the counters.
        *expected, _ = [step.token for step in steps]
        rows = Rows(family)
        rows.join(encoded(family, text, media), 16)

        token, found = rows.prompts[0].tokens[-1], list[int]()
        for _ in expected:
            token = int(rows.decode([[token]])[0, -1].argmax())
            found.append(token)

        assert len(expected) == 8
        assert found == expected


class TestEmbeddings:
    @every_family
    @pytest.mark.parametrize("number", [1, 2, 4])
    def test_they_are_those_of_mlx_vlm(self, family: str, number: int) -> None:
        prompt = encoded(family, *REQUESTS[number])

        found = np.array(loaded(family).model.embeddings(prompt))

        expected = np.array(Reference(family, *REQUESTS[number]).embeddings[0])
        assert difference(found, expected) < 1e-5

    @pytest.mark.parametrize("family", QWEN)
    def test_positions_are_those_of_mlx_vlm(self, family: str) -> None:
        prompt, own = encoded(family, *REPEATED), Reference(family, *REPEATED).extra

        assert np.array_equal(prompt.positions, np.array(own["position_ids"])[:, 0])
        assert prompt.delta == own["rope_deltas"].item()

    @settings(deadline=None, max_examples=40)
    @given(family=st.sampled_from(zoo.FAMILIES), data=st.data())
    def test_a_slice_is_that_part_of_the_whole(self, family: str, data: st.DataObject) -> None:
        model, prompt = loaded(family).model, encoded(family, *REPEATED)
        start = data.draw(st.integers(0, len(prompt.tokens) - 1))
        stop = data.draw(st.integers(start + 1, len(prompt.tokens)))

        found = np.array(model.embeddings(prompt, start, stop))

        assert np.array_equal(found, np.array(model.embeddings(prompt))[start:stop])

    def test_gemma_has_nothing_where_mlx_vlm_sees_padding(self) -> None:
        prompt = encoded("gemma3", f"a hole {zoo.PAD} in the text", (image(0),))
        expected = Reference("gemma3", f"a hole {zoo.PAD} in the text", (image(0),))

        found = np.array(loaded("gemma3").model.embeddings(prompt))

        assert len(prompt.blanks) == 1
        assert not found[prompt.blanks[0]].any()
        assert difference(found, np.array(expected.embeddings[0])) < 1e-5


class TestFeatures:
    @every_family
    def test_the_encoder_runs_once_for_each_distinct_item(self, family: str) -> None:
        model = fresh(family)
        prompt = encoded(family, *REPEATED)

        for chunk in (8, 16, 1024):
            for start in range(0, len(prompt.tokens), chunk):
                model.embeddings(prompt, start, start + chunk)

        assert model.features.stats().misses == 2

    @every_family
    def test_an_item_in_another_prompt_is_not_encoded_again(self, family: str) -> None:
        model = fresh(family)
        model.embeddings(encoded(family, "one", (image(0), image(1))))

        model.embeddings(encoded(family, "another text", (image(2), image(0))))

        assert model.features.stats().misses == 3

    @every_family
    def test_text_and_what_lies_outside_of_a_chunk_is_not_encoded(self, family: str) -> None:
        model = fresh(family)
        prompt = encoded(family, *ONE)
        begin, end = prompt.segments[0].start, prompt.segments[-1].end

        model.embeddings(prompt, 0, begin)
        model.embeddings(prompt, end)
        model.embeddings(encoded(family, *TEXT))

        assert model.features.stats().misses == 0

    @every_family
    def test_without_room_the_result_is_the_same(self, family: str) -> None:
        model = fresh(family, feature_bytes=0)
        prompt = encoded(family, *REPEATED)

        found = np.concatenate(
            [
                np.array(model.embeddings(prompt, at, at + 8))
                for at in range(0, len(prompt.tokens), 8)
            ]
        )

        assert np.array_equal(found, np.array(loaded(family).model.embeddings(prompt)))
        assert model.features.stats().used_bytes == 0

    @every_family
    def test_their_bytes_are_counted(self, family: str) -> None:
        model = fresh(family)
        prompt = encoded(family, *ONE)

        features = model.encoder.take(prompt.items[0])

        layers = [features.embeddings, *features.deepstack]
        deep = family in ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe")
        assert len(layers) == (3 if deep else 1)
        assert model.features.stats().used_bytes == sum(array.nbytes for array in layers)
        assert features.nbytes == len(layers) * prompt.items[0].num_tokens * zoo.HIDDEN * 4


class TestSpec:
    @every_family
    def test_every_layer_is_known_and_rows_may_share(self, family: str) -> None:
        spec = loaded(family).base.runner.spec

        full = FullAttention(2, 16, 16, "float32")
        ring = Window(2, 16, 16, "float32", zoo.WINDOW)
        state = Recurrent(((3, 384), (4, 32, 32)), ("float32",) * 2)
        layers = {
            "gemma3": [ring, ring, full],
            # Two more read what these keep.
            "gemma4": [ring, FullAttention(2, 32, 32, "float32")],
            "qwen3_5": [state, state, state, full],
            "qwen3_5_moe": [state, state, state, full],
        }
        assert spec.layers == tuple(layers.get(family, [full] * 3))
        assert spec.batched, spec.note
        assert spec.model_type == family

    @pytest.mark.parametrize("family", QWEN)
    def test_mlx_vlm_s_model_remembers_nothing_of_a_request(self, family: str) -> None:
        model = fresh(family)
        language: Any = model.model.language_model
        language._rope_deltas = language._position_ids = None
        prompt = encoded(family, *ONE)

        caches = model.new_cache()
        mx.eval(model.forward(mx.array([prompt.tokens]), caches, [RowInput(0, prompt)]))
        mx.eval(model.forward(mx.array([[5]]), caches, [RowInput(len(prompt.tokens), prompt)]))

        assert language._rope_deltas is None
        assert language._position_ids is None


def fresh(family: str, feature_bytes: int = 2**24) -> VlmModel:
    """The family's model with an empty cache of features."""
    target = loaded(family)
    axes = target.preprocessor.family.counts_axes
    return VlmModel(target.model.model, counts_axes=axes, feature_bytes=feature_bytes)
