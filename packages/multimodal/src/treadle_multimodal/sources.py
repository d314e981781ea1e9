"""Where media come from: a closed union of plain data. Nothing is opened or decoded here."""

from typing import Literal, assert_never

from msgspec import Struct
from PIL import Image

from treadle_core.errors import shorten
from treadle_core.request import check_float, check_int
from treadle_multimodal.errors import MediaError

Kind = Literal["image", "video", "audio"]

DETAILS = ("auto", "low", "high")


class Url(Struct, frozen=True, kw_only=True, tag="url"):
    """A remote file.

    Attributes:
        url: With scheme http or https; the policy says which hosts and schemes are fetched.
    """

    url: str


class DataUri(Struct, frozen=True, kw_only=True, tag="data_uri"):
    """A file inside a ``data:`` URI.

    Attributes:
        media_type: As the URI says; empty where it does not.
        is_base64: Whether the payload is base64; otherwise it is percent-encoded.
        payload: What follows the comma.
    """

    media_type: str
    is_base64: bool
    payload: str


class Base64(Struct, frozen=True, kw_only=True, tag="base64"):
    """A file in base64.

    Attributes:
        data: With padding; white space is ignored.
        media_type: As the caller says; empty where it does not.
    """

    data: str
    media_type: str = ""


class Bytes(Struct, frozen=True, kw_only=True, tag="bytes"):
    """A file in memory.

    Attributes:
        data: The encoded file.
        media_type: As the caller says; empty where it does not.
    """

    data: bytes
    media_type: str = ""


class PilImage(Struct, frozen=True, kw_only=True, tag="pil_image"):
    """An image that the caller opened; it is read, never changed, but lazily loaded.

    Attributes:
        image: Not to be changed until it was loaded.
    """

    image: Image.Image


class LocalPath(Struct, frozen=True, kw_only=True, tag="local_path"):
    """A file of the machine that Treadle runs on.

    Attributes:
        path: Absolute; read only where its directory is allowed.
    """

    path: str


Source = Url | DataUri | Base64 | Bytes | PilImage | LocalPath


class MediaOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller asks for about one item; None leaves it to the configuration.

    Attributes:
        detail: Of an image: how finely it is looked at.
        fps: Of a video: frames taken per second.
        max_frames: Of a video: most frames taken; then they are spread evenly.
    """

    detail: Literal["auto", "low", "high"] | None = None
    fps: float | None = None
    max_frames: int | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        if self.detail is not None and self.detail not in DETAILS:
            raise MediaError("detail", self.detail, f"one of {', '.join(DETAILS)}")
        if self.fps is not None:
            check_float("fps", self.fps, 0.001, 240.0)
        if self.max_frames is not None:
            check_int("max_frames", self.max_frames, 1)


class MediaPart(Struct, frozen=True, kw_only=True):
    """One media item of a request.

    Attributes:
        kind: What it must turn out to be.
        source: Where it comes from.
        options: What the caller asks for.
    """

    kind: Kind
    source: Source
    options: MediaOptions = MediaOptions()

    def __post_init__(self) -> None:
        """Check that source and options fit the kind.

        Raises:
            MediaError: They do not.
        """
        if self.kind != "image" and isinstance(self.source, PilImage):
            raise MediaError(self.kind, self.source.image, f"an encoded {self.kind} file")
        if self.kind != "image" and self.options.detail is not None:
            raise MediaError("detail", self.options.detail, f"no detail with {self.kind}")
        if self.kind != "video" and self.options.fps is not None:
            raise MediaError("fps", self.options.fps, f"no fps with {self.kind}")
        if self.kind != "video" and self.options.max_frames is not None:
            raise MediaError("max_frames", self.options.max_frames, f"no limit with {self.kind}")


def describe_source(source: Source) -> str:
    """A source in a few words, without its data."""
    match source:
        case Url(url=url):
            return shorten(url)
        case DataUri(media_type=media_type, payload=payload):
            return f"in a data URI of {len(payload)} characters ({shorten(media_type)})"
        case Base64(data=data):
            return f"in {len(data)} characters of base64"
        case Bytes(data=data):
            return f"in {len(data)} bytes"
        case PilImage(image=image):
            return f"opened by the caller, {image.width} x {image.height}"
        case LocalPath(path=path):
            return shorten(path)
        case _:
            assert_never(source)
