"""What of a prompt's media is encoded, when, and for how long it is kept."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from treadle_multimodal.features import FeatureCache
from treadle_multimodal.prompt import Arrays, EncodedPrompt, PreparedItem
from treadle_multimodal.vlm.encoders import Call, Encoder

AHEAD_TOKENS = 2048
"""Items that begin this far behind the next token are not encoded yet: what is made is held."""

NEWEST = 0.3
CLEAR_AFTER_TOKENS = 512


class Features:
    """What the encoder makes of one item.

    Args:
        embeddings: In place of its placeholders' embeddings, ``[tokens, hidden]``.
        deepstack: What is added to the hidden states behind the first layers, ``[tokens, hidden]``
            each; empty where a model has none.
    """

    def __init__(self, embeddings: mx.array, deepstack: tuple[mx.array, ...]) -> None:
        self.embeddings = embeddings
        self.deepstack = deepstack
        self.nbytes: int = sum(array.nbytes for array in (embeddings, *deepstack))

    def arrays(self) -> list[mx.array]:
        """All of it."""
        return [self.embeddings, *self.deepstack]

    def part(self, start: int, stop: int) -> "Features":
        """Those of some of its tokens, as a copy: a slice would keep all of them in memory."""
        chosen = mx.arange(start, stop)
        deepstack = tuple(mx.take(layer, chosen, axis=0) for layer in self.deepstack)
        return Features(mx.take(self.embeddings, chosen, axis=0), deepstack)


def joined(parts: Sequence[Features]) -> Features:
    """Those of an item from those of its parts."""
    if len(parts) == 1:
        return parts[0]
    layers = zip(*(part.arrays() for part in parts), strict=True)
    embeddings, *deepstack = (mx.concatenate(list(layer)) for layer in layers)
    return Features(embeddings, tuple(deepstack))


class Part:
    """A part of an item that is encoded apart from the rest.

    Args:
        item: Which item.
        arrays: What the encoder is given.
        num_tokens: How many placeholders it has.
    """

    def __init__(self, item: PreparedItem, arrays: Arrays, num_tokens: int) -> None:
        self.item = item
        self.arrays = arrays
        self.num_tokens = num_tokens
        self.size = sum(array.size for array in arrays.values())


class Job:
    """Items on their way through the encoder.

    Args:
        items: Distinct, and such that they can be joined.
        encoder: Encodes them.

    Attributes:
        call_size: How many numbers the call under way, or the last one, was given.
        call_seconds: What it has taken.
    """

    def __init__(self, items: Sequence[PreparedItem], encoder: Encoder) -> None:
        self.items = tuple(items)
        self.call_size = 0
        self.call_seconds = 0.0
        self._encoder = encoder
        self._waiting = deque(part for item in items for part in parts_of(item, encoder))
        self._made: dict[bytes, list[Features]] = {item.digest: [] for item in items}
        self._call: Call | None = None
        self._called: list[Part] = []

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to compute."""
        return self._call is None and not self._waiting

    def advance(self, most: float) -> bool:
        """Compute the next piece.

        Args:
            most: Size of the parts that a new call may have together; it has one at least.

        Returns:
            Whether a call ended with it.
        """
        if self._call is None:
            self._call = self._next_call(most)
        if not self._call.advance():
            return False
        self._take(self._call)
        self._call = None
        return True

    def features(self) -> Iterator[tuple[bytes, Features]]:
        """Those of its items by their digests, when it is done."""
        for digest, parts in self._made.items():
            whole = joined(parts)
            mx.eval(whole.arrays())
            yield digest, whole

    def _next_call(self, most: float) -> Call:
        first = self._waiting.popleft()
        self._called, self.call_size = [first], first.size
        while self._waiting and self._fits(self._waiting[0], most):
            part = self._waiting.popleft()
            self._called.append(part)
            self.call_size += part.size
        num_tokens = sum(part.num_tokens for part in self._called)
        arrays = [part.arrays for part in self._called]
        return self._encoder.call(first.item.placeholder, num_tokens, arrays)

    def _fits(self, part: Part, most: float) -> bool:
        """Whether a part can be added to the call."""
        first = self._called[0]
        return self.call_size + part.size <= most and self._encoder.may_join(
            first.arrays, part.arrays
        )

    def _take(self, call: Call) -> None:
        whole, start = Features(*call.outputs), 0
        for part in self._called:
            stop = start + part.num_tokens
            alone = whole if len(self._called) == 1 else whole.part(start, stop)
            self._made[part.item.digest].append(alone)
            start = stop


def parts_of(item: PreparedItem, encoder: Encoder) -> list[Part]:
    """An item as it can be encoded; its parts have as many tokens each."""
    parts = encoder.parts(item.arrays)
    return [Part(item, arrays, item.num_tokens // len(parts)) for arrays in parts]


class MediaEncoder:
    """Encodes items ahead of the chunks that show them; see :class:`treadle_core.ports.Encoder`.

    Where the time is short, what is begun goes on when it is asked for again. What was made is held
    until the chunk that shows the end of it, and kept in a cache beyond.

    Args:
        encoder: The model's.
        cache: For later prompts.
        now: Seconds since some fixed moment.
    """

    def __init__(
        self,
        encoder: Encoder,
        cache: FeatureCache[Features],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._encoder = encoder
        self._cache = cache
        self._now = now
        self._jobs: dict[bytes, Job] = {}
        self._held: dict[bytes, Features] = {}
        self._speed = 0.0

    def ready(self, prompt: EncodedPrompt, start: int, stop: int) -> int:
        """How far a prompt can be computed with what is there."""
        for segment in prompt.segments:
            if segment.end > start and not self._has(prompt.items[segment.item]):
                return min(max(segment.start, start), stop)
        return stop

    def encode(self, prompt: EncodedPrompt, start: int, seconds: float) -> None:
        """Work on what a position needs, and the positions behind it: one piece at least."""
        end, longest = self._now() + seconds, 0.0
        while items := self._missing(prompt, start):
            job = self._jobs.get(items[0].digest) or self._begin(items, seconds)
            while not job.is_done:
                if longest and self._now() + longest > end:
                    return
                longest = max(longest, self._piece(job, seconds))
            self._end(job)

    def take(self, item: PreparedItem) -> Features:
        """Those of an item for a chunk that shows it: made before, or now."""
        found = self._held.get(item.digest) or self._cache.get(item.digest)
        if found is None:
            job = self._jobs.pop(item.digest, None) or Job([item], self._encoder)
            while not job.is_done:
                job.advance(0)
            made = dict(job.features())
            for digest, features in made.items():
                self._cache.put(digest, features)
            found = made[item.digest]
        return found

    def shown(self, prompt: EncodedPrompt, stop: int) -> None:
        """A chunk ends at a position: what no position behind it needs is not held any more."""
        if self._held:
            needed = {prompt.items[part.item].digest for part in prompt.segments if part.end > stop}
            for item in prompt.items:
                if item.digest not in needed:
                    self._held.pop(item.digest, None)

    def release(self, prompt: EncodedPrompt) -> None:
        """A prompt's row is gone."""
        for item in prompt.items:
            self._held.pop(item.digest, None)
            self._jobs.pop(item.digest, None)

    def reset(self) -> None:
        """Drop what is being encoded, and what is held."""
        self._jobs.clear()
        self._held.clear()

    def _has(self, item: PreparedItem) -> bool:
        return item.digest in self._held or item.digest in self._cache

    def _missing(self, prompt: EncodedPrompt, start: int) -> list[PreparedItem]:
        """Distinct items that a prompt shows soon, in their order, and that are not there."""
        soon = (p for p in prompt.segments if start < p.end and p.start < start + AHEAD_TOKENS)
        items = (prompt.items[segment.item] for segment in soon)
        return list({item.digest: item for item in items if not self._has(item)}.values())

    def _begin(self, items: Sequence[PreparedItem], seconds: float) -> Job:
        """A job for the first of some items, and for others that fit into its call."""
        chosen, most = [items[0]], self._fitting(seconds) - _size(items[0])
        for item in items[1:]:
            if not self._encoder.may_join(items[0].arrays, item.arrays) or _size(item) > most:
                break
            most -= _size(item)
            chosen.append(item)
        for item in chosen:
            self._cache.get(item.digest)  # counted: it is not there
        job = self._jobs[items[0].digest] = Job(chosen, self._encoder)
        return job

    def _piece(self, job: Job, seconds: float) -> float:
        """Do the next piece of a job, and return what it took."""
        before = self._now()
        ended = job.advance(self._fitting(seconds))
        took = self._now() - before
        job.call_seconds += took
        if ended:
            self._learn(job.call_seconds / job.call_size)
            job.call_seconds = 0.0
        return took

    def _learn(self, speed: float) -> None:
        """Seconds that a call took for each number that it was given."""
        weight = NEWEST if self._speed else 1.0
        self._speed += weight * (speed - self._speed)

    def _fitting(self, seconds: float) -> float:
        """How much a call of so many seconds may be given."""
        return seconds / self._speed if self._speed else 0.0

    def _end(self, job: Job) -> None:
        del self._jobs[job.items[0].digest]
        for digest, features in job.features():
            self._held[digest] = features
            self._cache.put(digest, features)
        if sum(item.num_tokens for item in job.items) >= CLEAR_AFTER_TOKENS:
            # The intermediates of an encoder are larger than what comes after them.
            mx.clear_cache()


def _size(item: PreparedItem) -> int:
    return sum(array.size for array in item.arrays.values())
