"""SmolVLM and Idefics 3: an image as tiles and a small copy of the whole, each a run of placeholders."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_core import Unsupported
from treadle_multimodal.families.base import AmongTokens, Made, Marker, rows_of
from treadle_multimodal.prompt import Arrays
from treadle_multimodal.sources import Kind

TILES = ("pixel_values", "pixel_attention_mask")


class SmolVlm(AmongTokens):
    """Images only.

    Args:
        config: The checkpoint's.
        processor: The checkpoint's, as mlx-vlm loads it.

    Raises:
        Unsupported: Its processor does not cut images into tiles of one size.
    """

    def __init__(self, config: Mapping[str, Any], processor: Any) -> None:
        if not processor.image_processor.do_image_splitting:
            raise Unsupported("SmolVLM without image splitting has not been checked")
        placeholder: int = processor.image_token_id
        self._per_tile: int = processor.image_seq_len
        is_smol = config["model_type"] == "smolvlm"
        whole: str = processor.global_image_token if is_smol else processor.global_image_tag
        self._whole: int = processor.tokenizer.convert_tokens_to_ids(whole)
        words = (processor.image_token, whole)
        super().__init__({"image": Marker(processor.image_token, placeholder, words)})

    def split(self, kind: Kind, arrays: Made, tokens: NDArray[Any]) -> list[Arrays]:
        """Tiles by image: each image ends with the small copy of the whole."""
        begins = np.flatnonzero(tokens == self.markers[kind].placeholder)[:: self._per_tile]
        ends = np.flatnonzero(tokens[begins - 1] == self._whole) + 1
        counts = [int(count) for count in np.diff(ends, prepend=0)]
        parts = zip(*(rows_of(arrays, name, counts, axis=1) for name in TILES), strict=True)
        return [dict(zip(TILES, part, strict=True)) for part in parts]

    def num_tokens(self, kind: Kind, arrays: Arrays) -> int:
        """As many for each tile."""
        del kind
        return arrays[TILES[0]].shape[1] * self._per_tile
