"""How the state of a model lies in host memory: one piece per block, a few arrays per checkpoint.

A block of ``block_size`` tokens is one array of bytes, in which its token arrays follow each other:

    block: [ heads x block_size x dim of array 0 | ... of array 1 | ... ]

Freeing it gives its memory back. Whatever is stored is written once, and read-only from then on.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from treadle_core.prefix import HostArray, StateLayout, TokenArray, host_dtype

Block = NDArray[np.uint8]
"""The bytes of a block, read-only."""


class Codec(Protocol):
    """Another form of token arrays. It works token by token, so that cutting commutes with it."""

    @property
    def arrays(self) -> Sequence[TokenArray]:
        """What the coded form consists of."""
        ...

    def encode(self, arrays: Sequence[HostArray]) -> list[HostArray]:
        """The coded form of all token arrays."""
        ...

    def parts(self, index: int) -> Sequence[int]:
        """Which arrays of the coded form belong to one token array."""
        ...

    def decode(self, index: int, parts: Sequence[HostArray]) -> HostArray:
        """One token array, from its parts."""
        ...


class Checkpoint(Struct, frozen=True):
    """What goes on after a token count.

    Attributes:
        tail: The token arrays after the last full block; empty if there is nothing after it.
        state: What the other layers keep.
    """

    tail: tuple[HostArray, ...]
    state: tuple[HostArray, ...]

    @property
    def arrays(self) -> tuple[HostArray, ...]:
        """All of it, the tail first."""
        return (*self.tail, *self.state)

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays)


class BlockForm:
    """Blocks of one size and layout.

    Args:
        arrays: The token arrays of a row.
        block_size: Tokens per block.
        codec: The form in which blocks keep them; None keeps them as they are.
    """

    def __init__(
        self, arrays: Sequence[TokenArray], block_size: int, codec: Codec | None = None
    ) -> None:
        self._arrays = tuple(codec.arrays if codec else arrays)
        self._codec = codec
        self._block_size = block_size
        self._shapes = [(array.heads, block_size, array.dim) for array in self._arrays]
        self._dtypes = [host_dtype(array.dtype) for array in self._arrays]
        self._offsets = [0]
        for array in self._arrays:
            self._offsets.append(self._offsets[-1] + array.token_bytes * block_size)

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return self._offsets[-1]

    def encode(self, arrays: Sequence[HostArray]) -> Sequence[HostArray]:
        """Token arrays of a row in the form that :meth:`pack` takes."""
        return self._codec.encode(arrays) if self._codec else arrays

    def pack(self, arrays: Sequence[HostArray], start: int = 0) -> Block:
        """A block with the tokens ``[start, start + block_size)`` of encoded arrays.

        Raises:
            ValueError: The arrays do not fit.
        """
        if len(arrays) != len(self._arrays):
            raise ValueError(f"{len(arrays)} arrays instead of {len(self._arrays)}")
        block: Block = np.empty(self.num_bytes, np.uint8)
        for index, array in enumerate(arrays):
            part = array[:, start : start + self._block_size]
            if part.shape != self._shapes[index] or part.dtype != self._dtypes[index]:
                raise ValueError(f"array {index} is {part.dtype}{list(part.shape)}")
            self._view(block, index)[...] = part
        return as_read_only(block)

    def views(self, block: Block) -> tuple[HostArray, ...]:
        """The arrays of a block, as it keeps them, without a copy."""
        return tuple([self._view(block, index) for index in range(len(self._arrays))])

    def pieces(self, index: int, blocks: Sequence[Block]) -> list[HostArray]:
        """Arrays that make one token array of ``blocks`` when they are joined."""
        if self._codec is None or not blocks:
            return [self._view(block, index) for block in blocks]
        parts = [
            np.concatenate([self._view(block, part) for block in blocks], axis=1)
            for part in self._codec.parts(index)
        ]
        return [self._codec.decode(index, parts)]

    def _view(self, block: Block, index: int) -> HostArray:
        return np.ndarray(self._shapes[index], self._dtypes[index], block, self._offsets[index])


class Storage:
    """How all states of a model are kept.

    Args:
        layout: What a row consists of.
        block_size: Tokens per block.
        codec: The form of blocks that lose something; None where none do.
        head_blocks: How many blocks at the start of each chain are kept as they are anyway.
    """

    def __init__(
        self,
        layout: StateLayout,
        block_size: int,
        codec: Codec | None = None,
        head_blocks: int = 0,
    ) -> None:
        self.layout = layout
        self.block_size = block_size
        self.head_blocks = head_blocks if codec else 0
        self.head = BlockForm(layout.tokens, block_size)
        self.body = BlockForm(layout.tokens, block_size, codec) if codec else self.head

    def form(self, number: int) -> BlockForm:
        """The form of the block that is the ``number``-th of its chain, from 0."""
        return self.head if number < self.head_blocks else self.body

    def checkpoint_bytes(self, num_tokens: int, state_bytes: int) -> int:
        """Bytes of a checkpoint."""
        return num_tokens % self.block_size * self.layout.token_bytes + state_bytes

    def checkpoint_of(self, arrays: Sequence[HostArray], num_tokens: int) -> Checkpoint:
        """A checkpoint from its arrays.

        Raises:
            ValueError: They are none of this model's.
        """
        length = num_tokens % self.block_size
        num_tail = len(self.layout.tokens) if length else 0
        tail, state = arrays[:num_tail], arrays[num_tail:]
        expected = self.layout.tokens[:num_tail]
        if len(tail) != num_tail:
            raise ValueError(f"{len(tail)} arrays instead of {num_tail}")
        for array, kind in zip(tail, expected, strict=True):
            if array.shape != (kind.heads, length, kind.dim):
                raise ValueError(f"an array of {list(array.shape)} after the last block")
            if array.dtype != host_dtype(kind.dtype):
                raise ValueError(f"an array of {array.dtype} after the last block")
        return Checkpoint(tuple(map(as_owned, tail)), tuple(map(as_owned, state)))


class HeldRow:
    """A stored prefix. It keeps what it needs alive, whatever becomes of the store.

    Args:
        storage: How it is kept.
        num_tokens: Tokens that it covers.
        blocks: Its blocks; of the last one it may cover the first tokens only.
        checkpoint: What is after them; they are full then.
    """

    def __init__(
        self,
        storage: Storage,
        num_tokens: int,
        blocks: Sequence[Block],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._storage = storage
        self._num_tokens = num_tokens
        self._blocks = blocks
        self._checkpoint = checkpoint

    @property
    def num_tokens(self) -> int:
        """Tokens that it covers."""
        return self._num_tokens

    @property
    def blocks(self) -> Sequence[Block]:
        """Its blocks."""
        return self._blocks

    @property
    def checkpoint(self) -> Checkpoint | None:
        """What is after them."""
        return self._checkpoint

    def tokens(self, index: int) -> HostArray:
        """All tokens of one token array, in an array of its own."""
        head = self._storage.head_blocks
        pieces = self._storage.head.pieces(index, self._blocks[:head])
        pieces += self._storage.body.pieces(index, self._blocks[head:])
        if self._checkpoint is not None and self._checkpoint.tail:
            pieces.append(self._checkpoint.tail[index])
        beyond = len(self._blocks) * self._storage.block_size - self._num_tokens
        if beyond > 0:
            # The last piece reaches over the last block at least.
            pieces[-1] = pieces[-1][:, :-beyond]
        return np.concatenate(pieces, axis=1)

    def state(self) -> list[HostArray]:
        """What the layers that cannot be cut keep."""
        return list(self._checkpoint.state) if self._checkpoint else []


def as_read_only(array: HostArray) -> HostArray:
    """``array``, to which nobody writes from now on."""
    array.flags.writeable = False
    return array


def as_owned(array: HostArray) -> HostArray:
    """``array`` read-only, contiguous and with its own memory, copied where it is not."""
    if array.base is not None or not array.flags.c_contiguous:
        array = np.array(array, order="C")
    return as_read_only(array)
