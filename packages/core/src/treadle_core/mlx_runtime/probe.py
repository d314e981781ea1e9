"""Whether a model's rows may share a forward: proven at load by comparing with its own run."""

import mlx.core as mx
from msgspec.structs import replace

from treadle_core.errors import describe
from treadle_core.layers import ModelSpec
from treadle_core.mlx_runtime.adapter import TextModel
from treadle_core.mlx_runtime.groups import RowGroup, SlotGroup
from treadle_core.plan import Open, Promote, Resize

PROMPTS = ((5, 3, 7, 2, 11), (6, 4, 9))
DECODED = (8, 10)
CAPACITY = 64
# Half precision rounds differently in other shapes; a wrong cache is wrong by far more.
TOLERANCE = 0.05


def check_batching(model: TextModel, spec: ModelSpec) -> ModelSpec:
    """``spec``, with ``batched`` off and a note if two rows together differ from each alone."""
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
    """Logits ``[rows, vocab]`` of each decode step of two rows that share a forward."""
    group = SlotGroup(model, spec.layers, slack=0, width_step=CAPACITY)
    prompts = [list(prompt) for prompt in PROMPTS]
    # The second row decodes its whole prompt, from an empty row on.
    starts = [len(prompts[0]) - 1, 0]
    group.resize(Resize(0, len(prompts), CAPACITY))
    for row in range(len(prompts)):
        group.open(Open(0, row))
        if starts[row]:
            group.prefill(row, prompts[row][:-1], 0)
        group.promote(Promote(0, row, row, starts[row], starts[row]))
    found: list[mx.array] = []
    for step, fed in enumerate(_feed(prompts, starts)):
        found.append(_decode(group, fed, [start + step for start in starts]))
    return found


def run_alone(model: TextModel) -> list[mx.array]:
    """The same logits from the model's own caches, one row after the other."""
    rows: list[list[mx.array]] = []
    for prompt, start in zip(PROMPTS, (len(PROMPTS[0]) - 1, 0), strict=True):
        cache = model.new_cache()
        if start:
            mx.eval(model.forward(mx.array([list(prompt[:start])]), cache))
        fed = [*prompt[start:], *DECODED][: len(PROMPTS[1])]
        rows.append([model.forward(mx.array([[token]]), cache)[0, -1] for token in fed])
    return [mx.stack([row[step] for row in rows]) for step in range(len(PROMPTS[1]))]


def relative_difference(left: list[mx.array], right: list[mx.array]) -> float:
    """Largest difference over the largest absolute value."""
    a, b = (mx.stack(side).astype(mx.float32) for side in (left, right))
    value: float = (mx.max(mx.abs(a - b)) / mx.maximum(mx.max(mx.abs(b)), 1e-6)).item()  # pyright: ignore[reportAssignmentType]
    return value


def _feed(prompts: list[list[int]], starts: list[int]) -> list[list[int]]:
    rows = [
        [*prompt[start:], *DECODED][: len(PROMPTS[1])]
        for prompt, start in zip(prompts, starts, strict=True)
    ]
    return [list(column) for column in zip(*rows, strict=True)]


def _decode(group: RowGroup, tokens: list[int], starts: list[int]) -> mx.array:
    logits = group.decode(mx.array(tokens)[:, None], starts)[:, -1]
    mx.eval(logits)
    return logits
