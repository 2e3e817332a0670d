"""Rollouts: an epoch's samples with verdicts and scores."""
