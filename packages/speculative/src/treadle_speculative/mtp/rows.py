"""What an MTP drafter knows of a row: which positions its head has seen, and which it will."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from treadle_core.plan import RowSetup


class Piece(NamedTuple):
    """Hidden states of positions ``[start, stop)`` of a row, somewhere in an array.

    Attributes:
        start: The first position.
        stop: The position behind the last.
        hidden: ``[rows, width, hidden]``.
        lane: The row's place in it.
        offset: Where ``start`` stands in it.
    """

    start: int
    stop: int
    hidden: mx.array
    lane: int
    offset: int

    def cut(self, start: int, stop: int) -> "Piece":
        """The part of it within ``[start, stop)``."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return Piece(start, stop, self.hidden, self.lane, self.offset + start - self.start)

    @property
    def num_bytes(self) -> int:
        """Of its own hidden states."""
        return (self.stop - self.start) * self.hidden.shape[-1] * self.hidden.dtype.size


class HeadRow:
    """A row as the head has it.

    By position the head has seen ``[origin, seen)`` and ``[seen, heard)`` waits for it. Position i is
    of use when the row has token ``i + ahead``. What the head has not seen at all, because the row's
    state there came from a store, it does without: what it sees begins at ``origin``.

    Args:
        setup: What the row brought along, and its tokens.
        ahead: How far behind a position the token stands that the head is given with it: 1 for the
            first of several heads, one more for each behind it.

    Attributes:
        setup: See above.
        ahead: See above.
        origin: The first position that the head has seen or will see.
        seen: The position behind the last that is in the head's slot.
        barred: Whether it gets no drafts any more, because there is no room for it.
        tip: What the head made of the last position in its slot, ``[hidden]``; None if that was not
            kept.
    """

    def __init__(self, setup: RowSetup, ahead: int = 1) -> None:
        self.setup = setup
        self.ahead = ahead
        self.origin = 0
        self.seen = 0
        self.barred = False
        self.tip: mx.array | None = None
        self._waiting: deque[Piece] = deque()

    @property
    def total(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.setup.prompt) + len(self.setup.output)

    @property
    def length(self) -> int:
        """Positions in the head's slot."""
        return self.seen - self.origin

    @property
    def heard(self) -> int:
        """The position behind the last whose hidden state is there."""
        return self._waiting[-1].stop if self._waiting else self.seen

    @property
    def due(self) -> int:
        """Positions that wait and whose token is known."""
        return max(0, min(self.heard, self.total - self.ahead) - self.seen)

    @property
    def is_ready(self) -> bool:
        """Whether the head, when it has seen what is due, stands where the row's tokens end."""
        return self.seen + self.due == self.total - 1 and (self.due > 0 or self.tip is not None)

    @property
    def waiting_bytes(self) -> int:
        """Of the hidden states that wait."""
        return sum(piece.num_bytes for piece in self._waiting)

    def hear(self, piece: Piece) -> None:
        """Hidden states arrive. They replace what was heard of the same positions, or of later ones.

        Those were of a draft that was not kept, or of a step that failed.
        """
        if self.barred:
            return
        while self._waiting and self._waiting[-1].stop > piece.start:
            last = self._waiting.pop()
            if last.start < piece.start:
                self._waiting.append(last.cut(last.start, piece.start))
        if piece.start < self.seen:
            self.seen = max(piece.start, self.origin)
            self.tip = None
        if piece.start != self.heard:
            # There is a gap, or nothing before.
            self.begin(piece.start)
        self._waiting.append(piece)

    def begin(self, origin: int) -> None:
        """Begin anew."""
        self._waiting.clear()
        self.origin = self.seen = origin
        self.tip = None

    def take(self, num: int) -> list[Piece]:
        """The first ``num`` positions that wait; they count as seen."""
        taken: list[Piece] = []
        stop = self.seen + num
        while self._waiting and self.seen < stop:
            piece = self._waiting.popleft()
            taken.append(piece.cut(self.seen, stop))
            if piece.stop > stop:
                self._waiting.appendleft(piece.cut(stop, piece.stop))
            self.seen = taken[-1].stop
        return taken

    def waiting(self) -> list[Piece]:
        """What waits; it goes on waiting."""
        return list(self._waiting)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens ``[start, stop)`` of prompt and answer."""
        prompt, output = self.setup.prompt, self.setup.output
        length = len(prompt)
        behind: Sequence[int] = output[max(0, start - length) : max(0, stop - length)]
        return [*prompt[start:stop], *behind]

    def bar(self) -> None:
        """Give it up."""
        self.barred = True
        self.begin(0)
