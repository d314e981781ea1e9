"""The tier on disk: entries in files that survive the process and that processes share."""

from treadle_cache.disk.care import (
    Cleared,
    Collected,
    EntryInfo,
    Listing,
    Verified,
    clear,
    collect,
    list_entries,
    verify,
)
from treadle_cache.disk.config import DiskConfig
from treadle_cache.disk.files import Files, Found, RealFiles
from treadle_cache.disk.tier import DiskReading, DiskTier

__all__ = [
    "Cleared",
    "Collected",
    "DiskConfig",
    "DiskReading",
    "DiskTier",
    "EntryInfo",
    "Files",
    "Found",
    "Listing",
    "RealFiles",
    "Verified",
    "clear",
    "collect",
    "list_entries",
    "verify",
]
