"""Decoding audio with PyAV: one channel of float32 at the sample rate that is asked for.

Several channels are averaged.
"""

from collections.abc import Iterator
from fractions import Fraction

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from treadle_multimodal.boxes import check_samples
from treadle_multimodal.containers import check_length, codec_name, open_container
from treadle_multimodal.errors import BrokenMedia, MediaTooLarge, UnsupportedMedia
from treadle_multimodal.limits import MediaLimits
from treadle_multimodal.media import Checkpoint, Claim, DecodedAudio, make_audio
from treadle_multimodal.sniff import check_type

# Few decoders stand open to whoever sends a file; pcm_ stands for all of that family.
CODECS = ("aac", "alac", "flac", "mp3", "opus", "vorbis")
PCM = "pcm_"
DECODERS = (
    *CODECS,
    "mp3float",
    *sorted(name for name in av.codecs_available if name.startswith(PCM)),
)

MAX_CHANNELS = 16
MIN_SOURCE_RATE = 1000
MAX_SOURCE_RATE = 768_000

# The headers of these say how long they are; of others FFmpeg guesses.
TRUE_LENGTH = ("mov", "matroska", "flac")


def decode_audio(
    data: bytes,
    limits: MediaLimits,
    *,
    sample_rate: int,
    media_type: str = "",
    checkpoint: Checkpoint = lambda: None,
    claim: Claim = lambda _: None,
) -> DecodedAudio:
    """Encoded audio, or the audio of a video file, as samples. Blocks; deterministic.

    Args:
        data: The file.
        limits: Of seconds.
        sample_rate: Of the result.
        media_type: As a caller or server says; only errors show it.
        checkpoint: Called between frames.
        claim: Called with the bytes that each of them adds to the result.

    Raises:
        UnsupportedMedia: It is no audio that is decoded here.
        MediaTooLarge: It is too long.
        BrokenMedia: It is empty, cut short or damaged, or has no samples.
    """
    file_type = check_type(data, "audio", media_type)
    if file_type.reader == "mov":
        check_samples(data, "audio", limits.max_decoded_bytes)
    with open_container(data, file_type, "audio", DECODERS) as container:
        stream = _audio_stream(container)
        pieces = list[NDArray[np.float32]]()
        for piece in _resample(_frames(container, stream, limits, checkpoint), sample_rate):
            claim(piece.nbytes)
            pieces.append(piece)
        samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
        if file_type.reader in TRUE_LENGTH:
            check_length(container, len(samples) / sample_rate, "audio")
    if not len(samples):
        raise BrokenMedia("audio", "0 samples", "at least one sample")
    if not np.isfinite(samples).all():
        raise BrokenMedia("audio", "samples that are not finite", "finite samples")
    return make_audio(samples, sample_rate)


def _audio_stream(container: InputContainer) -> AudioStream:
    if not container.streams.audio:
        raise BrokenMedia("audio", "no audio stream", "a file with an audio stream")
    stream = container.streams.audio[0]
    name = codec_name(stream)
    if name not in CODECS and not name.startswith(PCM):
        raise UnsupportedMedia("codec", name, f"audio in PCM, {', '.join(CODECS)}")
    return stream


def _frames(
    container: InputContainer, stream: AudioStream, limits: MediaLimits, checkpoint: Checkpoint
) -> Iterator[AudioFrame]:
    """Decoded frames, as long as they are within the limits and of one form."""
    seconds, form = Fraction(0), None
    for frame in container.decode(stream):
        checkpoint()
        _check_frame(frame)
        this = frame.sample_rate, frame.layout.nb_channels, frame.format.name
        if form not in (None, this):
            raise UnsupportedMedia("sample format", this, f"{form} throughout")
        form = this
        seconds += Fraction(frame.samples, frame.sample_rate)
        if seconds > limits.max_audio_seconds:
            limit = f"at most {limits.max_audio_seconds:g} seconds"
            raise MediaTooLarge("audio", "longer audio", limit)
        yield frame


def _check_frame(frame: AudioFrame) -> None:
    """Raise UnsupportedMedia for rates and channels that no recording has."""
    if not MIN_SOURCE_RATE <= frame.sample_rate <= MAX_SOURCE_RATE:
        limit = f"from {MIN_SOURCE_RATE} to {MAX_SOURCE_RATE} per second"
        raise UnsupportedMedia("sample rate", frame.sample_rate, limit)
    if not 1 <= frame.layout.nb_channels <= MAX_CHANNELS:
        limit = f"from 1 to {MAX_CHANNELS}"
        raise UnsupportedMedia("channels", frame.layout.nb_channels, limit)


def _resample(frames: Iterator[AudioFrame], sample_rate: int) -> Iterator[NDArray[np.float32]]:
    """Frames mixed to one channel at another rate; the last samples come after the last frame."""
    resampler = AudioResampler(format="flt", rate=sample_rate)
    for frame in frames:
        yield from map(_samples, resampler.resample(frame))
    yield from map(_samples, resampler.resample(None))


def _samples(frame: AudioFrame) -> NDArray[np.float32]:
    """The mean of the channels: FFmpeg's own mix to one is louder, and may exceed 1."""
    channels = np.asarray(frame.to_ndarray(), np.float32).reshape(-1, frame.layout.nb_channels)
    return channels.mean(axis=1, dtype=np.float32)
