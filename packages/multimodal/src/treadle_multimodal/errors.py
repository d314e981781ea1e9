"""What can be wrong with media, one class per situation a caller handles differently.

    InvalidRequest
    └── MediaError              the content part is malformed, or there are too many
        ├── MediaForbidden      policy: an address, host, port, scheme or path that is not allowed
        ├── MediaTooLarge       a limit of bytes, pixels, frames or seconds
        ├── UnsupportedMedia    a kind of file that is not decoded
        ├── BrokenMedia         a kind of file that is decoded, but not this one
        └── MediaUnavailable    it could not be fetched; the same call may work later
            └── MediaTimeout    a time limit passed

Each names the field, the value and what would have been accepted; once a request's media are
loaded together, also the item.
"""

from typing import Self

from msgspec import Struct

from treadle_core import InvalidRequest

MAX_VALUE = 100


class Item(Struct, frozen=True, kw_only=True):
    """One media item of a request, as an error names it.

    Attributes:
        index: Its position among the request's media, from 0.
        kind: Image, video or audio.
        source: Where it comes from, shortened.
        field: What the caller calls it; empty if by its position.
    """

    index: int
    kind: str
    source: str
    field: str = ""


class MediaError(InvalidRequest):
    """A media item cannot be used.

    Args:
        field: Name of the field or limit.
        value: The offending value.
        limit: What would have been accepted, in words.
        item: Which item of the request; None where only one is known.
    """

    code = "invalid_media"

    def __init__(self, field: str, value: object, limit: str, item: Item | None = None) -> None:
        called = "" if item is None else item.field
        where = "" if item is None else called or f"media[{item.index}]"
        shown = "" if item is None else f"{where} ({item.kind} {item.source}) "
        super().__init__(f"{shown}{field}", _cut(value), limit)
        self.field = called or field
        self.item = item
        self._name = field

    def of(self, item: Item) -> Self:
        """The same error, naming ``item``."""
        return type(self)(self._name, self.value, self.limit, item)


class MediaForbidden(MediaError):
    """The policy does not allow it; nothing was connected to or opened."""

    code = "media_forbidden"


class MediaTooLarge(MediaError):
    """A limit of bytes, pixels, frames or seconds is passed."""

    code = "media_too_large"


class UnsupportedMedia(MediaError):
    """The content is a kind of file that is not decoded here."""

    code = "unsupported_media"


class BrokenMedia(MediaError):
    """The content is empty, cut short or damaged."""

    code = "broken_media"


class MediaUnavailable(MediaError):
    """A remote item could not be fetched."""

    code = "media_unavailable"
    retryable = True


class MediaTimeout(MediaUnavailable):
    """Fetching or decoding took longer than its limit."""

    code = "media_timeout"


def _cut(value: object) -> object:
    """The value, or the beginning of a long one: a payload is neither kept nor written out."""
    return value[:MAX_VALUE] if isinstance(value, str | bytes) else value
