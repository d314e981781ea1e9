"""What the slower tier has no room for waits, and what it has lost is written again."""

import pytest

from treadle_cache.config import CacheConfig
from treadle_cache.ram import RamStore
from treadle_cache.testing import FakeSlowTier, layout_of
from treadle_cache.tiered import TieredStore
from treadle_core.prefix import PrefixKey, StateLayout
from treadle_core.testing.prefixes import KeyedRow

PLAIN = layout_of("float32")
HYBRID = layout_of("bfloat16", has_state=True)
SIZE = 4
TEXT = "abcdefghijklmnop"


class Tiers:
    def __init__(self, layout: StateLayout, *, ram: int = 1 << 20, backlog: int = 1 << 20) -> None:
        self.layout = layout
        self.slow = FakeSlowTier(delayed=False)
        self.ram = RamStore(CacheConfig(capacity_bytes=ram, block_size=SIZE))
        self.store = TieredStore(self.ram, self.slow, max_backlog_bytes=backlog)
        self.store.attach("weights", layout)

    def keep(self, text: str) -> None:
        row = KeyedRow(key(text), self.layout)
        self.store.insert(key(text), row, self.store.generation)
        self.store.check_integrity()

    def restarted(self) -> TieredStore:
        store = TieredStore(
            RamStore(CacheConfig(capacity_bytes=1 << 20, block_size=SIZE)), self.slow
        )
        store.attach("weights", self.layout)
        return store

    def found_after_restart(self, text: str) -> int:
        store = self.restarted()
        prefix = store.find(key(text), len(text))
        while not prefix.ready:
            assert prefix.ticket is not None
            store.wait(1.0)
            prefix = store.poll(prefix.ticket) or prefix
        return prefix.num_tokens


def key(text: str) -> PrefixKey:
    return PrefixKey(tokens=tuple(map(ord, text)))


@pytest.mark.parametrize("layout", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_a_parent_that_the_slower_tier_has_lost_is_written_again(layout: StateLayout) -> None:
    tiers = Tiers(layout)
    tiers.keep(TEXT[:8])
    first = tiers.ram.chain(key(TEXT)).digests[0]
    del tiers.slow.entries[first]
    tiers.keep(TEXT)
    assert first in tiers.slow.entries
    assert tiers.found_after_restart(TEXT) == len(TEXT)


@pytest.mark.parametrize("layout", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_a_slower_tier_that_has_lost_everything_gets_the_whole_chain(layout: StateLayout) -> None:
    tiers = Tiers(layout)
    tiers.keep(TEXT[:12])
    tiers.slow.entries.clear()
    tiers.keep(TEXT)
    assert tiers.found_after_restart(TEXT) == len(TEXT)


@pytest.mark.parametrize("ram", [1 << 20, 0], ids=["ram", "no ram"])
def test_what_has_no_room_waits_and_is_handed_on_in_order(ram: int) -> None:
    tiers = Tiers(PLAIN, ram=ram)
    tiers.slow.room = 0
    tiers.keep(TEXT)
    assert not tiers.slow.entries
    assert tiers.slow.num_puts == 0
    assert tiers.store.stats().details["backlog_bytes"] > 0
    tiers.slow.room = None
    tiers.store.prefetch(key("something else"), 4)
    assert tiers.store.stats().details["backlog_bytes"] == 0
    assert list(tiers.slow.entries) == list(tiers.ram.chain(key(TEXT)).digests)


def test_nothing_waits_twice() -> None:
    tiers = Tiers(PLAIN)
    tiers.slow.room = 0
    tiers.keep(TEXT)
    waiting = tiers.store.stats().details["backlog_bytes"]
    tiers.keep(TEXT)
    assert tiers.store.stats().details["backlog_bytes"] == waiting


def test_a_store_is_busy_while_half_of_its_backlog_is_full() -> None:
    tiers = Tiers(PLAIN, backlog=4 * 2 * SIZE * 4 * 4)
    tiers.slow.room = 0
    assert not tiers.store.busy
    tiers.keep(TEXT)
    assert tiers.store.busy
    tiers.slow.room = None
    assert not tiers.store.busy


def test_beyond_the_backlog_is_given_up_and_written_when_it_is_stored_again() -> None:
    tiers = Tiers(PLAIN, backlog=0)
    tiers.slow.room = 0
    tiers.keep(TEXT)
    assert tiers.store.stats().details["given_up_writes"] == 4
    tiers.slow.room = None
    tiers.keep(TEXT + "qrst")
    assert tiers.found_after_restart(TEXT + "qrst") == 20


def test_a_clear_forgets_what_waits() -> None:
    tiers = Tiers(PLAIN)
    tiers.slow.room = 0
    tiers.keep(TEXT)
    tiers.store.clear()
    tiers.slow.room = None
    tiers.store.prefetch(key(TEXT), 4)
    assert not tiers.slow.entries


def test_closing_hands_on_what_waits() -> None:
    tiers = Tiers(PLAIN)
    tiers.slow.room = 0
    tiers.keep(TEXT)
    tiers.slow.room = None
    tiers.store.close()
    assert len(tiers.slow.entries) == 4


@pytest.mark.parametrize("layout", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_what_ram_serves_is_touched_in_the_slower_tier(layout: StateLayout) -> None:
    tiers = Tiers(layout)
    tiers.keep(TEXT)
    prefix = tiers.store.find(key(TEXT), len(TEXT))
    assert prefix.ticket is not None
    tiers.store.release(prefix.ticket)
    chain = tiers.ram.chain(key(TEXT))
    ends = [chain.end(len(TEXT))] if layout is HYBRID else []
    assert tiers.slow.touched == [*chain.digests, *ends]
