"""From an encoded video to a prompt: the frames, their times and their order reach the model."""

import re
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from mlx_vlm.utils import prepare_inputs
from numpy.typing import NDArray

from treadle_core.testing import RecordingStore
from treadle_multimodal import DecodedVideo, MediaLimits, decode_video
from treadle_multimodal.media import Media
from treadle_multimodal.prompt import EncodedPrompt
from treadle_multimodal.testing import zoo

from .media_files import picture, video
from .test_engine import UNCUT, answers, expected_tokens, make_engine, requested_as
from .test_preprocess import UNREAD, arrays_of
from .vlm import VIDEO, Reference, chat, clip, encoded, image, loaded

every_family = pytest.mark.parametrize("family", VIDEO)
with_times = pytest.mark.parametrize("family", zoo.QWEN3)

LIMITS = MediaLimits()

MAX_FRAMES = {"gemma4": 6}
"""As the checkpoints' processors say; Qwen's say 8."""


def moving(num_frames: int, width: int = 80, height: int = 64) -> list[NDArray[np.uint8]]:
    """Squares of noise, so that compressing loses little."""
    small = [np.array(picture(width // 8, height // 8, seed)) for seed in range(num_frames)]
    return [np.kron(frame, np.ones((8, 8, 1), np.uint8)) for frame in small]


def at_times(frames: list[NDArray[np.uint8]], milliseconds: list[int]) -> bytes:
    """A video whose frames are shown at given times."""
    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=1000)
        stream.pix_fmt = "yuv420p"
        stream.height, stream.width = frames[0].shape[:2]
        stream.codec_context.time_base = Fraction(1, 1000)
        for pixels, time in zip(frames, milliseconds, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def assert_as_mlx_vlm_reads(
    family: str, data: bytes, decoded: DecodedVideo, fps: float, folder: Path
) -> EncodedPrompt:
    """A prompt is what mlx-vlm makes of the file by itself."""
    path = folder / "video.mp4"
    path.write_bytes(data)
    preprocessor = loaded(family).preprocessor
    text = preprocessor.render(chat("look", (decoded,)))
    made = dict(prepare_inputs(preprocessor._processor, videos=[str(path)], prompts=text, fps=fps))
    prompt = encoded(family, "look", (decoded,))

    assert prompt.tokens == tuple(made.pop("input_ids")[0].tolist())
    del made["attention_mask"]
    found = arrays_of(prompt)
    assert found.keys() == made.keys() - UNREAD
    for name, (array,) in found.items():
        assert np.array_equal(array, np.array(made[name])), name
    return prompt


def times_of(family: str, prompt: EncodedPrompt) -> list[str]:
    """Times that stand between the frames."""
    tokenizer = loaded(family).preprocessor._processor.tokenizer
    return re.findall(r"<([0-9.]+) seconds>", tokenizer.decode(prompt.tokens))


class TestFiles:
    @every_family
    def test_all_frames_of_a_file_are_prepared_as_by_mlx_vlm(
        self, family: str, tmp_path: Path
    ) -> None:
        data = video(moving(6), rate=4)

        decoded = decode_video(data, LIMITS, fps=4.0)

        assert len(decoded.frames) == 6
        assert_as_mlx_vlm_reads(family, data, decoded, 4.0, tmp_path)

    @every_family
    def test_a_file_of_more_frames_than_the_model_takes_is_too(
        self, family: str, tmp_path: Path
    ) -> None:
        data = video(moving(21), rate=4)

        decoded = decode_video(data, LIMITS, fps=4.0)

        assert len(decoded.frames) == 21 > MAX_FRAMES.get(family, 8)
        assert_as_mlx_vlm_reads(family, data, decoded, 4.0, tmp_path)

    @every_family
    def test_a_turned_video_is_too(self, family: str, tmp_path: Path) -> None:
        data = video(moving(4), rate=4, rotation=90)

        decoded = decode_video(data, LIMITS, fps=4.0)

        assert decoded.frames[0].shape == (80, 64, 3)
        assert_as_mlx_vlm_reads(family, data, decoded, 4.0, tmp_path)

    @with_times
    def test_times_of_uneven_frames_are_their_own(self, family: str) -> None:
        data = at_times(moving(6), [0, 100, 900, 1000, 4000, 4400])

        decoded = decode_video(data, LIMITS, fps=20.0)

        assert decoded.timestamps == pytest.approx((0.0, 0.1, 0.9, 1.0, 4.0, 4.4))
        # Two frames together have their mean; the hundredths are rounded.
        found = times_of(family, encoded(family, "look", (decoded,)))
        assert [float(time) for time in found] == pytest.approx([0.05, 0.95, 4.2], abs=0.051)

    @with_times
    @pytest.mark.parametrize(("fps", "expected"), [(1.0, ["0.5", "2.5"]), (2.0, ["0.2", "1.2"])])
    def test_the_rate_moves_frames_and_their_times(
        self, family: str, fps: float, expected: list[str]
    ) -> None:
        decoded = decode_video(video(moving(16), rate=4), LIMITS, fps=fps)

        assert times_of(family, encoded(family, "look", (decoded,)))[:2] == expected

    @every_family
    def test_one_frame_is_enough(self, family: str) -> None:
        decoded = decode_video(video(moving(1)), LIMITS, fps=2.0)
        prompt, expected = encoded(family, "", (decoded,)), Reference(family, "", (decoded,))

        assert prompt.tokens == tuple(expected.ids[0].tolist())
        assert prompt.items[0].num_tokens == sum(part.length for part in prompt.segments)


class TestRequests:
    @every_family
    def test_frames_in_another_order_are_another_video(self, family: str) -> None:
        one = clip(0, 4)
        other = DecodedVideo(
            frames=one.frames[::-1],
            timestamps=one.timestamps,
            duration=one.duration,
            digest=b"",
        )

        first, second = (encoded(family, "look", (item,)).items[0] for item in (one, other))

        assert first.num_tokens == second.num_tokens
        assert first.digest != second.digest

    @pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma4"])
    def test_swapped_videos_are_not_each_other_s(self, family: str) -> None:
        store = RecordingStore()
        engine, model = make_engine(family, store)
        videos = (clip(0, 2), clip(7, 2))
        asked: dict[str, tuple[str, tuple[Media, ...]]] = {
            "one": ("look", videos),
            "swapped": ("look", videos[::-1]),
            "again": ("look", videos),
        }

        found = [answers(engine, [requested_as(family, name, asked[name])])[name] for name in asked]

        assert found[0] == found[2] == expected_tokens(family, asked["one"])
        assert found[1] == expected_tokens(family, asked["swapped"])
        prompt = encoded(family, *asked["one"])
        until_video = 0 if family in UNCUT else prompt.segments[0].start
        assert store.found == [0, until_video, len(prompt.tokens) - 1]
        assert model.features.stats().misses == 2

    @pytest.mark.parametrize("family", ["qwen3_vl", "gemma4"])
    def test_swapped_videos_and_an_image_in_one_batch(self, family: str) -> None:
        engine, _ = make_engine(family)
        one, other = clip(0, 2), clip(7, 2)
        asked: dict[str, tuple[str, tuple[Media, ...]]] = {
            "one": ("look", (one, image(1), other)),
            "swapped": ("look", (other, image(1), one)),
        }

        found = answers(engine, [requested_as(family, *each) for each in asked.items()])

        assert found == {name: expected_tokens(family, each) for name, each in asked.items()}
