"""From a rendered prompt and decoded media to what the model takes, by mlx-vlm's own processor.

Blocking, for worker threads; nothing here stays on a device.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from struct import pack
from threading import Lock
from typing import Any, cast

import numpy as np
from mlx_vlm.utils import prepare_inputs
from numpy.typing import NDArray

from treadle_multimodal.errors import MediaError, UnsupportedMedia
from treadle_multimodal.families import Family, make_family
from treadle_multimodal.families.base import Placed
from treadle_multimodal.media import DIGEST_BYTES, DecodedAudio, DecodedImage, DecodedVideo, Media
from treadle_multimodal.prompt import Arrays, EncodedPrompt, PreparedItem, Segment
from treadle_multimodal.sources import Kind

# The numbers change with the encoding.
ITEM_DOMAIN = b"treadle.item.1"
SEGMENT_DOMAIN = b"treadle.seg.1"

TICKS_PER_SECOND = 1000
"""Frames are given to processors by number at this rate, so that any time can be told."""

Prepare = Callable[..., Mapping[str, Any]]


class Preprocessor:
    """Prepares the prompts of one checkpoint. May be used from any thread.

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
        # Tokenizers keep their padding options in themselves while they run.
        self._lock = Lock()

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
        own = getattr(self._processor, "chat_template", None)
        template = self._processor if own else self._processor.tokenizer
        options = {"add_generation_prompt": True, **options, "tokenize": False}
        return template.apply_chat_template(list(messages), **options)

    def encode(self, text: str, media: Sequence[Media]) -> EncodedPrompt:
        """A rendered prompt with its media, in the order of their markers.

        Raises:
            MediaError: They do not fit the prompt, or the processor does not take them.
        """
        kinds: list[Kind] = [kind_of(item) for item in media]
        self._check(text, kinds)
        made = self._process(text, media, kinds)
        tokens = made["input_ids"][0]
        items, placed = self._place(tokens, kinds, made)
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

    def _process(
        self, text: str, media: Sequence[Media], kinds: Sequence[Kind]
    ) -> dict[str, NDArray[Any]]:
        """What mlx-vlm makes of a prompt, as numpy arrays."""
        images = [item.image for item in media if isinstance(item, DecodedImage)]
        videos = [item for item in media if isinstance(item, DecodedVideo)]
        options: dict[str, Any] = {}
        if videos:
            options["videos"] = [np.stack(video.frames) for video in videos]
            options["video_metadata"] = [timing(video) for video in videos]
        prepare = cast(Prepare, prepare_inputs)
        with self._lock:
            try:
                made = prepare(
                    self._processor,
                    images=images or None,
                    prompts=text,
                    # A rendered chat brings its own.
                    add_special_tokens=False,
                    **options,
                )
            except ValueError as error:
                if not media:
                    raise
                shown = ", ".join(kinds)
                raise MediaError("media", shown, f"what the processor takes ({error})") from error
            # Copies: the arrays that mlx-vlm made must not outlive this thread's call.
            return {name: np.array(array) for name, array in made.items() if array is not None}

    def _place(
        self, tokens: NDArray[Any], kinds: Sequence[Kind], made: Arrays
    ) -> tuple[list[PreparedItem], list[Placed]]:
        """Items, and where they stand, in the order of the request."""
        items: list[PreparedItem] = []
        places: list[Placed] = []
        parts = {kind: iter(self._family.split(kind, made, tokens)) for kind in set(kinds)}
        free = {kind: self._free(kind, tokens) for kind in set(kinds)}
        known: dict[bytes, PreparedItem] = {}
        for kind in kinds:
            arrays = next(parts[kind])
            length = self._family.num_tokens(kind, arrays)
            where, free[kind] = free[kind][:length], free[kind][length:]
            assert len(where) == length, f"{self._model_type}: an item without placeholders"
            item = self._item(kind, arrays, length)
            item = known.setdefault(item.digest, item)
            items.append(item)
            places.append(Placed(item.arrays, where))
        assert not any(map(len, free.values())), f"{self._model_type}: placeholders without an item"
        return items, places

    def _free(self, kind: Kind, tokens: NDArray[Any]) -> NDArray[np.intp]:
        return np.flatnonzero(tokens == self._family.markers[kind].placeholder)

    def _item(self, kind: Kind, arrays: Arrays, length: int) -> PreparedItem:
        # Out of what was made of all items together, so that each can be let go.
        own = {name: np.array(array) for name, array in arrays.items()}
        for array in own.values():
            array.flags.writeable = False
        placeholder = self._family.markers[kind].placeholder
        digest = item_digest(self._model_type, placeholder, own)
        return PreparedItem(arrays=own, placeholder=placeholder, num_tokens=length, digest=digest)


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
        for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
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


def item_digest(model_type: str, placeholder: int, arrays: Arrays) -> bytes:
    """Digest of all that an encoder is given."""
    state = blake2b(digest_size=DIGEST_BYTES, person=ITEM_DOMAIN)
    for name, array in [(f"{model_type} {placeholder}", np.empty(0)), *sorted(arrays.items())]:
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
