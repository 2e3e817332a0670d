"""The rollout: samples with their verdicts and log-probabilities, of an epoch or a block of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from cdpg.constraints.judge import CheckFailure
from cdpg.models.sampling import Samples
from cdpg.target import partition
from cdpg.target.target import log_target


@dataclass(frozen=True)
class Rollout:
    """An epoch's samples before the gradient; float64 on the CPU.

    ``[context, sample]`` tensors cover the contexts of all processes, so that every process decides the same;
    ``samples`` and ``[context, sample, token]`` tensors are this process's own.
    """

    number: int
    """The epoch, or the block of an evaluation."""
    b: Tensor
    """``[context, sample]``: the constraint's verdict in [0, 1]."""
    valid: Tensor
    """``[context, sample]``: false where there is no verdict, because the check failed or no constraint applies; such a
    sample is left out of every estimate."""
    failed: Tensor
    """``[context, sample]``: whether the check failed."""
    log_q: Tensor
    """``[context, sample]``: log-probability under the model that drew the samples."""
    log_a: Tensor
    """``[context, sample]``: log-probability under the base; 0 where it was not needed."""
    lengths: Tensor
    """``[context, sample]``: tokens, the end token included."""
    samples: Samples
    token_log_a: Tensor
    """``[context, sample, token]``: the base's log-probabilities of this process's tokens."""
    first_context: int
    """Index of this process's first context."""
    indices: tuple[int, ...] = ()
    """``[context]``: the index of each context among those of the run; empty for an evaluation."""
    checks: Mapping[str, int] = field(default_factory=dict)
    """Counts over all processes, such as ``failed_timeout`` and ``exhausted_cpu``: failed and exhausted checks."""
    failures: Mapping[int, CheckFailure] = field(default_factory=dict)
    """Why a check failed, by row of this process."""
    pruned: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))
    """``[context, sample]``, or one for all: whether it was ended early, since b = 0 whatever follows. Its log q and
    its length are those of the tokens drawn."""

    log_policy: Tensor | None = None
    """``[context, sample]``: log-probability under the policy before the epoch's steps, where ``rescored``, else 0;
    None if the policy drew the samples, so that it is log q."""
    rescored: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))
    """``[context, sample]``, or one for all: whether the policy has scored it. All that satisfy are."""
    log_recomputed: Tensor | None = None
    """``[context, sample]``: log-probability under the model that an engine has drawn from, as computed here, where
    ``recomputed``, else 0; None without an engine."""
    recomputed: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))
    """``[context, sample]``, or one for all: whether this log-probability was computed."""

    features: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """``[context, sample, factor]``: the values of the target's moments and rewards, NaN without one; empty if the
    target has none."""
    coefficients: tuple[float, ...] = ()
    """``[factor]``: what each is multiplied by in log P, λ or 1/β."""
    factor_names: tuple[str, ...] = ()
    """``[factor]``: their names in files."""

    @property
    def inapplicable(self) -> Tensor:
        """``[context, sample]``: whether no constraint applies."""
        return ~self.valid & ~self.failed

    @property
    def is_tilted(self) -> bool:
        """Whether the target has moments or rewards: Z_c may then have any scale."""
        return bool(self.coefficients)

    @cached_property
    def log_tilt(self) -> Tensor | None:
        """Σ λφ + Σ r/β, ``[context, sample]``, 0 where b = 0 or there is no verdict; None without such factors."""
        if not self.is_tilted:
            return None
        tilt = (self.features * self.features.new_tensor(self.coefficients)).sum(dim=2)
        return tilt.where((self.b > 0) & self.valid, tilt.new_zeros(()))

    @cached_property
    def log_p(self) -> Tensor:
        """log P_c(x), ``[context, sample]``; −∞ where b = 0."""
        return log_target(self.log_a, self.b, self.log_tilt)

    @cached_property
    def log_ratio(self) -> Tensor:
        """log P_c(x)/q(x|c), ``[context, sample]``; −∞ where b = 0 or there is no verdict."""
        ratio = self.log_p - self.log_q
        return ratio.masked_fill(~self.valid, -math.inf)

    def by_factor(self) -> dict[str, Tensor]:
        """The values of each moment and reward, ``[context, sample]``, by name."""
        return dict(zip(self.factor_names, self.features.unbind(dim=2), strict=True)) if self.is_tilted else {}

    def epsilon(self, epsilon: float) -> float:
        """ε in the divisor of the weights; 0 with moments or rewards, where Z_c may be far smaller than ε and a divisor
        is never 0."""
        return 0.0 if self.is_tilted else epsilon

    @cached_property
    def log_z(self) -> Tensor:
        """log Ẑ_c, ``[context]``."""
        return partition.log_partition(self.log_ratio, self.valid)

    def own(self, tensor: Tensor) -> Tensor:
        """This process's rows of a ``[context, sample]`` tensor, flat."""
        first = self.first_context
        return tensor[first : first + len(self.samples.contexts)].flatten()


def example_of(failures: Mapping[int, CheckFailure]) -> str:
    """``; for example, …`` for a message, with one of the failed checks; empty if there are none."""
    return f"; for example, {next(iter(failures.values()))}" if failures else ""
