"""The translation task."""
