"""What a family has to say about its prompts. No MLX: processors' arrays come as numpy."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from treadle_multimodal.prompt import Arrays
from treadle_multimodal.sources import Kind

Made = Mapping[str, NDArray[Any] | list[NDArray[Any]]]
"""What a processor made, by name; a list where items differ in size."""


class Marker(Struct, frozen=True):
    """How the chat template of a family writes one item, before it is expanded.

    Attributes:
        text: What stands in the prompt.
        placeholder: The token id that its expansion consists of.
        words: Texts that no prompt may hold beyond its markers, because they would be expanded or
            read as placeholders.
    """

    text: str
    placeholder: int
    words: tuple[str, ...]


class Placed(Struct, frozen=True, eq=False):
    """An item and the positions of its placeholders.

    Attributes:
        arrays: What the encoder is given.
        where: Positions in the prompt, increasing.
    """

    arrays: Arrays
    where: NDArray[np.intp]


class Hearing(Struct, frozen=True, kw_only=True):
    """What sound a family takes; its processor would cut what is longer, or fail.

    Attributes:
        sample_rate: Samples per second.
        min_samples: Fewest of one clip.
        max_samples: Most of one clip.
        arrays: What its encoder is given, of what the processor makes.
    """

    sample_rate: int
    min_samples: int
    max_samples: int
    arrays: tuple[str, ...]


class Family(Protocol):
    """How one model family lays out media.

    Args:
        config: The checkpoint's.
        processor: The checkpoint's, as mlx-vlm loads it.
    """

    def __init__(self, config: Mapping[str, Any], processor: Any) -> None: ...

    @property
    def markers(self) -> Mapping[Kind, Marker]:
        """Markers by the kinds of media that were checked."""
        ...

    @property
    def mixes_kinds(self) -> bool:
        """Whether one prompt may hold media of different kinds."""
        ...

    @property
    def counts_axes(self) -> bool:
        """Whether a token's position has three axes: time, height and width."""
        ...

    @property
    def channels_first(self) -> bool:
        """Whether its processor takes frames of a video as [channels, height, width]."""
        ...

    @property
    def hearing(self) -> Hearing | None:
        """What sound it takes; None where it takes none."""
        ...

    def split(self, kind: Kind, arrays: Made, tokens: NDArray[Any]) -> list[Arrays]:
        """What a processor made of all images or videos, item by item.

        Args:
            kind: Which.
            arrays: All that the processor made.
            tokens: The prompt's token ids, placeholders included.
        """
        ...

    def num_tokens(self, kind: Kind, arrays: Arrays) -> int:
        """How many placeholders an image or a video has."""
        ...

    def positions(self, num_tokens: int, items: Sequence[Placed]) -> NDArray[np.int32] | None:
        """Positions by axis ``[3, tokens]``; None where the model counts tokens.

        Args:
            num_tokens: Length of the prompt.
            items: The items, in the order of their positions.
        """
        ...

    def blanks(self, tokens: NDArray[Any]) -> NDArray[np.intp]:
        """Positions of a prompt with media whose embedding is zero."""
        ...


class AmongTokens:
    """What families have in common whose models count tokens.

    Args:
        markers: How items are written, by kind.
    """

    counts_axes = False
    mixes_kinds = True
    channels_first = False
    hearing: Hearing | None = None

    def __init__(self, markers: Mapping[Kind, Marker]) -> None:
        self._markers = markers

    @property
    def markers(self) -> Mapping[Kind, Marker]:
        """As given."""
        return self._markers

    def positions(self, num_tokens: int, items: Sequence[Placed]) -> NDArray[np.int32] | None:
        """The model counts tokens."""
        del num_tokens, items
        return None

    def blanks(self, tokens: NDArray[Any]) -> NDArray[np.intp]:
        """None."""
        return no_blanks(tokens)


def no_blanks(tokens: NDArray[Any]) -> NDArray[np.intp]:
    """Of a model that embeds every token."""
    del tokens
    return np.empty(0, dtype=np.intp)


def array_of(arrays: Made, name: str) -> NDArray[Any]:
    """What a processor always makes as one array."""
    found = arrays[name]
    assert not isinstance(found, list), f"{name} is not one array"
    return found


def each_of(arrays: Made, name: str) -> list[NDArray[Any]]:
    """Items of one array or list, each with a first axis of length 1."""
    return [item[None] for item in arrays[name]]


def rows_of(arrays: Made, name: str, counts: Sequence[int], axis: int = 0) -> list[NDArray[Any]]:
    """Consecutive parts of one array, of the given lengths.

    Raises:
        ValueError: They are not all of it.
    """
    whole = array_of(arrays, name)
    if sum(counts) != whole.shape[axis]:
        raise ValueError(f"{name} has {whole.shape[axis]} parts, the items have {sum(counts)}")
    return np.split(whole, np.cumsum(counts)[:-1], axis=axis)
