"""Prefixes in host memory, within a budget of bytes.

The index decides what is there and what goes; this store keeps the bytes. They are host arrays, not
MLX ones: so they never alias a live array, come back bit by bit, can be written to disk from
another thread, and their memory goes back block by block.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from treadle_cache.aside import Aside, GivenUp
from treadle_cache.codec import Quantizer
from treadle_cache.config import CacheConfig, capacity, free_memory
from treadle_cache.digests import Chain, Namespace
from treadle_cache.entries import Entry, EntryName
from treadle_cache.index import (
    CHECKPOINT_METADATA_BYTES,
    Evicted,
    EvictedBlock,
    Indexed,
    Insertion,
    NewBlock,
    PrefixIndex,
    block_metadata_bytes,
)
from treadle_cache.saved import DamagedFile, Footer, SavedEntry, SavedFile
from treadle_cache.saved import write as write_file
from treadle_cache.storage import Block, Checkpoint, HeldRow, Storage, as_read_only
from treadle_core.ports import RowReader, StoredRow
from treadle_core.prefix import HostArray, Prefix, PrefixKey, PrefixStats, StateLayout

READ_BYTES = 64 << 20
"""Most bytes that are copied from a row at a time while it is stored, but at least a block."""

FAILURES = (MemoryError, RuntimeError, ValueError)
"""What reading a row may raise: no memory, an error of mlx, arrays of another layout."""


GoesOn = Callable[[int, int], bool]
"""Told of how many things how many are done; whether to go on."""


def always(done: int, total: int) -> bool:
    """Go on."""
    return True


class Source(Protocol):
    """Where the contents of new entries come from."""

    def blocks(self, new: Sequence[NewBlock]) -> Iterable[Block]:
        """The contents of consecutive new blocks, in order."""
        ...

    def checkpoint(self) -> Checkpoint:
        """The contents of the new checkpoint."""
        ...


@dataclass(slots=True)
class _Counters:
    failed_inserts: int = 0
    saved_entries: int = 0
    restored_entries: int = 0
    failed_saves: int = 0
    failed_loads: int = 0
    given_up_loads: int = 0
    damaged_entries: int = 0


class RamStore:
    """A prefix store in host memory; see :class:`treadle_core.ports.PrefixStore`.

    Args:
        config: Its options.
        free_memory: Bytes that are free now. Asked only where the config gives no capacity.
    """

    def __init__(
        self, config: CacheConfig | None = None, free_memory: Callable[[], int] = free_memory
    ) -> None:
        self._config = config or CacheConfig()
        self._free_memory = free_memory
        self._capacity: int | None = None
        self._fingerprint = ""
        self._format = ""
        self._attached = False
        self._storage = Storage(
            StateLayout(tokens=(), has_state=False, format=""), self._config.block_size
        )
        self._index = self._make_index(0)
        self._blocks: dict[int, Block] = {}
        self._checkpoints: dict[int, Checkpoint] = {}
        self._held: dict[int, HeldRow] = {}
        self._counters = _Counters()

    @property
    def generation(self) -> int:
        """Counts clears."""
        return self._index.generation

    @property
    def busy(self) -> bool:
        """Never: what is stored is there at once."""
        return False

    @property
    def storage(self) -> Storage:
        """How the states of the model are kept."""
        return self._storage

    def attach(self, fingerprint: str, layout: StateLayout) -> None:
        """Serve one model from now on; called once, before anything else.

        Raises:
            Unsupported: The model's KV cannot be quantised as configured.
        """
        assert not self._attached, "a store serves one model"
        self._storage, form = _storage_for(self._config, layout)
        self._attached = True
        self._fingerprint = fingerprint
        self._format = f"{layout.format}|{form}"
        self._index = self._make_index(self._wanted_capacity())

    def chain(self, key: PrefixKey) -> Chain:
        """The digests of ``key``."""
        namespace = Namespace(fingerprint=self._fingerprint, kv_format=self._format, salt=key.salt)
        return Chain(namespace.root, key.tokens, self._config.block_size, key.media)

    def find(self, key: PrefixKey, limit: int) -> Prefix:
        """The longest stored prefix of ``key``, held until its ticket is released."""
        return self.hold(self.chain(key), limit)

    def longest(self, key: PrefixKey, limit: int) -> int:
        """Tokens that :meth:`find` would find now. Holds nothing, and counts as no lookup."""
        return self.peek(self.chain(key), limit)

    def hold(self, chain: Chain, limit: int) -> Prefix:
        """As :meth:`find`, for digests."""
        match = self._index.lookup(chain, limit=limit)
        if not match.num_tokens:
            return Prefix(miss=match.miss)
        ticket = self._index.pin(match)
        assert ticket is not None, "a match was gone before it was pinned"
        checkpoint = None
        if match.checkpoint is not None:
            checkpoint = self._checkpoints[match.checkpoint]
        blocks = [self._blocks[slot] for slot in match.slots]
        self._held[ticket] = HeldRow(self._storage, match.num_tokens, blocks, checkpoint)
        return Prefix(num_tokens=match.num_tokens, ticket=ticket)

    def reach(self, chain: Chain, num_blocks: int) -> int:
        """How many of the first ``num_blocks`` blocks of ``chain`` are there. Counts nothing."""
        return len(self._index.reach(chain, num_blocks).slots)

    def peek(self, chain: Chain, limit: int) -> int:
        """How many tokens :meth:`hold` would find. Counts nothing."""
        return self._index.peek(chain, limit=limit)

    def hold_blocks(self, chain: Chain, num_blocks: int) -> int:
        """Hold the first ``num_blocks`` blocks, which must be there, usable by themselves or not.

        Returns:
            A ticket.
        """
        match = self._index.reach(chain, num_blocks)
        assert len(match.slots) == num_blocks, "a block that is to be held is not there"
        ticket = self._index.pin(match)
        assert ticket is not None, "a match was gone before it was pinned"
        blocks = [self._blocks[slot] for slot in match.slots]
        self._held[ticket] = HeldRow(self._storage, match.num_tokens, blocks)
        return ticket

    def held_blocks(self, ticket: int) -> Sequence[Block]:
        """The blocks that a ticket holds."""
        return self._row(ticket).blocks

    def poll(self, ticket: int) -> Prefix:
        """What :meth:`find` returned: it was ready.

        Raises:
            ValueError: The ticket is not open.
        """
        return Prefix(num_tokens=self._row(ticket).num_tokens, ticket=ticket)

    def wait(self, seconds: float) -> None:
        """Return at once: there is nothing to wait for."""

    def prefetch(self, key: PrefixKey, limit: int) -> None:
        """Do nothing: there is no slower tier."""

    def load(self, ticket: int) -> StoredRow:
        """What a ticket holds.

        Raises:
            ValueError: The ticket is not open.
        """
        return self._row(ticket)

    def release(self, ticket: int) -> None:
        """Let go of what :meth:`find` found, once.

        Raises:
            ValueError: The ticket is not open.
        """
        self._row(ticket)
        del self._held[ticket]
        self._index.release(ticket)
        self._shrink()

    def insert(self, key: PrefixKey, row: RowReader, generation: int) -> None:
        """Keep the state of ``key``, as far as there is room; what is there is not copied."""
        self.add(self.chain(key), row, generation)

    def add(self, chain: Chain, row: RowReader, generation: int) -> Insertion:
        """As :meth:`insert`, for digests.

        Returns:
            What was stored. Its slots and numbers are good until the store is used again.
        """
        assert row.num_tokens == chain.num_tokens, "a state covers exactly the tokens of its key"
        state_bytes = row.state_bytes if self._storage.layout.has_state else None
        return self.put(
            chain, row.num_tokens, RowSource(self._storage, row), state_bytes, generation
        )

    def put(
        self,
        chain: Chain,
        num_tokens: int,
        source: Source,
        state_bytes: int | None,
        generation: int,
    ) -> Insertion:
        """Store the first ``num_tokens`` tokens of ``chain`` from ``source``.

        Args:
            chain: Digests of the tokens.
            num_tokens: How many of them the state covers.
            source: Where the contents come from; asked only for what is new.
            state_bytes: Bytes of a checkpoint's state; None stores no checkpoint.
            generation: The store's generation when computing the state began.

        Returns:
            What was stored; nothing when the source failed.
        """
        self._shrink()
        size = None
        if state_bytes is not None:
            size = self._storage.checkpoint_bytes(num_tokens, state_bytes)
        insertion = self._index.insert(
            chain, num_tokens, generation=generation, checkpoint_bytes=size
        )
        self._drop(insertion.evicted)
        try:
            self._write(insertion, source, size)
        except FAILURES as error:
            self._withdraw(insertion)
            self._counters.failed_inserts += 1
            if isinstance(error, MemoryError):
                # Somebody needs memory more than a cache does.
                self._drop(self._index.evict(self._index.used_bytes // 2))
            return Insertion(evicted=insertion.evicted, refused="no_room")
        return insertion

    def entries(self, chain: Chain, insertion: Insertion) -> Iterator[Entry]:
        """What ``insertion`` has just stored of ``chain``, without a copy."""
        for new in insertion.new:
            number = new.num_tokens // self._config.block_size - 1
            yield block_entry(self._storage, chain, number, self._blocks[new.slot])
        if insertion.checkpoint is not None:
            yield checkpoint_entry(chain, self._checkpoints[insertion.checkpoint])

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity for good, whatever the config says, and evict down to it.

        What is held by tickets stays until they are released.

        Raises:
            ValueError: ``capacity_bytes`` is negative.
        """
        if capacity_bytes < 0:
            raise ValueError(f"a capacity of {capacity_bytes} bytes")
        self._capacity = capacity_bytes
        self._shrink()

    def clear(self) -> None:
        """Forget everything; what tickets hold can be loaded until they are released."""
        self._index.clear()
        self._blocks.clear()
        self._checkpoints.clear()

    def stats(self) -> PrefixStats:
        """Counters, as of now. May be called from any thread."""
        stats = self._index.stats
        refused = {f"refused_{reason}": count for reason, count in stats.refused.items()}
        return PrefixStats(
            hits=stats.hits,
            misses=stats.misses,
            matched_tokens=stats.matched_tokens,
            num_entries=stats.num_blocks + stats.num_checkpoints,
            used_bytes=stats.used_bytes,
            capacity_bytes=stats.capacity,
            evicted=stats.evicted_blocks + stats.evicted_checkpoints,
            details={
                "num_blocks": stats.num_blocks,
                "num_checkpoints": stats.num_checkpoints,
                "failed_inserts": self._counters.failed_inserts,
                "saved_entries": self._counters.saved_entries,
                "restored_entries": self._counters.restored_entries,
                "failed_saves": self._counters.failed_saves,
                "failed_loads": self._counters.failed_loads,
                "given_up_loads": self._counters.given_up_loads,
                "damaged_entries": self._counters.damaged_entries,
                **refused,
            },
        )

    def save_to_disk(self, path: Path) -> int:
        """Write all entries to a file, whole or not at all.

        Returns:
            How many; 0 if it could not be written, and then ``path`` is as it was.
        """
        footer = Footer(
            fingerprint=self._fingerprint,
            format=self._format,
            block_size=self._config.block_size,
            entries=(),
        )
        entries = self._index.entries()
        try:
            write_file(path, footer, ((entry, self._arrays_of(entry)) for entry in entries))
        except (OSError, MemoryError):
            self._counters.failed_saves += 1
            return 0
        self._counters.saved_entries += len(entries)
        return len(entries)

    def load_from_disk(self, path: Path, goes_on: GoesOn = always) -> int:
        """Add what a file has, the most recently used first, as far as it fits beside what is here.

        A file of another model or format, or none of ours, adds nothing; an entry that is damaged
        is left out, with what hangs on it.

        Args:
            path: The file.
            goes_on: Told of how many entries how many were looked at, and asked whether to go on;
                every now and then even if the disk does not answer.

        Returns:
            How many entries were added.
        """
        self._shrink()
        before = self._counters.restored_entries
        with Aside() as aside:
            try:
                file = aside.call(lambda: SavedFile(path), lambda: goes_on(0, 0))
                try:
                    self._restore(file, aside, goes_on)
                finally:
                    # There, because a call that was given up may still read it.
                    aside.later(file.close)
            except (OSError, DamagedFile):
                self._counters.failed_loads += 1
            except GivenUp:
                self._counters.given_up_loads += 1
        return self._counters.restored_entries - before

    def close(self) -> None:
        """Give everything back that no ticket holds. Idempotent."""
        self.clear()

    def check_integrity(self) -> None:
        """Assert everything that this class promises. Takes time in proportion to all entries."""
        self._index.check_integrity()
        stored = self._index.entries()
        blocks = {entry.number for entry in stored if entry.checkpoint_bytes is None}
        checkpoints = {entry.number for entry in stored if entry.checkpoint_bytes is not None}
        assert self._blocks.keys() == blocks, "blocks and slots differ"
        assert self._checkpoints.keys() == checkpoints, "checkpoints and numbers differ"
        assert self._index.used_bytes == self._count_bytes(), "used bytes are not what is held"

    def _count_bytes(self) -> int:
        """Bytes of everything that is reachable, as the arrays themselves say."""
        rows = self._held.values()
        blocks = {id(block): block for block in self._blocks.values()}
        blocks |= {id(block): block for row in rows for block in row.blocks}
        ends = {id(end): end for end in self._checkpoints.values()}
        ends |= {id(row.checkpoint): row.checkpoint for row in rows if row.checkpoint}
        metadata = block_metadata_bytes(self._config.block_size)
        return sum(block.nbytes + metadata for block in blocks.values()) + sum(
            end.num_bytes + CHECKPOINT_METADATA_BYTES for end in ends.values()
        )

    def _make_index(self, capacity: int) -> PrefixIndex:
        return PrefixIndex(
            block_size=self._config.block_size,
            block_bytes=self._storage.body.num_bytes,
            capacity=capacity,
            needs_checkpoints=self._storage.layout.has_state,
            head_blocks=self._storage.head_blocks,
            head_block_bytes=self._storage.head.num_bytes,
        )

    def _row(self, ticket: int) -> HeldRow:
        row = self._held.get(ticket)
        if row is None:
            raise ValueError(f"ticket {ticket} is not open")
        return row

    # Contents

    def _write(self, insertion: Insertion, source: Source, size: int | None) -> None:
        contents = source.blocks(insertion.new)
        for new, block in zip(insertion.new, contents, strict=True):
            self._blocks[new.slot] = block
        if insertion.checkpoint is not None:
            checkpoint = source.checkpoint()
            if checkpoint.num_bytes != size:
                raise ValueError(f"a checkpoint of {checkpoint.num_bytes} bytes, not {size}")
            self._checkpoints[insertion.checkpoint] = checkpoint

    def _withdraw(self, insertion: Insertion) -> None:
        self._index.withdraw(insertion)
        for new in insertion.new:
            self._blocks.pop(new.slot, None)
        if insertion.checkpoint is not None:
            self._checkpoints.pop(insertion.checkpoint, None)

    def _drop(self, evicted: Iterable[Evicted]) -> None:
        for entry in evicted:
            if isinstance(entry, EvictedBlock):
                del self._blocks[entry.slot]
            else:
                del self._checkpoints[entry.number]

    # Files

    def _arrays_of(self, entry: Indexed) -> Sequence[HostArray]:
        if entry.checkpoint_bytes is None:
            return [self._blocks[entry.number]]
        return self._checkpoints[entry.number].arrays

    def _restore(self, file: SavedFile, aside: Aside, goes_on: GoesOn) -> None:
        footer = file.footer
        expected = (self._fingerprint, self._format, self._config.block_size)
        if (footer.fingerprint, footer.format, footer.block_size) != expected:
            raise DamagedFile("the file is of another model or format")
        ages = {saved.entry.digest: age for age, saved in enumerate(footer.entries, 1)}
        # Parents before children, and checkpoints before those that extend them.
        wanted = sorted(self._fitting(footer.entries), key=lambda one: one.entry.num_tokens)
        for number, saved in enumerate(wanted):
            if not goes_on(number, len(wanted)):
                raise GivenUp
            try:
                arrays = aside.call(
                    partial(file.arrays, saved), partial(goes_on, number, len(wanted))
                )
                is_new = self._adopt(saved.entry, arrays, ages[saved.entry.digest])
                self._counters.restored_entries += is_new
            except (OSError, ValueError, DamagedFile):
                self._counters.damaged_entries += 1
            except MemoryError:
                self._counters.failed_loads += 1
                break

    def _fitting(self, entries: Iterable[SavedEntry]) -> Iterator[SavedEntry]:
        """The first of ``entries`` that are not here and fit together beside what is here."""
        room = self._index.capacity - self._index.used_bytes
        for saved in entries:
            is_block = saved.entry.checkpoint_bytes is None
            size = self._config.block_size
            metadata = block_metadata_bytes(size) if is_block else CHECKPOINT_METADATA_BYTES
            if saved.entry.digest in self._index:
                continue
            if saved.num_bytes + metadata <= room:
                room -= saved.num_bytes + metadata
                yield saved

    def _adopt(self, entry: Indexed, arrays: list[HostArray], age: int) -> bool:
        """Keep an entry of a file, if there is something for it to hang on."""
        if entry.checkpoint_bytes is not None:
            checkpoint = self._storage.checkpoint_of(arrays, entry.num_tokens)
            if checkpoint.num_bytes != entry.checkpoint_bytes:
                raise ValueError("a checkpoint of another size")
            number = self._index.adopt(entry, age=age)
            if number is not None:
                self._checkpoints[number] = checkpoint
            return number is not None
        form = self._storage.form(entry.num_tokens // self._config.block_size - 1)
        if len(arrays) != 1 or arrays[0].dtype != np.uint8 or arrays[0].shape != (form.num_bytes,):
            raise ValueError("a block of another size")
        slot = self._index.adopt(entry, age=age)
        if slot is not None:
            self._blocks[slot] = as_read_only(arrays[0])
        return slot is not None

    # Capacity

    def _wanted_capacity(self) -> int:
        if self._capacity is not None:
            return self._capacity
        return capacity(self._config, self._index.used_bytes, self._free_memory)

    def _shrink(self) -> None:
        """Follow the capacity that is wanted now, as far as tickets allow."""
        wanted = self._wanted_capacity()
        if wanted != self._index.capacity:
            self._drop(self._index.resize(wanted))


class RowSource:
    """The contents of new entries, copied from a live row.

    Args:
        storage: How they are kept.
        row: The row.
    """

    def __init__(self, storage: Storage, row: RowReader) -> None:
        self._storage = storage
        self._row = row

    def blocks(self, new: Sequence[NewBlock]) -> Iterator[Block]:
        """The contents of consecutive new blocks."""
        if not new:
            return
        size = self._storage.block_size
        first, last = new[0].num_tokens // size - 1, new[-1].num_tokens // size
        head = min(max(first, self._storage.head_blocks), last)
        yield from self._read(first, head)
        yield from self._read(head, last)

    def checkpoint(self) -> Checkpoint:
        """The contents of the checkpoint at the row's end."""
        stop = self._row.num_tokens
        start = stop - stop % self._storage.block_size
        tail = self._row.tokens(start, stop) if start < stop else []
        return self._storage.checkpoint_of([*tail, *self._row.state()], stop)

    def _read(self, first: int, last: int) -> Iterator[Block]:
        """Blocks of one form, several at a time."""
        size, form = self._storage.block_size, self._storage.form(first)
        step = max(1, READ_BYTES // max(1, self._storage.head.num_bytes))
        for start in range(first, last, step):
            stop = min(start + step, last)
            arrays = form.encode(self._row.tokens(start * size, stop * size))
            for number in range(stop - start):
                yield form.pack(arrays, number * size)


class EntrySource:
    """The contents of new entries, as another tier gave them back.

    Args:
        storage: How they are kept.
        entries: Blocks by digest.
        end: The checkpoint.
    """

    def __init__(
        self, storage: Storage, entries: Mapping[bytes, Block], end: Checkpoint | None
    ) -> None:
        self._storage = storage
        self._entries = entries
        self._end = end

    def blocks(self, new: Sequence[NewBlock]) -> Iterator[Block]:
        """The contents of new blocks."""
        for block in new:
            if block.digest not in self._entries:
                raise ValueError("a block was not read")
            yield self._entries[block.digest]

    def checkpoint(self) -> Checkpoint:
        """The contents of the new checkpoint."""
        if self._end is None:
            raise ValueError("the checkpoint was not read")
        return self._end


def block_entry(storage: Storage, chain: Chain, number: int, block: Block) -> Entry:
    """The ``number``-th block of ``chain``, from 0, for another tier."""
    name = EntryName(
        kind="block",
        root=chain.root,
        digest=chain.digests[number],
        parent=chain.position(number),
        num_tokens=(number + 1) * chain.block_size,
    )
    return Entry(name=name, arrays=storage.form(number).views(block))


def checkpoint_entry(chain: Chain, checkpoint: Checkpoint) -> Entry:
    """The checkpoint at the end of ``chain``, for another tier."""
    name = EntryName(
        kind="checkpoint",
        root=chain.root,
        digest=chain.end(chain.num_tokens),
        parent=chain.position(chain.num_tokens // chain.block_size),
        num_tokens=chain.num_tokens,
    )
    return Entry(name=name, arrays=checkpoint.arrays)


def _storage_for(config: CacheConfig, layout: StateLayout) -> tuple[Storage, str]:
    """How a model's states are kept, and the name of that format."""
    bits, group_size = config.kv_storage_bits, config.group_size
    if bits is None:
        return Storage(layout, config.block_size), "exact"
    codec = Quantizer(layout.tokens, bits, group_size)
    head_blocks = -(-config.min_quantize_tokens // config.block_size)
    storage = Storage(layout, config.block_size, codec, head_blocks)
    return storage, f"q{bits}g{group_size} from block {head_blocks}"
