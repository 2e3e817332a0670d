"""A language model small enough to enumerate: one row of logits for each context and prefix.

Every expectation of the method can be computed exactly on it. The tests and the worked example in the documentation use
it. Its parameters are float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cdpg.config import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.models.base import Decoding, LanguageModel, PromptTokens, Rows, TokenScores

END = 0
"""The end token of every tabular model."""


class TabularModel(LanguageModel):
    """π(token | context, prefix) as a table; contexts are the texts of ``contexts``, tokens those of ``symbols``."""

    end_ids = frozenset({END})

    def __init__(self, contexts: Sequence[str], symbols: Sequence[str], max_length: int, seed: int = 0) -> None:
        self.contexts = tuple(contexts)
        self.symbols = ("", *symbols)  # the end token has no text
        self.max_length = max_length
        prefixes = sum(len(symbols) ** length for length in range(max_length))
        generator = torch.Generator().manual_seed(seed)
        shape = (len(contexts), prefixes, len(self.symbols))
        # [context, prefix, token]
        self.table = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        self.module = nn.ParameterDict({"table": self.table})
        self.hidden_size = len(self.symbols)

    def encode(self, contexts: Sequence[Context], max_length: int) -> list[PromptTokens]:
        for context in contexts:
            if context.prompt not in self.contexts:
                raise UserError(f"row {context.row}: {context.prompt!r} is not one of {', '.join(self.contexts)}")
        return [(self.contexts.index(str(context.prompt)),) for context in contexts]

    def decode(self, prompt: PromptTokens, tokens: Sequence[int]) -> str:
        return "".join(self.symbols[token] for token in tokens)

    def start(self, prompts: Sequence[PromptTokens], context: Tensor, max_length: int) -> Decoding:
        if max_length > self.max_length:
            raise UserError(f"max_completion_length is {max_length}, but this table ends at {self.max_length}")
        return _TabularDecoding(self, torch.tensor([prompts[i][0] for i in context.tolist()]))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def score(self, prompts: Sequence[PromptTokens], rows: Rows) -> TokenScores:
        context = torch.tensor([prompts[i][0] for i in rows.context.tolist()])
        prefix = torch.zeros_like(rows.tokens)
        for position in range(1, rows.tokens.shape[1]):
            prefix[:, position] = self.next_prefix(prefix[:, position - 1], rows.tokens[:, position - 1])
        mask = rows.mask
        row = context[:, None] * self.table.shape[1] + torch.where(mask, prefix, 0)
        hidden = nn.functional.embedding(row, self.table.flatten(0, 1))
        log_probs = hidden.log_softmax(dim=-1).gather(2, rows.tokens[..., None] * mask[..., None])[..., 0]
        return TokenScores(log_probs=log_probs.where(mask, torch.zeros_like(log_probs)), hidden=hidden, mask=mask)

    def save(self, path: Path, config: CDPGConfig) -> None:
        path.mkdir(parents=True, exist_ok=True)
        save_file({"table": self.table.detach()}, path / "model.safetensors")

    def next_prefix(self, prefix: Tensor, token: Tensor) -> Tensor:
        """Prefixes are numbered breadth first: the children of prefix ``p`` are ``p·V + 1 … p·V + V``."""
        return prefix * (len(self.symbols) - 1) + token

    def outcomes(self) -> list[tuple[int, ...]]:
        """All sequences, with the end token unless they are cut; in each context their probabilities sum to 1."""
        letters = range(1, len(self.symbols))
        ended = [(*word, END) for length in range(self.max_length) for word in product(letters, repeat=length)]
        return [*ended, *product(letters, repeat=self.max_length)]

    def log_prob_table(self) -> Tensor:
        """``[context, outcome]``: log π of every outcome, differentiable."""
        outcomes = self.outcomes()
        count, width = len(self.contexts), self.max_length
        tokens = torch.tensor([[*outcome, *[END] * (width - len(outcome))] for outcome in outcomes])
        rows = Rows(
            context=torch.arange(count).repeat_interleave(len(outcomes)),
            tokens=tokens.repeat(count, 1),
            lengths=torch.tensor([len(outcome) for outcome in outcomes]).repeat(count),
        )
        return self.score([(i,) for i in range(count)], rows).log_prob().view(count, -1)


class _TabularDecoding(Decoding):
    def __init__(self, model: TabularModel, context: Tensor) -> None:
        self.model, self.context = model, context
        self.prefix = torch.zeros_like(context)
        self.hidden = model.table[context, self.prefix]

    def advance(self, tokens: Tensor) -> None:
        self.prefix = self.model.next_prefix(self.prefix, tokens)
        self.hidden = self.model.table[self.context, self.prefix]

    def keep(self, rows: Tensor) -> None:
        self.context, self.prefix, self.hidden = self.context[rows], self.prefix[rows], self.hidden[rows]
