"""vLLM as the sampler: it draws whole completions, which are cut here.

It samples at temperature 1 from the whole vocabulary, and the log-probabilities that it reports are q: the weights of
the samples are then right whatever kernels it uses. It knows only end tokens. The stop rule and pruning are applied to
the tokens that it returns, one at a time as in :mod:`cdpg.models.sampling`, and a completion is cut where they would
have ended it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cdpg.errors import RunError
from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Chunk, GrowingRows, Prune, StopRule

SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""vLLM's settings for its whole distribution. All are given: a server may have others as its defaults."""

_ROUNDING = 1e-3
"""How far above 0 a log-probability may be."""


@dataclass(frozen=True)
class Wanted:
    """Completions of one prompt."""

    prompt: PromptTokens
    count: int
    max_tokens: int
    seed: int
    """Seed of the first completion; the next ones have the following numbers."""
    end_ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """What vLLM has drawn."""

    tokens: tuple[int, ...]
    """The end token included."""
    log_probs: tuple[float, ...]


class Connection(Protocol):
    """A connection to vLLM."""

    def complete(self, wanted: Sequence[Wanted]) -> Iterator[list[Completion]]:
        """The completions of each prompt, in the order of the prompts; it may work on all at the same time."""

    def load(self, folder: str, version: str) -> None:
        """Load the weights of a model's folder and clear the cache of prompts."""

    def version(self) -> str | None:
        """The version of the weights that it has, as given to :meth:`load`; None if it cannot say."""

    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True)
class VLLMEngine:
    """Samples of a vLLM, cut and read as those of the model itself."""

    connection: Connection
    model: LanguageModel
    """Has the tokens: it decodes, and knows the end tokens."""
    vocabulary: int

    def sample_chunks(
        self,
        prompts: Sequence[PromptTokens],
        samples_per_context: int,
        max_length: int,
        uniforms: UniformStream,
        rows_per_pass: int,
        stop: StopRule | None = None,
        first_slot: int = 0,
        prune: Prune | None = None,
    ) -> Iterator[Chunk]:
        """See :class:`~cdpg.models.sampling.Engine`. A chunk is the completions of one prompt."""
        ends = tuple(sorted(self.model.end_ids))
        wanted = [
            Wanted(prompt, samples_per_context, max_length, uniforms.seed_of(first_slot + slot), ends)
            for slot, prompt in enumerate(prompts)
        ]
        for slot, drawn in enumerate(self.connection.complete(wanted)):
            self._refuse_wrong(drawn, wanted[slot])
            rows = np.arange(slot * samples_per_context, (slot + 1) * samples_per_context)
            pruning = None if prune is None else prune(rows.tolist())
            context = np.zeros(samples_per_context, dtype=np.int64)
            growing = GrowingRows(self.model, [prompts[slot]], context, stop, pruning)
            for position in range(max_length):
                alive = [drawn[row] for row in growing.alive.tolist()]
                going_on = growing.add(
                    [one.tokens[position] for one in alive],
                    [one.log_probs[position] for one in alive],
                    last=position + 1 == max_length,
                )
                if not going_on:
                    break
                growing.alive = growing.alive[going_on]
            yield growing.chunk(rows)

    def _refuse_wrong(self, drawn: Sequence[Completion], wanted: Wanted) -> None:
        """Refuse an answer that is not what was asked for: its probabilities would not be q."""
        if len(drawn) != wanted.count:
            raise RunError(f"the engine gave {len(drawn)} completions of a prompt, and {wanted.count} were asked for")
        for one in drawn:
            problem = _problem(one, wanted, self.vocabulary)
            if problem is not None:
                raise RunError(f"the engine's answer cannot be used: {problem}")


def _problem(one: Completion, wanted: Wanted, vocabulary: int) -> str | None:
    """What is wrong with a completion, and what to do; None if nothing is."""
    if not one.tokens or len(one.tokens) != len(one.log_probs) or len(one.tokens) > wanted.max_tokens:
        return f"{len(one.tokens)} tokens with {len(one.log_probs)} log-probabilities, of at most {wanted.max_tokens}"
    if not all(0 <= token < vocabulary for token in one.tokens):
        return (
            f"token {max(one.tokens):,} is not one of the model's {vocabulary:,} tokens: let it serve the model "
            "that is tuned"
        )
    if not all(math.isfinite(value) and value <= _ROUNDING for value in one.log_probs):
        return "it has numbers that are not log-probabilities: start it without --logprobs-mode"
    ended = one.tokens[-1] in wanted.end_ids
    if not ended and len(one.tokens) < wanted.max_tokens:
        return (
            f"a completion ends after {len(one.tokens)} of {wanted.max_tokens} tokens without an end token: the "
            "server's window is too short (--max-model-len), or it has stop tokens of its own (--generation-config "
            "vllm leaves them out)"
        )
    if any(token in wanted.end_ids for token in one.tokens[:-1]):
        return "a completion continues after an end token"
    return None
