"""The command ``treadle``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from treadle_core import InvalidRequest, TreadleError, Unsupported
from treadle_server import compose
from treadle_server.cache_command import Task, care_for
from treadle_server.options import (
    RUN_OPTIONS,
    SERVE_OPTIONS,
    Values,
    add_options,
    from_file,
    from_flags,
    run_config,
    serve_config,
)
from treadle_server.run import run
from treadle_server.serve import listener, serve
from treadle_server.warm import read_warm_prompts

CACHE_ACTIONS = {
    "ls": "list the entries, the most recently used first",
    "verify": "read every file and compare its checksum; status 1 if one is damaged or missing",
    "clear": "remove all entries",
    "gc": "put the directory in order and remove entries until it is small enough",
}

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: Those of the command line; None takes the process's.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # What follows "bench engine", "mtp fit" and the like is their own.
    own = 2 if words[:1] in (["bench"], ["mtp"]) else len(words)
    given = make_parser().parse_args(words[:own])
    try:
        return COMMANDS[given.command](given, words[own:])
    except TreadleError as error:
        print(f"treadle: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, InvalidRequest | Unsupported) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The command's parser."""
    parser = argparse.ArgumentParser(
        prog="treadle", description="Serve and run language models on MLX.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serving = commands.add_parser(
        "serve", help="serve a model over HTTP, with OpenAI's interface", allow_abbrev=False
    )
    serving.add_argument("positional_model", nargs="?", metavar="MODEL", help="as --model")
    serving.add_argument("--config", type=Path, metavar="FILE.toml", help="options by their names")
    add_options(serving, SERVE_OPTIONS)
    running = commands.add_parser(
        "run", help="answer one prompt; greedy, unless told otherwise", allow_abbrev=False
    )
    running.add_argument("prompt", metavar="PROMPT", help='what to answer; "-" reads stdin')
    add_options(running, RUN_OPTIONS)
    caring = commands.add_parser(
        "cache", help="look at an SSD cache, check it, empty it", allow_abbrev=False
    )
    actions = caring.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, does in CACHE_ACTIONS.items():
        acting = actions.add_parser(action, help=does, allow_abbrev=False)
        acting.add_argument("--ssd-cache-dir", required=True, metavar="DIR", help="as for serve")
        acting.add_argument("--json", action="store_true", help="write JSON")
        if action == "gc":
            acting.add_argument("--max-gb", default="10", metavar="GB", help="most gibibytes (10)")
    bench = commands.add_parser("bench", help="measure", allow_abbrev=False, add_help=False)
    bench.add_argument("what", choices=sorted(compose.BENCHMARKS), help="what to measure")
    heads = commands.add_parser(
        "mtp", help="heads that guess several tokens ahead", allow_abbrev=False, add_help=False
    )
    heads.add_argument("what", choices=["fit"], help="fit one to a model that has none")
    return parser


def serve_command(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """``treadle serve``.

    Raises:
        TreadleError: An option cannot be honoured, or the model not be loaded.
        KeyboardInterrupt: It was ended by Ctrl-C.
    """
    flags = vars(given)
    values: Values = {}
    if given.config is not None:
        values |= from_file(given.config, SERVE_OPTIONS)
    values |= from_flags(with_positional(flags), SERVE_OPTIONS)
    config = serve_config(values)
    warm = read_warm_prompts(config.cache.warm_prompts)
    prepare_libraries(offline=config.model.offline)
    with listener(config.http.host, config.http.port) as bound:
        config = compose.with_served_name(config)
        served = compose.serving_engine(config)
        serve(config, served.engine, bound, warm, served.media)
    return OK


def with_positional(flags: Values) -> Values:
    """``flags`` with the model, wherever it was said.

    Raises:
        Unsupported: It was said twice, differently.
    """
    positional = flags.get("positional_model")
    if positional is None:
        return flags
    if flags.get("model", positional) != positional:
        raise Unsupported(f"two models are given: {positional} and {flags['model']}")
    return {**flags, "model": positional}


def run_command(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """``treadle run``.

    Raises:
        TreadleError: An option cannot be honoured, or the prompt not be answered.
        KeyboardInterrupt: It was ended by Ctrl-C.
    """
    config = run_config(from_flags(vars(given), RUN_OPTIONS), read_prompt(given.prompt))
    prepare_libraries(offline=config.model.offline)
    # Whoever gives the command may read what it reads.
    media = replace(config.media, allowed_local_media_path=("/",)) if config.run.media else None
    if media is not None:
        compose.check_media(media)
    engine, takes = compose.running_engine(config, media or config.media)
    try:
        run(engine, config.run, sys.stdout, sys.stderr, takes)
    except BrokenPipeError:
        # Whoever read has seen enough; the interpreter must not try to flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        engine.close()
    return OK


def read_prompt(argument: str) -> str:
    """The prompt: the argument itself, or all of stdin.

    Raises:
        InvalidRequest: It is not UTF-8.
    """
    spelled = sys.stdin.buffer.read() if argument == "-" else os.fsencode(argument)
    try:
        return spelled.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("prompt", spelled[error.start : error.end], "UTF-8") from None


def bench_command(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """``treadle bench``, whose benchmarks read their own options.

    Raises:
        Unsupported: A package that it needs is not installed.
    """
    return compose.BENCHMARKS[given.what]()(list(rest))


def mtp_command(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """``treadle mtp``, which reads its own options.

    Raises:
        TreadleError: One cannot be honoured, or the model not be loaded.
        KeyboardInterrupt: It was stopped by Ctrl-C, and can go on.
    """
    fit = compose.mtp_fit()
    prepare_libraries(offline=False)
    return fit(list(rest))


def cache_command(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """``treadle cache``.

    Raises:
        TreadleError: The directory cannot be used.
    """
    # As for serve, so that the limits are the same.
    values = {"ssd_cache_dir": given.ssd_cache_dir}
    if given.action == "gc":
        values["ssd_cache_max_gb"] = given.max_gb
    options = serve_config(from_flags(values, SERVE_OPTIONS)).cache
    task = Task(
        action=given.action,
        directory=given.ssd_cache_dir,
        max_bytes=options.ssd_bytes,
        as_json=given.json,
    )
    return OK if care_for(task, compose.cache_care(), sys.stdout) else FAILED


def prepare_libraries(*, offline: bool) -> None:
    """Tell the Hub's code and transformers, which are not imported yet, how to behave.

    Args:
        offline: Whether the Hub must not be asked.
    """
    # Its warning about a long prompt would stand before our own sentence about it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


COMMANDS = {
    "serve": serve_command,
    "run": run_command,
    "cache": cache_command,
    "bench": bench_command,
    "mtp": mtp_command,
}
