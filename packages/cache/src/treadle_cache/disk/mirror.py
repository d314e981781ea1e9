"""What the index of a directory says, in memory, so that look-ups ask no disk."""

from collections.abc import Iterable, Sequence, Set

from treadle_cache.disk.catalog import Kept, News
from treadle_cache.entries import EntryName


class Mirror:
    """The entries that can be found, as of the last news. Not for several threads at once.

    It takes about 200 bytes for a block, and a kilobyte for a checkpoint.
    """

    def __init__(self) -> None:
        self._sizes: dict[bytes, int] = {}
        # By the digest that they hang on.
        self._checkpoints: dict[bytes, dict[bytes, EntryName]] = {}
        self._parents: dict[bytes, bytes] = {}
        self._epoch: int | None = None
        self._number = 0

    @property
    def epoch(self) -> int | None:
        """The epoch of the last news; None before any."""
        return self._epoch

    @property
    def number(self) -> int:
        """Number of the last change that it knows of."""
        return self._number

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._sizes)

    def present(self, digests: Set[bytes]) -> Set[bytes]:
        """Which of ``digests`` can be found."""
        return self._sizes.keys() & digests

    def num_bytes(self, digests: Iterable[bytes]) -> int:
        """Bytes of the files of those entries that can be found."""
        return sum(self._sizes.get(digest, 0) for digest in digests)

    def checkpoints(self, parents: Sequence[bytes]) -> list[EntryName]:
        """Checkpoints that hang on any of ``parents``."""
        found = (self._checkpoints.get(parent) for parent in dict.fromkeys(parents))
        return [name for names in found if names for name in names.values()]

    def take(self, news: News) -> None:
        """Take in what has changed since."""
        if news.is_all:
            self.forget()
        for digest in news.gone:
            self._remove(digest)
        for entry in news.kept:
            self._add(entry)
        self._epoch, self._number = news.epoch, news.number

    def forget(self, epoch: int | None = None) -> None:
        """Be empty, as of ``epoch``, until the next news, which will be of everything."""
        self._sizes.clear()
        self._checkpoints.clear()
        self._parents.clear()
        self._epoch, self._number = epoch, 0

    def _add(self, entry: Kept) -> None:
        self._sizes[entry.digest] = entry.num_bytes
        if entry.checkpoint is not None:
            name = entry.checkpoint
            self._checkpoints.setdefault(name.parent, {})[name.digest] = name
            self._parents[name.digest] = name.parent

    def _remove(self, digest: bytes) -> None:
        self._sizes.pop(digest, None)
        parent = self._parents.pop(digest, None)
        if parent is not None:
            names = self._checkpoints[parent]
            del names[digest]
            if not names:
                del self._checkpoints[parent]
