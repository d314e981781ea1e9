"""From a checkpoint on disk to answers: heads beside the model, and heads of their own."""

from pathlib import Path

import pytest

from treadle_core import Engine, ModelLoadError, Request, SamplingParams, collect
from treadle_core.mlx_runtime.load import ModelOptions
from treadle_core.mlx_runtime.open import open_engine
from treadle_core.testing import zoo
from treadle_speculative.config import SpeculativeConfig, make_controller, make_drafter
from treadle_speculative.mtp import save_head

from .mtp_models import FAMILIES, bigram, original_head, second_head, write_original

PROMPTS = ((1, 2, 3, 4, 5, 6, 7, 8, 9), (40, 41), (70, 71, 72, 73))


def checkpoint(name: str, folder: Path, num: int) -> Path:
    """A family's checkpoint with its heads, as its authors publish it, but for the base's layout."""
    family = FAMILIES[name]
    write_original(name, folder, *[original_head(name), second_head(name)][:num])
    return zoo.save_checkpoint(family.base, folder, **family.changes)


def opened(folder: Path, config: SpeculativeConfig | None = None) -> Engine:
    make = None
    if config is not None:
        chosen = config
        make = lambda: (lambda loaded: make_drafter(chosen, loaded), make_controller(chosen))  # noqa: E731
    return open_engine(ModelOptions(model=str(folder)), make_drafting=make)[0]


def answers(engine: Engine) -> dict[str, tuple[int, ...]]:
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=14, ignore_eos=True)
        engine.add(Request(id=f"r{i}", prompt=prompt, params=params))
    events = []
    while engine.has_work:
        events += engine.step()
    return {key[0]: tuple(completion.tokens) for key, completion in collect(events).items()}


@pytest.mark.parametrize(("name", "num"), [("glm4_moe", 1), ("mimo", 2)])
def test_a_model_drafts_with_the_heads_in_its_checkpoint(
    name: str, num: int, tmp_path: Path
) -> None:
    folder = checkpoint(name, tmp_path, num)
    engine = opened(folder, SpeculativeConfig(method="mtp", num_tokens=3))

    assert answers(engine) == answers(opened(folder))

    total = engine.stats().drafts
    assert total is not None
    assert total.failures == 0
    assert total.attempted > 50


def test_a_head_of_its_own_drafts_for_the_model_that_it_was_made_for(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    config = SpeculativeConfig(method="mtp", num_tokens=2, mtp_head=str(tmp_path / "head"))
    plain = opened(folder)
    _, head = bigram("llama", 1.0)
    save_head(head, tmp_path / "head", base=plain._runner.fingerprint)

    engine = opened(folder, config)

    assert answers(engine) == answers(plain)
    total = engine.stats().drafts
    assert total is not None
    assert total.attempted > 30
    other = zoo.save_checkpoint("llama", tmp_path / "other", seed=1)
    with pytest.raises(ModelLoadError, match="the head was made for other weights"):
        opened(other, config)


def test_a_checkpoint_without_a_head_is_refused_at_the_start(tmp_path: Path) -> None:
    family = FAMILIES["mimo"]
    folder = zoo.save_checkpoint(family.base, tmp_path / "plain", **family.changes)
    config = SpeculativeConfig(method="mtp")
    with pytest.raises(ModelLoadError, match=r"no MTP head: no tensor begins with 'model\.mtp_la"):
        opened(folder, config)
    head = original_head("mimo")
    del head["input_proj.weight"]
    write_original("mimo", tmp_path / "damaged", head)
    with pytest.raises(ModelLoadError, match=r"tensor fc\.weight is missing"):
        opened(folder, SpeculativeConfig(method="mtp", mtp_head=str(tmp_path / "damaged")))
