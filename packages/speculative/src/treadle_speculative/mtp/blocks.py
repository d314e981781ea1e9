"""The decoder layers of a head, made of what the model's own file makes its layers of.

Most heads have one more layer like the model's. Some families train theirs with another one: without
experts where the model's have them, with a window, or with half of what a layer of the model is.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache

from treadle_core.errors import Unsupported, describe
from treadle_core.mlx_runtime.split import SplitModel

LIKE_MODEL = "like_model"
DENSE = "dense"
OWN = "own"
KINDS = (LIKE_MODEL, DENSE, OWN)
ATTENTION, EXPERTS, FEED_FORWARD = "*", "E", "-"
"""What a block of Nemotron-H may be, as its config says it."""


class Blocks(NamedTuple):
    """A head's layers.

    Attributes:
        layers: Them, in their order.
        caches: Makes the cache of each that has one; the others have None.
        window: Positions that they attend to; None is all.
    """

    layers: list[nn.Module]
    caches: list[Callable[[], Any] | None]
    window: int | None = None


def make_blocks(
    base: SplitModel, kind: str, num: int, *, place: int = 0, pattern: str = ""
) -> Blocks:
    """Layers of a kind for a model.

    Args:
        base: The model.
        kind: ``like_model``: as its last layer with full attention; ``dense``: the same without
            experts; ``own``: what the family trains its heads with.
        num: How many, where the family does not say.
        place: Which of several heads they are for.
        pattern: What each of them is, where the family has several kinds.

    Raises:
        Unsupported: They cannot be made.
    """
    if kind == OWN:
        if base.name not in OWN_BLOCKS:
            raise Unsupported(f"no layers for MTP heads alone are known of {base.name}")
        return _guarded(base, lambda: OWN_BLOCKS[base.name](base, place, pattern))
    like = attention_layer(base)
    layers = [make_layer(base, like, dense=kind == DENSE) for _ in range(num)]
    return Blocks(layers, [lambda: base.new_cache()[like]] * num)


def attention_layer(base: SplitModel) -> int:
    """The last of a model's layers that attends to everything before it.

    Raises:
        Unsupported: There is none.
    """
    caches = base.new_cache()
    for index in reversed(range(min(len(caches), len(base.layers)))):
        if all(type(part) is KVCache for part in parts_of(caches[index])):
            return index
    raise Unsupported(f"no MTP head can be made for {base.name}: no layer has full attention")


def parts_of(cache: Any) -> tuple[Any, ...]:
    """The caches of a composite one, or the cache itself."""
    return tuple(cache.caches) if isinstance(cache, CacheList) else (cache,)


WITHOUT_EXPERTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "bailing_moe": lambda num: {"first_k_dense_replace": num},
    "ernie4_5_moe": lambda num: {"moe_layer_start_index": num},
    "exaone_moe": lambda num: {"is_moe_layer": [False] * num},
}
"""How a model's args say that none of so many layers has experts."""


def make_layer(base: SplitModel, index: int, *, dense: bool = False) -> nn.Module:
    """Another layer like the one at ``index``, made as the model makes its own.

    Args:
        base: The model.
        index: Which.
        dense: Whether to make it without experts.

    Raises:
        Unsupported: It is made from more than the model's args and its place.
    """
    kind: Any = type(base.layers[index])
    args = base.args
    if dense:
        if base.name not in WITHOUT_EXPERTS:
            raise Unsupported(f"no layers without experts can be made for {base.name}")
        args = replace(args, **WITHOUT_EXPERTS[base.name](len(base.layers)))
    needed = [
        parameter.name
        for parameter in list(inspect.signature(kind).parameters.values())[1:]
        if parameter.default is inspect.Parameter.empty
    ]
    if not needed:
        return _guarded(base, lambda: kind(args))
    if needed in (["layer_idx"], ["layer_index"]):
        return _guarded(base, lambda: kind(args, index))
    raise Unsupported(
        f"no MTP head can be made for {base.name}: {kind.__name__} needs {', '.join(needed)}"
    )


class LongcatBlock(nn.Module):
    """Half of a layer of LongCat: one attention and one feed-forward network, without experts.

    Args:
        parts: The module of mlx-lm's that has both.
        args: What the model is made from.
    """

    def __init__(self, parts: Any, args: Any) -> None:
        super().__init__()
        self.self_attn = parts.LongcatFlashMLA(args)
        self.mlp = parts.LongcatFlashMLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """``[B, L, hidden]``."""
        h = x + self.self_attn(self.input_layernorm(x), mask=mask, cache=cache)
        return h + self.mlp(self.post_attention_layernorm(h))


def _longcat(base: SplitModel, place: int, pattern: str) -> Blocks:
    del place, pattern
    return Blocks([LongcatBlock(_file_of(base), base.args)], [KVCache])


def _mimo_v2(base: SplitModel, place: int, pattern: str) -> Blocks:
    del place, pattern
    layer = _file_of(base).DecoderLayer(base.args, is_moe=False, is_sliding_window=True)
    return Blocks([layer], [KVCache], base.args.sliding_window_size)


def _nemotron(base: SplitModel, place: int, pattern: str) -> Blocks:
    del place
    block: Any = type(base.layers[0])
    layers = [block(base.args, kind) for kind in pattern]
    return Blocks(layers, [KVCache if kind == ATTENTION else None for kind in pattern])


def _step(base: SplitModel, place: int, pattern: str) -> Blocks:
    del pattern
    layer = _file_of(base).Step3p5DecoderLayer(base.args, len(base.layers) + place)
    window = base.args.sliding_window if layer.is_sliding else None
    return Blocks([layer], [KVCache], window)


OWN_BLOCKS: dict[str, Callable[[SplitModel, int, str], Blocks]] = {
    "longcat_flash": _longcat,
    "mimo_v2_flash": _mimo_v2,
    "nemotron_h": _nemotron,
    "step3p5": _step,
}
"""By mlx-lm's name of the architecture, for a head's place among several and its pattern."""


def _file_of(base: SplitModel) -> Any:
    return sys.modules[type(base.model).__module__]


def _guarded(base: SplitModel, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        raise Unsupported(
            f"no MTP head can be made for {base.name}: its layer raised {describe(error)}"
        ) from error
