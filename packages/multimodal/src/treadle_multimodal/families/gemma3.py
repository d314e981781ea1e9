"""Gemma 3: every image becomes the same number of tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_core import Unsupported
from treadle_multimodal.families.base import AmongTokens, Made, Marker, each_of
from treadle_multimodal.prompt import Arrays
from treadle_multimodal.sources import Kind

PIXELS = "pixel_values"


class Gemma3(AmongTokens):
    """Images only. As in mlx-vlm's own generation, a token sees those before it, in images too.

    Args:
        config: The checkpoint's.
        processor: The checkpoint's, as mlx-vlm loads it.

    Raises:
        Unsupported: Its processor takes crops of images besides the whole.
    """

    def __init__(self, config: Mapping[str, Any], processor: Any) -> None:
        if processor.image_processor.do_pan_and_scan:
            raise Unsupported("Gemma 3 with pan and scan has not been checked")
        self._per_image: int = processor.image_seq_length
        self._pad: int = config.get("pad_token_id") or 0
        words = (processor.boi_token, processor.image_token)
        super().__init__({"image": Marker(processor.boi_token, processor.image_token_id, words)})

    def split(self, kind: Kind, arrays: Made, tokens: NDArray[Any]) -> list[Arrays]:
        """One of the rows each."""
        del kind, tokens
        return [{PIXELS: part} for part in each_of(arrays, PIXELS)]

    def num_tokens(self, kind: Kind, arrays: Arrays) -> int:
        """The same for each image."""
        del kind, arrays
        return self._per_image

    def blanks(self, tokens: NDArray[Any]) -> NDArray[np.intp]:
        """Where mlx-vlm takes a token for padding."""
        return np.flatnonzero(tokens == self._pad)
