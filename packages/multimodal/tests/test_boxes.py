"""What MP4 files say of their samples is looked at before FFmpeg makes room for them."""

from collections.abc import Callable
from io import BytesIO
from struct import pack

import av
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from treadle_multimodal import (
    MediaError,
    MediaLimits,
    UnsupportedMedia,
    decode_audio,
    decode_video,
)
from treadle_multimodal.boxes import check_samples

from .media_files import audio, grey_frames, tone, video

LIMITS = MediaLimits()
VIDEO = video(grey_frames(range(0, 80, 8)), "mp4", "mpeg4")
INSIDE = (b"moov", b"trak", b"mdia", b"minf", b"stbl")


def in_pieces(data: bytes) -> bytes:
    """The same video as a stream is sent."""
    file = BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov"}
    with av.open(BytesIO(data)) as read, av.open(file, "w", format="mp4", options=options) as out:
        stream = out.add_stream_from_template(read.streams.video[0])
        for packet in read.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    return file.getvalue()


PIECES = in_pieces(VIDEO)


def with_table(data: bytes, name: bytes, body: bytes, inside: tuple[bytes, ...]) -> bytes:
    """The file with another table in a box's place, the boxes around it grown."""
    place = data.index(name) - 4
    old = int.from_bytes(data[place : place + 4], "big")
    changed = data[:place] + pack(">I", len(body) + 8) + name + body + data[place + old :]
    for box in inside:
        place = changed.index(box) - 4
        size = int.from_bytes(changed[place : place + 4], "big") + len(body) + 8 - old
        changed = changed[:place] + pack(">I", size) + changed[place + 4 :]
    return changed


def many_samples(count: int) -> bytes:
    """All of one size, in one piece: a file as short as before."""
    data = with_table(VIDEO, b"stsz", pack(">III", 0, 1, count), INSIDE)
    data = with_table(data, b"stts", pack(">IIII", 0, 1, count, 1), INSIDE)
    data = with_table(data, b"stsc", pack(">IIIII", 0, 1, 1, count, 1), INSIDE)
    return with_table(data, b"stco", pack(">III", 0, 1, 48), INSIDE)


def many_in_a_piece(count: int) -> bytes:
    return with_table(PIECES, b"trun", pack(">III", 1, count, 0), (b"moof", b"traf"))


def many_edits(count: int) -> bytes:
    body = pack(">II", 0, count) + pack(">IIHH", 1, 0, 1, 0) * count
    return with_table(VIDEO, b"elst", body, (b"moov", b"trak", b"edts"))


@pytest.mark.parametrize(
    ("make", "count", "message"),
    [
        (many_samples, 2_000_000, "2000000 samples in [0-9]+ bytes"),
        (many_samples, 2**32 - 1, "4294967295 samples in [0-9]+ bytes"),
        (many_in_a_piece, 2_000_000, "20000[0-9]+ samples in [0-9]+ bytes"),
        (many_edits, 5_000, "5000 edits"),
    ],
)
def test_a_short_file_cannot_ask_for_room_for_many_samples(
    make: Callable[[int], bytes], count: int, message: str
) -> None:
    data = make(count)

    with pytest.raises(MediaError, match=message):
        decode_video(data, LIMITS, fps=1.0)
    with pytest.raises(MediaError, match=message):
        decode_audio(data, LIMITS, sample_rate=16_000)


def test_samples_that_are_there_have_a_limit_in_bytes() -> None:
    check_samples(VIDEO, "video", 10_000)
    with pytest.raises(MediaError, match="10 samples', expected at most 4"):
        check_samples(VIDEO, "video", 200)
    with pytest.raises(MediaError, match="10 samples in 3 edits', expected at most 6"):
        check_samples(many_edits(3), "video", 1000)


def test_a_compressed_list_is_refused() -> None:
    with pytest.raises(UnsupportedMedia, match="a compressed list"):
        decode_video(VIDEO.replace(b"trak", b"cmov"), LIMITS, fps=1.0)


def test_what_stands_among_the_samples_is_no_list() -> None:
    box = pack(">I", 24) + b"mdat" + b"trun" + b"\xff" * 12
    long_box = pack(">I", 1) + b"mdat" + pack(">Q", 32) + b"trun" + b"\xff" * 12
    last = pack(">I", 0) + b"mdat" + b"cmov"

    check_samples(VIDEO + box + long_box + last, "video", 10_000)
    with pytest.raises(MediaError, match="samples in"):
        check_samples(VIDEO + box.replace(b"mdat", b"free"), "video", 10_000)


@pytest.mark.parametrize("cut", [3, 20, 60])
def test_a_box_that_ends_early_is_left_to_the_decoder(cut: int) -> None:
    check_samples(VIDEO[:cut], "video", 10_000)


def test_files_in_pieces_and_with_sound_are_decoded() -> None:
    assert len(decode_video(PIECES, LIMITS, fps=10.0).frames) == 10
    assert decode_audio(audio(tone(), "mov", "pcm_s16le"), LIMITS, sample_rate=16_000).samples.size
