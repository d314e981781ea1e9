"""Reuse as an engine's users see it: what is counted, what waits, and what a faulty store may do."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from msgspec.structs import replace

from treadle_core.batch import run
from treadle_core.engine import Engine, EngineConfig
from treadle_core.errors import InvalidRequest, Unsupported
from treadle_core.events import Event, Failed, Finished, TokenOut
from treadle_core.layers import state_layout
from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.mlx_runtime.probe import check_storing
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.plan import Plan, Prefill, Restore
from treadle_core.ports import RowReader
from treadle_core.prefix import MediaSpan, Prefix, PrefixKey
from treadle_core.request import Request, SamplingParams
from treadle_core.testing import (
    SMALL_SPEC,
    Fault,
    ManualClock,
    RecordingStore,
    ScriptedRunner,
    hashed,
    zoo,
)
from treadle_core.testing.scripted import ScriptedStep

LONG = tuple(range(3, 203))


def request(id: str, prompt: Sequence[int] = LONG, max_tokens: int = 3, **options: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(id=id, prompt=tuple(prompt), params=params, **options)


class Rig:
    """An engine over a scripted runner and a store."""

    def __init__(self, store: RecordingStore, faults: Sequence[Fault] = (), **options: Any) -> None:
        self.store = store
        self.clock = ManualClock()
        self.runner = ScriptedRunner(hashed(), faults=faults, clock=self.clock)
        config = EngineConfig(**options)
        self.engine = Engine(self.runner, config=config, clock=self.clock, store=store)
        self.ended: dict[str, Finished | Failed] = {}

    def step(self) -> list[Event]:
        events = self.engine.step()
        self.ended |= {e.request_id: e for e in events if isinstance(e, Finished | Failed)}
        return events

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("it never ends")

    def cached(self, id: str) -> int:
        return self.ended[id].usage.cached_tokens

    def chunks(self, id: str) -> list[tuple[int, int]]:
        work = (item for plan in self.runner.plans for item in plan.work)
        mine = (item for item in work if isinstance(item, Prefill) and item.key[0] == id)
        return [(item.start, len(item.tokens)) for item in mine]


def test_tokens_that_are_computed_again_after_a_failure_do_not_count_as_reused() -> None:
    rig = Rig(RecordingStore(), faults=[Fault(skip=4)])
    rig.engine.add(request("first"))
    rig.run()
    rig.engine.add(request("second", max_tokens=30))
    rig.run()
    computed = {at for start, num in rig.chunks("second") for at in range(start, start + num)}
    assert computed, "the failure made nothing be computed again"
    # The last token is fed by the decode that samples the first.
    assert rig.cached("second") == len(LONG) - len(computed | {len(LONG) - 1})


def test_who_ends_does_not_wait_for_the_chunk_of_another() -> None:
    """Between its last token and its end, nothing is prefilled."""
    rig = Rig(RecordingStore(), max_num_seqs=2, prefill_step_size=64)
    rig.engine.add(request("short", LONG[:5], max_tokens=4))
    told, when_last = sum(isinstance(event, TokenOut) for event in rig.step()), 0
    rig.engine.add(request("long", LONG * 4))
    while "short" not in rig.ended:
        for event in rig.step():
            told += isinstance(event, TokenOut) and event.request_id == "short"
        if told == 4 and not when_last:
            when_last = len(rig.chunks("long"))
    assert told == 4
    assert len(rig.chunks("long")) == when_last
    assert LONG[:5] == rig.store.inserted[-1][:5] or LONG[:5] in [t[:5] for t in rig.store.inserted]
    rig.run()


class CannotArrange(ScriptedRunner):
    """Fails the first time that rows are to change without the model running."""

    failed = False

    def submit(self, plan: Plan) -> ScriptedStep:
        if plan.work and not plan.has_work and not self.failed:
            self.failed = True
            raise RuntimeError("no memory")
        return super().submit(plan)


def test_what_a_step_would_have_restored_is_let_go_if_its_first_part_fails() -> None:
    runner, store = CannotArrange(hashed()), RecordingStore()
    engine = Engine(runner, config=EngineConfig(chunked_prefill_tokens=32), store=store)
    engine.add(request("known", LONG[:64], max_tokens=40))
    engine.add(request("leaves", range(4), max_tokens=40))
    while not store.inserted or engine.scheduler.num_waiting:
        engine.step()
    for _ in range(3):
        engine.step()

    engine.abort("leaves")
    engine.add(request("short", range(9, 14)))
    engine.add(request("again", LONG[:64] + LONG[100:120]))
    while engine.has_work:
        engine.step()

    assert runner.failed
    assert max(store.found) == 63
    assert not store.open_tickets


def test_a_long_answer_is_stored_piece_by_piece() -> None:
    rig = Rig(RecordingStore())
    rig.engine.add(request("long", LONG[:10], max_tokens=900))
    rig.run()
    lengths = [len(tokens) for tokens in rig.store.inserted]
    assert len(lengths) >= 4
    assert max(b - a for a, b in itertools.pairwise(lengths)) <= 260


def test_a_prompt_is_looked_up_again_before_its_first_chunk() -> None:
    """It got its row, for the sake of a short one behind it, before its twin was computed."""
    rig = Rig(RecordingStore(), max_num_seqs=4, chunked_prefill_tokens=16, prefill_step_size=64)
    rig.engine.add(request("stream", LONG[:3], max_tokens=60))
    rig.step()
    rig.engine.add(request("one"))
    rig.engine.add(request("twin"))
    rig.engine.add(request("short", LONG[:4]))
    rig.run()
    assert rig.cached("twin") >= len(LONG) - 20


def test_a_tier_that_hangs_is_given_up() -> None:
    rig = Rig(RecordingStore(delay=10**9), max_num_seqs=1)
    rig.engine.add(request("first"))
    rig.run()
    rig.engine.add(request("second"))
    for _ in range(5):
        rig.step()
    assert rig.engine.scheduler.is_waiting_for_state
    rig.clock.advance(11)
    rig.run()
    assert rig.cached("second") == 0
    assert not rig.store.open_tickets


def test_what_is_read_ahead_is_let_go_however_a_request_ends() -> None:
    rig = Rig(RecordingStore(), max_num_seqs=1)
    rig.engine.add(request("runs"))
    rig.engine.add(request("waits", n=2))
    rig.engine.add(request("late", deadline=5.0))
    rig.engine.add(request("left"))
    assert len(rig.store.open_tickets) == 4
    rig.step()
    assert len(rig.store.open_tickets) == 3, "it has its row"
    rig.engine.abort("waits")
    assert len(rig.store.open_tickets) == 2
    rig.clock.advance(6)
    rig.step()
    assert len(rig.store.open_tickets) == 1
    rig.engine.close()
    assert not rig.store.open_tickets


def test_a_row_that_waited_through_a_clear_is_stored() -> None:
    store = RecordingStore(delay=3, lost=True)
    rig = Rig(store)
    rig.engine.add(request("first"))
    rig.run()
    rig.engine.add(request("second"))
    rig.step()
    store.clear()
    store.inserted.clear()
    rig.run()
    assert LONG[:-1] in store.inserted


class Broken(RecordingStore):
    """A store with a method that raises."""

    def __init__(self, method: str) -> None:
        super().__init__(delay=2)
        self.method = method

    def find(self, key: PrefixKey, limit: int) -> Prefix:
        self.fail("find")
        return super().find(key, limit)

    def poll(self, ticket: int) -> Prefix | None:
        self.fail("poll")
        return super().poll(ticket)

    def release(self, ticket: int) -> None:
        self.fail("release")
        super().release(ticket)

    def prefetch(self, key: PrefixKey, limit: int) -> int:
        self.fail("prefetch")
        return super().prefetch(key, limit)

    def fail(self, method: str) -> None:
        if method == self.method:
            raise OSError("the store is broken")


@pytest.mark.parametrize("method", ["find", "poll", "release", "prefetch"])
def test_a_store_that_raises_hurts_nobody(method: str) -> None:
    rig = Rig(Broken(method))
    expected = Rig(RecordingStore())
    for each in (rig, expected):
        for id in ("first", "second"):
            each.engine.add(request(id))
            each.run()
    assert all(isinstance(event, Finished) for event in rig.ended.values())
    assert len(rig.ended) == 2
    assert method == "release" or not rig.store.open_tickets


class Asked(RecordingStore):
    """Keeps every key that it is given, by what for."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[tuple[str, PrefixKey]] = []

    def find(self, key: PrefixKey, limit: int) -> Prefix:
        self.keys.append(("find", key))
        return super().find(key, limit)

    def prefetch(self, key: PrefixKey, limit: int) -> int:
        self.keys.append(("prefetch", key))
        return super().prefetch(key, limit)

    def insert(self, key: PrefixKey, row: RowReader, generation: int) -> None:
        self.keys.append(("insert", key))
        super().insert(key, row, generation)


def test_every_key_of_a_request_has_its_media_and_salt() -> None:
    store, media = Asked(), (MediaSpan(5, 9, b"picture"),)
    model = TextModel(zoo.build("llama"))
    spec = replace(inspect(model, zoo.config("llama")), media=True)
    engine = Engine(ModelRunner(model, spec), config=EngineConfig(), store=store)

    for name in ("first", "second"):
        run(engine, [request(name, media=media, cache_salt="tenant")])

    assert {name for name, _ in store.keys} == {"find", "prefetch", "insert"}
    assert {(key.media, key.salt) for _, key in store.keys} == {(media, "tenant")}


def test_a_salt_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cache_salt"):
        request("salt", cache_salt="\ud800")


def test_a_restore_that_fails_makes_its_own_row_cold() -> None:
    """And nobody gets another's state: both answers are those of the script."""
    store = RecordingStore()
    rig = Rig(store, faults=[])
    rig.engine.add(request("first"))
    rig.run()
    before = len(rig.runner.plans)
    rig.engine.add(request("second"))
    rig.run()
    restores = [p for p in rig.runner.plans[before:] for w in p.work if isinstance(w, Restore)]
    assert len(restores) == 1


# Models whose own caches hold more than they tell.


class Silent(KVCache):
    """Its state says nothing."""

    @property
    def state(self) -> Any:
        return []

    @state.setter
    def state(self, value: Any) -> None:
        pass


class Sealed(KVCache):
    """Its state cannot be set."""

    @property
    def state(self) -> Any:
        return (self.keys, self.values)


class Odd(KVCache):
    """Its state is neither arrays nor plain data."""

    @property
    def state(self) -> Any:
        return {"keys": self.keys}


def llama_with(make: Callable[[], Any]) -> Any:
    model = zoo.build("llama")
    number = len(model.model.layers)
    type(model)  # the module itself stays as it is; only its cache differs
    return TextModel(model, make_cache=lambda _: [make() for _ in range(number)])


@pytest.mark.parametrize("kind", [Silent, Sealed, Odd])
def test_caches_that_do_not_come_back_are_not_stored(kind: Callable[[], Any]) -> None:
    text = llama_with(kind)
    spec = inspect(text, zoo.config("llama"))
    assert not spec.batched
    checked = check_storing(text, spec)
    assert not checked.storable
    assert "stor" in checked.note
    runner = ScriptedRunner(hashed(), spec=replace(SMALL_SPEC, storable=False, note=checked.note))
    with pytest.raises(Unsupported, match="can be stored"):
        Engine(runner, store=RecordingStore())


@pytest.mark.parametrize("family", ["llama4", "gpt_bigcode", "gemma2"])
def test_own_caches_of_known_families_come_back(family: str) -> None:
    assert make_runner(zoo.build(family), zoo.config(family)).spec.storable


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gpt_bigcode"])
def test_what_is_not_a_number_is_not_stored(family: str) -> None:
    """Whatever made it so once must not come back for ever."""
    model = zoo.build(family)
    runner = make_runner(model, zoo.config(family))
    weights = dict(tree_flatten(model.parameters()))
    path = next(p for p in weights if p.endswith(("embed_tokens.weight", "wte.weight")))
    spoiled = mx.array(weights[path])
    spoiled[9] = float("nan")
    model.load_weights([(path, spoiled)], strict=False)
    store = RecordingStore()
    engine = Engine(runner, store=store)
    engine.add(request("bad", (5, 6, 9, 7, 8)))
    events = [event for _ in range(40) if engine.has_work for event in engine.step()]
    assert any(isinstance(event, Failed) for event in events)
    assert store.stats().num_entries == 0
    assert state_layout(runner.spec).format


def test_what_was_computed_before_a_clear_is_not_stored_though_it_was_looked_up_after_it() -> None:
    """A prompt is looked up again while it is prefilled; its first chunks stay what they are."""
    rig = Rig(RecordingStore(), chunked_prefill_tokens=16, prefill_step_size=16)
    rig.engine.add(request("long"))
    rig.step()
    assert rig.chunks("long")
    rig.engine.clear_prefixes()
    rig.run()
    assert rig.store.inserted == []


def test_a_request_is_one_lookup_however_many_chunks_its_prompt_takes() -> None:
    """Looking again counts only where it finds more."""
    rig = Rig(RecordingStore(), chunked_prefill_tokens=16, prefill_step_size=16)
    rig.engine.add(request("first", LONG[:50]))
    rig.run()
    rig.engine.add(request("second", (*LONG[:40], *LONG[:100])))
    rig.run()
    assert len(rig.chunks("second")) > 3
    assert rig.store.found == [0, 40]
