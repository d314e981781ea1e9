"""Fixtures of the multimodal package's tests."""

from collections.abc import Generator
from importlib.util import find_spec

import pytest
from blockbuster import blockbuster_ctx

INSTALLED = find_spec("treadle_multimodal") is not None


@pytest.fixture(params=["asyncio", *(["trio"] if find_spec("trio") else [])])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every async test runs on each event loop that is installed."""
    backend: str = request.param
    return backend


@pytest.fixture(autouse=INSTALLED)
def nothing_blocks_the_loop() -> Generator[None]:
    """Fails a test in which our code makes a blocking call on the event loop."""
    with blockbuster_ctx("treadle_multimodal"):
        yield
