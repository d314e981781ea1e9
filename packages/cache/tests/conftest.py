"""Fixtures of the cache package's tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from treadle_cache.disk import DiskConfig, DiskTier
from treadle_cache.disk.testing import WatchedFiles
from treadle_core.testing import ManualClock


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Opens tiers on one directory, and closes them."""
    with ExitStack() as stack:

        def make(
            files: WatchedFiles | None = None,
            capacity_bytes: int = 8 << 20,
            clock: ManualClock | None = None,
            **options: int,
        ) -> DiskTier:
            config = DiskConfig(
                directory=str(tmp_path / "tier"),
                capacity_bytes=capacity_bytes,
                **{"min_free_bytes": 0, **options},
            )
            tier = DiskTier(config, files=files, clock=clock)
            stack.callback(tier.close)
            return tier

        yield make
