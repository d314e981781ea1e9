"""Media files for tests, each made here."""

import wave
from base64 import b64encode
from collections.abc import Iterable
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image


def picture(width: int = 24, height: int = 16, seed: int = 0) -> Image.Image:
    """Noise in RGB."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def encode(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(width: int = 24, height: int = 16, seed: int = 0) -> bytes:
    return encode(picture(width, height, seed))


def data_uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64encode(data).decode()}"


def grey_frames(
    levels: Iterable[int], width: int = 64, height: int = 48
) -> list[NDArray[np.uint8]]:
    return [np.full((height, width, 3), level, np.uint8) for level in levels]


def video(
    frames: Iterable[NDArray[np.uint8]],
    form: str = "mp4",
    codec: str = "libx264",
    rate: int = 10,
    rotation: int = 0,
    pixel_format: str = "yuv420p",
    **options: str,
) -> bytes:
    """A video of RGB frames."""
    file = BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.pix_fmt = pixel_format
        for index, pixels in enumerate(frames):
            if index == 0:
                stream.height, stream.width = pixels.shape[:2]
                if rotation:
                    stream.set_display_rotation(rotation)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def tone(seconds: float = 0.5, rate: int = 16_000, pitch: float = 440.0) -> NDArray[np.float32]:
    """A sine at half of full scale."""
    time = np.arange(int(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * pitch * time)).astype(np.float32)


def wav(samples: NDArray[np.float32], rate: int = 16_000, width: int = 2) -> bytes:
    """PCM of 8 or 16 bits; [samples] or [samples, channels]."""
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        writer.setsampwidth(width)
        writer.setframerate(rate)
        scaled = samples * 127 + 128 if width == 1 else samples * 32767
        writer.writeframes(np.rint(scaled).astype(np.uint8 if width == 1 else "<i2").tobytes())
    return file.getvalue()


def audio(samples: NDArray[np.float32], form: str, codec: str, rate: int = 16_000) -> bytes:
    """Mono audio in any container and codec."""
    file = BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="flt", layout="mono")
        frame.sample_rate, frame.pts = rate, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
