"""What the recurrent parts of a model were given, so that they can go back a few tokens.

Recurrent state cannot be cut. Where a row keeps fewer tokens than a forward fed it, the state
before the forward is taken up again, and the parts of the model that write it run once more, over
as many tokens as are kept. What they were given stands already for every token, padding behind
them included, since no position depends on a later one; so attention, experts and output of the
model are not computed again.

mlx has no hooks. As with LoRA layers, a part's place in the model is taken by another one: of a
class that derives from its own, with its weights, its settings and its name.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from treadle_core.mlx_runtime.twins import twin


class RecordedCache(ArraysCache):
    """Recurrent state that is told which parts of a model write it.

    Attributes:
        calls: They, in order; None where nobody wants to know.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.calls: list[Call] | None = None


class Call:
    """A part of a model, and what it was given for ``num_tokens`` tokens of ``num_rows`` rows.

    Args:
        part: The part.
        args: Its arguments.
        options: Its arguments by name.
    """

    def __init__(
        self, part: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._part = part
        self._args = args
        self._options = options

    def again(
        self, state: RecordedCache, shape: tuple[int, int], rows: list[int], num: int
    ) -> None:
        """Let the part write ``state``, which belongs to ``rows``, for their first ``num`` tokens.

        Args:
            state: Before the first token; after the last one when this returns, lazily.
            shape: Rows and tokens of the forward.
            rows: Which of its rows.
            num: How many of its tokens.
        """
        index = mx.array(rows) if len(rows) < shape[0] else None

        def cut(value: Any) -> Any:
            if isinstance(value, RecordedCache):
                return state
            if not isinstance(value, mx.array) or value.shape[:1] != shape[:1]:
                return value
            if value.shape[:2] == shape:
                value = value[:, :num]
            return value if index is None else mx.take(value, index, axis=0)

        options = {name: cut(value) for name, value in self._options.items()}
        self._part(*map(cut, self._args), **options)


class Recorder:
    """What a part of a model becomes: it tells the state that it is given of itself."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As the part does, and noted where no part of it was noted for the same state."""
        forward: Callable[..., Any] = super().__call__  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
        calls = _calls((*args, *options.values()))
        if calls is None:
            return forward(*args, **options)
        known = len(calls)
        result = forward(*args, **options)
        if len(calls) == known:
            calls.append(Call(self, args, options))
        return result


def record_inputs(model: nn.Module) -> None:
    """Let every part of ``model`` that is given a cache be a recorder. Idempotent."""
    _replace_parts(model, {})


def _replace_parts(parts: Any, known: dict[int, tuple[Any, Any]]) -> None:
    """Replace those within a module, a list or a dict, from the innermost outwards."""
    found: list[tuple[Any, Any]] = list(
        enumerate(parts) if isinstance(parts, list) else parts.items()
    )
    for place, part in found:
        if id(part) in known:
            _, parts[place] = known[id(part)]
        elif isinstance(part, list | dict):
            _replace_parts(part, known)
            if _takes_cache(part):
                parts[place] = twin(part, Recorder)
                # Both are held: nothing else gets the id.
                known[id(part)] = part, parts[place]


def _takes_cache(part: Any) -> bool:
    """Whether it is a module that is called with a cache, and no recorder yet."""
    if isinstance(part, Recorder) or not isinstance(part, nn.Module):
        return False
    defined = (vars(kind).get("__call__") for kind in type(part).__mro__)
    forward = next((call for call in defined if call is not None), None)
    try:
        return forward is not None and "cache" in inspect.signature(forward).parameters
    except ValueError:
        return False


def _calls(values: Iterable[Any]) -> "list[Call] | None":
    for value in values:
        if isinstance(value, RecordedCache):
            return value.calls
    return None
