"""What an engine tells: a closed union of frozen Structs.

For each answer of an accepted request there are zero or more ``Progress`` and ``TokenOut`` events
and then exactly one terminal event, ``Finished`` or ``Failed``.
"""

from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "abort"]


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A token and its log-probability."""

    token: int
    logprob: float


BypassReason = Literal["off", "no_draft", "pending", "no_room", "unsupported", "failed"]
"""Why a row decoded a step without a draft although speculation is configured.

``off``: the controller found that it does not pay. ``no_draft``: the drafter had nothing to
propose. ``pending``: the drafter has not read all of the row yet. ``no_room``: the row is about to end, or its buffer is full. ``unsupported``: the row or
the model has something that cannot be verified or taken back. ``failed``: the drafter was switched
off because it raised.
"""


class DraftCounters(Struct, frozen=True, kw_only=True):
    """What speculation did for a request, or for all.

    Attributes:
        verifications: Forwards of a row that looked at a draft.
        attempted: Draft tokens that they looked at.
        accepted: Those of them that became part of the answer.
        committed: All tokens that these forwards added to the answer.
        bypassed: Forwards of a row without a draft, by reason.
        failures: Drafters switched off because they raised.
        lossy: Accepted draft tokens that the model was not asked about; always 0, unless the engine
            was told to be lossy.
    """

    verifications: int = 0
    attempted: int = 0
    accepted: int = 0
    committed: int = 0
    bypassed: dict[BypassReason, int] = {}
    failures: int = 0
    lossy: int = 0

    @property
    def rejected(self) -> int:
        """Draft tokens that were looked at in vain."""
        return self.attempted - self.accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of attempted tokens; None before there was one."""
        return self.accepted / self.attempted if self.attempted else None

    @property
    def forwards_saved(self) -> int:
        """Forwards of a row that plain decoding would have needed on top."""
        return self.committed - self.verifications

    def __add__(self, other: "DraftCounters") -> "DraftCounters":
        """Both together."""
        bypassed = dict(self.bypassed)
        for reason, number in other.bypassed.items():
            bypassed[reason] = bypassed.get(reason, 0) + number
        return DraftCounters(
            verifications=self.verifications + other.verifications,
            attempted=self.attempted + other.attempted,
            accepted=self.accepted + other.accepted,
            committed=self.committed + other.committed,
            bypassed=bypassed,
            failures=self.failures + other.failures,
            lossy=self.lossy + other.lossy,
        )


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of one answer.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens generated, the one that ended the answer included.
        cached_tokens: Prompt tokens whose prefill was really skipped.
        preemptions: How often the answer was put back into the queue.
        drafts: What speculation did for it; None where nobody drafts.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0
    drafts: DraftCounters | None = None


class Timings(Struct, frozen=True, kw_only=True):
    """Where the time went, in seconds.

    Attributes:
        queue: From acceptance to admission.
        prefill: From admission to the first token.
        first_token: From acceptance to the first token.
        decode: From the first token to the end.
        total: From acceptance to the end.
    """

    queue: float
    prefill: float
    first_token: float
    decode: float
    total: float


class Progress(Struct, frozen=True, kw_only=True, tag="progress"):
    """A long prompt advanced: ``prefilled`` of ``total`` tokens are in the KV cache."""

    request_id: str
    index: int
    prefilled: int
    total: int


class TokenOut(Struct, frozen=True, kw_only=True, tag="token"):
    """One generated token.

    Attributes:
        request_id: The request.
        index: Which of its ``n`` answers.
        token: The token id.
        text: Text that became certain with it; may be empty (part of a character, or held back
            because a stop string may be beginning).
        logprob: Log-probability of the token, for requests that ask.
        top_logprobs: Most likely tokens first, for requests that ask.
    """

    request_id: str
    index: int
    token: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class Finished(Struct, frozen=True, kw_only=True, tag="finished"):
    """The answer ended.

    Attributes:
        request_id: The request.
        index: Which of its ``n`` answers.
        reason: ``stop`` (end token or stop string), ``length`` or ``abort``.
        text: Text that was held back until now, to be appended.
        stop: The stop string or token id that ended it, when the request named one.
        usage: Token counts.
        timings: Where the time went.
    """

    request_id: str
    index: int
    reason: FinishReason
    text: str
    stop: str | int | None
    usage: Usage
    timings: Timings


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """The answer ended with an error.

    Attributes:
        request_id: The request.
        index: Which of its ``n`` answers.
        code: The error's code, as in :mod:`treadle_core.errors`.
        message: The sentence for people.
        usage: Token counts up to the failure.
        timings: Where the time went.
    """

    request_id: str
    index: int
    code: str
    message: str
    usage: Usage
    timings: Timings


Event = Progress | TokenOut | Finished | Failed
Terminal = Finished | Failed
