"""A real model: batched answers of SmolLM2 are those of mlx-lm's own loop, token for token."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache

from treadle_core import Engine, EngineConfig, Request, SamplingParams, collect
from treadle_core.mlx_runtime.gguf import find_demo_model, load_gguf
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.mlx_runtime.tokenizer import ModelTokenizer
from treadle_core.pacing import FixedChunk

CLEAR_GAP = 1e-3
NUM_TOKENS = {
    "The capital of France is": 24,
    "Once upon a time, there lived a weaver who": 6,
    "def fibonacci(n):": 12,
}

QUANTISED_TOKENS = {"The capital of France is": 12, "def fibonacci(n):": 8, "Water boils at": 6}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_greedy_answers_that_join_and_leave_equal_the_plain_loop() -> None:
    path = find_demo_model()
    if path is None:
        pytest.skip("the demo package is not installed")
    model, wrapper, config = load_gguf(path)
    tokenizer = ModelTokenizer(wrapper, config)
    requests = [
        Request(
            id=text,
            prompt=tuple(tokenizer.encode(text)),
            params=SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True),
        )
        for text, num in NUM_TOKENS.items()
    ]
    runner = make_runner(model, config)
    engine = Engine(
        runner,
        config=EngineConfig(max_num_seqs=2, max_num_batched_tokens=256),
        chunk=FixedChunk(5),
    )

    events: list[Any] = []
    for request in requests:
        engine.add(request)
        events += [*engine.step(), *engine.step(), *engine.step()]
    while engine.has_work:
        events += engine.step()
    together = collect(events)
    alone = {r.id: plain_loop(model, r.prompt, NUM_TOKENS[r.id]) for r in requests}

    assert runner.spec.batched
    clear = [name for name, (_, gap) in alone.items() if gap > CLEAR_GAP]
    assert len(clear) >= len(requests) - 1, "too many prompts are a matter of rounding"
    for name in clear:
        assert together[name, 0].tokens == alone[name][0]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bits", [4, 8])
def test_greedy_answers_over_quantised_kv_equal_mlx_lms_own(bits: int) -> None:
    path = find_demo_model()
    if path is None:
        pytest.skip("the demo package is not installed")
    model, wrapper, config = load_gguf(path)
    tokenizer = ModelTokenizer(wrapper, config)
    prompts = {text: tuple(tokenizer.encode(text)) for text in QUANTISED_TOKENS}
    engine = Engine(make_runner(model, config, kv_bits=bits), config=EngineConfig(max_num_seqs=2))

    events: list[Any] = []
    for text, prompt in prompts.items():
        params = SamplingParams(temperature=0.0, max_tokens=QUANTISED_TOKENS[text], ignore_eos=True)
        engine.add(Request(id=text, prompt=prompt, params=params))
        events += [*engine.step(), *engine.step()]
    while engine.has_work:
        events += engine.step()
    together = collect(events)

    for text, prompt in prompts.items():
        alone, gap = quantised_loop(model, prompt, QUANTISED_TOKENS[text], bits)
        assert gap > CLEAR_GAP, "the prompt is a matter of rounding"
        assert together[text, 0].tokens == alone


def quantised_loop(
    model: nn.Module, prompt: tuple[int, ...], num_tokens: int, bits: int
) -> tuple[list[int], float]:
    """The greedy answer of mlx-lm's model over its own quantised caches, and the closest call."""
    caches = [QuantizedKVCache(64, bits) for _ in model.layers]
    tokens, fed, closest = list[int](), list(prompt), float("inf")
    for _ in range(num_tokens):
        logits = np.array(model(mx.array([fed]), cache=caches)[0, -1].astype(mx.float32))
        second, best = np.sort(logits)[-2:]
        closest = min(closest, float(best - second))
        fed = [int(logits.argmax())]
        tokens += fed
    return tokens, closest


def plain_loop(model: nn.Module, prompt: Any, num_tokens: int) -> tuple[list[int], float]:
    """mlx-lm's greedy answer, and how close the second best token ever came."""
    steps = list(generate_step(mx.array(prompt), model, max_tokens=num_tokens))
    logprobs = np.stack([np.array(logprobs) for _, logprobs in steps])
    second, best = np.sort(logprobs, axis=-1)[:, -2:].T
    return [token for token, _ in steps], float((best - second).min())
