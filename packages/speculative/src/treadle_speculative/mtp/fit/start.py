"""A new head to fit: it begins as the model's own last layer."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from treadle_core.errors import Unsupported
from treadle_core.mlx_runtime.split import SplitModel
from treadle_speculative.mtp.blocks import parts_of
from treadle_speculative.mtp.head import MtpHead

OTHER_WEIGHTS = 0.1
LAST_NORMS = ("norm", "norm_f", "ln_f", "final_layernorm")


def new_head(base: SplitModel, seed: int) -> MtpHead:
    """A head in float32, whatever the model computes in: small updates would be lost in 16 bits.

    Its layer begins as the model's last one with full attention, and is given little but the hidden
    state: from there a head gets further on few tokens than from random weights.

    Raises:
        Unsupported: A head for this model cannot be made, or not be fitted.
    """
    mx.random.seed(seed)
    head = MtpHead(base)
    if len(parts_of(base.new_cache()[head.like])) > 1:
        raise Unsupported(f"mtp fit: the layers of {base.name} keep several caches each")
    copied = plain_weights(base.layers[head.like])
    own = names(head.layers[0])
    if copied.keys() == own.keys() and all(copied[n].shape == own[n].shape for n in own):
        head.layers[0].load_weights(list(copied.items()))
    last_norm = last_norm_of(base)
    if last_norm is not None:
        head.norm.weight = last_norm.weight
    width = base.hidden_size
    noise = OTHER_WEIGHTS * head.fc.weight
    head.fc.weight = noise + mx.concatenate([mx.zeros((width, width)), mx.eye(width)], axis=1)
    head.set_dtype(mx.float32)
    mx.eval(head.parameters())
    return head


def last_norm_of(base: SplitModel) -> nn.RMSNorm | None:
    """The norm behind the model's last layer; None where it is of a kind of the model's own."""
    for name, module in base.model.named_modules():
        *path, own = name.split(".")
        if own in LAST_NORMS and "layers" not in path and type(module) is nn.RMSNorm:
            return module
    return None


def plain_weights(layer: nn.Module) -> dict[str, mx.array]:
    """A layer's weights by name, not quantised."""
    weights = names(layer)
    for name, module in layer.named_modules():
        if "scales" not in module:
            continue
        prefix = f"{name}." if name else ""
        packed: Any = module
        weights[f"{prefix}weight"] = mx.dequantize(
            packed.weight,
            weights.pop(f"{prefix}scales"),
            weights.pop(f"{prefix}biases", None),
            group_size=packed.group_size,
            bits=packed.bits,
            mode=packed.mode,
        )
    return weights


def names(module: nn.Module) -> dict[str, mx.array]:
    """A module's weights by name."""
    flat: Any = tree_flatten(module.parameters())
    return dict(flat)
