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
from cdpg.models.base import LanguageModel, PromptTokens, Rows
from cdpg.models.drawing import draw_tokens
from cdpg.models.rng import UniformStream
from cdpg.system import memory

_REFILL = 2
"""Rows that wait begin when one place in so many is free: half of them. Batches attend apart, so few are best."""

_AHEAD = 16
"""Positions whose uniform numbers are drawn at once."""

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


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

    Rows that wait take the places of rows that finished, if the model can advance rows at different positions together.
    ``first_slot`` is the index of the first prompt in the epoch, so that several processes draw the same samples as
    one.
    """
    by_length = sorted(range(len(prompts)), key=lambda slot: len(prompts[slot]))
    rows = [slot * samples_per_context + sample for slot in by_length for sample in range(samples_per_context)]
    advice = f"lower rows_per_pass (now {rows_per_pass}) or max_completion_length (now {max_length})"
    waiting, batches = np.array(rows, dtype=np.int64), list[_Batch]()
    with memory.needed_for("sampling", advice), model.sampling(min(len(rows), rows_per_pass)):
        while len(waiting) or batches:
            free = rows_per_pass - sum(len(batch.alive) for batch in batches)
            joins = all(batch.decoding.joins for batch in batches)
            least = -(-rows_per_pass // _REFILL) if joins else rows_per_pass
            if free >= least and len(waiting):
                part, waiting = waiting[:free], waiting[free:]
                batches.append(_Batch(model, prompts, part, samples_per_context, first_slot, max_length, stop, prune))
            going = _step(model, batches, uniforms)
            yield from (batch.chunk(batch.rows) for batch in batches if batch not in going)
            batches = going


class GrowingRows:
    """Rows while they grow, wherever their tokens come from: end tokens, the stop rule and pruning finish them."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[PromptTokens],
        context: IntArray,
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

    def chunk(self, rows: IntArray) -> Chunk:
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
    """Rows that begin together; a finished row leaves the computation."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[PromptTokens],
        rows: IntArray,
        samples_per_context: int,
        first_slot: int,
        max_length: int,
        stop: StopRule | None,
        prune: Prune | None,
    ) -> None:
        """``rows`` as :class:`Chunk` numbers them; ``prompts`` has those of all rows of the epoch."""
        slots, context = np.unique(rows // samples_per_context, return_inverse=True)
        pruning = None if prune is None else prune(rows.tolist())
        super().__init__(model, [prompts[slot] for slot in slots], context, stop, pruning)
        self.rows, self.max_length, self.position = rows, max_length, 0
        self._slot, self._sample = rows // samples_per_context + first_slot, rows % samples_per_context
        self._uniforms = np.empty((len(rows), _AHEAD))  # of some positions at once, which is faster
        self.decoding = model.start(self.prompts, torch.from_numpy(context).to(model.device), max_length)

    def uniforms(self, stream: UniformStream) -> Tensor:
        """A number for the next token of each unfinished row."""
        if self.position % _AHEAD == 0:
            slots, samples = (np.repeat(part[self.alive], _AHEAD) for part in (self._slot, self._sample))
            drawn = stream.draw(slots, samples, self.position + np.tile(np.arange(_AHEAD), len(self.alive)))
            self._uniforms[self.alive] = drawn.reshape(-1, _AHEAD)
        return torch.from_numpy(self._uniforms[self.alive, self.position % _AHEAD])

    def take(self, tokens: Tensor, log_q: Tensor) -> Tensor:
        """Append a token to each unfinished row; the tokens of the rows that continue, in their new order."""
        self.position += 1
        living = self.add(tokens.tolist(), log_q.tolist(), last=self.position == self.max_length)
        if living and len(living) < len(self.alive):
            kept = _few_moves(living)
            self.alive, tokens = self.alive[kept], tokens[kept]
            self.decoding.keep(torch.tensor(kept, device=self.model.device))
        return tokens[: len(living)]


def _step(model: LanguageModel, batches: Sequence[_Batch], stream: UniformStream) -> list[_Batch]:
    """Draw one token for each unfinished row; the batches with rows that continue."""
    logits = model.logits(torch.cat([batch.decoding.hidden for batch in batches]))
    if logits.device.type == "mps":
        logits = logits.cpu()  # MPS has no float64
    sizes = [len(batch.alive) for batch in batches]
    drawn = draw_tokens(logits, torch.cat([batch.uniforms(stream) for batch in batches]))
    parts = zip(batches, *(values.split(sizes) for values in drawn), strict=True)
    going = [(batch, taken) for batch, *own in parts if len(taken := batch.take(*own))]
    if going:
        model.advance([batch.decoding for batch, _ in going], [taken.to(model.device) for _, taken in going])
    return [batch for batch, _ in going]


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
