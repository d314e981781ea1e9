"""A disk that hangs, a process that holds a lock, a thread that dies: the engine's thread goes on."""

import logging
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Event, current_thread

import pytest

from treadle_cache.disk import DiskConfig, DiskTier
from treadle_cache.disk.catalog import Change, Row, State, open_catalog
from treadle_cache.disk.testing import (
    ROOT,
    Call,
    WatchedFiles,
    digest_of,
    digests,
    make_entry,
    same_entry,
)
from treadle_cache.disk.tier import HANG_SECONDS
from treadle_cache.entries import EntryName
from treadle_core.ports import Clock
from treadle_core.testing import ManualClock

Make = Callable[..., DiskTier]


class Hang:
    """Holds a call to the file system until the test is over."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.reached = Event()
        self.ended = Event()

    def __call__(self, call: Call, path: Path) -> None:
        if call == self.call:
            self.reached.set()
            self.ended.wait(50)


def open_tier(
    directory: Path,
    files: WatchedFiles | None = None,
    clock: Clock | None = None,
    **options: float,
) -> DiskTier:
    config = DiskConfig(
        directory=str(directory), capacity_bytes=64 << 20, min_free_bytes=0, **options
    )
    return DiskTier(config, files=files, clock=clock)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(
            before: Callable[[Call, Path], None] | None = None,
            clock: Clock | None = None,
            **options: float,
        ) -> DiskTier:
            tier = open_tier(tmp_path / "tier", WatchedFiles(before), clock, **options)
            stack.callback(tier.close)
            if isinstance(before, Hang):
                stack.callback(before.ended.set)
            return tier

        yield make


def put(tier: DiskTier, numbers: Sequence[int]) -> None:
    for number in numbers:
        tier.put(make_entry(number))


def seconds_of(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def test_close_gives_up_what_a_hanging_disk_does_not_take(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    hang = Hang("create")
    tier = make(hang, close_seconds=0.2)
    put(tier, range(3))
    assert hang.reached.wait(20)
    assert seconds_of(tier.close) < 5
    tier.close()
    assert tier.stats()["given_up"] == 3
    assert tier.stats()["num_waiting"] == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "3 entries are not written" in caplog.text


def test_a_reading_that_never_completes_does_not_hold_up_close(make: Make) -> None:
    hang = Hang("read")
    tier = make(hang, close_seconds=0.2)
    put(tier, [0, 1])
    tier.flush()
    first, second = tier.read([digest_of(0)]), tier.read([digest_of(1)])
    assert hang.reached.wait(20)
    assert seconds_of(tier.close) < 5
    assert first.result() == second.result() == [None]


def test_the_interpreter_ends_while_the_disk_hangs(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, __file__, str(tmp_path / "tier")], timeout=20)
    assert result.returncode == 0


@pytest.mark.parametrize("call", ["create", "free_bytes"])
def test_a_clear_does_not_wait_for_a_write_that_hangs(make: Make, call: Call) -> None:
    hang = Hang(call)
    hang.ended.set()
    tier = make(hang, close_seconds=0.2)
    put(tier, [0])
    tier.flush()
    hang.reached.clear()
    hang.ended.clear()
    put(tier, [1])
    assert hang.reached.wait(20)
    assert seconds_of(tier.clear) < 5
    assert seconds_of(tier.stats) < 1
    assert tier.present(digests([0, 1])) == set()
    assert tier.stats()["num_entries"] == 0
    put(tier, [2])
    hang.ended.set()
    tier.flush()
    assert tier.present(digests(range(3))) == {digest_of(2)}


def test_a_clear_does_not_wait_for_a_disk_that_hangs(make: Make) -> None:
    hang = Hang("make_directory")
    hang.ended.set()
    tier = make(hang)
    put(tier, [0])
    tier.flush()
    hang.ended.clear()
    assert seconds_of(tier.clear) < 5
    assert tier.present([digest_of(0)]) == set()
    hang.ended.set()
    tier.flush()
    assert tier.present([digest_of(0)]) == set()


def test_a_clear_does_not_wait_for_a_lock_of_another_process(make: Make, tmp_path: Path) -> None:
    tier = make()
    put(tier, [0])
    tier.flush()
    with closing(sqlite3.connect(tmp_path / "tier/index.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert seconds_of(tier.clear) < 5
        assert tier.present([digest_of(0)]) == set()
        assert tier.read([digest_of(0)]).result() == [None]
        put(tier, [1])
        other.rollback()
    tier.flush()
    assert tier.present(digests([0, 1])) == {digest_of(1)}
    tier.close()
    assert make().present(digests([0, 1])) == {digest_of(1)}


LOCK_THE_INDEX = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX, 8, 120)
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def locked_index(directory: Path) -> Generator[None]:
    """Another process holds what SQLite needs to read the index, as a hanging disk would."""
    command = [sys.executable, "-c", LOCK_THE_INDEX, str(directory / "index.db-shm")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        yield
        other.communicate(timeout=20)


def test_a_look_up_does_not_wait_for_an_index_that_cannot_be_read(
    make: Make, tmp_path: Path
) -> None:
    tier = make(close_seconds=0.2)
    put(tier, range(3))
    tier.put(make_entry(3, kind="checkpoint"))
    tier.flush()

    def look_up() -> None:
        assert tier.present(digests(range(5))) == set(digests(range(4)))
        assert tier.count_blocks(digests(range(3))) == 3
        assert [name.digest for name in tier.checkpoints([ROOT])] == [digest_of(3)]
        assert not tier.read([digest_of(0)]).done
        tier.touch([digest_of(0)])
        put(tier, [4])
        assert tier.present([digest_of(4)])

    with locked_index(tmp_path / "tier"):
        assert seconds_of(look_up) < 0.5


def test_nothing_more_is_found_on_a_disk_that_hangs_until_it_answers(
    make: Make, tmp_path: Path
) -> None:
    hang, clock = Hang("read"), ManualClock()
    tier = make(hang, clock)
    put(tier, range(2))
    tier.flush()
    reading = tier.read([digest_of(0)])
    assert hang.reached.wait(20)
    assert tier.present(digests(range(2))) == set(digests(range(2)))
    clock.advance(HANG_SECONDS + 1)
    put(tier, [2])
    assert tier.present(digests(range(3))) - {digest_of(2)} == set()
    assert tier.checkpoints([ROOT]) == []
    assert tier.read([digest_of(1)]).result() == [None]
    hang.ended.set()
    assert same_entry(reading.result()[0], make_entry(0))
    assert tier.present(digests(range(2))) == set(digests(range(2)))


def test_an_index_that_cannot_be_read_counts_as_a_disk_that_hangs(
    make: Make, tmp_path: Path
) -> None:
    clock = ManualClock()
    tier = make(clock=clock, close_seconds=0.2)
    put(tier, [0])
    tier.flush()
    with locked_index(tmp_path / "tier"):
        put(tier, [1])
        # Found in memory; whether the directory was cleared since, the index does not say.
        tier.read([digest_of(1)])
        end = time.monotonic() + 5
        while tier.present([digest_of(0)]) and time.monotonic() < end:
            clock.advance(HANG_SECONDS)
            time.sleep(0.01)
        assert not tier.present([digest_of(0)])


def counted_bytes(directory: Path) -> int:
    """Bytes of entries as the index counts them for every process."""
    with closing(sqlite3.connect(directory / "index.db")) as index:
        query = "SELECT value FROM figures WHERE name = 'num_bytes'"
        return index.execute(query).fetchone()[0]


def test_a_clear_leaves_the_files_to_the_writer(make: Make, tmp_path: Path) -> None:
    threads: set[str] = set()
    hang = Hang("unlink")

    def note(call: Call, path: Path) -> None:
        if call == "unlink":
            threads.add(current_thread().name)
        hang(call, path)

    tier = make(note, close_seconds=5)
    put(tier, range(50))
    tier.flush()
    used = tier.stats()["used_bytes"]
    tier.clear()
    assert hang.reached.wait(20)
    # Gone for others too, while every file is still there and counts.
    assert counted_bytes(tmp_path / "tier") > 50 * 3000
    assert tier.stats()["used_bytes"] >= used
    assert tier.stats()["num_entries"] == 0
    assert not list((tmp_path / "tier/entries").rglob("*.safetensors"))
    hang.ended.set()
    tier.flush()
    assert threads == {"treadle-disk-writer"}
    assert not list((tmp_path / "tier").rglob("*.safetensors"))
    assert counted_bytes(tmp_path / "tier") == 0


def test_what_is_cleared_is_not_found_without_the_index_either(make: Make, tmp_path: Path) -> None:
    hang = Hang("unlink")
    tier = make(hang, close_seconds=0.1)
    put(tier, range(5))
    tier.flush()
    tier.clear()
    assert hang.reached.wait(20)
    (tmp_path / "tier/index.db").unlink()
    assert make().present(digests(range(5))) == set()


@pytest.mark.parametrize("call", ["create", "read"])
def test_a_thread_that_dies_leaves_an_empty_tier(
    make: Make, caplog: pytest.LogCaptureFixture, call: Call
) -> None:
    is_on = Event()

    def fail(made: Call, path: Path) -> None:
        if made == call and is_on.is_set():
            raise RuntimeError("nobody expects this")

    tier = make(fail)
    put(tier, [0])
    tier.flush()
    assert tier.stats()["is_dead"] == 0
    is_on.set()
    with caplog.at_level(logging.INFO):
        if call == "read":
            assert tier.read([digest_of(0)]).result() == [None]
        put(tier, [1])
        tier.flush()
    while not tier.stats()["is_dead"]:
        time.sleep(0.01)
    put(tier, [2])
    assert tier.has_room(1 << 40)
    assert tier.present(digests(range(3))) == set()
    assert tier.checkpoints([ROOT]) == []
    assert tier.read([digest_of(0)]).result() == [None]
    tier.touch([digest_of(0)])
    tier.clear()
    tier.flush()
    tier.close()
    assert tier.stats()["threads_died"] == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "nobody expects this" in caplog.text


def num_steps(path: Path, length: int) -> int:
    """Steps of SQLite until the oldest leaf among chains of ``length`` is found."""
    with closing(open_catalog(path)) as catalog, catalog.changing() as change:
        epoch = change.figure("epoch")
        for number in range(5 * length):
            name = EntryName(
                kind="block",
                root=ROOT,
                digest=digest_of(number),
                parent=digest_of(number - 1) if number % length else ROOT,
                num_tokens=number,
            )
            row = Row(
                name=name, num_bytes=1, used=number, state=State.READY, owner=None, epoch=epoch
            )
            change.add(row)
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    with closing(sqlite3.connect(path)) as connection:
        connection.set_progress_handler(count, 1)
        victim = Change(connection).oldest(b"")
    assert victim is not None
    assert victim.name.digest == digest_of(length - 1)
    return steps


def test_the_oldest_leaf_is_found_as_fast_among_many(tmp_path: Path) -> None:
    few, many = num_steps(tmp_path / "few.db", 10), num_steps(tmp_path / "many.db", 200)
    assert many < few + 50


def main(directory: Path) -> None:
    hang = Hang("create")
    tier = open_tier(directory, WatchedFiles(hang), close_seconds=0.1)
    put(tier, range(3))
    assert hang.reached.wait(10)
    tier.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
