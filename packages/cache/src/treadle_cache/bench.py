"""What reuse saves and what it costs: ratios from one run, as JSON."""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from treadle_cache.config import CacheConfig
from treadle_cache.digests import Chain, Namespace
from treadle_cache.disk import DiskConfig, DiskTier
from treadle_cache.disk.bench import measure_disk
from treadle_cache.index import PrefixIndex
from treadle_cache.ram import RamStore
from treadle_cache.tiered import TieredStore
from treadle_core.engine import Engine, EngineConfig
from treadle_core.events import Finished, TokenOut
from treadle_core.mlx_runtime.bench import (
    Checkpoint,
    engine_throughput,
    load_checkpoint,
    make_parser,
    run,
)
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.ports import PrefixStore
from treadle_core.request import Request, SamplingParams

CAPACITY = 4 << 30
LENGTHS = (1000, 3000)
SUFFIX = 8
ROWS = 8

Report = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run the benchmarks named on the command line (all by default) and print JSON."""
    parser = make_parser("cache", __doc__, BENCHMARKS)
    parser.add_argument("--directory", help="where the disk tier works; removed afterwards")
    options = parser.parse_args(argv)
    checkpoint = load_checkpoint(options.model)

    def measure(name: str) -> tuple[dict[str, float], Report]:
        figures, details = BENCHMARKS[name](checkpoint, options.repeat, options.directory)
        return {figure: round(value, 3) for figure, value in figures.items()}, details

    return run(BENCHMARKS, options.only, measure)


def first_tokens(
    checkpoint: Checkpoint, repeat: int, directory: str | None
) -> tuple[dict[str, float], Report]:
    """Time to the first token of a prompt whose beginning is new, in RAM, or on disk.

    Prompts are a shared beginning of 1,000 or 3,000 tokens and ``SUFFIX`` tokens of their own. For
    the disk, the engine and its RAM store are new each time; the directory is what stays.
    """
    figures: dict[str, float] = {}
    details: Report = {}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        engine = _engine(checkpoint, _tiered(folder))
        first_token(engine, checkpoint.prompt(33, 1))
        for length in LENGTHS:
            shared = checkpoint.prompt(length, length)
            asked = [
                (*shared, *checkpoint.prompt(SUFFIX, 100 + turn)) for turn in range(repeat + 1)
            ]
            cold = first_token(engine, asked[0])
            ram = [first_token(engine, prompt) for prompt in asked[1:]]
            details[str(length)] = {"cold": cold, "ram": ram}
            figures[f"ram_ttft_ratio_{length}"] = cold[0] / statistics.median(t for t, _ in ram)
        engine.close()
        for length in LENGTHS:
            shared = checkpoint.prompt(length, length)
            disk: list[tuple[float, int]] = []
            for turn in range(repeat):
                engine = _engine(checkpoint, _tiered(folder))
                first_token(engine, checkpoint.prompt(33, 200 + turn))
                disk.append(first_token(engine, (*shared, *checkpoint.prompt(SUFFIX, 300 + turn))))
                engine.close()
            details[str(length)]["disk"] = disk
            cold = details[str(length)]["cold"][0]
            figures[f"ssd_ttft_ratio_{length}"] = cold / statistics.median(t for t, _ in disk)
    return figures, {"seconds_and_reused_tokens": details, "suffix": SUFFIX}


def first_token(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds to the first token of a prompt, alone; and how many of its tokens were reused."""
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    started, seconds, reused = time.perf_counter(), 0.0, 0
    engine.add(Request(id="one", prompt=prompt, params=params))
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOut) and not seconds:
                seconds = time.perf_counter() - started
            elif isinstance(event, Finished):
                reused = event.usage.cached_tokens
    return seconds, reused


def index(
    checkpoint: Checkpoint, repeat: int, directory: str | None
) -> tuple[dict[str, float], Report]:
    """Milliseconds of Python to look up and insert a new prompt of 8,000 tokens."""
    del directory
    root = Namespace(fingerprint="bench", kv_format="bench").root
    books = PrefixIndex(
        block_size=32, block_bytes=1 << 20, capacity=1 << 40, needs_checkpoints=False
    )
    times: list[float] = []
    for turn in range(10 * repeat):
        prompt = checkpoint.prompt(8000, turn)
        started = time.perf_counter()
        chain = Chain(root, prompt, 32)
        books.lookup(chain, limit=len(prompt) - 1)
        books.insert(chain, len(prompt), generation=books.generation)
        times.append(1000 * (time.perf_counter() - started))
    return {"index_ms_8000": statistics.median(times)}, {"largest_ms": max(times)}


def disk(
    checkpoint: Checkpoint, repeat: int, directory: str | None
) -> tuple[dict[str, float], Report]:
    """Bytes per second through the disk tier, against a plain copy of the same bytes."""
    del checkpoint
    measured = measure_disk(directory, num_runs=repeat)
    ratios = ("ssd_write_ratio", "ssd_read_ratio")
    return {name: measured[name] for name in ratios}, measured


def miss(
    checkpoint: Checkpoint, repeat: int, directory: str | None
) -> tuple[dict[str, float], Report]:
    """Tokens per second of prompts that nobody repeats: with a store ÷ without one."""
    del directory
    rng = random.Random(5)
    work = [
        (checkpoint.prompt(rng.randint(20, 200), 900 + number), rng.randint(8, 48))
        for number in range(24)
    ]
    stores: dict[str, Callable[[], PrefixStore | None]] = {
        "without": lambda: None,
        "with": lambda: RamStore(CacheConfig(capacity_bytes=CAPACITY)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in stores}
    for turn in range(repeat):
        # In turns, each first as often as the other: a machine gets slower as it gets warm.
        for name in sorted(stores, reverse=turn % 2 == 0):
            speeds[name].append(engine_throughput(_engine(checkpoint, stores[name]()), work))
    ratio = statistics.median(speeds["with"]) / statistics.median(speeds["without"])
    return {"miss_ratio": ratio}, {"tokens_per_second": speeds}


def _engine(checkpoint: Checkpoint, store: PrefixStore | None) -> Engine:
    runner = make_runner(checkpoint.model, checkpoint.config)
    return Engine(runner, config=EngineConfig(max_num_seqs=ROWS), store=store)


def _tiered(folder: str) -> TieredStore:
    config = DiskConfig(
        directory=str(Path(folder) / "tier"), capacity_bytes=CAPACITY, min_free_bytes=0
    )
    return TieredStore(RamStore(CacheConfig(capacity_bytes=CAPACITY)), DiskTier(config))


BENCHMARKS: dict[str, Callable[[Checkpoint, int, str | None], tuple[dict[str, float], Report]]] = {
    "first_tokens": first_tokens,
    "index": index,
    "disk": disk,
    "miss": miss,
}
