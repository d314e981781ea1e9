"""What both generating routes do around their own rendering: the reply's header, and the reply."""

import time
from collections.abc import Sequence

from treadle_core import Request
from treadle_server.openai.answering import Answering
from treadle_server.openai.sampling import include_usage
from treadle_server.openai.schema import Generation
from treadle_server.openai.shapes import Header, Shape
from treadle_server.serving import Serving, new_id


def make_header(serving: Serving, wire: Generation, prefix: str) -> Header:
    """What every reply to a request says.

    Args:
        serving: The engine and its settings.
        wire: The request.
        prefix: How its id begins.

    Raises:
        UnknownModel: The request asks for a model that is not served.
    """
    return Header(
        id=new_id(prefix),
        created=int(time.time()),
        model=serving.model_name(wire.model),
        usage=include_usage(wire),
    )


def reply(
    serving: Serving, wire: Generation, requests: Sequence[Request], shape: Shape
) -> Answering:
    """The answers to ``requests``, whole or as the stream that the client asked for."""
    http = serving.config.http
    return Answering(
        serving.dispatcher,
        requests,
        shape,
        stream=bool(wire.stream),
        usage=include_usage(wire),
        interval=http.stream_interval,
        heartbeat_seconds=http.heartbeat_seconds,
    )
