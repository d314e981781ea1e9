"""A drafter over a head: answers stay what they are, and drafts are what the head alone would say."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from treadle_core import Completion, Engine, EngineConfig, Request, SamplingParams, collect
from treadle_core.drafting import (
    DraftController,
    Drafter,
    DraftRoom,
    HeardRow,
    HiddenStates,
    Proposal,
    Verified,
)
from treadle_core.layers import ModelSpec, is_recurrent
from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.fusing import prepare
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.mlx_runtime.split import SplitModel
from treadle_core.pacing import FixedChunk
from treadle_core.plan import Key, RowSetup
from treadle_core.testing import RecordingStore, ScriptedConstraint, zoo
from treadle_core.testing.drafting import DrafterContract, SteadyController, draft_row
from treadle_speculative.mtp.drafter import MtpDrafter
from treadle_speculative.mtp.files import parameters
from treadle_speculative.mtp.head import HeadForm, MtpHead
from treadle_speculative.mtp.rows import HeadRow, Piece

from .mtp_models import bigram, randomised

CONTEXT = 512
LENGTHS = (1, 33, 64, 140, 17, 5)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5, "top_k": 40},
    {"temperature": 0.0},
)


@cache
def pair(family: str) -> tuple[SplitModel, MtpHead]:
    """A model and a head that is often right; tests leave them as they are."""
    return bigram(family, 0.02)


def reference_draft(
    heads: Sequence[MtpHead], tokens: list[int], origin: int, num: int
) -> list[int]:
    """What heads say behind ``tokens``, computed from nothing, greedily.

    Args:
        heads: The heads, in their order.
        tokens: Prompt and answer so far.
        origin: The first position whose hidden state the first is given.
        num: Tokens to draft.
    """
    base, head, cache = heads[0].base, heads[0], heads[0].new_cache()
    hidden = base.hidden(mx.array([tokens[:-1]]), base.new_cache())[:, origin:]
    found: list[int] = []
    for place in range(num):
        if place < len(heads):
            head, cache = heads[place], heads[place].new_cache()
            behind = [*tokens, *found][origin + 1 + place :]
            hidden = head(hidden, mx.array([behind]), cache)
        else:
            hidden = head(hidden[:, -1:], mx.array([found[-1:]]), cache)
        found.append(int(mx.argmax(head.logits(hidden)[0, -1]).item()))
    return found


class Checked:
    """An MTP drafter whose greedy drafts are held against :func:`reference_draft`, now and then.

    Args:
        inner: The drafter.
        heads: Its heads.
        every: Check the n-th proposals only.

    Attributes:
        compared: Drafts that were compared.
        origins: The first position that was heard of each row.
    """

    def __init__(self, inner: MtpDrafter, *heads: MtpHead, every: int = 2) -> None:
        self._inner = inner
        self._heads = heads
        self._every = every
        self._setups: dict[Key, RowSetup] = {}
        self._asked = 0
        self.compared = 0
        self.origins: dict[Key, int] = {}

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def held_bytes(self) -> int:
        return self._inner.held_bytes

    def hear(self, states: HiddenStates) -> None:
        for row in states.rows:
            self.origins.setdefault(row.key, row.start)
        self._inner.hear(states)

    def join(self, setup: RowSetup) -> None:
        self._setups[setup.key] = setup
        self.origins.pop(setup.key, None)
        self._inner.join(setup)

    def leave(self, key: Key) -> None:
        self._inner.leave(key)

    def propose(self, rooms: Sequence[DraftRoom]) -> list[Proposal]:
        found = self._inner.propose(rooms)
        self._asked += 1
        for room, proposal in zip(rooms, found, strict=True):
            assert len(proposal.tokens) == room.most, "a row whose hidden states are there drafts"
            setup = self._setups[room.key]
            greedy = setup.params.greedy and not setup.params.has_penalties
            if greedy and proposal.tokens and self._asked % self._every == 0:
                tokens = [*setup.prompt, *setup.output]
                origin = self.origins[room.key]
                expected = reference_draft(self._heads, tokens, origin, len(proposal.tokens))
                assert list(proposal.tokens) == expected
                self.compared += 1
        return found

    def observe(self, verified: Sequence[Verified]) -> None:
        self._inner.observe(verified)

    def reset(self) -> None:
        self._inner.reset()


def engine_of(
    base: SplitModel,
    drafter: Any = None,
    *,
    k: int = 0,
    store: Any = None,
    controller: DraftController | None = None,
    lossy: bool = False,
    **config: Any,
) -> Engine:
    """An engine over a model, with a drafter that listens, if there is one."""
    model = TextModel(base.model)
    spec = inspect(model, {"max_position_embeddings": CONTEXT})
    # Chunks go through the model together with decoding rows where a loaded model's do.
    fuses = not is_recurrent(spec) and prepare(base.model)
    runner = ModelRunner(model, spec, slack=k, fuses=fuses)
    if drafter is not None:
        runner.listen(drafter, base)
        controller = controller or SteadyController(k)
    return Engine(
        runner,
        config=EngineConfig(
            **{"max_num_seqs": 4, "max_num_batched_tokens": 256, "checkpoint_interval": 16} | config
        ),
        chunk=FixedChunk(16),
        store=store,
        drafter=drafter,
        controller=controller,
        lossy=lossy,
    )


def requests(**changes: Any) -> list[Request]:
    """Rows of every kind, of all lengths."""
    rng = random.Random(1)
    return [
        Request(
            id=f"r{i}",
            prompt=tuple(rng.randrange(256) for _ in range(length)),
            params=SamplingParams(**{"max_tokens": 26 - i, **kind, **changes}),
        )
        for i, (length, kind) in enumerate(zip(LENGTHS, KINDS, strict=True))
    ]


def odd_places() -> ScriptedConstraint:
    """At every other place a third of all tokens is allowed; the answer is complete after 17."""
    allowed = [range(place % 3, zoo.VOCAB_SIZE, 3) if place % 2 else None for place in range(40)]
    return ScriptedConstraint(allowed, complete_after=17, vocab_size=zoo.VOCAB_SIZE)


def masked_requests() -> list[Request]:
    """Rows that forbid tokens, penalise them, or see their logits changed, beside one that is free."""
    ends = tuple(range(0, zoo.VOCAB_SIZE, 2))
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({}, {"constraint": odd_places}),
        ({"temperature": 0.9, "seed": 4}, {"constraint": odd_places}),
        ({"repetition_penalty": 1.4, "presence_penalty": 0.6}, {"constraint": odd_places}),
        ({"min_tokens": 11, "stop_token_ids": ends, "logit_bias": {9: 2.0}}, {}),
        ({"frequency_penalty": 0.5}, {"logits_processors": (lambda tokens, logits: -logits,)}),
    ]
    rng = random.Random(2)
    return [
        Request(
            id=f"r{i}",
            prompt=tuple(rng.randrange(256) for _ in range(length)),
            params=SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **params}),
            **more,
        )
        for i, (length, (params, more)) in enumerate(zip(LENGTHS, kinds, strict=True))
    ]


def play(
    engine: Engine,
    asked: Sequence[Request],
    every: int = 3,
    meanwhile: Callable[[int], None] = lambda number: None,
) -> dict[str, Completion]:
    """Run requests that arrive one after the other."""
    waiting, events = list(asked), list[Any]()
    for number in range(2_000):
        if waiting and number % every == 0:
            engine.add(waiting.pop(0))
        if not waiting and not engine.has_work:
            break
        events += engine.step()
        engine.check_integrity()
        meanwhile(number)
    assert not engine.has_work
    drafts = engine.stats().drafts
    # A drafter that raises is dropped in silence, and so is a comparison that fails within one.
    assert drafts is None or drafts.failures == 0
    return {key[0]: completion for key, completion in collect(events).items()}


@cache
def plain(family: str) -> dict[str, Sequence[int]]:
    found = play(engine_of(pair(family)[0]), requests())
    return {name: completion.tokens for name, completion in found.items()}


def tokens_of(found: dict[str, Completion]) -> dict[str, Sequence[int]]:
    return {name: completion.tokens for name, completion in found.items()}


@pytest.mark.parametrize(
    ("family", "k"),
    [("llama", 1), ("llama", 5), ("deepseek_v3", 3), ("qwen3_5", 3), ("qwen3_next", 2)],
)
def test_rows_that_join_and_leave_get_their_plain_answers(family: str, k: int) -> None:
    base, head = pair(family)
    drafter = Checked(MtpDrafter(head, context_length=CONTEXT), head)
    engine = engine_of(base, drafter, k=k)

    found = play(engine, requests())

    assert tokens_of(found) == plain(family)
    assert drafter.compared >= 9
    total = engine.stats().drafts
    assert total is not None
    assert total.failures == 0
    assert total.accepted > 0.3 * total.attempted
    assert total.rejected > 10
    assert drafter.held_bytes == 0


def test_a_head_that_thinks_like_the_model_draws_like_it() -> None:
    """Sampled rows too, with filters and penalties, and each with its own seed."""
    base, head = bigram("llama", 0.0)
    engine = engine_of(base, MtpDrafter(head, context_length=CONTEXT), k=3)

    found = play(engine, requests())

    assert tokens_of(found) == tokens_of(play(engine_of(base), requests()))
    total = engine.stats().drafts
    assert total is not None
    assert total.accepted == total.attempted > 50


def test_a_head_that_is_always_wrong_changes_nothing() -> None:
    base, _ = pair("llama")
    # What it says depends on every position that it has seen, its own guesses included.
    head = randomised(MtpHead(base), gain=4.0)
    engine = engine_of(base, Checked(MtpDrafter(head, context_length=CONTEXT), head), k=4)

    found = play(engine, requests())

    assert tokens_of(found) == plain("llama")
    total = engine.stats().drafts
    assert total is not None
    assert total.accepted < 0.1 * total.attempted


def test_a_row_that_was_long_off_is_caught_up_with() -> None:
    """Nothing is drafted for 80 tokens; what waits is bounded, and then drafts are right at once."""

    class Late(SteadyController):
        def asks(self) -> bool:
            return len(self.steps) % 90 >= 80

    base, head = pair("llama")
    inner = MtpDrafter(head, context_length=CONTEXT)
    drafter = Checked(inner, head, every=1)
    engine = engine_of(base, drafter, k=2, controller=Late(2))
    asked = [r for r in requests(max_tokens=90)[:4] if r.params.greedy]
    waiting: list[int] = []
    whole = engine_of(base)

    found = play(
        engine,
        asked,
        meanwhile=lambda _: waiting.append(
            sum(row.waiting_bytes for rows in inner._rows.values() for row in rows)
        ),
    )

    assert tokens_of(found) == tokens_of(play(whole, asked))
    assert drafter.compared >= 3
    # A step may be in flight whose tokens nobody has read.
    assert max(waiting) <= 4 * 67 * base.hidden_size * 4


def several(family: str, num: int) -> tuple[SplitModel, list[MtpHead]]:
    """A model, a head that is often right, and heads behind it that look at everything they saw."""
    base, head = pair(family)
    more = [bigram(family, 0.02)[1] for _ in range(num - 1)]
    for place, each in enumerate(more, 1):
        width = base.hidden_size
        noise = mx.random.normal((width, 2 * width), key=mx.random.key(place)) * 0.4 * width**-0.5
        each.fc.weight = each.fc.weight + noise
    last = MtpHead(base, HeadForm(own_output=True))
    last.load_weights(parameters(more[-1]), strict=False)
    assert base.output is not None
    last.lm_head.weight = mx.roll(base.output.weight, 1, axis=0)
    mx.eval(last.parameters())
    return base, [head, *more[:-1], last]


@pytest.mark.parametrize(
    ("family", "num", "k"), [("llama", 2, 5), ("llama", 4, 3), ("qwen3_5", 3, 4)]
)
def test_each_place_of_a_draft_has_its_own_head(family: str, num: int, k: int) -> None:
    base, heads = several(family, num)
    drafter = Checked(MtpDrafter(*heads, context_length=CONTEXT), *heads, every=1)
    engine = engine_of(base, drafter, k=k)

    found = play(engine, requests())

    assert tokens_of(found) == plain(family)
    assert drafter.compared > 20
    total = engine.stats().drafts
    assert total is not None
    assert total.accepted > 20
    assert total.rejected > 20
    assert drafter.held_bytes == 0


def test_several_heads_begin_anew_together() -> None:
    base, heads = several("llama", 2)
    drafter = MtpDrafter(*heads, context_length=CONTEXT)
    prompt = tuple(range(40))
    drafter.join(draft_row(("a", 0), prompt, []))
    hidden = base.hidden(mx.array([prompt]), base.new_cache())
    drafter.hear(HiddenStates((HeardRow(("a", 0), 0, 30),), hidden[:, :30]))
    drafter._see(("a", 0), 0, 29)

    drafter.hear(HiddenStates((HeardRow(("a", 0), 34, 6),), hidden[:, 34:]))

    assert [row.origin for row in drafter._rows["a", 0]] == [34, 34]
    assert [row.due for row in drafter._rows["a", 0]] == [5, 0]
    (proposal,) = drafter.propose([DraftRoom(("a", 0), 4)])
    assert list(proposal.tokens) == reference_draft(heads, list(prompt), 34, 4)


def test_several_heads_catch_up_with_a_row_that_was_off_or_came_from_a_store() -> None:
    class Rarely(SteadyController):
        def asks(self) -> bool:
            return len(self.steps) % 30 >= 20

    base, heads = several("llama", 3)
    drafter = Checked(MtpDrafter(*heads, context_length=CONTEXT), *heads, every=1)
    store = RecordingStore()
    engine = engine_of(
        base, drafter, k=4, store=store, controller=Rarely(4), kv_memory_bytes=350_000
    )
    asked = requests(max_tokens=70)[:4]

    found = play(engine, asked, every=1)

    assert tokens_of(found) == tokens_of(play(engine_of(base), asked))
    assert max(store.found) > 0
    assert max(drafter.origins.values()) > 0
    assert drafter.compared > 10


@pytest.mark.parametrize(("family", "k"), [("llama", 4), ("qwen3_next", 3)])
def test_rows_that_forbid_tokens_get_their_plain_answers_too(family: str, k: int) -> None:
    base, head = pair(family)
    engine = engine_of(base, MtpDrafter(head, context_length=CONTEXT), k=k)

    found = play(engine, masked_requests())

    plainly = play(engine_of(base), masked_requests())
    assert tokens_of(found) == tokens_of(plainly)
    assert {name: each.reason for name, each in found.items()} == {
        name: each.reason for name, each in plainly.items()
    }
    drafts = [found[f"r{i}"].usage.drafts for i in range(6)]
    # What they forbid is never accepted, and what they allow is.
    assert all(each.accepted > 0 and each.rejected > 0 for each in drafts[1:4])
    assert drafts[5].attempted == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_lossy_rows_still_forbid_what_they_forbid(family: str) -> None:
    base, _ = pair(family)
    head = randomised(MtpHead(base), gain=4.0)
    drafter = MtpDrafter(head, context_length=CONTEXT)
    engine = engine_of(base, drafter, k=3, lossy=True)

    found = play(engine, masked_requests())

    free = found["r0"].usage.drafts
    assert free.lossy == free.accepted == free.attempted > 10
    assert 0 < found["r1"].usage.drafts.lossy < found["r1"].usage.drafts.attempted
    for name in ("r1", "r2", "r3"):
        tokens = found[name].tokens
        assert len(tokens) == 17
        assert [token % 3 for token in tokens[1::2]] == [place % 3 for place in range(1, 17, 2)]
    assert all(token % 2 for token in found["r4"].tokens[:10])
    assert len(found["r4"].tokens) >= 11
    # Nobody drafts for it.
    assert found["r5"].tokens == play(engine_of(base), masked_requests())["r5"].tokens
    assert drafter.held_bytes == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_rows_that_are_aborted_leave_nothing_behind(family: str) -> None:
    base, head = pair(family)
    drafter = Checked(MtpDrafter(head, context_length=CONTEXT), head)
    engine = engine_of(base, drafter, k=3)

    def abort(number: int) -> None:
        if number in (4, 11, 19):
            engine.abort({4: "r1", 11: "r0", 19: "r5"}[number])

    found = play(engine, requests(), meanwhile=abort)

    for name in ("r2", "r3", "r4"):
        assert found[name].tokens == plain(family)[name]
    assert found["r1"].reason == "abort"
    assert drafter.held_bytes == 0


@pytest.mark.parametrize(
    ("family", "memory", "num_tokens"), [("llama", 300_000, 40), ("qwen3_next", 350_000, 130)]
)
def test_rows_that_come_back_from_a_store_draft_on_with_what_the_head_has_heard(
    family: str, memory: int, num_tokens: int
) -> None:
    """Memory for one long row: the others are preempted, their states stored, and restored."""
    base, head = pair(family)
    drafter = Checked(MtpDrafter(head, context_length=CONTEXT), head, every=num_tokens // 20)
    store = RecordingStore()
    engine = engine_of(base, drafter, k=3, store=store, kv_memory_bytes=memory)
    asked = requests(max_tokens=num_tokens)[:4]

    found = play(engine, asked, every=1)

    assert tokens_of(found) == tokens_of(play(engine_of(base), asked))
    assert max(drafter.origins.values()) > 0
    assert max(store.found) > 0
    assert any(completion.usage.preemptions for completion in found.values())
    assert drafter.compared > 10


def test_what_is_stored_beside_drafts_is_exactly_what_plain_decoding_stores() -> None:
    base, head = pair("deepseek_v3")
    stores = [RecordingStore(), RecordingStore()]
    drafter = MtpDrafter(head, context_length=CONTEXT)

    speculating = play(engine_of(base, drafter, k=5, store=stores[0]), requests())
    plainly = play(engine_of(base, store=stores[1]), requests())

    assert tokens_of(speculating) == tokens_of(plainly)
    longest = [{max(s.inserted, key=len)} for s in stores]
    assert longest[0] == longest[1]
    for name, completion in speculating.items():
        prompt = next(r.prompt for r in requests() if r.id == name)
        whole = (*prompt, *completion.tokens)
        assert any(key == whole[: len(key)] for key in stores[0].inserted)


def test_a_step_that_fails_leaves_drafter_and_rows_in_step() -> None:
    base, head = pair("llama")
    drafter = Checked(MtpDrafter(head, context_length=CONTEXT), head)

    class FailingSplit(SplitModel):
        calls = 0

        def hidden(self, tokens: mx.array, caches: list[Any], rows: Any = ()) -> mx.array:
            self.calls += 1
            if self.calls == 40:
                raise RuntimeError("the model broke")
            return super().hidden(tokens, caches, rows)

    engine = engine_of(FailingSplit(base.model), drafter, k=3)

    assert tokens_of(play(engine, requests())) == plain("llama")
    assert drafter.compared > 5


def test_the_drafter_takes_its_share_of_the_memory() -> None:
    base, head = pair("llama")
    spec: ModelSpec = inspect(TextModel(base.model), {"max_position_embeddings": CONTEXT})

    # Of four layers of the same size, three are the model's.
    assert MtpDrafter(head, context_length=CONTEXT).take_share(500_000, spec) == 375_000


@pytest.mark.parametrize("share", [40_000, 125_000])
def test_rows_without_room_get_no_drafts_and_their_answers(share: int) -> None:
    base, head = pair("llama")
    drafter = MtpDrafter(head, context_length=CONTEXT)
    drafter.take_share(4 * share, inspect(TextModel(base.model), {}))
    highest: list[int] = []
    engine = engine_of(base, drafter, k=3)

    found = play(engine, requests(), meanwhile=lambda _: highest.append(drafter.held_bytes))

    assert tokens_of(found) == plain("llama")
    assert max(highest) <= share + 4 * 70 * base.hidden_size * 4
    total = engine.stats().drafts
    assert total is not None
    assert total.failures == 0
    assert total.bypassed["no_draft"] > 0


class Fed:
    """An MTP drafter that is told the hidden states of all that is committed before it is asked."""

    def __init__(self, head: MtpHead) -> None:
        self._inner = MtpDrafter(head, context_length=CONTEXT)
        self._base = head.base
        self._setups: dict[Key, RowSetup] = {}
        self._fed: dict[Key, int] = {}

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def held_bytes(self) -> int:
        return self._inner.held_bytes

    def join(self, setup: RowSetup) -> None:
        self._setups[setup.key], self._fed[setup.key] = setup, 0
        self._inner.join(setup)

    def leave(self, key: Key) -> None:
        self._inner.leave(key)

    def propose(self, rooms: Sequence[DraftRoom]) -> list[Proposal]:
        for room in rooms:
            setup, start = self._setups[room.key], self._fed[room.key]
            tokens = [*setup.prompt, *setup.output][:-1]
            if len(tokens) > start:
                hidden = self._base.hidden(mx.array([tokens]), self._base.new_cache())[:, start:]
                heard = HeardRow(room.key, start, len(tokens) - start)
                self._inner.hear(HiddenStates((heard,), hidden))
                self._fed[room.key] = len(tokens)
        return self._inner.propose(rooms)

    def observe(self, verified: Sequence[Verified]) -> None:
        self._inner.observe(verified)

    def reset(self) -> None:
        self._inner.reset()


class TestContract(DrafterContract):
    @pytest.fixture
    def make_drafter(self) -> Callable[[], Drafter]:
        return lambda: Fed(pair("llama")[1])

    @pytest.fixture
    def vocab_size(self) -> int:
        return zoo.VOCAB_SIZE

    def test_it_does_draft(self, make_drafter: Callable[[], Drafter]) -> None:
        drafter = make_drafter()
        drafter.join(draft_row(("a", 0), (5, 6, 7), []))

        assert len(drafter.propose([DraftRoom(("a", 0), 4)])[0].tokens) == 4


class TestHeadRow:
    """What a row makes of the stretches that it hears."""

    @staticmethod
    def row(prompt: int, output: list[int] | None = None) -> HeadRow:
        return HeadRow(draft_row(("a", 0), tuple(range(prompt)), output or []))

    @staticmethod
    def piece(start: int, stop: int, first: float = 0.0) -> Piece:
        return Piece(start, stop, mx.arange(first, first + stop - start)[None, :, None], 0, 0)

    @staticmethod
    def values(pieces: Sequence[Piece]) -> list[float]:
        return [
            p.hidden[p.lane, p.offset + i, 0].item()
            for p in pieces
            for i in range(p.stop - p.start)
        ]

    def test_a_position_is_due_when_the_token_behind_it_is_known(self) -> None:
        output: list[int] = []
        row = HeadRow(draft_row(("a", 0), (1, 2, 3), output))
        row.hear(self.piece(0, 3))
        assert (row.due, row.is_ready) == (2, True)
        output.append(9)
        assert row.due == 3
        assert row.tokens(1, 4) == [2, 3, 9]

    def test_what_is_heard_again_replaces_what_was_heard_before(self) -> None:
        row = self.row(12)
        row.hear(self.piece(0, 4))
        row.hear(self.piece(4, 8, 4.0))
        row.hear(self.piece(5, 7, 50.0))
        assert self.values(row.take(row.due)) == [0, 1, 2, 3, 4, 50, 51]

    def test_what_was_seen_and_is_heard_again_is_written_again(self) -> None:
        row = self.row(12)
        row.hear(self.piece(0, 6))
        row.take(6)
        row.hear(self.piece(4, 6, 40.0))
        assert (row.seen, row.length, row.due) == (4, 4, 2)
        assert self.values(row.take(1)) == [40]
        assert self.values(row.take(9)) == [41]

    def test_behind_a_gap_it_begins_anew(self) -> None:
        row = self.row(20)
        row.hear(self.piece(0, 6))
        row.take(3)
        row.hear(self.piece(9, 12))
        assert (row.origin, row.seen, row.length, row.due) == (9, 9, 0, 3)
        row.take(3)
        row.hear(self.piece(2, 4))
        assert (row.origin, row.length, row.due) == (2, 0, 2)

    def test_one_that_was_given_up_hears_nothing(self) -> None:
        row = self.row(12)
        row.hear(self.piece(0, 4))
        row.bar()
        row.hear(self.piece(0, 4))
        assert (row.due, row.waiting_bytes, row.is_ready) == (0, 0, False)
