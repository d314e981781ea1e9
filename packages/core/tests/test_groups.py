"""Groups of rows: joining, leaving and decoding touch no other row's memory; limits hold."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from treadle_core.kv_layout import KvLayout
from treadle_core.layers import FullAttention, ModelSpec, is_recurrent
from treadle_core.mlx_runtime.adapter import RowInput, TextModel, inspect
from treadle_core.mlx_runtime.groups import SlotGroup, SoloGroup
from treadle_core.mlx_runtime.load import quantised
from treadle_core.mlx_runtime.masks import Positions
from treadle_core.mlx_runtime.stores import AttentionStore
from treadle_core.plan import Close, Move, Open, Promote, Resize, Transfer
from treadle_core.testing import zoo

CONTEXT = 512
NUM_ROWS = 8
PROMPT = list(range(20))

# Small models with buffers of 8 to 17 MB for 8 rows of 512 tokens, two of them per layer.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 512},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 512},
    "gemma3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": CONTEXT,
    },
}
# One query head per head of keys: for more, the CPU's quantised product copies what it looks at.
QUANTISED: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama of 8 bits": ("llama", {**SHAPES["llama"], "head_dim": 512}, 8),
    "llama of 4 bits": ("llama", {**SHAPES["llama"], "head_dim": 1024}, 4),
}
every_shape = pytest.mark.parametrize("family", [*SHAPES, *QUANTISED])


@cache
def model_of(family: str) -> tuple[TextModel, ModelSpec]:
    name, shape, bits = QUANTISED.get(family) or (family, SHAPES[family], None)
    options = {"num_hidden_layers": 2, **shape}
    model = TextModel(zoo.build(name, **options))
    spec = inspect(model, zoo.config(name, **options))
    return model, spec if bits is None else quantised(spec, bits, 64)


def group_of(family: str, num_rows: int) -> SlotGroup:
    """A group of 8 rows of 512 tokens, of which the first few decode."""
    model, spec = model_of(family)
    group = SlotGroup(model, spec.layers, slack=0, width_step=64)
    group.resize(Resize(0, NUM_ROWS, CONTEXT))
    for row in range(num_rows):
        join(group, row)
    mx.eval(group.arrays())
    return group


def join(group: SlotGroup, row: int) -> None:
    """Open a row, prefill it and let it decode."""
    group.open(Open(0, row))
    mx.eval(group.prefill(row, PROMPT, 0), group.arrays())
    group.promote(Promote(0, row, row, len(PROMPT), len(PROMPT)))


def extra_peak(group: SlotGroup, action: Callable[[], Any]) -> float:
    """Memory that an action took beyond what there was, in parts of the largest buffer."""
    action()  # once before, for what is made only once
    mx.eval(group.arrays())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    action()
    mx.eval(group.arrays())
    return (mx.get_peak_memory() - before) / max(array.nbytes for array in group.arrays())


class TestMemory:
    """A copy of one buffer would show as an extra peak of at least 1."""

    @every_shape
    def test_decoding_writes_in_place(self, family: str) -> None:
        group = group_of(family, NUM_ROWS)

        def five_steps() -> None:
            for step in range(5):
                starts = [len(PROMPT) + step] * NUM_ROWS
                logits = group.decode(mx.zeros((NUM_ROWS, 1), dtype=mx.int32), starts)
                mx.eval(logits, group.arrays())

        assert extra_peak(group, five_steps) < 0.5

    @every_shape
    def test_decoding_some_of_the_rows_writes_in_place(self, family: str) -> None:
        group = group_of(family, 3)

        def a_step() -> None:
            starts = [len(PROMPT)] * 3
            logits = group.decode(mx.zeros((3, 1), dtype=mx.int32), starts)
            mx.eval(logits, group.arrays())

        assert extra_peak(group, a_step) < 0.5

    @every_shape
    def test_a_row_that_joins_and_leaves_copies_no_other_row(self, family: str) -> None:
        group = group_of(family, NUM_ROWS - 1)

        def join_and_leave() -> None:
            join(group, NUM_ROWS - 1)
            move = Move(NUM_ROWS - 1, 2, len(PROMPT))
            group.close(Close(0, 2, (move,)))

        assert extra_peak(group, join_and_leave) < 0.5

    @every_shape
    def test_rows_that_trade_places_copy_no_other_row(self, family: str) -> None:
        group = group_of(family, NUM_ROWS - 2)

        def trade() -> None:
            for row in (NUM_ROWS - 2, NUM_ROWS - 1):
                group.open(Open(0, row))
                mx.eval(group.prefill(row, PROMPT, 0), group.arrays())
            lengths = len(PROMPT), len(PROMPT)
            group.promote(Promote(0, NUM_ROWS - 1, NUM_ROWS - 2, *lengths))
            group.close(Close(0, NUM_ROWS - 1, ()))
            group.close(Close(0, NUM_ROWS - 2, ()))

        assert extra_peak(group, trade) < 0.5

    def test_a_row_that_goes_to_another_group_copies_no_other_row(self) -> None:
        source, target = group_of("llama", 2), group_of("llama", NUM_ROWS - 1)

        def transfer() -> None:
            to = NUM_ROWS - 1
            target.insert(Transfer(0, 1, 1, to, (), len(PROMPT)), source)
            target.close(Close(1, to, ()))

        assert extra_peak(target, transfer) < 0.5

    @pytest.mark.parametrize(("rows", "capacity"), [(8, 512), (4, 512), (8, 256), (4, 128)])
    def test_a_change_of_size_takes_no_more_than_one_layer_twice(
        self, rows: int, capacity: int
    ) -> None:
        options = {**SHAPES["llama"], "num_hidden_layers": 6}
        model = TextModel(zoo.build("llama", **options))
        spec = inspect(model, zoo.config("llama", **options))
        group = SlotGroup(model, spec.layers, slack=0, width_step=64)
        group.resize(Resize(0, 4, 256))
        for row in range(4):
            join(group, row)
        mx.eval(group.arrays())
        mx.clear_cache()
        held = sum(array.nbytes for array in group.arrays())
        others = mx.get_active_memory() - held
        mx.reset_peak_memory()

        group.resize(Resize(0, rows, capacity))
        mx.eval(group.arrays())

        after = sum(array.nbytes for array in group.arrays())
        layer = max(held, after) / len(spec.layers)
        assert mx.get_peak_memory() - others <= max(held, after) + 1.01 * layer
        assert after == allocated(spec, rows, capacity)


def allocated(spec: ModelSpec, rows: int, capacity: int, slack: int = 0) -> int:
    """What the bookkeeping counts for a group of this size."""
    layout = KvLayout(
        spec.layers, budget_bytes=None, max_rows=rows, context_length=capacity, slack=slack
    )
    for row in range(rows):
        layout.admit((f"{row}", 0), capacity, 0)
    assert [(g.rows, g.capacity) for g in layout.groups.values()] == [(rows, capacity)]
    return layout.allocated_bytes


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("family", [family for family in zoo.FAMILIES if family != "llama4"])
def test_bytes_that_are_counted_are_bytes_that_are_allocated(family: str, slack: int) -> None:
    model = TextModel(zoo.build(family))
    spec = inspect(model, zoo.config(family))
    group = SlotGroup(model, spec.layers, slack=slack, width_step=64)
    group.resize(Resize(0, 3, 128))

    for row in range(3):
        group.open(Open(0, row))
        group.promote(Promote(0, row, row, 0, 0))
    if slack and is_recurrent(spec):
        group.decode(mx.zeros((3, 1 + slack), dtype=mx.int32), [0, 0, 0])

    assert sum(array.nbytes for array in group.arrays()) == allocated(spec, 3, 128, slack)


class TestLimits:
    def group(self) -> SlotGroup:
        model, spec = model_of("llama")
        group = SlotGroup(model, spec.layers, slack=0, width_step=64)
        group.resize(Resize(0, 2, 64))
        group.open(Open(0, 0))
        return group

    def test_a_row_that_outgrew_its_buffer_is_refused(self) -> None:
        group = self.group()
        group.promote(Promote(0, 0, 0, 0, 0))

        group.decode(mx.zeros((1, 1), dtype=mx.int32), [63])
        with pytest.raises(AssertionError, match="a row outgrew its buffer"):
            group.decode(mx.zeros((1, 1), dtype=mx.int32), [64])
        with pytest.raises(AssertionError, match="a row outgrew its buffer"):
            group.decode(mx.zeros((1, 2), dtype=mx.int32), [63])

    def test_a_chunk_that_exceeds_its_row_is_refused(self) -> None:
        group = self.group()

        group.prefill(0, [1] * 60, 0)
        with pytest.raises(AssertionError, match="a chunk exceeds its row"):
            group.prefill(0, [1] * 5, 60)

    def test_rows_are_opened_at_the_end_only(self) -> None:
        with pytest.raises(AssertionError, match="rows are opened at the end"):
            self.group().open(Open(0, 0))

    def test_rows_of_their_own_do_not_move_between_groups(self) -> None:
        group = SoloGroup(model_of("llama")[0])
        group.open(Open(0, 0))

        with pytest.raises(AssertionError, match="do not move between groups"):
            group.insert(Transfer(0, 0, 1, 0, (), 1), group)


class RememberingModel(TextModel):
    """Remembers which rows it was given."""

    def __init__(self, model: TextModel) -> None:
        super().__init__(model.model)
        self.seen: list[list[RowInput]] = []

    def forward(
        self, tokens: mx.array, caches: list[Any], rows: Sequence[RowInput] = ()
    ) -> mx.array:
        self.seen.append(list(rows))
        return super().forward(tokens, caches, rows)


@pytest.mark.parametrize("solo", [False, True])
def test_the_model_is_told_where_rows_stand_and_what_their_prompts_bring(solo: bool) -> None:
    text, spec = model_of("llama")
    model = RememberingModel(text)
    group = SoloGroup(model) if solo else SlotGroup(model, spec.layers, slack=0, width_step=64)
    group.resize(Resize(0, 2, 64))
    for row, prompt in enumerate((None, "picture")):
        group.open(Open(0, row))
        group.prefill(row, PROMPT[: row + 3], 0, prompt)
        group.promote(Promote(0, row, row, row + 3, row + 3))

    group.decode(mx.zeros((2, 1), dtype=mx.int32), [3, 4], [None, "picture"])
    group.decode(mx.zeros((2, 1), dtype=mx.int32), [4, 5])

    decoded = [RowInput(3), RowInput(4, "picture"), RowInput(4), RowInput(5)]
    assert model.seen[:2] == [[RowInput(0)], [RowInput(0, "picture")]]
    assert [row for rows in model.seen[2:] for row in rows] == decoded


def test_a_batch_knows_its_longest_row_without_reading_an_array() -> None:
    """As mlx-vlm's models ask for it, once for each forward."""
    store = AttentionStore(FullAttention(1, 4, 4, "float32"), 0)
    store.resize(2, 64, 0)

    view = store.batch_view(Positions([3, 7]), 64)

    assert view._offset == 7
