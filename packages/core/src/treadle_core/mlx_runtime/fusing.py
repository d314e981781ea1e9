"""Two forwards of one model that share every product with a weight.

A step with a prompt chunk beside decoding rows is two forwards, and each reads all weights. Most of
what a forward does looks at one token at a time, so both can go through a layer's weights at once;
only attention is each one's own. That is what systems with kernels for it do with a packed batch
(Agrawal et al. 2023, "SARATHI: Efficient LLM inference by piggybacking decodes with chunked
prefills"). Models of mlx-lm take a batch of rows of one length, so here each forward runs as the model
wrote it, in a coroutine of its own, and the two meet at each linear layer: it is called once, with the
tokens of both.

Whatever a model does, the results are right. The one that is ahead (the chunk) never falls
behind the other: what the other reads of the live KV, the first has written. Where the two do not
arrive at the same layer, each calls its own.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from greenlet import getcurrent, greenlet
from mlx.utils import tree_flatten, tree_unflatten

from treadle_core.mlx_runtime.twins import twin

Forward = Callable[[], Any]

MEETING_PLACES = (nn.Linear, nn.QuantizedLinear)
WRITTEN = object()
"""Where forwards stop once they have written the live KV of a layer."""


def prepare(model: nn.Module) -> bool:
    """Let forwards of ``model`` meet at its linear layers; whether it has any.

    Alone, a forward runs as before. Preparing a model again changes nothing.

    The output head is left out: nobody wants the logits of a chunk. So is the last layer, of whose
    work for a chunk the keys and values alone are ever evaluated.
    """
    places = [(name, _meeting(module)) for name, module in _places(model)]
    if places:
        model.update_modules(tree_unflatten(places))
    return bool(places)


def wait_for_other_writes() -> None:
    """Let the other forward, if there is one, write its live KV too before either reads it.

    A buffer that is written while a view of it waits to be used would have to be copied.
    """
    forward = getcurrent()
    if isinstance(forward, _Runner):
        forward.stop_at(WRITTEN)


def run_together(first: Forward, second: Forward) -> tuple[Any, Any]:
    """The results of two forwards, which meet wherever both can.

    Args:
        first: Is ahead of the other all the time.
        second: May read what the first writes in the same layer.

    Raises:
        Exception: What either raised; the other is given up.
    """
    ahead, behind = _Runner(first), _Runner(second)
    try:
        ahead.go_on()
        behind.go_on()
        while not (ahead.dead and behind.dead):
            if not behind.dead and ahead.place is behind.place:
                _share(ahead, behind)
            elif not ahead.dead:
                ahead.go_on(ahead.alone())
            else:
                behind.go_on(behind.alone())
    finally:
        ahead.give_up()
        behind.give_up()
    return ahead.result, behind.result


class _Runner(greenlet):
    """A forward that stops at each place where it may meet another."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(forward)
        self.place: Any = None
        self.tokens: Any = None
        self.result: Any = None

    def go_on(self, output: Any = None) -> None:
        """Run up to the next place, or to the end."""
        self.place = self.tokens = None
        self.result = self.switch() if output is None else self.switch(output)

    def stop_at(self, place: Any, tokens: Any = None) -> Any:
        """Called inside: wait at ``place``, for what it makes of ``tokens`` if there are any."""
        self.place, self.tokens = place, tokens
        assert self.parent is not None
        return self.parent.switch()

    def alone(self) -> Any:
        """What the place makes of these tokens."""
        return None if self.tokens is None else self.place.compute(self.tokens)

    def give_up(self) -> None:
        """End it where it is, if it has not ended."""
        if self and not self.dead:
            self.throw()


class _Meeting(nn.Module):
    """Mixed into the class of a layer that looks at each token alone."""

    def __call__(self, x: mx.array) -> mx.array:
        """As the layer does it, or together with whoever arrives here too."""
        forward = getcurrent()
        return forward.stop_at(self, x) if isinstance(forward, _Runner) else self.compute(x)

    def compute(self, x: mx.array) -> mx.array:
        """The layer itself."""
        return super().__call__(x)  # pyright: ignore[reportUnknownVariableType, reportAttributeAccessIssue, reportUnknownMemberType]


def _share(ahead: _Runner, behind: _Runner) -> None:
    """One call of the layer where both are."""
    if ahead.tokens is None:
        ahead.go_on()
        behind.go_on()
        return
    shapes = [runner.tokens.shape for runner in (ahead, behind)]
    rows = [runner.tokens.reshape(-1, runner.tokens.shape[-1]) for runner in (ahead, behind)]
    both = ahead.place.compute(mx.concatenate(rows))
    for runner, shape, part in zip(
        (ahead, behind), shapes, mx.split(both, [len(rows[0])]), strict=True
    ):
        runner.go_on(part.reshape(*shape[:-1], -1))


def _places(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Linear layers by their path in ``model``."""
    layers: Any = getattr(model, "layers", None)
    if not isinstance(layers, list) or len(layers) < 2:  # pyright: ignore[reportUnknownArgumentType]
        return []
    inside = {
        id(module)
        for layer in layers[:-1]  # pyright: ignore[reportUnknownVariableType]
        for _, module in layer.named_modules()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    }
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    return [
        (name, leaf)
        for name, leaf in leaves
        if id(leaf) in inside and (isinstance(leaf, _Meeting) or type(leaf) in MEETING_PLACES)
    ]


def _meeting(module: nn.Module) -> nn.Module:
    """The same layer, of a class that meets."""
    return module if isinstance(module, _Meeting) else twin(module, _Meeting)
