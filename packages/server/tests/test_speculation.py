"""Speculation from flags to replies."""

import io
import subprocess
import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from treadle_core import Engine, EngineStats, InvalidRequest, ModelLoadError, Unsupported, Usage
from treadle_core.events import DraftCounters
from treadle_core.testing import zoo
from treadle_core.testing.drafting import SteadyController, WrongDrafter
from treadle_core.testing.scripted import ScriptedRunner
from treadle_server import compose
from treadle_server.cli import make_parser
from treadle_server.generation import total
from treadle_server.openai.replies import usage_reply
from treadle_server.options import SERVE_OPTIONS, from_flags, serve_config
from treadle_server.run import run
from treadle_server.settings import RunOptions, ServeConfig, SpeculativeOptions
from treadle_server.speculative_routes import speculative_stats


def serve_of(*words: str) -> ServeConfig:
    return serve_config(
        from_flags(vars(make_parser().parse_args(["serve", *words])), SERVE_OPTIONS)
    )


def usage_of(drafts: DraftCounters | None) -> Usage:
    return Usage(prompt_tokens=3, completion_tokens=9, drafts=drafts)


def test_nobody_drafts_unless_told() -> None:
    assert compose.drafting_maker(serve_of().speculative) is None


def test_a_fixed_number_of_tokens_is_what_the_controller_asks_for() -> None:
    if find_spec("treadle_speculative") is None:
        pytest.skip("treadle-speculative is not installed")
    options = serve_of("--speculative-method", "ngram", "--num-speculative-tokens", "4").speculative
    make = compose.drafting_maker(options)
    assert make is not None

    make_drafter, controller = make()

    assert make_drafter(None).name == "ngram"
    assert controller.max_tokens == 4


def test_a_model_whose_checkpoint_holds_no_head_is_refused_at_the_start(tmp_path: Path) -> None:
    if find_spec("treadle_speculative") is None:
        pytest.skip("treadle-speculative is not installed")
    config = serve_of("--model", str(zoo.save_checkpoint("llama", tmp_path / "plain")))
    options = serve_of("--speculative-method", "mtp").speculative

    with pytest.raises(Unsupported, match="MTP heads of llama are not known"):
        compose.open_engine(
            config.model, config.engine, config.memory, None, compose.drafting_maker(options)
        )
    away = serve_of("--speculative-method", "mtp", "--mtp-head", str(tmp_path / "away")).speculative
    with pytest.raises(ModelLoadError, match="away: there is no such directory"):
        compose.open_engine(
            config.model, config.engine, config.memory, None, compose.drafting_maker(away)
        )


@pytest.mark.parametrize(
    "words",
    [
        ("--num-speculative-tokens", "4"),
        ("--speculative-method", "off", "--num-speculative-tokens", "4"),
    ],
)
def test_a_number_without_a_method_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(Unsupported, match="num_speculative_tokens"):
        serve_of(*words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--speculative-lossy",), "speculative_lossy means nothing"),
        (("--speculative-method", "off", "--speculative-lossy"), "speculative_lossy means nothing"),
        (("--speculative-method", "draft-model"), "needs draft_model"),
        (("--draft-model", "small"), "draft_model means nothing"),
        (("--mtp-head", "head"), "mtp_head means nothing unless speculative_method is mtp"),
        (("--speculative-method", "ngram", "--draft-model", "small"), "draft_model means nothing"),
    ],
)
def test_options_that_would_be_ignored_are_refused(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        serve_of(*words)


def test_nothing_is_lossy_unless_told() -> None:
    assert not serve_of("--speculative-method", "ngram").speculative.speculative_lossy
    told = serve_of("--speculative-method", "ngram", "--speculative-lossy").speculative
    assert told.speculative_lossy


@pytest.mark.parametrize(
    "words",
    [
        ("--speculative-method", "magic"),
        ("--speculative-method", "ngram", "--num-speculative-tokens", "0"),
        ("--speculative-method", "ngram", "--num-speculative-tokens", "99"),
    ],
)
def test_a_value_that_is_none_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest):
        serve_of(*words)


def test_a_method_of_another_making_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="ngram"):
        SpeculativeOptions(speculative_method=msgspec.convert("magic", Any))


def test_replies_count_guesses_only_where_somebody_guesses() -> None:
    drafts = DraftCounters(
        verifications=2, attempted=7, accepted=5, committed=7, bypassed={"off": 2}
    )

    reply = msgspec.to_builtins(usage_reply(usage_of(drafts)))

    assert reply["completion_tokens_details"] == {
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 2,
        "speculation": {
            "attempted": 7,
            "accepted": 5,
            "rejected": 2,
            "acceptance_rate": 5 / 7,
            "forwards_saved": 5,
            "bypassed": {"off": 2},
        },
    }
    assert "completion_tokens_details" not in msgspec.to_builtins(usage_reply(usage_of(None)))


def test_replies_of_a_lossy_server_say_so() -> None:
    drafts = DraftCounters(verifications=1, attempted=3, accepted=3, committed=4, lossy=3)

    reply = msgspec.to_builtins(usage_reply(usage_of(drafts)))

    assert reply["completion_tokens_details"]["lossy_prediction_tokens"] == 3


def test_answers_of_one_request_are_counted_together() -> None:
    one = DraftCounters(verifications=1, attempted=3, accepted=1, committed=2)

    found = total([usage_of(one), usage_of(one)], n=2)

    assert found.drafts == one + one
    assert total([usage_of(None)], n=1).drafts is None


def test_the_stats_route_tells_who_guesses_and_that_it_is_lossy() -> None:
    drafts = DraftCounters(
        verifications=2, attempted=6, accepted=6, committed=8, bypassed={"pending": 3}, lossy=6
    )
    stats = EngineStats(
        num_waiting=0,
        num_running=1,
        kv_bytes=0,
        num_steps=5,
        num_requests=1,
        num_finished=0,
        num_failed=0,
        prompt_tokens=0,
        completion_tokens=0,
        last_step=None,
        drafts=drafts,
        drafter="draft-model",
        draft_bytes=640,
        lossy=True,
    )

    assert msgspec.to_builtins(speculative_stats(stats)) == {
        "method": "draft-model",
        "failure": None,
        "lossy": True,
        "lossy_tokens": 6,
        "held_bytes": 640,
        "failures": 0,
        "total": {
            "attempted": 6,
            "accepted": 6,
            "rejected": 0,
            "acceptance_rate": 1.0,
            "forwards_saved": 6,
            "bypassed": {"pending": 3},
        },
    }


def test_run_tells_how_many_guesses_were_kept_and_when_it_was_lossy(tokenizer_type: Any) -> None:
    for lossy in (False, True):
        notes = io.StringIO()
        engine = Engine(
            ScriptedRunner(lambda tokens: 65, max_draft_tokens=2),
            tokenizer=tokenizer_type(),
            drafter=WrongDrafter(lambda tokens, num: [65] * num),
            controller=SteadyController(2),
            lossy=lossy,
        )
        run(engine, RunOptions(prompt="hey", raw=True, max_tokens=7), io.StringIO(), notes)
        kept, said = ("4", "LOSSY: 4 unverified") if lossy else ("0", "guesses kept (length)")
        assert f"{kept} of " in notes.getvalue()
        assert said in notes.getvalue()


@pytest.fixture(scope="module")
def guessing(checkpoint: Path, tmp_path_factory: Any, launch: Any) -> Generator[Any]:
    """A server whose draft model is the model itself."""
    if find_spec("treadle_speculative") is None:
        pytest.skip("treadle-speculative is not installed")
    words = ["--speculative-method", "draft-model", "--draft-model", str(checkpoint)]
    log = tmp_path_factory.mktemp("log") / "stderr"
    with launch(log, "--model", str(checkpoint), *words, "--num-speculative-tokens", "3") as ready:
        yield ready


def post(url: str, path: str, **fields: Any) -> Any:
    """The reply, or the last event of a stream before its end."""
    body = {"model": "default", "max_tokens": 20, "ignore_eos": True, "seed": 7, **fields}
    reply = httpx2.post(f"{url}/v1/{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    if "stream" not in fields:
        return reply.json()
    events = [line.removeprefix("data: ") for line in reply.text.split("\n") if line[:5] == "data:"]
    return msgspec.json.decode(events[-2])


ASKS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "The loom", "temperature": 0}),
    ("completions", {"prompt": "The loom", "temperature": 1.2, "top_p": 0.9}),
    ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.8}),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("path", "fields"), ASKS)
def test_a_server_with_a_draft_model_answers_alike_and_says_what_it_saved(
    process: Any, guessing: Any, path: str, fields: dict[str, Any]
) -> None:
    plain, found = (post(server.url, path, **fields) for server in (process, guessing))
    streamed = post(
        guessing.url, path, **fields, stream=True, stream_options={"include_usage": True}
    )

    assert found["choices"] == plain["choices"]
    assert "completion_tokens_details" not in plain["usage"]
    for reply in (found, streamed):
        details = reply["usage"]["completion_tokens_details"]
        assert details["speculation"]["forwards_saved"] >= 12
        assert details["accepted_prediction_tokens"] == details["speculation"]["accepted"]
        assert "lossy_prediction_tokens" not in details
    stats = httpx2.get(f"{guessing.url}/v1/speculative/stats").json()
    assert stats["method"] == "draft-model"
    assert stats["total"]["accepted"] >= 24
    assert not stats["lossy"]
    assert httpx2.get(f"{process.url}/v1/speculative/stats").json()["method"] is None


@pytest.mark.timeout(120)
def test_a_draft_model_with_another_tokenizer_is_refused_at_the_start(
    checkpoint: Path, tmp_path: Path
) -> None:
    if find_spec("treadle_speculative") is None:
        pytest.skip("treadle-speculative is not installed")
    other = zoo.save_checkpoint("llama", tmp_path / "other", vocab_size=340)
    words = ["--speculative-method", "draft-model", "--draft-model", str(other)]
    ended = subprocess.run(
        [sys.executable, "-m", "treadle_server", "run", "hi", "--model", str(checkpoint), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "draft_model: its tokenizer differs from the model's: token " in ended.stderr
    assert ended.stderr.count("\n") == 1
