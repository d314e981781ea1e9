"""A prompt with media, ready for the model: token ids, and what stands at their placeholders.

Plain data, made in a worker thread and read on the model's thread.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from treadle_core.prefix import MediaSpan

Arrays = Mapping[str, NDArray[Any]]
"""What a model's encoder is given, by the names that mlx-vlm uses; read only."""


class PreparedItem(Struct, frozen=True, kw_only=True, eq=False):
    """A media item as the model's encoder takes it.

    Attributes:
        arrays: Its part of what mlx-vlm's processor made.
        placeholder: The token id that stands for it in the prompt.
        num_tokens: How many times.
        digest: Over all of that: decoded pixels after preprocessing with its parameters.
    """

    arrays: Arrays
    placeholder: int
    num_tokens: int
    digest: bytes


class Segment(Struct, frozen=True, kw_only=True):
    """Consecutive placeholders of one item.

    An item has several where its processor writes text between them, such as tiles or timestamps.

    Attributes:
        start: Its first position in the prompt.
        length: Its number of positions.
        item: Which of the prompt's items it shows.
        offset: Which of the item's features stands at ``start``.
        digest: Digest of what the model sees there.
    """

    start: int
    length: int
    item: int
    offset: int
    digest: bytes

    @property
    def end(self) -> int:
        """The position after its last."""
        return self.start + self.length


class EncodedPrompt(Struct, frozen=True, kw_only=True, eq=False):
    """A prompt as the model takes it.

    Attributes:
        tokens: Token ids, a placeholder for each feature of an item.
        segments: Where items stand, in the order of their positions.
        items: The items, in the order of the request; equal ones share their arrays.
        positions: Positions by axis, ``[3, tokens]``, where they are not simply counted.
        delta: What to add to the number of tokens before a later token to get its position.
        blanks: Positions whose embedding is zero.
    """

    tokens: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    items: tuple[PreparedItem, ...] = ()
    positions: NDArray[np.int32] | None = None
    delta: int = 0
    blanks: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of its items; equal ones count once."""
        items = {item.digest: item for item in self.items}.values()
        return sum(array.nbytes for item in items for array in item.arrays.values())

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        """Its items as a key of stored prefixes names them."""
        return tuple(MediaSpan(part.start, part.length, part.digest) for part in self.segments)
