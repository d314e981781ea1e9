"""``treadle run``, with a scripted engine."""

import io
from typing import Any

import pytest

from treadle_core import Engine, EngineConfig, InvalidRequest
from treadle_core.testing.scripted import Fault, ScriptedRunner
from treadle_server.errors import AnswerFailed
from treadle_server.run import run
from treadle_server.settings import RunOptions

BEGIN, END = 257, 258


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Writes(io.StringIO):
    """A stream that remembers its pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def shout(tokens: Any) -> int:
    """Says the prompt's bytes in capitals."""
    start = list(tokens).index(BEGIN)
    said = bytes(tokens[:start]).upper()
    position = len(tokens) - start - 1
    return said[position] if position < len(said) else END


def made(tokenizer_type: Any, **runner: Any) -> Engine:
    return Engine(
        ScriptedRunner(shout, **runner),
        tokenizer=tokenizer_type(),
        config=EngineConfig(prefill_step_size=64),
    )


def test_the_answer_streams_to_stdout_and_figures_go_to_stderr(tokenizer_type: Any) -> None:
    out, notes = Writes(), io.StringIO()
    run(made(tokenizer_type), RunOptions(prompt="hey", raw=True), out, notes)
    assert out.getvalue() == "HEY\n"
    assert [piece for piece in out.pieces if piece] == ["H", "E", "Y", "\n"]
    (line,) = notes.getvalue().splitlines()
    assert line.startswith("4 prompt tokens, 4 generated tokens, first token after ")
    assert "tok/s" in line
    assert line.endswith("(stop)")


def test_a_chat_goes_through_the_template(tokenizer_type: Any) -> None:
    out = io.StringIO()
    options = RunOptions(prompt="hey", system="be brief", max_tokens=500)
    run(made(tokenizer_type), options, out, io.StringIO())
    assert out.getvalue() == (
        '{"CONTENT": "BE BRIEF", "ROLE": "SYSTEM"}\n{"CONTENT": "HEY", "ROLE": "USER"}\n'
        "ASSISTANT:\n"
    )


def test_limits_and_stop_strings_are_honoured(tokenizer_type: Any) -> None:
    out, notes = io.StringIO(), io.StringIO()
    run(made(tokenizer_type), RunOptions(prompt="abcdef", raw=True, stop=("DE",)), out, notes)
    assert out.getvalue() == "ABC\n"
    out, notes = io.StringIO(), io.StringIO()
    run(made(tokenizer_type), RunOptions(prompt="abcdef", raw=True, max_tokens=2), out, notes)
    assert out.getvalue() == "AB\n"
    assert notes.getvalue().endswith("(length)\n")


def test_on_a_terminal_a_long_prompt_shows_its_progress_in_place(tokenizer_type: Any) -> None:
    out, notes = io.StringIO(), Terminal()
    options = RunOptions(prompt="x" * 999, raw=True, max_tokens=1)
    run(made(tokenizer_type), options, out, notes)
    shown = notes.getvalue()
    assert "\rprompt: 64 of 1000 tokens (6%)" in shown
    assert "\rprompt: 960 of 1000 tokens (96%)" in shown
    # It is wiped before the figures.
    assert shown.rsplit("\r", 1)[1].startswith("1000 prompt tokens")
    assert out.getvalue() == "X\n"


def test_without_a_terminal_a_quick_prompt_shows_nothing(tokenizer_type: Any) -> None:
    notes = io.StringIO()
    options = RunOptions(prompt="x" * 999, raw=True, max_tokens=1)
    run(made(tokenizer_type), options, io.StringIO(), notes)
    assert len(notes.getvalue().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (RunOptions(prompt="", raw=True), "prompt"),
        (RunOptions(prompt="x", temperature=-1), "temperature"),
        (RunOptions(prompt="x", max_tokens=0), "max_tokens"),
        (RunOptions(prompt="x" * 40_000), "prompt"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_told(
    tokenizer_type: Any, options: RunOptions, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        run(made(tokenizer_type), options, io.StringIO(), io.StringIO())
    assert caught.value.field == field


def test_a_failing_model_is_an_error_after_what_it_said(tokenizer_type: Any) -> None:
    out = io.StringIO()
    engine = made(tokenizer_type, faults=[Fault(skip=2, times=None)])
    with pytest.raises(AnswerFailed, match="on fire"):
        run(engine, RunOptions(prompt="abcdef", raw=True), out, io.StringIO())
    assert not engine.has_work


def test_an_interruption_aborts_the_request(tokenizer_type: Any) -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    engine = made(tokenizer_type)
    with pytest.raises(KeyboardInterrupt):
        run(engine, RunOptions(prompt="abcdef", raw=True), Interrupted(), io.StringIO())
    assert engine.stats().num_running == 0
