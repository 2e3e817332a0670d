"""Samples of this and earlier epochs, for further steps on them.

The importance weight P_c(x)/(Z_c q(x|c)) of a sample does not depend on the present policy: it stays right as long as q
is the distribution that the sample was drawn from. So a sample can be used again, with its own log q.

A *visit* is a context with the samples that an epoch drew for it. Only tokens of satisfying samples are stored, since
the others have weight 0; they count in Ẑ_c and in the mean. All processes hold the same visits, so that what is
replayed does not depend on their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cdpg.contexts.contexts import Context
from cdpg.models.base import PromptTokens
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Samples
from cdpg.rollout.rollout import Rollout
from cdpg.system.distributed import Processes

_TABLES = ("b", "valid", "log_q", "log_a", "lengths")
"""``[visit, sample]`` tensors of a rollout that are kept."""
_FEATURES = "features"
"""``[visit, sample, factor]``: the same, if the target has moments or rewards."""
_NOT_STORED = torch.zeros(0, dtype=torch.float64)
"""What a replayed rollout lacks: it is not needed for the gradient."""


@dataclass(frozen=True)
class ReplayBuffer:
    """The visits of the latest epochs; immutable."""

    capacity: int
    """Samples that are kept, satisfying or not; whole epochs are dropped, the oldest first, and never the latest."""
    indices: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """``[visit]``: the index of its context among those of the run."""
    epochs: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """``[visit]``: the epoch that drew it."""
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """``[visit, sample]``, as in a rollout; empty before the first epoch."""
    tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """``[token]``: those of all satisfying samples, one after the other, in the order of the tables."""

    def add(self, rollout: Rollout, processes: Processes) -> ReplayBuffer:
        """With the samples of an epoch of all processes."""
        impossible = rollout.log_a == -math.inf  # under the base: P = 0 whatever b is, and a checkpoint holds no −∞
        stored = {"b": rollout.b.masked_fill(impossible, 0.0), "log_a": rollout.log_a.masked_fill(impossible, 0.0)}
        tables = {name: stored.get(name, getattr(rollout, name)) for name in _TABLES}
        kept = _satisfying(tables["b"], tables["valid"])
        own_rows = rollout.own(kept).nonzero()[:, 0].tolist()
        per_context = rollout.b.shape[1]
        own = [rollout.samples.token_ids(*divmod(row, per_context)) for row in own_rows]
        new = torch.tensor([token for ids in processes.gather(own) for token in ids], dtype=torch.int32)
        if rollout.is_tilted:  # those of failing samples are not used, and may be NaN
            tables[_FEATURES] = rollout.features.where(kept[..., None], rollout.features.new_zeros(()))
        grown = ReplayBuffer(
            self.capacity,
            torch.cat([self.indices, torch.tensor(rollout.indices, dtype=torch.long)]),
            torch.cat([self.epochs, torch.full((len(rollout.b),), rollout.number, dtype=torch.long)]),
            {name: torch.cat([self.tables[name], table]) if self.tables else table for name, table in tables.items()},
            torch.cat([self.tokens, new]),
        )
        return grown._without_oldest(len(rollout.b))

    def __len__(self) -> int:
        """Number of visits."""
        return len(self.indices)

    @property
    def covered(self) -> Tensor:
        """``[visit]``: whether any of its samples satisfies; the others have no gradient."""
        if not self.tables:
            return torch.zeros(0, dtype=torch.bool)
        return _satisfying(self.tables["b"], self.tables["valid"]).any(dim=1)

    @property
    def covered_share(self) -> float:
        """Share of the valid samples that are of covered visits."""
        per_visit = self.tables["valid"].sum(dim=1).double()
        return float(per_visit[self.covered].sum() / per_visit.sum())

    def choose(self, count: int, uniforms: UniformStream) -> Tensor:
        """``count`` covered visits, or all if they are fewer, without replacement; ``[chosen]`` in ascending order."""
        covered = self.covered.nonzero()[:, 0]
        order = torch.from_numpy(uniforms.permutation(len(covered)))[:count]
        return covered[order].sort().values

    def rollout(
        self,
        visits: Tensor,
        contexts: Sequence[Context],
        prompts: Sequence[PromptTokens],
        processes: Processes,
        coefficients: tuple[float, ...] = (),
        factor_names: tuple[str, ...] = (),
    ) -> Rollout:
        """Some visits as the record of an epoch; ``contexts`` and ``prompts`` are those of the run.

        ``coefficients`` are the present ones of the target's moments and rewards, ``factor_names`` their names.
        """
        tables = {name: table[visits] for name, table in self.tables.items()}
        share = processes.share(len(visits))
        own = visits[share.start : share.stop]
        chosen = self.indices[visits].tolist()
        samples = Samples(
            contexts=tuple(contexts[chosen[i]] for i in share),
            prompts=tuple(prompts[chosen[i]] for i in share),
            texts=tuple(("",) * tables["b"].shape[1] for _ in share),  # not stored
            tokens=self._tokens_of(own),
            lengths=tables["lengths"][share.start : share.stop],
            token_log_q=_NOT_STORED,
            ended=_NOT_STORED.bool(),
        )
        return Rollout(
            number=int(self.epochs[-1]),
            b=tables["b"],
            valid=tables["valid"],
            failed=torch.zeros_like(tables["valid"]),
            log_q=tables["log_q"],
            log_a=tables["log_a"],
            lengths=tables["lengths"],
            samples=samples,
            token_log_a=_NOT_STORED,
            first_context=share.start,
            indices=tuple(chosen),
            features=tables.get(_FEATURES, _NOT_STORED),
            coefficients=coefficients,
            factor_names=factor_names,
        )

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint; empty before the first epoch."""
        if not self.tables:
            return {}
        return {"indices": self.indices, "epochs": self.epochs, "tokens": self.tokens, **self.tables}

    def restored(self, tensors: Mapping[str, Tensor]) -> ReplayBuffer:
        """What :meth:`tensors` gave."""
        if not tensors:
            return ReplayBuffer(self.capacity)
        tables = {name: tensors[name] for name in (*_TABLES, _FEATURES) if name in tensors}
        return ReplayBuffer(self.capacity, tensors["indices"], tensors["epochs"], tables, tensors["tokens"])

    def _token_counts(self) -> Tensor:
        """``[visit, sample]``: tokens that are stored."""
        kept = _satisfying(self.tables["b"], self.tables["valid"])
        return self.tables["lengths"] * kept

    def _tokens_of(self, visits: Tensor) -> Tensor:
        """``[visit, sample, token]`` of some visits; 0 where nothing is stored."""
        counts = self._token_counts()
        starts = counts.flatten().cumsum(0).view_as(counts) - counts
        width = int(self.tables["lengths"][visits].max()) if len(visits) else 0
        places = torch.arange(width)
        stored = places < counts[visits][..., None]
        source = (starts[visits][..., None] + places).where(stored, 0)
        return self.tokens[source].long().where(stored, 0)

    def _without_oldest(self, latest: int) -> ReplayBuffer:
        """Without the epochs that exceed the capacity; the ``latest`` visits stay."""
        most = max(latest, self.capacity // self.tables["b"].shape[1])
        first_kept = self.epochs[max(0, len(self) - most) :][0]
        if len(self) > most and bool(self.epochs[len(self) - most - 1] == first_kept):
            first_kept = first_kept + 1  # the capacity ends within an epoch
        kept = self.epochs >= first_kept
        dropped = int(self._token_counts()[~kept].sum())
        tables = {name: table[kept] for name, table in self.tables.items()}
        return ReplayBuffer(self.capacity, self.indices[kept], self.epochs[kept], tables, self.tokens[dropped:])


def _satisfying(b: Tensor, valid: Tensor) -> Tensor:
    return (b > 0) & valid
