"""What people do with a directory, also while a server uses it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from treadle_cache.disk import (
    Cleared,
    Collected,
    DiskConfig,
    DiskTier,
    Listing,
    Verified,
    clear,
    collect,
    list_entries,
    verify,
)
from treadle_cache.disk.bench import measure_disk
from treadle_cache.disk.files import RealFiles, tree_bytes
from treadle_cache.disk.testing import digest_of, make_entry


def put(tier: DiskTier, numbers: Sequence[int], num_bytes: int = 3000) -> None:
    for number in numbers:
        tier.put(make_entry(number, num_bytes=num_bytes))
        tier.flush()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def tier(directory: Path) -> Iterator[DiskTier]:
    config = DiskConfig(directory=str(directory), capacity_bytes=8 << 20, min_free_bytes=0)
    tier = DiskTier(config)
    yield tier
    tier.close()


def test_a_directory_that_is_not_there_is_empty_and_stays_away(directory: Path) -> None:
    assert list_entries(directory) == Listing()
    assert verify(directory) == Verified()
    assert clear(directory) == Cleared()
    assert collect(directory, 0) == Collected()
    assert not directory.exists()


@pytest.mark.parametrize("is_running", [True, False])
def test_entries_are_listed_the_latest_used_first(
    tier: DiskTier, directory: Path, is_running: bool
) -> None:
    put(tier, range(3))
    tier.read([digest_of(0)]).result()
    tier.flush()
    if not is_running:
        tier.close()
    listing = list_entries(directory)
    assert [it.name for it in listing.entries] == [make_entry(n).name for n in (0, 2, 1)]
    assert all(3000 < it.num_bytes < 4000 for it in listing.entries)
    assert listing.used_bytes == tree_bytes(RealFiles(), directory)


def test_entries_are_listed_without_an_index_too(tier: DiskTier, directory: Path) -> None:
    put(tier, range(3))
    tier.close()
    (directory / "index.db").write_bytes(bytes(100))
    assert len(list_entries(directory).entries) == 3


def test_verify_reads_every_file_and_changes_nothing(tier: DiskTier, directory: Path) -> None:
    put(tier, range(5))
    paths = [next(directory.rglob(f"{digest_of(n).hex()}.*")) for n in range(5)]
    data = paths[0].read_bytes()
    paths[0].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    paths[1].write_bytes(paths[1].read_bytes()[:700])
    paths[2].unlink()
    (directory / "entries/0/notes.txt").write_text("no entry" * 100)
    before = {path: path.read_bytes() for path in (directory / "entries").rglob("*.*")}
    assert verify(directory) == Verified(
        num_good=2,
        num_damaged={"checksum": 1, "truncated": 1, "foreign": 1},
        num_orphaned=0,
        num_missing=1,
        num_bytes=3 * len(data) + 700 + 800,
        damaged=tuple(str(path) for path in (*paths[:2], directory / "entries/0/notes.txt")),
    )
    assert {path: path.read_bytes() for path in (directory / "entries").rglob("*.*")} == before


def test_files_that_the_index_does_not_know_are_orphans(tier: DiskTier, directory: Path) -> None:
    put(tier, range(3))
    tier.close()
    (directory / "index.db").unlink()
    assert (verify(directory).num_good, verify(directory).num_orphaned) == (3, 3)
    assert not (directory / "index.db").exists()


def test_clear_empties_a_directory_that_is_in_use(tier: DiskTier, directory: Path) -> None:
    put(tier, range(5), num_bytes=300_000)
    cleared = clear(directory)
    assert cleared.num_entries == 5
    assert cleared.freed_bytes > 1_400_000
    tier.flush()
    assert tier.present([digest_of(n) for n in range(5)]) == set()
    put(tier, [1])
    assert tier.present([digest_of(1)]) == {digest_of(1)}


def test_collect_evicts_what_was_not_used_for_longest(tier: DiskTier, directory: Path) -> None:
    put(tier, range(10), num_bytes=300_000)
    # Five entries, the index and its log, and the room that is kept for it.
    capacity_bytes = 2_150_000
    collected = collect(directory, capacity_bytes)
    assert collected.used_bytes <= capacity_bytes
    assert collected.num_evicted + collected.num_entries == 10
    assert collected.num_entries == 5
    assert collected.freed_bytes > 1_400_000
    digests = [digest_of(n) for n in range(10)]
    tier.flush()
    assert tier.present(digests) == set(digests[5:])
    assert collect(directory, 0).num_entries == 0


def test_collect_puts_a_directory_in_order(tier: DiskTier, directory: Path) -> None:
    put(tier, range(3))
    tier.close()
    (directory / "index.db").unlink()
    (directory / "temp/left.tmp").write_bytes(bytes(10))
    (directory / "entries/notes.txt").write_text("x")
    collected = collect(directory, 8 << 20)
    assert (collected.num_adopted, collected.num_stale, collected.num_damaged) == (3, 1, 1)
    assert verify(directory).num_orphaned == 0


def test_the_bench_gives_both_ratios(tmp_path: Path) -> None:
    figures = measure_disk(str(tmp_path), num_entries=4, entry_bytes=100_000, num_runs=1)
    assert figures["ssd_write_ratio"] > 0
    assert figures["ssd_read_ratio"] > 0
    assert list(tmp_path.iterdir()) == []
