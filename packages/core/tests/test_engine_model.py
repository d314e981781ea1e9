"""What the engine promises, on a real model: faults of one row, memory that is given back."""

import gc
import random
import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from treadle_core import (
    Engine,
    EngineConfig,
    Failed,
    Request,
    SamplingParams,
    Unsupported,
    collect,
    run,
)
from treadle_core.layers import Opaque
from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.mlx_runtime.sampler import DrawParams, Row, keep_likely
from treadle_core.pacing import FixedChunk
from treadle_core.plan import RowSetup
from treadle_core.testing import zoo

POISON = 319


def greedy(max_tokens: int) -> SamplingParams:
    """Nobody generates the poison by chance."""
    return SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, logit_bias={POISON: -100.0}
    )


def poisoned(family: str) -> Any:
    model = zoo.build(family)
    weights = model.model.embed_tokens.weight
    weights[POISON] = float("nan")
    model.model.embed_tokens.weight = weights
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "llama"])
def test_a_poisoned_row_leaves_nothing_behind_when_its_group_grows(family: str) -> None:
    engine = Engine(
        make_runner(poisoned(family), zoo.config(family)),
        config=EngineConfig(max_num_seqs=2),
        chunk=FixedChunk(1_000),
    )
    neighbour = tuple(random.Random(0).randrange(250) for _ in range(200))
    engine.add(Request(id="neighbour", prompt=neighbour, params=greedy(120)))
    events = [*engine.step(), *engine.step()]
    guilty = (*(1, 2, 3) * 13, POISON, 4)
    engine.add(Request(id="guilty", prompt=guilty, params=greedy(20)))
    while not any(isinstance(event, Failed) for event in events):
        events += engine.step()
    while engine.scheduler.layout.groups[0].capacity < 512:
        events += engine.step()

    events += run(engine, [Request(id="innocent", prompt=(5, 6, 7), params=greedy(5))])

    reasons = {key[0]: completion.reason for key, completion in collect(events).items()}
    assert reasons == {"neighbour": "length", "guilty": "error", "innocent": "length"}


def test_nothing_of_the_last_request_is_kept() -> None:
    class Processor:
        def __call__(self, tokens: Sequence[int], logits: mx.array) -> mx.array:
            return logits

    engine = Engine(make_runner(zoo.build("llama"), zoo.config("llama")))
    processor = Processor()
    alive = weakref.ref(processor)
    params = SamplingParams(max_tokens=4, presence_penalty=1.0)
    run(engine, [Request(id="r", prompt=(1, 2), params=params, logits_processors=(processor,))])

    del processor
    gc.collect()

    assert alive() is None


def test_a_row_without_filters_keeps_its_tail_beside_one_with_them() -> None:
    vocab_size = 150_000
    setups = [
        RowSetup(
            key=(str(top_p), 0),
            params=SamplingParams(temperature=1.0, top_p=top_p),
            seed=1,
            end_tokens=(),
            prompt=(1,),
            output=(),
        )
        for top_p in (1.0, 0.5)
    ]
    logits = mx.random.normal((2, vocab_size), key=mx.random.key(3))

    kept = keep_likely(logits, DrawParams([Row(setup, vocab_size) for setup in setups]))

    finite = mx.isfinite(kept).sum(axis=-1).tolist()
    assert finite[0] == vocab_size
    assert 0 < finite[1] < vocab_size // 2


def test_an_opaque_layer_is_charged_for_what_it_holds() -> None:
    spec = inspect(TextModel(zoo.build("llama4")), zoo.config("llama4"))
    heads, dim, float32 = 2, 16, 4

    opaque = [layer for layer in spec.layers if isinstance(layer, Opaque)]
    assert {layer.bytes_per_token for layer in opaque} == {2 * heads * dim * float32}


def test_a_context_longer_than_the_models_is_refused() -> None:
    runner = make_runner(zoo.build("llama"), zoo.config("llama"))

    with pytest.raises(Unsupported, match="context_length: got 1000000, the model has 4096"):
        Engine(runner, config=EngineConfig(context_length=1_000_000))
