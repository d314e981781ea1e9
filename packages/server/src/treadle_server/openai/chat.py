"""``POST /v1/chat/completions``."""

from contextlib import AsyncExitStack

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle_core import Request
from treadle_server.http import read_body, unless_left
from treadle_server.openai.exchange import TimeLimit, make_header, reply
from treadle_server.openai.messages import check_chat
from treadle_server.openai.prompts import chat_prompt
from treadle_server.openai.sampling import (
    chat_params,
    check_offered,
    deadline,
    either,
)
from treadle_server.openai.schema import CHAT, ChatRequest
from treadle_server.openai.shapes import ChatShape
from treadle_server.serving import Serving
from treadle_server.validation import decode


class ChatCompletions:
    """Answers chats.

    Args:
        serving: The engine and its settings.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def post(self, http: HttpRequest) -> Response:
        """The answers to a chat, whole or as a stream.

        Raises:
            TreadleError: The request cannot be served; the application writes the reply.
        """
        serving = self._serving
        wire = decode(CHAT, await read_body(http, serving.config.http.max_body_bytes))
        header = make_header(serving, wire, "chatcmpl")
        async with AsyncExitStack() as held:
            request = await unless_left(http.receive, lambda: self._request(wire, header.id, held))
            shape = ChatShape(header, serving.token_names, logprobs=request.params.logprobs)
            return reply(serving, wire, [request], shape, held.pop_all())

    async def _request(self, wire: ChatRequest, request_id: str, held: AsyncExitStack) -> Request:
        serving, defaults = self._serving, self._serving.config.defaults
        check_offered(wire, priorities=serving.priorities)
        check_chat(wire)
        params = chat_params(wire, defaults)
        n = either(wire.n, 1)
        serving.check_answers("n", n)
        limit = TimeLimit(deadline(wire, defaults))
        with limit.preparing(request_id):
            prompt = await chat_prompt(serving, wire, held)
        return Request(
            id=request_id,
            prompt=prompt.tokens,
            boundaries=prompt.boundaries,
            media=prompt.media,
            attachment=prompt.attachment,
            cache_salt=wire.cache_salt,
            params=params,
            n=n,
            priority=wire.priority or 0,
            deadline=limit.seconds,
            elapsed=limit.elapsed,
        )
