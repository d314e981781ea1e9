"""Interfaces that the engine asks for. They speak tokens, bytes and plain data, never arrays."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from treadle_core.events import Event
from treadle_core.layers import ModelSpec
from treadle_core.plan import Plan, StepResult
from treadle_core.prefix import HostArray, Prefix, PrefixKey, PrefixStats, StateLayout


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

    def seconds(self, num_decoding: int) -> float:
        """How long a step with so many decoding rows may do something in place of a chunk.

        Above zero. It is something that loses nothing by being cut, however many prompts wait.
        """
        ...

    def fuses(self, num_decoding: int) -> bool:
        """Whether a chunk may go through the model beside so many decoding rows.

        Not while it has to be seen what either takes without the other.
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

    def observe_fused(self, num_decoding: int, num_prefill: int, seconds: float) -> None:
        """What a decode took together with a chunk that went through the model beside it.

        Args:
            num_decoding: Rows that decoded.
            num_prefill: Tokens of the chunk.
            seconds: How long both took.
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


class Encoder(Protocol):
    """Makes what a model sees of media, ahead of the chunks that show them.

    Used from the engine's thread alone. A prompt is what a request brought as its attachment.
    """

    def ready(self, prompt: Any, start: int, stop: int) -> int:
        """How far tokens ``[start, stop)`` of a prompt can be computed with what is there.

        Returns:
            ``stop``, or the first position that needs something to be encoded.
        """
        ...

    def encode(self, prompt: Any, start: int, seconds: float) -> None:
        """Work on what position ``start`` needs, and then on what the positions behind it need.

        Args:
            prompt: The row's.
            start: A position that is not ready.
            seconds: Stop then. It takes longer only where something cannot be cut.
        """
        ...

    def release(self, prompt: Any) -> None:
        """The prompt's row is gone: nothing has to be kept for it."""
        ...

    def reset(self) -> None:
        """Drop what is being encoded."""
        ...


class Runner(Protocol):
    """The only place that touches the model. Used from one thread, the one that made it."""

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of everything about the model that a row's state depends on."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """Longest draft of a row that a step may carry; rings hold as many tokens more.

        0 where rows cannot take tokens back: then no plan has drafts.
        """
        ...

    @property
    def encoder(self) -> Encoder | None:
        """Encodes the media of prompts when a plan says so; None where the model reads text.

        What it was not told to encode is encoded by the chunk that shows it.
        """
        ...

    def use(self, store: "PrefixStore") -> None:
        """Restore from, and save to, this store when a plan says so. Called once, at the start."""
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


class RowReader(Protocol):
    """A row's live state, to be copied from. Valid during one call."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are in it, all of them of the key that it is read for."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of :meth:`state`; 0 where every layer can be cut."""
        ...

    def tokens(self, start: int, stop: int) -> list[HostArray]:
        """Copies of tokens ``[start, stop)``: ``[heads, stop - start, dim]`` per token array."""
        ...

    def state(self) -> list[HostArray]:
        """Copies of what the other layers keep after exactly ``num_tokens`` tokens."""
        ...


class StoredRow(Protocol):
    """A stored prefix, to be copied into a row. Valid until its ticket is released."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it covers."""
        ...

    def tokens(self, index: int) -> HostArray:
        """All tokens of one token array, ``[heads, num_tokens, dim]``."""
        ...

    def state(self) -> list[HostArray]:
        """What :meth:`RowReader.state` gave when it was stored; empty where nothing was."""
        ...


class PrefixStore(Protocol):
    """Keeps the state of prefixes, so that it need not be computed twice.

    Used from the engine's thread alone. Whatever goes wrong inside (a damaged file, no room) is a
    miss or something not stored, counted, and never an exception.
    """

    @property
    def generation(self) -> int:
        """Counts clears. Whoever begins to compute a state notes it, and hands it in with it."""
        ...

    @property
    def busy(self) -> bool:
        """Whether more waits to be written than should: new prompts had better wait a little."""
        ...

    def attach(self, fingerprint: str, layout: StateLayout) -> None:
        """Serve one model from now on; called once, before anything else.

        Args:
            fingerprint: Digest of weights, config, settings and dtype. Keys are token ids, so the
                tokenizer has no part in it.
            layout: What its rows consist of.

        Raises:
            Unsupported: The store cannot honour one of its options for this model.
        """
        ...

    def find(self, key: PrefixKey, limit: int) -> Prefix:
        """The longest stored prefix of ``key``, held until its ticket is released.

        Args:
            key: What is wanted.
            limit: Most tokens: all but the last, whose logits are needed.
        """
        ...

    def longest(self, key: PrefixKey, limit: int) -> int:
        """Tokens that :meth:`find` would find now. Holds nothing, and counts as no lookup."""
        ...

    def poll(self, ticket: int) -> Prefix | None:
        """How a prefix that was not ready came out, under the same ticket; None if it still is not.

        It may be shorter than announced, or a miss, when the slower tier failed; a miss has no
        ticket any more.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Block until a prefix that was not ready may have become so, at most ``seconds``."""
        ...

    def prefetch(self, key: PrefixKey, limit: int) -> int | None:
        """``key`` will be looked up soon: begin to fetch it from a slower tier.

        Returns:
            A ticket, to be released once it was looked up, or will not be; None where nothing is
            fetched.
        """
        ...

    def load(self, ticket: int) -> StoredRow:
        """What a ready ticket holds."""
        ...

    def release(self, ticket: int) -> None:
        """Let go of what :meth:`find` found, or of what :meth:`prefetch` began to fetch.

        What is still on its way for nobody else is given up.
        """
        ...

    def insert(self, key: PrefixKey, row: RowReader, generation: int) -> None:
        """Keep the state of ``key``, as far as there is room; what is there already is not copied.

        Args:
            key: Exactly the tokens that are in the row.
            row: Their state. Where layers keep state that cannot be cut, a checkpoint is stored.
            generation: The store's generation when computing the state began.
        """
        ...

    def clear(self) -> None:
        """Forget everything, in every tier; what is being computed now will not be kept either."""
        ...

    def stats(self) -> PrefixStats:
        """Counters, as of now. May be called from any thread."""
        ...

    def close(self) -> None:
        """Write what is still to be written, and give everything back. Idempotent."""
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
