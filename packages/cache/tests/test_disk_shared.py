"""Two processes, or two tiers of one, on the same directory.

Run as a script, this file is the other process.
"""

import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from errno import EIO
from pathlib import Path
from threading import Event

import pytest

from treadle_cache.disk import DiskConfig, DiskTier, verify
from treadle_cache.disk.catalog import (
    JOURNAL_ROWS,
    LOG_PAGES,
    PAGE_BYTES,
    Row,
    State,
    open_catalog,
)
from treadle_cache.disk.files import RealFiles, tree_bytes
from treadle_cache.disk.mirror import Mirror
from treadle_cache.disk.testing import (
    ROOT,
    Call,
    WatchedFiles,
    digest_of,
    make_entry,
    same_entry,
)

CAPACITY_BYTES = 3 << 20
NUM_BYTES = 120_000
NUMBERS = range(30)

Make = Callable[..., DiskTier]


def open_tier(
    directory: Path, files: WatchedFiles | None = None, capacity_bytes: int = CAPACITY_BYTES
) -> DiskTier:
    config = DiskConfig(directory=str(directory), capacity_bytes=capacity_bytes, min_free_bytes=0)
    return DiskTier(config, files=files)


def has(tier: DiskTier, number: int) -> bool:
    digest = digest_of(number)
    (entry,) = tier.read([digest]).result()
    assert entry is None or same_entry(entry, make_entry(number))
    assert (entry is not None) == (digest in tier.present([digest]))
    return entry is not None


def put(tier: DiskTier, number: int) -> None:
    tier.put(make_entry(number))
    tier.flush()


def soon(is_so: Callable[[], bool]) -> bool:
    """Whether something comes to be so without anybody asking for it, as others' changes do."""
    end = time.monotonic() + 5
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return is_so()


def test_each_sees_what_the_other_writes(make: Make) -> None:
    left, right = make(), make()
    put(left, 1)
    checkpoint = make_entry(2, kind="checkpoint")
    right.put(checkpoint)
    right.flush()
    assert has(right, 1)
    assert soon(lambda: left.checkpoints([ROOT]) == [checkpoint.name])


def test_each_sees_what_the_other_evicts_and_clears(make: Make) -> None:
    left, right = make(), make(capacity_bytes=2 << 20)
    for number in range(6):
        left.put(make_entry(number, num_bytes=200_000))
    left.flush()
    for number in range(6, 9):
        right.put(make_entry(number, num_bytes=200_000))
    right.flush()
    assert not right.present([digest_of(0)])
    assert soon(lambda: not left.present([digest_of(0)]))
    assert soon(lambda: bool(left.present([digest_of(8)])))
    left.clear()
    assert soon(lambda: not right.present([digest_of(8)]))


def test_more_changes_than_are_kept_are_followed_too(tmp_path: Path) -> None:
    with closing(open_catalog(tmp_path / "index.db")) as catalog:
        mirror = Mirror()
        mirror.take(catalog.news(None, 0))
        for first in (0, JOURNAL_ROWS, 3 * JOURNAL_ROWS):
            with catalog.changing() as change:
                epoch = change.figure("epoch")
                for number in range(first, 2 * first + 10):
                    name = make_entry(number, kind="checkpoint", num_bytes=24).name
                    change.add(
                        Row(
                            name=name,
                            num_bytes=number,
                            used=1,
                            state=State.READY,
                            owner=None,
                            epoch=epoch,
                        )
                    )
                change.remove(digest_of(3))
            mirror.take(catalog.news(mirror.epoch, mirror.number))
            rows = {row.name.digest: row for row in catalog.rows()}
            assert len(mirror) == len(rows)
            assert mirror.present(rows.keys()) == rows.keys()
            names = {name.digest: name for name in mirror.checkpoints([ROOT])}
            assert names == {digest: row.name for digest, row in rows.items()}
            assert mirror.num_bytes(rows) == sum(row.num_bytes for row in rows.values())
        news = catalog.news(mirror.epoch, mirror.number)
        assert (news.is_all, news.gone, news.kept) == (False, (), ())


def test_the_same_entry_is_written_once(make: Make) -> None:
    left, right = make(), make()
    put(left, 1)
    put(right, 1)
    assert left.stats()["written"] == right.stats()["duplicate"] == 1


def test_a_clear_is_one_for_both(make: Make) -> None:
    left, right = make(), make()
    put(left, 1)
    put(right, 2)
    left.clear()
    assert not any(has(tier, number) for tier in (left, right) for number in (1, 2))
    put(right, 2)
    assert has(left, 2)


def test_a_clear_reaches_what_the_other_has_waiting(make: Make) -> None:
    left, is_put, is_cleared = make(), Event(), Event()

    def clear_once(call: Call, path: Path) -> None:
        # Between the room that is made for the first entry, and its file.
        if call == "create" and not is_cleared.is_set():
            is_cleared.set()
            assert is_put.wait(20)
            left.clear()

    right = make(WatchedFiles(clear_once))
    for number in range(3):
        right.put(make_entry(number))
    is_put.set()
    right.flush()
    assert right.stats()["cleared"] == 3
    assert not any(has(tier, number) for tier in (left, right) for number in range(3))
    put(right, 1)
    assert has(left, 1)
    right.close()
    left.close()
    again = make()
    assert [number for number in range(3) if has(again, number)] == [1]


def test_a_file_that_comes_after_a_clear_is_not_adopted(make: Make) -> None:
    left = make()

    def clear_and_fail(call: Call, path: Path) -> None:
        if call == "create":
            left.clear()
        if call == "unlink" and path.suffix == ".safetensors":
            raise OSError(EIO, "as if the process had died here")

    right = make(WatchedFiles(clear_and_fail))
    put(right, 1)
    right.close()
    assert not has(left, 1)
    left.close()
    assert not has(make(), 1)


def test_what_waits_is_not_found_after_the_other_has_cleared(make: Make) -> None:
    left = make()
    seen: list[set[bytes]] = []

    def look(call: Call, path: Path) -> None:
        if call == "create" and not seen:
            left.clear()
            soon(lambda: not right.present([digest_of(0)]))
            seen.append(right.present([digest_of(0), digest_of(1)]))
            assert right.read([]).done is False

    right = make(WatchedFiles(look))
    right.put(make_entry(0))
    right.flush()
    assert seen == [set()]


def test_an_entry_that_the_other_evicts_is_a_miss(make: Make) -> None:
    left, right = make(), make(capacity_bytes=2 << 20)
    for number in range(12):
        left.put(make_entry(number, num_bytes=200_000))
    left.flush()
    right.put(make_entry(20, num_bytes=200_000))
    right.flush()
    found = left.read([digest_of(number) for number in range(12)]).result()
    assert found[0] is None
    assert same_entry(found[11], make_entry(11, num_bytes=200_000))


def test_what_a_living_process_is_writing_is_left_alone(make: Make, tmp_path: Path) -> None:
    opened: list[DiskTier] = []

    def open_another(call: Call, path: Path) -> None:
        if call == "rename" and not opened:
            opened.append(make())

    tier = make(WatchedFiles(open_another))
    put(tier, 1)
    assert opened[0].stats().get("stale_removed", 0) == 0
    assert has(opened[0], 1)


def most_bytes(directory: Path) -> int:
    """Bytes of all files at one moment, which a walk beside other processes does not see.

    Within a change nobody else removes an entry, and one that is renamed meanwhile counts once.
    """
    with closing(open_catalog(directory / "index.db")) as catalog, catalog.changing():
        sizes: dict[int, int] = {}
        folders = [directory]
        while folders:
            for item in RealFiles().scan(folder := folders.pop()):
                if item.is_directory:
                    folders.append(folder / item.name)
                else:
                    sizes[item.inode] = max(item.num_bytes, sizes.get(item.inode, 0))
        return sum(sizes.values())


def test_the_limit_holds_beside_a_process_that_stands_still_while_it_reads(
    make: Make, tmp_path: Path
) -> None:
    tier, log = make(capacity_bytes=CAPACITY_BYTES), tmp_path / "tier" / "index.db-wal"
    for number in NUMBERS:
        tier.put(make_entry(number, num_bytes=NUM_BYTES))
    tier.flush()
    with closing(sqlite3.connect(log.with_name("index.db"), isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM entries").fetchone()
        # The log cannot begin anew before that has ended: each change makes it longer.
        for number in range(160):
            tier.read([digest_of(NUMBERS[-1 - number % 5])]).result()
            tier.flush()
            assert most_bytes(tmp_path / "tier") <= CAPACITY_BYTES
        grown = log.stat().st_size
    assert grown > 2 * LOG_PAGES * PAGE_BYTES
    for number in range(3):
        put(tier, 100 + number)
    assert log.stat().st_size <= 2 * LOG_PAGES * PAGE_BYTES
    assert has(tier, 102)


def hammer(directory: Path, seed: int, seconds: float) -> None:
    """Use a tier in any way for a while; nothing raises, and what is read is equal."""
    chance = random.Random(seed)
    tier = open_tier(directory)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        number = chance.choice(NUMBERS)
        digests = [digest_of(number), digest_of(chance.choice(NUMBERS))]
        tier.put(make_entry(number, num_bytes=NUM_BYTES))
        for digest, entry in zip(digests, tier.read(digests).result(), strict=True):
            other = int.from_bytes(digest, "big")
            assert entry is None or same_entry(entry, make_entry(other, num_bytes=NUM_BYTES))
        if chance.random() < 0.02:
            tier.clear()
        assert most_bytes(directory) <= CAPACITY_BYTES
    tier.close()
    stats = tier.stats()
    bad = [name for name in stats if name.startswith(("damaged", "index_", "write_failures"))]
    assert not bad, stats
    assert stats["written"] > 5


def start(directory: Path, seed: int, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, str(directory), str(seed), str(seconds)],
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "tier"
    other = start(directory, 1, 1.0)
    try:
        hammer(directory, 2, 1.5)
        _, errors = other.communicate(timeout=20)
    finally:
        other.kill()
        other.wait()
    assert other.returncode == 0, errors
    checked = verify(directory)
    assert (checked.num_damaged, checked.num_orphaned, checked.num_missing) == ({}, 0, 0)


@pytest.mark.slow
def test_a_process_killed_at_any_time_does_not_disturb_the_other(tmp_path: Path) -> None:
    directory = tmp_path / "tier"
    chance = random.Random(3)
    for seed in range(3):
        other = start(directory, seed, 20)
        while not (directory / "index.db").exists():
            time.sleep(0.01)
        hammer(directory, 10 + seed, 0.3 + chance.random() / 2)
        other.kill()
        _, errors = other.communicate(timeout=20)
        assert not errors
    tier = open_tier(directory)
    tier.close()
    checked = verify(directory)
    assert (checked.num_damaged, checked.num_orphaned, checked.num_missing) == ({}, 0, 0)
    assert tree_bytes(RealFiles(), directory) <= CAPACITY_BYTES


if __name__ == "__main__":
    hammer(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
