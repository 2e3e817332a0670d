"""The chat task: a record as JSON."""
