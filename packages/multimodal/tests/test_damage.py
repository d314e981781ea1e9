"""Files with changed bytes: whatever happens, it is decoded or refused as media."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random

import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from PIL import features

from treadle_multimodal import MediaError, MediaLimits, decode_audio, decode_image, decode_video

from .media_files import audio, encode, grey_frames, picture, tone, video, wav

LIMITS = MediaLimits(max_pixels=1_000_000, max_frame_pixels=1_000_000)

FORMS = ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", *(["AVIF"] if features.check("avif") else [])]

GREY = grey_frames(range(0, 80, 8))

IMAGES = {form: encode(picture(32, 32), form) for form in FORMS}
VIDEOS = {
    "mp4": video(GREY),
    "matroska": video(GREY, "matroska"),
    "webm": video(GREY, "webm", "libvpx"),
    "avi": video(GREY, "avi", "mpeg4"),
}
SOUNDS = {
    "wav": wav(tone(0.2)),
    "mp3": audio(tone(0.2, 44_100), "mp3", "libmp3lame", 44_100),
    "flac": audio(tone(0.2), "flac", "flac"),
    "ogg": audio(tone(0.2, 48_000), "ogg", "libopus", 48_000),
    "ipod": audio(tone(0.2, 44_100), "ipod", "aac", 44_100),
    "adts": audio(tone(0.2, 44_100), "adts", "aac", 44_100),
}

CASES = [
    *((data, partial(decode_image, limits=LIMITS)) for data in IMAGES.values()),
    *((data, partial(decode_video, limits=LIMITS, fps=5.0)) for data in VIDEOS.values()),
    *((data, partial(decode_audio, limits=LIMITS, sample_rate=16_000)) for data in SOUNDS.values()),
]


def damage(data: bytes, random: Random) -> bytes:
    """A few bytes changed, mostly in the header; sometimes the end is missing."""
    damaged = bytearray(data)
    for _ in range(random.choice((1, 2, 5, 30))):
        place = random.randrange(min(len(damaged), random.choice((64, 300, 10**6))))
        damaged[place] = random.choice((0, 127, 128, 255, random.randrange(256)))
    if random.random() < 0.2:
        del damaged[random.randrange(len(damaged)) :]
    return bytes(damaged)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("data", "decode"), CASES, ids=[*IMAGES, *VIDEOS, *SOUNDS])
def test_damage_is_decoded_or_refused(data: bytes, decode: Callable[[bytes], object]) -> None:
    decode(data)
    for seed in range(60):
        with suppress(MediaError):
            decode(damage(data, Random(seed)))


def test_a_codec_that_nobody_knows_is_refused() -> None:
    with pytest.raises(MediaError, match="codec: got ''"):
        decode_video(VIDEOS["mp4"].replace(b"avc1", b"xxxx"), LIMITS, fps=5.0)
    lossless = audio(tone(0.2), "ipod", "alac").replace(b"alac", b"xxxx")
    with pytest.raises(MediaError, match="codec: got ''"):
        decode_audio(lossless, LIMITS, sample_rate=16_000)
