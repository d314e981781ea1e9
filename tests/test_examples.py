"""The examples do what they say."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from treadle_core.testing import zoo

EXAMPLES = Path(__file__).parent.parent / "examples"


def load_example(name: str) -> Any:
    return type("Example", (), runpy.run_path(str(EXAMPLES / name)))


def test_the_store_works_under_mlx_lms_own_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo.save_checkpoint("llama", tmp_path)
    example = load_example("prefix_cache_with_mlx_lm.py")
    example.main(str(tmp_path))
    first, second, again = capsys.readouterr().out.splitlines()
    assert reused(first) == 0
    assert reused(second) >= 1900
    assert reused(again) >= 1900
    assert first.split(" s: ")[1] == again.split(" s: ")[1]


def reused(line: str) -> int:
    return int(line.split(" reused")[0].split()[-1])


def test_it_refuses_what_it_is_not_for(tmp_path: Path) -> None:
    zoo.save_checkpoint("gemma3", tmp_path)
    example = load_example("prefix_cache_with_mlx_lm.py")
    with pytest.raises(SystemExit, match="plain keys and values"):
        example.main(str(tmp_path))
