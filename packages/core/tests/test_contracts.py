"""Our implementations and our fakes keep the contracts of their ports."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from msgspec.structs import replace

from treadle_core.clock import SystemClock
from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.mlx_runtime.tokenizer import ModelTokenizer
from treadle_core.pacing import AdaptiveChunk, FixedChunk
from treadle_core.testing import (
    SMALL_SPEC,
    ByteTokenizer,
    ListConstraint,
    ManualClock,
    RecordingObserver,
    ScriptedConstraint,
    ScriptedRunner,
    expected_tokens,
    hashed,
    zoo,
)
from treadle_core.testing.contracts import (
    ChunkPolicyContract,
    ClockContract,
    ObserverContract,
    Oracle,
    RunnerContract,
    TokenConstraintContract,
    TokenizerContract,
)
from treadle_core.testing.fakes import VOCAB_SIZE

SCRIPT = hashed(250)


class TestSystemClock(ClockContract):
    @pytest.fixture
    def clock(self) -> SystemClock:
        return SystemClock()


class TestManualClock(ClockContract):
    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()


def test_a_manual_clock_moves_when_it_is_told_to() -> None:
    clock = ManualClock(5.0)

    clock.advance(1.5)

    assert clock.now() == 6.5


class TestFixedChunk(ChunkPolicyContract):
    @pytest.fixture
    def policy(self) -> FixedChunk:
        return FixedChunk(64)


class TestAdaptiveChunk(ChunkPolicyContract):
    @pytest.fixture(params=[None, 0.15])
    def policy(self, request: pytest.FixtureRequest) -> AdaptiveChunk:
        return AdaptiveChunk(request.param)


class TestByteTokenizer(TokenizerContract):
    @pytest.fixture(params=[False, True])
    def tokenizer(self, request: pytest.FixtureRequest) -> ByteTokenizer:
        return ByteTokenizer(opens=request.param)


class TestModelTokenizer(TokenizerContract):
    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> ModelTokenizer:
        folder = zoo.save_checkpoint("llama", tmp_path)
        config = json.loads((folder / "config.json").read_text())
        return ModelTokenizer(load_tokenizer(folder), config)


class TestListConstraint(TokenConstraintContract):
    @pytest.fixture
    def constraint(self) -> ListConstraint:
        return ListConstraint([[1, 2, 3], [1, 5], [7, 2, 3, 4]])

    @pytest.fixture
    def path(self) -> list[int]:
        return [7, 2, 3, 4]

    @pytest.fixture
    def vocab_size(self) -> int:
        return VOCAB_SIZE


class TestScriptedConstraint(TokenConstraintContract):
    @pytest.fixture
    def constraint(self) -> ScriptedConstraint:
        return ScriptedConstraint([{4, 255}, None, {258}], complete_after=4)

    @pytest.fixture
    def path(self) -> list[int]:
        return [255, 0, 258, 3]

    @pytest.fixture
    def vocab_size(self) -> int:
        return VOCAB_SIZE


class TestRecordingObserver(ObserverContract):
    @pytest.fixture
    def observer(self) -> RecordingObserver:
        return RecordingObserver()


class TestScriptedRunner(RunnerContract):
    @pytest.fixture(params=[True, False])
    def runner(self, request: pytest.FixtureRequest) -> ScriptedRunner:
        drafts = 4 if request.param else 0
        spec = replace(SMALL_SPEC, batched=request.param)
        return ScriptedRunner(SCRIPT, spec=spec, max_draft_tokens=drafts)

    @pytest.fixture
    def oracle(self) -> Oracle:
        return lambda prompt, num_tokens: expected_tokens(SCRIPT, prompt, num_tokens)


@cache
def tiny_model(family: str) -> TextModel:
    return TextModel(zoo.build(family))


@cache
def greedy(family: str, prompt: tuple[int, ...]) -> list[int]:
    return zoo.greedy(tiny_model(family).model, prompt, 8)


class ModelRunnerContract(RunnerContract):
    FAMILY = "llama"
    BATCHED = True

    @pytest.fixture
    def runner(self) -> ModelRunner:
        model = tiny_model(self.FAMILY)
        spec = replace(inspect(model, zoo.config(self.FAMILY)), batched=self.BATCHED)
        return ModelRunner(model, spec, slack=4)

    @pytest.fixture
    def oracle(self) -> Oracle:
        def of(prompt: Sequence[int], num_tokens: int) -> list[int]:
            return greedy(self.FAMILY, tuple(prompt))[:num_tokens]

        return of


class TestModelRunner(ModelRunnerContract):
    pass


class TestModelRunnerWithRowsOfTheirOwn(ModelRunnerContract):
    BATCHED = False


class TestModelRunnerWithRecurrentLayers(ModelRunnerContract):
    FAMILY = "qwen3_next"
