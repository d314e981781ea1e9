"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches in a row, positions in time, height and width."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_multimodal.families.base import Marker, Placed, rows_of
from treadle_multimodal.prompt import Arrays
from treadle_multimodal.sources import Kind

PIXELS: dict[Kind, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
GRIDS: dict[Kind, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}

Grid = tuple[int, int, int]


class QwenVl:
    """The three families differ in their encoders, and in how frames of a video are written.

    Args:
        config: The checkpoint's.
        processor: The checkpoint's, as mlx-vlm loads it.
    """

    def __init__(self, config: Mapping[str, Any], processor: Any) -> None:
        self._is_third = config["model_type"] == "qwen3_vl"
        self._merge_size: dict[Kind, int] = {
            "image": processor.image_processor.merge_size,
            "video": processor.video_processor.merge_size,
        }
        self._markers: dict[Kind, Marker] = {
            "image": _marker(processor.image_token, processor.image_token_id),
            "video": _marker(processor.video_token, processor.video_token_id),
        }

    @property
    def markers(self) -> Mapping[Kind, Marker]:
        """Images and videos, each between a start and an end."""
        return self._markers

    @property
    def mixes_kinds(self) -> bool:
        """mlx-vlm runs its encoder once for a prompt, except for Qwen3-VL."""
        return self._is_third

    @property
    def counts_axes(self) -> bool:
        """Time, height and width."""
        return True

    def split(self, kind: Kind, arrays: Arrays, tokens: NDArray[Any]) -> list[Arrays]:
        """Patches by item, as many as its grid has."""
        del tokens
        grids = arrays[GRIDS[kind]]
        pixels = rows_of(arrays, PIXELS[kind], [int(grid.prod()) for grid in grids])
        return [
            {PIXELS[kind]: part, GRIDS[kind]: grids[index : index + 1]}
            for index, part in enumerate(pixels)
        ]

    def num_tokens(self, kind: Kind, arrays: Arrays) -> int:
        """One for each square of merged patches."""
        return int(arrays[GRIDS[kind]].prod()) // self._merge_size[kind] ** 2

    def positions(self, num_tokens: int, items: Sequence[Placed]) -> NDArray[np.int32]:
        """Text counts on all axes; an item's tokens stand in a box, and text goes on behind it."""
        found = np.empty((3, num_tokens), dtype=np.int32)
        done = position = 0
        for start, grid in self._boxes(items):
            found[:, done:start] = np.arange(position, position + start - done)
            corner = position + start - done
            box = np.indices(grid).reshape(3, -1)
            done = start + box.shape[1]
            found[:, start:done] = corner + box
            position = corner + max(grid)
        found[:, done:] = np.arange(position, position + num_tokens - done)
        return found

    def blanks(self, tokens: NDArray[Any]) -> NDArray[np.intp]:
        """None."""
        return np.flatnonzero(np.zeros(len(tokens), dtype=bool))

    def _boxes(self, items: Sequence[Placed]) -> Iterator[tuple[int, Grid]]:
        """Boxes of tokens: an image, a video, or one frame of a video where each has its time."""
        for item in items:
            kind: Kind = "image" if GRIDS["image"] in item.arrays else "video"
            merge = self._merge_size[kind]
            frames, height, width = (int(size) for size in item.arrays[GRIDS[kind]][0])
            height, width = height // merge, width // merge
            if kind == "video" and self._is_third:
                for frame in range(frames):
                    yield int(item.where[frame * height * width]), (1, height, width)
            else:
                yield int(item.where[0]), (frames, height, width)


def _marker(token: str, placeholder: int) -> Marker:
    return Marker(f"<|vision_start|>{token}<|vision_end|>", placeholder, (token,))
