"""What a family has to say about its prompts. No MLX: processors' arrays come as numpy."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from treadle_multimodal.prompt import Arrays
from treadle_multimodal.sources import Kind


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

    def split(self, kind: Kind, arrays: Arrays, tokens: NDArray[Any]) -> list[Arrays]:
        """What a processor made of all items of a kind, item by item.

        Args:
            kind: Which.
            arrays: All that the processor made.
            tokens: The prompt's token ids, placeholders included.
        """
        ...

    def num_tokens(self, kind: Kind, arrays: Arrays) -> int:
        """How many placeholders an item has."""
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


class ImagesAmongTokens:
    """What families have in common that take images alone, and whose models count tokens.

    Args:
        marker: How an image is written.
    """

    def __init__(self, marker: Marker) -> None:
        self._marker = marker

    @property
    def markers(self) -> Mapping[Kind, Marker]:
        """Images."""
        return {"image": self._marker}

    @property
    def mixes_kinds(self) -> bool:
        """There is one."""
        return False

    @property
    def counts_axes(self) -> bool:
        """It counts tokens."""
        return False

    def positions(self, num_tokens: int, items: Sequence[Placed]) -> NDArray[np.int32] | None:
        """The model counts tokens."""
        del num_tokens, items
        return None


def rows_of(arrays: Arrays, name: str, counts: Sequence[int], axis: int = 0) -> list[NDArray[Any]]:
    """Consecutive parts of one array, of the given lengths.

    Raises:
        ValueError: They are not all of it.
    """
    whole = arrays[name]
    if sum(counts) != whole.shape[axis]:
        raise ValueError(f"{name} has {whole.shape[axis]} parts, the items have {sum(counts)}")
    return np.split(whole, np.cumsum(counts)[:-1], axis=axis)
