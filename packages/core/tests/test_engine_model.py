"""What the engine promises, on a real model: faults of one row, memory that is given back."""

import gc
import random
import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from treadle_core import (
    Engine,
    EngineConfig,
    Failed,
    InvalidRequest,
    Request,
    SamplingParams,
    Unsupported,
    collect,
    run,
)
from treadle_core.layers import Opaque
from treadle_core.mlx_runtime.adapter import RowInput, TextModel, inspect
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.mlx_runtime.sampler import DrawParams, Row, keep_likely
from treadle_core.pacing import FixedChunk
from treadle_core.plan import RowSetup
from treadle_core.prefix import MediaSpan
from treadle_core.testing import RecordingStore, zoo
from treadle_core.testing.drafting import LastWrongDrafter, OracleDrafter, SteadyController

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


class ShiftingModel(TextModel):
    """Adds to the tokens of a prompt what its request attached, position by position."""

    def forward(
        self, tokens: mx.array, caches: list[Any], rows: Sequence[RowInput] = ()
    ) -> mx.array:
        num_tokens = tokens.shape[1]
        shifts = [[shift_at(row, row.start + index) for index in range(num_tokens)] for row in rows]
        return super().forward(tokens + mx.array(shifts), caches, rows)


def shift_at(row: RowInput, position: int) -> int:
    shifts: tuple[int, ...] = row.prompt or ()
    return shifts[position] if position < len(shifts) else 0


def with_media(name: str, prompt: tuple[int, ...], shift: int) -> Request:
    """Its second half is a media item that adds ``shift``."""
    half = len(prompt) // 2
    span = MediaSpan(half, len(prompt) - half, bytes([shift]))
    shifts = (0,) * half + (shift,) * span.length
    return Request(id=name, prompt=prompt, params=greedy(8), media=(span,), attachment=shifts)


class TestMedia:
    PROMPT = tuple(range(10, 50))

    def engine(
        self, store: RecordingStore | None = None, drafter: OracleDrafter | None = None
    ) -> Engine:
        model = ShiftingModel(zoo.build("llama"))
        spec = replace(inspect(TextModel(model.model), zoo.config("llama")), media=True)
        controller = SteadyController(3) if drafter else None
        return Engine(
            ModelRunner(model, spec, slack=3),
            chunk=FixedChunk(16),
            store=store,
            drafter=drafter,
            controller=controller,
        )

    def expected(self, shift: int) -> tuple[int, ...]:
        half = len(self.PROMPT) // 2
        shifted = (*self.PROMPT[:half], *(token + shift for token in self.PROMPT[half:]))
        engine = Engine(make_runner(zoo.build("llama"), zoo.config("llama")))
        return self.answers(engine, [Request(id="r", prompt=shifted, params=greedy(8))])["r"]

    def answers(self, engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
        completions = collect(run(engine, requests))
        return {key[0]: tuple(answer.tokens) for key, answer in completions.items()}

    def test_each_row_has_its_own_attachment(self) -> None:
        requests = [with_media(f"shift{shift}", self.PROMPT, shift) for shift in (3, 7, 3)]
        requests = [replace(r, id=f"{index}") for index, r in enumerate(requests)]
        text = Request(id="text", prompt=self.PROMPT, params=greedy(8))

        found = self.answers(self.engine(), [requests[0], text, *requests[1:]])

        shifts = {"0": 3, "1": 7, "2": 3, "text": 0}
        assert found == {name: self.expected(shift) for name, shift in shifts.items()}

    @pytest.mark.parametrize("kind", [OracleDrafter, LastWrongDrafter])
    def test_drafts_are_verified_with_each_rows_own_attachment(
        self, kind: type[OracleDrafter]
    ) -> None:
        # They go on behind the prompt, so that answers without them would be others.
        requests = [
            Request(
                id=f"{shift}",
                prompt=self.PROMPT[shift:],
                params=greedy(12),
                media=(MediaSpan(0, 1, bytes([shift])),),
                attachment=(shift,) * 60,
            )
            for shift in (3, 7, 0)
        ]
        expected = self.answers(self.engine(), requests)

        def go_on(tokens: Sequence[int], num: int) -> list[int]:
            (request,) = (r for r in requests if r.prompt[0] == tokens[0])
            known = [*request.prompt, *expected[request.id]]
            assert known[: len(tokens)] == list(tokens)
            return [*known[len(tokens) :], *[1] * num][:num]

        engine = self.engine(drafter=kind(go_on))
        found = self.answers(engine, requests)

        assert found == expected
        drafts = engine.stats().drafts
        assert drafts is not None
        assert drafts.accepted > 12

    def test_an_attachment_ends_with_its_request(self) -> None:
        engine = self.engine()
        self.answers(engine, [with_media("r", self.PROMPT, 3)])

        found = self.answers(engine, [Request(id="r", prompt=self.PROMPT, params=greedy(8))])

        assert found["r"] == self.expected(0)

    def test_what_is_stored_is_reused_for_the_same_media_only(self) -> None:
        store = RecordingStore()
        engine, half = self.engine(store), len(self.PROMPT) // 2

        for shift in (3, 7, 3):
            found = self.answers(engine, [with_media("r", self.PROMPT, shift)])
            assert found["r"] == self.expected(shift)

        assert store.found == [0, half, len(self.PROMPT) - 1]

    def test_a_model_that_reads_text_refuses_media(self) -> None:
        engine = Engine(make_runner(zoo.build("llama"), zoo.config("llama")))

        with pytest.raises(InvalidRequest, match="media: got '1 spans', expected none: the model"):
            engine.add(with_media("r", self.PROMPT, 3))
