"""Drafters for lossless speculative decoding, and the controller that decides when to draft."""

from treadle_speculative.config import SpeculativeConfig, make_controller, make_drafter
from treadle_speculative.controller import AdaptiveController, ControllerConfig, FixedController
from treadle_speculative.draft_model import DraftModelConfig, DraftModelDrafter
from treadle_speculative.ngram import NgramConfig, NgramDrafter

__all__ = [
    "AdaptiveController",
    "ControllerConfig",
    "DraftModelConfig",
    "DraftModelDrafter",
    "FixedController",
    "NgramConfig",
    "NgramDrafter",
    "SpeculativeConfig",
    "make_controller",
    "make_drafter",
]
