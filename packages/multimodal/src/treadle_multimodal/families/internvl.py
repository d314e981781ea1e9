"""InternVL: an image as tiles and a small copy of the whole, all of them one run of placeholders."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_multimodal.families.base import AmongTokens, Made, Marker, rows_of
from treadle_multimodal.prompt import Arrays
from treadle_multimodal.sources import Kind

TILES = "pixel_values"

MARKER = "<IMG_CONTEXT>"
WORDS = (MARKER, "<image>", "<img>", "</img>")
"""The processor reads the first two alike, and writes the others around an image."""


class InternVl(AmongTokens):
    """Images only.

    Args:
        config: The checkpoint's.
        processor: The checkpoint's, as mlx-vlm loads it.
    """

    def __init__(self, config: Mapping[str, Any], processor: Any) -> None:
        del config
        self._per_tile: int = processor.num_image_token
        placeholder: int = processor.img_context_token_id
        super().__init__({"image": Marker(MARKER, placeholder, WORDS)})

    def split(self, kind: Kind, arrays: Made, tokens: NDArray[Any]) -> list[Arrays]:
        """Tiles by image: there is always something between two of them."""
        where = np.flatnonzero(tokens == self.markers[kind].placeholder)
        runs = np.split(where, np.flatnonzero(np.diff(where) != 1) + 1)
        counts = [len(run) // self._per_tile for run in runs]
        return [{TILES: part} for part in rows_of(arrays, TILES, counts, axis=1)]

    def num_tokens(self, kind: Kind, arrays: Arrays) -> int:
        """As many for each tile."""
        del kind
        return arrays[TILES].shape[1] * self._per_tile
