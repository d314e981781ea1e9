"""Gemma 4: images of their own sizes, frames with their times, and sound."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from treadle_core import Unsupported
from treadle_multimodal.families.base import AmongTokens, Hearing, Made, Marker, each_of
from treadle_multimodal.prompt import Arrays
from treadle_multimodal.sources import Kind

PIXELS = "pixel_values"
FRAMES = ("pixel_values_videos", "video_position_ids")
SOUND = ("input_features", "input_features_mask")

MAX_SAMPLES = 480_000
"""Its feature extractor cuts what is longer, unless told otherwise."""


class Gemma4(AmongTokens):
    """Images and videos, and sound where the checkpoint has an encoder for it.

    Args:
        config: The checkpoint's.
        processor: The checkpoint's, as mlx-vlm loads it.

    Raises:
        Unsupported: Its tokens see those behind them, within an image.
    """

    channels_first = True

    def __init__(self, config: Mapping[str, Any], processor: Any) -> None:
        if config.get("text_config", {}).get("use_bidirectional_attention") == "vision":
            raise Unsupported("Gemma 4 with images that are seen both ways has not been checked")
        images = processor.image_processor
        self._patch: int = images.patch_size
        self._pooled: int = images.pooling_kernel_size
        self._pooled_frames: int = processor.video_processor.pooling_kernel_size
        markers: dict[Kind, Marker] = {
            "image": _marker(processor.image_token, config["image_token_id"]),
        }
        if config.get("video_token_id") is not None:
            markers["video"] = _marker(processor.video_token, config["video_token_id"])
        if config.get("audio_config"):
            markers["audio"] = _marker(processor.audio_token, config["audio_token_id"])
            self.hearing = _hearing(processor)
        super().__init__(markers)

    def split(self, kind: Kind, arrays: Made, tokens: NDArray[Any]) -> list[Arrays]:
        """One of the rows each."""
        del tokens
        if kind == "image":
            return [{PIXELS: part} for part in each_of(arrays, PIXELS)]
        parts = zip(*(each_of(arrays, name) for name in FRAMES), strict=True)
        return [dict(zip(FRAMES, part, strict=True)) for part in parts]

    def num_tokens(self, kind: Kind, arrays: Arrays) -> int:
        """One for each square of pooled patches; frames are padded with patches at no place."""
        if kind == "image":
            height, width = arrays[PIXELS].shape[-2:]
            return (height // self._patch) * (width // self._patch) // self._pooled**2
        places = arrays[FRAMES[1]]
        return int((places[0, :, :, 0] >= 0).sum()) // self._pooled_frames**2


def _marker(token: str, placeholder: int) -> Marker:
    return Marker(token, placeholder, (token,))


def _hearing(processor: Any) -> Hearing:
    extractor = processor.feature_extractor
    rate: int = extractor.sampling_rate
    limit: int = processor.audio_seq_length * processor.audio_ms_per_token * rate // 1000
    return Hearing(
        sample_rate=rate,
        # The first window is centred on the first sample, and counts if it is full.
        min_samples=extractor.frame_length - extractor.frame_length // 2 + 1,
        max_samples=min(limit, MAX_SAMPLES),
        arrays=SOUND,
    )
