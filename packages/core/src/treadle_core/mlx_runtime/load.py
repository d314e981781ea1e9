"""Loading a checkpoint on the owner thread: a GGUF file, a directory, or a Hub repository."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from msgspec import Struct
from msgspec.structs import replace

from treadle_core.errors import ModelLoadError, TreadleError, Unsupported, describe
from treadle_core.layers import (
    FullAttention,
    ModelSpec,
    Quantised,
    bound,
    flatten,
    grows,
    quantise,
    why_no_drafts,
)
from treadle_core.mlx_runtime.adapter import ModelAdapter, TextModel, inspect
from treadle_core.mlx_runtime.gguf import find_demo_model, load_gguf
from treadle_core.mlx_runtime.probe import (
    check_batching,
    check_drafts,
    check_fusing,
    check_quantising,
    check_storing,
)
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.mlx_runtime.tokenizer import ModelTokenizer, token_ids

HUB_DEFAULT = "mlx-community/SmolLM2-135M-Instruct"
KEPT_TOKENS = 4
KV_BITS = (4, 8)
KV_GROUP_SIZES = (32, 64)
WIDEST_ELSEWHERE = 32


UNAVAILABLE = (EntryNotFoundError, HfHubHTTPError, HFValidationError)
"""What is raised for a file that a repository does not give."""


class ModelOptions(Struct, frozen=True, kw_only=True):
    """What to load, and how.

    Attributes:
        model: A GGUF file, a directory, or a Hub repository; None takes the demo model when it
            is installed, else a small one from the Hub.
        adapter_path: LoRA adapters to apply, for directories and repositories.
        trust_remote_code: Allow the checkpoint's own Python code.
        max_kv_size: Most tokens whose KV a row keeps, the first four among them; 0 keeps all.
        kv_bits: Bits of a number of live KV in layers of full attention, 4 or 8; None keeps it
            as the model computes it.
        kv_group_size: Numbers that share a scale, 32 or 64, where ``kv_bits`` is set.
    """

    model: str | None = None
    adapter_path: str | None = None
    trust_remote_code: bool = False
    max_kv_size: int = 0
    kv_bits: int | None = None
    kv_group_size: int = 64


class LoadedModel:
    """A model that is ready to run.

    Attributes:
        name: How clients call it.
        runner: Runs plans over it.
        tokenizer: Its text.
        config: The checkpoint's config.
        folder: Where its files are on this machine; None where it is a single one.
    """

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        tokenizer: ModelTokenizer,
        config: dict[str, Any],
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.runner = runner
        self.tokenizer = tokenizer
        self.config = config
        self.folder = folder


def load(options: ModelOptions, *, max_draft_tokens: int = 0) -> LoadedModel:
    """Load a model on the calling thread, which owns it from now on.

    Args:
        options: What to load.
        max_draft_tokens: Longest draft that is to be verified; the model may allow less.

    Raises:
        ModelLoadError: The checkpoint cannot be used.
        Unsupported: An option cannot be honoured for this model.
    """
    reference = resolve(options.model)
    model, tokenizer, config = read_checkpoint(reference, options)
    try:
        runner = make_runner(
            model,
            config,
            max_kv_size=options.max_kv_size,
            kv_bits=options.kv_bits,
            kv_group_size=options.kv_group_size,
            slack=max_draft_tokens,
        )
    except TreadleError:
        raise
    except Exception as error:
        raise ModelLoadError(reference, f"it does not run ({describe(error)})") from error
    return LoadedModel(
        model_name(reference),
        runner,
        ModelTokenizer(tokenizer, config),
        config,
        checkpoint_folder(reference),
    )


def load_draft_model(
    model: str, *, vocab_size: int, max_draft_tokens: int
) -> tuple[LoadedModel, int]:
    """Load a small model that guesses what a large one will say, on the thread that owns both.

    Args:
        model: What to load, as :class:`ModelOptions` have it.
        vocab_size: Logits of the large model: both sample from as many, so that the same noise
            gives both the same token where they agree.
        max_draft_tokens: How many tokens are drafted at once.

    Returns:
        The model, and how many token ids it can be fed: those below.

    Raises:
        ModelLoadError: The checkpoint cannot be used.
        Unsupported: Rows of it cannot take tokens back.
    """
    network, tokenizer, config = read_checkpoint(model, ModelOptions(model=model))
    try:
        runner = make_runner(network, config, slack=max_draft_tokens)
        known = runner.spec.vocab_size
        if known != vocab_size:
            runner = make_runner(network, config, slack=max_draft_tokens, vocab_size=vocab_size)
    except TreadleError:
        raise
    except Exception as error:
        raise ModelLoadError(model, f"it does not run ({describe(error)})") from error
    loaded = LoadedModel(model_name(model), runner, ModelTokenizer(tokenizer, config), config)
    return loaded, known


def make_runner(
    model: nn.Module,
    config: dict[str, Any],
    *,
    max_kv_size: int = 0,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    slack: int = 0,
    vocab_size: int | None = None,
) -> ModelRunner:
    """A runner for an mlx-lm model: inspects its layers and proves that its rows may share.

    Args:
        model: The model, evaluated.
        config: The checkpoint's config.
        max_kv_size: Most tokens whose KV a row keeps; 0 keeps all.
        kv_bits: Bits of a number of live KV; None does not quantise.
        kv_group_size: Numbers that share a scale.
        slack: Longest draft that is to be verified: tokens that a row may take back.
        vocab_size: How many logits to sample from; None takes the model's own number.

    Raises:
        Unsupported: ``max_kv_size`` or ``kv_bits`` cannot be honoured, or drafts give wrong
            logits.
    """
    if max_kv_size and kv_bits is not None:
        raise Unsupported(
            "max_kv_size and kv_bits exclude each other: a bounded row is a window, and windows "
            "are not quantised"
        )
    text = TextModel(model)
    spec = check_batching(text, inspect(text, config))
    slack = draft_limit(text, spec, config, slack)
    if max_kv_size:
        spec = bounded(spec, max_kv_size)
    if kv_bits is not None:
        spec = quantised(spec, kv_bits, kv_group_size)
        check_quantising(text, spec)
    fuses = check_fusing(text, spec)
    spec = check_storing(text, spec)
    if vocab_size is not None and vocab_size != spec.vocab_size:
        text, spec = TextModel(model, vocab_size=vocab_size), replace(spec, vocab_size=vocab_size)
    return ModelRunner(text, spec, slack=slack, config=config, fuses=fuses)


def draft_limit(model: ModelAdapter, spec: ModelSpec, config: dict[str, Any], most: int) -> int:
    """Longest draft of up to ``most`` tokens that a forward takes; the logits are proven right.

    Raises:
        Unsupported: Drafts give wrong logits.
    """
    limit = min(most, widest_forward(config) - 1)
    wrong = check_drafts(model, spec) if limit and not why_no_drafts(spec) else ""
    if wrong:
        raise Unsupported(f"no drafts can be verified with {spec.model_type}: {wrong}")
    return limit


def widest_forward(config: dict[str, Any]) -> int:
    """Tokens per row up to which attention of one forward costs little more than of one token.

    Metal has a kernel for few queries; it takes at most 8 per row, and 32 that share a key head.
    """
    if mx.default_device() == mx.cpu or not mx.metal.is_available():
        return WIDEST_ELSEWHERE
    text: Any = config.get("text_config")
    source = text if isinstance(text, dict) else config
    heads: Any = source.get("num_attention_heads") or 1
    shared: Any = source.get("num_key_value_heads") or heads
    return max(2, min(8, 32 * shared // heads))


def bounded(spec: ModelSpec, max_kv_size: int) -> ModelSpec:
    """``spec`` with windows of ``max_kv_size`` tokens in place of full attention.

    Raises:
        Unsupported: A layer cannot be bounded, or the bound is too small.
    """
    if max_kv_size <= 2 * KEPT_TOKENS:
        raise Unsupported(f"max_kv_size: got {max_kv_size}, expected more than {2 * KEPT_TOKENS}")
    if not spec.batched and any(grows(layer) for layer in spec.layers):
        raise Unsupported(
            f"max_kv_size cannot be honoured for {spec.model_type}: {spec.note or 'unknown layers'}"
        )
    layers = tuple(bound(layer, max_kv_size, KEPT_TOKENS) for layer in spec.layers)
    return replace(spec, layers=layers)


def quantised(spec: ModelSpec, kv_bits: int, kv_group_size: int) -> ModelSpec:
    """``spec`` with quantised KV in its layers of full attention; the others stay exact.

    Raises:
        Unsupported: No layer can be quantised, or one of full attention cannot.
    """
    for name, value, known in (
        ("kv_bits", kv_bits, KV_BITS),
        ("kv_group_size", kv_group_size, KV_GROUP_SIZES),
    ):
        if value not in known:
            raise Unsupported(f"{name}: got {value}, expected {known[0]} or {known[1]}")
    obstacle = unquantisable(spec, kv_group_size)
    if obstacle:
        raise Unsupported(f"kv_bits cannot be honoured for {spec.model_type}: {obstacle}")
    form = Quantised(kv_bits, kv_group_size)
    return replace(spec, layers=tuple(quantise(layer, form) for layer in spec.layers))


def unquantisable(spec: ModelSpec, group_size: int) -> str:
    """What keeps the KV from being quantised, in words; empty if nothing is known to."""
    if not spec.batched:
        return spec.note or "its rows run one at a time"
    parts = [part for layer in spec.layers for part in flatten(layer)]
    full = [part for part in parts if isinstance(part, FullAttention)]
    if not full:
        kinds = Counter(type(part).__name__.lower() for part in parts)
        found = " and ".join(f"{kind} ones in {_layers(n)}" for kind, n in sorted(kinds.items()))
        return f"it has no caches of full attention, only {found}"
    latent = sum(part.latent for part in full)
    if latent:
        return f"latent attention (MLA), in {_layers(latent)}, cannot be quantised"
    odd = [part for part in full if part.key_dim % group_size or part.value_dim % group_size]
    if odd:
        dims = sorted({dim for part in odd for dim in (part.key_dim, part.value_dim)})
        sizes = " and ".join(map(str, dims))
        return f"heads of {sizes}, in {_layers(len(odd))}, are no multiple of {group_size}"
    return ""


def resolve(model: str | None) -> str:
    """The checkpoint that ``model`` means."""
    if model is not None:
        return model
    demo = find_demo_model()
    return str(demo) if demo is not None else HUB_DEFAULT


def model_name(reference: str) -> str:
    """How clients call a checkpoint: its repository, or the last part of its path."""
    path = Path(reference)
    if path.suffix == ".gguf":
        return path.name.removesuffix(".gguf").split(".")[0]
    return path.resolve().name if path.exists() else reference


def read_checkpoint(reference: str, options: ModelOptions) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Model, mlx-lm's tokenizer and config of a checkpoint, evaluated on the calling thread.

    Raises:
        ModelLoadError: The checkpoint cannot be used.
        Unsupported: An option cannot be honoured for it.
    """
    path = Path(reference)
    if path.suffix == ".gguf" and options.adapter_path is not None:
        raise Unsupported("adapter_path cannot be honoured for a GGUF file")
    _check_place(reference)
    if path.suffix == ".gguf":
        return load_gguf(path)
    return _read_directory(reference, options)


def read_config(reference: str) -> dict[str, Any]:
    """The config of a checkpoint, whose weights need not be there; empty for a GGUF file.

    Raises:
        ModelLoadError: There is no such checkpoint, or none that can be read.
    """
    _check_place(reference)
    if Path(reference).suffix == ".gguf":
        return {}
    try:
        path = _get_file(reference, "config.json")
    except UNAVAILABLE as error:
        raise _unavailable(reference, error) from error
    if path is None:
        raise ModelLoadError(reference, "it has no config.json")
    return _parse(reference, path)


def _check_place(reference: str) -> None:
    """Refuse what is neither here nor a repository's name."""
    path = Path(reference)
    if not reference:
        raise ModelLoadError("''", "its name is empty")
    if path.suffix == ".gguf" and not path.is_file():
        raise ModelLoadError(reference, "there is no such file")
    if not path.exists() and looks_like_path(reference):
        raise ModelLoadError(reference, "there is no such file or directory")


def _unavailable(reference: str, error: Exception) -> ModelLoadError:
    """A repository that is neither here nor to be had."""
    reason = f"it is not on this machine and the Hub did not give it ({error})"
    return ModelLoadError(reference, reason)


def _read_directory(reference: str, options: ModelOptions) -> tuple[nn.Module, Any, dict[str, Any]]:
    try:
        loaded: Any = mlx_lm.load(
            reference,
            adapter_path=options.adapter_path,
            return_config=True,
            trust_remote_code=options.trust_remote_code,
        )
        model, tokenizer, config = loaded
        # mlx-lm puts the generation config's end tokens in place of the config's own.
        ends = token_ids(config.get("eos_token_id")) | own_end_tokens(reference)
        config = {**config, "eos_token_id": sorted(ends)}
        mx.eval(model.parameters())
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        raise _unavailable(reference, error) from error
    except TreadleError:
        raise
    except Exception as error:
        raise ModelLoadError(reference, describe(error)) from error
    return model, tokenizer, config


def own_end_tokens(reference: str) -> frozenset[int]:
    """The end tokens that a checkpoint's ``config.json`` names."""
    return token_ids(read_json(reference, "config.json").get("eos_token_id"))


def read_json(reference: str, name: str) -> dict[str, Any]:
    """A JSON file of a checkpoint, whose weights need not be there; empty if it has none.

    Raises:
        ModelLoadError: The file holds something else.
    """
    try:
        path = _get_file(reference, name)
    except UNAVAILABLE:
        # Whether anything else of it is there shows when it is loaded.
        return {}
    return {} if path is None else _parse(reference, path)


def _parse(reference: str, path: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(reference, f"{path.name}: {describe(error)}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(reference, f"{path.name} is no JSON object")
    return content


def _get_file(reference: str, name: str) -> Path | None:
    """Where a file of a checkpoint is on this machine, fetched from the Hub if need be.

    None if a directory has none; a repository that does not give it raises.
    """
    folder = Path(reference)
    if folder.exists() or looks_like_path(reference):
        return folder / name if (folder / name).is_file() else None
    known = try_to_load_from_cache(reference, name)
    if isinstance(known, str):
        return Path(known)
    return Path(hf_hub_download(reference, name))


def checkpoint_folder(reference: str) -> Path | None:
    """Where the files of a loaded checkpoint are; None for a GGUF file."""
    path = Path(reference)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return None
    found = try_to_load_from_cache(reference, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def looks_like_path(reference: str) -> bool:
    """Whether a reference can only be a path, never a Hub repository."""
    return reference.startswith(("/", ".", "~")) or reference.count("/") != 1


def _layers(number: int) -> str:
    return f"{number} layer" if number == 1 else f"{number} layers"
