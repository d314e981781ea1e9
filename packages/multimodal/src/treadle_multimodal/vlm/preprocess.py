"""From a rendered prompt and decoded media to what the model takes, by mlx-vlm's own processor.

Blocking, for worker threads; nothing here stays on a device.
"""

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from hashlib import blake2b
from struct import pack
from typing import Any, cast

import numpy as np
from mlx_vlm.utils import prepare_inputs, processor_video_sampling
from msgspec.structs import replace
from numpy.typing import NDArray

from treadle_multimodal.errors import MediaError, MediaTooLarge, UnsupportedMedia
from treadle_multimodal.families import Family, make_family
from treadle_multimodal.families.base import Hearing, Made, Placed, array_of
from treadle_multimodal.media import DIGEST_BYTES, DecodedAudio, DecodedImage, DecodedVideo, Media
from treadle_multimodal.prompt import Arrays, EncodedPrompt, PreparedItem, Segment
from treadle_multimodal.sources import Kind

# The numbers change with the encoding.
ITEM_DOMAIN = b"treadle.item.2"
SEGMENT_DOMAIN = b"treadle.seg.1"

TICKS_PER_SECOND = 1000
"""Frames are given to processors by number at this rate, so that any time can be told."""

STANDIN_SECONDS = 0.1
"""Of the silence that holds a clip's place until its own features are known."""

PROBE = "treadle"

Prepare = Callable[..., Mapping[str, Any]]

Part = tuple[Arrays, int]
"""What an item's encoder is given, and how many placeholders the item has."""


class Preprocessor:
    """Prepares the prompts of one checkpoint. Any thread may use it, several at once.

    A tokenizer keeps options in itself while it runs. So a prompt with media is prepared by a copy
    of the processor; there are as many as ever ran at once. The processor itself is left to text.

    Args:
        config: The checkpoint's, as its ``config.json`` has it.
        processor: The checkpoint's, as mlx-vlm loads it.

    Raises:
        Unsupported: Nobody has checked this family, or this way to use it.
    """

    def __init__(self, config: Mapping[str, Any], processor: Any) -> None:
        self._model_type = str(config.get("model_type"))
        self._family: Family = make_family(config, processor)
        self._processor = processor
        self._max_frames: int | None = processor_video_sampling(processor).max_frames
        self._takes_strings = takes_strings(self._apply_template)
        self._idle: list[Any] = []

    @property
    def kinds(self) -> frozenset[Kind]:
        """Kinds of media that the model's family was checked with."""
        return frozenset(self._family.markers)

    @property
    def family(self) -> Family:
        """How the model lays out media."""
        return self._family

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A chat as the checkpoint's template writes it, with one marker for each item.

        Args:
            messages: With ``content`` a string or parts of type ``text`` and of the media's kinds.
            **options: Further variables of the template.

        Raises:
            MediaError: Text of the chat holds what stands for media.
        """
        self._check_texts(messages)
        if not self._takes_strings:
            messages = [in_parts(message) for message in messages]
        return self._apply_template(messages, **options)

    def encode(self, text: str, media: Sequence[Media]) -> EncodedPrompt:
        """A rendered prompt with its media, in the order of their markers.

        Raises:
            MediaError: They do not fit the prompt, or the processor does not take them.
        """
        kinds: list[Kind] = [kind_of(item) for item in media]
        self._check(text, kinds)
        made = self._process(text, media, kinds)
        sounds = self._hear(media)
        tokens = self._room_for(sounds, array_of(made, "input_ids")[0])
        items, placed = self._place(tokens, kinds, made, sounds)
        order = sorted(range(len(placed)), key=lambda index: int(placed[index].where[0]))
        positions = None
        if media:
            by_position = [placed[index] for index in order]
            positions = self._family.positions(len(tokens), by_position)
        blanks = self._family.blanks(tokens) if media else ()
        return EncodedPrompt(
            tokens=tuple(tokens.tolist()),
            segments=tuple(segments_of(items, [each.where for each in placed])),
            items=tuple(items),
            positions=positions,
            delta=0 if positions is None else int(positions.max()) + 1 - len(tokens),
            blanks=tuple(int(position) for position in blanks),
        )

    def _apply_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        own = getattr(self._processor, "chat_template", None)
        options = {"add_generation_prompt": True, **options, "tokenize": False}
        if own:
            options["chat_template"] = own["default"] if isinstance(own, dict) else own
        # Not the processor's own method: mlx-vlm's for Gemma 4 puts all images before all sounds.
        return self._processor.tokenizer.apply_chat_template(list(messages), **options)

    def _check_texts(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse text that the processor would expand or the model read as media."""
        words = {word for marker in self._family.markers.values() for word in marker.words}
        for text in texts_of(messages):
            for word in sorted(words):
                if word in text:
                    raise MediaError("text", word, "text without the model's own media tokens")

    def _check(self, text: str, kinds: Sequence[Kind]) -> None:
        markers = self._family.markers
        for kind in kinds:
            if kind not in markers:
                known = " and ".join(sorted(markers))
                raise UnsupportedMedia("kind", kind, f"{known} for {self._model_type}")
        if len(set(kinds)) > 1 and not self._family.mixes_kinds:
            raise UnsupportedMedia("kinds", "image, video", f"one in a {self._model_type} prompt")
        names: dict[str, Kind] = {marker.text: kind for kind, marker in markers.items()}
        either = re.compile("|".join(re.escape(name) for name in names))
        found = [names[match] for match in either.findall(text)]
        rest = either.sub("", text)
        stray = [w for marker in markers.values() for w in marker.words if w in rest]
        if kinds and (found != list(kinds) or stray):
            shown = f"markers of {', '.join(found) or 'nothing'}{' and others' if stray else ''}"
            raise MediaError("prompt", shown, f"one marker for each of {', '.join(kinds)}")

    def _process(self, text: str, media: Sequence[Media], kinds: Sequence[Kind]) -> Made:
        """What mlx-vlm makes of a prompt, silence in place of its sound, as numpy arrays."""
        images = [item.image for item in media if isinstance(item, DecodedImage)]
        videos = [
            thinned(item, self._max_frames) for item in media if isinstance(item, DecodedVideo)
        ]
        options: dict[str, Any] = {}
        if videos:
            options["videos"] = [self._frames(video) for video in videos]
            options["video_metadata"] = [timing(video) for video in videos]
        hearing = self._family.hearing
        if hearing and "audio" in kinds:
            silence = np.zeros(round(STANDIN_SECONDS * hearing.sample_rate), dtype=np.float32)
            options["audio"] = [silence] * kinds.count("audio")
        return self._prepare(text, kinds, images=images or None, **options)

    def _frames(self, video: DecodedVideo) -> NDArray[np.uint8]:
        frames = np.stack(video.frames)
        return frames.transpose(0, 3, 1, 2) if self._family.channels_first else frames

    def _prepare(self, text: str, kinds: Sequence[Kind], **options: Any) -> Made:
        """Run mlx-vlm's own preparation."""
        prepare = cast(Prepare, prepare_inputs)
        with self._own_processor() as processor:
            try:
                made = prepare(
                    processor,
                    prompts=text,
                    # A rendered chat brings its own.
                    add_special_tokens=False,
                    **options,
                )
            except ValueError as error:
                if not kinds:
                    raise
                shown = ", ".join(kinds)
                raise MediaError("media", shown, f"what the processor takes ({error})") from error
            return {name: copied(value) for name, value in made.items() if value is not None}

    @contextmanager
    def _own_processor(self) -> Generator[Any]:
        """A processor that nobody else uses until the body ends."""
        try:
            own = self._idle.pop()
        except IndexError:
            own = deepcopy(self._processor)
        try:
            yield own
        finally:
            self._idle.append(own)

    def _hear(self, media: Sequence[Media]) -> list[Part]:
        """The sounds of a request, each distinct one prepared alone.

        Beside a longer one, a clip is padded and so gets other features; mlx-vlm's encoders also
        take what is padded for sound. Alone it is the same in each prompt.
        """
        clips = [item for item in media if isinstance(item, DecodedAudio)]
        hearing = self._family.hearing
        if hearing is None:
            return []
        for clip in clips:
            check_sound(clip, hearing, self._model_type)
        marker = self._family.markers["audio"]
        known: dict[bytes, Part] = {}
        for clip in clips:
            if clip.digest not in known:
                made = self._prepare(marker.text, ["audio"], audio=[clip.samples])
                length = np.count_nonzero(array_of(made, "input_ids") == marker.placeholder)
                arrays = {name: array_of(made, name) for name in hearing.arrays}
                known[clip.digest] = arrays, int(length)
        return [known[clip.digest] for clip in clips]

    def _room_for(self, sounds: Sequence[Part], tokens: NDArray[Any]) -> NDArray[Any]:
        """Token ids with as many placeholders for each sound as it needs."""
        if not sounds:
            return tokens
        placeholder = self._family.markers["audio"].placeholder
        runs = consecutive(np.flatnonzero(tokens == placeholder))
        assert len(runs) == len(sounds), f"{self._model_type}: sounds that are not apart"
        parts: list[NDArray[Any]] = []
        done = 0
        for run, (_, length) in zip(runs, sounds, strict=True):
            parts += [tokens[done : run[0]], np.full(length, placeholder, tokens.dtype)]
            done = run[-1] + 1
        return np.concatenate([*parts, tokens[done:]])

    def _place(
        self, tokens: NDArray[Any], kinds: Sequence[Kind], made: Made, sounds: Iterable[Part]
    ) -> tuple[list[PreparedItem], list[Placed]]:
        """Items, and where they stand, in the order of the request."""
        items: list[PreparedItem] = []
        places: list[Placed] = []
        parts = {kind: self._parts(kind, made, tokens, sounds) for kind in set(kinds)}
        free = {kind: self._free(kind, tokens) for kind in set(kinds)}
        known: dict[bytes, PreparedItem] = {}
        for kind in kinds:
            arrays, length = next(parts[kind])
            where, free[kind] = free[kind][:length], free[kind][length:]
            assert len(where) == length, f"{self._model_type}: an item without placeholders"
            item = self._item(kind, arrays, length)
            item = known.setdefault(item.digest, item)
            items.append(item)
            places.append(Placed(item.arrays, where))
        assert not any(map(len, free.values())), f"{self._model_type}: placeholders without an item"
        return items, places

    def _parts(
        self, kind: Kind, made: Made, tokens: NDArray[Any], sounds: Iterable[Part]
    ) -> Iterator[Part]:
        if kind == "audio":
            return iter(sounds)
        count = partial(self._family.num_tokens, kind)
        return ((arrays, count(arrays)) for arrays in self._family.split(kind, made, tokens))

    def _free(self, kind: Kind, tokens: NDArray[Any]) -> NDArray[np.intp]:
        return np.flatnonzero(tokens == self._family.markers[kind].placeholder)

    def _item(self, kind: Kind, arrays: Arrays, length: int) -> PreparedItem:
        # Out of what was made of all items together, so that each can be let go.
        own = {name: np.array(array) for name, array in arrays.items()}
        for array in own.values():
            array.flags.writeable = False
        placeholder = self._family.markers[kind].placeholder
        digest = item_digest(self._model_type, placeholder, length, own)
        return PreparedItem(arrays=own, placeholder=placeholder, num_tokens=length, digest=digest)


def takes_strings(render: Callable[..., str]) -> bool:
    """Whether a chat template writes contents that are strings; some read parts only."""
    try:
        return PROBE in render([{"role": "user", "content": PROBE}])
    except Exception:  # noqa: BLE001 — a template raises what it likes, and may refuse this chat
        return False


def in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same message, its content a list of parts."""
    content: Any = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def kind_of(media: Media) -> Kind:
    """What kind of media it is."""
    match media:
        case DecodedImage():
            return "image"
        case DecodedVideo():
            return "video"
        case DecodedAudio():
            return "audio"


def timing(video: DecodedVideo) -> dict[str, Any]:
    """When a video's frames are shown, as mlx-vlm takes it."""
    ticks = [round(seconds * TICKS_PER_SECOND) for seconds in video.timestamps]
    total = max(round(video.duration * TICKS_PER_SECOND), ticks[-1] + 1)
    return {"total_num_frames": total, "fps": float(TICKS_PER_SECOND), "frames_indices": ticks}


def thinned(video: DecodedVideo, max_frames: int | None) -> DecodedVideo:
    """A video of at most so many frames, those that mlx-vlm's own processors would keep."""
    if max_frames is None or len(video.frames) <= max_frames:
        return video
    kept = np.linspace(0, len(video.frames) - 1, max_frames).round().astype(int)
    return replace(
        video,
        frames=tuple(video.frames[index] for index in kept),
        timestamps=tuple(video.timestamps[index] for index in kept),
    )


def check_sound(clip: DecodedAudio, hearing: Hearing, model_type: str) -> None:
    """Raise MediaError unless a family takes a clip whole."""
    rate = hearing.sample_rate
    if clip.sample_rate != rate:
        limit = f"{rate} per second for {model_type}"
        raise UnsupportedMedia("sample rate", clip.sample_rate, limit)
    length = f"{clip.duration:.4g} seconds"
    if len(clip.samples) > hearing.max_samples:
        limit = f"at most {hearing.max_samples / rate:g} seconds for {model_type}"
        raise MediaTooLarge("audio", length, limit)
    if len(clip.samples) < hearing.min_samples:
        limit = f"at least {hearing.min_samples / rate:.4g} seconds for {model_type}"
        raise MediaError("audio", length, limit)


def copied(value: Any) -> NDArray[Any] | list[NDArray[Any]]:
    """What mlx-vlm made as numpy arrays of their own: its own must not outlive a thread's call."""
    if isinstance(value, list) and not np.isscalar(value[0]):
        return [np.array(item) for item in cast("list[Any]", value)]
    return np.array(value)


def consecutive(positions: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Increasing positions, cut where one is left out."""
    return np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)


def texts_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Every text of a chat."""
    for message in messages:
        content: Any = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, Sequence):
            parts = [part for part in cast("Sequence[Any]", content) if isinstance(part, Mapping)]
            yield from (part["text"] for part in parts if isinstance(part.get("text"), str))


def segments_of(items: Sequence[PreparedItem], where: Sequence[NDArray[np.intp]]) -> list[Segment]:
    """Runs of consecutive placeholders, in the order of their positions."""
    found: list[Segment] = []
    for index, (item, positions) in enumerate(zip(items, where, strict=True)):
        offset = 0
        for run in consecutive(positions):
            found.append(
                Segment(
                    start=int(run[0]),
                    length=len(run),
                    item=index,
                    offset=offset,
                    digest=segment_digest(item, offset, len(run)),
                )
            )
            offset += len(run)
    return sorted(found, key=lambda segment: segment.start)


def item_digest(model_type: str, placeholder: int, num_tokens: int, arrays: Arrays) -> bytes:
    """Digest of all that an encoder is given."""
    state = blake2b(digest_size=DIGEST_BYTES, person=ITEM_DOMAIN)
    whole = f"{model_type} {placeholder} {num_tokens}"
    for name, array in [(whole, np.empty(0)), *sorted(arrays.items())]:
        header = f"{name} {array.dtype.str} {array.shape};".encode()
        state.update(pack("<Q", len(header)) + header)
        state.update(np.ascontiguousarray(array).data)
    return state.digest()


def segment_digest(item: PreparedItem, offset: int, length: int) -> bytes:
    """Digest of a part of what a model sees of an item."""
    if length == item.num_tokens:
        return item.digest
    state = blake2b(item.digest, digest_size=DIGEST_BYTES, person=SEGMENT_DOMAIN)
    state.update(pack("<QQ", offset, length))
    return state.digest()
