"""Decoding of videos: which frames are taken, limits, damage."""

from fractions import Fraction
from io import BytesIO

import av
import numpy as np
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_multimodal import (
    BrokenMedia,
    DecodedVideo,
    MediaError,
    MediaLimits,
    MediaTimeout,
    MediaTooLarge,
    UnsupportedMedia,
    decode_video,
)
from treadle_multimodal.containers import open_container
from treadle_multimodal.sniff import sniff
from treadle_multimodal.video import Timeline, choose_frames

from .media_files import audio, encode, grey_frames, picture, png, tone, video, wav

LIMITS = MediaLimits()

THIRTY = video(grey_frames(range(0, 240, 8)))
"""3 seconds at 10 frames per second; frame i is grey of level 8 * i."""


def levels(decoded: DecodedVideo) -> list[int]:
    """Which frames these are, by their grey."""
    return [round(float(frame.mean()) / 8) for frame in decoded.frames]


def test_frames_are_taken_at_even_distances() -> None:
    decoded = decode_video(THIRTY, LIMITS, fps=2.0)

    assert levels(decoded) == [0, 5, 10, 15, 20, 25]
    assert decoded.timestamps == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
    assert decoded.duration == 3.0
    assert {frame.shape for frame in decoded.frames} == {(48, 64, 3)}
    assert all(frame.dtype == np.uint8 for frame in decoded.frames)


@pytest.mark.parametrize(
    ("fps", "max_frames", "expected"),
    [
        (10.0, None, list(range(30))),
        (100.0, None, list(range(30))),
        (1.0, None, [0, 10, 20]),
        (0.1, None, [0]),
        (10.0, 3, [0, 10, 20]),
        (10.0, 4, [0, 8, 15, 23]),
        (2.0, 1, [0]),
        (4.0, None, [0, 3, 5, 8, 10, 13, 15, 18, 20, 23, 25, 28]),
    ],
)
def test_rate_and_number_choose_the_frames(
    fps: float, max_frames: int | None, expected: list[int]
) -> None:
    assert levels(decode_video(THIRTY, LIMITS, fps=fps, max_frames=max_frames)) == expected


def test_the_limit_of_frames_is_the_most_and_the_default() -> None:
    limits = MediaLimits(max_frames=5)

    assert len(decode_video(THIRTY, limits, fps=10.0).frames) == 5
    with pytest.raises(MediaTooLarge, match="max_frames: got 6, expected at most 5"):
        decode_video(THIRTY, limits, fps=10.0, max_frames=6)


@pytest.mark.parametrize(
    ("form", "codec", "pixel_format"),
    [
        ("mp4", "libx264", "yuv420p"),
        ("mov", "libx264", "yuv420p"),
        ("matroska", "libx264", "yuv420p"),
        ("avi", "mpeg4", "yuv420p"),
        ("avi", "mjpeg", "yuvj420p"),
        ("webm", "libvpx", "yuv420p"),
        ("webm", "libvpx-vp9", "yuv420p"),
    ],
)
def test_a_container_and_codec_are_decoded(form: str, codec: str, pixel_format: str) -> None:
    data = video(grey_frames(range(0, 80, 8)), form, codec, pixel_format=pixel_format)
    decoded = decode_video(data, LIMITS, fps=5.0)

    assert levels(decoded) == [0, 2, 4, 6, 8]
    assert decoded.timestamps == pytest.approx((0.0, 0.2, 0.4, 0.6, 0.8))


def test_frames_out_of_order_in_the_file_come_in_order() -> None:
    data = video(grey_frames(range(0, 240, 8)), bf="3", g="12")

    assert levels(decode_video(data, LIMITS, fps=10.0)) == list(range(30))


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_a_turned_video_is_upright(rotation: int) -> None:
    upright = np.zeros((48, 64, 3), np.uint8)
    upright[:24, :32] = 255
    # A display rotation by so many degrees, anticlockwise, undoes this.
    stored = np.ascontiguousarray(np.rot90(upright, -rotation // 90))
    frame = decode_video(video([stored] * 3, rotation=rotation), LIMITS, fps=1.0).frames[0]

    assert frame.shape == (48, 64, 3)
    assert np.abs(frame.astype(int) - upright.astype(int)).mean() < 6


def test_one_frame_is_a_video() -> None:
    decoded = decode_video(video(grey_frames([80])), LIMITS, fps=2.0)

    assert levels(decoded) == [10]
    assert decoded.timestamps == (0.0,)


def test_equal_arguments_give_equal_frames_and_digests() -> None:
    first, second = (decode_video(THIRTY, LIMITS, fps=4.0) for _ in range(2))

    assert first.digest == second.digest
    assert all(map(np.array_equal, first.frames, second.frames))


def test_the_digest_knows_frames_and_times() -> None:
    slow = video(grey_frames(range(0, 240, 8)), rate=5)
    digests = {
        decode_video(THIRTY, LIMITS, fps=10.0).digest,
        decode_video(THIRTY, LIMITS, fps=5.0).digest,
        decode_video(THIRTY, LIMITS, fps=10.0, max_frames=4).digest,
        decode_video(slow, LIMITS, fps=5.0).digest,
        decode_video(video(grey_frames(range(8, 248, 8))), LIMITS, fps=10.0).digest,
    }

    assert len(digests) == 5


def test_frames_are_read_only() -> None:
    frame = decode_video(THIRTY, LIMITS, fps=1.0).frames[0]

    with pytest.raises(ValueError, match="read-only"):
        frame[0, 0, 0] = 1


@pytest.mark.parametrize(
    ("limits", "field", "limit"),
    [
        (MediaLimits(max_video_seconds=2.0), "video", "at most 2 seconds"),
        (MediaLimits(max_side=63), "frame size", "at most 63 pixels on a side"),
        (MediaLimits(max_frame_pixels=64 * 48 - 1), "frame size", "at most 3071 pixels"),
        (MediaLimits(max_video_pixels=64 * 48 * 30 - 1), "frames", "lower fps or max_frames"),
    ],
)
def test_a_limit_is_held(limits: MediaLimits, field: str, limit: str) -> None:
    with pytest.raises(MediaTooLarge) as caught:
        decode_video(THIRTY, limits, fps=10.0)

    assert caught.value.field == field
    assert limit in caught.value.limit


def test_limits_are_inclusive() -> None:
    limits = MediaLimits(
        max_video_seconds=3.0,
        max_side=64,
        max_frame_pixels=64 * 48,
        max_frames=30,
        max_video_pixels=64 * 48 * 30,
    )

    assert len(decode_video(THIRTY, limits, fps=10.0).frames) == 30


def test_a_length_that_the_header_hides_is_found() -> None:
    header = THIRTY.index(b"mvhd")
    lying = bytearray(THIRTY)
    for name, at in ((b"mvhd", 16), (b"tkhd", 20), (b"mdhd", 16)):
        place = THIRTY.index(name) + 4 + at
        lying[place : place + 4] = (1).to_bytes(4, "big")
    assert bytes(lying) != THIRTY
    assert header > 0

    with pytest.raises(MediaTooLarge, match="at most 2 seconds"):
        decode_video(bytes(lying), MediaLimits(max_video_seconds=2.0), fps=1.0)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", BrokenMedia, "got '0 bytes'"),
        (THIRTY[: len(THIRTY) // 2], BrokenMedia, "InvalidDataError"),
        (THIRTY[:40], BrokenMedia, "InvalidDataError"),
        (THIRTY[:12] + b"\0" * 500, BrokenMedia, "video"),
        (THIRTY[:1500] + bytes(len(THIRTY) - 1500), BrokenMedia, "video"),
        (audio(tone(), "mp4", "aac"), BrokenMedia, "no video stream"),
        (audio(tone(), "matroska", "flac"), BrokenMedia, "no video stream"),
        (video(grey_frames([0, 8]), "matroska", "ffv1"), UnsupportedMedia, "codec: got 'ffv1'"),
        (png(), UnsupportedMedia, "got 'a PNG image'"),
        (audio(tone(), "mp3", "libmp3lame"), UnsupportedMedia, "got 'MP3 audio'"),
        (b"#EXTM3U\n/etc/passwd", UnsupportedMedia, "got 'an HLS playlist'"),
        (b"ffconcat version 1.0\nfile /etc/passwd", UnsupportedMedia, "got 'text'"),
        (b"\x1aE\xdf\xa3" + b"\xff" * 200, BrokenMedia, "video"),
        (b"RIFF\x10\0\0\0AVI " + b"\0" * 64, BrokenMedia, "video"),
    ],
)
def test_what_cannot_be_used_is_refused(data: bytes, error: type[MediaError], message: str) -> None:
    with pytest.raises(error) as caught:
        decode_video(data, LIMITS, fps=2.0)

    assert message in str(caught.value)


@pytest.mark.parametrize("form", ["webm", "matroska"])
def test_a_file_that_ends_long_before_its_header_says_is_refused(form: str) -> None:
    noise = np.random.default_rng(0)
    frames = [noise.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(40)]
    data = video(frames, form, "libvpx")

    with pytest.raises(BrokenMedia, match=r"got '\d\.\d of 4\.0 seconds'.*not cut short"):
        decode_video(data[: len(data) // 3], LIMITS, fps=2.0)


@pytest.mark.parametrize("size", [(64, 64), (32, 32), (3000, 3000)])
def test_a_size_that_changes_on_the_way_is_refused(size: tuple[int, int]) -> None:
    data = motion_jpeg([encode(picture(48, 48), "JPEG")] * 3 + [encode(picture(*size), "JPEG")] * 3)
    limits = MediaLimits(max_frame_pixels=1_000_000)

    with pytest.raises((UnsupportedMedia, BrokenMedia)):
        decode_video(data, limits, fps=10.0)


def motion_jpeg(pictures: list[bytes]) -> bytes:
    """An AVI of JPEG files as they are."""
    file = BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream = container.add_stream("mjpeg", rate=10)
        stream.width = stream.height = 48
        stream.pix_fmt = "yuvj420p"
        for index, data in enumerate(pictures):
            packet = av.Packet(data)
            packet.stream, packet.time_base = stream, Fraction(1, 10)
            packet.pts = packet.dts = index
            packet.is_keyframe = True
            container.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(("codec", "runs"), [("libx264", True), ("ffv1", False)])
def test_only_the_decoders_of_a_list_run(codec: str, runs: bool) -> None:
    data = video(grey_frames([0, 8, 16]), "matroska", codec)
    opened = open_container(data, sniff(data), "video", ["h264"], max_pixels=64 * 48)
    with opened as container:
        # The pixel format is known to who decoded a frame.
        assert (container.streams.video[0].codec_context.pix_fmt is not None) == runs


def test_only_the_demuxer_of_the_type_is_tried() -> None:
    with (
        pytest.raises(BrokenMedia, match="an undamaged audio file"),
        open_container(wav(tone()), sniff(THIRTY), "audio", ["pcm_s16le"]),
    ):
        pass


def test_a_checkpoint_ends_it() -> None:
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 40:
            raise MediaTimeout("decoding", "more time", "less")

    with pytest.raises(MediaTimeout):
        decode_video(THIRTY, LIMITS, fps=10.0, checkpoint=stop)
    assert calls == 40


@settings(deadline=None)
@given(
    gaps=st.lists(st.integers(1, 5000), max_size=60),
    last=st.integers(1, 100),
    start=st.integers(-1000, 1000),
    fps=st.floats(0.01, 240.0),
    max_frames=st.integers(1, 50),
)
def test_chosen_frames_are_frames_in_order_and_within_the_limit(
    gaps: list[int], last: int, start: int, fps: float, max_frames: int
) -> None:
    ticks = [start]
    for gap in gaps:
        ticks.append(ticks[-1] + gap)
    timeline = Timeline(ticks=tuple(ticks), end=ticks[-1] + last, time_base=Fraction(1, 1000))

    chosen = choose_frames(timeline, fps, max_frames)

    assert 1 <= len(chosen) <= max_frames
    assert chosen[0] == start
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(ticks)
