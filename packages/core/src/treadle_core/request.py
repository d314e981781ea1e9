"""What a caller asks for: prompt, sampling parameters, limits. Plain data, checked on creation."""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct

from treadle_core.errors import InvalidRequest
from treadle_core.prefix import MediaSpan

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
MAX_SEED = 2**63 - 1

LogitsProcessor = Callable[[Sequence[int], Any], Any]
"""``f(generated_tokens, logits[V]) -> logits[V]``, called on the owner thread for each token.

It receives exactly the tokens generated so far (never the prompt), on every path, and may hold
state. A request with one decodes without look-ahead, because its next call needs the last token.
"""


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen and when it ends.

    All of it belongs to the row: nothing leaks to the requests beside it. The order is penalties,
    logit bias, masks (grammar, ``min_tokens``), temperature, top-k, top-p, min-p.

    Attributes:
        max_tokens: Most tokens to generate; None means as many as the context holds.
        min_tokens: End tokens are masked until this many tokens were generated.
        temperature: 0 is greedy.
        top_p: Smallest set of tokens with at least this probability; 1 is off.
        top_k: Keep this many most likely tokens; 0 is off.
        min_p: Drop tokens less likely than this share of the most likely one; 0 is off.
        repetition_penalty: Divides (or multiplies, when negative) the logits of tokens that the
            prompt or the answer contains; 1 is off.
        presence_penalty: Subtracted from the logits of tokens in the answer; 0 is off.
        frequency_penalty: Subtracted once per occurrence in the answer; 0 is off.
        logit_bias: Added to the logits of these token ids.
        seed: Makes the tokens reproducible, whatever runs beside; None draws one.
        stop: Strings that end the answer; the string itself is not part of it.
        stop_token_ids: Token ids that end the answer, besides the model's own end tokens.
        ignore_eos: Do not end at the model's own end tokens.
        logprobs: Report the log-probability of each token, from the model's own logits.
        top_logprobs: Report this many most likely alternatives too; needs ``logprobs``.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})"
            )
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_float("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        check_int("top_k", self.top_k, 0)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, exclusive_low=True)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_logit_bias(self.logit_bias)
        if self.seed is not None:
            check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        check_stop(self.stop)
        check_tokens("stop_token_ids", self.stop_token_ids)
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("logprobs", self.logprobs)
        check_int("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", self.top_logprobs, "logprobs to be on")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class Request(Struct, frozen=True, kw_only=True):
    """One request, as an engine accepts it.

    Attributes:
        id: Unique among unfinished requests; events carry it.
        prompt: Text (encoded by the engine's tokenizer) or token ids; never empty.
        params: Sampling and limits.
        n: How many independent answers; each has its own index and its own terminal event.
        priority: Lower is served earlier under the PRIORITY policy.
        deadline: Seconds after which the request fails; None is no limit.
        elapsed: Seconds of them that were over at acceptance, such as for making the prompt.
        cache_salt: Separates reuse of stored KV between tenants; it never changes tokens.
        boundaries: Numbers of prompt tokens after which others may go on differently, such as the
            ends of messages: a prefix store keeps state there that it could not cut later.
        logits_processors: Called in order on the row's logits for each token.
        constraint: Makes a :class:`treadle_core.ports.TokenConstraint` for each answer.
        media: Where media stand in a prompt of token ids; stored KV is reused for the same only.
        attachment: What the model is given of the prompt besides token ids, as the model's own
            package made it.
    """

    id: str
    prompt: str | tuple[int, ...]
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    n: int = 1
    priority: int = 0
    deadline: float | None = None
    elapsed: float = 0.0
    cache_salt: str | None = None
    boundaries: tuple[int, ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    constraint: Callable[[], Any] | None = None
    media: tuple[MediaSpan, ...] = ()
    attachment: Any = None

    def __post_init__(self) -> None:
        """Check every field that needs no model.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        check_text("id", self.id)
        check_prompt(self.prompt)
        check_params(self.params)
        check_int("n", self.n, 1, MAX_CHOICES)
        check_int("priority", self.priority, -(2**31), 2**31)
        if self.deadline is not None:
            check_float("deadline", self.deadline, 0.0, math.inf, exclusive_low=True)
        check_float("elapsed", self.elapsed, 0.0, math.inf)
        if self.cache_salt is not None:
            check_text("cache_salt", self.cache_salt)
        for boundary in self.boundaries:
            check_int("boundaries", boundary, 1)
        check_callables("logits_processors", self.logits_processors)
        check_callables("constraint", () if self.constraint is None else (self.constraint,))
        check_media(self.media, self.prompt)
        if self.attachment is not None and not self.media:
            raise InvalidRequest("attachment", type(self.attachment).__name__, "media beside it")


def check_int(field: str, value: object, low: int, high: int | None = None) -> None:
    """Raise InvalidRequest unless ``value`` is an int (not a bool) in [low, high]."""
    bounds = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(field, value, bounds)
    if value < low or (high is not None and value > high):
        raise InvalidRequest(field, value, bounds)


def check_float(
    field: str, value: object, low: float, high: float, *, exclusive_low: bool = False
) -> None:
    """Raise InvalidRequest unless ``value`` is a finite number in the interval."""
    above = f"above {low:g}" if exclusive_low else f"from {low:g}"
    bounds = f"a number {above}" if high == math.inf else f"a number {above} to {high:g}"
    if not isinstance(value, int | float) or isinstance(value, bool) or not is_finite(value):
        raise InvalidRequest(field, value, bounds)
    if value > high or value < low or (exclusive_low and value == low):
        raise InvalidRequest(field, value, bounds)


def is_finite(value: float) -> bool:
    """Whether a number is finite as a float; a long integer is not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_text(field: str, value: object) -> None:
    """Raise InvalidRequest unless ``value`` is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise InvalidRequest(field, value, "a non-empty string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, ascii(value), "text without lone surrogates") from None


def check_bool(field: str, value: object) -> None:
    """Raise InvalidRequest unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise InvalidRequest(field, value, "true or false")


def check_logit_bias(bias: object) -> None:
    """Raise InvalidRequest unless every key is a token id and every value a number."""
    if not isinstance(bias, dict):
        raise InvalidRequest("logit_bias", bias, "a mapping of token ids to numbers")
    for token, value in cast("dict[object, object]", bias).items():
        check_int("logit_bias", token, 0)
        check_float(f"logit_bias[{token}]", value, -100.0, 100.0)


def check_stop(stop: object) -> None:
    """Raise InvalidRequest unless ``stop`` is a short tuple of non-empty strings."""
    if not isinstance(stop, tuple):
        raise InvalidRequest("stop", stop, "a tuple of strings")
    texts = cast("tuple[object, ...]", stop)
    if len(texts) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", texts, f"at most {MAX_STOP_STRINGS} strings")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequest("stop", texts, "non-empty strings")


def check_prompt(prompt: object) -> None:
    """Raise InvalidRequest unless ``prompt`` is text or token ids, and not empty."""
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("prompt", prompt, "at least one token")
        return
    if not isinstance(prompt, tuple) or not prompt:
        limit = "text or a non-empty tuple of token ids"
        raise InvalidRequest("prompt", cast("object", prompt), limit)
    check_tokens("prompt", cast("object", prompt))


def check_media(media: object, prompt: str | tuple[int, ...]) -> None:
    """Raise InvalidRequest unless ``media`` are spans of a prompt of token ids."""
    if not isinstance(media, tuple):
        raise InvalidRequest("media", media, "a tuple of spans")
    spans = cast("tuple[object, ...]", media)
    if spans and isinstance(prompt, str):
        raise InvalidRequest("media", spans, "a prompt of token ids beside them")
    for span in spans:
        if not isinstance(span, MediaSpan) or span.end > len(prompt):
            raise InvalidRequest("media", span, f"a span of the prompt's {len(prompt)} tokens")


def check_tokens(field: str, tokens: object) -> None:
    """Raise InvalidRequest unless ``tokens`` is a tuple of token ids."""
    if not isinstance(tokens, tuple):
        raise InvalidRequest(field, tokens, "a tuple of token ids")
    for token in cast("tuple[object, ...]", tokens):
        check_int(field, token, 0)


def check_params(params: object) -> None:
    """Raise InvalidRequest unless ``params`` are sampling parameters."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest("params", params, "SamplingParams")


def check_callables(field: str, functions: object) -> None:
    """Raise InvalidRequest unless ``functions`` is a tuple of callables."""
    if not isinstance(functions, tuple):
        raise InvalidRequest(field, functions, "a tuple of callables")
    if not all(callable(function) for function in cast("tuple[object, ...]", functions)):
        raise InvalidRequest(field, cast("object", functions), "a tuple of callables")
