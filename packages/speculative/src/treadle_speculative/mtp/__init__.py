"""Heads for multi-token prediction: made, saved and loaded."""
