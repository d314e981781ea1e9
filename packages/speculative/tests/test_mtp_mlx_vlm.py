"""Heads compared with mlx-vlm's own code for them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="the default environment leaves mlx-vlm out")

from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.split_mtp import split_mtp

from treadle_core.mlx_runtime.split import SplitModel
from treadle_core.testing import zoo
from treadle_speculative.mtp.head import MtpHead
from treadle_speculative.mtp.native import find_heads

from .mtp_models import (
    NEXT,
    as_bfloat16,
    base_of,
    difference,
    hidden_of,
    logits_of,
    original_head,
    randomised,
    same,
    write_as_deepseek,
    write_original,
)
from .test_mtp_families import NEMOTRON, nemotron_head


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_head_of_qwen_computes_what_mlx_vlm_does(name: str, tmp_path: Path) -> None:
    base = base_of(name)
    (head,) = find_heads(write_original(name, tmp_path), base)
    hidden = hidden_of(base)
    drafter: Any = load_drafter(str(tmp_path))[0]
    drafter.reset(base.model)

    theirs = drafter._forward_tokens(mx.array([NEXT]), hidden, mx.int32)
    chained = drafter._forward_tokens(mx.array([[99]]), theirs[:, -1:], mx.int32)
    cache = head.new_cache()
    ours = head(hidden, mx.array([NEXT]), cache)

    assert difference(np.array(ours), np.array(theirs)) < 1e-4
    assert (
        difference(np.array(head(ours[:, -1:], mx.array([[99]]), cache)), np.array(chained)) < 1e-4
    )


def test_a_head_of_glm_5_computes_what_mlx_vlm_does(tmp_path: Path) -> None:
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    more = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    changes = {"model_type": "glm_moe_dsa", "rope_parameters": rope, "norm_topk_prob": True, **more}
    base = SplitModel(zoo.build("deepseek_v32", **changes))
    like = randomised(MtpHead(base))
    write_as_deepseek(like, tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**zoo.config("deepseek_v32", **changes), "num_nextn_predict_layers": 1})
    )
    hidden = hidden_of(base)

    (head,) = find_heads(tmp_path, base)
    drafter: Any = load_drafter(str(tmp_path))[0]
    drafter._input_embed = base.embedding
    drafter._cache = drafter.make_cache()
    theirs = drafter._forward_tokens(mx.array([NEXT]), hidden, mx.int32)

    assert same(head, like)
    assert difference(np.array(head(hidden, mx.array([NEXT]))), np.array(theirs)) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4_moe_lite"])
def test_a_head_that_mlx_vlm_split_off_is_the_original(name: str, tmp_path: Path) -> None:
    base = base_of(name)
    source = write_original(name, tmp_path / "original")
    if name == "glm4_moe_lite":
        # It makes them half as precise; values that it keeps are needed to compare.
        rounded = {key: as_bfloat16(value) for key, value in original_head(name).items()}
        write_original(name, source, rounded)
    split_mtp(str(source), str(tmp_path / "split"))

    (head,), (original,) = find_heads(tmp_path / "split", base), find_heads(source, base)

    assert same(head, original)


def test_a_head_that_was_quantised_when_split_off_stays_so(tmp_path: Path) -> None:
    base = base_of("qwen3_5_moe")
    source = write_original("qwen3_5_moe", tmp_path / "original")
    split_mtp(str(source), str(tmp_path / "split"), q_bits=8, q_group_size=32)

    (head,), (original,) = find_heads(tmp_path / "split", base), find_heads(source, base)

    assert head.layers[0].self_attn.q_proj.bits == 8
    assert head.layers[0].mlp.switch_mlp.up_proj.group_size == 32
    hidden = hidden_of(base)
    assert 1e-6 < difference(logits_of(head, hidden), logits_of(original, hidden)) < 0.05


def test_a_head_of_nemotron_is_the_one_that_mlx_vlm_splits_off(tmp_path: Path) -> None:
    base = SplitModel(zoo.build("nemotron_h", **NEMOTRON))
    source = tmp_path / "original"
    source.mkdir()
    tensors = {f"mtp.{name}": mx.array(value) for name, value in nemotron_head().items()}
    mx.save_safetensors(str(source / "model-mtp.safetensors"), tensors, {"format": "pt"})
    config = zoo.config("nemotron_h", **NEMOTRON)
    config |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    (source / "config.json").write_text(json.dumps(config))
    split_mtp(str(source), str(tmp_path / "split"))

    (head,), (original,) = find_heads(tmp_path / "split", base), find_heads(source, base)

    assert head.form == original.form
    hidden = hidden_of(base)
    assert difference(logits_of(head, hidden), logits_of(original, hidden)) < 0.02
