"""The tier on disk: entries in files that survive the process and that processes share."""

from treadle_cache.disk.config import DiskConfig
from treadle_cache.disk.files import Files, Found, RealFiles
from treadle_cache.disk.tier import DiskReading, DiskTier

__all__ = ["DiskConfig", "DiskReading", "DiskTier", "Files", "Found", "RealFiles"]
