"""Every field is checked when a request is made, and what is wrong is named with its limit."""

import math
from typing import Any

import msgspec
import pytest

from treadle_core.errors import InvalidRequest
from treadle_core.prefix import MediaSpan
from treadle_core.request import MAX_SEED, Request, SamplingParams

NAN, INFINITY = math.nan, math.inf
HUGE = 10**400  # beyond any float

NOT_NUMBERS: list[Any] = [None, "1", True, [1], {}, NAN, INFINITY, -INFINITY, HUGE]
NOT_INTEGERS: list[Any] = [None, "1", True, 1.0, [1], NAN]


def refused(make: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        make(**fields)
    return error.value


def make_request(**fields: Any) -> Request:
    return Request(**{"id": "r", "prompt": (1, 2), **fields})


# Sampling


@pytest.mark.parametrize(
    ("field", "limit", "wrong"),
    [
        ("temperature", "a number from 0 to 100", [-0.001, 100.001, -1]),
        ("top_p", "a number above 0 to 1", [0, 0.0, 1.001, 5, -1]),
        ("min_p", "a number from 0 to 1", [-0.001, 1.001]),
        ("repetition_penalty", "a number above 0 to 100", [0, 0.0, -1.0, 100.5]),
        ("presence_penalty", "a number from -2 to 2", [-2.001, 2.001]),
        ("frequency_penalty", "a number from -2 to 2", [-2.001, 2.001]),
    ],
)
def test_numbers_outside_of_their_interval_are_refused(
    field: str, limit: str, wrong: list[Any]
) -> None:
    for value in [*wrong, *NOT_NUMBERS]:
        error = refused(SamplingParams, **{field: value})

        assert (error.field, error.limit) == (field, limit), value
        assert error.value is value


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [0, 0.0, 1, 1e-9, 100]),
        ("top_p", [1e-9, 1, 1.0]),
        ("min_p", [0, 1.0]),
        ("repetition_penalty", [1e-9, 1, 100.0]),
        ("presence_penalty", [-2, 0, 2.0]),
        ("frequency_penalty", [-2.0, 2]),
    ],
)
def test_numbers_at_their_limits_are_accepted(field: str, values: list[float]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "limit", "wrong", "accepted"),
    [
        ("max_tokens", "an integer of at least 1", [0, -1], [1, 10**9, None]),
        ("min_tokens", "an integer of at least 0", [-1], [0, 256]),
        ("top_k", "an integer of at least 0", [-1], [0, 1, 10**6]),
        (
            "seed",
            f"an integer from {-MAX_SEED - 1} to {MAX_SEED}",
            [MAX_SEED + 1, -MAX_SEED - 2],
            [0, -1, MAX_SEED, -MAX_SEED - 1, None],
        ),
        ("top_logprobs", "an integer from 0 to 20", [-1, 21], [0]),
    ],
)
def test_integers_have_their_limits(
    field: str, limit: str, wrong: list[Any], accepted: list[Any]
) -> None:
    for value in [*wrong, *(v for v in NOT_INTEGERS if v not in accepted)]:
        error = refused(SamplingParams, **{field: value})

        assert (error.field, error.limit) == (field, limit), value
    for value in accepted:
        assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize("field", ["ignore_eos", "logprobs"])
@pytest.mark.parametrize("value", [None, 0, 1, "true", NAN])
def test_flags_are_booleans(field: str, value: Any) -> None:
    error = refused(SamplingParams, **{field: value})

    assert (error.field, error.limit) == (field, "true or false")


def test_min_tokens_do_not_exceed_max_tokens() -> None:
    error = refused(SamplingParams, min_tokens=6, max_tokens=5)

    assert (error.field, error.limit) == ("min_tokens", "at most max_tokens (5)")
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6


def test_top_logprobs_need_logprobs() -> None:
    error = refused(SamplingParams, top_logprobs=3)

    assert (error.field, error.limit) == ("top_logprobs", "logprobs to be on")
    assert SamplingParams(logprobs=True, top_logprobs=20).top_logprobs == 20


@pytest.mark.parametrize("value", [None, [], [(1, 1.0)], "1", 1])
def test_a_logit_bias_is_a_mapping(value: Any) -> None:
    error = refused(SamplingParams, logit_bias=value)

    assert (error.field, error.limit) == ("logit_bias", "a mapping of token ids to numbers")


@pytest.mark.parametrize("token", ["1", "abc", -1, 1.0, True, None])
def test_a_logit_bias_is_keyed_by_token_ids(token: Any) -> None:
    error = refused(SamplingParams, logit_bias={token: 1.0})

    assert (error.field, error.limit) == ("logit_bias", "an integer of at least 0")


def test_a_logit_bias_is_a_number_within_its_limits() -> None:
    for value in [*NOT_NUMBERS, "x", -100.5, 100.5]:
        error = refused(SamplingParams, logit_bias={7: 1.0, 8: value})

        assert (error.field, error.limit) == ("logit_bias[8]", "a number from -100 to 100")


def test_a_logit_bias_at_its_limits_is_accepted() -> None:
    assert SamplingParams(logit_bias={0: -100, 1: 100.0}).logit_bias == {0: -100, 1: 100.0}


@pytest.mark.parametrize("value", [None, "end", ["end"], 1])
def test_stop_is_a_tuple(value: Any) -> None:
    error = refused(SamplingParams, stop=value)

    assert (error.field, error.limit) == ("stop", "a tuple of strings")


@pytest.mark.parametrize("value", [("a", ""), (1,), (None,), (b"a",)])
def test_stop_strings_are_not_empty(value: Any) -> None:
    error = refused(SamplingParams, stop=value)

    assert (error.field, error.limit) == ("stop", "non-empty strings")


def test_there_are_at_most_sixteen_stop_strings() -> None:
    error = refused(SamplingParams, stop=tuple("abcdefghijklmnopq"))

    assert (error.field, error.limit) == ("stop", "at most 16 strings")
    assert len(SamplingParams(stop=tuple("abcdefghijklmnop")).stop) == 16


@pytest.mark.parametrize("value", [(-1,), (True,), ("1",), (1.0,), (None,)])
def test_stop_tokens_are_token_ids(value: Any) -> None:
    error = refused(SamplingParams, stop_token_ids=value)

    assert (error.field, error.limit) == ("stop_token_ids", "an integer of at least 0")


@pytest.mark.parametrize("value", [None, 5, [5], "5"])
def test_stop_tokens_are_a_tuple(value: Any) -> None:
    error = refused(SamplingParams, stop_token_ids=value)

    assert (error.field, error.limit) == ("stop_token_ids", "a tuple of token ids")


def test_defaults_are_what_the_documentation_says() -> None:
    params = SamplingParams()

    assert (params.max_tokens, params.temperature, params.top_p) == (256, 0.7, 0.9)
    assert not params.greedy
    assert not params.has_penalties


def test_a_temperature_of_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-9).greedy


@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 1.1}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.1}],
)
def test_each_penalty_counts_as_one(fields: dict[str, float]) -> None:
    assert SamplingParams(**fields).has_penalties


def test_decoding_checks_the_same_limits() -> None:
    with pytest.raises(InvalidRequest, match="top_p: got 5"):
        msgspec.json.decode(b'{"top_p": 5}', type=SamplingParams)


def test_decoding_refuses_unknown_fields() -> None:
    with pytest.raises(msgspec.ValidationError, match="topp"):
        msgspec.json.decode(b'{"topp": 0.5}', type=SamplingParams)


# Requests


@pytest.mark.parametrize("id", ["", None, 7, b"r"])
def test_an_id_is_a_non_empty_string(id: Any) -> None:
    error = refused(make_request, id=id)

    assert (error.field, error.limit) == ("id", "a non-empty string")


@pytest.mark.parametrize("prompt", [None, [1, 2], (), b"ab", 5, {1}])
def test_a_prompt_is_text_or_a_tuple_of_tokens(prompt: Any) -> None:
    error = refused(make_request, prompt=prompt)

    assert (error.field, error.limit) == ("prompt", "text or a non-empty tuple of token ids")


def test_an_empty_text_is_refused() -> None:
    assert refused(make_request, prompt="").limit == "at least one token"


@pytest.mark.parametrize("token", [-1, True, 1.0, "1", None])
def test_a_prompt_consists_of_token_ids(token: Any) -> None:
    error = refused(make_request, prompt=(1, token))

    assert (error.field, error.limit) == ("prompt", "an integer of at least 0")


@pytest.mark.parametrize("n", [0, -1, 129, True, 1.0, None])
def test_the_number_of_answers_is_limited(n: Any) -> None:
    error = refused(make_request, n=n)

    assert (error.field, error.limit) == ("n", "an integer from 1 to 128")


@pytest.mark.parametrize("priority", [2**31 + 1, -(2**31) - 1, 0.5, True, None])
def test_a_priority_is_an_integer(priority: Any) -> None:
    assert refused(make_request, priority=priority).field == "priority"


def test_a_deadline_is_a_time_from_now() -> None:
    for deadline in [0, 0.0, -1, NAN, INFINITY, "1", True, HUGE]:
        error = refused(make_request, deadline=deadline)

        assert (error.field, error.limit) == ("deadline", "a number above 0")


@pytest.mark.parametrize("params", [None, {}, "greedy"])
def test_sampling_parameters_are_of_their_type(params: Any) -> None:
    assert refused(make_request, params=params).field == "params"


@pytest.mark.parametrize("salt", [1, b"x", ()])
def test_a_cache_salt_is_text(salt: Any) -> None:
    assert refused(make_request, cache_salt=salt).field == "cache_salt"


@pytest.mark.parametrize("processors", [(None,), (1,), 5, None, [print]])
def test_processors_are_a_tuple_of_callables(processors: Any) -> None:
    error = refused(make_request, logits_processors=processors)

    assert (error.field, error.limit) == ("logits_processors", "a tuple of callables")


@pytest.mark.parametrize("constraint", [5, "json", {}])
def test_a_constraint_is_a_factory(constraint: Any) -> None:
    assert refused(make_request, constraint=constraint).field == "constraint"


def test_a_long_value_is_cut_in_the_sentence() -> None:
    error = refused(make_request, id=b"x" * 500)

    assert len(str(error)) < 160
    assert "…" in str(error)


# Media


SPAN = MediaSpan(1, 2, b"digest")


def test_a_request_may_bring_media_and_what_the_model_needs_of_them() -> None:
    request = make_request(prompt=(5, 6, 6), media=(SPAN,), attachment="pixels")

    assert request.media == (SPAN,)
    assert request.attachment == "pixels"


@pytest.mark.parametrize(
    ("fields", "field", "limit"),
    [
        ({"media": [SPAN], "prompt": (5, 6, 6)}, "media", "a tuple of spans"),
        ({"media": (SPAN,), "prompt": "text"}, "media", "a prompt of token ids beside them"),
        ({"media": (SPAN,), "prompt": (5, 6)}, "media", "a span of the prompt's 2 tokens"),
        ({"media": ("picture",)}, "media", "a span of the prompt's 2 tokens"),
        ({"attachment": "pixels"}, "attachment", "media beside it"),
    ],
)
def test_media_that_do_not_fit_are_refused(fields: Any, field: str, limit: str) -> None:
    error = refused(make_request, **fields)

    assert (error.field, error.limit) == (field, limit)
