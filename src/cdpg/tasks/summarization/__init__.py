"""The summarisation task."""
