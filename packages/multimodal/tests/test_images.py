"""Decoding of images: every mode to RGB, limits before pixels, damage as errors."""

import struct
import tracemalloc
import zlib
from io import BytesIO

import numpy as np
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from treadle_multimodal import (
    BrokenMedia,
    MediaError,
    MediaLimits,
    MediaTimeout,
    MediaTooLarge,
    UnsupportedMedia,
    convert_image,
    decode_image,
)

from .media_files import encode, picture, png, tone, wav

LIMITS = MediaLimits()


def pixels(data: bytes) -> list[object]:
    image = decode_image(data, LIMITS).image
    assert image.mode == "RGB"
    return np.asarray(image).tolist()


def huge_png(width: int, height: int) -> bytes:
    """A valid header of any size, and next to no pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0"))


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF"])
def test_a_lossless_file_keeps_its_pixels(form: str) -> None:
    image = picture()

    assert pixels(encode(image, form)) == np.asarray(image).tolist()


@pytest.mark.parametrize(
    "form", ["JPEG", "WEBP", "GIF", *(["AVIF"] if features.check("avif") else [])]
)
def test_a_lossy_file_is_decoded(form: str) -> None:
    decoded = decode_image(encode(Image.new("RGB", (24, 16), (200, 40, 40)), form), LIMITS)

    assert decoded.image.size == (24, 16)
    red, green, blue = decoded.image.getpixel((5, 5))  # type: ignore[misc]
    assert abs(red - 200) < 12
    assert abs(green - 40) < 12
    assert abs(blue - 40) < 12


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    upright = Image.new("RGB", (32, 16), "white")
    upright.paste((0, 0, 0), (0, 0, 16, 8))
    stored = {
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.transpose(Image.Transpose.ROTATE_180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation

    assert pixels(encode(stored, "PNG", exif=exif)) == np.asarray(upright).tolist()


@pytest.mark.parametrize("exif", [b"Exif\0\0broken", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b""])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_exif_that_cannot_be_read_leaves_the_image_upright(exif: bytes) -> None:
    decoded = decode_image(encode(picture(), "JPEG", exif=exif), LIMITS)

    assert decoded.image.size == (24, 16)


def test_an_odd_orientation_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 99

    assert decode_image(encode(picture(), "PNG", exif=exif), LIMITS).image.size == (24, 16)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("RGBA", (1, 1), (255, 0, 0, 255)), [255, 0, 0]),
        (Image.new("RGBA", (1, 1), (255, 0, 0, 0)), [255, 255, 255]),
        (Image.new("RGBA", (1, 1), (0, 0, 0, 51)), [204, 204, 204]),
        (Image.new("LA", (1, 1), (0, 0)), [255, 255, 255]),
        (Image.new("LA", (1, 1), (9, 255)), [9, 9, 9]),
        (Image.new("L", (1, 1), 77), [77, 77, 77]),
        (Image.new("1", (1, 1), 1), [255, 255, 255]),
        (Image.new("I;16", (1, 1), 0x8001), [128, 128, 128]),
        (Image.new("I;16", (1, 1), 0xFFFF), [255, 255, 255]),
        (Image.new("I;16", (1, 1), 0x00FF), [0, 0, 0]),
    ],
)
def test_a_mode_becomes_rgb(image: Image.Image, expected: list[int]) -> None:
    assert pixels(encode(image)) == [[expected]]


def test_big_endian_grey_of_16_bits_is_scaled_too() -> None:
    image = Image.frombytes("I;16B", (2, 1), b"\x80\x01\x40\x00")

    assert np.asarray(convert_image(image, LIMITS).image).tolist() == [[[128] * 3, [64] * 3]]


def test_a_palette_with_a_transparent_colour_lies_on_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)

    assert pixels(encode(image)) == [[[10, 20, 30], [40, 50, 60]]]
    assert pixels(encode(image, transparency=1)) == [[[10, 20, 30], [255, 255, 255]]]


def test_a_transparent_colour_of_rgb_lies_on_white() -> None:
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (4, 5, 6))

    assert pixels(encode(image, transparency=(4, 5, 6))) == [[[1, 2, 3], [255, 255, 255]]]


def test_cmyk_becomes_rgb() -> None:
    decoded = decode_image(encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), LIMITS)

    red, green, blue = decoded.image.getpixel((4, 4))  # type: ignore[misc]
    assert red > 240
    assert green < 15
    assert blue < 15


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation_is_taken(form: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    data = encode(frames[0], form, save_all=True, append_images=frames[1:], lossless=True)

    assert pixels(data)[0][0] == [255, 0, 0]  # type: ignore[index]


def test_samples_of_32_bits_are_refused() -> None:
    with pytest.raises(UnsupportedMedia, match="samples of 8 or 16 bits"):
        decode_image(encode(Image.new("F", (2, 2)), "TIFF"), LIMITS)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_an_image_that_is_cut_short_is_refused(form: str, share: float) -> None:
    data = encode(picture(64, 64), form)

    with pytest.raises(MediaError) as caught:
        decode_image(data[: max(4, int(len(data) * share))], LIMITS)

    assert caught.value.code in ("broken_media", "unsupported_media")


@pytest.mark.parametrize(
    ("width", "height", "limit"),
    [
        (30_000, 30_000, "at most 40000000 pixels"),
        (12_000, 12_000, "at most 40000000 pixels"),
        (8_000, 8_000, "at most 40000000 pixels"),
        (16_385, 1, "at most 16384 pixels on a side"),
        (1, 16_385, "at most 16384 pixels on a side"),
        (60_000, 60_000, "at most 40000000 pixels"),
        (2**31 - 1, 2**31 - 1, "at most 40000000 pixels"),
    ],
)
def test_a_bomb_is_refused_by_its_header(width: int, height: int, limit: str) -> None:
    data = huge_png(width, height)
    decode_image(png(), LIMITS)
    tracemalloc.start()
    try:
        with pytest.raises(MediaTooLarge, match=limit):
            decode_image(data, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def many_scans(num_scans: int) -> bytes:
    """A small grey JPEG that describes the same coefficients again and again."""

    def segment(marker: int, body: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body

    one_code = bytes([1, *[0] * 15])
    return b"".join(
        (
            b"\xff\xd8",
            segment(0xDB, bytes([0, *[1] * 64])),
            segment(0xC2, struct.pack(">BHHB", 8, 64, 64, 1) + bytes([1, 0x11, 0])),
            segment(0xC4, b"\x00" + one_code + b"\x00"),
            segment(0xC4, b"\x10" + one_code + b"\xe0"),
            segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + bytes(8),
            (segment(0xDA, bytes([1, 1, 0, 1, 1, 0])) + b"\x7f\xfe") * num_scans,
            b"\xff\xd9",
        )
    )


def test_a_small_image_of_many_scans_is_ended_on_its_way() -> None:
    num_calls = 0

    def checkpoint() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 8:
            raise MediaTimeout("decoding", "more time", "less")

    decode_image(many_scans(3), LIMITS, checkpoint=lambda: None)
    with pytest.raises(MediaTimeout):
        decode_image(many_scans(30_000), LIMITS, checkpoint=checkpoint)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("tag", [273, 324, 700])
def test_a_tiff_with_a_long_list_of_numbers_is_refused(order: str, tag: int) -> None:
    count = 2**18 + 1
    numbers = bytes(4 * count)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(numbers))
    tags = [(256, 4, 1, 1), (257, 4, 1, 1), (tag, 4, count, 8)]
    entries = b"".join(struct.pack(f"{order}HHII", *entry) for entry in tags)
    data = head + numbers + struct.pack(f"{order}H", len(tags)) + entries + bytes(4)

    with pytest.raises(MediaTooLarge, match="262145 numbers in a list', expected at most 262144"):
        decode_image(data, LIMITS)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(BrokenMedia):
        decode_image(huge_png(*size), LIMITS)
    with pytest.raises(BrokenMedia, match="at least 1 x 1 pixels"):
        convert_image(Image.new("RGB", size), LIMITS)


def test_limits_are_inclusive() -> None:
    limits = MediaLimits(max_side=24, max_pixels=24 * 16)

    assert decode_image(png(24, 16), limits).image.size == (24, 16)
    with pytest.raises(MediaTooLarge, match="got '25 x 16', expected at most 24 pixels on a side"):
        decode_image(png(25, 16), limits)
    with pytest.raises(MediaTooLarge, match="got '24 x 17', expected at most 384 pixels"):
        decode_image(png(24, 17), limits)


def test_odd_shapes_are_decoded() -> None:
    for size in ((1, 1), (28, 5000), (5000, 3)):
        assert decode_image(encode(Image.new("RGB", size)), LIMITS).image.size == size


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG image"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<svg/>", "an SVG image"),
        (b"<?xml version='1.0'?><a/>", "an XML document"),
        (b"%PDF-1.7\n", "a PDF document"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"  <html><body>not found", "an HTML page"),
        (b"#EXTM3U\nhttp://10.0.0.1/a.ts", "an HLS playlist"),
        (b"\x1f\x8b\x08\0", "a gzip archive"),
        (b"PK\x03\x04", "a ZIP archive"),
        (b"\0\0\x01\0\x01\0", "an icon"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "a HEIC image"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "an MP4 or QuickTime video"),
        (wav(tone()), "WAV audio"),
        (b"hello", "text"),
        (b"\0\1\2\3", "content of an unknown kind"),
        (b"RIFF\0\0\0\0ABCD", "content of an unknown kind"),
    ],
)
def test_what_is_no_image_is_refused_by_name(data: bytes, name: str) -> None:
    with pytest.raises(UnsupportedMedia) as caught:
        decode_image(data, LIMITS, media_type="image/png")

    assert str(caught.value) == (
        f"image: got {name + ' sent as ' + repr('image/png')!r}, "
        "expected a JPEG, PNG, GIF, WebP, AVIF, BMP or TIFF image"
    )


def test_a_wrong_type_is_no_matter_when_the_content_is_an_image() -> None:
    assert decode_image(png(), LIMITS, media_type="image/jpeg").image.size == (24, 16)
    assert decode_image(png(), LIMITS, media_type="application/octet-stream")


def test_no_bytes_are_refused() -> None:
    with pytest.raises(BrokenMedia, match="got '0 bytes'"):
        decode_image(b"", LIMITS)


def test_a_picture_has_the_same_digest_in_every_lossless_file() -> None:
    image = picture()
    digests = {decode_image(encode(image, form), LIMITS).digest for form in ("PNG", "BMP", "TIFF")}

    assert digests == {convert_image(image, LIMITS).digest}
    assert len(digests.pop()) == 32


def test_the_digest_knows_pixels_and_size() -> None:
    images = [
        picture(),
        picture(seed=1),
        Image.new("RGB", (4, 2)),
        Image.new("RGB", (2, 4)),
        Image.new("RGB", (8, 1)),
        Image.new("RGB", (4, 2), (0, 0, 1)),
    ]

    assert len({convert_image(image, LIMITS).digest for image in images}) == len(images)


def test_the_digest_is_that_of_earlier_versions() -> None:
    digest = convert_image(Image.new("RGB", (2, 1), (1, 2, 3)), LIMITS).digest

    assert digest.hex() == DIGEST


DIGEST = "5febd4c5fa726a806aa2c61801e547f690dd9c30a1de091adb370f3b0deab98d"


def test_an_opened_image_is_left_as_it_is() -> None:
    image = Image.new("RGBA", (3, 3), (1, 2, 3, 4))
    before = image.tobytes()
    convert_image(image, LIMITS)

    assert (image.mode, image.tobytes()) == ("RGBA", before)


def test_an_opened_image_that_was_not_loaded_is_checked_too() -> None:
    data = encode(picture(64, 64))
    with Image.open(BytesIO(data[: len(data) // 2])) as image, pytest.raises(BrokenMedia):
        convert_image(image, LIMITS)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(deadline=None)
@given(
    data=st.binary(max_size=64),
    kind=st.sampled_from(
        [
            b"",
            b"\x89PNG\r\n\x1a\n",
            b"\xff\xd8\xff",
            b"GIF89a",
            b"BM",
            b"II*\0",
            b"MM\0*",
            b"RIFF\0\0\0\0WEBP",
        ]
    ),
)
def test_any_bytes_are_decoded_or_refused(data: bytes, kind: bytes) -> None:
    try:
        decode_image(kind + data, LIMITS)
    except MediaError:
        pass
