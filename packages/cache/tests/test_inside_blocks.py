"""Matches that end inside a block, where all layers can be cut."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from treadle_cache.config import CacheConfig
from treadle_cache.digests import Chain, Namespace
from treadle_cache.index import (
    MIN_LONE_TOKENS,
    Indexed,
    PrefixIndex,
    block_metadata_bytes,
)
from treadle_cache.ram import RamStore
from treadle_cache.testing import FakeSlowTier, layout_of
from treadle_cache.tiered import TieredStore
from treadle_core.prefix import HostArray, MediaSpan, Prefix, PrefixKey, StateLayout
from treadle_core.testing.prefixes import KeyedRow

SIZE = 12
PLAIN = layout_of("bfloat16", "float32")
HYBRID = layout_of("float32", has_state=True)
WIDE = layout_of("float32", dim=64)
BLOCK = SIZE * PLAIN.token_bytes + block_metadata_bytes(SIZE)
FIRST, SECOND = "abcdefghijkl", "mnopqrstuvwx"


def store_for(
    layout: StateLayout = PLAIN, capacity: int = 1 << 20, bits: int | None = None
) -> RamStore:
    store = RamStore(CacheConfig(capacity_bytes=capacity, block_size=SIZE, kv_storage_bits=bits))
    store.attach("weights", layout)
    return store


def key(text: str, salt: str = "", media: Sequence[MediaSpan] = ()) -> PrefixKey:
    return PrefixKey(tokens=tuple(map(ord, text)), salt=salt, media=tuple(media))


def keep(
    store: RamStore | TieredStore, *keys: PrefixKey | str, layout: StateLayout = PLAIN
) -> None:
    for its in keys:
        its = key(its) if isinstance(its, str) else its
        store.insert(its, KeyedRow(its, layout), store.generation)
        store.check_integrity()


def settled(store: RamStore | TieredStore, prefix: Prefix) -> Prefix:
    while not prefix.ready:
        assert prefix.ticket is not None
        store.wait(1.0)
        prefix = store.poll(prefix.ticket) or prefix
    return prefix


def state_of(its: PrefixKey, num_tokens: int, layout: StateLayout = PLAIN) -> list[HostArray]:
    """What computing exactly the first ``num_tokens`` tokens gives."""
    media = tuple([span for span in its.media if span.start < num_tokens])
    cut = PrefixKey(tokens=its.tokens[:num_tokens], salt=its.salt, media=media)
    return KeyedRow(cut, layout).tokens(0, num_tokens)


def holds(store: RamStore | TieredStore, ticket: int | None, its: PrefixKey) -> bool:
    """Whether a ticket holds the state of exactly its tokens, bit by bit."""
    assert ticket is not None
    row = store.load(ticket)
    loaded = [row.tokens(index) for index in range(len(PLAIN.tokens))]
    expected = state_of(its, row.num_tokens)
    return all(
        one.shape == other.shape
        and one.dtype == other.dtype
        and one.flags.c_contiguous
        and one.tobytes() == other.tobytes()
        for one, other in zip(loaded, expected, strict=True)
    )


def reuse(store: RamStore | TieredStore, its: PrefixKey | str, limit: int = 1000) -> int:
    """Tokens of ``its`` that are reused, having checked each bit of them."""
    its = key(its) if isinstance(its, str) else its
    prefix = settled(store, store.find(its, limit))
    if prefix.ticket is not None:
        assert holds(store, prefix.ticket, its)
        store.release(prefix.ticket)
    store.check_integrity()
    return prefix.num_tokens


# Where a match ends


def test_a_shared_beginning_that_ends_inside_a_block_is_reused_to_its_last_token() -> None:
    store = store_for()
    keep(store, FIRST + SECOND)
    assert reuse(store, FIRST + "mnopqXXXXXXXXXX") == 17
    assert reuse(store, FIRST + "m") == 13
    assert reuse(store, FIRST + "Xnopqrstuvwx") == 12
    assert store.stats().matched_tokens == 17 + 13 + 12


def test_a_repeated_prompt_of_whole_blocks_is_reused_but_for_its_last_token() -> None:
    store = store_for()
    keep(store, FIRST + SECOND)
    assert [reuse(store, FIRST + SECOND, limit) for limit in range(-1, 26)] == [
        *[0] * (MIN_LONE_TOKENS + 1),
        *range(MIN_LONE_TOKENS, 25),
        24,
    ]


def test_the_branch_that_goes_on_alike_for_the_longest_is_taken() -> None:
    store = store_for()
    tails = ["mnXXXXXXXXXX", "mnopXXXXXXXX", "mnopqYYYYYYY", "mZZZZZZZZZZZ", "ZZZZZZZZZZZZ"]
    for tail in tails:
        keep(store, FIRST + tail)
    asked = ["mnopqYa", "mnopqr", "mnopa", "mnoa", "mna", "ma", "Za", "a"]
    assert [reuse(store, FIRST + tail) - 12 for tail in asked] == [6, 5, 4, 3, 2, 1, 1, 0]


def test_however_many_branches_there_are_the_longest_is_found() -> None:
    store = store_for(capacity=1 << 22)
    for letter in range(300):
        keep_text = FIRST + "mnopqr" + chr(1000 + letter) * 6
        store.insert(key(keep_text), KeyedRow(key(keep_text), PLAIN), 0)
    assert reuse(store, FIRST + "mnopqr" + chr(1150) * 5 + "X") == 23


def test_a_match_without_a_full_block_has_a_shortest_length() -> None:
    store = store_for()
    keep(store, FIRST)
    assert store.find(key("abcdefgX"), 8).miss == "no_block"
    assert store.find(key("abcdefgh"), 7).miss == "too_short"
    assert reuse(store, "abcdefghX") == 8
    assert reuse(store, "abcdefghX", 8) == 8


def test_tenants_and_prompts_that_part_in_an_earlier_block_keep_apart() -> None:
    store = store_for()
    keep(store, FIRST + SECOND)
    assert reuse(store, key(FIRST + "mnop", salt="tenant")) == 0
    assert reuse(store, "Xbcdefghijkl" + SECOND) == 0


def test_a_model_with_state_that_cannot_be_cut_matches_at_checkpoints_only() -> None:
    store = store_for(HYBRID)
    keep(store, FIRST + SECOND, layout=HYBRID)
    assert store.find(key(FIRST + "mnopX"), 17).miss == "no_checkpoint"
    assert not store._index._siblings
    assert all(entry.tokens == b"" for entry in store._index.entries())


# Media


def test_a_block_with_media_is_matched_whole_or_not_at_all() -> None:
    store = store_for()
    cat = [MediaSpan(18, 2, b"cat")]
    keep(store, key(FIRST + SECOND, media=cat))
    assert reuse(store, key(FIRST + SECOND, media=cat)) == 24
    assert reuse(store, key(FIRST + SECOND, media=cat), 23) == 12
    assert reuse(store, FIRST + SECOND) == 12
    keep(store, FIRST + SECOND)
    assert reuse(store, FIRST + SECOND, 23) == 23


@pytest.mark.parametrize(
    ("span", "matched"), [((16, 2), 16), ((12, 1), 12), ((8, 6), 0), ((23, 9), 23), ((24, 1), 24)]
)
def test_a_match_ends_before_the_media_of_a_prompt(span: tuple[int, int], matched: int) -> None:
    store = store_for()
    keep(store, FIRST + SECOND)
    # Media in the first block leave less than a match of their own there, or just enough.
    expected = 8 if span[0] == 8 else matched
    assert reuse(store, key(FIRST + SECOND + "yz", media=[MediaSpan(*span, b"cat")])) == expected


def test_what_comes_after_media_is_matched_inside_too() -> None:
    store = store_for()
    cat = [MediaSpan(3, 4, b"cat")]
    keep(store, key(FIRST + SECOND, media=cat))
    assert reuse(store, key(FIRST + "mnoX", media=cat)) == 15
    assert reuse(store, key(FIRST + "mnoX", media=[MediaSpan(3, 4, b"dog")])) == 0


# What is held


def test_a_cut_block_that_is_held_is_not_evicted_and_goes_after_that() -> None:
    store = store_for(capacity=3 * BLOCK)
    keep(store, FIRST + SECOND, "X" * SIZE)
    asked = key(FIRST + "mnopY")
    ticket = store.find(asked, 16).ticket
    assert ticket is not None
    store.resize(0)
    store.check_integrity()
    assert store.stats().details["num_blocks"] == 2
    assert holds(store, ticket, asked)
    store.release(ticket)
    store.check_integrity()
    assert store.stats().used_bytes == 0
    assert not store._index._siblings


def test_a_cut_block_counts_as_used() -> None:
    store = store_for(capacity=3 * BLOCK)
    keep(store, FIRST + SECOND, FIRST + "Y" * SIZE)
    assert reuse(store, FIRST + "mnopZ") == 16
    keep(store, "X" * SIZE)
    assert reuse(store, FIRST + SECOND) == 24
    assert reuse(store, FIRST + "Y" * SIZE) == 12


def test_what_was_evicted_is_not_matched_inside() -> None:
    store = store_for(capacity=2 * BLOCK)
    keep(store, FIRST + SECOND, FIRST + "mnoYYYYYYYYY")
    assert reuse(store, FIRST + "mnopqX") == 15


def test_clear_forgets_what_is_inside_blocks_and_spares_what_is_held() -> None:
    store = store_for()
    keep(store, FIRST + SECOND)
    asked = key(FIRST + "mnopY")
    ticket = store.find(asked, 16).ticket
    store.clear()
    assert store.find(asked, 16).miss == "cleared"
    keep(store, FIRST)
    assert reuse(store, asked) == 12
    assert holds(store, ticket, asked)
    assert ticket is not None
    store.release(ticket)
    store.check_integrity()


def test_what_could_not_be_written_is_not_matched_inside() -> None:
    store = store_for()
    keep(store, FIRST)
    failing = key(FIRST + SECOND)
    store.insert(failing, KeyedRow(failing, PLAIN, RuntimeError("metal")), 0)
    assert reuse(store, FIRST + "mnopX") == 12


def test_what_follows_a_match_inside_a_block_is_stored_in_whole_blocks() -> None:
    store = store_for()
    keep(store, FIRST + SECOND)
    longer = key(FIRST + "mnopYYYYYYYYZZZ")
    assert reuse(store, longer) == 16
    row = KeyedRow(longer, PLAIN)
    store.insert(longer, row, store.generation)
    assert row.reads == [(12, 24)]
    assert reuse(store, longer) == 24
    assert reuse(store, FIRST + SECOND) == 24


@pytest.mark.parametrize("min_tokens", [0, SIZE, 2 * SIZE])
def test_a_quantised_block_is_cut_as_it_comes_back_whole(min_tokens: int) -> None:
    config = CacheConfig(
        capacity_bytes=1 << 20,
        block_size=SIZE,
        kv_storage_bits=8,
        min_quantize_tokens=min_tokens,
    )
    store = RamStore(config)
    store.attach("weights", WIDE)
    keep(store, FIRST + SECOND, layout=WIDE)
    whole, cut = store.find(key(FIRST + SECOND), 24), store.find(key(FIRST + "mnopX"), 16)
    lone = store.find(key("abcdefghiX"), 10)
    assert (whole.num_tokens, cut.num_tokens, lone.num_tokens) == (24, 16, 9)
    assert whole.ticket is not None
    expected = store.load(whole.ticket).tokens(0)
    for part in (cut, lone):
        assert part.ticket is not None
        found = store.load(part.ticket).tokens(0)
        assert found.shape == (2, part.num_tokens, 64)
        assert found.tobytes() == expected[:, : part.num_tokens].tobytes()


# From a file


def test_what_was_saved_is_matched_inside_when_it_is_loaded(tmp_path: Path) -> None:
    store = store_for()
    cat = [MediaSpan(18, 2, b"cat")]
    keep(store, FIRST + SECOND, key("Y" * 24, media=cat))
    store.save_to_disk(tmp_path / "cache")
    again = store_for()
    assert again.load_from_disk(tmp_path / "cache") == 4
    assert reuse(again, FIRST + "mnopX") == 16
    assert reuse(again, key("Y" * 24, media=cat), 23) == 12
    assert reuse(again, "Y" * 24, 23) == 12


@pytest.mark.parametrize("tokens", [b"", b"abcd", bytes(4 * SIZE)])
def test_an_adopted_block_without_its_own_tokens_is_matched_whole(tokens: bytes) -> None:
    root = Namespace(fingerprint="weights", kv_format="float32").root
    index = PrefixIndex(block_size=SIZE, block_bytes=0, capacity=1 << 20, needs_checkpoints=False)
    its = Chain(root, map(ord, FIRST), SIZE)
    entry = Indexed(digest=its.digests[0], parent=root, num_tokens=12, number=0, tokens=tokens)
    assert index.adopt(entry, age=1) is not None
    index.check_integrity()
    assert index.lookup(its, limit=11).num_tokens == 0
    assert index.lookup(its, limit=12).num_tokens == 12


# Over two tiers


def tiers(capacity: int = 1 << 20) -> tuple[TieredStore, RamStore, FakeSlowTier]:
    ram = RamStore(CacheConfig(capacity_bytes=capacity, block_size=SIZE))
    slow = FakeSlowTier(delayed=True)
    store = TieredStore(ram, slow)
    store.attach("weights", PLAIN)
    return store, ram, slow


def test_ram_gives_the_tokens_inside_a_block_at_once() -> None:
    store, _, slow = tiers()
    keep(store, FIRST + SECOND)
    assert store.find(key(FIRST + "mnopX"), 16).ready
    assert reuse(store, FIRST + "mnopX") == 16
    assert slow.readings == []


def test_the_slower_tier_gives_whole_blocks() -> None:
    store, _, _ = tiers(0)
    keep(store, FIRST + SECOND)
    assert reuse(store, FIRST + "mnopX") == 12
    assert reuse(store, "abcdefghijX") == 0


def test_what_was_read_is_matched_inside_from_then_on() -> None:
    store, ram, _ = tiers()
    keep(store, FIRST + SECOND)
    ram.clear()
    assert reuse(store, FIRST + "mnopX") == 12
    assert reuse(store, FIRST + SECOND) == 24
    assert reuse(store, FIRST + "mnopX") == 16
    assert store.stats().details["promoted"] == 2


def test_a_whole_block_that_is_slow_is_more_than_a_part_that_is_not() -> None:
    store, ram, _ = tiers(3 * BLOCK)
    keep(store, FIRST + SECOND, "X" * SIZE, FIRST + "mnopYYYYYYYY")
    assert ram.peek(ram.chain(key(FIRST + SECOND)), 24) == 16
    assert reuse(store, FIRST + SECOND) == 24


@pytest.mark.parametrize("base", ["", FIRST])
def test_what_cannot_be_read_leaves_the_part_that_ram_has(base: str) -> None:
    store, ram, slow = tiers(3 * BLOCK)
    slow_text, near = base + "mnopqrstuvwx", base + "mnopqrstuYYY"
    keep(store, slow_text)
    ram.resize(0)
    ram.resize(3 * BLOCK)
    keep(store, near)
    slow.damaged.add(ram.chain(key(slow_text)).digests[-1])
    prefix = store.find(key(slow_text), 24)
    assert (prefix.num_tokens, prefix.ready) == (len(slow_text), False)
    # It is held while the rest is read.
    ram.resize(0)
    prefix = settled(store, prefix)
    assert prefix.num_tokens == len(base) + 9
    assert holds(store, prefix.ticket, key(slow_text))


# By trying everything

spans = st.builds(
    MediaSpan, st.integers(0, 30), st.integers(1, 6), st.sampled_from([b"cat", b"dog"])
)
prompts = st.builds(
    PrefixKey,
    # Few places where they part, so that they have much in common.
    tokens=st.lists(st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, 0, 1]), min_size=1, max_size=40).map(
        tuple
    ),
    salt=st.sampled_from(["", "", "", "", "tenant"]),
    media=st.just(()) | st.just(()) | st.lists(spans, max_size=2).map(tuple),
)


def media_of(its: PrefixKey, start: int) -> list[MediaSpan]:
    """Media that overlap the block at ``start``."""
    return sorted(span for span in its.media if span.start < start + SIZE and span.end > start)


def in_common(stored: PrefixKey, asked: PrefixKey, limit: int) -> int:
    """Tokens of ``asked`` whose state is among the full blocks of ``stored``, one by one."""
    if stored.salt != asked.salt:
        return 0
    limit, end = min(limit, len(asked.tokens)), len(stored.tokens) // SIZE * SIZE
    for start in range(0, end, SIZE):
        block = slice(start, start + SIZE)
        alike = stored.tokens[block] == asked.tokens[block]
        if start + SIZE <= limit and alike and media_of(stored, start) == media_of(asked, start):
            continue
        stop = start
        while (
            not media_of(stored, start)
            and stop < min(limit, start + SIZE)
            and stored.tokens[stop] == asked.tokens[stop]
            and not any(span.start <= stop < span.end for span in asked.media)
        ):
            stop += 1
        return stop
    return end


@given(st.lists(prompts, max_size=6), prompts, st.integers(-1, 40), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_match_is_the_longest_that_trying_every_stored_token_finds(
    stored: list[PrefixKey], asked: PrefixKey, limit: int, again: bool
) -> None:
    store = store_for()
    keep(store, *stored)
    if again:
        limit, asked = max(0, limit), (stored or [asked])[0]
    longest = max((in_common(its, asked, max(0, limit)) for its in stored), default=0)
    expected = longest if longest >= MIN_LONE_TOKENS else 0
    event("nothing" if not expected else "inside" if expected % SIZE else "whole blocks")
    assert reuse(store, asked, limit) == expected
