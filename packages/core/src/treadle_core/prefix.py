"""What a prefix store and the engine tell each other: stored KV as plain data.

One convention holds everywhere: a stored state covers exactly the tokens of its key.
"""

from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

HostArray = NDArray[Any]
"""A C-contiguous array in host memory that nobody writes to. bfloat16 comes as its bits, uint16."""

MissReason = Literal[
    "empty", "cleared", "too_short", "no_block", "no_checkpoint", "no_room", "refused", "damaged"
]
"""Why a lookup found nothing.

``empty``: nothing was ever stored, or all of it was evicted. ``cleared``: nothing was stored since
the last clear. ``too_short``: fewer tokens may be reused than the shortest match has.
``no_block``: nothing that is there begins with as many of the same tokens. ``no_checkpoint``:
blocks are, but no checkpoint among them. ``no_room``: what a slower tier has is larger than all
that may be read at a time. ``refused``: the request asked not to reuse anything. ``damaged``: what was found could not be read back.
"""


class MediaSpan(Struct, frozen=True, order=True):
    """A media item in place of the tokens ``[start, start + length)``.

    Attributes:
        start: Its first position in the prompt.
        length: Its number of positions, at least 1.
        digest: Digest of what the model sees there.
    """

    start: int
    length: int
    digest: bytes

    def __post_init__(self) -> None:
        """Refuse a span that covers nothing.

        Raises:
            ValueError: ``start`` is negative or ``length`` below 1.
        """
        if self.start < 0 or self.length < 1:
            raise ValueError(f"a media span of {self.length} positions at {self.start}")

    @property
    def end(self) -> int:
        """The position after its last."""
        return self.start + self.length


class PrefixKey(Struct, frozen=True, kw_only=True):
    """What a state depends on, besides the model.

    Attributes:
        tokens: Token ids.
        salt: Keeps a tenant's states to itself; empty where all share.
        media: What stands at placeholder positions, in any order.
    """

    tokens: tuple[int, ...]
    salt: str = ""
    media: tuple[MediaSpan, ...] = ()


class Prefix(Struct, frozen=True, kw_only=True):
    """The longest usable prefix of a key.

    Attributes:
        num_tokens: Tokens it covers; 0 is a miss.
        ticket: Number under which it is held until it is released; None for a miss.
        ready: Whether it can be loaded now; otherwise it is on its way from a slower tier.
        miss: Why it is empty, if it is.
    """

    num_tokens: int = 0
    ticket: int | None = None
    ready: bool = True
    miss: MissReason | None = None


class TokenArray(Struct, frozen=True):
    """One array of a row that keeps something of every token: ``[heads, tokens, dim]``."""

    heads: int
    dim: int
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return host_dtype(self.dtype).itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.heads * self.dim * self.itemsize


class StateLayout(Struct, frozen=True, kw_only=True):
    """What the state of a row consists of.

    Attributes:
        tokens: Arrays that can be cut at any token, in the order of the model's layers.
        has_state: Whether other layers (windowed, recurrent) keep state that is whole only at the
            token count at which it was read.
        format: Identifies how the state is kept: kinds, shapes and dtypes of all layers.
    """

    tokens: tuple[TokenArray, ...]
    has_state: bool
    format: str

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all arrays that can be cut."""
        return sum(array.token_bytes for array in self.tokens)


class PrefixStats(Struct, frozen=True, kw_only=True):
    """Counters of a store since it was made, and what is there now.

    Attributes:
        hits: Lookups that found something.
        misses: Lookups that found nothing, by reason.
        matched_tokens: Tokens of all hits.
        num_entries: Blocks and checkpoints that can be found.
        used_bytes: Bytes of all that is held, bookkeeping included.
        capacity_bytes: Most bytes.
        evicted: Entries given up for room.
        details: Further figures by name, as far as the store has any.
    """

    hits: int = 0
    misses: dict[MissReason, int] = {}
    matched_tokens: int = 0
    num_entries: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    evicted: int = 0
    details: dict[str, int | float] = {}


def host_dtype(name: str) -> np.dtype[Any]:
    """The dtype in which host arrays keep a device dtype: itself, or its bits."""
    return np.dtype("uint16" if name == "bfloat16" else name)
