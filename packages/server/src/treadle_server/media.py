"""What the server needs of whoever understands images, videos and audio; none is needed for text.

The composition root provides it once the model is loaded, because it depends on the model.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from msgspec import Struct

from treadle_core.prefix import MediaSpan


class MediaPrompt(Protocol):
    """A prompt with media, as the model takes it."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids, those that stand for media included."""
        ...

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        """Where media stand."""
        ...


class FeatureFigures(Struct, frozen=True, kw_only=True):
    """What an encoder made and is kept for later requests.

    Attributes:
        hits: Look-ups that found something.
        misses: Look-ups that did not.
        evicted: Entries given up for room.
        refused: Entries larger than the whole cache.
        num_items: Entries now.
        used_bytes: Their bytes.
        capacity_bytes: Most bytes.
    """

    hits: int
    misses: int
    evicted: int
    refused: int
    num_items: int
    used_bytes: int
    capacity_bytes: int


def no_features() -> FeatureFigures | None:
    """What is told where nothing is known of them."""
    return None


class MediaInput(Struct, frozen=True, kw_only=True):
    """How the media of requests reach the model.

    Attributes:
        kinds: What the model takes, among ``image``, ``video`` and ``audio``.
        parse: A content part of a request as what ``prepare`` takes; the second argument is its name
            in errors. Raises InvalidRequest. Any thread may call it.
        prepare: A rendered chat with its media as a prompt: waits for memory, fetches, decodes and
            encodes, in other threads than the event loop's. The second argument is what was
            parsed, in order, the third names it in errors. Raises InvalidRequest. Nothing of it
            runs any more after it has ended, by cancellation too. The prompt's memory is given to
            others when the body ends.
        features: What is kept of what the encoder made. Any thread may call it.
    """

    kinds: frozenset[str]
    parse: Callable[[Mapping[str, object], str], Any]
    prepare: Callable[[str, Sequence[Any], Sequence[str]], AbstractAsyncContextManager[MediaPrompt]]
    features: Callable[[], FeatureFigures | None] = no_features


class NoMedia(Struct, frozen=True, kw_only=True):
    """The model is used for text alone.

    Attributes:
        why: The reason, in words.
    """

    why: str = "the model takes text only"


Media = MediaInput | NoMedia


def text_only() -> Media:
    """What is known of a model of which nothing else is said."""
    return NoMedia()
