"""From content parts to media parts."""

from base64 import b64encode
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_core import InvalidRequest
from treadle_multimodal import (
    Base64,
    Bytes,
    DataUri,
    LocalPath,
    MediaOptions,
    MediaPart,
    PilImage,
    Url,
    is_media,
    parse_content,
    parse_part,
    parse_reference,
)
from treadle_multimodal.encoding import decode_base64, decode_data_uri
from treadle_multimodal.errors import MediaError, MediaTooLarge
from treadle_multimodal.sources import describe_source

from .media_files import data_uri, picture, png

URL = Url(url="https://a.example/a.png")
ENCODED = b64encode(png()).decode()


@pytest.mark.parametrize(
    ("part", "kind", "source", "options"),
    [
        ({"type": "image_url", "image_url": {"url": URL.url}}, "image", URL, {}),
        ({"type": "image_url", "image_url": URL.url}, "image", URL, {}),
        (
            {"type": "image_url", "image_url": {"url": URL.url, "detail": "low"}},
            "image",
            URL,
            {"detail": "low"},
        ),
        ({"type": "image", "image": URL.url}, "image", URL, {}),
        ({"type": "image", "image": {"url": URL.url}}, "image", URL, {}),
        ({"type": "input_image", "image_url": URL.url}, "image", URL, {}),
        (
            {"type": "input_image", "image_url": URL.url, "detail": "high"},
            "image",
            URL,
            {"detail": "high"},
        ),
        ({"type": "image", "source": {"type": "url", "url": URL.url}}, "image", URL, {}),
        (
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/PNG", "data": ENCODED},
                "cache_control": {"type": "ephemeral"},
            },
            "image",
            Base64(data=ENCODED, media_type="image/png"),
            {},
        ),
        (
            {"type": "image_url", "image_url": {"url": data_uri(png())}},
            "image",
            DataUri(media_type="image/png", is_base64=True, payload=ENCODED),
            {},
        ),
        ({"type": "image", "image": ENCODED}, "image", Base64(data=ENCODED), {}),
        ({"type": "image", "image": "/a/b.png"}, "image", LocalPath(path="/a/b.png"), {}),
        ({"type": "image", "image": "file:///a/b%20c"}, "image", LocalPath(path="/a/b c"), {}),
        ({"type": "image", "image": "file://localhost/a"}, "image", LocalPath(path="/a"), {}),
        ({"type": "image", "image": b"abc"}, "image", Bytes(data=b"abc"), {}),
        ({"type": "video_url", "video_url": {"url": URL.url}}, "video", URL, {}),
        (
            {"type": "video_url", "video_url": {"url": URL.url, "fps": 1}, "max_frames": 8},
            "video",
            URL,
            {"fps": 1, "max_frames": 8},
        ),
        (
            {"type": "video", "video": URL.url, "fps": 0.5, "max_frames": None},
            "video",
            URL,
            {"fps": 0.5},
        ),
        ({"type": "audio_url", "audio_url": {"url": URL.url}}, "audio", URL, {}),
        ({"type": "audio", "audio": URL.url, "fps": 3}, "audio", URL, {}),
        (
            {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
            "audio",
            Base64(data="UklGRg==", media_type="audio/wav"),
            {},
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "data:audio/wav;base64,UklGRg=="}},
            "audio",
            DataUri(media_type="audio/wav", is_base64=True, payload="UklGRg=="),
            {},
        ),
    ],
)
def test_a_form_is_read(part: Any, kind: Any, source: Any, options: Any) -> None:
    assert is_media(part)
    assert parse_part(part) == MediaPart(kind=kind, source=source, options=MediaOptions(**options))


def test_an_opened_image_is_a_source() -> None:
    image = picture()
    part = parse_part({"type": "image", "image": image})

    assert isinstance(part.source, PilImage)
    assert part.source.image is image


def test_media_are_taken_out_of_content_in_order() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": "/1"},
        "b",
        {"type": "audio", "audio": "/2"},
        {"type": "tool_use"},
        {"type": "video", "video": "/3"},
    ]

    assert [part.kind for part in parse_content(content)] == ["image", "audio", "video"]
    with pytest.raises(MediaError, match=r"messages\[3\]\.content\[1\]\.image: got 7"):
        parse_content([{}, {"type": "image", "image": 7}], "messages[3].content")


@pytest.mark.parametrize(
    ("part", "field", "limit"),
    [
        (None, "part", "an object"),
        ("https://a.example", "part", "an object"),
        ([], "part", "an object"),
        ({}, "part.type", "one of image_url"),
        ({"type": None}, "part.type", "one of image_url"),
        ({"type": 3}, "part.type", "one of image_url"),
        ({"type": "text"}, "part.type", "one of image_url"),
        ({"type": "input_file"}, "part.type", "one of image_url"),
        ({"type": "image_url"}, "part.image_url", "an http, https"),
        ({"type": "image_url", "image_url": None}, "part.image_url", "an http, https"),
        ({"type": "image_url", "image_url": ""}, "part.image_url", "an http, https"),
        ({"type": "image_url", "image_url": {}}, "part.image_url.url", "an http, https"),
        ({"type": "image_url", "image_url": {"url": 5}}, "part.image_url.url", "an http, https"),
        ({"type": "image_url", "image_url": ["a"]}, "part.image_url", "an http, https"),
        ({"type": "input_image", "file_id": "file-1"}, "part.image_url", "an http, https"),
        ({"type": "image", "image": "ftp://a/b"}, "part.image", "an http, https"),
        ({"type": "image", "image": "javascript:x"}, "part.image", "an http, https"),
        ({"type": "image", "image": "a.png"}, "part.image", "an http, https"),
        ({"type": "image", "image": "../a.png"}, "part.image", "an http, https"),
        ({"type": "image", "image": "~/a.png"}, "part.image", "an http, https"),
        ({"type": "image", "image": "C:\\a.png"}, "part.image", "an http, https"),
        ({"type": "image", "image": " https://a"}, "part.image", "an http, https"),
        ({"type": "image", "image": "abcd"}, "part.image", "an http, https"),
        ({"type": "image", "image": "/a\0b"}, "part.image", "an absolute path"),
        ({"type": "image", "image": "file:a"}, "part.image", "an absolute path"),
        ({"type": "image", "image": "file:///a%00"}, "part.image", "an absolute path"),
        ({"type": "image", "image": "file://host/a"}, "part.image", "a file URL without host"),
        ({"type": "image", "image": "file:///a?b"}, "part.image", "a file URL without host"),
        ({"type": "image", "image": "file://[/a"}, "part.image", "a file URL with"),
        ({"type": "image", "image": "data:image/png;base64"}, "part.image", "a data URI"),
        ({"type": "image", "image": f"data:{'a' * 300},"}, "part.image", "a data URI"),
        ({"type": "image", "source": None}, "part.source", "an object"),
        ({"type": "image", "source": {}}, "part.source.type", "base64 or url"),
        ({"type": "image", "source": {"type": "file"}}, "part.source.type", "base64 or url"),
        ({"type": "image", "source": {"type": "url"}}, "part.source.url", "an http or https"),
        ({"type": "image", "source": {"type": "base64"}}, "part.source.data", "base64"),
        (
            {"type": "image", "source": {"type": "base64", "data": "a", "media_type": 1}},
            "part.source.media_type",
            "a media type",
        ),
        (
            {"type": "image_url", "image_url": {"url": "/a", "detail": "best"}},
            "part.detail",
            "one of auto, low, high",
        ),
        ({"type": "video", "video": ["/a", "/b"]}, "part.video", "an http, https"),
        ({"type": "video", "video": "/a", "fps": 0}, "part.fps", "a number from 0.001"),
        ({"type": "video", "video": "/a", "fps": "2"}, "part.fps", "a number from 0.001"),
        ({"type": "video", "video": "/a", "fps": float("nan")}, "part.fps", "a number from"),
        ({"type": "video", "video": "/a", "max_frames": 0}, "part.max_frames", "an integer of"),
        ({"type": "video", "video": "/a", "max_frames": 1.5}, "part.max_frames", "an integer"),
        ({"type": "video", "video": picture()}, "video", "an encoded video file"),
        ({"type": "input_audio"}, "part.input_audio", "an object"),
        ({"type": "input_audio", "input_audio": {}}, "part.input_audio.data", "base64"),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "exe"}},
            "part.input_audio.format",
            "one of wav",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": ["wav"]}},
            "part.input_audio.format",
            "one of wav",
        ),
    ],
)
def test_a_malformed_part_is_refused_by_its_field(part: object, field: str, limit: str) -> None:
    with pytest.raises(MediaError) as caught:
        parse_part(part)

    assert caught.value.code == "invalid_media"
    assert caught.value.field.endswith(field)
    assert caught.value.limit.startswith(limit)


def test_an_error_keeps_no_payload() -> None:
    with pytest.raises(MediaError) as caught:
        parse_part({"type": "image", "image": "x" * 5_000_000 + "!"})

    assert len(str(caught.value.value)) <= 100
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("audio", {"fps": 1.0}),
        ("image", {"max_frames": 3}),
        ("video", {"detail": "low"}),
        ("image", {"fps": 1.0}),
    ],
)
def test_options_of_another_kind_are_refused(kind: Any, options: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"with {kind}|no limit"):
        MediaPart(kind=kind, source=URL, options=MediaOptions(**options))


def test_a_source_is_described_without_its_data() -> None:
    secret = "c2VjcmV0" * 1000
    sources = [
        Base64(data=secret),
        DataUri(media_type="x" * 200, is_base64=True, payload=secret),
        Bytes(data=secret.encode()),
        Url(url="https://a.example/" + "b" * 500),
        LocalPath(path="/" + "b" * 500),
        PilImage(image=picture()),
    ]

    for source in sources:
        assert len(describe_source(source)) < 140
        assert "c2VjcmV0" not in describe_source(source)


@settings(deadline=None)
@given(data=st.binary(max_size=300), breaks=st.integers(1, 80))
def test_base64_comes_back_whatever_its_line_breaks(data: bytes, breaks: int) -> None:
    text = b64encode(data).decode()
    lines = "\r\n".join(text[at : at + breaks] for at in range(0, len(text), breaks))

    assert decode_base64(text, len(data)) == data
    assert decode_base64(lines, 1000) == data
    if data:
        with pytest.raises(MediaTooLarge):
            decode_base64(text, len(data) - 1)


@settings(deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_is_base64_or_refused(text: str) -> None:
    with suppress(MediaError):
        assert isinstance(decode_base64(text, 1000), bytes)


@pytest.mark.parametrize(
    "text", ["A", "AA", "AAA", "AA=A", "A===", "AA==AA==", "_-_-", "é", "AA=="[:3]]
)
def test_it_is_not_base64(text: str) -> None:
    with pytest.raises(MediaError, match="base64 with padding"):
        decode_base64(text, 1000)


@settings(deadline=None)
@given(data=st.binary(max_size=100), media_type=st.sampled_from(["", "image/png", "IMAGE/PNG"]))
def test_a_data_uri_comes_back(data: bytes, media_type: str) -> None:
    source = parse_reference(data_uri(data, media_type), "image")

    assert isinstance(source, DataUri)
    assert source.media_type == media_type.lower()
    assert decode_data_uri(source, 100) == data


def test_a_data_uri_may_be_percent_encoded() -> None:
    source = parse_reference("DATA:image/png;charset=x,%89PNG%00", "image")

    assert isinstance(source, DataUri)
    assert decode_data_uri(source, 5) == b"\x89PNG\0"
    with pytest.raises(MediaTooLarge, match="got 5, expected at most 4"):
        decode_data_uri(source, 4)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)

MEMBERS = st.sampled_from(
    ["image_url", "image", "source", "input_audio", "video", "url", "data", "fps", "format"]
)

REFERENCES = st.sampled_from(["https://a", "data:,", "data:;base64,", "file:///a", "/a", "file:"])

TYPES = ["image_url", "image", "input_image", "video_url", "video", "audio_url", "audio"]


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from([*TYPES, "input_audio", "text"]),
    members=st.dictionaries(
        MEMBERS, JSON | REFERENCES | st.dictionaries(MEMBERS, JSON | REFERENCES), max_size=4
    ),
)
def test_any_part_is_read_or_refused(kind: str, members: dict[str, Any]) -> None:
    with suppress(InvalidRequest):
        assert parse_part({**members, "type": kind}).kind in kind


@settings(deadline=None)
@given(text=st.text(max_size=60) | st.from_regex(r"(file|data|https?|x-y):.{0,40}", fullmatch=True))
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    with suppress(MediaError):
        source = parse_reference(text, "image")
        assert not isinstance(source, LocalPath) or source.path.startswith("/")
