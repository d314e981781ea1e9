"""Two forwards in one pass over the weights give what each gives alone."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from treadle_core.layers import ModelSpec
from treadle_core.mlx_runtime import fusing
from treadle_core.mlx_runtime.adapter import TextModel, inspect
from treadle_core.mlx_runtime.groups import SlotGroup
from treadle_core.mlx_runtime.probe import check_fusing, relative_difference
from treadle_core.plan import Open, Promote, Resize
from treadle_core.testing import zoo

FUSED = ("llama", "qwen3", "moe", "deepseek_v3", "deepseek_v32")
APART = ("gemma3", "gpt_oss", "qwen3_next", "mamba2_hybrid", "llama4", "gpt_bigcode")
DECODING = (tuple(range(10, 40)), tuple(range(60, 80)))
CHUNKED = tuple(range(90, 131))


class Toy(nn.Module):
    """Layers that are called in an order of the caller's choice, then one that never meets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]

    def __call__(self, x: mx.array, order: list[int]) -> mx.array:
        for number in order:
            x = mx.tanh(self.layers[number](x))
        return self.layers[-1](x)


@pytest.fixture
def toy() -> Toy:
    model = Toy()
    assert fusing.prepare(model)
    return model


def products(folder: Path, *outputs: mx.array) -> int:
    """Matrix products in the graph of some arrays."""
    drawing = folder / "graph.dot"
    mx.export_to_dot(str(drawing), *outputs)
    return drawing.read_text().count('"Matmul"')


@pytest.mark.parametrize(
    ("one", "other", "num_products"),
    [
        ([0, 1, 2], [0, 1, 2], 3 + 2),
        ([0, 1], [0, 1, 2], 2 + 1 + 2),
        ([0, 1, 2], [2], 1 + 2 + 2),
        ([2, 1, 0], [0, 1, 2], 3 + 2 + 2),
        ([], [0, 1, 2], 3 + 2),
        ([1, 1, 1], [1, 1], 3 + 2),
    ],
)
def test_forwards_meet_where_both_arrive_and_call_their_own_elsewhere(
    toy: Toy, tmp_path: Path, one: list[int], other: list[int], num_products: int
) -> None:
    chunk, rows = mx.random.normal((1, 5, 8)), mx.random.normal((3, 1, 8))

    together = fusing.run_together(partial(toy, chunk, one), partial(toy, rows, other))

    assert products(tmp_path, *together) == num_products
    for mine, alone in zip(together, (toy(chunk, one), toy(rows, other)), strict=True):
        assert mine.shape == alone.shape
        assert mx.allclose(mine, alone, atol=1e-6)


@pytest.mark.parametrize("which", [0, 1])
def test_whoever_raises_ends_both(toy: Toy, which: int) -> None:
    ended: list[str] = []

    def fails() -> None:
        toy(mx.zeros((1, 2, 8)), [0])
        raise RuntimeError("as if a layer had failed")

    def waits() -> None:
        try:
            toy(mx.zeros((1, 2, 8)), [0, 1, 2])
        finally:
            ended.append("waits")

    forwards = [waits, waits]
    forwards[which] = fails
    with pytest.raises(RuntimeError, match="as if a layer"):
        fusing.run_together(forwards[0], forwards[1])
    assert ended == ["waits"]

    # And the model is as good as before.
    assert toy(mx.zeros((1, 2, 8)), [0, 1, 2]).shape == (1, 2, 8)


def test_a_prepared_model_keeps_its_names_classes_and_arrays() -> None:
    model = zoo.build("llama")
    before = {name: module for name, module in model.named_modules() if "proj" in name}
    weights = {name: module.weight for name, module in before.items()}
    kinds = {name: (type(m).__name__, type(m).__module__) for name, m in before.items()}

    assert fusing.prepare(model)

    after = {name: module for name, module in model.named_modules() if "proj" in name}
    assert {name: (type(m).__name__, type(m).__module__) for name, m in after.items()} == kinds
    assert all(after[name].weight is weight for name, weight in weights.items())
    assert all(isinstance(module, nn.Linear) for module in after.values())


def test_a_model_without_linear_layers_is_left_alone() -> None:
    assert not fusing.prepare(nn.Sequential(nn.Embedding(4, 4)))


def loaded(family: str, **overrides: Any) -> tuple[TextModel, ModelSpec]:
    model = TextModel(zoo.build(family, **overrides))
    return model, inspect(model, zoo.config(family, **overrides))


def rows_of(model: TextModel, spec: ModelSpec, capacity: int = 128) -> SlotGroup:
    """Two decoding rows, and one with half of its prompt."""
    group = SlotGroup(model, spec.layers, slack=0, width_step=64)
    group.resize(Resize(0, 3, capacity))
    for row, prompt in enumerate(DECODING):
        group.open(Open(0, row))
        group.prefill(row, prompt[:-1], 0)
        group.promote(Promote(0, row, row, len(prompt) - 1, len(prompt) - 1))
    group.open(Open(0, 2))
    group.prefill(2, CHUNKED[:11], 0)
    mx.eval(group.arrays())
    return group


def step(group: SlotGroup, *, joins: bool, fused: bool) -> list[mx.array]:
    """A chunk and a decode, then a decode of all three rows."""
    rows = [*DECODING, CHUNKED] if joins else [*DECODING]
    tokens = mx.array([[row[-1]] for row in rows])
    starts = [len(row) - 1 for row in rows]

    def chunk() -> None:
        # Whoever keeps its logits keeps all that they would be computed from.
        group.prefill(2, CHUNKED[11:-1], 11)

    decode = partial(group.decode, tokens, starts)
    if fused:
        _, logits = fusing.run_together(chunk, decode)
    else:
        chunk()
        mx.eval(group.arrays())
        logits = decode()
    mx.eval(logits, group.arrays())
    starts = [len(DECODING[0]), len(DECODING[1]), len(CHUNKED) - 1 + joins]
    after = group.decode(mx.array([[3], [4], [5]]), starts)
    mx.eval(after, group.arrays())
    return [logits[:, -1], after[:, -1]]


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("family", FUSED)
def test_a_chunk_beside_decoding_rows_changes_no_logits(family: str, joins: bool) -> None:
    model, spec = loaded(family)
    apart = step(rows_of(model, spec), joins=joins, fused=False)
    assert check_fusing(model, spec)

    together = step(rows_of(model, spec), joins=joins, fused=True)

    for mine, theirs in zip(together, apart, strict=True):
        assert relative_difference([mine], [theirs]) < 1e-5


@pytest.mark.parametrize("family", APART)
def test_layers_that_take_a_chunk_over_in_the_end_run_apart(family: str) -> None:
    model, spec = loaded(family)

    assert not check_fusing(model, spec)


def test_no_buffer_is_copied() -> None:
    model, spec = loaded("llama")
    assert check_fusing(model, spec)
    group = rows_of(model, spec, capacity=16_384)
    step(group, joins=True, fused=True)
    smallest = min(array.nbytes for array in group.arrays())
    held = mx.get_active_memory()
    mx.reset_peak_memory()

    step(group, joins=True, fused=True)

    assert mx.get_peak_memory() - held < smallest
