"""Fixtures of the core package's tests."""

from importlib.util import find_spec

import pytest


@pytest.fixture(params=["asyncio", *(["trio"] if find_spec("trio") else [])])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every async test runs on each event loop that is installed."""
    backend: str = request.param
    return backend
