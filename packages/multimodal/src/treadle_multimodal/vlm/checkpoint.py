"""Loading a vision checkpoint on the thread that owns it from now on."""

from typing import Any

import mlx_vlm
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_vlm.utils import get_model_path, load_config
from msgspec.structs import replace

from treadle_core import ModelLoadError, TreadleError, Unsupported
from treadle_core.errors import describe
from treadle_core.mlx_runtime.adapter import inspect
from treadle_core.mlx_runtime.load import (
    LoadedModel,
    ModelOptions,
    draft_limit,
    model_name,
    own_end_tokens,
    resolve,
)
from treadle_core.mlx_runtime.probe import check_batching, check_storing
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.mlx_runtime.tokenizer import ModelTokenizer, token_ids
from treadle_multimodal.families import check_family
from treadle_multimodal.vlm.model import DEFAULT_FEATURE_BYTES, VlmModel
from treadle_multimodal.vlm.preprocess import Preprocessor


class LoadedVlm:
    """A vision model that is ready to run.

    Attributes:
        base: What an engine needs of any model.
        model: What the runner runs, on this thread.
        preprocessor: Prepares its prompts, on any thread.
    """

    def __init__(self, base: LoadedModel, model: VlmModel, preprocessor: Preprocessor) -> None:
        self.base = base
        self.model = model
        self.preprocessor = preprocessor


def load_vlm(
    options: ModelOptions, *, feature_bytes: int = DEFAULT_FEATURE_BYTES, max_draft_tokens: int = 0
) -> LoadedVlm:
    """Load a directory or a Hub repository with mlx-vlm.

    Args:
        options: What to load; adapters, bounded and quantised KV have not been checked with media.
        feature_bytes: Most bytes of vision features that are kept.
        max_draft_tokens: Longest draft that is to be verified; the model may allow less.

    Raises:
        ModelLoadError: The checkpoint cannot be used.
        Unsupported: Nobody has checked its family, or an option, with media.
    """
    plain = ModelOptions()
    for name in ("adapter_path", "max_kv_size", "kv_bits"):
        if getattr(options, name) != getattr(plain, name):
            raise Unsupported(f"{name} has not been checked with media")
    reference = resolve(options.model)
    try:
        return _load(reference, options, feature_bytes, max_draft_tokens)
    except TreadleError:
        raise
    except Exception as error:
        raise ModelLoadError(reference, describe(error)) from error


def _load(
    reference: str, options: ModelOptions, feature_bytes: int, max_draft_tokens: int
) -> LoadedVlm:
    config: dict[str, Any] = load_config(get_model_path(reference))
    # Before its weights are read.
    check_family(config)
    network, processor = mlx_vlm.load(reference, trust_remote_code=options.trust_remote_code)
    preprocessor = Preprocessor(config, processor)
    axes = preprocessor.family.counts_axes
    model = VlmModel(network, counts_axes=axes, feature_bytes=feature_bytes)
    spec = check_batching(model, inspect(model, config))
    slack = draft_limit(model, spec, config, max_draft_tokens)
    spec = replace(check_storing(model, spec), media=True)
    # mlx-vlm puts the generation config's end tokens in place of the config's own.
    ends = token_ids(config.get("eos_token_id")) | own_end_tokens(reference)
    config = {**config, "eos_token_id": sorted(ends)}
    wrapper = TokenizerWrapper(processor.tokenizer)
    tokenizer = ModelTokenizer(wrapper, config, render=preprocessor.render)
    runner = ModelRunner(model, spec, slack=slack, config=config)
    base = LoadedModel(model_name(reference), runner, tokenizer, config)
    return LoadedVlm(base, model, preprocessor)
