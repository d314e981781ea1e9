"""Which prefixes are stored, and where: bookkeeping over integers that holds no state itself.

Two kinds of entries hang on the chains of :mod:`treadle_cache.digests`:

    root <- block <- block <- block <- block        a slot each; prefixes share what they have
               ^                ^  ^                in common
               checkpoint       |  checkpoint
                                checkpoint          state at exactly one token count

A block is the KV of ``block_size`` tokens in layers that can be cut anywhere. A checkpoint is all
else that goes on after ``num_tokens`` tokens: the state of windowed and recurrent layers, and what
the other layers keep of the tokens after the last full block. A block is there only while its
parent is, and a checkpoint only while the block it hangs on is.

Where all layers can be cut, a match may end inside a block: what a block keeps of its first tokens
is right for every prompt that has the same tokens up to there, whatever follows. So blocks remember
their tokens, and those that hang on the same block are kept in the order of their tokens:

    root <- block <- block        a prompt that goes on with a, b, x finds them between these two,
                  <- a b c d      and has two tokens in common with the first
                  <- a f g h
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise
from typing import Literal

from msgspec import Struct

from treadle_cache.digests import TOKEN_BYTES, Chain, common_tokens, encoded_block_digest
from treadle_core.prefix import MissReason

BLOCK_METADATA_BYTES = 640
"""What this index holds for a block besides its tokens, in Python objects; a bound, measured in the
tests."""

CHECKPOINT_METADATA_BYTES = 2048
"""What this index holds for a checkpoint, in Python objects; a bound, measured in the tests."""

MIN_LONE_TOKENS = 8
"""Fewest tokens of a match that has no full block. Most prompts begin alike for a few tokens, those
of the chat template, and taking them from a store costs about as much as computing them."""

Refusal = Literal["cleared", "no_room"]
"""Why an insertion was not, or not whole, carried out."""


class Match(Struct, frozen=True, kw_only=True):
    """The longest usable prefix of a chain. Holds nothing: it must be pinned to be relied on.

    Attributes:
        num_tokens: Tokens it covers; 0 is a miss.
        slots: Slots of its blocks, in order. Where none needs a checkpoint, only the first tokens
            of the last one may be covered.
        checkpoint: Number of the checkpoint at its end; None where none is needed.
        miss: Why it is empty, if it is.
        tip: Digest and serial number of its last block.
        end: Digest of the checkpoint.
    """

    num_tokens: int = 0
    slots: tuple[int, ...] = ()
    checkpoint: int | None = None
    miss: MissReason | None = None
    tip: tuple[bytes, int] | None = None
    end: bytes | None = None


class NewBlock(Struct, frozen=True, array_like=True):
    """A block to be written: the KV of ``[num_tokens - block_size, num_tokens)`` into ``slot``."""

    digest: bytes
    slot: int
    num_tokens: int


class EvictedBlock(Struct, frozen=True, tag="block"):
    """A block that was given up. Its slot keeps its KV until somebody writes to it.

    Attributes:
        digest: Its digest.
        parent: Digest of the block before it, or the root.
        num_tokens: Tokens from the start of the chain to its end.
        slot: Where it is.
    """

    digest: bytes
    parent: bytes
    num_tokens: int
    slot: int


class EvictedCheckpoint(Struct, frozen=True, tag="checkpoint"):
    """A checkpoint that was given up; the caller drops its state, or moves it elsewhere.

    Attributes:
        digest: Its digest.
        parent: Digest of the last full block before it, or the root.
        num_tokens: Tokens from the start of the chain to its end.
        number: Its number.
        num_bytes: Bytes of its state.
    """

    digest: bytes
    parent: bytes
    num_tokens: int
    number: int
    num_bytes: int


Evicted = EvictedBlock | EvictedCheckpoint


class Indexed(Struct, frozen=True, kw_only=True):
    """An entry that can be found, as it is written down for another index.

    Attributes:
        digest: Its digest.
        parent: Digest of the last full block before it, or the root.
        num_tokens: Tokens from the start of the chain to its end.
        number: Slot of a block, number of a checkpoint.
        checkpoint_bytes: Bytes of a checkpoint; None for a block.
        extends: Digest of the checkpoint that a checkpoint extends.
        reused: Whether a checkpoint is a prefix that others share.
        tokens: Encoded tokens of a block; empty if media overlap it or matches end at checkpoints.
    """

    digest: bytes
    parent: bytes
    num_tokens: int
    number: int
    checkpoint_bytes: int | None = None
    extends: bytes | None = None
    reused: bool = False
    tokens: bytes = b""


class Insertion(Struct, frozen=True, kw_only=True):
    """What an insertion did. What was evicted must be read before the new slots are written.

    Attributes:
        new: Blocks to be written, in order. What was there already is not among them.
        checkpoint: Number of the new checkpoint; None if it was there, not asked for or refused.
        end: Digest of the new checkpoint.
        evicted: Entries that made room, in the order in which they went.
        refused: Why something is missing; None when everything is there now.
    """

    new: tuple[NewBlock, ...] = ()
    checkpoint: int | None = None
    end: bytes | None = None
    evicted: tuple[Evicted, ...] = ()
    refused: Refusal | None = None


class IndexStats(Struct, frozen=True, kw_only=True):
    """Counters since construction, and what is there now.

    Attributes:
        hits: Lookups that found something.
        misses: Lookups that found nothing, by reason.
        matched_tokens: Tokens of all matches.
        inserted_blocks: Blocks that got a slot.
        inserted_checkpoints: Checkpoints that got a number.
        refused: Insertions not carried out whole, by reason.
        evicted_blocks: Blocks given up for room; a clear does not count.
        evicted_checkpoints: Checkpoints given up for room.
        num_blocks: Blocks that can be found.
        num_checkpoints: Checkpoints that can be found.
        used_bytes: Bytes of all entries, those that only a pin still holds included.
        capacity: Most bytes.
    """

    hits: int
    misses: dict[MissReason, int]
    matched_tokens: int
    inserted_blocks: int
    inserted_checkpoints: int
    refused: dict[Refusal, int]
    evicted_blocks: int
    evicted_checkpoints: int
    num_blocks: int
    num_checkpoints: int
    used_bytes: int
    capacity: int


@dataclass(slots=True, eq=False)
class _Block:
    """A full block. ``used`` is never below a child's: who uses a child uses its parents.

    ``pins`` counts open pins on the block or on a later one of its chain, ``children`` and
    ``checkpoints`` what hangs on it. ``tokens`` are its own ones, encoded; empty where a match must
    not end inside it.
    """

    digest: bytes
    above: bytes
    parent: "_Block | None"
    num_tokens: int
    slot: int
    serial: int
    used: int
    tokens: bytes
    children: int = 0
    checkpoints: int = 0
    pins: int = 0
    findable: bool = True


@dataclass(slots=True, eq=False)
class _Checkpoint:
    """A checkpoint. ``earlier`` is the next shorter one of its chain, ``later`` the reverse.

    ``reused`` says that it ended a match although there were longer ones of its chain: it is a
    prefix that others share, and not just what a conversation has left behind.
    """

    digest: bytes
    above: bytes
    num_tokens: int
    num_bytes: int
    used: int
    serial: int = 0
    block: _Block | None = None
    earlier: "_Checkpoint | None" = None
    later: "set[_Checkpoint]" = field(default_factory=set["_Checkpoint"])
    reused: bool = False
    pins: int = 0
    findable: bool = True

    @property
    def superseded(self) -> bool:
        """Whether another extends it and nobody has used it since."""
        return bool(self.later) and not self.reused


@dataclass(slots=True, eq=False)
class _Found:
    """The longest usable prefix: its blocks, of which the last may be cut, and its end.

    ``num_present`` is the number of full blocks that are there, usable or not.
    """

    path: list[_Block]
    num_tokens: int
    checkpoint: _Checkpoint | None
    num_present: int


_Entry = _Block | _Checkpoint
_Rank = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class _Counters:
    hits: int = 0
    matched_tokens: int = 0
    inserted_blocks: int = 0
    inserted_checkpoints: int = 0
    evicted_blocks: int = 0
    evicted_checkpoints: int = 0
    misses: dict[MissReason, int] = field(default_factory=dict["MissReason", int])
    refused: dict[Refusal, int] = field(default_factory=dict["Refusal", int])


class PrefixIndex:
    """Finds, shares, pins and evicts blocks and checkpoints. Used from one thread.

    ``free + cached + pinned`` slots are all slots ever given out, and the bytes of all entries,
    this index's own included, never exceed the capacity. Lookups, insertions and pins take time in
    proportion to the chain's blocks and media, and at most a digest per token where checkpoints lie
    inside blocks; an eviction takes the logarithm of the number of entries. Only moving the
    references to the blocks that hang on the same one grows with their number, by bytes.

    What goes first, when room is needed: checkpoints that another one extends, unless they were
    used again since; then the least recently used entry. A block goes after everything that hangs
    on it. Where matches end at checkpoints, a last block without one is of no use to anybody, and
    goes with the first. What is pinned stays.

    Args:
        block_size: Tokens per block.
        block_bytes: Bytes of a block's KV in all layers; may be 0.
        capacity: Most bytes; 0 stores nothing.
        needs_checkpoints: Whether the model has layers whose state cannot be cut at any block, so
            that a match must end at a checkpoint.
        head_blocks: How many blocks at the start of each chain have a size of their own.
        head_block_bytes: Their size.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        *,
        block_size: int,
        block_bytes: int,
        capacity: int,
        needs_checkpoints: bool,
        head_blocks: int = 0,
        head_block_bytes: int = 0,
    ) -> None:
        if block_size < 1 or min(block_bytes, capacity, head_blocks, head_block_bytes) < 0:
            raise ValueError(
                f"blocks of {block_size} tokens and {block_bytes} bytes within {capacity} bytes, "
                f"{head_blocks} of {head_block_bytes} bytes before them"
            )
        self._block_size = block_size
        self._block_cost = block_bytes + block_metadata_bytes(block_size)
        self._head_blocks = head_blocks
        self._head_cost = head_block_bytes + block_metadata_bytes(block_size)
        self._capacity = capacity
        self._needs_checkpoints = needs_checkpoints
        self._blocks: dict[bytes, _Block] = {}
        self._checkpoints: dict[bytes, _Checkpoint] = {}
        # By the digest they hang on: how many checkpoints are how many tokens after it.
        self._tails: dict[bytes, dict[int, int]] = {}
        # By the digest they hang on: blocks inside which a match may end, in order of their tokens.
        self._siblings: dict[bytes, list[_Block]] = {}
        self._queue: list[tuple[_Rank, _Entry]] = []
        self._pins: dict[int, tuple[_Block | None, _Checkpoint | None]] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._num_pinned = 0
        self._used_bytes = 0
        self._pinned_bytes = 0
        self._generation = 0
        self._cleared = False
        self._tick = 0
        self._serial = 0
        self._counters = _Counters()

    @property
    def generation(self) -> int:
        """Counts clears. Whoever begins to compute state notes it, and hands it in with it."""
        return self._generation

    @property
    def capacity(self) -> int:
        """Most bytes of all entries."""
        return self._capacity

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries."""
        return self._used_bytes

    @property
    def num_slots(self) -> int:
        """Slots ever given out; their numbers are below this."""
        return self._num_slots

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free_slots)

    @property
    def num_pinned_slots(self) -> int:
        """Slots of pinned blocks, those that a clear took out of sight included."""
        return self._num_pinned

    @property
    def num_cached_slots(self) -> int:
        """Slots of blocks that may be evicted sooner or later."""
        return self._num_slots - len(self._free_slots) - self._num_pinned

    @property
    def stats(self) -> IndexStats:
        """Counters, as of now."""
        counters = self._counters
        return IndexStats(
            hits=counters.hits,
            misses=dict(counters.misses),
            matched_tokens=counters.matched_tokens,
            inserted_blocks=counters.inserted_blocks,
            inserted_checkpoints=counters.inserted_checkpoints,
            refused=dict(counters.refused),
            evicted_blocks=counters.evicted_blocks,
            evicted_checkpoints=counters.evicted_checkpoints,
            num_blocks=len(self._blocks),
            num_checkpoints=len(self._checkpoints),
            used_bytes=self._used_bytes,
            capacity=self._capacity,
        )

    def __contains__(self, digest: object) -> bool:
        """Whether a block or a checkpoint of this digest can be found. Refreshes nothing."""
        return digest in self._blocks or digest in self._checkpoints

    def lookup(self, chain: Chain, *, limit: int) -> Match:
        """The longest usable prefix of ``chain``; refreshes it, and counts.

        Args:
            chain: The prompt.
            limit: Most tokens to match: all but the last, whose logits are needed.

        Raises:
            ValueError: The chain has blocks of another size.
        """
        limit = min(limit, chain.num_tokens)
        found = self._usable(chain, limit)
        if not found.num_tokens and found.checkpoint is None:
            return self._miss(limit, found.num_present)
        if found.checkpoint is not None and found.checkpoint.later:
            found.checkpoint.reused = True
        self._touch(found.path, found.checkpoint)
        return self._hit(found)

    def peek(self, chain: Chain, *, limit: int) -> int:
        """How many tokens :meth:`lookup` would match. Refreshes nothing, and counts nothing.

        Raises:
            ValueError: The chain has blocks of another size.
        """
        return self._usable(chain, min(limit, chain.num_tokens)).num_tokens

    def reach(self, chain: Chain, num_blocks: int) -> Match:
        """The first blocks of ``chain`` that are there whole, at most ``num_blocks``.

        Whether a checkpoint ends them does not matter, nothing is refreshed and nothing counted.
        """
        self._check(chain)
        path = self._walk(chain, num_blocks)
        return Match(
            num_tokens=len(path) * self._block_size,
            slots=tuple([block.slot for block in path]),
            tip=(path[-1].digest, path[-1].serial) if path else None,
        )

    def entries(self) -> list[Indexed]:
        """All that can be found, the most recently used first, and parents before children."""
        ordered = sorted(
            (*self._blocks.values(), *self._checkpoints.values()),
            key=lambda entry: (-entry.used, entry.num_tokens),
        )
        return [_describe(entry) for entry in ordered]

    def adopt(self, entry: Indexed, *, age: int) -> int | None:
        """Add an entry that another index has described, as far as there is room for it.

        Nothing is evicted for it. Its chain is not known here, so a block comes after its parent
        and a checkpoint after the block it hangs on and the checkpoint it extends.

        Args:
            entry: What :meth:`entries` gave there; its number means nothing here.
            age: At least 1; the higher, the sooner it goes. All that was used here is younger.

        Returns:
            The slot of a block, the number of a checkpoint; None if it was there or has no room or
            nothing to hang on.
        """
        parent = self._blocks.get(entry.parent)
        is_block = entry.checkpoint_bytes is None
        start = entry.num_tokens - self._block_size if is_block else entry.num_tokens
        expected = start // self._block_size * self._block_size
        if entry.digest in self or (parent.num_tokens if parent else 0) != expected:
            return None
        used = min(-age, parent.used if parent else -age)
        if is_block:
            return self._adopt_block(entry, parent, used)
        return self._adopt_checkpoint(entry, parent, used)

    def pin(self, match: Match) -> int | None:
        """Keep all of ``match`` until :meth:`release`.

        Returns:
            The pin's number, or None when some of the match is gone since it was found.
        """
        block = checkpoint = None
        if match.tip is not None:
            digest, serial = match.tip
            block = self._blocks.get(digest)
            if block is None or block.serial != serial:
                return None
        if match.end is not None:
            checkpoint = self._checkpoints.get(match.end)
            if checkpoint is None or checkpoint.serial != match.checkpoint:
                return None
        self._hold(block, checkpoint)
        number = self._next_serial()
        self._pins[number] = (block, checkpoint)
        return number

    def release(self, pin: int) -> tuple[int, ...]:
        """End a pin. Its entries can be evicted again; those cleared meanwhile are gone now.

        Returns:
            Numbers of checkpoints that are gone with it, whose state is to be dropped.

        Raises:
            ValueError: The pin is not open.
        """
        if pin not in self._pins:
            raise ValueError(f"pin {pin} is not open")
        return self._let_go(*self._pins.pop(pin))

    def insert(
        self,
        chain: Chain,
        num_tokens: int,
        *,
        generation: int,
        checkpoint_bytes: int | None = None,
    ) -> Insertion:
        """Make room for the state of the first ``num_tokens`` tokens of ``chain``.

        What is there already is refreshed and kept. New entries can be found at once, so that the
        caller writes them before anybody looks up. An insertion that could not be whole, for its
        size or because of pins, evicts nothing: the first of its blocks take what room is free,
        and a checkpoint, with the blocks that would lead to it alone, is left out.

        Args:
            chain: Tokens of the state.
            num_tokens: How many of them it covers. Tokens after the last full block count only
                for the checkpoint.
            generation: The index's generation when computing the state began.
            checkpoint_bytes: Bytes of the checkpoint at ``num_tokens``; None stores none.

        Raises:
            ValueError: The chain has blocks of another size or is too short, or the size of the
                checkpoint is negative.
        """
        self._check(chain)
        if not 0 <= num_tokens <= chain.num_tokens:
            raise ValueError(f"{num_tokens} tokens of a chain of {chain.num_tokens}")
        if checkpoint_bytes is not None and checkpoint_bytes < 0:
            raise ValueError(f"a checkpoint of {checkpoint_bytes} bytes")
        if generation != self._generation:
            return self._refuse("cleared")
        num_blocks = num_tokens // self._block_size
        path = self._walk(chain, num_blocks)
        if checkpoint_bytes is None:
            return self._insert_blocks(chain, path, num_blocks)
        known = self._checkpoints.get(chain.end(num_tokens))
        if known is not None:
            self._touch(path, known)
            self._link(chain, path, num_tokens)
            return Insertion()
        return self._insert_checkpoint(chain, path, num_tokens, checkpoint_bytes)

    def withdraw(self, insertion: Insertion) -> None:
        """Take back what ``insertion`` added, because it could not be written.

        To be called before anything else happens to the index. What was evicted stays evicted.
        """
        if insertion.end is not None:
            checkpoint = self._checkpoints[insertion.end]
            assert checkpoint.serial == insertion.checkpoint, "another checkpoint by now"
            assert not checkpoint.pins, "a checkpoint that is in use is withdrawn"
            self._remove_checkpoint(checkpoint)
        for new in reversed(insertion.new):
            block = self._blocks[new.digest]
            in_use = block.children or block.checkpoints or block.pins
            assert not in_use, "a block that is in use is withdrawn"
            self._remove_block(block)

    def evict(self, num_bytes: int) -> tuple[Evicted, ...]:
        """Free at least ``num_bytes``, or all that is not pinned.

        Returns:
            What went, in order. All of it can be read until the next insertion is written.
        """
        return tuple(self._evict_to(self._used_bytes - num_bytes))

    def resize(self, capacity: int) -> tuple[Evicted, ...]:
        """Change the capacity. What is pinned stays, so that it may end up above ``capacity``.

        Returns:
            What went, in order.

        Raises:
            ValueError: ``capacity`` is negative.
        """
        if capacity < 0:
            raise ValueError(f"a capacity of {capacity} bytes")
        evicted = self._evict_to(capacity)
        self._capacity = max(capacity, self._used_bytes)
        return tuple(evicted)

    def clear(self) -> tuple[int, ...]:
        """Forget everything: nothing inserted or begun before can be found from here on.

        Pinned slots are not given out again before their pins end.

        Returns:
            Numbers of checkpoints that are gone, whose state is to be dropped; pinned ones follow
            from :meth:`release`.
        """
        self._generation += 1
        self._cleared = True
        blocks, checkpoints = list(self._blocks.values()), list(self._checkpoints.values())
        self._blocks.clear()
        self._checkpoints.clear()
        self._tails.clear()
        self._siblings.clear()
        self._queue.clear()
        for entry in (*checkpoints, *blocks):
            entry.findable = False
        for checkpoint in checkpoints:
            checkpoint.earlier = None
            checkpoint.later.clear()
        for block in blocks:
            if not block.pins:
                self._free(block)
        dropped = [checkpoint for checkpoint in checkpoints if not checkpoint.pins]
        for checkpoint in dropped:
            self._used_bytes -= _cost(checkpoint)
        return tuple(checkpoint.serial for checkpoint in dropped)

    def check_integrity(self) -> None:
        """Assert everything this class promises. Takes time in proportion to all entries."""
        pinned_blocks, pinned_checkpoints = self._check_pins()
        blocks = {*self._blocks.values(), *pinned_blocks}
        checkpoints = {*self._checkpoints.values(), *pinned_checkpoints}
        self._check_slots(blocks)
        used = sum(map(self._cost_of, blocks)) + sum(map(_cost, checkpoints))
        pinned = sum(map(self._cost_of, pinned_blocks)) + sum(map(_cost, pinned_checkpoints))
        assert self._used_bytes == used, "used bytes are miscounted"
        assert self._pinned_bytes == pinned, "pinned bytes are miscounted"
        assert self._num_pinned == len(pinned_blocks), "pinned blocks are miscounted"
        assert used <= self._capacity, "the capacity is exceeded"
        self._check_tree()
        self._check_siblings()
        self._check_checkpoints()
        self._check_queue()

    # Lookup

    def _check(self, chain: Chain) -> None:
        if chain.block_size != self._block_size:
            raise ValueError(f"blocks of {chain.block_size} tokens, not {self._block_size}")

    def _usable(self, chain: Chain, limit: int) -> _Found:
        """The longest match within ``limit``."""
        self._check(chain)
        path = self._walk(chain, max(0, limit) // self._block_size)
        present = len(path)
        if self._needs_checkpoints:
            checkpoint = next(self._ends(chain, path, limit), None)
            num_tokens = checkpoint.num_tokens if checkpoint else 0
            del path[num_tokens // self._block_size :]
            return _Found(path, num_tokens, checkpoint, present)
        block, more = self._most_alike(chain, present, limit)
        if block is not None:
            path.append(block)
        return _Found(path, present * self._block_size + more, None, present)

    def _most_alike(self, chain: Chain, num_blocks: int, limit: int) -> tuple[_Block | None, int]:
        """The block that goes on after ``num_blocks`` as ``chain`` does for the most tokens.

        Returns:
            The block, and how many tokens; never all, or it would be a block of the chain.
        """
        start = num_blocks * self._block_size
        siblings = self._siblings.get(chain.position(num_blocks), ())
        stop = min(limit, start + self._block_size)
        wanted = chain.tokens_until_media(start, max(start, stop))
        # In any order by bytes, those that begin most alike are next to each other.
        place = bisect_left(siblings, wanted, key=_tokens_of)
        best, most = None, 0
        for block in siblings[max(0, place - 1) : place + 1]:
            length = common_tokens(block.tokens, wanted)
            if length > most:
                best, most = block, length
        return (best, most) if start + most >= self._fewest_tokens else (None, 0)

    @property
    def _fewest_tokens(self) -> int:
        """Length of the shortest match."""
        return (
            self._block_size if self._needs_checkpoints else min(self._block_size, MIN_LONE_TOKENS)
        )

    def _walk(self, chain: Chain, num_blocks: int) -> list[_Block]:
        """The first blocks of ``chain`` that are there, at most ``num_blocks``."""
        path: list[_Block] = []
        for digest in islice(chain.digests, num_blocks):
            block = self._blocks.get(digest)
            if block is None:
                break
            path.append(block)
        return path

    def _ends(self, chain: Chain, path: Sequence[_Block], limit: int) -> Iterator[_Checkpoint]:
        """Checkpoints of ``chain`` at up to ``limit`` tokens, the longest first."""
        for num_blocks in range(len(path), -1, -1):
            if num_blocks and not path[num_blocks - 1].checkpoints:
                continue
            tails = self._tails.get(chain.position(num_blocks), {})
            for tail in sorted(tails, reverse=True):
                num_tokens = num_blocks * self._block_size + tail
                if num_tokens <= limit:
                    checkpoint = self._checkpoints.get(chain.end(num_tokens))
                    if checkpoint is not None:
                        yield checkpoint

    def _hit(self, found: _Found) -> Match:
        path, checkpoint = found.path, found.checkpoint
        self._counters.hits += 1
        self._counters.matched_tokens += found.num_tokens
        return Match(
            num_tokens=found.num_tokens,
            slots=tuple([block.slot for block in path]),
            checkpoint=checkpoint.serial if checkpoint else None,
            tip=(path[-1].digest, path[-1].serial) if path else None,
            end=checkpoint.digest if checkpoint else None,
        )

    def _miss(self, limit: int, num_present: int) -> Match:
        reason = self._miss_reason(limit, num_present)
        self._counters.misses[reason] = self._counters.misses.get(reason, 0) + 1
        return Match(miss=reason)

    def _miss_reason(self, limit: int, num_present: int) -> MissReason:
        if not self._blocks and not self._checkpoints:
            return "cleared" if self._cleared else "empty"
        if limit < self._fewest_tokens:
            return "too_short"
        return "no_checkpoint" if num_present else "no_block"

    def _touch(self, path: Sequence[_Block], checkpoint: _Checkpoint | None) -> None:
        self._tick = tick = self._tick + 1
        for block in path:
            block.used = tick
        if path:
            self._enqueue(path[-1])
        if checkpoint is not None:
            checkpoint.used = tick
            self._enqueue(checkpoint)

    # Insertion

    def _insert_blocks(self, chain: Chain, path: list[_Block], num_blocks: int) -> Insertion:
        wanted = num_blocks - len(path)
        self._touch(path, None)
        evicted = self._make_room(path, self._path_cost(len(path), wanted))
        if evicted is None:
            wanted = self._how_many_fit(len(path), wanted)
        new = self._append(chain, path, wanted)
        if evicted is None:
            return self._refuse("no_room", new)
        return Insertion(new=new, evicted=evicted)

    def _insert_checkpoint(
        self, chain: Chain, path: list[_Block], num_tokens: int, num_bytes: int
    ) -> Insertion:
        num_blocks = num_tokens // self._block_size
        wanted = num_blocks - len(path)
        self._touch(path, None)
        checkpoint = _Checkpoint(
            chain.end(num_tokens), chain.position(num_blocks), num_tokens, num_bytes, self._tick
        )
        # Linked before room is made: what this one extends goes before the end of another chain.
        self._set_earlier(checkpoint, next(self._ends(chain, path, num_tokens), None))
        evicted = self._make_room(path, self._path_cost(len(path), wanted) + _cost(checkpoint))
        if evicted is None:
            self._set_earlier(checkpoint, None)
            if self._needs_checkpoints:
                return self._refuse("no_room")
            wanted = self._how_many_fit(len(path), wanted)
            return self._refuse("no_room", self._append(chain, path, wanted))
        new = self._append(chain, path, wanted)
        self._attach(checkpoint, path[-1] if path else None)
        self._link(chain, path, num_tokens)
        return Insertion(
            new=new, checkpoint=checkpoint.serial, end=checkpoint.digest, evicted=evicted
        )

    def _refuse(self, reason: Refusal, new: tuple[NewBlock, ...] = ()) -> Insertion:
        self._counters.refused[reason] = self._counters.refused.get(reason, 0) + 1
        return Insertion(new=new, refused=reason)

    def _make_room(self, path: Sequence[_Block], num_bytes: int) -> tuple[Evicted, ...] | None:
        """Evict until ``num_bytes`` more fit, but none of ``path``.

        Returns:
            What went; None when it cannot be done, and then nothing went.
        """
        if self._used_bytes + num_bytes <= self._capacity:
            return ()
        tip = path[-1] if path else None
        self._hold(tip, None)
        evicted = None
        if self._pinned_bytes + num_bytes <= self._capacity:
            evicted = tuple(self._evict_to(self._capacity - num_bytes))
        self._let_go(tip, None)
        return evicted

    def _append(self, chain: Chain, path: list[_Block], num_blocks: int) -> tuple[NewBlock, ...]:
        """Add the ``num_blocks`` blocks of ``chain`` that follow ``path``, and to ``path`` too."""
        new: list[NewBlock] = []
        parent = path[-1] if path else None
        above = parent.digest if parent else chain.root
        for digest in islice(chain.digests, len(path), len(path) + num_blocks):
            if parent is not None:
                parent.children += 1
            end = (len(path) + 1) * self._block_size
            tokens = b"" if self._needs_checkpoints else chain.block_tokens(len(path))
            serial = self._next_serial()
            slot = self._take_slot()
            block = _Block(digest, above, parent, end, slot, serial, self._tick, tokens)
            self._blocks[digest] = block
            self._add_sibling(block)
            self._used_bytes += self._cost_of(block)
            path.append(block)
            new.append(NewBlock(digest, block.slot, end))
            parent, above = block, digest
        if new:
            self._cleared = False
            self._counters.inserted_blocks += len(new)
            self._enqueue(path[-1])
        return tuple(new)

    def _add_sibling(self, block: _Block) -> None:
        if block.tokens:
            insort(self._siblings.setdefault(block.above, []), block, key=_tokens_of)

    def _remove_sibling(self, block: _Block) -> None:
        if block.tokens:
            siblings = self._siblings[block.above]
            del siblings[bisect_left(siblings, block.tokens, key=_tokens_of)]
            if not siblings:
                del self._siblings[block.above]

    def _attach(self, checkpoint: _Checkpoint, block: _Block | None) -> None:
        checkpoint.serial = self._next_serial()
        checkpoint.block = block
        if block is not None:
            block.checkpoints += 1
        self._checkpoints[checkpoint.digest] = checkpoint
        tails = self._tails.setdefault(checkpoint.above, {})
        tail = checkpoint.num_tokens % self._block_size
        tails[tail] = tails.get(tail, 0) + 1
        self._used_bytes += _cost(checkpoint)
        self._cleared = False
        self._counters.inserted_checkpoints += 1
        self._enqueue(checkpoint)

    def _link(self, chain: Chain, path: Sequence[_Block], num_tokens: int) -> None:
        """Note which checkpoints of ``chain`` extend each other."""
        for later, earlier in pairwise(self._ends(chain, path, num_tokens)):
            if later.earlier is not earlier:
                self._set_earlier(later, earlier)

    def _set_earlier(self, later: _Checkpoint, earlier: _Checkpoint | None) -> None:
        if later.earlier is not None:
            later.earlier.later.discard(later)
            self._enqueue(later.earlier)
        later.earlier = earlier
        if earlier is not None:
            earlier.later.add(later)
            self._enqueue(earlier)

    def _adopt_block(self, entry: Indexed, parent: _Block | None, used: int) -> int | None:
        serial, end = self._next_serial(), entry.num_tokens
        tokens = b"" if self._needs_checkpoints else self._own_tokens(entry)
        block = _Block(entry.digest, entry.parent, parent, end, -1, serial, used, tokens)
        if end % self._block_size or self._used_bytes + self._cost_of(block) > self._capacity:
            return None
        block.slot = self._take_slot()
        if parent is not None:
            parent.children += 1
        self._blocks[entry.digest] = block
        self._add_sibling(block)
        self._used_bytes += self._cost_of(block)
        self._cleared = False
        self._counters.inserted_blocks += 1
        self._enqueue(block)
        return block.slot

    def _own_tokens(self, entry: Indexed) -> bytes:
        """The tokens that a block is said to have, if its digest says so too."""
        if len(entry.tokens) != self._block_size * TOKEN_BYTES:
            return b""
        own = encoded_block_digest(entry.parent, entry.tokens) == entry.digest
        return entry.tokens if own else b""

    def _adopt_checkpoint(self, entry: Indexed, parent: _Block | None, used: int) -> int | None:
        size = entry.checkpoint_bytes or 0
        checkpoint = _Checkpoint(entry.digest, entry.parent, entry.num_tokens, size, used)
        if self._used_bytes + _cost(checkpoint) > self._capacity:
            return None
        checkpoint.reused = entry.reused
        self._attach(checkpoint, parent)
        earlier = self._checkpoints.get(entry.extends) if entry.extends else None
        if earlier is not None and earlier.num_tokens < entry.num_tokens:
            self._set_earlier(checkpoint, earlier)
        return checkpoint.serial

    # Sizes

    def _cost_of(self, block: _Block) -> int:
        head = block.num_tokens <= self._head_blocks * self._block_size
        return self._head_cost if head else self._block_cost

    def _path_cost(self, start: int, num_blocks: int) -> int:
        """Bytes of the blocks ``[start, start + num_blocks)`` of a chain."""
        num_head = min(max(self._head_blocks - start, 0), num_blocks)
        return num_head * self._head_cost + (num_blocks - num_head) * self._block_cost

    def _how_many_fit(self, start: int, num_blocks: int) -> int:
        """How many blocks of a chain, from ``start`` on, fit without evicting anything."""
        room = self._capacity - self._used_bytes
        num_head = min(max(self._head_blocks - start, 0), num_blocks)
        fitting = min(num_head, room // self._head_cost)
        if fitting < num_head:
            return fitting
        room -= num_head * self._head_cost
        return num_head + min(num_blocks - num_head, room // self._block_cost)

    # Pins

    def _hold(self, block: _Block | None, checkpoint: _Checkpoint | None) -> None:
        while block is not None:
            if not block.pins:
                self._num_pinned += 1
                self._pinned_bytes += self._cost_of(block)
            block.pins += 1
            block = block.parent
        if checkpoint is not None:
            if not checkpoint.pins:
                self._pinned_bytes += _cost(checkpoint)
            checkpoint.pins += 1

    def _let_go(self, block: _Block | None, checkpoint: _Checkpoint | None) -> tuple[int, ...]:
        dropped: tuple[int, ...] = ()
        if checkpoint is not None:
            checkpoint.pins -= 1
            if not checkpoint.pins:
                self._pinned_bytes -= _cost(checkpoint)
                if checkpoint.findable:
                    self._enqueue(checkpoint)
                else:
                    self._used_bytes -= _cost(checkpoint)
                    dropped = (checkpoint.serial,)
        while block is not None:
            parent = block.parent
            block.pins -= 1
            if not block.pins:
                self._num_pinned -= 1
                self._pinned_bytes -= self._cost_of(block)
                if block.findable:
                    self._enqueue(block)
                else:
                    self._free(block)
            block = parent
        return dropped

    # Eviction

    def _rank(self, entry: _Entry) -> _Rank | None:
        """The order of eviction; None for an entry that cannot go now."""
        if not entry.findable or entry.pins:
            return None
        if isinstance(entry, _Checkpoint):
            first = entry.superseded
        elif entry.children or entry.checkpoints:
            return None
        else:
            first = self._needs_checkpoints
        return (0 if first else 1, entry.used, entry.serial)

    def _enqueue(self, entry: _Entry) -> None:
        """Queue ``entry`` by its present rank. Records of a former rank stay, and are skipped."""
        rank = self._rank(entry)
        if rank is None:
            return
        heappush(self._queue, (rank, entry))
        if len(self._queue) > 2 * (len(self._blocks) + len(self._checkpoints)) + 64:
            valid = {rank: entry for rank, entry in self._queue if self._rank(entry) == rank}
            self._queue = list(valid.items())
            heapify(self._queue)

    def _evict_to(self, num_bytes: int) -> list[Evicted]:
        """Evict until at most ``num_bytes`` are used or everything left is pinned."""
        evicted: list[Evicted] = []
        while self._used_bytes > num_bytes and self._queue:
            rank, entry = heappop(self._queue)
            if self._rank(entry) == rank:
                evicted.append(self._evict(entry))
        return evicted

    def _evict(self, entry: _Entry) -> Evicted:
        if isinstance(entry, _Checkpoint):
            self._counters.evicted_checkpoints += 1
            self._remove_checkpoint(entry)
            return EvictedCheckpoint(
                entry.digest, entry.above, entry.num_tokens, entry.serial, entry.num_bytes
            )
        self._counters.evicted_blocks += 1
        self._remove_block(entry)
        return EvictedBlock(entry.digest, entry.above, entry.num_tokens, entry.slot)

    def _remove_block(self, block: _Block) -> None:
        block.findable = False
        del self._blocks[block.digest]
        self._remove_sibling(block)
        parent = block.parent
        self._free(block)
        if parent is not None:
            parent.children -= 1
            self._enqueue(parent)

    def _remove_checkpoint(self, checkpoint: _Checkpoint) -> None:
        checkpoint.findable = False
        del self._checkpoints[checkpoint.digest]
        self._used_bytes -= _cost(checkpoint)
        tails = self._tails[checkpoint.above]
        tail = checkpoint.num_tokens % self._block_size
        tails[tail] -= 1
        if not tails[tail]:
            del tails[tail]
        if not tails:
            del self._tails[checkpoint.above]
        for later in tuple(checkpoint.later):
            self._set_earlier(later, checkpoint.earlier)
        self._set_earlier(checkpoint, None)
        if checkpoint.block is not None:
            checkpoint.block.checkpoints -= 1
            self._enqueue(checkpoint.block)

    # Slots

    def _take_slot(self) -> int:
        """The lowest free slot, so that the arena stays short."""
        if self._free_slots:
            return heappop(self._free_slots)
        self._num_slots += 1
        return self._num_slots - 1

    def _free(self, block: _Block) -> None:
        heappush(self._free_slots, block.slot)
        self._used_bytes -= self._cost_of(block)
        block.parent = None

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    # Integrity

    def _check_pins(self) -> tuple[set[_Block], set[_Checkpoint]]:
        """Recount the pins, and return what they hold."""
        blocks: list[_Block] = []
        checkpoints: list[_Checkpoint] = []
        for block, checkpoint in self._pins.values():
            while block is not None:
                blocks.append(block)
                block = block.parent
            if checkpoint is not None:
                checkpoints.append(checkpoint)
        counts = Counter[_Entry]([*blocks, *checkpoints])
        for entry in {*self._blocks.values(), *self._checkpoints.values(), *counts}:
            assert entry.pins == counts[entry], "pins are miscounted"
        return set(blocks), set(checkpoints)

    def _check_slots(self, blocks: set[_Block]) -> None:
        slots = sorted([*self._free_slots, *(block.slot for block in blocks)])
        assert slots == list(range(self._num_slots)), "a slot is lost or has two owners"
        cached = sum(not block.pins for block in blocks)
        assert self.num_cached_slots == cached, "cached slots are miscounted"

    def _check_tree(self) -> None:
        children: dict[_Block, int] = {}
        for digest, block in self._blocks.items():
            assert block.digest == digest, "a block is under another's digest"
            assert block.findable, "a block that is gone can be found"
            parent = block.parent
            start = parent.num_tokens if parent else 0
            # Lengths that grow from parent to child leave no room for a cycle.
            assert block.num_tokens == start + self._block_size, "a block is out of place"
            if parent is not None:
                children[parent] = children.get(parent, 0) + 1
                assert self._blocks.get(block.above) is parent, "a block has lost its parent"
                assert parent.used >= block.used, "a parent is older than its child"
        for block in self._blocks.values():
            assert block.children == children.get(block, 0), "children are miscounted"

    def _check_siblings(self) -> None:
        expected: dict[bytes, list[_Block]] = {}
        for block in sorted(self._blocks.values(), key=_tokens_of):
            if block.tokens:
                expected.setdefault(block.above, []).append(block)
                named = encoded_block_digest(block.above, block.tokens)
                assert named == block.digest, "a block has the tokens of another"
        assert self._siblings == expected, "siblings are lost or out of order"

    def _check_checkpoints(self) -> None:
        tails: dict[bytes, dict[int, int]] = {}
        for digest, checkpoint in self._checkpoints.items():
            assert checkpoint.digest == digest, "a checkpoint is under another's digest"
            assert checkpoint.findable, "a checkpoint that is gone can be found"
            block = checkpoint.block
            assert block is self._blocks.get(checkpoint.above), "a checkpoint has lost its block"
            tail = checkpoint.num_tokens - (block.num_tokens if block else 0)
            assert 0 <= tail < self._block_size, "a checkpoint is out of place"
            counts = tails.setdefault(checkpoint.above, {})
            counts[tail] = counts.get(tail, 0) + 1
            self._check_links(checkpoint)
        assert self._tails == tails, "tails are miscounted"
        for block in self._blocks.values():
            count = sum(tails.get(block.digest, {}).values())
            assert block.checkpoints == count, "checkpoints are miscounted"

    def _check_links(self, checkpoint: _Checkpoint) -> None:
        earlier = checkpoint.earlier
        if earlier is not None:
            assert earlier.findable, "a checkpoint extends one that is gone"
            assert earlier.num_tokens < checkpoint.num_tokens, "a longer one is extended"
            assert checkpoint in earlier.later, "a link goes one way only"
        for later in checkpoint.later:
            assert later.earlier is checkpoint, "a link goes one way only"
            assert self._checkpoints.get(later.digest) is later, "one that is gone extends another"

    def _check_queue(self) -> None:
        queued = {rank for rank, entry in self._queue if self._rank(entry) == rank}
        for entry in (*self._blocks.values(), *self._checkpoints.values()):
            rank = self._rank(entry)
            assert rank is None or rank in queued, "an entry can never be evicted"
        assert heap_is_ordered([rank for rank, _ in self._queue]), "the queue is out of order"


def block_metadata_bytes(block_size: int) -> int:
    """What the index holds for a block of so many tokens, in Python objects; a bound."""
    return BLOCK_METADATA_BYTES + TOKEN_BYTES * block_size


def heap_is_ordered(ranks: Sequence[_Rank]) -> bool:
    """Whether no item of a heap comes before its parent."""
    return all(ranks[(i - 1) // 2] <= ranks[i] for i in range(1, len(ranks)))


def _describe(entry: _Entry) -> Indexed:
    if isinstance(entry, _Block):
        return Indexed(
            digest=entry.digest,
            parent=entry.above,
            num_tokens=entry.num_tokens,
            number=entry.slot,
            tokens=entry.tokens,
        )
    return Indexed(
        digest=entry.digest,
        parent=entry.above,
        num_tokens=entry.num_tokens,
        number=entry.serial,
        checkpoint_bytes=entry.num_bytes,
        extends=entry.earlier.digest if entry.earlier else None,
        reused=entry.reused,
    )


def _tokens_of(block: _Block) -> bytes:
    return block.tokens


def _cost(checkpoint: _Checkpoint) -> int:
    return checkpoint.num_bytes + CHECKPOINT_METADATA_BYTES
