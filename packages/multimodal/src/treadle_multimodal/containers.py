"""Opening encoded streams with PyAV, as FFmpeg is to see them: one demuxer, no other file."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from io import BytesIO
from typing import NoReturn, cast

import av
from av.codec import CodecContext
from av.container import InputContainer
from av.error import FFmpegError
from av.stream import Stream

from treadle_core.errors import describe
from treadle_multimodal.errors import BrokenMedia
from treadle_multimodal.sniff import FileType
from treadle_multimodal.sources import Kind

# A container that ends this much earlier than its header says was cut short.
SLACK_SECONDS = 1.0
SLACK_SHARE = 0.1


@contextmanager
def open_container(
    data: bytes, file_type: FileType, kind: Kind, decoders: Iterable[str], max_pixels: int = 1
) -> Generator[InputContainer]:
    """A container over ``data``, read with the demuxer of its type.

    Args:
        data: The file.
        file_type: Names the demuxer.
        kind: For errors.
        decoders: FFmpeg's names of those that may run, also while it looks what streams there are.
        max_pixels: Of a frame, for the same look.

    Raises:
        BrokenMedia: It cannot be read, here or while it is open.
    """
    try:
        with av.open(
            BytesIO(data),
            "r",
            format=file_type.reader,
            options={"codec_whitelist": ",".join(decoders), "max_pixels": str(max_pixels)},
            metadata_errors="replace",
            io_open=_refuse_file,
        ) as container:
            yield container
    except (FFmpegError, _OtherFile) as error:
        raise BrokenMedia(kind, describe(error), f"an undamaged {kind} file") from error


def check_length(container: InputContainer, seconds: float, kind: Kind) -> None:
    """Raise BrokenMedia if a container ends long before its header says.

    Args:
        container: Its header gives a duration, or none.
        seconds: What it was found to hold.
        kind: For the error.
    """
    if container.duration is None:
        return
    claimed = container.duration / av.time_base
    if seconds < claimed - max(SLACK_SECONDS, SLACK_SHARE * claimed):
        found = f"{seconds:.1f} of {claimed:.1f} seconds"
        raise BrokenMedia(kind, found, f"a {kind} file that is not cut short")


def codec_name(stream: Stream) -> str:
    """FFmpeg's name of a stream's codec; empty where it knows none."""
    # The stubs leave out that there is none then.
    context = cast("CodecContext | None", stream.codec_context)
    return "" if context is None else context.codec.canonical_name


class _OtherFile(Exception):
    """A container asked for another file."""


def _refuse_file(url: str, flags: int, options: object) -> NoReturn:
    # Playlists and reference movies name other files and hosts.
    raise _OtherFile(f"it names another file: {url}")
