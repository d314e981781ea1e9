"""Preparing equals mlx-vlm's own, items are told apart, and what does not fit is refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_core import ModelLoadError, Unsupported
from treadle_core.mlx_runtime.load import ModelOptions
from treadle_multimodal import MediaError, UnsupportedMedia
from treadle_multimodal.families import make_family
from treadle_multimodal.media import Media, make_image
from treadle_multimodal.prompt import EncodedPrompt
from treadle_multimodal.testing import zoo
from treadle_multimodal.vlm.checkpoint import load_vlm
from treadle_multimodal.vlm.preprocess import Preprocessor, item_digest

from .media_files import picture
from .vlm import HEARING, QWEN, VIDEO, Reference, chat, clip, encoded, image, loaded, sound

every_family = pytest.mark.parametrize("family", zoo.FAMILIES)

SIZES = [(80, 60), (120, 50), (33, 200), (60, 60), (300, 40)]

ITEM_AXIS = {"smolvlm": 1, "idefics3": 1, "internvl": 1}
"""Where arrays of several items are joined, unless it is the first axis."""


UNREAD = {
    *("mm_token_type_ids", "num_frames_per_video", "video_second_per_grid"),
    "image_token_index",
}
"""What mlx-vlm's processors make, and its models, as they are loaded here, do not look at."""


PADDING = ("pixtral", "mistral3")
"""Families of which mlx-vlm pads all images of a prompt to the largest."""


def padded(array: Any, shape: tuple[int, ...]) -> Any:
    return np.pad(array, [(0, most - size) for size, most in zip(array.shape, shape, strict=True)])


def arrays_of(prompt: EncodedPrompt) -> dict[str, list[Any]]:
    """The items' arrays by name."""
    found = dict[str, list[Any]]()
    for item in prompt.items:
        for name, array in item.arrays.items():
            found.setdefault(name, []).append(array)
    return found


def assert_as_mlx_vlm(family: str, media: tuple[Media, ...]) -> EncodedPrompt:
    prompt, reference = encoded(family, "look", media), Reference(family, "look", media)
    expected = {name: made for name, made in reference.inputs.items() if name not in UNREAD}
    assert prompt.tokens == tuple(expected.pop("input_ids")[0].tolist())
    assert np.array(expected.pop("attention_mask")).all()
    found = arrays_of(prompt)
    assert found.keys() == expected.keys()
    for name, made in expected.items():
        axis = ITEM_AXIS.get(family, 0)
        if isinstance(made, list):  # of items that differ in size
            parts = [part[0] for part in found[name]]
        elif family in PADDING and name == "pixel_values":
            parts = [padded(part[0], made.shape[1:]) for part in found[name]]
        else:
            parts, made = [np.concatenate(found[name], axis=axis)], [made]
        for part, array in zip(parts, map(np.array, made), strict=True):
            assert part.dtype == array.dtype
            assert np.array_equal(part, array)
    return prompt


def placeholders(prompt: EncodedPrompt) -> list[int]:
    """Positions of placeholders, item by item in the order of their features."""
    assert prompt.items
    found: list[int] = []
    for index, item in enumerate(prompt.items):
        own = [part for part in prompt.segments if part.item == index]
        assert [part.offset for part in own] == np.cumsum([0, *(p.length for p in own)])[
            :-1
        ].tolist()
        assert sum(part.length for part in own) == item.num_tokens
        found += [position for part in own for position in range(part.start, part.end)]
    return found


@every_family
@pytest.mark.parametrize("count", [1, 2, 5])
def test_images_are_prepared_as_by_mlx_vlm(family: str, count: int) -> None:
    media = tuple(image(index, *size) for index, size in enumerate(SIZES[:count]))

    prompt = assert_as_mlx_vlm(family, media)

    (token,) = {item.placeholder for item in prompt.items}
    assert placeholders(prompt) == [i for i, t in enumerate(prompt.tokens) if t == token]


@pytest.mark.parametrize("family", VIDEO)
def test_videos_are_prepared_as_by_mlx_vlm(family: str) -> None:
    prompt = assert_as_mlx_vlm(family, (clip(0), clip(7, 5, 120, 60)))

    assert sorted(placeholders(prompt)) == placeholders(prompt)


def test_images_and_videos_keep_their_order() -> None:
    media = (clip(0), image(1), clip(2, 3), image(3, 120, 60))

    prompt = assert_as_mlx_vlm("qwen3_vl", media)

    names = [sorted(item.arrays)[0] for item in prompt.items]
    image_name, video_name = "image_grid_thw", "pixel_values_videos"
    assert names == [video_name, image_name, video_name, image_name]
    assert placeholders(prompt) == sorted(placeholders(prompt))


def test_a_video_s_times_are_written_as_they_are() -> None:
    prompt = encoded("qwen3_vl", "look", (clip(0, 4),))

    tokenizer = loaded("qwen3_vl").preprocessor._processor.tokenizer
    text = tokenizer.decode(prompt.tokens)
    # Frames at 0, 0.5, 1 and 1.5 seconds, two by two.
    assert "<0.2 seconds>" in text
    assert "<1.2 seconds>" in text


@every_family
def test_a_text_prompt_has_nothing_but_tokens(family: str) -> None:
    prompt = encoded(family, "hello")

    assert prompt.tokens == tuple(Reference(family, "hello").ids[0].tolist())
    assert (prompt.segments, prompt.items, prompt.positions) == ((), (), None)
    assert (prompt.delta, prompt.blanks, prompt.media) == (0, (), ())


@every_family
def test_equal_items_have_one_digest_and_others_their_own(family: str) -> None:
    media = (image(0), image(1), image(0), image(0, 120, 60))

    prompt = encoded(family, "look", media)

    first, second, third, fourth = prompt.items
    assert first is third
    assert len({first.digest, second.digest, fourth.digest}) == 3
    spans = prompt.media
    assert [span.start for span in spans] == [part.start for part in prompt.segments]
    repeats = [
        [s.digest for s, p in zip(spans, prompt.segments, strict=True) if p.item == i]
        for i in (0, 2)
    ]
    assert repeats[0] == repeats[1]


@every_family
def test_what_stands_beside_an_image_does_not_change_its_digest(family: str) -> None:
    found = {
        encoded(family, "look", media).items[-1].digest
        for media in [(image(0),), (image(1, 90, 200), image(0)), (image(2), image(0))]
    }

    assert len(found) == 1


def test_an_item_of_other_length_has_another_digest() -> None:
    arrays = {"input_features": np.zeros((1, 8, 4), np.float32)}

    assert item_digest("gemma4", 7, 2, arrays) != item_digest("gemma4", 7, 3, arrays)


def test_parts_of_an_item_have_digests_of_their_own() -> None:
    prompt = encoded("smolvlm", "look", (image(0),))

    digests = [span.digest for span in prompt.media]
    assert len(set(digests)) == len(digests) > 1


@pytest.mark.parametrize(("key", "value"), [("max_pixels", 8 * 14 * 14), ("image_std", [1.0] * 3)])
def test_the_digest_covers_what_preprocessing_does(key: str, value: Any) -> None:
    target = loaded("qwen2_vl")
    text = target.preprocessor.render(chat("look", (image(0),)))
    processor = deepcopy(target.preprocessor._processor)
    setattr(processor.image_processor, key, value)

    usual, other = (
        Preprocessor(target.base.config, each).encode(text, (image(0),)).items[0].digest
        for each in (target.preprocessor._processor, processor)
    )

    assert other != usual


@every_family
def test_what_comes_back_is_numpy_read_only_and_no_view_of_more(family: str) -> None:
    prompt = encoded(family, "look", (image(0), image(1)))

    for item in prompt.items:
        for array in item.arrays.values():
            assert type(array) is np.ndarray
            assert array.base is None
            assert not array.flags.writeable


@every_family
def test_many_threads_prepare_at_once(family: str) -> None:
    """Text and media alternate, since processors pad them on different sides."""
    words = "long enough that another thread gets a turn, " * 40
    requests: list[tuple[Media, ...]] = []
    for seed in range(12):
        requests += [(), (image(seed), image(seed + 50, *SIZES[seed % 5]))]
    expected = [encoded(family, words, media) for media in requests]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda media: encoded(family, words, media), requests))

    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.segments == other.segments


@every_family
def test_a_prompt_is_prepared_while_another_one_is(family: str) -> None:
    preprocessor = loaded(family).preprocessor
    expected = encoded(family, "look", (image(0),))

    with preprocessor._own_processor() as one:
        found = encoded(family, "look", (image(0),))
        with preprocessor._own_processor() as other:
            kept = [one, other, preprocessor._processor]
            assert len({id(each.tokenizer._tokenizer) for each in kept}) == 3

    assert (found.tokens, found.segments) == (expected.tokens, expected.segments)


def test_a_template_that_reads_parts_only_loses_no_words(tmp_path: Path) -> None:
    """SmolVLM's own writes nothing for a content that is a string."""
    path = zoo.save_checkpoint("smolvlm", tmp_path) / "tokenizer_config.json"
    template = (
        "{% for message in messages %}{{ message['role'] }}:"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
        "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %};{% endfor %}"
    )
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": template}))
    loaded = load_vlm(ModelOptions(model=str(tmp_path)))

    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]},
    ]

    assert loaded.preprocessor.render(chat) == "system:be brief;user:<image>hi;"
    assert loaded.base.tokenizer.render_chat(chat[:1]) == "system:be brief;"


class TestOptions:
    @pytest.mark.parametrize(
        "options", [{"adapter_path": "lora"}, {"max_kv_size": 64}, {"kv_bits": 8}, {"kv_bits": 0}]
    )
    def test_an_option_that_was_not_checked_is_refused(self, options: dict[str, Any]) -> None:
        (name,) = options
        with pytest.raises(Unsupported, match=f"{name} has not been checked with media"):
            load_vlm(ModelOptions(model="nowhere", **options))

    def test_a_checkpoint_of_another_family_is_refused_before_its_weights(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "paligemma"}')

        with pytest.raises(Unsupported, match="media input for paligemma has not been checked"):
            load_vlm(ModelOptions(model=str(tmp_path)))

    def test_a_checkpoint_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')

        with pytest.raises(ModelLoadError, match=str(tmp_path)):
            load_vlm(ModelOptions(model=str(tmp_path)))


class TestRefused:
    @pytest.mark.parametrize(
        ("model_type", "why"),
        [
            ("gemma3n", "the words around its media are embedded by its encoders"),
            ("internvl_chat", "checkpoints of the newer format, internvl, are taken"),
            ("llava", "processor for it fails"),
            ("phi4mm", "changes all of its weights for prompts with media"),
        ],
    )
    def test_a_family_that_cannot_be_taken(self, model_type: str, why: str) -> None:
        with pytest.raises(Unsupported, match=rf"media input for {model_type}: .*{why}"):
            Preprocessor({"model_type": model_type}, None)

    @pytest.mark.parametrize("model_type", ["minicpmo", "paligemma", None])
    def test_a_family_that_was_not_checked(self, model_type: str | None) -> None:
        expected = rf"media input for {model_type} has not been checked.*checked are gemma3, gemma4, idefics3"
        with pytest.raises(Unsupported, match=expected):
            Preprocessor({"model_type": model_type}, None)

    @pytest.mark.parametrize("family", PADDING)
    def test_a_text_model_that_was_not_checked(self, family: str) -> None:
        config = {"model_type": family, "text_config": {"model_type": "ministral3"}}

        with pytest.raises(Unsupported, match=f"{family} with text of ministral3 has not been"):
            make_family(config, None)

    @pytest.mark.parametrize(
        ("family", "option", "value"),
        [("smolvlm", "do_image_splitting", False), ("gemma3", "do_pan_and_scan", True)],
    )
    def test_a_way_to_use_it_that_was_not_checked(
        self, family: str, option: str, value: bool
    ) -> None:
        processor = SimpleNamespace(image_processor=SimpleNamespace(**{option: value}))

        with pytest.raises(Unsupported, match="has not been checked"):
            make_family({"model_type": family}, processor)

    @pytest.mark.parametrize("family", [name for name in zoo.FAMILIES if name not in HEARING])
    def test_sound_where_the_model_takes_none(self, family: str) -> None:
        kinds = "image and video" if family in QWEN else "image"

        with pytest.raises(UnsupportedMedia) as caught:
            loaded(family).preprocessor.encode("text", (sound(),))

        assert str(caught.value) == f"kind: got 'audio', expected {kinds} for {family}"

    def test_kinds_that_mlx_vlm_does_not_run_together(self) -> None:
        with pytest.raises(UnsupportedMedia, match="one in a qwen2_vl prompt"):
            encoded("qwen2_vl", "look", (image(0), clip(0)))

    @every_family
    @pytest.mark.parametrize("count", [1, 3])
    def test_another_number_of_markers(self, family: str, count: int) -> None:
        preprocessor = loaded(family).preprocessor
        text = preprocessor.render(chat("look", (image(0), image(1))))

        with pytest.raises(MediaError, match="got 'markers of image, image'"):
            preprocessor.encode(text, (image(0),) * count)

    def test_markers_in_another_order(self) -> None:
        preprocessor = loaded("qwen3_vl").preprocessor
        text = preprocessor.render(chat("look", (image(0), clip(0))))

        with pytest.raises(MediaError, match="one marker for each of video, image"):
            preprocessor.encode(text, (clip(0), image(0)))

    @every_family
    def test_text_that_reads_like_media(self, family: str) -> None:
        preprocessor = loaded(family).preprocessor
        for marker in preprocessor.family.markers.values():
            for word in marker.words:
                with pytest.raises(MediaError, match="without the model's own media tokens"):
                    preprocessor.render(chat(f"what is {word}?", (image(0),)))
                rendered = preprocessor.render(chat("look", (image(0),)))
                with pytest.raises(MediaError, match="one marker for each"):
                    preprocessor.encode(rendered + word, (image(0),))

    def test_what_the_processor_does_not_take(self) -> None:
        sliver = make_image(picture(1000, 2))

        with pytest.raises(MediaError, match="aspect ratio must be smaller than 200"):
            encoded("qwen2_vl", "look", (sliver,))


Layout = list[tuple[str, tuple[int, int, int], int]]


@settings(deadline=None, max_examples=30)
@given(
    family=st.sampled_from(QWEN),
    layout=st.lists(
        st.tuples(
            st.sampled_from(["image", "video"]),
            st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=4,
    ),
    tail=st.integers(0, 4),
)
def test_positions_are_those_of_mlx_vlm(family: str, layout: Layout, tail: int) -> None:
    target = loaded(family)
    language, config = target.model.model.language_model, target.base.config
    config = config.get("thinker_config", config)
    start, end = config["vision_start_token_id"], config["vision_end_token_id"]
    tokens: list[int] = [5]
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    items: list[Any] = []
    for kind, (frames, height, width), words in layout:
        frames = 1 if kind == "image" else frames
        placeholder = config[f"{kind}_token_id"]
        tokens += [7] * words
        where: list[int] = []
        for size in [height * width] * frames if family in zoo.QWEN3 else [frames * height * width]:
            tokens += [start, *[placeholder] * size, end]
            where += range(len(tokens) - 1 - size, len(tokens) - 1)
        grid = [frames, 2 * height, 2 * width]
        grids[kind].append(grid)
        arrays = {f"{kind}_grid_thw": np.array([grid])}
        items.append(SimpleNamespace(arrays=arrays, where=np.array(where)))
    tokens += [9] * tail
    given_grids = {
        f"{kind}_grid_thw": mx.array(rows) if rows else None for kind, rows in grids.items()
    }

    expected, delta = language.get_rope_index(mx.array([tokens]), **given_grids)

    found = target.preprocessor.family.positions(len(tokens), items)
    assert found is not None
    assert np.array_equal(found, np.array(expected)[:, 0])
    assert int(found.max()) + 1 - len(tokens) == delta.item()


@pytest.mark.parametrize("number", range(0, 150, 30))
@every_family
def test_unusual_sizes_are_all_placed(family: str, number: int) -> None:
    placeholders(encoded(family, "look", (image(number, 29 + number, 200 - number),)))
