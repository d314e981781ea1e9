"""How much media a request may bring, and for how long it may be worked on."""

import math
from typing import assert_never

from msgspec import Struct

from treadle_core.request import check_float, check_int
from treadle_multimodal.errors import BrokenMedia, MediaTooLarge
from treadle_multimodal.sources import Kind

MIB = 1024 * 1024

MAX_IMAGE_PIXELS = 89_478_485
"""Pillow warns above this size, whoever asks."""

DAY = 86_400.0


class MediaLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one request's media, checked on creation.

    Bytes are counted as they arrive, sizes before anything is decoded. While it is decoded an item
    takes more than its result: an image up to 13 bytes per pixel, a video a few frames, audio its
    samples twice.

    Attributes:
        max_items: Images, videos and audio of one request together.
        max_image_bytes: Of one encoded image.
        max_video_bytes: Of one encoded video.
        max_audio_bytes: Of one encoded audio.
        max_request_bytes: Of all encoded media of one request.
        max_decoded_bytes: Of all pixels and samples of one request: 3 per pixel, 4 per sample.
        max_side: Width and height of an image or a video frame.
        max_pixels: Width times height of an image.
        max_frame_pixels: Width times height of a video frame.
        max_frames: Frames taken from one video.
        max_video_pixels: Pixels of all frames taken from one video.
        max_video_seconds: Length of a video.
        max_audio_seconds: Length of audio.
        fetch_seconds: For fetching one item, its redirects included.
        decode_seconds: For decoding one item.
        max_redirects: Redirects followed for one item.
        max_concurrent: Items that are decoded at one moment, over all requests, and that are fetched
            at one moment for one request.
        max_loaded_bytes: Of the media of all requests that were not answered yet; others wait for
            room. While they are loaded, they count as large as they may be, then as their pixels
            and samples, and once they are prepared as what was made of them, which is not limited
            alone: while that is more than there is room for, nobody else's are loaded. Files that
            are fetched have as much room of their own, before they are loaded.
    """

    max_items: int = 32
    max_image_bytes: int = 20 * MIB
    max_video_bytes: int = 256 * MIB
    max_audio_bytes: int = 64 * MIB
    max_request_bytes: int = 512 * MIB
    max_decoded_bytes: int = 1024 * MIB
    max_side: int = 16_384
    max_pixels: int = 40_000_000
    max_frame_pixels: int = 4096 * 2160
    max_frames: int = 128
    max_video_pixels: int = 128 * 1920 * 1080
    max_video_seconds: float = 1800.0
    max_audio_seconds: float = 1800.0
    fetch_seconds: float = 30.0
    decode_seconds: float = 60.0
    max_redirects: int = 5
    max_concurrent: int = 4
    max_loaded_bytes: int = 4096 * MIB

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        check_int("max_items", self.max_items, 1, 1024)
        check_int("max_image_bytes", self.max_image_bytes, 1, 2**40)
        check_int("max_video_bytes", self.max_video_bytes, 1, 2**40)
        check_int("max_audio_bytes", self.max_audio_bytes, 1, 2**40)
        check_int("max_request_bytes", self.max_request_bytes, 1, 2**40)
        check_int("max_decoded_bytes", self.max_decoded_bytes, 1, 2**40)
        check_int("max_side", self.max_side, 1, 2**16)
        check_int("max_pixels", self.max_pixels, 1, MAX_IMAGE_PIXELS)
        check_int("max_frame_pixels", self.max_frame_pixels, 1, MAX_IMAGE_PIXELS)
        check_int("max_frames", self.max_frames, 1, 2**16)
        check_int("max_video_pixels", self.max_video_pixels, 1, 2**40)
        _check_seconds("max_video_seconds", self.max_video_seconds)
        _check_seconds("max_audio_seconds", self.max_audio_seconds)
        _check_seconds("fetch_seconds", self.fetch_seconds)
        _check_seconds("decode_seconds", self.decode_seconds)
        check_int("max_redirects", self.max_redirects, 0, 32)
        check_int("max_concurrent", self.max_concurrent, 1, 256)
        check_int("max_loaded_bytes", self.max_loaded_bytes, 1, 2**40)

    def max_bytes(self, kind: Kind) -> int:
        """Most encoded bytes of one item."""
        match kind:
            case "image":
                return self.max_image_bytes
            case "video":
                return self.max_video_bytes
            case "audio":
                return self.max_audio_bytes
            case _:
                assert_never(kind)

    def max_decoded(self, kind: Kind, sample_rate: int) -> int:
        """Most bytes of one item's pixels, or of its samples at a rate."""
        match kind:
            case "image":
                return 3 * self.max_pixels
            case "video":
                return 3 * self.max_video_pixels
            case "audio":
                return math.ceil(4 * self.max_audio_seconds * sample_rate)
            case _:
                assert_never(kind)


def check_size(field: str, width: int, height: int, max_side: int, max_pixels: int) -> None:
    """Raise MediaTooLarge or BrokenMedia unless a picture of that size may be decoded."""
    size = f"{width} x {height}"
    if width < 1 or height < 1:
        raise BrokenMedia(field, size, "at least 1 x 1 pixels")
    if max(width, height) > max_side:
        raise MediaTooLarge(field, size, f"at most {max_side} pixels on a side")
    if width * height > max_pixels:
        raise MediaTooLarge(field, size, f"at most {max_pixels} pixels")


def _check_seconds(field: str, value: object) -> None:
    check_float(field, value, 0.0, DAY, exclusive_low=True)
