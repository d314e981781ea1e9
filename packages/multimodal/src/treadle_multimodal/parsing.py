"""From the content parts of the OpenAI and Anthropic forms to media parts. Pure functions.

Accepted, with ``REF`` a string or an object with ``url``:

    {"type": "image_url", "image_url": REF}      also video_url, audio_url
    {"type": "image", "image": REF}              also video, audio; in Python also bytes or an image
    {"type": "image", "source": {...}}           base64 with media_type and data, or url
    {"type": "input_image", "image_url": REF}
    {"type": "input_audio", "input_audio": {"data": ..., "format": ...}}

A string is an http(s), ``data:`` or ``file:`` URL, an absolute path, or at least 64 characters of
base64. ``detail``, ``fps`` and ``max_frames`` may stand in the part or in the object; other members
of a part are not looked at.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from PIL import Image

from treadle_core import InvalidRequest
from treadle_multimodal.errors import MediaError
from treadle_multimodal.sources import (
    Base64,
    Bytes,
    DataUri,
    Kind,
    LocalPath,
    MediaOptions,
    MediaPart,
    PilImage,
    Source,
    Url,
)

OPTIONS: dict[Kind, tuple[str, ...]] = {
    "image": ("detail",),
    "video": ("fps", "max_frames"),
    "audio": (),
}

AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "m4a", "mp4", "aac", "webm")

MAX_HEADER = 256

REFERENCE = "an http, https, data or file URL, an absolute path, or base64"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_BASE64 = re.compile(r"[A-Za-z0-9+/]{62,}={0,2}")

_Members = Mapping[str, object]


def is_media(part: object) -> bool:
    """Whether a content part is one that :func:`parse_part` reads."""
    return isinstance(part, Mapping) and cast("_Members", part).get("type") in _FORMS


def parse_content(content: Iterable[object], field: str = "content") -> tuple[MediaPart, ...]:
    """The media among content parts, in order; other parts are left out.

    Raises:
        InvalidRequest: A media part is malformed; the field names it.
    """
    return tuple(
        parse_part(part, f"{field}[{index}]")
        for index, part in enumerate(content)
        if is_media(part)
    )


def parse_part(part: object, field: str = "part") -> MediaPart:
    """One content part as a media part.

    Args:
        part: An object of the request.
        field: What to call it in errors.

    Raises:
        InvalidRequest: It is malformed; the field names the member.
    """
    members = _members(part, field)
    name = members.get("type")
    form = _FORMS.get(name) if isinstance(name, str) else None
    if form is None:
        raise MediaError(f"{field}.type", name, f"one of {', '.join(_FORMS)}")
    return form(members, field)


def parse_reference(text: str, field: str) -> Source:
    """A string as a source; nothing is fetched, opened or decoded.

    Raises:
        MediaError: It is none of the accepted forms.
    """
    scheme = _SCHEME.match(text)
    match scheme and scheme[1].lower():
        case "data":
            return parse_data_uri(text, field)
        case "http" | "https":
            return Url(url=text)
        case "file":
            return _parse_file_url(text, field)
        case None:
            return _parse_bare(text, field)
        case _:
            raise MediaError(field, text, REFERENCE)


def parse_data_uri(text: str, field: str) -> DataUri:
    """A ``data:`` URI, its payload still encoded.

    Raises:
        MediaError: It has no comma, or what stands before it is too long.
    """
    header, comma, payload = text[len("data:") :].partition(",")
    if not comma or len(header) > MAX_HEADER:
        raise MediaError(field, text, "a data URI: data:<type>;base64,<data>")
    media_type, *parameters = (word.strip().lower() for word in header.split(";"))
    return DataUri(media_type=media_type, is_base64="base64" in parameters, payload=payload)


def _parse_file_url(text: str, field: str) -> LocalPath:
    try:
        parts = urlsplit(text)
    except ValueError:
        raise MediaError(field, text, "a file URL with an absolute path") from None
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise MediaError(field, text, "a file URL without host, query and fragment")
    return _local_path(path, field)


def _parse_bare(text: str, field: str) -> Source:
    # A JPEG in base64 begins with a slash, so the longer look comes first.
    if len(text) % 4 == 0 and _BASE64.fullmatch(text):
        return Base64(data=text)
    if not text.startswith("/"):
        raise MediaError(field, text, REFERENCE)
    return _local_path(text, field)


def _local_path(path: str, field: str) -> LocalPath:
    if not path.startswith("/") or "\0" in path:
        raise MediaError(field, path, "an absolute path")
    return LocalPath(path=path)


def _parse_named(kind: Kind, key: str) -> Callable[[_Members, str], MediaPart]:
    """A form that carries a reference under ``key``."""

    def parse(part: _Members, field: str) -> MediaPart:
        value, where = part.get(key), f"{field}.{key}"
        if not isinstance(value, Mapping):
            return _media_part(kind, _parse_value(value, where), (part,), field)
        inner = cast("_Members", value)
        source = _parse_value(inner.get("url"), f"{where}.url")
        return _media_part(kind, source, (inner, part), field)

    return parse


def _parse_plain(kind: Kind) -> Callable[[_Members, str], MediaPart]:
    """A form named like its kind: with a source object, or else with a reference."""
    named = _parse_named(kind, kind)

    def parse(part: _Members, field: str) -> MediaPart:
        if "source" not in part:
            return named(part, field)
        source = _parse_source(part["source"], f"{field}.source")
        return _media_part(kind, source, (part,), field)

    return parse


def _parse_input_audio(part: _Members, field: str) -> MediaPart:
    where = f"{field}.input_audio"
    members = _members(part.get("input_audio"), where)
    data = _text(members.get("data"), f"{where}.data", "base64")
    form = members.get("format")
    if form is not None and form not in AUDIO_FORMATS:
        raise MediaError(f"{where}.format", form, f"one of {', '.join(AUDIO_FORMATS)}")
    source = Base64(data=data, media_type="" if form is None else f"audio/{form}")
    if data.startswith("data:"):
        return MediaPart(kind="audio", source=parse_data_uri(data, f"{where}.data"))
    return MediaPart(kind="audio", source=source)


def _parse_source(value: object, field: str) -> Source:
    """The source object of the Anthropic form."""
    members = _members(value, field)
    match members.get("type"):
        case "base64":
            data = _text(members.get("data"), f"{field}.data", "base64")
            media_type = members.get("media_type", "")
            if not isinstance(media_type, str):
                raise MediaError(f"{field}.media_type", media_type, "a media type")
            return Base64(data=data, media_type=media_type.lower())
        case "url":
            url = _text(members.get("url"), f"{field}.url", "an http or https URL")
            return parse_reference(url, f"{field}.url")
        case other:
            raise MediaError(f"{field}.type", other, "base64 or url")


def _parse_value(value: object, field: str) -> Source:
    match value:
        case str() if value:
            return parse_reference(value, field)
        case bytes():
            return Bytes(data=value)
        case Image.Image():
            return PilImage(image=value)
        case _:
            raise MediaError(field, value, REFERENCE)


def _media_part(kind: Kind, source: Source, places: tuple[_Members, ...], field: str) -> MediaPart:
    """A part with the kind's options, taken from the first place that has them."""
    found: dict[str, Any] = {}
    for name in OPTIONS[kind]:
        values = [place[name] for place in places if place.get(name) is not None]
        if values:
            found[name] = values[0]
    try:
        return MediaPart(kind=kind, source=source, options=MediaOptions(**found))
    except InvalidRequest as error:
        raise MediaError(f"{field}.{error.field}", error.value, error.limit) from None


def _members(value: object, field: str) -> _Members:
    if not isinstance(value, Mapping):
        raise MediaError(field, value, "an object")
    return cast("_Members", value)


def _text(value: object, field: str, limit: str) -> str:
    if not isinstance(value, str) or not value:
        raise MediaError(field, value, limit)
    return value


_FORMS: dict[str, Callable[[_Members, str], MediaPart]] = {
    "image_url": _parse_named("image", "image_url"),
    "image": _parse_plain("image"),
    "input_image": _parse_named("image", "image_url"),
    "video_url": _parse_named("video", "video_url"),
    "video": _parse_plain("video"),
    "audio_url": _parse_named("audio", "audio_url"),
    "audio": _parse_plain("audio"),
    "input_audio": _parse_input_audio,
}
