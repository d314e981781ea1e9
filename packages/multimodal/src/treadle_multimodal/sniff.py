"""What kind of file some bytes are, by their content: what a caller or server says is not trusted."""

from msgspec import Struct

from treadle_core.errors import shorten
from treadle_multimodal.errors import BrokenMedia, UnsupportedMedia
from treadle_multimodal.sources import Kind

SUPPORTED: dict[Kind, str] = {
    "image": "a JPEG, PNG, GIF, WebP, AVIF, BMP or TIFF image",
    "video": "an MP4, QuickTime, WebM, Matroska or AVI video",
    "audio": "WAV, MP3, FLAC, Ogg, AAC, M4A, MP4, WebM or Matroska audio",
}

NAME_BYTES = 1024


class FileType(Struct, frozen=True, kw_only=True):
    """A kind of file.

    Attributes:
        name: In words, for people.
        kinds: As what it may be used.
        reader: Pillow's format, or FFmpeg's demuxer.
    """

    name: str
    kinds: frozenset[Kind] = frozenset()
    reader: str = ""


def _image(name: str, reader: str) -> FileType:
    return FileType(name=name, kinds=frozenset({"image"}), reader=reader)


def _stream(name: str, reader: str, *kinds: Kind) -> FileType:
    return FileType(name=name, kinds=frozenset(kinds), reader=reader)


AVIF = _image("an AVIF image", "AVIF")
HEIC = FileType(name="a HEIC image")
M4A = _stream("M4A audio", "mov", "audio")
MP4 = _stream("an MP4 or QuickTime video", "mov", "video", "audio")
WAV = _stream("WAV audio", "wav", "audio")
WEBP = _image("a WebP image", "WEBP")
AVI = _stream("an AVI video", "avi", "video")
MP3 = _stream("MP3 audio", "mp3", "audio")
AAC = _stream("AAC audio", "aac", "audio")
UNKNOWN = FileType(name="content of an unknown kind")

BRANDS = {
    b"avif": AVIF,
    b"avis": AVIF,
    b"heic": HEIC,
    b"heix": HEIC,
    b"hevc": HEIC,
    b"mif1": HEIC,
    b"msf1": HEIC,
    b"M4A ": M4A,
    b"M4B ": M4A,
}

RIFF_FORMS = {b"WAVE": WAV, b"WEBP": WEBP, b"AVI ": AVI}

BEGINNINGS = (
    (b"\xff\xd8\xff", _image("a JPEG image", "JPEG")),
    (b"\x89PNG\r\n\x1a\n", _image("a PNG image", "PNG")),
    (b"GIF87a", _image("a GIF image", "GIF")),
    (b"GIF89a", _image("a GIF image", "GIF")),
    (b"BM", _image("a BMP image", "BMP")),
    (b"II*\0", _image("a TIFF image", "TIFF")),
    (b"MM\0*", _image("a TIFF image", "TIFF")),
    (b"\x1aE\xdf\xa3", _stream("a WebM or Matroska video", "matroska", "video", "audio")),
    (b"OggS", _stream("Ogg audio", "ogg", "audio")),
    (b"fLaC", _stream("FLAC audio", "flac", "audio")),
    (b"ID3", MP3),
    (b"%PDF-", FileType(name="a PDF document")),
    (b"\x1f\x8b", FileType(name="a gzip archive")),
    (b"PK\x03\x04", FileType(name="a ZIP archive")),
    (b"\0\0\x01\0", FileType(name="an icon")),
)

TEXTS = (
    (b"<svg", FileType(name="an SVG image")),
    (b"<!doctype html", FileType(name="an HTML page")),
    (b"<html", FileType(name="an HTML page")),
    (b"#extm3u", FileType(name="an HLS playlist")),
    (b"<?xml", FileType(name="an XML document")),
)


def sniff(data: bytes) -> FileType:
    """The kind of file that ``data`` is, as far as its first bytes tell."""
    for beginning, file_type in BEGINNINGS:
        if data.startswith(beginning):
            return file_type
    if data[4:8] == b"ftyp":
        return BRANDS.get(data[8:12], MP4)
    if data[:4] == b"RIFF":
        return RIFF_FORMS.get(data[8:12], UNKNOWN)
    return _sniff_frames(data) or _sniff_text(data[:NAME_BYTES])


def check_type(data: bytes, kind: Kind, media_type: str = "") -> FileType:
    """The kind of file, which can be used as ``kind``.

    Args:
        data: The file.
        kind: As what it is wanted.
        media_type: As a caller or server says; only errors show it.

    Raises:
        BrokenMedia: There are no bytes.
        UnsupportedMedia: It cannot be used as ``kind``.
    """
    if not data:
        raise BrokenMedia(kind, "0 bytes", SUPPORTED[kind])
    file_type = sniff(data)
    if kind not in file_type.kinds:
        said = f" sent as {shorten(media_type)}" if media_type else ""
        raise UnsupportedMedia(kind, file_type.name + said, SUPPORTED[kind])
    return file_type


def _sniff_frames(data: bytes) -> FileType | None:
    """Audio that begins with a frame: eleven or twelve set bits, then the layer."""
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return None
    version, layer = data[1] >> 3 & 3, data[1] >> 1 & 3
    if layer == 0:
        return AAC if data[1] & 0xF0 == 0xF0 else None
    return MP3 if version != 1 else None


def _sniff_text(beginning: bytes) -> FileType:
    text = beginning.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<?xml", b"<!--", b"<!doctype svg")) and b"<svg" in text:
        return TEXTS[0][1]
    for word, file_type in TEXTS:
        if text.startswith(word):
            return file_type
    if text and all(byte >= 0x20 or byte in b"\t\r\n" for byte in text):
        return FileType(name="text")
    return UNKNOWN
