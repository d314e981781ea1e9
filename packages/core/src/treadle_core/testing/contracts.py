"""One conformance suite per port: what an engine relies on, whoever implements it.

Subclass a suite in a test module, name the class ``Test…`` and provide its fixtures::

    class TestMyClock(ClockContract):
        @pytest.fixture
        def clock(self) -> MyClock:
            return MyClock()

The suites need no plugin and import no test runner.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from treadle_core.engine import Engine
from treadle_core.layers import state_layout
from treadle_core.plan import (
    Close,
    Decode,
    Instruction,
    Key,
    Move,
    Open,
    Plan,
    Prefill,
    Promote,
    Resize,
    Restore,
    RowSetup,
    Save,
    StepResult,
    Transfer,
)
from treadle_core.ports import (
    ChunkPolicy,
    Clock,
    Observer,
    PendingStep,
    PrefixStore,
    Runner,
    StoredRow,
    TokenConstraint,
    Tokenizer,
)
from treadle_core.prefix import (
    MediaSpan,
    Prefix,
    PrefixKey,
    StateLayout,
    TokenArray,
)
from treadle_core.request import LogitsProcessor, Request, SamplingParams
from treadle_core.testing.checks import EventChecker, pump
from treadle_core.testing.fakes import ScriptedConstraint
from treadle_core.testing.prefixes import KeyedRow, RecordingStore
from treadle_core.testing.scripted import ScriptedRunner

Oracle = Callable[[Sequence[int], int], list[int]]
"""``oracle(prompt, num_tokens)``: what a model generates greedily after a prompt."""

A, B, C = ("a", 0), ("b", 0), ("c", 0)


class ClockContract:
    """Fixture: ``clock``."""

    def test_time_is_a_number_of_seconds(self, clock: Clock) -> None:
        """An int would do as well."""
        assert isinstance(clock.now(), int | float)

    def test_time_never_goes_back(self, clock: Clock) -> None:
        """Not even by rounding."""
        readings = [clock.now() for _ in range(1_000)]

        assert readings == sorted(readings)


class ChunkPolicyContract:
    """Fixture: ``policy``, fresh."""

    def test_the_budget_is_within_its_limits(self, policy: ChunkPolicy) -> None:
        """Whatever was observed before, and before anything was."""
        for num_decoding, num_tokens, seconds in _OBSERVATIONS:
            for limit in (1, 2, 17, 100_000):
                for rows in (0, 1, 256):
                    assert 1 <= policy.budget(rows, limit) <= limit
            policy.observe(num_decoding, num_tokens, seconds)

    def test_asking_changes_nothing(self, policy: ChunkPolicy) -> None:
        """A budget that was not used is asked for again."""
        policy.observe(4, 100, 0.1)

        assert len({policy.budget(4, 1_000) for _ in range(10)}) == 1

    def test_there_is_always_time_for_something_else(self, policy: ChunkPolicy) -> None:
        """Whatever was observed."""
        for observation in _OBSERVATIONS:
            for rows in (1, 256):
                assert 0 < policy.seconds(rows) <= 1e4
            assert policy.seconds(0) > 0
            policy.observe(*observation)

    def test_a_plain_decode_is_enough_to_fuse(self, policy: ChunkPolicy) -> None:
        """Whatever was observed before: there is no end to asking otherwise."""
        for observation in _OBSERVATIONS:
            for rows in (1, 3, 256):
                policy.observe(rows, 0, 0.02)
                assert policy.fuses(rows)
            policy.observe(*observation)

    def test_beginning_a_chunk_costs_no_less_than_nothing(self, policy: ChunkPolicy) -> None:
        """At any time."""
        for observation in _OBSERVATIONS:
            assert policy.overhead >= 0
            policy.observe(*observation)


_OBSERVATIONS = (
    (0, 512, 0.5),
    (4, 32, 0.05),
    (4, 0, 0.02),
    (4, 64, 0.0),
    (1, 1, 100.0),
    (256, 0, 0.0),
    (4, 8_192, 1e-6),
)


class TokenizerContract:
    """Fixture: ``tokenizer``."""

    TEXTS = ("Hello, world!", "né 漢字", "👩‍👩‍👧 emoji", "tabs\tand\nlines", "x")

    def test_text_survives_a_round_trip(self, tokenizer: Tokenizer) -> None:
        """The model's own opening token adds nothing to it."""
        for text in self.TEXTS:
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_there_is_at_most_one_opening_token(self, tokenizer: Tokenizer) -> None:
        """And it is the first."""
        for text in self.TEXTS:
            tokens = tokenizer.encode(text)
            special = [i for i, t in enumerate(tokens) if t in tokenizer.special_tokens]
            assert special in ([], [0]), f"special tokens at {special} of {tokens}"

    def test_ids_are_within_the_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Those of texts, and those that end an answer."""
        ids = {token for text in self.TEXTS for token in tokenizer.encode(text)}

        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        assert all(isinstance(token, int) and token >= 0 for token in tokenizer.end_tokens)

    def test_an_answer_can_end(self, tokenizer: Tokenizer) -> None:
        """Without an end token every answer would run into its limit."""
        assert tokenizer.end_tokens

    def test_special_tokens_add_no_text(self, tokenizer: Tokenizer) -> None:
        """Alone and among others."""
        tokens = tokenizer.encode("x")
        for special in tokenizer.special_tokens:
            assert tokenizer.decode([special]) == ""
            assert tokenizer.decode([*tokens, special]) == "x"

    def test_unknown_ids_add_no_text(self, tokenizer: Tokenizer) -> None:
        """A model may have more logits than its tokenizer has tokens."""
        unknown = [tokenizer.vocab_size, tokenizer.vocab_size + 1_000]

        assert tokenizer.decode(unknown) == ""
        assert tokenizer.decode([*tokenizer.encode("x"), *unknown]) == "x"

    def test_any_stretch_of_tokens_can_be_decoded(self, tokenizer: Tokenizer) -> None:
        """Half a character too."""
        for text in self.TEXTS:
            tokens = tokenizer.encode(text)
            for start in range(len(tokens) + 1):
                for stop in range(start, len(tokens) + 1):
                    assert isinstance(tokenizer.decode(tokens[start:stop]), str)


class TokenConstraintContract:
    """Fixtures: ``constraint``, fresh; ``path``, tokens that complete it; ``vocab_size``."""

    def test_it_is_a_token_constraint(self, constraint: TokenConstraint) -> None:
        """As the port tells at run time."""
        assert isinstance(constraint, TokenConstraint)

    def test_every_token_of_the_path_is_allowed_in_its_turn(
        self, constraint: TokenConstraint, path: Sequence[int], vocab_size: int
    ) -> None:
        """And a mask covers the vocabulary."""
        for token in path:
            packed = constraint.mask()
            assert packed is None or len(packed) * 8 >= vocab_size
            assert allows(packed, token), f"{token} is not allowed"
            constraint.advance(token)

    def test_it_is_complete_at_the_end_of_the_path_only(
        self, constraint: TokenConstraint, path: Sequence[int]
    ) -> None:
        """So that the answer ends there."""
        assert [constraint.advance(token) for token in path] == [False] * (len(path) - 1) + [True]

    def test_asking_for_the_mask_changes_nothing(
        self, constraint: TokenConstraint, path: Sequence[int]
    ) -> None:
        """A step that failed asks again."""
        for token in path:
            assert constraint.mask() == constraint.mask()
            constraint.advance(token)

    def test_rolling_back_restores_every_state(
        self, constraint: TokenConstraint, path: Sequence[int]
    ) -> None:
        """By any number of tokens."""
        masks: list[bytes | None] = []
        for done, token in enumerate(path):
            masks.append(constraint.mask())
            for back in range(1, done + 1):
                constraint.rollback(back)
                assert constraint.mask() == masks[done - back]
                for taken in path[done - back : done]:
                    constraint.advance(taken)
            assert constraint.mask() == masks[done]
            constraint.advance(token)


class ObserverContract:
    """Fixture: ``observer``."""

    def test_it_follows_an_engine_without_disturbing_it(self, observer: Observer) -> None:
        """The events are those of an engine that nobody watches."""
        events = [
            _events_of(Engine(ScriptedRunner(), observers=watching))
            for watching in ([], [observer])
        ]

        assert events[0] == events[1]

    def test_it_takes_empty_reports(self, observer: Observer) -> None:
        """A step may tell nothing."""
        plan = Plan(number=1)
        observer.stepped(plan, StepResult(number=1, sampled={}, failures={}, seconds=0.0))
        observer.emitted([])


def _events_of(engine: Engine) -> list[tuple[str, int]]:
    checker = EventChecker()
    for number in range(3):
        request = Request(id=f"r{number}", prompt=(number, 1), n=2)
        engine.add(request)
        checker.accepted(request)
    engine.abort("r1")
    pump(engine, checker)
    checker.finish()
    return [(key[0], token) for key, tokens in checker.tokens.items() for token in tokens]


NO_DRAFTS: Mapping[Key, tuple[int, ...]] = {}


class RunnerContract:
    """Fixtures: ``runner``, fresh; ``oracle``, what its model generates greedily.

    The model's greedy choices for these prompts have to be clear ones, so that rounding in another
    batch shape cannot change them.
    """

    PROMPTS = ((5, 9, 2, 7), (11, 3, 8, 1, 6, 4), (21, 22, 23))

    def test_it_says_what_the_model_is(self, runner: Runner) -> None:
        """Before anything runs."""
        assert runner.spec.layers
        assert runner.spec.vocab_size > 1
        assert runner.spec.context_length > 1

    def test_a_row_gets_the_models_tokens(self, runner: Runner, oracle: Oracle) -> None:
        """Fed by the tokens that were sampled and not read yet."""
        rows = Rows(runner)
        rows.open(A, self.PROMPTS[0])
        rows.prefill(A)
        rows.promote(A)
        for _ in range(8):
            rows.submit()
        rows.read_all()

        assert rows.sampled(A) == oracle(self.PROMPTS[0], 8)

    def test_tokens_that_were_read_may_be_fed_by_their_ids(
        self, runner: Runner, oracle: Oracle
    ) -> None:
        """With and without look-ahead in between."""
        rows = Rows(runner)
        rows.open(A, self.PROMPTS[0])
        rows.prefill(A)
        rows.promote(A)
        for step in range(8):
            rows.submit()
            if step % 3:
                rows.read_all()
        rows.read_all()

        assert rows.sampled(A) == oracle(self.PROMPTS[0], 8)

    def test_a_prompt_may_come_in_chunks(self, runner: Runner, oracle: Oracle) -> None:
        """In steps of their own."""
        rows = Rows(runner)
        rows.open(B, self.PROMPTS[1])
        for _ in range(3):
            rows.prefill(B, 2)
            rows.submit()
        rows.promote(B)
        rows.submit()
        rows.submit()
        rows.read_all()

        assert rows.sampled(B) == oracle(self.PROMPTS[1], 2)

    def test_a_row_may_decode_its_prompt_from_nothing(self, runner: Runner, oracle: Oracle) -> None:
        """A prompt of one token has nothing to prefill."""
        rows = Rows(runner)
        rows.open(A, self.PROMPTS[0][:1])
        rows.promote(A)
        rows.submit()
        rows.read_all()

        assert rows.sampled(A) == oracle(self.PROMPTS[0][:1], 1)

    def test_rows_join_while_others_decode(self, runner: Runner, oracle: Oracle) -> None:
        """And nobody's tokens change."""
        rows = Rows(runner)
        for key, prompt in zip((A, B, C), self.PROMPTS, strict=True):
            rows.open(key, prompt)
            rows.prefill(key)
            rows.promote(key)
            rows.submit()
            rows.submit()
        rows.read_all()

        self._check(rows, oracle, {A: 6, B: 4, C: 2})

    def test_rows_are_promoted_in_any_order(self, runner: Runner, oracle: Oracle) -> None:
        """The last one first, while the others are in the middle of their prompts."""
        rows = Rows(runner)
        for key, prompt in zip((A, B, C), self.PROMPTS, strict=True):
            rows.open(key, prompt)
            rows.prefill(key, 1)
        for key in (C, A, B):
            rows.prefill(key)
            rows.promote(key)
            rows.submit()
        rows.submit()
        rows.read_all()

        self._check(rows, oracle, {A: 3, B: 2, C: 4})

    def test_a_row_that_leaves_disturbs_nobody(self, runner: Runner, oracle: Oracle) -> None:
        """The first one, with decoding and prefilling rows behind it."""
        rows = Rows(runner)
        for key, prompt in zip((A, B, C), self.PROMPTS, strict=True):
            rows.open(key, prompt)
            rows.prefill(key, 2)
        for key in (A, B):
            rows.prefill(key)
            rows.promote(key)
        rows.submit()
        rows.close(A, [B, C])
        rows.submit()
        rows.prefill(C)
        rows.promote(C)
        rows.submit()
        rows.submit()
        rows.read_all()

        self._check(rows, oracle, {A: 1, B: 4, C: 2})

    def test_a_prefilling_row_that_leaves_disturbs_nobody(
        self, runner: Runner, oracle: Oracle
    ) -> None:
        """Its place is taken by the last one."""
        rows = Rows(runner)
        for key, prompt in zip((A, B, C), self.PROMPTS, strict=True):
            rows.open(key, prompt)
            rows.prefill(key, 2)
        rows.prefill(A)
        rows.promote(A)
        rows.submit()
        rows.close(B, [C])
        rows.prefill(C)
        rows.promote(C)
        rows.submit()
        rows.submit()
        rows.read_all()

        self._check(rows, oracle, {A: 3, B: 0, C: 2})

    def test_a_row_that_was_left_can_be_used_again(self, runner: Runner, oracle: Oracle) -> None:
        """What it held before is forgotten."""
        rows = Rows(runner)
        for key, prompt in ((A, self.PROMPTS[1]), (B, self.PROMPTS[0])):
            rows.open(key, prompt)
            rows.prefill(key)
            rows.promote(key)
            rows.submit()
            rows.submit()
            rows.read_all()
            if key == A:
                rows.close(A, [])

        self._check(rows, oracle, {A: 2, B: 2})

    def test_buffers_grow_and_shrink_around_their_rows(
        self, runner: Runner, oracle: Oracle
    ) -> None:
        """In rows and in tokens."""
        rows = Rows(runner, num_rows=1, capacity=8)
        rows.open(A, self.PROMPTS[0])
        rows.prefill(A)
        rows.promote(A)
        for size in ((1, 16), (4, 16), (2, 64), (1, 12)):
            rows.submit()
            rows.resize(*size)
        rows.submit()
        rows.read_all()

        assert rows.sampled(A) == oracle(self.PROMPTS[0], 5)

    def test_a_row_moves_to_another_group(self, runner: Runner, oracle: Oracle) -> None:
        """And a prefilling row there makes place for it."""
        if not runner.spec.batched:
            return  # rows of their own have one group
        rows = Rows(runner)
        for key, prompt in ((A, self.PROMPTS[0]), (B, self.PROMPTS[1])):
            rows.open(key, prompt)
            rows.prefill(key)
            rows.promote(key)
        rows.submit()
        rows.resize(2, 128, group=1)
        rows.open(C, self.PROMPTS[2], group=1)
        rows.prefill(C, 1)
        rows.transfer(A, 1, [C], [B])
        rows.submit()
        rows.prefill(C)
        rows.promote(C)
        rows.submit()
        rows.submit()
        rows.read_all()

        self._check(rows, oracle, {A: 4, B: 4, C: 2})

    def test_a_right_draft_is_kept_whole(self, runner: Runner, oracle: Oracle) -> None:
        """And the row goes on behind it, with and without another one."""
        if runner.max_draft_tokens == 0:
            return
        truth = oracle(self.PROMPTS[0], 8)
        rows = self._started(runner, A)
        rows.submit({A: tuple(truth[: min(3, runner.max_draft_tokens)])})
        kept = len(rows.sampled(A))
        rows.submit({A: (truth[kept],)})
        rows.submit()
        rows.submit()
        rows.read_all()

        assert kept == 1 + min(3, runner.max_draft_tokens)
        assert rows.sampled(A) == truth[: kept + 4]

    def test_a_wrong_draft_leaves_no_trace(self, runner: Runner, oracle: Oracle) -> None:
        """Nor does one that is wrong in its last place, nor what pads the rows beside it."""
        if runner.max_draft_tokens < 2:
            return
        truths = {key: oracle(self.PROMPTS[i], 8) for i, key in enumerate((A, B, C))}
        rows = self._started(runner, A, B, C)
        wrong = {key: truth[0] - 1 if truth[0] else 1 for key, truth in truths.items()}
        rows.submit({A: (wrong[A], wrong[A]), B: (truths[B][0], wrong[B])})
        for _ in range(4):
            rows.submit()
        rows.read_all()

        for key, truth in truths.items():
            found = rows.sampled(key)
            assert found == truth[: len(found)], f"row of {key}"
        assert len(rows.sampled(A)) == 5
        assert len(rows.sampled(C)) == 5

    def test_a_row_whose_code_raises_behind_a_draft_keeps_what_came_before(
        self, runner: Runner, oracle: Oracle
    ) -> None:
        """A grammar that allows what the model wants, until it fails."""
        if runner.max_draft_tokens < 2:
            return
        truth = oracle(self.PROMPTS[0], 4)
        broken = ScriptedConstraint(
            mask_error=ValueError("mine"), error_after=1, vocab_size=runner.spec.vocab_size
        )
        rows = Rows(runner)
        rows.open(A, self.PROMPTS[0], constraint=broken)
        rows.prefill(A)
        rows.promote(A)
        rows.submit({A: tuple(truth[:2])})

        assert rows.sampled(A) == truth[:1]
        assert "mine" in rows.results[-1].failures[A]
        assert broken.taken == []

    def test_end_tokens_are_not_sampled_before_min_tokens(
        self, runner: Runner, oracle: Oracle
    ) -> None:
        """And are afterwards."""
        wish = oracle(self.PROMPTS[0], 1)[0]
        rows = Rows(runner)
        rows.open(A, self.PROMPTS[0], min_tokens=1, end_tokens=(wish,))
        rows.open(B, self.PROMPTS[0], min_tokens=0, end_tokens=(wish,))
        for key in (A, B):
            rows.prefill(key)
            rows.promote(key)
        rows.submit()
        rows.read_all()

        assert rows.sampled(A) != [wish]
        assert rows.sampled(B) == [wish]

    def test_a_row_whose_own_code_raises_is_reported_and_disturbs_nobody(
        self, runner: Runner, oracle: Oracle
    ) -> None:
        """By its key, with what was raised."""

        def fail(tokens: Sequence[int], logits: Any) -> Any:
            raise KeyError("no such table")

        rows = Rows(runner)
        rows.open(A, self.PROMPTS[0], processors=(fail,))
        rows.open(B, self.PROMPTS[1])
        for key in (A, B):
            rows.prefill(key)
            rows.promote(key)
        rows.submit()
        rows.read_all()

        assert rows.results[0].failures == {A: "KeyError: 'no such table'"}
        assert rows.sampled(A) == []
        assert rows.sampled(B) == oracle(self.PROMPTS[1], 1)

    def test_processors_get_the_generated_tokens_only(self, runner: Runner, oracle: Oracle) -> None:
        """Exactly those before the one to be sampled."""
        seen: list[tuple[int, ...]] = []

        def watch(tokens: Sequence[int], logits: Any) -> Any:
            seen.append(tuple(tokens))
            return logits

        rows = Rows(runner)
        rows.open(A, self.PROMPTS[0], processors=(watch,))
        rows.prefill(A)
        rows.promote(A)
        for _ in range(3):
            rows.submit()
            rows.read_all()

        expected = oracle(self.PROMPTS[0], 3)
        assert rows.sampled(A) == expected
        assert seen == [tuple(expected[:n]) for n in range(3)]

    def test_a_row_that_was_stored_goes_on_in_another(self, runner: Runner, oracle: Oracle) -> None:
        """Stored after its prompt, and when it leaves; restored beside a row that decodes."""
        store = RecordingStore()
        store.attach(runner.fingerprint, state_layout(runner.spec))
        runner.use(store)
        rows = Rows(runner)
        rows.open(A, self.PROMPTS[0])
        rows.prefill(A)
        rows.save(A)
        rows.promote(A)
        for _ in range(4):
            rows.submit()
        rows.read_all()
        rows.save(A)
        rows.close(A, [])
        rows.open(B, self.PROMPTS[1])
        rows.prefill(B)
        rows.promote(B)
        rows.submit()
        rows.open(A, (*self.PROMPTS[0], *rows.sampled(A)))
        found = rows.restore(A, store)
        rows.prefill(A)
        rows.promote(A)
        for _ in range(3):
            rows.submit()
        rows.read_all()

        assert found == len(self.PROMPTS[0]) + 3
        assert rows.sampled(A) == oracle(self.PROMPTS[0], 7)[4:]
        assert rows.sampled(B) == oracle(self.PROMPTS[1], 4)
        assert [len(tokens) for tokens in store.inserted] == [len(self.PROMPTS[0]) - 1, found]

    def test_one_model_has_one_fingerprint(self, runner: Runner) -> None:
        """However often it is asked for."""
        first, second = runner.fingerprint, runner.fingerprint
        assert first
        assert first == second

    def test_results_name_their_plan_and_its_cost(self, runner: Runner) -> None:
        """A time for each chunk, in the plan's order."""
        rows = Rows(runner)
        for key, prompt in ((A, self.PROMPTS[0]), (B, self.PROMPTS[1])):
            rows.open(key, prompt)
            rows.prefill(key)
        rows.submit()
        rows.promote(A)
        rows.submit()
        rows.read_all()

        first, second = rows.results
        assert (first.number, second.number) == (1, 2)
        assert (len(first.prefill_seconds), len(second.prefill_seconds)) == (2, 0)
        assert first.sampled == {}
        assert list(second.sampled) == [A]
        assert all(result.seconds >= 0 for result in rows.results)

    def test_a_reset_runner_is_as_new(self, runner: Runner, oracle: Oracle) -> None:
        """Whatever was submitted and not read."""
        for _ in range(2):
            rows = Rows(runner)
            rows.open(A, self.PROMPTS[0])
            rows.prefill(A)
            rows.promote(A)
            rows.submit()
            rows.submit()
            runner.reset()
        rows = Rows(runner)
        rows.open(A, self.PROMPTS[1])
        rows.prefill(A)
        rows.promote(A)
        rows.submit()
        rows.read_all()

        assert rows.sampled(A) == oracle(self.PROMPTS[1], 1)

    def test_it_can_be_closed_twice(self, runner: Runner) -> None:
        """In the middle of a step too."""
        rows = Rows(runner)
        rows.open(A, self.PROMPTS[0])
        rows.prefill(A)
        rows.promote(A)
        rows.submit()

        runner.close()
        runner.close()

    def _started(self, runner: Runner, *keys: Key) -> "Rows":
        rows = Rows(runner)
        for key, prompt in zip(keys, self.PROMPTS, strict=False):
            rows.open(key, prompt)
            rows.prefill(key)
            rows.promote(key)
        return rows

    def _check(self, rows: "Rows", oracle: Oracle, counts: dict[Key, int]) -> None:
        for key, num_tokens in counts.items():
            assert rows.sampled(key) == oracle(rows.prompts[key], num_tokens), f"row of {key}"


class Rows:
    """Plays the scheduler's part by hand: collects instructions and submits them as plans."""

    def __init__(self, runner: Runner, *, num_rows: int = 3, capacity: int = 64) -> None:
        self.prompts: dict[Key, tuple[int, ...]] = {}
        self.results: list[StepResult] = []
        self._runner = runner
        self._groups: dict[int, tuple[list[Key], list[Key]]] = {}
        self._work: list[Instruction | Prefill] = []
        self._joins: list[RowSetup] = []
        self._leaves: list[Key] = []
        self._output: dict[Key, list[int]] = {}
        self._in_flight: dict[Key, int] = {}
        self._written: dict[Key, int] = {}
        self._pending: list[tuple[Plan, PendingStep]] = []
        self._number = 0
        self.resize(num_rows, capacity)

    def resize(self, num_rows: int, capacity: int, *, group: int = 0) -> None:
        """Give a group its buffers."""
        self._groups.setdefault(group, ([], []))
        self._work.append(Resize(group, num_rows, capacity))

    def open(
        self,
        key: Key,
        prompt: tuple[int, ...],
        *,
        group: int = 0,
        min_tokens: int = 0,
        end_tokens: tuple[int, ...] = (),
        processors: tuple[LogitsProcessor, ...] = (),
        constraint: TokenConstraint | None = None,
    ) -> None:
        """A greedy row joins, to be prefilled."""
        decoding, prefilling = self._groups[group]
        self._work.append(Open(group, len(decoding) + len(prefilling)))
        prefilling.append(key)
        self.prompts[key], self._output[key] = prompt, []
        self._in_flight[key] = self._written[key] = 0
        params = SamplingParams(temperature=0.0, top_p=1.0, min_tokens=min_tokens)
        self._joins.append(
            RowSetup(
                key=key,
                params=params,
                seed=1,
                end_tokens=end_tokens,
                prompt=prompt,
                output=self._output[key],
                processors=processors,
                constraint=constraint,
            )
        )

    def prefill(self, key: Key, num_tokens: int | None = None) -> None:
        """Write some of a prompt, or all that is left of it but its last token."""
        start, prompt = self._written[key], self.prompts[key]
        left = len(prompt) - 1 - start
        stop = start + (left if num_tokens is None else min(num_tokens, left))
        if stop > start:
            group, row = self._place(key)
            tokens = prompt[start:stop]
            self._work.append(Prefill(key=key, group=group, row=row, tokens=tokens, start=start))
            self._written[key] = stop

    def save(self, key: Key) -> None:
        """Store all that a row holds."""
        group, row = self._place(key)
        tokens = (*self.prompts[key], *self._output[key])[: self._written[key]]
        prefix = PrefixKey(tokens=tokens)
        self._work.append(Save(key=key, group=group, row=row, prefix=prefix, generation=0))

    def restore(self, key: Key, store: PrefixStore) -> int:
        """Fill an open row from a store, as far as possible but its last token; how far."""
        prompt = self.prompts[key]
        found = store.find(PrefixKey(tokens=prompt), len(prompt) - 1)
        assert found.ticket is not None, f"nothing is stored of {prompt}"
        group, row = self._place(key)
        self._work.append(
            Restore(key=key, group=group, row=row, ticket=found.ticket, num_tokens=found.num_tokens)
        )
        self._written[key] = found.num_tokens
        return found.num_tokens

    def promote(self, key: Key) -> None:
        """A prefilled row decodes from now on."""
        group, row = self._place(key)
        decoding, prefilling = self._groups[group]
        to, other = len(decoding), prefilling[0]
        self._work.append(Promote(group, row, to, self._written[key], self._written[other]))
        prefilling[row - to] = other
        del prefilling[0]
        decoding.append(key)

    def close(self, key: Key, movers: Sequence[Key]) -> None:
        """A row leaves; ``movers`` fill its hole, and the hole of the one before."""
        group, row = self._place(key)
        decoding, prefilling = self._groups[group]
        moves: list[Move] = []
        hole = row
        for mover in movers:
            source = self._place(mover)[1]
            moves.append(Move(source, hole, self._written[mover]))
            hole = source
        was_decoding = key in decoding
        order = [*decoding, *prefilling]
        for move, mover in zip(moves, movers, strict=True):
            order[move.target] = mover
        order.pop()
        self._groups[group] = _split(order, len(decoding) - was_decoding)
        self._work.append(Close(group, row, tuple(moves)))
        self._leaves.append(key)

    def transfer(self, key: Key, to_group: int, aside: list[Key], movers: list[Key]) -> None:
        """A decoding row goes to another group, where the row ``aside`` moves to the end."""
        group, row = self._place(key)
        decoding, prefilling = self._groups[to_group]
        to = len(decoding)
        end = to + len(prefilling)
        moves = tuple(Move(to, end, self._written[mover]) for mover in aside)
        self._work.append(Transfer(group, row, to_group, to, moves, self._written[key]))
        self.close(key, movers)
        self._leaves.remove(key)
        prefilling[:] = [*prefilling[len(aside) :], *aside]
        decoding.append(key)

    def submit(self, drafts: Mapping[Key, tuple[int, ...]] = NO_DRAFTS) -> None:
        """Submit what was collected, with a token for every decoding row; read the step before.

        A step with drafts is read at once, as the rows' lengths depend on it.
        """
        self._number += 1
        if drafts:
            self.read_all()
        decodes = tuple(self._decodes(drafts))
        plan = Plan(
            number=self._number,
            leaves=tuple(self._leaves),
            joins=tuple(self._joins),
            work=tuple(self._work),
            decodes=decodes,
        )
        for collected in (self._leaves, self._joins, self._work):
            collected.clear()
        self._pending.append((plan, self._runner.submit(plan)))
        for decode in decodes:
            self._written[decode.key] += 1
            self._in_flight[decode.key] += 1
        while len(self._pending) > (not drafts):
            self._read()

    def read_all(self) -> None:
        """Read every step that was submitted."""
        while self._pending:
            self._read()

    def sampled(self, key: Key) -> list[int]:
        """The tokens that a row got."""
        return list(self._output[key])

    def _read(self) -> None:
        plan, step = self._pending.pop(0)
        result = step.wait()
        self.results.append(result)
        for decode in plan.decodes:
            self._in_flight[decode.key] -= 1
            tokens = [sampled.token for sampled in result.sampled.get(decode.key, ())]
            self._output[decode.key] += tokens
            self._written[decode.key] += max(0, len(tokens) - 1)

    def _decodes(self, drafts: Mapping[Key, tuple[int, ...]]) -> Generator[Decode]:
        for group in sorted(self._groups):
            for row, key in enumerate(self._groups[group][0]):
                num_output = len(self._output[key]) + self._in_flight[key]
                known = [*self.prompts[key], *self._output[key]]
                yield Decode(
                    key=key,
                    group=group,
                    row=row,
                    start=self._written[key],
                    num_output=num_output,
                    token=None if self._in_flight[key] else known[-1],
                    draft=drafts.get(key, ()),
                )

    def _place(self, key: Key) -> tuple[int, int]:
        for group, (decoding, prefilling) in self._groups.items():
            order = [*decoding, *prefilling]
            if key in order:
                return group, order.index(key)
        raise KeyError(key)


def _split(order: list[Key], num_decoding: int) -> tuple[list[Key], list[Key]]:
    return order[:num_decoding], order[num_decoding:]


def allows(packed: bytes | None, token: int) -> bool:
    """Whether a token constraint's mask allows a token."""
    return packed is None or bool(packed[token // 8] >> token % 8 & 1)


class PrefixStoreContract:
    """Fixture: ``store``, a fresh :class:`PrefixStore` that nobody attached, with room for a few MB.

    It keeps what it is given bit by bit, and its blocks, if it has any, are of at most 64 tokens.
    """

    plain = StateLayout(
        tokens=(TokenArray(2, 4, "bfloat16"), TokenArray(1, 3, "float32")),
        has_state=False,
        format="plain",
    )
    hybrid = StateLayout(tokens=(TokenArray(2, 4, "float16"),), has_state=True, format="hybrid")

    def test_an_empty_store_finds_nothing_and_says_why(self, store: PrefixStore) -> None:
        """And a miss has no ticket."""
        store.attach("model", self.plain)
        prefix = settled(store, numbered(300), 299)
        assert prefix == Prefix(miss="empty")
        assert store.stats().misses == {"empty": 1}

    def test_what_was_stored_comes_back_bit_by_bit(self, store: PrefixStore) -> None:
        """For exactly the tokens that it covers."""
        store.attach("model", self.plain)
        self.keep(store, numbered(300), self.plain)
        prefix = settled(store, numbered(300), 299)
        assert 299 - 64 < prefix.num_tokens <= 299
        self.agree(store, prefix, numbered(300), self.plain)

    def test_asking_how_much_there_is_holds_and_counts_nothing(self, store: PrefixStore) -> None:
        """It tells what a look-up finds."""
        store.attach("model", self.plain)
        assert store.longest(numbered(300), 299) == 0
        self.keep(store, numbered(300), self.plain)
        before = store.stats()
        longest = store.longest(numbered(300), 299)
        assert store.stats() == before
        prefix = settled(store, numbered(300), 299)
        assert longest == prefix.num_tokens
        assert longest > 299 - 64
        self.agree(store, prefix, numbered(300), self.plain)

    def test_a_state_that_cannot_be_cut_is_found_where_it_was_read(
        self, store: PrefixStore
    ) -> None:
        """At any token count, and at no other."""
        store.attach("model", self.hybrid)
        for num_tokens in (1, 70, 203):
            self.keep(store, numbered(num_tokens), self.hybrid)
        for limit, expected in ((300, 203), (203, 203), (202, 70), (69, 1)):
            prefix = settled(store, numbered(301), limit)
            assert prefix.num_tokens == expected
            self.agree(store, prefix, numbered(301), self.hybrid)

    def test_a_chat_that_only_grows_never_goes_back(self, store: PrefixStore) -> None:
        """Whatever is between the turns."""
        store.attach("model", self.hybrid)
        for num_tokens in range(5, 400, 37):
            self.keep(store, numbered(num_tokens), self.hybrid)
            prefix = settled(store, numbered(500), 499)
            assert prefix.num_tokens == num_tokens
            self.agree(store, prefix, numbered(500), self.hybrid)

    def test_prompts_share_what_they_begin_with(self, store: PrefixStore) -> None:
        """And no more."""
        store.attach("model", self.plain)
        self.keep(store, numbered(256), self.plain)
        other = PrefixKey(tokens=(*range(130), *range(1_000, 1_170)))
        prefix = settled(store, other, 299)
        assert 130 - 64 < prefix.num_tokens <= 130
        self.agree(store, prefix, other, self.plain)
        self.keep(store, other, self.plain)
        for key in (numbered(256), other):
            prefix = settled(store, key, 256)
            assert prefix.num_tokens > 256 - 64
            self.agree(store, prefix, key, self.plain)

    def test_tenants_and_media_keep_apart(self, store: PrefixStore) -> None:
        """What a state depends on is in its key."""
        store.attach("model", self.plain)
        tokens = tuple(range(200))
        keys = [
            PrefixKey(tokens=tokens),
            PrefixKey(tokens=tokens, salt="tenant"),
            PrefixKey(tokens=tokens, media=(MediaSpan(0, 9, b"image"),)),
        ]
        for number, key in enumerate(keys):
            assert settled(store, key, 200).num_tokens == 0
            self.keep(store, key, self.plain)
            for other in keys[: number + 1]:
                self.agree(store, settled(store, other, 200), other, self.plain)

    def test_clear_forgets_everything(self, store: PrefixStore) -> None:
        """What was begun before it too."""
        store.attach("model", self.plain)
        self.keep(store, numbered(200), self.plain)
        generation = store.generation
        store.clear()
        assert store.generation > generation
        store.insert(numbered(200), KeyedRow(numbered(200), self.plain), generation)
        assert settled(store, numbered(200), 199) == Prefix(miss="cleared")
        self.keep(store, numbered(200), self.plain)
        assert settled(store, numbered(200), 199).num_tokens > 0

    def test_what_is_held_outlives_a_clear(self, store: PrefixStore) -> None:
        """It can be loaded, and not be found."""
        store.attach("model", self.hybrid)
        self.keep(store, numbered(100), self.hybrid)
        prefix = settled(store, numbered(101), 100)
        store.clear()
        self.keep(store, numbered(50), self.hybrid)
        assert settled(store, numbered(101), 100).num_tokens == 50
        self.agree(store, prefix, numbered(101), self.hybrid)

    def test_a_ready_prefix_stays_as_it_is(self, store: PrefixStore) -> None:
        """However often one asks."""
        store.attach("model", self.plain)
        self.keep(store, numbered(200), self.plain)
        prefix = settled(store, numbered(200), 199)
        assert prefix.ticket is not None
        assert store.poll(prefix.ticket) == store.poll(prefix.ticket) == prefix

    def test_what_is_loaded_belongs_to_the_caller(self, store: PrefixStore) -> None:
        """Two rows that load the same do not see each other."""
        store.attach("model", self.plain)
        self.keep(store, numbered(200), self.plain)
        prefix = settled(store, numbered(200), 199)
        assert prefix.ticket is not None
        array = store.load(prefix.ticket).tokens(0)
        if array.flags.writeable:
            array[...] = 0
        self.agree(store, prefix, numbered(200), self.plain)

    def test_a_row_that_cannot_be_read_is_not_stored(self, store: PrefixStore) -> None:
        """Nobody is told, and what was there is left as it was."""
        store.attach("model", self.hybrid)
        self.keep(store, numbered(100), self.hybrid)
        failing = KeyedRow(numbered(200), self.hybrid, RuntimeError("out of memory"))
        store.insert(numbered(200), failing, store.generation)
        prefix = settled(store, numbered(300), 299)
        assert prefix.num_tokens == 100
        self.agree(store, prefix, numbered(300), self.hybrid)

    def test_fetching_ahead_changes_nothing_that_is_found(self, store: PrefixStore) -> None:
        """Whether it is done or not."""
        store.attach("model", self.plain)
        tickets = [store.prefetch(numbered(200), 199)]
        self.keep(store, numbered(200), self.plain)
        tickets += [store.prefetch(numbered(200), 199), store.prefetch(numbered(200), 199)]
        prefix = settled(store, numbered(200), 199)
        for ticket in tickets:
            if ticket is not None:
                store.release(ticket)
        assert prefix.num_tokens > 199 - 64
        self.agree(store, prefix, numbered(200), self.plain)

    def test_lookups_are_counted_once(self, store: PrefixStore) -> None:
        """Each is a hit or a miss with a reason."""
        store.attach("model", self.plain)
        matched = 0
        for count in range(3):
            matched += settled(store, numbered(200 + count), 199).num_tokens
            self.keep(store, numbered(200 + count), self.plain)
        stats = store.stats()
        assert (stats.hits, sum(stats.misses.values())) == (2, 1)
        assert stats.matched_tokens == matched
        assert stats.used_bytes <= stats.capacity_bytes

    def test_closing_twice_is_closing_once(self, store: PrefixStore) -> None:
        """Even with something stored."""
        store.attach("model", self.plain)
        self.keep(store, numbered(200), self.plain)
        store.close()
        store.close()

    def keep(self, store: PrefixStore, key: PrefixKey, layout: StateLayout) -> None:
        """Store the state of ``key``."""
        store.insert(key, KeyedRow(key, layout), store.generation)

    def agree(
        self, store: PrefixStore, prefix: Prefix, key: PrefixKey, layout: StateLayout
    ) -> None:
        """What a prefix holds is what computing it again gives; it is released then."""
        assert prefix.ticket is not None
        row: StoredRow = store.load(prefix.ticket)
        cut = PrefixKey(tokens=key.tokens[: prefix.num_tokens], salt=key.salt, media=key.media)
        assert row.num_tokens == len(cut.tokens) == prefix.num_tokens
        media = tuple([span for span in key.media if span.end <= row.num_tokens])
        fresh = KeyedRow(PrefixKey(tokens=cut.tokens, salt=key.salt, media=media), layout)
        loaded = [row.tokens(index) for index in range(len(layout.tokens))]
        expected = fresh.tokens(0, row.num_tokens)
        for stored, computed in zip(
            [*loaded, *row.state()], [*expected, *fresh.state()], strict=True
        ):
            assert stored.dtype == computed.dtype
            assert stored.shape == computed.shape
            assert stored.tobytes() == computed.tobytes()
        store.release(prefix.ticket)


def numbered(num_tokens: int) -> PrefixKey:
    """A key with the tokens from 0 up to ``num_tokens``, which is not one of them."""
    return PrefixKey(tokens=tuple(range(num_tokens)))


def settled(store: PrefixStore, key: PrefixKey, limit: int) -> Prefix:
    """What is found, waited for where it is on its way."""
    prefix = store.find(key, limit)
    while not prefix.ready:
        assert prefix.ticket is not None
        store.wait(1.0)
        prefix = store.poll(prefix.ticket) or prefix
    return prefix
