"""Options of the disk tier."""

from msgspec import Struct

from treadle_core.request import check_float, check_int, check_text

MIN_CAPACITY_BYTES = 2 << 20
"""Below this the index alone would take most of the room."""


class DiskConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a disk tier. Made means on: there is no tier without a directory.

    Attributes:
        directory: Where the files lie; made if it is not there. Several processes may share it.
        capacity_bytes: Most bytes of all files in it: entries of all namespaces, files that are
            being written, the index and the quarantine.
        queue_bytes: Most bytes that wait to be written; ``put`` drops what comes beyond that.
        min_free_bytes: Bytes of the file system that are left to others.
        quarantine_bytes: Most bytes of damaged files that are kept for people to look at, and at
            most an eighth of the capacity; 0 removes them at once.
        sync_bytes: Most bytes written whose loss a power cut may cause while writing goes on.
        max_failures: Failed writes in a row after which nothing is written for a while.
        retry_seconds: How long that while is.
        close_seconds: Longest that ``close`` waits for what is unwritten.
    """

    directory: str
    capacity_bytes: int
    queue_bytes: int = 256 << 20
    min_free_bytes: int = 1 << 30
    quarantine_bytes: int = 64 << 20
    sync_bytes: int = 256 << 20
    max_failures: int = 3
    retry_seconds: float = 60.0
    close_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        check_text("directory", self.directory)
        check_int("capacity_bytes", self.capacity_bytes, MIN_CAPACITY_BYTES)
        check_int("queue_bytes", self.queue_bytes, 1)
        check_int("min_free_bytes", self.min_free_bytes, 0)
        check_int("quarantine_bytes", self.quarantine_bytes, 0)
        check_int("sync_bytes", self.sync_bytes, 1)
        check_int("max_failures", self.max_failures, 1)
        check_float("retry_seconds", self.retry_seconds, 0.0, 1e9)
        check_float("close_seconds", self.close_seconds, 0.0, 1e6)
