"""A head by itself on disk, and whether tensors fit a head.

A folder with two files:

- ``mtp_head.safetensors``: every tensor of the head, by the name that it has in
  :class:`~treadle_speculative.mtp.head.MtpHead`: ``norm_embed.weight``, ``norm_hidden.weight``,
  ``fc.weight``, ``layers.<i>.<as in the model's own layer>``, ``norm.weight``, and where the form says
  so ``embed_tokens.weight`` and ``lm_head.weight``. Quantised ones have ``.scales`` and ``.biases``
  beside ``.weight``, as mlx has them.
- ``mtp_head.json``: a :class:`HeadFile`: which model it belongs to, its sizes, its form.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten
from msgspec import Struct

from treadle_core.errors import ModelLoadError, TreadleError, describe
from treadle_core.mlx_runtime.split import SplitModel
from treadle_speculative.mtp.head import HeadForm, MtpHead

WEIGHTS = "mtp_head.safetensors"
DESCRIPTION = "mtp_head.json"
FORMAT = "treadle-mtp-head-1"
AFFINE = "affine"
WORD_BITS = 32


class HeadFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a head besides its tensors.

    Attributes:
        model_type: The architecture of its model.
        base: Fingerprint of the model that it was made with; empty where nobody took it.
        hidden_size: Width of the hidden states.
        vocab_size: Number of logits.
        form: How the head is wired.
        mode: mlx's mode of the tensors that are quantised, if any is; their shapes say the rest.
        format: Of these files.
    """

    model_type: str
    base: str
    hidden_size: int
    vocab_size: int
    form: HeadForm
    mode: str = AFFINE
    format: str = FORMAT


def save_head(head: MtpHead, folder: Path, *, base: str = "", mode: str = AFFINE) -> None:
    """Write a head's two files; made if absent, files of the same names are replaced.

    Args:
        head: The head.
        folder: Where to.
        base: Fingerprint of its model, as ``ModelRunner.fingerprint`` has it; empty leaves out the
            check when it is loaded.
        mode: mlx's mode, if it was quantised.
    """
    described = HeadFile(
        model_type=head.base.name,
        base=base,
        hidden_size=head.base.hidden_size,
        vocab_size=head.base.vocab_size,
        form=head.form,
        mode=mode,
    )
    folder.mkdir(parents=True, exist_ok=True)
    # Beside their final names first: a run that is stopped leaves whole files, or none.
    weights = folder / f"writing-{WEIGHTS}"
    mx.save_safetensors(str(weights), dict(parameters(head)), {"format": "mlx"})
    description = folder / f"writing-{DESCRIPTION}"
    description.write_bytes(msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n")
    weights.replace(folder / WEIGHTS)
    description.replace(folder / DESCRIPTION)


def load_head(folder: Path, base: SplitModel, *, fingerprint: str = "") -> MtpHead:
    """A head that was saved by itself, evaluated.

    Args:
        folder: Where it is.
        base: The model that it is to draft for.
        fingerprint: That model's; empty leaves out the comparison.

    Raises:
        ModelLoadError: It cannot be read, belongs to another model, or does not fit.
        Unsupported: No head can be made for the model.
    """
    where = str(folder)
    described = _read_description(folder)
    for name, found, expected in (
        ("model_type", described.model_type, base.name),
        ("hidden_size", described.hidden_size, base.hidden_size),
        ("vocab_size", described.vocab_size, base.vocab_size),
    ):
        if found != expected:
            raise ModelLoadError(
                where, f"the head's {name} is {found}, the model's is {expected}: another model's"
            )
    if described.base and fingerprint and described.base != fingerprint:
        raise ModelLoadError(where, "the head was made for other weights than the model's")
    try:
        tensors: Any = mx.load(str(folder / WEIGHTS))
    except Exception as error:
        raise ModelLoadError(where, f"{WEIGHTS} cannot be read ({describe(error)})") from error
    head = MtpHead(base, described.form)
    fill(head, tensors, where, described.mode)
    return head


def fill(head: MtpHead, tensors: dict[str, mx.array], where: str, mode: str = AFFINE) -> None:
    """Give a head its tensors, and evaluate it.

    Args:
        head: The head.
        tensors: By the names of its attributes: all of them, and no others.
        where: What to call the source in an error.
        mode: mlx's mode of those that have scales.

    Raises:
        ModelLoadError: A tensor is missing, superfluous, or of another shape.
    """
    nn.quantize(head, class_predicate=lambda path, module: form_of(path, module, tensors, mode))
    expected = dict(parameters(head))
    for name in sorted(expected.keys() - tensors.keys()):
        raise ModelLoadError(
            where, f"tensor {name} is missing: expected one of shape {expected[name].shape}"
        )
    for name in sorted(tensors.keys() - expected.keys()):
        raise ModelLoadError(
            where, f"tensor {name} of shape {tensors[name].shape}: the head has no place for it"
        )
    for name, tensor in expected.items():
        if tensor.shape != tensors[name].shape:
            raise ModelLoadError(
                where,
                f"tensor {name} has shape {tensors[name].shape}, expected {tensor.shape}",
            )
    head.load_weights(list(tensors.items()))
    head.eval()
    mx.eval(head.parameters())


def form_of(
    path: str, module: Any, tensors: dict[str, mx.array], mode: str
) -> bool | dict[str, Any]:
    """How to quantise a module so that its tensors fit; False where they are plain numbers."""
    scales, weight = tensors.get(f"{path}.scales"), tensors.get(f"{path}.weight")
    if scales is None or weight is None or not hasattr(module, "to_quantized"):
        return False
    width = module.weight.shape[-1]
    return {
        "group_size": width // scales.shape[-1],
        "bits": weight.shape[-1] * WORD_BITS // width,
        "mode": mode,
    }


def parameters(head: nn.Module) -> list[tuple[str, mx.array]]:
    """A head's tensors by name."""
    flat: Any = tree_flatten(head.parameters())
    return flat


def _read_description(folder: Path) -> HeadFile:
    try:
        described = msgspec.json.decode((folder / DESCRIPTION).read_bytes(), type=HeadFile)
    except (OSError, msgspec.DecodeError, TreadleError) as error:
        raise ModelLoadError(str(folder), f"{DESCRIPTION} cannot be read ({error})") from error
    if described.format != FORMAT:
        raise ModelLoadError(
            str(folder), f"{DESCRIPTION} has format {described.format!r}, expected {FORMAT!r}"
        )
    return described
