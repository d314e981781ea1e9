"""How errors look to an HTTP client: one table from error classes to replies, and the server's own.

TreadleError
├── InvalidRequest
│   ├── UnknownField          a field that this server does not know
│   ├── NotOffered            a documented field asking for something that is not done here
│   ├── UnknownModel          another model than the served one
│   └── ChatRefused           a well-formed chat that the model's template refuses
├── MalformedBody             not JSON
├── BodyTooLarge              more bytes than accepted
├── Unauthorized              no key, or a wrong one
├── Unsupported
│   └── BadWarmPrompt         the file of warm prompts has something else in it
├── CacheUnusable             the directory of an SSD cache cannot be read or changed
├── NoCache                   there is no prefix store to be emptied
├── CannotListen              the address is taken, or none of this machine's
└── AnswerFailed              an accepted request ended with an error of the engine
"""

from typing import NamedTuple

from msgspec import Struct

from treadle_core import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineClosed,
    InvalidRequest,
    ModelLoadError,
    OutOfMemory,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    StepFailed,
    TreadleError,
    Unsupported,
)
from treadle_core.errors import shorten

INVALID = "invalid_request_error"
SERVER = "server_error"
RETRY_AFTER_SECONDS = 1


MAX_NAME = 200


def shorten_name(name: str) -> str:
    """A name that a client made up, cut where it is long."""
    return name if len(name) <= MAX_NAME else name[:MAX_NAME] + "…"


class UnknownField(InvalidRequest):
    """The request has a field that this server does not know."""

    code = "unknown_field"

    def __init__(self, field: str) -> None:
        TreadleError.__init__(self, f"{shorten_name(field)}: this server does not know the field")
        self.field = shorten_name(field)
        self.value = None
        self.limit = "no such field"


class NotOffered(InvalidRequest):
    """A documented field asks for something that this server does not do.

    Args:
        field: Name of the field as the caller wrote it.
        wanted: What it asks for, in words.
    """

    code = "unsupported_value"

    def __init__(self, field: str, wanted: str) -> None:
        TreadleError.__init__(self, f"{field}: this server does not offer {wanted}")
        self.field = field
        self.value = wanted
        self.limit = "to be left out"


class UnknownModel(InvalidRequest):
    """The request names a model that is not served."""

    code = "model_not_found"

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        names = ", ".join(served)
        TreadleError.__init__(self, f"model: {shorten(model)} is not served here, but: {names}")
        self.field = "model"
        self.value = model
        self.limit = names


class ChatRefused(InvalidRequest):
    """The model's chat template refuses a well-formed chat."""

    code = "chat_refused"


class MalformedBody(TreadleError):
    """The request's body is not the JSON it should be."""

    code = "invalid_json"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the body is not valid JSON: {reason}")


class BodyTooLarge(TreadleError):
    """The request's body is longer than accepted."""

    code = "body_too_large"

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"the body is longer than the {limit} bytes that are accepted")


class Unauthorized(TreadleError):
    """The request carries no API key, or a wrong one."""

    code = "invalid_api_key"

    def __init__(self) -> None:
        super().__init__("this server needs its API key, as a Bearer token or as x-api-key")


class BadWarmPrompt(Unsupported):
    """The file of warm prompts has something else in it.

    Args:
        path: The file.
        line: Where, from 1.
        reason: What is wrong.
    """

    code = "bad_warm_prompt"

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(f"warm_prompts: {path}, line {line}: {reason}")


class CacheUnusable(TreadleError):
    """The directory of an SSD cache cannot be read or changed."""

    code = "cache_unusable"

    def __init__(self, directory: str, error: Exception) -> None:
        super().__init__(f"{directory} cannot be used: {error}")


class NoCache(TreadleError):
    """No prefix is kept, so there is nothing to empty."""

    code = "no_cache"

    def __init__(self) -> None:
        super().__init__("this server keeps no prefixes, so there is no cache to empty")


class CannotListen(TreadleError):
    """Nothing can listen on an address."""

    code = "cannot_listen"

    def __init__(self, host: str, port: int, error: OSError) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {error.strerror or error}")


class AnswerFailed(TreadleError):
    """An accepted request ended with an error.

    Args:
        failed_code: The code of the engine's error class.
        message: The engine's sentence.
    """

    code = "answer_failed"

    def __init__(self, failed_code: str, message: str) -> None:
        self.failed_code = failed_code
        super().__init__(message)


class Row(NamedTuple):
    """How one kind of error is answered.

    Attributes:
        status: The HTTP status.
        kind: The ``type`` of OpenAI's error object.
        code: The ``code`` of it; None takes the class's own.
        retryable: Whether clients should try the same request again.
    """

    status: int
    kind: str
    code: str | None = None
    retryable: bool = False


TABLE: dict[type[TreadleError], Row] = {
    TreadleError: Row(500, SERVER),
    InvalidRequest: Row(400, INVALID, "invalid_value"),
    PromptTooLong: Row(400, INVALID),
    DuplicateRequest: Row(400, INVALID),
    UnknownField: Row(400, INVALID),
    NotOffered: Row(400, INVALID),
    UnknownModel: Row(404, INVALID),
    ChatRefused: Row(422, INVALID),
    MalformedBody: Row(400, INVALID),
    BodyTooLarge: Row(413, INVALID),
    Unauthorized: Row(401, "authentication_error"),
    Unsupported: Row(400, INVALID),
    BadWarmPrompt: Row(400, INVALID),
    CacheUnusable: Row(500, SERVER),
    NoCache: Row(409, INVALID),
    CannotListen: Row(503, SERVER),
    QueueFull: Row(429, "rate_limit_error", retryable=True),
    EngineClosed: Row(503, SERVER, retryable=True),
    ModelLoadError: Row(503, SERVER),
    RequestFailed: Row(500, SERVER),
    DeadlineExceeded: Row(504, "timeout_error"),
    OutOfMemory: Row(503, SERVER),
    StepFailed: Row(500, SERVER),
    AnswerFailed: Row(500, SERVER),
}

MEDIA_CODES: dict[str, Row] = {
    "invalid_media": Row(400, INVALID),
    "media_forbidden": Row(400, INVALID),
    "media_too_large": Row(413, INVALID),
    "unsupported_media": Row(422, INVALID),
    "broken_media": Row(422, INVALID),
    "media_unavailable": Row(400, INVALID, retryable=True),
    # Whoever tries at once would wait as long again.
    "media_timeout": Row(400, INVALID),
}
"""The same for the errors of treadle-multimodal, which need not be installed, by their codes."""

BY_CODE: dict[str, Row] = {error.code: row for error, row in TABLE.items()}


class ErrorObject(Struct, frozen=True, kw_only=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True, kw_only=True):
    """OpenAI's error reply."""

    error: ErrorObject


class Reply(NamedTuple):
    """An error as it is sent."""

    status: int
    body: ErrorBody
    headers: dict[str, str]


def reply_to(error: TreadleError) -> Reply:
    """The reply to an error, as :data:`TABLE` says."""
    if isinstance(error, AnswerFailed):
        code, row = error.failed_code, BY_CODE.get(error.failed_code, TABLE[AnswerFailed])
    else:
        row = row_for(type(error))
        code = row.code or error.code
    param = error.field if isinstance(error, InvalidRequest) else None
    return make_reply(row, error.message, code=code, param=param)


def row_for(kind: type[TreadleError]) -> Row:
    """The row of a class, or of its nearest base that has one."""
    for base in kind.__mro__:
        assert issubclass(base, TreadleError), "TreadleError has a row"
        row = TABLE.get(base) or MEDIA_CODES.get(base.code)
        if row is not None:
            return row
    raise AssertionError("TreadleError has a row")


def make_reply(row: Row, message: str, *, code: str, param: str | None = None) -> Reply:
    """A reply from its parts."""
    headers = {"x-should-retry": "true" if row.retryable else "false"}
    if row.status in (429, 503):
        headers["retry-after"] = str(RETRY_AFTER_SECONDS)
    if row.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = ErrorObject(message=message, type=row.kind, param=param, code=code)
    return Reply(row.status, ErrorBody(error=body), headers)


def reply_to_status(status: int, detail: str) -> Reply:
    """The reply to something that routing refused: an unknown path, a wrong method."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
    return make_reply(Row(status, INVALID if status < 500 else SERVER), detail, code=code)


def reply_to_surprise() -> Reply:
    """The reply to an exception that nobody foresaw; it says nothing about the inside."""
    row = TABLE[TreadleError]
    return make_reply(row, "the server failed unexpectedly; its log says why", code="internal")
