"""``POST /v1/completions``."""

from collections.abc import Iterator, Sequence
from typing import TypeGuard

from anyio import from_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle_core import InvalidRequest, PromptTooLong, Request
from treadle_server.errors import NotOffered
from treadle_server.http import read_body, unless_left
from treadle_server.openai.exchange import TimeLimit, make_header, reply
from treadle_server.openai.sampling import (
    check_offered,
    completion_params,
    deadline,
    either,
)
from treadle_server.openai.schema import COMPLETION, CompletionRequest
from treadle_server.openai.shapes import CompletionShape
from treadle_server.serving import Serving
from treadle_server.tokenizer import BoundedTokenizer
from treadle_server.validation import decode

Prompt = str | tuple[int, ...]


class Completions:
    """Continues texts.

    Args:
        serving: The engine and its settings.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def post(self, http: HttpRequest) -> Response:
        """The continuations of one or several prompts, whole or as a stream.

        Raises:
            TreadleError: The request cannot be served; the application writes the reply.
        """
        serving = self._serving
        wire = decode(COMPLETION, await read_body(http, serving.config.http.max_body_bytes))
        header = make_header(serving, wire, "cmpl")
        requests = await unless_left(http.receive, lambda: self._requests(wire, header.id))
        logprobs = requests[0].params.logprobs
        shape = CompletionShape(header, serving.token_names, logprobs=logprobs)
        return reply(serving, wire, requests, shape)

    async def _requests(self, wire: CompletionRequest, request_id: str) -> list[Request]:
        serving, defaults = self._serving, self._serving.config.defaults
        check_offered(wire, priorities=serving.priorities)
        check_completion(wire)
        params = completion_params(wire, defaults)
        n = either(wire.n, 1)
        self._check_number(wire.prompt, n)
        prompts = split(wire.prompt)
        serving.check_answers("prompt", len(prompts) * n)
        tokenizer = serving.prompt_tokenizer
        limit = TimeLimit(deadline(wire, defaults))
        with limit.preparing(request_id):
            encoded = await serving.text_work(lambda: list(encoded_all(tokenizer, prompts)))
        return [
            Request(
                id=request_id if number == 0 else f"{request_id}-{number}",
                prompt=serving.check_size("prompt", prompt),
                cache_salt=wire.cache_salt,
                params=params,
                n=n,
                priority=wire.priority or 0,
                deadline=limit.seconds,
                elapsed=limit.elapsed,
            )
            for number, prompt in enumerate(encoded)
        ]

    def _check_number(self, prompt: str | Sequence[str | int | list[int]], n: int) -> None:
        """Refuse what is too long by its length alone, before its items are looked at.

        Raises:
            PromptTooLong: It begins like one prompt of token ids.
            InvalidRequest: It begins like a list of prompts.
        """
        if isinstance(prompt, str) or not prompt:
            return
        if not isinstance(prompt[0], int):
            self._serving.check_answers("prompt", len(prompt) * n)
        elif len(prompt) >= self._serving.context_length:
            raise PromptTooLong(len(prompt), self._serving.context_length)


def check_completion(wire: CompletionRequest) -> None:
    """Refuse what a completion asks for and nobody does here.

    Raises:
        NotOffered: With the field.
    """
    if wire.echo:
        raise NotOffered("echo", "the prompt in the answer")
    if wire.suffix:
        raise NotOffered("suffix", "text insertion")
    if wire.best_of is not None and wire.best_of != either(wire.n, 1):
        raise NotOffered("best_of", "a choice among more answers than n")


def split(prompt: str | Sequence[str | int | list[int]]) -> list[Prompt]:
    """The prompts of a request: one or several texts, or one or several lists of token ids.

    Raises:
        InvalidRequest: There is none, or they are mixed.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt", prompt, "at least one token")
    if all_tokens(prompt):
        return [tuple(prompt)]
    texts: list[Prompt] = [item for item in prompt if isinstance(item, str)]
    lists: list[Prompt] = [tuple(item) for item in prompt if isinstance(item, list)]
    if len(prompt) not in (len(texts), len(lists)):
        raise InvalidRequest("prompt", prompt, "texts only, token ids only, or lists of them only")
    return texts or lists


def all_tokens(prompt: Sequence[str | int | list[int]]) -> TypeGuard[Sequence[int]]:
    """Whether a prompt is one list of token ids."""
    return all(isinstance(item, int) for item in prompt)


def encoded_all(
    tokenizer: BoundedTokenizer, prompts: Sequence[Prompt]
) -> Iterator[tuple[int, ...]]:
    """The token ids of all prompts, as long as somebody waits for them. In a worker thread.

    Raises:
        InvalidRequest: One has none, or too many.
    """
    for prompt in prompts:
        from_thread.check_cancelled()
        yield encode(tokenizer, prompt)


def encode(tokenizer: BoundedTokenizer, prompt: Prompt) -> tuple[int, ...]:
    """A prompt's token ids.

    Raises:
        InvalidRequest: It has none.
    """
    tokens = tuple(tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
    if not tokens:
        raise InvalidRequest("prompt", prompt, "at least one token")
    return tokens
