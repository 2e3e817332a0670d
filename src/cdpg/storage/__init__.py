"""The files of a run: atomic, locked, and checked when read."""
