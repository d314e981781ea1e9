"""A RAM store that goes to disk and comes back."""

import os
from pathlib import Path
from typing import Any

import pytest

from treadle_cache.config import CacheConfig
from treadle_cache.index import block_metadata_bytes
from treadle_cache.ram import RamStore
from treadle_cache.saved import MAGIC, ArrayShape
from treadle_cache.testing import layout_of
from treadle_core.prefix import PrefixKey, StateLayout
from treadle_core.testing.prefixes import KeyedRow

PLAIN = layout_of("bfloat16", "float32")
HYBRID = layout_of("float16", has_state=True)
SIZE = 4
BLOCK = SIZE * PLAIN.token_bytes + block_metadata_bytes(SIZE)


def store_for(
    layout: StateLayout, capacity: int = 1 << 20, fingerprint: str = "weights"
) -> RamStore:
    store = RamStore(CacheConfig(capacity_bytes=capacity, block_size=SIZE))
    store.attach(fingerprint, layout)
    return store


def key(text: str) -> PrefixKey:
    return PrefixKey(tokens=tuple(map(ord, text)))


def insert(store: RamStore, layout: StateLayout, *texts: str) -> None:
    for text in texts:
        store.insert(key(text), KeyedRow(key(text), layout), store.generation)


def reuse(store: RamStore, layout: StateLayout, text: str) -> int:
    """Tokens of ``text`` that can be reused, having checked each bit of them."""
    store.check_integrity()
    prefix = store.find(key(text), len(text))
    if prefix.ticket is not None:
        row = store.load(prefix.ticket)
        fresh = KeyedRow(key(text[: prefix.num_tokens]), layout)
        stored = [row.tokens(index) for index in range(len(layout.tokens))] + row.state()
        expected = [*fresh.tokens(0, prefix.num_tokens), *fresh.state()]
        for left, right in zip(stored, expected, strict=True):
            assert left.dtype == right.dtype
            assert left.tobytes() == right.tobytes()
        store.release(prefix.ticket)
    return prefix.num_tokens


@pytest.mark.parametrize("layout", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_a_load_may_end_at_any_entry(layout: StateLayout, tmp_path: Path) -> None:
    store = store_for(layout)
    insert(store, layout, "abcdefgh", "abcdefghijklmnop")
    path = tmp_path / "cache"
    saved = store.save_to_disk(path)
    for most in range(saved + 1):
        again, told = store_for(layout), list[tuple[int, int]]()

        def goes_on(done: int, total: int, most: int = most, told: list[Any] = told) -> bool:
            told.append((done, total))
            return done < most

        assert again.load_from_disk(path, goes_on) == most
        assert told[-1] == (min(most, saved - 1), saved)
        assert again.stats().details["given_up_loads"] == (most < saved)
        reuse(again, layout, "abcdefghijklmnop")
    assert reuse(again, layout, "abcdefghijklmnop") == 16


def test_a_file_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    path, store = tmp_path / "cache", store_for(PLAIN)
    os.mkfifo(path)
    asked = iter([True, True, False])
    assert store.load_from_disk(path, lambda done, total: next(asked)) == 0
    assert store.stats().details["given_up_loads"] == 1
    # So that the thread ends.
    os.close(os.open(path, os.O_WRONLY))


@pytest.mark.parametrize("layout", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_what_was_saved_is_loaded_bit_by_bit(layout: StateLayout, tmp_path: Path) -> None:
    store = store_for(layout)
    insert(store, layout, "abcdefghij", "abcdefghijklmn", "xyzxyz")
    path = tmp_path / "new" / "cache"
    saved = store.save_to_disk(path)
    assert saved == store.stats().num_entries > 0
    again = store_for(layout)
    assert again.load_from_disk(path) == saved
    for text in ("abcdefghijkl", "abcdefghijklmnop", "xyzxyzxyz"):
        assert reuse(again, layout, text) == reuse(store, layout, text) > 0
    assert [one.name for one in path.parent.iterdir()] == ["cache"]
    assert again.load_from_disk(path) == 0


def test_a_smaller_budget_takes_the_newest(tmp_path: Path) -> None:
    store = store_for(PLAIN)
    insert(store, PLAIN, "aaaaaaaa", "bbbbbbbb", "cccccccc")
    assert reuse(store, PLAIN, "aaaaaaaa") == 8
    store.save_to_disk(tmp_path / "cache")
    small = store_for(PLAIN, 3 * BLOCK)
    assert small.load_from_disk(tmp_path / "cache") == 3
    assert [reuse(small, PLAIN, text * 8) for text in "abc"] == [8, 0, 4]


def test_the_order_of_use_survives(tmp_path: Path) -> None:
    store = store_for(PLAIN)
    insert(store, PLAIN, "aaaa", "bbbb", "cccc")
    reuse(store, PLAIN, "aaaa")
    store.save_to_disk(tmp_path / "cache")
    again = store_for(PLAIN, 3 * BLOCK)
    again.load_from_disk(tmp_path / "cache")
    insert(again, PLAIN, "dddd")
    insert(again, PLAIN, "eeee")
    assert [reuse(again, PLAIN, text * 4) for text in "abcde"] == [4, 0, 0, 4, 4]


def test_what_is_loaded_is_older_than_what_is_here(tmp_path: Path) -> None:
    store = store_for(PLAIN)
    insert(store, PLAIN, "aaaa")
    store.save_to_disk(tmp_path / "cache")
    again = store_for(PLAIN, 2 * BLOCK)
    insert(again, PLAIN, "bbbb")
    again.load_from_disk(tmp_path / "cache")
    insert(again, PLAIN, "cccc")
    assert [reuse(again, PLAIN, text * 4) for text in "abc"] == [0, 4, 4]


def test_checkpoints_still_know_whom_they_extend(tmp_path: Path) -> None:
    store = store_for(HYBRID)
    insert(store, HYBRID, "abcdef", "abcdefghij", "xxxxxx")
    store.save_to_disk(tmp_path / "cache")
    again = store_for(HYBRID)
    again.load_from_disk(tmp_path / "cache")
    again.resize(again.stats().used_bytes - 1)
    assert reuse(again, HYBRID, "abcdefg") == 0
    assert reuse(again, HYBRID, "abcdefghij") == 10
    assert reuse(again, HYBRID, "xxxxxx") == 6


@pytest.mark.parametrize("case", ["model", "format", "blocks", "foreign", "absent", "empty"])
def test_a_file_of_something_else_loads_nothing(case: str, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    store = store_for(PLAIN)
    insert(store, PLAIN, "aaaa")
    store.save_to_disk(path)
    other = store_for(PLAIN, fingerprint="others" if case == "model" else "weights")
    if case == "format":
        other = store_for(HYBRID)
    elif case == "blocks":
        other = RamStore(CacheConfig(capacity_bytes=1 << 20, block_size=2))
        other.attach("weights", PLAIN)
    elif case == "foreign":
        path.write_bytes(b"something else entirely" * 10)
    elif case == "absent":
        path.unlink()
    elif case == "empty":
        path.write_bytes(b"")
    assert other.load_from_disk(path) == 0
    assert other.stats().details["failed_loads"] == 1
    assert other.stats().num_entries == 0
    other.check_integrity()


def test_a_file_that_was_cut_off_anywhere_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    store = store_for(HYBRID)
    insert(store, HYBRID, "abcdefghij")
    store.save_to_disk(path)
    data = path.read_bytes()
    again = store_for(HYBRID)
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        assert again.load_from_disk(path) == 0


@pytest.mark.parametrize("layout", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_a_flipped_bit_anywhere_costs_at_most_what_it_hit(
    layout: StateLayout, tmp_path: Path
) -> None:
    path = tmp_path / "cache"
    store = store_for(layout)
    insert(store, layout, "abcdefghij", "abcdefghijklmn")
    saved = store.save_to_disk(path)
    data = path.read_bytes()
    for position in range(0, len(data), 23):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        again = store_for(layout)
        loaded = again.load_from_disk(path)
        reuse(again, layout, "abcdefghijklmn")
        details = again.stats().details
        hit_nothing = position < len(MAGIC)
        assert hit_nothing or loaded < saved
        assert hit_nothing or details["failed_loads"] + details["damaged_entries"] == 1


def test_a_place_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = store_for(PLAIN)
    insert(store, PLAIN, "aaaa")
    assert store.save_to_disk(tmp_path / "file" / "cache") == 0
    assert store.stats().details["failed_saves"] == 1
    (tmp_path / "folder").mkdir()
    assert store.save_to_disk(tmp_path / "folder") == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


def test_a_file_may_only_have_arrays_of_numbers() -> None:
    for dtype, shape in (("|O", (1,)), ("nonsense", (1,)), ("<f4", (-1,))):
        with pytest.raises((ValueError, TypeError)):
            ArrayShape(dtype, shape)
