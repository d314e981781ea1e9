"""Tiny models of families with native heads, their heads as the original checkpoints hold them, and
what such a head computes, written down from the publications with nothing of mlx-lm's models."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from treadle_core.mlx_runtime.split import SplitModel
from treadle_core.testing import zoo
from treadle_speculative.mtp.files import parameters
from treadle_speculative.mtp.head import MtpHead

TOKENS = [7, 301, 45, 88, 9, 120, 33, 12, 250, 5, 77, 31]
NEXT = [*TOKENS[1:], 64]

Tensors = dict[str, np.ndarray]

MOE = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
QWEN_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


class Family(NamedTuple):
    """A family.

    Attributes:
        base: The family of the zoo that its model is made from.
        changes: What differs from that.
        attention: ``gqa``, ``gated`` (Qwen) or ``mla``.
        mlp: ``dense``, ``sigmoid`` (DeepSeek) or ``softmax`` (Qwen) experts.
        prefix: What the head's tensors begin with.
        layer: What those of its decoder layer begin with, behind the prefix.
        names: Of the tensors around it: norm of the embedding, of the hidden state, the fusing
            matrix, the last norm.
        hidden_first: Whether the matrix is given the hidden state first.
    """

    base: str
    changes: dict[str, Any]
    attention: str
    mlp: str
    prefix: str
    layer: str
    names: tuple[str, str, str, str]
    hidden_first: bool = False


QWEN_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
NEXTN_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO_NAMES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")

FAMILIES = {
    "qwen3_next": Family("qwen3_next", {}, "gated", "softmax", "mtp.", "layers.0.", QWEN_NAMES),
    "qwen3_5": Family("qwen3_5", {}, "gated", "dense", "mtp.", "layers.0.", QWEN_NAMES),
    "qwen3_5_moe": Family(
        "qwen3_5",
        {"model_type": "qwen3_5_moe", **QWEN_MOE},
        "gated",
        "softmax",
        "mtp.",
        "layers.0.",
        QWEN_NAMES,
    ),
    "deepseek_v3": Family("deepseek_v3", {}, "mla", "sigmoid", "model.layers.3.", "", NEXTN_NAMES),
    "glm4_moe": Family(
        "llama",
        {
            "model_type": "glm4_moe",
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_scaling": None,
            **MOE,
        },
        "gqa",
        "sigmoid",
        "model.layers.3.",
        "",
        NEXTN_NAMES,
    ),
    "glm4_moe_lite": Family(
        "deepseek_v3",
        {"model_type": "glm4_moe_lite"},
        "mla",
        "sigmoid",
        "model.layers.3.",
        "",
        NEXTN_NAMES,
    ),
    "mimo": Family(
        "llama",
        {"model_type": "mimo"},
        "gqa",
        "dense",
        "model.mtp_layers.0.",
        "",
        MIMO_NAMES,
        hidden_first=True,
    ),
}


@cache
def base_of(name: str) -> SplitModel:
    """The model of a family; tests leave it as it is."""
    family = FAMILIES[name]
    return SplitModel(zoo.build(family.base, **family.changes))


def config_of(name: str) -> dict[str, Any]:
    """The ``config.json`` of a family's checkpoint."""
    family = FAMILIES[name]
    return zoo.config(family.base, **family.changes)


def sizes_of(name: str) -> dict[str, Any]:
    """The text part of it."""
    config = config_of(name)
    return config.get("text_config", config)


def original_head(name: str, seed: int = 3) -> Tensors:
    """A random head, by its original names behind the prefix, norms as they multiply."""
    family, text = FAMILIES[name], sizes_of(name)
    random = np.random.default_rng(seed)
    width = text["hidden_size"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        values = gain * columns**-0.5 * random.standard_normal((rows, columns))
        return values.astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1.0 + 0.1 * random.standard_normal(size)).astype(np.float32)

    embed, hidden, fuse, last = family.names
    tensors: Tensors = {
        f"{embed}.weight": norm(width),
        f"{hidden}.weight": norm(width),
        f"{fuse}.weight": matrix(width, 2 * width),
        f"{last}.weight": norm(width),
    }
    layer: Tensors = {
        "input_layernorm.weight": norm(width),
        "post_attention_layernorm.weight": norm(width),
    }
    heads, shared = text["num_attention_heads"], text["num_key_value_heads"]
    if family.attention == "mla":
        nope, rope = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
        rank, value = text["kv_lora_rank"], text["v_head_dim"]
        layer |= {
            "self_attn.q_a_proj.weight": matrix(text["q_lora_rank"], width),
            "self_attn.q_a_layernorm.weight": norm(text["q_lora_rank"]),
            "self_attn.q_b_proj.weight": matrix(heads * (nope + rope), text["q_lora_rank"], 1.5),
            "self_attn.kv_a_proj_with_mqa.weight": matrix(rank + rope, width, 1.5),
            "self_attn.kv_a_layernorm.weight": norm(rank),
            "self_attn.kv_b_proj.weight": matrix(heads * (nope + value), rank),
            "self_attn.o_proj.weight": matrix(width, heads * value),
        }
    else:
        dim = text["head_dim"]
        doubled = 2 if family.attention == "gated" else 1
        layer |= {
            "self_attn.q_proj.weight": matrix(doubled * heads * dim, width, 1.5),
            "self_attn.k_proj.weight": matrix(shared * dim, width, 1.5),
            "self_attn.v_proj.weight": matrix(shared * dim, width),
            "self_attn.o_proj.weight": matrix(width, heads * dim),
        }
        if name in ("mimo", "glm4_moe"):
            for part, rows in (("q", heads * dim), ("k", shared * dim), ("v", shared * dim)):
                layer[f"self_attn.{part}_proj.bias"] = matrix(rows, 1, 0.1)[:, 0]
        if name != "mimo":
            layer |= {f"self_attn.{part}_norm.weight": norm(dim) for part in "qk"}
    if family.mlp == "dense":
        sizes = {"mlp": text["intermediate_size"]}
    else:
        sizes = {f"mlp.experts.{i}": 32 for i in range(4)}
        sizes["mlp.shared_expert" + "s" * (family.mlp == "sigmoid")] = 32
        layer["mlp.gate.weight"] = matrix(4, width, 2.0)
    if family.mlp == "sigmoid":
        layer["mlp.gate.e_score_correction_bias"] = matrix(4, 1, 0.05)[:, 0]
    if family.mlp == "softmax":
        layer["mlp.shared_expert_gate.weight"] = matrix(1, width)
    for module, inner in sizes.items():
        layer[f"{module}.gate_proj.weight"] = matrix(inner, width)
        layer[f"{module}.up_proj.weight"] = matrix(inner, width)
        layer[f"{module}.down_proj.weight"] = matrix(width, inner)
    return tensors | {family.layer + key: value for key, value in layer.items()}


def write_original(name: str, folder: Path, *heads: Tensors) -> Path:
    """A checkpoint's config and its heads (one by default), as the family's authors publish them."""
    family = FAMILIES[name]
    heads = heads or (original_head(name),)
    stored: Tensors = {}
    for place, tensors in enumerate(heads):
        # The prefix or, where heads share what is around their layers, the layer counts them.
        prefix = counted_on(family.prefix, place)
        layer = family.layer if prefix != family.prefix else counted_on(family.layer, place)
        for key, value in tensors.items():
            behind = key.removeprefix(family.layer)
            stored[prefix + (layer if key.startswith(family.layer) else "") + behind] = value
    if name.startswith("qwen"):
        # Their norms are stored less one.
        stored = {key: value - 1 if "norm" in key else value for key, value in stored.items()}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model-mtp.safetensors"),
        {key: mx.array(value) for key, value in stored.items()},
        {"format": "pt"},
    )
    config = config_of(name)
    text = config.get("text_config", config)
    depth = "mtp_num_hidden_layers" if name.startswith("qwen") else "num_nextn_predict_layers"
    text[depth] = len(heads)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def counted_on(prefix: str, place: int) -> str:
    """A prefix with its number so much higher, if it has one."""
    return re.sub(r"\d+", lambda number: str(int(number.group()) + place), prefix)


def second_head(name: str) -> Tensors:
    """Another head; what Qwen's heads share is that of the first."""
    family, first = FAMILIES[name], original_head(name)
    second = original_head(name, seed=4)
    shared = [key for key in first if family.layer and not key.startswith(family.layer)]
    return second | {key: first[key] for key in shared}


def formula(
    name: str, hidden: np.ndarray, tokens: list[int], tensors: Tensors | None = None
) -> np.ndarray:
    """Logits ``[L, vocab]`` of a family's original head.

    Args:
        name: The family.
        hidden: ``[L, hidden]``, the model's hidden states.
        tokens: The token behind each of them.
        tensors: The head; by default the one that is written by default.
    """
    family, text, base = FAMILIES[name], sizes_of(name), base_of(name)
    t, eps = tensors or original_head(name), text["rms_norm_eps"]
    embed_norm, hidden_norm, fuse, last = family.names
    e = rms(np.array(base.embedding.weight)[tokens], t[f"{embed_norm}.weight"], eps)
    h = rms(hidden, t[f"{hidden_norm}.weight"], eps)
    pair = [h, e] if family.hidden_first else [e, h]
    x = np.concatenate(pair, axis=-1) @ t[f"{fuse}.weight"].T
    layer = {key.removeprefix(family.layer): value for key, value in t.items()}
    a = rms(x, layer["input_layernorm.weight"], eps)
    x = x + (mla if family.attention == "mla" else gqa)(name, a, layer)
    m = rms(x, layer["post_attention_layernorm.weight"], eps)
    x = x + {"dense": dense, "sigmoid": sigmoid_experts, "softmax": softmax_experts}[family.mlp](
        m, layer, text
    )
    x = rms(x, t[f"{last}.weight"], eps)
    output = base.embedding if base.output is None else base.output
    return x @ np.array(output.weight).T


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotated(x: np.ndarray, dims: int, base: float, *, interleaved: bool) -> np.ndarray:
    """Rotary positions ``0, 1, …`` for ``x [L, heads, dim]``, in its first ``dims`` numbers."""
    angles = np.arange(len(x))[:, None] * base ** -(np.arange(0, dims, 2) / dims)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    part, rest = x[..., :dims], x[..., dims:]
    if interleaved:
        one, other = part[..., 0::2], part[..., 1::2]
    else:
        one, other = part[..., : dims // 2], part[..., dims // 2 :]
    turned = [one * cos - other * sin, one * sin + other * cos]
    if interleaved:
        part = np.stack(turned, axis=-1).reshape(part.shape)
    else:
        part = np.concatenate(turned, axis=-1)
    return np.concatenate([part, rest], axis=-1)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention over ``[L, heads, dim]``."""
    scores = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def gqa(name: str, x: np.ndarray, t: Tensors) -> np.ndarray:
    text, gated = sizes_of(name), FAMILIES[name].attention == "gated"
    heads, shared, dim = (
        text[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    q, k, v = (
        x @ t[f"self_attn.{part}_proj.weight"].T + t.get(f"self_attn.{part}_proj.bias", 0.0)
        for part in "qkv"
    )
    q, k, v = (
        q.reshape(len(x), heads, -1),
        k.reshape(len(x), shared, -1),
        v.reshape(len(x), shared, -1),
    )
    q, gate = q[..., :dim], q[..., dim:]
    if "self_attn.q_norm.weight" in t:
        eps = text["rms_norm_eps"]
        q, k = rms(q, t["self_attn.q_norm.weight"], eps), rms(k, t["self_attn.k_norm.weight"], eps)
    rope = text.get("rope_parameters", text)
    dims = int(dim * rope.get("partial_rotary_factor", 1.0))
    q, k = (rotated(part, dims, rope["rope_theta"], interleaved=False) for part in (q, k))
    k, v = (np.repeat(part, heads // shared, axis=1) for part in (k, v))
    out = attended(q, k, v)
    if gated:
        out = out * sigmoid(gate.reshape(len(x), -1))
    return out @ t["self_attn.o_proj.weight"].T


def mla(name: str, x: np.ndarray, t: Tensors) -> np.ndarray:
    text = sizes_of(name)
    heads, nope, rope, rank = (
        text[key]
        for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
    )
    eps = 1e-6 if name == "deepseek_v3" else text["rms_norm_eps"]
    q = rms(x @ t["self_attn.q_a_proj.weight"].T, t["self_attn.q_a_layernorm.weight"], eps)
    q = (q @ t["self_attn.q_b_proj.weight"].T).reshape(len(x), heads, -1)
    both = x @ t["self_attn.kv_a_proj_with_mqa.weight"].T
    latent = rms(both[:, :rank], t["self_attn.kv_a_layernorm.weight"], eps)
    kv = (latent @ t["self_attn.kv_b_proj.weight"].T).reshape(len(x), heads, -1)
    theta = text["rope_theta"]
    q_rope = rotated(q[..., nope:], rope, theta, interleaved=True)
    k_rope = rotated(both[:, None, rank:], rope, theta, interleaved=True)
    q = np.concatenate([q[..., :nope], q_rope], axis=-1)
    k = np.concatenate([kv[..., :nope], np.repeat(k_rope, heads, axis=1)], axis=-1)
    return attended(q, k, kv[..., nope:]) @ t["self_attn.o_proj.weight"].T


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def swiglu(x: np.ndarray, t: Tensors, module: str) -> np.ndarray:
    gate, up = (x @ t[f"{module}.{part}_proj.weight"].T for part in ("gate", "up"))
    return (gate * sigmoid(gate) * up) @ t[f"{module}.down_proj.weight"].T


def dense(x: np.ndarray, t: Tensors, text: dict[str, Any]) -> np.ndarray:
    del text
    return swiglu(x, t, "mlp")


def routed(x: np.ndarray, t: Tensors, chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The chosen experts' sum for each token."""
    return np.stack(
        [
            sum(
                weight * swiglu(row[None], t, f"mlp.experts.{expert}")[0]
                for expert, weight in zip(experts, row_weights, strict=True)
            )
            for row, experts, row_weights in zip(x, chosen, weights, strict=True)
        ]
    )


def sigmoid_experts(x: np.ndarray, t: Tensors, text: dict[str, Any]) -> np.ndarray:
    """DeepSeek-V3: groups are chosen by their two best, experts by score plus bias."""
    scores = sigmoid(x @ t["mlp.gate.weight"].T)
    ranks = scores + t["mlp.gate.e_score_correction_bias"]
    groups = text["n_group"]
    if groups > 1:
        by_group = ranks.reshape(len(x), groups, -1)
        best = np.sort(by_group, axis=-1)[..., -2:].sum(axis=-1)
        losers = np.argsort(best, axis=-1)[:, : groups - text["topk_group"]]
        np.put_along_axis(by_group, losers[..., None], 0.0, axis=1)
        ranks = by_group.reshape(len(x), -1)
    chosen = np.argsort(-ranks, axis=-1)[:, : text["num_experts_per_tok"]]
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if text.get("norm_topk_prob", True):
        weights = weights / weights.sum(axis=-1, keepdims=True)
    weights = weights * text["routed_scaling_factor"]
    return routed(x, t, chosen, weights) + swiglu(x, t, "mlp.shared_experts")


def softmax_experts(x: np.ndarray, t: Tensors, text: dict[str, Any]) -> np.ndarray:
    """Qwen3-Next: the best by softmax, and one that is always asked behind a gate of its own."""
    logits = x @ t["mlp.gate.weight"].T
    scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-scores, axis=-1)[:, : text["num_experts_per_tok"]]
    weights = np.take_along_axis(scores, chosen, axis=-1)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    gate = sigmoid(x @ t["mlp.shared_expert_gate.weight"].T)
    return routed(x, t, chosen, weights) + gate * swiglu(x, t, "mlp.shared_expert")


def hidden_of(base: SplitModel) -> mx.array:
    return base.hidden(mx.array([TOKENS]), base.new_cache())


def logits_of(head: MtpHead, hidden: mx.array) -> np.ndarray:
    return np.array(head.logits(head(hidden, mx.array([NEXT])))[0])


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def randomised(head: MtpHead, gain: float = 1.0) -> MtpHead:
    """A head of random weights; ``gain`` makes its attention choosier, and count for more."""
    mx.random.seed(1)
    head.update(tree_map(lambda p: p + 0.1 * mx.random.normal(p.shape), head.parameters()))
    scaled = ("q_proj.weight", "k_proj.weight", "o_proj.weight")
    chosen = [(name, gain * p) for name, p in parameters(head) if name.endswith(scaled)]
    head.load_weights(chosen, strict=False)
    mx.eval(head.parameters())
    return head


def same(one: MtpHead, other: MtpHead) -> bool:
    mine, theirs = dict(parameters(one)), dict(parameters(other))
    return mine.keys() == theirs.keys() and all(
        mx.array_equal(mine[name], theirs[name]) for name in mine
    )


def as_bfloat16(value: np.ndarray) -> np.ndarray:
    return np.array(mx.array(value).astype(mx.bfloat16).astype(mx.float32))


def write_as_deepseek(head: MtpHead, folder: Path) -> None:
    """A head's tensors as original checkpoints have them: experts apart, both matrices of MLA in one."""
    around = {"norm_embed": "enorm", "norm_hidden": "hnorm", "fc": "eh_proj"}
    around["norm"] = "shared_head.norm"
    tensors: dict[str, mx.array] = {}
    for name, value in parameters(head):
        module, _, kind = name.removeprefix("layers.0.").rpartition(".")
        if module in around:
            tensors[f"{around[module]}.{kind}"] = value
        elif ".switch_mlp." in module:
            for number, expert in enumerate(value):
                tensors[f"{module.replace('switch_mlp', f'experts.{number}')}.{kind}"] = expert
        else:
            tensors[f"{module}.{kind}"] = value
    keys = tensors.pop("self_attn.embed_q.weight").swapaxes(-1, -2)
    both = mx.concatenate([keys, tensors.pop("self_attn.unembed_out.weight")], axis=1)
    tensors["self_attn.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {f"model.layers.3.{name}": value for name, value in tensors.items()},
        {"format": "pt"},
    )


def bigram(family: str, noise: float, **changes: Any) -> tuple[SplitModel, MtpHead]:
    """A model of the zoo whose next token follows mostly from the last one, and a head that knows how.

    The smaller ``noise`` is, the less their layers add to the embedding, and the more often the head is
    right.
    """
    model = zoo.build(family, **changes)
    quieter(model, noise)
    base = SplitModel(model)
    head = MtpHead(base)
    head.layers[0].load_weights(parameters(base.layers[head.like]))
    width = base.hidden_size
    mixing = mx.random.normal((width, width), key=mx.random.key(5)) * noise * width**-0.5
    head.fc.weight = mx.concatenate([mx.eye(width), mixing], axis=1)
    last: Any = dict(base.model.named_modules())
    norms = [
        module for name, module in last.items() if name.endswith("norm") and "layers" not in name
    ]
    head.norm.weight = norms[0].weight
    mx.eval(head.parameters())
    return base, head


def quieter(model: Any, noise: float) -> None:
    """Scale what a model's layers add."""
    scaled = [
        (name, value * noise)
        for name, value in parameters(model)
        if name.endswith("weight") and name.split(".")[-2] in ("o_proj", "out_proj", "down_proj")
    ]
    model.load_weights(scaled, strict=False)
    mx.eval(model.parameters())
