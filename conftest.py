"""Settings for the process, made before any test imports MLX."""

import os

import pytest

# Before anybody imports it: several packages' tests derive from its suites.
pytest.register_assert_rewrite("treadle_core.testing.contracts", "treadle_core.testing.drafting")

# On Linux's CPU backend each new compiled kernel runs a C++ compiler, for a second or two.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
