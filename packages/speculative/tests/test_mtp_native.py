"""Heads that models were trained with, from the files of each family."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from treadle_core.errors import ModelLoadError, Unsupported
from treadle_core.mlx_runtime.split import SplitModel
from treadle_core.testing import zoo
from treadle_speculative.mtp.head import HeadForm
from treadle_speculative.mtp.native import find_heads

from .mtp_models import (
    FAMILIES,
    NEXT,
    base_of,
    difference,
    formula,
    hidden_of,
    logits_of,
    original_head,
    second_head,
    write_original,
)

every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
def test_an_original_head_computes_what_its_publication_says(name: str, tmp_path: Path) -> None:
    base = base_of(name)
    (head,) = find_heads(write_original(name, tmp_path), base)
    hidden = hidden_of(base)

    expected = formula(name, np.array(hidden[0]), NEXT)

    assert difference(logits_of(head, hidden), expected) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "mimo"])
def test_several_heads_are_each_what_its_tensors_say(name: str, tmp_path: Path) -> None:
    """The second is given what the first made, and the tokens one further on."""
    base = base_of(name)
    heads = find_heads(write_original(name, tmp_path, original_head(name), second_head(name)), base)
    hidden = hidden_of(base)

    between = heads[0](hidden, mx.array([NEXT]))
    tokens = [*NEXT[1:], 17]
    found = [head.logits(head(between, mx.array([tokens])))[0] for head in heads]

    assert len(heads) == 2
    expected = formula(name, np.array(between[0]), tokens, second_head(name))
    assert difference(np.array(found[1]), expected) < 1e-4
    assert difference(np.array(found[0]), expected) > 0.05


def test_a_head_that_the_config_speaks_of_has_to_be_there(tmp_path: Path) -> None:
    write_original("mimo", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for num, sentence in ((2, r"no tensor begins with 'model\.mtp_layers\.1\.'"), (9, "at most 8")):
        config["num_nextn_predict_layers"] = num
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelLoadError, match=sentence):
            find_heads(tmp_path, base_of("mimo"))


def test_a_head_of_a_quantised_model_is_quantised_like_it(tmp_path: Path) -> None:
    family = FAMILIES["qwen3_5"]
    model = zoo.build(family.base, **family.changes)
    nn.quantize(model, group_size=32, bits=4)
    base = SplitModel(model)

    (head,) = find_heads(write_original("qwen3_5", tmp_path), base)

    assert (head.layers[0].mlp.up_proj.bits, head.layers[0].mlp.up_proj.group_size) == (4, 32)
    assert not hasattr(head.fc, "bits")
    assert mx.all(mx.isfinite(head.logits(head(hidden_of(base), mx.array([NEXT])))))


@pytest.mark.parametrize("own", [False, True])
def test_copies_of_embedding_and_output_head_are_shared(own: bool, tmp_path: Path) -> None:
    base = base_of("glm4_moe")
    copies = {
        "embed_tokens.weight": np.array(base.embedding.weight) + 0.5 * own,
        "shared_head.head.weight": np.array(base.output.weight) - 0.5 * own,
    }
    write_original("glm4_moe", tmp_path, original_head("glm4_moe") | copies)
    hidden = hidden_of(base)

    (head,) = find_heads(tmp_path, base)

    assert (head.form.own_embedding, head.form.own_output) == (own, own)
    shared = difference(logits_of(head, hidden), formula("glm4_moe", np.array(hidden[0]), NEXT))
    assert (shared > 0.01) if own else (shared < 1e-4)


def test_a_file_made_for_mlx_has_its_norms_as_they_multiply(tmp_path: Path) -> None:
    base = base_of("qwen3_5")
    tensors = {f"mtp.{key}": mx.array(value) for key, value in original_head("qwen3_5").items()}
    write_original("qwen3_5", tmp_path)
    mx.save_safetensors(str(tmp_path / "model-mtp.safetensors"), tensors, {"format": "mlx"})
    hidden = hidden_of(base)

    logits = logits_of(find_heads(tmp_path, base)[0], hidden)

    assert difference(logits, formula("qwen3_5", np.array(hidden[0]), NEXT)) < 1e-4


def test_a_head_is_found_by_the_index_of_its_files(tmp_path: Path) -> None:
    write_original("mimo", tmp_path)
    (tmp_path / "model-00001.safetensors").write_bytes(b"not read")
    names = [f"model.mtp_layers.0.{key}" for key in original_head("mimo")]
    index = {"weight_map": {"lm_head.weight": "model-00001.safetensors"}}
    index["weight_map"] |= dict.fromkeys(names, "model-mtp.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    assert find_heads(tmp_path, base_of("mimo"))[0].form == HeadForm(hidden_first=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"eh_proj.weight": None}, r"tensor fc\.weight is missing: expected one of shape \(64, 128\)"),
        ({"eh_proj.weight": (64, 64)}, r"tensor fc\.weight has shape \(64, 64\), expected \(64, 128\)"),
        ({"mlp.experts.2.up_proj.weight": None}, r"tensor mlp\.experts\.2\.up_proj\.weight .* missing"),
        ({"mlp.experts.4.up_proj.weight": (32, 64)}, r"tensor layers\.0\.mlp\.\S+ of shape .*no place"),
        ({"self_attn.kv_b_proj.weight": None}, r"tensor layers\.0\.self_attn\.embed_q\.weight is missing"),
        ({"extra.weight": (3,)}, r"tensor layers\.0\.extra\.weight of shape \(3,\): the head has no place"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused(
    change: dict[str, tuple[int, ...] | None], sentence: str, tmp_path: Path
) -> None:
    tensors = original_head("deepseek_v3")
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.zeros(shape, dtype=np.float32)

    with pytest.raises(ModelLoadError, match=sentence):
        find_heads(write_original("deepseek_v3", tmp_path, tensors), base_of("deepseek_v3"))


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    source = write_original("qwen3_5", tmp_path / "qwen")
    with pytest.raises(ModelLoadError, match="model_type is 'qwen3_5', the model's is 'mimo'"):
        find_heads(source, base_of("mimo"))
    smaller = SplitModel(zoo.build("qwen3_5", num_hidden_layers=8))
    with pytest.raises(ModelLoadError, match="num_hidden_layers is 4, the model's is 8: another"):
        find_heads(source, smaller)
    (source / "config.json").write_text(json.dumps({"model_type": "glm4_moe_lite_mtp"}))
    with pytest.raises(ModelLoadError, match="is for glm4_moe_lite, the model is qwen3_5"):
        find_heads(source, base_of("qwen3_5"))


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    zoo.save_checkpoint("qwen3_5", tmp_path / "plain")
    with pytest.raises(ModelLoadError, match="it holds no MTP head: no tensor begins with 'mtp"):
        find_heads(tmp_path / "plain", base_of("qwen3_5"))
    zoo.save_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(
        Unsupported, match="MTP heads of llama are not known; those of bailing_moe, deep"
    ):
        find_heads(tmp_path / "llama", SplitModel(zoo.build("llama")))
    with pytest.raises(ModelLoadError, match="there is no such directory"):
        find_heads(tmp_path / "nowhere", base_of("qwen3_5"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        find_heads(tmp_path / "empty", base_of("qwen3_5"))
