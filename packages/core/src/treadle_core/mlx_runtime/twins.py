"""A module of a loaded model, of a class that does something besides."""

from functools import cache
from typing import Any

import mlx.nn as nn


def twin(module: Any, mixin: type[Any]) -> Any:
    """The same module with the same arrays and settings, and ``mixin`` before its class.

    The class keeps its name: a model's fingerprint is that of the model as it was loaded.
    """
    made: Any = nn.Module.__new__(_mixed(mixin, type(module)))
    dict.update(made, module)
    vars(made).update(vars(module))
    return made


@cache
def _mixed(mixin: type[Any], kind: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (mixin, kind), names)
