"""The adapter to mlx-vlm: its processors, its models, and their vision features."""
