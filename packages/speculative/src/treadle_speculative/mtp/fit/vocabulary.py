"""Part of a model's output head: the logits of some tokens, at a fraction of the cost of all.

With a vocabulary of tens of thousands, nearly all of a small head's training would go into logits that
hardly matter. Each sequence is therefore learned from with a shortlist: its own tokens, those that the
model would choose along it, and others at random, which differ every time, so that no token is never looked
at (sampled softmax; Jean et al. 2015).
"""

import random
from typing import Any

import mlx.core as mx

from treadle_core.mlx_runtime.split import SplitModel


def rows_of(base: SplitModel, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
    """Weights ``[N, hidden]`` and biases of the output head for N tokens, in its own dtype."""
    module: Any = base.embedding if base.output is None else base.output
    weight = module.weight[tokens]
    if "scales" in module:
        packed_biases = module.biases[tokens] if "biases" in module else None
        weight = mx.dequantize(
            weight,
            module.scales[tokens],
            packed_biases,
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )
    return weight, module.bias[tokens] if "bias" in module else None


def shortlist(own: set[int], vocab_size: int, number: int, rng: random.Random) -> list[int]:
    """``own`` in order, with others at random until there are ``number``; all if there are not."""
    if vocab_size <= number:
        return list(range(vocab_size))
    chosen = set(own)
    while len(chosen) < number:
        chosen.add(rng.randrange(vocab_size))
    return sorted(chosen)
