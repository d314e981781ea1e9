"""Reading local files: only regular ones below allowed directories, whatever links say."""

import os
import socket
from pathlib import Path

import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from treadle_multimodal import MediaForbidden, MediaTooLarge
from treadle_multimodal.files import read_file


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    """An allowed directory with a file, beside another with a secret."""
    (tmp_path / "secret").write_bytes(b"secret")
    directory = tmp_path / "allowed"
    (directory / "deep").mkdir(parents=True)
    (directory / "a").write_bytes(b"abc")
    (directory / "deep" / "b").write_bytes(b"defg")
    return directory


def test_a_file_below_an_allowed_directory_is_read(allowed: Path) -> None:
    assert read_file(f"{allowed}/a", (str(allowed),), 3) == b"abc"
    assert read_file(f"{allowed}/deep/b", ("/nowhere", str(allowed)), 4) == b"defg"
    assert read_file(f"{allowed}/deep/../a", (str(allowed),), 3) == b"abc"


def test_a_file_above_the_limit_is_not_read(allowed: Path) -> None:
    with pytest.raises(MediaTooLarge, match="got 3, expected at most 2"):
        read_file(f"{allowed}/a", (str(allowed),), 2)


def test_links_are_followed_inside(allowed: Path) -> None:
    (allowed / "link").symlink_to("deep/b")
    (allowed / "way").symlink_to("deep")

    assert read_file(f"{allowed}/link", (str(allowed),), 9) == b"defg"
    assert read_file(f"{allowed}/way/b", (str(allowed),), 9) == b"defg"


def test_the_allowed_directory_may_be_a_link(allowed: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(allowed)

    assert read_file(f"{tmp_path}/link/a", (str(tmp_path / "link"),), 9) == b"abc"
    assert read_file(f"{allowed}/a", (str(tmp_path / "link"),), 9) == b"abc"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/proc/self/environ",
        "/dev/zero",
        "{}/../secret",
        "{}/deep/../../secret",
        "{}/out",
        "{}/outside/secret",
        "{}/loop",
        "{}/missing",
        "{}/a/b",
        "{}",
        "{}/deep",
        "{}/pipe",
        "{}/socket",
        "{}x/a",
        "{}/" + "a" * 5000,
        "/",
    ],
)
def test_anything_else_is_refused_alike(allowed: Path, path: str) -> None:
    (allowed / "out").symlink_to(allowed.parent / "secret")
    (allowed / "outside").symlink_to(allowed.parent)
    (allowed / "loop").symlink_to("loop")
    os.mkfifo(allowed / "pipe")
    (allowed.parent / "allowedx").mkdir()
    (allowed.parent / "allowedx" / "a").write_bytes(b"x")
    here = Path.cwd()
    os.chdir(allowed)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    os.chdir(here)

    with pytest.raises(MediaForbidden, match="expected a regular file in an allowed directory"):
        read_file(path.format(allowed), (str(allowed),), 100)


def test_nothing_is_allowed_by_default(allowed: Path) -> None:
    with pytest.raises(MediaForbidden):
        read_file(f"{allowed}/a", (), 100)


def test_a_file_that_cannot_be_read_is_refused(allowed: Path) -> None:
    (allowed / "a").chmod(0)
    if os.access(allowed / "a", os.R_OK):
        pytest.skip("this user may read every file")

    with pytest.raises(MediaForbidden):
        read_file(f"{allowed}/a", (str(allowed),), 100)


def test_no_descriptor_stays_open(allowed: Path) -> None:
    count = len([*Path("/dev/fd").iterdir()])
    for name in ("a", "deep/b", "deep", "missing", "a/b"):
        try:
            read_file(f"{allowed}/{name}", (str(allowed),), 3)
        except (MediaForbidden, MediaTooLarge):
            continue

    assert len([*Path("/dev/fd").iterdir()]) == count
