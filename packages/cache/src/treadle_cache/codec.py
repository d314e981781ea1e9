"""Token arrays in 8 or 4 bits: mlx's affine quantisation along each head's dimension.

A token's numbers are quantised by themselves, so that blocks can be cut out of a longer array. What
comes back differs from what was stored; the format's name is in every digest, so that exact and
quantised states are never taken for each other.

Which blocks are quantised depends on their position alone: those that begin before
``min_quantize_tokens`` never are, all others always. So a block has the same contents whether a
short or a long prompt stored it first. What follows the last full block is kept as it is, and so is
the state of layers that cannot be cut.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
# mlx is typed in part.

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from treadle_core.errors import Unsupported
from treadle_core.prefix import HostArray, TokenArray

FLOATS = ("bfloat16", "float16", "float32")


class Quantizer:
    """Token arrays as packed integers, scales and biases.

    Args:
        arrays: The token arrays of a row.
        bits: Bits of a number.
        group_size: Numbers that share a scale.

    Raises:
        Unsupported: An array cannot be quantised.
    """

    def __init__(self, arrays: Sequence[TokenArray], bits: int, group_size: int) -> None:
        _check(arrays, bits, group_size)
        self._bits = bits
        self._group_size = group_size
        self._dtypes = [array.dtype for array in arrays]
        self._arrays = [part for array in arrays for part in self._parts_of(array)]

    @property
    def arrays(self) -> Sequence[TokenArray]:
        """Packed integers, scales and biases of each token array in turn."""
        return self._arrays

    def encode(self, arrays: Sequence[HostArray]) -> list[HostArray]:
        """The quantised form of all token arrays."""
        encoded: list[HostArray] = []
        for array, dtype in zip(arrays, self._dtypes, strict=True):
            packed, scales, biases = mx.quantize(
                _to_device(array, dtype), group_size=self._group_size, bits=self._bits
            )
            encoded += [np.array(packed), _to_host(scales), _to_host(biases)]
        return encoded

    def parts(self, index: int) -> Sequence[int]:
        """Where the packed integers, scales and biases of one token array are."""
        return range(3 * index, 3 * index + 3)

    def decode(self, index: int, parts: Sequence[HostArray]) -> HostArray:
        """One token array, about as it was."""
        packed, scales, biases = parts
        dtype = self._dtypes[index]
        array = mx.dequantize(
            mx.array(packed),
            _to_device(scales, dtype),
            _to_device(biases, dtype),
            group_size=self._group_size,
            bits=self._bits,
        )
        return _to_host(array)

    def _parts_of(self, array: TokenArray) -> list[TokenArray]:
        groups = TokenArray(array.heads, array.dim // self._group_size, array.dtype)
        words = TokenArray(array.heads, array.dim * self._bits // 32, "uint32")
        return [words, groups, groups]


def _check(arrays: Sequence[TokenArray], bits: int, group_size: int) -> None:
    if not arrays:
        raise Unsupported(
            f"kv_storage_bits={bits}: the model keeps nothing per token that could be quantised"
        )
    for array in arrays:
        if array.dtype not in FLOATS:
            raise Unsupported(f"kv_storage_bits={bits}: the model's KV is {array.dtype} already")
        if array.dim % group_size:
            raise Unsupported(
                f"kv_storage_bits={bits}: the head dimension {array.dim} is not a multiple of "
                f"group_size={group_size}"
            )


def _to_device(array: HostArray, dtype: str) -> mx.array:
    device = mx.array(array)
    return device.view(mx.bfloat16) if dtype == "bfloat16" else device


def _to_host(array: mx.array) -> HostArray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
