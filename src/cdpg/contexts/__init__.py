"""Contexts: reading, checking, splitting and the order of drawing."""
