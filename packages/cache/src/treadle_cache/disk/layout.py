"""Where things lie in the directory of a tier.

index.db, index.db-wal, index.db-shm   the index
lock                                   held while the directory is put in order or cleared
entries/a/abcd....safetensors          entries by digest
temp/<owner>-<digest>.tmp              entries that are being written
temp/<owner>.lock                      held as long as the owner lives
quarantine/                            damaged files, for people to look at
cleared-*/                             entries of a clear that is under way
"""

from pathlib import Path

from treadle_cache.digests import DIGEST_BYTES
from treadle_cache.disk.format import SUFFIX

INDEX_NAME = "index.db"
INDEX_SUFFIXES = ("", "-wal", "-shm")
TEMP_SUFFIX = ".tmp"
LOCK_SUFFIX = ".lock"
CLEARED_PREFIX = "cleared-"


class Layout:
    """The paths of a directory.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = root / INDEX_NAME
        self.lock = root / "lock"
        self.entries = root / "entries"
        self.temp = root / "temp"
        self.quarantine = root / "quarantine"

    def entry(self, digest: bytes) -> Path:
        """The file of an entry."""
        name = digest.hex()
        return self.entries.joinpath(name[:1], f"{name}{SUFFIX}")

    def unfinished(self, owner: str, digest: bytes) -> Path:
        """The file in which ``owner`` writes an entry."""
        return self.temp / f"{owner}-{digest.hex()}{TEMP_SUFFIX}"

    def owner(self, owner: str) -> Path:
        """The lock that ``owner`` holds."""
        return self.temp / f"{owner}{LOCK_SUFFIX}"

    def cleared(self, token: str) -> Path:
        """Where a clear moves all entries."""
        return self.root / f"{CLEARED_PREFIX}{token}"


def digest_of(folder: str, name: str) -> bytes | None:
    """The digest that a file in ``entries`` is named for; None for a foreign name."""
    stem = name.removesuffix(SUFFIX)
    if stem == name or len(stem) != 2 * DIGEST_BYTES or stem[:1] != folder or stem != stem.lower():
        return None
    try:
        return bytes.fromhex(stem)
    except ValueError:
        return None


def owner_of(name: str) -> str:
    """The owner of a file in ``temp``."""
    return name.partition("-")[0].removesuffix(LOCK_SUFFIX)
