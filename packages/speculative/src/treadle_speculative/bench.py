"""What drafting brings: speed with it against speed without, as ratios from one run, as JSON.

On a CPU the model's weights are dequantised first, for both sides: MLX's quantised kernels there take
as long for several tokens at once as one after the other, so that nothing could be gained. A draft
model and a head are taken as they are.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from treadle_core.engine import Engine, EngineConfig
from treadle_core.events import DraftCounters, Event, Finished, TokenOut
from treadle_core.mlx_runtime.bench import dense, make_parser, run
from treadle_core.mlx_runtime.load import (
    LoadedModel,
    ModelOptions,
    checkpoint_folder,
    make_runner,
    read_checkpoint,
    resolve,
)
from treadle_core.mlx_runtime.tokenizer import ModelTokenizer
from treadle_core.request import Request, SamplingParams
from treadle_speculative.config import (
    Method,
    SpeculativeConfig,
    make_controller,
    make_drafter,
)

ROWS = 8
NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
OFF = SpeculativeConfig()

STORY = (
    "The harbour master of Port Ellen kept two ledgers. In the first she wrote the names of the "
    "ships that came in, the hour of their arrival, and the weight of what they carried. In the "
    "second she wrote what the sailors told her about the weather further north. On the ninth of "
    "October a grey schooner called the Marigold came in with forty barrels of herring."
)
COPY = (
    f"Repeat this text word for word:\n\n{STORY}",
    f"Copy the following text exactly, but write Seagull in place of Marigold:\n\n{STORY}",
)
CHAT = (
    "What should I think about before I adopt a dog?",
    "Explain to a child why the sky is blue.",
    "Give me three ideas for a birthday party in winter.",
)

Report = dict[str, Any]


class Measured(NamedTuple):
    """The model that is measured, its tokenizer, its config, and the folder that it came from."""

    network: Any
    tokenizer: ModelTokenizer
    config: dict[str, Any]
    folder: Path | None


class Side:
    """One engine of a comparison, and what it did.

    Args:
        model: The model.
        config: How it drafts.
    """

    def __init__(self, model: Measured, config: SpeculativeConfig) -> None:
        controller = make_controller(config) if config.method != "off" else None
        longest = controller.max_tokens if controller is not None else 0
        runner = make_runner(model.network, model.config, slack=longest)
        loaded = LoadedModel("target", runner, model.tokenizer, model.config, model.folder)
        drafter = make_drafter(config, loaded)
        self.engine = Engine(
            runner,
            config=EngineConfig(max_num_seqs=ROWS),
            drafter=drafter,
            controller=controller,
        )
        self.speeds: list[float] = []
        self.tokens: dict[str, list[int]] = {}
        self.drafts = DraftCounters()
        self.num_tokens = 0

    def run(self, requests: Sequence[Request], *, counts: bool) -> None:
        """Answer requests together; the time begins when each has its first token."""
        for request in requests:
            self.engine.add(request)
            self.tokens[request.id] = []
        while not all(self.tokens[request.id] for request in requests):
            self._take(self.engine.step(), counts=counts)
        before, started = self._count(requests), time.perf_counter()
        while self.engine.has_work:
            self._take(self.engine.step(), counts=counts)
        if counts:
            seconds = time.perf_counter() - started
            self.speeds.append((self._count(requests) - before) / seconds)

    def figures(self) -> Report:
        """What it did in all of its runs."""
        forwards = self.num_tokens - self.drafts.forwards_saved
        return {
            "tokens_per_second": self.speeds,
            "forwards_per_token": round(forwards / max(1, self.num_tokens), 3),
            "acceptance": self.drafts.acceptance_rate,
            "drafts": self.drafts,
        }

    def _take(self, events: Sequence[Event], *, counts: bool) -> None:
        for event in events:
            if isinstance(event, TokenOut):
                self.tokens[event.request_id].append(event.token)
            elif isinstance(event, Finished) and counts:
                self.num_tokens += event.usage.completion_tokens
                self.drafts += event.usage.drafts or DraftCounters()

    def _count(self, requests: Sequence[Request]) -> int:
        return sum(len(self.tokens[request.id]) for request in requests)


def main(argv: Sequence[str]) -> int:
    """Run the benchmarks named on the command line (all by default) and print JSON."""
    parser = make_parser("speculative", __doc__, BENCHMARKS)
    parser.add_argument(
        "--num-tokens", type=int, help="draft so many tokens in every step; else as many as pays"
    )
    parser.add_argument(
        "--draft-model", help="measure this draft model too, on the same tasks as n-grams"
    )
    heads = parser.add_mutually_exclusive_group()
    heads.add_argument(
        "--mtp", action="store_true", help="measure the head in the model's own checkpoint too"
    )
    heads.add_argument("--mtp-head", help="measure the head in this directory too")
    options = parser.parse_args(argv)
    methods = methods_of(options)
    for name in options.only or ():
        if not name.startswith(tuple(methods)):
            parser.error(f"{name} needs {NEEDED[name.rsplit('_', 2)[0]]}")
    reference = resolve(options.model)
    network, wrapper, config = read_checkpoint(reference, ModelOptions(model=options.model))
    model = Measured(
        dense(network), ModelTokenizer(wrapper, config), config, checkpoint_folder(reference)
    )
    measured = {
        f"{method}_{task}": (drafting, make_work)
        for method, drafting in methods.items()
        for task, make_work in TASKS.items()
    }

    def measure(name: str) -> tuple[dict[str, float], Report]:
        drafting, make_work = measured[name]
        ratio, details = compare(model, make_work, drafting, options.repeat)
        return {name: ratio}, details

    return run(measured, options.only, measure)


def methods_of(options: Namespace) -> dict[str, SpeculativeConfig]:
    """What is measured, by the first part of its name."""
    given: dict[str, dict[str, Any]] = {"ngram": {}}
    if options.draft_model is not None:
        given["draft_model"] = {"model": options.draft_model}
    if options.mtp or options.mtp_head is not None:
        given["mtp"] = {"mtp_head": options.mtp_head}
    num_tokens = options.num_tokens
    return {
        method: SpeculativeConfig(method=cast(Method, method), num_tokens=num_tokens, **more)
        for method, more in given.items()
    }


def compare(
    model: Measured,
    make_work: Callable[[ModelTokenizer], list[list[Request]]],
    drafting: SpeculativeConfig,
    repeat: int,
) -> tuple[float, Report]:
    """Tokens per second with drafts ÷ without, and whether the answers were the same."""
    sides = {"plain": Side(model, OFF), "drafting": Side(model, drafting)}
    for turn in range(repeat + 1):
        # In turns, each first as often as the other: a machine gets slower as it gets warm.
        for name in sorted(sides, reverse=turn % 2 == 0):
            for batch in make_work(model.tokenizer):
                # In the first turn kernels are compiled and costs get known.
                sides[name].run(batch, counts=turn > 0)
    plain, drafted = sides["plain"], sides["drafting"]
    ratio = statistics.median(drafted.speeds) / statistics.median(plain.speeds)
    return round(ratio, 3), {
        **{name: side.figures() for name, side in sides.items()},
        "same_tokens": plain.tokens == drafted.tokens,
    }


def copy_alone(tokenizer: ModelTokenizer) -> list[list[Request]]:
    """Quote and edit a given text, one request at a time."""
    return [[_request(tokenizer, f"copy{i}", text, GREEDY)] for i, text in enumerate(COPY)]


def chat_alone(tokenizer: ModelTokenizer) -> list[list[Request]]:
    """Ordinary questions, one at a time, sampled as chats are."""
    return [
        [
            _request(
                tokenizer,
                f"chat{i}",
                text,
                SamplingParams(temperature=0.7, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True),
            )
        ]
        for i, text in enumerate(CHAT)
    ]


def copy_together(tokenizer: ModelTokenizer) -> list[list[Request]]:
    """Quote and edit, ``ROWS`` requests at a time."""
    texts = [COPY[i % len(COPY)] + " " * (i // len(COPY)) for i in range(ROWS)]
    return [[_request(tokenizer, f"row{i}", text, GREEDY) for i, text in enumerate(texts)]]


TASKS = {"copy_b1": copy_alone, "chat_b1": chat_alone, "copy_b8": copy_together}
NEEDED = {"ngram": "nothing", "draft_model": "--draft-model", "mtp": "--mtp or --mtp-head"}
BENCHMARKS = tuple(f"{method}_{task}" for method in NEEDED for task in TASKS)


def _request(tokenizer: ModelTokenizer, id: str, text: str, params: SamplingParams) -> Request:
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return Request(id=id, prompt=tuple(tokenizer.encode(chat)), params=params)
