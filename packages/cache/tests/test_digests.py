"""Digests name everything that a state depends on, and nothing else."""

from hashlib import blake2b
from struct import pack

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from treadle_cache.digests import Chain, MediaSpan, Namespace, block_digests, tail_digest

ROOT = Namespace(fingerprint="weights", kv_format="float32").root
CAT = b"cat"
DOG = b"dog"

token_lists = st.lists(st.integers(0, 2), max_size=12)


def common(first: list[bytes], second: list[bytes]) -> int:
    """Leading digests that are equal; no digest may be equal after one that differs."""
    equal = [a == b for a, b in zip(first, second, strict=False)]
    assert equal == sorted(equal, reverse=True)
    return sum(equal)


def test_there_is_one_digest_of_32_bytes_per_full_block() -> None:
    digests = block_digests(ROOT, range(11), 4)

    assert [len(digest) for digest in digests] == [32, 32]


def test_the_encoding_is_the_one_that_names_files_on_disk() -> None:
    # A change here makes every stored file unreachable: it needs a new number in the domains.
    root = Namespace(fingerprint="f", kv_format="k", adapter="a", salt="s").root
    media = [MediaSpan(1, 3, CAT), MediaSpan(6, 2, DOG)]
    chain = Chain(root, [1, 2, 3, 4, 5, 6, 70_000], 2, media)

    assert [digest.hex()[:16] for digest in (root, *chain.digests, chain.end(7))] == [
        "4f6999b2f9d387db",
        "909789cb71b25246",
        "5c72b8418308f166",
        "773c4aa0b7cccbdd",
        "4d0676ac14ee67fc",
    ]


def test_the_encoding_can_be_read_off() -> None:
    first = blake2b(digest_size=32, person=b"treadle.block.1")
    first.update(pack("<Q32s I2I I", 32, ROOT, 2, 1, 2, 1) + pack("<qQ Q3s", 1, 2, 3, CAT))
    second = blake2b(digest_size=32, person=b"treadle.block.1")
    second.update(pack("<Q32s I2I I", 32, first.digest(), 2, 3, 4, 1))
    second.update(pack("<qQ Q3s", -1, 2, 3, CAT))
    third = blake2b(digest_size=32, person=b"treadle.block.1")
    third.update(pack("<Q32s I2I I", 32, second.digest(), 2, 5, 6, 0))
    end = blake2b(digest_size=32, person=b"treadle.end.1")
    end.update(pack("<Q32s II I", 32, second.digest(), 1, 5, 0))

    chain = Chain(ROOT, [1, 2, 3, 4, 5, 6], 2, [MediaSpan(1, 2, CAT)])

    assert chain.digests == [first.digest(), second.digest(), third.digest()]
    assert chain.end(5) == end.digest()


def test_a_block_depends_on_everything_before_it() -> None:
    same_second_block = [[1, 2, 3, 4], [9, 2, 3, 4]]

    first, second = (block_digests(ROOT, tokens, 2) for tokens in same_second_block)

    assert common(first, second) == 0


def test_a_block_depends_on_nothing_after_it() -> None:
    first, second = block_digests(ROOT, [1, 2, 3, 4], 2), block_digests(ROOT, [1, 2, 3, 5], 2)

    assert common(first, second) == 1


def test_equal_bytes_of_different_tokens_are_kept_apart() -> None:
    # As bytes of variable width, or of one byte each, these would look alike.
    assert block_digests(ROOT, [1, 0], 2) != block_digests(ROOT, [256, 0], 2)
    assert block_digests(ROOT, [0, 1], 2) != block_digests(ROOT, [1, 0], 2)
    assert block_digests(ROOT, [2**32 - 1], 1) != block_digests(ROOT, [0], 1)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_does_not_fit_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        block_digests(ROOT, [token], 1)


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="a block of 0 tokens"):
        block_digests(ROOT, [1], 0)


@pytest.mark.parametrize(
    "other",
    [
        Namespace(fingerprint="other weights", kv_format="float32"),
        Namespace(fingerprint="weights", kv_format="8 bits"),
        Namespace(fingerprint="weights", kv_format="float32", adapter="lora"),
        Namespace(fingerprint="weights", kv_format="float32", salt="tenant"),
        Namespace(fingerprint="weight", kv_format="sfloat32"),
        Namespace(fingerprint="weights", kv_format="float32", adapter="", salt="lora"),
    ],
)
def test_namespaces_never_share(other: Namespace) -> None:
    tokens = range(8)

    assert common(block_digests(ROOT, tokens, 2), block_digests(other.root, tokens, 2)) == 0
    assert Chain(ROOT, tokens, 3).end(8) != Chain(other.root, tokens, 3).end(8)


def test_fields_of_a_namespace_do_not_run_into_each_other() -> None:
    roots = {
        Namespace(fingerprint="f", kv_format="k", adapter="lora").root,
        Namespace(fingerprint="f", kv_format="k", salt="lora").root,
        Namespace(fingerprint="f", kv_format="klora").root,
        Namespace(fingerprint="fk", kv_format="lora").root,
    }

    assert len(roots) == 4


def test_the_same_tokens_with_another_picture_never_match() -> None:
    cat = block_digests(ROOT, [7] * 8, 2, [MediaSpan(0, 8, CAT)])
    dog = block_digests(ROOT, [7] * 8, 2, [MediaSpan(0, 8, DOG)])
    none = block_digests(ROOT, [7] * 8, 2)

    assert common(cat, dog) == common(cat, none) == common(dog, none) == 0


def test_text_before_a_picture_matches_whatever_the_picture() -> None:
    tokens = [1, 2, 3, 4, 7, 7, 5, 6]
    cat = block_digests(ROOT, tokens, 2, [MediaSpan(4, 2, CAT)])
    dog = block_digests(ROOT, tokens, 2, [MediaSpan(4, 2, DOG)])

    assert common(cat, dog) == common(cat, block_digests(ROOT, tokens, 2)) == 2


def test_a_second_picture_later_keeps_the_blocks_before_it() -> None:
    first = [MediaSpan(1, 2, CAT)]
    second = [*first, MediaSpan(5, 2, DOG)]
    tokens = [1, 7, 7, 2, 3, 7, 7, 4]

    assert (
        common(block_digests(ROOT, tokens, 2, first), block_digests(ROOT, tokens, 2, second)) == 2
    )


def test_a_picture_in_the_last_position_of_a_block_belongs_to_it() -> None:
    for start, kept in [(3, 1), (4, 2)]:
        media = [MediaSpan(start, 1, CAT)]

        digests = block_digests(ROOT, [7] * 6, 2, media)

        assert common(digests, block_digests(ROOT, [7] * 6, 2)) == kept


def test_where_in_a_block_a_picture_stands_counts() -> None:
    first = block_digests(ROOT, [7] * 4, 4, [MediaSpan(0, 2, CAT)])
    second = block_digests(ROOT, [7] * 4, 4, [MediaSpan(1, 2, CAT)])
    third = block_digests(ROOT, [7] * 4, 4, [MediaSpan(1, 3, CAT)])

    assert len({first[0], second[0], third[0]}) == 3


def test_two_pictures_and_one_with_their_digests_joined_are_kept_apart() -> None:
    both = [MediaSpan(0, 1, b"ab"), MediaSpan(1, 1, b"c")]
    shifted = [MediaSpan(0, 1, b"a"), MediaSpan(1, 1, b"bc")]

    assert block_digests(ROOT, [7, 7], 2, both) != block_digests(ROOT, [7, 7], 2, shifted)


def test_the_order_in_which_media_are_given_does_not_count() -> None:
    media = [MediaSpan(0, 3, CAT), MediaSpan(1, 1, DOG), MediaSpan(3, 2, CAT)]

    chain = Chain(ROOT, [7] * 5, 2, media)
    reverse = Chain(ROOT, [7] * 5, 2, media[::-1])

    assert chain.digests == reverse.digests
    assert chain.end(5) == reverse.end(5)


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 0), (3, -1)])
def test_a_span_that_covers_nothing_is_refused(start: int, length: int) -> None:
    with pytest.raises(ValueError, match="a media span"):
        MediaSpan(start, length, CAT)


def test_an_end_depends_on_its_tokens_and_their_media_only() -> None:
    plain = Chain(ROOT, [1, 2, 3, 4, 5], 4)
    later = Chain(ROOT, [1, 2, 3, 4, 5, 6, 7], 4, [MediaSpan(5, 1, CAT)])

    assert [plain.end(n) for n in range(6)] == [later.end(n) for n in range(6)]
    assert later.end(6) != Chain(ROOT, [1, 2, 3, 4, 5, 6], 4).end(6)


def test_an_end_on_a_block_boundary_is_not_the_block() -> None:
    chain = Chain(ROOT, [1, 2, 3, 4], 2)

    assert len({chain.root, *chain.digests, *(chain.end(n) for n in range(5))}) == 1 + 2 + 5


def test_an_end_is_the_tail_digest_after_its_last_block() -> None:
    media = [MediaSpan(4, 2, CAT)]
    chain = Chain(ROOT, [1, 2, 3, 4, 5, 6], 4, media)

    assert chain.end(6) == tail_digest(chain.digests[0], [5, 6], 4, media)
    assert chain.end(4) == tail_digest(chain.digests[0], [], 4, media)
    assert chain.end(3) == tail_digest(ROOT, [1, 2, 3])


def test_an_end_past_the_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="4 tokens of a chain of 3"):
        Chain(ROOT, [1, 2, 3], 2).end(4)


def test_a_chain_keeps_its_own_copy_of_the_tokens() -> None:
    tokens = [1, 2, 3]
    chain = Chain(ROOT, tokens, 2)
    end = chain.end(3)

    tokens[2] = 9

    assert chain.end(3) == end
    assert chain.num_tokens == 3


@given(token_lists, token_lists, st.integers(1, 4))
@settings(deadline=None)
def test_chains_share_exactly_the_full_blocks_of_their_common_prefix(
    first: list[int], second: list[int], size: int
) -> None:
    length = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )

    shared = common(block_digests(ROOT, first, size), block_digests(ROOT, second, size))

    assert shared == length // size


@given(token_lists, token_lists, st.integers(1, 4), st.data())
@settings(deadline=None)
def test_ends_are_equal_exactly_when_all_tokens_before_them_are(
    first: list[int], second: list[int], size: int, data: st.DataObject
) -> None:
    a = data.draw(st.integers(0, len(first)))
    b = data.draw(st.integers(0, len(second)))

    ends = Chain(ROOT, first, size).end(a), Chain(ROOT, second, size).end(b)

    assert (ends[0] == ends[1]) == (first[:a] == second[:b])


@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)), max_size=3),
    st.integers(0, 2),
    st.integers(1, 5),
)
@settings(deadline=None)
def test_another_picture_changes_the_first_block_it_overlaps_and_all_after(
    spans: list[tuple[int, int]], changed: int, size: int
) -> None:
    assume(changed < len(spans))
    media = [MediaSpan(start, length, CAT) for start, length in spans]
    other = list(media)
    other[changed] = MediaSpan(*spans[changed], DOG)
    tokens = [7] * 12

    shared = common(
        block_digests(ROOT, tokens, size, media), block_digests(ROOT, tokens, size, other)
    )

    assert shared == min(spans[changed][0] // size, 12 // size)
