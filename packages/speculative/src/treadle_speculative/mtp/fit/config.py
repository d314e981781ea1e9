"""How a head is fitted: options, checked."""

from typing import Literal

from msgspec import Struct

from treadle_core.errors import InvalidRequest
from treadle_core.request import check_bool, check_float, check_int, check_text

Targets = Literal["soft", "text"]
TARGETS = ("soft", "text")
MOST_DEPTH = 8


class FitConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a head is fitted, but for the model and the place of the result.

    Attributes:
        data: Files to learn from: ``.jsonl`` has an object per line with ``text`` or ``messages``,
            anything else is plain text.
        sequence_length: Tokens of a sequence.
        batch_size: Sequences of a step.
        epochs: How often every sequence is learned from.
        held_out: Share of the tokens that is not learned from, but measured with.
        learning_rate: The highest; it rises over the first steps and then falls.
        warm_up: Share of the steps over which it rises.
        clip_norm: Longest gradient.
        depth: Tokens that the head learns to guess in a chain, each from its own guess's state.
        targets: What it learns to say: ``soft`` the model's own distribution, ``text`` the token
            that the text has.
        shortlist: Tokens of the vocabulary that a sequence is learned from with, its own among
            them.
        seed: Makes two runs the same.
        save_every: Steps between checkpoints.
        generate: Answers of the model to prompts from the data, to learn from too.
        generate_tokens: Most tokens of such an answer.
        temperature: How they are sampled.
        measure: Answers that the result is measured on.
        keep_mb: Mebibytes for hidden states of the model that are kept from one epoch to the next.
        overwrite: Whether a finished head, or another run, may be replaced.
    """

    data: tuple[str, ...]
    sequence_length: int = 256
    batch_size: int = 4
    epochs: int = 4
    held_out: float = 0.05
    learning_rate: float = 1e-3
    warm_up: float = 0.05
    clip_norm: float = 1.0
    depth: int = 1
    targets: Targets = "soft"
    shortlist: int = 2048
    seed: int = 0
    save_every: int = 50
    generate: int = 0
    generate_tokens: int = 200
    temperature: float = 0.7
    measure: int = 24
    keep_mb: int = 1024
    overwrite: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        if not self.data:
            raise InvalidRequest("data", self.data, "at least one file")
        for path in self.data:
            check_text("data", path)
        check_int("sequence_length", self.sequence_length, 2 * MOST_DEPTH, 65536)
        for field, low, high in (
            ("batch_size", 1, 4096),
            ("epochs", 1, 10_000),
            ("depth", 1, MOST_DEPTH),
            ("shortlist", 1, None),
            ("save_every", 1, None),
            ("generate", 0, 1_000_000),
            ("generate_tokens", 1, 65536),
            ("measure", 1, 10_000),
            ("keep_mb", 0, None),
            ("seed", 0, 2**32 - 1),
        ):
            check_int(field, getattr(self, field), low, high)
        check_float("held_out", self.held_out, 0.0, 0.5, exclusive_low=True)
        check_float("learning_rate", self.learning_rate, 0.0, 1.0, exclusive_low=True)
        check_float("warm_up", self.warm_up, 0.0, 1.0)
        check_float("clip_norm", self.clip_norm, 0.0, 1e6, exclusive_low=True)
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_bool("overwrite", self.overwrite)
        if self.targets not in TARGETS:
            raise InvalidRequest("targets", self.targets, ", ".join(TARGETS))
