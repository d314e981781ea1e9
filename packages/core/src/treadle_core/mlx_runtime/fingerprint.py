"""A model's identity, from what it computes with and not from its name."""

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from hashlib import blake2b
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

MULTIPLIER = 2654435761
"""An odd number, so that no bit of an element is lost in a product modulo 2**32."""

PIECE = 2**22


def fingerprint(model: nn.Module, config: Mapping[str, Any] | None = None) -> str:
    """Digest of a checkpoint's config, its modules' settings, and every bit of its weights.

    Keys of stored state are token ids, so the tokenizer has no part in it.

    Each weight counts with two sums modulo 2**32 over all of its 32-bit words, one of them
    weighted by position: that notices any accidental difference at the speed of memory, where a
    cryptographic hash of many gigabytes would delay the start by half a minute.
    """
    digest = blake2b(digest_size=32, person=b"treadle.model.1")
    digest.update(json.dumps(config or {}, sort_keys=True, default=repr).encode())
    for name, module in sorted(model.named_modules(), key=lambda item: item[0]):
        digest.update(f"{name} {_settings(module)};".encode())
    weights = cast(list[tuple[str, Any]], tree_flatten(model.parameters()))
    for name, weight in sorted(weights, key=lambda item: item[0]):
        if isinstance(weight, mx.array):
            digest.update(f"{name} {weight.dtype} {weight.shape} {_sums(weight)};".encode())
    return digest.hexdigest()


def _settings(module: nn.Module) -> str:
    """A module's class, and its numbers and words: a LoRA scale, the base of a rotation."""
    kind, values = type(module), vars(module)
    plain = {
        name: value
        for name, value in values.items()
        if name[0] != "_" and (isinstance(value, bool | int | float | str) or is_dataclass(value))
    }
    return f"{kind.__module__}.{kind.__qualname__} {sorted(plain.items())!r}"


def _sums(weight: mx.array) -> list[int]:
    """Plain and weighted sum of a weight's words, piece by piece to bound the memory."""
    words = _words(weight)
    total = weighted = 0
    for start in range(0, words.size, PIECE):
        piece = words[start : start + PIECE]
        place = mx.arange(start, start + piece.size, dtype=mx.uint32) * MULTIPLIER + 1
        mixed = piece ^ (piece >> 15)
        sums = mx.stack([mx.sum(piece), mx.sum(mixed * (place | 1))])
        first, second = cast(list[int], sums.tolist())
        total, weighted = (total + first) % 2**32, (weighted + second) % 2**32
    return [total, weighted]


def _words(weight: mx.array) -> mx.array:
    """The bits of a weight as 32-bit words."""
    flat = mx.flatten(weight)
    if flat.dtype == mx.bool_:
        return flat.astype(mx.uint32)
    if flat.dtype.size == 1:
        return flat.view(mx.uint8).astype(mx.uint32)
    if flat.dtype.size == 2:
        return flat.view(mx.uint16).astype(mx.uint32)
    return flat.view(mx.uint32)
