"""The cache of vision features: bounded at every instant, and the oldest goes first."""

import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from hypothesis import given
from hypothesis import strategies as st

from treadle_multimodal.features import FeatureCache


class Block:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def test_what_was_put_is_found_and_counted() -> None:
    cache = FeatureCache[Block](100)
    block = Block(60)

    assert cache.get(b"a") is None
    cache.put(b"a", block)
    assert cache.get(b"a") is block

    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.num_items, stats.used_bytes) == (1, 1, 1, 60)


def test_what_was_used_longest_ago_goes_first() -> None:
    cache = FeatureCache[Block](100)
    for name in (b"a", b"b", b"c"):
        cache.put(name, Block(30))
    cache.get(b"a")

    cache.put(b"d", Block(40))

    assert [cache.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [1, 0, 1, 1]
    assert cache.stats().evicted == 1


def test_what_is_larger_than_all_is_not_kept_and_evicts_nothing() -> None:
    cache = FeatureCache[Block](100)
    cache.put(b"a", Block(30))

    cache.put(b"b", Block(101))

    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None
    assert (cache.stats().refused, cache.stats().evicted) == (1, 0)


def test_nothing_is_kept_when_there_is_no_room_at_all() -> None:
    cache = FeatureCache[Block](0)

    cache.put(b"a", Block(1))

    assert cache.get(b"a") is None
    assert cache.stats().used_bytes == 0


def test_clearing_forgets_all() -> None:
    cache = FeatureCache[Block](10)
    cache.put(b"a", Block(5))

    cache.clear()

    assert cache.get(b"a") is None
    assert (cache.stats().num_items, cache.stats().used_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=40))
def test_the_bound_holds_after_every_put(puts: list[tuple[int, int]]) -> None:
    cache, sizes = FeatureCache[Block](100), dict[bytes, int]()

    for name, size in puts:
        cache.put(bytes([name]), Block(size))
        sizes[bytes([name])] = size
        held = [n for n in sizes if cache.get(n) is not None]
        stats = cache.stats()
        assert stats.used_bytes == sum(sizes[n] for n in held) <= stats.capacity_bytes
        assert stats.num_items == len(held)
