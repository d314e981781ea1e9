"""``treadle mtp fit``: its options, and what it prints."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from treadle_core.engine import Engine, EngineConfig
from treadle_core.errors import InvalidRequest
from treadle_core.mlx_runtime.bench import dense
from treadle_core.mlx_runtime.load import (
    ModelOptions,
    make_runner,
    model_name,
    read_checkpoint,
    resolve,
)
from treadle_core.mlx_runtime.tokenizer import ModelTokenizer
from treadle_speculative.mtp.fit.config import FitConfig
from treadle_speculative.mtp.fit.progress import ProgressBar
from treadle_speculative.mtp.fit.run import Fit, FitReport, Subject

ROWS = 16

HELP = {
    "data": "file to learn from: .jsonl with text or messages in each line, else plain text; "
    "repeatable",
    "sequence_length": "tokens of a sequence",
    "batch_size": "sequences of a step",
    "epochs": "how often every sequence is learned from",
    "held_out": "share of the text that is measured with, not learned from",
    "learning_rate": "the highest",
    "warm_up": "share of the steps over which the learning rate rises",
    "clip_norm": "longest gradient",
    "depth": "tokens that it learns to guess in a chain",
    "targets": "what it learns to say: soft is the model's distribution, text the text's token",
    "shortlist": "tokens of the vocabulary that a sequence is learned from with",
    "seed": "makes two runs the same",
    "save_every": "steps between checkpoints",
    "generate": "let the model answer so many prompts from the data, and learn from that too",
    "generate_tokens": "most tokens of such an answer",
    "temperature": "how they are sampled",
    "measure": "answers that the result is measured on",
    "keep_mb": "mebibytes for the model's hidden states, from one epoch to the next",
    "overwrite": "replace the head or the unfinished run that is there",
}


def main(argv: Sequence[str]) -> int:
    """Fit a head and print what came of it.

    Raises:
        TreadleError: An option cannot be honoured, or the model not be loaded.
        KeyboardInterrupt: It was stopped; the same command goes on.
    """
    given = vars(make_parser().parse_args(argv))
    options = ModelOptions(
        model=given["model"],
        adapter_path=given["adapter_path"],
        trust_remote_code=given["trust_remote_code"],
    )
    config = from_flags(given)
    bar = ProgressBar(sys.stderr)
    try:
        report = Fit(load_subject(options), config, Path(given["out"]), bar).run()
    except KeyboardInterrupt:
        bar.note("stopped; the same command goes on from here")
        raise
    finally:
        bar.clear()
    sys.stdout.write(summary(report))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command's parser."""
    parser = argparse.ArgumentParser(
        prog="treadle mtp fit",
        description="Fit a small head that guesses several tokens ahead to a model that has none.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="MODEL", help="as for serve")
    parser.add_argument("--adapter-path", metavar="DIR", help="LoRA adapters to apply")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code of the checkpoint"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the head")
    for field in msgspec.structs.fields(FitConfig):
        add_option(parser, field)
    return parser


def add_option(parser: argparse.ArgumentParser, field: Any) -> None:
    """Let ``parser`` take a field of the options."""
    flag, told = "--" + field.name.replace("_", "-"), HELP[field.name]
    if field.type is bool:
        parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=told)
    elif field.required:
        parser.add_argument(flag, action="append", required=True, metavar="FILE", help=told)
    else:
        parser.add_argument(
            flag, default=argparse.SUPPRESS, metavar="X", help=f"{told} ({field.default})"
        )


def from_flags(given: dict[str, Any]) -> FitConfig:
    """The options from the command line.

    Raises:
        InvalidRequest: One is not of its type, or beyond its limits.
    """
    fields = [field for field in msgspec.structs.fields(FitConfig) if field.name in given]
    return FitConfig(**{field.name: typed(field, given[field.name]) for field in fields})


def typed(field: Any, value: Any) -> Any:
    """A value from the command line as the type of its field.

    Raises:
        InvalidRequest: It is of another type.
    """
    try:
        return msgspec.convert(value, field.type, strict=False)
    except msgspec.ValidationError as error:
        limit = str(error).removeprefix("Expected ").partition(", got")[0]
        raise InvalidRequest(field.name, value, limit) from None


def load_subject(options: ModelOptions) -> Subject:
    """Load the model that gets a head.

    Raises:
        ModelLoadError: The checkpoint cannot be used.
    """
    reference = resolve(options.model)
    model, wrapper, config = read_checkpoint(reference, options)
    model = dense(model)
    tokenizer = ModelTokenizer(wrapper, config)

    def make_engine() -> Engine:
        return Engine(
            make_runner(model, config),
            tokenizer=tokenizer,
            config=EngineConfig(max_num_seqs=ROWS),
        )

    return Subject(
        name=model_name(reference),
        model=model,
        tokenizer=tokenizer,
        config=config,
        make_engine=make_engine,
    )


def summary(report: FitReport) -> str:
    """What came of it, for people."""
    accepted = report.answers
    figures = zip(accepted.by_position, accepted.tokens_per_forward, strict=True)
    shown = f"""\
{report.steps} steps in {report.seconds:.0f} s on {report.learned_tokens} tokens; \
the model wrote {report.generated_tokens} of them
along held-out text ({report.held_out_tokens} tokens) the first guess is \
the model's own choice in {report.agreement:.1%}
in greedy answers to held-out prompts ({accepted.num_guesses} places):
"""
    return shown + "".join(
        f"  guess {place}: {share:.1%} accepted; {gain:.2f} tokens per forward with {place} guessed\n"
        for place, (share, gain) in enumerate(figures, 1)
    )
