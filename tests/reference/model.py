"""A language model that is a table, with its gradient written out by hand.

The state that predicts the next token is the sum of two vectors, one for the token before it and one for its position;
the distribution is the softmax of a linear map of the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Parameters = dict[str, Array]
"""``tokens`` and ``positions`` ``[·, feature]``, ``head`` ``[token, feature]``; PPO adds ``value`` and ``bias``."""

LETTERS = "abcd"
END = 0
"""The end token; the letters are the tokens 1 to 4."""


@dataclass(frozen=True)
class Context:
    """A prompt with what the constraint is told beside it."""

    prompt: str
    columns: Mapping[str, Any]
    row: int

    @property
    def tokens(self) -> list[int]:
        return [1 + LETTERS.index(letter) for letter in self.prompt.split()]


@dataclass(frozen=True)
class Sequences:
    """Completions of prompts; arrays are ``[row, token]``."""

    before: Array
    """The token before each token: the prompt's last one, then the completion's own."""
    place: Array
    """The position of that token, from 0 at the prompt's start."""
    tokens: Array
    counts: Array
    """True where there is a token."""

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Sequences:
        width = max(map(len, completions))
        tokens = np.array([[*x, *[END] * (width - len(x))] for x in completions])
        last = np.array([prompt[-1] for prompt in prompts])
        first_place = np.array([len(prompt) - 1 for prompt in prompts])
        before = np.concatenate([last[:, None], tokens[:, :-1]], axis=1)
        counts = np.arange(width) < np.array([len(x) for x in completions])[:, None]
        return cls(before, first_place[:, None] + np.arange(width), tokens, counts)

    def rows(self, index: Sequence[int]) -> Sequences:
        return Sequences(self.before[index], self.place[index], self.tokens[index], self.counts[index])


def states(parameters: Parameters, x: Sequences) -> Array:
    """``[row, token, feature]``: what each token is predicted from."""
    return parameters["tokens"][x.before] + parameters["positions"][x.place]


def distribution(parameters: Parameters, state: Array) -> Array:
    """softmax(head · state)."""
    logits = state @ parameters["head"].T
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(odds / odds.sum(axis=-1, keepdims=True))


def token_log_probs(parameters: Parameters, x: Sequences) -> Array:
    """``[row, token]``: log π of each token; 0 where there is none."""
    chosen = np.take_along_axis(distribution(parameters, states(parameters, x)), x.tokens[..., None], axis=2)
    return np.where(x.counts, np.log(chosen[..., 0]), 0.0)


def backward(parameters: Parameters, x: Sequences, d_log_prob: Array, d_value: Array | None = None) -> Parameters:
    """The gradient of a loss from its derivatives by the tokens' log-probabilities and values, ``[row, token]``.

    ∂ log softmax(l)[t] / ∂l = onehot(t) − softmax(l), l = head · h, V = value · h + bias, h = tokens[·] + positions[·].
    """
    state = states(parameters, x)
    onehot = np.eye(len(parameters["head"]))[x.tokens]
    d_logits = (d_log_prob * x.counts)[..., None] * (onehot - distribution(parameters, state))
    d_state = d_logits @ parameters["head"]
    gradient = {name: np.zeros_like(values) for name, values in parameters.items()}
    gradient["head"] = np.einsum("rtv,rtf->vf", d_logits, state)
    if d_value is not None:
        d_value = d_value * x.counts
        d_state = d_state + d_value[..., None] * parameters["value"]
        gradient["value"], gradient["bias"] = np.einsum("rt,rtf->f", d_value, state), d_value.sum(keepdims=True)[0]
    np.add.at(gradient["tokens"], x.before, d_state)
    np.add.at(gradient["positions"], x.place, d_state)
    return gradient
