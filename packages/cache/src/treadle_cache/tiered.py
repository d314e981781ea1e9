"""A RAM store before a slower tier: what is stored goes to both, and comes back from either.

A match is the longest over both tiers. Its first blocks may be in RAM and the rest not:

    [0, base) in RAM, held . [base, end) being read . checkpoint, if the model needs one, from either

The slower tier has whole blocks; a match ends inside a block only where RAM serves it alone.

What was read moves into RAM when it is polled, evicting what is older there; where RAM has no room,
the ticket alone keeps it. An entry that cannot be read is left out, and the next best match taken.

Bytes that are being read count against a budget of their own until they are in RAM's or let go:

    found . begins to read when there is room . read . in RAM, or with its ticket until released
            [             counted from here                      ... to here                  ]
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from msgspec import Struct

from treadle_cache.digests import Chain
from treadle_cache.entries import Entry, EntryName, Reading, SlowTier
from treadle_cache.index import Insertion, NewBlock
from treadle_cache.ram import (
    FAILURES,
    EntrySource,
    RamStore,
    RowSource,
    block_entry,
    checkpoint_entry,
)
from treadle_cache.storage import Block, Checkpoint, HeldRow
from treadle_core.ports import RowReader, StoredRow
from treadle_core.prefix import MissReason, Prefix, PrefixKey, PrefixStats, StateLayout

CLOSE_SECONDS = 30.0


class _Plan(Struct, frozen=True, kw_only=True):
    """The longest match over both tiers.

    Attributes:
        num_tokens: Tokens it covers.
        base: Blocks of it that are in RAM.
        missing: Digests to be read: blocks in order, then the checkpoint.
        end: The checkpoint, if it is not in RAM.
        num_reachable: Blocks that are in either tier, whether or not a checkpoint makes them usable.
        is_cut: Whether more could be found than may be read at a time.
    """

    num_tokens: int
    base: int
    missing: tuple[bytes, ...] = ()
    end: EntryName | None = None
    num_reachable: int = 0
    is_cut: bool = False


@dataclass(slots=True)
class _Pending:
    """A match that is being read, or waits until there is room for it.

    ``read_bytes`` counts what was read, ``coming_bytes`` bounds what is on its way.

    ``base`` holds what RAM has of it, ``fallback`` what RAM could serve alone; both are tickets of
    the RAM store. What was read already is under its digest. ``limit`` is the number of tokens that
    was announced: however it comes out, it is not longer.
    """

    chain: Chain
    limit: int
    plan: _Plan
    generation: int
    reading: Reading | None = None
    read_bytes: int = 0
    coming_bytes: int = 0
    wanted_by: set[int] = field(default_factory=set[int])
    base: int | None = None
    fallback: int | None = None
    blocks: dict[bytes, Block] = field(default_factory=dict[bytes, Block])
    ends: dict[bytes, Checkpoint] = field(default_factory=dict[bytes, Checkpoint])
    names: dict[bytes, EntryName] = field(default_factory=dict[bytes, EntryName])
    failed: set[bytes] = field(default_factory=set[bytes])


@dataclass(slots=True)
class _Ready:
    """A match that can be loaded, and the RAM store's ticket that holds it, or part of it.

    ``num_bytes`` of it were read, and are not in RAM.
    """

    row: StoredRow
    held: int | None
    num_bytes: int = 0


@dataclass(slots=True)
class _Counters:
    hits: int = 0
    misses: dict[MissReason, int] = field(default_factory=dict[MissReason, int])
    matched_tokens: int = 0
    promoted: int = 0
    unpromoted: int = 0
    damaged: int = 0
    prefetches: int = 0
    failed_writes: int = 0
    given_up: int = 0
    cut: int = 0


class _Nothing:
    """A reading of no entries."""

    @property
    def done(self) -> bool:
        return True

    def result(self) -> list[Entry | None]:
        return []

    def cancel(self) -> None:
        pass


_NOTHING = _Nothing()


class TieredStore:
    """A prefix store of two tiers; see :class:`treadle_core.ports.PrefixStore`.

    Args:
        ram: The faster tier; with a capacity of 0 the slower one works alone.
        slow: The slower tier.
        max_prefetches: Most matches that are read ahead, or kept after that, at a time.
        max_backlog_bytes: Most bytes that wait until the slower tier has room for them; while half
            of it does, the store is busy.
        max_read_bytes: Most bytes that are being read, or were read and are not in RAM: those of
            open tickets and of what is read ahead. A match waits for room, and one that is larger
            is cut.
    """

    def __init__(
        self,
        ram: RamStore,
        slow: SlowTier,
        max_prefetches: int = 2,
        max_backlog_bytes: int = 1 << 30,
        max_read_bytes: int = 4 << 30,
    ) -> None:
        self._ram = ram
        self._slow = slow
        self._max_prefetches = max_prefetches
        self._max_backlog_bytes = max_backlog_bytes
        self._max_read_bytes = max_read_bytes
        self._pending: dict[int, _Pending] = {}
        self._ready: dict[int, _Ready] = {}
        self._ahead: dict[tuple[bytes, ...], _Pending] = {}
        # Tickets of what is read ahead, or was.
        self._fetching: dict[int, tuple[bytes, ...]] = {}
        # Given up, and perhaps still being read.
        self._leaving: list[tuple[Reading, int]] = []
        self._last_ticket = 0
        self._backlog: dict[bytes, Entry] = {}
        self._backlog_bytes = 0
        self._has_stored = False
        self._has_state = False
        self._counters = _Counters()

    @property
    def generation(self) -> int:
        """Counts clears."""
        return self._ram.generation

    @property
    def busy(self) -> bool:
        """Whether the slower tier is so far behind that much of what is stored waits for it."""
        self._drain()
        return 2 * self._backlog_bytes > self._max_backlog_bytes

    def attach(self, fingerprint: str, layout: StateLayout) -> None:
        """Serve one model from now on; called once, before anything else.

        Raises:
            Unsupported: The RAM store cannot honour one of its options for this model.
        """
        self._ram.attach(fingerprint, layout)
        self._has_state = layout.has_state

    def find(self, key: PrefixKey, limit: int) -> Prefix:
        """The longest prefix of ``key`` in either tier, held until its ticket is released."""
        self._harvest()
        chain = self._ram.chain(key)
        limit = min(limit, chain.num_tokens)
        plan = self._plan(chain, limit)
        self._counters.cut += plan.is_cut
        if not plan.missing:
            return self._outcome_in_ram(self._take_ticket(), chain, limit, plan)
        ticket = self._take_ticket()
        self._pending[ticket] = self._ahead.pop(plan.missing, None) or self._held(chain, plan)
        self._begin_all()
        return self.poll(ticket) or Prefix(num_tokens=plan.num_tokens, ticket=ticket, ready=False)

    def longest(self, key: PrefixKey, limit: int) -> int:
        """Tokens that :meth:`find` would find now. Holds nothing, and counts as no lookup."""
        chain = self._ram.chain(key)
        limit = min(limit, chain.num_tokens)
        return max(self._plan(chain, limit).num_tokens, self._ram.peek(chain, limit))

    def poll(self, ticket: int) -> Prefix | None:
        """How a prefix that was not ready came out; None if it still is not.

        Raises:
            ValueError: The ticket is not open.
        """
        ready = self._ready.get(ticket)
        if ready is not None:
            return Prefix(num_tokens=ready.row.num_tokens, ticket=ticket)
        pending = self._pending.get(ticket)
        if pending is None:
            raise ValueError(f"ticket {ticket} is not open")
        self._begin_all()
        if pending.generation != self.generation:
            self.release(ticket)
            return self._miss("cleared")
        if self._is_in_ram(pending):
            # Another request that begins alike has brought it in meanwhile.
            del self._pending[ticket]
            self._cancel(pending)
            self._let_go(pending.fallback)
            return self._serve_from_ram(ticket, pending)
        if not self._advance(pending):
            return None
        del self._pending[ticket]
        return self._finish(ticket, pending)

    def wait(self, seconds: float) -> None:
        """Block until a reading may have finished, at most ``seconds``; not if one has."""
        readings = [pending.reading for pending in self._pending.values()]
        if readings and not any(reading is not None and reading.done for reading in readings):
            self._slow.wait(seconds)

    def prefetch(self, key: PrefixKey, limit: int) -> int | None:
        """Begin to read what :meth:`find` would, unless enough is being read ahead.

        Returns:
            A ticket, by which it is wanted until that is released; None if nothing is read.
        """
        self._harvest()
        chain = self._ram.chain(key)
        plan = self._plan(chain, min(limit, chain.num_tokens))
        if not plan.missing or any(
            plan.missing == it.plan.missing for it in self._pending.values()
        ):
            return None
        if plan.missing not in self._ahead and not self._fetch(chain, plan):
            return None
        ticket = self._take_ticket()
        self._fetching[ticket] = plan.missing
        self._ahead[plan.missing].wanted_by.add(ticket)
        return ticket

    def _fetch(self, chain: Chain, plan: _Plan) -> bool:
        """Read a match ahead, if there is room; whether there is."""
        if len(self._ahead) >= self._max_prefetches and not self._forget_finished():
            return False
        if not self._fits(self._slow.num_bytes(plan.missing)):
            return False
        self._counters.prefetches += 1
        self._ahead[plan.missing] = pending = self._held(chain, plan)
        self._begin(pending)
        return True

    def load(self, ticket: int) -> StoredRow:
        """What a ready ticket holds.

        Raises:
            ValueError: The ticket is not open, or not ready.
        """
        ready = self._ready.get(ticket)
        if ready is None:
            raise ValueError(f"ticket {ticket} is not ready")
        return ready.row

    def release(self, ticket: int) -> None:
        """Let go of what :meth:`find` found or :meth:`prefetch` began, once.

        What is still being read for nobody else is given up.

        Raises:
            ValueError: The ticket is not open.
        """
        fetching = self._fetching.pop(ticket, None)
        if fetching is not None:
            self._unwant(fetching, ticket)
            return
        ready = self._ready.pop(ticket, None)
        if ready is not None:
            self._let_go(ready.held)
            return
        pending = self._pending.pop(ticket, None)
        if pending is None:
            raise ValueError(f"ticket {ticket} is not open")
        self._abandon(pending)

    def insert(self, key: PrefixKey, row: RowReader, generation: int) -> None:
        """Keep the state of ``key`` in both tiers; what RAM has no room for, in the slower one."""
        if generation != self.generation:
            self._ram.insert(key, row, generation)
            return
        chain = self._ram.chain(key)
        insertion = self._ram.add(chain, row, generation)
        try:
            for entry in self._unwritten(chain, row, insertion):
                self._put(entry)
        except FAILURES:
            self._counters.failed_writes += 1
        self._drain()

    def clear(self) -> None:
        """Forget everything in both tiers; what is being read comes out as a miss."""
        self._ram.clear()
        self._forget_backlog()
        self._slow.clear()
        self._has_stored = False
        for pending in self._pending.values():
            self._cancel(pending)
        self._forget_ahead()

    def stats(self) -> PrefixStats:
        """Counters, as of now. May be called from any thread."""
        ram, counters = self._ram.stats(), self._counters
        return PrefixStats(
            hits=counters.hits,
            misses=dict(counters.misses),
            matched_tokens=counters.matched_tokens,
            num_entries=ram.num_entries,
            used_bytes=ram.used_bytes,
            capacity_bytes=ram.capacity_bytes,
            evicted=ram.evicted,
            details={
                **ram.details,
                "promoted": counters.promoted,
                "unpromoted": counters.unpromoted,
                "damaged_reads": counters.damaged,
                "prefetches": counters.prefetches,
                "failed_writes": counters.failed_writes,
                "given_up_writes": counters.given_up,
                "backlog_bytes": self._backlog_bytes,
                "cut_matches": counters.cut,
                "reading_bytes": self._read_bytes(),
                **{f"slow_{name}": value for name, value in self._slow.stats().items()},
            },
        )

    def close(self) -> None:
        """Write what is still to be written, and give everything back. Idempotent."""
        for pending in self._pending.values():
            self._cancel(pending)
        self._forget_ahead()
        self._finish_backlog()
        self._slow.close()
        self._ram.close()

    def check_integrity(self) -> None:
        """Assert everything that this class promises, for the RAM store too."""
        self._ram.check_integrity()
        assert not self._ready.keys() & self._pending.keys(), "a ticket is ready and is not"
        assert len(self._ahead) <= self._max_prefetches, "too much is read ahead"
        assert self._read_bytes() <= self._max_read_bytes, "too much is being read"
        for pending in (*self._pending.values(), *self._ahead.values()):
            arrays = [
                *pending.blocks.values(),
                *(a for e in pending.ends.values() for a in e.arrays),
            ]
            assert pending.read_bytes == sum(array.nbytes for array in arrays)

    # Planning

    def _plan(self, chain: Chain, limit: int, pending: _Pending | None = None) -> _Plan:
        """The longest match, without the entries that ``pending`` could not read."""
        digests = chain.digests[: max(0, limit) // chain.block_size]
        base = self._ram.reach(chain, len(digests))
        found = self._reach(digests, base, pending)
        reach = self._readable(digests, base, found)
        in_ram = self._ram.peek(chain, limit)
        if not self._has_state:
            missing = digests[base:reach]
            num_tokens = reach * chain.block_size
            return _Plan(
                num_tokens=num_tokens,
                base=base,
                missing=tuple(missing),
                num_reachable=found,
                is_cut=reach < found,
            )
        ends = self._ends(chain, digests[:found], in_ram + 1, limit, pending)
        end = next((it for it in ends if self._may_read(chain, base, it)), None)
        is_cut = bool(ends) and end is not ends[0]
        if end is None:
            return _Plan(num_tokens=in_ram, base=base, num_reachable=found, is_cut=is_cut)
        num_blocks = end.num_tokens // chain.block_size
        return _Plan(
            num_tokens=end.num_tokens,
            base=min(base, num_blocks),
            missing=(*digests[base:num_blocks], end.digest),
            end=end,
            num_reachable=found,
            is_cut=is_cut,
        )

    def _reach(self, digests: Sequence[bytes], base: int, pending: _Pending | None) -> int:
        """How many of the blocks are in either tier, or read already, without a gap."""
        stop, reach = len(digests), base
        if pending is not None:
            failed = (n for n in range(base, stop) if digests[n] in pending.failed)
            stop = next(failed, stop)
            while reach < stop and digests[reach] in pending.blocks:
                reach += 1
        return reach + self._slow.count_blocks(digests[reach:stop]) if reach < stop else reach

    def _readable(self, digests: Sequence[bytes], base: int, reach: int) -> int:
        """How many of the blocks there are if no more is read than may be at a time."""
        room = self._max_read_bytes
        if self._slow.num_bytes(digests[base:reach]) <= room:
            return reach
        for number in range(base, reach):
            room -= self._slow.num_bytes([digests[number]])
            if room < 0:
                return number
        return reach

    def _ends(
        self,
        chain: Chain,
        digests: Sequence[bytes],
        low: int,
        high: int,
        pending: _Pending | None,
    ) -> list[EntryName]:
        """Checkpoints of ``chain`` on these blocks from ``low`` to ``high`` tokens, longest first."""
        if low > high:
            return []
        names = self._slow.checkpoints([chain.root, *digests])
        if pending is not None:
            names = [*names, *pending.names.values()]
            names = [name for name in names if name.digest not in pending.failed]
        names = [name for name in names if low <= name.num_tokens <= high]
        names.sort(key=lambda name: name.num_tokens, reverse=True)
        return [
            name
            for name in names
            if name.num_tokens // chain.block_size <= len(digests)
            and name.digest == chain.end(name.num_tokens)
        ]

    def _may_read(self, chain: Chain, base: int, end: EntryName) -> bool:
        """Whether a checkpoint, and the blocks before it from ``base`` on, may be read at a time."""
        blocks = chain.digests[base : end.num_tokens // chain.block_size]
        return self._slow.num_bytes([*blocks, end.digest]) <= self._max_read_bytes

    # Reading

    def _held(self, chain: Chain, plan: _Plan) -> _Pending:
        pending = _Pending(chain, plan.num_tokens, plan, self.generation)
        self._hold(pending)
        return pending

    def _begin_all(self) -> None:
        """Begin to read what waits for room, in the order in which it was found."""
        for pending in self._pending.values():
            if pending.reading is None and pending.generation == self.generation:
                if not self._make_room(self._slow.num_bytes(self._to_read(pending))):
                    return
                self._begin(pending)

    def _begin(self, pending: _Pending) -> None:
        """Read what is still to be read of a match; there is room for it."""
        missing = self._to_read(pending)
        pending.coming_bytes = self._slow.num_bytes(missing)
        pending.reading = self._slow.read(missing) if missing else _NOTHING

    def _make_room(self, num_bytes: int) -> bool:
        """Give up what is read ahead until so many bytes may be read; whether they may."""
        while not self._fits(num_bytes):
            if not self._ahead:
                return False
            if not self._forget_finished():
                self._abandon(self._ahead.pop(next(iter(self._ahead))))
        return True

    def _fits(self, num_bytes: int) -> bool:
        return self._read_bytes() + num_bytes <= self._max_read_bytes

    def _read_bytes(self) -> int:
        """Bytes that are being read, or were read and are not in RAM. For any thread."""
        readings = (*self._pending.values(), *self._ahead.values())
        num_bytes = sum(pending.read_bytes + pending.coming_bytes for pending in readings)
        num_bytes += sum(ready.num_bytes for ready in (*self._ready.values(),))
        return num_bytes + sum(size for reading, size in self._leaving if not reading.done)

    def _cancel(self, pending: _Pending) -> None:
        """Read no more of a match; what is on its way counts until the reader has noticed."""
        if pending.reading is not None:
            pending.reading.cancel()
            leaving = [*self._leaving, (pending.reading, pending.coming_bytes)]
            self._leaving = [(reading, size) for reading, size in leaving if not reading.done]
            pending.coming_bytes = 0

    def _hold(self, pending: _Pending) -> None:
        """Hold what RAM has of a match, and what it could serve alone."""
        chain, plan = pending.chain, pending.plan
        before = (pending.base, pending.fallback)
        pending.base = self._ram.hold_blocks(chain, plan.base) if plan.base else None
        pending.fallback = None
        if self._ram.peek(chain, pending.limit):
            pending.fallback = self._ram.hold(chain, pending.limit).ticket
        self._let_go(*before)

    def _advance(self, pending: _Pending) -> bool:
        """Take what was read, and read on where something is damaged; whether that is all."""
        while pending.reading is not None and pending.reading.done:
            before = len(pending.failed)
            self._take(pending, pending.reading)
            if len(pending.failed) == before:
                return True
            # Every round reads or gives up at least one entry more, so there is a last one.
            pending.plan = self._plan(pending.chain, pending.plan.num_tokens, pending)
            self._hold(pending)
            self._drop_unplanned(pending)
            pending.reading = None
            missing = self._to_read(pending)
            if not missing:
                return True
            if self._fits(self._slow.num_bytes(missing)):
                self._begin(pending)
        return False

    def _drop_unplanned(self, pending: _Pending) -> None:
        """Keep no more of what was read than the match still needs."""
        wanted = set(pending.plan.missing)
        pending.blocks = {it: block for it, block in pending.blocks.items() if it in wanted}
        pending.ends = {it: end for it, end in pending.ends.items() if it in wanted}
        pending.names = {it: name for it, name in pending.names.items() if it in wanted}
        pending.read_bytes = sum(block.nbytes for block in pending.blocks.values())
        pending.read_bytes += sum(end.num_bytes for end in pending.ends.values())

    def _to_read(self, pending: _Pending) -> tuple[bytes, ...]:
        known = pending.blocks.keys() | pending.ends.keys()
        return tuple([digest for digest in pending.plan.missing if digest not in known])

    def _take(self, pending: _Pending, reading: Reading) -> None:
        asked, entries = self._to_read(pending), reading.result()
        for place, digest in enumerate(asked):
            # One by one, so that nothing is there twice but the one that is being moved.
            entry, entries[place] = entries[place], None
            num_bytes = None if entry is None else self._accept(pending, digest, entry)
            if num_bytes is None:
                pending.failed.add(digest)
                self._counters.damaged += 1
            pending.read_bytes += num_bytes or 0
        pending.coming_bytes = 0

    def _accept(self, pending: _Pending, digest: bytes, entry: Entry) -> int | None:
        """Keep an entry with the ticket, and say how large it is; None if it is another."""
        name, end, storage = entry.name, pending.plan.end, self._ram.storage
        if name.digest != digest:
            return None
        try:
            if end is not None and digest == end.digest:
                checkpoint = storage.checkpoint_of(entry.arrays, end.num_tokens)
                pending.ends[digest] = checkpoint
                pending.names[digest] = end
                return checkpoint.num_bytes
            number = name.num_tokens // pending.chain.block_size - 1
            pending.blocks[digest] = block = storage.form(number).pack(entry.arrays)
            return block.nbytes
        except FAILURES:
            return None

    # Outcomes

    def _finish(self, ticket: int, pending: _Pending) -> Prefix:
        """Move what was read into RAM, and serve it from there, or from the ticket."""
        chain, plan = pending.chain, pending.plan
        if not plan.missing:
            result = self._outcome_in_ram(ticket, chain, pending.limit, plan, pending.failed)
            self._let_go(pending.base, pending.fallback)
            return result
        if self._promote(pending):
            return self._serve_from_ram(ticket, pending)
        self._counters.unpromoted += 1
        return self._hit(ticket, self._row_of(pending), pending.base, pending.read_bytes)

    def _serve_from_ram(self, ticket: int, pending: _Pending) -> Prefix:
        held = self._ram.hold(pending.chain, pending.plan.num_tokens).ticket
        assert held is not None, "a match was gone at once"
        self._let_go(pending.base)
        return self._hit(ticket, self._ram.load(held), held)

    def _is_in_ram(self, pending: _Pending) -> bool:
        num_tokens = pending.plan.num_tokens
        return 0 < num_tokens == self._ram.peek(pending.chain, num_tokens)

    def _promote(self, pending: _Pending) -> bool:
        """Move what was read into RAM, as far as there is room; whether RAM can serve it now."""
        plan = pending.plan
        self._let_go(pending.fallback)
        pending.fallback = None
        end = pending.ends[plan.end.digest] if plan.end is not None else None
        state_bytes = sum(array.nbytes for array in end.state) if end is not None else None
        source = EntrySource(self._ram.storage, pending.blocks, end)
        insertion = self._ram.put(
            pending.chain, plan.num_tokens, source, state_bytes, pending.generation
        )
        self._counters.promoted += len(insertion.new) + (insertion.checkpoint is not None)
        return self._is_in_ram(pending)

    def _harvest(self) -> None:
        """Move into RAM what was read ahead; what it has no room for waits to be asked for."""
        self._drain()
        for missing, pending in tuple(self._ahead.items()):
            if pending.reading is _NOTHING or not self._advance(pending):
                continue
            if not pending.plan.missing or self._promote(pending):
                del self._ahead[missing]
                self._let_go(pending.base, pending.fallback)
            else:
                pending.reading = _NOTHING

    def _row_of(self, pending: _Pending) -> StoredRow:
        """The match, from what is held in RAM and what was read."""
        plan, chain = pending.plan, pending.chain
        num_blocks = plan.num_tokens // chain.block_size
        base = self._ram.held_blocks(pending.base) if pending.base is not None else ()
        read = [pending.blocks[digest] for digest in chain.digests[plan.base : num_blocks]]
        end = pending.ends[plan.end.digest] if plan.end is not None else None
        return HeldRow(self._ram.storage, plan.num_tokens, [*base, *read], end)

    def _outcome_in_ram(
        self,
        ticket: int,
        chain: Chain,
        limit: int,
        plan: _Plan,
        failed: set[bytes] | frozenset[bytes] = frozenset(),
    ) -> Prefix:
        prefix = self._ram.hold(chain, limit)
        if prefix.ticket is not None:
            # What RAM serves must not age in the slower tier.
            num_blocks = prefix.num_tokens // chain.block_size
            ends = [chain.end(prefix.num_tokens)] if self._has_state else []
            self._slow.touch([*chain.digests[:num_blocks], *ends])
            return self._hit(ticket, self._ram.load(prefix.ticket), prefix.ticket)
        return self._miss("damaged" if failed else self._why(prefix.miss, limit, chain, plan))

    def _why(self, reason: MissReason | None, limit: int, chain: Chain, plan: _Plan) -> MissReason:
        """Why nothing was found, given what the RAM store says of itself."""
        if plan.is_cut:
            return "no_room"
        if reason not in ("empty", "cleared"):
            return "no_checkpoint" if plan.num_reachable else reason or "no_block"
        if not self._has_stored and not plan.num_reachable:
            return reason
        if limit < chain.block_size:
            return "too_short"
        return "no_checkpoint" if plan.num_reachable else "no_block"

    def _hit(self, ticket: int, row: StoredRow, held: int | None, num_bytes: int = 0) -> Prefix:
        self._ready[ticket] = _Ready(row, held, num_bytes)
        self._counters.hits += 1
        self._counters.matched_tokens += row.num_tokens
        return Prefix(num_tokens=row.num_tokens, ticket=ticket)

    def _miss(self, reason: MissReason) -> Prefix:
        self._counters.misses[reason] = self._counters.misses.get(reason, 0) + 1
        return Prefix(miss=reason)

    def _take_ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    # Ends

    def _let_go(self, *tickets: int | None) -> None:
        for ticket in tickets:
            if ticket is not None:
                self._ram.release(ticket)

    def _unwant(self, missing: tuple[bytes, ...], ticket: int) -> None:
        """Give up what was read ahead, if this ticket was the last that wanted it."""
        pending = self._ahead.get(missing)
        # Another may be read under the same digests meanwhile.
        if pending is not None and ticket in pending.wanted_by:
            pending.wanted_by.remove(ticket)
            if not pending.wanted_by:
                del self._ahead[missing]
                self._abandon(pending)

    def _abandon(self, pending: _Pending) -> None:
        self._cancel(pending)
        self._let_go(pending.base, pending.fallback)

    def _forget_finished(self) -> bool:
        """Give up the oldest match that was read ahead and is not wanted yet; whether any was."""
        for missing, pending in self._ahead.items():
            if pending.reading is None or pending.reading.done:
                del self._ahead[missing]
                self._abandon(pending)
                return True
        return False

    def _forget_ahead(self) -> None:
        for pending in self._ahead.values():
            self._abandon(pending)
        self._ahead.clear()

    # Writing

    def _put(self, entry: Entry) -> None:
        """Hand an entry on, or keep it until the slower tier has room: the engine never waits."""
        self._has_stored = True
        if not self._backlog and self._slow.has_room(entry.num_bytes):
            self._slow.put(entry)
        elif self._backlog_bytes + entry.num_bytes <= self._max_backlog_bytes:
            self._backlog[entry.name.digest] = entry
            self._backlog_bytes += entry.num_bytes
        else:
            # It is put when its chain is stored again.
            self._counters.given_up += 1

    def _drain(self) -> None:
        """Hand on what the slower tier has room for now."""
        while self._backlog:
            digest, entry = next(iter(self._backlog.items()))
            if not self._slow.has_room(entry.num_bytes):
                return
            self._slow.put(entry)
            del self._backlog[digest]
            self._backlog_bytes -= entry.num_bytes

    def _finish_backlog(self) -> None:
        """Hand on all of it, as fast as the slower tier writes; a disk that hangs is given up."""
        stop = time.monotonic() + CLOSE_SECONDS
        self._drain()
        while self._backlog and time.monotonic() < stop:
            time.sleep(0.005)
            self._drain()
        self._counters.given_up += len(self._backlog)
        self._forget_backlog()

    def _forget_backlog(self) -> None:
        self._backlog.clear()
        self._backlog_bytes = 0

    def _unwritten(self, chain: Chain, row: RowReader, insertion: Insertion) -> Iterator[Entry]:
        """Whatever the slower tier lacks of a chain, parents first, from RAM or else from the row.

        Not only what is new: it may have lost a parent, without which nobody finds a child.
        """
        num_blocks, ends = len(chain.digests), list[bytes]()
        if self._has_state:
            ends = [chain.end(chain.num_tokens)]
        present = self._slow.present([*chain.digests, *ends]) | self._backlog.keys()
        in_ram = self._ram.reach(chain, num_blocks)
        absent = [n for n in range(num_blocks) if chain.digests[n] not in present]
        yield from self._from_ram(chain, [n for n in absent if n < in_ram])
        yield from self._from_row(chain, row, [n for n in absent if n >= in_ram])
        if ends and ends[0] not in present:
            if insertion.checkpoint is not None:
                yield from (e for e in self._ram.entries(chain, insertion) if e.name.digest in ends)
            else:
                yield checkpoint_entry(chain, RowSource(self._ram.storage, row).checkpoint())

    def _from_ram(self, chain: Chain, numbers: Sequence[int]) -> list[Entry]:
        if not numbers:
            return []
        ticket = self._ram.hold_blocks(chain, numbers[-1] + 1)
        blocks = self._ram.held_blocks(ticket)
        found = [block_entry(self._ram.storage, chain, n, blocks[n]) for n in numbers]
        self._ram.release(ticket)
        return found

    def _from_row(self, chain: Chain, row: RowReader, absent: Sequence[int]) -> Iterator[Entry]:
        storage = self._ram.storage
        source = RowSource(storage, row)
        for _, run in groupby(enumerate(absent), key=lambda pair: pair[1] - pair[0]):
            numbers = [number for _, number in run]
            new = [
                NewBlock(chain.digests[number], -1, (number + 1) * chain.block_size)
                for number in numbers
            ]
            for number, block in zip(numbers, source.blocks(new), strict=True):
                yield block_entry(storage, chain, number, block)
