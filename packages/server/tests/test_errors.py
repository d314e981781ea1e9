"""The table of replies, and that nothing is missing in it."""

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

import pytest

from treadle_core import (
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    OutOfMemory,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    StepFailed,
    TreadleError,
)
from treadle_server.errors import (
    MEDIA_CODES,
    TABLE,
    AnswerFailed,
    BodyTooLarge,
    ChatRefused,
    MalformedBody,
    NotOffered,
    Unauthorized,
    UnknownField,
    UnknownModel,
    reply_to,
)


def family(kind: type[TreadleError]) -> Iterator[type[TreadleError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from family(child)


def ours(kind: type[TreadleError]) -> bool:
    """Whether the class is not a test's."""
    return kind.__module__.startswith("treadle_")


def test_every_error_class_has_a_row() -> None:
    with suppress(ModuleNotFoundError):
        import_module("treadle_multimodal")
    missing = [
        kind.__name__
        for kind in family(TreadleError)
        if ours(kind) and kind not in TABLE and kind.code not in MEDIA_CODES
    ]
    assert missing == []


def test_no_two_classes_share_a_code() -> None:
    codes = [*(kind.code for kind in TABLE), *MEDIA_CODES]
    assert sorted(codes) == sorted(set(codes))


def test_errors_of_media_have_rows_of_their_own() -> None:
    errors = pytest.importorskip("treadle_multimodal.errors")
    known = {kind.code: kind for kind in family(errors.MediaError)}
    assert known.keys() == MEDIA_CODES.keys()
    item = errors.Item(index=0, kind="image", source="x", field="messages[0].content[1]")
    for code, row in MEDIA_CODES.items():
        reply = reply_to(known[code]("url", "x", "y").of(item))
        assert (reply.status, reply.body.error.code) == (row.status, code)
        assert 400 <= row.status < 500
        assert reply.body.error.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (InvalidRequest("n", 0, "1"), 400, "invalid_request_error", "invalid_value", "n"),
        (
            PromptTooLong(9, 8),
            400,
            "invalid_request_error",
            "context_length_exceeded",
            "prompt",
        ),
        (UnknownField("x"), 400, "invalid_request_error", "unknown_field", "x"),
        (NotOffered("x", "y"), 400, "invalid_request_error", "unsupported_value", "x"),
        (UnknownModel("x", ("y",)), 404, "invalid_request_error", "model_not_found", "model"),
        (ChatRefused("messages", 1, "2"), 422, "invalid_request_error", "chat_refused", "messages"),
        (MalformedBody("x"), 400, "invalid_request_error", "invalid_json", None),
        (BodyTooLarge(1), 413, "invalid_request_error", "body_too_large", None),
        (Unauthorized(), 401, "authentication_error", "invalid_api_key", None),
        (QueueFull(4, 4), 429, "rate_limit_error", "queue_full", None),
        (EngineClosed(), 503, "server_error", "engine_closed", None),
        (DeadlineExceeded("r", "x"), 504, "timeout_error", "deadline_exceeded", None),
        (OutOfMemory("r", "x"), 503, "server_error", "out_of_memory", None),
        (StepFailed("r", "x"), 500, "server_error", "step_failed", None),
        (RequestFailed("r", "x"), 500, "server_error", "request_failed", None),
        (AnswerFailed("step_failed", "x"), 500, "server_error", "step_failed", None),
        (AnswerFailed("deadline_exceeded", "x"), 504, "timeout_error", "deadline_exceeded", None),
        (AnswerFailed("engine_closed", "x"), 503, "server_error", "engine_closed", None),
        (AnswerFailed("out_of_memory", "x"), 503, "server_error", "out_of_memory", None),
        (AnswerFailed("what is this", "x"), 500, "server_error", "what is this", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TreadleError) else None,
)
def test_an_error_is_answered_as_the_table_says(
    error: TreadleError, status: int, kind: str, code: str, param: str | None
) -> None:
    reply = reply_to(error)
    assert reply.status == status
    found = reply.body.error
    assert (found.type, found.code, found.param) == (kind, code, param)
    assert found.message == str(error)


def test_a_class_of_somebody_else_is_answered_like_its_base() -> None:
    class TooVague(InvalidRequest):
        code = "too_vague"

    reply = reply_to(TooVague("messages", "?", "a question"))
    assert (reply.status, reply.body.error.param) == (400, "messages")


@pytest.mark.parametrize(
    ("error", "retry", "after"),
    [
        (QueueFull(4, 4), "true", "1"),
        (EngineClosed(), "true", "1"),
        (StepFailed("r", "x"), "false", None),
        (InvalidRequest("n", 0, "1"), "false", None),
    ],
)
def test_clients_are_told_whether_to_try_again(
    error: TreadleError, retry: str, after: str | None
) -> None:
    headers = reply_to(error).headers
    assert headers["x-should-retry"] == retry
    assert headers.get("retry-after") == after
