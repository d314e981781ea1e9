"""``treadle run``: one prompt, its answer on stdout, everything else on stderr."""

import time
from typing import TextIO

from treadle_core import (
    Engine,
    Failed,
    Finished,
    InvalidRequest,
    Progress,
    Request,
    SamplingParams,
    TokenOut,
)
from treadle_server.errors import AnswerFailed
from treadle_server.settings import RunOptions
from treadle_server.tokenizer import chat_tokenizer

REQUEST_ID = "run"
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


def run(engine: Engine, options: RunOptions, out: TextIO, notes: TextIO) -> None:
    """Answer one prompt.

    Args:
        engine: Has no other work.
        options: The prompt, and how to answer it.
        out: Gets the text as it comes.
        notes: Gets progress and figures.

    Raises:
        TreadleError: The prompt was not accepted, or its answer failed.
    """
    engine.add(request(engine, options))
    line = ProgressLine(notes)
    try:
        ending = answer(engine, out, line)
    finally:
        line.clear()
        engine.abort(REQUEST_ID)
    out.write("\n")
    out.flush()
    notes.write(figures(ending) + "\n")


def request(engine: Engine, options: RunOptions) -> Request:
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
    return Request(id=REQUEST_ID, prompt=prompt(engine, options), params=params)


def prompt(engine: Engine, options: RunOptions) -> tuple[int, ...]:
    """The prompt's token ids, as a chat unless it is raw.

    Raises:
        TreadleError: There are none, or the chat template refuses the prompt.
    """
    tokenizer = chat_tokenizer(engine.tokenizer)
    if options.raw:
        tokens = tokenizer.encode(options.prompt)
    else:
        messages = [{"role": "user", "content": options.prompt}]
        if options.system is not None:
            messages.insert(0, {"role": "system", "content": options.system})
        tokens = tokenizer.encode_rendered(tokenizer.render_chat(messages))
    if not tokens:
        raise InvalidRequest("prompt", options.prompt, "at least one token")
    return tuple(tokens)


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
