"""Exact states of the index: which slot, which order, which reason."""

import tracemalloc
from collections.abc import Iterable, Sequence

import pytest

from treadle_cache.digests import Chain, MediaSpan, Namespace
from treadle_cache.index import (
    CHECKPOINT_METADATA_BYTES,
    EvictedBlock,
    EvictedCheckpoint,
    Insertion,
    Match,
    MissReason,
    NewBlock,
    PrefixIndex,
    block_metadata_bytes,
)

ROOT = Namespace(fingerprint="weights", kv_format="float32").root
SIZE = 4
BLOCK = 100 + block_metadata_bytes(SIZE)
CHECKPOINT = 50 + CHECKPOINT_METADATA_BYTES


def blocks_only(num_blocks: int) -> PrefixIndex:
    """Room for ``num_blocks`` blocks, in a model that needs no checkpoints."""
    return PrefixIndex(
        block_size=SIZE, block_bytes=100, capacity=num_blocks * BLOCK, needs_checkpoints=False
    )


def with_checkpoints(num_blocks: int, num_checkpoints: int) -> PrefixIndex:
    return PrefixIndex(
        block_size=SIZE,
        block_bytes=100,
        capacity=num_blocks * BLOCK + num_checkpoints * CHECKPOINT,
        needs_checkpoints=True,
    )


def chain(text: str, media: Iterable[MediaSpan] = (), root: bytes = ROOT) -> Chain:
    """A chain with one token per letter."""
    return Chain(root, map(ord, text), SIZE, media)


def insert(
    index: PrefixIndex, text: str, *, checkpoint: bool = False, root: bytes = ROOT
) -> Insertion:
    done = index.insert(
        chain(text, root=root),
        len(text),
        generation=index.generation,
        checkpoint_bytes=50 if checkpoint else None,
    )
    index.check_integrity()
    return done


def lookup(index: PrefixIndex, text: str, *, root: bytes = ROOT) -> Match:
    """As an engine does: the last token is recomputed, for its logits are needed."""
    return index.lookup(chain(text, root=root), limit=len(text) - 1)


def found(index: PrefixIndex, *texts: str) -> list[str]:
    """Those of ``texts`` whose last full block is there, or whose checkpoint is."""
    present: list[str] = []
    for text in texts:
        its = chain(text)
        if its.end(len(text)) in index or (its.digests and its.digests[-1] in index):
            present.append(text)
    return present


def ends(index: PrefixIndex, *texts: str) -> list[str]:
    """Those of ``texts`` that have a checkpoint."""
    return [text for text in texts if chain(text).end(len(text)) in index]


def slots(done: Insertion) -> list[int]:
    return [new.slot for new in done.new]


# Insertion and lookup


def test_every_full_block_gets_the_lowest_free_slot() -> None:
    index = blocks_only(8)
    its = chain("aaaabbbbcc")

    done = insert(index, "aaaabbbbcc")

    assert done == Insertion(
        new=(NewBlock(its.digests[0], 0, 4), NewBlock(its.digests[1], 1, 8)),
    )
    assert (index.num_slots, index.num_free_slots, index.used_bytes) == (2, 0, 2 * BLOCK)


def test_freed_slots_are_given_out_again_lowest_first() -> None:
    index = blocks_only(4)
    for text in ("aaaa", "bbbb", "cccc", "dddd"):
        insert(index, text)
    index.evict(3 * BLOCK)

    done = insert(index, "eeeeffff")

    assert slots(done) == [0, 1]
    assert (index.num_slots, index.num_free_slots) == (4, 1)


def test_what_is_there_already_is_not_stored_twice() -> None:
    index = blocks_only(8)
    insert(index, "aaaabbbb")

    again = insert(index, "aaaabbbb")
    longer = insert(index, "aaaabbbbcccc")
    branch = insert(index, "aaaadddd")

    assert (slots(again), slots(longer), slots(branch)) == ([], [2], [3])
    assert index.stats.num_blocks == 4


def test_a_match_is_the_longest_over_all_branches() -> None:
    index = blocks_only(8)
    insert(index, "aaaa")
    insert(index, "aaaabbbbcccc")
    insert(index, "aaaadddd")

    match = lookup(index, "aaaabbbbccccdddd")

    assert match.slots == (0, 1, 2)
    assert match.num_tokens == 12


def test_a_prompt_that_diverges_matches_up_to_the_first_other_token() -> None:
    index = blocks_only(8)
    insert(index, "aaaabbbbcccc")

    match = lookup(index, "aaaabbbXcccc")

    assert (match.num_tokens, match.slots) == (7, (0, 1))


def test_a_block_never_matches_after_other_blocks() -> None:
    index = blocks_only(8)
    insert(index, "aaaabbbb")
    insert(index, "cccc")

    assert lookup(index, "ccccbbbbx").num_tokens == 4
    assert lookup(index, "bbbbx").num_tokens == 0


@pytest.mark.parametrize(("length", "matched"), [(15, 12), (16, 15), (17, 16)])
def test_all_but_the_last_token_match_of_the_blocks_that_are_there(
    length: int, matched: int
) -> None:
    index = blocks_only(8)
    prompt = "abcdefghijklmnopqrst"[:length]
    insert(index, prompt)

    assert lookup(index, prompt).num_tokens == matched


def test_a_limit_beyond_the_prompt_is_its_length() -> None:
    index = blocks_only(8)
    insert(index, "aaaabbbb")

    assert index.lookup(chain("aaaa"), limit=1_000).num_tokens == 4


def test_an_insertion_covers_the_tokens_it_says_and_no_more() -> None:
    index = blocks_only(8)

    done = index.insert(chain("aaaabbbbcccc"), 11, generation=0)

    assert slots(done) == [0, 1]


def test_namespaces_never_share() -> None:
    index = blocks_only(8)
    other = Namespace(fingerprint="weights", kv_format="float32", salt="tenant").root
    insert(index, "aaaabbbb")

    assert lookup(index, "aaaabbbbx", root=other).miss == "no_block"
    assert slots(insert(index, "aaaabbbb", root=other)) == [2, 3]


def test_a_picture_later_keeps_the_blocks_before_it_and_another_picture_does_not_match() -> None:
    index = blocks_only(8)
    cat = chain("aaaaPPPPbbbbPPPP", [MediaSpan(4, 4, b"cat")])
    index.insert(cat, 16, generation=0)

    dog = index.lookup(chain("aaaaPPPPbbbbPPPP", [MediaSpan(4, 4, b"dog")]), limit=15)
    both = [MediaSpan(4, 4, b"cat"), MediaSpan(12, 4, b"dog")]
    second = index.lookup(chain("aaaaPPPPbbbbPPPP", both), limit=16)

    assert (dog.num_tokens, second.num_tokens) == (4, 12)


def test_one_token_prefixes_match_where_blocks_hold_one_token() -> None:
    index = PrefixIndex(block_size=1, block_bytes=0, capacity=10_000, needs_checkpoints=False)
    index.insert(Chain(ROOT, [5], 1), 1, generation=0)

    assert index.lookup(Chain(ROOT, [5, 6], 1), limit=1).num_tokens == 1


def test_a_chain_of_other_blocks_is_refused() -> None:
    index = blocks_only(8)

    with pytest.raises(ValueError, match="blocks of 2 tokens, not 4"):
        index.lookup(Chain(ROOT, [1, 2], 2), limit=1)
    with pytest.raises(ValueError, match="blocks of 2 tokens, not 4"):
        index.insert(Chain(ROOT, [1, 2], 2), 2, generation=0)


def test_numbers_that_make_no_sense_are_refused() -> None:
    index = blocks_only(8)

    with pytest.raises(ValueError, match="5 tokens of a chain of 4"):
        index.insert(chain("aaaa"), 5, generation=0)
    with pytest.raises(ValueError, match="a checkpoint of -1 bytes"):
        index.insert(chain("aaaa"), 4, generation=0, checkpoint_bytes=-1)
    with pytest.raises(ValueError, match="a capacity of -1 bytes"):
        index.resize(-1)
    with pytest.raises(ValueError, match="blocks of 0 tokens"):
        PrefixIndex(block_size=0, block_bytes=1, capacity=1, needs_checkpoints=False)


# Misses


def misses(index: PrefixIndex) -> dict[MissReason, int]:
    return index.stats.misses


def test_every_miss_has_a_reason() -> None:
    index = with_checkpoints(8, 2)

    reasons = [lookup(index, "aaaab").miss]
    insert(index, "aaaa")
    reasons += [lookup(index, prompt).miss for prompt in ("aaaab", "aaa", "bbbbb", "")]
    index.clear()
    reasons += [lookup(index, "aaaab").miss]

    assert reasons == ["empty", "no_checkpoint", "too_short", "no_block", "too_short", "cleared"]
    assert misses(index) == {
        "empty": 1,
        "no_checkpoint": 1,
        "too_short": 2,
        "no_block": 1,
        "cleared": 1,
    }
    assert index.stats.hits == 0


def test_an_index_that_was_emptied_by_eviction_says_empty() -> None:
    index = blocks_only(8)
    index.clear()
    insert(index, "aaaa")
    index.evict(BLOCK)

    assert lookup(index, "aaaab").miss == "empty"


def test_tokens_that_match_are_counted() -> None:
    index = blocks_only(8)
    insert(index, "aaaabbbb")

    lookup(index, "aaaabbbbc")
    lookup(index, "aaaac")

    assert (index.stats.hits, index.stats.matched_tokens) == (2, 12)


# Checkpoints


def test_a_match_ends_at_the_deepest_checkpoint_within_the_limit() -> None:
    index = with_checkpoints(8, 8)
    for end in (4, 6, 9, 12):
        insert(index, "aaaabbbbcccc"[:end], checkpoint=True)

    matches = [index.lookup(chain("aaaabbbbccccdddd"), limit=n) for n in range(3, 14)]

    assert [match.num_tokens for match in matches] == [0, 4, 4, 6, 6, 6, 9, 9, 9, 12, 12]
    assert matches[3].slots == (0,)
    assert matches[6].slots == (0, 1)
    assert len({match.checkpoint for match in matches}) == 5


def test_blocks_beyond_the_last_checkpoint_do_not_match() -> None:
    index = with_checkpoints(8, 8)
    insert(index, "aaaab", checkpoint=True)
    insert(index, "aaaabbbbcccc")

    match = lookup(index, "aaaabbbbccccd")

    assert (match.num_tokens, match.slots) == (5, (0,))


def test_a_checkpoint_inside_a_block_matches_its_own_tokens_only() -> None:
    index = with_checkpoints(8, 8)
    insert(index, "aaaabc", checkpoint=True)

    assert lookup(index, "aaaabcx").num_tokens == 6
    assert lookup(index, "aaaabdx").miss == "no_checkpoint"


def test_a_checkpoint_shorter_than_a_block_matches() -> None:
    index = with_checkpoints(8, 8)
    insert(index, "ab", checkpoint=True)

    match = lookup(index, "abx")

    assert (match.num_tokens, match.slots) == (2, ())


def test_the_same_checkpoint_is_not_stored_twice() -> None:
    index = with_checkpoints(8, 8)
    first = insert(index, "aaaab", checkpoint=True)

    second = insert(index, "aaaab", checkpoint=True)

    assert first.checkpoint is not None
    assert second == Insertion()
    assert index.stats.num_checkpoints == 1


def test_a_growing_chat_never_matches_less_than_its_last_prompt() -> None:
    index = with_checkpoints(40, 3)
    prompt, before = "", 0
    for turn in range(8):
        prompt += "uvwxyz"[: 3 + turn % 4] + str(turn) * 3
        match = lookup(index, prompt)
        assert match.num_tokens == before
        insert(index, prompt, checkpoint=True)
        insert(index, f"one-off {turn}", checkpoint=True)
        before = len(prompt)


def test_where_none_are_needed_a_checkpoint_is_still_found_by_its_digest() -> None:
    index = PrefixIndex(block_size=SIZE, block_bytes=0, capacity=10_000, needs_checkpoints=False)

    insert(index, "aaaab", checkpoint=True)

    assert chain("aaaab").end(5) in index
    assert lookup(index, "aaaabx").num_tokens == 4


# Eviction


def test_the_least_recently_used_last_block_goes_first_and_parents_last() -> None:
    index = blocks_only(5)
    insert(index, "aaaabbbb")
    insert(index, "aaaacccc")
    insert(index, "dddd")
    its, other = chain("aaaabbbb"), chain("aaaacccc")

    evicted = index.evict(4 * BLOCK)

    assert evicted == (
        EvictedBlock(its.digests[1], its.digests[0], 8, 1),
        EvictedBlock(other.digests[1], other.digests[0], 8, 2),
        EvictedBlock(its.digests[0], ROOT, 4, 0),
        EvictedBlock(chain("dddd").digests[0], ROOT, 4, 3),
    )
    index.check_integrity()


def test_room_is_made_for_what_is_missing_only() -> None:
    index = blocks_only(3)
    insert(index, "aaaa")
    insert(index, "bbbbcccc")

    done = insert(index, "bbbbdddd")

    assert [entry.digest for entry in done.evicted] == [chain("aaaa").digests[0]]
    assert slots(done) == [0]
    assert found(index, "aaaa", "bbbbcccc", "bbbbdddd") == ["bbbbcccc", "bbbbdddd"]


def test_a_hit_refreshes_so_that_the_shared_system_prompt_survives_one_off_prompts() -> None:
    index = blocks_only(6)
    insert(index, "systprom")
    for number in range(18):
        one_off = f"systprom{chr(ord('a') + number)}000x"

        assert lookup(index, one_off).num_tokens == 8
        insert(index, one_off)
        insert(index, f"{number:04}")

    assert found(index, "systprom") == ["systprom"]
    assert index.stats.evicted_blocks == 36 - 4


def test_a_shared_checkpoint_survives_one_off_prompts_that_extend_it() -> None:
    index = with_checkpoints(2, 3)
    insert(index, "system", checkpoint=True)
    for number in range(9):
        one_off = f"system{number:04}"

        assert lookup(index, one_off).num_tokens == 6
        insert(index, one_off, checkpoint=True)

    assert ends(index, "system", "system0006", "system0007", "system0008") == [
        "system",
        "system0007",
        "system0008",
    ]


def test_a_popular_entry_that_nobody_uses_any_more_is_evicted() -> None:
    index = blocks_only(3)
    insert(index, "aaaa")
    for _ in range(20):
        lookup(index, "aaaax")

    for text in ("bbbb", "cccc", "dddd"):
        insert(index, text)

    assert found(index, "aaaa", "bbbb", "cccc", "dddd") == ["bbbb", "cccc", "dddd"]


@pytest.mark.parametrize("length", [8, 7])
def test_superseded_turns_go_before_the_live_end_of_another_chat(length: int) -> None:
    index = with_checkpoints(20, 4)
    turns = ["AAAAaaaa"[:length], "BBBBbbbb"[:length]]
    first = [turns[0], turns[0] + "111", turns[0] + "111222"]
    second = [turns[1], turns[1] + "111", turns[1] + "111222"]
    for text in (*first, *second):
        insert(index, text, checkpoint=True)
    index.resize(index.used_bytes - 2 * CHECKPOINT)

    insert(index, "C", checkpoint=True)

    assert ends(index, *first, *second, "C") == [first[2], second[1], second[2], "C"]


def test_what_an_insertion_supersedes_goes_before_the_end_of_another_chat() -> None:
    index = with_checkpoints(8, 2)
    insert(index, "aaaa", checkpoint=True)
    insert(index, "b", checkpoint=True)
    index.resize(2 * BLOCK + 2 * CHECKPOINT)
    lookup(index, "bbbbx")

    done = insert(index, "bbbb", checkpoint=True)

    assert [type(entry) for entry in done.evicted] == [EvictedCheckpoint]
    assert ends(index, "aaaa", "b", "bbbb") == ["aaaa", "bbbb"]


def test_an_end_lives_again_when_what_extended_it_is_gone() -> None:
    index = with_checkpoints(8, 4)
    insert(index, "a", checkpoint=True)
    insert(index, "ab", checkpoint=True)
    insert(index, "c", checkpoint=True)
    pin = index.pin(lookup(index, "ax"))
    index.evict(CHECKPOINT)
    assert ends(index, "a", "ab", "c") == ["a", "c"]
    assert pin is not None
    index.release(pin)
    insert(index, "cd", checkpoint=True)

    index.evict(CHECKPOINT)

    assert ends(index, "a", "c", "cd") == ["a", "cd"]
    index.check_integrity()


def test_the_checkpoint_between_two_others_goes_and_the_first_stays_superseded() -> None:
    index = with_checkpoints(8, 4)
    insert(index, "a", checkpoint=True)
    insert(index, "ab", checkpoint=True)
    insert(index, "abc", checkpoint=True)
    insert(index, "x", checkpoint=True)
    pin = index.pin(index.lookup(chain("a"), limit=1))
    assert pin is not None

    gone = [entry.num_tokens for entry in index.evict(CHECKPOINT)]
    index.release(pin)
    index.check_integrity()

    assert gone == [2]
    assert ends(index, "a", "ab", "abc", "x") == ["a", "abc", "x"]


@pytest.mark.parametrize(("again", "left"), [("abcd", ["x", "abcd"]), ("abc", ["abc", "x"])])
def test_one_stored_after_what_extends_it_is_superseded_once_that_is_seen(
    again: str, left: list[str]
) -> None:
    index = with_checkpoints(8, 8)
    for text in ("a", "abc", "x", "ab", again):
        insert(index, text, checkpoint=True)

    index.evict((index.stats.num_checkpoints - 2) * CHECKPOINT)

    assert ends(index, "a", "ab", "abc", "x", "abcd") == left


def test_a_refused_checkpoint_supersedes_nothing() -> None:
    index = with_checkpoints(2, 2)
    insert(index, "x", checkpoint=True)
    insert(index, "a", checkpoint=True)
    index.insert(chain("ab"), 2, generation=0, checkpoint_bytes=1_000_000)
    index.check_integrity()

    index.evict(CHECKPOINT)

    assert ends(index, "a", "x") == ["a"]


def test_where_matches_end_at_checkpoints_blocks_without_one_go_first() -> None:
    index = with_checkpoints(8, 4)
    insert(index, "aaaa", checkpoint=True)
    insert(index, "bbbbcccc")

    evicted = index.evict(2 * BLOCK)

    assert [entry.num_tokens for entry in evicted] == [8, 4]
    assert found(index, "aaaa", "bbbb") == ["aaaa"]


def test_an_evicted_checkpoint_says_all_that_another_tier_must_know() -> None:
    index = with_checkpoints(8, 4)
    done = insert(index, "aaaab", checkpoint=True)
    its = chain("aaaab")

    evicted = index.evict(1)

    assert done.checkpoint is not None
    assert evicted == (EvictedCheckpoint(its.end(5), its.digests[0], 5, done.checkpoint, 50),)


def test_a_block_goes_after_the_checkpoint_that_hangs_on_it() -> None:
    index = with_checkpoints(8, 4)
    insert(index, "aaaab", checkpoint=True)
    insert(index, "bbbb", checkpoint=True)

    evicted = index.evict(CHECKPOINT + BLOCK)

    assert [type(entry) for entry in evicted] == [EvictedCheckpoint, EvictedBlock]
    assert found(index, "aaaa", "bbbb") == ["bbbb"]


# The budget


def test_an_insertion_larger_than_the_budget_takes_free_room_and_evicts_nothing() -> None:
    index = blocks_only(3)
    insert(index, "aaaa")

    done = insert(index, "bbbbccccddddeeee")

    assert (slots(done), done.evicted, done.refused) == ([1, 2], (), "no_room")
    assert found(index, "aaaa", "bbbb", "bbbbcccc") == ["aaaa", "bbbb", "bbbbcccc"]
    assert index.stats.refused == {"no_room": 1}


def test_an_insertion_that_fills_the_budget_exactly_is_whole() -> None:
    index = blocks_only(3)
    insert(index, "aaaa")

    done = insert(index, "bbbbccccdddd")

    assert (slots(done), done.refused) == ([0, 1, 2], None)
    assert index.used_bytes == index.capacity


def test_a_checkpoint_larger_than_the_budget_is_refused_with_its_blocks() -> None:
    index = with_checkpoints(4, 1)
    insert(index, "aaaa", checkpoint=True)
    before = index.used_bytes

    done = index.insert(chain("bbbbcccc"), 8, generation=0, checkpoint_bytes=1_000_000)

    assert done == Insertion(refused="no_room")
    assert index.used_bytes == before
    assert ends(index, "aaaa") == ["aaaa"]
    index.check_integrity()


def test_where_none_are_needed_blocks_are_stored_without_their_checkpoint() -> None:
    index = blocks_only(4)

    done = index.insert(chain("bbbbcccc"), 8, generation=0, checkpoint_bytes=1_000_000)

    assert (slots(done), done.checkpoint, done.refused) == ([0, 1], None, "no_room")
    index.check_integrity()


def test_off_means_nothing_is_stored() -> None:
    index = blocks_only(0)

    done = insert(index, "aaaabbbb")

    assert done == Insertion(refused="no_room")
    assert (index.used_bytes, index.num_slots) == (0, 0)


def test_less_capacity_evicts_at_once_down_to_what_is_pinned() -> None:
    index = blocks_only(4)
    insert(index, "aaaabbbb")
    insert(index, "cccc")
    pin = index.pin(lookup(index, "aaaax"))

    evicted = index.resize(0)

    assert [entry.num_tokens for entry in evicted] == [8, 4]
    assert index.capacity == index.used_bytes == BLOCK
    index.check_integrity()
    assert pin is not None
    index.release(pin)
    assert len(index.resize(0)) == 1
    assert index.capacity == index.used_bytes == 0


def test_an_insertion_does_not_evict_the_blocks_it_builds_on() -> None:
    index = blocks_only(3)
    insert(index, "aaaabbbb")
    insert(index, "cccc")
    pin = index.pin(lookup(index, "ccccx"))

    done = insert(index, "aaaabbbbdddd")

    assert pin is not None
    assert done == Insertion(refused="no_room")
    assert found(index, "aaaabbbb", "cccc") == ["aaaabbbb", "cccc"]


@pytest.mark.parametrize("length", [1, 300])
def test_metadata_stays_below_its_estimate(length: int) -> None:
    index = PrefixIndex(block_size=1, block_bytes=0, capacity=2**40, needs_checkpoints=True)
    prompts = [[number, *range(length - 1)] for number in range(1_200 // length)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]

    for prompt in prompts:
        index.insert(Chain(ROOT, prompt, 1), length, generation=0)
    after_blocks = tracemalloc.get_traced_memory()[0]
    for prompt in prompts:
        its = Chain(ROOT, prompt, 1)
        for end in range(length, 0, -4):
            index.insert(its, end, generation=0, checkpoint_bytes=0)
    del its
    after_checkpoints = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    stats = index.stats
    assert after_blocks - before < stats.num_blocks * block_metadata_bytes(SIZE)
    assert after_checkpoints - after_blocks < stats.num_checkpoints * CHECKPOINT_METADATA_BYTES


@pytest.mark.parametrize("size", [1, 32])
@pytest.mark.parametrize("length", [1, 2, 300])
@pytest.mark.parametrize("num_blocks", [342, 1_200, 2_731])
def test_metadata_of_blocks_with_tokens_stays_below_its_estimate(
    size: int, length: int, num_blocks: int
) -> None:
    index = PrefixIndex(block_size=size, block_bytes=0, capacity=2**40, needs_checkpoints=False)
    prompts = [[number, *range(length * size - 1)] for number in range(num_blocks // length)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]

    for prompt in prompts:
        index.insert(Chain(ROOT, prompt, size), length * size, generation=0)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert after - before < index.stats.num_blocks * block_metadata_bytes(size)


def test_hits_without_evictions_do_not_make_the_queue_grow() -> None:
    index = blocks_only(8)
    insert(index, "aaaa")

    for _ in range(1_000):
        lookup(index, "aaaax")

    assert len(index._queue) <= 70
    index.check_integrity()


@pytest.mark.parametrize("hits", [0, 1])
def test_an_end_that_was_superseded_for_a_moment_can_still_be_evicted(hits: int) -> None:
    index = with_checkpoints(2, 2)
    insert(index, "a", checkpoint=True)
    for _ in range(hits):
        lookup(index, "ax")

    # Often enough for the queue to be cleaned up at that very moment.
    for _ in range(70):
        index.insert(chain("ab"), 2, generation=0, checkpoint_bytes=1_000_000)
        index.check_integrity()

    assert len(index.evict(1)) == 1


# Pins


def test_a_pinned_block_and_its_parents_survive_eviction() -> None:
    index = blocks_only(4)
    insert(index, "aaaabbbbcccc")
    insert(index, "dddd")
    pin = index.pin(lookup(index, "aaaabbbbx"))

    evicted = index.evict(1_000_000)

    assert [entry.num_tokens for entry in evicted] == [12, 4]
    assert (index.num_free_slots, index.num_cached_slots, index.num_pinned_slots) == (2, 0, 2)
    assert pin is not None
    assert index.release(pin) == ()
    assert (index.num_free_slots, index.num_cached_slots, index.num_pinned_slots) == (2, 2, 0)


def test_two_pins_on_one_prefix_both_count() -> None:
    index = blocks_only(4)
    insert(index, "aaaa")
    first, second = (index.pin(lookup(index, "aaaax")) for _ in range(2))
    assert first is not None
    assert second is not None

    index.release(first)
    kept = index.evict(BLOCK)
    index.release(second)
    gone = index.evict(BLOCK)

    assert (len(kept), len(gone)) == (0, 1)


def test_a_pinned_checkpoint_survives_though_it_is_superseded() -> None:
    index = with_checkpoints(8, 4)
    insert(index, "a", checkpoint=True)
    pin = index.pin(lookup(index, "ax"))
    insert(index, "ab", checkpoint=True)

    index.evict(1_000_000)

    assert pin is not None
    assert ends(index, "a", "ab") == ["a"]
    index.check_integrity()


def test_a_match_that_is_gone_cannot_be_pinned() -> None:
    index = blocks_only(4)
    insert(index, "aaaabbbb")
    match = lookup(index, "aaaabbbbx")

    index.evict(BLOCK)

    assert index.pin(match) is None


def test_a_match_that_came_back_in_another_slot_cannot_be_pinned() -> None:
    index = blocks_only(4)
    insert(index, "aaaa")
    match = lookup(index, "aaaax")
    index.evict(BLOCK)
    insert(index, "bbbb")
    insert(index, "aaaa")

    assert index.pin(match) is None


def test_a_checkpoint_that_came_back_with_another_number_cannot_be_pinned() -> None:
    index = with_checkpoints(8, 4)
    insert(index, "a", checkpoint=True)
    match = lookup(index, "ax")
    index.evict(CHECKPOINT)
    insert(index, "a", checkpoint=True)

    assert index.pin(match) is None


def test_a_pin_ends_once() -> None:
    index = blocks_only(4)
    pin = index.pin(lookup(index, "aaaax"))
    assert pin is not None
    index.release(pin)

    with pytest.raises(ValueError, match=f"pin {pin} is not open"):
        index.release(pin)


# Clear


def test_clear_means_clear() -> None:
    index = with_checkpoints(8, 4)
    done = insert(index, "aaaab", checkpoint=True)

    dropped = index.clear()

    assert dropped == (done.checkpoint,)
    assert lookup(index, "aaaabx").miss == "cleared"
    assert (index.used_bytes, index.num_free_slots, index.num_slots) == (0, 1, 1)
    assert index.stats.evicted_blocks == index.stats.evicted_checkpoints == 0
    index.check_integrity()


def test_what_was_begun_before_a_clear_cannot_be_stored_after_it() -> None:
    index = blocks_only(8)
    generation = index.generation
    index.clear()

    done = index.insert(chain("aaaabbbb"), 8, generation=generation)

    assert done == Insertion(refused="cleared")
    assert lookup(index, "aaaabbbbx").miss == "cleared"
    assert index.stats.refused == {"cleared": 1}


def test_a_pinned_slot_is_not_given_out_again_before_its_pin_ends() -> None:
    index = blocks_only(8)
    insert(index, "aaaabbbb")
    pin = index.pin(lookup(index, "aaaax"))
    index.clear()
    index.check_integrity()

    while_pinned = slots(insert(index, "aaaabbbb"))
    assert pin is not None
    index.release(pin)
    after = slots(insert(index, "cccc"))

    assert (while_pinned, after) == ([1, 2], [0])


def test_a_pinned_checkpoint_that_was_cleared_is_dropped_with_its_pin() -> None:
    index = with_checkpoints(8, 4)
    done = insert(index, "aaaab", checkpoint=True)
    pin = index.pin(lookup(index, "aaaabx"))
    assert pin is not None

    assert index.clear() == ()
    assert index.used_bytes == BLOCK + CHECKPOINT
    assert index.release(pin) == (done.checkpoint,)
    assert index.used_bytes == 0
    index.check_integrity()


def test_a_match_found_before_a_clear_cannot_be_pinned_after_it() -> None:
    index = blocks_only(8)
    insert(index, "aaaa")
    match = lookup(index, "aaaax")
    index.clear()

    assert index.pin(match) is None
    insert(index, "aaaa")
    assert index.pin(match) is None


# Withdrawal


def test_what_could_not_be_written_is_taken_back() -> None:
    index = with_checkpoints(8, 4)
    insert(index, "aaaab", checkpoint=True)
    before = index.used_bytes

    index.withdraw(insert(index, "aaaabbbbccccd", checkpoint=True))

    assert index.used_bytes == before
    assert index.num_free_slots == 2
    assert lookup(index, "aaaabbbbccccdx").num_tokens == 5
    assert index.stats.evicted_blocks == 0
    index.check_integrity()


def test_a_very_long_chain_can_be_cleared_and_dropped() -> None:
    index = PrefixIndex(block_size=1, block_bytes=0, capacity=2**40, needs_checkpoints=False)
    its = Chain(ROOT, range(100_000), 1)
    index.insert(its, 100_000, generation=0)

    pin = index.pin(index.lookup(its, limit=100_000))
    assert pin is not None
    index.clear()
    index.release(pin)

    assert (index.num_free_slots, index.used_bytes) == (100_000, 0)


# The walk notices


def damages() -> Sequence[str]:
    return [
        "index._used_bytes += 1",
        "index._pinned_bytes += 1",
        "index._num_pinned += 1",
        "index._num_slots += 1",
        "index._free_slots.append(0)",
        "index._capacity = 0",
        "block.pins += 1",
        "block.children += 1",
        "block.checkpoints += 1",
        "block.findable = False",
        "block.parent.used = 0",
        "block.parent = None",
        "block.num_tokens = 4",
        "block.digest = b''",
        "checkpoint.pins += 1",
        "checkpoint.block = None",
        "checkpoint.findable = False",
        "checkpoint.earlier.later.clear()",
        "checkpoint.earlier = None",
        "checkpoint.num_tokens = 1",
        "checkpoint.digest = b''",
        "index._tails.clear()",
        "index._queue.clear()",
        "index._queue.reverse()",
    ]


@pytest.mark.parametrize("damage", damages())
def test_the_integrity_walk_notices_damage(damage: str) -> None:
    index = with_checkpoints(8, 4)
    insert(index, "aaaa", checkpoint=True)
    insert(index, "aaaabbbb", checkpoint=True)
    insert(index, "aaaacccc")
    its = chain("aaaabbbb")
    block, checkpoint = index._blocks[its.digests[1]], index._checkpoints[its.end(8)]

    exec(damage, {"index": index, "block": block, "checkpoint": checkpoint})

    with pytest.raises(AssertionError):
        index.check_integrity()


@pytest.mark.parametrize(
    "damage",
    [
        "index._siblings.clear()",
        "index._siblings[block.above].reverse()",
        "index._siblings[block.above].remove(block)",
        "block.tokens = b''",
        "block.tokens = bytes(16)",
    ],
)
def test_the_integrity_walk_notices_damage_among_siblings(damage: str) -> None:
    index = blocks_only(8)
    insert(index, "aaaabbbb")
    insert(index, "aaaacccc")

    exec(damage, {"index": index, "block": index._blocks[chain("aaaabbbb").digests[1]]})

    with pytest.raises(AssertionError):
        index.check_integrity()


def test_what_is_reached_and_peeked_is_neither_counted_nor_refreshed() -> None:
    index = with_checkpoints(8, 2)
    insert(index, "abcdefghij", checkpoint=True)
    before = index.stats
    its = chain("abcdefghijkl")
    assert index.reach(its, 3).num_tokens == 8
    assert index.reach(its, 1).slots == (0,)
    assert [index.peek(its, limit=limit) for limit in (12, 10, 9, -1)] == [10, 10, 0, 0]
    assert index.stats == before
    assert index.pin(index.reach(its, 2)) is not None
    assert index.num_pinned_slots == 2
    index.check_integrity()


def test_entries_are_described_newest_first_and_adopted_by_another_index() -> None:
    index = with_checkpoints(8, 4)
    insert(index, "abcdef", checkpoint=True)
    insert(index, "abcdefghij", checkpoint=True)
    insert(index, "wxyz", checkpoint=True)
    described = index.entries()
    assert [entry.num_tokens for entry in described] == [4, 4, 4, 8, 10, 6]
    assert described[4].extends == described[5].digest
    other = with_checkpoints(8, 4)
    ages = {entry.digest: age for age, entry in enumerate(described, 1)}
    for entry in sorted(described, key=lambda entry: entry.num_tokens):
        assert other.adopt(entry, age=ages[entry.digest]) is not None
        other.check_integrity()
    assert [entry.digest for entry in other.entries()] == [entry.digest for entry in described]
    assert lookup(other, "abcdefghijk").num_tokens == 10
    (gone,) = other.evict(1)
    assert gone.digest == chain("abcdef").end(6)


def test_what_is_adopted_has_something_to_hang_on() -> None:
    index = with_checkpoints(8, 4)
    insert(index, "abcdefghij", checkpoint=True)
    first, second, end = sorted(index.entries(), key=lambda entry: entry.num_tokens)
    other = with_checkpoints(2, 1)
    assert other.adopt(second, age=1) is None
    assert other.adopt(end, age=1) is None
    assert other.adopt(first, age=9) is not None
    assert other.adopt(first, age=9) is None
    # It is used with its parent, so it cannot have been used later.
    assert other.adopt(second, age=1) is not None
    other.check_integrity()
    assert other.adopt(end, age=1) is not None
    other.check_integrity()
    full = with_checkpoints(1, 0)
    assert full.adopt(first, age=1) is not None
    assert full.adopt(second, age=1) is None
    full.check_integrity()


def test_blocks_at_the_head_of_a_chain_have_their_own_size() -> None:
    index = PrefixIndex(
        block_size=SIZE,
        block_bytes=100,
        capacity=2 * (1000 + block_metadata_bytes(SIZE)) + 2 * BLOCK,
        needs_checkpoints=False,
        head_blocks=2,
        head_block_bytes=1000,
    )
    assert len(insert(index, "abcdefghijklmnopqrst").new) == 4
    assert index.used_bytes == index.capacity
    index.evict(1)
    assert index.used_bytes == index.capacity - BLOCK
    index.clear()
    assert index.used_bytes == 0
    assert len(insert(index, "abcdefgh").new) == 2
    pin = index.pin(lookup(index, "abcdefghi"))
    assert pin is not None
    assert insert(index, "ABCD").refused == "no_room"
    index.release(pin)
    index.check_integrity()
