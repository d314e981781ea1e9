"""What an operator sets for media input."""

from pathlib import Path

import msgspec
from msgspec import Struct

from treadle_core import InvalidRequest
from treadle_core.request import check_float, check_int
from treadle_multimodal.limits import MediaLimits
from treadle_multimodal.policy import FetchPolicy


class MultimodalConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How media of a request are read, checked on creation.

    Attributes:
        limits: Of bytes, sizes, numbers and time.
        fetch: What may be fetched.
        allowed_directories: Absolute; local files below them are read. None by default.
        video_fps: Frames per second taken from a video, where its part does not say.
        audio_sample_rate: Samples per second that audio is converted to.
    """

    limits: MediaLimits = msgspec.field(default_factory=MediaLimits)
    fetch: FetchPolicy = msgspec.field(default_factory=FetchPolicy)
    allowed_directories: tuple[str, ...] = ()
    video_fps: float = 2.0
    audio_sample_rate: int = 16_000

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        for directory in self.allowed_directories:
            if not Path(directory).is_absolute() or "\0" in directory:
                raise InvalidRequest("allowed_directories", directory, "absolute paths")
        check_float("video_fps", self.video_fps, 0.001, 240.0)
        check_int("audio_sample_rate", self.audio_sample_rate, 1000, 192_000)
