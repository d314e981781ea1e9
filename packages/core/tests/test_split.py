"""Models in halves, and who is told the hidden states between them."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from treadle_core import Engine, EngineConfig, Request, SamplingParams, collect
from treadle_core.drafting import HiddenStates
from treadle_core.errors import Unsupported
from treadle_core.layers import ModelSpec
from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.mlx_runtime.split import SplitModel
from treadle_core.pacing import FixedChunk
from treadle_core.plan import Key
from treadle_core.testing import zoo
from treadle_core.testing.drafting import LastWrongDrafter, SteadyController

TOKENS = [7, 301, 45, 88, 9, 120, 33]
PROMPTS = ((5, 3, 7, 2, 11, 9, 30, 31, 8, 22, 40, 41, 6, 1, 2, 3, 4, 9, 90), (6, 4, 9), (8,))


class Listening:
    """Keeps what it hears, by row and position.

    Attributes:
        heard: The newest hidden state of each position.
        widths: Tokens per row of each forward.
    """

    def __init__(self) -> None:
        self.heard: dict[Key, dict[int, Any]] = {}
        self.widths: list[int] = []

    def hear(self, states: HiddenStates) -> None:
        self.widths.append(states.hidden.shape[1])
        for lane, row in enumerate(states.rows):
            known = self.heard.setdefault(row.key, {})
            for place in range(row.num_tokens):
                known[row.start + place] = states.hidden[lane, place]


class Broken(Listening):
    def hear(self, states: HiddenStates) -> None:
        super().hear(states)
        raise RuntimeError("it broke")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_5", "gemma3"])
def test_the_halves_of_a_model_make_up_its_logits(family: str) -> None:
    model = SplitModel(zoo.build(family))

    hidden = model.hidden(mx.array([TOKENS]), model.new_cache())

    assert hidden.shape == (1, len(TOKENS), 64)
    assert (model.hidden_size, model.vocab_size) == (64, zoo.VOCAB_SIZE)
    whole = zoo.reference_logits(model.model, TOKENS)
    assert mx.array_equal(model.logits(hidden)[0], whole)


def test_a_model_whose_logits_are_capped_is_refused() -> None:
    with pytest.raises(Unsupported, match="gemma2 cannot be read: its last norm and output head"):
        SplitModel(zoo.build("gemma2"))


def test_a_model_that_takes_media_is_refused() -> None:
    model = TextModel(zoo.build("llama"))
    spec: ModelSpec = inspect(model, zoo.config("llama"))

    with pytest.raises(Unsupported, match="cannot be read: it takes media"):
        ModelRunner(model, replace(spec, media=True)).split()


def runner_of(k: int) -> ModelRunner:
    model = TextModel(zoo.build("llama"))
    return ModelRunner(model, inspect(model, zoo.config("llama")), slack=k)


def answers(runner: ModelRunner, k: int, truth: dict[str, list[int]]) -> dict[str, Sequence[int]]:
    """The answers to all prompts, with drafts that are wrong at the end, if ``k``."""

    def go_on(tokens: Sequence[int], num: int) -> list[int]:
        known = next(each for each in truth.values() if each[: len(tokens)] == list(tokens))
        return [*known[len(tokens) :], *[1] * num][:num]

    engine = Engine(
        runner,
        config=EngineConfig(max_num_seqs=3, max_num_batched_tokens=64),
        chunk=FixedChunk(8),
        drafter=LastWrongDrafter(go_on) if k else None,
        controller=SteadyController(k) if k else None,
    )
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=12 + i)
        engine.add(Request(id=f"r{i}", prompt=prompt, params=params))
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
    return {key[0]: completion.tokens for key, completion in collect(events).items()}


def test_a_listener_hears_every_committed_position_of_every_row() -> None:
    plain = answers(runner_of(0), 0, {})
    truth = {f"r{i}": [*prompt, *plain[f"r{i}"]] for i, prompt in enumerate(PROMPTS)}
    runner, listening = runner_of(3), Listening()
    split = runner.split()
    runner.listen(listening, split)

    assert answers(runner, 3, truth) == plain

    assert {1, 4, 18} <= set(listening.widths)
    for name, tokens in truth.items():
        expected = split.hidden(mx.array([tokens[:-1]]), split.new_cache())[0]
        heard = listening.heard[(name, 0)]
        mine = mx.stack([heard[position] for position in range(len(tokens) - 1)])
        scale = mx.abs(expected).max().item()
        assert float(np.abs(np.array(mine - expected)).max()) < 1e-4 * scale


def test_rows_do_not_suffer_from_a_listener_that_breaks() -> None:
    runner, broken = runner_of(0), Broken()
    plain = answers(runner_of(0), 0, {})
    runner.listen(broken, runner.split())

    assert answers(runner, 0, {}) == plain

    assert len(broken.widths) == 1


def test_listening_leaves_the_fingerprint_as_it_is() -> None:
    runner = runner_of(0)
    before = runner.fingerprint
    runner.listen(Listening(), runner.split())

    assert runner.fingerprint == before
