"""Lanes of a draft are sampled as plain steps would be, whatever the rows ask for."""

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from treadle_core.mlx_runtime.sampler import Sampler
from treadle_core.mlx_runtime.verifying import verify
from treadle_core.plan import Decode, RowSetup, Sampled
from treadle_core.request import SamplingParams
from treadle_core.testing import ScriptedConstraint

VOCAB = 12
ENDS = (3, 4)
STEPS = 12
PROMPT = (1, 2, 2)

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.5},
    "filtered": {"temperature": 2.0, "top_k": 4, "top_p": 0.8},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.8, "frequency_penalty": 1.5},
    "present": {"temperature": 1.0, "presence_penalty": 2.0, "logit_bias": {5: 2.0}},
    "bounded": {"temperature": 0.0, "min_tokens": 5, "logit_bias": {3: 9.0, 4: 8.0}},
}


class Rows:
    """Rows of every kind over logits that are known beforehand, by position."""

    def __init__(self, constraint: ScriptedConstraint | None = None) -> None:
        self.sampler = Sampler(VOCAB)
        self.setups: dict[str, RowSetup] = {}
        self.found: dict[str, list[Sampled]] = {}
        self.failed: dict[str, str] = {}
        self.logits: dict[str, np.ndarray] = {}
        for seed, (name, params) in enumerate(KINDS.items()):
            self.setups[name] = RowSetup(
                key=(name, 0),
                params=SamplingParams(logprobs=True, top_logprobs=2, **params),
                seed=seed,
                end_tokens=ENDS,
                prompt=PROMPT,
                output=[],
                constraint=constraint if name == "greedy" else None,
            )
            self.sampler.join(self.setups[name])
            self.found[name] = []
            chance = np.random.default_rng(seed)
            self.logits[name] = chance.normal(0, 2, (2 * STEPS, VOCAB)).astype(np.float32)

    def length(self, name: str) -> int:
        return len(self.setups[name].output)

    def step(self, drafts: dict[str, tuple[int, ...]] | None = None) -> None:
        """One step of all rows that have not failed; without drafts, a plain one."""
        names = [name for name in self.setups if name not in self.failed]
        decodes = [self.decode(name, (drafts or {}).get(name, ())) for name in names]
        lanes = [
            self.logits[name][self.length(name) + place]
            for name, decode in zip(names, decodes, strict=True)
            for place in range(1 + len(decode.draft))
        ]
        logits = mx.array(np.stack(lanes))
        if drafts is None:
            sampled, failures = self.sampler.choose(logits, decodes).read_rows()
        else:
            sampled, failures = verify(self.sampler, logits, decodes).read_rows()
        for name in names:
            tokens = sampled.get((name, 0), ())
            output: Any = self.setups[name].output
            output += [one.token for one in tokens]
            self.found[name] += tokens
            if (name, 0) in failures:
                self.failed[name] = failures[name, 0]

    def decode(self, name: str, draft: tuple[int, ...]) -> Decode:
        num = self.length(name)
        start = len(PROMPT) + num - 1
        return Decode(
            key=(name, 0), group=0, row=0, start=start, num_output=num, token=0, draft=draft
        )


def plain(num_steps: int = STEPS) -> Rows:
    rows = Rows()
    for _ in range(num_steps):
        rows.step()
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_a_draft_that_is_right_for_a_while_gives_what_plain_steps_give(seed: int) -> None:
    truth, rows, chance = plain(), Rows(), random.Random(seed)
    while min(map(rows.length, KINDS)) < STEPS - 4:
        drafts: dict[str, tuple[int, ...]] = {}
        for name in KINDS:
            known = [one.token for one in truth.found[name][rows.length(name) :]]
            draft = known[: chance.randint(0, 4)]
            if draft and chance.random() < 0.4:
                draft[-1] = (draft[-1] + 1) % VOCAB
            drafts[name] = tuple(draft) if rows.length(name) < STEPS - 4 else ()
        rows.step(drafts if any(drafts.values()) else None)

    for name in KINDS:
        for mine, other in zip(rows.found[name], truth.found[name], strict=False):
            assert mine.token == other.token, name
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [t.token for t in mine.top_logprobs] == [t.token for t in other.top_logprobs]


def test_what_a_rejected_draft_would_have_met_fails_nobody() -> None:
    rows, truth = Rows(), plain()
    right = truth.found["greedy"][0].token
    rows.logits["greedy"][1] = np.nan
    rows.logits["drawn"][1] = np.nan
    wrong = (truth.found["drawn"][0].token + 1) % VOCAB

    rows.step({"greedy": (right, 0), "drawn": (wrong,)})

    assert rows.found["greedy"][0].token == right
    assert len(rows.found["greedy"]) == 1
    assert set(rows.failed) == {"greedy"}
    assert "not finite" in rows.failed["greedy"]
    assert rows.found["drawn"][0].token == truth.found["drawn"][0].token


@pytest.mark.parametrize("complete_after", [None, 1, 2, 3])
@pytest.mark.parametrize("allowed", [None, {5, 6}])
def test_a_grammar_follows_the_draft_and_is_back_where_it_was(
    complete_after: int | None, allowed: set[int] | None
) -> None:
    def grammar() -> ScriptedConstraint:
        return ScriptedConstraint(
            [None, allowed, None], complete_after=complete_after, vocab_size=VOCAB
        )

    truth = Rows(grammar())
    for _ in range(3):
        truth.step()
        constraint: Any = truth.setups["greedy"].constraint
        constraint.advance(truth.found["greedy"][-1].token)
    tokens = [one.token for one in truth.found["greedy"]]
    asked = grammar()
    rows = Rows(asked)

    rows.step({"greedy": tuple(tokens[:2])})

    found = [one.token for one in rows.found["greedy"]]
    assert found == tokens[: min(3, complete_after or 3)]
    assert asked.taken == []


class Watched(ScriptedConstraint):
    """Keeps every token that it was ever advanced with."""

    def __init__(self, allowed: list[set[int]]) -> None:
        super().__init__(allowed, vocab_size=VOCAB)
        self.seen: list[int] = []

    def advance(self, token: int) -> bool:
        self.seen.append(token)
        return super().advance(token)


def test_a_draft_that_the_grammar_forbids_is_not_taken() -> None:
    asked = Watched([{5}, {6}])
    rows = Rows(asked)

    rows.step({"greedy": (7, 6)})

    assert [one.token for one in rows.found["greedy"]] == [5]
    assert asked.taken == asked.seen == []


def test_a_grammar_that_refuses_to_go_on_is_asked_no_further() -> None:
    asked = ScriptedConstraint(
        [{5}, {6}], advance_error=ValueError("no"), error_after=1, vocab_size=VOCAB
    )
    rows = Rows(asked)

    rows.step({"greedy": (5, 6, 7)})

    assert [one.token for one in rows.found["greedy"]] == [5, 6]
    assert asked.taken == []
    assert not rows.failed
