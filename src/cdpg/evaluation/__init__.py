"""Evaluation of models on held-out contexts: metrics with intervals."""
