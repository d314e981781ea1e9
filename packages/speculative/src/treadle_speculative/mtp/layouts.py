"""Where each family keeps the heads that its models were trained with.

The names are those of the files on the Hugging Face Hub, and of what ``mlx_vlm.split_mtp`` makes of
them.
"""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from treadle_speculative.mtp.blocks import DENSE, LIKE_MODEL, OWN


class Layout(Struct, frozen=True, kw_only=True):
    """Where the checkpoints of a family keep its heads.

    Several heads guess a token each, one behind the other. Where ``prefix`` does not tell them apart,
    they have decoder layers of their own and share the rest.

    Attributes:
        prefix: What all tensors of a head begin with; ``{i}`` is its number, ``{layer}`` the same
            counted on from the model's layers.
        names: The modules of :class:`MtpHead`, by what they are called behind the prefix, ``{i}``
            again.
        layer: What the tensors of its decoder layer begin with, behind the prefix.
        depth: The key of the config that says how many heads there are; None is one.
        hidden_first: See :class:`HeadForm`.
        last_norm: See :class:`HeadForm`.
        blocks: What its layers are (:func:`treadle_speculative.mtp.blocks.make_blocks`).
        renamed: Parts of names behind the prefix, and what is read in their place.
        base_names: The same for what the model's own code converts, there and back.
        base_prefix: What the model's own code finds layers by.
        in_blocks: Whether a head is several blocks, ``layers.<number>.``, the first and last of which
            have what is around them too.
        zero_centred: Whether norms are stored less one, unless the file was made for mlx.
        like_base: Whether the layer's tensors have the form of the model's own layers in its original
            checkpoints, so that the model's own code converts them.
    """

    prefix: str
    names: Mapping[str, str]
    layer: str = ""
    depth: str | None = None
    hidden_first: bool = False
    last_norm: bool = True
    blocks: str = LIKE_MODEL
    renamed: tuple[tuple[str, str], ...] = ()
    base_names: tuple[tuple[str, str], ...] = ()
    base_prefix: str = "model.layers."
    in_blocks: bool = False
    zero_centred: bool = False
    like_base: bool = True


QWEN_NAMES = {
    "fc": "fc",
    "pre_fc_norm_embedding": "norm_embed",
    "pre_fc_norm_hidden": "norm_hidden",
    "norm": "norm",
}
QWEN = Layout(
    prefix="mtp.",
    names=QWEN_NAMES,
    layer="layers.{i}.",
    depth="mtp_num_hidden_layers",
    zero_centred=True,
    like_base=False,
)
QWEN_SPLIT = replace(QWEN, prefix="", zero_centred=False)
NEXTN_NAMES = {"enorm": "norm_embed", "hnorm": "norm_hidden", "eh_proj": "fc"}
NEXTN = Layout(
    prefix="model.layers.{layer}.",
    depth="num_nextn_predict_layers",
    names={
        **NEXTN_NAMES,
        "shared_head.norm": "norm",
        "shared_head.head": "lm_head",
        "embed_tokens": "embed_tokens",
    },
)
GLM_LITE_SPLIT = Layout(
    prefix="",
    names={
        "model.enorm": "norm_embed",
        "model.hnorm": "norm_hidden",
        "model.eh_proj": "fc",
        "model.shared_head_norm": "norm",
        "lm_head": "lm_head",
        "model.embed_tokens": "embed_tokens",
    },
    layer="model.mtp_block.",
    like_base=False,
)
GLM_DSA_SPLIT = Layout(
    prefix="mtp.", names={**NEXTN_NAMES, "shared_head_norm": "norm"}, like_base=False
)
MIMO = Layout(
    prefix="model.mtp_layers.{i}.",
    depth="num_nextn_predict_layers",
    names={
        "token_layernorm": "norm_embed",
        "hidden_layernorm": "norm_hidden",
        "input_proj": "fc",
        "final_layernorm": "norm",
    },
    hidden_first=True,
)

EXAONE = replace(QWEN, depth="num_nextn_predict_layers", blocks=DENSE, zero_centred=False)
ERNIE = Layout(
    prefix="model.mtp_",
    names={
        "emb_norm.{i}": "norm_embed",
        "hidden_norm.{i}": "norm_hidden",
        "linear_proj.{i}": "fc",
    },
    layer="block.{i}.",
    depth="num_nextn_predict_layers",
    last_norm=False,
    blocks=DENSE,
    like_base=False,
)
BAILING = replace(NEXTN, names={**NEXTN.names, "final_layernorm": "norm"})
LONGCAT = Layout(
    prefix="model.mtp.",
    names={
        "layers.0.enorm.m": "norm_embed",
        "layers.0.hnorm.m": "norm_hidden",
        "layers.0.eh_proj": "fc",
        "norm": "norm",
        "embed_tokens": "embed_tokens",
    },
    layer="layers.0.",
    blocks=OWN,
    renamed=((".transformer_layer.", "."),),
    base_names=(("self_attn.", "self_attn.0."),),
)
MIMO_V2 = Layout(
    prefix="model.mtp.layers.0.",
    names={**NEXTN_NAMES, "final_layernorm": "norm"},
    blocks=OWN,
    renamed=(("pre_mlp_layernorm.", "post_attention_layernorm."),),
)
NEMOTRON = Layout(
    prefix="mtp.",
    names=MIMO_V2.names,
    blocks=OWN,
    in_blocks=True,
    base_prefix="backbone.layers.",
)
NEMOTRON_SPLIT = replace(NEMOTRON, prefix="")
STEP = replace(
    NEXTN,
    names={**NEXTN.names, "shared_head.output": "lm_head"},
    blocks=OWN,
    renamed=(("transformer.", ""),),
    zero_centred=True,
    like_base=False,
)

LAYOUTS: dict[str, Layout] = {
    "bailing_moe": BAILING,
    "ernie4_5_moe": ERNIE,
    "exaone_moe": EXAONE,
    "longcat_flash": LONGCAT,
    "mimo_v2_flash": MIMO_V2,
    "nemotron_h": NEMOTRON,
    "step3p5": STEP,
    "qwen3_next": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "deepseek_v3": NEXTN,
    "deepseek_v32": NEXTN,
    "glm4_moe": NEXTN,
    "glm4_moe_lite": NEXTN,
    "glm_moe_dsa": NEXTN,
    "mimo": MIMO,
}
"""By mlx-lm's name of the architecture."""

REFUSED = {
    "bailing_moe_linear": "tell what the layer of one is made of",
    "deepseek_v4": "run the model: mlx-lm has no such architecture",
    "kimi_linear": "name their tensors: no checkpoint with a head is known",
}
"""Families whose heads are known to exist, and why none can be loaded: nothing can …"""

SPLIT_LAYOUTS: dict[str, Layout] = {
    "qwen3_5_mtp": QWEN_SPLIT,
    "glm4_moe_lite_mtp": GLM_LITE_SPLIT,
    "glm_moe_dsa_mtp": GLM_DSA_SPLIT,
    "nemotron_h_mtp": NEMOTRON_SPLIT,
}
"""By the ``model_type`` that mlx-vlm gives a head that it split off."""

SPLIT_BASES = {
    "qwen3_5_mtp": ("qwen3_next", "qwen3_5", "qwen3_5_moe"),
    "glm4_moe_lite_mtp": ("glm4_moe_lite",),
    "glm_moe_dsa_mtp": ("glm_moe_dsa",),
    "nemotron_h_mtp": ("nemotron_h",),
}
