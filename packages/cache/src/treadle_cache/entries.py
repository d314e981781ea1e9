"""What the tiers of a store hand to each other: blocks and checkpoints with their contents."""

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct

from treadle_core.prefix import HostArray

EntryKind = Literal["block", "checkpoint"]


class EntryName(Struct, frozen=True, kw_only=True):
    """An entry without its contents.

    Attributes:
        kind: Block or checkpoint.
        root: Digest of the namespace that it belongs to.
        digest: Its digest; it names the contents, so that equal digests mean equal contents.
        parent: Digest of the block before it, or the root.
        num_tokens: Tokens from the start of the chain to its end.
    """

    kind: EntryKind
    root: bytes
    digest: bytes
    parent: bytes
    num_tokens: int


class Entry(Struct, frozen=True, kw_only=True):
    """An entry with its contents.

    Attributes:
        name: Which.
        arrays: Its arrays; never written to by anybody again.
    """

    name: EntryName
    arrays: tuple[HostArray, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its contents."""
        return sum(array.nbytes for array in self.arrays)


class Reading(Protocol):
    """Entries that are being read in another thread."""

    @property
    def done(self) -> bool:
        """Whether :meth:`result` returns at once."""
        ...

    def result(self) -> list[Entry | None]:
        """The entries in the order asked for, None for each that is gone or damaged. Blocks.

        It is the caller's: what is taken out of the list is kept by nobody else.
        """
        ...

    def cancel(self) -> None:
        """Nobody wants it any more."""
        ...


class SlowTier(Protocol):
    """Where entries outlive the RAM tier. Used from the engine's thread; never raises.

    Only :meth:`wait`, :meth:`flush` and :meth:`close` may block, and a :class:`Reading`'s result.
    """

    def has_room(self, num_bytes: int) -> bool:
        """Whether :meth:`put` would take so many bytes without exceeding what may wait.

        True also where it would drop them for another reason, so that nobody keeps them for it.
        """
        ...

    def put(self, entry: Entry) -> None:
        """Keep an entry, later. Without room it is taken only if nothing else waits."""
        ...

    def touch(self, digests: Sequence[bytes]) -> None:
        """Note a use of entries that were served from elsewhere, the first as the latest."""
        ...

    def count_blocks(self, digests: Sequence[bytes]) -> int:
        """How many of ``digests``, from the first on without a gap, are kept or being written."""
        ...

    def present(self, digests: Sequence[bytes]) -> set[bytes]:
        """Which of ``digests`` are kept or being written."""
        ...

    def checkpoints(self, parents: Sequence[bytes]) -> list[EntryName]:
        """Checkpoints that hang on any of ``parents``."""
        ...

    def num_bytes(self, digests: Sequence[bytes]) -> int:
        """Most bytes that reading those of ``digests`` gives which are kept or being written."""
        ...

    def read(self, digests: Sequence[bytes]) -> Reading:
        """Begin to read entries, in the order given."""
        ...

    def wait(self, seconds: float) -> None:
        """Block until some reading has finished, at most ``seconds``."""
        ...

    def clear(self) -> None:
        """Forget everything; what was put before is not found after this returns.

        That holds after a restart and for other processes too, unless one of them holds a lock for
        long; then it comes to hold there as soon as the lock is given back.
        """
        ...

    def flush(self) -> None:
        """Block until everything put before is written, or given up, and what is cleared is gone."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Counters by name, at once. May be called from any thread."""
        ...

    def close(self) -> None:
        """Flush and end the threads, or give up what takes too long. Idempotent."""
        ...
