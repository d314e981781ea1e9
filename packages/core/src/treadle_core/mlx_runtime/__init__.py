"""The one adapter to mlx and mlx-lm: loading, live KV, sampling, and the runner over them."""
