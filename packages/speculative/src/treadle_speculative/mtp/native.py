"""Heads that models were trained with, from the checkpoints that hold them.

mlx-lm's own loading leaves them out. Here they are read from the original files on the Hugging Face
Hub, where each family has names and forms of its own, and from the files that ``mlx_vlm.split_mtp``
makes of them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import MODEL_REMAPPING

from treadle_core.errors import ModelLoadError, Unsupported, describe
from treadle_core.mlx_runtime.split import SplitModel
from treadle_speculative.mtp.blocks import (
    ATTENTION,
    DENSE,
    EXPERTS,
    FEED_FORWARD,
    LIKE_MODEL,
    WITHOUT_EXPERTS,
)
from treadle_speculative.mtp.files import AFFINE, DESCRIPTION, fill, load_head
from treadle_speculative.mtp.head import HeadForm, MtpHead
from treadle_speculative.mtp.layouts import (
    LAYOUTS,
    REFUSED,
    SPLIT_BASES,
    SPLIT_LAYOUTS,
    Layout,
)

BUFFERS = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")
MOST_HEADS = 8
SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
BLOCK = re.compile(r"layers\.(\d+)\.")
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.(weight|scales|biases)")


def find_heads(folder: Path, base: SplitModel, *, fingerprint: str = "") -> list[MtpHead]:
    """The heads in a folder, whatever wrote them, evaluated, in the order of the tokens they guess.

    That may be a head that was saved by itself, what mlx-vlm split off, or an original checkpoint
    with everything. Where the model is quantised and a head is not, its layers are quantised like
    the model's.

    Args:
        folder: Where they are.
        base: The model that they are to draft for.
        fingerprint: That model's, where it is known.

    Raises:
        ModelLoadError: There are none, they belong to another model, or one does not fit.
        Unsupported: Heads of the model's family are not known.
    """
    if not folder.is_dir():
        raise ModelLoadError(str(folder), "there is no such directory")
    if (folder / DESCRIPTION).exists():
        return [load_head(folder, base, fingerprint=fingerprint)]
    config = read_config(folder)
    layout = layout_of(folder, config, base)
    text: Any = config.get("text_config") or config
    check_sizes(folder, text, base)
    if "sliding_attention" in (text.get("mtp_layer_types") or ()):
        raise Unsupported(
            f"its mtp_layer_types is {text['mtp_layer_types']}: only heads with full attention are "
            f"known of {base.name}"
        )
    num = int(text.get(layout.depth) or 1) if layout.depth else 1
    if num > MOST_HEADS:
        raise ModelLoadError(
            str(folder), f"its {layout.depth} is {num}, expected at most {MOST_HEADS}"
        )
    return [read_head(folder, layout, config, base, place, num) for place in range(num)]


def read_head(
    folder: Path,
    layout: Layout,
    config: dict[str, Any],
    base: SplitModel,
    place: int,
    num: int,
) -> MtpHead:
    """One of a checkpoint's ``num`` heads, evaluated.

    Raises:
        ModelLoadError: It is not there, or does not fit.
    """
    prefix = layout.prefix.format(i=place, layer=len(base.layers) + place)
    tensors, made_for_mlx = read_tensors(folder, prefix)
    form, tensors = converted(folder, layout, tensors, base, made_for_mlx, place, num)
    head = MtpHead(base, form)
    quantised = any(name.endswith(".scales") for name in tensors)
    fill(head, tensors, str(folder), mode_of(config))
    if not quantised:
        quantise_like_base(head)
    return head


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's ``config.json``.

    Raises:
        ModelLoadError: It cannot be read.
    """
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(str(folder), f"config.json cannot be read ({error})") from error


def layout_of(folder: Path, config: dict[str, Any], base: SplitModel) -> Layout:
    """Where a checkpoint keeps its head.

    Raises:
        ModelLoadError: It belongs to a model of another family.
        Unsupported: Heads of the family are not known.
    """
    kind = str(config.get("model_type", ""))
    kind = MODEL_REMAPPING.get(kind, kind).removesuffix("_text")
    if kind in SPLIT_LAYOUTS:
        if base.name not in SPLIT_BASES[kind]:
            expected = ", ".join(SPLIT_BASES[kind])
            raise ModelLoadError(
                str(folder), f"a head of {kind} is for {expected}, the model is {base.name}"
            )
        return SPLIT_LAYOUTS[kind]
    if kind != base.name.removesuffix("_text"):
        raise ModelLoadError(
            str(folder),
            f"its model_type is {kind!r}, the model's is {base.name!r}: another model's",
        )
    if kind in REFUSED:
        raise Unsupported(f"MTP heads of {kind} cannot be used: nothing here can {REFUSED[kind]}")
    if kind not in LAYOUTS:
        known = ", ".join(sorted(LAYOUTS))
        raise Unsupported(f"MTP heads of {kind} are not known; those of {known} are")
    return LAYOUTS[kind]


def check_sizes(folder: Path, text: dict[str, Any], base: SplitModel) -> None:
    """Compare the config beside a head with the model.

    Raises:
        ModelLoadError: They differ in a size.
    """
    for name in SIZES:
        found, expected = text.get(name), getattr(base.args, name, None)
        if found is not None and expected is not None and found != expected:
            raise ModelLoadError(
                str(folder), f"its {name} is {found}, the model's is {expected}: another model's"
            )


def read_tensors(folder: Path, prefix: str) -> tuple[dict[str, mx.array], bool]:
    """A head's tensors as they are called behind ``prefix``, and who wrote them.

    Returns:
        The tensors, not read yet, and whether the file was made for mlx.

    Raises:
        ModelLoadError: There are none, or a file cannot be read.
    """
    tensors: dict[str, mx.array] = {}
    made_for_mlx = False
    for path in files_of(folder, prefix):
        try:
            loaded: Any = mx.load(str(path), return_metadata=True)
        except Exception as error:
            raise ModelLoadError(str(path), f"it cannot be read ({describe(error)})") from error
        found = {name: tensor for name, tensor in loaded[0].items() if name.startswith(prefix)}
        tensors |= {name.removeprefix(prefix): tensor for name, tensor in found.items()}
        made_for_mlx |= bool(found) and loaded[1].get("format") == "mlx"
    if not tensors:
        raise ModelLoadError(str(folder), f"it holds no MTP head: no tensor begins with {prefix!r}")
    return tensors, made_for_mlx


def files_of(folder: Path, prefix: str) -> list[Path]:
    """The files that may hold tensors that begin with ``prefix``.

    Raises:
        ModelLoadError: The index of the files cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    every = sorted(path for path in folder.glob("*.safetensors") if "consolidated" not in path.name)
    if not index.exists():
        return every
    try:
        weights: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(str(index), f"it cannot be read ({describe(error)})") from error
    named = {file for name, file in weights.items() if name.startswith(prefix)}
    # A head that was added later stands in a file that the index may not know.
    return sorted(folder / file for file in named) or every


def converted(
    folder: Path,
    layout: Layout,
    tensors: dict[str, mx.array],
    base: SplitModel,
    made_for_mlx: bool,
    place: int,
    num: int,
) -> tuple[HeadForm, dict[str, mx.array]]:
    """The form of a head, one of ``num``, and its tensors by the names of :class:`MtpHead`.

    Raises:
        ModelLoadError: A tensor is missing.
    """
    found, layers = parted(layout, tensors, place, num)
    if layout.zero_centred and not made_for_mlx:
        found, layers = shifted(found), shifted(layers)
    own, known = starts_of(layout, layers, place, num)
    pattern = ""
    for number, start in enumerate(own):
        mine = {
            name.removeprefix(start): tensor
            for name, tensor in layers.items()
            if name.startswith(start)
        }
        pattern += block_kind(mine) if layout.in_blocks else ""
        if layout.like_base:
            mine = converted_by_base(folder, mine, base, layout)
        found |= {f"layers.{number}.{key}": value for key, value in stacked(folder, mine).items()}
    found |= {key: value for key, value in layers.items() if not key.startswith(known)}
    drop_shared(found, base)
    blocks = layout.blocks
    if blocks == LIKE_MODEL and base.name in WITHOUT_EXPERTS and "experts" not in "".join(layers):
        blocks = DENSE
    form = HeadForm(
        hidden_first=layout.hidden_first,
        own_embedding="embed_tokens.weight" in found,
        own_output="lm_head.weight" in found,
        layer=blocks,
        last_norm=layout.last_norm,
        place=place,
        pattern=pattern,
    )
    return form, found


def parted(
    layout: Layout, tensors: Mapping[str, mx.array], place: int, num: int
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Tensors of a head's own modules by their names there, and those of layers as they are called.

    What is another head's module, one of ``num``, is left out.
    """
    names = {module.format(i=place): own for module, own in layout.names.items()}
    others = {module.format(i=i) for module in layout.names for i in range(num)} - names.keys()
    found: dict[str, mx.array] = {}
    layers: dict[str, mx.array] = {}
    for original, tensor in tensors.items():
        name = replaced(original, layout.renamed)
        module, _, kind = name.rpartition(".")
        if layout.in_blocks and module.rpartition(".")[2] in names:
            module = module.rpartition(".")[2]
        if name.endswith(BUFFERS) or module in others:
            continue
        if module in names:
            found[f"{names[module]}.{kind}"] = tensor
        else:
            layers[name] = tensor
    return found, layers


def starts_of(
    layout: Layout, layers: Mapping[str, mx.array], place: int, num: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the names of a head's layers begin with, in their order, and those of all ``num`` heads."""
    if layout.in_blocks:
        numbers = sorted({int(match.group(1)) for match in map(BLOCK.match, layers) if match})
        blocks = tuple(f"layers.{number}." for number in numbers)
        return blocks, blocks
    starts = tuple(layout.layer.format(i=i) for i in range(num))
    return (starts[place],), starts


def block_kind(tensors: Mapping[str, Any]) -> str:
    """What a block of Nemotron-H is, by its tensors."""
    if any(name.startswith("mixer.q_proj.") for name in tensors):
        return ATTENTION
    return EXPERTS if any(name.startswith("mixer.gate.") for name in tensors) else FEED_FORWARD


def replaced(name: str, parts: Sequence[tuple[str, str]]) -> str:
    """A name with parts of it replaced."""
    for old, new in parts:
        name = name.replace(old, new)
    return name


def shifted(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """The tensors with one added to the weights of norms."""
    return {
        name: tensor + 1.0 if tensor.ndim == 1 and is_norm(name) else tensor
        for name, tensor in tensors.items()
    }


def is_norm(name: str) -> bool:
    """Whether a tensor is the weight of a norm, by its name."""
    module, _, kind = name.rpartition(".")
    return kind == "weight" and "norm" in module.rpartition(".")[2]


def converted_by_base(
    folder: Path,
    tensors: dict[str, mx.array],
    base: SplitModel,
    layout: Layout,
) -> dict[str, mx.array]:
    """One layer's tensors as the model's own code converts those of its layers.

    Raises:
        ModelLoadError: A tensor is missing.
    """
    prefix, names = f"{layout.base_prefix}{len(base.layers) - 1}.", layout.base_names
    renamed = {prefix + replaced(name, names): tensor for name, tensor in tensors.items()}
    model: Any = base.model
    try:
        own: dict[str, mx.array] = model.sanitize(renamed)
    except KeyError as error:
        missing = str(error.args[0]).removeprefix(prefix)
        raise ModelLoadError(str(folder), f"tensor {missing} of the head is missing") from error
    back = [(new, old) for old, new in names]
    return {replaced(name.removeprefix(prefix), back): tensor for name, tensor in own.items()}


def stacked(folder: Path, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """The tensors with those of experts as mlx-lm has them: all in one.

    Raises:
        ModelLoadError: An expert is missing among others.
    """
    found: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        stack = "{}.switch_mlp.{}.{}".format(*match.group(1, 3, 4)) if match else name
        if match and stack not in tensors:
            number = match.group(2)
            experts.setdefault(stack, {})[int(number)] = tensor
        elif name.endswith(".experts.gate_up_proj"):
            module = name.removesuffix(".experts.gate_up_proj")
            gate, up = mx.split(tensor, 2, axis=-2)
            found[f"{module}.switch_mlp.gate_proj.weight"] = gate
            found[f"{module}.switch_mlp.up_proj.weight"] = up
        elif name.endswith(".experts.down_proj"):
            module = name.removesuffix(".experts.down_proj")
            found[f"{module}.switch_mlp.down_proj.weight"] = tensor
        else:
            found[name] = tensor
    for name, parts in experts.items():
        missing = sorted(set(range(max(parts) + 1)) - parts.keys())
        if missing:
            raise ModelLoadError(str(folder), f"tensor {name} lacks expert {missing[0]}")
        found[name] = mx.stack([parts[number] for number in range(len(parts))])
    return found


def drop_shared(tensors: dict[str, mx.array], base: SplitModel) -> None:
    """Leave out copies of the model's own embedding and output head.

    Some checkpoints ship them. A quantised model's cannot be compared; there they are taken to be
    copies, as the families train them.
    """
    output = base.embedding if base.output is None else base.output
    for name, module in (("embed_tokens", base.embedding), ("lm_head", output)):
        own = tensors.get(f"{name}.weight")
        if own is None:
            continue
        same_shape = own.shape == (base.vocab_size, base.hidden_size)
        shared = isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
        shared = shared or bool(mx.array_equal(own.astype(base.dtype), module.weight))
        if same_shape and shared:
            for kind in ("weight", "scales", "biases"):
                tensors.pop(f"{name}.{kind}", None)


def mode_of(config: dict[str, Any]) -> str:
    """How mlx calls the form of a checkpoint's quantised tensors."""
    quantisation: Any = config.get("quantization")
    return str(quantisation.get("mode", AFFINE)) if isinstance(quantisation, dict) else AFFINE


def quantise_like_base(head: MtpHead) -> None:
    """Quantise the layers of a head, module by module, as the model's own layers are.

    What no layer of the model has is quantised as most of the layer is that the head's is made like.
    """
    layers = head.base.layers
    known: dict[str, Any] = {}
    for layer in (layers[head.like], *reversed(layers)):
        for path, module in layer.named_modules():
            if hasattr(module, "bits"):
                known.setdefault(path, module)
    typical: Any = next(iter(known.values()), None)

    def form(path: str, module: nn.Module) -> bool | dict[str, Any]:
        same = known.get(path, typical)
        if not hasattr(module, "to_quantized") or same is None or not is_matrix(module, same):
            return False
        return {"bits": same.bits, "group_size": same.group_size, "mode": same.mode}

    for layer in head.layers:
        nn.quantize(layer, class_predicate=form)
        mx.eval(layer.parameters())


def is_matrix(module: Any, like: Any) -> bool:
    """Whether a module's weight can be quantised in groups of that size."""
    return module.weight.shape[-1] % like.group_size == 0
