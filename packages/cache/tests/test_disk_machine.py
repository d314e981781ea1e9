"""Any sequence of calls, restarts and damages leaves the tier equal to a dictionary of entries."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from treadle_cache.disk import DiskConfig, DiskTier, verify
from treadle_cache.disk.files import RealFiles, tree_bytes
from treadle_cache.disk.testing import ROOT, digest_of, make_entry, same_entry
from treadle_cache.entries import Entry

CAPACITY_BYTES = 2 << 20
LARGE_BYTES = 300_000
SMALL_BYTES = 1_200

# Odd numbers are checkpoints; each hangs on the block before it, and blocks on the root.
numbers = st.integers(0, 11)


def entry_of(number: int, is_large: bool) -> Entry:
    kind, parent = ("checkpoint", digest_of(number - 1)) if number % 2 else ("block", ROOT)
    num_bytes = LARGE_BYTES if is_large else SMALL_BYTES
    return make_entry(number, kind=kind, parent=parent, num_bytes=num_bytes)


class DiskTierMachine(RuleBasedStateMachine):
    """The model keeps what was put; the tier may evict, and must not keep anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.kept: dict[int, Entry] = {}
        self.others: list[DiskTier] = []
        self.num_damaged = 0

    @initialize()
    def start(self) -> None:
        self.tier = self.open()

    def open(self) -> DiskTier:
        config = DiskConfig(
            directory=str(self.root / "tier"), capacity_bytes=CAPACITY_BYTES, min_free_bytes=0
        )
        return DiskTier(config)

    def teardown(self) -> None:
        for tier in [self.tier, *self.others]:
            tier.close()
        checked = verify(self.root / "tier")
        assert (checked.num_orphaned, checked.num_missing) == (0, 0)
        shutil.rmtree(self.root)

    def note_evicted(self) -> None:
        """Forget in the model what the tier has evicted, which it may only do for room."""
        self.tier.flush()
        present = self.tier.present([digest_of(number) for number in self.kept])
        gone = {number for number in self.kept if digest_of(number) not in present}
        if gone:
            event("evicted")
            evicted = sum(tier.stats().get("evicted", 0) for tier in [self.tier, *self.others])
            assert len(gone) <= evicted
        for number in gone:
            del self.kept[number]

    @rule(number=numbers, is_large=st.booleans())
    def put(self, number: int, is_large: bool) -> None:
        entry = entry_of(number, is_large)
        self.tier.put(entry)
        assert self.tier.present([entry.name.digest]) == {entry.name.digest}
        self.kept.setdefault(number, entry)
        self.note_evicted()
        assert number in self.kept

    @rule(chosen=st.lists(numbers, max_size=6))
    def read(self, chosen: list[int]) -> None:
        found = self.tier.read([digest_of(number) for number in chosen]).result()
        for number, entry in zip(chosen, found, strict=True):
            assert same_entry(entry, self.kept.get(number))

    @rule(chosen=st.lists(numbers, max_size=12))
    def look_up(self, chosen: list[int]) -> None:
        digests = [digest_of(number) for number in chosen]
        kept = [number in self.kept for number in chosen]
        assert self.tier.present(digests) == {
            digest_of(number) for number in chosen if number in self.kept
        }
        assert self.tier.count_blocks(digests) == [*kept, False].index(False)
        names = self.tier.checkpoints(digests)
        expected = [n for n in {c + 1 for c in chosen if c % 2 == 0} if n in self.kept]
        assert sorted(name.digest for name in names) == sorted(map(digest_of, expected))

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.kept.clear()

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.tier = self.open()

    @rule()
    def share(self) -> None:
        """Another tier on the directory goes on; what the model says holds for both."""
        if len(self.others) < 2:
            self.others.append(self.tier)
            self.tier = self.open()

    @rule()
    def swap(self) -> None:
        if self.others:
            self.others.append(self.tier)
            self.tier = self.others.pop(0)
            # Look-ups and puts ask nobody: what others have changed shows a moment later.
            self.tier.flush()

    @rule(number=numbers, place=st.integers(0, 1 << 30), is_restarting=st.booleans())
    def damage(self, number: int, place: int, is_restarting: bool) -> None:
        """Flip a bit or cut a file short; it is a miss from when it is read."""
        if number not in self.kept:
            return
        name = f"{digest_of(number).hex()}.safetensors"
        (path,) = (self.root / "tier/entries").rglob(name)
        data = bytearray(path.read_bytes())
        place %= len(data)
        if place % 3:
            data[place] ^= 1
        else:
            del data[place:]
        path.write_bytes(data)
        if is_restarting:
            self.restart()
        assert self.tier.read([digest_of(number)]).result() == [None]
        assert self.tier.present([digest_of(number)]) == set()
        del self.kept[number]

    @rule()
    def lose_the_index(self) -> None:
        for tier in [self.tier, *self.others]:
            tier.close()
        self.others.clear()
        (self.root / "tier/index.db").unlink()
        self.tier = self.open()

    @invariant()
    def the_limit_holds(self) -> None:
        assert tree_bytes(RealFiles(), self.root) <= CAPACITY_BYTES


TestDiskTier = DiskTierMachine.TestCase
TestDiskTier.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
