"""A list of prompts in, a list of answers out, through any engine."""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from treadle_core.engine import Engine
from treadle_core.errors import failure_for
from treadle_core.events import (
    Event,
    Failed,
    Finished,
    Progress,
    Timings,
    TokenLogprob,
    TokenOut,
    Usage,
)
from treadle_core.request import Request, SamplingParams


class Completion(Struct, kw_only=True):
    """One answer.

    Attributes:
        tokens: Generated token ids.
        text: Their text, stop string excluded; empty without a tokenizer.
        reason: ``stop``, ``length``, ``abort`` or ``error``.
        logprobs: Log-probability of each token, if the request asked.
        top_logprobs: Most likely alternatives of each token, if the request asked.
        usage: Token counts.
        timings: Where the time went.
        error: What failed, when ``reason`` is ``error``.
        stop: The stop string or token id that ended it, when the request named one.
    """

    tokens: list[int]
    text: str
    reason: str
    logprobs: list[float]
    top_logprobs: list[tuple[TokenLogprob, ...]]
    usage: Usage | None = None
    timings: Timings | None = None
    error: Exception | None = None
    stop: str | int | None = None


def collect(events: Iterable[Event]) -> dict[tuple[str, int], Completion]:
    """Completions by request id and index, from events in order."""
    found: dict[tuple[str, int], Completion] = {}
    for event in events:
        key = (event.request_id, event.index)
        completion = found.get(key)
        if completion is None:
            completion = found[key] = Completion(
                tokens=[], text="", reason="", logprobs=[], top_logprobs=[]
            )
        add_event(completion, event)
    return found


def add_event(completion: Completion, event: Event) -> None:
    """Take one event of an answer into its completion."""
    match event:
        case TokenOut():
            completion.tokens.append(event.token)
            completion.text += event.text
            if event.logprob is not None:
                completion.logprobs.append(event.logprob)
                completion.top_logprobs.append(event.top_logprobs)
        case Finished():
            completion.text += event.text
            completion.reason = event.reason
            completion.stop = event.stop
            completion.usage, completion.timings = event.usage, event.timings
        case Failed():
            completion.reason = "error"
            completion.error = failure_for(event.code, event.request_id, event.message)
            completion.usage, completion.timings = event.usage, event.timings
        case Progress():
            pass


def run(engine: Engine, requests: Iterable[Request]) -> list[Event]:
    """Add requests, step until the engine has nothing to do, return all events."""
    for request in requests:
        engine.add(request)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return events


def generate_batch(
    engine: Engine,
    prompts: Iterable[str | tuple[int, ...] | list[int]],
    params: SamplingParams | list[SamplingParams] | None = None,
) -> list[Completion]:
    """Answers to prompts, in their order, whatever their number.

    Prompts wait outside the engine while its queue is full, so that their number is not bounded
    by it.

    Args:
        engine: An engine without other work.
        prompts: Texts or token ids.
        params: For all, or one for each.

    Raises:
        InvalidRequest: A prompt or its parameters cannot be honoured; all are aborted.
    """
    prompts = list(prompts)
    each = params if isinstance(params, list) else [params or SamplingParams()] * len(prompts)
    requests = [
        Request(
            id=f"batch-{number}",
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            params=chosen,
        )
        for number, (prompt, chosen) in enumerate(zip(prompts, each, strict=True))
    ]
    try:
        found = collect(_feed(engine, requests))
    except BaseException:
        for request in requests:
            engine.abort(request.id)
        engine.flush()
        raise
    return [found[(request.id, 0)] for request in requests]


def _feed(engine: Engine, requests: list[Request]) -> Iterator[Event]:
    """All events of requests that are added as the queue has room."""
    todo = list(reversed(requests))
    while todo or engine.has_work:
        while todo and engine.has_room:
            engine.add(todo.pop())
        yield from engine.step()
