"""The benchmark measures a checkpoint and prints JSON."""

import json
from pathlib import Path

import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from treadle_core.testing import RecordingStore
from treadle_multimodal.testing import zoo
from treadle_multimodal.vlm import bench


def test_it_tells_ratios_and_what_they_are_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = zoo.save_checkpoint("qwen2_vl", tmp_path)
    parts = ["--only", "repeat_ttft_ratio", "--only", "stall", "--repeat", "1"]

    assert bench.main(["--model", str(folder), *parts], RecordingStore) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["repeat_ttft_ratio"] > 0
    assert report["stall"] >= 1
    assert report["details"]["model"] == str(folder)
    ((first, second),) = report["details"]["repeat_ttft_ratio"]["turns"]
    assert first["reused_tokens"] < 10  # what stands before the picture
    assert second["reused_tokens"] > 0.8 * first["prompt_tokens"]
    (turn,) = report["details"]["stall"]["turns"]
    assert turn["steps_with_encoding"] >= 3
