"""What a model can do, proven at load by comparing with its own run.

That is whether its rows may share a forward, and whether its attention takes quantised KV.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, QuantizedKVCache
from msgspec.structs import replace

from treadle_core.errors import Unsupported, describe
from treadle_core.layers import (
    Composite,
    FullAttention,
    LayerSpec,
    ModelSpec,
    Quantised,
    Recurrent,
    flatten,
    is_recurrent,
)
from treadle_core.mlx_runtime import fusing
from treadle_core.mlx_runtime.adapter import ModelAdapter
from treadle_core.mlx_runtime.groups import RowGroup, SlotGroup
from treadle_core.mlx_runtime.host import pack_caches, unpack_caches
from treadle_core.mlx_runtime.recording import record_inputs
from treadle_core.mlx_runtime.stores import blank_state
from treadle_core.plan import Open, Promote, Resize

# Of different lengths, so that a row that takes another's position differs; the last one decodes
# its whole prompt, from an empty row on.
PROMPTS = ((5, 3, 7, 2, 11), (6, 4, 9), (8,))
DECODED = (12, 10)
# Of those and the token before them, by row; what comes then.
KEPT = (1, 3, 2)
NEXT = 13
CAPACITY = 64
STORED_TOKENS = 24
# Most that logits may differ, as a part of their scale: other shapes round differently. Over the tiny
# families, of a few layers, that was 1.3e-6, 3e-3 and 3e-2 at most; a wrong cache is wrong by far
# more, and a model of many layers that is taken for wrong runs one row at a time.
TOLERANCES = {mx.float32: 1e-3, mx.float16: 0.05, mx.bfloat16: 0.05}
# A number of quantised KV may be rounded to its neighbour.
QUANTISED_TOLERANCE = 0.05
# Of the same shapes. Known families that start from zeros give the same bits in any precision.
START_TOLERANCE = 1e-3


def tolerance_of(model: ModelAdapter) -> float:
    """Most that logits may differ where a model computes the same in other shapes."""
    parameters: Any = tree_flatten(model.model.parameters())
    found = [TOLERANCES[array.dtype] for _, array in parameters if array.dtype in TOLERANCES]
    # A GPU may multiply float32 with as few bits as float16 has (TF32).
    least = 0.0 if mx.default_device() == mx.cpu else TOLERANCES[mx.float16]
    return max(least, max(found, default=max(TOLERANCES.values())))


def check_batching(model: ModelAdapter, spec: ModelSpec) -> ModelSpec:
    """``spec``, with ``batched`` off and a note if rows together differ from each alone."""
    if not spec.batched:
        return spec
    try:
        batched = run_together(model, spec)
        alone = run_alone(model, model.new_cache)
        difference = relative_difference(batched, alone)
        start = start_difference(model, spec)
    except Exception as error:  # noqa: BLE001 — unknown models may raise anything
        return replace(spec, batched=False, note=f"batching raised {describe(error)}")
    if not start <= START_TOLERANCE:
        note = f"state of zeros is no fresh state: they differ by {start:.2g} of the logits' scale"
        return replace(spec, batched=False, note=note)
    if not difference <= tolerance_of(model):
        note = f"batched rows differ from single ones by {difference:.2g} of the logits' scale"
        return replace(spec, batched=False, note=note)
    return spec


def start_difference(model: ModelAdapter, spec: ModelSpec) -> float:
    """How far a prompt's logits are off if recurrent state starts from zeros, as slots have it.

    A model may tell a row that begins by its having no state at all, and treat its first token
    otherwise. That shows clearly only here: in reduced precision it could pass for rounding.
    """
    if not is_recurrent(spec):
        return 0.0
    fresh, zeros = model.new_cache(), model.new_cache()
    for cache, layer in zip(zeros, spec.layers, strict=True):
        _blank(cache, layer)
    chunk = mx.array([PROMPTS[0]])
    return relative_difference([model.forward(chunk, zeros)], [model.forward(chunk, fresh)])


def check_storing(model: ModelAdapter, spec: ModelSpec) -> ModelSpec:
    """``spec``, with ``storable`` off and a note if a row's own caches do not come back as they were.

    What slots keep is known; a model's own caches may hold more than they tell.
    """
    if spec.batched:
        return spec
    try:
        differs = not goes_on_from_stored(model)
        note = "a row that was stored and restored goes on differently" if differs else ""
    except Exception as error:  # noqa: BLE001 — unknown caches may raise anything
        note = f"storing a row raised {describe(error)}"
    if not note:
        return spec
    return replace(spec, storable=False, note="; ".join(filter(None, (spec.note, note))))


def goes_on_from_stored(model: ModelAdapter) -> bool:
    """Whether logits are the same after a row's caches went through host memory."""
    caches, restored = model.new_cache(), model.new_cache()
    prompt = [token + 1 for token in range(STORED_TOKENS)]
    mx.eval(model.forward(mx.array([prompt]), caches))
    unpack_caches(restored, pack_caches(caches))
    for token in (*DECODED, *DECODED):
        one, other = (model.forward(mx.array([[token]]), row) for row in (caches, restored))
        if not mx.array_equal(one, other):
            return False
    return True


def check_quantising(model: ModelAdapter, spec: ModelSpec) -> None:
    """Prove that the model's attention takes the quantised KV that ``spec`` says.

    Raises:
        Unsupported: It raises, or rows of a batch differ from mlx-lm's own quantised run.
    """
    parts = [part for layer in spec.layers for part in flatten(layer)]
    number = sum(isinstance(part, FullAttention) for part in parts)
    subject = (
        f"kv_bits cannot be honoured for {spec.model_type}: full attention over quantised KV, "
        f"in {number} of its {len(spec.layers)} layers,"
    )
    try:
        batched = run_together(model, spec)
        alone = run_alone(model, lambda: quantised_caches(model, spec.layers))
        difference = relative_difference(batched, alone)
    except Exception as error:
        raise Unsupported(f"{subject} raised {describe(error)}") from error
    if not difference <= QUANTISED_TOLERANCE:
        raise Unsupported(
            f"{subject} differs between batched and single rows by {difference:.2g} of the "
            "logits' scale"
        )


def quantised_caches(model: ModelAdapter, layers: Sequence[LayerSpec]) -> list[Any]:
    """The model's own caches for one row, with mlx-lm's quantised ones where ``layers`` say so."""
    pairs = zip(model.new_cache(), layers, strict=True)
    return [_quantised_cache(cache, layer) for cache, layer in pairs]


def check_drafts(model: ModelAdapter, spec: ModelSpec) -> str:
    """What is wrong with several tokens per row in one forward, and taking some back; or nothing.

    Every row is fed a draft, of which each keeps another number of tokens. Then they go on with
    another one than was drafted.

    Full precision is held against the model's own run token by token. In reduced precision a
    model differs from itself when it is fed several tokens at once, without bound where it routes
    them to experts; so there it is held against its own run over as many.
    """
    at_once = tolerance_of(model) > TOLERANCES[mx.float32]
    try:
        written, group = run_wide(model, spec)
        ahead = relative_difference(written, run_alone(model, at_once=at_once))
        gone_back = relative_difference([take_back(group)], [went_back(model, at_once=at_once)])
    except Exception as error:  # noqa: BLE001 — unknown models may raise anything
        return f"a forward of several tokens per row raised {describe(error)}"
    difference = max(ahead, gone_back)
    if not difference <= tolerance_of(model):
        return f"logits of several tokens per row differ by {difference:.2g} of their scale"
    return ""


def check_fusing(model: ModelAdapter, spec: ModelSpec) -> bool:
    """Whether a chunk may go through the model together with decoding rows; prepares it for that.

    That is for layers whose KV is written where it is read: then the chunk's own row decodes in
    the same pass. Rings and recurrent state take a chunk over only when it is through.
    """
    parts = [part for layer in spec.layers for part in flatten(layer)]
    plain = all(isinstance(part, FullAttention) and part.quantised is None for part in parts)
    if not (spec.batched and plain and fusing.prepare(model.model)):
        return False
    try:
        difference = relative_difference(run_fused(model, spec), run_together(model, spec))
    except Exception:  # noqa: BLE001 — unknown models may raise anything, and run apart then
        return False
    return difference <= tolerance_of(model)


def run_fused(model: ModelAdapter, spec: ModelSpec) -> list[mx.array]:
    """As :func:`run_together`, but one row's prompt goes with the first decode of all rows."""
    order = [*range(1, len(PROMPTS)), 0]
    prompts = [PROMPTS[place] for place in order]
    group, starts = _prefilled(model, spec, slack=0, prompts=prompts, lazy=True)
    row, chunk = len(prompts) - 1, prompts[-1][:-1]
    columns = zip(*(decoded(prompt) for prompt in prompts), strict=True)
    first = mx.array([list(next(columns))]).T
    _, logits = fusing.run_together(
        lambda: group.prefill(row, chunk, 0), lambda: group.decode(first, starts)
    )
    mx.eval(logits)
    steps = [
        logits[:, -1],
        *(_decode(group, list(fed), [s + i for s in starts]) for i, fed in enumerate(columns, 1)),
    ]
    back = mx.array([order.index(place) for place in range(len(order))])
    return [step[back] for step in steps]


def run_wide(model: ModelAdapter, spec: ModelSpec) -> tuple[list[mx.array], SlotGroup]:
    """Logits of all that the rows decode, from one forward, and their group after it."""
    group, starts = _prefilled(model, spec, slack=len(DECODED))
    tokens = mx.array([list(decoded(prompt)) for prompt in PROMPTS])
    logits = group.decode(tokens, starts)
    mx.eval(logits)
    return [logits[:, step] for step in range(tokens.shape[1])], group


def take_back(group: RowGroup) -> mx.array:
    """Logits ``[rows, vocab]`` of the next token behind what each row keeps."""
    group.keep(KEPT)
    starts = [len(prompt) - 1 + num for prompt, num in zip(PROMPTS, KEPT, strict=True)]
    return _decode(group, [NEXT] * len(PROMPTS), starts)


def went_back(model: ModelAdapter, *, at_once: bool = False) -> mx.array:
    """The same logits from each row's own run over what it keeps."""
    runs = {
        num: run_alone(model, tokens=DECODED[: num - 1], then=(NEXT,), at_once=at_once)
        for num in set(KEPT)
    }
    return mx.stack([runs[num][-1][row] for row, num in enumerate(KEPT)])


def run_together(model: ModelAdapter, spec: ModelSpec) -> list[mx.array]:
    """Logits ``[rows, vocab]`` of each decode step of rows that share a forward."""
    group, starts = _prefilled(model, spec, slack=0)
    columns = zip(*(decoded(prompt) for prompt in PROMPTS), strict=True)
    return [
        _decode(group, list(fed), [start + step for start in starts])
        for step, fed in enumerate(columns)
    ]


def run_alone(
    model: ModelAdapter,
    new_cache: Callable[[], list[Any]] | None = None,
    tokens: tuple[int, ...] = DECODED,
    then: tuple[int, ...] = (),
    *,
    at_once: bool = False,
) -> list[mx.array]:
    """The same logits from caches of mlx-lm's, one row after the other.

    Args:
        model: The model.
        new_cache: Makes a row's caches; the model's own by default.
        tokens: What each row is fed after its prompt.
        then: What it is fed after those, one by one.
        at_once: Feed the prompt's last token and ``tokens`` in one forward.
    """
    rows: list[list[mx.array]] = []
    for prompt in PROMPTS:
        cache = (new_cache or model.new_cache)()
        if len(prompt) > 1:
            mx.eval(model.forward(mx.array([prompt[:-1]]), cache))
        first = (prompt[-1], *tokens)
        chunks = [first] if at_once else [(token,) for token in first]
        chunks += [(token,) for token in then]
        logits = [model.forward(mx.array([chunk]), cache)[0] for chunk in chunks]
        rows.append([row for part in logits for row in part])
    return [mx.stack(list(step)) for step in zip(*rows, strict=True)]


def decoded(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that a row is fed one by one."""
    return (prompt[-1], *DECODED)


def relative_difference(left: list[mx.array], right: list[mx.array]) -> float:
    """Largest difference over the largest absolute value."""
    a, b = (mx.stack(side).astype(mx.float32) for side in (left, right))
    value: float = (mx.max(mx.abs(a - b)) / mx.maximum(mx.max(mx.abs(b)), 1e-6)).item()  # pyright: ignore[reportAssignmentType]
    return value


def _prefilled(
    model: ModelAdapter,
    spec: ModelSpec,
    *,
    slack: int,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    lazy: bool = False,
) -> tuple[SlotGroup, list[int]]:
    """Rows that hold all of their prompts but the last token, and how much that is.

    With ``lazy`` the last row is still empty.
    """
    if slack and is_recurrent(spec):
        record_inputs(model.model)
    group = SlotGroup(model, spec.layers, slack=slack, width_step=CAPACITY)
    starts = [len(prompt) - 1 for prompt in prompts]
    group.resize(Resize(0, len(prompts), CAPACITY))
    for row, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        group.open(Open(0, row))
        if start and not (lazy and row == len(prompts) - 1):
            group.prefill(row, prompt[:start], 0)
        group.promote(Promote(0, row, row, start, start))
    return group, starts


def _decode(group: RowGroup, tokens: list[int], starts: list[int]) -> mx.array:
    logits = group.decode(mx.array(tokens)[:, None], starts)[:, -1]
    mx.eval(logits)
    return logits


def _quantised_cache(cache: Any, layer: LayerSpec) -> Any:
    match layer:
        case FullAttention(quantised=Quantised(bits, group_size)):
            return QuantizedKVCache(group_size=group_size, bits=bits)
        case Composite(parts):
            pairs = zip(cache.caches, parts, strict=True)
            return CacheList(*(_quantised_cache(inner, part) for inner, part in pairs))
        case _:
            return cache


def _blank(cache: Any, layer: LayerSpec) -> None:
    """Fill a fresh cache's recurrent state with zeros."""
    match layer:
        case Recurrent():
            cache.cache = blank_state(layer)
        case Composite(parts):
            for inner, part in zip(cache.caches, parts, strict=True):
                _blank(inner, part)
        case _:
            return
