"""Whatever the disk does, no method raises, what is read is equal, and the counters say why not."""

import errno
import logging
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from treadle_cache.disk import DiskTier
from treadle_cache.disk.files import RealFiles, tree_bytes
from treadle_cache.disk.testing import (
    CHANGES,
    ROOT,
    Call,
    WatchedFiles,
    digest_of,
    digests,
    make_entry,
    same_entry,
)
from treadle_core.testing import ManualClock

Make = Callable[..., DiskTier]


class Faults:
    """Raises an error from the ``first`` call on that changes something, ``count`` times."""

    def __init__(self, error: int, first: int = 0, count: int = 1 << 30) -> None:
        self.error = error
        self.first = first
        self.count = count
        self.calls = 0
        self.is_on = True

    def __call__(self, call: Call, path: Path) -> None:
        if call not in CHANGES or not self.is_on:
            return
        self.calls += 1
        if 0 <= self.calls - 1 - self.first < self.count:
            raise OSError(self.error, os.strerror(self.error), str(path))


@pytest.fixture
def make(make: Make) -> Make:
    """As the others' `make`, over files that ``before`` is told of."""

    def watched(before: Callable[[Call, Path], None] | None = None, **options: Any) -> DiskTier:
        return make(WatchedFiles(before), **options)

    return watched


def put(tier: DiskTier, numbers: Sequence[int], num_bytes: int = 3000) -> None:
    for number in numbers:
        tier.put(make_entry(number, num_bytes=num_bytes))
    tier.flush()


def read(tier: DiskTier, numbers: Sequence[int], num_bytes: int = 3000) -> list[int]:
    """The numbers of the entries that are found; each must be equal to what was put."""
    found = tier.read(digests(numbers)).result()
    for number, entry in zip(numbers, found, strict=True):
        assert entry is None or same_entry(entry, make_entry(number, num_bytes=num_bytes))
    return [number for number, entry in zip(numbers, found, strict=True) if entry is not None]


def use(tier: DiskTier, numbers: Sequence[int]) -> list[int]:
    """Everything the port has; returns what is found in the end."""
    put(tier, numbers)
    tier.count_blocks(digests(numbers))
    tier.checkpoints([ROOT])
    tier.wait(0)
    tier.stats()
    found = read(tier, numbers)
    tier.flush()
    assert set(digests(found)) <= tier.present(digests(numbers))
    return found


def path_of(directory: Path, number: int) -> Path:
    (path,) = (directory / "tier").rglob(f"{digest_of(number).hex()}.safetensors")
    return path


# Failing calls


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_each_call_may_fail_once(make: Make, error: int) -> None:
    faults = Faults(error, first=1 << 20)
    tier = make(faults, clock=ManualClock())
    put(tier, [0])
    for first in range(12):
        faults.calls, faults.first, faults.count = 0, first, 1
        use(tier, [10 * first + number for number in range(1, 4)])
        tier.clear()
    faults.is_on = False
    tier.clear()
    assert use(tier, range(5)) == list(range(5))
    tier.close()
    again = make()
    assert read(again, range(200)) == list(range(5))


@pytest.mark.parametrize(
    ("error", "reason"),
    [(errno.ENOSPC, "disk_full"), (errno.EACCES, "permission"), (errno.EIO, "other")],
)
def test_a_failing_disk_is_left_alone_for_a_while(
    make: Make, caplog: pytest.LogCaptureFixture, error: int, reason: str
) -> None:
    clock, faults = ManualClock(), Faults(error)
    faults.is_on = False
    tier = make(faults, clock=clock)
    assert use(tier, [0]) == [0]
    faults.is_on = True
    with caplog.at_level(logging.INFO):
        for number in range(1, 10):
            assert use(tier, [number]) == []
    stats = tier.stats()
    assert stats[f"write_failures_{reason}"] == 3
    assert stats["dropped"] == 6
    assert stats["is_paused"] == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "nothing is written to" in caplog.text
    assert use(tier, [0]) == [0]

    clock.advance(61)
    assert use(tier, [1]) == []
    assert use(tier, [2]) == []
    assert tier.stats()[f"write_failures_{reason}"] == 4
    clock.advance(61)
    faults.is_on = False
    with caplog.at_level(logging.INFO):
        assert use(tier, [3]) == [3]
    assert use(tier, [4, 5]) == [4, 5]
    assert tier.stats()["is_paused"] == 0
    assert "takes writes again" in caplog.text


def test_a_failed_write_leaves_nothing_behind(make: Make, tmp_path: Path) -> None:
    faults = Faults(errno.ENOSPC, first=1 << 20)
    tier = make(faults, clock=ManualClock(), max_failures=100)
    put(tier, [0])
    for first in range(5):
        faults.calls, faults.first, faults.count = 0, first, 1
        put(tier, [first + 1])
    tier.close()
    names = {path.name for path in (tmp_path / "tier").rglob("*.*") if "index.db" not in path.name}
    kept = make().present(digests(range(10)))
    assert names == {f"{digest.hex()}.safetensors" for digest in kept}


def test_a_clear_that_fails_is_made_up_for(make: Make) -> None:
    clock, faults = ManualClock(), Faults(errno.EACCES)
    faults.is_on = False
    tier = make(faults, clock=clock)
    put(tier, [0, 1])
    faults.is_on = True
    tier.clear()
    assert tier.present(digests([0, 1])) == set()
    assert read(tier, [0, 1]) == []
    assert tier.stats()["clear_failures"] == 1
    faults.is_on = False
    assert use(tier, [1, 2]) == [1, 2]
    tier.close()
    assert make().present(digests(range(3))) == set(digests([1, 2]))


def test_what_a_failed_clear_left_is_not_found_after_a_restart(make: Make) -> None:
    faults = Faults(errno.EACCES)
    faults.is_on = False
    tier = make(faults)
    put(tier, [0, 1])
    faults.is_on = True
    tier.clear()
    tier.close()
    assert read(make(), [0, 1]) == []


# The directory goes away


@pytest.mark.parametrize("below", ["", "entries", "temp", "index.db"])
def test_a_directory_removed_while_running_is_made_anew(
    make: Make, tmp_path: Path, below: str
) -> None:
    tier = make(clock=ManualClock())
    put(tier, range(3))
    path = tmp_path / "tier" / below
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    read(tier, range(3))
    tier.checkpoints([ROOT])
    assert use(tier, [3, 4]) == [3, 4]
    if below != "temp":
        assert read(tier, range(3)) == ([0, 1, 2] if below == "index.db" else [])
    tier.clear()
    assert read(tier, range(5)) == []
    assert use(tier, [5]) == [5]
    tier.close()
    assert read(make(), range(6)) == [5]


def test_a_clear_after_the_directory_was_removed(make: Make, tmp_path: Path) -> None:
    tier = make()
    put(tier, [0])
    shutil.rmtree(tmp_path / "tier")
    tier.clear()
    assert use(tier, [0, 1]) == [0, 1]


# Files that are not what they should be


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def replace(path: Path) -> None:
    path.write_bytes(bytes(5000))


def become_another(path: Path) -> None:
    path.write_bytes(next(it for it in path.parent.iterdir() if it != path).read_bytes())


DAMAGES = [
    (truncate, "truncated"),
    (empty, "truncated"),
    (flip, "checksum"),
    (replace, "foreign"),
    (become_another, "misplaced"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_file_is_a_miss_and_put_away(
    make: Make, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    tier = make()
    put(tier, [0, 1])
    damage(path_of(tmp_path, 1))
    assert read(tier, [0, 1]) == [0]
    assert tier.stats()[f"damaged_{reason}"] == 1
    assert tier.present(digests([0, 1])) == {digest_of(0)}
    assert len(list((tmp_path / "tier/quarantine").iterdir())) == 1
    assert use(tier, [1]) == [1]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_file_damaged_between_runs_is_never_read(
    make: Make, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    tier = make()
    put(tier, [0, 1])
    tier.close()
    damage(path_of(tmp_path, 1))
    again = make()
    assert read(again, [0, 1]) == [0]
    assert again.stats()[f"damaged_{reason}"] == 1


def test_the_quarantine_keeps_to_its_limit(make: Make, tmp_path: Path) -> None:
    tier = make(quarantine_bytes=10_000)
    put(tier, range(8))
    put(tier, [8], num_bytes=20_000)
    for number in range(9):
        flip(path_of(tmp_path, number))
    assert read(tier, range(9)) == []
    kept = list((tmp_path / "tier/quarantine").iterdir())
    assert len(kept) == 2
    assert sum(path.stat().st_size for path in kept) <= 10_000


def test_without_a_quarantine_damaged_files_are_removed(make: Make, tmp_path: Path) -> None:
    tier = make(quarantine_bytes=0)
    put(tier, [0])
    flip(path_of(tmp_path, 0))
    assert read(tier, [0]) == []
    assert not list((tmp_path / "tier").rglob("*.safetensors"))


def test_foreign_files_are_put_away_at_the_start(make: Make, tmp_path: Path) -> None:
    tier = make()
    put(tier, [0])
    tier.close()
    entries = tmp_path / "tier/entries"
    (entries / "notes.txt").write_text("x")
    (entries / "0" / "weights.safetensors").write_bytes(bytes(100))
    (entries / "0" / f"{'0' * 63}1.safetensors").write_bytes(bytes(100))
    (entries / "0" / "folder").mkdir()
    (entries / "0" / "folder" / "more.txt").write_text("x")
    (tmp_path / "tier/temp/left.tmp").write_bytes(bytes(100))
    again = make()
    assert read(again, [0, 1]) == [0]
    assert again.stats()["damaged_foreign"] == 4
    assert again.stats()["stale_removed"] == 1
    assert [path.name for path in entries.rglob("*.*")] == [f"{'0' * 64}.safetensors"]


# The index


def scribble(path: Path) -> None:
    path.write_bytes(os.urandom(20_000))


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def scratch(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(4096, len(data), 512):
        data[place : place + 64] = b"\xa5" * 64
    path.write_bytes(data)


def make_newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def make_other(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE others (x)")
    connection.close()


@pytest.mark.parametrize("damage", [scribble, halve, empty, scratch, make_newer, make_other])
def test_an_index_that_cannot_be_used_is_made_from_the_files(
    make: Make, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    tier = make()
    put(tier, range(30))
    tier.close()
    flip(path_of(tmp_path, 7))
    damage(tmp_path / "tier/index.db")
    again = make()
    assert read(again, range(30)) == [number for number in range(30) if number != 7]
    assert again.stats()["orphans_adopted"] == 30
    assert use(again, [30]) == [30]


@pytest.mark.parametrize("damage", [scribble, halve, scratch])
def test_an_index_damaged_while_running(
    make: Make, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    tier = make(clock=ManualClock())
    put(tier, range(30))
    damage(tmp_path / "tier/index.db")
    use(tier, range(20, 40))
    tier.clear()
    assert read(tier, range(40)) == []
    tier.close()
    again = make()
    read(again, range(40))
    assert use(again, [50]) == [50]


def test_an_index_with_any_bytes_flipped(make: Make, tmp_path: Path) -> None:
    tier = make()
    put(tier, range(12), num_bytes=24)
    tier.close()
    index = tmp_path / "tier/index.db"
    whole, chance = index.read_bytes(), random.Random(5)
    for _ in range(30):
        data = bytearray(whole)
        for _ in range(4):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        index.write_bytes(data)
        again = make()
        put(again, [3, 20], num_bytes=24)
        read(again, range(21), num_bytes=24)
        again.checkpoints([ROOT])
        again.close()
    index.unlink()
    assert set(range(12)) <= set(read(make(), range(21), num_bytes=24))


def test_rows_without_a_file_are_dropped(make: Make, tmp_path: Path) -> None:
    tier = make()
    put(tier, range(3))
    path_of(tmp_path, 0).unlink()
    assert read(tier, range(3)) == [1, 2]
    assert tier.present(digests(range(3))) == set(digests([1, 2]))
    tier.close()
    path_of(tmp_path, 1).unlink()
    again = make()
    assert again.present(digests(range(3))) == {digest_of(2)}
    assert again.stats()["rows_dropped"] == 1


def test_an_entry_whose_file_is_gone_is_written_again(make: Make, tmp_path: Path) -> None:
    tier = make()
    put(tier, [0])
    path_of(tmp_path, 0).unlink()
    assert use(tier, [0]) == [0]


def test_orphans_are_counted_before_the_limit_is_held(make: Make, tmp_path: Path) -> None:
    tier = make()
    put(tier, range(10), num_bytes=300_000)
    tier.close()
    (tmp_path / "tier/index.db").unlink()
    again = make(capacity_bytes=2 << 20)
    assert tree_bytes(RealFiles(), tmp_path / "tier") <= 2 << 20
    assert len(read(again, range(10), 300_000)) == 5
