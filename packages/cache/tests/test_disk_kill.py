"""kill -9 at any call to the file system: what is found afterwards is whole, and nothing is left over.

Run as a script, this file is the process that is killed: it forks a child for every call.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from treadle_cache.disk import DiskConfig, DiskTier, verify
from treadle_cache.disk.files import RealFiles, tree_bytes
from treadle_cache.disk.testing import (
    CHANGES,
    ROOT,
    Call,
    WatchedFiles,
    digest_of,
    make_entry,
    same_entry,
)

CAPACITY_BYTES = 2 << 20
NUM_BYTES = 400_000
FIRST, SECOND = range(5), range(5, 7)


def config(directory: Path) -> DiskConfig:
    return DiskConfig(directory=str(directory), capacity_bytes=CAPACITY_BYTES, min_free_bytes=0)


def work(directory: Path, files: WatchedFiles, say: Callable[[str], object]) -> None:
    """Write more than fits, clear, write again."""
    tier = DiskTier(config(directory), files=files)
    for number in FIRST:
        tier.put(make_entry(number, num_bytes=NUM_BYTES))
    tier.flush()
    say("written")
    tier.read([digest_of(4)]).result()
    tier.flush()
    tier.clear()
    say("cleared")
    for number in SECOND:
        tier.put(make_entry(number, num_bytes=NUM_BYTES))
    tier.flush()
    say("written again")
    tier.close()
    say("closed")


class Killer:
    """Ends the process at the ``turn``-th call that changes something."""

    def __init__(self, turn: int) -> None:
        self.left = turn

    def before(self, call: Call, path: Path) -> None:
        if call in CHANGES and call != "close":
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1


def main(root: Path) -> None:
    turn, status = 0, signal.SIGKILL
    while status == signal.SIGKILL:
        folder = root / f"{turn:04d}"
        folder.mkdir()
        child = os.fork()
        if child == 0:
            be_killed(folder, turn)
        status = os.waitpid(child, 0)[1]
        turn += 1
    print(turn - 1)


def be_killed(folder: Path, turn: int) -> None:
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # Large writes in two parts, so that a file is left half written too.
    files = WatchedFiles(Killer(turn).before, max_written=250_000)
    work(folder / "tier", files, lambda text: os.write(said, f"{text}\n".encode()))
    os._exit(0)


def check(folder: Path) -> None:
    """Open what is left, and look at all of it."""
    said = (folder / "said").read_text().splitlines()
    tier = DiskTier(config(folder / "tier"))
    numbers = [*FIRST, *SECOND]
    digests = [digest_of(number) for number in numbers]
    found = tier.read(digests).result()
    kept = set[int]()
    for number, entry in zip(numbers, found, strict=True):
        assert entry is None or same_entry(entry, make_entry(number, num_bytes=NUM_BYTES))
        if entry is not None:
            kept.add(number)
    assert tier.present(digests) == {digest_of(number) for number in kept}
    assert tree_bytes(RealFiles(), folder / "tier") <= CAPACITY_BYTES
    stats = tier.stats()
    assert not [name for name in stats if name.startswith("damaged") or "fail" in name], stats
    assert "index_rebuilt" not in stats
    assert tier.checkpoints([ROOT]) == []
    if said == ["written"]:
        assert kept in ({2, 3, 4}, {1, 2, 3, 4}, set())
    if "cleared" in said:
        assert not kept & set(FIRST)
    if "written again" in said:
        assert kept == set(SECOND)
    # Whatever was there, the tier goes on from it.
    tier.put(make_entry(9, num_bytes=NUM_BYTES))
    tier.close()
    checked = verify(folder / "tier")
    assert checked.num_good >= min(len(kept) + 1, 3)
    assert (checked.num_damaged, checked.num_orphaned, checked.num_missing) == ({}, 0, 0)
    left = {path.name for path in (folder / "tier").rglob("*") if path.is_file()}
    assert left == {"index.db", "lock", *(n for n in left if n.endswith(".safetensors"))}


@pytest.mark.slow
def test_what_survives_kill_9_at_any_call_is_whole(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=55
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 60
    for folder in sorted(tmp_path.iterdir()):
        check(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
