"""Tiny random models that see and hear, for tests, as whole checkpoints with processor and tokenizer.

mlx-vlm loads them like any other. The weights are float32, made in milliseconds without a network,
and scaled so that logits depend on the whole context and on every image in it.

The vocabulary holds three special tokens, the 256 bytes, and the family's own tokens.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_and_args, update_module_configs
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
WINDOW = 32
"""Width of the sliding window of the families that have one."""

QWEN3 = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")

HIDDEN = 64
_VOCABULARY_STEP = 32

_TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
}

_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}

_HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_PARTIAL_ROPE: dict[str, Any] = {
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
}

_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}

_NORMALISING: dict[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
    "rescale_factor": 1 / 255,
    "do_rescale": True,
    "do_normalize": True,
    "do_resize": True,
    "do_convert_rgb": True,
}

_QWEN_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_OMNI_TOKENS = (*_QWEN_TOKENS, "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")
_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_TILES_TOKENS = (
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
_INTERN_TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>")
_GEMMA3_TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
_GEMMA4_TOKENS = (
    *("<|image>", "<|image|>", "<image|>"),
    *("<|audio>", "<|audio|>", "<audio|>"),
    "<|video|>",
)

Files = dict[str, dict[str, Any]]
"""Contents of JSON files, by name."""


@dataclass(frozen=True)
class _Family:
    """How to build one family.

    Attributes:
        tokens: Its special tokens.
        markers: What the chat template writes for an item, by kind.
        files: Config and processor files, from token ids and the vocabulary's size.
        tokenizer: Extra settings of the tokenizer.
    """

    tokens: tuple[str, ...]
    markers: dict[str, str]
    files: Callable[[dict[str, int], int], Files]
    tokenizer: dict[str, Any]


def _qwen_files(model_type: str) -> Callable[[dict[str, int], int], Files]:
    patch = 16 if model_type in QWEN3 else 14

    def files(ids: dict[str, int], vocab_size: int) -> Files:
        processor = {
            **_NORMALISING,
            "patch_size": patch,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "min_pixels": 4 * patch * patch,
            "max_pixels": 256 * patch * patch,
        }
        config = {
            "model_type": model_type,
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "vision_token_id": ids["<|vision_pad|>"],
            "tie_word_embeddings": False,
            "vision_config": _qwen_vision(model_type, patch),
            **_qwen_text(model_type, vocab_size),
        }
        image = {**processor, "image_processor_type": "Qwen2VLImageProcessor"}
        video = {**processor, "fps": 2.0, "min_frames": 2, "max_frames": 8}
        return {
            "config.json": config,
            "preprocessor_config.json": image,
            "video_preprocessor_config.json": video,
        }

    return files


def _qwen_text(model_type: str, vocab_size: int) -> dict[str, Any]:
    """The text part: a section of its own, or before Qwen3 among the other keys."""
    # Sections of the rotary position: time, height, width; half of a head together.
    sections = {"mrope_section": [4, 2, 2]}
    text = {**_TEXT, "vocab_size": vocab_size, "rope_theta": 10000.0}
    if model_type not in QWEN3:
        return {**text, "rope_scaling": {"type": "mrope", **sections}}
    scaling = {"rope_type": "default", "mrope_interleaved": True, **sections}
    experts = _EXPERTS if model_type.endswith("_moe") else {}
    if model_type.startswith("qwen3_5"):
        section = {**text, **_HYBRID, **experts, "model_type": f"{model_type}_text"}
        section["rope_parameters"] = {**scaling, **_PARTIAL_ROPE}
        return {"text_config": section, "vocab_size": vocab_size}
    section = {
        **text,
        **experts,
        "model_type": f"{model_type}_text",
        "head_dim": 16,
        "rope_scaling": scaling,
        "tie_word_embeddings": False,
    }
    return {"text_config": section, "vocab_size": vocab_size}


def _qwen_vision(model_type: str, patch: int) -> dict[str, Any]:
    vision = {
        "model_type": model_type,
        "depth": 4,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    match model_type:
        case "qwen2_vl":
            return {**vision, "embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2}
        case "qwen2_5_vl":
            windows = {"window_size": 56, "fullatt_block_indexes": [1, 3], "tokens_per_second": 2}
            return {**vision, **_VISION, "out_hidden_size": HIDDEN, **windows}
        case _:
            deep = [] if model_type.startswith("qwen3_5") else [0, 1]
            depth = {"num_position_embeddings": 256, "deepstack_visual_indexes": deep}
            return {**vision, **_VISION, "out_hidden_size": HIDDEN, **depth}


def _omni_files(ids: dict[str, int], vocab_size: int) -> Files:
    """Qwen3-Omni without the part that speaks; it thinks as Qwen3-VL does, with experts."""
    made = _qwen_files("qwen3_vl")(ids, vocab_size)
    vision: dict[str, Any] = made["config.json"]["vision_config"]
    text = {**made["config.json"]["text_config"], **_EXPERTS, "model_type": "qwen3_omni_moe_text"}
    audio = {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "output_dim": HIDDEN,
        "downsample_hidden_size": 8,
        "n_window_infer": 200,
    }
    thinker = {
        "text_config": text,
        "vision_config": {**vision, "model_type": "qwen3_omni_moe_vision_encoder"},
        "audio_config": audio,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_token_id": ids["<|audio_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    config = {
        "model_type": "qwen3_omni_moe",
        "thinker_config": thinker,
        "talker_config": {"text_config": text},
        "enable_audio_output": False,
    }
    sound = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": audio["num_mel_bins"],
        "chunk_length": 20,
        "return_attention_mask": True,
    }
    made["preprocessor_config.json"].update(sound)
    return {**made, "config.json": config}


def _tiles_files(model_type: str, ids: dict[str, int], vocab_size: int) -> Files:
    side, patch, scale = 56, 14, 2
    text = {"model_type": "llama", "head_dim": 16, "rope_theta": 10000.0}
    name = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[model_type]
    config = {
        "model_type": model_type,
        "text_config": {**_TEXT, **text, "vocab_size": vocab_size},
        "vision_config": _siglip(side, patch),
        "vocab_size": vocab_size,
        "scale_factor": scale,
        "image_token_id": ids["<image>"],
    }
    image = {
        **_NORMALISING,
        "image_processor_type": f"{name}ImageProcessor",
        "do_image_splitting": True,
        "do_pad": True,
        "size": {"longest_edge": 2 * side},
        "max_image_size": {"longest_edge": side},
        "resample": 1,
    }
    processor = {"image_seq_len": (side // patch // scale) ** 2}
    return {
        "config.json": config,
        "preprocessor_config.json": image,
        "processor_config.json": {**processor, "processor_class": f"{name}Processor"},
    }


def _internvl_files(ids: dict[str, int], vocab_size: int) -> Files:
    side, patch = 56, 14
    text = {**_TEXT, "model_type": "qwen3", "head_dim": 16, "rope_theta": 10000.0}
    vision = {
        **_VISION,
        "model_type": "internvl_vision",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [side, side],
        "patch_size": [patch, patch],
    }
    config = {
        "model_type": "internvl",
        "text_config": {**text, "vocab_size": vocab_size, "tie_word_embeddings": False},
        "vision_config": vision,
        "vocab_size": vocab_size,
        "downsample_ratio": 0.5,
        "image_token_id": ids["<IMG_CONTEXT>"],
        "max_dynamic_patch": 4,
    }
    processor = {"image_seq_length": (side // patch // 2) ** 2}
    return {
        "config.json": config,
        "processor_config.json": {**processor, "processor_class": "InternVLProcessor"},
    }


def _gemma3_files(ids: dict[str, int], vocab_size: int) -> Files:
    side, patch, num_tokens = 56, 14, 4
    text = {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "mm_tokens_per_image": num_tokens,
        "rope_global_base_freq": 1e6,
    }
    config = {
        "model_type": "gemma3",
        "text_config": {**_TEXT, **text, "vocab_size": vocab_size},
        "vision_config": _siglip(side, patch),
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "image_token_index": ids["<image_soft_token>"],
        "pad_token_id": 0,
        "mm_tokens_per_image": num_tokens,
    }
    image = {
        **_NORMALISING,
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": side, "width": side},
        "resample": 2,
        "image_seq_length": num_tokens,
    }
    processor = {"image_seq_length": num_tokens, "processor_class": "Gemma3Processor"}
    return {
        "config.json": config,
        "preprocessor_config.json": image,
        "processor_config.json": processor,
    }


def _gemma4_files(ids: dict[str, int], vocab_size: int) -> Files:
    patch, pooled = 8, 2
    text = {
        **_TEXT,
        "model_type": "gemma4_text",
        "vocab_size": vocab_size,
        # The last two layers read what the two before them keep.
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": vocab_size,
    }
    vision = {
        **_VISION,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": patch,
        "pooling_kernel_size": pooled,
        "position_embedding_size": 512,
    }
    audio = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [8, 4],
        "attention_chunk_size": 4,
        "attention_context_left": 5,
        "output_proj_dims": 48,
    }
    config = {
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": vision,
        "audio_config": audio,
        "vocab_size": vocab_size,
        "image_token_id": ids["<|image|>"],
        "audio_token_id": ids["<|audio|>"],
        "video_token_id": ids["<|video|>"],
    }
    image = {"patch_size": patch, "pooling_kernel_size": pooled, "max_soft_tokens": 12}
    video = {**image, "max_soft_tokens": 70, "num_frames": 6}
    processor = {
        "image_processor": image,
        "video_processor": video,
        # With its usual half of it, transformers warns of filters without any bin.
        "feature_extractor": {"fft_overdrive": True},
        "processor_class": "Gemma4Processor",
    }
    return {"config.json": config, "processor_config.json": processor}


def _pixtral_files(model_type: str, ids: dict[str, int], vocab_size: int) -> Files:
    patch = 8
    text = {**_TEXT, "model_type": "mistral", "head_dim": 16, "vocab_size": vocab_size}
    vision = {
        **_VISION,
        "model_type": "pixtral",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 64,
        "patch_size": patch,
    }
    config = {
        "model_type": model_type,
        "text_config": {**text, "rope_theta": 10000.0},
        "vision_config": vision,
        "vocab_size": vocab_size,
        "image_token_index": ids["[IMG]"],
    }
    if model_type == "mistral3":
        config["spatial_merge_size"] = 2
    image = {
        **_NORMALISING,
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 64},
        "patch_size": {"height": patch, "width": patch},
    }
    processor = {"patch_size": patch, "processor_class": "PixtralProcessor"}
    return {
        "config.json": config,
        "preprocessor_config.json": image,
        "processor_config.json": processor,
    }


def _siglip(side: int, patch: int) -> dict[str, Any]:
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    shape = {"patch_size": patch, "image_size": side}
    return {"model_type": "siglip_vision_model", **_VISION, **layers, **shape}


_QWEN_MARKERS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
_OMNI_MARKERS = {**_QWEN_MARKERS, "audio": "<|audio_start|><|audio_pad|><|audio_end|>"}
_OMNI_NAMES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_GEMMA3_NAMES = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
_GEMMA4_NAMES = {
    "boi_token": "<|image>",
    "image_token": "<|image|>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "audio_token": "<|audio|>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
_GEMMA4_MARKERS = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"}

_FAMILIES: dict[str, _Family] = {
    **{
        name: _Family(_QWEN_TOKENS, _QWEN_MARKERS, _qwen_files(name), {})
        for name in ("qwen2_vl", "qwen2_5_vl", *QWEN3)
    },
    "qwen3_omni_moe": _Family(
        _OMNI_TOKENS,
        _OMNI_MARKERS,
        _omni_files,
        {**_OMNI_NAMES, "extra_special_tokens": _OMNI_NAMES},
    ),
    **{
        name: _Family(_TILES_TOKENS, {"image": "<image>"}, partial(_tiles_files, name), {})
        for name in ("smolvlm", "idefics3")
    },
    **{
        name: _Family(_PIXTRAL_TOKENS, {"image": "[IMG]"}, partial(_pixtral_files, name), {})
        for name in ("pixtral", "mistral3")
    },
    "internvl": _Family(_INTERN_TOKENS, {"image": "<IMG_CONTEXT>"}, _internvl_files, {}),
    "gemma3": _Family(
        _GEMMA3_TOKENS,
        {"image": "<start_of_image>"},
        _gemma3_files,
        {**_GEMMA3_NAMES, "extra_special_tokens": _GEMMA3_NAMES},
    ),
    "gemma4": _Family(
        _GEMMA4_TOKENS,
        _GEMMA4_MARKERS,
        _gemma4_files,
        {**_GEMMA4_NAMES, "extra_special_tokens": _GEMMA4_NAMES},
    ),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
"""Names of all families, as mlx-vlm calls them."""


def save_checkpoint(
    family: str, folder: Path, *, seed: int = 0, changes: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint that ``mlx_vlm.load(str(folder))`` reads.

    Args:
        family: One of :data:`FAMILIES`.
        folder: Where to write; made if absent.
        seed: Seed of the weights.
        changes: Keys of its JSON files that are to be otherwise, by the files' names; those of
            inner sections too.

    Returns:
        ``folder``.

    Raises:
        KeyError: If there is no such family; the message lists the known names.
    """
    if family not in _FAMILIES:
        raise KeyError(f"unknown family {family!r}, known are: {', '.join(FAMILIES)}")
    recipe = _FAMILIES[family]
    tokenizer = _byte_tokenizer(recipe.tokens)
    vocab_size = tokenizer.get_vocab_size()
    ids = {name: cast(int, tokenizer.token_to_id(name)) for name in recipe.tokens}
    files = recipe.files(ids, vocab_size)
    end = tokenizer.token_to_id(END)
    files["config.json"]["eos_token_id"] = end
    files["generation_config.json"] = {"eos_token_id": end, "pad_token_id": 0}
    files["tokenizer_config.json"] = {**_tokenizer_settings(recipe.markers), **recipe.tokenizer}
    files = _changed(files, changes or {})
    folder.mkdir(parents=True, exist_ok=True)
    for name, contents in files.items():
        (folder / name).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = _random_weights(files["config.json"], seed)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _changed(section: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        key: _changed(section[key], value)
        for key, value in changes.items()
        if isinstance(value, Mapping) and isinstance(section.get(key), dict)
    }
    return {**section, **changes, **inner}


def _byte_tokenizer(specials: Iterable[str]) -> Tokenizer:
    names = [PAD, START, END]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*names, *letters])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names.extend(specials)
    # Every id that the model can emit has a token: mlx-vlm's detokenizer looks it up.
    missing = -(len(letters) + len(names)) % _VOCABULARY_STEP
    names.extend(f"<|reserved_{index}|>" for index in range(missing))
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in names])
    return tokenizer


def _tokenizer_settings(markers: dict[str, str]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": START,
        "eos_token": END,
        "unk_token": PAD,
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": _chat_template(markers),
    }


def _chat_template(markers: dict[str, str]) -> str:
    cases = "".join(
        f"{{% elif part['type'] == '{kind}' %}}{marker}" for kind, marker in markers.items()
    )
    text = "{% if part['type'] == 'text' %}{{ part.get('text', part.get('content')) }}"
    parts = f"{{% for part in message['content'] %}}{text}{cases}{{% endif %}}{{% endfor %}}"
    content = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        f"{parts}{{% endif %}}"
    )
    return (
        f"{{% for message in messages %}}{START}{{{{ message['role'] }}}}\n{content}{END}\n"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
    )


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    # mlx-vlm writes into the config that it reads.
    settings = cast(dict[str, Any], json.loads(json.dumps(config)))
    module, _ = get_model_and_args(settings)
    settings.setdefault("text_config", {})
    made = module.ModelConfig.from_dict(settings)
    parts = ["text", "vision", *(["audio"] if "audio_config" in settings else [])]
    model = module.Model(update_module_configs(made, module, settings, parts))
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    gemma = settings["model_type"] == "gemma3"
    gains = {**_GAINS, **(_GEMMA_GAINS if settings["model_type"].startswith("gemma") else {})}
    weights = {
        path: _random_parameter(path, value.shape, gains, key) if value.ndim else value
        for (path, value), key in zip(parameters, keys, strict=True)
    }
    if gemma:
        offset = [path for path in weights if path.startswith("language_model.") or "soft" in path]
        for path in offset:
            # Gemma's own norms add the one themselves.
            if weights[path].ndim == 1:
                weights[path] = weights[path] - 1.0
        # mlx-vlm always ties the two; the checkpoint has the one.
        del weights["language_model.lm_head.weight"]
    mx.eval(weights)
    return weights


def _random_parameter(
    path: str, shape: tuple[int, ...], gains: dict[str, float], key: mx.array
) -> mx.array:
    module, name = path.split(".")[-2:] if "." in path else ("", path)
    noise = mx.random.normal(shape, key=key)
    if name == "bias":
        return 0.1 * noise
    if len(shape) == 1:  # a norm
        return 1.0 + 0.1 * noise
    fan_in = noise.size // shape[0]
    if "embed" in module and "patch" not in path:  # a row for each token or place
        fan_in = 1
    if name == "mm_input_projection_weight":
        fan_in = shape[0]
    return gains.get(module, 1.0) * fan_in**-0.5 * noise


# As in treadle_core.testing.zoo: attention that is far from uniform, choices with gaps.
_GAINS = {"q_proj": 1.5, "k_proj": 1.5, "qkv": 1.5, "lm_head": 2.0}
# Gemma multiplies embeddings by the root of the width, and these are also the output matrix.
_GEMMA_GAINS = {"embed_tokens": 0.25}
