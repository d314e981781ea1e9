"""Steps of training: which sequences, what loss, which update; the same in every run."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from msgspec import Struct

from treadle_core.errors import Unsupported
from treadle_core.mlx_runtime.split import SplitModel
from treadle_speculative.mtp.fit.config import FitConfig, Targets
from treadle_speculative.mtp.fit.hidden import HiddenStates, Seen
from treadle_speculative.mtp.fit.passes import chain, num_guesses
from treadle_speculative.mtp.fit.vocabulary import rows_of, shortlist
from treadle_speculative.mtp.head import MtpHead

BETAS = (0.9, 0.95)
LAST_SHARE = 0.05
"""Of the highest learning rate, in the last step."""


class Step(Struct, frozen=True, kw_only=True):
    """What a step came to.

    Attributes:
        number: From 1.
        loss: Its mean cross entropy.
        agreement: Share of first guesses that are the model's own choice.
    """

    number: int
    loss: float
    agreement: float


class State(Struct, frozen=True):
    """Everything that later steps depend on: the number of steps, and arrays by name.

    The order of the sequences follows from seed and step, so there is no state of a random generator.
    """

    step: int
    arrays: dict[str, mx.array]


class Lesson(Struct, frozen=True, kw_only=True):
    """A sequence to learn from, with a part of the vocabulary.

    Attributes:
        tokens: ``[1, L]``.
        hidden: ``[1, L, hidden]``, the model's hidden states.
        places: ``[1, L]``, where the tokens stand in the shortlist.
        choices: ``[1, L]``, where the model's own choice behind each stands in it.
        weights: ``[N, hidden]``, rows of the output head for the shortlist, in float32.
        biases: ``[N]``; None where it has none.
    """

    tokens: mx.array
    hidden: mx.array
    places: mx.array
    choices: mx.array
    weights: mx.array
    biases: mx.array | None

    def logits(self, states: mx.array) -> mx.array:
        """Logits ``[1, n, N]`` of the shortlist."""
        found = states @ self.weights.T
        return found if self.biases is None else found + self.biases


def make_lesson(
    base: SplitModel, sequence: tuple[int, ...], seen: Seen, chosen: Sequence[int]
) -> Lesson:
    """A lesson on a sequence with the tokens ``chosen``, which has all of its own."""
    place = {token: number for number, token in enumerate(chosen)}
    choices: Any = seen.choices[0].tolist()
    weights, biases = rows_of(base, mx.array(list(chosen)))
    return Lesson(
        tokens=mx.array([sequence]),
        hidden=seen.hidden.astype(mx.float32),
        places=mx.array([[place[token] for token in sequence]]),
        choices=mx.array([[place[token] for token in choices]]),
        weights=weights.astype(mx.float32),
        biases=None if biases is None else biases.astype(mx.float32),
    )


class Trainer:
    """Fits a head, step by step.

    Attributes:
        head: The head.

    Args:
        head: The head, in float32.
        hidden: The model's hidden states.
        sequences: What to learn from, all of one length.
        config: How.
    """

    def __init__(
        self,
        head: MtpHead,
        hidden: HiddenStates,
        sequences: Sequence[tuple[int, ...]],
        config: FitConfig,
    ) -> None:
        self.head = head
        self._hidden = hidden
        self._sequences = sequences
        self._config = config
        self._per_epoch = math.ceil(len(sequences) / config.batch_size)
        self._optimizer = optim.Adam(learning_rate(config, self.num_steps), betas=list(BETAS))
        self._optimizer.init(head.trainable_parameters())
        self._gradient = nn.value_and_grad(head, loss_function(config.depth, config.targets))
        self._state = self._read_state(0)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self._per_epoch * self._config.epochs

    @property
    def state(self) -> State:
        """The state behind the last whole step."""
        return self._state

    def restore(self, state: State) -> None:
        """Go on from another trainer's state.

        Raises:
            Unsupported: Its arrays are not this one's.
        """
        mine, found = self._state.arrays, state.arrays
        if {n: (a.shape, a.dtype) for n, a in mine.items()} != {
            n: (a.shape, a.dtype) for n, a in found.items()
        }:
            raise Unsupported("the run that was kept has not the arrays of this head and optimiser")
        self.head.load_weights(list(part(found, "head.").items()))
        self._optimizer.state = tree_unflatten(list(part(found, "optimiser.").items()))
        self._state = state

    def step(self) -> Step:
        """Do one step."""
        number = self._state.step
        batch = self._batch(number)
        gradient: Any = None
        losses, agreed = list[float](), list[float]()
        # One after the other: the logits of a whole batch would take gigabytes.
        for place, sequence in enumerate(batch):
            lesson = self._lesson(sequence, random.Random(f"{self._config.seed} {number} {place}"))
            (loss, agreement), found = self._gradient(self.head, lesson)
            gradient = found if gradient is None else tree_map(mx.add, gradient, found)
            mx.eval(gradient, loss, agreement)
            losses.append(loss.item())
            agreed.append(agreement.item())
        gradient = tree_map(lambda array: array / len(batch), gradient)
        gradient, _ = optim.clip_grad_norm(gradient, self._config.clip_norm)
        self._optimizer.update(self.head, gradient)
        mx.eval(self.head.parameters(), self._optimizer.state)
        self._state = self._read_state(number + 1)
        return Step(
            number=number + 1,
            loss=math.fsum(losses) / len(batch),
            agreement=math.fsum(agreed) / len(batch),
        )

    def _lesson(self, sequence: tuple[int, ...], rng: random.Random) -> Lesson:
        seen, base = self._hidden.of(sequence), self.head.base
        choices: Any = seen.choices[0].tolist()
        own = {*sequence, *choices}
        return make_lesson(
            base, sequence, seen, shortlist(own, base.vocab_size, self._config.shortlist, rng)
        )

    def _batch(self, step: int) -> list[tuple[int, ...]]:
        epoch, place = divmod(step, self._per_epoch)
        order = list(range(len(self._sequences)))
        random.Random(f"{self._config.seed} {epoch}").shuffle(order)
        size = self._config.batch_size
        return [self._sequences[i] for i in order[place * size : (place + 1) * size]]

    def _read_state(self, step: int) -> State:
        trees: Any = {"head": self.head.parameters(), "optimiser": self._optimizer.state}
        return State(step, dict(tree_flatten(trees)))


def part(arrays: Mapping[str, mx.array], prefix: str) -> dict[str, mx.array]:
    """Those arrays whose names have a prefix, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def learning_rate(config: FitConfig, num_steps: int) -> Callable[[mx.array], mx.array]:
    """A straight rise, then half a cosine down."""
    rising = max(1, round(config.warm_up * num_steps))
    falling = max(1, num_steps - rising)
    highest = config.learning_rate
    return optim.join_schedules(
        [
            optim.linear_schedule(highest / rising, highest, max(1, rising - 1)),
            optim.cosine_decay(highest, falling, LAST_SHARE * highest),
        ],
        [rising],
    )


def loss_function(
    depth: int, targets: Targets
) -> Callable[[MtpHead, Lesson], tuple[mx.array, mx.array]]:
    """Loss of a head in a lesson, and the share of its first guesses that the model would accept."""

    def loss(head: MtpHead, lesson: Lesson) -> tuple[mx.array, mx.array]:
        length = lesson.tokens.shape[1]
        total, agreement = mx.array(0.0), mx.array(0.0)
        for step, states in enumerate(chain(head, lesson.tokens, lesson.hidden, depth)):
            count = num_guesses(length, step)
            logits = lesson.logits(states[:, :count])
            if targets == "soft":
                wanted = lesson.logits(lesson.hidden[:, 1 + step : 1 + step + count])
                total = total + soft_cross_entropy(logits, wanted)
            else:
                labels = lesson.places[:, 2 + step : 2 + step + count]
                total = total + mx.mean(nn.losses.cross_entropy(logits, labels))
            if step == 0:
                same = mx.argmax(logits, axis=-1) == lesson.choices[:, 1 : 1 + count]
                agreement = mx.mean(same.astype(mx.float32))
        return total / depth, agreement

    return loss


def soft_cross_entropy(logits: mx.array, wanted: mx.array) -> mx.array:
    """Mean cross entropy of logits ``[B, N, tokens]`` against the distributions of others.

    Their entropy, which nothing changes, is left in.
    """
    told = mx.softmax(mx.stop_gradient(wanted), axis=-1)
    return mx.mean(mx.logsumexp(logits, axis=-1) - mx.sum(told * logits, axis=-1))
