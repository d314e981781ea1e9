from importlib import metadata
from importlib.resources import files

import treadle_speculative


def test_the_package_is_typed_and_has_a_version() -> None:
    assert files(treadle_speculative).joinpath("py.typed").is_file()
    assert metadata.version("treadle-speculative") == "0.1.0"
