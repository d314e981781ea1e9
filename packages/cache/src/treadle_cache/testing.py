"""Helpers for tests of prefix stores: rows whose contents follow from their tokens."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from treadle_core.prefix import HostArray, PrefixKey, StateLayout, TokenArray, host_dtype

WINDOW = 4
"""Tokens that the window of a :class:`TokenRow` keeps."""

STATE_HEADS, STATE_DIM = 2, 3


def layout_of(*dtypes: str, has_state: bool = False, heads: int = 2, dim: int = 4) -> StateLayout:
    """A layout with one token array per dtype."""
    return StateLayout(
        tokens=tuple(TokenArray(heads, dim, dtype) for dtype in dtypes),
        has_state=has_state,
        format=f"{','.join(dtypes)}/{heads}x{dim}{'+state' if has_state else ''}",
    )


class TokenRow:
    """A live row whose state is a function of the key's tokens, media and salt.

    What it gives for a token depends on all tokens up to it, as in a model, and its numbers are
    exact in every dtype.

    Args:
        key: Its tokens.
        layout: What it consists of.
        failure: Raised by every reading; None reads well.

    Attributes:
        reads: Ranges of tokens that were read, in order.
        num_state_reads: How often the state was read.
    """

    def __init__(
        self, key: PrefixKey, layout: StateLayout, failure: Exception | None = None
    ) -> None:
        self._layout = layout
        self._failure = failure
        self._seeds = _seeds(key)
        self.reads: list[tuple[int, int]] = []
        self.num_state_reads = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that are in it."""
        return len(self._seeds)

    @property
    def state_bytes(self) -> int:
        """Bytes of :meth:`state`."""
        return sum(array.nbytes for array in self._state())

    def tokens(self, start: int, stop: int) -> list[HostArray]:
        """The token arrays of ``[start, stop)``."""
        self.reads.append((start, stop))
        if self._failure is not None:
            raise self._failure
        return [
            _numbers(self._seeds[start:stop], index, array)
            for index, array in enumerate(self._layout.tokens)
        ]

    def state(self) -> list[HostArray]:
        """A window over the last tokens and a recurrent state, where the layout has any."""
        self.num_state_reads += 1
        if self._failure is not None:
            raise self._failure
        return self._state()

    def _state(self) -> list[HostArray]:
        if not self._layout.has_state:
            return []
        window = TokenArray(STATE_HEADS, STATE_DIM, "bfloat16")
        recurrent = TokenArray(STATE_HEADS, STATE_DIM, "float32")
        return [
            _numbers(self._seeds[-WINDOW:], 1000, window),
            _numbers(self._seeds[-1:], 1001, recurrent),
        ]


def _seeds(key: PrefixKey) -> list[int]:
    """A number per position that stands for everything up to it."""
    parent = blake2b(key.salt.encode(), digest_size=8).digest()
    seeds: list[int] = []
    for position, token in enumerate(key.tokens):
        seen = blake2b(parent + token.to_bytes(8, "little"), digest_size=8)
        for span in sorted(key.media):
            if span.start <= position < span.end:
                seen.update(span.digest + (position - span.start).to_bytes(8, "little"))
        parent = seen.digest()
        seeds.append(int.from_bytes(parent[:4], "little"))
    return seeds


def _numbers(seeds: Sequence[int], index: int, array: TokenArray) -> HostArray:
    """``[heads, len(seeds), dim]`` of small multiples of 1/16."""
    seed = np.asarray(seeds, np.uint64)[None, :, None]
    head = np.arange(array.heads, dtype=np.uint64)[:, None, None]
    column = np.arange(array.dim, dtype=np.uint64)[None, None, :]
    mixed = (seed + head * 977 + column * 131 + (index + 1) * 7919) * 2654435761
    values = ((mixed >> 7) % 255).astype(np.float32) / 16 - 8
    if array.dtype == "bfloat16":
        return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))
    return np.ascontiguousarray(values.astype(host_dtype(array.dtype)))
