"""The runner executes plans as they are written, forgets on request, and frees what it held."""

import gc

import mlx.core as mx
import pytest
from msgspec.structs import replace

from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.load import make_runner
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.plan import (
    Close,
    Decode,
    Key,
    Open,
    Plan,
    Prefill,
    Promote,
    Resize,
    RowSetup,
    StepResult,
    Transfer,
)
from treadle_core.request import SamplingParams
from treadle_core.testing import zoo

FIRST, SECOND = tuple(range(10, 22)), tuple(range(50, 57))
A: Key = ("a", 0)
B: Key = ("b", 0)


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel(zoo.build("llama"))


@pytest.fixture
def runner(model: TextModel) -> ModelRunner:
    return ModelRunner(model, inspect(model, zoo.config("llama")))


def setup(key: Key, prompt: tuple[int, ...]) -> RowSetup:
    params = SamplingParams(temperature=0.0)
    return RowSetup(key=key, params=params, seed=0, end_tokens=(), prompt=prompt, output=[])


def decode(key: Key, group: int, row: int, start: int, token: int | None) -> Decode:
    return Decode(key=key, group=group, row=row, start=start, num_output=0, token=token)


def prefill(key: Key, group: int, row: int, tokens: tuple[int, ...], start: int = 0) -> Prefill:
    return Prefill(key=key, group=group, row=row, tokens=tokens, start=start)


def tokens_of(*results: StepResult) -> list[dict[str, int]]:
    assert not any(result.failures for result in results)
    return [{key[0]: s.token for key, (s,) in result.sampled.items()} for result in results]


def two_groups(number: int = 1) -> Plan:
    """Two rows join, each in a group of its own, and decode their last prompt token."""
    return Plan(
        number=number,
        joins=(setup(A, FIRST), setup(B, SECOND)),
        work=(
            Resize(0, 2, 64),
            Open(0, 0),
            prefill(A, 0, 0, FIRST[:5]),
            prefill(A, 0, 0, FIRST[5:-1], start=5),
            Promote(0, 0, 0, len(FIRST) - 1, len(FIRST) - 1),
            Resize(1, 1, 128),
            Open(1, 0),
            prefill(B, 1, 0, SECOND[:-1]),
            Promote(1, 0, 0, len(SECOND) - 1, len(SECOND) - 1),
        ),
        decodes=(
            decode(A, 0, 0, len(FIRST) - 1, FIRST[-1]),
            decode(B, 1, 0, len(SECOND) - 1, SECOND[-1]),
        ),
    )


def test_rows_of_several_groups_decode_in_one_step_on_tokens_that_nobody_read(
    model: TextModel, runner: ModelRunner
) -> None:
    pending = [
        runner.submit(two_groups()),
        runner.submit(
            Plan(
                number=2,
                decodes=(decode(A, 0, 0, len(FIRST), None), decode(B, 1, 0, len(SECOND), None)),
            )
        ),
    ]

    # The row moves to the other group, behind the one that is there.
    length = len(FIRST) + 1
    pending.append(
        runner.submit(
            Plan(
                number=3,
                work=(
                    Resize(1, 2, 128),
                    Transfer(0, 0, 1, 1, (), length),
                    Close(0, 0, ()),
                    Resize(0, 0, 0),
                ),
                decodes=(
                    decode(B, 1, 0, len(SECOND) + 1, None),
                    decode(A, 1, 1, length, None),
                ),
            )
        )
    )
    found = tokens_of(*(step.wait() for step in pending))

    first, second = (zoo.greedy(model.model, prompt, 3) for prompt in (FIRST, SECOND))
    assert found == [{"a": a, "b": b} for a, b in zip(first, second, strict=True)]


def test_known_and_unread_tokens_are_fed_side_by_side(
    model: TextModel, runner: ModelRunner
) -> None:
    first = runner.submit(two_groups())

    second = runner.submit(
        Plan(
            number=2,
            decodes=(decode(A, 0, 0, len(FIRST), None), decode(B, 1, 0, len(SECOND), 99)),
        )
    )
    found = tokens_of(first.wait(), second.wait())

    logits = zoo.reference_logits(model.model, [*SECOND, 99])
    assert found[1]["a"] == zoo.greedy(model.model, FIRST, 2)[1]
    assert found[1]["b"] == mx.argmax(logits[-1]).item()


def beside(number: int, chunk: Prefill, *after: Promote | Open | Close) -> Plan:
    """A decodes in group 0 while a chunk of B is written."""
    joined = any(isinstance(item, Promote) for item in after)
    decodes = [decode(A, 0, 0, len(FIRST) - 1, FIRST[-1])]
    if joined:
        decodes.append(decode(B, 0, 1, len(SECOND) - 1, SECOND[-1]))
    return Plan(number=number, work=(chunk, *after), decodes=tuple(decodes))


def one_group() -> Plan:
    """A is ready to decode, B has a row."""
    return Plan(
        number=1,
        joins=(setup(A, FIRST), setup(B, SECOND)),
        work=(
            Resize(0, 3, 64),
            Open(0, 0),
            prefill(A, 0, 0, FIRST[:-1]),
            Promote(0, 0, 0, len(FIRST) - 1, len(FIRST) - 1),
            Open(0, 1),
        ),
    )


@pytest.mark.parametrize("joins", [False, True])
def test_a_chunk_goes_through_the_model_with_the_decoding_rows(
    model: TextModel, joins: bool
) -> None:
    runner = make_runner(model.model, zoo.config("llama"))
    runner.submit(one_group()).wait()
    length = len(SECOND) - 1
    joining = (Promote(0, 1, 1, length, length),) if joins else ()

    result = runner.submit(beside(2, prefill(B, 0, 1, SECOND[:-1]), *joining)).wait()

    assert result.fused
    assert result.prefill_seconds == ()
    (first,), (second,) = (zoo.greedy(model.model, prompt, 1) for prompt in (FIRST, SECOND))
    assert tokens_of(result) == [{"a": first, "b": second} if joins else {"a": first}]


def test_only_the_last_chunk_goes_with_the_decoding_rows(model: TextModel) -> None:
    runner = make_runner(model.model, zoo.config("llama"))
    runner.submit(one_group()).wait()
    length = len(SECOND) - 1
    plan = beside(2, prefill(B, 0, 1, SECOND[:3]), Promote(0, 1, 1, length, length))
    rest = prefill(B, 0, 1, SECOND[3:-1], start=3)

    result = runner.submit(
        Plan(number=2, work=(plan.work[0], rest, plan.work[1]), decodes=plan.decodes)
    ).wait()

    assert result.fused
    assert len(result.prefill_seconds) == 1
    (first,), (second,) = (zoo.greedy(model.model, prompt, 1) for prompt in (FIRST, SECOND))
    assert tokens_of(result) == [{"a": first, "b": second}]


def test_a_chunk_goes_alone_where_the_plan_says_so(model: TextModel) -> None:
    runner = make_runner(model.model, zoo.config("llama"))
    runner.submit(one_group()).wait()
    plan = beside(2, prefill(B, 0, 1, SECOND[:-1]))

    result = runner.submit(replace(plan, fuses=False)).wait()

    assert not result.fused
    assert len(result.prefill_seconds) == 1
    assert tokens_of(result) == [{"a": zoo.greedy(model.model, FIRST, 1)[0]}]


def test_a_chunk_that_something_else_follows_goes_alone(model: TextModel) -> None:
    runner = make_runner(model.model, zoo.config("llama"))
    runner.submit(one_group()).wait()

    result = runner.submit(beside(2, prefill(B, 0, 1, SECOND[:-1]), Open(0, 2))).wait()

    assert not result.fused
    assert len(result.prefill_seconds) == 1
    assert tokens_of(result) == [{"a": zoo.greedy(model.model, FIRST, 1)[0]}]


def test_rows_are_fed_as_many_known_tokens_as_they_lack(
    model: TextModel, runner: ModelRunner
) -> None:
    """One row lacks three tokens and one lacks one; both go on from the device."""
    runner = ModelRunner(model, runner.spec, slack=2)
    opened = (Resize(0, 2, 64), Open(0, 0), prefill(A, 0, 0, FIRST[:-3]), Promote(0, 0, 0, 9, 0))
    second = (Open(0, 1), prefill(B, 0, 1, SECOND[:-1]), Promote(0, 1, 1, 6, 0))
    fed = Decode(key=A, group=0, row=0, start=9, num_output=-2, token=FIRST[9], more=FIRST[10:])
    plan = Plan(
        number=1,
        joins=(setup(A, FIRST), setup(B, SECOND)),
        work=(*opened, *second),
        decodes=(fed, decode(B, 0, 1, 6, SECOND[-1])),
    )
    then = Plan(number=2, decodes=(decode(A, 0, 0, 12, None), decode(B, 0, 1, 7, None)))

    steps = [runner.submit(plan), runner.submit(then)]
    found = tokens_of(*(step.wait() for step in steps))

    expected = [zoo.greedy(model.model, prompt, 2) for prompt in (FIRST, SECOND)]
    assert found == [{"a": a, "b": b} for a, b in zip(*expected, strict=True)]


def test_a_step_tells_its_number_and_how_long_it_took(runner: ModelRunner) -> None:
    result = runner.submit(two_groups(number=17)).wait()

    assert result.number == 17
    assert result.seconds > 0


def test_after_a_reset_it_is_as_new(model: TextModel, runner: ModelRunner) -> None:
    before = tokens_of(runner.submit(two_groups()).wait())
    assert runner.num_rows == 2

    runner.reset()

    assert runner.num_rows == 0
    assert tokens_of(runner.submit(two_groups()).wait()) == before


def test_answers_that_leave_are_forgotten(runner: ModelRunner) -> None:
    runner.submit(two_groups()).wait()

    runner.submit(
        Plan(
            number=2,
            leaves=(A,),
            work=(Close(0, 0, ()), Resize(0, 0, 0)),
            decodes=(decode(B, 1, 0, len(SECOND), None),),
        )
    ).wait()

    assert runner.num_rows == 1


def test_a_closed_runner_holds_no_memory_and_may_be_closed_again() -> None:
    gc.collect()
    before = mx.get_active_memory()
    options = {"hidden_size": 256, "intermediate_size": 1024}
    runner = make_runner(zoo.build("llama", **options), zoo.config("llama", **options))
    runner.submit(two_groups()).wait()
    assert mx.get_active_memory() > before + 2**22

    runner.close()
    runner.close()
    gc.collect()

    assert mx.get_active_memory() < before + 2**20
    assert mx.get_cache_memory() < 2**20


def test_a_closed_runner_refuses_plans(runner: ModelRunner) -> None:
    runner.close()

    with pytest.raises(AssertionError, match="the runner is closed"):
        runner.submit(two_groups())
