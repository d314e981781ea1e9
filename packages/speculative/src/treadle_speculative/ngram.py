"""Prompt lookup: what followed the last few tokens when they stood in the row before.

No weights and no model: good where answers repeat their prompts (edits, extraction, code) or
themselves. The idea is prompt lookup decoding (Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding); here an index replaces the search.
"""

from collections.abc import Sequence

from msgspec import Struct

from treadle_core.drafting import NO_PROPOSAL, DraftRoom, Proposal, Verified
from treadle_core.plan import Key, RowSetup
from treadle_core.request import check_int

TOKEN_BITS = 32
ENTRY_BYTES = 192
"""What an index entry takes, in Python objects; a bound, measured in the tests."""

MOST_N = 16


class NgramConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the n-gram drafter.

    Attributes:
        min_n: Fewest last tokens that must have stood in the row before.
        max_n: Most that are looked for; the longest that is found counts.
        max_indexed_tokens: Newest tokens of a row that can be found; older ones are forgotten.
        catch_up_tokens: Most tokens of a row that one proposal indexes, so that a long prompt does
            not hold up a step. Until the index has caught up, only older text is found.
    """

    min_n: int = 2
    max_n: int = 4
    max_indexed_tokens: int = 65_536
    catch_up_tokens: int = 4_096

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        check_int("max_n", self.max_n, 1, MOST_N)
        check_int("min_n", self.min_n, 1, self.max_n)
        check_int("max_indexed_tokens", self.max_indexed_tokens, 1)
        check_int("catch_up_tokens", self.catch_up_tokens, 1)


class NgramDrafter:
    """Proposes what followed the newest earlier occurrence of a row's longest known suffix.

    A row's tokens are read from its views and never copied. A token is indexed once, in a time
    that does not depend on the row's length; a proposal takes ``max_n`` look-ups and its own length.
    Rejected drafts are in no view, so there is nothing to take back.

    Args:
        config: Options.
    """

    def __init__(self, config: NgramConfig | None = None) -> None:
        self._config = config or NgramConfig()
        self._rows: dict[Key, NgramIndex] = {}

    @property
    def name(self) -> str:
        """What it is called in counters and status."""
        return "ngram"

    @property
    def held_bytes(self) -> int:
        """Memory of all indexes, from above."""
        return ENTRY_BYTES * sum(index.num_entries for index in self._rows.values())

    def join(self, setup: RowSetup) -> None:
        """A row begins to run; its tokens are indexed when it first asks."""
        self._rows[setup.key] = NgramIndex(setup.prompt, setup.output, self._config)

    def leave(self, key: Key) -> None:
        """Forget a row."""
        self._rows.pop(key, None)

    def propose(self, rooms: Sequence[DraftRoom]) -> list[Proposal]:
        """A guess for each row, where its last tokens stood before."""
        return [self._propose(self._rows[room.key], room.most) for room in rooms]

    def observe(self, verified: Sequence[Verified]) -> None:
        """Nothing: what was accepted is in the rows' views."""

    def reset(self) -> None:
        """Forget every row."""
        self._rows.clear()

    def _propose(self, index: "NgramIndex", most: int) -> Proposal:
        if most == 0:
            return NO_PROPOSAL
        index.catch_up(self._config.catch_up_tokens)
        return Proposal(index.continuation(most))


class NgramIndex:
    """Where each n-gram of a row last stood, as the position of the token after it.

    ``[0, num_indexed)`` of the row's tokens are indexed as continuations. The row's end is not an
    occurrence of anything yet: nothing follows it.

    Args:
        prompt: The row's prompt.
        output: Its committed output, a live view.
        config: Options.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int], config: NgramConfig) -> None:
        self._prompt = prompt
        self._output = output
        self._window = config.max_indexed_tokens
        self._sizes = range(config.min_n, config.max_n + 1)
        self._masks = [(1 << TOKEN_BITS * n) - 1 for n in self._sizes]
        self._tables: list[dict[int, int]] = [{} for _ in self._sizes]
        # The tokens before num_indexed, the newest in the lowest bits, as many as max_n.
        self._recent = 0
        self.num_indexed = 0

    @property
    def num_entries(self) -> int:
        """N-grams of all sizes that can be found."""
        return sum(len(table) for table in self._tables)

    def catch_up(self, most: int) -> None:
        """Index tokens that were committed since, at most so many."""
        stop = min(len(self._prompt) + len(self._output), self.num_indexed + most)
        for position in range(self.num_indexed, stop):
            self._add(position)
            if position >= self._window:
                self._forget(position - self._window)
        self.num_indexed = stop

    def continuation(self, most: int) -> tuple[int, ...]:
        """What followed the longest suffix that stood before; at most ``most`` tokens."""
        start = self._find()
        if start is None:
            return ()
        length = len(self._prompt) + len(self._output)
        found: list[int] = []
        for position in range(start, start + most):
            # A repetition that reaches the end goes on with itself, as in LZ77.
            inside = position < length
            found.append(self._token(position) if inside else found[position - length])
        return tuple(found)

    def _find(self) -> int | None:
        """The continuation of the longest suffix that has one."""
        length = len(self._prompt) + len(self._output)
        suffix = self._pack(max(0, length - self._sizes[-1]), length)
        entries = zip(self._masks, self._tables, strict=True)
        for mask, table in reversed(list(entries)):
            start = table.get(suffix & mask)
            if start is not None:
                return start
        return None

    def _add(self, position: int) -> None:
        """The token at ``position`` follows the n-grams that end before it."""
        for n, mask, table in zip(self._sizes, self._masks, self._tables, strict=True):
            if n <= position:
                table[self._recent & mask] = position
        self._recent = (self._recent << TOKEN_BITS | self._token(position)) & self._masks[-1]

    def _forget(self, position: int) -> None:
        """Drop the n-grams before ``position``, unless they stood somewhere since."""
        for n, table in zip(self._sizes, self._tables, strict=True):
            gram = self._pack(position - n, position) if n <= position else None
            if gram is not None and table.get(gram) == position:
                del table[gram]

    def _pack(self, start: int, stop: int) -> int:
        packed = 0
        for position in range(start, stop):
            packed = packed << TOKEN_BITS | self._token(position)
        return packed

    def _token(self, position: int) -> int:
        length = len(self._prompt)
        return self._prompt[position] if position < length else self._output[position - length]
