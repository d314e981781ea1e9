"""``treadle bench engine``: what the engine costs on top of the model, as ratios from one run.

Figures of one machine at one moment do not travel; ratios between two things measured side by side
do, so everything here is measured in turns and reported as a ratio, with the details beside it.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.utils import dequantize_model

from treadle_core.engine import Engine, EngineConfig
from treadle_core.events import Event, TokenOut
from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.groups import SlotGroup
from treadle_core.mlx_runtime.load import ModelOptions, make_runner, read_checkpoint, resolve
from treadle_core.mlx_runtime.runner import default_width_step
from treadle_core.plan import Close, Move, Open, Plan, Promote, Resize, StepResult
from treadle_core.request import Request, SamplingParams

ROWS = 8
TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}

Details = dict[str, Any]


class Checkpoint:
    """A model to measure, with what the engine needs to know of it."""

    def __init__(self, model: nn.Module, config: dict[str, Any], vocab_size: int) -> None:
        self.model = model
        self.config = config
        self.vocab_size = vocab_size

    def engine(self, **options: Any) -> Engine:
        """A fresh engine over the model, without a tokenizer: text is not measured here."""
        return Engine(make_runner(self.model, self.config), config=EngineConfig(**options))

    def prompt(self, length: int, seed: int) -> tuple[int, ...]:
        """Random token ids."""
        rng = random.Random(seed)
        return tuple(rng.randrange(self.vocab_size) for _ in range(length))


def main(argv: Sequence[str]) -> int:
    """Run the benchmarks named on the command line (all by default) and print JSON."""
    options = make_parser("engine", __doc__, BENCHMARKS).parse_args(argv)
    checkpoint = load_checkpoint(options.model)

    def measure(name: str) -> tuple[dict[str, float], Details]:
        ratio, details = BENCHMARKS[name](checkpoint, options.repeat)
        return {name: round(ratio, 3)}, details

    return run(BENCHMARKS, options.only, measure, {"device": str(mx.default_device())})


def make_parser(
    what: str, description: str | None, benchmarks: Iterable[str]
) -> argparse.ArgumentParser:
    """The options that every ``treadle bench`` has."""
    parser = argparse.ArgumentParser(prog=f"treadle bench {what}", description=description)
    parser.add_argument("--model", help="checkpoint to measure; the demo model by default")
    parser.add_argument(
        "--only", choices=sorted(benchmarks), action="append", help="run these parts alone"
    )
    parser.add_argument("--repeat", type=int, default=3, help="turns of each comparison")
    return parser


def run(
    benchmarks: Iterable[str],
    only: Sequence[str] | None,
    measure: Callable[[str], tuple[dict[str, float], Details]],
    details: Details | None = None,
) -> int:
    """Measure, and print figures and details as JSON.

    Args:
        benchmarks: Names of all parts, in their order.
        only: Names of those that are wanted; None for all.
        measure: Gives the figures of a part, and its details.
        details: What there is to say besides.

    Returns:
        The command's exit status.
    """
    report: dict[str, Any] = {}
    details = dict(details or {})
    for name in benchmarks:
        if not only or name in only:
            print(f"{name} …", file=sys.stderr, flush=True)  # noqa: T201 — a command's output
            figures, details[name] = measure(name)
            report |= figures
    text = msgspec.json.format(msgspec.json.encode({**report, "details": details}), indent=2)
    print(text.decode())  # noqa: T201 — a command's output
    return 0


def load_checkpoint(reference: str | None) -> Checkpoint:
    """The model to measure."""
    model, _, config = read_checkpoint(resolve(reference), ModelOptions(model=reference))
    return Checkpoint(model, config, int(config.get("vocab_size", 1024)))


def dense(model: nn.Module) -> nn.Module:
    """``model`` with weights that are not quantised, where that is what makes tokens dear.

    MLX multiplies quantised weights on the CPU one token after the other: there several tokens in
    one forward cost as much as in several.
    """
    if mx.default_device() != mx.cpu:
        return model
    model = dequantize_model(model)
    mx.eval(model.parameters())
    return model


def tiny_checkpoint() -> Checkpoint:
    """A two-layer model, where only overhead counts."""
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(TINY))
    mx.eval(model.parameters())
    return Checkpoint(model, TINY, 1024)


def efficiency(checkpoint: Checkpoint, repeat: int) -> tuple[float, Details]:
    """Engine against a bare loop over the same model, slots and batch size."""
    return _efficiency(checkpoint, repeat, num_tokens=64)


def efficiency_tiny(checkpoint: Checkpoint, repeat: int) -> tuple[float, Details]:
    """The same on a model so small that the engine's own work shows."""
    del checkpoint
    return _efficiency(tiny_checkpoint(), repeat, num_tokens=400)


def _efficiency(checkpoint: Checkpoint, repeat: int, num_tokens: int) -> tuple[float, Details]:
    engine_speed: list[float] = []
    bare_speed: list[float] = []
    for turn in range(repeat + 1):
        engine = engine_decode_speed(checkpoint, num_tokens)
        bare = bare_decode_speed(checkpoint, num_tokens)
        if turn:  # the first turn compiles kernels
            engine_speed.append(engine)
            bare_speed.append(bare)
    ratios = [a / b for a, b in zip(engine_speed, bare_speed, strict=True)]
    return statistics.median(ratios), {
        "engine_tokens_per_second": engine_speed,
        "bare_tokens_per_second": bare_speed,
        "rows": ROWS,
    }


def engine_decode_speed(checkpoint: Checkpoint, num_tokens: int) -> float:
    """Tokens per second of the engine while all rows decode."""
    engine = checkpoint.engine(max_num_seqs=ROWS)
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    for row in range(ROWS):
        prompt = checkpoint.prompt(33, row)
        engine.add(Request(id=str(row), prompt=prompt, params=params))
    # Until the last prompt is in and its first token came out.
    seen: set[str] = set()
    while len(seen) < ROWS:
        seen |= {event.request_id for event in engine.step() if isinstance(event, TokenOut)}
    started, count = time.perf_counter(), 0
    while engine.stats().num_finished == 0:
        count += sum(isinstance(event, TokenOut) for event in engine.step())
    return count / (time.perf_counter() - started)


def bare_decode_speed(checkpoint: Checkpoint, num_tokens: int) -> float:
    """Tokens per second of a loop that does nothing but the forward and an argmax."""
    group, lengths = _filled_group(checkpoint, 32)
    tokens = mx.zeros((ROWS,), dtype=mx.int32)
    started, read = time.perf_counter(), 0
    before: mx.array | None = None
    for _ in range(num_tokens):
        logits = group.decode(tokens[:, None], lengths)
        tokens = mx.argmax(logits[:, -1], axis=-1).astype(mx.int32)
        mx.async_eval(tokens)
        if before is not None:
            read += len(before.tolist())  # pyright: ignore[reportArgumentType]
        before = tokens
        lengths = [length + 1 for length in lengths]
    read += len(tokens.tolist())  # pyright: ignore[reportArgumentType]
    return read / (time.perf_counter() - started)


def churn(checkpoint: Checkpoint, repeat: int) -> tuple[float, Details]:
    """Short requests that come and go through eight rows, against mlx-lm's BatchGenerator."""
    rng = random.Random(7)
    work = [
        (checkpoint.prompt(rng.randint(20, 200), seed), rng.randint(8, 48)) for seed in range(48)
    ]
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(max(1, repeat - 1)):
        ours.append(engine_throughput(checkpoint.engine(max_num_seqs=ROWS), work))
        theirs.append(batch_generator_throughput(checkpoint, work))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(ratios), {
        "engine_tokens_per_second": ours,
        "batch_generator_tokens_per_second": theirs,
        "join_and_leave_ms": {
            str(context): join_and_leave(checkpoint, context) for context in (512, 2048)
        },
    }


def engine_throughput(engine: Engine, work: Iterable[tuple[tuple[int, ...], int]]) -> float:
    """Generated tokens per second, prompts included in the time."""
    started = time.perf_counter()
    for number, (prompt, num_tokens) in enumerate(work):
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        engine.add(Request(id=str(number), prompt=prompt, params=params))
    count = 0
    while engine.has_work:
        count += sum(isinstance(event, TokenOut) for event in engine.step())
    return count / (time.perf_counter() - started)


def batch_generator_throughput(
    checkpoint: Checkpoint, work: Sequence[tuple[tuple[int, ...], int]]
) -> float:
    """The same through mlx-lm."""
    generator: Any = BatchGenerator(
        checkpoint.model, completion_batch_size=ROWS, prefill_batch_size=ROWS
    )
    started, count = time.perf_counter(), 0
    generator.insert(
        [list(prompt) for prompt, _ in work], max_tokens=[tokens for _, tokens in work]
    )
    finished = 0
    while finished < len(work):
        _, responses = generator.next()
        count += len(responses)
        finished += sum(response.finish_reason is not None for response in responses)
    elapsed = time.perf_counter() - started
    generator.close()
    return count / elapsed


def join_and_leave(checkpoint: Checkpoint, context: int) -> Details:
    """Milliseconds to let one row leave and another join seven rows of ``context`` tokens."""
    group, _ = _filled_group(checkpoint, context)
    leave = _median_ms(lambda: _leave(group, context), lambda: _join(group, context))
    join = _median_ms(lambda: _join(group, context), lambda: _leave(group, context), first=True)
    return {
        "leave": leave,
        "join": join,
        "mlx_lm_leave": _mlx_lm_leave(checkpoint, context),
        "mlx_lm_join": _mlx_lm_join(checkpoint, context),
    }


def _leave(group: SlotGroup, context: int) -> None:
    """The first row leaves; the last one moves into its place."""
    group.close(Close(0, 0, (Move(ROWS - 1, 0, context),)))
    mx.eval(group.arrays())


def _join(group: SlotGroup, context: int) -> None:
    """A row whose prompt is in joins the decoding rows: its KV is where it was written."""
    group.open(Open(0, ROWS - 1))
    group.promote(Promote(0, ROWS - 1, ROWS - 1, context, context))
    mx.eval(group.arrays())


def _median_ms(
    action: Callable[[], None], undo: Callable[[], None], *, first: bool = False
) -> float:
    times: list[float] = []
    if first:
        undo()
    for _ in range(7):
        started = time.perf_counter()
        action()
        times.append(1000 * (time.perf_counter() - started))
        undo()
    if first:
        action()
    return round(statistics.median(times), 3)


def _mlx_lm_leave(checkpoint: Checkpoint, context: int) -> float:
    caches = _batch_caches(checkpoint, ROWS, context)

    def leave() -> None:
        for cache in caches:
            cache.filter(mx.arange(1, ROWS))
        mx.eval([cache.state for cache in caches])

    started = time.perf_counter()
    leave()
    return round(1000 * (time.perf_counter() - started), 3)


def _mlx_lm_join(checkpoint: Checkpoint, context: int) -> float:
    caches = _batch_caches(checkpoint, ROWS - 1, context)
    others = _batch_caches(checkpoint, 1, context)
    started = time.perf_counter()
    for cache, other in zip(caches, others, strict=True):
        cache.extend(other)
    mx.eval([cache.state for cache in caches])
    return round(1000 * (time.perf_counter() - started), 3)


def _batch_caches(checkpoint: Checkpoint, rows: int, context: int) -> list[Any]:
    model = TextModel(checkpoint.model)
    shapes = [(c.keys.shape, c.values.shape, c.keys.dtype) for c in _probe_caches(model)]
    caches: list[Any] = []
    for keys, values, dtype in shapes:
        cache = BatchKVCache([0] * rows)
        cache.update_and_fetch(
            mx.zeros((rows, keys[1], context, keys[3]), dtype),
            mx.zeros((rows, values[1], context, values[3]), dtype),
        )
        caches.append(cache)
    mx.eval([cache.state for cache in caches])
    return caches


def _probe_caches(model: TextModel) -> list[Any]:
    caches = model.new_cache()
    mx.eval(model.forward(mx.array([[1, 2]]), caches))
    return caches


def stall(checkpoint: Checkpoint, repeat: int) -> tuple[float, Details]:
    """Largest gap of four running streams while a 3,000-token prompt arrives ÷ their median gap."""
    worst = [_stall(checkpoint) for _ in range(max(1, repeat - 1))]
    ratio = statistics.median(turn["ratio"] for turn in worst)
    return ratio, {"turns": worst, "prompt_tokens": 3000, "streams": 4}


def _stall(checkpoint: Checkpoint) -> Details:
    engine = checkpoint.engine(max_num_seqs=ROWS)
    endless = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
    for stream in range(4):
        prompt = checkpoint.prompt(40, stream)
        engine.add(Request(id=f"s{stream}", prompt=prompt, params=endless))
    times: dict[str, list[float]] = {f"s{stream}": [] for stream in range(4)}
    _follow(engine, times, until=lambda: min(map(len, times.values())) >= 30)
    calm = [gap for stamps in times.values() for gap in _gaps(stamps[10:])]
    arrival = time.perf_counter()
    engine.add(
        Request(
            id="long",
            prompt=checkpoint.prompt(3000, 99),
            params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
        )
    )
    times["long"] = []
    _follow(engine, times, until=lambda: bool(times["long"]))
    first_token = times.pop("long")[0]
    during = [
        gap
        for stamps in times.values()
        for gap in _gaps([stamp for stamp in stamps if stamp >= arrival - max(calm)])
    ]
    return {
        "ratio": max(during) / statistics.median(calm),
        "median_gap_ms": 1000 * statistics.median(calm),
        "median_gap_during_ms": 1000 * statistics.median(during),
        "largest_gap_ms": 1000 * max(during),
        "long_prompt_first_token_s": first_token - arrival,
    }


def _follow(engine: Engine, times: dict[str, list[float]], until: Callable[[], bool]) -> None:
    while not until():
        for event in engine.step():
            if isinstance(event, TokenOut) and event.request_id in times:
                times[event.request_id].append(time.perf_counter())


def _gaps(stamps: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(stamps)]


def arrivals(checkpoint: Checkpoint, repeat: int) -> tuple[float, Details]:
    """Sixteen prompts at once: median time to first token ÷ the last one's."""
    del repeat
    engine = checkpoint.engine(max_num_seqs=16)
    rng = random.Random(3)
    started = time.perf_counter()
    firsts: dict[str, float] = {}
    for number in range(16):
        prompt = checkpoint.prompt(rng.randint(30, 200), number)
        params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
        engine.add(Request(id=str(number), prompt=prompt, params=params))
    while len(firsts) < 16:
        for event in engine.step():
            if isinstance(event, TokenOut):
                firsts.setdefault(event.request_id, time.perf_counter() - started)
    times = sorted(firsts.values())
    return statistics.median(times) / times[-1], {"first_token_seconds": times}


class ChunkTimes:
    """An observer that remembers what the chunks of a run took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def accepted(self, request_id: str) -> None:
        """Nothing to remember."""

    def stepped(self, plan: Plan, result: StepResult) -> None:
        """Remember the chunks of a step."""
        self.seconds += result.prefill_seconds

    def emitted(self, events: Iterable[Event]) -> None:
        """Nothing to remember."""


def leave_during_prefill(checkpoint: Checkpoint, repeat: int) -> tuple[float, Details]:
    """A client leaves during a long prefill: seconds until idle ÷ seconds of the longest chunk."""
    del repeat
    times = ChunkTimes()
    runner = make_runner(checkpoint.model, checkpoint.config)
    engine = Engine(runner, observers=[times])
    engine.add(Request(id="long", prompt=checkpoint.prompt(4000, 5)))
    while len(times.seconds) < 2:
        engine.step()
    started = time.perf_counter()
    engine.abort("long")
    while engine.has_work:
        engine.step()
    idle = time.perf_counter() - started
    return idle / max(times.seconds), {
        "seconds_until_idle": idle,
        "seconds_of_chunks": times.seconds,
    }


def _filled_group(checkpoint: Checkpoint, context: int) -> tuple[SlotGroup, list[int]]:
    """Eight decoding rows of ``context`` tokens."""
    model = TextModel(checkpoint.model)
    spec = inspect(model, checkpoint.config)
    group = SlotGroup(model, spec.layers, slack=0, width_step=default_width_step())
    group.resize(Resize(0, ROWS, 2 * context + 512))
    for row in range(ROWS):
        group.open(Open(0, row))
        if context <= 64:
            group.prefill(row, checkpoint.prompt(context, row), 0)
        group.promote(Promote(0, row, row, context, context))
    mx.eval(group.arrays())
    return group, [context] * ROWS


BENCHMARKS: dict[str, Callable[[Checkpoint, int], tuple[float, Details]]] = {
    "efficiency": efficiency,
    "efficiency_tiny": efficiency_tiny,
    "churn": churn,
    "stall": stall,
    "arrivals": arrivals,
    "leave_during_prefill": leave_during_prefill,
}
