"""Ancestral sampling at temperature 1 from the whole vocabulary; log q is recorded as each token is drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cdpg.config import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.errors import RunError
from cdpg.models.base import LanguageModel, PromptTokens, Rows
from cdpg.models.rng import UniformStream
from cdpg.system import memory

_BLOCK = 256
"""Tokens in a block; the search for a token runs over sums of blocks, then within one block."""


class StopRule(Protocol):
    """Ends a sequence before its end token. The stopped sequence is the outcome, for every model."""

    watch: frozenset[str]
    """The rule applies only if one of these characters is in the last two tokens; empty: at every token."""

    def cut(self, completion: str) -> str | None:
        """The text up to where the rule ends the completion; None if it does not end yet."""


class Pruning(Protocol):
    """Watches the rows of one pass, and says which of them need no more tokens."""

    def hopeless(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], text: Callable[[int, Sequence[int]], str]
    ) -> Collection[int]:
        """Those of the unfinished rows that end here, since b = 0 whatever follows; called after each token.

        ``tokens`` has what is drawn, by row; ``text`` decodes tokens of a row.
        """

    def close(self) -> None:
        """The pass is over."""


Prune = Callable[[Sequence[int]], Pruning]
"""Watches a pass, given its rows as :class:`Chunk` numbers them."""


@dataclass(frozen=True)
class Chunk:
    """Rows that were sampled side by side; ``row`` is ``slot · M + sample``, where a slot is a context's index."""

    row: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    token_log_q: tuple[tuple[float, ...], ...]
    ended: tuple[bool, ...]
    texts: tuple[str, ...]
    pruned: tuple[bool, ...] = ()
    """Whether each row was ended early; empty if none was."""

    def whole(self) -> Chunk:
        """Without the rows that were ended early."""
        if not self.pruned:
            return self
        kept = [place for place, pruned in enumerate(self.pruned) if not pruned]
        parts = (self.row, self.tokens, self.token_log_q, self.ended, self.texts)
        return Chunk(*(tuple(part[place] for place in kept) for part in parts))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Samples:
    """M completions for each of N contexts; tensors live on the CPU."""

    contexts: tuple[Context, ...]
    prompts: tuple[PromptTokens, ...]
    texts: tuple[tuple[str, ...], ...]
    """``[context][sample]``."""
    tokens: Tensor
    """``[context, sample, token]``: token ids, 0 beyond the length."""
    lengths: Tensor
    """``[context, sample]``."""
    token_log_q: Tensor
    """``[context, sample, token]``, float64: log q of each token when it was drawn; 0 beyond the length."""
    ended: Tensor
    """``[context, sample]``: true where an end token or the stop rule ended it, false where the limit cut it."""
    pruned: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))
    """``[context, sample]``, or one for all: whether it was ended early, since b = 0 whatever follows. Its tokens are a
    beginning, and nothing else about it is known."""

    @property
    def log_q(self) -> Tensor:
        """``[context, sample]``, float64: log q(x | c)."""
        return self.token_log_q.sum(dim=2)

    @property
    def shape(self) -> tuple[int, int]:
        return self.lengths.shape[0], self.lengths.shape[1]

    def token_ids(self, context: int, sample: int) -> list[int]:
        """The tokens that were drawn, the end token included. Tokenising the text again may give other tokens."""
        ids: list[int] = self.tokens[context, sample, : int(self.lengths[context, sample])].tolist()
        return ids

    def text(self, row: int) -> str:
        """The text of a flat row ``context · M + sample``."""
        context, sample = divmod(row, self.shape[1])
        return self.texts[context][sample]

    def with_log_q(self, token_log_q: Tensor) -> Samples:
        """The same samples with another log q."""
        return replace(self, token_log_q=token_log_q)

    def rows(self, index: Tensor) -> Rows:
        """Flat rows ``context · M + sample``, in the form that models score."""
        lengths = self.lengths.flatten()[index]
        width = int(lengths.max()) if len(index) else 0
        return Rows(index // self.shape[1], self.tokens.flatten(0, 1)[index, :width], lengths)


def draw_tokens(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse transform: one token a row and its log-probability, from ``[row, vocabulary]`` and ``[row]`` float64.

    The cumulative sum runs in float64, over sums of blocks and then within one block. So tokens are drawn with the
    probabilities that are recorded, however large the vocabulary. A token of probability 0 is never drawn.
    """
    vocabulary = logits.shape[1]
    probabilities = logits.softmax(dim=1)
    blocks = _block_sums(probabilities).double().cumsum(dim=1)  # [row, block]
    total = blocks[:, -1:]
    if not bool(total.isfinite().all()):
        raise RunError("the model's probabilities are not finite: its weights hold NaN or are too large")
    block, goal = _first_above(blocks, uniforms.to(total)[:, None] * total)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)

    members = block * _BLOCK + torch.arange(_BLOCK, device=logits.device)  # [row, token of the block]
    inside = probabilities.gather(1, members.clamp(max=vocabulary - 1)).double()
    inside = inside.masked_fill_(members >= vocabulary, 0.0)
    place, _ = _first_above(inside.cumsum(dim=1), goal - before)
    log_probs = inside.gather(1, place).log() - total.log()
    return (block * _BLOCK + place)[:, 0], log_probs[:, 0]


def _block_sums(weights: Tensor) -> Tensor:
    whole = weights.shape[1] // _BLOCK * _BLOCK
    sums: Tensor = weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=2)
    if whole < weights.shape[1]:
        sums = torch.cat([sums, weights[:, whole:].sum(dim=1, keepdim=True)], dim=1)
    return sums


def _first_above(edges: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first of ``[row, edge]`` cumulative sums above the goal, and the goal, kept below the last sum."""
    top = edges[:, -1:]
    goal = torch.minimum(goal, torch.nextafter(top, torch.zeros_like(top)))
    return torch.searchsorted(edges, goal, right=True), goal


@torch.inference_mode()
def sample_chunks(
    model: LanguageModel,
    prompts: Sequence[PromptTokens],
    samples_per_context: int,
    max_length: int,
    uniforms: UniformStream,
    rows_per_pass: int,
    stop: StopRule | None = None,
    first_slot: int = 0,
    prune: Prune | None = None,
) -> Iterator[Chunk]:
    """Sample every context ``samples_per_context`` times, at most ``rows_per_pass`` rows side by side.

    ``first_slot`` is the index of the first prompt in the epoch, so that several processes draw the same samples as
    one.
    """
    by_length = sorted(range(len(prompts)), key=lambda slot: len(prompts[slot]))
    rows = [slot * samples_per_context + sample for slot in by_length for sample in range(samples_per_context)]
    advice = f"lower rows_per_pass (now {rows_per_pass}) or max_completion_length (now {max_length})"
    with memory.needed_for("sampling", advice), model.sampling(min(len(rows), rows_per_pass)):
        for start in range(0, len(rows), rows_per_pass):
            part = np.array(rows[start : start + rows_per_pass])
            slots, index = np.unique(part // samples_per_context, return_inverse=True)
            pruning = None if prune is None else prune(part.tolist())
            batch = _Batch(model, [prompts[slot] for slot in slots], index, max_length, stop, pruning)
            slot_of_row, sample_of_row = part // samples_per_context + first_slot, part % samples_per_context
            for position in range(max_length):
                drawn = uniforms.draw(slot_of_row[batch.alive], sample_of_row[batch.alive], position)
                if not batch.step(torch.from_numpy(drawn), last=position + 1 == max_length):
                    break
            yield batch.chunk(part)


class GrowingRows:
    """Rows while they grow, wherever their tokens come from: end tokens, the stop rule and pruning finish them."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[PromptTokens],
        context: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        stop: StopRule | None,
        pruning: Pruning | None,
    ) -> None:
        """``context`` has the index of each row's prompt; ``model`` has the end tokens and decodes."""
        self.model, self.prompts, self.context, self.stop, self.pruning = model, prompts, context, stop, pruning
        self.alive = np.arange(len(context))
        self.tokens: list[list[int]] = [[] for _ in context]
        self.log_q: list[list[float]] = [[] for _ in context]
        self.ended = [False] * len(context)
        self.pruned: set[int] = set()
        self.watched: dict[tuple[int, ...], bool] = {}

    def add(self, tokens: Sequence[int], log_q: Sequence[float], last: bool) -> list[int]:
        """Append a token to each unfinished row; returns the places, among these rows, of those that continue."""
        for row, token, log_prob in zip(self.alive.tolist(), tokens, log_q, strict=True):
            self.tokens[row].append(token)
            self.log_q[row].append(log_prob)
            self.ended[row] = token in self.model.end_ids or self._stopped(row)
        living = [i for i, row in enumerate(self.alive.tolist()) if not self.ended[row]]
        if self.pruning is not None and not last:
            unfinished = self.alive[living].tolist()
            self.pruned.update(self.pruning.hopeless(unfinished, self.tokens, self._text))
            living = [i for i, row in zip(living, unfinished, strict=True) if row not in self.pruned]
        return [] if last else living

    def _stopped(self, row: int) -> bool:
        if self.stop is None:
            return False
        if self.stop.watch and not self._is_watched(row):
            return False
        return self.stop.cut(self._text(row, self.tokens[row])) is not None

    def _is_watched(self, row: int) -> bool:
        """Whether the last two tokens hold a watched character; cached, since decoding a pair is slow."""
        assert self.stop is not None
        last = tuple(self.tokens[row][-2:])
        known = self.watched.get(last)
        if known is None:
            known = self.watched[last] = not self.stop.watch.isdisjoint(self._text(row, last))
        return known

    def _text(self, row: int, tokens: Sequence[int]) -> str:
        return self.model.decode(self.prompts[self.context[row]], tokens)

    def _final_text(self, row: int) -> str:
        """The text that is judged: up to where the stop rule ended it."""
        text = self._text(row, self.tokens[row])
        cut = self.stop.cut(text) if self.stop is not None else None
        return text if cut is None else cut

    def chunk(self, rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Chunk:
        if self.pruning is not None:
            self.pruning.close()
        return Chunk(
            row=tuple(rows.tolist()),
            tokens=tuple(map(tuple, self.tokens)),
            token_log_q=tuple(map(tuple, self.log_q)),
            ended=tuple(self.ended),
            texts=tuple(self._final_text(row) for row in range(len(self.tokens))),
            pruned=tuple(row in self.pruned for row in range(len(self.tokens))) if self.pruned else (),
        )


class _Batch(GrowingRows):
    """The rows of one pass; a finished row leaves the computation."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[PromptTokens],
        context: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        max_length: int,
        stop: StopRule | None,
        pruning: Pruning | None,
    ) -> None:
        super().__init__(model, prompts, context, stop, pruning)
        self.decoding = model.start(prompts, torch.from_numpy(context).to(model.device), max_length)

    def step(self, uniforms: Tensor, last: bool) -> bool:
        """Draw one token for each unfinished row; false if no row is left."""
        logits = self.model.logits(self.decoding.hidden)
        if logits.device.type == "mps":
            logits = logits.cpu()  # MPS has no float64
        tokens, log_q = draw_tokens(logits, uniforms)
        living = self.add(tokens.tolist(), log_q.tolist(), last)
        if not living:
            return False
        if len(living) < len(self.alive):
            kept = _few_moves(living)
            self.alive, tokens = self.alive[kept], tokens[kept]
            self.decoding.keep(torch.tensor(kept, device=self.model.device))
        self.decoding.advance(tokens.to(self.model.device))
        return True


def _few_moves(living: list[int]) -> list[int]:
    """The unfinished rows in an order that moves few of them: the last ones fill the gaps."""
    count = len(living)
    staying = {row for row in living if row < count}
    movers = iter(row for row in living if row >= count)
    return [row if row in staying else next(movers) for row in range(count)]


def assemble(
    contexts: Sequence[Context], prompts: Sequence[PromptTokens], chunks: Sequence[Chunk], samples_per_context: int
) -> Samples:
    """The chunks of an epoch as one record, in the order of the contexts."""
    flat = {row: (chunk, i) for chunk in chunks for i, row in enumerate(chunk.row)}
    ordered = [flat[row] for row in range(len(flat))]
    count, width = len(ordered), max((len(chunk.tokens[i]) for chunk, i in ordered), default=0)
    tokens, log_q = np.zeros((count, width), dtype=np.int64), np.zeros((count, width))
    for row, (chunk, i) in enumerate(ordered):
        length = len(chunk.tokens[i])
        tokens[row, :length], log_q[row, :length] = chunk.tokens[i], chunk.token_log_q[i]
    shape = (len(contexts), samples_per_context)
    texts = [chunk.texts[i] for chunk, i in ordered]
    return Samples(
        contexts=tuple(contexts),
        prompts=tuple(prompts),
        texts=tuple(tuple(texts[i * shape[1] : (i + 1) * shape[1]]) for i in range(shape[0])),
        tokens=torch.from_numpy(tokens).view(*shape, width),
        lengths=torch.tensor([len(chunk.tokens[i]) for chunk, i in ordered], dtype=torch.long).view(shape),
        token_log_q=torch.from_numpy(log_q).view(*shape, width),
        ended=torch.tensor([chunk.ended[i] for chunk, i in ordered], dtype=torch.bool).view(shape),
        pruned=torch.tensor([any(chunk.pruned[i : i + 1]) for chunk, i in ordered], dtype=torch.bool).view(shape),
    )


class Engine(Protocol):
    """Draws completions, with the log q that each token was drawn with."""

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
        """See :func:`sample_chunks`; the engine's seeds come from ``uniforms``."""


def draw_samples(
    engine: LanguageModel | Engine,
    contexts: Sequence[Context],
    prompts: Sequence[PromptTokens],
    samples_per_context: int,
    config: CDPGConfig,
    uniforms: UniformStream,
    stop: StopRule | None = None,
    first_slot: int = 0,
    on_chunk: Callable[[Chunk], None] = lambda chunk: None,
    prune: Prune | None = None,
) -> Samples:
    """Sample every context ``samples_per_context`` times, as one record; ``on_chunk`` is called with each part."""
    chunks: list[Chunk] = []
    length, rows = config.max_completion_length, config.rows_per_pass
    draw = partial(sample_chunks, engine) if isinstance(engine, LanguageModel) else engine.sample_chunks
    for chunk in draw(prompts, samples_per_context, length, uniforms, rows, stop, first_slot, prune):
        chunks.append(chunk)
        on_chunk(chunk)
    return assemble(contexts, prompts, chunks, samples_per_context)
