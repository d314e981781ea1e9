"""The benchmark measures whom it is told to, and says what they did."""

import json
from pathlib import Path
from typing import Any

import pytest

from treadle_core.testing import zoo
from treadle_speculative.bench import main

from .mtp_models import FAMILIES, write_original


def checkpoint(folder: Path) -> Path:
    write_original("mimo", folder)
    return zoo.save_checkpoint(FAMILIES["mimo"].base, folder, **FAMILIES["mimo"].changes)


def test_a_head_is_measured_like_other_drafters(tmp_path: Path, capsys: Any) -> None:
    folder = checkpoint(tmp_path / "own")
    # Long answers of a model whose head guesses at random: only that they are measured counts.
    arguments = ["--model", str(folder), "--repeat", "1", "--num-tokens", "2"]

    assert main([*arguments, "--mtp", "--only", "mtp_copy_b1"]) == 0

    report = json.loads(capsys.readouterr().out)
    details = report["details"]["mtp_copy_b1"]
    assert report["mtp_copy_b1"] > 0
    assert details["same_tokens"]
    assert details["plain"]["forwards_per_token"] == 1
    drafts = details["drafting"]["drafts"]
    assert drafts["attempted"] > 100
    assert details["drafting"]["acceptance"] == drafts["accepted"] / drafts["attempted"]


@pytest.mark.parametrize(
    ("part", "needs"), [("mtp_chat_b1", "--mtp or --mtp-head"), ("draft_model_copy_b8", "--draft-model")]
)  # fmt: skip
def test_what_is_not_there_is_not_measured(part: str, needs: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--only", part])
    assert f"{part} needs {needs}" in capsys.readouterr().err
