"""Texts to learn from: files become documents of token ids, documents become sequences."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard, cast

from msgspec import Struct

from treadle_core.errors import InvalidRequest, Unsupported

MOST_LINE_BYTES = 16 * 2**20
MOST_FILE_BYTES = 2**30
LINE_SUFFIXES = (".jsonl", ".ndjson")
PROMPT_TOKENS = 48
LONGEST_PROMPT = 1024
ROLES = ("system", "user", "assistant", "tool")


def bad_data(path: Path, line: int | None, got: str, limit: str) -> Unsupported:
    """A file to learn from has something that cannot be used.

    Args:
        path: The file.
        line: Where, from 1; None for the whole of it.
        got: What is there.
        limit: What would have been accepted.
    """
    where = f"{path}" if line is None else f"{path}, line {line}"
    return Unsupported(f"data: {where}: got {got}, expected {limit}")


class TextTokenizer(Protocol):
    """What reading needs of a tokenizer."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered chat."""
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """A chat as text."""
        ...


class Document(Struct, frozen=True, kw_only=True):
    """A text.

    Attributes:
        tokens: All of it, with what ends it.
        prompt: What the model can answer, where the text is a chat; None where it is prose.
    """

    tokens: tuple[int, ...]
    prompt: tuple[int, ...] | None = None


class Corpus(Struct, frozen=True, kw_only=True):
    """What is learned from, and what is held out."""

    learned: tuple[Document, ...]
    held_out: tuple[Document, ...]


def read(paths: Sequence[str], tokenizer: TextTokenizer) -> list[Document]:
    """The documents of files.

    Raises:
        Unsupported: A file or a line cannot be used.
    """
    return [document for path in paths for document in read_file(Path(path), tokenizer)]


def read_file(path: Path, tokenizer: TextTokenizer) -> Iterator[Document]:
    """The documents of a file.

    Raises:
        Unsupported: It, or a line of it, cannot be used.
    """
    try:
        size = path.stat().st_size
        if not path.is_file() or not 0 < size <= MOST_FILE_BYTES:
            raise bad_data(path, None, f"{size} bytes", f"a file of 1 to {MOST_FILE_BYTES} bytes")
        if path.suffix in LINE_SUFFIXES:
            yield from read_lines(path, tokenizer)
        else:
            yield prose(decode(path.read_bytes(), path), tokenizer)
    except OSError as error:
        raise bad_data(path, None, error.strerror or str(error), "a readable file") from None


def read_lines(path: Path, tokenizer: TextTokenizer) -> Iterator[Document]:
    """The documents of a file of JSON lines; empty lines are none.

    Raises:
        Unsupported: With the line.
    """
    with path.open("rb") as file:
        line = 0
        while spelled := file.readline(MOST_LINE_BYTES + 1):
            line += 1
            if len(spelled) > MOST_LINE_BYTES:
                raise bad_data(
                    path, line, f"over {MOST_LINE_BYTES} bytes", f"at most {MOST_LINE_BYTES} bytes"
                )
            if spelled.strip():
                yield read_line(spelled, path, line, tokenizer)


def read_line(spelled: bytes, path: Path, line: int, tokenizer: TextTokenizer) -> Document:
    """The document of a line.

    Raises:
        Unsupported: It is none.
    """
    try:
        found: Any = json.loads(decode(spelled, path, line))
    except (ValueError, RecursionError) as error:
        raise bad_data(path, line, f"no JSON ({error})", "a JSON object") from None
    given = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    text, messages = given.get("text"), given.get("messages")
    try:
        if isinstance(text, str) and text and messages is None:
            return prose(text, tokenizer)
        if text is None and is_chat(messages):
            return chat(messages, tokenizer)
    except InvalidRequest as error:
        raise bad_data(path, line, str(error.value), error.limit) from error
    raise bad_data(
        path,
        line,
        f"an object with {', '.join(sorted(given)) or 'nothing'}" if given else "no such object",
        "an object with either a non-empty string as text, or messages with role and content",
    )


def decode(spelled: bytes, path: Path, line: int | None = None) -> str:
    """Bytes as text.

    Raises:
        Unsupported: They are not UTF-8.
    """
    try:
        return spelled.decode()
    except UnicodeDecodeError as error:
        where = line if line is not None else 1 + spelled[: error.start].count(b"\n")
        raise bad_data(path, where, repr(spelled[error.start : error.end]), "UTF-8") from None


def is_chat(messages: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether these are messages, with a user's among them."""
    if not isinstance(messages, list):
        return False
    found = cast("list[Any]", messages)
    return any(is_message(message, ("user",)) for message in found) and all(
        is_message(message, ROLES) for message in found
    )


def is_message(message: Any, roles: Sequence[str]) -> bool:
    """Whether this is a message of one of these roles."""
    if not isinstance(message, dict):
        return False
    fields = cast("dict[str, Any]", message)
    return fields.get("role") in roles and isinstance(fields.get("content"), str)


def prose(text: str, tokenizer: TextTokenizer) -> Document:
    """A text as a document.

    Raises:
        InvalidRequest: It is no Unicode.
    """
    ends = sorted(tokenizer.end_tokens)[:1]
    return Document(tokens=(*tokenizer.encode(text), *ends))


def chat(messages: list[dict[str, Any]], tokenizer: TextTokenizer) -> Document:
    """A chat as a document; its prompt is everything up to the last user's message.

    Raises:
        InvalidRequest: The model's template refuses it.
    """
    whole = tokenizer.render_chat(messages, add_generation_prompt=False)
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    asked = tokenizer.render_chat(messages[: last + 1])
    return Document(
        tokens=tuple(tokenizer.encode_rendered(whole)),
        prompt=tuple(tokenizer.encode_rendered(asked)),
    )


def split(documents: Sequence[Document], share: float, seed: int) -> Corpus:
    """Hold a share of the tokens out: whole documents, in a random order, and of one a part."""
    order = list(documents)
    random.Random(seed).shuffle(order)
    left = max(1, round(share * sum(len(document.tokens) for document in order)))
    held: list[Document] = []
    while order and left > 0:
        document = order.pop()
        cut = min(left, len(document.tokens))
        left -= cut
        if document.prompt is None and cut < len(document.tokens):
            held.append(Document(tokens=document.tokens[-cut:]))
            order.append(Document(tokens=document.tokens[:-cut]))
        else:
            held.append(document)
    return Corpus(learned=tuple(order), held_out=tuple(held))


def pack(documents: Sequence[Document], length: int) -> list[tuple[int, ...]]:
    """Sequences of ``length`` tokens out of all documents, one behind the other.

    What is left over at the end and is shorter makes no sequence.
    """
    stream = [token for document in documents for token in document.tokens]
    return [
        tuple(stream[start : start + length])
        for start in range(0, len(stream) - length + 1, length)
    ]


def prompts(documents: Sequence[Document], number: int, seed: int) -> list[tuple[int, ...]]:
    """Beginnings for the model to go on from: a chat's prompt, or a stretch of prose.

    Every document is asked once before one is asked again, at another place if it is prose. Chats
    whose prompt is long are left out.
    """
    asked = [d for d in documents if d.prompt is None or len(d.prompt) <= LONGEST_PROMPT]
    rng = random.Random(seed)
    found: list[tuple[int, ...]] = []
    while asked and len(found) < number:
        round_ = list(asked)
        rng.shuffle(round_)
        found += [prompt_of(document, rng) for document in round_]
    return found[:number]


def prompt_of(document: Document, rng: random.Random) -> tuple[int, ...]:
    """A beginning out of one document."""
    if document.prompt is not None:
        return document.prompt
    start = rng.randrange(max(1, len(document.tokens) - PROMPT_TOKENS))
    return document.tokens[start : start + PROMPT_TOKENS]
