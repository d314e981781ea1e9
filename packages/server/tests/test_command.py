"""The command, in this process: how it fails."""

import os
import socket
from collections.abc import Generator
from pathlib import Path

import pytest

from treadle_server.cli import main


@pytest.fixture(autouse=True)
def same_environment() -> Generator[None]:
    """The command prepares the environment of its own process; here that is the tests'."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint whose weights are cut."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return tmp_path


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on stderr, which is all that was said."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("treadle: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("command", ["serve", "run"])
@pytest.mark.parametrize("missing", [True, False])
def test_a_model_that_cannot_be_loaded_is_one_sentence(
    command: str, missing: bool, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "/no/such/model" if missing else str(broken)
    words = {"serve": ["serve", "--port", "0"], "run": ["run", "hi"]}[command]
    assert main([*words, "--model", model]) == 1
    assert f"cannot load {model}: " in one_sentence(capsys)


def test_an_option_that_the_model_cannot_honour_is_one_sentence(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(checkpoint), "--port", "0", "--max-kv-size", "3"]) == 2
    assert "max_kv_size" in one_sentence(capsys)
    assert main(["serve", str(checkpoint), "--port", "0", "--kv-bits", "8"]) == 2
    assert "kv_bits cannot be honoured for llama: heads of 16, in 3 layers" in one_sentence(capsys)


def test_a_taken_port_is_told_before_the_model_is_looked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", "/no/such/model", "--port", port]) == 1
    assert f"cannot listen on 127.0.0.1:{port}: " in one_sentence(capsys)


def test_a_host_of_another_machine_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "203.0.113.1", "--port", "0"]) == 1
    assert "cannot listen on 203.0.113.1:0: " in one_sentence(capsys)


def test_run_tells_an_error_in_a_sentence(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "x" * 5000, "--model", str(checkpoint)]) == 2
    assert "prompt: 5019 tokens do not fit" in one_sentence(capsys)


def test_run_refuses_what_is_no_utf8(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", os.fsdecode(b"caf\xe9")]) == 2
    assert "expected UTF-8" in one_sentence(capsys)


def test_offline_is_said_to_the_hubs_code(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.pop("HF_HUB_OFFLINE", None)
    os.environ.pop("TRANSFORMERS_VERBOSITY", None)
    assert main(["run", "x" * 5000, "--model", str(checkpoint)]) == 2
    assert "HF_HUB_OFFLINE" not in os.environ
    assert main(["run", "x" * 5000, "--model", str(checkpoint), "--offline"]) == 2
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
