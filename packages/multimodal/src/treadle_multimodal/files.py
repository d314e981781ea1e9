"""Reading local files, from allowed directories only."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG

from treadle_multimodal.encoding import check_bytes
from treadle_multimodal.errors import MediaForbidden

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A pipe that nobody writes to is opened at once, and then refused.
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_file(path: str, directories: tuple[str, ...], max_bytes: int) -> bytes:
    """The bytes of a regular file below one of ``directories``. Blocks.

    Links are followed if what they lead to is below one too.

    Raises:
        MediaForbidden: It is not; the same where there is no such file, so that a caller learns
            nothing about others.
        MediaTooLarge: It has more than ``max_bytes``.
    """
    for directory in directories:
        try:
            root = Path(directory).resolve(strict=True)
            below = Path(path).resolve(strict=True).relative_to(root)
            with _open_below(root, below.parts) as descriptor:
                return _read(descriptor, max_bytes)
        # RuntimeError: a loop of links, before Python 3.13.
        except (OSError, ValueError, RuntimeError):
            continue
    raise MediaForbidden("path", path, "a regular file in an allowed directory")


@contextmanager
def _open_below(root: Path, parts: tuple[str, ...]) -> Generator[int]:
    """A file opened step by step without following links: none can be put in its way meanwhile."""
    descriptor = os.open(root, DIRECTORY)
    try:
        for index, part in enumerate(parts):
            flags = FILE if index == len(parts) - 1 else DIRECTORY | os.O_NOFOLLOW
            inner = os.open(part, flags, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int, max_bytes: int) -> bytes:
    """All bytes of an open regular file; it may grow meanwhile, the limit holds."""
    status = os.fstat(descriptor)
    if not S_ISREG(status.st_mode):
        raise FileNotFoundError
    check_bytes(status.st_size, max_bytes)
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        data = file.read(max_bytes + 1)
    check_bytes(len(data), max_bytes)
    return data
