"""Warm prompts: the file that says them, and computing them beside the serving of requests."""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from treadle_core import (
    EngineClosed,
    Failed,
    InvalidRequest,
    Request,
    SamplingParams,
    TreadleError,
    Unsupported,
)
from treadle_server.errors import BadWarmPrompt
from treadle_server.openai.messages import check_chat, template_messages
from treadle_server.openai.prompts import Prompt, refuse_media, warm_prompt
from treadle_server.openai.schema import ChatRequest, Message
from treadle_server.serving import Serving, new_id
from treadle_server.validation import decode

LAST = 2**31

logger = logging.getLogger("treadle.server")


class WarmObject(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A warm chat that says more than its messages; its fields are those of a request."""

    messages: list[Message]
    tools: list[Any] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


class WarmChat(Struct, frozen=True, kw_only=True):
    """A chat of the file.

    Attributes:
        line: Where it begins in the file, from 1.
        wire: The chat as a request.
    """

    line: int
    wire: ChatRequest


LIST = msgspec.json.Decoder(list[Message])
OBJECT = msgspec.json.Decoder(WarmObject)
ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


def read_warm_prompts(path: str | None) -> tuple[WarmChat, ...]:
    """The chats of a file: JSON, or JSON lines; each is a list of messages, or has ``messages``.

    Raises:
        BadWarmPrompt: With the line.
        Unsupported: The file cannot be read.
    """
    if path is None:
        return ()
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise Unsupported(f"warm_prompts: {path}: {error.strerror or error}") from None
    return tuple(parse(path, content))


def parse(path: str, content: bytes) -> Iterator[WarmChat]:
    """The chats in a file's content.

    Raises:
        BadWarmPrompt: With the line.
    """
    line = 1
    try:
        for number, document in documents(content):
            line = number
            for line, chat in chats(number, document):
                yield WarmChat(line=line, wire=as_request(chat))
    except BadJson as error:
        raise BadWarmPrompt(path, line + error.lines_before, str(error)) from error
    except TreadleError as error:
        raise BadWarmPrompt(path, line, error.message) from error


def chats(line: int, document: bytes) -> Iterator[tuple[int, bytes]]:
    """Every chat of a document that begins in ``line``, spelled, with its own line.

    Raises:
        BadJson: It is no JSON.
    """
    items = list_items(document)
    if not items or is_message(items[0]):
        yield line, document
        return
    start = 0
    for item in items:
        start = document.index(item, start)
        yield line + document.count(b"\n", 0, start), item
        start += len(item)


def documents(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The JSON documents of a file, with their lines: its lines, or the whole of it."""
    lines = [(n, line) for n, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if len(lines) > 1 and is_json(lines[0][1]):
        yield from lines
    elif lines:
        yield 1, content


def is_json(spelled: bytes) -> bool:
    """Whether this is a whole JSON document."""
    try:
        msgspec.json.decode(spelled, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def list_items(document: bytes) -> list[bytes] | None:
    """The items of a JSON list as they are spelled, or None if this is no list.

    Raises:
        BadJson: It is no JSON at all.
    """
    try:
        return [bytes(item) for item in ITEMS.decode(document)]
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadJson(document, error) from None


class BadJson(Exception):
    """A document is no JSON.

    Args:
        document: What is none.
        error: What the decoder says.

    Attributes:
        lines_before: Lines of it before the one that is wrong.
    """

    def __init__(self, document: bytes, error: Exception) -> None:
        self.lines_before = 0
        reason = str(error)
        try:
            # It is slower, and tells the line.
            json.loads(document)
        except json.JSONDecodeError as located:
            self.lines_before, reason = located.lineno - 1, located.msg
        except (UnicodeDecodeError, RecursionError):
            pass
        super().__init__(f"this is no JSON: {reason}")


def is_message(item: bytes) -> bool:
    """Whether an item is a message, so that the list around it is one chat."""
    try:
        value: Any = msgspec.json.decode(item)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(value, dict) and "messages" not in value


def as_request(chat: bytes) -> ChatRequest:
    """A chat of the file as a request, checked like one.

    Raises:
        TreadleError: It could not be one.
    """
    if chat.lstrip().startswith(b"["):
        wire = ChatRequest(messages=decode(LIST, chat))
    else:
        wire = ChatRequest(**asdict(decode(OBJECT, chat)))
    check_chat(wire)
    refuse_media(wire)
    template_messages(wire)
    return wire


class Warmer:
    """Computes the warm prompts, one after the other, while requests are served.

    Args:
        serving: The engine and its settings.
        chats: What to compute.
    """

    def __init__(self, serving: Serving, chats: Sequence[WarmChat]) -> None:
        self._serving = serving
        self._chats = chats
        self._prompts: list[tuple[WarmChat, Prompt]] = []
        self._num_done = 0
        self._was_ready = not chats
        self._round = 0
        self._changed = anyio.Event()

    @property
    def progress(self) -> str | None:
        """How far the first round is; None once it is done."""
        if self._was_ready:
            return None
        return f"{self._num_done} of {len(self._chats)} warm prompts are computed"

    async def prepare(self) -> None:
        """Render all, so that one that cannot be rendered is told before anything is served.

        Raises:
            BadWarmPrompt: The model's template refuses one, or it is too long.
        """
        path = self._serving.config.cache.warm_prompts or ""
        for chat in self._chats:
            try:
                prompt = await warm_prompt(self._serving, chat.wire)
            except InvalidRequest as error:
                raise BadWarmPrompt(path, chat.line, error.message) from error
            self._prompts.append((chat, prompt))

    def again(self) -> int:
        """Begin anew, after the store was emptied; returns how many there are."""
        self._round += 1
        self._changed.set()
        return len(self._chats)

    async def run(self, scope: anyio.CancelScope) -> None:
        """Compute them now and whenever it is to be done again, until the engine ends."""
        try:
            while self._prompts:
                number = self._round
                if await self._compute_all(number):
                    self._was_ready = True
                while self._round == number:
                    await self._changed.wait()
                    self._changed = anyio.Event()
        except EngineClosed:
            return

    async def _compute_all(self, number: int) -> bool:
        """One round; returns whether it was not cut short by a later one."""
        self._num_done = 0
        for chat, prompt in self._prompts:
            if self._round != number:
                return False
            await self._compute(chat, prompt)
            self._num_done += 1
        logger.info("%d warm prompts are computed", self._num_done)
        return self._round == number

    async def _compute(self, chat: WarmChat, prompt: Prompt) -> None:
        request = Request(
            id=new_id("warm"),
            prompt=prompt.tokens,
            boundaries=prompt.boundaries,
            cache_salt=chat.wire.cache_salt,
            params=SamplingParams(max_tokens=1, temperature=0.0),
            # Those who wait for an answer come first, where the policy lets them.
            priority=LAST,
        )
        try:
            events = await self._serving.engine.generate(request)
        except EngineClosed:
            raise
        except TreadleError as error:
            logger.warning("the warm prompt of line %d was refused: %s", chat.line, error)
            return
        for event in events:
            if isinstance(event, Failed):
                logger.warning("the warm prompt of line %d failed: %s", chat.line, event.message)
