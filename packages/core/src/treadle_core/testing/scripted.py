"""A runner without a model: a script says the next token, and every plan is checked.

Rows really hold tokens, moved only by the plan's instructions. Before a row samples, its contents
must be exactly the answer's prompt and output so far, so a wrong row, a wrong start or a lost move
fails at once, with a sentence.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from treadle_core.errors import describe
from treadle_core.events import TokenLogprob
from treadle_core.layers import FullAttention, ModelSpec, layer_bytes, state_layout
from treadle_core.plan import (
    Close,
    Decode,
    Encode,
    Key,
    Open,
    Plan,
    Prefill,
    Promote,
    Resize,
    Restore,
    RowSetup,
    Sampled,
    Save,
    StepResult,
    Transfer,
    Work,
)
from treadle_core.ports import PrefixStore
from treadle_core.testing.fakes import VOCAB_SIZE, ManualClock, ScriptedEncoder
from treadle_core.testing.prefixes import TokenRow, tokens_of
from treadle_core.testing.rows import SimulatedRows

Script = Callable[[Sequence[int]], int]
"""The next token after these: a function of nothing else."""

NEGATIVE_INFINITY = -float("inf")
PADDING = -1

SMALL_SPEC = ModelSpec(
    layers=(FullAttention(heads=1, key_dim=1, value_dim=1, dtype="float32"),),
    vocab_size=VOCAB_SIZE,
    context_length=32_768,
    model_type="scripted",
)
"""One layer of eight bytes per token."""


def hashed(vocab_size: int = 256) -> Script:
    """A script whose token depends on every token before it and on their order."""

    def script(tokens: Sequence[int]) -> int:
        digest = 7
        for token in tokens:
            digest = (digest * 31 + token + 1) % 1_000_003
        return digest % vocab_size

    return script


def answers(known: Mapping[tuple[int, ...], Sequence[int]], otherwise: int = 0) -> Script:
    """A script that continues known prompts; after an answer, and elsewhere, ``otherwise``."""

    def script(tokens: Sequence[int]) -> int:
        for prompt, answer in known.items():
            done = len(tokens) - len(prompt)
            if 0 <= done < len(answer) and tuple(tokens) == (*prompt, *answer[:done]):
                return answer[done]
        return otherwise

    return script


def expected_tokens(script: Script, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a row of ``prompt`` gets from ``script``, alone and undisturbed."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(script(tokens))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Fault:
    """When a step raises.

    Attributes:
        where: While it is submitted, or when it is waited for.
        marked: Only steps with a row that holds this token; None means any step.
        skip: Such steps that succeed before the first one that fails.
        times: Such steps that fail; None means all from then on.
        message: What the exception says.
    """

    where: Literal["submit", "wait"] = "wait"
    marked: int | None = None
    skip: int = 0
    times: int | None = 1
    message: str = "the device is on fire"


class ScriptedFailure(RuntimeError):
    """What a :class:`Fault` raises."""


class WrongPlan(BaseException):
    """A plan, or the order of calls, is wrong.

    No Exception: an engine must not take it for a failing model and go on.
    """


@contextmanager
def strictly() -> Generator[None]:
    """Turn failed assertions into :class:`WrongPlan`.

    Raises:
        WrongPlan: An assertion failed.
    """
    try:
        yield
    except AssertionError as error:
        raise WrongPlan(str(error)) from error


@dataclass
class Answering:
    """One joined answer: what it brought, and the tokens that its row must hold in the end.

    The row holds the first ``written`` of them, and state that cannot be cut covers those.
    """

    setup: RowSetup
    tokens: list[int]
    written: int = 0

    @property
    def num_output(self) -> int:
        """Sampled tokens, unread ones included."""
        return len(self.tokens) - len(self.setup.prompt)

    def check_output(self) -> None:
        """Assert that what the host read is what was sampled, in order."""
        read = list(self.setup.output)
        sampled = self.tokens[len(self.setup.prompt) :]
        assert read == sampled[: len(read)], f"{self.setup.key}: read {read}, sampled {sampled}"


class ScriptedStep:
    """A submitted step; its tokens are known, but only told when it is waited for."""

    def __init__(self, runner: "ScriptedRunner", result: StepResult, fault: Fault | None) -> None:
        self._runner = runner
        self._result = result
        self._fault = fault

    def wait(self) -> StepResult:
        """Block until its tokens are there.

        Raises:
            ScriptedFailure: By a fault.
        """
        self._runner.read(self, self._result.seconds)
        if self._fault is not None:
            self._runner.lose()
            raise ScriptedFailure(self._fault.message)
        return self._result


class ScriptedRunner:
    """A :class:`treadle_core.ports.Runner` in plain Python.

    Its methods raise :class:`WrongPlan` when they are misused.

    Args:
        script: The next token of a row.
        spec: What the model is said to be.
        faults: Steps that raise.
        row_fails: Why a row with these tokens fails by itself, or None.
        clock: Advanced by the cost of each step when it is read.
        prefill_cost: Seconds that a chunk of so many prompt tokens takes.
        decode_cost: Seconds that so many decoding rows take in a step.
        budget_bytes: Most bytes that the buffers may take at any moment.
        max_draft_tokens: Longest draft that it verifies.
        encoder: Encodes media. No chunk may show what it has not encoded.

    Attributes:
        plans: Every plan that was submitted.
        num_resets: How often it was reset.
        peak_bytes: Most bytes that the buffers took.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        spec: ModelSpec = SMALL_SPEC,
        faults: Sequence[Fault] = (),
        row_fails: Callable[[Key, Sequence[int]], str | None] = lambda key, tokens: None,
        clock: ManualClock | None = None,
        prefill_cost: Callable[[int], float] = lambda num_tokens: 0.0,
        decode_cost: Callable[[int], float] = lambda num_rows: 0.0,
        budget_bytes: int | None = None,
        max_draft_tokens: int = 0,
        encoder: ScriptedEncoder | None = None,
    ) -> None:
        self._encoder = encoder
        self.plans: list[Plan] = []
        self.num_resets = 0
        self.peak_bytes = 0
        self._script = script or hashed()
        self._spec = spec
        self._faults = [[fault, fault.skip, fault.times] for fault in faults]
        self._row_fails = row_fails
        self._clock = clock
        self._prefill_cost = prefill_cost
        self._decode_cost = decode_cost
        self._budget_bytes = budget_bytes
        self._max_draft_tokens = max_draft_tokens
        self._groups: dict[int, SimulatedRows] = {}
        self._answering: dict[Key, Answering] = {}
        self._leaving: dict[Key, Answering] = {}
        self._unread: list[ScriptedStep] = []
        self._last: frozenset[Key] = frozenset()
        self._drafted = False
        self._broken = False
        self._closed = False
        self._store: PrefixStore | None = None
        self._layout = state_layout(spec)

    @property
    def spec(self) -> ModelSpec:
        """What the model is said to be."""
        return self._spec

    @property
    def fingerprint(self) -> str:
        """The same for all scripts."""
        return "scripted"

    @property
    def max_draft_tokens(self) -> int:
        """Longest draft that it verifies."""
        return self._max_draft_tokens

    @property
    def encoder(self) -> ScriptedEncoder | None:
        """What it was made with."""
        return self._encoder

    def use(self, store: PrefixStore) -> None:
        """Restore from, and save to, this store."""
        with strictly():
            assert self._store is None, "a second store"
        self._store = store

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return sum(group.num_used for group in self._groups.values())

    @property
    def num_live(self) -> int:
        """Everything it holds for anybody: rows, buffers, sampling state, unread steps."""
        return self.num_rows + len(self._groups) + len(self._answering) + len(self._unread)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all buffers; 0 where rows have their own."""
        if not self._spec.batched:
            return 0
        sizes = [(len(group.cells), group.capacity) for group in self._groups.values()]
        slack = self._max_draft_tokens
        return sum(
            layer_bytes(layer, *size, slack) for layer in self._spec.layers for size in sizes
        )

    def submit(self, plan: Plan) -> ScriptedStep:
        """Carry a plan out; its tokens are told when the step is waited for.

        Raises:
            ScriptedFailure: By a fault.
        """
        with strictly():
            return self._submit(plan)

    def reset(self) -> None:
        """Drop every row, buffer and pending step, as after construction."""
        with strictly():
            assert not self._closed, "reset after close"
        self.num_resets += 1
        self._drop()

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._drop()
        self._closed = True

    def read(self, step: ScriptedStep, cost: float) -> None:
        """``step`` is being waited for."""
        with strictly():
            assert step in self._unread, "read twice, or lost with a reset or a step before it"
            assert step is self._unread[0], "steps are read in order"
        self._unread.pop(0)
        if self._clock is not None:
            self._clock.advance(cost)

    def lose(self) -> None:
        """A step failed: nothing works until a reset, and the steps after it have no result."""
        self._broken = True
        self._unread.clear()

    def contents(self, key: Key) -> list[int]:
        """Prompt and output of a joined answer, as its row must hold them in the end."""
        return list(self._answering[key].tokens)

    def _submit(self, plan: Plan) -> ScriptedStep:
        assert not self._closed, "submitted to a closed runner"
        assert not self._broken, "submitted after a failure without a reset"
        assert len(self._unread) < 2, "look ahead one step only: two steps are unread"
        if plan.has_work and self._unread:
            assert not self._drafted, "a step with drafts has to be read before the next one"
            assert not plan.has_drafts, "a draft needs all tokens before it"
        self.plans.append(plan)
        self._join(plan)
        fault = self._fault_of(plan)
        result = self._run(plan)
        if fault is not None and fault.where == "submit":
            self._broken = True
            raise ScriptedFailure(fault.message)
        step = ScriptedStep(self, result, fault)
        if plan.has_work:
            self._unread.append(step)
            self._drafted = plan.has_drafts
        return step

    def _drop(self) -> None:
        self._groups.clear()
        self._answering.clear()
        self._leaving.clear()
        self._unread.clear()
        self._last = frozenset()
        self._drafted = False
        self._broken = False
        if self._encoder is not None:
            self._encoder.reset()

    def _release(self, prompt: Any) -> None:
        others = (other.setup.attachment for other in self._answering.values())
        if self._encoder is not None and prompt and all(prompt is not other for other in others):
            self._encoder.release(prompt)

    def _join(self, plan: Plan) -> None:
        self._leaving.clear()
        for key in plan.leaves:
            assert key in self._answering, f"{key} leaves and was not here"
            self._leaving[key] = self._answering.pop(key)
            self._release(self._leaving[key].setup.attachment)
        for setup in plan.joins:
            assert setup.key not in self._answering, f"{setup.key} joins twice"
            tokens = [*setup.prompt, *setup.output]
            self._answering[setup.key] = Answering(setup, tokens)

    def _fault_of(self, plan: Plan) -> Fault | None:
        if not plan.has_work:
            return None
        for entry in self._faults:
            fault: Any = entry[0]
            if self._concerns(fault, plan) and self._is_due(entry):
                return fault
        return None

    def _concerns(self, fault: Fault, plan: Plan) -> bool:
        if fault.marked is None:
            return True
        return any(fault.marked in self._answering[key].tokens for key in plan.keys)

    def _is_due(self, entry: list[Any]) -> bool:
        _, skip, times = entry
        if skip > 0:
            entry[1] -= 1
            return False
        if times is not None:
            entry[2] -= 1
        return times is None or times > 0

    def _do(self, item: Work) -> None:
        match item:
            case Prefill():
                self._prefill(item)
            case Encode():
                self._encode(item)
            case Resize(group, 0, _):
                rows = self._groups.pop(group, None)
                assert rows is None or rows.num_used == 0, f"dropped in use: {item}"
            case Resize(group):
                self._group(group).resize(item)
            case Open(group):
                self._group(group).open(item)
            case Promote(group):
                self._groups[group].promote(item)
            case Close(group):
                self._groups[group].close(item)
            case Transfer(group, row, to_group):
                contents = self._groups[group].take(row, item.length)
                self._groups[to_group].insert(item, contents)
            case Restore():
                self._restore(item)
            case Save():
                self._save(item)
        self._count_bytes()

    def _group(self, number: int) -> SimulatedRows:
        return self._groups.setdefault(number, SimulatedRows(shared=self._spec.batched))

    def _count_bytes(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.kv_bytes)
        if self._budget_bytes is not None:
            assert self.kv_bytes <= self._budget_bytes, f"{self.kv_bytes} bytes of KV"

    def _encode(self, encode: Encode) -> None:
        assert self._encoder is not None, f"no encoder: {encode}"
        prompt = self._answering[encode.key].setup.attachment
        ready = self._encoder.ready(prompt, encode.start, encode.start + 1)
        assert ready == encode.start, f"nothing to encode: {encode}"
        self._encoder.encode(prompt, encode.start, encode.seconds)

    def _prefill(self, prefill: Prefill) -> None:
        group = self._groups[prefill.group]
        assert prefill.row >= group.num_decoding, f"a decoding row is prefilled: {prefill}"
        assert prefill.tokens, f"an empty chunk: {prefill}"
        self._check_row(prefill.key, prefill.group, prefill.row, prefill.start)
        stop = prefill.start + len(prefill.tokens)
        expected = self._answering[prefill.key].tokens[prefill.start : stop]
        assert list(prefill.tokens) == expected, f"{prefill.key}: wrong tokens in {prefill}"
        if self._encoder is not None:
            prompt = self._answering[prefill.key].setup.attachment
            ready = self._encoder.ready(prompt, prefill.start, stop)
            assert ready == stop, f"{prefill.key}: {ready} is not encoded"
        group.write(prefill.row, prefill.start, prefill.tokens)
        self._answering[prefill.key].written = stop

    def _restore(self, restore: Restore) -> None:
        assert self._store is not None, f"no store: {restore}"
        group = self._groups[restore.group]
        assert restore.row >= group.num_decoding, f"a decoding row is restored: {restore}"
        stored = self._store.load(restore.ticket)
        assert stored.num_tokens == restore.num_tokens, f"{stored.num_tokens} tokens: {restore}"
        arrays = [stored.tokens(index) for index in range(len(self._layout.tokens))]
        tokens = tokens_of(restore.num_tokens, arrays, stored.state())
        expected = self._answering[restore.key].tokens[: restore.num_tokens]
        assert len(self._answering[restore.key].tokens) > restore.num_tokens, "nothing is left"
        assert tokens == expected, f"{restore} brings {tokens}, not {expected}"
        group.write(restore.row, 0, tuple(tokens))
        self._answering[restore.key].written = restore.num_tokens

    def _save(self, save: Save) -> None:
        assert self._store is not None, f"no store: {save}"
        tokens = list(save.prefix.tokens)
        # One that leaves, or one that joined under the same key.
        known = [self._leaving.get(save.key), self._answering.get(save.key)]
        rows = [each for each in known if each is not None]
        expected = [each.tokens[: len(tokens)] for each in rows]
        assert tokens in expected, f"wrong tokens: {save}, not {expected}"
        if self._layout.has_state:
            written = [each.written for each in rows]
            assert len(tokens) in written, f"{save} of a row that is {written} tokens far"
        found = self._groups[save.group].read(save.row, len(tokens))
        assert found == tokens, f"{save} from a row that holds {found}"
        self._store.insert(save.prefix, TokenRow(self._layout, tokens), save.generation)

    def _run(self, plan: Plan) -> StepResult:
        for item in plan.work:
            self._do(item)
        sampled, failures = self._decode(plan)
        chunks = tuple(self._prefill_cost(len(prefill.tokens)) for prefill in plan.prefills)
        encode = self._encoder.take_seconds() if self._encoder is not None else 0.0
        decode = self._decode_cost(len(plan.decodes)) if plan.decodes else 0.0
        return StepResult(
            number=plan.number,
            sampled=sampled,
            failures=failures,
            seconds=sum(chunks) + encode + decode,
            prefill_seconds=chunks,
            encode_seconds=encode,
        )

    def _decode(self, plan: Plan) -> tuple[dict[Key, tuple[Sampled, ...]], dict[Key, str]]:
        if plan.has_work:
            self._check_order(plan.decodes)
        sampled: dict[Key, tuple[Sampled, ...]] = {}
        failures: dict[Key, str] = {}
        widths = _widths(plan.decodes)
        for decode in plan.decodes:
            answering = self._answering[decode.key]
            self._feed(decode, answering, widths[decode.group])
            tokens, why = self._choose_along(answering, decode.draft, lossy=plan.lossy)
            answering.written = len(answering.tokens) - 1
            if tokens:
                sampled[decode.key] = tuple(_report(answering.setup, token) for token in tokens)
            if why is not None:
                failures[decode.key] = why
        if plan.decodes:
            self._last = frozenset(decode.key for decode in plan.decodes)
        return sampled, failures

    def _choose_along(
        self, answering: Answering, draft: tuple[int, ...], *, lossy: bool
    ) -> tuple[list[int], str | None]:
        """The tokens of a row as far as they equal its draft, and one more, or why there is none."""
        setup, tokens = answering.setup, list[int]()
        assert not (draft and setup.processors), f"{setup.key}: a draft with processors"
        advanced = 0
        try:
            for drafted in (*draft, None):
                token, why = self._choose(answering, advanced)
                if lossy and drafted is not None:
                    token = drafted
                answering.tokens.append(token)
                if why is not None:
                    return tokens, why
                tokens.append(token)
                if token != drafted or not _advance(setup, token):
                    return tokens, None
                advanced += 1
        finally:
            if setup.constraint is not None and advanced:
                setup.constraint.rollback(advanced)
        return tokens, None

    def _check_order(self, decodes: Sequence[Decode]) -> None:
        expected = [
            (number, row)
            for number in sorted(self._groups)
            for row in range(self._groups[number].num_decoding)
        ]
        found = [(decode.group, decode.row) for decode in decodes]
        assert found == expected, f"decoding rows are {expected}, the plan decodes {found}"

    def _feed(self, decode: Decode, answering: Answering, width: int) -> None:
        """Check what is fed to a row, and write it, padded to the width of its group's forward."""
        answering.check_output()
        tokens, key = answering.tokens, decode.key
        assert not decode.more, f"an engine feeds one token, and a draft: {decode}"
        assert decode.start == len(tokens) - 1, f"{decode} feeds token {len(tokens) - 1}"
        assert decode.num_output == answering.num_output, f"{decode}: {answering.num_output}"
        if decode.token is None:
            assert key in self._last, f"{key}: the step before did not sample its token"
        else:
            assert decode.token == tokens[-1], f"{decode} feeds {tokens[-1]}"
        assert len(decode.draft) <= self._max_draft_tokens, f"a draft that is too long: {decode}"
        assert decode.token is not None or not decode.draft, f"a draft behind no token: {decode}"
        self._check_row(key, decode.group, decode.row, decode.start)
        padding = (PADDING,) * (width - 1 - len(decode.draft))
        fed = (tokens[-1], *decode.draft, *padding)
        self._groups[decode.group].write(decode.row, decode.start, fed)

    def _check_row(self, key: Key, group: int, row: int, length: int) -> None:
        found = self._groups[group].read(row, length)
        expected = self._answering[key].tokens[:length]
        assert found == expected, f"{key} in row {row} of group {group}: {found}, not {expected}"

    def _choose(self, answering: Answering, advanced: int) -> tuple[int, str | None]:
        """The next token, and why the row fails; so many tokens of a draft are taken already."""
        setup, token = answering.setup, self._script(answering.tokens)
        early = answering.num_output < setup.params.min_tokens and token in setup.end_tokens
        hosted = bool(setup.processors) or setup.constraint is not None
        if hosted:
            read = len(setup.output) + advanced
            assert read == answering.num_output, f"{setup.key}: asked too early"
        if early or hosted:
            try:
                token = self._ask_host(answering, token)
            except Exception as error:  # noqa: BLE001 — a request's own code may raise anything
                return token, describe(error)
        return token, self._row_fails(setup.key, answering.tokens)

    def _ask_host(self, answering: Answering, wish: int) -> int:
        """The best token under masks and processors, given the script's wish."""
        setup = answering.setup
        logits = [0.0] * self._spec.vocab_size
        logits[wish] = 1.0
        if answering.num_output < setup.params.min_tokens:
            for token in setup.end_tokens:
                logits[token] = NEGATIVE_INFINITY
        packed = setup.constraint.mask() if setup.constraint is not None else None
        if packed is not None:
            logits = _masked(logits, packed)
        for processor in setup.processors:
            logits = list(processor(tuple(setup.output), logits))
        return max(range(len(logits)), key=lambda token: (logits[token], -token))


def _widths(decodes: Sequence[Decode]) -> dict[int, int]:
    """Tokens per row of each group's forward."""
    widths: dict[int, int] = {}
    for decode in decodes:
        widths[decode.group] = max(widths.get(decode.group, 1), 1 + len(decode.draft))
    return widths


def _advance(setup: RowSetup, token: int) -> bool:
    """Whether a draft may go on behind a token that the row chose."""
    if setup.constraint is None:
        return True
    try:
        complete = setup.constraint.advance(token)
    except Exception:  # noqa: BLE001 — it will raise again when the answer takes the token
        return False
    if complete:
        setup.constraint.rollback(1)
    return not complete


def _masked(logits: list[float], packed: bytes) -> list[float]:
    allowed = [bool(packed[token // 8] >> token % 8 & 1) for token in range(len(logits))]
    if not any(allowed):
        raise ValueError("the grammar allows no token")
    return [
        value if keep else NEGATIVE_INFINITY for value, keep in zip(logits, allowed, strict=True)
    ]


def _report(setup: RowSetup, token: int) -> Sampled:
    """A token with certain log-probabilities, for rows that ask."""
    if not setup.params.logprobs:
        return Sampled(token)
    num_others = max(0, setup.params.top_logprobs - 1)
    others = [other for other in range(num_others + 1) if other != token][:num_others]
    top = [TokenLogprob(token, 0.0), *(TokenLogprob(other, -9.0) for other in others)]
    return Sampled(token, 0.0, tuple(top[: setup.params.top_logprobs]))
