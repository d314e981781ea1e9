"""When a row's state is looked up, and when it is stored: the scheduler's side of a prefix store."""

from treadle_core.plan import Save
from treadle_core.ports import PrefixStore
from treadle_core.prefix import Prefix, PrefixKey, StateLayout
from treadle_core.sequence import Sequence

SAVE_STEP = 256


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

    def find(self, sequence: Sequence) -> Prefix:
        """What is stored of a sequence that got a row; held until it is released."""
        sequence.generation = self._store.generation
        if sequence.cold:
            return Prefix(miss="refused")
        known = len(sequence.prompt) + len(sequence.output)
        return self._store.find(_key(sequence, known), sequence.num_tokens - 1)

    def poll(self, sequence: Sequence) -> Prefix | None:
        """What became of the prefix that a sequence waits for; None while it is on its way."""
        assert sequence.ticket is not None
        prefix = self._store.poll(sequence.ticket)
        if prefix is not None:
            sequence.ticket = None
        return prefix

    def forget(self, sequence: Sequence) -> None:
        """A sequence does not wait any more."""
        if sequence.ticket is not None:
            self._store.release(sequence.ticket)
            sequence.ticket = None

    def restored(self, sequence: Sequence, prefix: Prefix) -> None:
        """A row is about to hold ``prefix``."""
        sequence.num_computed = sequence.num_saved = prefix.num_tokens
        if sequence.epoch == 0:
            sequence.num_cached = min(prefix.num_tokens, len(sequence.prompt))

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

    def save(self, sequence: Sequence, place: tuple[int, int]) -> Save | None:
        """Store the row of a sequence; None if there is nothing new in it.

        Args:
            sequence: Whose row.
            place: Its group and row.
        """
        known = len(sequence.prompt) + len(sequence.output)
        num = min(sequence.num_computed, known)
        if num <= sequence.num_saved or (self._has_state and num < sequence.num_computed):
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
    return PrefixKey(tokens=sequence.tokens(0, num_tokens), salt=sequence.request.cache_salt or "")
