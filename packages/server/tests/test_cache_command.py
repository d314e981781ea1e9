"""``treadle cache``, on a directory that a server has filled, and the cache's routes."""

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from treadle_core.testing import RecordingStore
from treadle_server.cache_command import size
from treadle_server.cli import main
from treadle_server.settings import HttpConfig, ServeConfig

from .conftest import needs_cache


@pytest.fixture(scope="module")
def filled(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, launch: Any
) -> Generator[tuple[str, Path, Any]]:
    """A server with a cache on disk, and in a file."""
    folder = tmp_path_factory.mktemp("ssd")
    words = ["--model", str(checkpoint), "--ssd-cache-dir", str(folder)]
    words += ["--cache-save", str(folder.parent / "saved"), "--cache-memory-mb", "16"]
    with launch(tmp_path_factory.mktemp("log") / "stderr", *words) as server:
        yield server.url, folder, server.popen


def ask(url: str, content: str) -> int:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
    reply = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=30).json()
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def until_written(url: str) -> None:
    for _ in range(200):
        details = httpx2.get(f"{url}/v1/cache/stats").json()["details"]
        if details["slow_num_waiting"] == 0:
            return
        time.sleep(0.02)


def told(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["cache", *words]) == status
    out, err = capsys.readouterr()
    assert err == "" or status == 2
    return out or err


@needs_cache
def test_the_directory_of_a_running_server_can_be_cared_for(
    filled: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    url, folder, _ = filled
    here = ["--ssd-cache-dir", str(folder)]
    assert ask(url, "a question that is long enough " * 8) == 0
    until_written(url)

    listing = json.loads(told(capsys, "ls", *here, "--json"))
    assert listing["num_entries"] >= 6
    assert {entry["kind"] for entry in listing["entries"]} == {"block"}
    assert listing["used_bytes"] > sum(entry["num_bytes"] for entry in listing["entries"])
    lines = told(capsys, "ls", *here).splitlines()
    assert sum(" tokens " in line for line in lines) == listing["num_entries"]
    assert lines[listing["num_entries"]].startswith(f"{listing['num_entries']} entries, ")
    assert "damaged: 0" in told(capsys, "verify", *here)
    collected = json.loads(told(capsys, "gc", *here, "--max-gb", "1", "--json"))
    assert collected["num_entries"] == listing["num_entries"]

    assert "entries: " in told(capsys, "clear", *here)
    assert json.loads(told(capsys, "ls", *here, "--json"))["entries"] == []


@needs_cache
def test_a_damaged_file_is_told_by_its_path(
    filled: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, folder, _ = filled
    stray = folder / "entries" / "a"
    stray.mkdir(parents=True, exist_ok=True)
    (stray / "junk.safetensors").write_bytes(b"junk")
    said = told(capsys, "verify", "--ssd-cache-dir", str(folder), status=1)
    assert "junk.safetensors" in said
    told(capsys, "gc", "--ssd-cache-dir", str(folder))
    assert "damaged: 0" in told(capsys, "verify", "--ssd-cache-dir", str(folder))


@needs_cache
@pytest.mark.parametrize("action", ["ls", "verify", "clear", "gc"])
def test_a_directory_that_is_not_there_is_refused(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "nowhere"
    said = told(capsys, action, "--ssd-cache-dir", str(nowhere), status=2)
    assert said == f"treadle: ssd_cache_dir: {nowhere} is not a directory\n"
    assert not nowhere.exists()


@needs_cache
def test_a_limit_that_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for limit in ("0", "-1", "nan", "many"):
        told(capsys, "gc", "--ssd-cache-dir", str(tmp_path), f"--max-gb={limit}", status=2)


@needs_cache
def test_the_routes_show_and_empty_both_tiers_and_the_saved_file(filled: Any) -> None:
    url, folder, _ = filled
    httpx2.delete(f"{url}/v1/cache")
    saved = folder.parent / "saved"
    saved.write_text("what an earlier process left")
    before = httpx2.get(f"{url}/v1/cache/stats").json()
    question = "another question that is long enough " * 8
    assert ask(url, question) == 0
    assert ask(url, question) >= 64
    stats = httpx2.get(f"{url}/v1/cache/stats").json()
    assert stats["enabled"] is True
    assert stats["hits"] == before["hits"] + 1
    assert stats["misses"] == sum(stats["miss_reasons"].values()) == before["misses"] + 1
    assert 0 < stats["used_bytes"] <= stats["capacity_bytes"] == 16 << 20
    assert stats["details"]["slow_capacity_bytes"] == 10 << 30

    assert httpx2.delete(f"{url}/v1/cache").json() == {"cleared": True, "warming": 0}
    assert not saved.exists()
    emptied = httpx2.get(f"{url}/v1/cache/stats").json()
    assert (emptied["num_entries"], emptied["details"]["slow_num_entries"]) == (0, 0)
    assert ask(url, question) == 0


@needs_cache
def test_the_ram_tier_is_saved_at_the_end_and_read_at_the_start(
    checkpoint: Path, tmp_path: Path, launch: Any
) -> None:
    saved = tmp_path / "states"
    words = ["--model", str(checkpoint), "--cache-save", str(saved)]
    found: list[int] = []
    for number in range(2):
        with launch(tmp_path / f"stderr{number}", *words) as server:
            found.append(ask(server.url, "a question that is long enough " * 8))
            server.popen.terminate()
            assert server.popen.wait(30) == 0
        assert saved.stat().st_size > 1000
    assert found[0] == 0
    assert found[1] >= 64
    log = (tmp_path / "stderr1").read_text()
    assert "states of prompts were loaded" in log
    assert "states of prompts were saved" in log


async def test_without_a_store_there_are_no_figures_and_nothing_to_clear(serve: Any) -> None:
    async with serve() as served:
        stats = (await served.client.get("/v1/cache/stats")).json()
        assert (stats["enabled"], stats["hits"], stats["hit_rate"]) == (False, 0, None)
        reply = await served.client.delete("/v1/cache")
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "no_cache")
        assert (await served.client.get("/v1/cache")).status_code == 405


async def test_the_routes_need_the_key(serve: Any) -> None:
    config = ServeConfig(http=HttpConfig(api_key="k"))
    async with serve(store=RecordingStore(), config=config) as served:
        assert (await served.client.get("/v1/cache/stats")).status_code == 401
        assert (await served.client.delete("/v1/cache")).status_code == 401


def test_sizes_read_well() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 << 29, 1 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "1024.0 TiB",
    ]
