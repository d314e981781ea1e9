"""Which drafter an engine gets and who controls it: options, and the objects that they become."""

from pathlib import Path
from typing import Literal

from msgspec import Struct

from treadle_core.drafting import DraftController, Drafter
from treadle_core.errors import InvalidRequest, Unsupported
from treadle_core.mlx_runtime.load import LoadedModel, load_draft_model
from treadle_core.request import check_bool, check_int
from treadle_speculative.controller import (
    MOST_TOKENS,
    AdaptiveController,
    ControllerConfig,
    FixedController,
)
from treadle_speculative.draft_model import DraftModelConfig, DraftModelDrafter
from treadle_speculative.mtp.drafter import MtpDrafter
from treadle_speculative.mtp.files import DESCRIPTION
from treadle_speculative.mtp.native import find_heads
from treadle_speculative.ngram import NgramConfig, NgramDrafter

Method = Literal["off", "ngram", "draft_model", "mtp"]
METHODS = ("off", "ngram", "draft_model", "mtp")


class SpeculativeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of speculative decoding. What cannot be honoured is refused.

    Attributes:
        method: Who drafts: ``ngram``, ``draft_model``, or ``mtp`` for the model's own head; ``off``
            for nobody.
        num_tokens: Draft exactly this many tokens for each row, whether it pays or not; None lets
            the controller decide.
        controller: How it decides.
        ngram: Options of the n-gram drafter.
        model: The draft model, which has the large model's tokenizer: a GGUF file, a directory or
            a Hub repository.
        draft_model: Options of the draft model's rows.
        mtp_head: Directory of a head that is not in the model's own checkpoint, or not for it
            alone; None takes the one that is there.
        lossy: Keep drafts without verifying them: answers are not the model's own. To be handed to
            the engine, which does it.
    """

    method: Method = "off"
    num_tokens: int | None = None
    controller: ControllerConfig = ControllerConfig()
    ngram: NgramConfig = NgramConfig()
    model: str | None = None
    draft_model: DraftModelConfig = DraftModelConfig()
    mtp_head: str | None = None
    lossy: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
            Unsupported: Two options contradict each other.
        """
        if self.method not in METHODS:
            raise InvalidRequest("method", self.method, ", ".join(METHODS))
        check_bool("lossy", self.lossy)
        if self.num_tokens is not None:
            check_int("num_tokens", self.num_tokens, 1, MOST_TOKENS)
        self._refuse()

    def _refuse(self) -> None:
        if self.method == "draft_model" and not self.model:
            raise Unsupported("method: draft_model needs a model")
        if self.method != "draft_model" and self.model is not None:
            raise Unsupported("model means nothing unless the method is draft_model")
        if self.method != "mtp" and self.mtp_head is not None:
            raise Unsupported("mtp_head means nothing unless the method is mtp")
        if self.lossy and self.method == "off":
            raise Unsupported("lossy: nobody drafts, the method is off")
        if self.num_tokens is not None and self.controller != ControllerConfig():
            raise Unsupported("num_tokens fixes the number of draft tokens: nothing controls it")
        if self.method == "off" and self.num_tokens is not None:
            raise Unsupported("num_tokens: nobody drafts, the method is off")


def make_drafter(config: SpeculativeConfig, target: LoadedModel) -> Drafter | None:
    """The drafter that the configuration asks for; None when speculation is off.

    Args:
        config: Who drafts.
        target: For which model. A draft model is loaded beside it, on the same thread.

    Raises:
        ModelLoadError: The draft model or the head cannot be used.
        Unsupported: It does not fit to ``target``.
    """
    if config.method == "draft_model":
        return load_draft_model_drafter(config, target)
    if config.method == "mtp":
        return load_mtp_drafter(config, target)
    return NgramDrafter(config.ngram) if config.method == "ngram" else None


def load_draft_model_drafter(config: SpeculativeConfig, target: LoadedModel) -> DraftModelDrafter:
    """A draft model beside the model that it drafts for.

    Raises:
        ModelLoadError: It cannot be used.
        Unsupported: It does not fit to ``target``.
    """
    assert config.model is not None, "checked with the other options"
    draft, num_known = load_draft_model(
        config.model,
        vocab_size=target.runner.spec.vocab_size,
        max_draft_tokens=make_controller(config).max_tokens,
    )
    return DraftModelDrafter(
        draft.runner, draft.tokenizer, target.tokenizer, config.draft_model, num_known=num_known
    )


def load_mtp_drafter(config: SpeculativeConfig, target: LoadedModel) -> MtpDrafter:
    """Heads over a model, whose hidden states they are told from now on.

    Raises:
        ModelLoadError: There is no head, or one does not fit.
        Unsupported: The model cannot have one.
    """
    folder = target.folder if config.mtp_head is None else Path(config.mtp_head)
    if folder is None:
        raise Unsupported(f"method: mtp needs mtp_head: the file of {target.name} holds no head")
    base = target.runner.split()
    # It takes reading every weight, and only heads that were made here name a model by it.
    named = (folder / DESCRIPTION).exists()
    heads = find_heads(folder, base, fingerprint=target.runner.fingerprint if named else "")
    drafter = MtpDrafter(*heads, context_length=target.runner.spec.context_length)
    target.runner.listen(drafter, base)
    return drafter


def make_controller(config: SpeculativeConfig) -> DraftController:
    """The controller that the configuration asks for."""
    if config.num_tokens is not None:
        return FixedController(config.num_tokens)
    return AdaptiveController(config.controller)
