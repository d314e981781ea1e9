"""What each layer of a model keeps is found by asking its own caches."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from treadle_core.layers import Composite, FullAttention, LayerSpec, Opaque, Recurrent, Window
from treadle_core.mlx_runtime.adapter import (
    DEFAULT_CONTEXT,
    TextModel,
    context_length,
    describe_cache,
    inspect,
)
from treadle_core.testing import zoo

FULL = FullAttention(2, 16, 16, "float32")
RING = Window(2, 16, 16, "float32", zoo.SLIDING_WINDOW)


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama", [FULL] * 3),
        ("gemma3", [RING, FULL] * 2),
        ("gpt_oss", [RING, FULL] * 2),
        ("deepseek_v3", [FullAttention(1, 32, 8, "float32")] * 3),
        (
            "deepseek_v32",
            [Composite((FullAttention(1, 32, 8, "float32"), FullAttention(1, 16, 16, "float32")))]
            * 3,
        ),
        ("lfm2", [Recurrent(((2, 64),), ("float32",)), FULL] * 2),
        ("nemotron_h", None),
    ],
)
def test_layers_are_described_as_they_are(family: str, layers: list[LayerSpec] | None) -> None:
    spec = inspect(TextModel(zoo.build(family)), zoo.config(family))

    if layers is not None:
        assert spec.layers == tuple(layers)
    assert spec.vocab_size == zoo.VOCAB_SIZE
    assert spec.context_length == 4096
    assert spec.model_type == zoo.config(family)["model_type"]
    assert spec.batched


def test_gated_delta_layers_keep_a_convolution_and_a_state() -> None:
    spec = inspect(TextModel(zoo.build("qwen3_next")), zoo.config("qwen3_next"))

    *linear, attention = spec.layers
    # Keys and queries of 2 heads and values of 4, each 32 wide, for the 3 tokens before.
    expected = Recurrent(((3, 2 * 2 * 32 + 4 * 32), (4, 32, 32)), ("float32", "float32"))
    assert linear == [expected] * 3
    assert attention == FULL


def test_layers_with_an_unknown_cache_are_opaque_and_named() -> None:
    spec = inspect(TextModel(zoo.build("llama4")), zoo.config("llama4"))

    assert not spec.batched
    assert spec.note == "layers with ChunkedKVCache run one row at a time"
    assert any(isinstance(layer, Opaque) and layer.bytes_per_token > 0 for layer in spec.layers)


def filled(cache: Any, num_tokens: int = 3) -> Any:
    keys = mx.zeros((1, 2, num_tokens, 8), dtype=mx.float16)
    cache.update_and_fetch(keys, mx.zeros((1, 2, num_tokens, 4), dtype=mx.float16))
    return cache


class OwnCache(KVCache):
    """Whoever derives a cache may mean something else by it."""


def test_caches_of_mlx_lm_are_known_and_others_are_not() -> None:
    arrays = ArraysCache(2)
    arrays[0], arrays[1] = mx.zeros((1, 3, 5)), mx.zeros((1, 7), dtype=mx.int32)
    full = FullAttention(2, 8, 4, "float16")

    assert describe_cache(filled(KVCache())) == full
    assert describe_cache(filled(RotatingKVCache(max_size=9, keep=4))) == Window(
        2, 8, 4, "float16", 9, 4
    )
    assert describe_cache(arrays) == Recurrent(((3, 5), (7,)), ("float32", "int32"))
    assert describe_cache(CacheList(filled(KVCache()), arrays)) == Composite(
        (full, Recurrent(((3, 5), (7,)), ("float32", "int32")))
    )


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(KVCache(), id="unused"),
        pytest.param(ArraysCache(2), id="arrays without content"),
        pytest.param(filled(OwnCache()), id="derived"),
        pytest.param(filled(ChunkedKVCache(16)), id="chunked"),
        pytest.param(
            CacheList(filled(OwnCache()), filled(KVCache())), id="list with a derived one"
        ),
        pytest.param(CacheList(CacheList(filled(KVCache()))), id="list in a list"),
    ],
)
def test_what_is_not_exactly_known_is_opaque(cache: Any) -> None:
    assert isinstance(describe_cache(cache), Opaque)


def test_a_quantised_cache_is_opaque() -> None:
    cache = QuantizedKVCache(group_size=32)
    cache.update_and_fetch(mx.zeros((1, 2, 3, 32)), mx.zeros((1, 2, 3, 32)))

    assert isinstance(describe_cache(cache), Opaque)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": 100, "text_config": {"max_position_embeddings": 512}}, 100),
        ({"max_position_embeddings": None, "max_seq_len": 77}, 77),
        ({"max_position_embeddings": 0}, DEFAULT_CONTEXT),
        ({"text_config": None}, DEFAULT_CONTEXT),
        ({}, DEFAULT_CONTEXT),
    ],
)
def test_the_context_length_is_what_the_config_names(config: Any, expected: int) -> None:
    assert context_length(config) == expected


def test_a_model_may_bring_its_own_way_to_make_caches() -> None:
    made: list[Any] = []

    def make(model: Any) -> list[Any]:
        made.append(model)
        return [KVCache() for _ in model.layers]

    model = zoo.build("llama")
    text = TextModel(model, make)

    assert inspect(text, zoo.config("llama")).layers == (FULL,) * 3
    assert made == [model]
