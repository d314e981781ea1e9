"""Sound beside images and words: prepared, encoded and answered as by mlx-vlm."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

import mlx.core as mx
from mlx_vlm.utils import prepare_inputs

from treadle_core import Request, SamplingParams, Unsupported
from treadle_core.testing import RecordingObserver, RecordingStore
from treadle_multimodal import MediaError, MediaTooLarge, UnsupportedMedia
from treadle_multimodal.families import make_family
from treadle_multimodal.media import DecodedAudio, Media, make_audio
from treadle_multimodal.prompt import EncodedPrompt
from treadle_multimodal.vlm.model import VlmModel

from .test_engine import NUM_TOKENS, UNCUT, answers, expected_tokens, make_engine, requested_as
from .vlm import (
    HEARING,
    TOLERANCE,
    Reference,
    Rows,
    chat,
    difference,
    encoded,
    image,
    loaded,
    sound,
)

every_family = pytest.mark.parametrize("family", HEARING)

CONTINUATION = (70, 105, 33)

SECOND = 16_000

Asked = tuple[str, tuple[Media, ...]]

REQUESTS: dict[str, Asked] = {
    "text": ("a text without any sound", ()),
    "one": ("what is this?", (sound(0),)),
    "other": ("what is this?", (sound(9),)),
    "two": ("compare", (sound(1, 9_000), sound(2, 2 * SECOND))),
    "swapped": ("compare", (sound(2, 2 * SECOND), sound(1, 9_000))),
    "repeated": ("the same twice", (sound(3), sound(4, 5_000), sound(3))),
    "mixed": ("look and listen", (image(1), sound(5, 7_777), image(2, 120, 50), sound(6))),
}


@cache
def reference(family: str, name: str) -> np.ndarray[Any, Any]:
    return Reference(family, *REQUESTS[name]).logits(CONTINUATION)


@cache
def expected(family: str, name: str) -> tuple[int, ...]:
    return expected_tokens(family, REQUESTS[name])


def sounds_of(prompt: EncodedPrompt) -> list[dict[str, Any]]:
    return [dict(item.arrays) for item in prompt.items if "input_features" in item.arrays]


def alone(family: str, clip: DecodedAudio) -> tuple[dict[str, Any], int]:
    """What mlx-vlm makes of one sound, and how many placeholders."""
    preprocessor = loaded(family).preprocessor
    marker = preprocessor.family.markers["audio"]
    made = prepare_inputs(preprocessor._processor, audio=[clip.samples], prompts=marker.text)
    arrays = {name: np.array(array) for name, array in made.items() if "feature" in name}
    return arrays, int((np.array(made["input_ids"]) == marker.placeholder).sum())


def prepared(
    family: str, messages: Sequence[Mapping[str, Any]], media: Sequence[Media]
) -> EncodedPrompt:
    """The prompt of a conversation."""
    preprocessor = loaded(family).preprocessor
    return preprocessor.encode(preprocessor.render(messages), media)


class Turn(NamedTuple):
    """An answer, and what it took.

    Attributes:
        tokens: Of the answer.
        logits: Behind the prompt and behind each of them but the last.
        prefilled: Positions of the prompt that were, in order.
        encoded: How many sounds were.
    """

    tokens: tuple[int, ...]
    logits: np.ndarray[Any, Any]
    prefilled: list[int]
    encoded: int


class Conversation:
    """Asks an engine one prompt after the other."""

    def __init__(self, family: str, store: RecordingStore) -> None:
        self._observer = RecordingObserver()
        self._engine, self._model = make_engine(family, store, [self._observer])

    def ask(self, prompt: EncodedPrompt) -> Turn:
        logits = list[np.ndarray[Any, Any]]()

        def record(_: Any, row: Any) -> Any:
            logits.append(np.array(row).reshape(-1))
            return row

        request = Request(
            id="turn",
            prompt=prompt.tokens,
            params=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
            logits_processors=(record,),
            media=prompt.media,
            attachment=prompt,
        )
        steps, misses = len(self._observer.steps), self._model.features.stats().misses
        (tokens,) = answers(self._engine, [request]).values()
        parts = [part for plan, _ in self._observer.steps[steps:] for part in plan.prefills]
        return Turn(
            tokens=tokens,
            logits=np.stack(logits),
            prefilled=[part.start + index for part in parts for index in range(len(part.tokens))],
            encoded=self._model.features.stats().misses - misses,
        )


class TestPrepared:
    @every_family
    @pytest.mark.parametrize("num_samples", [161, 8_100, SECOND, SECOND + 10, 5 * SECOND + 7])
    def test_one_sound_is_prepared_as_by_mlx_vlm(self, family: str, num_samples: int) -> None:
        media = (sound(0, num_samples),)
        prompt, expected = encoded(family, "listen", media), Reference(family, "listen", media)

        assert prompt.tokens == tuple(expected.ids[0].tolist())
        (found,) = sounds_of(prompt)
        assert found.keys() == {name for name in expected.inputs if "feature" in name}
        for name, array in found.items():
            made = np.array(expected.inputs[name])
            assert array.dtype == made.dtype
            assert np.array_equal(array, made)

    @every_family
    def test_sounds_of_one_length_and_images_are_too(self, family: str) -> None:
        media = (image(0), sound(0), sound(1), image(1, 120, 50), sound(0))
        prompt, expected = encoded(family, "listen", media), Reference(family, "listen", media)

        assert prompt.tokens == tuple(expected.ids[0].tolist())
        for name in sounds_of(prompt)[0]:
            together = np.concatenate([arrays[name] for arrays in sounds_of(prompt)])
            assert np.array_equal(together, np.array(expected.inputs[name]))
        kinds = [sorted(item.arrays)[-1] for item in prompt.items]
        assert kinds[0] == kinds[3] == "pixel_values"
        starts = [part.start for part in prompt.segments]
        assert starts == sorted(starts)
        assert [part.item for part in prompt.segments] == [0, 1, 2, 3, 4]

    @every_family
    def test_each_of_several_lengths_is_prepared_as_if_alone(self, family: str) -> None:
        clips = (sound(1, 9_000), sound(2, 2 * SECOND + 31), sound(3, 500))

        prompt = encoded(family, "listen", clips)

        for item, clip in zip(prompt.items, clips, strict=True):
            arrays, length = alone(family, clip)
            assert item.num_tokens == length
            assert item.arrays.keys() == arrays.keys()
            assert all(np.array_equal(item.arrays[name], arrays[name]) for name in arrays)

    @every_family
    def test_what_stands_beside_a_sound_does_not_change_its_digest(self, family: str) -> None:
        clip = sound(1, 9_200)

        found = {
            encoded(family, "listen", media).items[-1].digest
            for media in [(clip,), (sound(2, 5 * SECOND), clip), (image(0), clip)]
        }

        assert len(found) == 1

    @every_family
    def test_equal_sounds_have_one_digest_and_others_their_own(self, family: str) -> None:
        longer = make_audio(np.concatenate([sound(0).samples, np.zeros(640, np.float32)]), SECOND)

        prompt = encoded(family, "listen", (sound(0), sound(1), sound(0), longer))

        first, second, third, fourth = prompt.items
        assert first is third
        assert len({first.digest, second.digest, fourth.digest}) == 3
        assert [span.digest for span in prompt.media] == [item.digest for item in prompt.items]

    @every_family
    def test_a_chat_with_every_kind_keeps_its_order(self, family: str) -> None:
        kinds = loaded(family).preprocessor.kinds

        prompt = encoded(family, "all", (sound(0), image(0), sound(1)))

        assert kinds == {"image", "video", "audio"}
        assert [("input_features" in item.arrays) for item in prompt.items] == [True, False, True]


class TestLogits:
    @every_family
    @pytest.mark.parametrize("chunk", [8, 1024])
    def test_rows_with_sound_images_and_words_decode_together(
        self, family: str, chunk: int
    ) -> None:
        rows = Rows(family)
        for asked in REQUESTS.values():
            rows.join(encoded(family, *asked), chunk)

        fed = [[prompt.tokens[-1], *CONTINUATION] for prompt in rows.prompts]
        found = np.concatenate(
            [rows.decode([row[:1] for row in fed]), rows.decode([row[1:] for row in fed])], axis=1
        )

        for row, name in enumerate(REQUESTS):
            assert difference(found[row], reference(family, name)) < TOLERANCE, name

    @every_family
    def test_a_prompt_may_be_cut_anywhere(self, family: str) -> None:
        asked = ("what?", (sound(0, 5_000), image(0)))
        prompt = encoded(family, *asked)
        expected = Reference(family, *asked).logits([])

        for cut in range(1, len(prompt.tokens) - 1, 3):
            rows = Rows(family, capacity=128, num_rows=1)
            rows.join(prompt, cut)
            assert difference(rows.decode([[prompt.tokens[-1]]])[0], expected) < TOLERANCE, cut

    @every_family
    def test_sounds_of_one_length_are_as_mlx_vlm_encodes_them_together(self, family: str) -> None:
        asked = ("compare", (sound(0), image(0), sound(1)))
        prompt = encoded(family, *asked)

        found = np.array(loaded(family).model.embeddings(prompt))

        expected = Reference(family, *asked, together=True).embeddings[0]
        assert difference(found, np.array(expected)) < 1e-5

    @every_family
    def test_logits_depend_on_the_sound_and_its_place(self, family: str) -> None:
        one = Reference(family, "what?", (sound(0), sound(1))).logits([])

        for media in [(sound(2), sound(1)), (sound(1), sound(0))]:
            assert difference(Reference(family, "what?", media).logits([]), one) > 1e-3


class TestFeatures:
    @every_family
    def test_the_encoder_runs_once_for_each_distinct_sound(self, family: str) -> None:
        target = loaded(family)
        axes = target.preprocessor.family.counts_axes
        model = VlmModel(target.model.model, counts_axes=axes)
        prompt = encoded(family, *REQUESTS["repeated"])

        for chunk in (8, 1024):
            for start in range(0, len(prompt.tokens), chunk):
                mx.eval(model.embeddings(prompt, start, start + chunk))
        model.embeddings(encoded(family, "another text", (image(0), sound(4, 5_000))))

        assert model.features.stats().misses == 3

    @every_family
    def test_a_sound_keeps_one_vector_for_each_placeholder(self, family: str) -> None:
        prompt = encoded(family, *REQUESTS["one"])

        features = loaded(family).model.encoder.take(prompt.items[0])

        assert features.embeddings.shape[0] == prompt.items[0].num_tokens
        assert features.deepstack == ()


class TestEngine:
    @every_family
    def test_answers_are_those_of_each_request_alone(self, family: str) -> None:
        engine, _ = make_engine(family, max_num_seqs=4)
        asked = [requested_as(family, name, REQUESTS[name]) for name in REQUESTS]

        found = answers(engine, asked)

        assert found == {name: expected(family, name) for name in REQUESTS}

    @every_family
    def test_a_stored_prefix_is_reused_for_the_same_sound_only(self, family: str) -> None:
        store = RecordingStore()
        engine, model = make_engine(family, store)
        prompt = encoded(family, *REQUESTS["one"])

        for name in ("one", "other", "one"):
            (found,) = answers(engine, [requested_as(family, name, REQUESTS[name])]).values()
            assert found == expected(family, name)

        nothing, until_sound, all_but_last = store.found
        assert (nothing, all_but_last) == (0, len(prompt.tokens) - 1)
        if family not in UNCUT:
            assert until_sound == prompt.segments[0].start
        assert model.features.stats().misses == 2

    @every_family
    def test_a_conversation_that_grows_by_a_longer_sound_prefills_only_that(
        self, family: str
    ) -> None:
        """Prepared beside the longer one, the first would have other features at its end."""
        store, first, second = RecordingStore(), sound(1, 9_200), sound(2, 2 * SECOND)
        told = [
            {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": "noise"},
            {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "and now?"}]},
        ]
        prompts = [
            prepared(family, told[:1], (first,)),
            prepared(family, told, (first, second)),
        ]
        known = len(prompts[0].tokens)
        assert prompts[1].tokens[:known] == prompts[0].tokens

        conversation = Conversation(family, store)
        turns = [conversation.ask(prompt) for prompt in prompts]
        cold = Conversation(family, RecordingStore()).ask(prompts[1])

        nothing, reused = store.found
        assert nothing == 0
        # Where state cannot be cut, it is stored before the last token, whose logits are wanted.
        assert reused == (known - 1 if family in UNCUT else known)
        assert turns[0].prefilled == list(range(known - 1))
        assert turns[1].prefilled == list(range(reused, len(prompts[1].tokens) - 1))
        assert cold.prefilled == list(range(len(prompts[1].tokens) - 1))
        assert [turn.encoded for turn in (*turns, cold)] == [1, 1, 2]
        assert turns[1].tokens == cold.tokens
        assert difference(turns[1].logits, cold.logits) < TOLERANCE


class TestRefused:
    @every_family
    def test_a_sound_that_would_be_cut(self, family: str) -> None:
        limit = {"gemma4": 30, "qwen3_omni_moe": 20}[family]
        encoded(family, "listen", (sound(0, limit * SECOND),))

        with pytest.raises(MediaTooLarge) as caught:
            encoded(family, "listen", (sound(0, limit * SECOND + 800),))

        assert str(caught.value) == (
            f"audio: got '{limit}.05 seconds', expected at most {limit} seconds for {family}"
        )

    @every_family
    def test_a_sound_of_less_than_one_window(self, family: str) -> None:
        with pytest.raises(MediaError, match=f"audio: got '0.00625 seconds'.*{family}"):
            encoded(family, "listen", (sound(0, 100),))

    @every_family
    def test_a_sound_at_another_rate(self, family: str) -> None:
        clip = make_audio(np.zeros(8_000, dtype=np.float32), 8_000)

        with pytest.raises(UnsupportedMedia, match=f"got 8000, expected 16000 .* for {family}"):
            encoded(family, "listen", (clip,))

    @every_family
    def test_text_that_reads_like_a_sound(self, family: str) -> None:
        preprocessor = loaded(family).preprocessor
        (word,) = preprocessor.family.markers["audio"].words

        with pytest.raises(MediaError, match="without the model's own media tokens"):
            preprocessor.render(chat(f"what is {word}?", (sound(0),)))

    def test_gemma_4_with_images_that_are_seen_both_ways(self) -> None:
        config = {"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "vision"}}

        with pytest.raises(Unsupported, match="both ways has not been checked"):
            make_family(config, None)

    def test_gemma_4_without_an_encoder_for_it(self) -> None:
        target = loaded("gemma4")
        config = {**target.base.config, "audio_config": None}

        family = make_family(config, target.preprocessor._processor)

        assert family.hearing is None
        assert set(family.markers) == {"image", "video"}
