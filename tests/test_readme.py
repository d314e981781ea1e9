"""What the READMEs show runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from treadle_core.mlx_runtime.gguf import find_demo_model

ROOT = Path(__file__).parents[1]


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_example_of_the_core_readme_answers() -> None:
    if find_demo_model() is None:
        pytest.skip("the demo package is not installed")
    (example,) = python_blocks(ROOT / "packages" / "core" / "README.md")

    run = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=50, check=False
    )

    assert run.returncode == 0, run.stderr
    assert "Paris" in run.stdout
