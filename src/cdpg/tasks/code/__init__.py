"""The code tasks."""
