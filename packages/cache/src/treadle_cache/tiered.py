"""A RAM store before a slower tier: what is stored goes to both, and comes back from either.

A match is the longest over both tiers. Its first blocks may be in RAM and the rest not:

    [0, base) in RAM, held . [base, end) being read . checkpoint, if the model needs one, from either

The slower tier has whole blocks; a match ends inside a block only where RAM serves it alone.

What was read moves into RAM when it is polled, evicting what is older there; where RAM has no room,
the ticket alone keeps it. An entry that cannot be read is left out, and the next best match taken.
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
    """

    num_tokens: int
    base: int
    missing: tuple[bytes, ...] = ()
    end: EntryName | None = None
    num_reachable: int = 0


@dataclass(slots=True)
class _Pending:
    """A match that is being read.

    ``base`` holds what RAM has of it, ``fallback`` what RAM could serve alone; both are tickets of
    the RAM store. What was read already is under its digest. ``limit`` is the number of tokens that
    was announced: however it comes out, it is not longer.
    """

    chain: Chain
    limit: int
    plan: _Plan
    reading: Reading
    generation: int
    base: int | None = None
    fallback: int | None = None
    blocks: dict[bytes, Block] = field(default_factory=dict[bytes, Block])
    ends: dict[bytes, Checkpoint] = field(default_factory=dict[bytes, Checkpoint])
    names: dict[bytes, EntryName] = field(default_factory=dict[bytes, EntryName])
    failed: set[bytes] = field(default_factory=set[bytes])


@dataclass(slots=True)
class _Ready:
    """A match that can be loaded, and the RAM store's ticket that holds it, or part of it."""

    row: StoredRow
    held: int | None


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
    """

    def __init__(
        self,
        ram: RamStore,
        slow: SlowTier,
        max_prefetches: int = 2,
        max_backlog_bytes: int = 1 << 30,
    ) -> None:
        self._ram = ram
        self._slow = slow
        self._max_prefetches = max_prefetches
        self._max_backlog_bytes = max_backlog_bytes
        self._pending: dict[int, _Pending] = {}
        self._ready: dict[int, _Ready] = {}
        self._ahead: dict[tuple[bytes, ...], _Pending] = {}
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
        if not plan.missing:
            return self._outcome_in_ram(self._take_ticket(), chain, limit, plan)
        pending = self._ahead.pop(plan.missing, None)
        if pending is None:
            pending = self._begin(chain, plan)
        ticket = self._take_ticket()
        self._pending[ticket] = pending
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
        if pending.generation != self.generation:
            self.release(ticket)
            return self._miss("cleared")
        if self._is_in_ram(pending):
            # Another request that begins alike has brought it in meanwhile.
            del self._pending[ticket]
            pending.reading.cancel()
            self._let_go(pending.fallback)
            return self._serve_from_ram(ticket, pending)
        if not self._advance(pending):
            return None
        del self._pending[ticket]
        return self._finish(ticket, pending)

    def wait(self, seconds: float) -> None:
        """Block until a reading may have finished, at most ``seconds``; not if one has."""
        readings = [pending.reading for pending in self._pending.values()]
        if readings and not any(reading.done for reading in readings):
            self._slow.wait(seconds)

    def prefetch(self, key: PrefixKey, limit: int) -> None:
        """Begin to read what :meth:`find` would, unless enough is being read ahead."""
        self._harvest()
        chain = self._ram.chain(key)
        plan = self._plan(chain, min(limit, chain.num_tokens))
        busy = (*self._ahead.values(), *self._pending.values())
        if not plan.missing or any(plan.missing == other.plan.missing for other in busy):
            return
        if len(self._ahead) >= self._max_prefetches and not self._forget_finished():
            return
        self._counters.prefetches += 1
        self._ahead[plan.missing] = self._begin(chain, plan)

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
        """Let go of what :meth:`find` found, once; what is still being read is not wanted any more.

        Raises:
            ValueError: The ticket is not open.
        """
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
            pending.reading.cancel()
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
                **{f"slow_{name}": value for name, value in self._slow.stats().items()},
            },
        )

    def close(self) -> None:
        """Write what is still to be written, and give everything back. Idempotent."""
        for pending in self._pending.values():
            pending.reading.cancel()
        self._forget_ahead()
        self._finish_backlog()
        self._slow.close()
        self._ram.close()

    def check_integrity(self) -> None:
        """Assert everything that this class promises, for the RAM store too."""
        self._ram.check_integrity()
        assert not self._ready.keys() & self._pending.keys(), "a ticket is ready and is not"
        assert len(self._ahead) <= self._max_prefetches, "too much is read ahead"

    # Planning

    def _plan(self, chain: Chain, limit: int, pending: _Pending | None = None) -> _Plan:
        """The longest match, without the entries that ``pending`` could not read."""
        digests = chain.digests[: max(0, limit) // chain.block_size]
        base = self._ram.reach(chain, len(digests))
        reach = self._reach(digests, base, pending)
        in_ram = self._ram.peek(chain, limit)
        if not self._has_state:
            missing = digests[base:reach]
            num_tokens = reach * chain.block_size
            return _Plan(
                num_tokens=num_tokens, base=base, missing=tuple(missing), num_reachable=reach
            )
        end = self._longest_end(chain, digests[:reach], in_ram + 1, limit, pending)
        if end is None:
            return _Plan(num_tokens=in_ram, base=base, num_reachable=reach)
        num_blocks = end.num_tokens // chain.block_size
        return _Plan(
            num_tokens=end.num_tokens,
            base=min(base, num_blocks),
            missing=(*digests[base:num_blocks], end.digest),
            end=end,
            num_reachable=reach,
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

    def _longest_end(
        self,
        chain: Chain,
        digests: Sequence[bytes],
        low: int,
        high: int,
        pending: _Pending | None,
    ) -> EntryName | None:
        """The longest checkpoint of ``chain`` on these blocks, from ``low`` to ``high`` tokens."""
        if low > high:
            return None
        names = self._slow.checkpoints([chain.root, *digests])
        if pending is not None:
            names = [*names, *pending.names.values()]
            names = [name for name in names if name.digest not in pending.failed]
        names = [name for name in names if low <= name.num_tokens <= high]
        names.sort(key=lambda name: name.num_tokens, reverse=True)
        for name in names:
            num_blocks = name.num_tokens // chain.block_size
            if num_blocks <= len(digests) and name.digest == chain.end(name.num_tokens):
                return name
        return None

    # Reading

    def _begin(self, chain: Chain, plan: _Plan) -> _Pending:
        reading = self._slow.read(plan.missing)
        pending = _Pending(chain, plan.num_tokens, plan, reading, self.generation)
        self._hold(pending)
        return pending

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
        while pending.reading.done:
            before = len(pending.failed)
            self._take(pending)
            if len(pending.failed) == before:
                return True
            # Every round reads or gives up at least one entry more, so there is a last one.
            pending.plan = self._plan(pending.chain, pending.plan.num_tokens, pending)
            self._hold(pending)
            missing = self._to_read(pending)
            pending.reading = self._slow.read(missing) if missing else _NOTHING
            if not missing:
                return True
        return False

    def _to_read(self, pending: _Pending) -> tuple[bytes, ...]:
        known = pending.blocks.keys() | pending.ends.keys()
        return tuple([digest for digest in pending.plan.missing if digest not in known])

    def _take(self, pending: _Pending) -> None:
        asked, entries = self._to_read(pending), pending.reading.result()
        for digest, entry in zip(asked, entries, strict=True):
            if entry is None or not self._accept(pending, digest, entry):
                pending.failed.add(digest)
                self._counters.damaged += 1

    def _accept(self, pending: _Pending, digest: bytes, entry: Entry) -> bool:
        """Keep an entry with the ticket, if it is what was asked for."""
        name, end, storage = entry.name, pending.plan.end, self._ram.storage
        if name.digest != digest:
            return False
        try:
            if end is not None and digest == end.digest:
                pending.ends[digest] = storage.checkpoint_of(entry.arrays, end.num_tokens)
                pending.names[digest] = end
            else:
                number = name.num_tokens // pending.chain.block_size - 1
                pending.blocks[digest] = storage.form(number).pack(entry.arrays)
        except FAILURES:
            return False
        return True

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
        return self._hit(ticket, self._row_of(pending), pending.base)

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
        if reason not in ("empty", "cleared"):
            return "no_checkpoint" if plan.num_reachable else reason or "no_block"
        if not self._has_stored and not plan.num_reachable:
            return reason
        if limit < chain.block_size:
            return "too_short"
        return "no_checkpoint" if plan.num_reachable else "no_block"

    def _hit(self, ticket: int, row: StoredRow, held: int | None) -> Prefix:
        self._ready[ticket] = _Ready(row, held)
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

    def _abandon(self, pending: _Pending) -> None:
        pending.reading.cancel()
        self._let_go(pending.base, pending.fallback)

    def _forget_finished(self) -> bool:
        """Give up the oldest match that was read ahead and is not wanted yet; whether any was."""
        for missing, pending in self._ahead.items():
            if pending.reading.done:
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
