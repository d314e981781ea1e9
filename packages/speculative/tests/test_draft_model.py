"""A small model that drafts: whatever it says, and however much of it is kept."""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from treadle_core import Completion, Engine, EngineConfig, Request, SamplingParams, collect
from treadle_core.drafting import Drafter, DraftRoom, Verified, VerifiedStep
from treadle_core.errors import Unsupported
from treadle_core.layers import ModelSpec, layer_bytes
from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.load import ModelOptions, load, load_draft_model, make_runner
from treadle_core.mlx_runtime.probe import check_fusing
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.pacing import FixedChunk
from treadle_core.plan import Key
from treadle_core.testing import zoo
from treadle_core.testing.drafting import A, B, DrafterContract, SteadyController, draft_row
from treadle_speculative import (
    AdaptiveController,
    DraftModelConfig,
    DraftModelDrafter,
    SpeculativeConfig,
    make_drafter,
)

VOCAB = zoo.VOCAB_SIZE
SAME, OTHER = 0, 5


class Words:
    """A vocabulary."""

    def __init__(
        self, vocabulary: Mapping[str, int] | None = None, special: Sequence[int] = (1,)
    ) -> None:
        plain = {f"t{token}": token for token in range(VOCAB)}
        self.vocabulary = plain if vocabulary is None else dict(vocabulary)
        self.special_tokens = frozenset(special)


@cache
def model_of(family: str, seed: int = SAME) -> Any:
    return zoo.build(family, seed=seed)


@cache
def subject(family: str, seed: int = SAME) -> tuple[TextModel, ModelSpec]:
    model = TextModel(model_of(family, seed))
    return model, inspect(model, zoo.config(family))


def runner_of(family: str, seed: int = SAME, slack: int = 4) -> ModelRunner:
    model, spec = subject(family, seed)
    # As loaded models are run: a piece of a prompt goes through the model with other rows.
    return ModelRunner(model, spec, slack=slack, fuses=check_fusing(model, spec))


def drafter_of(
    family: str = "llama", seed: int = SAME, *, slack: int = 4, config: Any = None, **options: Any
) -> DraftModelDrafter:
    return DraftModelDrafter(runner_of(family, seed, slack), Words(), Words(), config, **options)


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 * place + 13 * salt + place * place) % 256 for place in range(length))


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"temperature": 1.0, "top_k": 30, "presence_penalty": 0.7},
    {"temperature": 0.8, "min_p": 0.03, "logit_bias": {7: 3.0}, "min_tokens": 5},
]


def requests_of(num: int, max_tokens: int = 24) -> list[Request]:
    lengths = (1, 9, 30, 64, 100, 3)
    return [
        Request(
            id=f"r{i}",
            prompt=prompt_of(lengths[i % len(lengths)], i),
            params=SamplingParams(max_tokens=max_tokens - i, seed=i, **KINDS[i % len(KINDS)]),
        )
        for i in range(num)
    ]


def play(engine: Engine, requests: Sequence[Request], every: int = 3) -> dict[str, Completion]:
    """Run requests that arrive one after the other."""
    waiting, events = list(requests), list[Any]()
    for number in range(5_000):
        if waiting and number % every == 0:
            engine.add(waiting.pop(0))
        if not waiting and not engine.has_work:
            break
        events += engine.step()
    return {key[0]: completion for key, completion in collect(events).items()}


@cache
def plain(family: str, num: int) -> dict[str, list[int]]:
    engine = Engine(runner_of(family, slack=0), config=EngineConfig(max_num_seqs=4))
    return tokens_of(play(engine, requests_of(num)))


def tokens_of(found: Mapping[str, Completion]) -> dict[str, list[int]]:
    return {id: list(completion.tokens) for id, completion in found.items()}


def drafting(family: str, drafter: DraftModelDrafter, k: int, **options: Any) -> Engine:
    return Engine(
        runner_of(family, slack=k),
        config=EngineConfig(max_num_seqs=4, **options),
        drafter=drafter,
        controller=SteadyController(k),
    )


class TestContract(DrafterContract):
    @pytest.fixture
    def make_drafter(self) -> Callable[[], Drafter]:
        return drafter_of

    @pytest.fixture
    def vocab_size(self) -> int:
        return VOCAB


class TestWindowedContract(TestContract):
    @pytest.fixture
    def make_drafter(self) -> Callable[[], Drafter]:
        return lambda: drafter_of("gemma3")


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_a_draft_model_that_thinks_alike_is_always_right(family: str, k: int) -> None:
    """Greedy or drawn, filtered, penalised or biased: with the same noise it chooses the same."""
    engine = drafting(family, drafter_of(family, slack=k), k)

    found = play(engine, requests_of(6))

    assert tokens_of(found) == plain(family, 6)
    total = engine.stats().drafts
    assert total is not None
    assert total.attempted > 40
    # What was drafted behind an answer's end is all that may be in vain.
    assert total.rejected <= k


@pytest.mark.parametrize(
    ("family", "small", "seed"), [("llama", "llama", OTHER), ("gemma3", "llama", SAME)]
)
def test_a_draft_model_that_thinks_otherwise_changes_no_token(
    family: str, small: str, seed: int
) -> None:
    engine = drafting(family, drafter_of(small, seed), 4)

    found = play(engine, requests_of(6))

    assert tokens_of(found) == plain(family, 6)
    total = engine.stats().drafts
    assert total is not None
    assert total.rejected > 100


def test_what_was_not_kept_leaves_no_trace_in_its_slots() -> None:
    """After drafts that were kept in part, it goes on as one that reads the row afresh."""
    for family in ("llama", "gemma3"):
        drafter = drafter_of(family)
        output: list[int] = []
        drafter.join(draft_row(A, prompt_of(40), output, seed=3, temperature=0.9))
        drafter.join(draft_row(B, prompt_of(11), []))
        for step in range(12):
            proposal, _ = drafter.propose([DraftRoom(A, 4), DraftRoom(B, 2)])
            output += [*proposal.tokens[: step % 5], 9 * step % 250]
            if step % 3:
                continue
            fresh = drafter_of(family)
            fresh.join(draft_row(A, prompt_of(40), output, seed=3, temperature=0.9))
            while (expected := fresh.propose([DraftRoom(A, 4)])[0]).pending:
                pass
            while (found := drafter.propose([DraftRoom(A, 4)])[0]).pending:
                pass
            assert found == expected
            assert len(found.tokens) == 4


def test_a_long_prompt_is_read_in_pieces_while_others_are_drafted_for() -> None:
    drafter = drafter_of(chunk=FixedChunk(16))
    drafter.join(draft_row(A, prompt_of(5), []))
    drafter.join(draft_row(B, prompt_of(70), []))
    pending = 0
    while True:
        short, long = drafter.propose([DraftRoom(A, 3), DraftRoom(B, 3)])
        assert len(short.tokens) == 3
        if not long.pending:
            break
        assert long.tokens == ()
        pending += 1
    assert pending == 3
    alone = drafter_of()
    alone.join(draft_row(B, prompt_of(70), []))
    while (expected := alone.propose([DraftRoom(B, 3)])[0]).pending:
        pass
    assert long == expected


class Told(FixedChunk):
    """Lets a chunk share a forward or not, and notes how many did."""

    def __init__(self, *, fuses: bool) -> None:
        super().__init__(16)
        self.num_fused = 0
        self._may = fuses

    def fuses(self, num_decoding: int) -> bool:
        return self._may

    def observe_fused(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        self.num_fused += 1


@pytest.mark.parametrize("fuses", [True, False])
def test_a_chunk_shares_the_forward_of_drafting_where_it_may(fuses: bool) -> None:
    chunk = Told(fuses=fuses)
    drafter = drafter_of(chunk=chunk)
    drafter.join(draft_row(A, prompt_of(5), []))
    drafter.join(draft_row(B, prompt_of(70), []))

    while drafter.propose([DraftRoom(A, 3), DraftRoom(B, 3)])[1].pending:
        pass

    assert bool(chunk.num_fused) == fuses


def test_rows_beyond_its_memory_decode_plainly() -> None:
    spec = runner_of("llama").spec
    bytes_of_two = sum(layer_bytes(layer, 2, 128, 4) for layer in spec.layers)
    drafter = drafter_of(config=DraftModelConfig(kv_memory_bytes=bytes_of_two))
    engine = drafting("llama", drafter, 4)
    held: list[int] = []
    waiting, events = requests_of(6), list[Any]()
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop(0))
        events += engine.step()
        held.append(engine.stats().draft_bytes)

    assert tokens_of({k[0]: c for k, c in collect(events).items()}) == plain("llama", 6)
    assert 0 < max(held) <= bytes_of_two
    assert held[-1] == 0
    total = engine.stats().drafts
    assert total is not None
    assert total.accepted > 10
    assert total.bypassed["no_draft"] > 10


def test_both_models_share_the_engines_budget() -> None:
    drafter = drafter_of()
    engine = drafting("llama", drafter, 4, kv_memory_bytes=700_000)
    peak = 0
    for request in requests_of(6):
        engine.add(request)
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        peak = max(peak, stats.kv_bytes + stats.draft_bytes)
    assert 0 < peak <= 700_000
    assert drafter_of().take_share(1_000, subject("llama")[1]) == 500
    greedy = drafter_of(config=DraftModelConfig(kv_memory_bytes=3000))
    with pytest.raises(Unsupported, match="kv_memory_bytes of the draft model: got 3000"):
        drafting("llama", greedy, 4, kv_memory_bytes=3000)


def test_rows_that_are_aborted_or_preempted_leave_nothing_behind() -> None:
    drafter = drafter_of()
    engine = drafting("llama", drafter, 4, kv_memory_bytes=600_000)
    requests = requests_of(6)
    for request in requests:
        engine.add(request)
    events: list[Any] = []
    for step in range(400):
        if step == 6:
            engine.abort("r3")
        events += engine.step()
        if not engine.has_work:
            break
    found = tokens_of({k[0]: c for k, c in collect(events).items()})
    expected = plain("llama", 6)
    for id in ("r0", "r1", "r2", "r4", "r5"):
        assert found[id] == expected[id]
    assert found["r3"] == expected["r3"][: len(found["r3"])]
    assert drafter.held_bytes == 0


def test_a_closed_engine_lets_go_of_the_draft_model() -> None:
    drafter = drafter_of()
    gone = weakref.ref(drafter)
    engine = drafting("llama", drafter, 4)
    del drafter
    play(engine, requests_of(1))

    engine.close()

    gc.collect()
    assert gone() is None


def test_a_row_that_says_what_it_does_not_know_gets_no_drafts() -> None:
    drafter = drafter_of(num_known=200)
    output: list[int] = []
    drafter.join(draft_row(A, (5, 6, 7), output))
    assert drafter.propose([DraftRoom(A, 3)])[0].tokens
    output += [250]

    assert drafter.propose([DraftRoom(A, 3)])[0].tokens == ()
    assert drafter.held_bytes == 0


def test_a_row_that_does_not_ask_is_not_fed_what_is_not_known_either() -> None:
    drafter = drafter_of(num_known=200)
    output: list[int] = []
    drafter.join(draft_row(A, (5, 6, 7), output))
    drafter.join(draft_row(B, (8, 9), []))
    drafter.propose([DraftRoom(A, 3), DraftRoom(B, 3)])
    output += [250, 5]

    assert drafter.propose([DraftRoom(B, 3)])[0].tokens
    assert drafter.propose([DraftRoom(A, 3)])[0].tokens == ()


def test_a_row_longer_than_its_context_gets_no_drafts() -> None:
    config = {**zoo.config("llama"), "max_position_embeddings": 48}
    runner = make_runner(model_of("llama"), config, slack=4)
    drafter = DraftModelDrafter(runner, Words(), Words())
    output: list[int] = []
    drafter.join(draft_row(A, prompt_of(10), output))
    found: list[int] = []
    for _ in range(12):
        tokens = drafter.propose([DraftRoom(A, 4)])[0].tokens
        found.append(len(tokens))
        output += tokens or [1, 2, 3, 4]
    assert found[0] == 4
    assert found[-1] == 0


def test_logits_of_another_number_are_cut_or_filled_up() -> None:
    """The same noise needs as many logits, and ids are the large model's."""
    for width in (VOCAB - 20, VOCAB + 20):
        runner = make_runner(model_of("llama"), zoo.config("llama"), slack=4, vocab_size=width)
        assert runner.spec.vocab_size == width
        assert runner.spec.batched
        drafter = DraftModelDrafter(runner, Words(), Words(), num_known=VOCAB)
        drafter.join(draft_row(A, prompt_of(9), [], seed=1, temperature=2.0))
        tokens = drafter.propose([DraftRoom(A, 4)])[0].tokens
        assert all(token < min(VOCAB, width) for token in tokens)


DIFFERENT: list[tuple[Words, Words, str]] = [
    (
        Words({"a": 0, "b": 1}),
        Words({"a": 1, "b": 0}),
        "token 'b' is 0 in the model's tokenizer, it is 1 there",
    ),
    (
        Words({"a": 0}),
        Words({"a": 0, "b": 1}),
        "token 'b' is 1 in the model's tokenizer, it has no such",
    ),
    (Words({"a": 0, "b": 1}), Words({"a": 0}), r"token 'b' \(1\) is not in the model's"),
    (Words(special=(1, 2)), Words(special=(1,)), "token 2 is special in its own tokenizer only"),
    (
        Words(special=(1,)),
        Words(special=(1, 3)),
        "token 3 is special in the model's tokenizer only",
    ),
]


@pytest.mark.parametrize(("draft", "target", "why"), DIFFERENT)
def test_another_tokenizer_is_refused_by_its_first_difference(
    draft: Words, target: Words, why: str
) -> None:
    with pytest.raises(Unsupported, match=why):
        DraftModelDrafter(runner_of("llama"), draft, target)


@pytest.mark.parametrize(("family", "why"), [("mamba2", "recurrent"), ("llama4", "one at a time")])
def test_models_that_cannot_take_tokens_back_do_not_draft(family: str, why: str) -> None:
    runner = make_runner(model_of(family), zoo.config(family), slack=4)
    with pytest.raises(Unsupported, match=f"draft_model: .* cannot draft: .*{why}"):
        DraftModelDrafter(runner, Words(), Words())


def test_a_draft_model_is_loaded_beside_its_target(tmp_path: Any) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "small", seed=OTHER)
    target = load(ModelOptions(model=str(zoo.save_checkpoint("llama", tmp_path / "large"))))
    config = SpeculativeConfig(method="draft_model", model=str(folder), num_tokens=3)

    drafter = make_drafter(config, target)

    assert isinstance(drafter, DraftModelDrafter)
    drafter.join(draft_row(A, (5, 6, 7), []))
    assert len(drafter.propose([DraftRoom(A, 3)])[0].tokens) == 3
    _, known = load_draft_model(str(folder), vocab_size=VOCAB + 7, max_draft_tokens=2)
    assert known == VOCAB


def test_the_controller_begins_no_rows_where_reading_them_does_not_pay() -> None:
    """Prompts of 64 steps each for answers of one: after a while new rows are left alone."""
    controller = AdaptiveController()
    keys: list[Key] = [(f"row{i}", 0) for i in range(40)]
    asked = [begin(controller, key) for key in keys]
    assert asked[0]
    assert not any(asked[8:])


def begin(controller: AdaptiveController, key: Key) -> bool:
    """A short answer to a prompt that takes long to be read; whether it was begun."""
    any_asked = False
    for _ in range(4):
        asked = any(controller.limits([DraftRoom(key, 4)]))
        any_asked |= asked
        row = Verified(key=key, drafted=0, accepted=0, tokens=(1,), pending=asked)
        controller.observe(
            VerifiedStep(rows=(row,), width=1, asked=asked, seconds=0.1, draft_seconds=3.2 * asked)
        )
    controller.leave(key)
    return any_asked
