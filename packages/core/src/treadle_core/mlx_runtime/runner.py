"""Runs plans: the only place where the model, the live KV and the sampler meet."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from treadle_core.drafting import HeardRow, HiddenListener, HiddenStates
from treadle_core.errors import Unsupported
from treadle_core.layers import ModelSpec, is_recurrent, why_no_drafts
from treadle_core.mlx_runtime.acceptance import Accept, accept_equal
from treadle_core.mlx_runtime.adapter import ModelAdapter
from treadle_core.mlx_runtime.fingerprint import fingerprint
from treadle_core.mlx_runtime.fusing import run_together
from treadle_core.mlx_runtime.groups import RowGroup, SlotGroup, SoloGroup, arrange
from treadle_core.mlx_runtime.recording import record_inputs
from treadle_core.mlx_runtime.sampler import Choice, Sampler
from treadle_core.mlx_runtime.split import HiddenTap, SplitModel
from treadle_core.mlx_runtime.verifying import DraftChoice, verify
from treadle_core.plan import (
    Decode,
    Encode,
    Instruction,
    Key,
    Plan,
    Prefill,
    Promote,
    Restore,
    Save,
    StepResult,
    Work,
)
from treadle_core.ports import Encoder, PendingStep, PrefixStore

logger = logging.getLogger("treadle")

CLEAR_EVERY_STEPS = 256
CLEAR_AFTER_TOKENS = 512


class SubmittedStep:
    """A step whose graph runs on the device.

    Args:
        number: The plan's number.
        choice: Its tokens, or None if nothing was sampled.
        started: When it was submitted, by the stopwatch.
        prefill_seconds: What each chunk took that was waited for.
        encode_seconds: What encoding media took.
        stopwatch: Tells how long the step took.
        fused: Whether its last chunk and its decode went through the model together.
        finish: Called when the tokens are there: what is left of the step to do.
    """

    def __init__(
        self,
        number: int,
        choice: Choice | DraftChoice | None,
        started: float,
        prefill_seconds: list[float],
        encode_seconds: float,
        stopwatch: "Stopwatch",
        *,
        fused: bool = False,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._number = number
        self._fused = fused
        self._choice = choice
        self._prefill_seconds = prefill_seconds
        self._encode_seconds = encode_seconds
        self._stopwatch = stopwatch
        self._started = started
        self._ended: float | None = None
        self._finish = finish

    def settle(self) -> None:
        """Wait for the tokens without reading them, and note when they came."""
        if self._choice is not None:
            mx.eval(self._choice.tokens)
        self._ended = self._stopwatch.now()

    def wait(self) -> StepResult:
        """Block until the tokens are there."""
        sampled, failures = self._choice.read_rows() if self._choice else ({}, {})
        if self._finish is not None:
            self._finish()
        return StepResult(
            number=self._number,
            sampled=sampled,
            failures=failures,
            seconds=self._stopwatch.lap(self._started, self._ended),
            prefill_seconds=tuple(self._prefill_seconds),
            fused=self._fused,
            encode_seconds=self._encode_seconds,
        )


class Stopwatch:
    """Tells pipelined steps apart: a step begins when it is submitted or its predecessor ends."""

    def __init__(self) -> None:
        self._last = 0.0

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return time.perf_counter()

    def lap(self, started: float, ended: float | None = None) -> float:
        """Seconds of the step that was submitted at ``started`` and ended then, or just now."""
        ended = self.now() if ended is None else ended
        seconds = max(0.0, ended - max(started, self._last))
        self._last = ended
        return seconds


class ModelRunner:
    """A runner over slots, or over the model's own caches where slots do not know its layers.

    Args:
        model: The model; loaded and used on one thread.
        spec: What it is; ``spec.batched`` decides between slots and rows of their own.
        slack: Longest draft that it verifies, and so the tokens that a ring holds beyond its window.
        width_step: Granularity of attention width; None chooses by device.
        config: The checkpoint's config, as far as it decides what is computed.
        fuses: Whether a chunk may go through the model together with decoding rows.
        accept: Which rule keeps drafts.
    """

    def __init__(
        self,
        model: ModelAdapter,
        spec: ModelSpec,
        *,
        slack: int = 0,
        width_step: int | None = None,
        config: Mapping[str, Any] | None = None,
        fuses: bool = False,
        accept: Accept = accept_equal,
    ) -> None:
        self._fuses = fuses
        self._model: ModelAdapter | None = model
        self._spec = spec
        self._slack = 0 if why_no_drafts(spec) else slack
        if self._slack and is_recurrent(spec):
            record_inputs(model.model)
        self._width_step = width_step or default_width_step()
        self._groups: dict[int, RowGroup] = {}
        self._sampler = Sampler(spec.vocab_size)
        self._last: Choice | None = None
        self._before: SubmittedStep | None = None
        self._stopwatch = Stopwatch()
        self._num_steps = 0
        self._prefixes: PrefixStore | None = None
        self._config = dict(config or {})
        self._accept = accept
        self._attachments: dict[Key, Any] = {}
        self._tap: HiddenTap | None = None
        self._listener: HiddenListener | None = None
        self._untold: list[HiddenStates] = []

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""
        return self._spec

    @property
    def max_draft_tokens(self) -> int:
        """Longest draft that it verifies; 0 where rows cannot take tokens back."""
        return self._slack

    @property
    def fingerprint(self) -> str:
        """Digest of config, class, settings and every bit of the weights; computed when asked."""
        assert self._model is not None, "the runner is closed"
        return fingerprint(self._model.model, self._config)

    @property
    def encoder(self) -> Encoder | None:
        """Encodes the media of prompts; None where the model reads text."""
        return None if self._model is None else self._model.encoder

    def use(self, store: PrefixStore) -> None:
        """Restore from, and save to, this store when a plan says so."""
        self._prefixes = store

    def split(self) -> SplitModel:
        """The model in halves, for a listener that builds on them.

        Raises:
            Unsupported: Its hidden states cannot be read.
        """
        assert self._model is not None, "the runner is closed"
        if self._spec.media:
            raise Unsupported(
                f"hidden states of {self._spec.model_type} cannot be read: it takes media"
            )
        return SplitModel(self._model.model)

    def listen(self, listener: HiddenListener, split: SplitModel) -> None:
        """Hand a listener the hidden states of every forward. Called once, before the first step.

        Args:
            listener: Who is told.
            split: What :meth:`split` gave.
        """
        assert not self._groups, "rows are there that nothing was heard of"
        self._model = self._tap = HiddenTap(split)
        self._listener = listener

    @property
    def num_rows(self) -> int:
        """Rows with sampling state; zero when nothing runs."""
        return self._sampler.num_rows

    def submit(self, plan: Plan) -> PendingStep:
        """Build the step's graph and start it.

        Raises:
            Exception: Whatever the model raised; call :meth:`reset` then.
        """
        for key in plan.leaves:
            self._sampler.leave(key)
            self._detach(key)
        for setup in plan.joins:
            self._sampler.join(setup)
            if setup.attachment is not None:
                self._attachments[setup.key] = setup.attachment
        if not self._sampler.num_rows:
            # Nobody is there: what the last row brought along need not be kept.
            self._sampler.clear()
            self._last = self._before = None
        if plan.delays_streams and self._before is not None:
            # It may still be running: its end is where the first chunk begins.
            self._before.settle()
        started = self._stopwatch.now()
        work, chunk, promoted, saved = self._apart(plan)
        prefills, encodes = self._do_work(work)
        self._do_work(promoted)
        if chunk is not None:
            choice = self._decode_beside(chunk, plan.decodes)
        else:
            choice = self._decode(plan.decodes, lossy=plan.lossy) if plan.decodes else None
        self._tell_hidden()
        if choice is not None:
            # Buffers too: what the logits do not depend on would otherwise stay lazy for ever.
            used = {decode.group for decode in plan.decodes}
            used |= set() if chunk is None else {chunk.group}
            buffers = [self._groups[group].arrays() for group in sorted(used)]
            mx.async_eval(choice.arrays(), buffers)
        if choice is not None:
            # Nothing is fed from the device behind a draft: its tokens are read first.
            self._last = choice if isinstance(choice, Choice) else None
        self._tidy(plan)
        finish = None
        if isinstance(choice, DraftChoice):
            finish = partial(self._take_back, choice, plan.decodes)
        step = SubmittedStep(
            plan.number,
            choice,
            started,
            prefills,
            sum(encodes),
            self._stopwatch,
            fused=chunk is not None,
            finish=finish,
        )
        if saved:
            # The step has ended before: what copying them takes says nothing of chunk or decode.
            step.settle()
            self._do_work(saved)
        self._before = step
        return step

    def reset(self) -> None:
        """Drop rows, buffers and everything in flight."""
        self._groups.clear()
        self._sampler.clear()
        self._attachments.clear()
        if self.encoder is not None:
            self.encoder.reset()
        self._untold.clear()
        self._last = None
        self._before = None
        mx.clear_cache()

    def close(self) -> None:
        """Free the model."""
        self.reset()
        self._model = self._tap = self._listener = None
        mx.clear_cache()

    def _apart(
        self, plan: Plan
    ) -> tuple[Sequence[Work], Prefill | None, Sequence[Promote], Sequence[Save]]:
        """The work before the chunk that goes together with the decode, it, and what follows it.

        What follows is which rows decode, and what is stored of rows. That can wait until the decode
        is through: in models that fuse, it writes behind what is stored and changes nothing of it.
        """
        apart = plan.work, None, (), ()
        last = max((i for i, w in enumerate(plan.work) if isinstance(w, Prefill)), default=-1)
        may_fuse = self._fuses and plan.fuses and not plan.has_drafts
        if last < 0 or not plan.decodes or not may_fuse:
            return apart
        chunk, after = plan.work[last], plan.work[last + 1 :]
        assert isinstance(chunk, Prefill)
        promoted = [item for item in after if isinstance(item, Promote) and item.row == item.to]
        saved = [item for item in after if isinstance(item, Save)]
        # Anything else reads what the chunk writes, or moves rows.
        if len(promoted) + len(saved) < len(after):
            return apart
        return plan.work[:last], chunk, promoted, saved

    def _detach(self, key: Key) -> None:
        """A row leaves: what was kept for its prompt is not needed, unless another row has it."""
        prompt = self._attachments.pop(key, None)
        if self.encoder is None or prompt is None:
            return
        if all(prompt is not other for other in self._attachments.values()):
            self.encoder.release(prompt)

    def _do_work(self, work: Sequence[Work]) -> tuple[list[float], list[float]]:
        """Arrange rows, prefill and encode; returns what each chunk and each encoding took."""
        prefills: list[float] = []
        encodes: list[float] = []
        for item in work:
            if isinstance(item, Prefill):
                prefills.append(self._prefill(item))
            elif isinstance(item, Encode):
                encodes.append(self._encode(item))
            else:
                self._arrange(item)
        return prefills, encodes

    def _arrange(self, change: Instruction) -> None:
        match change:
            case Restore():
                self._restore(change)
            case Save():
                self._save(change)
            case _:
                arrange(self._groups, change, self.new_group)

    def _restore(self, restore: Restore) -> None:
        assert self._prefixes is not None, "a stored prefix without a store"
        stored = self._prefixes.load(restore.ticket)
        assert stored.num_tokens == restore.num_tokens, "a stored prefix of another length"
        self._groups[restore.group].restore(restore.row, stored)

    def _save(self, save: Save) -> None:
        assert self._prefixes is not None, "a row to store without a store"
        try:
            row = self._groups[save.group].reader(save.row, len(save.prefix.tokens))
            self._prefixes.insert(save.prefix, row, save.generation)
        except Exception:
            # Nobody must suffer from what is kept for later.
            logger.exception("the state of %s could not be stored", save.key)

    def _prefill(self, prefill: Prefill) -> float:
        """Write a chunk, and wait for it: its speed decides how long the next one may be.

        A step with a chunk gives up its look-ahead for that; the chunk is far longer than the
        graph building that would have been hidden.
        """
        started = self._stopwatch.now()
        self._write(prefill)
        self._tell_hidden()
        mx.eval(self._groups[prefill.group].arrays())
        return self._stopwatch.now() - started

    def _write(self, prefill: Prefill) -> None:
        attachment = self._attachments.get(prefill.key)
        group = self._groups[prefill.group]
        group.prefill(prefill.row, prefill.tokens, prefill.start, attachment)
        self._note_hidden([prefill])

    def _decode_beside(self, chunk: Prefill, decodes: Sequence[Decode]) -> Choice:
        """A chunk and a token of each row in one pass over the weights.

        The chunk's row may be among those that decode: in every layer its KV is written first.
        """
        _, choice = run_together(
            lambda: self._write(chunk), lambda: self._decode(decodes, lossy=False)
        )
        return choice

    def _encode(self, encode: Encode) -> float:
        """Encode media, apart from the chunk that needs them: that one's speed is per token."""
        assert self.encoder is not None, "media for a model that reads text"
        started = self._stopwatch.now()
        self.encoder.encode(self._attachments[encode.key], encode.start, encode.seconds)
        return self._stopwatch.now() - started

    def _decode(self, decodes: Sequence[Decode], *, lossy: bool) -> Choice | DraftChoice:
        if any(decode.draft for decode in decodes):
            drafted = self._forward_wide(decodes, lambda decode: range(1 + len(decode.draft)))
            return verify(self._sampler, drafted, decodes, accept=self._accept, lossy=lossy)
        if any(decode.more for decode in decodes):
            behind = self._forward_wide(decodes, lambda decode: (len(decode.more),))
            return self._sampler.choose(behind, [_behind(decode) for decode in decodes])
        tokens = self._feed(decodes)
        logits: list[mx.array] = []
        begin = 0
        for group, members in _by_group(decodes):
            end = begin + len(members)
            starts = [decode.start for decode in members]
            fed = tokens[begin:end, None]
            out = self._groups[group].decode(fed, starts, self._attached(members))
            self._note_hidden(members)
            logits.append(out[:, -1])
            begin = end
        joined = logits[0] if len(logits) == 1 else mx.concatenate(logits)
        return self._sampler.choose(joined, decodes)

    def _forward_wide(
        self, decodes: Sequence[Decode], places: Callable[[Decode], Iterable[int]]
    ) -> mx.array:
        """One forward per group over all that its rows are fed, padded to the longest.

        Args:
            decodes: The rows.
            places: Which of a row's places are wanted.

        Returns:
            Logits ``[wanted places, vocab]``, row by row.
        """
        found: list[mx.array] = []
        for group, members in _by_group(decodes):
            fed = padded([_fed(decode) for decode in members])
            starts = [decode.start for decode in members]
            tokens = mx.array(fed, dtype=mx.int32)
            logits = self._groups[group].decode(tokens, starts, self._attached(members))
            self._note_hidden(members)
            width = len(fed[0])
            index = [
                row * width + place
                for row, decode in enumerate(members)
                for place in places(decode)
            ]
            found.append(mx.take(mx.flatten(logits, 0, 1), mx.array(index), axis=0))
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def _take_back(self, choice: DraftChoice, decodes: Sequence[Decode]) -> None:
        """Leave each row with its committed tokens only, and wait for that: it is part of the step.

        Whoever decides whether drafts pay must see what rejected ones cost.
        """
        kept = choice.num_kept()
        for group, members in _by_group(decodes):
            mine, kept = kept[: len(members)], kept[len(members) :]
            if any(decode.draft for decode in members):
                self._groups[group].keep(mine)
                mx.eval(self._groups[group].arrays())

    def _note_hidden(self, items: Sequence[Prefill | Decode]) -> None:
        """Take the hidden states of the forward before, to be handed on.

        Not at once: another forward may be in the middle of its layers.
        """
        if self._listener is None or self._tap is None:
            return
        rows = tuple(HeardRow(item.key, item.start, _num_fed(item)) for item in items)
        self._untold.append(HiddenStates(rows, self._tap.take()))

    def _tell_hidden(self) -> None:
        """Hand on what was taken, in the order of the forwards."""
        untold, self._untold = self._untold, []
        for states in untold:
            if self._listener is None:
                return
            try:
                self._listener.hear(states)
            except Exception:
                # Rows must not suffer from who listens to them.
                logger.exception("hidden states could not be handed on; nobody is told any more")
                self._listener = None

    def _attached(self, decodes: Sequence[Decode]) -> list[Any]:
        """What the model is given of each row's prompt besides tokens."""
        return [self._attachments.get(decode.key) for decode in decodes]

    def _feed(self, decodes: Sequence[Decode]) -> mx.array:
        """Ids ``[rows]`` to feed: from the step before while they are still on the device."""
        if all(decode.token is not None for decode in decodes):
            return mx.array([decode.token or 0 for decode in decodes], dtype=mx.int32)
        assert self._last is not None, "a token in flight has a step before it"
        keys = tuple(decode.key for decode in decodes)
        if self._last.batch.keys == keys and all(d.token is None for d in decodes):
            return self._last.tokens
        place = {key: i for i, key in enumerate(self._last.batch.keys)}
        index = mx.array([place[d.key] if d.token is None else 0 for d in decodes])
        known = mx.array([-1 if d.token is None else d.token for d in decodes], dtype=mx.int32)
        return mx.where(known < 0, mx.take(self._last.tokens, index), known)

    def new_group(self) -> RowGroup:
        assert self._model is not None, "the runner is closed"
        if not self._spec.batched:
            return SoloGroup(self._model)
        return SlotGroup(
            self._model, self._spec.layers, slack=self._slack, width_step=self._width_step
        )

    def _tidy(self, plan: Plan) -> None:
        """Give freed buffers back now and then; they would pile up behind changing shapes."""
        self._num_steps += 1
        num_prefill = sum(len(prefill.tokens) for prefill in plan.prefills)
        if num_prefill >= CLEAR_AFTER_TOKENS or self._num_steps % CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()


def default_width_step() -> int:
    """Fine on the CPU, where masked columns cost as much as others; coarse where they do not."""
    return 64 if mx.default_device() == mx.cpu else 256


def padded(rows: list[list[int]]) -> list[list[int]]:
    """Rows of one width. The padding is a token that the row has seen, so its values are finite."""
    width = max(map(len, rows))
    return [row + row[:1] * (width - len(row)) for row in rows]


def _fed(decode: Decode) -> list[int]:
    assert decode.token is not None, "a wide step knows all of its tokens"
    assert not (decode.draft and decode.more), "a draft behind more than one token"
    return [decode.token, *decode.more, *decode.draft]


def _behind(decode: Decode) -> Decode:
    """The same row when all but the last of its known tokens are written."""
    num = len(decode.more)
    return replace(decode, start=decode.start + num, num_output=decode.num_output + num)


def _num_fed(item: Prefill | Decode) -> int:
    if isinstance(item, Prefill):
        return len(item.tokens)
    return 1 + len(item.more) + len(item.draft)


def _by_group(decodes: Sequence[Decode]) -> list[tuple[int, list[Decode]]]:
    found: dict[int, list[Decode]] = {}
    for decode in decodes:
        found.setdefault(decode.group, []).append(decode)
    return list(found.items())
