from importlib import metadata
from importlib.resources import files

import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")


def test_the_package_is_typed_and_has_a_version() -> None:
    assert files("treadle_multimodal").joinpath("py.typed").is_file()
    assert metadata.version("treadle-multimodal") == "0.1.0"
