"""Helpers for tests of the Treadle packages: tiny models and what they are compared with."""
