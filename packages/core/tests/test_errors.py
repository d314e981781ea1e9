"""Errors carry a code, a sentence, and the numbers."""

from collections.abc import Iterator

import pytest

import treadle_core.errors as errors
from treadle_core.errors import (
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
    describe,
    failure_for,
    shorten,
)

EVERY_ERROR: list[tuple[TreadleError, str, bool, str]] = [
    (
        InvalidRequest("top_p", 5, "a number above 0 to 1"),
        "invalid_request",
        False,
        "top_p: got 5, expected a number above 0 to 1",
    ),
    (
        PromptTooLong(9000, 8192),
        "context_length_exceeded",
        False,
        (
            "prompt: 9000 tokens do not fit, the context is 8192 tokens "
            "and at least one must be left for the answer"
        ),
    ),
    (
        DuplicateRequest("r1"),
        "duplicate_request",
        False,
        "id: got 'r1', expected an id that no unfinished request has",
    ),
    (QueueFull(7, 8), "queue_full", True, "the queue is full: 7 waiting, at most 8"),
    (EngineClosed(), "engine_closed", False, "the engine is closed"),
    (
        ModelLoadError("some/model", "no config.json"),
        "model_load_error",
        False,
        "cannot load some/model: no config.json",
    ),
    (Unsupported("no such mode"), "unsupported", False, "no such mode"),
    (RequestFailed("r1", "why"), "request_failed", False, "request r1 failed: why"),
    (DeadlineExceeded("r1", "late"), "deadline_exceeded", False, "request r1 failed: late"),
    (OutOfMemory("r1", "big"), "out_of_memory", False, "request r1 failed: big"),
    (StepFailed("r1", "bad"), "step_failed", False, "request r1 failed: bad"),
]


def subclasses(kind: type[TreadleError]) -> Iterator[type[TreadleError]]:
    for child in kind.__subclasses__():
        if child.__module__ == "treadle_core.errors":
            yield child
            yield from subclasses(child)


@pytest.mark.parametrize(("error", "code", "retryable", "message"), EVERY_ERROR)
def test_an_error_says_what_happened(
    error: TreadleError, code: str, retryable: bool, message: str
) -> None:
    assert error.code == code
    assert error.retryable is retryable
    assert error.message == str(error) == message


def test_every_error_is_in_this_table_and_has_a_code_of_its_own() -> None:
    kinds = set(subclasses(TreadleError))

    assert {type(error) for error, *_ in EVERY_ERROR} == kinds
    assert len({kind.code for kind in kinds}) == len(kinds)


def test_the_drawing_names_every_error() -> None:
    drawing = errors.__doc__ or ""

    assert [
        kind.__name__ for kind in subclasses(TreadleError) if kind.__name__ not in drawing
    ] == []


def test_errors_carry_their_numbers() -> None:
    too_long = PromptTooLong(9000, 8192)

    assert (too_long.field, too_long.value, too_long.length) == ("prompt", 9000, 9000)
    assert too_long.limit == "at most 8191 tokens"
    assert (QueueFull(7, 8).waiting, QueueFull(7, 8).limit) == (7, 8)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("deadline_exceeded", DeadlineExceeded),
        ("out_of_memory", OutOfMemory),
        ("step_failed", StepFailed),
        ("engine_closed", RequestFailed),
        ("what_is_this", RequestFailed),
    ],
)
def test_a_failure_event_becomes_the_exception_of_its_code(
    code: str, kind: type[RequestFailed]
) -> None:
    error = failure_for(code, "r1", "why")

    assert type(error) is kind
    assert (error.request_id, error.reason) == ("r1", "why")


def test_a_failure_is_not_described_twice() -> None:
    told = StepFailed("r1", "bad").message

    assert str(failure_for("step_failed", "r1", told)) == "request r1 failed: bad"


def test_a_long_value_is_shortened_to_the_limit() -> None:
    assert shorten("a" * 78) == repr("a" * 78)
    assert shorten("a" * 79) == "'" + "a" * 78 + "…"
    assert shorten([1, 2, 3], limit=5) == "[1, …"


def test_exceptions_are_described_in_one_line() -> None:
    assert describe(ValueError("bad")) == "ValueError: bad"
    assert describe(ValueError()) == "ValueError"
    assert describe(KeyError("k")) == "KeyError: 'k'"
    assert describe(RuntimeError("first\nsecond")) == "RuntimeError: first second"
