"""One answer as its caller sees it: text, why it ended, usage and timings."""

from collections.abc import Callable

from treadle_core.errors import RequestFailed
from treadle_core.events import (
    DraftCounters,
    Failed,
    Finished,
    FinishReason,
    Progress,
    Timings,
    TokenOut,
    Usage,
)
from treadle_core.plan import Sampled
from treadle_core.ports import Tokenizer
from treadle_core.sequence import Sequence
from treadle_core.text import Detokenizer, StopMatcher


class Answer:
    """Follows one sequence from acceptance to its terminal event.

    Args:
        sequence: Its tokens.
        tokenizer: None gives no text.
        ends: Token ids that end it.
        drafts: What speculation did for it so far; None where nobody drafts.
    """

    def __init__(
        self,
        sequence: Sequence,
        tokenizer: Tokenizer | None,
        ends: frozenset[int],
        drafts: Callable[[], DraftCounters] | None = None,
    ) -> None:
        self.sequence = sequence
        self.reason: FinishReason | None = None
        self._ends = ends
        self._drafts = drafts
        self._stop: str | int | None = None
        self._detokenizer = Detokenizer(tokenizer.decode, sequence.prompt) if tokenizer else None
        stops = sequence.request.params.stop
        self._matcher = StopMatcher(stops) if stops else None
        self._admitted: float | None = None
        self._first: float | None = None
        self._prefilled = 0

    def admit(self, now: float) -> None:
        """It left the queue; only the first time counts."""
        if self._admitted is None:
            self._admitted = now

    def prefill(self, num_tokens: int) -> Progress | None:
        """The event of a prompt of which ``num_tokens`` are written, unless as much was told."""
        total = len(self.sequence.prompt)
        if self._first is not None or not self._prefilled < num_tokens < total - 1:
            return None
        self._prefilled = num_tokens
        return Progress(
            request_id=self.sequence.request.id,
            index=self.sequence.index,
            prefilled=num_tokens,
            total=total,
        )

    def take(self, sampled: Sampled, now: float) -> TokenOut:
        """Take in the token that was just appended to the sequence; sets :attr:`reason`.

        Raises:
            Exception: Whatever the request's constraint raises.
        """
        if self._first is None:
            self._first = now
        text = self._judge(sampled.token)
        return TokenOut(
            request_id=self.sequence.request.id,
            index=self.sequence.index,
            token=sampled.token,
            text=text,
            logprob=sampled.logprob,
            top_logprobs=sampled.top_logprobs,
        )

    def finish(self, reason: FinishReason, now: float) -> Finished:
        """The terminal event, with the text that was held back."""
        text = self._rest()
        if reason != "abort" and self.reason is not None:
            reason = self.reason  # the last text may hold a stop string
        return Finished(
            request_id=self.sequence.request.id,
            index=self.sequence.index,
            reason=reason,
            text=text,
            stop=self._stop if reason == "stop" else None,
            usage=self.usage(),
            timings=self._timings(now),
        )

    def fail(self, error: RequestFailed, now: float) -> Failed:
        """The terminal event of a failure."""
        return Failed(
            request_id=self.sequence.request.id,
            index=self.sequence.index,
            code=error.code,
            message=error.message,
            usage=self.usage(),
            timings=self._timings(now),
        )

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=len(self.sequence.prompt),
            completion_tokens=len(self.sequence.output),
            cached_tokens=self.sequence.num_cached,
            preemptions=self.sequence.num_preemptions,
            drafts=self._drafts() if self._drafts is not None else None,
        )

    def _judge(self, token: int) -> str:
        """The token's text, and whether it ends the answer."""
        params = self.sequence.request.params
        if token in self._ends and len(self.sequence.output) > params.min_tokens:
            self.reason = "stop"
            self._stop = token if token in params.stop_token_ids else None
            return ""
        complete = self.sequence.constraint is not None and self.sequence.constraint.advance(token)
        text = self._detokenizer.add(token) if self._detokenizer else ""
        if self._matcher is not None and len(self.sequence.output) >= params.min_tokens:
            text = self._matcher.feed(text)
            if self._matcher.found is not None:
                self._end_at(self._matcher.found)
                return text
        if complete:
            self.reason = "stop"
        elif len(self.sequence.output) >= self.sequence.max_tokens:
            self.reason = "length"
        return text

    def _end_at(self, stop: str) -> None:
        self.reason = "stop"
        self._stop = stop

    def _rest(self) -> str:
        """Text still held back; nothing after a stop string."""
        if self._matcher is not None and self._matcher.found is not None:
            return ""
        text = self._detokenizer.finish() if self._detokenizer else ""
        if self._matcher is None:
            return text
        text = self._matcher.feed(text)
        if self._matcher.found is not None:
            self._end_at(self._matcher.found)
            return text
        return text + self._matcher.flush()

    def _timings(self, now: float) -> Timings:
        arrival = self.sequence.arrival
        admitted = self._admitted if self._admitted is not None else now
        first = self._first if self._first is not None else now
        return Timings(
            queue=admitted - arrival,
            prefill=max(0.0, first - admitted),
            first_token=first - arrival,
            decode=now - first,
            total=now - arrival,
        )
