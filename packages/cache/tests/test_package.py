from importlib import metadata
from importlib.resources import files

import treadle_cache


def test_the_package_is_typed_and_has_a_version() -> None:
    assert files(treadle_cache).joinpath("py.typed").is_file()
    assert metadata.version("treadle-cache") == "0.1.0"
