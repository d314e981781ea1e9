"""A step as data: what the scheduler decides, what the runner reports.

Rows of a group are ordered: ``[0, decoding)`` decode together, ``[decoding, all)`` prefill one by
one. A row's tokens are ``[0, start)`` in the KV already and ``[start, start + n)`` in this step.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from treadle_core.events import TokenLogprob
from treadle_core.prefix import PrefixKey
from treadle_core.request import LogitsProcessor, SamplingParams

Key = tuple[str, int]
"""An answer: request id and index."""


class Resize(Struct, frozen=True, tag="resize"):
    """Give a group this many rows of this capacity; 0 rows drops its buffers."""

    group: int
    rows: int
    capacity: int


class Open(Struct, frozen=True, tag="open"):
    """A row joins at the end of a group, empty, to be prefilled."""

    group: int
    row: int


class Promote(Struct, frozen=True, tag="promote"):
    """The prefilled row ``row`` trades places with row ``to`` and decodes from now on."""

    group: int
    row: int
    to: int
    row_length: int
    to_length: int


class Move(Struct, frozen=True, array_like=True):
    """Copy the first ``length`` tokens of row ``source`` over row ``target``."""

    source: int
    target: int
    length: int


class Close(Struct, frozen=True, tag="close"):
    """Row ``row`` leaves; ``moves`` fill the hole."""

    group: int
    row: int
    moves: tuple[Move, ...]


class Transfer(Struct, frozen=True, tag="transfer"):
    """A decoding row goes on as the last decoding row ``to`` of a roomier group.

    The source row is closed by the instruction that follows.
    """

    group: int
    row: int
    to_group: int
    to: int
    moves: tuple[Move, ...]
    length: int


class Restore(Struct, frozen=True, kw_only=True, tag="restore"):
    """Copy the stored prefix of a ticket into an empty row, as its first tokens."""

    key: Key
    group: int
    row: int
    ticket: int
    num_tokens: int


class Save(Struct, frozen=True, kw_only=True, tag="save"):
    """Store what a row holds: the state after exactly the tokens of ``prefix``.

    ``generation`` is the store's, when computing the state began.
    """

    key: Key
    group: int
    row: int
    prefix: PrefixKey
    generation: int


Arrangement = Resize | Open | Promote | Close | Transfer
Instruction = Arrangement | Restore | Save


class RowSetup(Struct, frozen=True, kw_only=True):
    """Everything that a row brings along when it joins, besides the tokens of its chunks.

    Attributes:
        key: The answer.
        params: Its sampling parameters.
        seed: 64-bit seed of its randomness.
        end_tokens: Ids masked until ``min_tokens`` were generated.
        prompt: Prompt token ids.
        output: The answer's tokens so far; a live view that grows as tokens are read.
        processors: Called on the row's logits before sampling.
        constraint: A token constraint, or None.
        attachment: What the model is given of the prompt besides token ids, or None.
    """

    key: Key
    params: SamplingParams
    seed: int
    end_tokens: tuple[int, ...]
    prompt: Sequence[int]
    output: Sequence[int]
    processors: tuple[LogitsProcessor, ...] = ()
    constraint: Any = None
    attachment: Any = None


class Prefill(Struct, frozen=True, kw_only=True, tag="prefill"):
    """Write ``tokens`` at ``[start, start + len(tokens))`` of a row; nothing is sampled."""

    key: Key
    group: int
    row: int
    tokens: tuple[int, ...]
    start: int


class Encode(Struct, frozen=True, kw_only=True, tag="encode"):
    """Encode media of a row's prompt that its token ``start`` needs, for about ``seconds``.

    What is not done by then goes on with the next such instruction.
    """

    key: Key
    start: int
    seconds: float


Work = Instruction | Prefill | Encode


class Decode(Struct, frozen=True, kw_only=True):
    """Feed one token to a row and sample the next; with a draft, more of both.

    ``token`` is None when the token was sampled in the step before and not read yet; a step with a
    draft knows all of its tokens. One forward of a group is as wide as its longest draft: its other
    rows are padded, and what that leaves behind a row's tokens is overwritten later.

    Attributes:
        key: The answer.
        group: Its group.
        row: Its row there.
        start: Position of ``token``.
        num_output: Tokens of the answer, ``token`` included.
        token: What is fed.
        draft: What may follow it; each row keeps as much as it chooses itself.
        more: What does follow it, known like ``token`` and fed with it. The row samples behind all
            of it. Only in steps without drafts.
    """

    key: Key
    group: int
    row: int
    start: int
    num_output: int
    token: int | None
    draft: tuple[int, ...] = ()
    more: tuple[int, ...] = ()


class Plan(Struct, frozen=True, kw_only=True):
    """One step. Executed in the order of the fields.

    Attributes:
        number: Counts plans.
        leaves: Answers whose sampling state can be forgotten.
        joins: Sampling state of the answers that join.
        work: Changes of rows and buffers, prefill chunks and what is encoded for them, in the order
            that they rely on.
        decodes: Rows that sample: all decoding rows, ordered by group and row.
        lossy: Keep its drafts unverified, as far as no mask forbids them.
        fuses: Whether its last chunk may go through the model together with its decodes.
    """

    number: int
    leaves: tuple[Key, ...] = ()
    joins: tuple[RowSetup, ...] = ()
    work: tuple[Work, ...] = ()
    decodes: tuple[Decode, ...] = ()
    lossy: bool = False
    fuses: bool = True

    @property
    def prefills(self) -> tuple[Prefill, ...]:
        """The prefill chunks alone."""
        return tuple(item for item in self.work if isinstance(item, Prefill))

    @property
    def encodes(self) -> tuple[Encode, ...]:
        """What is encoded, alone."""
        return tuple(item for item in self.work if isinstance(item, Encode))

    @property
    def delays_streams(self) -> bool:
        """Whether it does more than decode, and the running streams wait for that."""
        return any(isinstance(item, Prefill | Encode) for item in self.work)

    def split(self) -> "tuple[Plan, Plan]":
        """What arranges rows before the model runs, and all from there on."""
        items = enumerate(self.work)
        first = next((i for i, item in items if isinstance(item, Prefill | Encode)), len(self.work))
        before = replace(self, work=self.work[:first], decodes=())
        return before, replace(self, leaves=(), joins=(), work=self.work[first:])

    @property
    def restored(self) -> frozenset[Key]:
        """Answers whose rows it restores."""
        return frozenset(item.key for item in self.work if isinstance(item, Restore))

    @property
    def tickets(self) -> tuple[int, ...]:
        """Tickets of the stored prefixes that it restores."""
        return tuple(item.ticket for item in self.work if isinstance(item, Restore))

    @property
    def saved(self) -> frozenset[Key]:
        """Answers whose rows it stores."""
        return frozenset(item.key for item in self.work if isinstance(item, Save))

    @property
    def has_work(self) -> bool:
        """Whether the plan runs the model."""
        return bool(self.decodes) or self.delays_streams

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing at all to do."""
        return not (self.decodes or self.work or self.leaves or self.joins)

    @property
    def has_drafts(self) -> bool:
        """Whether some row may get more than one token; the next plan depends on how many."""
        return any(decode.draft for decode in self.decodes)

    @property
    def has_first_tokens(self) -> bool:
        """Whether somebody gets a first token."""
        return any(decode.num_output == 0 for decode in self.decodes)

    @property
    def keys(self) -> tuple[Key, ...]:
        """Answers that the model runs for."""
        items = (*self.encodes, *self.prefills, *self.decodes)
        return tuple(dict.fromkeys(item.key for item in items))


class Sampled(Struct, frozen=True):
    """One token that a row got from a step."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class StepResult(Struct, frozen=True, kw_only=True):
    """What a step produced, read on the host.

    Attributes:
        number: The plan's number.
        sampled: The new tokens of each decoded row, in order: as much of its draft as it chose
            itself, and one more.
        failures: Rows whose own code raised or whose logits are not finite, and why; after the
            tokens in ``sampled``, if there are any.
        seconds: Time the step took, as far as it can be told apart from its neighbours.
        prefill_seconds: What each prompt chunk took, in the plan's order, as far as they were
            waited for.
        fused: Whether the last chunk went through the model together with the decode: then it is
            not among ``prefill_seconds``, and what both took is the rest of ``seconds``.
        encode_seconds: What encoding media took.
    """

    number: int
    sampled: dict[Key, tuple[Sampled, ...]]
    failures: dict[Key, str]
    seconds: float
    prefill_seconds: tuple[float, ...] = ()
    fused: bool = False
    encode_seconds: float = 0.0

    @property
    def decode_seconds(self) -> float:
        """What the decode of all rows took, with the chunk that went with it."""
        return max(0.0, self.seconds - sum(self.prefill_seconds) - self.encode_seconds)
