"""What every language model offers the pipeline: prompts, step-by-step decoding, and scores.

Sampling and scoring share one masking rule: a completion is its first ``length`` tokens, the end token included
when there is one; nothing else about padding, pad ids or end ids enters a probability.
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

Prompt = tuple[int, ...]
"""The token ids a context becomes."""


@dataclass(frozen=True)
class Rows:
    """Completions to score, one a row."""

    context: Tensor
    """``[row]``: which of the prompts the row continues."""
    tokens: Tensor
    """``[row, token]``: token ids; what stands beyond the row's length is ignored."""
    lengths: Tensor
    """``[row]``: tokens that count, at least 1, the end token among them."""

    @property
    def mask(self) -> Tensor:
        """``[row, token]``: true where a token counts."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]


@dataclass(frozen=True)
class TokenScores:
    """What a model says of :class:`Rows`, differentiable."""

    log_probs: Tensor
    """``[row, token]``: log π(token | prompt, tokens before it); 0 beyond the row's length."""
    hidden: Tensor
    """``[row, token, feature]``: the state each token was predicted from (a value head reads it)."""
    mask: Tensor
    """``[row, token]``: true where a token counts."""

    def log_prob(self) -> Tensor:
        """``[row]``: log π(x | c)."""
        return self.log_probs.sum(dim=1)


class Decoding(ABC):
    """Sequences under way, side by side: where each stands and how to go on."""

    hidden: Tensor
    """``[row, feature]``: the state that predicts each row's next token."""

    @abstractmethod
    def advance(self, tokens: Tensor) -> None:
        """Append one token to each row, ``[row]``."""

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, ``[kept]``."""


class LanguageModel(ABC):
    """A distribution over completions for each context."""

    module: nn.Module
    """Holds the parameters."""
    end_ids: frozenset[int]
    """Tokens that end a completion."""
    hidden_size: int
    """Features of the state a token is predicted from."""

    @abstractmethod
    def encode(self, contexts: Sequence[Context], max_length: int) -> list[Prompt]:
        """The prompts of some contexts; one that does not fit the model's window is refused by its row."""

    @abstractmethod
    def decode(self, prompt: Prompt, tokens: Sequence[int]) -> str:
        """The text of a completion, such that the prompt's text and it read on."""

    @abstractmethod
    def start(self, prompts: Sequence[Prompt], context: Tensor, max_length: int) -> Decoding:
        """Begin a row for each entry of ``context`` (an index of a prompt); each prompt is encoded once."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., feature]`` states to ``[..., vocabulary]`` unnormalised log-probabilities."""

    @abstractmethod
    def score(self, prompts: Sequence[Prompt], rows: Rows) -> TokenScores:
        """log π of given completions, token by token; each prompt is encoded once."""

    @abstractmethod
    def save(self, path: Path, config: CDPGConfig) -> None:
        """Write the model, tuned under these settings, to a folder."""

    @property
    def tokenizer(self) -> Any:
        """What Hugging Face calls the processing class; None for a model without one."""
        return None

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def exact_sampling(self) -> bool:
        """Whether log q recorded while sampling is as good as a re-scored one (not under reduced precision)."""
        return True

    def sampling(self, rows: int) -> AbstractContextManager[None]:
        """Within it nothing but sampling happens, ``rows`` rows side by side: the model may prepare for that."""
        return nullcontext()

    def as_base(self) -> AbstractContextManager[None]:
        """Within it the model is the base: adapters, if there are any, are off."""
        return nullcontext()
