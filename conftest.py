"""Settings for the process, made before any test imports MLX."""

import os

# On Linux's CPU backend each new compiled kernel runs a C++ compiler, for a second or two.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
