"""Which drafter an engine gets and who controls it: options, and the objects that they become."""

from typing import Literal

from msgspec import Struct

from treadle_core.drafting import DraftController, Drafter
from treadle_core.errors import InvalidRequest, Unsupported
from treadle_core.request import check_bool, check_int
from treadle_speculative.controller import (
    MOST_TOKENS,
    AdaptiveController,
    ControllerConfig,
    FixedController,
)
from treadle_speculative.ngram import NgramConfig, NgramDrafter

Method = Literal["off", "ngram", "draft_model", "mtp"]
METHODS = ("off", "ngram", "draft_model", "mtp")
NOT_YET = {
    "draft_model": "a second model as drafter",
    "mtp": "the model's own multi-token prediction heads",
}


class SpeculativeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of speculative decoding. What cannot be honoured yet is refused.

    Attributes:
        method: Who drafts: ``ngram``; ``off`` for nobody. ``draft_model`` and ``mtp`` are names
            kept for drafters that do not exist yet.
        num_tokens: Draft exactly this many tokens for each row, whether it pays or not; None lets
            the controller decide.
        controller: How it decides.
        ngram: Options of the n-gram drafter.
        lossy: Accept drafts without verifying them, which changes the output. Does not exist yet.
    """

    method: Method = "off"
    num_tokens: int | None = None
    controller: ControllerConfig = ControllerConfig()
    ngram: NgramConfig = NgramConfig()
    lossy: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
            Unsupported: An option that does not exist yet, or two that contradict each other.
        """
        if self.method not in METHODS:
            raise InvalidRequest("method", self.method, ", ".join(METHODS))
        check_bool("lossy", self.lossy)
        if self.num_tokens is not None:
            check_int("num_tokens", self.num_tokens, 1, MOST_TOKENS)
        self._refuse()

    def _refuse(self) -> None:
        if self.method in NOT_YET:
            raise Unsupported(
                f"method: {self.method} ({NOT_YET[self.method]}) is not supported yet; "
                "ngram and off are"
            )
        if self.lossy:
            raise Unsupported("lossy: drafts are always verified; skipping that is not supported")
        if self.num_tokens is not None and self.controller != ControllerConfig():
            raise Unsupported("num_tokens fixes the number of draft tokens: nothing controls it")
        if self.method == "off" and self.num_tokens is not None:
            raise Unsupported("num_tokens: nobody drafts, the method is off")


def make_drafter(config: SpeculativeConfig) -> Drafter | None:
    """The drafter that the configuration asks for; None when speculation is off."""
    return NgramDrafter(config.ngram) if config.method == "ngram" else None


def make_controller(config: SpeculativeConfig) -> DraftController:
    """The controller that the configuration asks for."""
    if config.num_tokens is not None:
        return FixedController(config.num_tokens)
    return AdaptiveController(config.controller)
