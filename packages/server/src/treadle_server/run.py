"""``treadle run``: one prompt, its answer on stdout, everything else on stderr."""

import re
import time
from pathlib import Path
from typing import TextIO

import anyio

from treadle_core import (
    Engine,
    Failed,
    Finished,
    InvalidRequest,
    Progress,
    Request,
    SamplingParams,
    TokenOut,
    Unsupported,
)
from treadle_server.errors import AnswerFailed
from treadle_server.media import Media, MediaPrompt, NoMedia
from treadle_server.settings import RunOptions
from treadle_server.tokenizer import ChatTokenizer, chat_tokenizer

REQUEST_ID = "run"
URL = re.compile(r"(https?|data|file):", re.IGNORECASE)
PLAIN_PROGRESS_SECONDS = 5.0


class ProgressLine:
    """Tells how far a long prompt is: in place on a terminal, else as a line now and then.

    Args:
        out: Where.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._last = time.monotonic()
        self._width = 0

    def show(self, progress: Progress) -> None:
        """The prompt advanced."""
        share = 100 * progress.prefilled // progress.total
        line = f"prompt: {progress.prefilled} of {progress.total} tokens ({share}%)"
        if self._live:
            self._out.write("\r" + line.ljust(self._width))
            self._width = len(line)
        elif time.monotonic() - self._last >= PLAIN_PROGRESS_SECONDS:
            self._last = time.monotonic()
            self._out.write(line + "\n")
        self._out.flush()

    def clear(self) -> None:
        """The answer begins."""
        if self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._out.flush()
            self._width = 0


def run(
    engine: Engine,
    options: RunOptions,
    out: TextIO,
    notes: TextIO,
    media: Media = NoMedia(),  # noqa: B008 — frozen
) -> None:
    """Answer one prompt.

    Args:
        engine: Has no other work.
        options: The prompt, and how to answer it.
        out: Gets the text as it comes.
        notes: Gets progress and figures.
        media: What the model does with media.

    Raises:
        TreadleError: The prompt was not accepted, or its answer failed.
    """
    engine.add(request(engine, options, media))
    line = ProgressLine(notes)
    try:
        ending = answer(engine, out, line)
    finally:
        line.clear()
        engine.abort(REQUEST_ID)
    out.write("\n")
    out.flush()
    notes.write(figures(ending) + "\n")


def request(engine: Engine, options: RunOptions, media: Media) -> Request:
    """The engine's request.

    Raises:
        TreadleError: A value cannot be honoured, or the chat template refuses the prompt.
    """
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=options.stop,
    )
    tokenizer = chat_tokenizer(engine.tokenizer)
    if not options.media:
        return Request(id=REQUEST_ID, prompt=prompt(tokenizer, options), params=params)
    made = media_prompt(tokenizer, options, media)
    return Request(
        id=REQUEST_ID, prompt=made.tokens, params=params, media=made.media, attachment=made
    )


def prompt(tokenizer: ChatTokenizer, options: RunOptions) -> tuple[int, ...]:
    """The prompt's token ids, as a chat unless it is raw.

    Raises:
        TreadleError: There are none, or the chat template refuses the prompt.
    """
    if options.raw:
        tokens = tokenizer.encode(options.prompt)
    else:
        tokens = tokenizer.encode_rendered(rendered(tokenizer, options))
    if not tokens:
        raise InvalidRequest("prompt", options.prompt, "at least one token")
    return tuple(tokens)


def rendered(tokenizer: ChatTokenizer, options: RunOptions) -> str:
    """The prompt as a chat.

    Raises:
        InvalidRequest: The chat template refuses it.
    """
    content: object = options.prompt
    if options.media:
        shown = [{"type": kind} for kind, _ in options.media]
        content = [*shown, {"type": "text", "text": options.prompt}]
    messages: list[dict[str, object]] = [{"role": "user", "content": content}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    return tokenizer.render_chat(messages)


def media_prompt(tokenizer: ChatTokenizer, options: RunOptions, media: Media) -> MediaPrompt:
    """The prompt with its media.

    Raises:
        InvalidRequest: One of them cannot be used, or the chat template refuses the prompt.
        Unsupported: The model does not take them.
    """
    for kind, _ in options.media:
        if isinstance(media, NoMedia):
            raise Unsupported(f"{kind} cannot be shown to the model: {media.why}")
        if kind not in media.kinds:
            takes = " and ".join(sorted(media.kinds))
            raise Unsupported(f"{kind} cannot be shown to the model, which takes {takes}")
    assert not isinstance(media, NoMedia), "there are no media"
    text = rendered(tokenizer, options)
    parts = [
        media.parse({"type": kind, kind: location(kind, place)}, f"--{kind}")
        for kind, place in options.media
    ]

    async def prepare() -> MediaPrompt:
        async with media.prepare(text, parts, [f"--{kind}" for kind, _ in options.media]) as made:
            return made

    return anyio.run(prepare)


def location(kind: str, place: str) -> str:
    """The URL of a file or a URL.

    Raises:
        InvalidRequest: There is no such file.
    """
    if URL.match(place):
        return place
    path = Path(place)
    if not path.is_file():
        raise InvalidRequest(f"--{kind}", place, "a file that is there, or a URL")
    return path.absolute().as_uri()


def answer(engine: Engine, out: TextIO, line: ProgressLine) -> Finished:
    """Run the engine until the answer ends.

    Raises:
        AnswerFailed: It ended with an error.
    """
    while True:
        for event in engine.step():
            match event:
                case Progress():
                    line.show(event)
                case TokenOut():
                    line.clear()
                    out.write(event.text)
                    out.flush()
                case Finished():
                    out.write(event.text)
                    return event
                case Failed():
                    raise AnswerFailed(event.code, event.message)


def figures(ending: Finished) -> str:
    """What the answer took, in one line."""
    usage, times = ending.usage, ending.timings
    parts = [
        f"{usage.prompt_tokens} prompt tokens",
        f"{usage.completion_tokens} generated tokens",
        f"first token after {times.first_token:.2f} s",
    ]
    if usage.completion_tokens > 1 and times.decode > 0:
        parts.append(f"{(usage.completion_tokens - 1) / times.decode:.1f} tok/s")
    drafts = usage.drafts
    if drafts is not None:
        parts.append(f"{drafts.accepted} of {drafts.attempted} guesses kept")
        if drafts.lossy:
            parts.append(f"LOSSY: {drafts.lossy} unverified")
    return ", ".join(parts) + f" ({ending.reason})"
