"""The interface of a language model: prompts, step-by-step decoding, and scores.

Sampling and scoring share one masking rule: a completion is its first ``length`` tokens, the end token included if
there is one. Padding, pad ids and end ids affect a probability in no other way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdpg.config import CDPGConfig
from cdpg.contexts.contexts import Context

PromptTokens = tuple[int, ...]
"""The token ids of a context."""


@dataclass(frozen=True)
class Rows:
    """Completions to score, one a row."""

    context: Tensor
    """``[row]``: index of the prompt that the row continues."""
    tokens: Tensor
    """``[row, token]``: token ids; those beyond the row's length are ignored."""
    lengths: Tensor
    """``[row]``: number of tokens, at least 1, the end token included."""

    @property
    def mask(self) -> Tensor:
        """``[row, token]``: true for tokens within the row's length."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]


@dataclass(frozen=True)
class TokenScores:
    """A model's scores of :class:`Rows`, differentiable."""

    log_probs: Tensor
    """``[row, token]``: log π(token | prompt, tokens before it); 0 beyond the row's length."""
    hidden: Tensor
    """``[row, token, feature]``: the hidden state that predicts each token (a value head reads it)."""
    mask: Tensor
    """``[row, token]``: true for tokens within the row's length."""

    def log_prob(self) -> Tensor:
        """``[row]``: log π(x | c)."""
        return self.log_probs.sum(dim=1)


class Decoding(ABC):
    """A batch of sequences during decoding."""

    hidden: Tensor
    """``[row, feature]``: the hidden state that predicts each row's next token."""
    joins = False
    """Whether :meth:`LanguageModel.advance` runs several such batches as one, so that rows may begin while others
    continue."""

    @abstractmethod
    def advance(self, tokens: Tensor) -> None:
        """Append one token to each row, ``[row]``."""

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, ``[kept]``."""


class LanguageModel(ABC):
    """A distribution over completions for each context."""

    module: nn.Module
    """Holds the parameters."""
    end_ids: frozenset[int]
    """Tokens that end a completion."""
    hidden_size: int
    """Features of a hidden state."""

    @abstractmethod
    def encode(self, contexts: Sequence[Context], max_length: int) -> list[PromptTokens]:
        """The prompts of some contexts; one that exceeds the model's window is refused, with its row."""

    @abstractmethod
    def decode(self, prompt: PromptTokens, tokens: Sequence[int]) -> str:
        """The text of a completion, as it continues the prompt's text."""

    @abstractmethod
    def start(self, prompts: Sequence[PromptTokens], context: Tensor, max_length: int) -> Decoding:
        """Start a row for each entry of ``context`` (an index of a prompt); each prompt is encoded once."""

    def advance(self, decodings: Sequence[Decoding], tokens: Sequence[Tensor]) -> None:
        """Append one token to each row of some batches that were started by :meth:`start`."""
        for decoding, part in zip(decodings, tokens, strict=True):
            decoding.advance(part)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., feature]`` hidden states to ``[..., vocabulary]`` logits."""

    @abstractmethod
    def score(self, prompts: Sequence[PromptTokens], rows: Rows) -> TokenScores:
        """log π of given completions, token by token; each prompt is encoded once."""

    @abstractmethod
    def save(self, path: Path, config: CDPGConfig) -> None:
        """Write the model, tuned under these settings, to a folder."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer (Hugging Face's processing class); None for a model without one."""
        return None

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def exact_sampling(self) -> bool:
        """Whether log q recorded while sampling equals a re-scored one (not under reduced precision)."""
        return True

    def sampling(self, rows: int) -> AbstractContextManager[None]:
        """Context for sampling ``rows`` rows side by side; the model may prepare its weights for it."""
        return nullcontext()

    def remembering_prompts(self) -> AbstractContextManager[None]:
        """Context in which prompts that are started again need not be encoded again; the weights do not change."""
        return nullcontext()

    def in_step(self) -> AbstractContextManager[None]:
        """Context in which processes run the model different numbers of times; all of them enter and leave it."""
        return nullcontext()

    def gradient_passes(self, passes: int) -> AbstractContextManager[None]:
        """Context in which this process differentiates ``passes`` scores; all processes enter and leave it."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss that was computed from one :meth:`score`."""
        loss.backward()

    def gathered(self, keep: bool) -> LanguageModel | None:
        """The model with whole weights, to save it; all processes call it, and get it if ``keep`` is set."""
        return self if keep else None

    def as_base(self) -> AbstractContextManager[None]:
        """Context in which the model is the base: its adapters, if any, are off."""
        return nullcontext()
