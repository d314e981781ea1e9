"""Fixtures of the multimodal package's tests."""

from collections.abc import Generator
from contextlib import nullcontext
from importlib.util import find_spec
from inspect import iscoroutinefunction

import pytest
from blockbuster import blockbuster_ctx

INSTALLED = find_spec("treadle_multimodal") is not None


@pytest.fixture(params=["asyncio", *(["trio"] if find_spec("trio") else [])])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every async test runs on each event loop that is installed."""
    backend: str = request.param
    return backend


@pytest.fixture(autouse=INSTALLED)
def nothing_blocks_the_loop(request: pytest.FixtureRequest) -> Generator[None]:
    """Fails an async test in which our code makes a blocking call on the event loop."""
    watched = iscoroutinefunction(request.function)
    with blockbuster_ctx("treadle_multimodal") if watched else nullcontext():
        yield
