"""The disk tier through its port: what is put is found, read back equal, and forgotten when told."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event, Thread, active_count

import numpy as np
import pytest

from treadle_cache.disk import DiskConfig, DiskTier
from treadle_cache.disk.files import RealFiles, tree_bytes
from treadle_cache.disk.testing import (
    ROOT,
    Call,
    WatchedFiles,
    digest_of,
    digests,
    make_entry,
    same_entry,
)
from treadle_cache.disk.tier import MAX_TOUCHES_WAITING
from treadle_cache.entries import Entry
from treadle_core.errors import InvalidRequest, Unsupported

Make = Callable[..., DiskTier]


def put(tier: DiskTier, numbers: Sequence[int], num_bytes: int = 3000) -> None:
    for number in numbers:
        tier.put(make_entry(number, num_bytes=num_bytes))


def read(tier: DiskTier, numbers: Sequence[int]) -> list[Entry | None]:
    return tier.read(digests(numbers)).result()


class Gate:
    """Holds the writer where it creates a file, until it is opened."""

    def __init__(self) -> None:
        self.reached = Event()
        self.opened = Event()

    def __call__(self, call: Call, path: Path) -> None:
        if call == "create":
            self.reached.set()
            assert self.opened.wait(20)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def test_what_is_put_is_found_and_read_back_equal(make: Make) -> None:
    tier = make()
    put(tier, range(5))
    assert tier.present(digests([0, 4, 99])) == set(digests([0, 4]))
    assert tier.count_blocks(digests([0, 1, 2, 99, 4])) == 3
    tier.flush()
    assert tier.present(digests([0, 4, 99])) == set(digests([0, 4]))
    assert tier.count_blocks(digests([0, 1, 2, 99, 4])) == 3
    assert tier.count_blocks(digests(range(5))) == 5
    for number, found in enumerate(read(tier, range(5))):
        assert same_entry(found, make_entry(number))
    assert read(tier, [99]) == [None]
    tier.flush()
    stats = tier.stats()
    assert (stats["num_entries"], stats["written"], stats["read"]) == (5, 5, 5)


def test_an_entry_that_is_there_is_not_written_again(make: Make) -> None:
    tier = make()
    put(tier, [1])
    tier.flush()
    put(tier, [1])
    tier.flush()
    assert tier.stats()["duplicate"] == 1
    assert tier.stats()["written"] == 1


def test_entries_outlive_the_tier(make: Make) -> None:
    first = make()
    put(first, [1])
    first.close()
    assert same_entry(read(make(), [1])[0], make_entry(1))


def test_checkpoints_are_found_by_what_they_hang_on(make: Make) -> None:
    tier = make()
    checkpoint = make_entry(2, parent=digest_of(1), kind="checkpoint")
    tier.put(make_entry(1))
    tier.put(checkpoint)
    assert tier.checkpoints([ROOT, digest_of(1)]) == [checkpoint.name]
    tier.flush()
    assert tier.checkpoints([digest_of(1)]) == [checkpoint.name]
    assert tier.checkpoints([ROOT]) == []


def test_look_ups_of_many_digests_at_once(make: Make) -> None:
    tier = make()
    put(tier, [0, 1999], num_bytes=24)
    tier.flush()
    assert tier.present(digests(range(2500))) == set(digests([0, 1999]))
    assert tier.checkpoints(digests(range(2500))) == []


def test_every_dtype_of_a_row_comes_back_as_its_bits(make: Make) -> None:
    tier = make()
    arrays = (
        np.arange(6, dtype=np.uint16).reshape(1, 2, 3),
        np.zeros((0, 4), np.float16),
        np.array(7, np.int64),
        np.arange(12, dtype=np.float32)[::2],
    )
    entry = Entry(name=make_entry(1).name, arrays=arrays)
    tier.put(entry)
    tier.flush()
    assert same_entry(read(tier, [1])[0], entry)


def test_an_entry_that_cannot_be_written_is_counted(make: Make) -> None:
    tier = make()
    tier.put(Entry(name=make_entry(1).name, arrays=(np.zeros(3, np.complex128),)))
    tier.flush()
    assert tier.stats()["unsupported"] == 1
    assert read(tier, [1]) == [None]


# The queue


def test_put_never_waits_and_drops_what_has_no_room(make: Make, gate: Gate) -> None:
    tier = make(WatchedFiles(before=gate), queue_bytes=7000)
    assert tier.has_room(7000)
    put(tier, [0, 1])
    assert gate.reached.wait(20)
    assert not tier.has_room(3000)
    put(tier, [1, 2, 3])
    assert tier.stats()["waiting_bytes"] <= 7000
    assert tier.stats()["dropped_full"] == 2
    gate.opened.set()
    tier.flush()
    assert tier.present(digests(range(4))) == set(digests(range(2)))
    assert tier.has_room(7000)


def test_what_would_be_dropped_anyway_has_room(make: Make) -> None:
    tier = make(queue_bytes=10)
    tier.close()
    assert tier.has_room(1 << 40)


def test_an_entry_larger_than_the_queue_is_written(make: Make) -> None:
    tier = make(queue_bytes=10)
    put(tier, [0])
    tier.flush()
    put(tier, [1])
    tier.flush()
    assert tier.stats()["written"] == 2


def test_what_waits_is_found_and_read_from_memory(make: Make, gate: Gate) -> None:
    tier = make(WatchedFiles(before=gate))
    put(tier, range(3))
    assert gate.reached.wait(20)
    assert tier.present(digests(range(4))) == set(digests(range(3)))
    assert all(same_entry(found, make_entry(n)) for n, found in enumerate(read(tier, range(3))))
    assert tier.stats()["read_from_memory"] == 3


def test_close_writes_what_waits_and_ends_the_threads(make: Make) -> None:
    before = active_count()
    tier = make()
    put(tier, range(20))
    tier.close()
    tier.close()
    assert active_count() == before
    assert read(make(), [19]) != [None]


def test_a_closed_tier_answers_and_has_nothing(make: Make) -> None:
    tier = make()
    put(tier, [1])
    tier.close()
    tier.put(make_entry(2))
    tier.flush()
    tier.clear()
    tier.wait(20)
    assert tier.present(digests([1, 2])) == set()
    assert tier.checkpoints([ROOT]) == []
    assert read(tier, [1, 2]) == [None, None]
    assert tier.stats()["num_entries"] == 0


def test_files_and_their_names_are_brought_to_the_device(make: Make, tmp_path: Path) -> None:
    synced: list[str] = []

    def note(call: Call, path: Path) -> None:
        if call == "sync":
            synced.append(path.name)

    tier = make(WatchedFiles(note), sync_bytes=5000)
    put(tier, range(4))
    tier.flush()
    # The last may be on its way still; those before it were due.
    assert len([name for name in synced if name.endswith(".safetensors")]) >= 2
    tier.close()
    assert {f"{digest_of(number).hex()}.safetensors" for number in range(4)} <= set(synced)
    assert "0" in synced


# Reading


def test_wait_returns_when_a_reading_has_finished(make: Make) -> None:
    tier = make()
    put(tier, range(3))
    readings = [tier.read(digests([number])) for number in range(3)]
    for _ in range(20):
        if all(reading.done for reading in readings):
            break
        tier.wait(20)
    assert all(reading.done for reading in readings)
    tier.wait(20)


def test_a_cancelled_reading_reads_no_further(make: Make) -> None:
    reached, go_on = Event(), Event()

    def hold(call: Call, path: Path) -> None:
        if call == "read":
            reached.set()
            assert go_on.wait(20)

    tier = make(WatchedFiles(before=hold))
    put(tier, range(5))
    tier.flush()
    reading = tier.read(digests(range(5)))
    assert reached.wait(20)
    reading.cancel()
    go_on.set()
    assert reading.result() == [None] * 5
    assert tier.stats()["read"] == 1


# Clearing


def test_nothing_is_found_after_a_clear_nor_after_a_restart(make: Make, tmp_path: Path) -> None:
    tier = make()
    put(tier, range(20))
    tier.flush()
    put(tier, range(20, 40))
    tier.clear()
    assert tier.present(digests(range(40))) == set()
    assert read(tier, range(40)) == [None] * 40
    tier.flush()
    assert not list((tmp_path / "tier").rglob("*.safetensors"))
    put(tier, [3])
    tier.close()
    assert make().present(digests(range(40))) == {digest_of(3)}


def test_a_clear_waits_for_the_write_under_way_and_undoes_it(make: Make, gate: Gate) -> None:
    tier = make(WatchedFiles(before=gate))
    put(tier, range(3))
    assert gate.reached.wait(20)
    thread = Thread(target=tier.clear)
    thread.start()
    gate.opened.set()
    thread.join(20)
    tier.flush()
    assert tier.present(digests(range(3))) == set()
    tier.close()
    assert make().present(digests(range(3))) == set()


def test_a_reading_under_way_delivers_nothing_after_a_clear(make: Make) -> None:
    reached, go_on = Event(), Event()

    def hold(call: Call, path: Path) -> None:
        if call == "read":
            reached.set()
            assert go_on.wait(20)

    tier = make(WatchedFiles(after=hold))
    put(tier, [1, 2])
    tier.flush()
    first, second = tier.read(digests([1])), tier.read(digests([2]))
    assert reached.wait(20)
    tier.clear()
    put(tier, [1])
    go_on.set()
    assert first.result() == second.result() == [None]


# The limit


def test_the_limit_holds_at_every_instant(make: Make, tmp_path: Path) -> None:
    capacity, most = 3 << 20, 0

    def measure(call: Call, path: Path) -> None:
        nonlocal most
        most = max(most, tree_bytes(RealFiles(), tmp_path / "tier"))

    tier = make(WatchedFiles(measure, measure), capacity)
    for number in range(40):
        put(tier, [number], num_bytes=100_000 + 7000 * (number % 9))
        if number % 7 == 0:
            tier.flush()
            read(tier, range(number))
    tier.close()
    assert 2 << 20 < most <= capacity
    assert tree_bytes(RealFiles(), tmp_path / "tier") <= capacity


def test_the_least_recently_used_goes_first(make: Make) -> None:
    tier = make(capacity_bytes=2_900_000)
    put(tier, range(6), num_bytes=300_000)
    tier.flush()
    read(tier, [0, 1])
    tier.flush()
    put(tier, range(6, 9), num_bytes=300_000)
    tier.flush()
    kept = tier.present(digests(range(9)))
    assert tier.stats()["evicted"] >= 1
    assert set(digests([0, 1, 6, 7, 8])) <= kept
    assert digest_of(2) not in kept


def test_a_use_elsewhere_is_a_use(make: Make) -> None:
    tier = make(capacity_bytes=2_900_000)
    put(tier, range(6), num_bytes=300_000)
    tier.flush()
    tier.touch(digests([0, 1, 99]))
    tier.flush()
    put(tier, range(6, 9), num_bytes=300_000)
    tier.flush()
    kept = tier.present(digests(range(9)))
    assert set(digests([0, 1, 8])) <= kept
    assert digest_of(2) not in kept


def test_uses_that_wait_are_bounded(make: Make, gate: Gate) -> None:
    tier = make(WatchedFiles(before=gate))
    put(tier, [0])
    assert gate.reached.wait(20)
    tier.touch(digests(range(MAX_TOUCHES_WAITING + 5)))
    tier.touch(digests(range(100, 200)))
    assert tier.stats()["touches_dropped"] == 5


def test_an_entry_goes_after_what_hangs_on_it(make: Make) -> None:
    tier = make(capacity_bytes=3 << 20)
    for number in range(4):
        tier.put(
            make_entry(number, parent=digest_of(number - 1) if number else ROOT, num_bytes=300_000)
        )
    lengths: list[int] = []
    for number in range(4, 20):
        put(tier, [number], num_bytes=300_000)
        tier.flush()
        lengths.append(tier.count_blocks(digests(range(4))))
        assert len(tier.present(digests(range(4)))) == lengths[-1]
    assert lengths == sorted(lengths, reverse=True)
    # The index takes room too, so that a step may take two of them.
    assert (lengths[0], lengths[-1]) == (4, 0)
    assert len(set(lengths)) >= 4


def test_a_smaller_limit_holds_from_the_start(make: Make, tmp_path: Path) -> None:
    first = make()
    put(first, range(20), num_bytes=300_000)
    first.close()
    second = make(capacity_bytes=2 << 20)
    assert tree_bytes(RealFiles(), tmp_path / "tier") <= 2 << 20
    assert second.present(digests(range(20))) == set(digests(range(15, 20)))


def test_an_entry_larger_than_the_limit_is_left_out(make: Make) -> None:
    tier = make(capacity_bytes=2 << 20)
    put(tier, [1])
    put(tier, [2], num_bytes=3 << 20)
    tier.flush()
    assert tier.present(digests([1, 2])) == {digest_of(1)}
    assert tier.stats()["no_room"] == 1


def test_room_is_left_to_others(make: Make) -> None:
    free = 2_000_000
    tier = make(WatchedFiles(free=lambda: free), min_free_bytes=1_000_000)
    put(tier, range(3), num_bytes=300_000)
    tier.flush()
    assert tier.stats()["written"] == 3
    free = 1_000_000
    put(tier, [3], num_bytes=300_000)
    tier.flush()
    assert tier.present(digests(range(4))) == set(digests([1, 2, 3]))
    free = 0
    put(tier, [4], num_bytes=300_000)
    tier.flush()
    assert tier.stats()["no_free_space"] == 1
    assert tier.stats()["num_entries"] == 3


# Options


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="capacity_bytes: got 5, expected an integer of at le"):
        DiskConfig(directory=str(tmp_path), capacity_bytes=5)
    with pytest.raises(InvalidRequest, match="directory: got '', expected a non-empty string"):
        DiskConfig(directory="", capacity_bytes=8 << 20)
    for option in ("queue_bytes", "sync_bytes", "max_failures"):
        with pytest.raises(InvalidRequest, match=f"{option}: got 0"):
            DiskConfig(directory="x", capacity_bytes=8 << 20, **{option: 0})
    for option in ("min_free_bytes", "quarantine_bytes", "retry_seconds"):
        with pytest.raises(InvalidRequest, match=f"{option}: got -1"):
            DiskConfig(directory="x", capacity_bytes=8 << 20, **{option: -1})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        config = DiskConfig(directory=str(tmp_path / name), capacity_bytes=8 << 20)
        with pytest.raises(Unsupported, match="cannot hold the disk tier"):
            DiskTier(config)
