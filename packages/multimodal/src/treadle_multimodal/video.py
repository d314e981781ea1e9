"""Decoding videos with PyAV: a look at all timestamps, the choice of frames, then the frames.

Frames are chosen at even distances in time. Nothing depends on what a header says about length or
number of frames. Frames are turned upright; pixels that are not square stay as they are.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial

import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from msgspec import Struct
from numpy.typing import NDArray

from treadle_multimodal.boxes import check_samples
from treadle_multimodal.containers import check_length, codec_name, open_container
from treadle_multimodal.errors import BrokenMedia, MediaTooLarge, UnsupportedMedia
from treadle_multimodal.limits import MediaLimits, check_size
from treadle_multimodal.media import Checkpoint, Claim, DecodedVideo, make_video
from treadle_multimodal.sniff import check_type

# Few decoders stand open to whoever sends a file.
CODECS = ("av1", "h264", "hevc", "mjpeg", "mpeg4", "vp8", "vp9")
DECODERS = (*CODECS, "libdav1d")

MAX_PACKETS = 2_000_000
"""Of one video: an hour has a tenth of that, and each is remembered."""


class Timeline(Struct, frozen=True, kw_only=True):
    """When the frames of a video are shown.

    Attributes:
        ticks: One per frame, in order; never empty.
        end: When the last one is over.
        time_base: Seconds per tick.
    """

    ticks: tuple[int, ...]
    end: int
    time_base: Fraction

    @property
    def duration(self) -> Fraction:
        """Seconds from the first frame to the end."""
        return (self.end - self.ticks[0]) * self.time_base


def decode_video(
    data: bytes,
    limits: MediaLimits,
    *,
    fps: float,
    max_frames: int | None = None,
    media_type: str = "",
    checkpoint: Checkpoint = lambda: None,
    claim: Claim = lambda _: None,
) -> DecodedVideo:
    """Frames of an encoded video. Blocks; equal arguments give equal frames.

    Args:
        data: The file.
        limits: Of seconds, frames and pixels.
        fps: Frames per second to take, if there are so many.
        max_frames: Most frames, spread evenly; at most the limit, which is the default.
        media_type: As a caller or server says; only errors show it.
        checkpoint: Called between packets and frames.
        claim: Called with the bytes of the result, before anything is decoded.

    Raises:
        UnsupportedMedia: It is no video that is decoded here.
        MediaTooLarge: It is too long or too large, or the frames to take are together.
        BrokenMedia: It is empty, cut short or damaged, or has no frames.
    """
    if max_frames is not None and max_frames > limits.max_frames:
        raise MediaTooLarge("max_frames", max_frames, f"at most {limits.max_frames}")
    file_type = check_type(data, "video", media_type)
    if file_type.reader == "mov":
        check_samples(data, "video", limits.max_decoded_bytes)
    opened = partial(
        open_container, data, file_type, "video", DECODERS, max_pixels=limits.max_frame_pixels
    )
    with opened() as container:
        stream = _video_stream(container, limits)
        timeline = _read_timeline(container, stream, limits, checkpoint)
        check_length(container, float(timeline.duration), "video")
    wanted = choose_frames(timeline, fps, max_frames or limits.max_frames)
    with opened() as container:
        stream = _video_stream(container, limits)
        claim(3 * _check_frames(len(wanted), stream, limits))
        # The decoder then allocates no larger frame, if the size changes on the way.
        stream.codec_context.options = {"max_pixels": str(limits.max_frame_pixels)}
        found = list(_take_frames(container, stream, wanted, checkpoint))
    if not found:
        raise BrokenMedia("video", "0 frames", "at least one frame that can be decoded")
    start = timeline.ticks[0]
    times = [float((tick - start) * timeline.time_base) for tick, _ in found]
    return make_video([frame for _, frame in found], times, float(timeline.duration))


def choose_frames(timeline: Timeline, fps: float, max_frames: int) -> list[int]:
    """Ticks of the frames to take: the first at or after each of evenly spaced times.

    Args:
        timeline: All frames.
        fps: Wanted times per second.
        max_frames: Most frames; if there would be more, the times lie further apart.

    Returns:
        Increasing ticks, at least one, the first frame's first.
    """
    rate = Fraction(fps).limit_denominator(1000)
    num_times = max(1, -int(-timeline.duration * rate // 1))
    step = 1 / (rate * timeline.time_base)
    if num_times > max_frames:
        num_times = max_frames
        step = Fraction(timeline.end - timeline.ticks[0], max_frames)
    start = timeline.ticks[0]
    indices = (bisect_left(timeline.ticks, start + k * step) for k in range(num_times))
    chosen = dict.fromkeys(index for index in indices if index < len(timeline.ticks))
    return [timeline.ticks[index] for index in chosen]


def _video_stream(container: InputContainer, limits: MediaLimits) -> VideoStream:
    """The first stream of moving pictures; a cover is none."""
    streams = [
        stream
        for stream in container.streams.video
        if not stream.disposition & Disposition.attached_pic
    ]
    if not streams:
        raise BrokenMedia("video", "no video stream", "a file with a video stream")
    stream = streams[0]
    name = codec_name(stream)
    if name not in CODECS:
        raise UnsupportedMedia("codec", name, f"a video in {', '.join(CODECS)}")
    width, height = stream.codec_context.width, stream.codec_context.height
    check_size("frame size", width, height, limits.max_side, limits.max_frame_pixels)
    return stream


def _check_frames(num_frames: int, stream: VideoStream, limits: MediaLimits) -> int:
    """Pixels of so many frames together, if they are within the limit."""
    width, height = stream.codec_context.width, stream.codec_context.height
    if num_frames * width * height > limits.max_video_pixels:
        frames = f"{num_frames} frames of {width} x {height}"
        limit = f"at most {limits.max_video_pixels} pixels together; lower fps or max_frames"
        raise MediaTooLarge("frames", frames, limit)
    return num_frames * width * height


def _read_timeline(
    container: InputContainer, stream: VideoStream, limits: MediaLimits, checkpoint: Checkpoint
) -> Timeline:
    """All timestamps of a stream; nothing is decoded."""
    time_base = stream.time_base
    if time_base is None:
        raise BrokenMedia("video", "no time base", "a video with timestamps")
    most = limits.max_video_seconds / time_base
    ticks, end = list[int](), 0
    for packet in container.demux(stream):
        checkpoint()
        tick = packet.dts if packet.pts is None else packet.pts
        if tick is None:
            continue
        if packet.is_corrupt:
            raise BrokenMedia("video", "a damaged packet", "an undamaged video file")
        ticks.append(tick)
        if len(ticks) > MAX_PACKETS:
            raise MediaTooLarge("video", "more packets", f"at most {MAX_PACKETS}")
        end = max(end, tick + max(packet.duration or 0, 1))
        if end - min(ticks[0], tick) > most:
            limit = f"at most {limits.max_video_seconds:g} seconds"
            raise MediaTooLarge("video", "a longer video", limit)
    if not ticks:
        raise BrokenMedia("video", "0 frames", "at least one frame")
    return Timeline(ticks=tuple(sorted(ticks)), end=end, time_base=time_base)


def _take_frames(
    container: InputContainer,
    stream: VideoStream,
    wanted: Sequence[int],
    checkpoint: Checkpoint,
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """The wanted frames: for each tick the first frame at or after it, each frame once."""
    remaining = list(reversed(wanted))
    size = stream.codec_context.width, stream.codec_context.height
    for frame in container.decode(stream):
        checkpoint()
        if frame.is_corrupt:
            raise BrokenMedia("video", "a damaged frame", "an undamaged video file")
        if frame.pts is None or frame.pts < remaining[-1]:
            continue
        if (frame.width, frame.height) != size:
            raise UnsupportedMedia("frame size", (frame.width, frame.height), f"{size} throughout")
        yield frame.pts, _upright_pixels(frame)
        while remaining and remaining[-1] <= frame.pts:
            remaining.pop()
        if not remaining:
            return


def _upright_pixels(frame: VideoFrame) -> NDArray[np.uint8]:
    pixels = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
