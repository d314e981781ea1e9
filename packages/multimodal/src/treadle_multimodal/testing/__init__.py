"""Helpers for tests: tiny vision models with their processors, made without a network.

They need MLX and mlx-vlm: :mod:`treadle_multimodal.testing.zoo`.
"""
