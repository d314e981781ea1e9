"""Options become objects, or are refused with a sentence."""

from typing import Any

import msgspec
import pytest

from treadle_core.errors import InvalidRequest, Unsupported
from treadle_core.mlx_runtime.load import LoadedModel, make_runner
from treadle_core.testing import ByteTokenizer, zoo
from treadle_speculative import (
    AdaptiveController,
    ControllerConfig,
    FixedController,
    NgramConfig,
    NgramDrafter,
    SpeculativeConfig,
    make_controller,
    make_drafter,
)


def target() -> LoadedModel:
    runner = make_runner(zoo.build("llama"), zoo.config("llama"))
    tokenizer: Any = ByteTokenizer()
    return LoadedModel("tiny", runner, tokenizer, {})


def test_speculation_is_off_unless_asked_for() -> None:
    assert make_drafter(SpeculativeConfig(), target()) is None
    assert not SpeculativeConfig(method="ngram").lossy


def test_ngram_is_controlled_unless_its_number_is_fixed() -> None:
    config = SpeculativeConfig(
        method="ngram", controller=ControllerConfig(max_draft_tokens=3), ngram=NgramConfig(max_n=5)
    )

    assert isinstance(make_drafter(config, target()), NgramDrafter)
    controller = make_controller(config)
    assert isinstance(controller, AdaptiveController)
    assert controller.max_tokens == 3
    fixed = make_controller(SpeculativeConfig(method="ngram", num_tokens=5))
    assert isinstance(fixed, FixedController)
    assert fixed.max_tokens == 5


def test_a_single_file_holds_no_head() -> None:
    with pytest.raises(Unsupported, match="mtp needs mtp_head: the file of tiny holds no head"):
        make_drafter(SpeculativeConfig(method="mtp"), target())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "draft_model", "model": ""}, "needs a model"),
        ({"method": "ngram", "model": "small"}, "draft_model"),
        (
            {"method": "ngram", "mtp_head": "head"},
            "mtp_head means nothing unless the method is mtp",
        ),
        ({"lossy": True}, "lossy"),
        ({"num_tokens": 4}, "num_tokens"),
        (
            {"method": "ngram", "num_tokens": 4, "controller": ControllerConfig(margin=0.1)},
            "num_tokens",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_sentence(
    options: dict[str, Any], word: str
) -> None:
    with pytest.raises(Unsupported, match=word):
        SpeculativeConfig(**options)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"method": "magic"}, "method"),
        ({"method": "ngram", "num_tokens": 0}, "num_tokens"),
        ({"method": "ngram", "num_tokens": 32}, "num_tokens"),
        ({"method": "ngram", "lossy": "yes"}, "lossy"),
    ],
)
def test_wrong_values_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SpeculativeConfig(**options)

    assert caught.value.field == field


def test_unknown_options_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="optimistic"):
        msgspec.json.decode(b'{"method": "ngram", "optimistic": true}', type=SpeculativeConfig)
