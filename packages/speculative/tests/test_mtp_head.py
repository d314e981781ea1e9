from pathlib import Path

import mlx.core as mx
import pytest

from treadle_core.errors import ModelLoadError, Unsupported
from treadle_core.mlx_runtime.split import SplitModel
from treadle_core.testing import zoo
from treadle_speculative.mtp.files import load_head, parameters, save_head
from treadle_speculative.mtp.head import HeadForm, MtpHead

from .mtp_models import randomised

TOKENS = [7, 301, 45, 88, 9, 120, 33]


def split(family: str = "llama", seed: int = 0) -> SplitModel:
    return SplitModel(zoo.build(family, seed=seed))


def test_a_model_without_full_attention_gets_no_head() -> None:
    with pytest.raises(Unsupported, match="mamba2: no layer has full attention"):
        MtpHead(split("mamba2"))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "deepseek_v32", "qwen3_next"])
def test_a_head_in_chunks_is_the_head_in_one(family: str) -> None:
    model = split(family)
    head = randomised(MtpHead(model))
    tokens = mx.array([TOKENS])
    hidden = model.hidden(tokens, model.new_cache())

    whole = head.logits(head(hidden, tokens))
    cache = head.new_cache()
    parts = [head(hidden[:, at], tokens[:, at], cache) for at in (slice(0, 3), slice(3, 7))]
    first = head(hidden[:, 3:], tokens[:, 3:])

    chunked = head.logits(mx.concatenate(parts, axis=1))
    assert mx.abs(whole - chunked).max().item() < 1e-4 * mx.abs(whole).max().item()
    # It does look at what was before.
    assert mx.abs(parts[1] - first).max().item() > 1e-3


@pytest.mark.parametrize("form", [HeadForm(), HeadForm(hidden_first=True)])
def test_a_head_is_its_formula(form: HeadForm) -> None:
    model = split()
    head = randomised(MtpHead(model, form))
    tokens = mx.array([TOKENS])
    hidden = model.hidden(tokens, model.new_cache())

    e, h = head.norm_embed(model.embed(tokens)), head.norm_hidden(hidden)
    pair = [h, e] if form.hidden_first else [e, h]
    x = mx.concatenate(pair, axis=-1) @ head.fc.weight.T
    x = head.layers[0](x, "causal")
    expected = model.logits(head.norm(x))

    assert mx.allclose(head.logits(head(hidden, tokens)), expected, atol=1e-4)
    assert mx.allclose(head(hidden, tokens), head.norm(x), atol=1e-4)


def test_a_saved_head_comes_back(tmp_path: Path) -> None:
    model = split()
    head = randomised(MtpHead(model, HeadForm(own_output=True)))
    save_head(head, tmp_path, base="abc")

    loaded = load_head(tmp_path, model, fingerprint="abc")

    assert loaded.form == head.form
    pairs = zip(parameters(head), parameters(loaded), strict=True)
    assert all(a[0] == b[0] and mx.array_equal(a[1], b[1]) for a, b in pairs)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mtp_head.json",
        "mtp_head.safetensors",
    ]


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    save_head(MtpHead(split()), tmp_path, base="abc")

    with pytest.raises(ModelLoadError, match="made for other weights than the model's"):
        load_head(tmp_path, split(), fingerprint="def")
    with pytest.raises(ModelLoadError, match="model_type is llama, the model's is qwen3"):
        load_head(tmp_path, split("qwen3"))
    with pytest.raises(ModelLoadError, match="hidden_size is 64, the model's is 32"):
        load_head(tmp_path, SplitModel(zoo.build("llama", hidden_size=32)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"fc.weight": None}, r"tensor fc.weight is missing: expected one of shape \(64, 128\)"),
        ({"extra": mx.zeros((3,))}, r"tensor extra of shape \(3,\): the head has no place for it"),
        (
            {"norm.weight": mx.zeros((65,))},
            r"tensor norm.weight has shape \(65,\), expected \(64,\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: dict[str, mx.array | None], sentence: str
) -> None:
    head = MtpHead(split())
    save_head(head, tmp_path)
    tensors = {**dict(parameters(head)), **change}
    mx.save_safetensors(
        str(tmp_path / "mtp_head.safetensors"),
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
    )

    with pytest.raises(ModelLoadError, match=sentence):
        load_head(tmp_path, split())


@pytest.mark.parametrize("text", ["", "{}", '{"format": "other"}'])
def test_a_damaged_description_is_an_error_with_a_sentence(tmp_path: Path, text: str) -> None:
    save_head(MtpHead(split()), tmp_path)
    (tmp_path / "mtp_head.json").write_text(text)

    with pytest.raises(ModelLoadError, match=r"mtp_head\.json cannot be read"):
        load_head(tmp_path, split())
