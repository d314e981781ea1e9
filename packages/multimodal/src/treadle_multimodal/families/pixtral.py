"""Pixtral and Mistral 3: images of their own sizes, a run of placeholders for each line of patches."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from treadle_core import Unsupported
from treadle_multimodal.families.base import AmongTokens, Made, Marker, each_of
from treadle_multimodal.prompt import Arrays
from treadle_multimodal.sources import Kind

PIXELS = "pixel_values"
SIZES = "image_sizes"

CHECKED_TEXT = "mistral"


class Pixtral(AmongTokens):
    """Images only.

    Args:
        config: The checkpoint's.
        processor: The checkpoint's, as mlx-vlm loads it.

    Raises:
        Unsupported: Its text model is one that scales attention by the place of one row.
    """

    def __init__(self, config: Mapping[str, Any], processor: Any) -> None:
        text = config["text_config"].get("model_type", CHECKED_TEXT)
        if text != CHECKED_TEXT:
            model_type = config["model_type"]
            raise Unsupported(f"{model_type} with text of {text} has not been checked")
        self._square: int = processor.patch_size * processor.spatial_merge_size
        marker = Marker(
            processor.image_token, processor.image_token_id, words=(processor.image_token,)
        )
        super().__init__({"image": marker})

    def split(self, kind: Kind, arrays: Made, tokens: NDArray[Any]) -> list[Arrays]:
        """One of the rows each, without what pads it to the largest of them."""
        del kind, tokens
        pairs = zip(each_of(arrays, PIXELS), each_of(arrays, SIZES), strict=True)
        return [
            {PIXELS: pixels[:, :, : size[0, 0], : size[0, 1]], SIZES: size}
            for pixels, size in pairs
        ]

    def num_tokens(self, kind: Kind, arrays: Arrays) -> int:
        """One for each square of merged patches."""
        del kind
        height, width = arrays[SIZES][0]
        return int(height // self._square) * int(width // self._square)
