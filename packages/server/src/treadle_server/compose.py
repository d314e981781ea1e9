"""The composition root: the one place where Treadle's packages are put together.

Everything that brings mlx or the Hub's code is imported when it is called for, so that options
can be read, and ``--offline`` set, before.
"""

from collections.abc import Callable

from msgspec.structs import replace

from treadle_core import AsyncEngine, Engine, EngineConfig
from treadle_server.settings import MemoryConfig, ModelConfig, ServeConfig


def open_engine(model: ModelConfig, engine: EngineConfig, memory: MemoryConfig) -> Engine:
    """Load a model on the calling thread and make an engine over it.

    Raises:
        ModelLoadError: The checkpoint cannot be used.
        Unsupported: An option cannot be honoured.
    """
    from treadle_core.mlx_runtime import open as runtime
    from treadle_core.mlx_runtime.load import ModelOptions

    options = ModelOptions(
        model=model.model,
        adapter_path=model.adapter_path,
        trust_remote_code=model.trust_remote_code,
        max_kv_size=model.max_kv_size,
    )
    config = replace(engine, kv_memory_bytes=memory.kv_bytes)
    opened, _ = runtime.open_engine(options, config, memory_utilization=memory.utilization)
    return opened


def serving_engine(config: ServeConfig) -> AsyncEngine:
    """The engine to serve, not started: entering it loads the model on its own thread."""
    return AsyncEngine(lambda: open_engine(config.model, config.engine, config.memory))


def with_served_name(config: ServeConfig) -> ServeConfig:
    """``config`` with the checkpoint's name to serve it under, if it has none."""
    if config.http.served_model_name:
        return config
    from treadle_core.mlx_runtime.load import model_name, resolve

    name = model_name(resolve(config.model.model))
    return replace(config, http=replace(config.http, served_model_name=(name,)))


def engine_bench() -> Callable[[list[str]], int]:
    """The engine's benchmark, which reads its own options."""
    from treadle_core.mlx_runtime import bench

    return bench.main
