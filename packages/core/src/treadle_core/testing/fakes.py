"""Small fakes of the ports: a clock, a tokenizer, token constraints and an observer."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from treadle_core.events import Event
from treadle_core.plan import Plan, StepResult
from treadle_core.prefix import MediaSpan

PAD, BEGIN, END = 256, 257, 258
VOCAB_SIZE = 259


class ManualClock:
    """A clock that moves when it is told to.

    Args:
        start: The first reading.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0, f"time does not go back ({seconds} s)"
        self._now += seconds


class ByteTokenizer:
    """Token id = byte value, then three special tokens: padding, begin and end.

    Args:
        opens: Whether an encoded text begins with the begin token.
    """

    def __init__(self, *, opens: bool = False) -> None:
        self._opens = opens

    @property
    def end_tokens(self) -> frozenset[int]:
        """The end token."""
        return frozenset({END})

    @property
    def special_tokens(self) -> frozenset[int]:
        """Padding, begin and end."""
        return frozenset({PAD, BEGIN, END})

    @property
    def vocab_size(self) -> int:
        """Bytes and special tokens."""
        return VOCAB_SIZE

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text`` in UTF-8."""
        return [*([BEGIN] if self._opens else []), *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text whose bytes these are; what is no character becomes U+FFFD."""
        return bytes(token for token in tokens if 0 <= token < 256).decode(errors="replace")


class ListConstraint:
    """The answer is one of these token sequences.

    Complete when no longer choice begins with what was taken.

    Args:
        choices: The sequences, none empty.
        vocab_size: Tokens that a mask covers.
    """

    def __init__(self, choices: Iterable[Sequence[int]], vocab_size: int = VOCAB_SIZE) -> None:
        self._choices = [tuple(choice) for choice in choices]
        self._vocab_size = vocab_size
        self._taken: tuple[int, ...] = ()

    def mask(self) -> bytes | None:
        """The tokens with which a choice goes on."""
        return pack_mask(self._next(), self._vocab_size)

    def advance(self, token: int) -> bool:
        """Take a token.

        Raises:
            ValueError: No choice goes on with it.
        """
        if token not in self._next():
            raise ValueError(f"token {token} does not continue {self._taken}")
        self._taken += (token,)
        return not self._next()

    def rollback(self, num_tokens: int) -> None:
        """Take tokens back."""
        self._taken = self._taken[: len(self._taken) - num_tokens]

    def _next(self) -> set[int]:
        taken = self._taken
        return {
            choice[len(taken)]
            for choice in self._choices
            if len(choice) > len(taken) and choice[: len(taken)] == taken
        }


class ScriptedConstraint:
    """Allows what it is told to, one entry per token, and may raise.

    Attributes:
        taken: The tokens that it was advanced with.

    Args:
        allowed: Tokens allowed at each position; None allows all, and so does the time after.
        complete_after: Tokens after which the answer is complete; None is never.
        mask_error: Raised by :meth:`mask` once ``error_after`` tokens were taken.
        advance_error: Raised by :meth:`advance` once ``error_after`` tokens were taken.
        error_after: See there.
        vocab_size: Tokens that a mask covers.
    """

    def __init__(
        self,
        allowed: Sequence[Collection[int] | None] = (),
        *,
        complete_after: int | None = None,
        mask_error: Exception | None = None,
        advance_error: Exception | None = None,
        error_after: int = 0,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.taken: list[int] = []
        self._allowed = list(allowed)
        self._complete_after = complete_after
        self._mask_error = mask_error
        self._advance_error = advance_error
        self._error_after = error_after
        self._vocab_size = vocab_size

    def mask(self) -> bytes | None:
        """The tokens of this position's entry."""
        if self._mask_error is not None and len(self.taken) >= self._error_after:
            raise self._mask_error
        allowed = self._entry()
        return None if allowed is None else pack_mask(allowed, self._vocab_size)

    def advance(self, token: int) -> bool:
        """Take a token."""
        if self._advance_error is not None and len(self.taken) >= self._error_after:
            raise self._advance_error
        self.taken.append(token)
        return len(self.taken) == self._complete_after

    def rollback(self, num_tokens: int) -> None:
        """Take tokens back."""
        del self.taken[len(self.taken) - num_tokens :]

    def _entry(self) -> Collection[int] | None:
        position = len(self.taken)
        return self._allowed[position] if position < len(self._allowed) else None


class ScriptedEncoder:
    """A :class:`treadle_core.ports.Encoder` whose prompts are the spans of their media.

    Args:
        pieces: Into how many pieces encoding an item is cut, by its digest.
        piece_seconds: What each of them takes.
        keeps: Whether what was encoded stays when its prompt's row is gone.
        broken: Digests of items that cannot be encoded.

    Attributes:
        num_pieces: Pieces that were encoded.
    """

    def __init__(
        self,
        pieces: Mapping[bytes, int],
        *,
        piece_seconds: float = 0.0,
        keeps: bool = True,
        broken: Collection[bytes] = (),
    ) -> None:
        self.num_pieces = 0
        self._pieces = dict(pieces)
        self._left = dict(pieces)
        self._piece_seconds = piece_seconds
        self._keeps = keeps
        self._broken = frozenset(broken)
        self._seconds = 0.0

    def ready(self, prompt: Sequence[MediaSpan] | None, start: int, stop: int) -> int:
        """How far a prompt can be computed."""
        missing = (span for span in prompt or () if self._left[span.digest])
        within = (max(span.start, start) for span in missing if span.end > start)
        return min(min(within, default=stop), stop)

    def encode(self, prompt: Sequence[MediaSpan], start: int, seconds: float) -> None:
        """As many pieces as fit, and at least one, of what stands at ``start`` alone."""
        assert seconds > 0, f"no time to encode: {seconds}"
        (digest,) = {span.digest for span in prompt if span.start <= start < span.end}
        if digest in self._broken:
            raise ValueError(f"cannot encode {digest!r}")
        fitting = int(seconds / self._piece_seconds) if self._piece_seconds else self._left[digest]
        num = max(1, min(fitting, self._left[digest]))
        self._left[digest] -= num
        self._seconds += num * self._piece_seconds
        self.num_pieces += num

    def take_seconds(self) -> float:
        """What was spent since it was asked before."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def release(self, prompt: Sequence[MediaSpan]) -> None:
        """A row is gone."""
        if not self._keeps:
            self._left.update({span.digest: self._pieces[span.digest] for span in prompt})

    def reset(self) -> None:
        """Drop what is being encoded."""
        unfinished = {digest for digest, left in self._left.items() if left}
        self._left.update({digest: self._pieces[digest] for digest in unfinished})


class RecordingObserver:
    """Keeps everything it is told.

    Attributes:
        requests: Ids of the accepted requests.
        steps: Plans that were read, with their results.
        events: Events, in order of delivery.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.steps: list[tuple[Plan, StepResult]] = []
        self.events: list[Event] = []

    def accepted(self, request_id: str) -> None:
        """A request was accepted."""
        self.requests.append(request_id)

    def stepped(self, plan: Plan, result: StepResult) -> None:
        """A step was read."""
        self.steps.append((plan, result))

    def emitted(self, events: Iterable[Event]) -> None:
        """Events are about to be delivered."""
        self.events.extend(events)


def pack_mask(allowed: Collection[int], vocab_size: int) -> bytes:
    """The bit mask of a token constraint: bit ``i % 8`` of byte ``i // 8`` is token i."""
    packed = bytearray(-(-vocab_size // 8))
    for token in allowed:
        packed[token // 8] |= 1 << token % 8
    return bytes(packed)
