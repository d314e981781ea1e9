"""Real drafter, real controller, real store: speculation changes nothing but the number of forwards."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from treadle_cache import CacheConfig, RamStore
from treadle_core import Completion, Engine, EngineConfig, Request, SamplingParams, collect
from treadle_core.mlx_runtime.gguf import find_demo_model, load_gguf
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.mlx_runtime.tokenizer import ModelTokenizer
from treadle_core.testing import zoo
from treadle_core.testing.drafting import (
    LastWrongDrafter,
    OracleDrafter,
    RandomDrafter,
    WrongDrafter,
)
from treadle_speculative import AdaptiveController, FixedController, NgramDrafter
from treadle_speculative.mtp import MtpDrafter, MtpHead

TOLERANCE = 1e-4
STORY = (
    "The harbour master of Port Ellen kept two ledgers. In the first she wrote the names of the "
    "ships that came in, the hour of their arrival, and the weight of what they carried."
)


@cache
def model_of(family: str) -> Any:
    return zoo.build(family)


def answer(engine: Engine, *requests: Request) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    return {key[0]: completion for key, completion in collect(events).items()}


def looped(length: int, seed: int) -> tuple[int, ...]:
    """A prompt that repeats itself, so that something is found in it."""
    rng = random.Random(seed)
    body = [rng.randrange(256) for _ in range(9)]
    return tuple((body * length)[:length])


def request_of(id: str, prompt: Sequence[int], **params: Any) -> Request:
    chosen = {"temperature": 0.0, "max_tokens": 24, "logprobs": True, "top_logprobs": 5, **params}
    return Request(id=id, prompt=tuple(prompt), params=SamplingParams(**chosen))


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h"])
def test_what_a_speculating_row_stored_is_what_a_plain_row_would_have_computed(family: str) -> None:
    """A chat goes on from the store, where the answer before it came from accepted drafts."""
    store = RamStore(CacheConfig(capacity_bytes=64 << 20, block_size=8))
    truth: list[int] = []
    speculating = Engine(
        make_runner(model_of(family), zoo.config(family), slack=5),
        config=EngineConfig(checkpoint_interval=16),
        store=store,
        drafter=LastWrongDrafter(lambda tokens, num: [*truth, *[1] * num][len(tokens) :][:num]),
        controller=FixedController(5),
    )
    plain = Engine(make_runner(model_of(family), zoo.config(family)))
    prompt = looped(40, seed=1)
    reused = 0
    for turn in range(4):
        request = request_of(f"turn{turn}", prompt, temperature=0.7 * (turn % 2), seed=turn)
        theirs = answer(plain, request)[request.id]
        truth[:] = [*prompt, *theirs.tokens]
        mine = answer(speculating, request)[request.id]
        assert mine.tokens == theirs.tokens
        scale = float(np.abs(np.array(theirs.logprobs)).max())
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=10 * TOLERANCE * scale)
        assert mine.usage is not None
        reused += mine.usage.cached_tokens
        prompt = (*prompt, *mine.tokens, *looped(7, seed=turn))
    assert reused > 0
    total = speculating.stats().drafts
    assert total is not None
    assert total.accepted > 20
    assert total.rejected > 5


def mtp_engine(runner: ModelRunner, k: int, **options: Any) -> Engine:
    """An engine over a runner, with a head that nobody has trained."""
    base = runner.split()
    drafter = MtpDrafter(MtpHead(base), context_length=runner.spec.context_length)
    runner.listen(drafter, base)
    return Engine(runner, drafter=drafter, controller=FixedController(k), **options)


def test_a_chat_goes_on_from_the_store_beside_a_head_that_has_not_heard_what_is_there() -> None:
    store = RamStore(CacheConfig(capacity_bytes=64 << 20, block_size=8))
    runner = make_runner(model_of("llama"), zoo.config("llama"), slack=3)
    speculating = mtp_engine(runner, 3, store=store)
    plain = Engine(make_runner(model_of("llama"), zoo.config("llama")))
    prompt, reused = looped(40, seed=1), 0
    for turn in range(3):
        request = request_of(f"turn{turn}", prompt, temperature=0.7 * (turn % 2), seed=turn)
        theirs = answer(plain, request)[request.id]
        mine = answer(speculating, request)[request.id]
        assert mine.tokens == theirs.tokens
        assert mine.usage is not None
        reused += mine.usage.cached_tokens
        prompt = (*prompt, *mine.tokens, *looped(7, seed=turn))
    assert reused > 80
    total = speculating.stats().drafts
    assert total is not None
    assert total.rejected > 100
    assert total.failures == 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2_hybrid"])
def test_the_adaptive_controller_changes_no_token_whatever_it_measures(family: str) -> None:
    requests = [
        request_of(f"r{i}", looped(20 + 9 * i, seed=i), temperature=0.6 * (i % 2), seed=i)
        for i in range(4)
    ]
    plain = answer(Engine(make_runner(model_of(family), zoo.config(family))), *requests)
    engine = Engine(
        make_runner(model_of(family), zoo.config(family), slack=7),
        drafter=NgramDrafter(),
        controller=AdaptiveController(),
    )
    for _ in range(3):
        found = answer(engine, *requests)
        assert {id: c.tokens for id, c in found.items()} == {
            id: c.tokens for id, c in plain.items()
        }


@cache
def smollm2() -> tuple[Any, ModelTokenizer, dict[str, Any]]:
    path = find_demo_model()
    if path is None:
        pytest.skip("the demo package is not installed")
    model, wrapper, config = load_gguf(path)
    return model, ModelTokenizer(wrapper, config), config


@cache
def smollm2_says() -> tuple[Request, list[int]]:
    model, tokenizer, config = smollm2()
    prompt = tokenizer.encode("The largest rivers are")
    request = request_of("r", prompt, max_tokens=7, logprobs=False, top_logprobs=0)
    return request, list(answer(Engine(make_runner(model, config)), request)["r"].tokens)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "k"),
    [
        (OracleDrafter, 1),
        (WrongDrafter, 2),
        (RandomDrafter, 3),
        (LastWrongDrafter, 4),
        (LastWrongDrafter, 5),
    ],
)
def test_smollm2_says_the_same_whoever_drafts(kind: type[OracleDrafter], k: int) -> None:
    model, _, config = smollm2()
    request, expected = smollm2_says()
    whole = [*request.prompt, *expected, *[1] * k]
    engine = Engine(
        make_runner(model, config, slack=k),
        drafter=kind(lambda tokens, num: whole[len(tokens) :][:num]),
        controller=FixedController(k),
    )

    assert answer(engine, request)["r"].tokens == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_copies_a_text_in_fewer_forwards_and_the_same_tokens() -> None:
    model, tokenizer, config = smollm2()
    text = f"<|im_start|>user\nRepeat this text:\n\n{STORY}<|im_end|>\n<|im_start|>assistant\n"
    request = request_of(
        "copy", tokenizer.encode(text), max_tokens=60, logprobs=False, top_logprobs=0
    )
    plain = answer(Engine(make_runner(model, config)), request)["copy"]
    engine = Engine(
        make_runner(model, config, slack=5),
        drafter=NgramDrafter(),
        controller=FixedController(5),
    )

    found = answer(engine, request)["copy"]

    assert found.tokens == plain.tokens
    assert found.usage is not None
    assert found.usage.drafts is not None
    assert found.usage.drafts.forwards_saved > 20


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_beside_a_head_that_knows_nothing_says_what_it_says_alone() -> None:
    path = find_demo_model()
    if path is None:
        pytest.skip("the demo package is not installed")
    model, wrapper, config = load_gguf(path)
    tokenizer = ModelTokenizer(wrapper, config)
    requests = [
        request_of(f"r{i}", tokenizer.encode(text), max_tokens=7, temperature=0.8 * i, seed=i)
        for i, text in enumerate(("The capital of France is", "def fibonacci(n):"))
    ]
    runner = make_runner(model, config, slack=2)
    plain = answer(Engine(runner), *requests)
    runner.reset()
    engine = mtp_engine(runner, 2)

    found = answer(engine, *requests)

    assert {id: c.tokens for id, c in found.items()} == {id: c.tokens for id, c in plain.items()}
    total = engine.stats().drafts
    assert total is not None
    assert total.failures == 0
    assert total.rejected > 10
