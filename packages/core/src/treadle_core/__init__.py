"""Continuous batching over MLX models: requests in, events out.

The names here are the package's public interface. The model side (loading, live KV, sampling) is in
:mod:`treadle_core.mlx_runtime`, so that importing this package does not import mlx.
"""

from treadle_core.batch import Completion, collect, generate_batch, run
from treadle_core.clock import SystemClock
from treadle_core.engine import Engine, EngineConfig, EngineStats
from treadle_core.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineClosed,
    InvalidRequest,
    ModelLoadError,
    OutOfMemory,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    StepFailed,
    TreadleError,
    Unsupported,
)
from treadle_core.events import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Progress,
    Timings,
    TokenLogprob,
    TokenOut,
    Usage,
)
from treadle_core.layers import LayerSpec, ModelSpec
from treadle_core.loop import AsyncEngine
from treadle_core.request import LogitsProcessor, Request, SamplingParams

__all__ = [
    "AsyncEngine",
    "Completion",
    "DeadlineExceeded",
    "DuplicateRequest",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "InvalidRequest",
    "LayerSpec",
    "LogitsProcessor",
    "ModelLoadError",
    "ModelSpec",
    "OutOfMemory",
    "Progress",
    "PromptTooLong",
    "QueueFull",
    "Request",
    "RequestFailed",
    "SamplingParams",
    "StepFailed",
    "SystemClock",
    "Timings",
    "TokenLogprob",
    "TokenOut",
    "TreadleError",
    "Unsupported",
    "Usage",
    "collect",
    "generate_batch",
    "run",
]
