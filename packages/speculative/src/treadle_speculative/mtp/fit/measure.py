"""What a head's guesses are worth, measured on text that it has not learned from."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from msgspec import Struct

from treadle_speculative.mtp.fit.hidden import HiddenStates
from treadle_speculative.mtp.fit.passes import chain, num_guesses
from treadle_speculative.mtp.head import MtpHead

MEASURED_DEPTH = 4


class Answer(Struct, frozen=True):
    """A text whose tokens from ``start`` on are the model's own choice, each after those before."""

    tokens: tuple[int, ...]
    start: int


class Acceptance(Struct, frozen=True, kw_only=True):
    """How many guesses the model accepts.

    Attributes:
        by_position: For each place of a chain, the share of guesses there that the model accepts
            if it accepted all before.
        num_guesses: How many there were at the first place.
        tokens_per_forward: Where one forward verifies a chain of so many guesses.
    """

    by_position: tuple[float, ...]
    num_guesses: int
    tokens_per_forward: tuple[float, ...]


def on_answers(head: MtpHead, hidden: HiddenStates, answers: Sequence[Answer]) -> Acceptance:
    """Acceptance where a greedy answer is continued; the answers are the model's greedy ones."""
    found = [hits_of(head, hidden, answer.tokens, answer.start) for answer in answers]
    return Acceptance(
        by_position=by_position(found),
        num_guesses=sum(len(hits[0]) for hits in found),
        tokens_per_forward=tuple(
            round(walk(found, depth), 3) for depth in range(1, MEASURED_DEPTH + 1)
        ),
    )


def agreement(head: MtpHead, hidden: HiddenStates, sequences: Sequence[tuple[int, ...]]) -> float:
    """Share of first guesses that are the model's own choice, all along given texts."""
    same = total = 0
    for sequence in sequences:
        seen = hidden.of(sequence)
        states = chain(head, mx.array([sequence]), seen.hidden, 1)[0]
        count = num_guesses(len(sequence), 0)
        guessed = mx.argmax(head.logits(states[:, :count]), axis=-1)
        right: Any = mx.sum(guessed == seen.choices[:, 1 : 1 + count]).item()
        same += right
        total += count
    return round(same / max(1, total), 4)


def hits_of(
    head: MtpHead, hidden: HiddenStates, tokens: tuple[int, ...], start: int
) -> list[list[bool]]:
    """For each place of a chain, whether the guess is right that begins at each token of an answer.

    The first chain guesses the second token of the answer, when the first is known.
    """
    states = chain(head, mx.array([tokens]), hidden.of(tokens).hidden, MEASURED_DEPTH)
    best: Any = [mx.argmax(head.logits(state[0]), axis=-1) for state in states]
    mx.eval(best)
    return [
        [
            guess == tokens[i + 2 + step]
            for i, guess in enumerate(found.tolist()[: num_guesses(len(tokens), step)])
            if i >= start - 1
        ]
        for step, found in enumerate(best)
    ]


def by_position(found: Sequence[list[list[bool]]]) -> tuple[float, ...]:
    """For each place of a chain, how many are right of those that follow right ones only."""
    right, asked = [0] * MEASURED_DEPTH, [0] * MEASURED_DEPTH
    for hits in found:
        for start in range(len(hits[0])):
            for step in range(MEASURED_DEPTH):
                if start >= len(hits[step]):
                    break
                asked[step] += 1
                if not hits[step][start]:
                    break
                right[step] += 1
    return tuple(round(r / a, 4) if a else 0.0 for r, a in zip(right, asked, strict=True))


def walk(found: Sequence[list[list[bool]]], depth: int) -> float:
    """Tokens per forward where each forward verifies a chain of ``depth`` guesses."""
    tokens = forwards = 0
    for hits in found:
        place = 0
        while place < len(hits[0]):
            accepted = 0
            while accepted < depth and place < len(hits[accepted]) and hits[accepted][place]:
                accepted += 1
            tokens += accepted + 1
            forwards += 1
            place += accepted + 1
    return tokens / max(1, forwards)
