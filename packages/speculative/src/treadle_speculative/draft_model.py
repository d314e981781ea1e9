"""A small model guesses what the large one will say.

Each token is drawn with the row's own parameters and with the noise of (seed, position), which the
large model chooses the token of that position with: where they think alike they choose alike, and
the answer stays that of plain decoding, token for token
(:mod:`treadle_core.mlx_runtime.acceptance`).

The small model has slots of its own behind a runner like the engine's; this module says what is in
which row. By position, a row's slot holds::

    [0, written) its tokens · [written, filled) drafted, perhaps in vain · anything

What turns out not to be part of the answer is overwritten by what is, so nothing is taken back.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from treadle_core.drafting import PENDING, DraftRoom, Proposal, Verified
from treadle_core.errors import Unsupported
from treadle_core.kv_layout import KvLayout
from treadle_core.layers import (
    ModelSpec,
    Window,
    flatten,
    is_recurrent,
    layer_bytes,
    why_no_drafts,
)
from treadle_core.pacing import AdaptiveChunk
from treadle_core.plan import Decode, Instruction, Key, Plan, Prefill, RowSetup, StepResult
from treadle_core.ports import ChunkPolicy, PendingStep, Runner
from treadle_core.request import check_int

HEADROOM = 64
MOST_ROWS = 65_536
MOST_AT_ONCE = 32
TYPICAL_LENGTH = 4_096


class Vocabulary(Protocol):
    """What tokenizers are compared by."""

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Every token and its id."""
        ...

    @property
    def special_tokens(self) -> frozenset[int]:
        """Ids without a text of their own."""
        ...


class DraftModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a draft model.

    Attributes:
        prefill_tokens: Most tokens of prompts that one proposal computes; within that, as many as
            the streams can wait for.
        kv_memory_bytes: Most bytes of its live KV; None takes a share of the engine's, so that
            both models have room for as many tokens.
    """

    prefill_tokens: int = 2_048
    kv_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        check_int("prefill_tokens", self.prefill_tokens, 1)
        if self.kv_memory_bytes is not None:
            check_int("kv_memory_bytes", self.kv_memory_bytes, 1)


class DraftRow:
    """A row as the small model has it.

    Args:
        setup: What it draws by, and its tokens.

    Attributes:
        setup: See above.
        written: Tokens of prompt and answer that are in its slot.
        ahead: What is in its slot behind them.
        barred: Whether it gets no drafts any more.
    """

    def __init__(self, setup: RowSetup) -> None:
        self.setup = setup
        self.written = 0
        self.ahead: deque[int] = deque()
        self.barred = False

    @property
    def total(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.setup.prompt) + len(self.setup.output)

    @property
    def lag(self) -> int:
        """Those that its slot lacks: at least one, the last."""
        return self.total - self.written

    @property
    def filled(self) -> int:
        """Tokens in its slot that are of use, or may be."""
        return self.written + len(self.ahead)

    def settle(self) -> None:
        """Find out how much of what was drafted is part of the answer by now.

        Where nothing new is, the last token is fed once more: what follows it was drawn from there.
        """
        if self.lag < 1:
            self.write(self.lag - 1)
        while self.ahead and self.lag > 1:
            if self.ahead.popleft() != self.tokens(self.written, self.written + 1)[0]:
                self.ahead.clear()
                return
            self.written += 1

    def write(self, num: int, drafted: Sequence[int] = ()) -> None:
        """So many more of its tokens are in its slot, and a draft behind them."""
        self.written += num
        self.ahead = deque(drafted)

    def lose(self) -> None:
        """It has no slot any more."""
        self.written = 0
        self.ahead.clear()

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens ``[start, stop)`` of prompt and answer."""
        length = len(self.setup.prompt)
        head = tuple(self.setup.prompt[start:stop]) if start < length else ()
        return head + tuple(self.setup.output[max(0, start - length) : max(0, stop - length)])


class Changes:
    """What the next plan does before it draws."""

    def __init__(self) -> None:
        self.leaves: list[Key] = []
        self.joins: dict[Key, RowSetup] = {}
        self.work: list[Instruction | Prefill] = []


class DraftModelDrafter:
    """Proposes what a small model says, for all rows together.

    A prompt is computed in pieces, one for each proposal, so that no stream waits for a long one;
    until then its row is pending. A row that finds no room in the small model's memory, that
    outgrows its context, or that says what it does not know, gets no drafts from then on.

    Args:
        runner: The small model, made to sample from as many logits as the large one, and used by
            nobody else. Drafts are about as long as it can take tokens back.
        tokenizer: Its tokenizer.
        target: The large model's.
        config: Options.
        num_known: Token ids that it can be fed: those below; None takes as many as it has logits.
        chunk: How many tokens of prompts a proposal computes.

    Raises:
        Unsupported: The tokenizers differ, or the small model cannot take tokens back.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Vocabulary,
        target: Vocabulary,
        config: DraftModelConfig | None = None,
        *,
        num_known: int | None = None,
        chunk: ChunkPolicy | None = None,
    ) -> None:
        spec = runner.spec
        if not runner.max_draft_tokens:
            why = why_no_drafts(spec) or "it was loaded to verify no drafts"
            raise Unsupported(f"draft_model: {spec.model_type} cannot draft: {why}")
        if is_recurrent(spec):
            # Its slots go back by their length alone.
            raise Unsupported(
                f"draft_model: {spec.model_type} cannot draft: it has recurrent layers"
            )
        check_same_tokenizer(tokenizer, target)
        self._runner = runner
        self._config = config or DraftModelConfig()
        self._num_known = spec.vocab_size if num_known is None else num_known
        self._chunk = chunk or AdaptiveChunk()
        self._width = 1 + runner.max_draft_tokens
        self._deepest = self._width if _has_windows(spec) else MOST_AT_ONCE
        self._layout = self._new_layout(self._config.kv_memory_bytes)
        self._rows: dict[Key, DraftRow] = {}
        self._number = 0

    @property
    def name(self) -> str:
        """What it is called in counters and status."""
        return "draft-model"

    @property
    def held_bytes(self) -> int:
        """Its live KV."""
        return self._layout.allocated_bytes

    def take_share(self, budget_bytes: int, spec: ModelSpec) -> int:
        """Take as much of the engine's KV budget as gives both models room for as many tokens.

        Raises:
            Unsupported: The configured bytes leave nothing for the engine.
        """
        mine = self._config.kv_memory_bytes
        if mine is None:
            own, other = _typical_bytes(self._runner.spec), _typical_bytes(spec)
            mine = budget_bytes * own // (own + other)
            self._layout = self._new_layout(mine)
        if mine >= budget_bytes:
            raise Unsupported(
                f"kv_memory_bytes of the draft model: got {mine}, expected less than the "
                f"{budget_bytes} bytes that there are for live KV"
            )
        return budget_bytes - mine

    def join(self, setup: RowSetup) -> None:
        """A row begins to run; its prompt is computed when it first asks."""
        self.leave(setup.key)
        params = replace(setup.params, logprobs=False, top_logprobs=0)
        # Grammars and processors are where the answer is, not where the draft is: the verification
        # follows it with them.
        mine = replace(setup, params=params, constraint=None, processors=(), attachment=None)
        self._rows[setup.key] = DraftRow(mine)

    def leave(self, key: Key) -> None:
        """Forget a row and free its slot."""
        if self._layout.holds(key):
            changes = Changes()
            self._release(key, changes)
            self._submit(changes)
        self._rows.pop(key, None)

    def propose(self, rooms: Sequence[DraftRoom]) -> list[Proposal]:
        """Drafts for the rows whose prompts are computed, after a piece of those that are not."""
        for row in self._rows.values():
            row.settle()
        asking = {room.key: min(room.most, self._deepest) for room in rooms if room.most}
        changes = Changes()
        self._bar(asking)
        self._admit(asking, changes)
        self._make_room(changes)
        placed = [key for key in asking if self._layout.holds(key)]
        self._catch_up(placed, changes)
        ready = {key: asking[key] for key in placed if self._is_ready(self._rows[key])}
        drafts = self._draw(ready, changes)
        behind = set(placed) - set(ready)
        return [
            PENDING if room.key in behind else Proposal(drafts.get(room.key, ())) for room in rooms
        ]

    def observe(self, verified: Sequence[Verified]) -> None:
        """Nothing: what was accepted is in the rows' views."""

    def reset(self) -> None:
        """Forget every row."""
        self._rows.clear()
        self._layout.reset()
        self._runner.reset()

    def _new_layout(self, budget_bytes: int | None) -> KvLayout:
        spec = self._runner.spec
        return KvLayout(
            spec.layers,
            budget_bytes=budget_bytes,
            max_rows=MOST_ROWS,
            context_length=spec.context_length,
            slack=self._runner.max_draft_tokens,
        )

    def _columns(self, row: DraftRow) -> int:
        """Tokens that its slot must have room for: the deepest draft, in a forward of any width."""
        return row.total + max(self._deepest, self._width)

    def _filled(self, key: Key) -> int:
        return self._rows[key].filled

    def _bar(self, keys: Mapping[Key, int]) -> None:
        """Leave out rows that have become too long, or said what the small model does not know.

        Those that have a slot are fed too, whether they ask or not.
        """
        longest = self._runner.spec.context_length
        for key, row in self._rows.items():
            if key not in keys and not self._layout.holds(key):
                continue
            fresh = row.tokens(row.written, row.total)
            if self._columns(row) > longest or any(t >= self._num_known for t in fresh):
                row.barred = True

    def _admit(self, keys: Mapping[Key, int], changes: Changes) -> None:
        """Give new rows a slot, as far as there is room."""
        for key in keys:
            row = self._rows[key]
            if row.barred or self._layout.holds(key):
                continue
            opened = self._layout.admit(key, self._columns(row), HEADROOM)
            if opened is not None:
                changes.work += [*opened, self._layout.promote(key, self._filled)]
                changes.joins[key] = row.setup

    def _make_room(self, changes: Changes) -> None:
        """Columns for all that rows are fed. One that finds none loses its slot for good.

        Every row that has a slot is fed, also one that did not ask: they share a forward.
        """
        for key, row in self._rows.items():
            if not self._layout.holds(key):
                continue
            grown = None
            if not row.barred:
                grown = self._layout.extend(key, self._columns(row), self._filled)
            if grown is not None:
                changes.work += grown
            else:
                row.barred = True
                self._release(key, changes)

    def _release(self, key: Key, changes: Changes) -> None:
        changes.work += self._layout.release(key, self._filled)
        if changes.joins.pop(key, None) is None:
            changes.leaves.append(key)
        self._rows[key].lose()

    def _catch_up(self, keys: Sequence[Key], changes: Changes) -> None:
        """Compute a piece of what rows have behind them, the shortest first."""
        behind = [key for key in keys if not self._is_ready(self._rows[key])]
        left = self._chunk.budget(len(self._rows), self._config.prefill_tokens) if behind else 0
        for key in sorted(behind, key=lambda key: self._rows[key].lag):
            row = self._rows[key]
            start, num = row.written, min(left, row.lag - 1)
            if num <= 0:
                return
            group, place = self._layout.place(key)
            tokens = row.tokens(start, start + num)
            changes.work.append(
                Prefill(key=key, group=group, row=place, tokens=tokens, start=start)
            )
            row.write(num)
            left -= num + self._chunk.overhead

    def _is_ready(self, row: DraftRow) -> bool:
        """Whether all that its slot lacks fits in the forward that draws its first token."""
        return row.lag <= self._width

    def _draw(self, ready: Mapping[Key, int], changes: Changes) -> dict[Key, tuple[int, ...]]:
        """The drafts of the rows that are ready.

        Each forward draws one token more, for all rows that have a slot.

        Args:
            ready: How many tokens each row is to draw.
            changes: What has to be done before.
        """
        depth = max(ready.values(), default=0)
        self._forget_drafts(ready, changes)
        if not depth:
            self._learn(changes, self._submit(changes).wait())
            return {}
        first = self._first_decodes(ready)
        fed = {decode.key: 1 + len(decode.more) for decode in first}
        steps = deque([self._submit(changes, first)])
        results: list[StepResult] = []
        for place in range(depth - 1):
            steps.append(self._submit(Changes(), [_next(decode, place) for decode in first]))
            # One step of look-ahead: a deeper one would copy buffers.
            results.append(steps.popleft().wait())
        results.append(steps.popleft().wait())
        self._learn(changes, results[0])
        return self._take(ready, fed, results)

    def _forget_drafts(self, ready: Mapping[Key, int], changes: Changes) -> None:
        """Penalties count what was drawn; what was not accepted must count no more."""
        for key in ready:
            setup = self._rows[key].setup
            if setup.params.has_penalties and key not in changes.joins:
                changes.leaves.append(key)
                changes.joins[key] = setup

    def _first_decodes(self, ready: Mapping[Key, int]) -> list[Decode]:
        """Feed ready rows all that they lack, and the others one token of theirs."""
        decodes: list[Decode] = []
        for number, group in sorted(self._layout.groups.items()):
            for place, key in enumerate(group.decoding):
                row = self._rows[key]
                start = row.written
                stop = row.total if key in ready else start + 1
                token, *more = row.tokens(start, stop)
                decodes.append(
                    Decode(
                        key=key,
                        group=number,
                        row=place,
                        start=start,
                        num_output=start + 1 - len(row.setup.prompt),
                        token=token,
                        more=tuple(more),
                    )
                )
        return decodes

    def _take(
        self, ready: Mapping[Key, int], fed: Mapping[Key, int], results: Sequence[StepResult]
    ) -> dict[Key, tuple[int, ...]]:
        """What each ready row drew; a row that the small model fails for is left out from now on."""
        drafts: dict[Key, tuple[int, ...]] = {}
        for key, num in fed.items():
            row = self._rows[key]
            if any(key in result.failures for result in results):
                row.barred = True
                continue
            drawn = tuple(result.sampled[key][0].token for result in results)
            row.write(num, drawn[:-1])
            if key in ready:
                drafts[key] = drawn[: ready[key]]
        return drafts

    def _learn(self, changes: Changes, result: StepResult) -> None:
        """What chunks and the forward after them took."""
        chunks = [item for item in changes.work if isinstance(item, Prefill)]
        num_rows = len(self._rows)
        # The last one may have gone through the model with the decode.
        for chunk, seconds in zip(chunks, result.prefill_seconds, strict=False):
            self._chunk.observe(num_rows, len(chunk.tokens), seconds)
        if result.fused:
            self._chunk.observe_fused(num_rows, len(chunks[-1].tokens), result.decode_seconds)
        elif result.sampled:
            self._chunk.observe(num_rows, 0, result.decode_seconds)

    def _submit(self, changes: Changes, decodes: Sequence[Decode] = ()) -> PendingStep:
        self._number += 1
        plan = Plan(
            number=self._number,
            leaves=tuple(changes.leaves),
            joins=tuple(changes.joins.values()),
            work=tuple(changes.work),
            decodes=tuple(decodes),
            fuses=self._chunk.fuses(len(self._rows)),
        )
        return self._runner.submit(plan)


def check_same_tokenizer(draft: Vocabulary, target: Vocabulary) -> None:
    """A draft is token ids: both models have to mean the same by them.

    Raises:
        Unsupported: They do not; the first difference is named.
    """
    ours, theirs = draft.vocabulary, target.vocabulary
    why = ""
    for token, id in sorted(theirs.items(), key=lambda item: item[1]):
        if ours.get(token) != id:
            found = "it has no such token" if token not in ours else f"it is {ours[token]} there"
            why = f"token {token!r} is {id} in the model's tokenizer, {found}"
            break
    extra = [token for token in ours if token not in theirs]
    if not why and extra:
        first = min(extra, key=lambda token: ours[token])
        why = f"token {first!r} ({ours[first]}) is not in the model's tokenizer"
    different = draft.special_tokens ^ target.special_tokens
    if not why and different:
        id = min(different)
        owner = "its own" if id in draft.special_tokens else "the model's"
        why = f"token {id} is special in {owner} tokenizer only"
    if why:
        raise Unsupported(f"draft_model: its tokenizer differs from the model's: {why}")


def _next(first: Decode, place: int) -> Decode:
    """The same row, so many tokens later: it is fed what the step before drew."""
    num = len(first.more) + 1 + place
    return replace(
        first, start=first.start + num, num_output=first.num_output + num, token=None, more=()
    )


def _has_windows(spec: ModelSpec) -> bool:
    """Whether what is overwritten may be needed again, if a draft is too long."""
    return any(isinstance(part, Window) for layer in spec.layers for part in flatten(layer))


def _typical_bytes(spec: ModelSpec) -> int:
    """Live KV of a row of ordinary length."""
    return sum(layer_bytes(layer, 1, TYPICAL_LENGTH, 0) for layer in spec.layers)
