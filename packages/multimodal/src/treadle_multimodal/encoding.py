"""From the encoded payloads of a request to bytes, sizes checked before anything is decoded."""

from base64 import b64decode
from urllib.parse import unquote_to_bytes

from treadle_multimodal.errors import MediaError, MediaTooLarge
from treadle_multimodal.sources import DataUri


def decode_base64(text: str, max_bytes: int) -> bytes:
    """The bytes of padded base64; white space between characters is ignored.

    Raises:
        MediaTooLarge: There are more than ``max_bytes``; nothing was decoded.
        MediaError: It is not base64.
    """
    # Before the text is copied: more white space than this is not a way to write base64.
    if len(text) > 2 * max_bytes + 8:
        raise MediaTooLarge("bytes", f"{len(text)} characters", f"base64 of at most {max_bytes}")
    compact = "".join(text.split())
    padding = len(compact) - len(compact.rstrip("="))
    check_bytes(len(compact) * 3 // 4 - min(padding, 2), max_bytes)
    try:
        return b64decode(compact, validate=True)
    except ValueError:
        raise MediaError("data", text, "base64 with padding") from None


def decode_data_uri(uri: DataUri, max_bytes: int) -> bytes:
    """The bytes of a data URI.

    Raises:
        MediaTooLarge: There are more than ``max_bytes``.
        MediaError: It is not base64, where it says so.
    """
    if uri.is_base64:
        return decode_base64(uri.payload, max_bytes)
    check_bytes(len(uri.payload) // 3, max_bytes)
    data = unquote_to_bytes(uri.payload)
    check_bytes(len(data), max_bytes)
    return data


def check_bytes(num_bytes: int, max_bytes: int) -> None:
    """Raise MediaTooLarge unless ``num_bytes`` fit."""
    if num_bytes > max_bytes:
        raise MediaTooLarge("bytes", num_bytes, f"at most {max_bytes}")
