"""The composition root: the one place where Treadle's packages are put together.

Everything that brings mlx or the Hub's code is imported when it is called for, so that options
can be read, and ``--offline`` set, before.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import msgspec
from msgspec.structs import replace

from treadle_core import AsyncEngine, Engine, EngineConfig, InvalidRequest, Unsupported
from treadle_core.drafting import DraftController, Drafter
from treadle_core.ports import PrefixStore
from treadle_server.cache_command import Care
from treadle_server.media import FeatureFigures, Media, MediaInput, MediaPrompt, NoMedia
from treadle_server.saving import SavingStore
from treadle_server.settings import (
    MEBIBYTE,
    CacheOptions,
    MediaOptions,
    MemoryConfig,
    ModelConfig,
    RunConfig,
    ServeConfig,
    SpeculativeOptions,
)

logger = logging.getLogger("treadle.server")

MakeStore = Callable[[], PrefixStore]
MakeDrafting = Callable[[], tuple[Callable[[Any], Drafter], DraftController]]
Bench = Callable[[list[str]], int]

MEDIA_PARTS = ("vision_config", "audio_config", "thinker_config")
"""What the config of a checkpoint has if the model sees or hears."""

MEDIA_LIMITS = {
    "max_media_items": "max_items",
    "max_image_bytes": "max_image_bytes",
    "max_video_bytes": "max_video_bytes",
    "max_audio_bytes": "max_audio_bytes",
    "max_media_bytes": "max_request_bytes",
    "max_decoded_media_bytes": "max_decoded_bytes",
    "max_media_side": "max_side",
    "max_image_pixels": "max_pixels",
    "max_frame_pixels": "max_frame_pixels",
    "max_video_frames": "max_frames",
    "max_video_pixels": "max_video_pixels",
    "max_video_seconds": "max_video_seconds",
    "max_audio_seconds": "max_audio_seconds",
    "media_fetch_seconds": "fetch_seconds",
    "media_decode_seconds": "decode_seconds",
    "max_media_redirects": "max_redirects",
    "max_concurrent_media": "max_concurrent",
    "max_loaded_media_bytes": "max_loaded_bytes",
}
MEDIA_POLICY = {
    "allow_http_media": "allow_http",
    "allowed_media_domains": "allowed_hosts",
    "allowed_media_ports": "allowed_ports",
    "allowed_media_networks": "allowed_networks",
}
MEDIA_FILES = {
    "allowed_local_media_path": "allowed_directories",
    "default_video_fps": "video_fps",
}
"""Options of the server by what treadle-multimodal calls them, in three of its Structs."""


class Opened(NamedTuple):
    """An engine, and what its model does with media."""

    engine: Engine
    media: Media


class Served(NamedTuple):
    """An engine that is not started, and, once it is, what its model does with media."""

    engine: AsyncEngine
    media: Callable[[], Media]


def open_engine(
    model: ModelConfig,
    engine: EngineConfig,
    memory: MemoryConfig,
    make_store: MakeStore | None = None,
    make_drafting: MakeDrafting | None = None,
    *,
    lossy: bool = False,
    media: MediaOptions | None = None,
    shown: Sequence[str] = (),
) -> Opened:
    """Load a model on the calling thread and make an engine over it.

    Args:
        model: Which.
        engine: Options of the engine.
        memory: How much memory live KV may take.
        make_store: Makes the store of prefixes; None keeps none.
        make_drafting: Makes the controller, and what makes the drafter once the model is loaded; None
            decodes one token at a time.
        lossy: Keep drafts without verifying them.
        media: How images, videos and audio are taken, if the model takes some.
        shown: Kinds of media that are there already.

    Raises:
        ModelLoadError: The checkpoint cannot be used.
        Unsupported: An option cannot be honoured.
    """
    from treadle_core.mlx_runtime import open as runtime
    from treadle_core.mlx_runtime.load import LoadedModel, ModelOptions, load

    wanted = media or MediaOptions()
    found: Media = NoMedia()

    def load_model(options: ModelOptions, *, max_draft_tokens: int) -> LoadedModel:
        nonlocal found
        why = why_text_only(options.model, wanted)
        if why:
            check_text_only(wanted, shown, why)
            found = NoMedia(why=why)
            return load(options, max_draft_tokens=max_draft_tokens)
        loaded, found = load_with_media(options, wanted, max_draft_tokens)
        return loaded

    options = ModelOptions(
        model=model.model,
        adapter_path=model.adapter_path,
        trust_remote_code=model.trust_remote_code,
        max_kv_size=model.max_kv_size,
        kv_bits=model.kv_bits,
        kv_group_size=model.kv_group_size,
    )
    config = replace(engine, kv_memory_bytes=memory.kv_bytes)
    opened, _ = runtime.open_engine(
        options,
        config,
        memory_utilization=memory.utilization,
        make_store=make_store,
        make_drafting=make_drafting,
        lossy=lossy,
        load_model=load_model,
    )
    return Opened(opened, found)


def serving_engine(config: ServeConfig) -> Served:
    """The engine to serve, not started: entering it loads the model on its own thread.

    Raises:
        InvalidRequest: An option's value is beyond its limits.
        Unsupported: An option needs a package that is not installed.
    """
    # Asked when the engine is there, on its own thread.
    make_store = store_maker(config.cache, asked_for(config), lambda: engine.closing)
    make_drafting = drafting_maker(config.speculative)
    check_media(config.media)
    media: Media = NoMedia()

    def make() -> Engine:
        nonlocal media
        opened, media = open_engine(
            config.model,
            config.engine,
            config.memory,
            make_store,
            make_drafting,
            lossy=config.speculative.speculative_lossy,
            media=config.media,
        )
        return opened

    engine = AsyncEngine(make)
    return Served(engine, lambda: media)


def check_media(options: MediaOptions) -> None:
    """Refuse what can be refused before a model is loaded.

    Raises:
        InvalidRequest: With the option, its value and what is accepted.
        Unsupported: The package that reads media is not installed.
    """
    if options.said:
        check_installed(options.said[0], "multimodal")
        media_config(options)


def why_text_only(model: str | None, options: MediaOptions) -> str:
    """Why a checkpoint is used for text alone, in words; empty if it is not.

    Raises:
        ModelLoadError: It cannot be read, so that nothing is known of it.
    """
    from treadle_core.mlx_runtime.load import read_config, read_json, resolve

    reference = resolve(model)
    config = read_config(reference)
    if not any(part in config for part in MEDIA_PARTS):
        return "the model takes text only"
    if options.text_only:
        return "text_only says so"
    if not is_installed("multimodal"):
        return needed("the model would take them, but that", "multimodal")
    from treadle_multimodal.families import FAMILIES, UNFIT

    family = str(config.get("model_type"))
    if family in UNFIT:
        return f"{family}: {UNFIT[family]}"
    if family not in FAMILIES:
        return f"{family} has not been checked with them; checked are {', '.join(FAMILIES)}"
    if not any(
        read_json(reference, f"{name}_config.json") for name in ("preprocessor", "processor")
    ):
        return "the checkpoint has no processor for them"
    return ""


def check_text_only(options: MediaOptions, shown: Sequence[str], why: str) -> None:
    """Refuse media, and options about them, for a model that is used for text alone.

    Raises:
        Unsupported: One was given.
    """
    if shown:
        raise Unsupported(f"{shown[0]} cannot be shown to the model: {why}")
    if options.said:
        raise Unsupported(f"{options.said[0]} cannot be honoured, no media are taken: {why}")


def load_with_media(options: Any, wanted: MediaOptions, max_draft_tokens: int) -> tuple[Any, Media]:
    """Load a model that takes media, and make what reads them.

    Args:
        options: What to load, as core's ``ModelOptions``.
        wanted: How media are taken.
        max_draft_tokens: Longest draft that is to be verified.

    Raises:
        ModelLoadError: The checkpoint cannot be used.
        Unsupported: An option cannot be honoured with media.
    """
    from treadle_multimodal import MediaLoader, parse_part
    from treadle_multimodal.vlm.checkpoint import load_vlm

    sizes: dict[str, int] = {}
    if wanted.vision_cache_mb is not None:
        sizes["feature_bytes"] = wanted.vision_cache_mb * MEBIBYTE
    try:
        loaded = load_vlm(options, max_draft_tokens=max_draft_tokens, **sizes)
    except Unsupported as error:
        raise Unsupported(f"{error}; text_only takes no media") from error
    preprocessor, config = loaded.preprocessor, media_config(wanted)
    hearing = preprocessor.family.hearing
    if hearing is not None:
        config = replace(config, audio_sample_rate=hearing.sample_rate)
    loader = MediaLoader(config)

    def prepare(
        text: str, parts: Sequence[Any], fields: Sequence[str]
    ) -> AbstractAsyncContextManager[MediaPrompt]:
        return loader.prepare(parts, partial(preprocessor.encode, text), fields)

    media = MediaInput(
        kinds=frozenset(preprocessor.kinds),
        parse=parse_part,
        prepare=prepare,
        features=feature_figures(loaded.model.features),
    )
    return loaded.base, media


def feature_figures(cache: Any) -> Callable[[], FeatureFigures | None]:
    """What tells how a cache of vision features does, without keeping it."""
    kept = ref(cache)

    def figures() -> FeatureFigures | None:
        found = kept()
        if found is None:
            return None
        return msgspec.convert(found.stats(), FeatureFigures, from_attributes=True)

    return figures


def media_config(options: MediaOptions) -> Any:
    """The configuration of treadle-multimodal.

    Raises:
        InvalidRequest: With the option, its value and what is accepted.
    """
    from treadle_multimodal import FetchPolicy, MediaLimits, MultimodalConfig

    for directory in options.allowed_local_media_path:
        if not Path(directory).is_dir():
            raise InvalidRequest("allowed_local_media_path", directory, "a directory")
    try:
        return MultimodalConfig(
            limits=MediaLimits(**said(options, MEDIA_LIMITS)),
            fetch=FetchPolicy(
                enabled=not options.disable_media_fetch, **said(options, MEDIA_POLICY)
            ),
            **said(options, MEDIA_FILES),
        )
    except InvalidRequest as error:
        known = {
            theirs: ours for ours, theirs in (MEDIA_LIMITS | MEDIA_POLICY | MEDIA_FILES).items()
        }
        raise InvalidRequest(known[error.field], error.value, error.limit) from None


def said(options: MediaOptions, names: dict[str, str]) -> dict[str, Any]:
    """Those of the options that were said, by their other names."""
    return {names[field]: getattr(options, field) for field in options.said if field in names}


def running_engine(config: RunConfig, media: MediaOptions) -> Opened:
    """The engine of ``treadle run``, on the calling thread.

    Args:
        config: Options of the command.
        media: How images, videos and audio are taken.

    Raises:
        ModelLoadError: A checkpoint cannot be used.
        Unsupported: An option cannot be honoured.
    """
    return open_engine(
        config.model,
        config.engine,
        config.memory,
        make_drafting=drafting_maker(config.speculative),
        lossy=config.speculative.speculative_lossy,
        media=media,
        shown=[kind for kind, _ in config.run.media],
    )


def asked_for(config: ServeConfig) -> tuple[str, ...]:
    """Names of the options that mean nothing without a store."""
    plain = config.engine.checkpoint_interval == EngineConfig().checkpoint_interval
    return config.cache.said if plain else (*config.cache.said, "checkpoint_interval")


def store_maker(
    options: CacheOptions,
    asked: tuple[str, ...] = (),
    stops: Callable[[], bool] = lambda: False,
) -> MakeStore | None:
    """What makes the store of prefixes, on the engine's thread; None where nothing is kept.

    Args:
        options: How they are kept.
        asked: Names of the options that ask for a store.
        stops: Whether the engine is to end before it has begun.

    Raises:
        Unsupported: An option asks for a store, and its package is not installed.
    """
    if options.disable_prefix_cache:
        return None
    if asked:
        check_installed(asked[0], "cache")
    elif not is_installed("cache"):
        logger.info("no prefix is kept: treadle-cache is not installed")
        return None
    return lambda: make_store(options, stops)


def is_installed(extra: str) -> bool:
    """Whether the package is there that an extra of the server brings."""
    return find_spec(f"treadle_{extra}") is not None


def check_installed(what: str, extra: str) -> None:
    """Refuse what needs the package of an extra.

    Raises:
        Unsupported: It is not installed.
    """
    if not is_installed(extra):
        raise Unsupported(needed(what, extra))


def needed(what: str, extra: str) -> str:
    """What to install."""
    return (
        f"{what} needs the package treadle-{extra}: "
        f"install treadle-server with its extra, treadle-server[{extra}]"
    )


def make_store(options: CacheOptions, stops: Callable[[], bool] = lambda: False) -> PrefixStore:
    """The store of prefixes, in RAM, and on disk if there is a directory.

    Args:
        options: How they are kept.
        stops: Whether nobody wants to use it any more, so that loading it is to stop.

    Raises:
        Unsupported: The directory cannot be used.
        InvalidRequest: It is given too little room.
    """
    from treadle_cache import CacheConfig, RamStore, TieredStore
    from treadle_cache.disk import DiskConfig, DiskTier

    ram = RamStore(
        CacheConfig(
            capacity_bytes=options.capacity_bytes,
            memory_fraction=options.share,
            block_size=options.block_size,
            kv_storage_bits=options.storage_bits,
            group_size=options.group_size,
            min_quantize_tokens=options.min_quantize_tokens,
        )
    )
    store: PrefixStore = ram
    if options.ssd_cache_dir is not None:
        disk = DiskConfig(directory=options.ssd_cache_dir, capacity_bytes=options.ssd_bytes)
        store = TieredStore(ram, DiskTier(disk))
    if options.cache_save is None:
        return store
    path = Path(options.cache_save)
    return SavingStore(
        store,
        path,
        load=lambda goes_on: ram.load_from_disk(path, goes_on),
        save=lambda: ram.save_to_disk(path),
        stops=stops,
    )


def cache_care() -> Care:
    """What can be done with the directory of an SSD cache.

    Raises:
        Unsupported: The package is not installed.
    """
    check_installed("treadle cache", "cache")
    from treadle_cache import disk

    return disk


def drafting_maker(options: SpeculativeOptions) -> MakeDrafting | None:
    """What makes controller and drafter, on the engine's thread; None where nobody drafts.

    Raises:
        Unsupported: Its package is not installed.
    """
    if options.speculative_method == "off":
        return None
    check_installed("speculative_method", "speculative")
    return lambda: make_drafting(options)


def make_drafting(
    options: SpeculativeOptions,
) -> tuple[Callable[[Any], Drafter], DraftController]:
    """What makes who drafts for a loaded model, and who decides how much."""
    from treadle_speculative import SpeculativeConfig, make_controller, make_drafter

    method = options.speculative_method
    config = SpeculativeConfig(
        method="draft_model" if method == "draft-model" else method,
        num_tokens=options.num_speculative_tokens,
        model=options.draft_model,
        mtp_head=options.mtp_head,
        lossy=options.speculative_lossy,
    )

    def drafter_for(loaded: Any) -> Drafter:
        drafter = make_drafter(config, loaded)
        assert drafter is not None, "somebody drafts unless the method is off"
        return drafter

    return drafter_for, make_controller(config)


def with_served_name(config: ServeConfig) -> ServeConfig:
    """``config`` with the checkpoint's name to serve it under, if it has none."""
    if config.http.served_model_name:
        return config
    from treadle_core.mlx_runtime.load import model_name, resolve

    name = model_name(resolve(config.model.model))
    return replace(config, http=replace(config.http, served_model_name=(name,)))


def engine_bench() -> Bench:
    """The engine's benchmark."""
    from treadle_core.mlx_runtime import bench

    return bench.main


def cache_bench() -> Bench:
    """The prefix store's benchmark, which reads its own options.

    Raises:
        Unsupported: The package is not installed.
    """
    check_installed("treadle bench cache", "cache")
    from treadle_cache import bench

    return bench.main


def speculative_bench() -> Bench:
    """The benchmark of speculation.

    Raises:
        Unsupported: Its package is not installed.
    """
    check_installed("bench speculative", "speculative")
    from treadle_speculative import bench

    return bench.main


def mtp_fit() -> Callable[[list[str]], int]:
    """What fits a head to a model; it reads its own options.

    Raises:
        Unsupported: Its package is not installed.
    """
    check_installed("mtp fit", "speculative")
    from treadle_speculative.mtp.fit import command

    return command.main


def multimodal_bench() -> Bench:
    """The benchmark of media, with a prefix store as a server has it.

    Raises:
        Unsupported: One of its packages is not installed.
    """
    check_installed("treadle bench multimodal", "multimodal")
    check_installed("treadle bench multimodal", "cache")
    from treadle_multimodal.vlm import bench

    return lambda argv: bench.main(argv, lambda: make_store(CacheOptions()))


BENCHMARKS = {
    "engine": engine_bench,
    "cache": cache_bench,
    "speculative": speculative_bench,
    "multimodal": multimodal_bench,
}
"""What can be measured; each reads its own options."""
