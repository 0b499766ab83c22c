"""Rank held-out items, turn ranks into metrics, and say which differences are real."""
