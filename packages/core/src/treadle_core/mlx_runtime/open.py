"""One call from options to a running engine."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from msgspec.structs import replace

from treadle_core.drafting import DraftController, Drafter
from treadle_core.engine import Engine, EngineConfig
from treadle_core.mlx_runtime.load import LoadedModel, ModelOptions, load
from treadle_core.mlx_runtime.memory import kv_budget, wire_memory
from treadle_core.ports import Observer, PrefixStore

logger = logging.getLogger("treadle")

MakeDrafter = Callable[[LoadedModel], Drafter]
"""Makes who drafts for a model that was loaded."""


class ModelLoader(Protocol):
    """Loads a model on the calling thread, as :func:`~treadle_core.mlx_runtime.load.load` does."""

    def __call__(self, options: ModelOptions, *, max_draft_tokens: int) -> LoadedModel:
        """Load what ``options`` say; drafts of up to so many tokens are to be verified."""
        ...


def open_engine(
    options: ModelOptions | None = None,
    config: EngineConfig | None = None,
    *,
    memory_utilization: float = 0.9,
    observers: Sequence[Observer] = (),
    make_store: Callable[[], PrefixStore | None] | None = None,
    make_drafting: Callable[[], tuple[MakeDrafter, DraftController]] | None = None,
    lossy: bool = False,
    load_model: ModelLoader = load,
) -> tuple[Engine, LoadedModel]:
    """Load a model and make an engine over it, both owned by the calling thread.

    Args:
        options: What to load.
        config: Options of the engine; without ``kv_memory_bytes``, live KV may take what
            ``memory_utilization`` leaves.
        memory_utilization: Share of the device's memory to use, weights included.
        observers: Are told what happens.
        make_store: Makes the engine's prefix store, or none. It is called here, because a store
            belongs to the engine's thread, and before the model is loaded, so that one that cannot
            be made is told at once; if anything fails after it, the store is closed.
        make_drafting: Makes who decides how much is drafted, before the model is loaded, and what
            makes who drafts, once it is; both on the engine's thread. None decodes one token at
            a time.
        lossy: Keep drafts without verifying them: answers are then not the model's own.
        load_model: Loads it; another package may know models that this one does not.

    Raises:
        ModelLoadError: The checkpoint cannot be used.
        Unsupported: An option cannot be honoured.
    """
    config = config or EngineConfig()
    with ExitStack() as undo:
        store = make_store() if make_store is not None else None
        if store is not None:
            undo.callback(store.close)
        make_drafter, controller = make_drafting() if make_drafting is not None else (None, None)
        wire_memory()
        longest = controller.max_tokens if controller is not None else 0
        loaded = load_model(options or ModelOptions(), max_draft_tokens=longest)
        if loaded.runner.spec.note:
            logger.warning("%s: %s", loaded.name, loaded.runner.spec.note)
        if store is not None and not loaded.runner.spec.storable:
            logger.warning("%s: no prompt is reused", loaded.name)
            store.close()
            store = None
        drafter = make_drafter(loaded) if make_drafter is not None else None
        if config.kv_memory_bytes is None:
            config = replace(config, kv_memory_bytes=kv_budget(memory_utilization))
        engine = Engine(
            loaded.runner,
            tokenizer=loaded.tokenizer,
            config=config,
            observers=observers,
            store=store,
            drafter=drafter,
            controller=controller,
            lossy=lossy,
        )
        if lossy:
            logger.warning("%s: lossy: answers are not the model's own", loaded.name)
        undo.pop_all()
        return engine, loaded
