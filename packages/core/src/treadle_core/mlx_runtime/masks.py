"""Which columns of a slot or a ring a query may see."""

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask


class Positions:
    """Where the tokens of one forward over a group stand.

    Args:
        starts: Tokens that each row holds already, ``[rows]``.
        num_tokens: New tokens of each row, N.

    Attributes:
        offset: ``starts`` on the device.
        query: Positions of the new tokens, ``[rows, N]``.
    """

    def __init__(self, starts: list[int], num_tokens: int = 1) -> None:
        self.starts = starts
        self.num_tokens = num_tokens
        self.longest = max(starts) + num_tokens
        self.offset = mx.array(starts, dtype=mx.int32)
        self.query = self.offset[:, None] + mx.arange(num_tokens, dtype=mx.int32)[None]

    def fresh_offset(self) -> mx.array:
        """The offsets as an array of its own: models may change what they are given in place."""
        return self.offset + 0


def slot_mask(positions: Positions, width: int, window: int | None) -> mx.array:
    """Mask ``[rows, 1, N, width]`` over left-aligned columns: column = position."""
    column = mx.arange(width, dtype=mx.int32)[None, None, None]
    query = positions.query[:, None, :, None]
    mask = column <= query
    if window is not None:
        mask = mask & (column > query - window)
    return mask


def ring_mask(positions: Positions, columns: int, ring: int, *, size: int, keep: int) -> mx.array:
    """Mask ``[rows, 1, N, columns]`` over a ring, from the position that each column holds.

    Args:
        positions: The new tokens; they are in the ring already.
        columns: Leading columns to look at.
        ring: Columns of the whole ring.
        size: Tokens that a query sees, itself and the kept ones included.
        keep: First tokens that are never overwritten.
    """
    column = mx.arange(columns, dtype=mx.int32)[None, None, None]
    query = positions.query[:, None, :, None]
    last = query[:, :, -1:]
    cycle = ring - keep
    held = last - mx.remainder(last - column, cycle)
    if keep == 0:
        return (held >= 0) & (held <= query) & (held > query - size)
    newest = keep + (last - keep) - mx.remainder((last - keep) - (column - keep), cycle)
    held = mx.where(column < keep, column, newest)
    inside = (column < keep) | ((held >= keep) & (held > query - (size - keep)))
    return inside & (held <= query)


def row_mask(
    num_tokens: int, offset: int, window: int | None, return_array: bool
) -> mx.array | str | None:
    """The mask of one row whose columns are in order, as mlx-lm's own caches answer it."""
    if window is not None and offset + num_tokens > window:
        return create_causal_mask(num_tokens, offset, window_size=window)
    if return_array and num_tokens > 1:
        return create_causal_mask(num_tokens, offset)
    return None if num_tokens == 1 else "causal"


def kept_mask(start: int, num_tokens: int, held: list[int], *, size: int, keep: int) -> mx.array:
    """Mask ``[N, columns]`` of one row whose columns hold the positions ``held``."""
    query = (start + mx.arange(num_tokens, dtype=mx.int32))[:, None]
    column = mx.array(held, dtype=mx.int32)[None]
    inside = (column < keep) | (column > query - (size - keep))
    return inside & (column <= query)
