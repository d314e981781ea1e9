"""A store that is loaded at the start and saved at the end."""

import os
import threading
import time
from pathlib import Path

import anyio
import pytest

from treadle_core import AsyncEngine, Engine
from treadle_core.prefix import StateLayout
from treadle_core.testing import RecordingStore, ScriptedRunner, hashed
from treadle_server import compose
from treadle_server.saving import GoesOn, SavingStore
from treadle_server.settings import CacheOptions

from .conftest import needs_cache

LAYOUT = StateLayout(tokens=(), has_state=True, format="f")


class Journal:
    """What was done, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def load(self, goes_on: GoesOn) -> int:
        self.done.append("load")
        return 1

    def save(self) -> int:
        self.done.append("save")
        return 1


def test_it_is_loaded_once_the_model_is_known_and_saved_once(tmp_path: Path) -> None:
    inner, journal = RecordingStore(), Journal()
    store = SavingStore(inner, tmp_path / "f", journal.load, journal.save)
    assert journal.done == []
    store.attach("model", LAYOUT)
    assert journal.done == ["load"]
    store.close()
    store.close()
    assert journal.done == ["load", "save"]
    assert inner.closed


def endless(goes_on: GoesOn) -> int:
    """A file that never ends."""
    num_loaded = 0
    while goes_on(num_loaded, 1000):
        num_loaded += 1
        time.sleep(0.005)
    return num_loaded


def test_a_load_that_takes_too_long_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal()
    store = SavingStore(RecordingStore(), tmp_path / "f", endless, journal.save, load_seconds=0.05)
    store.attach("model", LAYOUT)
    assert "given up after 0.05 s" in caplog.text
    store.close()
    assert journal.done == ["save"]


def test_a_load_that_is_stopped_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    journal = Journal()
    store = SavingStore(RecordingStore(), tmp_path / "f", endless, journal.save, stops=lambda: True)
    store.attach("model", LAYOUT)
    store.close()
    assert journal.done == []


@needs_cache
async def test_a_server_that_is_to_stop_does_not_wait_for_a_file_that_hangs(
    tmp_path: Path,
) -> None:
    path = tmp_path / "states"
    # Whoever opens it waits for somebody to write to it.
    os.mkfifo(path)
    options = CacheOptions(cache_save=str(path))

    def make() -> Engine:
        store = compose.make_store(options, lambda: engine.closing)
        return Engine(ScriptedRunner(hashed()), store=store)

    engine, started = AsyncEngine(make), time.monotonic()
    with anyio.move_on_after(0.3) as scope:
        async with engine:
            raise AssertionError("it was not read")
    assert scope.cancelled_caught
    assert time.monotonic() - started < 5
    # So that the thread ends.
    os.close(os.open(path, os.O_WRONLY))
    assert path.is_fifo(), "something was saved in place of what was not read"


def test_a_store_that_never_had_a_model_leaves_the_file_alone(tmp_path: Path) -> None:
    inner, journal = RecordingStore(), Journal()
    SavingStore(inner, tmp_path / "f", journal.load, journal.save).close()
    assert journal.done == []
    assert inner.closed


def test_a_save_that_takes_too_long_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner, go_on = RecordingStore(), threading.Event()

    def save() -> int:
        assert go_on.wait(10)
        return 0

    store = SavingStore(inner, tmp_path / "f", lambda goes_on: 0, save, seconds=0.05)
    store.attach("model", LAYOUT)
    store.close()
    assert inner.closed
    assert "given up after 0.05 s" in caplog.text
    go_on.set()


def test_a_save_that_fails_does_not_keep_the_store_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save() -> int:
        raise KeyError("a block that is gone")

    inner = RecordingStore()
    store = SavingStore(inner, tmp_path / "f", lambda goes_on: 0, save)
    store.attach("model", LAYOUT)
    store.close()
    assert inner.closed
    assert "not saved" in caplog.text


def test_a_clear_removes_what_was_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "f"
    path.write_text("states")
    store = SavingStore(RecordingStore(), path, lambda goes_on: 0, lambda: 0)
    store.attach("model", LAYOUT)
    store.clear()
    assert not path.exists()
    assert store.generation == 1
    store.clear()
    path.mkdir()
    store.clear()
    assert "could not be removed" in caplog.text
