"""Whether a model's rows may share a forward: proven at load by comparing with its own run."""

import mlx.core as mx
from msgspec.structs import replace

from treadle_core.errors import describe
from treadle_core.layers import ModelSpec
from treadle_core.mlx_runtime.adapter import TextModel
from treadle_core.mlx_runtime.groups import RowGroup, SlotGroup
from treadle_core.plan import Open, Promote, Resize

# Of different lengths, so that a row that takes another's position differs; the last one decodes
# its whole prompt, from an empty row on.
PROMPTS = ((5, 3, 7, 2, 11), (6, 4, 9), (8,))
DECODED = (12, 10)
CAPACITY = 64
# Half precision rounds differently in other shapes; a wrong cache is wrong by far more.
TOLERANCE = 0.05


def check_batching(model: TextModel, spec: ModelSpec) -> ModelSpec:
    """``spec``, with ``batched`` off and a note if rows together differ from each alone."""
    if not spec.batched:
        return spec
    try:
        batched = run_together(model, spec)
        alone = run_alone(model)
        difference = relative_difference(batched, alone)
    except Exception as error:  # noqa: BLE001 — unknown models may raise anything
        return replace(spec, batched=False, note=f"batching raised {describe(error)}")
    if not difference <= TOLERANCE:
        note = f"batched rows differ from single ones by {difference:.2g} of the logits' scale"
        return replace(spec, batched=False, note=note)
    return spec


def run_together(model: TextModel, spec: ModelSpec) -> list[mx.array]:
    """Logits ``[rows, vocab]`` of each decode step of rows that share a forward."""
    group = SlotGroup(model, spec.layers, slack=0, width_step=CAPACITY)
    starts = [len(prompt) - 1 for prompt in PROMPTS]
    group.resize(Resize(0, len(PROMPTS), CAPACITY))
    for row, (prompt, start) in enumerate(zip(PROMPTS, starts, strict=True)):
        group.open(Open(0, row))
        if start:
            group.prefill(row, prompt[:start], 0)
        group.promote(Promote(0, row, row, start, start))
    columns = zip(*(decoded(prompt) for prompt in PROMPTS), strict=True)
    return [
        _decode(group, list(fed), [start + step for start in starts])
        for step, fed in enumerate(columns)
    ]


def run_alone(model: TextModel) -> list[mx.array]:
    """The same logits from the model's own caches, one row after the other."""
    rows: list[list[mx.array]] = []
    for prompt in PROMPTS:
        cache = model.new_cache()
        if len(prompt) > 1:
            mx.eval(model.forward(mx.array([prompt[:-1]]), cache))
        rows.append([model.forward(mx.array([[token]]), cache)[0, -1] for token in decoded(prompt)])
    return [mx.stack(list(step)) for step in zip(*rows, strict=True)]


def decoded(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that a row is fed one by one."""
    return (prompt[-1], *DECODED)


def relative_difference(left: list[mx.array], right: list[mx.array]) -> float:
    """Largest difference over the largest absolute value."""
    a, b = (mx.stack(side).astype(mx.float32) for side in (left, right))
    value: float = (mx.max(mx.abs(a - b)) / mx.maximum(mx.max(mx.abs(b)), 1e-6)).item()  # pyright: ignore[reportAssignmentType]
    return value


def _decode(group: RowGroup, tokens: list[int], starts: list[int]) -> mx.array:
    logits = group.decode(mx.array(tokens)[:, None], starts)[:, -1]
    mx.eval(logits)
    return logits
