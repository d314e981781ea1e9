"""Text from tokens, piece by piece: never half a character, never past a stop string. Sans-IO."""

from collections.abc import Callable, Sequence

CONTEXT_TOKENS = 6
LONGEST_CHARACTER = 8
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns one answer's tokens into text that never changes once it was given out.

    A token's text may depend on its neighbours (leading spaces, characters made of several
    tokens), so a short stretch of tokens is decoded with and without the new one, and text is
    given out when it ends in a whole character. Joined pieces equal one decode of everything.

    Args:
        decode: Text of a stretch of tokens.
        prompt: The prompt's tokens; the last few are context for the first piece.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens: list[int] = list(prompt[-CONTEXT_TOKENS:])
        self._given = len(self._tokens)
        self._unsure = False

    def add(self, token: int) -> str:
        """Take a token in; return the text that became certain."""
        self._tokens.append(token)
        piece = self._pending()
        unsure = piece.endswith(REPLACEMENT)
        if (unsure or not piece) and len(self._tokens) - self._given < LONGEST_CHARACTER:
            return ""
        # A model may emit bytes that never make a character: do not wait for ever. Only the last
        # replacement may still become one.
        self._advance(unsure=unsure)
        return piece[:-1] if self._unsure else piece

    def finish(self) -> str:
        """The rest, half a character included."""
        piece = self._pending()
        self._advance(unsure=False)
        return piece

    def _pending(self) -> str:
        before = self._decode(self._tokens[: self._given])
        whole = self._decode(self._tokens)
        if self._unsure:
            before = before.removesuffix(REPLACEMENT)
        # The context's own end may be half a character that the new tokens complete.
        return whole[_common_length(before, whole) :]

    def _advance(self, *, unsure: bool) -> None:
        """All tokens are given out, but for the last replacement if that is ``unsure``."""
        drop = max(0, len(self._tokens) - CONTEXT_TOKENS)
        del self._tokens[:drop]
        self._given = len(self._tokens)
        self._unsure = unsure and self._decode(self._tokens).endswith(REPLACEMENT)


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces, and holds back what may be one.

    Args:
        stops: The stop strings, none empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Take text in; return what is certainly before any stop string.

        After a match (:attr:`found` is set) nothing more comes out.
        """
        if self.found is not None:
            return ""
        self._held += text
        match = self._first_match()
        if match is not None:
            position, self.found = match
            out, self._held = self._held[:position], ""
            return out
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """The held-back text: no more will come, so it is no stop string."""
        out, self._held = self._held, ""
        return out

    def _first_match(self) -> tuple[int, str] | None:
        hits = [(self._held.find(stop), stop) for stop in self._stops]
        # The one that is complete first wins, however the text is split; of two, the longer one.
        return min(
            ((at, stop) for at, stop in hits if at >= 0),
            key=lambda hit: (hit[0] + len(hit[1]), hit[0]),
            default=None,
        )


def _common_length(left: str, right: str) -> int:
    """Number of characters with which both begin."""
    if right.startswith(left):
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``, short of all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
