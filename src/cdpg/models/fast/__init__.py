"""Faster sampling: shared caches and packed weights, with the public operators as a fallback."""
