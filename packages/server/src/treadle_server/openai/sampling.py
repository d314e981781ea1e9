"""From the fields of a request to sampling parameters: request, then defaults, then OpenAI's own."""

from typing import TypeVar

from treadle_core import InvalidRequest, SamplingParams
from treadle_core.request import MAX_STOP_STRINGS, check_float
from treadle_server.errors import NotOffered
from treadle_server.openai.schema import ChatRequest, CompletionRequest, Generation
from treadle_server.settings import MAX_SECONDS, RequestDefaults

T = TypeVar("T")

MAX_DIGITS = 18

MAX_TOKEN_IDS = 2**19
"""In a list of a request; no vocabulary is larger."""


def chat_params(wire: ChatRequest, defaults: RequestDefaults) -> SamplingParams:
    """Sampling of a chat.

    Raises:
        InvalidRequest: A field cannot be honoured.
    """
    return params(
        wire,
        defaults,
        max_tokens=chat_max_tokens(wire, defaults),
        logprobs=bool(wire.logprobs),
        top_logprobs=wire.top_logprobs or 0,
    )


def completion_params(wire: CompletionRequest, defaults: RequestDefaults) -> SamplingParams:
    """Sampling of a plain completion, whose ``logprobs`` is a number.

    Raises:
        InvalidRequest: A field cannot be honoured.
    """
    count = wire.logprobs
    try:
        return params(
            wire,
            defaults,
            max_tokens=limited("max_tokens", wire.max_tokens, defaults),
            logprobs=count is not None,
            top_logprobs=count or 0,
        )
    except InvalidRequest as error:
        if error.field == "top_logprobs":
            raise InvalidRequest("logprobs", error.value, error.limit) from None
        raise


def params(
    wire: Generation,
    defaults: RequestDefaults,
    *,
    max_tokens: int,
    logprobs: bool,
    top_logprobs: int,
) -> SamplingParams:
    """Sampling from the fields that both kinds share.

    Raises:
        InvalidRequest: A field cannot be honoured.
    """
    for field in ("logit_bias", "stop_token_ids"):
        count = len(getattr(wire, field) or ())
        if count > MAX_TOKEN_IDS:
            raise InvalidRequest(field, f"{count} token ids", f"at most {MAX_TOKEN_IDS}")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=wire.min_tokens or 0,
        temperature=either(wire.temperature, defaults.default_temperature),
        top_p=either(wire.top_p, defaults.default_top_p),
        top_k=either(wire.top_k, defaults.default_top_k),
        min_p=either(wire.min_p, defaults.default_min_p),
        repetition_penalty=either(wire.repetition_penalty, defaults.default_repetition_penalty),
        presence_penalty=either(wire.presence_penalty, defaults.default_presence_penalty),
        frequency_penalty=either(wire.frequency_penalty, 0.0),
        logit_bias=logit_bias(wire.logit_bias),
        seed=wire.seed,
        stop=stop_strings(wire.stop),
        stop_token_ids=tuple(wire.stop_token_ids or ()),
        ignore_eos=bool(wire.ignore_eos),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )


def either(value: T | None, default: T) -> T:
    """``value`` if the request says it."""
    return default if value is None else value


def chat_max_tokens(wire: ChatRequest, defaults: RequestDefaults) -> int:
    """The limit of a chat's answer, by either of its names.

    Raises:
        InvalidRequest: Both are given and differ, or the limit is above the server's.
    """
    old, new = wire.max_tokens, wire.max_completion_tokens
    if None not in (old, new) and old != new:
        raise InvalidRequest("max_tokens", old, f"max_completion_tokens ({new}), or nothing")
    if new is not None:
        return limited("max_completion_tokens", new, defaults)
    return limited("max_tokens", old, defaults)


def limited(field: str, value: int | None, defaults: RequestDefaults) -> int:
    """The limit of an answer, within the server's.

    Raises:
        InvalidRequest: It is above the server's, or below one.
    """
    most = defaults.max_request_tokens
    if value is None:
        return min(defaults.max_tokens, most)
    if not 1 <= value <= most:
        raise InvalidRequest(field, value, f"an integer from 1 to {most}")
    return value


def logit_bias(wire: dict[str, float] | None) -> dict[int, float]:
    """The bias by token id; JSON spells the ids as strings.

    Raises:
        InvalidRequest: A key is not a token id.
    """
    return {token_id(key): value for key, value in (wire or {}).items()}


def token_id(key: str) -> int:
    """A token id from its decimal spelling.

    Raises:
        InvalidRequest: It is spelled otherwise.
    """
    if not (key.isascii() and key.isdecimal() and len(key) <= MAX_DIGITS):
        raise InvalidRequest("logit_bias", key, "token ids as keys")
    return int(key)


def stop_strings(wire: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings, one or several.

    Raises:
        InvalidRequest: There are too many, or one is empty.
    """
    stops = (wire,) if isinstance(wire, str) else tuple(wire or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", len(stops), f"at most {MAX_STOP_STRINGS} strings")
    if not all(stops):
        raise InvalidRequest("stop", wire, "non-empty strings")
    return stops


def deadline(wire: Generation, defaults: RequestDefaults) -> float | None:
    """Seconds that the request may take; None is no limit.

    Raises:
        InvalidRequest: The request's own is not a positive number of seconds.
    """
    if wire.timeout is not None:
        check_float("timeout", wire.timeout, 0.0, MAX_SECONDS, exclusive_low=True)
        return wire.timeout
    return defaults.timeout or None


def check_offered(wire: Generation, *, priorities: bool) -> None:
    """Refuse what both kinds can ask for and nobody does here.

    Args:
        wire: The request.
        priorities: Whether the engine's policy looks at priorities.

    Raises:
        InvalidRequest: A field asks for it.
    """
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest("stream_options", "an object", "null, unless stream is true")
    if wire.stream_options is not None and wire.stream_options.include_obfuscation:
        raise NotOffered("stream_options.include_obfuscation", "obfuscation")
    if wire.priority and not priorities:
        raise NotOffered("priority", "priorities (it was not started with --policy priority)")


def include_usage(wire: Generation) -> bool:
    """Whether the stream ends with a usage chunk."""
    return bool(wire.stream_options and wire.stream_options.include_usage)
