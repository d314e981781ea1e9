"""Prompt lookup finds what a search through the whole row finds, in bounded time and memory."""

import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_core.drafting import Drafter, DraftRoom
from treadle_core.errors import InvalidRequest
from treadle_core.testing.drafting import A, B, DrafterContract, draft_row
from treadle_speculative.ngram import ENTRY_BYTES, NgramConfig, NgramDrafter, NgramIndex


class TestNgramDrafter(DrafterContract):
    @pytest.fixture
    def make_drafter(self) -> Callable[[], Drafter]:
        return NgramDrafter

    @pytest.fixture
    def vocab_size(self) -> int:
        return 50


def searched(tokens: Sequence[int], most: int, config: NgramConfig) -> tuple[int, ...]:
    """The draft by looking at every place of the row, newest first."""
    length = len(tokens)
    oldest = max(0, length - config.max_indexed_tokens)
    for n in range(config.max_n, config.min_n - 1, -1):
        for start in range(length - 1, max(n, oldest) - 1, -1):
            if n <= length and list(tokens[start - n : start]) == list(tokens[length - n :]):
                period = length - start
                return tuple(tokens[start + i % period] for i in range(most))
    return ()


def proposed(drafter: NgramDrafter, most: int) -> tuple[int, ...]:
    return drafter.propose([DraftRoom(A, most)])[0].tokens


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=12),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 30),
    st.integers(0, 6),
)
def test_it_finds_what_a_search_finds(
    prompt: list[int], growth: list[list[int]], min_n: int, more: int, window: int, most: int
) -> None:
    config = NgramConfig(min_n=min_n, max_n=min_n + more, max_indexed_tokens=window)
    drafter, output = NgramDrafter(config), list[int]()
    drafter.join(draft_row(A, prompt, output))

    for tokens in [[], *growth]:
        output += tokens
        assert proposed(drafter, most) == searched([*prompt, *output], most, config)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.integers(1, 20))
def test_memory_is_bounded_by_the_window(tokens: list[int], window: int) -> None:
    config = NgramConfig(min_n=1, max_n=3, max_indexed_tokens=window)
    index = NgramIndex(tokens, [], config)
    index.catch_up(len(tokens))

    assert index.num_entries <= 3 * window


def test_the_longest_suffix_counts_and_of_those_the_newest() -> None:
    drafter = NgramDrafter(NgramConfig(min_n=1, max_n=3))
    drafter.join(draft_row(A, (1, 2, 3, 10, 9, 2, 3, 11, 8, 3, 12, 7, 1, 2, 3), []))
    assert proposed(drafter, 1) == (10,)

    drafter.join(draft_row(A, (2, 3, 10, 2, 3, 11, 7, 2, 3), []))
    assert proposed(drafter, 1) == (11,)


def test_a_repetition_goes_on_with_itself() -> None:
    drafter = NgramDrafter(NgramConfig(min_n=2, max_n=4))
    drafter.join(draft_row(A, (1, 2, 1, 2, 1), []))

    assert proposed(drafter, 6) == (2, 1, 2, 1, 2, 1)


def test_nothing_is_proposed_where_nothing_was_seen() -> None:
    drafter = NgramDrafter(NgramConfig(min_n=2, max_n=4))
    drafter.join(draft_row(A, (1, 2, 3, 4, 5), []))

    assert proposed(drafter, 4) == ()


def test_the_end_of_a_row_is_no_occurrence_of_itself() -> None:
    drafter = NgramDrafter(NgramConfig(min_n=1, max_n=1))
    drafter.join(draft_row(A, (1, 2), []))

    assert proposed(drafter, 4) == ()


def test_output_that_was_committed_is_found_and_prompt_and_output_are_one_text() -> None:
    output: list[int] = [3]
    drafter = NgramDrafter(NgramConfig(min_n=2, max_n=2))
    drafter.join(draft_row(A, (1, 2), output))
    output += [4, 2, 3]
    assert proposed(drafter, 2) == (4, 2)

    output += [5, 2, 3]
    assert proposed(drafter, 2) == (5, 2)


def test_large_token_ids_are_told_apart() -> None:
    big, half = 2**32 - 1, 2**31 - 1
    drafter = NgramDrafter(NgramConfig(min_n=2, max_n=2))
    drafter.join(draft_row(A, (0, big, 7, big, 0, 8, 1, half, 9, 0, big), []))

    assert proposed(drafter, 1) == (7,)


def test_a_long_prompt_is_indexed_piece_by_piece() -> None:
    prompt = (5, 6, 7, *range(100, 200), 150, 151)
    drafter = NgramDrafter(NgramConfig(min_n=2, max_n=2, catch_up_tokens=40))
    drafter.join(draft_row(A, prompt, []))

    assert proposed(drafter, 1) == ()
    assert proposed(drafter, 1) == (152,)
    assert drafter.propose([DraftRoom(A, 0)])[0].tokens == ()


def test_an_entry_takes_no_more_than_it_is_counted_for() -> None:
    """Of different n-grams throughout, the most that there can be."""
    rng = random.Random(1)
    for max_n in (2, 4, 16):
        config = NgramConfig(min_n=max_n - 1, max_n=max_n, catch_up_tokens=10**9)
        prompt = [rng.randrange(2**17) for _ in range(6_000)]
        drafter = NgramDrafter(config)
        tracemalloc.start()
        drafter.join(draft_row(A, prompt, []))
        proposed(drafter, 1)
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert drafter.held_bytes / 3 < used + sys.getsizeof(prompt) < drafter.held_bytes
        assert drafter.held_bytes == pytest.approx(2 * 6_000 * ENTRY_BYTES, rel=0.02)


def test_the_time_of_a_token_does_not_depend_on_the_rows_length() -> None:
    rng = random.Random(2)

    def seconds(length: int) -> float:
        output = [rng.randrange(1_000) for _ in range(length)]
        drafter = NgramDrafter(NgramConfig(min_n=2, max_n=4, catch_up_tokens=10**9))
        drafter.join(draft_row(A, (1,), output))
        proposed(drafter, 8)
        taken: list[float] = []
        for _ in range(200):
            output.append(rng.randrange(1_000))
            started = time.perf_counter()
            proposed(drafter, 8)
            taken.append(time.perf_counter() - started)
        return sorted(taken)[len(taken) // 2]

    assert seconds(60_000) < 10 * seconds(600)


def test_rows_are_told_apart() -> None:
    drafter = NgramDrafter(NgramConfig(min_n=1, max_n=2))
    drafter.join(draft_row(A, (1, 2, 1), []))
    drafter.join(draft_row(B, (1, 3, 1), []))

    proposals = drafter.propose([DraftRoom(B, 1), DraftRoom(A, 1)])

    assert [proposal.tokens for proposal in proposals] == [(3,), (2,)]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"min_n": 0}, "min_n"),
        ({"min_n": 5}, "min_n"),
        ({"max_n": 17}, "max_n"),
        ({"max_n": 0}, "max_n"),
        ({"min_n": True}, "min_n"),
        ({"max_indexed_tokens": 0}, "max_indexed_tokens"),
        ({"catch_up_tokens": 0}, "catch_up_tokens"),
    ],
)
def test_options_are_checked(options: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        NgramConfig(**options)

    assert caught.value.field == field
