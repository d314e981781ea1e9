"""From outside values to Structs, with errors that name field, value and limit."""

import re
from typing import Any, TypeVar

import msgspec

from treadle_core import InvalidRequest, TreadleError
from treadle_server.errors import MalformedBody, UnknownField

T = TypeVar("T")

MAX_LISTS = 500_000
"""In a body, or brackets in its texts. Meanwhile nothing else is done."""

# msgspec says where it stopped at the end of its message: "… - at `$.messages[0].role`".
WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`")
MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+)\]")
EXPECTED = re.compile(r"Expected (?P<what>.*?)(?:, got .*)?(?: - at .*)?")


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """``body`` as the decoder's type.

    Raises:
        MalformedBody: It is not JSON, or has so many lists that reading it takes seconds.
        InvalidRequest: A field is missing, unknown or of the wrong type.
    """
    if body.count(b"[") > MAX_LISTS:
        raise MalformedBody(f"it has more than {MAX_LISTS} opening brackets")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explain(str(error), body) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBody(str(error)) from error


def explain(message: str, body: bytes) -> TreadleError:
    """What msgspec says about a body, as an error about a field."""
    found = WHERE.fullmatch(message)
    what, path = (found["what"], found["path"] or "") if found else (message, "")
    field = path.removeprefix(".")
    if unknown := UNKNOWN.fullmatch(what):
        return UnknownField(join(field, unknown["name"]))
    if missing := MISSING.fullmatch(what):
        return InvalidRequest(join(field, missing["name"]), None, "a value: it is required")
    if what == "Number out of range":
        return InvalidRequest(field, "a number out of range", "one that a double can hold")
    return InvalidRequest(field or "body", value_at(path, body), expected(what))


def expected(message: str) -> str:
    """What msgspec would have accepted, from its message."""
    found = EXPECTED.fullmatch(message)
    return found["what"] if found else f"another value ({message})"


def join(field: str, name: str) -> str:
    """The name of a field's field."""
    return f"{field}.{name}" if field else name


def value_at(path: str, body: bytes) -> Any:
    """What stands at a path such as ``.messages[0].role``, as far as it can be followed."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for step in STEP.finditer(path):
        key = step["name"] if step["index"] is None else int(step["index"])
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return value
    return value
