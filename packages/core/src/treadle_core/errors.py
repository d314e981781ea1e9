"""What can go wrong, one class per situation a caller handles differently.

    TreadleError
    ├── InvalidRequest            a field of a request is wrong; nothing was accepted
    │   ├── PromptTooLong         the prompt does not fit the context
    │   └── DuplicateRequest      the id belongs to a live request
    ├── QueueFull                 the waiting queue is at its bound; retry later
    ├── EngineClosed              the engine no longer accepts or runs requests
    ├── ModelLoadError            a checkpoint cannot be used, with the reason
    ├── Unsupported               a configuration that cannot be honoured, refused at start
    └── RequestFailed             an accepted request ended with an error
        ├── DeadlineExceeded      its deadline passed
        ├── OutOfMemory           its KV cannot fit, even alone
        └── StepFailed            the model or the request's own code raised

Each class has a stable ``code`` (for machines) and writes its own sentence (for people).
"""

from typing import ClassVar


class TreadleError(Exception):
    """Base of every error that Treadle raises on purpose.

    Attributes:
        code: A stable snake_case identifier of the situation.
        retryable: Whether the same call may succeed later.
    """

    code: ClassVar[str] = "treadle_error"
    retryable: ClassVar[bool] = False

    @property
    def message(self) -> str:
        """The sentence for people."""
        return str(self)


class InvalidRequest(TreadleError):
    """A field of a request has a value that cannot be honoured.

    Args:
        field: Name of the field as the caller wrote it.
        value: The offending value.
        limit: What would have been accepted, in words.
    """

    code = "invalid_request"

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field = field
        self.value = value
        self.limit = limit
        super().__init__(f"{field}: got {shorten(value)}, expected {limit}")


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for a single new token.

    Args:
        length: Its tokens.
        limit: Tokens of the context.
        at_least: Whether ``length`` is of its beginning: nobody looked at the rest.
    """

    code = "context_length_exceeded"

    def __init__(self, length: int, limit: int, *, at_least: bool = False) -> None:
        self.length = length
        TreadleError.__init__(
            self,
            f"prompt: {'at least ' * at_least}{length} tokens do not fit, the context is {limit} tokens "
            "and at least one must be left for the answer",
        )
        self.field = "prompt"
        self.value = length
        self.limit = f"at most {limit - 1} tokens"


class DuplicateRequest(InvalidRequest):
    """The request id is in use by a request that has not ended."""

    code = "duplicate_request"

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__("id", request_id, "an id that no unfinished request has")


class QueueFull(TreadleError):
    """The waiting queue is at its bound.

    Args:
        waiting: Sequences waiting now.
        limit: The bound.
    """

    code = "queue_full"
    retryable = True

    def __init__(self, waiting: int, limit: int) -> None:
        self.waiting = waiting
        self.limit = limit
        super().__init__(f"the queue is full: {waiting} waiting, at most {limit}")


class EngineClosed(TreadleError):
    """The engine was closed, or its owner thread ended."""

    code = "engine_closed"

    def __init__(self, reason: str = "the engine is closed") -> None:
        super().__init__(reason)


class ModelLoadError(TreadleError):
    """A checkpoint cannot be used.

    Args:
        model: The path or name as the caller gave it.
        reason: What is wrong with it.
    """

    code = "model_load_error"

    def __init__(self, model: str, reason: str) -> None:
        self.model = model
        self.reason = reason
        super().__init__(f"cannot load {model}: {reason}")


class Unsupported(TreadleError):
    """A configuration that cannot be honoured; raised at start, never ignored."""

    code = "unsupported"


class RequestFailed(TreadleError):
    """An accepted request ended with an error.

    Args:
        request_id: The request that failed.
        reason: Why.
    """

    code = "request_failed"

    def __init__(self, request_id: str, reason: str) -> None:
        self.request_id = request_id
        self.reason = reason
        super().__init__(f"request {request_id} failed: {reason}")


class DeadlineExceeded(RequestFailed):
    """The request's deadline passed before it ended."""

    code = "deadline_exceeded"


class OutOfMemory(RequestFailed):
    """The request's KV does not fit in the budget, even with nobody else running."""

    code = "out_of_memory"


class StepFailed(RequestFailed):
    """The model, a logits processor or a constraint raised while running the request."""

    code = "step_failed"


def shorten(value: object, limit: int = 80) -> str:
    """``repr(value)`` cut to at most ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def failure_for(code: str, request_id: str, reason: str) -> RequestFailed:
    """The exception for a failure event's ``code``; ``reason`` may be its whole sentence."""
    kinds: dict[str, type[RequestFailed]] = {
        kind.code: kind for kind in (DeadlineExceeded, OutOfMemory, StepFailed)
    }
    reason = reason.removeprefix(f"request {request_id} failed: ")
    return kinds.get(code, RequestFailed)(request_id, reason)


def describe(error: BaseException) -> str:
    """One line that names an exception and what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
