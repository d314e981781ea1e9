"""Any sequence of calls leaves stores that keep their promises, in RAM alone and over two tiers."""

from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from treadle_cache.config import CacheConfig
from treadle_cache.index import MIN_LONE_TOKENS
from treadle_cache.ram import RamStore
from treadle_cache.storage import HeldRow
from treadle_cache.testing import FakeSlowTier, layout_of
from treadle_cache.tiered import TieredStore
from treadle_core.prefix import HostArray, Prefix, PrefixKey, StateLayout
from treadle_core.testing.prefixes import KeyedRow

SIZE = 3
FEWEST = min(SIZE, MIN_LONE_TOKENS)
LAYOUTS = (
    layout_of("bfloat16", "float16", "float32"),
    layout_of("float32"),
    layout_of("float16", "bfloat16", has_state=True),
    layout_of(has_state=True),
)
ROOMY = 1 << 20

LARGEST_MATCH = 600
"""Bytes; about a match of nine tokens in the widest layout."""

keys = st.builds(
    PrefixKey,
    # Mostly the same token, so that prompts begin alike.
    tokens=st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=1, max_size=9).map(tuple),
    salt=st.sampled_from(["", "", "", "", "", "tenant"]),
)


class WatchedRow(KeyedRow):
    """A row that looks, whenever it is read, at what the store holds at that instant."""

    def __init__(
        self,
        key: PrefixKey,
        layout: StateLayout,
        store: RamStore,
        failure: Exception | None = None,
    ) -> None:
        super().__init__(key, layout, failure)
        self._store = store

    def tokens(self, start: int, stop: int) -> list[HostArray]:
        self._look()
        return super().tokens(start, stop)

    def state(self) -> list[HostArray]:
        self._look()
        return super().state()

    def _look(self) -> None:
        assert self._store._count_bytes() <= self._store.stats().capacity_bytes


@dataclass
class Known:
    """What was stored: pairs of a salt and all tokens up to some point.

    Where layers can be cut, that is any point of a full block.
    """

    prefixes: set[tuple[str, tuple[int, ...]]] = field(
        default_factory=set[tuple[str, tuple[int, ...]]]
    )

    def add(self, key: PrefixKey, layout: StateLayout) -> None:
        end = len(key.tokens)
        ends = [end] if layout.has_state else range(FEWEST, end - end % SIZE + 1)
        self.prefixes |= {(key.salt, key.tokens[:n]) for n in ends}

    def longest(self, key: PrefixKey, limit: int) -> int:
        lengths = range(min(limit, len(key.tokens)), 0, -1)
        return next((n for n in lengths if (key.salt, key.tokens[:n]) in self.prefixes), 0)


def cut(key: PrefixKey, num_tokens: int) -> PrefixKey:
    return PrefixKey(tokens=key.tokens[:num_tokens], salt=key.salt)


def hash_of(arrays: list[HostArray]) -> bytes:
    digest = blake2b()
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.digest()


class Machine(RuleBasedStateMachine):
    """What both machines share: the RAM store that they look into, and what was stored."""

    ram: RamStore
    store: RamStore | TieredStore
    layout: StateLayout

    def begin(self, layout: StateLayout, capacity: int) -> None:
        self.layout = layout
        self.ram = RamStore(CacheConfig(capacity_bytes=capacity, block_size=SIZE))
        self.known = Known()
        self.held: dict[int, PrefixKey] = {}
        self.contents: dict[bytes, bytes] = {}
        self.names: dict[bytes, PrefixKey] = {}
        self.generations = [0]

    def keep(self, key: PrefixKey) -> None:
        row = WatchedRow(key, self.layout, self.ram)
        self.store.insert(key, row, self.store.generation)
        self.known.add(key, self.layout)
        for number, digest in enumerate(self.ram.chain(key).digests, 1):
            self.names[digest] = cut(key, number * SIZE)

    def check(self, ticket: int) -> None:
        """What a ticket holds is what computing exactly its tokens gives."""
        row, key = self.store.load(ticket), self.held[ticket]
        fresh = KeyedRow(cut(key, row.num_tokens), self.layout)
        loaded = [row.tokens(index) for index in range(len(self.layout.tokens))]
        expected = fresh.tokens(0, row.num_tokens) + fresh.state()
        assert hash_of(loaded + row.state()) == hash_of(expected)

    @precondition(lambda self: self.store.generation)
    @rule(key=keys, data=st.data())
    def insert_what_was_begun_before_a_clear(self, key: PrefixKey, data: st.DataObject) -> None:
        before = data.draw(st.integers(0, self.store.generation - 1))
        row = KeyedRow(key, self.layout)
        self.store.insert(key, row, before)
        assert row.reads == []
        assert row.num_state_reads == 0

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.check(data.draw(st.sampled_from(sorted(self.held))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.held)))
        self.check(ticket)
        self.store.release(ticket)
        del self.held[ticket]

    @invariant()
    def promises_are_kept(self) -> None:
        self.store.check_integrity()
        stats = self.store.stats()
        assert stats.used_bytes <= stats.capacity_bytes
        index = self.ram._index
        assert index.num_free_slots + index.num_cached_slots + index.num_pinned_slots == (
            index.num_slots
        )
        for ticket in self.held:
            row = self.store.load(ticket)
            assert isinstance(row, HeldRow)
            assert all(not block.flags.writeable for block in row.blocks)

    @invariant()
    def what_a_digest_names_never_changes(self) -> None:
        for entry in self.ram._index.entries():
            stored = hash_of(list(self.ram._arrays_of(entry)))
            assert self.contents.setdefault(entry.digest, stored) == stored


class RamMachine(Machine):
    """Insert, find, load, release, resize, clear, spill and restore, in any order."""

    store: RamStore

    @initialize(layout=st.sampled_from(LAYOUTS), capacity=st.integers(0, 16_000) | st.just(ROOMY))
    def start(self, layout: StateLayout, capacity: int) -> None:
        self.begin(layout, capacity)
        self.store = self.ram
        self.store.attach("weights", layout)
        self.lossless = capacity == ROOMY
        self.folder = Path(mkdtemp())
        self.saved: Known | None = None

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            rmtree(self.folder)

    def best(self, key: PrefixKey, limit: int) -> int:
        """The longest usable match, by trying every length on what is there."""
        there = {entry.digest for entry in self.store._index.entries()}
        chain = self.store.chain(key)
        blocks = [self.names[digest] for digest in there & self.names.keys()]
        for num_tokens in range(min(limit, len(key.tokens)), 0, -1):
            if self.layout.has_state:
                if chain.end(num_tokens) in there:
                    return num_tokens
            elif num_tokens >= FEWEST:
                wanted = cut(key, num_tokens)
                if any(cut(block, num_tokens) == wanted for block in blocks):
                    return num_tokens
        return 0

    @rule(key=keys)
    def insert(self, key: PrefixKey) -> None:
        self.keep(key)

    @rule(key=keys, more=st.lists(st.integers(0, 1), max_size=3).map(tuple))
    def take_turns(self, key: PrefixKey, more: tuple[int, ...]) -> None:
        self.keep(key)
        self.find(PrefixKey(tokens=key.tokens + more, salt=key.salt), len(key.tokens + more) - 1)

    @rule(key=keys, failure=st.sampled_from([MemoryError, RuntimeError, ValueError]))
    def insert_what_cannot_be_read(self, key: PrefixKey, failure: type[Exception]) -> None:
        row = WatchedRow(key, self.layout, self.store, failure())
        self.store.insert(key, row, self.store.generation)
        if row.reads or row.num_state_reads:
            self.lossless &= failure is not MemoryError

    @rule(key=keys, limit=st.integers(-1, 10))
    def find(self, key: PrefixKey, limit: int) -> None:
        best = self.best(key, limit)
        prefix = self.store.find(key, limit)
        assert prefix.num_tokens == best
        assert prefix.num_tokens in (0, self.known.longest(key, best))
        if self.lossless:
            assert prefix.num_tokens == self.known.longest(key, limit)
        inside = not self.layout.has_state and best % SIZE
        event("hit inside a block" if inside else "hit" if best else f"miss: {prefix.miss}")
        assert (prefix.ticket is None) == (best == 0) == (prefix.miss is not None)
        if prefix.ticket is not None:
            self.held[prefix.ticket] = key
            self.check(prefix.ticket)

    @rule(capacity=st.integers(0, 16_000))
    def resize(self, capacity: int) -> None:
        self.store.resize(capacity)
        self.lossless = False
        if not self.held:
            assert self.store.stats().capacity_bytes == capacity

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.known = Known()

    @rule()
    def spill(self) -> None:
        num_entries = self.store.stats().num_entries
        assert self.store.save_to_disk(self.folder / "saved") == num_entries
        self.saved = Known(set(self.known.prefixes))

    @precondition(lambda self: self.saved is not None)
    @rule()
    def restore(self) -> None:
        assert self.saved is not None
        restored = self.store.load_from_disk(self.folder / "saved")
        event("restored" if restored else "nothing restored")
        self.known.prefixes |= self.saved.prefixes
        assert self.store.stats().details["damaged_entries"] == 0
        # What was saved may have been evicted or have failed before.
        self.lossless = False


class TieredMachine(Machine):
    """Insert, find, wait, prefetch, load, release, resize, damage and clear, in any order."""

    store: TieredStore

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        capacity=st.just(0) | st.integers(0, 16_000),
        delayed=st.booleans(),
        max_read_bytes=st.just(LARGEST_MATCH) | st.just(ROOMY),
    )
    def start(self, layout: StateLayout, capacity: int, delayed: bool, max_read_bytes: int) -> None:
        self.begin(layout, capacity)
        self.slow = FakeSlowTier(delayed=delayed)
        self.store = TieredStore(self.ram, self.slow, max_read_bytes=max_read_bytes)
        self.store.attach("weights", layout)
        self.pending: dict[int, tuple[PrefixKey, int, int, int]] = {}
        self.fetching: list[int] = []
        self.max_read_bytes = max_read_bytes

    def readable(self, key: PrefixKey, limit: int) -> int:
        """The longest match that nothing damaged can spoil, by trying every length."""
        chain = self.ram.chain(key)
        for num_tokens in range(min(limit, len(key.tokens)), 0, -1):
            wanted = set(chain.digests[: num_tokens // SIZE])
            if self.layout.has_state:
                wanted.add(chain.end(num_tokens))
            elif num_tokens % SIZE:
                continue
            if wanted <= self.slow.entries.keys() - self.slow.damaged:
                return num_tokens
        return 0

    def accept(self, key: PrefixKey, prefix: Prefix, low: int, high: int) -> None:
        """A prefix came out; it is at least ``low`` and at most ``high`` tokens long."""
        assert low <= prefix.num_tokens <= high
        assert (prefix.ticket is None) == (prefix.num_tokens == 0) == (prefix.miss is not None)
        if prefix.ticket is not None:
            self.held[prefix.ticket] = key
            self.check(prefix.ticket)

    @rule(key=keys)
    def insert(self, key: PrefixKey) -> None:
        self.keep(key)

    @rule(key=keys, limit=st.integers(-1, 10))
    def find(self, key: PrefixKey, limit: int) -> None:
        low, high = self.readable(key, limit), self.known.longest(key, limit)
        ram = self.ram.peek(self.ram.chain(key), limit)
        prefix = self.store.find(key, limit)
        event("ready" if prefix.ready else "on its way")
        if prefix.ready:
            self.accept(key, prefix, max(low, ram), high)
        else:
            # The slower tier has whole blocks.
            high -= 0 if self.layout.has_state else high % SIZE
            assert ram < prefix.num_tokens == high
            assert prefix.ticket is not None
            self.pending[prefix.ticket] = (key, ram, high, self.store.generation)

    @rule(key=keys, more=st.lists(st.integers(0, 1), max_size=3).map(tuple))
    def take_turns(self, key: PrefixKey, more: tuple[int, ...]) -> None:
        self.keep(key)
        self.find(PrefixKey(tokens=key.tokens + more, salt=key.salt), len(key.tokens + more) - 1)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.pending)))
        prefix = self.store.poll(ticket)
        if prefix is None:
            return
        key, ram, high, generation = self.pending.pop(ticket)
        if generation != self.store.generation:
            assert prefix == Prefix(miss="cleared")
            return
        event("came whole" if prefix.num_tokens == high else "came shorter")
        # What RAM had when it was found, and what is still readable now, was never lost.
        self.accept(key, prefix, max(ram, min(high, self.readable(key, high))), high)

    @rule()
    def wait(self) -> None:
        self.store.wait(1.0)

    @rule()
    def finish(self) -> None:
        self.slow.finish()

    @rule(key=keys, limit=st.integers(-1, 10))
    def prefetch(self, key: PrefixKey, limit: int) -> None:
        ticket = self.store.prefetch(key, limit)
        if ticket is not None:
            self.fetching.append(ticket)

    @precondition(lambda self: self.fetching)
    @rule(data=st.data())
    def release_what_is_read_ahead(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.fetching))
        self.fetching.remove(ticket)
        self.store.release(ticket)

    @invariant()
    def no_more_is_read_than_may_be(self) -> None:
        if not hasattr(self, "fetching"):
            return
        readings = sum(reading.num_bytes for reading in self.slow.readings if not reading.cancelled)
        pending = [*self.store._pending.values(), *self.store._ahead.values()]
        read = sum(sum(b.nbytes for b in it.blocks.values()) for it in pending)
        read += sum(sum(end.num_bytes for end in it.ends.values()) for it in pending)
        in_ram = {id(block) for block in self.ram._blocks.values()}
        in_ram |= {id(block) for row in self.ram._held.values() for block in row.blocks}
        for ready in self.store._ready.values():
            assert isinstance(ready.row, HeldRow)
            read += sum(b.nbytes for b in ready.row.blocks if id(b) not in in_ram)
        assert readings + read <= self.max_read_bytes

    @precondition(lambda self: self.slow.entries)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        self.slow.damaged.add(data.draw(st.sampled_from(sorted(self.slow.entries))))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def release_early(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.pending)))
        self.store.release(ticket)
        del self.pending[ticket]

    @rule(capacity=st.integers(0, 16_000))
    def resize(self, capacity: int) -> None:
        self.ram.resize(capacity)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.slow.damaged.clear()
        self.known = Known()


TestRamMachine = RamMachine.TestCase
TestRamMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
