"""Text from tokens: whole characters only, nothing lost or told twice, nothing past a stop string."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from treadle_core.testing import ByteTokenizer
from treadle_core.text import Detokenizer, StopMatcher

TOKENIZER = ByteTokenizer()


def pieces(tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """What each token gives, and the rest."""
    detokenizer = Detokenizer(TOKENIZER.decode, prompt)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


# Characters


def test_plain_letters_come_one_by_one() -> None:
    assert pieces(b"abc") == ["a", "b", "c", ""]


@pytest.mark.parametrize("character", ["é", "ř", "漢", "👩", "\u200d", "🏽"])
def test_a_character_comes_with_its_last_byte(character: str) -> None:
    tokens = character.encode()

    assert pieces(tokens) == [""] * (len(tokens) - 1) + [character, ""]


def test_a_family_emoji_comes_part_by_part() -> None:
    found = [piece for piece in pieces("👩‍👩‍👧".encode()) if piece]

    assert found == ["👩", "\u200d", "👩", "\u200d", "👧"]


def test_a_cut_character_is_replaced_at_the_end_only() -> None:
    assert pieces("a👩".encode()[:-1]) == ["a", "", "", "", "\ufffd"]


def test_a_lone_byte_is_replaced_when_the_next_character_begins() -> None:
    assert pieces([0xC3, 0x20, 0x41]) == ["", "\ufffd ", "A", ""]


def test_a_replacement_character_of_the_model_itself_waits_for_the_next() -> None:
    assert pieces("\ufffdx".encode()) == ["", "", "", "\ufffdx", ""]


def test_bytes_that_never_make_a_character_do_not_hold_text_back_for_ever() -> None:
    found = pieces([0xFF] * 40)

    assert max(len(piece) for piece in found) <= 8
    assert "".join(found) == "\ufffd" * 40


def test_a_character_that_begins_in_a_long_run_of_bad_bytes_is_not_lost() -> None:
    tokens = [0xE2] * 8 + [0x82, 0xAC, 0x41]

    assert "".join(pieces(tokens)) == "\ufffd" * 7 + "€A"


def test_special_tokens_between_letters_add_nothing() -> None:
    assert pieces([65, 256, 66, 258]) == ["A", "", "B", "", ""]


def test_special_tokens_within_a_character_do_not_break_it() -> None:
    assert "".join(pieces([0xE2, 256, 0x82, 257, 0xAC, 65])) == "€A"


def test_a_replacement_is_not_lost_behind_many_special_tokens() -> None:
    assert "".join(pieces([0xE2, *[256] * 20, 65])) == "\ufffdA"


def test_the_end_of_the_prompt_is_context_and_not_told_again() -> None:
    assert "".join(pieces(b" you", prompt=b"Hello, are")) == " you"


def test_a_character_that_the_prompt_began_is_told_whole() -> None:
    assert pieces("é!".encode()[1:], prompt="é".encode()[:1]) == ["é", "!", ""]
    assert "".join(pieces([0xAC], prompt=[0x80, 0x80, 0x80, 0xE2, 0x82])) == "€"


characters = st.sampled_from("aé漢👩\u200d🏽 \n\ufffd")
whole_texts = st.text(characters, max_size=30)
any_tokens = st.lists(
    st.one_of(
        st.integers(0, 255),
        st.sampled_from([0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x91, 0xA9, 0xFF]),
    ),
    max_size=40,
)


@given(whole_texts)
@settings(deadline=None)
def test_joined_pieces_equal_the_text(text: str) -> None:
    assert "".join(pieces(text.encode())) == text


@given(any_tokens)
@example([0xE2] * 8 + [0x82, 0xAC])
@example([0xF0, 0x9F] * 8)
@settings(deadline=None, max_examples=500)
def test_joined_pieces_equal_one_decode_of_everything(tokens: list[int]) -> None:
    assert "".join(pieces(tokens)) == TOKENIZER.decode(tokens)


@given(whole_texts, any_tokens)
@settings(deadline=None, max_examples=200)
def test_joined_pieces_continue_a_prompt_of_whole_characters(
    prompt: str, tokens: list[int]
) -> None:
    found = "".join(pieces(tokens, prompt.encode()))

    assert prompt + found == TOKENIZER.decode([*prompt.encode(), *tokens])


@given(whole_texts)
@settings(deadline=None)
def test_no_piece_of_a_whole_text_but_the_last_holds_half_a_character(text: str) -> None:
    text = text.replace("\ufffd", "")

    assert all("\ufffd" not in piece for piece in pieces(text.encode()))


def test_spaces_that_depend_on_the_neighbour_are_kept() -> None:
    # As SentencePiece: a word's leading space is dropped at the beginning of what is decoded.
    words = {1: " Hello", 2: " world", 3: "!", 4: " again"}

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).removeprefix(" ")

    detokenizer = Detokenizer(decode, [1])

    assert [detokenizer.add(token) for token in (2, 3, 4, 1, 2, 3, 4, 2)] == [
        " world",
        "!",
        " again",
        " Hello",
        " world",
        "!",
        " again",
        " world",
    ]


def test_bytes_that_are_replaced_one_by_one_until_they_are_whole_are_told_once() -> None:
    # As SentencePiece's byte fallback: each byte of an unfinished run is replaced by itself.
    def decode(tokens: Sequence[int]) -> str:
        try:
            return bytes(tokens).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(tokens)

    detokenizer = Detokenizer(decode, [])

    found = [detokenizer.add(token) for token in "👩".encode()]

    assert found == ["", "", "", "👩"]


# Stop strings


def feed(stops: Sequence[str], parts: Sequence[str]) -> tuple[list[str], str | None]:
    """What each part gives and what is left at the end, and the stop string found."""
    matcher = StopMatcher(stops)
    found = [matcher.feed(part) for part in parts]
    return [*found, matcher.flush()], matcher.found


def test_text_without_a_beginning_of_a_stop_string_passes_at_once() -> None:
    assert feed(["xyz"], ["ab", "cd"]) == (["ab", "cd", ""], None)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    assert feed(["<end>"], ["a<", "en", "t"]) == (["a", "", "<ent", ""], None)


def test_held_back_text_is_given_at_the_end() -> None:
    assert feed(["<end>"], ["a<en"]) == (["a", "<en"], None)


def test_a_stop_string_over_several_pieces_is_found() -> None:
    assert feed(["<end>"], ["a<", "en", "d>b", "c"]) == (["a", "", "", "", ""], "<end>")


def test_a_stop_string_at_the_very_beginning_gives_no_text() -> None:
    assert feed(["ab"], ["ab", "cd"]) == (["", "", ""], "ab")


def test_only_what_can_still_become_a_stop_string_is_held_back() -> None:
    assert feed(["aab"], ["aaa", "a", "c"]) == (["a", "a", "aac", ""], None)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert feed(["abcd", "bc"], ["abcd"]) == (["a", ""], "bc")
    assert feed(["abc", "ab"], ["abc"]) == (["", ""], "ab")


def test_of_two_that_are_complete_together_the_longer_wins() -> None:
    assert feed(["cd", "bcd"], ["abcd"]) == (["a", ""], "bcd")


def test_a_stop_string_within_another_one_that_never_comes_is_found() -> None:
    assert feed(["abcx", "bc"], ["ab", "cy"]) == (["", "a", ""], "bc")


def naive(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """Character by character: text before the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
@settings(deadline=None, max_examples=1_000)
def test_any_split_of_a_text_gives_what_scanning_the_whole_gives(
    stops: list[str], parts: list[str]
) -> None:
    found, stop = feed(stops, parts)

    assert ("".join(found), stop) == naive(stops, "".join(parts))


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
@settings(deadline=None)
def test_no_more_is_held_back_than_a_stop_string_needs(stops: list[str], parts: list[str]) -> None:
    matcher, given_out, fed = StopMatcher(stops), "", ""
    for part in parts:
        given_out += matcher.feed(part)
        fed += part
        if matcher.found is not None:
            return
        held = fed[len(given_out) :]
        assert not held or any(stop.startswith(held) for stop in stops)
