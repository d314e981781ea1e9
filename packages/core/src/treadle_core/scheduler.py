"""Which rows decode, which prefill how much, who joins and who leaves: state in, plan out.

Pure Python and deterministic: time comes in as an argument, nothing here touches the model. A plan
assumes that the step before it succeeds, because it is made before that step's tokens are read.
What is found out late (an end token, a stop string) costs one row of one step, never a token.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import islice

from msgspec import Struct

from treadle_core.errors import QueueFull
from treadle_core.kv_layout import Group, KvLayout
from treadle_core.plan import (
    Decode,
    Encode,
    Key,
    Plan,
    Prefill,
    Restore,
    RowSetup,
    Sampled,
    StepResult,
    Work,
)
from treadle_core.ports import ChunkPolicy, Encoder
from treadle_core.prefix import Prefix
from treadle_core.reuse import Reuse
from treadle_core.sequence import Sequence, Status
from treadle_core.waiting import WaitingQueue

HEADROOM = 256


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds of a scheduler.

    Attributes:
        max_num_seqs: Most sequences with a row.
        max_queue: Most sequences that wait; one more is refused.
        max_num_batched_tokens: Most tokens of a step, decode and prefill together.
        prefill_step_size: Most prompt tokens of one step.
    """

    max_num_seqs: int = 256
    max_queue: int = 1024
    max_num_batched_tokens: int = 8192
    prefill_step_size: int = 2048


NO_DRAFTS: Mapping[Key, tuple[int, ...]] = {}


class Outcome(Struct, frozen=True):
    """What a step gave a row that is still there: tokens in order, then perhaps why it failed."""

    sequence: Sequence
    sampled: tuple[Sampled, ...]
    failure: str | None = None


class Draft:
    """A plan while it is being made."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.leaves: list[Key] = []
        self.joins: list[RowSetup] = []
        self.work: list[Work] = []
        self.decodes: list[Decode] = []

    def freeze(self, *, fuses: bool) -> Plan:
        """The plan as data."""
        return Plan(
            number=self.number,
            leaves=tuple(self.leaves),
            joins=tuple(self.joins),
            work=tuple(self.work),
            decodes=tuple(self.decodes),
            fuses=fuses,
        )


class Scheduler:
    """Waiting queue, running rows, and the plan of the next step.

    Args:
        layout: Rows and bytes.
        chunk: How much to prefill beside decoding rows.
        queue: Who is next.
        limits: Bounds.
        reuse: What is looked up and stored; None computes everything.
        encoder: Says which media have to be encoded before a chunk; None where there are none.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        chunk: ChunkPolicy,
        queue: WaitingQueue,
        limits: Limits,
        reuse: Reuse | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self._layout = layout
        self._encoder = encoder
        self._chunk = chunk
        self._waiting = queue
        self._limits = limits
        self._reuse = reuse
        self._running: dict[Key, Sequence] = {}
        self._leaving: list[tuple[Sequence, bool]] = []
        self._rows: dict[Key, Sequence] = {}
        self._planned: dict[int, list[tuple[Sequence, int]]] = {}
        self._doomed: list[Sequence] = []
        self._number = 0
        self._num_preemptions = 0
        self._any_suspect = False
        self._next_deadline = math.inf

    @property
    def num_waiting(self) -> int:
        """Sequences without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that are being worked on."""
        return len(self._running)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give its row to others."""
        return self._num_preemptions

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
    def number(self) -> int:
        """Number of the newest plan."""
        return self._number

    @property
    def is_waiting_for_state(self) -> bool:
        """Whether a row waits for state from a slower tier."""
        return any(s.ticket is not None for s in self._running.values())

    @property
    def must_read_first(self) -> bool:
        """Whether the next plan needs tokens that are still in flight."""
        longest = self._layout.longest_alone
        return any(
            # One that can grow no more may have got its last token already.
            s.num_in_flight and (s.synchronous or s.num_computed >= longest)
            for s in self._running.values()
        )

    def add(self, sequences: list[Sequence]) -> None:
        """Queue new sequences, all or none.

        Raises:
            QueueFull: There is no room for all of them.
        """
        if len(self._waiting) + len(sequences) > self._limits.max_queue:
            raise QueueFull(len(self._waiting), self._limits.max_queue)
        for sequence in sequences:
            self._waiting.push(sequence)
            self._next_deadline = min(self._next_deadline, sequence.deadline or math.inf)

    def finish(self, sequence: Sequence, *, keep: bool = True) -> bool:
        """End a sequence in whatever state it is; its row is free from the next plan on.

        Args:
            sequence: Which.
            keep: Whether what its row holds is worth storing.

        Returns:
            Whether the next plan stores something of it.
        """
        self._waiting.discard(sequence)
        self._running.pop(sequence.key, None)
        sequence.move_to(Status.FINISHED)
        if self._reuse is not None:
            self._reuse.forget(sequence)
        # Not by key: the row may be a finished predecessor's that had the same request id.
        if self._rows.get(sequence.key) is not sequence:
            return False
        self._leaving.append((sequence, keep))
        return keep and self._reuse is not None and sequence.num_computed > sequence.num_saved

    def expired(self, now: float) -> list[Sequence]:
        """Unfinished sequences whose deadline has passed."""
        if now < self._next_deadline:
            return []
        limited = [(s.deadline, s) for s in self.sequences if s.deadline is not None]
        self._next_deadline = min((d for d, _ in limited if d > now), default=math.inf)
        return [s for deadline, s in limited if deadline <= now]

    def take_doomed(self) -> list[Sequence]:
        """Sequences found to fit no more, even alone; the caller ends them."""
        doomed, self._doomed = self._doomed, []
        return doomed

    @property
    def decoding(self) -> list[Sequence]:
        """Sequences that decode in the next step, if nothing comes in between, and may draft."""
        if self._any_suspect:
            return []
        rows = self._running.values()
        return [s for s in rows if s.status is Status.DECODE and s.wants_token]

    def plan(self, now: float, drafts: Mapping[Key, tuple[int, ...]] = NO_DRAFTS) -> Plan:
        """Decide the next step. It may be empty.

        Args:
            now: The clock's reading.
            drafts: For rows of :attr:`decoding` with nothing in flight, what they may go on with.
                They are cut to the room that there is.
        """
        self._number += 1
        draft = Draft(self._number)
        self._release_finished(draft)
        only = self._suspect()
        if only is not None:
            self._preempt_others(draft, only)
        preempted = self._make_room_to_decode(draft, now)
        drafts = self._fitting(drafts) if only is None else NO_DRAFTS
        self._make_room_to_draft(draft, drafts)
        self._save_long_answers(draft)
        restored = self._take_arrivals(draft, now)
        admits = not preempted and (self._reuse is None or not self._reuse.holds_back(now))
        prefilled = self._plan_prefill(draft, now, only, drafts, may_admit=admits)
        self._plan_decode(draft, drafts)
        plan = draft.freeze(fuses=self._chunk.fuses(len(draft.decodes)))
        if plan.has_work:
            decoded = (self._running[decode.key] for decode in plan.decodes)
            involved = dict.fromkeys([*restored, *prefilled, *decoded])
            self._planned[plan.number] = [(s, s.epoch) for s in involved]
        return plan

    def alive(self, plan: Plan) -> set[Key]:
        """Answers for which a plan that was not read yet still counts."""
        return {s.key for s, epoch in self._planned[plan.number] if _is_alive(s, epoch)}

    def apply(self, plan: Plan, result: StepResult) -> list[Outcome]:
        """Take a step in.

        Returns:
            For each row that is still alive, its new tokens, for the caller to hand to the
            sequence one by one as far as they count, and why it failed after them.
        """
        involved = self._planned.pop(plan.number)
        self._observe(plan, result)
        outcomes: list[Outcome] = []
        for sequence, epoch in involved:
            if _is_alive(sequence, epoch):
                sampled = result.sampled.get(sequence.key, ())
                failure = result.failures.get(sequence.key)
                sequence.accept(len(sampled))
                if sampled or failure is not None:
                    outcomes.append(Outcome(sequence, sampled, failure))
        return outcomes

    def recover(self, failed: Plan, lost: Iterable[Plan] = ()) -> list[Sequence]:
        """A step failed and took all KV with it: every row goes back to the queue.

        Whoever was in it or in a step after it becomes a suspect and has to run alone until it
        gets a token.

        Args:
            failed: The plan that failed.
            lost: Plans submitted after it.

        Returns:
            The sequence that failed although it ran alone, if that is what happened.
        """
        blamed = self._forget(failed)
        involved = [*blamed, *(entry for plan in lost for entry in self._forget(plan))]
        # One that was preempted since is not alone any more: whoever runs now is not guilty.
        again = [s for s, epoch in blamed if s.suspect and s.epoch == epoch]
        guilty = again if len(blamed) == 1 else []
        for sequence, _ in involved:
            sequence.suspect = True
            sequence.cold = True
        for key in failed.restored:
            if key in self._running:
                self._running[key].cold = True
        self._any_suspect = True
        self._layout.reset()
        self._rows.clear()
        self._leaving.clear()
        for sequence in list(self._running.values()):
            self._send_back(sequence)
        return guilty

    def discard(self, plan: Plan) -> None:
        """Forget a plan that will not be run; :meth:`recover` has to follow."""
        self._forget(plan)

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
        """Who is in a plan that gives no result, and not finished."""
        entries = self._planned.pop(plan.number, [])
        return [(s, epoch) for s, epoch in entries if s.status is not Status.FINISHED]

    def _written(self, key: Key) -> int:
        return self._rows[key].num_computed

    def _release_finished(self, draft: Draft) -> None:
        for sequence, keep in self._leaving:
            self._release(draft, sequence, keep=keep)
        self._leaving.clear()
        for sequence in list(self._running.values()):
            # Its last token is on the way: the row is not needed any more.
            if not sequence.wants_token and sequence.key in self._rows:
                self._release(draft, sequence)

    def _release(self, draft: Draft, sequence: Sequence, *, keep: bool = True) -> None:
        if keep:
            self._save(draft, sequence)
        draft.work += self._layout.release(sequence.key, self._written)
        draft.leaves.append(sequence.key)
        del self._rows[sequence.key]

    def _preempt(self, draft: Draft, sequence: Sequence) -> None:
        """Take the row of a sequence for others."""
        self._requeue(draft, sequence)
        sequence.num_preemptions += 1
        self._num_preemptions += 1

    def _requeue(self, draft: Draft, sequence: Sequence) -> None:
        self._release(draft, sequence)
        self._send_back(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        if self._reuse is not None:
            self._reuse.forget(sequence)
        del self._running[sequence.key]
        sequence.restart()
        self._waiting.push(sequence)

    def _save(self, draft: Draft, sequence: Sequence) -> None:
        if self._reuse is not None:
            save = self._reuse.save(sequence, self._layout.place(sequence.key))
            draft.work += [save] if save is not None else []

    def _save_long_answers(self, draft: Draft) -> None:
        """Store a long answer piece by piece, a row at a time: no step pays for all of it."""
        if self._reuse is not None:
            long = (s for s in self._running.values() if s.status is Status.DECODE)
            due = (s for s in long if s.key in self._rows and self._reuse.is_long_unsaved(s))
            for sequence in islice(due, 1):
                self._save(draft, sequence)

    def _take_arrivals(self, draft: Draft, now: float) -> list[Sequence]:
        """Restore what has come from a slower tier; what has not come is computed.

        Returns:
            Whose rows that concerns.
        """
        restored: list[Sequence] = []
        for sequence in self._running.values():
            if self._reuse is not None and sequence.ticket is not None:
                prefix = self._reuse.poll(sequence, now)
                if prefix is not None:
                    self._restore(draft, sequence, prefix)
                    restored.append(sequence)
        return restored

    def _restore(self, draft: Draft, sequence: Sequence, prefix: Prefix) -> None:
        """Let a row wait for a prefix, or begin with it, unless it holds as much already."""
        assert self._reuse is not None
        if prefix.ticket is None:
            return
        if prefix.num_tokens <= sequence.num_computed:
            self._reuse.release(prefix.ticket)
            return
        if not prefix.ready:
            sequence.ticket = prefix.ticket
            return
        group, row = self._layout.place(sequence.key)
        draft.work.append(
            Restore(
                key=sequence.key,
                group=group,
                row=row,
                ticket=prefix.ticket,
                num_tokens=prefix.num_tokens,
            )
        )
        self._reuse.restored(sequence, prefix)

    def _suspect(self) -> Sequence | None:
        """Who has to run alone now, after a step that failed."""
        if not self._any_suspect:
            return None
        suspects = [s for s in self.sequences if s.suspect]
        self._any_suspect = bool(suspects)
        running = [s for s in suspects if s.status is not Status.WAITING]
        return min(running or suspects, key=lambda s: s.order, default=None)

    def _preempt_others(self, draft: Draft, only: Sequence) -> None:
        for sequence in list(self._running.values()):
            if sequence is not only and sequence.key in self._rows:
                self._requeue(draft, sequence)

    def _make_room_to_decode(self, draft: Draft, now: float) -> bool:
        """Give each decoding row room for a token, taking rows from the last served if need be."""
        preempted = False
        for sequence in sorted(self._running.values(), key=lambda s: s.order):
            while sequence.status is Status.DECODE and sequence.key in self._rows:
                grown = self._layout.extend(sequence.key, sequence.num_computed + 1, self._written)
                if grown is not None:
                    draft.work += grown
                    break
                preempted = True
                self._take_a_row(draft, sequence, now)
        return preempted

    def _fitting(self, drafts: Mapping[Key, tuple[int, ...]]) -> Mapping[Key, tuple[int, ...]]:
        """Drafts of rows that still decode, within half of what the step can take beside them."""
        decoding = [s for s in self._running.values() if s.status is Status.DECODE]
        beside = self._limits.max_num_batched_tokens - len(decoding)
        # A chunk needs two: whoever is prefilled to the end decodes in the same step.
        room = min(beside // 2, beside - 2)
        fitting: dict[Key, tuple[int, ...]] = {}
        for sequence in decoding:
            draft = drafts.get(sequence.key, ())[: max(0, room)]
            if draft:
                fitting[sequence.key] = draft
                room -= len(draft)
        return fitting

    def _make_room_to_draft(self, draft: Draft, drafts: Mapping[Key, tuple[int, ...]]) -> None:
        """Columns for the widest draft of each group, which every row of it is padded to."""
        if not drafts:
            return
        for number, group in list(self._layout.groups.items()):
            most = max((len(drafts.get(key, ())) for key in group.decoding), default=0)
            if most:
                longest = max(self._rows[key].num_computed for key in group.decoding)
                draft.work += self._layout.widen(number, longest + 1 + most)

    def _take_a_row(self, draft: Draft, sequence: Sequence, now: float) -> None:
        """Preempt the least urgent row; end ``sequence`` if it does not even fit alone."""
        if not self._layout.fits_alone(sequence.num_computed + 1):
            self._doomed.append(sequence)
            self._preempt(draft, sequence)
            return
        victims = [s for s in self._running.values() if s.key in self._rows]
        self._preempt(draft, self._waiting.least_urgent(victims, now))

    def _plan_prefill(
        self,
        draft: Draft,
        now: float,
        only: Sequence | None,
        drafts: Mapping[Key, tuple[int, ...]],
        *,
        may_admit: bool,
    ) -> list[Sequence]:
        """Share the step's prompt tokens out; returns who got some."""
        decoding = [s for s in self._running.values() if s.status is Status.DECODE]
        num_decoding = sum(s.key in self._rows for s in decoding)
        room = self._limits.max_num_batched_tokens - num_decoding - sum(map(len, drafts.values()))
        limit = min(self._limits.prefill_step_size, room)
        if limit <= 0:
            return []
        left = budget = self._chunk.budget(num_decoding, limit, len(self._waiting))
        served: list[Sequence] = []
        # Whoever is prefilled to the end decodes in the same step: one token more.
        while left > 0 and room > 1:
            sequence = self._next_to_prefill(draft, now, only, served, may_admit=may_admit)
            if sequence is None:
                break
            served.append(sequence)
            if self._looks_again(draft, sequence, now):
                continue
            ready = self._num_ready(sequence)
            if sequence.num_to_prefill and not ready:
                # The last of the step: what it takes is not known before.
                self._encode(draft, sequence, left / budget * self._chunk.seconds(num_decoding))
                break
            num = self._prefill(draft, sequence, left, min(ready, room - 1))
            left -= num + self._chunk.overhead
            room -= num + 1
            if num_decoding == 0 or left < self._chunk.overhead:
                # With nobody decoding the chunk is large; but the first token of this prompt
                # need not wait for the prompts behind it.
                break
        return served

    def _num_ready(self, sequence: Sequence) -> int:
        """Tokens to prefill whose media are encoded."""
        prompt, num = sequence.request.attachment, sequence.num_to_prefill
        if self._encoder is None or prompt is None or not num:
            return num
        start = sequence.num_computed
        return self._encoder.ready(prompt, start, start + num) - start

    def _encode(self, draft: Draft, sequence: Sequence, seconds: float) -> None:
        start = sequence.num_computed
        draft.work.append(Encode(key=sequence.key, start=start, seconds=seconds))

    def _next_to_prefill(
        self,
        draft: Draft,
        now: float,
        only: Sequence | None,
        served: list[Sequence],
        *,
        may_admit: bool,
    ) -> Sequence | None:
        """Whose prompt goes on: in turns the oldest, so that it ends, and the shortest."""
        started = [s for s in self._running.values() if s.status is Status.PREFILL]
        open_ = [s for s in started if s not in served and s.ticket is None]
        head = (only or self._waiting.peek(now)) if may_admit else None
        if open_ and self._number % 2:
            oldest = min(open_, key=lambda s: self._waiting.rank(s, now))
            if head is None or self._urgency(head, now) >= self._urgency(oldest, now):
                return oldest
        shortest = min(open_, key=lambda s: self._haste(s, now), default=None)
        while head is not None and head.status is Status.WAITING:
            if shortest is None or self._haste(head, now) < self._haste(shortest, now):
                admitted = self._admit(draft, head, now)
                if admitted is None or admitted.ticket is None:
                    return admitted or shortest
                # Its state is on the way; whoever is behind it need not wait for that.
                head = self._waiting.peek(now) if only is None else None
                continue
            # A long one only gets its row, and only so that a shorter one behind it is not stuck.
            mine = self._haste(shortest, now)
            stuck = any(self._haste(s, now) < mine for s in self._waiting)
            if only is not None or not stuck or self._admit(draft, head, now) is None:
                break
            head = self._waiting.peek(now)
        return shortest

    def _urgency(self, sequence: Sequence, now: float) -> float:
        return self._waiting.rank(sequence, now)[0]

    def _haste(self, sequence: Sequence, now: float) -> tuple[float, int, int]:
        """Smallest for the most urgent, and among equally urgent ones for the shortest prompt."""
        urgency, order = self._waiting.rank(sequence, now)
        return urgency, sequence.num_to_prefill, order

    def _admit(self, draft: Draft, sequence: Sequence, now: float) -> Sequence | None:
        """Give the next sequence a row, if there is one for it."""
        if len(self._running) >= self._limits.max_num_seqs:
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
        if self._reuse is not None:
            self._restore(draft, sequence, self._reuse.find(sequence, now))
        return sequence

    def _looks_again(self, draft: Draft, sequence: Sequence, now: float) -> bool:
        """Look a prompt up again before one of its first chunks; whether that is on its way."""
        just_admitted = any(setup.key == sequence.key for setup in draft.joins)
        if self._reuse is None or just_admitted or not self._reuse.has_more(sequence):
            return False
        self._restore(draft, sequence, self._reuse.find(sequence, now))
        return sequence.ticket is not None

    def _prefill(self, draft: Draft, sequence: Sequence, most: int, room: int) -> int:
        """Plan about ``most`` prompt tokens; the row decodes in this step if that was the rest."""
        if sequence.num_to_prefill <= most + min(self._chunk.overhead, most // 4):
            # A chunk of its own for such a rest would cost more than it spares anybody.
            most = sequence.num_to_prefill
        num = min(sequence.num_to_prefill, most, self._limits.prefill_step_size, room)
        if self._reuse is not None:
            num = self._reuse.cut(sequence, num)
        if num > 0:
            start = sequence.num_computed
            group, row = self._layout.place(sequence.key)
            tokens = sequence.tokens(start, start + num)
            draft.work.append(
                Prefill(key=sequence.key, group=group, row=row, tokens=tokens, start=start)
            )
            sequence.computes(start, start + num)
            sequence.num_computed += num
            if self._reuse is not None and self._reuse.is_due(sequence):
                self._save(draft, sequence)
        # The forward of another group would come on top of the chunk: that is for the next step.
        if sequence.num_to_prefill == 0 and not (num and self._needs_its_own_forward(sequence)):
            draft.work.append(self._layout.promote(sequence.key, self._written))
            sequence.computes(sequence.num_computed, sequence.num_computed + 1)
            sequence.move_to(Status.DECODE)
        return num

    def _needs_its_own_forward(self, sequence: Sequence) -> bool:
        """Whether rows decode, and none of them in the sequence's group."""
        number, _ = self._layout.place(sequence.key)
        groups = self._layout.groups
        elsewhere = any(group.decoding for n, group in groups.items() if n != number)
        return elsewhere and not groups[number].decoding

    def _plan_decode(self, draft: Draft, drafts: Mapping[Key, tuple[int, ...]]) -> None:
        for number in sorted(self._layout.groups):
            group = self._layout.groups[number]
            # Only now it is known who is in the group, and how large it is.
            room = self._room_to_draft(group) if drafts else 0
            for row, key in enumerate(group.decoding):
                tokens = drafts.get(key, ())[:room]
                draft.decodes.append(self._decode(self._rows[key], number, row, tokens))

    def _room_to_draft(self, group: Group) -> int:
        """Draft tokens that fit behind the longest row of a group."""
        longest = max((self._rows[key].num_computed for key in group.decoding), default=0)
        return max(0, group.capacity - longest - 1)

    def _decode(self, sequence: Sequence, group: int, row: int, tokens: tuple[int, ...]) -> Decode:
        last = sequence.num_tokens - 1
        token = None if sequence.num_in_flight else sequence.tokens(last, last + 1)[0]
        decode = Decode(
            key=sequence.key,
            group=group,
            row=row,
            start=sequence.num_computed,
            num_output=sequence.num_generated,
            token=token,
            draft=tokens,
        )
        sequence.num_computed += 1
        sequence.num_in_flight += 1
        sequence.num_drafted = len(tokens)
        return decode

    def _observe(self, plan: Plan, result: StepResult) -> None:
        for prefill, seconds in zip(plan.prefills, result.prefill_seconds, strict=False):
            self._chunk.observe(len(plan.decodes), len(prefill.tokens), seconds)
        if result.fused:
            num_prefill = len(plan.prefills[-1].tokens)
            self._chunk.observe_fused(len(plan.decodes), num_prefill, result.decode_seconds)
        # A wide forward does not tell what a chunk makes the streams wait beyond.
        elif plan.decodes and not plan.has_drafts:
            self._chunk.observe(len(plan.decodes), 0, result.decode_seconds)


def _is_alive(sequence: Sequence, epoch: int) -> bool:
    """Whether it goes on with the rows that it had in this epoch."""
    return sequence.status is not Status.FINISHED and sequence.epoch == epoch


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
        attachment=request.attachment,
    )
