"""Interfaces that the engine asks for. They speak tokens, bytes and plain data, never arrays."""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from treadle_core.events import Event
from treadle_core.layers import ModelSpec
from treadle_core.plan import Plan, StepResult


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


class ChunkPolicy(Protocol):
    """How many prompt tokens a step may prefill; see :mod:`treadle_core.pacing`."""

    @property
    def overhead(self) -> int:
        """Tokens of the budget that beginning another chunk in the same step costs."""
        ...

    def budget(self, num_decoding: int, limit: int, num_waiting: int = 0) -> int:
        """Prompt tokens for the next step, from 1 to ``limit``.

        Args:
            num_decoding: Rows that decode in it.
            limit: Most tokens.
            num_waiting: Sequences without a row.
        """
        ...

    def observe(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        """What a part of a step took.

        Args:
            num_decoding: Rows that decoded in the step.
            num_prefill: Tokens of the chunk; 0 for the decode of all rows.
            seconds: How long that took.
        """
        ...


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end an answer: those of tokenizer, config and generation config together."""
        ...

    @property
    def special_tokens(self) -> frozenset[int]:
        """Ids that have no text of their own; decoding leaves them out."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids below this can be encoded or decoded."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the model's own opening token exactly once."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``; unknown ids and special tokens add nothing."""
        ...


class PendingStep(Protocol):
    """A step that was submitted."""

    def wait(self) -> StepResult:
        """Block until its tokens are there.

        Raises:
            Exception: Whatever the model raised; the runner has to be reset then.
        """
        ...


class Runner(Protocol):
    """The only place that touches the model. Used from one thread, the one that made it."""

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""
        ...

    def submit(self, plan: Plan) -> PendingStep:
        """Start a step and return before it is done.

        A row whose own processor or constraint raises is reported in the result and does not
        disturb the others.

        Raises:
            Exception: Whatever the model raised; the runner has to be reset then.
        """
        ...

    def reset(self) -> None:
        """Drop every row, buffer and pending step, as after construction."""
        ...

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        ...


@runtime_checkable
class TokenConstraint(Protocol):
    """Which tokens may come next for one answer: a grammar, a schema, a choice."""

    def mask(self) -> bytes | None:
        """Allowed next tokens: bit ``i % 8`` of byte ``i // 8`` is token i; None allows all."""
        ...

    def advance(self, token: int) -> bool:
        """``token`` was taken.

        Returns:
            Whether the answer is complete, so that it ends with ``stop``.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` tokens."""
        ...


class Observer(Protocol):
    """Is told what happens on the owner thread; returns quickly. If it raises, the engine ends."""

    def accepted(self, request_id: str) -> None:
        """A request was accepted."""
        ...

    def stepped(self, plan: Plan, result: StepResult) -> None:
        """A step was read."""
        ...

    def emitted(self, events: Iterable[Event]) -> None:
        """Events are about to be delivered."""
        ...
