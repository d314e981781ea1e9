"""How the encoder of each family is called, and where its work can be cut."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from greenlet import getcurrent, greenlet
from msgspec import Struct
from msgspec.structs import replace

from treadle_core.mlx_runtime.twins import twin
from treadle_multimodal.prompt import Arrays

Outputs = tuple[mx.array, tuple[mx.array, ...]]
"""Embeddings ``[tokens, hidden]``, and what is added behind the first layers, the same each."""


class Calling(Struct, frozen=True):
    """What is known of a family's encoder.

    Attributes:
        run: Calls it: the model, the placeholder, how many of them, and the arrays.
        layers: Where the lists of its layers are, between which a call can stop; a checkpoint
            that sees and does not hear has not all of them.
        cut: An item in parts that the encoder sees apart from each other, of as many tokens each.
        axes: By array, along which axis several parts go into one call; what has none goes alone.
    """

    run: Callable[[Any, int, int, dict[str, mx.array]], Outputs]
    layers: tuple[str, ...]
    cut: Callable[[Arrays], list[Arrays]] = lambda arrays: [arrays]
    axes: Mapping[str, int] = {}


class Call(greenlet):
    """A call of an encoder that stops behind each of its layers but the last.

    The encoder runs as mlx-vlm wrote it, in a coroutine of its own.

    Args:
        run: Calls the encoder.
    """

    def __init__(self, run: Callable[[], Outputs]) -> None:
        super().__init__(run)
        self._outputs: Outputs | None = None

    @property
    def outputs(self) -> Outputs:
        """What it gives, when it is done."""
        assert self._outputs is not None, "the encoder is not done"
        return self._outputs

    def advance(self) -> bool:
        """Compute the next piece.

        Returns:
            Whether it is done with it.
        """
        made = self.switch()
        mx.eval(made)
        if self.dead:
            self._outputs = made
        return self.dead

    def stop(self, made: Any) -> None:
        """Called inside: wait until what was made is computed, and for the next piece."""
        assert self.parent is not None
        self.parent.switch(made)


class Stopping(nn.Module):
    """Mixed into the class of a layer behind which a call may stop."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As the layer does it."""
        made: Any = super().__call__(*args, **options)  # pyright: ignore[reportUnknownVariableType, reportAttributeAccessIssue, reportUnknownMemberType]
        call = getcurrent()
        if isinstance(call, Call):
            call.stop(made)
        return made


class Encoder:
    """The encoder of one loaded model. For the thread that loaded it.

    Args:
        model: As mlx-vlm loads it. Calls may stop behind its layers from now on.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._calling = CALLINGS[model.config.model_type]
        for path in self._calling.layers:
            let_stop(model, path)

    def parts(self, arrays: Arrays) -> list[Arrays]:
        """An item in the smallest parts that can be encoded apart."""
        return self._calling.cut(arrays)

    def may_join(self, one: Arrays, other: Arrays) -> bool:
        """Whether two parts can be encoded in one call."""
        axes = self._calling.axes
        if one.keys() != other.keys() or any(name not in axes for name in one):
            return False
        return all(_alike(one[name], other[name], axes[name]) for name in one)

    def call(self, placeholder: int, num_tokens: int, parts: Sequence[Arrays]) -> Call:
        """A call for parts that may be joined.

        Args:
            placeholder: The token that stands for them in a prompt.
            num_tokens: How many tokens they are together.
            parts: What to encode.
        """
        axes = self._calling.axes
        arrays = {
            name: mx.array(np.concatenate([part[name] for part in parts], axis=axes[name]))
            if len(parts) > 1
            else mx.array(array)
            for name, array in parts[0].items()
        }
        return Call(lambda: self._calling.run(self._model, placeholder, num_tokens, arrays))


def let_stop(model: Any, path: str) -> None:
    """Let calls stop behind the layers of an encoder; again changes nothing."""
    layers: Any = model
    for name in path.split("."):
        layers = getattr(layers, name)
        if layers is None:
            return
    # What is behind the last layer is short, and goes with it.
    for index, layer in enumerate(layers[:-1]):
        if not isinstance(layer, Stopping):
            layers[index] = twin(layer, Stopping)


def _alike(one: Any, other: Any, axis: int) -> bool:
    """Whether two arrays differ in their length along one axis at most."""
    shapes = [[*array.shape[:axis], *array.shape[axis + 1 :]] for array in (one, other)]
    return shapes[0] == shapes[1] and one.dtype == other.dtype


def _run_qwen(
    model: Any, placeholder: int, num_tokens: int, arrays: dict[str, mx.array]
) -> Outputs:
    """The tower alone: mlx-vlm's own way around it wants a prompt to count positions in."""
    del num_tokens
    (grid,) = (array for name, array in arrays.items() if name.endswith("grid_thw"))
    (pixels,) = (array for name, array in arrays.items() if not name.endswith("grid_thw"))
    tower = model.vision_tower
    made: Any = tower(pixels.astype(tower.patch_embed.proj.weight.dtype), grid)
    embeddings, deepstack = made if isinstance(made, tuple) else (made, ())
    text = model.language_model.model.embed_tokens(mx.array([placeholder]))
    return embeddings.astype(text.dtype), tuple(deepstack)


def _run_omni(
    model: Any, placeholder: int, num_tokens: int, arrays: dict[str, mx.array]
) -> Outputs:
    """Its part that thinks sees as Qwen3-VL does, and hears."""
    if "input_features" in arrays:
        return _run_whole(model, placeholder, num_tokens, arrays)
    return _run_qwen(model.thinker, placeholder, num_tokens, arrays)


def _run_whole(
    model: Any, placeholder: int, num_tokens: int, arrays: dict[str, mx.array]
) -> Outputs:
    """As mlx-vlm puts features into a prompt of nothing but placeholders."""
    tokens = mx.full((1, num_tokens), placeholder, dtype=mx.int32)
    rest = dict(arrays)
    pixels = rest.pop("pixel_values", None)
    made = model.get_input_embeddings(tokens, pixels, mask=mx.ones_like(tokens), **rest)
    return made.inputs_embeds[0], ()


def _frames(arrays: Arrays) -> list[Arrays]:
    """A video in groups of frames that the encoder merges in time; an image; a sound."""
    grids = next((name for name in arrays if name.endswith("grid_thw")), None)
    if grids is None:
        return [arrays]
    (pixels,) = (name for name in arrays if not name.endswith("grid_thw"))
    frames, *size = (int(number) for number in arrays[grids][0])
    grid = np.array([[1, *size]], dtype=arrays[grids].dtype)
    return [{pixels: part, grids: grid} for part in np.split(arrays[pixels], frames)]


def _along_second(name: str) -> Callable[[Arrays], list[Arrays]]:
    """Cuts an item that has an array of this name: it holds parts along the second axis."""

    def cut(arrays: Arrays) -> list[Arrays]:
        if name not in arrays:
            return [arrays]
        split = {key: np.split(array, array.shape[1], axis=1) for key, array in arrays.items()}
        return [dict(zip(split, parts, strict=True)) for parts in zip(*split.values(), strict=True)]

    return cut


QWEN = Calling(
    _run_qwen,
    cut=_frames,
    axes=dict.fromkeys(
        ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"), 0
    ),
    layers=("vision_tower.blocks",),
)

TILES = Calling(
    _run_whole,
    cut=_along_second("pixel_values"),
    axes={"pixel_values": 1, "pixel_attention_mask": 1},
    layers=("vision_model.encoder.layers",),
)

# Images are not joined: in a call of several, each patch is compared with those of all.
PIXTRAL = Calling(_run_whole, layers=("vision_tower.vision_model.transformer.layers",))

CALLINGS: dict[str, Calling] = {
    "gemma3": Calling(
        _run_whole,
        axes={"pixel_values": 0},
        layers=("vision_tower.vision_model.encoder.layers",),
    ),
    "gemma4": Calling(
        _run_whole,
        cut=_along_second("pixel_values_videos"),
        axes={"pixel_values": 0, "pixel_values_videos": 1, "video_position_ids": 1},
        layers=("vision_tower.encoder.layers", "audio_tower.layers"),
    ),
    "idefics3": TILES,
    "internvl": Calling(
        _run_whole,
        cut=_along_second("pixel_values"),
        axes={"pixel_values": 1},
        layers=("vision_tower.encoder.layer",),
    ),
    "mistral3": PIXTRAL,
    "pixtral": PIXTRAL,
    "qwen2_5_vl": QWEN,
    "qwen2_vl": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_omni_moe": replace(
        QWEN, run=_run_omni, layers=("thinker.vision_tower.blocks", "thinker.audio_tower.layers")
    ),
    "qwen3_vl": QWEN,
    "qwen3_vl_moe": QWEN,
    "smolvlm": TILES,
}
"""By the model type that a checkpoint's config names."""
