"""Decoded media: plain pixels, frames and samples, each with a digest that stands for them.

Digests are over what is decoded, so the same picture in another file has the same one. They do not
know of preprocessing, which comes later.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from struct import pack

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from PIL import Image

Checkpoint = Callable[[], None]
"""Called often while decoding; raises to end it: too late, or nobody waits any more."""

Claim = Callable[[int], None]
"""Called with the bytes that a result will take, before they are; raises if they are too many."""

DIGEST_BYTES = 32

# The number changes with the encoding.
IMAGE_DOMAIN = b"treadle.image.1"
VIDEO_DOMAIN = b"treadle.video.1"
AUDIO_DOMAIN = b"treadle.audio.1"


class DecodedImage(Struct, frozen=True, kw_only=True, tag="image"):
    """An image, upright and in RGB.

    Attributes:
        image: Mode RGB; not to be changed.
        digest: Over mode, size and pixels.
    """

    image: Image.Image
    digest: bytes


class DecodedVideo(Struct, frozen=True, kw_only=True, tag="video"):
    """Frames of a video, upright and in RGB.

    Attributes:
        frames: Each uint8, [height, width, 3], all of one size; read only.
        timestamps: Seconds from the first frame of the video, one per frame, increasing.
        duration: Seconds of the whole video.
        digest: Over sizes, timestamps and pixels.
    """

    frames: tuple[NDArray[np.uint8], ...]
    timestamps: tuple[float, ...]
    duration: float
    digest: bytes


class DecodedAudio(Struct, frozen=True, kw_only=True, tag="audio"):
    """Sound, mixed to one channel.

    Attributes:
        samples: float32, [samples], about -1 to 1; read only.
        sample_rate: Samples per second.
        digest: Over sample rate and samples.
    """

    samples: NDArray[np.float32]
    sample_rate: int
    digest: bytes

    @property
    def duration(self) -> float:
        """Seconds."""
        return len(self.samples) / self.sample_rate


Media = DecodedImage | DecodedVideo | DecodedAudio


def make_image(image: Image.Image) -> DecodedImage:
    """An RGB image with its digest."""
    size = pack("<QQ", *image.size)
    digest = _digest(IMAGE_DOMAIN, (image.mode.encode(), size, image.tobytes()))
    return DecodedImage(image=image, digest=digest)


def make_video(
    frames: Sequence[NDArray[np.uint8]], timestamps: Sequence[float], duration: float
) -> DecodedVideo:
    """Frames with their digest; they become read only."""
    pieces = [pack("<Q", len(frames)), pack(f"<{len(timestamps)}d", *timestamps)]
    for frame in frames:
        frame.flags.writeable = False
        pieces.append(pack("<QQ", *frame.shape[:2]))
    digest = _digest(VIDEO_DOMAIN, (*pieces, *(frame.data for frame in frames)))
    return DecodedVideo(
        frames=tuple(frames), timestamps=tuple(timestamps), duration=duration, digest=digest
    )


def make_audio(samples: NDArray[np.float32], sample_rate: int) -> DecodedAudio:
    """Samples with their digest; they become read only."""
    samples.flags.writeable = False
    little = samples.astype("<f4", copy=False)
    digest = _digest(AUDIO_DOMAIN, (pack("<Q", sample_rate), little.data))
    return DecodedAudio(samples=samples, sample_rate=sample_rate, digest=digest)


def _digest(domain: bytes, pieces: Iterable[bytes | memoryview]) -> bytes:
    """Digest of pieces, each with its length, so that no other pieces join to the same."""
    state = blake2b(digest_size=DIGEST_BYTES, person=domain)
    for piece in pieces:
        view = memoryview(piece)
        state.update(pack("<Q", view.nbytes))
        state.update(view)
    return state.digest()
