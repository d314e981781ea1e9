"""Whatever happens to the disk, answers are those of a cold engine, and the counters say why.

Run as a script, this file is the engine that is killed.
"""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from treadle_cache.disk.testing import CHANGES, Call, WatchedFiles

from .harness import BLOCK, Session, tiered_store, tokens

FAMILIES = ("llama", "qwen3_next")
WORK = {
    f"chat {i}": ((*tokens(1, 20), *tokens(70 + i, 9 + 8 * i)), tokens(80 + i, 6)) for i in range(3)
}


def serve(session: Session) -> int:
    """All of the work at once, every logit checked; how many prompt tokens were reused."""
    for id, (prompt, answer) in WORK.items():
        session.add(id, prompt, answer)
    session.run()
    return sum(session.check(id, prompt, answer) for id, (prompt, answer) in WORK.items())


def counters(session: Session) -> dict[str, float]:
    return dict(session.store.stats().details)


class Failing:
    """Every change of the disk fails while this is on."""

    def __init__(self, code: int, calls: frozenset[Call] = CHANGES) -> None:
        self.code = code
        self.calls = calls
        self.is_on = True

    def __call__(self, call: Call, path: Path) -> None:
        if self.is_on and call in self.calls:
            raise OSError(self.code, os.strerror(self.code), str(path))


@pytest.mark.parametrize("ram_bytes", [256 << 20, 0], ids=["ram", "no ram"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_disk_that_takes_nothing(family: str, code: int, ram_bytes: int, tmp_path: Path) -> None:
    failing = Failing(code)
    failing.is_on = False
    store = tiered_store(tmp_path, ram_bytes=ram_bytes, files=WatchedFiles(before=failing))
    session = Session(family, store)
    failing.is_on = True
    serve(session)
    reused = serve(session)
    # Without RAM, what still waits to be written may be found.
    assert reused > 0 or ram_bytes == 0
    session.engine.close()
    assert any(name.startswith("slow_") and "fail" in name for name in counters(session)), counters(
        session
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_disk_that_cannot_be_read(family: str, tmp_path: Path) -> None:
    before = Session(family, tiered_store(tmp_path))
    serve(before)
    before.engine.close()
    failing = Failing(errno.EIO, frozenset({"read"}))
    failing.is_on = False
    after = Session(family, tiered_store(tmp_path, files=WatchedFiles(before=failing)))
    failing.is_on = True
    serve(after)
    assert counters(after)["damaged_reads"] > 0
    after.engine.close()


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip, cut, empty, remove])
@pytest.mark.parametrize("family", FAMILIES)
def test_files_that_are_damaged_between_two_runs(
    family: str, damage: Callable[[Path, random.Random], None], tmp_path: Path
) -> None:
    before = Session(family, tiered_store(tmp_path))
    serve(before)
    before.engine.close()
    rng = random.Random(3)
    files = sorted(path for path in tmp_path.rglob("*.safetensors") if path.is_file())
    assert files
    for path in files:
        if rng.random() < 0.5:
            damage(path, rng)
    after = Session(family, tiered_store(tmp_path))
    serve(after)
    after.engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_that_is_removed_while_the_engine_runs(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    session = Session(family, tiered_store(folder, ram_bytes=0))
    serve(session)
    while folder.exists():  # the writer may still put something there
        shutil.rmtree(folder, ignore_errors=True)
    serve(session)
    serve(session)
    session.engine.close()


def killed_at(turn: int) -> Callable[[Call, Path], None]:
    left = [turn]

    def count(call: Call, path: Path) -> None:
        if call in CHANGES:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return count


@pytest.mark.parametrize("turn", [7, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_that_was_killed_while_it_wrote(family: str, turn: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reuse.test_faults", family, str(turn), str(tmp_path)],
        cwd=Path(__file__).parent.parent,
        timeout=50,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    session = Session(family, tiered_store(tmp_path))
    serve(session)
    again = serve(session)
    assert again > 0
    session.engine.close()
    verified = Session(family, tiered_store(tmp_path))
    # Disk matches end with a block; those of RAM, before, at any token.
    assert serve(verified) > again - len(WORK) * BLOCK
    verified.engine.close()


if __name__ == "__main__":
    family, turn, directory = sys.argv[1:]
    store = tiered_store(Path(directory), files=WatchedFiles(before=killed_at(int(turn))))
    session = Session(family, store)
    serve(session)
    session.engine.close()
