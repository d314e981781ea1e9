"""The disk tier through its port: what is put is found, read back equal, and forgotten when told."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from treadle_cache.disk import DiskConfig, DiskTier
from treadle_cache.entries import Entry, EntryKind, EntryName

ROOT = b"r" * 32


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def entry(
    number: int, *, parent: bytes = ROOT, kind: EntryKind = "block", num_bytes: int = 3000
) -> Entry:
    random = np.random.default_rng(number)
    arrays = (
        random.integers(0, 1 << 16, (3, num_bytes // 12), np.uint16),
        random.standard_normal(num_bytes // 8, np.float32),
    )
    name = EntryName(kind=kind, root=ROOT, digest=digest(number), parent=parent, num_tokens=32)
    return Entry(name=name, arrays=arrays)


def config(directory: Path, capacity_bytes: int = 8 << 20, **options: int) -> DiskConfig:
    return DiskConfig(
        directory=str(directory), capacity_bytes=capacity_bytes, min_free_bytes=0, **options
    )


def assert_equal(found: Entry | None, expected: Entry) -> None:
    assert found is not None
    assert found.name == expected.name
    assert len(found.arrays) == len(expected.arrays)
    for left, right in zip(found.arrays, expected.arrays, strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()


def read(tier: DiskTier, numbers: Sequence[int]) -> list[Entry | None]:
    return tier.read([digest(number) for number in numbers]).result()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(config(tmp_path / "tier"))
    yield tier
    tier.close()


def test_what_is_put_is_found_and_read_back_equal(tier: DiskTier) -> None:
    entries = [entry(number) for number in range(5)]
    for it in entries:
        tier.put(it)
    digests = [it.name.digest for it in entries]
    assert tier.present([*digests, digest(99)]) == set(digests)
    assert tier.count_blocks([*digests[:3], digest(99), digests[4]]) == 3
    tier.flush()
    assert tier.count_blocks(digests) == 5
    for found, expected in zip(tier.read(digests).result(), entries, strict=True):
        assert_equal(found, expected)
    assert tier.stats()["num_entries"] == 5


def test_entries_outlive_the_tier(tmp_path: Path) -> None:
    first = DiskTier(config(tmp_path))
    first.put(entry(1))
    first.close()
    second = DiskTier(config(tmp_path))
    assert_equal(read(second, [1])[0], entry(1))
    second.close()


def test_checkpoints_are_found_by_what_they_hang_on(tier: DiskTier) -> None:
    tier.put(entry(1))
    tier.put(entry(2, parent=digest(1), kind="checkpoint"))
    assert [it.digest for it in tier.checkpoints([ROOT, digest(1)])] == [digest(2)]
    tier.flush()
    assert tier.checkpoints([digest(1)]) == [entry(2, parent=digest(1), kind="checkpoint").name]
    assert tier.checkpoints([ROOT]) == []


def test_nothing_is_found_after_a_clear_nor_after_a_restart(tmp_path: Path) -> None:
    tier = DiskTier(config(tmp_path))
    for number in range(20):
        tier.put(entry(number))
    tier.clear()
    assert tier.present([digest(number) for number in range(20)]) == set()
    tier.put(entry(3))
    tier.close()
    tier = DiskTier(config(tmp_path))
    assert tier.present([digest(number) for number in range(20)]) == {digest(3)}
    tier.close()
