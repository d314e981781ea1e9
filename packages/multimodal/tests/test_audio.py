"""Decoding of audio: containers, rates, channels, limits, damage."""

import struct

import numpy as np
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from treadle_multimodal import (
    BrokenMedia,
    MediaError,
    MediaLimits,
    MediaTimeout,
    MediaTooLarge,
    UnsupportedMedia,
    decode_audio,
)

from .media_files import audio, grey_frames, png, tone, video, wav

LIMITS = MediaLimits()
RATE = 16_000


def float_wav(samples: list[float]) -> bytes:
    data = struct.pack(f"<{len(samples)}f", *samples)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, RATE, RATE * 4, 4, 32)
    body = b"WAVE" + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def pitch(samples: np.ndarray, rate: int) -> float:
    return float(np.argmax(np.abs(np.fft.rfft(samples))) * rate / len(samples))


def test_pcm_keeps_its_samples() -> None:
    samples = tone()
    decoded = decode_audio(wav(samples), LIMITS, sample_rate=RATE)

    assert decoded.samples.dtype == np.float32
    assert decoded.samples.shape == samples.shape
    assert np.abs(decoded.samples - samples).max() < 1e-4
    assert (decoded.sample_rate, decoded.duration) == (RATE, 0.5)


@pytest.mark.parametrize(
    ("form", "codec", "rate"),
    [
        ("wav", "pcm_s16le", RATE),
        ("wav", "pcm_s24le", RATE),
        ("wav", "pcm_f32le", RATE),
        ("wav", "pcm_mulaw", 8000),
        ("mp3", "libmp3lame", 44_100),
        ("flac", "flac", 44_100),
        ("ogg", "libopus", 48_000),
        ("ogg", "flac", RATE),
        ("adts", "aac", 44_100),
        ("ipod", "aac", 44_100),
        ("ipod", "alac", 44_100),
        ("mp4", "aac", 44_100),
        ("webm", "libopus", 48_000),
        ("matroska", "pcm_s16le", RATE),
    ],
)
def test_a_container_and_codec_are_decoded(form: str, codec: str, rate: int) -> None:
    decoded = decode_audio(audio(tone(1.0, rate), form, codec, rate), LIMITS, sample_rate=RATE)

    assert abs(decoded.duration - 1.0) < 0.15
    assert abs(pitch(decoded.samples, RATE) - 440.0) < 4.0
    assert 0.45 < np.quantile(np.abs(decoded.samples), 0.9) < 0.52


def test_8_bit_pcm_is_decoded() -> None:
    samples = tone()
    decoded = decode_audio(wav(samples, width=1), LIMITS, sample_rate=RATE)

    assert np.abs(decoded.samples - samples).max() < 0.02


@pytest.mark.parametrize("rate", [8000, 22_050, 48_000])
def test_the_rate_is_the_one_asked_for(rate: int) -> None:
    decoded = decode_audio(wav(tone(1.0)), LIMITS, sample_rate=rate)

    assert abs(len(decoded.samples) - rate) <= rate * 0.01
    assert abs(pitch(decoded.samples, rate) - 440.0) < 2.0


def test_channels_are_averaged() -> None:
    left = tone()
    stereo = np.stack([left, np.zeros_like(left)], axis=1)
    decoded = decode_audio(wav(stereo), LIMITS, sample_rate=RATE)

    assert np.abs(decoded.samples - left / 2).max() < 1e-3


def test_channels_that_agree_are_no_louder_together() -> None:
    same = np.stack([tone()] * 6, axis=1)
    decoded = decode_audio(wav(same), LIMITS, sample_rate=8000)

    assert 0.45 < np.abs(decoded.samples).max() < 0.55


def test_the_audio_of_a_video_file_may_be_taken() -> None:
    assert decode_audio(audio(tone(), "mp4", "aac"), LIMITS, sample_rate=RATE).duration > 0.4


def test_the_length_is_limited() -> None:
    data = wav(tone(2.0))

    assert decode_audio(data, MediaLimits(max_audio_seconds=2.0), sample_rate=RATE).duration == 2.0
    with pytest.raises(MediaTooLarge, match=r"at most 1\.9 seconds"):
        decode_audio(data, MediaLimits(max_audio_seconds=1.9), sample_rate=RATE)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", BrokenMedia, "got '0 bytes'"),
        (wav(tone())[:20], BrokenMedia, "audio"),
        (wav(np.zeros(0, np.float32)), BrokenMedia, "0 samples"),
        (b"RIFF\x10\0\0\0WAVE" + b"\0" * 64, BrokenMedia, "audio"),
        (b"ID3" + b"\0" * 200, BrokenMedia, "audio"),
        (b"fLaC" + b"\0" * 200, BrokenMedia, "audio"),
        (b"OggS" + b"\0" * 200, BrokenMedia, "audio"),
        (b"\xff\xfb\x90\0" + b"\0" * 60, BrokenMedia, "audio"),
        (audio(tone(), "ipod", "aac")[:900], BrokenMedia, "audio"),
        (audio(tone(4.0), "flac", "flac")[:9000], BrokenMedia, "audio"),
        (audio(tone(4.0), "matroska", "pcm_s16le")[:50_000], BrokenMedia, "not cut short"),
        (video(grey_frames([0, 8])), BrokenMedia, "no audio stream"),
        (png(), UnsupportedMedia, "got 'a PNG image'"),
        (b"\0" * 1000, UnsupportedMedia, "content of an unknown kind"),
        (b"<!doctype html>", UnsupportedMedia, "an HTML page"),
        (audio(tone(), "wav", "adpcm_ima_wav"), UnsupportedMedia, "codec: got 'adpcm_ima_wav'"),
        (float_wav([0.0, float("nan"), 0.5]), BrokenMedia, "not finite"),
        (float_wav([0.0, float("inf"), 0.5]), BrokenMedia, "not finite"),
        (wav(tone(), rate=900), UnsupportedMedia, "sample rate: got 900"),
        (wav(np.zeros((10, 20), np.float32)), UnsupportedMedia, "channels: got 20"),
    ],
)
def test_what_cannot_be_used_is_refused(data: bytes, error: type[MediaError], message: str) -> None:
    with pytest.raises(error) as caught:
        decode_audio(data, LIMITS, sample_rate=RATE)

    assert message in str(caught.value)


def test_digests_are_stable_and_distinct() -> None:
    data = wav(tone())
    decoded = decode_audio(data, LIMITS, sample_rate=RATE)
    digests = [
        decoded.digest,
        decode_audio(float_wav(decoded.samples.tolist()), LIMITS, sample_rate=RATE).digest,
        decode_audio(data, LIMITS, sample_rate=8000).digest,
        decode_audio(wav(tone(pitch=441.0)), LIMITS, sample_rate=RATE).digest,
        decode_audio(wav(tone(0.4)), LIMITS, sample_rate=RATE).digest,
    ]

    assert digests[0] == digests[1] == decode_audio(data, LIMITS, sample_rate=RATE).digest
    assert len(set(digests)) == 4


def test_samples_are_read_only() -> None:
    samples = decode_audio(wav(tone()), LIMITS, sample_rate=RATE).samples

    with pytest.raises(ValueError, match="read-only"):
        samples[0] = 1.0


def test_a_checkpoint_ends_it() -> None:
    def stop() -> None:
        raise MediaTimeout("decoding", "more time", "less")

    with pytest.raises(MediaTimeout):
        decode_audio(wav(tone()), LIMITS, sample_rate=RATE, checkpoint=stop)
