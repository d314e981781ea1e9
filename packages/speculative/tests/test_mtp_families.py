"""Heads whose layer is not one of the model's own, against their formulas written down anew."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from treadle_core.drafting import DraftRoom, HeardRow, HiddenStates
from treadle_core.errors import Unsupported
from treadle_core.mlx_runtime.split import SplitModel
from treadle_core.testing import zoo
from treadle_core.testing.drafting import draft_row
from treadle_speculative.mtp.drafter import MtpDrafter
from treadle_speculative.mtp.head import MtpHead
from treadle_speculative.mtp.native import find_heads
from treadle_speculative.mtp.slots import inspect_head

from .mtp_models import (
    NEXT,
    Tensors,
    difference,
    hidden_of,
    logits_of,
    rms,
    rotated,
    routed,
    sigmoid,
    swiglu,
)

WIDTH, HEADS, SHARED, DIM, INNER = 64, 4, 2, 16, 96
WINDOW = 5
Sizes = dict[str, tuple[int, ...]]

MATRICES: Sizes = {
    "self_attn.q_proj.weight": (HEADS * DIM, WIDTH),
    "self_attn.k_proj.weight": (SHARED * DIM, WIDTH),
    "self_attn.v_proj.weight": (SHARED * DIM, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, HEADS * DIM),
    "mlp.gate_proj.weight": (INNER, WIDTH),
    "mlp.up_proj.weight": (INNER, WIDTH),
    "mlp.down_proj.weight": (WIDTH, INNER),
    "input_layernorm.weight": (WIDTH,),
    "post_attention_layernorm.weight": (WIDTH,),
}
QK_NORMS: Sizes = {"self_attn.q_norm.weight": (DIM,), "self_attn.k_norm.weight": (DIM,)}
NEXTN: dict[str, str] = {"enorm": "embed", "hnorm": "hidden", "eh_proj": "fuse"}


class Case(NamedTuple):
    """A family.

    Attributes:
        base: The family of the zoo that its model is made from.
        changes: What differs from that.
        prefix: What the head's tensors begin with.
        around: The modules around its layer behind the prefix, and what they are.
        layer: The tensors of its layer behind the prefix, and their shapes.
        attend: What its attention makes of ``[L, width]``.
        eps: Of its norms.
        centred: What is added to the norms as they are stored.
        plain: How names of a plain layer come from those of the checkpoint.
    """

    base: str
    changes: dict[str, Any]
    prefix: str
    around: dict[str, str]
    layer: Sizes
    attend: Callable[[np.ndarray, Tensors], np.ndarray]
    eps: float = 1e-5
    centred: float = 0.0
    plain: tuple[tuple[str, str], ...] = ()


def weighted(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None = None, sinks: Any = None
) -> np.ndarray:
    """Causal attention over ``[L, heads, dim]``, within a window if there is one."""
    k, v = (np.repeat(part, q.shape[1] // part.shape[1], axis=1) for part in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    visible = np.tri(len(q), dtype=bool)
    if window is not None:
        visible &= ~np.tri(len(q), k=-window, dtype=bool)
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    return np.einsum("hqk,khd->qhd", weights / total, v)


def projected(x: np.ndarray, t: Tensors) -> list[np.ndarray]:
    """Queries, keys and values, each ``[L, heads, dim]``."""
    sizes = (HEADS, SHARED, SHARED)
    return [
        (x @ t[f"self_attn.{part}_proj.weight"].T).reshape(len(x), num, -1)
        for part, num in zip("qkv", sizes, strict=True)
    ]


def put_out(heads: np.ndarray, t: Tensors) -> np.ndarray:
    return heads.reshape(len(heads), -1) @ t["self_attn.o_proj.weight"].T


def exaone(x: np.ndarray, t: Tensors) -> np.ndarray:
    """Everything is seen, and nothing says where it is: the model's windows have rotations."""
    q, k, v = projected(x, t)
    q, k = rms(q, t["self_attn.q_norm.weight"], 1e-5), rms(k, t["self_attn.k_norm.weight"], 1e-5)
    return put_out(weighted(q, k, v), t)


def ernie(x: np.ndarray, t: Tensors) -> np.ndarray:
    q, k, v = projected(x, t)
    q, k = (rotated(part, DIM, 1e4, interleaved=True) for part in (q, k))
    return put_out(weighted(q, k, v), t)


def step(x: np.ndarray, t: Tensors) -> np.ndarray:
    """A window, a rotation of half of each head, and a gate for each head."""
    q, k, v = projected(x, t)
    q, k = rms(q, t["self_attn.q_norm.weight"], 1e-5), rms(k, t["self_attn.k_norm.weight"], 1e-5)
    q, k = (rotated(part, DIM // 2, 1e4, interleaved=False) for part in (q, k))
    gates = sigmoid(x @ t["self_attn.g_proj.weight"].T)
    return put_out(weighted(q, k, v, WINDOW) * gates[..., None], t)


def mimo_v2(x: np.ndarray, t: Tensors) -> np.ndarray:
    """A window, sinks, values that are narrower and scaled."""
    q, k, v = projected(x, t)
    q, k = (rotated(part, DIM // 2, 5e3, interleaved=False) for part in (q, k))
    return put_out(weighted(q, k, 0.7 * v, WINDOW, t["self_attn.attention_sink_bias"]), t)


def bailing(x: np.ndarray, t: Tensors) -> np.ndarray:
    """All projections in one."""
    both = x @ t["attention.query_key_value.weight"].T
    parts = both.reshape(len(x), HEADS + 2 * SHARED, DIM)
    q, k, v = parts[:, :HEADS], parts[:, HEADS:-SHARED], parts[:, -SHARED:]
    q = rms(q, t["attention.query_layernorm.weight"], 1e-5)
    k = rms(k, t["attention.key_layernorm.weight"], 1e-5)
    q, k = (rotated(part, DIM // 2, 1e4, interleaved=False) for part in (q, k))
    heads = weighted(q, k, v)
    return heads.reshape(len(x), -1) @ t["attention.dense.weight"].T


def longcat(x: np.ndarray, t: Tensors) -> np.ndarray:
    """Latent attention whose latents are scaled up."""
    rank, nope = 32, 16
    # mlx-lm's norms of latents have another epsilon than the layer's.
    q = rms(x @ t["self_attn.q_a_proj.weight"].T, t["self_attn.q_a_layernorm.weight"], 1e-5)
    q = (q @ t["self_attn.q_b_proj.weight"].T).reshape(len(x), HEADS, -1) * (WIDTH / rank) ** 0.5
    both = x @ t["self_attn.kv_a_proj_with_mqa.weight"].T
    latent = rms(both[:, :rank], t["self_attn.kv_a_layernorm.weight"], 1e-5) * (WIDTH / rank) ** 0.5
    kv = (latent @ t["self_attn.kv_b_proj.weight"].T).reshape(len(x), HEADS, -1)
    q_rope = rotated(q[..., nope:], 8, 1e4, interleaved=True)
    k_rope = np.repeat(rotated(both[:, None, rank:], 8, 1e4, interleaved=True), HEADS, axis=1)
    q = np.concatenate([q[..., :nope], q_rope], axis=-1)
    k = np.concatenate([kv[..., :nope], k_rope], axis=-1)
    return put_out(weighted(q, k, kv[..., nope:]), t)


WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
CASES: dict[str, Case] = {
    "exaone_moe": Case(
        "llama",
        {
            "model_type": "exaone_moe",
            **EXPERTS,
            "sliding_window": 16,
            "layer_types": WINDOWS,
            "is_moe_layer": [False, True, True],
        },
        "mtp.",
        {
            "pre_fc_norm_embedding": "embed",
            "pre_fc_norm_hidden": "hidden",
            "fc": "fuse",
            "norm": "last",
        },
        {f"layers.0.{name}": size for name, size in (MATRICES | QK_NORMS).items()},
        exaone,
        plain=(("layers.0.", ""),),
    ),
    "ernie4_5_moe": Case(
        "llama",
        {
            "model_type": "ernie4_5_moe",
            "use_bias": False,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
        },
        "model.mtp_",
        {"emb_norm.0": "embed", "hidden_norm.0": "hidden", "linear_proj.0": "fuse"},
        {f"block.0.{name}": size for name, size in MATRICES.items()},
        ernie,
        plain=(("block.0.", ""),),
    ),
    "bailing_moe": Case(
        "llama",
        {
            "model_type": "bailing_moe",
            **EXPERTS,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "moe_router_enable_expert_bias": True,
            "score_function": "sigmoid",
            "topk_group": 1,
            "rope_scaling": None,
        },
        "model.layers.3.",
        {**NEXTN, "final_layernorm": "last"},
        {
            "attention.query_key_value.weight": ((HEADS + 2 * SHARED) * DIM, WIDTH),
            "attention.dense.weight": (WIDTH, HEADS * DIM),
            "attention.query_layernorm.weight": (DIM,),
            "attention.key_layernorm.weight": (DIM,),
            "input_layernorm.weight": (WIDTH,),
            "post_attention_layernorm.weight": (WIDTH,),
            "mlp.gate.weight": (4, WIDTH),
            "mlp.gate.expert_bias": (4,),
            **{
                f"mlp.{module}.{part}_proj.weight": ((WIDTH, 32) if part == "down" else (32, WIDTH))
                for module in (*(f"experts.{i}" for i in range(4)), "shared_experts")
                for part in ("gate", "up", "down")
            },
        },
        bailing,
    ),
    "longcat_flash": Case(
        "deepseek_v3",
        {
            "model_type": "longcat_flash",
            "attention_method": "MLA",
            "zero_expert_type": "identity",
            "zero_expert_num": 2,
            "ffn_hidden_size": INNER,
            "expert_ffn_hidden_size": 32,
            "moe_topk": 2,
            "num_layers": 2,
            "num_hidden_layers": 2,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
        },
        "model.mtp.",
        {
            "layers.0.enorm.m": "embed",
            "layers.0.hnorm.m": "hidden",
            "layers.0.eh_proj": "fuse",
            "norm": "last",
        },
        {
            f"layers.0.{name}": size
            for name, size in {
                "self_attn.q_a_proj.weight": (32, WIDTH),
                "self_attn.q_a_layernorm.weight": (32,),
                "self_attn.q_b_proj.weight": (HEADS * 24, 32),
                "self_attn.kv_a_proj_with_mqa.weight": (40, WIDTH),
                "self_attn.kv_a_layernorm.weight": (32,),
                "self_attn.kv_b_proj.weight": (HEADS * 32, 32),
                "self_attn.o_proj.weight": (WIDTH, HEADS * 16),
                "transformer_layer.mlp.gate_proj.weight": (INNER, WIDTH),
                "transformer_layer.mlp.up_proj.weight": (INNER, WIDTH),
                "transformer_layer.mlp.down_proj.weight": (WIDTH, INNER),
                "input_layernorm.weight": (WIDTH,),
                "post_attention_layernorm.weight": (WIDTH,),
            }.items()
        },
        longcat,
        plain=(("layers.0.", ""), ("transformer_layer.", "")),
    ),
    "mimo_v2_flash": Case(
        "llama",
        {
            "model_type": "mimo_v2_flash",
            "hybrid_layer_pattern": [0, 1, 1],
            "moe_layer_freq": [0, 1, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "moe_intermediate_size": 32,
            "n_shared_experts": None,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": None,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 5e3,
            "swa_num_attention_heads": HEADS,
            "swa_num_key_value_heads": SHARED,
            "v_head_dim": 8,
            "swa_head_dim": DIM,
            "swa_v_head_dim": 8,
            "partial_rotary_factor": 0.5,
            "attention_value_scale": 0.7,
        },
        "model.mtp.layers.0.",
        {**NEXTN, "final_layernorm": "last"},
        {
            **{name.replace("post_attention", "pre_mlp"): size for name, size in MATRICES.items()},
            "self_attn.v_proj.weight": (SHARED * 8, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, HEADS * 8),
            "self_attn.attention_sink_bias": (HEADS,),
        },
        mimo_v2,
        plain=(("pre_mlp", "post_attention"),),
    ),
    "step3p5": Case(
        "llama",
        {
            "model_type": "step3p5",
            "num_attention_groups": SHARED,
            "sliding_window": WINDOW,
            # One more than the model has layers: the head's.
            "layer_types": [*WINDOWS, "sliding_attention"],
            "partial_rotary_factors": [1.0, 1.0, 1.0, 0.5],
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 32,
            "moe_layers_enum": "1,2",
        },
        "model.layers.3.",
        {**NEXTN, "transformer.shared_head.norm": "last"},
        MATRICES | QK_NORMS | {"self_attn.g_proj.weight": (HEADS, WIDTH)},
        step,
        centred=1.0,
    ),
}


def head_of(case: Case) -> Tensors:
    """A random head, by its names behind the prefix, norms as they multiply."""
    sizes: Sizes = {
        f"{module}.weight": (WIDTH, 2 * WIDTH) if what == "fuse" else (WIDTH,)
        for module, what in case.around.items()
    }
    return randomly(sizes | case.layer)


def randomly(sizes: Sizes) -> Tensors:
    """Random tensors, norms about one."""
    random = np.random.default_rng(7)
    tensors: Tensors = {}
    for name, size in sizes.items():
        values = random.standard_normal(size)
        if len(size) == 2:
            values *= size[1] ** -0.5
        elif name.endswith("weight"):
            values = 1 + 0.1 * values
        tensors[name] = values.astype(np.float32)
    return tensors


def formula(case: Case, base: SplitModel, hidden: np.ndarray) -> np.ndarray:
    """Logits ``[L, vocab]`` of a family's head."""
    tensors = head_of(case)
    around = {what: tensors[f"{module}.weight"] for module, what in case.around.items()}
    t: Tensors = {}
    for name, value in tensors.items():
        for old, new in case.plain:
            name = name.replace(old, new)
        t[name] = value
    e = rms(np.array(base.embed(mx.array(NEXT))), around["embed"], case.eps)
    pair = [e, rms(hidden, around["hidden"], case.eps)]
    x = np.concatenate(pair, axis=-1) @ around["fuse"].T
    x = x + case.attend(rms(x, t["input_layernorm.weight"], case.eps), t)
    m = rms(x, t["post_attention_layernorm.weight"], case.eps)
    x = x + (swiglu(m, t, "mlp") if "mlp.gate_proj.weight" in t else experts(m, t))
    if "last" in around:
        x = rms(x, around["last"], case.eps)
    return np.array(base.logits(mx.array(x, mx.float32)))


def experts(x: np.ndarray, t: Tensors) -> np.ndarray:
    """Ling: by sigmoid, chosen with a bias, and one that is always asked."""
    scores = sigmoid(x @ t["mlp.gate.weight"].T)
    chosen = np.argsort(-(scores + t["mlp.gate.expert_bias"]), axis=-1)[:, :2]
    weights = np.take_along_axis(scores, chosen, axis=-1)
    weights = 1.5 * weights / weights.sum(axis=-1, keepdims=True)
    return routed(x, t, chosen, weights) + swiglu(x, t, "mlp.shared_experts")


def write(case: Case, folder: Path) -> Path:
    stored = {
        case.prefix + name: mx.array(value - case.centred * ("norm" in name))
        for name, value in head_of(case).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), stored, {"format": "pt"})
    config = {**zoo.config(case.base, **case.changes), "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


NEMOTRON: dict[str, Any] = {
    "hybrid_override_pattern": "M*ME",
    "num_hidden_layers": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def nemotron_head() -> Tensors:
    sizes: Sizes = {
        "layers.0.enorm.weight": (WIDTH,),
        "layers.0.hnorm.weight": (WIDTH,),
        "layers.0.eh_proj.weight": (WIDTH, 2 * WIDTH),
        "layers.0.norm.weight": (WIDTH,),
        "layers.0.mixer.q_proj.weight": (HEADS * DIM, WIDTH),
        "layers.0.mixer.k_proj.weight": (SHARED * DIM, WIDTH),
        "layers.0.mixer.v_proj.weight": (SHARED * DIM, WIDTH),
        "layers.0.mixer.o_proj.weight": (WIDTH, HEADS * DIM),
        "layers.1.norm.weight": (WIDTH,),
        "layers.1.mixer.gate.weight": (4, WIDTH),
        "layers.1.mixer.gate.e_score_correction_bias": (4,),
        "layers.1.mixer.shared_experts.up_proj.weight": (48, WIDTH),
        "layers.1.mixer.shared_experts.down_proj.weight": (WIDTH, 48),
        "layers.1.final_layernorm.weight": (WIDTH,),
    }
    for number in range(4):
        sizes[f"layers.1.mixer.experts.{number}.up_proj.weight"] = (32, WIDTH)
        sizes[f"layers.1.mixer.experts.{number}.down_proj.weight"] = (WIDTH, 32)
    return randomly(sizes)


def nemotron_formula(base: SplitModel, hidden: np.ndarray) -> np.ndarray:
    """A block of attention without positions, then one of experts that square what is positive."""
    t = nemotron_head()
    e = rms(np.array(base.embedding.weight)[NEXT], t["layers.0.enorm.weight"], 1e-5)
    pair = [e, rms(hidden, t["layers.0.hnorm.weight"], 1e-5)]
    x = np.concatenate(pair, axis=-1) @ t["layers.0.eh_proj.weight"].T
    attention = {
        name.replace("layers.0.mixer", "self_attn"): value
        for name, value in t.items()
        if name.startswith("layers.0.mixer")
    }
    a = rms(x, t["layers.0.norm.weight"], 1e-5)
    x = x + put_out(weighted(*projected(a, attention)), attention)
    m = rms(x, t["layers.1.norm.weight"], 1e-5)

    def squared(rows: np.ndarray, module: str) -> np.ndarray:
        up = np.maximum(rows @ t[f"layers.1.mixer.{module}.up_proj.weight"].T, 0) ** 2
        return up @ t[f"layers.1.mixer.{module}.down_proj.weight"].T

    scores = sigmoid(m @ t["layers.1.mixer.gate.weight"].T)
    ranks = scores + t["layers.1.mixer.gate.e_score_correction_bias"]
    chosen = np.argsort(-ranks, axis=-1)[:, :2]
    weights = np.take_along_axis(scores, chosen, axis=-1)
    weights = 2.5 * weights / weights.sum(axis=-1, keepdims=True)
    asked = np.stack(
        [
            sum(w * squared(m[i : i + 1], f"experts.{c}")[0] for c, w in zip(*pair, strict=True))
            for i, pair in enumerate(zip(chosen, weights, strict=True))
        ]
    )
    x = rms(x + asked + squared(m, "shared_experts"), t["layers.1.final_layernorm.weight"], 1e-5)
    return x @ np.array(base.output.weight).T


def test_a_head_of_nemotron_is_several_blocks(tmp_path: Path) -> None:
    base = SplitModel(zoo.build("nemotron_h", **NEMOTRON))
    tensors = {f"mtp.{name}": mx.array(value) for name, value in nemotron_head().items()}
    mx.save_safetensors(str(tmp_path / "model-mtp.safetensors"), tensors, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(zoo.config("nemotron_h", **NEMOTRON)))
    hidden = hidden_of(base)

    (head,) = find_heads(tmp_path, base)

    assert (head.form.pattern, head.num_caches) == ("*E", 1)
    expected = nemotron_formula(base, np.array(hidden[0]))
    assert difference(logits_of(head, hidden), expected) < 1e-4
    assert inspect_head(head) == inspect_head(MtpHead(SplitModel(zoo.build("llama"))))


@pytest.mark.parametrize("name", CASES)
def test_an_original_head_computes_what_its_publication_says(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    base = SplitModel(zoo.build(case.base, **case.changes))
    hidden = hidden_of(base)

    (head,) = find_heads(write(case, tmp_path), base)

    expected = formula(case, base, np.array(hidden[0]))
    assert difference(logits_of(head, hidden), expected) < 1e-4
    # The same in two chunks, with a cache.
    cache, tokens = head.new_cache(), mx.array([NEXT])
    parts = [head(hidden[:, at], tokens[:, at], cache) for at in (slice(0, 7), slice(7, 12))]
    again = np.array(head.logits(mx.concatenate(parts, axis=1))[0])
    assert difference(again, expected) < 1e-4


def divisible(path: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


@pytest.mark.parametrize("name", ["ernie4_5_moe", "longcat_flash"])
def test_a_layer_that_no_layer_of_the_model_is_like_is_quantised_like_them(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    model = zoo.build(case.base, **case.changes)
    nn.quantize(model, group_size=32, bits=4, class_predicate=divisible)
    base = SplitModel(model)
    hidden = hidden_of(base)

    (head,) = find_heads(write(case, tmp_path), base)

    assert (head.layers[0].mlp.up_proj.bits, head.layers[0].mlp.up_proj.group_size) == (4, 32)
    assert head.layers[0].self_attn.o_proj.bits == 4
    assert difference(logits_of(head, hidden), formula(case, base, np.array(hidden[0]))) < 0.5


@pytest.mark.parametrize("name", ["mimo_v2_flash", "longcat_flash", "step3p5"])
def test_a_head_of_its_own_kind_drafts_in_slots(name: str, tmp_path: Path) -> None:
    """Rows in one group, of several lengths, beyond the window: as the head alone says."""
    case = CASES[name]
    base = SplitModel(zoo.build(case.base, **case.changes))
    (head,) = find_heads(write(case, tmp_path), base)
    drafter = MtpDrafter(head, context_length=128)
    prompts = {("a", 0): tuple(range(3, 24)), ("b", 0): tuple(range(90, 99))}
    for key, prompt in prompts.items():
        drafter.join(draft_row(key, prompt, []))
        hidden = base.hidden(mx.array([prompt]), base.new_cache())
        drafter.hear(HiddenStates((HeardRow(key, 0, len(prompt)),), hidden))

    found = drafter.propose([DraftRoom(key, 4) for key in prompts])

    for proposal, prompt in zip(found, prompts.values(), strict=True):
        hidden = base.hidden(mx.array([prompt[:-1]]), base.new_cache())
        cache, tokens, expected = head.new_cache(), mx.array([prompt[1:]]), list[int]()
        for _ in range(4):
            hidden = head(hidden, tokens, cache)[:, -1:]
            expected.append(int(mx.argmax(head.logits(hidden)[0, -1]).item()))
            tokens = mx.array([expected[-1:]])
        assert list(proposal.tokens) == expected


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("kimi_linear", "no checkpoint with a head is known"),
        ("bailing_moe_linear", "what the layer of one"),
    ],
)
def test_families_whose_heads_cannot_be_loaded_are_refused_with_the_reason(
    name: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    base = SplitModel(zoo.build("llama"))
    base.name = name

    with pytest.raises(Unsupported, match=f"MTP heads of {name} cannot be used: .*{why}"):
        find_heads(tmp_path, base)


def test_a_head_with_a_window_that_is_not_known_is_refused(tmp_path: Path) -> None:
    case = CASES["exaone_moe"]
    write(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["mtp_layer_types"] = ["sliding_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(
        Unsupported, match=r"mtp_layer_types is \['sliding_attention'\]: only heads"
    ):
        find_heads(tmp_path, SplitModel(zoo.build(case.base, **case.changes)))
