"""Options of the command line and of the configuration file: one table says them all.

An option is a field of one of the settings' Structs. Its type, its default and its limits are the
field's; here are its name, its help, and who takes it.
"""

import argparse
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import NODEFAULT, Struct

from treadle_core import EngineConfig, InvalidRequest, Unsupported
from treadle_server.settings import (
    CacheOptions,
    HttpConfig,
    MediaOptions,
    MemoryConfig,
    ModelConfig,
    RequestDefaults,
    RunConfig,
    RunOptions,
    ServeConfig,
    SpeculativeOptions,
)
from treadle_server.validation import expected

C = TypeVar("C", bound=Struct)

Values = dict[str, Any]


def flag_of(name: str) -> str:
    """The spelling of a name on the command line; a file has it with or without dashes."""
    return "--" + name.replace("_", "-")


class Option(NamedTuple):
    """One option.

    Attributes:
        owner: The Struct whose field it is.
        field: The field; the option's name too.
        help: What it does.
        metavar: How its value is called; None for a switch.
        many: Whether it may be given several times.
    """

    owner: type[Struct]
    field: str
    help: str
    metavar: str | None = None
    many: bool = False

    @property
    def flag(self) -> str:
        """Its spelling on the command line."""
        return flag_of(self.field)


class Alias(NamedTuple):
    """Another name that users know an option by, where it means the same.

    Attributes:
        name: The other name, spelled as a field.
        option: The field of the option.
        value: What the option is told where the name is a switch; None takes the name's own value.
        metavar: How its value is called; None for a switch.
    """

    name: str
    option: str
    value: Any = None
    metavar: str | None = None

    @property
    def help(self) -> str:
        """What it does."""
        said = "" if self.value in (None, True) else f" {self.value}"
        return f"as {flag_of(self.option)}{said}"


class Foreign(NamedTuple):
    """A name that users know from elsewhere, for something that is not done here.

    Attributes:
        name: The name, spelled as a field.
        instead: What to say in its place.
        metavar: How its value is called; None for a switch.
    """

    name: str
    instead: str
    metavar: str | None = None


MODEL = (
    Option(
        ModelConfig,
        "model",
        "GGUF file, directory or Hub repository; without it the demo model, if it is installed",
        "MODEL",
    ),
    Option(ModelConfig, "adapter_path", "LoRA adapters to apply", "DIR"),
    Option(ModelConfig, "trust_remote_code", "run Python code that comes with the checkpoint"),
    Option(ModelConfig, "offline", "never ask the Hugging Face Hub"),
    Option(
        ModelConfig,
        "max_kv_size",
        "most tokens whose keys and values a sequence keeps; 0 keeps all",
        "N",
    ),
    Option(
        ModelConfig,
        "kv_bits",
        "quantise live keys and values of full attention to 4 or 8 bits",
        "BITS",
    ),
    Option(
        ModelConfig, "kv_group_size", "with --kv-bits, numbers that share a scale: 32 or 64", "N"
    ),
    Option(MemoryConfig, "kv_memory_mb", "mebibytes for live keys and values", "MB"),
    Option(
        MemoryConfig,
        "gpu_memory_utilization",
        "share of the device's memory to use, weights included (0.9)",
        "SHARE",
    ),
    Option(EngineConfig, "context_length", "most tokens of prompt and answer", "N"),
    Option(EngineConfig, "prefill_step_size", "most prompt tokens of a sequence in a step", "N"),
)

ENGINE = (
    Option(EngineConfig, "max_num_seqs", "most sequences that run at once", "N"),
    Option(EngineConfig, "max_queue", "most sequences that wait; one more gets a 429", "N"),
    Option(EngineConfig, "max_num_batched_tokens", "most tokens of a step", "N"),
    Option(
        EngineConfig,
        "chunked_prefill_tokens",
        "prompt tokens per step while others decode; 0 adapts to --max-decode-stall-ms",
        "N",
    ),
    Option(
        EngineConfig,
        "max_decode_stall_ms",
        "how much longer prefill may make a step of decoding (1.5 steps, at least 100)",
        "MS",
    ),
    Option(EngineConfig, "policy", "order of the queue: fcfs or priority", "POLICY"),
    Option(
        EngineConfig,
        "ageing_seconds",
        "with --policy priority, so long a wait counts as one step of priority",
        "SECONDS",
    ),
)

CACHE = (
    Option(CacheOptions, "disable_prefix_cache", "keep no state of prompts for later ones"),
    Option(CacheOptions, "cache_memory_mb", "mebibytes of RAM for the states of prompts", "MB"),
    Option(
        CacheOptions,
        "cache_memory_percent",
        "share of the free memory for them, as a number from 0 to 1 (0.2)",
        "SHARE",
    ),
    Option(
        CacheOptions,
        "kv_cache_quantization",
        "keep them as small integers: more fit, and what is reused differs a little",
    ),
    Option(CacheOptions, "kv_cache_quantization_bits", "bits of such an integer, 8 or 4 (8)", "N"),
    Option(
        CacheOptions,
        "kv_cache_quantization_group_size",
        "numbers that share a scale, 64 or 32 (64)",
        "N",
    ),
    Option(
        CacheOptions,
        "kv_cache_min_quantize_tokens",
        "so many first tokens of a prompt are kept as they are (256)",
        "N",
    ),
    Option(
        CacheOptions,
        "paged_cache_block_size",
        "tokens per block: what prompts share, and where they can be cut (32)",
        "N",
    ),
    Option(
        EngineConfig,
        "checkpoint_interval",
        "tokens between the kept states of a long prompt, where layers cannot be cut anywhere",
        "N",
    ),
    Option(CacheOptions, "ssd_cache_dir", "keep states of prompts in this directory too", "DIR"),
    Option(CacheOptions, "ssd_cache_max_gb", "most gibibytes there (10)", "GB"),
    Option(
        CacheOptions,
        "cache_save",
        "read the states of prompts from this file at the start, write them at the end",
        "FILE",
    ),
    Option(
        CacheOptions,
        "warm_prompts",
        "JSON or JSON lines: chats, or beginnings of some, to compute at the start",
        "FILE",
    ),
)

SPECULATIVE = (
    Option(
        SpeculativeOptions,
        "speculative_method",
        "off, or who guesses tokens: ngram, from the text so far, draft-model, a small model, or "
        "mtp, the model's own head; answers stay what they are",
        "METHOD",
    ),
    Option(
        SpeculativeOptions,
        "draft_model",
        "the small model, with the same tokenizer: GGUF file, directory or Hub repository",
        "MODEL",
    ),
    Option(
        SpeculativeOptions,
        "mtp_head",
        "directory of a head for mtp, if the model's checkpoint holds none",
        "DIR",
    ),
    Option(
        SpeculativeOptions,
        "num_speculative_tokens",
        "guess so many in every step (as many as pays, by what is measured)",
        "N",
    ),
    Option(
        SpeculativeOptions,
        "speculative_lossy",
        "LOSSY: keep guesses unverified; answers are no longer the model's own",
    ),
)

ALIASES = (
    Alias("enable_mtp", "speculative_method", "mtp"),
    Alias("mtp_num_draft_tokens", "num_speculative_tokens", metavar="N"),
    Alias("mtp_optimistic", "speculative_lossy", True),
)

ASSISTANT = (
    "no assistant of mlx-vlm is run: speculative_method draft-model with draft_model takes a small "
    "model of the same tokenizer, speculative_method mtp a head"
)
SPARSE = (
    "no prompt is computed in part: its state is reused where it is known, see cache_memory_mb and "
    "ssd_cache_dir, and chunked_prefill_tokens keeps it from delaying others"
)
FOREIGN = (
    Foreign("mllm_draft_model", ASSISTANT, "MODEL"),
    Foreign("mllm_draft_kind", ASSISTANT, "KIND"),
    Foreign(
        "mllm_draft_block_size",
        "drafts have no blocks here: num_speculative_tokens is how many tokens are guessed",
        "N",
    ),
    Foreign(
        "default_mllm_draft",
        "speculative_method holds for all requests, and drafting stops where it does not pay",
    ),
    Foreign("specprefill", SPARSE),
    Foreign("specprefill_threshold", SPARSE, "N"),
    Foreign("specprefill_keep_pct", SPARSE, "SHARE"),
    Foreign("specprefill_backbone_pct", SPARSE, "SHARE"),
    Foreign("specprefill_draft_model", SPARSE, "MODEL"),
)
"""Options of speculation that vllm-mlx has, by what they are here."""

TEXT_ONLY = Option(
    MediaOptions, "text_only", "take no images, videos or audio, though the model would"
)
MEDIA_LIMITS = tuple(
    Option(MediaOptions, field, help, metavar)
    for field, metavar, help in (
        ("max_media_items", "N", "most images, videos and audio of a request (32)"),
        ("max_image_bytes", "BYTES", "most bytes of an image's file (20 MiB)"),
        ("max_video_bytes", "BYTES", "most bytes of a video's file (256 MiB)"),
        ("max_audio_bytes", "BYTES", "most bytes of an audio file (64 MiB)"),
        ("max_media_bytes", "BYTES", "most bytes of all these files of a request (512 MiB)"),
        (
            "max_decoded_media_bytes",
            "BYTES",
            "most bytes of pixels and samples of a request (1024 MiB)",
        ),
        ("max_media_side", "PIXELS", "longest side of an image or a video frame (16384)"),
        ("max_image_pixels", "PIXELS", "most pixels of an image (40000000)"),
        ("max_frame_pixels", "PIXELS", "most pixels of a video frame (8847360)"),
        ("max_video_frames", "N", "most frames taken from a video (128)"),
        ("max_video_pixels", "PIXELS", "most pixels of these frames (265420800)"),
        ("max_video_seconds", "SECONDS", "longest video (1800)"),
        ("max_audio_seconds", "SECONDS", "longest audio (1800)"),
        ("media_fetch_seconds", "SECONDS", "until fetching an item fails (30)"),
        ("media_decode_seconds", "SECONDS", "until decoding an item fails (60)"),
        ("max_media_redirects", "N", "most redirects followed for an item (5)"),
        ("max_concurrent_media", "N", "most items decoded at once, or fetched for one request (4)"),
        (
            "max_loaded_media_bytes",
            "BYTES",
            "most bytes of media of all requests that are not answered yet (4096 MiB)",
        ),
        ("default_video_fps", "FPS", "frames taken per second of video (2)"),
        ("vision_cache_mb", "MB", "mebibytes of vision features that are kept (512)"),
    )
)
MEDIA = (
    Option(MediaOptions, "mllm", "refuse a model that takes no images, videos or audio"),
    TEXT_ONLY,
    *MEDIA_LIMITS,
    Option(MediaOptions, "disable_media_fetch", "fetch no URLs of images, videos and audio"),
    Option(MediaOptions, "allow_http_media", "fetch from http URLs too, not from https alone"),
    Option(
        MediaOptions,
        "allowed_media_domains",
        "host to fetch from, or .NAME for all below it; repeatable (every public host)",
        "HOST",
        many=True,
    ),
    Option(
        MediaOptions,
        "allowed_media_ports",
        "port that a URL may name; repeatable (80 and 443)",
        "PORT",
        many=True,
    ),
    Option(
        MediaOptions,
        "allowed_media_networks",
        "network to fetch from though it is not public, such as 10.1.0.0/16; repeatable",
        "NETWORK",
        many=True,
    ),
    Option(
        MediaOptions,
        "allowed_local_media_path",
        "directory below which file: URLs are read; repeatable (none)",
        "DIR",
        many=True,
    ),
)

SERVER = (
    Option(HttpConfig, "host", "address to listen on", "ADDRESS"),
    Option(HttpConfig, "port", "port to listen on; 0 lets the system choose", "PORT"),
    Option(
        HttpConfig,
        "served_model_name",
        "name for clients to use; may be given several times (the checkpoint's name)",
        "NAME",
        many=True,
    ),
    Option(HttpConfig, "api_key", "key that clients must present, but for /health", "KEY"),
    Option(HttpConfig, "max_body_bytes", "longest accepted request body", "BYTES"),
    Option(HttpConfig, "stream_interval", "tokens per streamed chunk", "N"),
    Option(
        HttpConfig,
        "stall_seconds",
        "after so long without a step, with work waiting, /ready says 503",
        "SECONDS",
    ),
    Option(HttpConfig, "log_level", "debug, info, warning or error", "LEVEL"),
    Option(RequestDefaults, "max_tokens", "tokens of an answer, if the request does not say", "N"),
    Option(RequestDefaults, "max_request_tokens", "most tokens a request may ask for", "N"),
    Option(
        RequestDefaults,
        "timeout",
        "seconds until a request fails, if it does not say; 0 is never",
        "SECONDS",
    ),
    *(
        Option(RequestDefaults, f"default_{name}", f"{name}, if the request does not say", metavar)
        for name, metavar in (
            ("temperature", "T"),
            ("top_p", "P"),
            ("top_k", "K"),
            ("min_p", "P"),
            ("presence_penalty", "X"),
            ("repetition_penalty", "X"),
            ("chat_template_kwargs", "JSON"),
        )
    ),
)

RUN = (
    Option(RunOptions, "system", "system message before the prompt", "TEXT"),
    Option(RunOptions, "raw", "continue the prompt as text, without the chat template"),
    Option(RunOptions, "max_tokens", "most tokens to generate", "N"),
    Option(RunOptions, "temperature", "0 takes the likeliest token, so runs can be repeated", "T"),
    Option(RunOptions, "top_p", "sample from the likeliest tokens of this probability", "P"),
    Option(RunOptions, "top_k", "sample from so many of the likeliest tokens; 0 is all", "K"),
    Option(RunOptions, "seed", "makes sampling repeatable", "N"),
    Option(RunOptions, "stop", "text that ends the answer; repeatable", "TEXT", many=True),
    Option(RunOptions, "image", "file or URL of an image to show; repeatable", "FILE", many=True),
    Option(RunOptions, "video", "file or URL of a video to show; repeatable", "FILE", many=True),
    Option(RunOptions, "audio", "file or URL of audio to play; repeatable", "FILE", many=True),
)

SERVE_OPTIONS = (*MODEL, *ENGINE, *CACHE, *SPECULATIVE, *MEDIA, *SERVER)
RUN_OPTIONS = (*MODEL, *SPECULATIVE, *RUN, TEXT_ONLY, *MEDIA_LIMITS)

# Each of a pair would make the other one mean nothing; a zero of the first is as if it were absent.
EXCLUSIVE = (
    ("chunked_prefill_tokens", "max_decode_stall_ms"),
    ("disable_prefix_cache", "checkpoint_interval"),
)

# The first means nothing unless the second has one of these values.
DEPENDENT = (
    ("ageing_seconds", "policy", ("priority",)),
    ("kv_group_size", "kv_bits", (4, 8)),
    ("num_speculative_tokens", "speculative_method", ("ngram", "draft-model", "mtp")),
    ("mtp_num_draft_tokens", "speculative_method", ("mtp",)),
    ("mtp_optimistic", "speculative_method", ("mtp",)),
)


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Let ``parser`` take ``options``; one that is not given is absent from the result."""
    for option in options:
        if option.metavar is None:
            parser.add_argument(
                option.flag, action="store_true", default=argparse.SUPPRESS, help=option.help
            )
            continue
        parser.add_argument(
            option.flag,
            action="append" if option.many else "store",
            metavar=option.metavar,
            default=argparse.SUPPRESS,
            help=option.help + shown_default(option),
        )
    for other in (*known_aliases(options), *FOREIGN):
        help = other.help if isinstance(other, Alias) else argparse.SUPPRESS
        if other.metavar is None:
            parser.add_argument(
                flag_of(other.name), action="store_true", default=argparse.SUPPRESS, help=help
            )
        else:
            parser.add_argument(
                flag_of(other.name), metavar=other.metavar, default=argparse.SUPPRESS, help=help
            )


def known_aliases(options: Sequence[Option]) -> list[Alias]:
    """Other names of these options."""
    fields = {option.field for option in options}
    return [alias for alias in ALIASES if alias.option in fields]


def shown_default(option: Option) -> str:
    """What the help says about the default, if there is something to say."""
    default = field_of(option).default
    return "" if default in (None, "", NODEFAULT) else f" ({default})".replace("%", "%%")


def field_of(option: Option) -> Any:
    """The Struct's field behind an option."""
    return next(f for f in msgspec.structs.fields(option.owner) if f.name == option.field)


def from_flags(given: Mapping[str, Any], options: Sequence[Option]) -> Values:
    """Values from the command line, of their fields' types.

    Raises:
        InvalidRequest: One cannot be read as its type.
        Unsupported: One is of something else, or an option and its other name say different things.
    """
    refuse_foreign(given)
    values = {
        option.field: from_text(option, given[option.field])
        for option in options
        if option.field in given
    }
    told = {
        alias: alias_value(alias, given[alias.name], flag_of(alias.name), strict=False)
        for alias in known_aliases(options)
        if alias.name in given
    }
    return with_aliases(values, told)


def refuse_foreign(given: Iterable[str]) -> None:
    """Say what there is in place of options that are not here.

    Raises:
        Unsupported: There is such an option.
    """
    for foreign in FOREIGN:
        if foreign.name in given:
            raise Unsupported(f"{foreign.name}: {foreign.instead}")


def alias_value(alias: Alias, given: Any, name: str, *, strict: bool) -> Any:
    """What an option is told under another name; None if that is a switch and off.

    Raises:
        InvalidRequest: It is of another type than the option, or than a switch.
    """
    if alias.value is None:
        option = next(option for option in SPECULATIVE if option.field == alias.option)
        return typed(option, given, name, strict=strict)
    if not isinstance(given, bool):
        raise InvalidRequest(name, given, "true or false")
    return alias.value if given else None


def with_aliases(values: Values, told: Mapping[Alias, Any]) -> Values:
    """``values`` with what was told under other names, which stay in it.

    Raises:
        Unsupported: An option and its other name say different things.
    """
    found = dict(values)
    for alias, value in told.items():
        if value is None:
            continue
        if values.get(alias.option, value) != value:
            raise Unsupported(
                f"{alias.name} and {alias.option} {values[alias.option]} say different things"
            )
        found |= {alias.option: value, alias.name: value}
    return found


def from_text(option: Option, text: Any) -> Any:
    """An option's value from its text.

    Raises:
        InvalidRequest: It cannot be read as its type.
    """
    if option.metavar == "JSON":
        try:
            text = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise InvalidRequest(option.flag, text, f"JSON ({error})") from None
    return typed(option, text, option.flag, strict=False)


def typed(option: Option, value: Any, name: str, *, strict: bool) -> Any:
    """A value as the type of the option's field.

    Raises:
        InvalidRequest: It is of another type.
    """
    try:
        return msgspec.convert(value, field_of(option).type, strict=strict)
    except msgspec.ValidationError as error:
        raise InvalidRequest(name, value, expected(str(error))) from None


def from_file(path: Path, options: Sequence[Option]) -> Values:
    """Values from a TOML file, whose keys are the options' names.

    Raises:
        InvalidRequest: A key or its value is not an option's.
        Unsupported: The file cannot be read, a key is of something else, or an option and its
            other name say different things.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Unsupported(f"--config: {path}: {error}") from None
    known = {option.field: option for option in options}
    aliases = {alias.name: alias for alias in known_aliases(options)}
    values: Values = {}
    told: dict[Alias, Any] = {}
    for key, value in content.items():
        field, name = key.replace("-", "_"), f"--config: {path}: {key}"
        refuse_foreign([field])
        if field in aliases and aliases[field] not in told:
            told[aliases[field]] = alias_value(aliases[field], value, name, strict=True)
            continue
        if field not in known or field in values:
            raise InvalidRequest(
                f"--config: {path}", key, "each option at most once, and no other keys"
            )
        if known[field].many and not isinstance(value, list):
            value = [value]
        values[field] = typed(known[field], value, name, strict=True)
    return with_aliases(values, told)


def serve_config(values: Values) -> ServeConfig:
    """The settings of ``treadle serve``.

    Raises:
        InvalidRequest: A value is beyond its limits.
        Unsupported: Two of them contradict each other.
    """
    check_exclusive(values)
    return ServeConfig(
        model=part(ModelConfig, SERVE_OPTIONS, values),
        memory=part(MemoryConfig, SERVE_OPTIONS, values),
        cache=part(CacheOptions, SERVE_OPTIONS, values),
        speculative=part(SpeculativeOptions, SERVE_OPTIONS, values),
        media=part(MediaOptions, SERVE_OPTIONS, values),
        engine=part(EngineConfig, SERVE_OPTIONS, values),
        defaults=part(RequestDefaults, SERVE_OPTIONS, values),
        http=part(HttpConfig, SERVE_OPTIONS, values),
    )


def run_config(values: Values, prompt: str) -> RunConfig:
    """The settings of ``treadle run``.

    Raises:
        InvalidRequest: A value is beyond its limits.
        Unsupported: Two of them contradict each other.
    """
    check_exclusive(values)
    return RunConfig(
        model=part(ModelConfig, RUN_OPTIONS, values),
        memory=part(MemoryConfig, RUN_OPTIONS, values),
        speculative=part(SpeculativeOptions, RUN_OPTIONS, values),
        engine=part(EngineConfig, RUN_OPTIONS, values),
        media=part(MediaOptions, RUN_OPTIONS, values),
        run=part(RunOptions, RUN_OPTIONS, values, prompt=prompt),
    )


def part(owner: type[C], options: Sequence[Option], values: Values, **more: Any) -> C:
    """One Struct of the settings, from those values that are its own, and ``more``."""
    fields = {option.field for option in options if option.owner is owner}
    own = {field: value for field, value in values.items() if field in fields}
    return owner(**own, **more)


def check_exclusive(values: Values) -> None:
    """Refuse options of which one would be ignored.

    Raises:
        Unsupported: Both of a pair are given, or one without what it depends on.
    """
    for first, second in EXCLUSIVE:
        if values.get(first) and second in values:
            raise Unsupported(f"{first} and {second} exclude each other")
    for option, other, known in DEPENDENT:
        if option in values and values.get(other) not in known:
            shown = " or ".join(map(str, known))
            raise Unsupported(f"{option} means nothing unless {other} is {shown}")
