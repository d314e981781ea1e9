"""Rows that come and go at random, held against mlx-lm's own run of each sequence alone.

A :class:`Driver` plays the scheduler's part at the level of row groups: it asks a
:class:`~treadle_core.kv_layout.KvLayout` for instructions, obeys them, prefills and decodes with
tokens that are known beforehand, and compares the logits of every position. Columns that belong
to nobody are filled with huge numbers, so that a mask which lets one of them through shows.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from msgspec.structs import replace

from treadle_core.kv_layout import KvLayout
from treadle_core.layers import ModelSpec
from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.groups import RowGroup, SlotGroup, SoloGroup
from treadle_core.mlx_runtime.recording import record_inputs
from treadle_core.mlx_runtime.stores import AttentionStore, QuantisedStore
from treadle_core.plan import Close, Instruction, Key, Open, Promote, Resize, Transfer
from treadle_core.testing import zoo

TOLERANCE = 1e-4
GARBAGE = 1e4
ALL_ONES = mx.array(2**32 - 1, dtype=mx.uint32)
CONTEXT = 512
NUM_BYTES = 256
POISON = 300

# The families that the engine promises to be right for; the zoo's others run as well.
PROMISED = (
    "llama",
    "qwen3",
    "moe",
    "gemma3",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
    "mamba2_hybrid",
    "lfm2",
    "nemotron_h",
    "llama4",
    "gpt_bigcode",
)

# Their attention wants an int offset (llama4, gpt_bigcode) or no batch in its mask (gemma2).
SOLO = frozenset({"llama4", "gpt_bigcode", "gemma2"})


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under test and what was found out about it."""

    family: str
    model: TextModel
    spec: ModelSpec


@cache
def subject(family: str, **overrides: int) -> Subject:
    """The family's tiny model, built once per process."""
    model = TextModel(zoo.build(family, **overrides))
    spec = inspect(model, zoo.config(family, **overrides))
    # Not the probe's verdict: it would turn a fault of the slots into rows that run alone.
    return Subject(family, model, replace(spec, batched=family not in SOLO))


@cache
def poisoned(family: str, **overrides: int) -> Subject:
    """The family's model with a token, ``POISON``, that makes everything behind it NaN."""
    target = subject(family, **overrides)
    model = zoo.build(family, **overrides)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    path = next(p for p in weights if p.endswith(("embed_tokens.weight", "wte.weight")))
    weights[path][POISON] = math.nan
    model.load_weights([(path, weights[path])], strict=False)
    return Subject(family, TextModel(model), target.spec)


@cache
def reference(target: Subject, tokens: tuple[int, ...]) -> np.ndarray:
    """Logits ``[len(tokens), vocab]`` of mlx-lm's own run over ``tokens`` alone."""
    return np.array(zoo.reference_logits(target.model.model, tokens))


def deviation(actual: np.ndarray, expected: np.ndarray, scale: float | None = None) -> float:
    """Largest difference, as a part of the largest absolute logit; NaN counts as infinite."""
    largest = np.abs(actual - expected).max() / (scale or np.abs(expected).max())
    return float(largest) if np.isfinite(largest) else float("inf")


def random_tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    """Bytes, so that no special token ends anything."""
    return tuple(rng.randrange(NUM_BYTES) for _ in range(length))


class NarrowLayout(KvLayout):
    """A layout whose capacity classes are a few dozen tokens wide, so that rows change groups.

    Args:
        layers: See :class:`KvLayout`.
        limits: Largest row of each class.
        **options: See :class:`KvLayout`.
    """

    def __init__(self, layers: Any, *, limits: tuple[int, ...], **options: Any) -> None:
        super().__init__(layers, context_length=limits[-1], **options)
        if options.get("shared", True):
            self._limits = limits


@dataclass
class Script:
    """One row's life, decided beforehand.

    Attributes:
        key: Its name.
        tokens: Everything that it is fed.
        num_prompt: How many of them are the prompt: all but the last one are prefilled.
        chunk: Most tokens of a prefill; None takes all at once.
        num_steps: It leaves when this many tokens are written.
        headroom: Tokens beyond its prompt that its first group should have room for.
        written: How far it is.
        compared: Positions whose logits were held against the reference.
    """

    key: Key
    tokens: tuple[int, ...]
    num_prompt: int
    chunk: int | None
    num_steps: int
    headroom: int = 0
    written: int = 0
    compared: set[int] = field(default_factory=set)

    @property
    def is_prefilled(self) -> bool:
        return self.written >= self.num_prompt - 1

    @property
    def is_over(self) -> bool:
        return self.written >= self.num_steps


class Driver:
    """Obeys a layout's instructions with real buffers, and checks every logit that comes out.

    Args:
        target: The model.
        budget_bytes: Most bytes of the layout; no limit by default.
        slack: Tokens that a ring holds beyond its window.
        spec: What the layers keep, when that differs from ``target.spec``.
        expect: Expected logits of a sequence; the model's own run by default.
        width_step: Granularity of attention width.
        spoils: Whether columns that hold no token are filled with huge numbers all the time;
            otherwise they keep what their last owner left.
        tolerance: Most that a logit may be off, as a part of the logits' scale.
    """

    def __init__(
        self,
        target: Subject,
        *,
        budget_bytes: int | None = None,
        slack: int = 0,
        spec: ModelSpec | None = None,
        expect: Callable[[tuple[int, ...]], np.ndarray] | None = None,
        width_step: int = 64,
        spoils: bool = True,
        tolerance: float = TOLERANCE,
    ) -> None:
        self.target = target
        self.spec = spec or target.spec
        self.layout = NarrowLayout(
            self.spec.layers,
            limits=(64, 128, CONTEXT),
            budget_bytes=budget_bytes,
            max_rows=16,
            slack=slack,
            shared=self.spec.batched,
        )
        self.slack = slack
        self.width_step = width_step
        self.spoils = spoils
        self.tolerance = tolerance
        self.expect = expect or (lambda tokens: reference(target, tokens))
        self.groups: dict[int, RowGroup] = {}
        self.running: dict[Key, Script] = {}
        self.worst = 0.0
        self.obeyed: set[str] = set()

    def admit(self, script: Script) -> bool:
        """Give a row to a script; False when there is no room."""
        instructions = self.layout.admit(script.key, script.num_prompt, script.headroom)
        if instructions is None:
            return False
        script.written = 0
        self.running[script.key] = script
        self.obey(instructions)
        if script.is_prefilled:
            self.promote(script)
        return True

    def prefill(self, script: Script) -> None:
        """Write the next chunk of the prompt; promote the row when that was the rest."""
        stop = min(script.written + (script.chunk or CONTEXT), script.num_prompt - 1)
        group, row = self.layout.place(script.key)
        chunk = script.tokens[script.written : stop]
        logits = self.groups[group].prefill(row, chunk, script.written)
        mx.eval(logits, self.groups[group].arrays())
        self.compare(script, np.array(logits)[0], script.written)
        script.written = stop
        if script.is_prefilled:
            self.promote(script)

    def promote(self, script: Script) -> None:
        """The row decodes from now on."""
        self.obey([self.layout.promote(script.key, self.written)])

    def decode(self, num_tokens: int, rng: random.Random) -> list[Script]:
        """Feed ``num_tokens`` to every decoding row, of which each row keeps some.

        Returns:
            Scripts that lost their row, because another one had to grow.
        """
        evicted = self.make_room(num_tokens)
        for number, group in self.layout.groups.items():
            scripts = [self.running[key] for key in group.decoding]
            if not scripts:
                continue
            kept = [rng.randint(1, min(num_tokens, len(s.tokens) - s.written)) for s in scripts]
            fed = [
                s.tokens[s.written : s.written + num] + random_tokens(rng, num_tokens - num)
                for s, num in zip(scripts, kept, strict=True)
            ]
            starts = [s.written for s in scripts]
            logits = self.groups[number].decode(mx.array(fed), starts)
            mx.eval(logits, self.groups[number].arrays())
            if num_tokens > 1:
                self.groups[number].keep(kept)
            for script, num, row in zip(scripts, kept, np.array(logits), strict=True):
                self.compare(script, row[:num], script.written)
                script.written += num
        return evicted

    def release(self, script: Script) -> None:
        """The row leaves, whatever it was doing."""
        self.obey(self.layout.release(script.key, self.written))
        del self.running[script.key]

    def make_room(self, num_tokens: int) -> list[Script]:
        """Give every decoding row room for more tokens, at the cost of the newest row."""
        evicted: list[Script] = []
        for script in list(self.running.values()):
            while script.key in self.running and script.is_prefilled:
                length = script.written + num_tokens
                instructions = self.layout.extend(script.key, length, self.written)
                if instructions is not None:
                    self.obey(instructions)
                    break
                evicted.append(list(self.running.values())[-1])
                self.release(evicted[-1])
        return evicted

    def written(self, key: Key) -> int:
        """Tokens in the row of ``key``."""
        return self.running[key].written

    def obey(self, instructions: list[Instruction]) -> None:
        """Change buffers and rows as the layout says."""
        for change in instructions:
            self.obeyed.add(type(change).__name__)
            if isinstance(change, Resize) and change.rows == 0:
                self.groups.pop(change.group, None)
                continue
            if change.group not in self.groups:
                self.groups[change.group] = self.new_group()
            match change:
                case Resize():
                    self.groups[change.group].resize(change)
                case Open():
                    self.groups[change.group].open(change)
                case Promote():
                    self.groups[change.group].promote(change)
                case Close():
                    self.groups[change.group].close(change)
                case Transfer():
                    self.groups[change.to_group].insert(change, self.groups[change.group])
        self.layout.check_integrity()
        if self.spoils:
            self.spoil_unused()

    def new_group(self) -> RowGroup:
        """An empty group of the kind that the model needs."""
        if not self.spec.batched:
            return SoloGroup(self.target.model)
        if self.slack:
            record_inputs(self.target.model.model)
        return SlotGroup(
            self.target.model, self.spec.layers, slack=self.slack, width_step=self.width_step
        )

    def spoil_unused(self) -> None:
        """Overwrite every column that holds no token of its row."""
        for number, group in self.groups.items():
            if isinstance(group, SlotGroup):
                rows = self.layout.groups[number]
                lengths = [self.written(key) for key in [*rows.decoding, *rows.prefilling]]
                for store in group.stores:
                    if isinstance(store, AttentionStore | QuantisedStore):
                        spoil(store, lengths)

    def compare(self, script: Script, logits: np.ndarray, start: int) -> None:
        """Hold logits of the positions from ``start`` on against the reference."""
        script.compared.update(range(start, start + len(logits)))
        if POISON in script.tokens:
            return
        expected = self.expect(script.tokens)
        positions = slice(start, start + len(logits))
        error = deviation(logits, expected[positions], float(np.abs(expected).max()))
        self.worst = max(self.worst, error)
        assert error < self.tolerance, (
            f"{self.target.family}: row {script.key[0]} is off by {error:.2g} of the logits' scale "
            f"at positions {start} to {start + len(logits) - 1} of a prompt of {script.num_prompt}"
        )


def spoil(store: AttentionStore | QuantisedStore, lengths: list[int]) -> None:
    """Fill what lies behind each row's tokens with huge numbers of either sign."""
    rows = [*lengths, *[0] * (store.rows - len(lengths))]
    column = mx.arange(store.columns)
    unused = (column[None] >= mx.array(rows)[:, None])[:, None, :, None]
    garbage = mx.where(column % 2 == 0, GARBAGE, -GARBAGE)[None, None, :, None]
    if isinstance(store, QuantisedStore):
        # As packed numbers these are all ones: the garbage is in scales and biases too.
        store.buffers = [
            mx.where(unused, ALL_ONES if b.dtype == mx.uint32 else garbage, b)
            for b in store.buffers
        ]
        return
    store.keys = mx.where(unused, garbage, store.keys)
    store.values = mx.where(unused, garbage, store.values)


def random_scripts(rng: random.Random, lengths: list[int], num_decoded: int) -> list[Script]:
    """A script per prompt length, some of which leave early; chunks of 1, 7, 64 and all."""
    chunks = [1, 7, 64, None]
    scripts: list[Script] = []
    for number, length in enumerate(lengths):
        tokens = random_tokens(rng, length + rng.randint(1, num_decoded) - 1)
        leaves_early = rng.random() < 0.25
        num_steps = rng.randint(1, len(tokens)) if leaves_early else len(tokens)
        scripts.append(
            Script(
                key=(f"row-{number}", 0),
                tokens=tokens,
                num_prompt=length,
                chunk=chunks[number % len(chunks)],
                num_steps=num_steps,
                headroom=rng.choice([0, 0, 40]),
            )
        )
    rng.shuffle(scripts)
    return scripts


def play(driver: Driver, scripts: list[Script], rng: random.Random, num_tokens: int = 1) -> None:
    """Run scripts to their ends; joins, chunks, decodes and leaves are interleaved at random.

    Args:
        driver: Has no rows yet.
        scripts: In the order in which they join.
        rng: Decides what happens next.
        num_tokens: Most tokens that a decode feeds to each row.
    """
    waiting = list(reversed(scripts))
    while waiting or driver.running:
        if waiting and (not driver.running or rng.random() < 0.3):
            script = waiting.pop()
            if not driver.admit(script):
                assert driver.running, "a row does not fit alone"
                waiting.append(script)
        for script in list(driver.running.values()):
            if not script.is_prefilled and rng.random() < 0.7:
                driver.prefill(script)
            if script.is_over:
                driver.release(script)
        if any(script.is_prefilled for script in driver.running.values()):
            waiting += driver.decode(rng.randint(1, num_tokens), rng)
        for script in list(driver.running.values()):
            if script.is_over:
                driver.release(script)
    for script in scripts:
        assert script.compared >= set(range(script.num_steps)), "a position was not compared"
