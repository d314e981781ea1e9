"""The tiny models are healthy references: finite, context dependent and consistent."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from treadle_core.testing import zoo

# Longer than the sliding window and than two attention chunks.
PROMPT = [(37 * i * i + 11 * i + 5) % 256 for i in range(40)]
LONG_PROMPT = [(53 * i * i + 29 * i + 3) % 256 for i in range(100)]

every_family = pytest.mark.parametrize("family", zoo.FAMILIES)


@cache
def model_of(family: str) -> nn.Module:
    return zoo.build(family)


def deviation(actual: mx.array, expected: mx.array) -> float:
    """Largest difference, as a part of the largest absolute logit expected."""
    return (mx.abs(actual - expected).max() / mx.abs(expected).max()).item()


def with_token_changed(tokens: list[int], position: int) -> list[int]:
    changed = list(tokens)
    changed[position] = (changed[position] + 101) % 256
    return changed


@every_family
def test_logits_are_finite_and_of_healthy_scale(family: str) -> None:
    logits = zoo.reference_logits(model_of(family), LONG_PROMPT)

    assert logits.shape == (len(LONG_PROMPT), zoo.VOCAB_SIZE)
    assert logits.dtype == mx.float32
    assert mx.isfinite(logits).all().item()
    assert 2.0 < mx.abs(logits).max().item() < 30.0


@every_family
@pytest.mark.parametrize("distance", [8, 14])
def test_a_recent_token_changes_the_last_logits(family: str, distance: int) -> None:
    prompt = PROMPT[:16]
    changed = with_token_changed(prompt, len(prompt) - 1 - distance)

    before = zoo.reference_logits(model_of(family), prompt)
    after = zoo.reference_logits(model_of(family), changed)

    assert deviation(after[-1], before[-1]) > 5e-3


@every_family
@pytest.mark.parametrize("prompt", [PROMPT, LONG_PROMPT], ids=["40_tokens", "100_tokens"])
def test_an_early_token_changes_the_last_logits(family: str, prompt: list[int]) -> None:
    # Every family has a layer with full attention or a recurrent state, so nothing is out of sight.
    before = zoo.reference_logits(model_of(family), prompt)
    after = zoo.reference_logits(model_of(family), with_token_changed(prompt, 1))

    assert deviation(after[-1], before[-1]) > 5e-3


@every_family
def test_a_token_leaves_the_logits_before_it_alone(family: str) -> None:
    before = zoo.reference_logits(model_of(family), PROMPT)
    after = zoo.reference_logits(model_of(family), with_token_changed(PROMPT, 34))

    assert deviation(after[:34], before[:34]) < 1e-5


@every_family
@pytest.mark.parametrize("prefill", [1, 7])
def test_token_by_token_equals_one_pass(family: str, prefill: int) -> None:
    whole = zoo.reference_logits(model_of(family), PROMPT)
    stepwise = zoo.reference_logits(model_of(family), PROMPT, prefill=prefill)

    assert deviation(stepwise, whole) < 1e-4


@every_family
def test_chunks_of_uneven_length_equal_one_pass(family: str) -> None:
    model = model_of(family)
    kv_cache = make_prompt_cache(model)
    bounds = [0, 7, 14, 40, 41, 75, 100]

    chunks = [
        model(mx.array([LONG_PROMPT[start:end]]), cache=kv_cache)[0]
        for start, end in pairwise(bounds)
    ]

    whole = zoo.reference_logits(model, LONG_PROMPT)
    assert deviation(mx.concatenate(chunks), whole) < 1e-4


@every_family
def test_the_seed_alone_decides_the_weights(family: str) -> None:
    mx.random.seed(99)
    same, other = zoo.build(family, seed=0), zoo.build(family, seed=1)

    expected = zoo.reference_logits(model_of(family), PROMPT[:8])

    assert mx.array_equal(zoo.reference_logits(same, PROMPT[:8]), expected).item()
    assert deviation(zoo.reference_logits(other, PROMPT[:8]), expected) > 0.1


@every_family
def test_greedy_tokens_are_the_likeliest_and_vary(family: str) -> None:
    model = model_of(family)

    generated = zoo.greedy(model, PROMPT[:12], 16)

    logits = zoo.reference_logits(model, PROMPT[:12] + generated)
    assert generated == mx.argmax(logits[11:-1], axis=-1).tolist()
    assert len(set(generated)) >= 4


@every_family
def test_a_saved_checkpoint_loads_with_the_same_logits(family: str, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint(family, tmp_path / "model")

    loaded, tokenizer = load(str(folder))

    actual = zoo.reference_logits(loaded, PROMPT)
    assert mx.array_equal(actual, zoo.reference_logits(model_of(family), PROMPT)).item()
    assert tokenizer.eos_token_ids == {zoo.EOS_ID}


@every_family
def test_the_configuration_survives_json_and_is_fresh(family: str) -> None:
    first = zoo.config(family)

    first["model_type"] = "changed"
    first.get("text_config", first)["vocab_size"] = 1

    again = zoo.config(family)
    assert again["model_type"] != "changed"
    assert again.get("text_config", again)["vocab_size"] == zoo.VOCAB_SIZE
    assert json.loads(json.dumps(again)) == again


@pytest.mark.parametrize(
    ("family", "key", "limit"),
    [
        ("gemma3", "sliding_window", zoo.SLIDING_WINDOW),
        ("gpt_oss", "sliding_window", zoo.SLIDING_WINDOW),
        ("olmo3", "sliding_window", zoo.SLIDING_WINDOW),
        ("llama4", "attention_chunk_size", zoo.ATTENTION_CHUNK),
        ("deepseek_v32", "index_topk", zoo.config("deepseek_v32")["index_topk"]),
    ],
)
def test_a_limit_on_attention_is_felt_right_behind_it(family: str, key: str, limit: int) -> None:
    unlimited = zoo.build(family, **{key: 4096})

    limited_logits = zoo.reference_logits(model_of(family), PROMPT)
    unlimited_logits = zoo.reference_logits(unlimited, PROMPT)

    # The second comparison skips tokens that a limit may happen to affect only a little.
    assert deviation(limited_logits[:limit], unlimited_logits[:limit]) < 1e-5
    assert deviation(limited_logits[limit + 4], unlimited_logits[limit + 4]) > 1e-3


def test_deepseek_v3_also_builds_without_compressed_queries() -> None:
    model = zoo.build("deepseek_v3", q_lora_rank=None)

    whole = zoo.reference_logits(model, PROMPT)

    assert deviation(zoo.reference_logits(model, PROMPT, prefill=30), whole) < 1e-4


def test_overrides_reach_the_text_section_of_a_nested_configuration() -> None:
    settings = zoo.config("qwen3_5", hidden_size=32, eos_token_id=7)

    assert settings["text_config"]["hidden_size"] == 32
    assert settings["eos_token_id"] == 7
    assert "hidden_size" not in settings


def test_an_overridden_vocabulary_size_is_the_width_of_the_logits() -> None:
    model = zoo.build("llama", vocab_size=300)

    assert zoo.reference_logits(model, [1, 2]).shape == (2, 300)


def test_an_unknown_family_is_refused_with_the_known_names() -> None:
    with pytest.raises(KeyError, match=r"unknown family 'gpt9'.*llama.*nemotron_h"):
        zoo.build("gpt9")


@pytest.mark.parametrize(("tokens", "prefill"), [([], None), ([1, 2], 0), ([1, 2], 3)])
def test_a_prefill_outside_the_sequence_is_refused(tokens: list[int], prefill: int | None) -> None:
    with pytest.raises(ValueError, match="cannot prefill"):
        zoo.reference_logits(model_of("llama"), tokens, prefill=prefill)


def test_greedy_refuses_an_empty_prompt() -> None:
    with pytest.raises(ValueError, match="empty"):
        zoo.greedy(model_of("llama"), [], 4)


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        zoo.save_checkpoint("llama", tmp_path / "model", vocab_size=200)

    assert not (tmp_path / "model").exists()


def test_the_tokenizer_maps_bytes_to_themselves_and_covers_the_vocabulary(tmp_path: Path) -> None:
    _, tokenizer = load(str(zoo.save_checkpoint("llama", tmp_path)))
    text = "Grüße, \t\n世界 🧵 it's 42"

    ids = tokenizer.encode(text, add_special_tokens=False)

    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert all(tokenizer.decode([token]) for token in range(zoo.VOCAB_SIZE))


def test_the_chat_template_frames_turns_with_special_tokens(tmp_path: Path) -> None:
    _, tokenizer = load(str(zoo.save_checkpoint("llama", tmp_path)))
    messages = [{"role": "user", "content": "hi"}]

    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)

    turn = [zoo.BOS_ID, *b"user\nhi", zoo.EOS_ID, *b"\n", zoo.BOS_ID, *b"assistant\n"]
    assert list(ids) == turn
