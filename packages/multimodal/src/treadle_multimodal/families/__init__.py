"""What is known of each model family: a family that has not been checked is refused."""

from collections.abc import Mapping
from typing import Any

from treadle_core import Unsupported
from treadle_multimodal.families.base import Family
from treadle_multimodal.families.gemma3 import Gemma3
from treadle_multimodal.families.gemma4 import Gemma4
from treadle_multimodal.families.internvl import InternVl
from treadle_multimodal.families.pixtral import Pixtral
from treadle_multimodal.families.qwen_vl import QwenVl
from treadle_multimodal.families.smolvlm import SmolVlm

FAMILIES: dict[str, type[Family]] = {
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "idefics3": SmolVlm,
    "internvl": InternVl,
    "mistral3": Pixtral,
    "pixtral": Pixtral,
    "qwen2_5_vl": QwenVl,
    "qwen2_vl": QwenVl,
    "qwen3_5": QwenVl,
    "qwen3_5_moe": QwenVl,
    "qwen3_omni_moe": QwenVl,
    "qwen3_vl": QwenVl,
    "qwen3_vl_moe": QwenVl,
    "smolvlm": SmolVlm,
}
"""Families by the model type that a checkpoint's config names."""

UNFIT: dict[str, str] = {
    "gemma3n": "the words around its media are embedded by its encoders, which see media alone here",
    "internvl_chat": (
        "mlx-vlm writes its chats by a template of its own, not by the checkpoint's;"
        " checkpoints of the newer format, internvl, are taken"
    ),
    "llava": "mlx-vlm's processor for it fails with the present transformers",
    "phi4mm": "mlx-vlm changes all of its weights for prompts with media, so rows cannot share them",
}
"""Families that were looked at and cannot be taken, and why."""


def check_family(config: Mapping[str, Any]) -> type[Family]:
    """The family of a checkpoint.

    Args:
        config: The checkpoint's, as its ``config.json`` has it.

    Raises:
        Unsupported: It cannot be taken, or nobody has checked it.
    """
    model_type = str(config.get("model_type"))
    if model_type in UNFIT:
        raise Unsupported(f"media input for {model_type}: {UNFIT[model_type]}")
    family = FAMILIES.get(model_type)
    if family is None:
        raise Unsupported(
            f"media input for {model_type} has not been checked against mlx-vlm;"
            f" checked are {', '.join(FAMILIES)}"
        )
    return family


def make_family(config: Mapping[str, Any], processor: Any) -> Family:
    """What is known of a checkpoint's family.

    Args:
        config: The checkpoint's, as its ``config.json`` has it.
        processor: The checkpoint's, as mlx-vlm loads it.

    Raises:
        Unsupported: Nobody has checked it, or this way to use it.
    """
    return check_family(config)(config, processor)


__all__ = ["FAMILIES", "UNFIT", "Family", "check_family", "make_family"]
