"""Text and media requests in one engine: answers are those of mlx-vlm, each request alone."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from msgspec.structs import replace

from treadle_core import Engine, EngineConfig, Request, SamplingParams, collect, run
from treadle_core.mlx_runtime.load import LoadedModel, ModelOptions
from treadle_core.mlx_runtime.open import open_engine
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.pacing import FixedChunk
from treadle_core.ports import Observer
from treadle_core.testing import RecordingStore
from treadle_core.testing.drafting import (
    Continuation,
    LastWrongDrafter,
    OracleDrafter,
    SteadyController,
)
from treadle_multimodal.media import Media
from treadle_multimodal.testing import zoo
from treadle_multimodal.vlm.checkpoint import load_vlm
from treadle_multimodal.vlm.model import VlmModel

from .vlm import DISTINCT, Reference, clip, encoded, image, loaded
from .vlm import VIDEO as VIDEO_FAMILIES

every_family = pytest.mark.parametrize("family", zoo.FAMILIES)

NUM_TOKENS = 6

UNCUT = ("gemma3", "gemma4", "qwen3_5", "qwen3_5_moe")
"""Families whose stored state cannot be cut."""

REQUESTS: dict[str, tuple[str, tuple[Media, ...]]] = {
    "text": ("a text without any picture", ()),
    "one": ("what is this?", (image(0),)),
    "two": ("compare", (image(1, 120, 50), image(2))),
    "repeated": ("the same twice", (image(3, 150, 90), image(4, 60, 60), image(3, 150, 90))),
    "other": ("what is this?", (image(9),)),
    "long": ("words " * 60, ()),
}
VIDEO = ("look", (clip(0, 2), clip(7, 3, 120, 60)))


def requested(name: str) -> tuple[str, tuple[Media, ...]]:
    return VIDEO if name == "video" else REQUESTS[name]


def request(family: str, name: str, identity: str | None = None) -> Request:
    return requested_as(family, identity or name, requested(name))


def requested_as(family: str, identity: str, asked: tuple[str, tuple[Media, ...]]) -> Request:
    prompt = encoded(family, *asked)
    return Request(
        id=identity,
        prompt=prompt.tokens,
        params=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
        media=prompt.media,
        attachment=prompt if prompt.media else None,
    )


@cache
def expected(family: str, name: str) -> tuple[int, ...]:
    return expected_tokens(family, requested(name))


def expected_tokens(family: str, asked: tuple[str, tuple[Media, ...]]) -> tuple[int, ...]:
    return Reference(family, *asked).greedy(NUM_TOKENS)


def make_engine(
    family: str,
    store: RecordingStore | None = None,
    observers: Sequence[Observer] = (),
    **config: Any,
) -> tuple[Engine, VlmModel]:
    target = loaded(family)
    axes = target.preprocessor.family.counts_axes
    model = VlmModel(target.model.model, counts_axes=axes)
    runner = ModelRunner(model, target.base.runner.spec)
    settings = EngineConfig(**config)
    engine = Engine(
        runner,
        tokenizer=target.base.tokenizer,
        config=settings,
        chunk=FixedChunk(16),
        store=store,
        observers=observers,
    )
    return engine, model


def answers(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    completions = collect(run(engine, requests))
    return {key[0]: tuple(answer.tokens) for key, answer in completions.items()}


@every_family
@pytest.mark.parametrize("rows", [2, 8])
def test_all_requests_get_the_tokens_of_their_own_run(family: str, rows: int) -> None:
    engine, _ = make_engine(family, max_num_seqs=rows)

    found = answers(engine, [request(family, name) for name in REQUESTS])

    assert found == {name: expected(family, name) for name in REQUESTS}


@every_family
def test_a_stored_prefix_is_reused_for_the_same_picture_only(family: str) -> None:
    store = RecordingStore()
    engine, model = make_engine(family, store)
    prompt = encoded(family, *requested("one"))

    for name in ("one", "other", "one"):
        assert answers(engine, [request(family, name)])[name] == expected(family, name)

    nothing, until_picture, all_but_last = store.found
    assert (nothing, all_but_last) == (0, len(prompt.tokens) - 1)
    if family not in UNCUT:
        assert until_picture == prompt.segments[0].start
    assert model.features.stats().misses == 2


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_row_that_is_given_up_comes_back_with_its_pictures(family: str) -> None:
    """Memory for few rows: some are given up and prefilled again, with what they generated."""
    budget = spec_bytes(loaded(family).base.runner.spec, 400)
    params = SamplingParams(max_tokens=180, temperature=0.0, ignore_eos=True)
    requests = [replace(request(family, "two", f"r{index}"), params=params) for index in range(3)]
    (alone,) = answers(make_engine(family)[0], requests[:1]).values()

    engine, _ = make_engine(family, max_num_seqs=4, kv_memory_bytes=budget)
    completions = collect(run(engine, requests))

    assert alone[:NUM_TOKENS] == expected(family, "two")
    assert [tuple(answer.tokens) for answer in completions.values()] == [alone] * 3
    assert sum(answer.usage.preemptions for answer in completions.values() if answer.usage) > 0


def continuation(family: str) -> Continuation:
    """Right drafts for every request."""
    known = [
        [*request(family, name).prompt, *expected(family, name)]
        for name in REQUESTS
        if name != "other"
    ]

    def go_on(tokens: Sequence[int], num: int) -> list[int]:
        (found, *_) = (each for each in known if each[: len(tokens)] == list(tokens))
        return [*found[len(tokens) :], *[1] * num][:num]

    return go_on


# State that cannot be taken back refuses drafts.
@pytest.mark.parametrize("family", [name for name in DISTINCT if name != "qwen3_5"])
@pytest.mark.parametrize("kind", [OracleDrafter, LastWrongDrafter])
def test_an_engine_with_drafts_gives_the_same_answers(
    family: str, kind: type[OracleDrafter], tmp_path: Path
) -> None:
    def load_model(options: ModelOptions, *, max_draft_tokens: int) -> LoadedModel:
        return load_vlm(options, max_draft_tokens=max_draft_tokens).base

    engine, loaded_model = open_engine(
        ModelOptions(model=str(zoo.save_checkpoint(family, tmp_path))),
        memory_utilization=0.5,
        make_drafting=lambda: (lambda loaded: kind(continuation(family)), SteadyController(3)),
        load_model=load_model,
    )

    # "other" begins as "one" does, to one who sees tokens alone.
    names = [name for name in REQUESTS if name != "other"]
    found = answers(engine, [request(family, name) for name in names])

    assert loaded_model.runner.spec.media
    assert found == {name: expected(family, name) for name in names}
    drafts = engine.stats().drafts
    assert drafts is not None
    assert drafts.accepted >= 2 * len(names)


@pytest.mark.parametrize("family", [name for name in DISTINCT if name in VIDEO_FAMILIES])
def test_videos_beside_text(family: str) -> None:
    engine, _ = make_engine(family)
    names = ["text", "video", "one"]

    found = answers(engine, [request(family, name) for name in names])

    assert found == {name: expected(family, name) for name in names}


def spec_bytes(spec: Any, num_tokens: int) -> int:
    """KV of that many tokens, all layers counted as full."""
    layers = [2 * layer.heads * layer.key_dim * 4 for layer in spec.layers]
    return int(np.sum(layers)) * num_tokens
