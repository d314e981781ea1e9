"""Tiny vision models, and what mlx-vlm's own run of one request gives for them."""

from collections.abc import Callable, Iterator, Sequence
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
from treadle_multimodal.media import (
    DecodedAudio,
    DecodedImage,
    DecodedVideo,
    Media,
    make_audio,
    make_image,
    make_video,
)
from treadle_multimodal.prompt import EncodedPrompt
from treadle_multimodal.testing import zoo
from treadle_multimodal.vlm.checkpoint import LoadedVlm, load_vlm
from treadle_multimodal.vlm.preprocess import consecutive, kind_of, timing

from .media_files import picture

TOLERANCE = 1e-4
"""Of the logits' scale."""

QWEN = ("qwen2_vl", "qwen2_5_vl", *zoo.QWEN3, "qwen3_omni_moe")
# Families that take sound, videos, and several kinds in one prompt.
HEARING = ("gemma4", "qwen3_omni_moe")
VIDEO = (*QWEN, "gemma4")
MIXING = ("qwen3_vl", "qwen3_omni_moe", "gemma4")


DISTINCT = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "smolvlm", "gemma3", "gemma4")
"""Families that differ to a runtime; the others differ from one of these in what encodes media."""

SEEDS = {"idefics3": 1, "mistral3": 1}
"""Where the weights of seed 0 give an end token early."""


@cache
def loaded(family: str) -> LoadedVlm:
    with TemporaryDirectory() as folder:
        saved = zoo.save_checkpoint(family, Path(folder), seed=SEEDS.get(family, 0))
        return load_vlm(ModelOptions(model=str(saved)))


def image(seed: int = 0, width: int = 80, height: int = 60) -> DecodedImage:
    return make_image(picture(width, height, seed))


def clip(seed: int = 0, num_frames: int = 4, width: int = 80, height: int = 60) -> DecodedVideo:
    frames = [np.array(picture(width, height, seed + number)) for number in range(num_frames)]
    return make_video(frames, [0.5 * number for number in range(num_frames)], num_frames / 2)


def sound(seed: int = 0, num_samples: int = 16_000) -> DecodedAudio:
    noise = np.random.default_rng(seed).normal(0, 0.1, num_samples)
    return make_audio(noise.astype(np.float32), 16_000)


def chat(text: str, media: Sequence[Media]) -> list[dict[str, Any]]:
    """One message: the media, a word between them, then the text."""
    parts: list[dict[str, Any]] = []
    for item in media:
        parts.append({"type": kind_of(item)})
        parts.append({"type": "text", "text": "and "})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def encoded(family: str, text: str, media: Sequence[Media] = ()) -> EncodedPrompt:
    preprocessor = loaded(family).preprocessor
    return preprocessor.encode(preprocessor.render(chat(text, media)), media)


def frames_of(family: str, video: DecodedVideo) -> np.ndarray[Any, Any]:
    """Frames as mlx-vlm's processor of the family takes them."""
    frames = np.stack(video.frames)
    return frames.transpose(0, 3, 1, 2) if family == "gemma4" else frames


class Reference:
    """mlx-vlm's own way with one request.

    Of several sounds each is encoded alone, unless ``together`` is said: mlx-vlm pads the shorter
    ones, and Gemma 4's then also stand at places that are not theirs.
    """

    def __init__(
        self, family: str, text: str, media: Sequence[Media] = (), *, together: bool = False
    ) -> None:
        target = loaded(family)
        self.model: Any = target.model.model
        self.processor = target.preprocessor._processor
        prompt = target.preprocessor.render(chat(text, media))
        videos = [item for item in media if isinstance(item, DecodedVideo)]
        options: dict[str, Any] = {}
        if videos:
            options["videos"] = [frames_of(family, video) for video in videos]
            options["video_metadata"] = [timing(video) for video in videos]
        images = [item.image for item in media if isinstance(item, DecodedImage)]
        sounds = [item.samples for item in media if isinstance(item, DecodedAudio)]
        self.inputs = prepare_inputs(
            self.processor, images=images or None, audio=sounds or None, prompts=prompt, **options
        )
        rest = dict(self.inputs)
        apart = len(sounds) > 1 and not together
        if apart:
            rest = {k: v for k, v in rest.items() if "feature" not in k}
        self.ids, pixels = rest.pop("input_ids"), rest.pop("pixel_values", None)
        mask = rest.pop("attention_mask")
        made = self.model.get_input_embeddings(self.ids, pixels, mask=mask, **rest).to_dict()
        # Its own generation does not use this one.
        made.pop("attention_mask_4d", None)
        self.embeddings = made.pop("inputs_embeds")
        if apart:
            marker = target.preprocessor.family.markers["audio"]
            runs = consecutive(np.flatnonzero(np.array(self.ids[0]) == marker.placeholder))
            for run, samples in zip(runs, sounds, strict=True):
                own = self.heard(marker.text, samples, marker.placeholder)
                assert len(own) == len(run)
                self.embeddings[0, int(run[0]) : int(run[-1]) + 1] = own
        self.extra = {name: value for name, value in made.items() if value is not None}

    def heard(self, marker: str, samples: np.ndarray[Any, Any], placeholder: int) -> mx.array:
        """Embeddings of one sound."""
        inputs = dict(prepare_inputs(self.processor, audio=[samples], prompts=marker))
        ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
        made = self.model.get_input_embeddings(ids, None, mask=mask, **inputs).inputs_embeds
        where = np.flatnonzero(np.array(ids[0]) == placeholder)
        found: mx.array = made[0, int(where[0]) : int(where[-1]) + 1]
        return found

    def logits(self, continuation: Sequence[int]) -> np.ndarray[Any, Any]:
        """After the prompt and after each token of a continuation, ``[1 + tokens, vocab]``."""
        return np.stack([*self._run(lambda number, _: continuation[number], len(continuation))])

    def greedy(self, num_tokens: int) -> tuple[int, ...]:
        """The likeliest tokens behind the prompt."""
        found = self._run(lambda _, logits: int(logits.argmax()), num_tokens - 1)
        return tuple(int(logits.argmax()) for logits in found)

    def _run(
        self, choose: Callable[[int, np.ndarray[Any, Any]], int], num_tokens: int
    ) -> Iterator[np.ndarray[Any, Any]]:
        language = self.model.language_model
        caches = make_prompt_cache(language)
        out = language(self.ids, inputs_embeds=self.embeddings + 0, cache=caches, **self.extra)
        logits = np.array(out.logits[0, -1])
        yield logits
        for number in range(num_tokens):
            token = choose(number, logits)
            logits = np.array(language(mx.array([[token]]), cache=caches).logits[0, -1])
            yield logits


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
