"""Decoding images with Pillow: header first, limits next, pixels last.

The result is upright (EXIF orientation applied) and RGB: transparency is composited on white,
16-bit grey keeps its upper 8 bits, CMYK is converted without colour profile, and of an animation
the first frame is taken. An image that is cut short is refused, as is one with samples of 32 bits.
"""

import struct
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from PIL import Image

from treadle_core.errors import describe
from treadle_multimodal.errors import BrokenMedia, MediaTooLarge, UnsupportedMedia
from treadle_multimodal.limits import MediaLimits, check_size
from treadle_multimodal.media import Checkpoint, Claim, DecodedImage, make_image
from treadle_multimodal.sniff import check_type

# What Pillow's decoders raise on damaged files.
DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    OverflowError,
    EOFError,
    AttributeError,
    RuntimeError,
    struct.error,
    zlib.error,
)

ORIENTATION = 0x0112

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Of a TIFF directory: bytes of an entry, and the kinds of values that stay bytes.
TAG_BYTES = 12
BYTE_KINDS = (1, 2, 6, 7)

MAX_TAG_NUMBERS = 2**18
"""Tiles of 16 x 16 pixels in the largest image."""

WHITE = (255, 255, 255)
WIDE_GREY = ("I;16", "I;16L", "I;16B", "I;16N")
TRANSPARENT = ("RGBA", "RGBa", "LA", "La", "PA")


def decode_image(
    data: bytes,
    limits: MediaLimits,
    *,
    media_type: str = "",
    checkpoint: Checkpoint = lambda: None,
    claim: Claim = lambda _: None,
) -> DecodedImage:
    """An encoded image as RGB. Blocks, for as long as its pixels take.

    Args:
        data: The file.
        limits: Of side and pixels.
        media_type: As a caller or server says; only errors show it.
        checkpoint: Called between steps.
        claim: Called with the bytes of the result, before anything is decoded.

    Raises:
        UnsupportedMedia: It is no image that is decoded here.
        MediaTooLarge: It has too many pixels; none was decoded.
        BrokenMedia: It is empty, cut short or damaged.
    """
    file_type = check_type(data, "image", media_type)
    if file_type.reader == "TIFF":
        check_tags(data)
    with map_decode_errors(limits):
        image = Image.open(Checked(data, checkpoint), formats=(file_type.reader,))
    with image:
        return convert_image(image, limits, checkpoint=checkpoint, claim=claim)


def convert_image(
    image: Image.Image,
    limits: MediaLimits,
    *,
    checkpoint: Checkpoint = lambda: None,
    claim: Claim = lambda _: None,
) -> DecodedImage:
    """An opened image as RGB; it is loaded if it was not, and else left as it is.

    Args:
        image: In any mode.
        limits: Of side and pixels.
        checkpoint: Called between steps.
        claim: Called with the bytes of the result, before anything is decoded.

    Raises:
        UnsupportedMedia: Its samples have 32 bits.
        MediaTooLarge: It has too many pixels; none was decoded.
        BrokenMedia: It is empty, cut short or damaged.
    """
    check_size("size", image.width, image.height, limits.max_side, limits.max_pixels)
    claim(3 * image.width * image.height)
    checkpoint()
    with map_decode_errors(limits):
        image.load()
        checkpoint()
        # Before the modes change: the header is read from the image that was opened.
        operation = UPRIGHT.get(_orientation(image))
        rgb = _to_rgb(image)
        upright = rgb if operation is None else rgb.transpose(operation)
    checkpoint()
    return make_image(upright)


class Checked(BytesIO):
    """A file that calls ``checkpoint`` whenever more of it is read.

    A small image may take hours where its samples are described again and again, and Pillow reads
    it in small pieces.

    Args:
        data: The file.
        checkpoint: May raise.
    """

    def __init__(self, data: bytes, checkpoint: Checkpoint) -> None:
        super().__init__(data)
        self._checkpoint = checkpoint

    def read(self, size: int | None = -1, /) -> bytes:
        """As the base class."""
        self._checkpoint()
        return super().read(size)


def check_tags(data: bytes) -> None:
    """Refuse a TIFF image whose first directory has a long list of numbers.

    Pillow makes objects of them, and of each strip of pixels, whatever the size of the image.

    Raises:
        MediaTooLarge: It has.
    """
    order = "<" if data.startswith(b"II") else ">"
    try:
        (start,) = struct.unpack_from(f"{order}I", data, 4)
        (num_tags,) = struct.unpack_from(f"{order}H", data, start)
        tags = [
            struct.unpack_from(f"{order}HHI", data, start + 2 + TAG_BYTES * index)
            for index in range(num_tags)
        ]
    except struct.error:
        return  # Pillow says what is wrong with it
    for _, kind, count in tags:
        if kind not in BYTE_KINDS and count > MAX_TAG_NUMBERS:
            raise MediaTooLarge("image", f"{count} numbers in a list", f"at most {MAX_TAG_NUMBERS}")


@contextmanager
def map_decode_errors(limits: MediaLimits) -> Generator[None]:
    """Turn what Pillow raises into errors of media."""
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaTooLarge("size", str(error), f"at most {limits.max_pixels} pixels") from None
    except DECODE_ERRORS as error:
        raise BrokenMedia("image", describe(error), "an undamaged image") from error


def _orientation(image: Image.Image) -> int:
    """How the image is to be turned; upright where its EXIF says nothing or cannot be read."""
    try:
        value: object = image.getexif().get(ORIENTATION, 1)
    except DECODE_ERRORS:
        return 1
    return value if isinstance(value, int) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in WIDE_GREY:
        return _narrow(image)
    if image.mode in ("I", "F"):
        raise UnsupportedMedia("image", f"mode {image.mode}", "samples of 8 or 16 bits")
    if image.mode in TRANSPARENT or "transparency" in image.info:
        clear = image if image.mode == "RGBA" else image.convert("RGBA")
        opaque = Image.new("RGB", clear.size, WHITE)
        opaque.paste(clear, mask=clear.getchannel("A"))
        return opaque
    return image.convert("RGB")


def _narrow(image: Image.Image) -> Image.Image:
    """16-bit grey as RGB; Pillow's own conversion would cut off, not scale."""
    grey = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")
