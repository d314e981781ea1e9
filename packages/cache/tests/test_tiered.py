"""What two tiers do together that neither does alone."""

import pytest

from treadle_cache.config import CacheConfig
from treadle_cache.entries import Entry
from treadle_cache.index import block_metadata_bytes
from treadle_cache.ram import RamStore
from treadle_cache.testing import FakeSlowTier, layout_of
from treadle_cache.tiered import TieredStore
from treadle_core.prefix import HostArray, Prefix, PrefixKey, StateLayout
from treadle_core.testing.prefixes import KeyedRow

PLAIN = layout_of("float32")
HYBRID = layout_of("bfloat16", has_state=True)
SIZE = 4
CONTENTS = 2 * SIZE * 4 * 4
BLOCK = CONTENTS + block_metadata_bytes(SIZE)
ROOMY = 1 << 20


class Tiers:
    """A tiered store and its parts."""

    def __init__(
        self,
        layout: StateLayout,
        capacity: int = ROOMY,
        *,
        delayed: bool = True,
        max_read_bytes: int = ROOMY,
    ) -> None:
        self.layout = layout
        self.ram = RamStore(CacheConfig(capacity_bytes=capacity, block_size=SIZE))
        self.slow = FakeSlowTier(delayed=delayed)
        self.store = TieredStore(self.ram, self.slow, max_read_bytes=max_read_bytes)
        self.store.attach("weights", layout)

    def keep(self, *texts: str) -> None:
        for text in texts:
            self.store.insert(key(text), KeyedRow(key(text), self.layout), self.store.generation)
            self.store.check_integrity()

    def find(self, text: str) -> Prefix:
        return self.store.find(key(text), len(text))

    def wait_for(self, prefix: Prefix) -> Prefix:
        while not prefix.ready:
            assert prefix.ticket is not None
            self.store.wait(1.0)
            prefix = self.store.poll(prefix.ticket) or prefix
            self.store.check_integrity()
        return prefix

    def reuse(self, text: str) -> int:
        """Tokens of ``text`` that can be reused, having checked each bit of them."""
        prefix = self.wait_for(self.find(text))
        if prefix.ticket is not None:
            assert self.loads(prefix, text)
            self.store.release(prefix.ticket)
            self.store.check_integrity()
        return prefix.num_tokens

    def loads(self, prefix: Prefix, text: str) -> bool:
        assert prefix.ticket is not None
        row = self.store.load(prefix.ticket)
        fresh = KeyedRow(key(text[: prefix.num_tokens]), self.layout)
        tokens = [row.tokens(index) for index in range(len(self.layout.tokens))]
        stored = [*tokens, *row.state()]
        expected = [*fresh.tokens(0, prefix.num_tokens), *fresh.state()]
        return row.num_tokens == prefix.num_tokens and same(stored, expected)

    def digests(self, text: str) -> tuple[bytes, ...]:
        return tuple(self.ram.chain(key(text)).digests)

    def end(self, text: str) -> bytes:
        return self.ram.chain(key(text)).end(len(text))


def key(text: str) -> PrefixKey:
    return PrefixKey(tokens=tuple(map(ord, text)))


def same(left: list[HostArray], right: list[HostArray]) -> bool:
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(left, right, strict=True)
    )


def test_what_is_stored_is_written_through_once() -> None:
    tiers = Tiers(HYBRID)
    tiers.keep("abcdefghij", "abcdefghijklmn")
    assert tiers.slow.num_puts == len(tiers.slow.entries) == 5
    tiers.keep("abcdefghijklmn")
    assert tiers.slow.num_puts == 5


def test_what_ram_serves_alone_is_ready_at_once() -> None:
    tiers = Tiers(HYBRID)
    tiers.keep("abcdefghij")
    assert tiers.find("abcdefghij").ready
    assert tiers.slow.readings == []


def test_only_what_ram_lacks_is_read() -> None:
    tiers = Tiers(PLAIN, 2 * BLOCK)
    tiers.keep("abcdefgh", "abcdefghijklmnop")
    prefix = tiers.find("abcdefghijklmnop")
    assert prefix == Prefix(num_tokens=16, ticket=prefix.ticket, ready=False)
    assert [reading.digests for reading in tiers.slow.readings] == [
        tiers.digests("abcdefghijklmnop")[2:]
    ]
    assert prefix.ticket is not None
    assert tiers.store.poll(prefix.ticket) is None
    tiers.slow.finish()
    assert tiers.store.poll(prefix.ticket) == Prefix(num_tokens=16, ticket=prefix.ticket)
    assert tiers.loads(prefix, "abcdefghijklmnop")


def test_promotion_evicts_what_is_older() -> None:
    tiers = Tiers(PLAIN, 2 * BLOCK)
    tiers.keep("aaaaaaaa", "bbbbbbbb")
    assert tiers.reuse("aaaaaaaa") == 8
    assert tiers.find("aaaaaaaa").ready
    assert not tiers.find("bbbbbbbb").ready
    assert tiers.store.stats().details["promoted"] == 2


@pytest.mark.parametrize("layout", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_the_slow_tier_alone_is_a_store(layout: StateLayout) -> None:
    tiers = Tiers(layout, 0)
    tiers.keep("abcdefghij", "abcdefghijklmn")
    assert tiers.reuse("abcdefghijklmnop") == (14 if layout.has_state else 12)
    assert tiers.reuse("abcdefghijk") == (10 if layout.has_state else 8)
    assert tiers.store.stats().used_bytes == 0
    puts = tiers.slow.num_puts
    tiers.keep("abcdefghijklmn")
    assert tiers.slow.num_puts == puts


def test_what_has_no_room_is_served_without_being_kept() -> None:
    tiers = Tiers(PLAIN, 2 * BLOCK)
    tiers.keep("aaaaaaaa", "bbbbbbbb")
    held = tiers.find("bbbbbbbb")
    assert held.ready
    assert tiers.reuse("aaaaaaaa") == 8
    assert tiers.store.stats().details["unpromoted"] == 1
    assert tiers.loads(held, "bbbbbbbb")


def test_a_damaged_block_shortens_the_match() -> None:
    tiers = Tiers(PLAIN, 0)
    tiers.keep("abcdefghijklmnop")
    tiers.slow.damaged.add(tiers.digests("abcdefghijklmnop")[2])
    assert tiers.reuse("abcdefghijklmnop") == 8
    assert tiers.store.stats().details["damaged_reads"] == 1


def test_a_match_with_nothing_left_is_damaged() -> None:
    tiers = Tiers(PLAIN, 0)
    tiers.keep("abcdefgh")
    tiers.slow.damaged.update(tiers.slow.entries)
    assert tiers.wait_for(tiers.find("abcdefgh")) == Prefix(miss="damaged")
    assert tiers.store.stats().misses == {"damaged": 1}


def test_a_damaged_checkpoint_leaves_the_next_shorter_one() -> None:
    tiers = Tiers(HYBRID, 0)
    tiers.keep("abcde", "abcdefghij", "abcdefghijklmn")
    tiers.slow.damaged.add(tiers.end("abcdefghijklmn"))
    assert tiers.reuse("abcdefghijklmnop") == 10
    tiers.slow.damaged.add(tiers.digests("abcdefgh")[1])
    assert tiers.reuse("abcdefghijklmnop") == 5


def test_what_ram_alone_could_serve_is_never_lost() -> None:
    tiers = Tiers(HYBRID)
    tiers.keep("abcde")
    other = Tiers(HYBRID)
    other.keep("abcde", "abcdefghij")
    tiers.slow.entries.update(other.slow.entries)
    tiers.slow.damaged.add(tiers.end("abcdefghij"))
    del tiers.slow.entries[tiers.end("abcde")]
    prefix = tiers.find("abcdefghijkl")
    assert prefix.num_tokens == 10
    tiers.ram.resize(0)
    assert tiers.wait_for(prefix).num_tokens == 5
    assert prefix.ticket is not None
    assert tiers.loads(Prefix(num_tokens=5, ticket=prefix.ticket), "abcde")


def test_an_entry_of_another_layout_is_damaged() -> None:
    tiers = Tiers(PLAIN, 0)
    tiers.keep("abcd")
    (digest,) = tiers.digests("abcd")
    entry = tiers.slow.entries[digest]
    tiers.slow.entries[digest] = Entry(name=entry.name, arrays=(entry.arrays[0][:, :2],))
    assert tiers.wait_for(tiers.find("abcd")) == Prefix(miss="damaged")


def test_a_clear_reaches_what_is_being_read() -> None:
    tiers = Tiers(PLAIN, 0)
    tiers.keep("abcdefgh")
    tiers.store.prefetch(key("abcdefghij"), 10)
    prefix = tiers.find("abcdefgh")
    tiers.store.clear()
    assert all(reading.cancelled for reading in tiers.slow.readings)
    tiers.slow.finish()
    assert prefix.ticket is not None
    assert tiers.store.poll(prefix.ticket) == Prefix(miss="cleared")
    assert tiers.find("abcdefgh") == Prefix(miss="cleared")
    with pytest.raises(ValueError, match="not open"):
        tiers.store.release(prefix.ticket)


def test_what_is_released_early_is_cancelled() -> None:
    tiers = Tiers(PLAIN, 3 * BLOCK)
    tiers.keep("abcdefghijkl", "abcdxxxxyyyy")
    prefix = tiers.find("abcdefghijkl")
    assert prefix.ticket is not None
    with pytest.raises(ValueError, match="not ready"):
        tiers.store.load(prefix.ticket)
    tiers.store.release(prefix.ticket)
    assert tiers.slow.readings[0].cancelled
    tiers.ram.resize(0)
    assert tiers.store.stats().used_bytes == 0


def test_what_was_fetched_ahead_is_there() -> None:
    tiers = Tiers(PLAIN)
    tiers.keep("abcdefgh")
    tiers.ram.clear()
    tiers.store.prefetch(key("abcdefgh"), 8)
    tiers.store.prefetch(key("abcdefgh"), 8)
    tiers.slow.finish()
    assert tiers.find("abcdefgh").ready
    assert len(tiers.slow.readings) == 1


def test_what_is_fetched_ahead_is_taken_over() -> None:
    tiers = Tiers(PLAIN, 0)
    tiers.keep("abcdefgh")
    tiers.store.prefetch(key("abcdefgh"), 8)
    prefix = tiers.find("abcdefgh")
    assert not prefix.ready
    assert len(tiers.slow.readings) == 1
    assert tiers.wait_for(prefix).num_tokens == 8
    assert tiers.loads(prefix, "abcdefgh")


def test_what_was_fetched_ahead_without_room_waits_to_be_asked_for() -> None:
    tiers = Tiers(PLAIN, 0)
    tiers.keep("abcdefgh")
    tiers.store.prefetch(key("abcdefgh"), 8)
    tiers.slow.finish()
    tiers.find("xxxx")
    assert tiers.find("abcdefgh").ready
    assert len(tiers.slow.readings) == 1


def test_what_another_request_brought_in_is_not_read_again() -> None:
    tiers = Tiers(HYBRID)
    tiers.keep("abcdefghij")
    tiers.ram.clear()
    first, second = tiers.find("abcdefghij"), tiers.find("abcdefghijkl")
    tiers.slow.readings[0].finish()
    assert first.ticket is not None
    assert second.ticket is not None
    assert tiers.store.poll(second.ticket) is None
    assert tiers.store.poll(first.ticket) is not None
    assert tiers.store.poll(second.ticket) == Prefix(num_tokens=10, ticket=second.ticket)
    assert tiers.slow.readings[1].cancelled
    assert not tiers.slow.readings[1].done
    for ticket in (first.ticket, second.ticket):
        assert tiers.loads(Prefix(num_tokens=10, ticket=ticket), "abcdefghij")
        tiers.store.release(ticket)
    tiers.ram.resize(0)
    assert tiers.store.stats().used_bytes == 0
    tiers.store.check_integrity()


def test_a_bounded_number_is_read_ahead() -> None:
    tiers = Tiers(PLAIN, 0)
    tiers.keep("aaaa", "bbbb", "cccc")
    for text in ("aaaa", "bbbb", "cccc"):
        tiers.store.prefetch(key(text), 4)
        tiers.store.check_integrity()
    assert len(tiers.slow.readings) == 2
    tiers.slow.finish()
    tiers.store.prefetch(key("cccc"), 4)
    assert len(tiers.slow.readings) == 3
    tiers.store.check_integrity()


def test_what_is_read_ahead_is_given_up_with_the_last_who_wants_it() -> None:
    tiers = Tiers(PLAIN, 2 * BLOCK)
    tiers.keep("aaaabbbb", "aaaacccc", "dddd")
    assert tiers.reuse("aaaa") == 4
    one, two = (tiers.store.prefetch(key("aaaabbbb"), 8) for _ in range(2))
    reading = tiers.slow.readings[-1]
    assert one is not None
    assert two is not None
    tiers.store.release(one)
    assert not reading.cancelled
    tiers.store.release(two)
    assert reading.cancelled
    assert tiers.reuse("dddd") == 4
    tiers.ram.resize(0)
    assert tiers.store.stats().used_bytes == 0, "what RAM has of it is still held"
    with pytest.raises(ValueError, match="not open"):
        tiers.store.release(two)


def test_who_wanted_it_before_does_not_give_up_what_is_read_for_another() -> None:
    tiers = Tiers(PLAIN, 0)
    tiers.keep("aaaa")
    one = tiers.store.prefetch(key("aaaa"), 4)
    found = tiers.find("aaaa")
    assert found.ticket is not None
    tiers.store.release(found.ticket)
    two = tiers.store.prefetch(key("aaaa"), 4)
    assert one is not None
    assert two is not None
    tiers.store.release(one)
    assert [reading.cancelled for reading in tiers.slow.readings] == [True, False]
    tiers.store.release(two)
    assert tiers.slow.readings[1].cancelled


def test_a_look_up_waits_until_there_is_room_to_read() -> None:
    tiers = Tiers(PLAIN, 0, max_read_bytes=3 * CONTENTS)
    tiers.keep("aaaaaaaa", "bbbbbbbb")
    first, second = tiers.find("aaaaaaaa"), tiers.find("bbbbbbbb")
    assert first.ticket is not None
    assert second.ticket is not None
    assert len(tiers.slow.readings) == 1
    first = tiers.wait_for(first)
    # It has no place in RAM, so it counts as long as it is held.
    assert tiers.store.stats().details["reading_bytes"] == 2 * CONTENTS
    assert tiers.store.poll(second.ticket) is None
    assert len(tiers.slow.readings) == 1
    tiers.store.release(first.ticket)
    assert tiers.store.poll(second.ticket) is None
    assert len(tiers.slow.readings) == 2
    assert tiers.loads(tiers.wait_for(second), "bbbbbbbb")
    tiers.store.release(second.ticket)
    assert tiers.store.stats().details["reading_bytes"] == 0


def test_what_ram_takes_over_counts_there_alone() -> None:
    tiers = Tiers(PLAIN, max_read_bytes=2 * CONTENTS)
    tiers.keep("aaaaaaaa", "bbbbbbbb")
    tiers.ram.clear()
    for text in ("aaaaaaaa", "bbbbbbbb"):
        assert tiers.wait_for(tiers.find(text)).num_tokens == 8
    assert tiers.store.stats().details["reading_bytes"] == 0


def test_what_was_given_up_counts_until_the_reader_has_noticed() -> None:
    tiers = Tiers(PLAIN, 0, max_read_bytes=2 * CONTENTS)
    tiers.keep("aaaaaaaa", "bbbbbbbb")
    first, second = tiers.find("aaaaaaaa"), tiers.find("bbbbbbbb")
    assert first.ticket is not None
    assert second.ticket is not None
    tiers.store.release(first.ticket)
    assert tiers.store.poll(second.ticket) is None
    assert len(tiers.slow.readings) == 1
    tiers.slow.finish()
    assert tiers.store.poll(second.ticket) is None
    assert len(tiers.slow.readings) == 2


def test_a_look_up_takes_the_room_of_what_is_read_ahead() -> None:
    tiers = Tiers(PLAIN, 0, max_read_bytes=3 * CONTENTS)
    tiers.keep("aaaaaaaa", "bbbbbbbb", "cccccccc")
    assert tiers.store.prefetch(key("aaaaaaaa"), 8) is not None
    assert tiers.store.prefetch(key("bbbbbbbb"), 8) is None
    assert tiers.wait_for(tiers.find("cccccccc")).num_tokens == 8
    assert tiers.slow.readings[0].cancelled


def test_a_match_larger_than_may_be_read_at_a_time_is_cut() -> None:
    tiers = Tiers(PLAIN, 0, max_read_bytes=3 * CONTENTS - 1)
    tiers.keep("aaaabbbbccccdddd")
    assert tiers.reuse("aaaabbbbccccdddd") == 8
    assert tiers.store.stats().details["cut_matches"] == 1
    narrow = Tiers(PLAIN, 0, max_read_bytes=CONTENTS - 1)
    narrow.keep("aaaabbbb")
    assert narrow.find("aaaabbbb") == Prefix(miss="no_room")


def test_a_checkpoint_that_is_too_far_gives_way_to_a_nearer_one() -> None:
    tiers = Tiers(HYBRID, 0, max_read_bytes=250)
    tiers.keep("aaaa", "aaaabbbbcccc")
    entries = tiers.slow.entries
    near = [*tiers.digests("aaaa"), tiers.end("aaaa")]
    far = [*tiers.digests("aaaabbbbcccc"), tiers.end("aaaabbbbcccc")]
    assert sum(entries[it].num_bytes for it in near) < 250
    assert sum(entries[it].num_bytes for it in far) > 250
    assert tiers.reuse("aaaabbbbccccdddd") == 4
    assert tiers.store.stats().details["cut_matches"] == 1


def test_a_row_that_cannot_be_read_is_stored_nowhere() -> None:
    tiers = Tiers(HYBRID, 0)
    its = key("abcdefghij")
    tiers.store.insert(its, KeyedRow(its, HYBRID, RuntimeError("metal")), 0)
    assert tiers.slow.entries == {}
    assert tiers.store.stats().details["failed_writes"] == 1


def test_the_reason_of_a_miss_knows_of_both_tiers() -> None:
    tiers = Tiers(HYBRID, 0)
    assert tiers.find("abcdefgh").miss == "empty"
    tiers.keep("abcdefgh")
    assert tiers.find("xxxxxxxx").miss == "no_block"
    assert tiers.find("abcdefg").miss == "no_checkpoint"
    assert tiers.find("xxx").miss == "too_short"
    tiers.store.clear()
    assert tiers.find("abcdefgh").miss == "cleared"


def test_closing_closes_the_slow_tier() -> None:
    tiers = Tiers(PLAIN)
    tiers.store.close()
    assert tiers.slow.closed
