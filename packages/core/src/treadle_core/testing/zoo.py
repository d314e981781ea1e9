"""Tiny random models for tests, one for each kind of architecture that mlx-lm implements.

Every family is built from mlx-lm's own model class with float32 weights, in milliseconds and
without a network. The weights are scaled so that logits are of order one to ten, depend on the
whole context that the architecture can see, and rarely tie, so a cache that is wrong by one
position or one row shows up in a comparison with :func:`reference_logits` or :func:`greedy`.

The vocabulary holds the 256 bytes (token id = byte value) followed by special tokens, so
``list(text.encode())`` is a valid prompt for every family.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

VOCAB_SIZE = 320
PAD_ID, BOS_ID, EOS_ID = 256, 257, 258
SLIDING_WINDOW = 32
ATTENTION_CHUNK = 16

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class _Family:
    """How to build one family.

    Attributes:
        config: The configuration without the token ids that all families share.
        gains: Exceptions from the usual scale of matrices, by the name of their module.
    """

    config: dict[str, Any]
    gains: dict[str, float] = field(default_factory=dict)


_TRANSFORMER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "tie_word_embeddings": False,
}

_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

_LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

# Key and value widths are multiples of 32, which the Metal kernel needs.
_GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}

_ALTERNATING_WINDOW: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

_FAMILIES: dict[str, _Family] = {
    "llama": _Family({**_TRANSFORMER, "model_type": "llama"}),
    "qwen3": _Family({**_TRANSFORMER, "model_type": "qwen3"}),
    "moe": _Family(
        {
            **_TRANSFORMER,
            **_EXPERTS,
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    ),
    # Gemma multiplies embeddings by the root of the width, and these are also the output matrix:
    # at full size the last token would outweigh the layers and repeat itself.
    "gemma2": _Family(
        {**_TRANSFORMER, "model_type": "gemma2", "query_pre_attn_scalar": 16},
        gains={"embed_tokens": 0.5},
    ),
    "gemma3": _Family(
        {
            **_TRANSFORMER,
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 16,
            "sliding_window": SLIDING_WINDOW,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 10000.0,
        }
    ),
    "gpt_oss": _Family(
        {
            **_TRANSFORMER,
            **_ALTERNATING_WINDOW,
            "model_type": "gpt_oss",
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        }
    ),
    "olmo3": _Family({**_TRANSFORMER, **_ALTERNATING_WINDOW, "model_type": "olmo3"}),
    "llama4": _Family(
        {
            "model_type": "llama4",
            "text_config": {
                **_TRANSFORMER,
                "model_type": "llama4_text",
                "num_hidden_layers": 4,
                "attention_chunk_size": ATTENTION_CHUNK,
                "interleave_moe_layer_step": 2,
                "intermediate_size": 32,
                "intermediate_size_mlp": 96,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "rope_scaling": None,
                "use_qk_norm": True,
            },
        }
    ),
    "deepseek_v3": _Family({**_TRANSFORMER, **_LATENT_ATTENTION, "model_type": "deepseek_v3"}),
    "deepseek_v32": _Family(
        {
            **_TRANSFORMER,
            **_LATENT_ATTENTION,
            "model_type": "deepseek_v32",
            "index_head_dim": 16,
            "index_n_heads": 8,
            "index_topk": 24,
        }
    ),
    "gpt_bigcode": _Family(
        {
            "model_type": "gpt_bigcode",
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_layer": 3,
            "n_inner": 96,
            "n_head": 4,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "multi_query": True,
            "tie_word_embeddings": False,
        }
    ),
    "qwen3_next": _Family(
        {
            **_TRANSFORMER,
            **_GATED_DELTA,
            **_EXPERTS,
            "model_type": "qwen3_next",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "shared_expert_intermediate_size": 32,
            "partial_rotary_factor": 0.5,
        }
    ),
    "qwen3_5": _Family(
        {
            "model_type": "qwen3_5",
            "tie_word_embeddings": False,
            "text_config": {
                **_TRANSFORMER,
                **_GATED_DELTA,
                "model_type": "qwen3_5_text",
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 1, 1],
                },
            },
        }
    ),
    "mamba2": _Family(
        {
            "model_type": "mamba2",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_heads": 4,
            "head_dim": 32,
            "state_size": 32,
            "conv_kernel": 4,
            "n_groups": 2,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": False,
            "time_step_limit": [0.001, 100.0],
            "time_step_rank": "auto",
        }
    ),
    "mamba2_hybrid": _Family(
        {
            **_TRANSFORMER,
            "model_type": "falcon_h1",
            "num_hidden_layers": 2,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_rms_norm": True,
        }
    ),
    "granite_hybrid": _Family(
        {
            **_TRANSFORMER,
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba", "attention", "mamba"],
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.25,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_proj_bias": False,
            "mamba_conv_bias": True,
        }
    ),
    "nemotron_h": _Family(
        {
            **_TRANSFORMER,
            "model_type": "nemotron_h",
            "num_hidden_layers": 5,
            "hybrid_override_pattern": "M-*M-",
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "mamba_proj_bias": False,
            "ssm_state_size": 32,
            "conv_kernel": 4,
            "n_groups": 2,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
        }
    ),
    "lfm2": _Family(
        {
            **_TRANSFORMER,
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_ff_dim": 96,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [1, 3],
            "tie_word_embeddings": True,
        }
    ),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
"""Names of all families."""


def config(family: str, **overrides: Any) -> dict[str, Any]:
    """Return a fresh configuration of a family, as the ``config.json`` of a checkpoint has it.

    Args:
        family: One of :data:`FAMILIES`.
        **overrides: Keys to replace or add. Where the text model has a section of its own
            (``text_config``) they go there, unless the top level already has the key. Lists
            with one entry per layer are not adapted to another ``num_hidden_layers``.

    Raises:
        KeyError: If there is no such family; the message lists the known names.
    """
    tokens = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    result = {**copy.deepcopy(_family(family).config), **tokens, "torch_dtype": "float32"}
    text = _text_section(result)
    for key, value in overrides.items():
        (result if key in result else text)[key] = copy.deepcopy(value)
    return result


def build(family: str, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """Build the model of a family with random weights that depend on ``seed`` only.

    Args:
        family: One of :data:`FAMILIES`.
        seed: Seed of the weights.
        **overrides: See :func:`config`.

    Returns:
        The model in evaluation mode, with evaluated float32 weights.

    Raises:
        KeyError: If there is no such family; the message lists the known names.
    """
    settings = config(family, **overrides)
    module = import_module(f"mlx_lm.models.{settings['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(settings))
    model.load_weights(_random_weights(model, seed, _family(family).gains))
    model.eval()
    mx.eval(model.parameters())
    return model


def reference_logits(
    model: nn.Module, tokens: Sequence[int], *, prefill: int | None = None
) -> mx.array:
    """Run mlx-lm's own single-sequence path over ``tokens`` with a new cache.

    Args:
        model: A model as mlx-lm builds it.
        tokens: The sequence, at least one token.
        prefill: Number of leading tokens to run in one forward pass, the others follow one at
            a time. By default one pass takes them all.

    Returns:
        The logits at every position, ``[len(tokens), vocabulary]``, evaluated.

    Raises:
        ValueError: If ``tokens`` is empty or ``prefill`` is not within 1 and its length.
    """
    first = len(tokens) if prefill is None else prefill
    if not 1 <= first <= len(tokens):
        raise ValueError(f"cannot prefill {first} of {len(tokens)} tokens")
    cache = make_prompt_cache(model)
    chunks = [tokens[:first], *([token] for token in tokens[first:])]
    logits = mx.concatenate([_forward(model, chunk, cache) for chunk in chunks])
    mx.eval(logits)
    return logits


def greedy(model: nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Continue ``prompt`` with the likeliest token, ``num_tokens`` times; no token ends it.

    Args:
        model: A model as mlx-lm builds it.
        prompt: At least one token; it runs in one forward pass.
        num_tokens: Number of tokens to generate.

    Returns:
        The generated tokens, without the prompt.

    Raises:
        ValueError: If ``prompt`` is empty.
    """
    if not prompt:
        raise ValueError("the prompt is empty")
    cache = make_prompt_cache(model)
    result: list[int] = []
    chunk = prompt
    for _ in range(num_tokens):
        token = cast(int, mx.argmax(_forward(model, chunk, cache)[-1]).item())
        result.append(token)
        chunk = [token]
    return result


def save_checkpoint(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint that ``mlx_lm.load(str(folder))`` reads back as :func:`build`'s model.

    The folder gets ``config.json``, ``model.safetensors`` and a byte-level tokenizer whose
    entries cover the whole vocabulary, with a ChatML template and ``<|im_end|>`` as its end.

    Args:
        family: One of :data:`FAMILIES`.
        folder: Where to write; made if absent, files of the same names are replaced.
        seed: Seed of the weights.
        **overrides: See :func:`config`.

    Returns:
        ``folder``.

    Raises:
        KeyError: If there is no such family; the message lists the known names.
        ValueError: If ``vocab_size`` is overridden with too small a number for the tokenizer.
    """
    settings = config(family, **overrides)
    tokenizer = _byte_tokenizer(_text_section(settings)["vocab_size"])
    weights = _parameters(build(family, seed=seed, **overrides))
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", settings)
    _write_json(folder / "tokenizer_config.json", _tokenizer_settings())
    return folder


def _family(name: str) -> _Family:
    if name not in _FAMILIES:
        raise KeyError(f"unknown family {name!r}, known are: {', '.join(FAMILIES)}")
    return _FAMILIES[name]


def _text_section(settings: dict[str, Any]) -> dict[str, Any]:
    return settings.get("text_config", settings)


def _forward(model: nn.Module, tokens: Sequence[int], cache: list[Any]) -> mx.array:
    logits = model(mx.array([list(tokens)]), cache=cache)[0]
    mx.eval(logits)
    return logits


def _parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))


def _random_weights(
    model: nn.Module, seed: int, gains: dict[str, float]
) -> list[tuple[str, mx.array]]:
    parameters = _parameters(model)
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    return [
        (path, _random_parameter(path, value.shape, {**_GAINS, **gains}, key))
        for (path, value), key in zip(parameters.items(), keys, strict=True)
    ]


def _random_parameter(
    path: str, shape: tuple[int, ...], gains: dict[str, float], key: mx.array
) -> mx.array:
    module, name = path.split(".")[-2:]
    if name in _SPECIAL_PARAMETERS:
        return _SPECIAL_PARAMETERS[name](shape, key)
    if len(shape) == 1:  # a norm
        return 1.0 + 0.1 * mx.random.normal(shape, key=key)
    fan_in = shape[1] if "conv" in module else shape[-1]  # convolutions: [channels, kernel, 1]
    return gains.get(module, 1.0) * fan_in**-0.5 * mx.random.normal(shape, key=key)


def _uniform(low: float, high: float) -> Callable[[tuple[int, ...], mx.array], mx.array]:
    return lambda shape, key: mx.random.uniform(low, high, shape, key=key)


def _normal(scale: float) -> Callable[[tuple[int, ...], mx.array], mx.array]:
    return lambda shape, key: scale * mx.random.normal(shape, key=key)


# A recurrent state decays by exp(-exp(A_log) * softplus(input + dt_bias)) per token. These
# ranges keep between a half and nearly all of it, so neither does an early token vanish within
# a test prompt nor does the state grow without bound. A small D lets the state outweigh the
# direct path around it.
_SPECIAL_PARAMETERS: dict[str, Callable[[tuple[int, ...], mx.array], mx.array]] = {
    "A_log": _uniform(-3.5, -0.5),
    "dt_bias": _uniform(-1.5, 0.0),
    "D": _uniform(0.2, 0.6),
    "sinks": _normal(1.0),
    "e_score_correction_bias": _normal(0.05),
    "bias": _normal(0.1),
}


# Scale of a matrix, by the name of its module, relative to the one that keeps the variance of
# its input: queries and keys are large enough that attention is far from uniform and single
# tokens of the context count, and choices have gaps wide enough to survive rounding.
_GAINS: dict[str, float] = {
    "q_proj": 1.5,
    "k_proj": 1.5,
    "q_b_proj": 1.5,
    "c_attn": 1.5,
    "gate": 2.0,
    "router": 2.0,
    "lm_head": 2.0,
}


def _byte_tokenizer(vocab_size: int) -> Tokenizer:
    if vocab_size < 256 + len(_SPECIAL_TOKENS):
        raise ValueError(f"a vocabulary of {vocab_size} cannot hold the bytes and special tokens")
    vocab = {letter: byte for byte, letter in enumerate(_byte_letters())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    padding = vocab_size - 256 - len(_SPECIAL_TOKENS)
    specials = [*_SPECIAL_TOKENS, *(f"<|reserved_{i}|>" for i in range(padding))]
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return tokenizer


def _byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte, in the order of the bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _tokenizer_settings() -> dict[str, Any]:
    pad, bos, eos = _SPECIAL_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": pad,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
