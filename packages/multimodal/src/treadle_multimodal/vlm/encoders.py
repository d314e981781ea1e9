"""How the encoder of each family is called, and where its work can be cut."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from msgspec import Struct

from treadle_multimodal.prompt import Arrays

Outputs = tuple[mx.array, tuple[mx.array, ...]]
"""Embeddings ``[tokens, hidden]``, and what is added behind the first layers, the same each."""


class Calling(Struct, frozen=True):
    """What is known of a family's encoder.

    Attributes:
        run: Builds a call, lazily: the model, the placeholder, how many of them, and the arrays.
        cut: An item in parts that the encoder sees apart from each other, of as many tokens each.
        axes: By array, along which axis several parts go into one call; empty where they do not.
        layers: Where its layers are, whose outputs lie between pieces of a call; empty for one
            piece.
    """

    run: Callable[[Any, int, int, dict[str, mx.array]], Outputs]
    cut: Callable[[Arrays], list[Arrays]] = lambda arrays: [arrays]
    axes: Mapping[str, int] = {}
    layers: str = ""


class Call:
    """A call of an encoder, built and not computed.

    Attributes:
        pieces: What to compute, one after the other; the last of them is all that is left.
        outputs: What it gives.
    """

    def __init__(self, pieces: list[list[mx.array]], outputs: Outputs) -> None:
        self.pieces = pieces
        self.outputs = outputs


class Layer(nn.Module):
    """A layer of an encoder that tells what it gave.

    Args:
        inner: The layer.
        told: Who it tells.
    """

    def __init__(self, inner: nn.Module, told: "Told") -> None:
        super().__init__()
        self.inner = inner
        self.told = told

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As the layer itself."""
        found = self.inner(*args, **options)
        self.told.hear(found)
        return found


class Told:
    """Collects what the layers of one encoder give while somebody listens."""

    def __init__(self) -> None:
        self._heard: list[mx.array] | None = None

    def hear(self, output: Any) -> None:
        """A layer gave something."""
        if self._heard is not None and isinstance(output, mx.array):
            self._heard.append(output)

    @contextmanager
    def listen(self) -> Generator[list[mx.array]]:
        """A list that outputs are added to."""
        self._heard = heard = list[mx.array]()
        try:
            yield heard
        finally:
            self._heard = None


class Encoder:
    """The encoder of one loaded model. For the thread that loaded it.

    Args:
        model: As mlx-vlm loads it. The layers of its encoder are wrapped, as adapters wrap layers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._calling = CALLINGS.get(model.config.model_type, WHOLE)
        self._told = wrap_layers(model, self._calling.layers) if self._calling.layers else Told()

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
        with self._told.listen() as heard:
            outputs = self._calling.run(self._model, placeholder, num_tokens, arrays)
        # The last layer is left to the piece behind it, which is short.
        pieces = [[output] for output in heard[:-1]]
        return Call([*pieces, [outputs[0], *outputs[1]]], outputs)


def wrap_layers(model: Any, path: str) -> Told:
    """Have the layers of an encoder tell what they give; those that do already stay."""
    layers: Any = model
    for name in path.split("."):
        layers = getattr(layers, name)
    if layers and isinstance(layers[0], Layer):
        return layers[0].told
    told = Told()
    layers[:] = [Layer(layer, told) for layer in layers]
    return told


def _alike(one: Any, other: Any, axis: int) -> bool:
    """Whether two arrays differ in their length along one axis at most."""
    shapes = [[*array.shape[:axis], *array.shape[axis + 1 :]] for array in (one, other)]
    return shapes[0] == shapes[1] and one.dtype == other.dtype


def deepstack_of(made: Any) -> tuple[mx.array, ...]:
    """Of what mlx-vlm makes of one item, each layer ``[tokens, hidden]``; a sound has none."""
    found = made.deepstack_visual_embeds
    if found is None or made.visual_pos_masks is None:
        return ()
    if isinstance(found, mx.array):  # [1, tokens, layers, hidden]
        return tuple(found[0, :, layer] for layer in range(found.shape[2]))
    return tuple(found)


def _run_qwen(
    model: Any, placeholder: int, num_tokens: int, arrays: dict[str, mx.array]
) -> Outputs:
    """The tower alone: around it mlx-vlm waits for what the first layers give."""
    del num_tokens
    (grid,) = (array for name, array in arrays.items() if name.endswith("grid_thw"))
    (pixels,) = (array for name, array in arrays.items() if not name.endswith("grid_thw"))
    tower = model.vision_tower
    made: Any = tower(pixels.astype(tower.patch_embed.proj.weight.dtype), grid)
    embeddings, deepstack = made if isinstance(made, tuple) else (made, ())
    text = model.language_model.model.embed_tokens(mx.array([placeholder]))
    return embeddings.astype(text.dtype), tuple(deepstack)


def _run_whole(
    model: Any, placeholder: int, num_tokens: int, arrays: dict[str, mx.array]
) -> Outputs:
    """As mlx-vlm puts features into a prompt of nothing but placeholders."""
    tokens = mx.full((1, num_tokens), placeholder, dtype=mx.int32)
    rest = dict(arrays)
    pixels = rest.pop("pixel_values", None)
    made = model.get_input_embeddings(tokens, pixels, mask=mx.ones_like(tokens), **rest)
    return made.inputs_embeds[0], deepstack_of(made)


def _frames(arrays: Arrays) -> list[Arrays]:
    """A video in groups of frames that the encoder merges in time."""
    (grids,) = (name for name in arrays if name.endswith("grid_thw"))
    (pixels,) = (name for name in arrays if not name.endswith("grid_thw"))
    frames, *size = (int(number) for number in arrays[grids][0])
    grid = np.array([[1, *size]], dtype=arrays[grids].dtype)
    return [{pixels: part, grids: grid} for part in np.split(arrays[pixels], frames)]


def _tiles(arrays: Arrays) -> list[Arrays]:
    """An image in its tiles."""
    count = arrays["pixel_values"].shape[1]
    split = {name: np.split(array, count, axis=1) for name, array in arrays.items()}
    return [{name: parts[index] for name, parts in split.items()} for index in range(count)]


WHOLE = Calling(_run_whole)
"""For families of which nothing is known: an item is a call, and a call a piece."""

QWEN = Calling(
    _run_qwen,
    cut=_frames,
    axes=dict.fromkeys(
        ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"), 0
    ),
    layers="vision_tower.blocks",
)

CALLINGS: dict[str, Calling] = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "smolvlm": Calling(
        _run_whole,
        cut=_tiles,
        axes={"pixel_values": 1, "pixel_attention_mask": 1},
        layers="vision_model.encoder.layers",
    ),
    "gemma3": Calling(
        _run_whole,
        axes={"pixel_values": 0},
        layers="vision_tower.vision_model.encoder.layers",
    ),
}
"""By the model type that a checkpoint's config names."""
