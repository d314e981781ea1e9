"""What media cost those who wait: ratios from one run, as JSON.

Unless a checkpoint is given, a Qwen2-VL of random weights is measured, large enough that a decode
step takes some tens of milliseconds on a laptop's processor and an image some hundred.
"""

import io
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import anyio
import mlx.core as mx
import numpy as np
from PIL import Image

from treadle_core.engine import Engine
from treadle_core.events import Event, Finished, TokenOut
from treadle_core.loop import AsyncEngine
from treadle_core.mlx_runtime.bench import make_parser, run
from treadle_core.mlx_runtime.load import ModelOptions
from treadle_core.plan import Plan, StepResult
from treadle_core.ports import PrefixStore
from treadle_core.request import Request, SamplingParams
from treadle_multimodal.config import MultimodalConfig
from treadle_multimodal.load import MediaLoader
from treadle_multimodal.sources import Bytes, MediaPart
from treadle_multimodal.testing import zoo
from treadle_multimodal.vlm.checkpoint import LoadedVlm, load_vlm

STREAMS = 4
CALM_TOKENS = 40
SIDE = 336
TALKED_ABOUT = 448
LARGE = (4000, 3000)
NUM_LARGE = 8
ANSWER = 8

RANDOM_MODEL: dict[str, Any] = {
    "config.json": {
        "hidden_size": 512,
        "num_hidden_layers": 16,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "vision_config": {
            "depth": 8,
            "embed_dim": 256,
            "num_heads": 4,
            "mlp_ratio": 4,
            "hidden_size": 512,
        },
    },
    "preprocessor_config.json": {"max_pixels": TALKED_ABOUT**2},
}
"""Sizes of the measured model, where they are not those of a tiny one."""

Report = dict[str, Any]
MakeStore = Callable[[], PrefixStore]


class Bench:
    """An engine behind an event loop, and what prepares its requests, as a server has them.

    Args:
        make_store: Makes the engine's prefix store.
        reference: The checkpoint.
    """

    def __init__(self, reference: str, make_store: MakeStore) -> None:
        self._reference = reference
        self._make_store = make_store
        self._loaded: LoadedVlm | None = None
        self._media = MediaLoader(MultimodalConfig())
        self._ids = count()
        self.times = StepTimes()
        self.engine = AsyncEngine(self._open)

    def _open(self) -> Engine:
        self._loaded = load_vlm(ModelOptions(model=self._reference))
        base = self._loaded.base
        return Engine(
            base.runner, tokenizer=base.tokenizer, store=self._make_store(), observers=[self.times]
        )

    async def request(
        self, messages: Sequence[Report], images: Sequence[bytes], max_tokens: int
    ) -> Request:
        """A chat with its images, prepared in worker threads."""
        assert self._loaded is not None, "not opened"
        preprocessor = self._loaded.preprocessor
        parts = [MediaPart(kind="image", source=Bytes(data=data)) for data in images]
        text = preprocessor.render(messages)
        async with self._media.prepare(parts, partial(preprocessor.encode, text)) as prompt:
            pass  # no more requests come than there is room for
        return Request(
            id=str(next(self._ids)),
            prompt=prompt.tokens,
            params=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
            media=prompt.media,
            attachment=prompt if prompt.media else None,
        )

    async def first_token(
        self, messages: Sequence[Report], images: Sequence[bytes], max_tokens: int = ANSWER
    ) -> "Turn":
        """Answer a chat; the time counts from when its images are still files."""
        started = time.perf_counter()
        request = await self.request(messages, images, max_tokens)
        prepared = time.perf_counter() - started
        seconds, text, reused = 0.0, "", 0
        async with self.engine.open(request) as events:
            async for event in events:
                if isinstance(event, TokenOut):
                    seconds = seconds or time.perf_counter() - started
                    text += event.text
                elif isinstance(event, Finished):
                    reused = event.usage.cached_tokens
        return Turn(seconds, prepared, len(request.prompt), reused, text)


class Turn:
    """One answer.

    Attributes:
        seconds: To its first token.
        prepared: Of them, until the request was ready for the engine.
        num_tokens: Of its prompt.
        reused: Of them, from the prefix store.
        text: What it says.
    """

    def __init__(
        self, seconds: float, prepared: float, num_tokens: int, reused: int, text: str
    ) -> None:
        self.seconds = seconds
        self.prepared = prepared
        self.num_tokens = num_tokens
        self.reused = reused
        self.text = text

    def report(self) -> Report:
        """What to print of it."""
        return {
            "first_token_s": round(self.seconds, 4),
            "preparing_s": round(self.prepared, 4),
            "prompt_tokens": self.num_tokens,
            "reused_tokens": self.reused,
        }


class StepTimes:
    """An observer that remembers what the steps took, part by part."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float]] = []

    def accepted(self, request_id: str) -> None:
        """Nothing to remember."""

    def stepped(self, plan: Plan, result: StepResult) -> None:
        """Remember decode, chunks and encoding."""
        prefill = sum(result.prefill_seconds)
        self.steps.append((result.decode_seconds, prefill, result.encode_seconds))

    def emitted(self, events: Iterable[Event]) -> None:
        """Nothing to remember."""

    def since(self, number: int) -> Report:
        """The longest of each since so many steps, and how many there were."""
        steps = self.steps[number:]
        names = ("decode", "prefill", "encode")
        longest = (max((step[i] for step in steps), default=0.0) for i in range(3))
        return {
            **{f"longest_{n}_ms": 1000 * s for n, s in zip(names, longest, strict=True)},
            "steps": len(steps),
            "steps_with_encoding": sum(step[2] > 0 for step in steps),
        }


class Streams:
    """Text answers that go on and on, and when their tokens came.

    Args:
        bench: Where.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._news = anyio.Event()
        self.stamps: list[list[float]] = [[] for _ in range(STREAMS)]

    async def follow(self, number: int) -> None:
        """Read one of them until cancelled."""
        words = f"stream {number} tells a story without an end and says every word twice"
        request = await self._bench.request([{"role": "user", "content": words}], (), 4000)
        async with self._bench.engine.open(request) as events:
            async for event in events:
                if isinstance(event, TokenOut):
                    self.stamps[number].append(time.perf_counter())
                    self._news.set()

    async def wait(self, num_tokens: int) -> None:
        """Until each has got so many more tokens."""
        wanted = [len(stamps) + num_tokens for stamps in self.stamps]
        while any(len(s) < n for s, n in zip(self.stamps, wanted, strict=True)):
            self._news = anyio.Event()
            await self._news.wait()

    def gaps(self, since: float, until: float) -> list[float]:
        """Times between tokens of which the later came in an interval."""
        return [
            after - before
            for stamps in self.stamps
            for before, after in pairwise(stamps)
            if since <= after <= until
        ]


async def beside_streams(bench: Bench, work: Callable[[], Awaitable[Any]]) -> tuple[float, Report]:
    """Largest gap of running text streams during some work ÷ their median gap before and after."""
    streams, found = Streams(bench), list[tuple[float, Report]]()
    async with anyio.create_task_group() as tasks:
        for number in range(STREAMS):
            tasks.start_soon(streams.follow, number)
        found.append(await measure_beside(bench, streams, work))
        tasks.cancel_scope.cancel()
    return found[0]


async def measure_beside(
    bench: Bench, streams: Streams, work: Callable[[], Awaitable[Any]]
) -> tuple[float, Report]:
    """The same, for streams that are followed."""
    # Until all of them run, and what is compiled at first is compiled.
    await streams.wait(CALM_TOKENS // 2)
    calm_from = time.perf_counter()
    await streams.wait(CALM_TOKENS)
    began, num_steps = time.perf_counter(), len(bench.times.steps)
    result = await work()
    await streams.wait(1)
    ended, steps = time.perf_counter(), bench.times.since(num_steps)
    await streams.wait(CALM_TOKENS // 2)
    calm = [*streams.gaps(calm_from, began), *streams.gaps(ended, time.perf_counter())]
    during = sorted(streams.gaps(began, ended), reverse=True)
    usual = statistics.median(calm)
    return during[0] / usual, {
        "ratio": during[0] / usual,
        "median_gap_ms": 1000 * usual,
        "largest_gap_else_ms": 1000 * max(calm),
        "median_gap_during_ms": 1000 * statistics.median(during),
        # Of one stream: all of them wait for the same steps.
        "largest_gaps_ms": [round(1000 * gap, 1) for gap in during[: 5 * STREAMS : STREAMS]],
        "seconds": ended - began,
        **steps,
        "result": result,
    }


async def repeat(bench: Bench, turns: int) -> tuple[float, Report]:
    """Time to the first token of a first turn with an image ÷ of the next one's."""
    await converse(bench, 1000)  # what is compiled at first is compiled
    pairs = [await converse(bench, number) for number in range(turns)]
    ratios = [first.seconds / second.seconds for first, second in pairs]
    return statistics.median(ratios), {
        "ratios": ratios,
        "turns": [[first.report(), second.report()] for first, second in pairs],
    }


async def converse(bench: Bench, number: int) -> tuple[Turn, Turn]:
    """Two turns about an image that nobody has seen before."""
    picture = photograph(number, (TALKED_ABOUT, TALKED_ABOUT))
    question = {"type": "text", "text": f"What is in picture {number}? Name all that you see."}
    messages: list[Report] = [{"role": "user", "content": [{"type": "image"}, question]}]
    first = await bench.first_token(messages, (picture,))
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And what is green?"},
    ]
    return first, await bench.first_token(messages, (picture,))


async def stall(bench: Bench, turns: int) -> tuple[float, Report]:
    """Largest gap of four text streams while prompts with images are prefilled ÷ median gap.

    The prompts come one after the other: chunks are longer while others wait.
    """

    async def work(turn: int) -> list[Report]:
        found: list[Report] = []
        for number, num_images in enumerate((1, 1, 2)):
            seed = 10 * (100 * turn + number)
            images = [photograph(seed + i, (SIDE, SIDE)) for i in range(num_images)]
            content = [{"type": "image"}] * num_images
            message = {"role": "user", "content": [*content, {"type": "text", "text": "What?"}]}
            found.append((await bench.first_token([message], images)).report())
        return found

    return await median_of([partial(work, turn) for turn in range(turns)], bench)


async def preprocess_stall(bench: Bench, turns: int) -> tuple[float, Report]:
    """The same while eight large images are decoded and resized, and nothing more."""
    files = [photograph(number, LARGE) for number in range(NUM_LARGE)]
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}

    async def work() -> str:
        async with anyio.create_task_group() as tasks:
            for data in files:
                tasks.start_soon(bench.request, [message], (data,), 1)
        return f"{NUM_LARGE} images of {LARGE[0]} x {LARGE[1]}"

    await bench.request([message], (files[0],), 1)  # what is imported at first is imported
    return await median_of([work] * turns, bench)


async def median_of(
    works: Sequence[Callable[[], Awaitable[Any]]], bench: Bench
) -> tuple[float, Report]:
    """The ratio of the turn in the middle, and all of them."""
    measured = [await beside_streams(bench, work) for work in works]
    ratio = statistics.median(ratio for ratio, _ in measured)
    return ratio, {"turns": [report for _, report in measured], "streams": STREAMS}


def photograph(seed: int, size: tuple[int, int]) -> bytes:
    """A JPEG file of smooth colours with some grain."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    grain = rng.integers(0, 24, (size[1], size[0], 1), dtype=np.uint8)
    grained = Image.fromarray(np.asarray(image) // 2 + grain)
    file = io.BytesIO()
    grained.save(file, "JPEG", quality=85)
    return file.getvalue()


def main(argv: Sequence[str], make_store: MakeStore) -> int:
    """Run the benchmarks named on the command line (all by default) and print JSON.

    Args:
        argv: Options.
        make_store: Makes a prefix store, as a server would.
    """
    options = make_parser("multimodal", __doc__, BENCHMARKS).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        reference = options.model
        about: Report = {"device": str(mx.default_device()), "model": reference}
        if reference is None:
            zoo.save_checkpoint("qwen2_vl", Path(folder), changes=RANDOM_MODEL)
            reference = folder
            about["model"] = "a Qwen2-VL of random weights: there is no text in what it says"

        def measure(name: str) -> tuple[dict[str, float], Report]:
            async def opened() -> tuple[float, Report]:
                bench = Bench(reference, make_store)
                async with bench.engine:
                    return await BENCHMARKS[name](bench, options.repeat)

            ratio, details = anyio.run(opened)
            return {name: round(ratio, 3)}, details

        return run(BENCHMARKS, options.only, measure, about)


BENCHMARKS: dict[str, Callable[[Bench, int], Awaitable[tuple[float, Report]]]] = {
    "repeat_ttft_ratio": repeat,
    "stall": stall,
    "preprocess_stall": preprocess_stall,
}
