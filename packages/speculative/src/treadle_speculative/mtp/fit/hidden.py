"""What the frozen model makes of sequences: its hidden states, and its choice behind each token."""

from typing import Any

import mlx.core as mx
from msgspec import Struct

from treadle_core.mlx_runtime.split import SplitModel


class Seen(Struct, frozen=True):
    """A sequence as the model sees it.

    Attributes:
        hidden: ``[1, L, hidden]``.
        choices: ``[1, L]``, the token that it would choose behind each.
    """

    hidden: mx.array
    choices: mx.array

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.hidden.nbytes + self.choices.nbytes


class HiddenStates:
    """Gives what the model makes of a sequence, and keeps as many as there is room for.

    Each sequence is run by itself, so that what was kept is bit for bit what would be computed.

    Args:
        base: The model.
        most_bytes: Room for what is kept.
    """

    def __init__(self, base: SplitModel, most_bytes: int) -> None:
        self._base = base
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._kept: dict[tuple[int, ...], Seen] = {}

    @property
    def held_bytes(self) -> int:
        """What is kept."""
        return self._held_bytes

    def of(self, sequence: tuple[int, ...]) -> Seen:
        """What the model makes of a sequence, evaluated."""
        kept = self._kept.get(sequence)
        if kept is not None:
            return kept
        caches: list[Any] = self._base.new_cache()
        hidden = self._base.hidden(mx.array([sequence]), caches)
        seen = Seen(hidden, mx.argmax(self._base.logits(hidden), axis=-1))
        mx.eval(seen.hidden, seen.choices)
        if self._held_bytes + seen.nbytes <= self._most_bytes:
            self._held_bytes += seen.nbytes
            self._kept[sequence] = seen
        return seen
