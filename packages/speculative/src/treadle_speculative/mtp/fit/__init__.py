"""Fitting a head to a model that has none: what ``treadle mtp fit`` does."""
