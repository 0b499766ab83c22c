"""Attacks on a finished run: what its privacy is worth, measured."""
