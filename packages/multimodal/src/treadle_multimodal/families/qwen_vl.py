"""Qwen-VL and Qwen-Omni: patches in a row, positions in time, height and width."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_multimodal.families.base import (
    Hearing,
    Made,
    Marker,
    Placed,
    array_of,
    no_blanks,
    rows_of,
)
from treadle_multimodal.prompt import Arrays
from treadle_multimodal.sources import Kind

PIXELS: dict[Kind, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
GRIDS: dict[Kind, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}

FRAMES_APART = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
"""Models that see each frame with its time, in a box of its own."""

SOUND = ("input_features", "feature_attention_mask")

Grid = tuple[int, int, int]


class QwenVl:
    """The families differ in their encoders, and in how frames of a video are written.

    Args:
        config: The checkpoint's.
        processor: The checkpoint's, as mlx-vlm loads it.
    """

    counts_axes = True
    channels_first = False

    def __init__(self, config: Mapping[str, Any], processor: Any) -> None:
        model_type = config["model_type"]
        ids = config.get("thinker_config", config)
        self._merge_size: dict[Kind, int] = {
            "image": processor.image_processor.merge_size,
            "video": processor.video_processor.merge_size,
        }
        self._markers: dict[Kind, Marker] = {
            "image": _marker("vision", processor.image_token, ids["image_token_id"]),
            "video": _marker("vision", processor.video_token, ids["video_token_id"]),
        }
        self._frames_apart = model_type in FRAMES_APART
        # mlx-vlm's encoders of the others run once for a prompt.
        self.mixes_kinds = model_type in ("qwen3_vl", "qwen3_omni_moe")
        self.hearing: Hearing | None = None
        if model_type == "qwen3_omni_moe":
            marker = _marker("audio", processor.audio_token, ids["audio_token_id"])
            self._markers["audio"] = marker
            self.hearing = _hearing(processor.feature_extractor)

    @property
    def markers(self) -> Mapping[Kind, Marker]:
        """Each item between a start and an end."""
        return self._markers

    def split(self, kind: Kind, arrays: Made, tokens: NDArray[Any]) -> list[Arrays]:
        """Patches by item, as many as its grid has."""
        del tokens
        grids = array_of(arrays, GRIDS[kind])
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
        return no_blanks(tokens)

    def _boxes(self, items: Sequence[Placed]) -> Iterator[tuple[int, Grid]]:
        """Boxes of tokens: an image, a video, or one frame of a video where each has its time."""
        for item in items:
            if SOUND[0] in item.arrays:
                continue  # counts like text
            kind: Kind = "image" if GRIDS["image"] in item.arrays else "video"
            merge = self._merge_size[kind]
            frames, height, width = (int(size) for size in item.arrays[GRIDS[kind]][0])
            height, width = height // merge, width // merge
            if kind == "video" and self._frames_apart:
                for frame in range(frames):
                    yield int(item.where[frame * height * width]), (1, height, width)
            else:
                yield int(item.where[0]), (frames, height, width)


def _marker(around: str, token: str, placeholder: int) -> Marker:
    return Marker(f"<|{around}_start|>{token}<|{around}_end|>", placeholder, (token,))


def _hearing(extractor: Any) -> Hearing:
    return Hearing(
        sample_rate=extractor.sampling_rate,
        min_samples=extractor.hop_length,
        max_samples=extractor.n_samples,
        arrays=SOUND,
    )
