"""When a row's state is looked up, and when it is stored: the scheduler's side of a prefix store."""

import logging

from treadle_core.plan import Save
from treadle_core.ports import PrefixStore
from treadle_core.prefix import Prefix, PrefixKey, StateLayout
from treadle_core.sequence import Sequence

SAVE_STEP = 256
LONGEST_RESTORE = 10.0
MOST_LOOKS = 2
LONGEST_HOLD = 5.0

logger = logging.getLogger("treadle")


class Reuse:
    """Decides what to look up and what to keep.

    Where every layer can be cut at any token, a long prompt is stored piece by piece while it is
    prefilled, so that no step pays for all of it. Where layers keep state that cannot be cut, it
    is stored at chosen lengths: the request's boundaries, every ``checkpoint_interval`` tokens,
    the end of the prompt, and wherever a row is given up.

    Args:
        store: Where to.
        layout: What rows consist of.
        checkpoint_interval: Tokens between checkpoints of a long prefill.
    """

    def __init__(
        self, store: PrefixStore, layout: StateLayout, *, checkpoint_interval: int
    ) -> None:
        self._store = store
        self._has_state = layout.has_state
        self._interval = checkpoint_interval
        self._busy_since: float | None = None

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether states are stored that cannot be cut later."""
        return self._has_state

    def prefetch(self, sequence: Sequence) -> None:
        """A sequence is waiting: a slower tier may begin to read."""
        key, limit = self._wanted(sequence)
        try:
            sequence.prefetched = self._store.prefetch(key, limit)
        except Exception:
            logger.exception("a prefix store failed to read ahead")

    def holds_back(self, now: float) -> bool:
        """Whether new prompts wait until the store has written more; never for long."""
        try:
            busy = self._store.busy
        except Exception:
            logger.exception("a prefix store failed")
            busy = False
        if not busy:
            self._busy_since = None
            return False
        if self._busy_since is None:
            self._busy_since = now
        return now - self._busy_since < LONGEST_HOLD

    def find(self, sequence: Sequence, now: float) -> Prefix:
        """What is stored of a sequence that got a row; held until it is released."""
        if sequence.cold:
            found = Prefix(miss="refused")
        else:
            found = self._find(sequence)
        # Only now: what is being read for it is taken over.
        self._release_prefetched(sequence)
        sequence.waits_until = now + LONGEST_RESTORE
        return found

    def _find(self, sequence: Sequence) -> Prefix:
        key, limit = self._wanted(sequence)
        try:
            self._begin(sequence)
            return self._store.find(key, limit)
        except Exception:
            logger.exception("a prefix store failed to look up")
            return Prefix(miss="damaged")

    def _begin(self, sequence: Sequence) -> None:
        """Note when computing a row begins; what it holds already stays as old as it is."""
        if sequence.num_computed == 0:
            sequence.generation = self._store.generation

    def has_more(self, sequence: Sequence) -> bool:
        """Whether, before one of its first chunks, more is stored than its row holds.

        Another may have computed the same since.
        """
        if sequence.cold or sequence.num_looks >= MOST_LOOKS or not sequence.num_to_prefill:
            return False
        sequence.num_looks += 1
        key, limit = self._wanted(sequence)
        try:
            return self._store.longest(key, limit) > sequence.num_computed
        except Exception:
            logger.exception("a prefix store failed to look up")
            return False

    def _wanted(self, sequence: Sequence) -> tuple[PrefixKey, int]:
        """What to look up: all that is known of a sequence, but its last token."""
        known = len(sequence.prompt) + len(sequence.output)
        return _key(sequence, known), sequence.num_tokens - 1

    def poll(self, sequence: Sequence, now: float) -> Prefix | None:
        """What became of the prefix that a sequence waits for; None while it is on its way.

        A tier that takes too long, a disk that hangs say, is given up.
        """
        assert sequence.ticket is not None
        if now > sequence.waits_until:
            self.forget(sequence)
            sequence.num_looks = MOST_LOOKS
            return Prefix(miss="damaged")
        try:
            prefix = self._store.poll(sequence.ticket)
            if prefix is not None and prefix.ticket is None:
                # Nothing came, perhaps because of a clear: all of it is computed from now on.
                self._begin(sequence)
        except Exception:
            logger.exception("a prefix store failed while something was read")
            self.forget(sequence)
            return Prefix(miss="damaged")
        if prefix is None:
            return None
        sequence.ticket = None
        return prefix

    def forget(self, sequence: Sequence) -> None:
        """A sequence does not wait any more."""
        self._release_prefetched(sequence)
        if sequence.ticket is not None:
            self.release(sequence.ticket)
            sequence.ticket = None

    def _release_prefetched(self, sequence: Sequence) -> None:
        if sequence.prefetched is not None:
            self.release(sequence.prefetched)
            sequence.prefetched = None

    def release(self, ticket: int) -> None:
        """What a ticket holds is in its row now, or not wanted."""
        try:
            self._store.release(ticket)
        except Exception:
            logger.exception("a prefix store failed to let go")

    def restored(self, sequence: Sequence, prefix: Prefix) -> None:
        """A row is about to hold ``prefix``."""
        sequence.num_computed = sequence.num_saved = prefix.num_tokens
        sequence.num_restored = max(sequence.num_restored, prefix.num_tokens)

    def cut(self, sequence: Sequence, num: int) -> int:
        """How much of a chunk of ``num`` tokens to prefill, so that it ends where state is kept."""
        if not self._has_state:
            return num
        start = sequence.num_computed
        stops = [start - start % self._interval + self._interval, *sequence.request.boundaries]
        return min((stop - start for stop in stops if start < stop < start + num), default=num)

    def is_due(self, sequence: Sequence) -> bool:
        """Whether a row is to be stored after the chunk that was just planned for it."""
        if sequence.num_to_prefill == 0:
            return True
        if not self._has_state:
            return sequence.num_computed - sequence.num_saved >= SAVE_STEP
        at = sequence.num_computed
        return at % self._interval == 0 or at in sequence.request.boundaries

    def is_long_unsaved(self, sequence: Sequence) -> bool:
        """Whether a row that decodes should be stored before more piles up."""
        known = len(sequence.prompt) + len(sequence.output)
        new = min(sequence.num_computed, known) - sequence.num_saved
        return not self._has_state and new >= SAVE_STEP

    def save(self, sequence: Sequence, place: tuple[int, int]) -> Save | None:
        """Store the row of a sequence; None if there is nothing new in it.

        Args:
            sequence: Whose row.
            place: Its group and row.
        """
        known = len(sequence.prompt) + len(sequence.output)
        num = min(sequence.num_computed, known)
        # A row may be further than that: its answer ended within a draft, or nobody has read how
        # much of a draft it took. State that cannot be cut covers more than there is a key for.
        beyond = sequence.num_drafted or num < sequence.num_computed
        if num <= sequence.num_saved or (self._has_state and beyond):
            return None
        sequence.num_saved = num
        group, row = place
        return Save(
            key=sequence.key,
            group=group,
            row=row,
            prefix=_key(sequence, num),
            generation=sequence.generation,
        )


def _key(sequence: Sequence, num_tokens: int) -> PrefixKey:
    request, tokens = sequence.request, sequence.tokens(0, num_tokens)
    return PrefixKey(tokens=tokens, salt=request.cache_salt or "", media=request.media)
