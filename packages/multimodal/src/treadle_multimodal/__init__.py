"""Image, video and audio input for Treadle engines.

Nothing here imports mlx or mlx-vlm; models are in :mod:`treadle_multimodal.vlm`.
"""

from treadle_multimodal.audio import decode_audio
from treadle_multimodal.config import MultimodalConfig
from treadle_multimodal.errors import (
    BrokenMedia,
    Item,
    MediaError,
    MediaForbidden,
    MediaTimeout,
    MediaTooLarge,
    MediaUnavailable,
    UnsupportedMedia,
)
from treadle_multimodal.features import FeatureCache, FeatureStats
from treadle_multimodal.fetch import Fetched, Fetcher, Resolver, SystemResolver
from treadle_multimodal.images import convert_image, decode_image
from treadle_multimodal.limits import MediaLimits
from treadle_multimodal.load import MediaLoader, load_media
from treadle_multimodal.media import DecodedAudio, DecodedImage, DecodedVideo, Media
from treadle_multimodal.parsing import is_media, parse_content, parse_part, parse_reference
from treadle_multimodal.policy import FetchPolicy
from treadle_multimodal.prompt import EncodedPrompt, PreparedItem, Segment
from treadle_multimodal.sources import (
    Base64,
    Bytes,
    DataUri,
    Kind,
    LocalPath,
    MediaOptions,
    MediaPart,
    PilImage,
    Source,
    Url,
)
from treadle_multimodal.video import decode_video

__all__ = [
    "Base64",
    "BrokenMedia",
    "Bytes",
    "DataUri",
    "DecodedAudio",
    "DecodedImage",
    "DecodedVideo",
    "EncodedPrompt",
    "FeatureCache",
    "FeatureStats",
    "FetchPolicy",
    "Fetched",
    "Fetcher",
    "Item",
    "Kind",
    "LocalPath",
    "Media",
    "MediaError",
    "MediaForbidden",
    "MediaLimits",
    "MediaLoader",
    "MediaOptions",
    "MediaPart",
    "MediaTimeout",
    "MediaTooLarge",
    "MediaUnavailable",
    "MultimodalConfig",
    "PilImage",
    "PreparedItem",
    "Resolver",
    "Segment",
    "Source",
    "SystemResolver",
    "UnsupportedMedia",
    "Url",
    "convert_image",
    "decode_audio",
    "decode_image",
    "decode_video",
    "is_media",
    "load_media",
    "parse_content",
    "parse_part",
    "parse_reference",
]
