"""Vision features that were computed lately, by what the encoder was given. Bounded in bytes."""

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from msgspec import Struct


class HasBytes(Protocol):
    """Something of a known size."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        ...


FeaturesT = TypeVar("FeaturesT", bound=HasBytes)


class FeatureStats(Struct, frozen=True, kw_only=True):
    """Counters of a cache, and what is in it now.

    Attributes:
        hits: Look-ups that found something.
        misses: Look-ups that did not; the encoder ran for each.
        evicted: Entries given up for room.
        refused: Entries larger than the whole cache.
        num_items: Entries now.
        used_bytes: Their bytes.
        capacity_bytes: Most bytes.
    """

    hits: int
    misses: int
    evicted: int
    refused: int
    num_items: int
    used_bytes: int
    capacity_bytes: int


class FeatureCache(Generic[FeaturesT]):
    """Features by digest; those used longest ago go first. For one thread.

    Args:
        capacity_bytes: Never exceeded; 0 keeps nothing.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[bytes, FeaturesT] = OrderedDict()
        self._used = 0
        self._hits = self._misses = self._evicted = self._refused = 0

    def __contains__(self, digest: bytes) -> bool:
        """Whether something is there; this is no look-up."""
        return digest in self._entries

    def get(self, digest: bytes) -> FeaturesT | None:
        """What was put under a digest, if it is still there."""
        found = self._entries.get(digest)
        if found is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(digest)
        return found

    def put(self, digest: bytes, features: FeaturesT) -> None:
        """Keep features, as far as there is room."""
        self._drop(digest)
        size = features.nbytes
        if size > self._capacity:
            self._refused += 1
            return
        while self._used + size > self._capacity:
            self._drop(next(iter(self._entries)))
            self._evicted += 1
        self._entries[digest] = features
        self._used += size

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
        self._used = 0

    def stats(self) -> FeatureStats:
        """Counters, as of now."""
        return FeatureStats(
            hits=self._hits,
            misses=self._misses,
            evicted=self._evicted,
            refused=self._refused,
            num_items=len(self._entries),
            used_bytes=self._used,
            capacity_bytes=self._capacity,
        )

    def _drop(self, digest: bytes) -> None:
        features = self._entries.pop(digest, None)
        if features is not None:
            self._used -= features.nbytes
