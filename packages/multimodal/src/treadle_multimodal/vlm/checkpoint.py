"""Loading a vision checkpoint on the thread that owns it from now on."""

from typing import Any, cast

import mlx_vlm
from mlx_vlm.utils import get_model_path, load_config

from treadle_core import ModelLoadError, TreadleError
from treadle_core.errors import describe
from treadle_core.layers import ModelSpec
from treadle_core.mlx_runtime.adapter import inspect
from treadle_core.mlx_runtime.probe import check_batching
from treadle_multimodal.families import check_family
from treadle_multimodal.vlm.model import DEFAULT_FEATURE_BYTES, VlmModel
from treadle_multimodal.vlm.preprocess import Preprocessor


class LoadedVlm:
    """A vision model that is ready to run.

    Attributes:
        model: For the runtime, on this thread.
        spec: What it is.
        preprocessor: Prepares its prompts, on any thread.
        config: The checkpoint's config.
    """

    def __init__(
        self, model: VlmModel, spec: ModelSpec, preprocessor: Preprocessor, config: dict[str, Any]
    ) -> None:
        self.model = model
        self.spec = spec
        self.preprocessor = preprocessor
        self.config = config


def load_vlm(reference: str, *, feature_bytes: int = DEFAULT_FEATURE_BYTES) -> LoadedVlm:
    """Load a directory or a Hub repository with mlx-vlm.

    Args:
        reference: Which.
        feature_bytes: Most bytes of vision features that are kept.

    Raises:
        ModelLoadError: The checkpoint cannot be used.
        Unsupported: Nobody has checked its family with media.
    """
    try:
        config = cast("dict[str, Any]", load_config(get_model_path(reference)))
        # Before its weights are read.
        check_family(config)
        loaded: Any = mlx_vlm.load(reference)
        network, processor = loaded
        preprocessor = Preprocessor(config, processor)
        axes = preprocessor.family.counts_axes
        model = VlmModel(network, counts_axes=axes, feature_bytes=feature_bytes)
        spec = check_batching(model, inspect(model, config))
    except TreadleError:
        raise
    except Exception as error:
        raise ModelLoadError(reference, describe(error)) from error
    return LoadedVlm(model, spec, preprocessor, config)
