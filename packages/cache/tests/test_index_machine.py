"""Any sequence of calls leaves the index equal to a naive one that keeps whole prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from treadle_cache.digests import Chain, Namespace
from treadle_cache.index import (
    CHECKPOINT_METADATA_BYTES,
    MIN_LONE_TOKENS,
    Evicted,
    EvictedBlock,
    Insertion,
    Match,
    PrefixIndex,
    block_metadata_bytes,
)

SIZE = 3
BLOCK_BYTES = 1_000
BLOCK = BLOCK_BYTES + block_metadata_bytes(SIZE)
ROOTS = tuple(
    Namespace(fingerprint="weights", kv_format="float32", salt=salt).root for salt in ("", "tenant")
)

Prefix = tuple[int, ...]
"""The number of a namespace, and tokens."""

prefixes = st.tuples(
    st.sampled_from([0, 0, 0, 1]), st.lists(st.integers(0, 1), max_size=9).map(tuple)
).map(lambda pair: (pair[0], *pair[1]))


def num_tokens(prefix: Prefix) -> int:
    return len(prefix) - 1


def common(one: Prefix, other: Prefix) -> int:
    """Tokens that both begin with; -1 in different namespaces."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other))) - 1


def full_blocks(prefix: Prefix) -> list[Prefix]:
    return [prefix[: end + 1] for end in range(SIZE, num_tokens(prefix) + 1, SIZE)]


def chain_of(prefix: Prefix) -> Chain:
    return Chain(ROOTS[prefix[0]], prefix[1:], SIZE)


@dataclass
class Stored:
    """An entry, known by its whole prefix."""

    number: int
    used: int
    cost: int
    pins: int = 0
    earlier: Prefix | None = None
    reused: bool = False


@dataclass
class Held:
    """What an open pin holds; entries outlive a clear here."""

    blocks: list[Stored]
    checkpoint: Stored | None
    slots: Sequence[int]


@dataclass
class Naive:
    """The same rules, over dictionaries of prefixes and without any cleverness."""

    capacity: int
    needs_checkpoints: bool
    blocks: dict[Prefix, Stored] = field(default_factory=dict)
    checkpoints: dict[Prefix, Stored] = field(default_factory=dict)
    ghosts: list[Stored] = field(default_factory=list)
    tick: int = 0

    @property
    def entries(self) -> list[Stored]:
        return [*self.blocks.values(), *self.checkpoints.values(), *self.ghosts]

    @property
    def used_bytes(self) -> int:
        return sum(entry.cost for entry in self.entries)

    @property
    def pinned_bytes(self) -> int:
        return sum(entry.cost for entry in self.entries if entry.pins)

    def longest(self, prefix: Prefix, limit: int) -> tuple[list[Prefix], Prefix | None, int]:
        """The longest usable match over everything that is there, token by token.

        Returns:
            Its full blocks, its checkpoint, and the number of its tokens.
        """
        if not self.needs_checkpoints:
            wanted = prefix[: max(0, limit) + 1]
            most = max((common(key, wanted) for key in self.blocks), default=0)
            if most < min(SIZE, MIN_LONE_TOKENS):
                return [], None, 0
            return full_blocks(prefix[: most + 1]), None, most
        ends = [
            key
            for key in self.checkpoints
            if key == prefix[: len(key)] and num_tokens(key) <= limit
        ]
        end = max(ends, key=len, default=None)
        return (full_blocks(end) if end else []), end, (num_tokens(end) if end else 0)

    def touch(self, blocks: list[Prefix], checkpoint: Prefix | None = None) -> None:
        self.tick += 1
        for key in blocks:
            self.blocks[key].used = self.tick
        if checkpoint:
            self.checkpoints[checkpoint].used = self.tick

    def superseded(self, key: Prefix, pending: Prefix | None) -> bool:
        earlier = {entry.earlier for entry in self.checkpoints.values()} | {pending}
        return key in earlier and not self.checkpoints[key].reused

    def is_free_to_go(self, key: Prefix) -> bool:
        """Whether nothing hangs on a block."""
        children = any(len(k) == len(key) + SIZE and k[: len(key)] == key for k in self.blocks)
        ends = any(full_blocks(k)[-1:] == [key] for k in self.checkpoints)
        return not children and not ends

    def victim(self, keep: list[Prefix], pending: Prefix | None) -> tuple[str, Prefix] | None:
        ranked: list[tuple[tuple[bool, int], str, Prefix]] = []
        for key, entry in self.blocks.items():
            if not entry.pins and key not in keep and self.is_free_to_go(key):
                rank = (not self.needs_checkpoints, entry.used)
                ranked.append((rank, "block", key))
        for key, entry in self.checkpoints.items():
            if not entry.pins:
                rank = (not self.superseded(key, pending), entry.used)
                ranked.append((rank, "checkpoint", key))
        return min(ranked)[1:] if ranked else None

    def evict_to(
        self, num_bytes: int, keep: list[Prefix] | None = None, pending: Prefix | None = None
    ) -> list[tuple[str, Prefix, int]]:
        gone: list[tuple[str, Prefix, int]] = []
        while self.used_bytes > num_bytes:
            victim = self.victim(keep or [], pending)
            if victim is None:
                break
            kind, key = victim
            if kind == "block":
                gone.append((kind, key, self.blocks.pop(key).number))
                continue
            entry = self.checkpoints.pop(key)
            gone.append((kind, key, entry.number))
            for other in self.checkpoints.values():
                if other.earlier == key:
                    other.earlier = entry.earlier
            if pending == key:
                pending = entry.earlier
        return gone


class IndexMachine(RuleBasedStateMachine):
    """Insert, look up, pin, release, evict, resize, clear and withdraw, in any order."""

    @initialize(
        needs_checkpoints=st.booleans(), room=st.integers(0, 12), checkpoints=st.integers(0, 4)
    )
    def start(self, needs_checkpoints: bool, room: int, checkpoints: int) -> None:
        capacity = room * BLOCK + checkpoints * (100 + CHECKPOINT_METADATA_BYTES)
        self.index = PrefixIndex(
            block_size=SIZE,
            block_bytes=BLOCK_BYTES,
            capacity=capacity,
            needs_checkpoints=needs_checkpoints,
        )
        self.naive = Naive(capacity, needs_checkpoints)
        self.matches: list[tuple[Match, list[Stored], Stored | None]] = []
        self.pins: dict[int, Held] = {}
        self.generations = [0]
        self.seen: set[Prefix] = set()
        self.names: dict[bytes, Prefix] = {}

    def known(self, prefix: Prefix) -> Chain:
        its = chain_of(prefix)
        for end in range(num_tokens(prefix) + 1):
            self.names[its.end(end)] = prefix[: end + 1]
        for key, digest in zip(full_blocks(prefix), its.digests, strict=True):
            self.names[digest] = key
        self.seen.add(prefix)
        return its

    def agree_on(self, evicted: Sequence[Evicted], expected: list[tuple[str, Prefix, int]]) -> None:
        """The same went, in the same order, and each says where it belongs."""
        seen: list[tuple[str, Prefix, int]] = []
        for entry in evicted:
            key = self.names[entry.digest]
            assert entry.num_tokens == num_tokens(key)
            above = [k for k in full_blocks(key) if k != key or not isinstance(entry, EvictedBlock)]
            parent = chain_of(above[-1]).digests[-1] if above else ROOTS[key[0]]
            assert entry.parent == parent
            if isinstance(entry, EvictedBlock):
                seen.append(("block", key, entry.slot))
            else:
                seen.append(("checkpoint", key, entry.number))
        assert seen == expected

    @rule(
        prefix=prefixes, size=st.sampled_from([None, 0, 100, 5_000]), back=st.sampled_from([0, 1])
    )
    def insert(self, prefix: Prefix, size: int | None, back: int) -> None:
        generation = self.generations[-1 - min(back, len(self.generations) - 1)]
        its = self.known(prefix)
        done = self.index.insert(
            its, num_tokens(prefix), generation=generation, checkpoint_bytes=size
        )
        if generation != self.index.generation:
            event("a stale insertion")
            assert done == Insertion(refused="cleared")
            return
        self.follow_insertion(prefix, size, done)

    def follow_insertion(self, prefix: Prefix, size: int | None, done: Insertion) -> None:
        naive = self.naive
        path = [key for key in full_blocks(prefix) if key in naive.blocks]
        missing = full_blocks(prefix)[len(path) :]
        wants = size is not None and prefix not in naive.checkpoints
        naive.touch(path, prefix if size is not None and not wants else None)
        cost = (size or 0) + CHECKPOINT_METADATA_BYTES if wants else 0
        need = len(missing) * BLOCK + cost
        kept = {id(naive.blocks[key]) for key in path}
        pinned = sum(e.cost for e in naive.entries if e.pins or id(e) in kept)
        fits = pinned + need <= naive.capacity
        if fits:
            ends = [k for k in naive.checkpoints if k == prefix[: len(k)]] if wants else []
            pending = max(ends, key=len, default=None)
            self.agree_on(done.evicted, naive.evict_to(naive.capacity - need, path, pending))
        else:
            event("an insertion that does not fit")
            assert done.evicted == ()
            free = (naive.capacity - naive.used_bytes) // BLOCK
            missing = [] if wants and naive.needs_checkpoints else missing[:free]
        assert done.refused == (None if fits else "no_room")
        assert [self.names[new.digest] for new in done.new] == missing
        for new in done.new:
            naive.blocks[self.names[new.digest]] = Stored(new.slot, naive.tick, BLOCK)
        assert (done.checkpoint is not None) == (wants and fits)
        if done.checkpoint is not None:
            naive.checkpoints[prefix] = Stored(done.checkpoint, naive.tick, cost)
        if size is not None and fits:
            ends = sorted((k for k in naive.checkpoints if k == prefix[: len(k)]), key=len)
            for earlier, later in pairwise(ends):
                naive.checkpoints[later].earlier = earlier

    @rule(prefix=prefixes, size=st.sampled_from([None, 100]))
    def insert_and_withdraw(self, prefix: Prefix, size: int | None) -> None:
        naive = self.naive
        its = self.known(prefix)
        done = self.index.insert(
            its, num_tokens(prefix), generation=self.index.generation, checkpoint_bytes=size
        )
        self.follow_insertion(prefix, size, done)
        self.index.withdraw(done)
        for new in done.new:
            del naive.blocks[self.names[new.digest]]
        if done.end is not None:
            del naive.checkpoints[prefix]

    @rule(prefix=prefixes, limit=st.integers(-1, 10))
    def lookup(self, prefix: Prefix, limit: int) -> None:
        naive = self.naive
        blocks, end, longest = naive.longest(prefix, limit)
        its = self.known(prefix)
        assert self.index.peek(its, limit=limit) == longest

        match = self.index.lookup(its, limit=limit)

        assert match.num_tokens == longest
        if not end and longest % SIZE:
            event("a hit that ends inside a block")
            blocks.append(self.cut_block(prefix, match))
        assert match.slots == tuple(naive.blocks[key].number for key in blocks)
        assert match.checkpoint == (naive.checkpoints[end].number if end else None)
        assert (match.miss is None) == bool(blocks or end)
        if blocks or end:
            event("a hit")
            if end and any(entry.earlier == end for entry in naive.checkpoints.values()):
                naive.checkpoints[end].reused = True
            naive.touch(blocks, end)
        held = [naive.blocks[key] for key in blocks]
        self.matches.append((match, held, naive.checkpoints[end] if end else None))

    def cut_block(self, prefix: Prefix, match: Match) -> Prefix:
        """The last block of a match; of several that serve as well, any may be taken."""
        length = match.num_tokens // SIZE * SIZE + SIZE
        alike = [
            key
            for key in self.naive.blocks
            if num_tokens(key) == length and common(key, prefix) >= match.num_tokens
        ]
        (taken,) = [key for key in alike if self.naive.blocks[key].number == match.slots[-1]]
        return taken

    @precondition(lambda self: self.matches)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        match, blocks, checkpoint = self.matches.pop(
            data.draw(st.integers(max(0, len(self.matches) - 3), len(self.matches) - 1))
        )
        present = [id(entry) for entry in self.naive.entries if entry not in self.naive.ghosts]
        valid = all(
            id(entry) in present for entry in [*blocks, *([checkpoint] if checkpoint else [])]
        )

        pin = self.index.pin(match)

        assert (pin is not None) == valid
        if pin is None:
            event("a match that is gone")
            return
        for entry in [*blocks, *([checkpoint] if checkpoint else [])]:
            entry.pins += 1
        self.pins[pin] = Held(blocks, checkpoint, match.slots)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(sorted(self.pins)))
        held = self.pins.pop(pin)
        for entry in [*held.blocks, *([held.checkpoint] if held.checkpoint else [])]:
            entry.pins -= 1
        dropped = [e for e in self.naive.ghosts if e is held.checkpoint and not e.pins]
        self.naive.ghosts = [entry for entry in self.naive.ghosts if entry.pins]

        assert self.index.release(pin) == tuple(entry.number for entry in dropped)

    @rule(num_bytes=st.sampled_from([1, BLOCK, 3 * BLOCK]))
    def evict(self, num_bytes: int) -> None:
        expected = self.naive.evict_to(self.naive.used_bytes - num_bytes)

        self.agree_on(self.index.evict(num_bytes), expected)

    @rule(room=st.integers(0, 12))
    def resize(self, room: int) -> None:
        expected = self.naive.evict_to(room * BLOCK)
        self.naive.capacity = max(room * BLOCK, self.naive.used_bytes)

        self.agree_on(self.index.resize(room * BLOCK), expected)

        assert self.index.capacity == self.naive.capacity

    @rule()
    def clear(self) -> None:
        naive = self.naive
        dropped = {entry.number for entry in naive.checkpoints.values() if not entry.pins}
        naive.ghosts = [entry for entry in naive.entries if entry.pins]
        naive.blocks.clear()
        naive.checkpoints.clear()

        assert set(self.index.clear()) == dropped

        self.generations.append(self.index.generation)
        for prefix in self.seen:
            assert chain_of(prefix).end(num_tokens(prefix)) not in self.index

    @invariant()
    def it_is_sound(self) -> None:
        if not hasattr(self, "index"):
            return
        index, naive = self.index, self.naive
        index.check_integrity()
        assert index.used_bytes == naive.used_bytes <= naive.capacity == index.capacity
        present = {digest for digest in self.names if digest in index}
        expected = {chain_of(key).digests[-1] for key in naive.blocks}
        assert present == expected | {chain_of(k).end(num_tokens(k)) for k in naive.checkpoints}
        parts = (index.num_free_slots, index.num_cached_slots, index.num_pinned_slots)
        assert sum(parts) == index.num_slots
        slots = [entry.number for entry in naive.blocks.values()]
        for held in self.pins.values():
            assert tuple(entry.number for entry in held.blocks) == tuple(held.slots)
            assert all(id(e) in map(id, naive.entries) for e in held.blocks), "a pinned one is gone"
        ghosts = {slot for held in self.pins.values() for slot in held.slots} - set(slots)
        assert len(slots) + len(ghosts) == index.num_slots - index.num_free_slots
        assert len(slots) == len(set(slots))


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
