"""Every store keeps what the engine relies on."""

import pytest

from treadle_cache.config import CacheConfig
from treadle_cache.ram import RamStore
from treadle_cache.testing import FakeSlowTier
from treadle_cache.tiered import TieredStore
from treadle_core.testing.contracts import PrefixStoreContract


class TestRamStore(PrefixStoreContract):
    @pytest.fixture(params=[1, 16, 64])
    def store(self, request: pytest.FixtureRequest) -> RamStore:
        return RamStore(CacheConfig(capacity_bytes=4 << 20, block_size=request.param))


class TestTieredStore(PrefixStoreContract):
    """With a RAM tier that holds all, a part, or nothing."""

    @pytest.fixture(params=[4 << 20, 12_000, 0])
    def store(self, request: pytest.FixtureRequest) -> TieredStore:
        ram = RamStore(CacheConfig(capacity_bytes=request.param, block_size=16))
        return TieredStore(ram, FakeSlowTier(delayed=True))
