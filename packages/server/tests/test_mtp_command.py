"""``treadle mtp fit``, from the command line to the files of a head."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from treadle_server.cli import main

needs_speculative = pytest.mark.skipif(
    find_spec("treadle_speculative") is None, reason="treadle-speculative is not installed"
)


@needs_speculative
def test_a_head_is_fitted(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "head"
    text.write_text("up and down; " * 30)
    words = ["--model", str(checkpoint), "--data", str(text), "--out", str(out)]
    words += ["--sequence-length", "32", "--held-out", "0.2", "--epochs", "1", "--measure", "1"]

    assert main(["mtp", "fit", *words]) == 0

    said = capsys.readouterr()
    assert "guess 1: " in said.out
    assert "steps [########################] 3/3 loss " in said.err
    assert json.loads((out / "report.json").read_text())["steps"] == 3
    assert {path.name for path in out.iterdir()} == {
        "mtp_head.json",
        "mtp_head.safetensors",
        "report.json",
    }

    assert main(["mtp", "fit", *words]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err


@needs_speculative
def test_options_beyond_their_limits_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mtp", "fit", "--data", "x", "--out", "y"]
    for option, value, limit in (
        ("--epochs", "0", "epochs: got 0, expected an integer from 1 to 10000"),
        ("--epochs", "many", "epochs: got 'many', expected `int`"),
        ("--targets", "hard", "targets: got 'hard', expected"),
        ("--held-out", "1", "held_out: got 1.0, expected a number above 0 to 0.5"),
    ):
        assert main([*words, option, value]) == 2
        assert limit in capsys.readouterr().err
