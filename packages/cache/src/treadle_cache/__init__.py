"""A prefix store for Treadle engines: so far its index, which stores nothing itself."""

from treadle_cache.digests import Chain, Namespace, block_digests, tail_digest
from treadle_cache.index import (
    Evicted,
    EvictedBlock,
    EvictedCheckpoint,
    IndexStats,
    Insertion,
    Match,
    NewBlock,
    PrefixIndex,
    Refusal,
)
from treadle_core.prefix import MediaSpan, MissReason

__all__ = [
    "Chain",
    "Evicted",
    "EvictedBlock",
    "EvictedCheckpoint",
    "IndexStats",
    "Insertion",
    "Match",
    "MediaSpan",
    "MissReason",
    "Namespace",
    "NewBlock",
    "PrefixIndex",
    "Refusal",
    "block_digests",
    "tail_digest",
]
