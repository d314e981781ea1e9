"""Tiny vision models, and what mlx-vlm's own run of one request gives for them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import prepare_inputs

from treadle_core.mlx_runtime.groups import SlotGroup
from treadle_core.mlx_runtime.load import ModelOptions
from treadle_core.plan import Open, Promote, Resize
from treadle_multimodal.media import DecodedImage, DecodedVideo, Media, make_image, make_video
from treadle_multimodal.prompt import EncodedPrompt
from treadle_multimodal.testing import zoo
from treadle_multimodal.vlm.checkpoint import LoadedVlm, load_vlm
from treadle_multimodal.vlm.preprocess import timing

from .media_files import picture

TOLERANCE = 1e-4
"""Of the logits' scale."""

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@cache
def loaded(family: str) -> LoadedVlm:
    with TemporaryDirectory() as folder:
        return load_vlm(ModelOptions(model=str(zoo.save_checkpoint(family, Path(folder)))))


def image(seed: int = 0, width: int = 80, height: int = 60) -> DecodedImage:
    return make_image(picture(width, height, seed))


def clip(seed: int = 0, num_frames: int = 4, width: int = 80, height: int = 60) -> DecodedVideo:
    frames = [np.array(picture(width, height, seed + number)) for number in range(num_frames)]
    return make_video(frames, [0.5 * number for number in range(num_frames)], num_frames / 2)


def chat(text: str, media: Sequence[Media]) -> list[dict[str, Any]]:
    """One message: the media, a word between them, then the text."""
    parts: list[dict[str, Any]] = []
    for item in media:
        parts.append({"type": "image" if isinstance(item, DecodedImage) else "video"})
        parts.append({"type": "text", "text": "and "})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def encoded(family: str, text: str, media: Sequence[Media] = ()) -> EncodedPrompt:
    preprocessor = loaded(family).preprocessor
    return preprocessor.encode(preprocessor.render(chat(text, media)), media)


class Reference:
    """mlx-vlm's own way with one request."""

    def __init__(self, family: str, text: str, media: Sequence[Media] = ()) -> None:
        target = loaded(family)
        self.model: Any = target.model.model
        prompt = target.preprocessor.render(chat(text, media))
        videos = [item for item in media if isinstance(item, DecodedVideo)]
        options: dict[str, Any] = {}
        if videos:
            options["videos"] = [np.stack(video.frames) for video in videos]
            options["video_metadata"] = [timing(video) for video in videos]
        images = [item.image for item in media if isinstance(item, DecodedImage)]
        processor = target.preprocessor._processor
        self.inputs = prepare_inputs(processor, images=images or None, prompts=prompt, **options)
        rest = dict(self.inputs)
        self.ids, pixels = rest.pop("input_ids"), rest.pop("pixel_values", None)
        mask = rest.pop("attention_mask")
        made = self.model.get_input_embeddings(self.ids, pixels, mask=mask, **rest).to_dict()
        # Its own generation does not use this one.
        made.pop("attention_mask_4d", None)
        self.embeddings = made.pop("inputs_embeds")
        self.extra = {name: value for name, value in made.items() if value is not None}

    def logits(self, continuation: Sequence[int]) -> np.ndarray[Any, Any]:
        """After the prompt and after each token of a continuation, ``[1 + tokens, vocab]``."""
        language = self.model.language_model
        caches = make_prompt_cache(language)
        out = language(
            self.ids, inputs_embeds=self.embeddings + 0, cache=caches, **self.extra
        ).logits[:, -1]
        found = [out]
        for token in continuation:
            found.append(language(mx.array([[token]]), cache=caches).logits[:, -1])
            mx.eval(found[-1])
        return np.array(mx.concatenate(found))


class Rows:
    """Rows of one group, prefilled in chunks and decoded together."""

    def __init__(self, family: str, capacity: int = 1024, num_rows: int = 8) -> None:
        target = loaded(family)
        spec = target.base.runner.spec
        assert spec.batched, spec.note
        self.group = SlotGroup(target.model, spec.layers, slack=8, width_step=64)
        self.group.resize(Resize(0, num_rows, capacity))
        self.prompts: list[EncodedPrompt] = []
        self.starts: list[int] = []

    def join(self, prompt: EncodedPrompt, chunk: int, length: int | None = None) -> None:
        """A row with the first tokens of a prompt; all but the last, if nothing is said."""
        row = len(self.prompts)
        length = len(prompt.tokens) - 1 if length is None else length
        self.group.open(Open(0, row))
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            self.group.prefill(row, prompt.tokens[start:stop], start, prompt)
            mx.eval(self.group.arrays())
        self.group.promote(Promote(0, row, row, length, length))
        self.prompts.append(prompt)
        self.starts.append(length)

    def decode(self, tokens: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
        """Feed each row its tokens; logits ``[rows, tokens, vocab]``."""
        prompts = [prompt if prompt.segments else None for prompt in self.prompts]
        out = self.group.decode(mx.array(tokens), self.starts, prompts)
        mx.eval(out, self.group.arrays())
        self.starts = [start + len(tokens[0]) for start in self.starts]
        return np.array(out)


def difference(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Largest, in parts of the expected scale."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())
