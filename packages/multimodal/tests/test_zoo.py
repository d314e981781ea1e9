"""The tiny checkpoints work with mlx-vlm as they are, from loading to generating."""

import json
from pathlib import Path

import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from mlx_vlm import generate, load

from treadle_multimodal.testing import zoo

from .vlm import Reference, chat, difference, image, loaded

every_family = pytest.mark.parametrize("family", zoo.FAMILIES)


@every_family
def test_mlx_vlm_loads_and_generates_by_itself(family: str, tmp_path: Path) -> None:
    model, processor = load(str(zoo.save_checkpoint(family, tmp_path)))
    media = (image(0), image(1, 120, 50))
    prompt = loaded(family).preprocessor.render(chat("compare", media))

    pictures = [item.image for item in media]
    result = generate(model, processor, prompt, pictures, max_tokens=6, temperature=0.0)

    assert result.generation_tokens == 6


@every_family
def test_logits_depend_on_the_picture_its_place_and_the_words(family: str) -> None:
    one = Reference(family, "what?", (image(0), image(1))).logits([])

    for text, media in [
        ("what?", (image(2), image(1))),
        ("what?", (image(1), image(0))),
        ("When?", (image(0), image(1))),
    ]:
        assert difference(Reference(family, text, media).logits([]), one) > 1e-3


def test_weights_depend_on_the_seed_only(tmp_path: Path) -> None:
    files = [
        zoo.save_checkpoint("smolvlm", tmp_path / name, seed=seed) / "model.safetensors"
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    first, second, other = (path.read_bytes() for path in files)

    assert first == second != other


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="unknown family 'blip', known are: qwen2_vl"):
        zoo.save_checkpoint("blip", tmp_path)


def test_keys_of_inner_sections_can_be_otherwise(tmp_path: Path) -> None:
    changes = {"config.json": {"num_hidden_layers": 1, "vision_config": {"depth": 2}}}
    usual = json.loads((zoo.save_checkpoint("qwen2_vl", tmp_path) / "config.json").read_text())

    folder = zoo.save_checkpoint("qwen2_vl", tmp_path, changes=changes)

    found = json.loads((folder / "config.json").read_text())
    vision = {**usual["vision_config"], "depth": 2}
    assert found == {**usual, "num_hidden_layers": 1, "vision_config": vision}
