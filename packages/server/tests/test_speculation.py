"""Speculation from flags to replies."""

from importlib.util import find_spec
from typing import Any

import msgspec
import pytest

from treadle_core import InvalidRequest, Unsupported, Usage
from treadle_core.events import DraftCounters
from treadle_server import compose
from treadle_server.cli import make_parser
from treadle_server.generation import total
from treadle_server.openai.replies import usage_reply
from treadle_server.options import SERVE_OPTIONS, from_flags, serve_config
from treadle_server.settings import ServeConfig, SpeculativeOptions


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
