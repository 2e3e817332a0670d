"""Checks before a run: samples of the base, advice, and a forecast."""
