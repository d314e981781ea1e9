"""What the server and the command line can be told, as frozen data; every field is checked."""

from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from treadle_core import EngineConfig, InvalidRequest, Unsupported
from treadle_core.request import check_bool, check_float, check_int

T = TypeVar("T")

MEBIBYTE = 2**20
GIBIBYTE = 2**30
DEFAULT_UTILIZATION = 0.9
DEFAULT_CACHE_SHARE = 0.2
DEFAULT_STORAGE_BITS = 8
DEFAULT_GROUP_SIZE = 64
DEFAULT_MIN_QUANTIZE_TOKENS = 256
DEFAULT_BLOCK_SIZE = 32
DEFAULT_SSD_GB = 10.0
MIN_SSD_GB = 0.01
MAX_SSD_GB = 1e6
MAX_SECONDS = 1e9
MAX_DRAFT_TOKENS = 31

# Fields of MediaOptions that say what is fetched, and how.
FETCHING = (
    "media_fetch_seconds",
    "max_media_redirects",
    "allow_http_media",
    "allowed_media_domains",
    "allowed_media_ports",
    "allowed_media_networks",
)

SpeculativeMethod = Literal["off", "ngram", "draft-model", "mtp"]
SPECULATIVE_METHODS = ("off", "ngram", "draft-model", "mtp")
LogLevel = Literal["debug", "info", "warning", "error"]


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoint to load, and how.

    Attributes:
        model: A GGUF file, a directory or a Hub repository; None takes the default model.
        adapter_path: LoRA adapters to apply.
        trust_remote_code: Allow the checkpoint's own Python code.
        max_kv_size: Most tokens whose KV a sequence keeps; 0 keeps all.
        kv_bits: Bits of a number of live KV in layers of full attention, 4 or 8; None keeps it
            as the model computes it.
        kv_group_size: Numbers that share a scale, 32 or 64, where ``kv_bits`` is set.
        offline: Never ask the Hub.
    """

    model: str | None = None
    adapter_path: str | None = None
    trust_remote_code: bool = False
    max_kv_size: int = 0
    kv_bits: int | None = None
    kv_group_size: int = 64
    offline: bool = False

    def __post_init__(self) -> None:
        """Check every field that needs no checkpoint.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
            Unsupported: Two fields contradict each other.
        """
        check_int("max_kv_size", self.max_kv_size, 0)
        if self.kv_bits not in (None, 4, 8):
            raise InvalidRequest("kv_bits", self.kv_bits, "4 or 8")
        if self.kv_group_size not in (32, 64):
            raise InvalidRequest("kv_group_size", self.kv_group_size, "32 or 64")
        if self.kv_bits is not None and self.max_kv_size:
            raise Unsupported(
                "max_kv_size and kv_bits exclude each other: a bounded sequence is a window, and "
                "windows are not quantised"
            )
        if self.model == "":
            raise InvalidRequest("model", self.model, "a path or a name")


class MemoryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much memory live KV may take; at most one of the two is set.

    Attributes:
        kv_memory_mb: This many mebibytes.
        gpu_memory_utilization: What this share of the device's memory leaves beside the weights;
            0.9 when neither is set.
    """

    kv_memory_mb: int | None = None
    gpu_memory_utilization: float | None = None

    def __post_init__(self) -> None:
        """Check both fields.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
            Unsupported: Both are set.
        """
        if self.kv_memory_mb is not None:
            check_int("kv_memory_mb", self.kv_memory_mb, 1)
        share = self.gpu_memory_utilization
        if share is not None:
            check_float("gpu_memory_utilization", share, 0.0, 1.0, exclusive_low=True)
        if self.kv_memory_mb is not None and share is not None:
            raise Unsupported("kv_memory_mb and gpu_memory_utilization exclude each other")

    @property
    def kv_bytes(self) -> int | None:
        """The fixed budget, or None when the utilization decides."""
        return None if self.kv_memory_mb is None else self.kv_memory_mb * MEBIBYTE

    @property
    def utilization(self) -> float:
        """Share of the device's memory to use."""
        share = self.gpu_memory_utilization
        return DEFAULT_UTILIZATION if share is None else share


def _either(value: T | None, default: T) -> T:
    return default if value is None else value


def _said(options: Struct, *, but: str) -> tuple[str, ...]:
    """Names of the fields that ask for something, but for one; zero is something."""
    values = {field: getattr(options, field) for field in options.__struct_fields__ if field != but}
    return tuple(
        field
        for field, value in values.items()
        if value is not None and value is not False and value != ()
    )


def _check_choice(field: str, value: int | None, choices: tuple[int, ...]) -> None:
    if value is not None and (isinstance(value, bool) or value not in choices):
        raise InvalidRequest(field, value, " or ".join(map(str, choices)))


class CacheOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the state of prompts is kept for later ones. None is "not said" throughout.

    Attributes:
        disable_prefix_cache: Keep nothing.
        cache_memory_mb: Most mebibytes in RAM; 0, beside ``ssd_cache_dir``, keeps all on disk.
        cache_memory_percent: Share of the free memory to take in RAM, as a number from 0 to 1;
            0.2 when neither is said.
        kv_cache_quantization: Keep states in RAM and on disk as small integers.
        kv_cache_quantization_bits: 8 or 4; 8 when not said.
        kv_cache_quantization_group_size: Numbers that share a scale, 64 or 32; 64 when not said.
        kv_cache_min_quantize_tokens: The first tokens, which are kept as they are; 256 when not
            said.
        paged_cache_block_size: Tokens that are shared, and given up, together; 32 when not said.
        ssd_cache_dir: Keep states on disk too, in this directory.
        ssd_cache_max_gb: Most gibibytes there; 10 when not said.
        cache_save: Write what is in RAM to this file at the end, and read it at the start.
        warm_prompts: A file of chats to compute at the start.
    """

    disable_prefix_cache: bool = False
    cache_memory_mb: int | None = None
    cache_memory_percent: float | None = None
    kv_cache_quantization: bool = False
    kv_cache_quantization_bits: int | None = None
    kv_cache_quantization_group_size: int | None = None
    kv_cache_min_quantize_tokens: int | None = None
    paged_cache_block_size: int | None = None
    ssd_cache_dir: str | None = None
    ssd_cache_max_gb: float | None = None
    cache_save: str | None = None
    warm_prompts: str | None = None

    def __post_init__(self) -> None:
        """Check every field, and that none would be ignored.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
            Unsupported: Two fields contradict each other.
        """
        self._check_values()
        if self.disable_prefix_cache and self.said:
            raise Unsupported(f"disable_prefix_cache and {self.said[0]} exclude each other")
        if self.cache_memory_mb is not None and self.cache_memory_percent is not None:
            raise Unsupported("cache_memory_mb and cache_memory_percent exclude each other")
        self._check_dependent()

    @property
    def said(self) -> tuple[str, ...]:
        """Names of the fields that ask for something, but for the one that asks for nothing."""
        return _said(self, but="disable_prefix_cache")

    @property
    def capacity_bytes(self) -> int | None:
        """Most bytes in RAM, or None when the share decides."""
        return None if self.cache_memory_mb is None else self.cache_memory_mb * MEBIBYTE

    @property
    def share(self) -> float:
        """Share of the free memory to take."""
        return _either(self.cache_memory_percent, DEFAULT_CACHE_SHARE)

    @property
    def storage_bits(self) -> int | None:
        """Bits of a number that is kept; None keeps what is there."""
        if not self.kv_cache_quantization:
            return None
        return _either(self.kv_cache_quantization_bits, DEFAULT_STORAGE_BITS)

    @property
    def group_size(self) -> int:
        """Numbers that share a scale."""
        return _either(self.kv_cache_quantization_group_size, DEFAULT_GROUP_SIZE)

    @property
    def min_quantize_tokens(self) -> int:
        """The first tokens, which are kept as they are."""
        return _either(self.kv_cache_min_quantize_tokens, DEFAULT_MIN_QUANTIZE_TOKENS)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return _either(self.paged_cache_block_size, DEFAULT_BLOCK_SIZE)

    @property
    def ssd_bytes(self) -> int:
        """Most bytes on disk."""
        return int(_either(self.ssd_cache_max_gb, DEFAULT_SSD_GB) * GIBIBYTE)

    def _check_values(self) -> None:
        if self.cache_memory_mb is not None:
            check_int("cache_memory_mb", self.cache_memory_mb, 0)
        check_float("cache_memory_percent", self.share, 0.0, 1.0, exclusive_low=True)
        _check_choice("kv_cache_quantization_bits", self.kv_cache_quantization_bits, (8, 4))
        group_size = self.kv_cache_quantization_group_size
        _check_choice("kv_cache_quantization_group_size", group_size, (64, 32))
        check_int("kv_cache_min_quantize_tokens", self.min_quantize_tokens, 0)
        check_int("paged_cache_block_size", self.block_size, 1)
        size = _either(self.ssd_cache_max_gb, DEFAULT_SSD_GB)
        check_float("ssd_cache_max_gb", size, MIN_SSD_GB, MAX_SSD_GB)
        for field in ("ssd_cache_dir", "cache_save", "warm_prompts"):
            if getattr(self, field) == "":
                raise InvalidRequest(field, "", "a path")

    def _check_dependent(self) -> None:
        if not self.kv_cache_quantization:
            for field in (
                "kv_cache_quantization_bits",
                "kv_cache_quantization_group_size",
                "kv_cache_min_quantize_tokens",
            ):
                self._refuse(field, "kv_cache_quantization")
        if self.ssd_cache_dir is None:
            self._refuse("ssd_cache_max_gb", "ssd_cache_dir")
            if self.cache_memory_mb == 0:
                raise Unsupported(
                    "cache_memory_mb 0 keeps nothing unless ssd_cache_dir is given; "
                    "disable_prefix_cache says that"
                )
        if self.cache_memory_mb == 0 and self.cache_save is not None:
            raise Unsupported("cache_memory_mb 0 leaves nothing for cache_save to write")

    def _refuse(self, field: str, other: str) -> None:
        if getattr(self, field) is not None:
            raise Unsupported(f"{field} means nothing without {other}")


class SpeculativeOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether several tokens are guessed and verified at once.

    Attributes:
        speculative_method: ``ngram`` guesses from what the prompt and the answer said before,
            ``draft-model`` asks a small model, ``mtp`` the model's own head.
        draft_model: The small model: a GGUF file, a directory or a Hub repository.
        mtp_head: Directory of a head that the model's checkpoint does not hold.
        num_speculative_tokens: Guess so many in every step; None guesses as many as pays.
        speculative_lossy: Keep guesses without verifying them: answers are not the model's own.
    """

    speculative_method: SpeculativeMethod = "off"
    draft_model: str | None = None
    mtp_head: str | None = None
    num_speculative_tokens: int | None = None
    speculative_lossy: bool = False

    def __post_init__(self) -> None:
        """Check every field, and that none would be ignored.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
            Unsupported: Two fields contradict each other.
        """
        method = self.speculative_method
        if method not in SPECULATIVE_METHODS:
            raise InvalidRequest("speculative_method", method, ", ".join(SPECULATIVE_METHODS))
        if self.num_speculative_tokens is not None:
            check_int("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFT_TOKENS)
        check_bool("speculative_lossy", self.speculative_lossy)
        if self.draft_model == "":
            raise InvalidRequest("draft_model", "", "a path or a name")
        if self.mtp_head == "":
            raise InvalidRequest("mtp_head", "", "a directory")
        if method == "draft-model" and self.draft_model is None:
            raise Unsupported("speculative_method draft-model needs draft_model")
        if method != "draft-model" and self.draft_model is not None:
            raise Unsupported("draft_model means nothing unless speculative_method is draft-model")
        if method != "mtp" and self.mtp_head is not None:
            raise Unsupported("mtp_head means nothing unless speculative_method is mtp")
        if method == "off" and self.speculative_lossy:
            raise Unsupported(
                "speculative_lossy means nothing while speculative_method is off: nobody guesses"
            )


class MediaOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How images, videos and audio in chats are taken. None is "not said" throughout.

    The limits have the defaults and ranges of treadle-multimodal.

    Attributes:
        mllm: Refuse a model that takes none.
        text_only: Take none, though the model would.
        max_media_items: Images, videos and audio of one request together.
        max_image_bytes: Of one encoded image.
        max_video_bytes: Of one encoded video.
        max_audio_bytes: Of one encoded audio.
        max_media_bytes: Of all encoded media of one request.
        max_decoded_media_bytes: Of all pixels and samples of one request.
        max_media_side: Width and height of an image or a video frame.
        max_image_pixels: Width times height of an image.
        max_frame_pixels: Width times height of a video frame.
        max_video_frames: Frames taken from one video.
        max_video_pixels: Pixels of all frames taken from one video.
        max_video_seconds: Length of a video.
        max_audio_seconds: Length of audio.
        media_fetch_seconds: For fetching one item, its redirects included.
        media_decode_seconds: For decoding one item.
        max_media_redirects: Redirects followed for one item.
        max_concurrent_media: Items decoded at one moment, over all requests, and fetched at one
            moment for one request.
        max_loaded_media_bytes: Of media of all requests that were not answered yet; others wait.
        default_video_fps: Frames per second taken from a video, where the request does not say.
        vision_cache_mb: Most mebibytes of vision features that are kept.
        disable_media_fetch: Fetch no URLs.
        allow_http_media: Fetch from http URLs too, not from https alone.
        allowed_media_domains: Hosts to fetch from; one that begins with a dot stands for all names
            below it. Empty allows every host.
        allowed_media_ports: Ports that a URL may name.
        allowed_media_networks: Networks to fetch from though they are not public.
        allowed_local_media_path: Directories below which local files are read; none by default.
    """

    mllm: bool = False
    text_only: bool = False
    max_media_items: int | None = None
    max_image_bytes: int | None = None
    max_video_bytes: int | None = None
    max_audio_bytes: int | None = None
    max_media_bytes: int | None = None
    max_decoded_media_bytes: int | None = None
    max_media_side: int | None = None
    max_image_pixels: int | None = None
    max_frame_pixels: int | None = None
    max_video_frames: int | None = None
    max_video_pixels: int | None = None
    max_video_seconds: float | None = None
    max_audio_seconds: float | None = None
    media_fetch_seconds: float | None = None
    media_decode_seconds: float | None = None
    max_media_redirects: int | None = None
    max_concurrent_media: int | None = None
    max_loaded_media_bytes: int | None = None
    default_video_fps: float | None = None
    vision_cache_mb: int | None = None
    disable_media_fetch: bool = False
    allow_http_media: bool = False
    allowed_media_domains: tuple[str, ...] = ()
    allowed_media_ports: tuple[int, ...] = ()
    allowed_media_networks: tuple[str, ...] = ()
    allowed_local_media_path: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what treadle-multimodal does not, and that no field would be ignored.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
            Unsupported: Two fields contradict each other.
        """
        if self.vision_cache_mb is not None:
            check_int("vision_cache_mb", self.vision_cache_mb, 0)
        if self.text_only and self.said:
            raise Unsupported(f"text_only and {self.said[0]} exclude each other")
        fetching = [field for field in self.said if field in FETCHING]
        if self.disable_media_fetch and fetching:
            raise Unsupported(f"disable_media_fetch and {fetching[0]} exclude each other")

    @property
    def said(self) -> tuple[str, ...]:
        """Names of the fields that ask for something of a model that takes media."""
        return _said(self, but="text_only")


class RequestDefaults(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request gets where it says nothing, and the most it may ask for.

    Attributes:
        max_tokens: Tokens of an answer, never more than ``max_request_tokens``.
        max_request_tokens: Most tokens of an answer that a request may ask for.
        timeout: Seconds until a request fails; 0 is no limit.
        default_temperature: As the field of that name in a request, and so on.
        default_top_p: See above.
        default_top_k: See above.
        default_min_p: See above.
        default_presence_penalty: See above.
        default_repetition_penalty: See above.
        default_chat_template_kwargs: Arguments of the chat template; a request's own win.
    """

    max_tokens: int = 32768
    max_request_tokens: int = 32768
    timeout: float = 300.0
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    default_top_k: int = 0
    default_min_p: float = 0.0
    default_presence_penalty: float = 0.0
    default_repetition_penalty: float = 1.0
    default_chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        check_int("max_tokens", self.max_tokens, 1)
        check_int("max_request_tokens", self.max_request_tokens, 1)
        check_float("timeout", self.timeout, 0.0, MAX_SECONDS)
        check_float("default_temperature", self.default_temperature, 0.0, 100.0)
        check_float("default_top_p", self.default_top_p, 0.0, 1.0, exclusive_low=True)
        check_int("default_top_k", self.default_top_k, 0)
        check_float("default_min_p", self.default_min_p, 0.0, 1.0)
        check_float("default_presence_penalty", self.default_presence_penalty, -2.0, 2.0)
        check_float(
            "default_repetition_penalty",
            self.default_repetition_penalty,
            0.0,
            100.0,
            exclusive_low=True,
        )


class HttpConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 lets the system choose.
        served_model_name: Names that clients may use; the first one is reported. Empty takes the
            checkpoint's name.
        api_key: What clients have to present, on every route but ``/health``; None asks nothing.
        max_body_bytes: Longest accepted request body.
        stream_interval: Tokens per streamed chunk.
        heartbeat_seconds: After so long without a chunk a stream gets a comment.
        stall_seconds: After so long without a step, while work waits, ``/ready`` says 503.
        log_level: What goes to stderr.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: str | None = None
    max_body_bytes: int = 16 * MEBIBYTE
    stream_interval: int = 1
    heartbeat_seconds: float = 5.0
    stall_seconds: float = 60.0
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        check_int("port", self.port, 0, 65535)
        check_int("max_body_bytes", self.max_body_bytes, 1)
        check_int("stream_interval", self.stream_interval, 1)
        for field in ("heartbeat_seconds", "stall_seconds"):
            check_float(field, getattr(self, field), 0.0, MAX_SECONDS, exclusive_low=True)
        if not all(self.served_model_name):
            raise InvalidRequest("served_model_name", self.served_model_name, "non-empty names")
        if self.api_key == "":
            raise InvalidRequest("api_key", self.api_key, "a non-empty key")


class ServeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of ``treadle serve``."""

    model: ModelConfig = ModelConfig()
    memory: MemoryConfig = MemoryConfig()
    cache: CacheOptions = CacheOptions()
    speculative: SpeculativeOptions = SpeculativeOptions()
    media: MediaOptions = MediaOptions()
    engine: EngineConfig = EngineConfig()
    defaults: RequestDefaults = RequestDefaults()
    http: HttpConfig = HttpConfig()


class RunOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt on the command line.

    Attributes:
        prompt: What the user says.
        system: A system message before it.
        raw: The prompt is text to continue; no chat template is applied.
        max_tokens: Most tokens to generate.
        temperature: 0 is greedy.
        top_p: As in a request.
        top_k: As in a request.
        seed: As in a request.
        stop: As in a request.
        image: Files or URLs of images that the user shows before the words, in their order.
        video: The same for videos, which follow the images.
        audio: The same for audio, which comes last.
    """

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    max_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    image: tuple[str, ...] = ()
    video: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what the sampling parameters do not.

        Raises:
            Unsupported: Two fields contradict each other.
        """
        if self.raw and self.system is not None:
            raise Unsupported("system and raw exclude each other: raw text has no system message")
        if self.raw and self.media:
            raise Unsupported(f"{self.media[0][0]} and raw exclude each other: raw text has none")

    @property
    def media(self) -> tuple[tuple[str, str], ...]:
        """Kind and place of each item, in order."""
        named = (("image", self.image), ("video", self.video), ("audio", self.audio))
        return tuple((kind, place) for kind, places in named for place in places)


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of ``treadle run``."""

    model: ModelConfig = ModelConfig()
    memory: MemoryConfig = MemoryConfig()
    speculative: SpeculativeOptions = SpeculativeOptions()
    engine: EngineConfig = EngineConfig()
    media: MediaOptions = MediaOptions()
    run: RunOptions = RunOptions()

    def __post_init__(self) -> None:
        """Refuse media that were not to be taken.

        Raises:
            Unsupported: There are.
        """
        if self.media.text_only and self.run.media:
            raise Unsupported(f"text_only and {self.run.media[0][0]} exclude each other")
