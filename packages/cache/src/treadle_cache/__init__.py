"""A prefix store for Treadle engines: the state of prompts, in host memory, before a slower tier."""

from treadle_cache.config import CacheConfig, free_memory
from treadle_cache.digests import Chain, Namespace, block_digests, tail_digest
from treadle_cache.entries import Entry, EntryName, Reading, SlowTier
from treadle_cache.index import (
    Evicted,
    EvictedBlock,
    EvictedCheckpoint,
    Indexed,
    IndexStats,
    Insertion,
    Match,
    NewBlock,
    PrefixIndex,
    Refusal,
)
from treadle_cache.ram import RamStore
from treadle_cache.tiered import TieredStore
from treadle_core.prefix import MediaSpan, MissReason

__all__ = [
    "CacheConfig",
    "Chain",
    "Entry",
    "EntryName",
    "Evicted",
    "EvictedBlock",
    "EvictedCheckpoint",
    "IndexStats",
    "Indexed",
    "Insertion",
    "Match",
    "MediaSpan",
    "MissReason",
    "Namespace",
    "NewBlock",
    "PrefixIndex",
    "RamStore",
    "Reading",
    "Refusal",
    "SlowTier",
    "TieredStore",
    "block_digests",
    "free_memory",
    "tail_digest",
]
