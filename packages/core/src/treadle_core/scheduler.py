"""Which rows decode, which prefill how much, who joins and who leaves: state in, plan out.

Pure Python and deterministic: time comes in as an argument, nothing here touches the model. A plan
assumes that the step before it succeeds, because it is made before that step's tokens are read.
What is found out late (an end token, a stop string) costs one row of one step, never a token.
"""

from collections.abc import Iterable

from msgspec import Struct

from treadle_core.errors import QueueFull
from treadle_core.kv_layout import KvLayout
from treadle_core.plan import (
    Decode,
    Instruction,
    Key,
    Plan,
    Prefill,
    RowSetup,
    Sampled,
    StepResult,
)
from treadle_core.ports import ChunkPolicy
from treadle_core.sequence import Sequence, Status
from treadle_core.waiting import WaitingQueue

HEADROOM = 256


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds of a scheduler.

    Attributes:
        max_num_seqs: Most sequences with a row.
        max_queue: Most sequences that wait; one more is refused.
        max_num_batched_tokens: Most tokens of a step, decode and prefill together.
        prefill_step_size: Most prompt tokens of one row in one step.
    """

    max_num_seqs: int = 256
    max_queue: int = 1024
    max_num_batched_tokens: int = 8192
    prefill_step_size: int = 2048


class Draft:
    """A plan while it is being made."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.leaves: list[Key] = []
        self.joins: list[RowSetup] = []
        self.work: list[Instruction | Prefill] = []
        self.decodes: list[Decode] = []

    def freeze(self) -> Plan:
        """The plan as data."""
        return Plan(
            number=self.number,
            leaves=tuple(self.leaves),
            joins=tuple(self.joins),
            work=tuple(self.work),
            decodes=tuple(self.decodes),
        )


class Scheduler:
    """Waiting queue, running rows, and the plan of the next step.

    Args:
        layout: Rows and bytes.
        chunk: How much to prefill beside decoding rows.
        queue: Who is next.
        limits: Bounds.
    """

    def __init__(
        self, *, layout: KvLayout, chunk: ChunkPolicy, queue: WaitingQueue, limits: Limits
    ) -> None:
        self._layout = layout
        self._chunk = chunk
        self._waiting = queue
        self._limits = limits
        self._running: dict[Key, Sequence] = {}
        self._leaving: list[tuple[Sequence, bool]] = []
        self._rows: dict[Key, Sequence] = {}
        self._planned: dict[int, list[tuple[Sequence, int]]] = {}
        self._doomed: list[Sequence] = []
        self._number = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that are being worked on."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a plan would do something."""
        return bool(self._running or self._leaving or len(self._waiting))

    @property
    def layout(self) -> KvLayout:
        """Rows and bytes."""
        return self._layout

    @property
    def sequences(self) -> list[Sequence]:
        """Every sequence that has not finished."""
        return [*self._running.values(), *self._waiting]

    @property
    def must_read_first(self) -> bool:
        """Whether the next plan needs tokens that are still in flight."""
        return any(s.synchronous and s.num_in_flight for s in self._running.values())

    def add(self, sequences: list[Sequence]) -> None:
        """Queue new sequences, all or none.

        Raises:
            QueueFull: There is no room for all of them.
        """
        if len(self._waiting) + len(sequences) > self._limits.max_queue:
            raise QueueFull(len(self._waiting), self._limits.max_queue)
        for sequence in sequences:
            self._waiting.push(sequence)

    def finish(self, sequence: Sequence, *, scrub: bool = False) -> None:
        """End a sequence in whatever state it is; its row is free from the next plan on.

        Args:
            sequence: One that has not finished.
            scrub: Whether its row may hold values that are not finite.
        """
        self._waiting.discard(sequence)
        self._running.pop(sequence.key, None)
        sequence.move_to(Status.FINISHED)
        if sequence.key in self._rows:
            self._leaving.append((sequence, scrub))

    def expired(self, now: float) -> list[Sequence]:
        """Unfinished sequences whose deadline has passed."""
        return [s for s in self.sequences if s.deadline is not None and s.deadline <= now]

    def take_doomed(self) -> list[Sequence]:
        """Sequences found to fit no more, even alone; the caller ends them."""
        doomed, self._doomed = self._doomed, []
        return doomed

    def plan(self, now: float) -> Plan:
        """Decide the next step. It may be empty."""
        self._number += 1
        draft = Draft(self._number)
        self._release_finished(draft)
        only = self._suspect()
        if only is not None:
            self._preempt_others(draft, only)
        preempted = self._make_room_to_decode(draft)
        prefilled = self._plan_prefill(draft, now, only, may_admit=not preempted)
        self._plan_decode(draft)
        plan = draft.freeze()
        if plan.has_work:
            involved = dict.fromkeys([*prefilled, *(self._running[d.key] for d in plan.decodes)])
            self._planned[plan.number] = [(s, s.epoch) for s in involved]
        return plan

    def apply(self, plan: Plan, result: StepResult) -> list[tuple[Sequence, Sampled | str]]:
        """Take the tokens of a step in.

        Returns:
            For each row that is still alive, its new token, or why it failed.
        """
        involved = self._planned.pop(plan.number)
        self._observe(plan, result)
        outcomes: list[tuple[Sequence, Sampled | str]] = []
        for sequence, epoch in involved:
            if sequence.status is Status.FINISHED or sequence.epoch != epoch:
                continue
            outcome = result.failures.get(sequence.key) or result.sampled.get(sequence.key)
            if isinstance(outcome, Sampled):
                sequence.num_in_flight -= 1
                sequence.output.append(outcome.token)
                sequence.suspect = False
            if outcome is not None:
                outcomes.append((sequence, outcome))
        return outcomes

    def recover(self, plans: Iterable[Plan]) -> list[Sequence]:
        """A step failed and took all KV with it: every row goes back to the queue.

        Whoever was in one of ``plans`` becomes a suspect and has to run alone until it gets a
        token.

        Returns:
            The sequence that failed although it ran alone, if that is what happened.
        """
        involved = {s.key: s for p in plans for s, e in self._forget(p) if s.epoch == e}
        alive = [s for s in involved.values() if s.status is not Status.FINISHED]
        self._layout.reset()
        self._rows.clear()
        self._leaving.clear()
        for sequence in list(self._running.values()):
            del self._running[sequence.key]
            sequence.restart()
            self._waiting.push(sequence)
        guilty = [s for s in alive if s.suspect] if len(alive) == 1 else []
        for sequence in alive:
            sequence.suspect = True
        return guilty

    def check_integrity(self) -> None:
        """Assert that queue, rows and layout agree."""
        self._layout.check_integrity()
        for sequence in self._running.values():
            assert sequence.status in (Status.PREFILL, Status.DECODE), sequence.status
        for sequence in self._waiting:
            assert sequence.status is Status.WAITING, sequence.status
            assert sequence.key not in self._running, "waiting and running at once"
        assert len(self._rows) == self._layout.num_rows, "rows without a sequence"
        assert len(self._running) <= self._limits.max_num_seqs

    def _forget(self, plan: Plan) -> list[tuple[Sequence, int]]:
        return self._planned.pop(plan.number, [])

    def _written(self, key: Key) -> int:
        return self._rows[key].num_computed

    def _release_finished(self, draft: Draft) -> None:
        for sequence, scrub in self._leaving:
            self._release(draft, sequence, scrub=scrub)
        self._leaving.clear()
        for sequence in list(self._running.values()):
            # Its last token is on the way: the row is not needed any more.
            if not sequence.wants_token and sequence.key in self._rows:
                self._release(draft, sequence)

    def _release(self, draft: Draft, sequence: Sequence, *, scrub: bool = False) -> None:
        draft.work += self._layout.release(sequence.key, self._written, scrub=scrub)
        draft.leaves.append(sequence.key)
        del self._rows[sequence.key]

    def _preempt(self, draft: Draft, sequence: Sequence) -> None:
        self._release(draft, sequence)
        del self._running[sequence.key]
        sequence.restart()
        sequence.num_preemptions += 1
        self._waiting.push(sequence)

    def _suspect(self) -> Sequence | None:
        """Who has to run alone now, after a step that failed."""
        suspects = [s for s in self.sequences if s.suspect]
        running = [s for s in suspects if s.status is not Status.WAITING]
        return min(running or suspects, key=lambda s: s.order, default=None)

    def _preempt_others(self, draft: Draft, only: Sequence) -> None:
        for sequence in list(self._running.values()):
            if sequence is not only and sequence.key in self._rows:
                self._preempt(draft, sequence)

    def _make_room_to_decode(self, draft: Draft) -> bool:
        """Give each decoding row room for a token, taking rows from the last served if need be."""
        preempted = False
        for sequence in sorted(self._running.values(), key=lambda s: s.order):
            while sequence.status is Status.DECODE and sequence.key in self._rows:
                grown = self._layout.extend(sequence.key, sequence.num_computed + 1, self._written)
                if grown is not None:
                    draft.work += grown
                    break
                preempted = True
                self._take_a_row(draft, sequence)
        return preempted

    def _take_a_row(self, draft: Draft, sequence: Sequence) -> None:
        """Preempt the least urgent row; end ``sequence`` if it does not even fit alone."""
        if not self._layout.fits_alone(sequence.num_computed + 1):
            self._doomed.append(sequence)
            self._preempt(draft, sequence)
            return
        victims = [s for s in self._running.values() if s.key in self._rows]
        self._preempt(draft, max(victims, key=lambda s: (s.request.priority, s.order)))

    def _plan_prefill(
        self, draft: Draft, now: float, only: Sequence | None, *, may_admit: bool
    ) -> list[Sequence]:
        """Share the step's prompt tokens out; returns who got some."""
        decoding = [s for s in self._running.values() if s.status is Status.DECODE]
        num_decoding = sum(s.key in self._rows for s in decoding)
        limit = min(
            self._limits.prefill_step_size, self._limits.max_num_batched_tokens - num_decoding
        )
        if limit <= 0:
            return []
        left = self._chunk.budget(num_decoding, limit)
        # With nobody to keep waiting, one prompt at a time: its first token need not wait for
        # the prompts behind it.
        alone = num_decoding == 0
        served: list[Sequence] = []
        prefilling = [s for s in self._running.values() if s.status is Status.PREFILL]
        oldest = min(prefilling, key=lambda s: s.order, default=None)
        kept = 0
        if oldest is not None:
            others = len(prefilling) > 1 or (may_admit and len(self._waiting) > 0)
            share = left if alone or not others else max(1, left // 2)
            kept = min(oldest.num_to_prefill, share)
            left -= kept
        for sequence in sorted(prefilling, key=lambda s: (s.num_to_prefill, s.order)):
            if sequence is not oldest and left > 0 and not alone:
                left -= self._prefill(draft, sequence, left)
                served.append(sequence)
        while may_admit and left > 0 and not (alone and (served or kept)):
            admitted = self._admit(draft, now, only)
            if admitted is None:
                break
            left -= self._prefill(draft, admitted, left)
            served.append(admitted)
        if oldest is not None:
            self._prefill(draft, oldest, kept + max(left, 0))
            served.append(oldest)
        return served

    def _admit(self, draft: Draft, now: float, only: Sequence | None) -> Sequence | None:
        if len(self._running) >= self._limits.max_num_seqs:
            return None
        sequence = only if only is not None else self._waiting.peek(now)
        if sequence is None or sequence.status is not Status.WAITING:
            return None
        length = sequence.num_tokens
        rest = min(sequence.max_tokens - sequence.num_generated, HEADROOM)
        opened = self._layout.admit(sequence.key, length, rest)
        if opened is None:
            if self._layout.num_rows == 0:
                self._doomed.append(sequence)
            return None
        draft.work += opened
        draft.joins.append(_setup(sequence))
        self._waiting.discard(sequence)
        sequence.move_to(Status.PREFILL)
        self._running[sequence.key] = sequence
        self._rows[sequence.key] = sequence
        return sequence

    def _prefill(self, draft: Draft, sequence: Sequence, most: int) -> int:
        """Plan up to ``most`` prompt tokens; the row decodes in this step if that was the rest."""
        num = min(sequence.num_to_prefill, most, self._limits.prefill_step_size)
        if num > 0:
            start = sequence.num_computed
            group, row = self._layout.place(sequence.key)
            tokens = sequence.tokens(start, start + num)
            draft.work.append(
                Prefill(key=sequence.key, group=group, row=row, tokens=tokens, start=start)
            )
            sequence.num_computed += num
        if sequence.num_to_prefill == 0:
            draft.work.append(self._layout.promote(sequence.key, self._written))
            sequence.move_to(Status.DECODE)
        return num

    def _plan_decode(self, draft: Draft) -> None:
        for number in sorted(self._layout.groups):
            for row, key in enumerate(self._layout.groups[number].decoding):
                draft.decodes.append(self._decode(self._rows[key], number, row))

    def _decode(self, sequence: Sequence, group: int, row: int) -> Decode:
        last = sequence.num_tokens - 1
        token = None if sequence.num_in_flight else sequence.tokens(last, last + 1)[0]
        decode = Decode(
            key=sequence.key,
            group=group,
            row=row,
            start=sequence.num_computed,
            num_output=sequence.num_generated,
            token=token,
        )
        sequence.num_computed += 1
        sequence.num_in_flight += 1
        return decode

    def _observe(self, plan: Plan, result: StepResult) -> None:
        num_prefill = sum(len(prefill.tokens) for prefill in plan.prefills)
        self._chunk.observe(len(plan.decodes), num_prefill, result.seconds)


def _setup(sequence: Sequence) -> RowSetup:
    request = sequence.request
    make = request.constraint
    return RowSetup(
        key=sequence.key,
        params=request.params,
        seed=sequence.seed,
        end_tokens=sequence.end_tokens,
        prompt=sequence.prompt,
        output=sequence.output,
        processors=request.logits_processors,
        constraint=sequence.constraint if make is not None else None,
    )
