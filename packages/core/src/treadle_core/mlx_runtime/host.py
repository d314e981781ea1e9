"""Between the device and host memory: arrays, and a model's own caches, bit for bit."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from treadle_core.prefix import HostArray


def to_host(array: mx.array) -> HostArray:
    """An evaluated array's values in host memory, without a copy where memory is shared."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def to_device(array: HostArray) -> mx.array:
    """A copy of what :func:`to_host` gave. No layer keeps 16-bit integers, so they are bfloat16."""
    copy = mx.array(array)
    return copy.view(mx.bfloat16) if copy.dtype == mx.uint16 else copy


def check_tokens(arrays: Sequence[mx.array]) -> None:
    """Refuse keys and values that are not finite: nobody should go on from them.

    Raises:
        ValueError: Some are not.
    """
    floats = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
    if not mx.all(mx.stack([mx.all(mx.isfinite(a)) for a in floats] or [mx.array(True)])).item():
        raise ValueError("keys or values of a row are not finite")


def check_state(arrays: Sequence[mx.array]) -> None:
    """Refuse state that is not a number; infinite values may be a model's own.

    Raises:
        ValueError: Some is not.
    """
    floats = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
    if mx.any(mx.stack([mx.any(mx.isnan(a)) for a in floats] or [mx.array(False)])).item():
        raise ValueError("the state of a row is not a number")


def pack_caches(caches: Sequence[Any]) -> list[HostArray]:
    """All that a model's own caches hold: a description of their states, then the arrays in it."""
    arrays: list[mx.array] = []
    tree = [_without_arrays(cache.state, arrays) for cache in caches]
    mx.eval(arrays)
    check_state(arrays)
    description = np.frombuffer(msgspec.msgpack.encode(tree), dtype=np.uint8)
    return [description, *(np.array(to_host(array)) for array in arrays)]


def unpack_caches(caches: Sequence[Any], packed: Sequence[HostArray]) -> None:
    """Fill fresh caches of the same model with what :func:`pack_caches` gave."""
    arrays = [to_device(array) for array in packed[1:]]
    tree = msgspec.msgpack.decode(packed[0].tobytes())
    for cache, state in zip(caches, tree, strict=True):
        cache.state = _with_arrays(state, arrays)
    mx.eval(arrays)


def _without_arrays(node: Any, arrays: list[mx.array]) -> Any:
    """``node`` as plain data: an array becomes its place in ``arrays``, under a key of its own."""
    if isinstance(node, mx.array):
        arrays.append(node)
        return {"array": len(arrays) - 1}
    if isinstance(node, list | tuple):
        kind = "list" if isinstance(node, list) else "tuple"
        return {kind: [_without_arrays(item, arrays) for item in node]}
    return {"value": node}


def _with_arrays(node: dict[str, Any], arrays: list[mx.array]) -> Any:
    ((kind, value),) = node.items()
    if kind == "array":
        return arrays[value]
    if kind == "value":
        return value
    items = [_with_arrays(item, arrays) for item in value]
    return items if kind == "list" else tuple(items)
