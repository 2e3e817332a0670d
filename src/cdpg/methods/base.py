"""The interface of a method: it turns an epoch's samples into a loss for each, independently of the trainer.

Every method is one loop with a different coefficient, ``θ ← θ + α · w(x,c) · ∇log π(x|c)``. A new one of that kind is
a subclass of :class:`WeightedMethod` with one function, ``weights``.

A method is pure: its state goes into :meth:`Method.epoch_loss` and comes out of it. Nothing here loads torch, so that
settings and methods can be listed at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from cdpg.config import CDPGConfig, MethodSettings, add_method, remove_method
from cdpg.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cdpg.models.base import LanguageModel, TokenScores
    from cdpg.rollout.rollout import Rollout

    Total = Callable[[Tensor], Tensor]

State = Mapping[str, Any]
"""The state of a method between epochs, beside parameters; checkpoints store it as JSON."""


def log_scale(state: State, rollout: Rollout) -> dict[str, float]:
    """What a state holds of the scale of P: the log of a number by which sums of P/q over epochs are divided.

    With moments or rewards, P may be too large or too small for a number. It is then the largest ratio of the first
    epoch that has one, under ``log_scale``. Without them there is none.
    """
    if not rollout.is_tilted or "log_scale" in state:
        return {key: value for key, value in state.items() if key == "log_scale"}
    largest = float(rollout.log_ratio.max())
    return {"log_scale": largest} if math.isfinite(largest) else {}


def of_one_process(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes, where there is one."""
    return tensor


@dataclass(frozen=True)
class Style:
    """How a method, or the base, is drawn."""

    color: str
    dark: str
    """The colour on a dark page."""
    marker: str = "o"
    dash: tuple[float, ...] = ()
    """Lengths of dashes and gaps, in line widths; none for an unbroken line."""


class SampleLoss(ABC):
    """The loss of each sample of an epoch."""

    active: Tensor
    """``[row]`` over all processes: whether the row has any gradient."""
    weights: Tensor | None = None
    """``[row]`` of this process: the coefficient of each sample; None if a sample has no single one."""
    normalizer: float
    """The divisor that turns the epoch's summed loss into a mean: the number of valid samples, or of their tokens."""

    @abstractmethod
    def loss(self, rows: Tensor, scores: TokenScores) -> Tensor:
        """The summed loss of some of this process's rows."""


@dataclass(frozen=True)
class EpochLoss:
    """A method's result for an epoch's samples."""

    samples: SampleLoss
    state: State
    """For the next epoch."""
    metrics: Mapping[str, float]
    """Values to log for the epoch."""


@dataclass(frozen=True)
class Method(ABC):
    """One way to learn from an epoch's samples."""

    config: CDPGConfig

    name: ClassVar[str]
    """The value of the setting ``method``."""
    label: ClassVar[str]
    """Its name in figures and tables."""
    description: ClassVar[str]
    """One line, as the model card has it."""
    style: ClassVar[Style]
    """How figures draw it."""
    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    """The settings of its own."""
    targets_p: ClassVar[bool] = False
    """Whether its optimum is the ideal model p."""
    normalizes_per_context: ClassVar[bool] = False
    """Whether a weight is divided by Ẑ_c, a mean over the samples of its own context."""
    proposal: ClassVar[Literal["policy", "base"]] = "policy"
    """Which model draws its samples, unless the setting of this name says otherwise."""
    divides_by_q: ClassVar[bool] = False
    """Whether any model may draw the samples: a weight divides by the probability q that the sample was drawn with."""
    scores_every_sample: ClassVar[bool] = False
    """Whether the base must score the samples with b = 0 too. They are then drawn to their end (no pruning)."""
    differentiates_from: ClassVar[float] = 0.0
    """If the gradient may need the samples with b = 0: the share of satisfying samples below which it does not."""

    @property
    def source(self) -> str:
        """What draws the samples: ``policy``, ``base``, or the name of another model."""
        return self.config.proposal or self.proposal

    def require_proposal(self) -> None:
        """Refuse settings with which a model draws the samples that the method cannot learn from."""
        given, every = self.config.proposal, self.config.sync_every
        if not self.divides_by_q and (self.source != self.proposal or every > 1):
            what = f"proposal is {given!r}" if self.source != self.proposal else f"sync_every is {every}"
            raise UserError(
                f"{what}, but {self.name} can learn only from samples of the present {self.proposal}: leave it out, "
                "or set method: cdpg, whose weights divide by the probability under the model that drew the sample"
            )
        if every > 1 and self.source != "policy":
            raise UserError(
                f"sync_every is {every}, but proposal is {given!r}, which does not change: leave out one of the two"
            )

    @property
    def chooses_epoch(self) -> bool:
        """Whether by default the model of the epoch with the largest gain is kept, if there are held-out contexts."""
        return False

    @property
    def needs_positive_b(self) -> bool:
        """Whether its divergence is infinite where a sample of the policy has b = 0."""
        return False

    @property
    def differentiates_every_sample(self) -> bool:
        """Whether the gradient needs the samples with b = 0 too."""
        return self.scores_every_sample

    @property
    def passes(self) -> int:
        """Passes over each epoch's samples."""
        return 1

    @property
    def replay(self) -> int:
        """Further steps on samples of this and earlier epochs, for each step on an epoch's own."""
        return 0

    @property
    def replay_samples(self) -> int:
        """Samples of the latest epochs that are kept for it; those of the latest one in any case."""
        return 0

    def begin(self) -> State:
        """The state before the first epoch."""
        return {}

    def retargeted(self, state: State) -> State:
        """The state after λ of the target's moments has changed, without sums for the earlier target."""
        return state

    def make_module(self, policy: LanguageModel) -> nn.Module | None:
        """A module of its own, trained together with the policy."""
        return None

    @abstractmethod
    def epoch_loss(
        self,
        state: State,
        rollout: Rollout,
        policy: LanguageModel,
        module: nn.Module | None = None,
        total: Total = of_one_process,
    ) -> EpochLoss:
        """The loss of the epoch's samples, from the state after the epoch before.

        ``module`` is the method's own, if any; ``total`` sums a tensor over all processes.
        """

    def replay_loss(self, rollout: Rollout, state: State) -> SampleLoss:
        """The loss of samples of this and earlier epochs; ``state`` is that after the present one."""
        raise TypeError(f"{self.name} does not replay")


METHODS: dict[str, type[Method]] = {}
"""Every method by its name."""
M = TypeVar("M", bound=type[Method])


def register(method: M) -> M:
    """Make a method known to settings, commands and reports."""
    add_method(method.name, method.Settings)
    METHODS[method.name] = method
    return method


def unregister(name: str) -> None:
    """Undo :func:`register`."""
    del METHODS[name]
    remove_method(name)


class WeightedMethod(Method):
    """``−w(x,c) · log π(x|c)`` summed over samples, w a constant."""

    follows_policy: ClassVar[bool] = False
    """Whether w is multiplied by π/q, π being the policy of each step and q that of the samples."""

    def subtracts_control_variate(self, state: State) -> bool:
        """Whether π/q is subtracted from w: its expected gradient is 0. Every sample then needs a gradient.

        It is decided by the state before the epoch, so that the epoch's samples do not decide about themselves.
        """
        return False

    @abstractmethod
    def weights(self, rollout: Rollout, state: State) -> Tensor:
        """w, ``[context, sample]``; 0 means that the sample needs no gradient. ``state`` has seen the epoch."""

    def advance(self, state: State, rollout: Rollout) -> State:
        """The state after the epoch's samples."""
        return state

    def metrics(self, state: State) -> Mapping[str, float]:
        """Values to log for an epoch, from the state after it."""
        return {}

    def epoch_loss(
        self,
        state: State,
        rollout: Rollout,
        policy: LanguageModel,
        module: nn.Module | None = None,
        total: Total = of_one_process,
    ) -> EpochLoss:
        subtracts = self.subtracts_control_variate(state)
        state = self.advance(state, rollout)
        return EpochLoss(self.sample_loss(rollout, state, subtracts), state, self.metrics(state))

    def replay_loss(self, rollout: Rollout, state: State) -> SampleLoss:
        """The same weights with the q that drew each sample and the present Ẑ_c, without a control variate."""
        return self.sample_loss(rollout, state, False)

    def sample_loss(self, rollout: Rollout, state: State, subtracts: bool) -> SampleLoss:
        """The loss of samples, by the state that has seen them; ``subtracts`` a control variate or not."""
        return WeightedLoss(rollout, self.weights(rollout, state), self.follows_policy, subtracts)


class WeightedLoss(SampleLoss):
    """Constant weights, multiplied by π/q or with π/q subtracted if the method asks for it."""

    def __init__(
        self, rollout: Rollout, weights: Tensor, follows_policy: bool, subtracts_control_variate: bool
    ) -> None:
        # The expectation of π/q · ∇log π is 0 over all samples of a context, those without a verdict included.
        everywhere = rollout.valid.any(dim=1, keepdim=True).expand_as(rollout.valid)
        self.active = (everywhere if subtracts_control_variate else weights != 0).flatten()
        self.normalizer = float(rollout.valid.sum())
        self.weights: Tensor = rollout.own(weights.detach())
        self._log_q = rollout.own(rollout.log_q)
        self._multiplies, self._subtracts = follows_policy, subtracts_control_variate

    def loss(self, rows: Tensor, scores: TokenScores) -> Tensor:
        """−Σ w · log π, no gradient through w."""
        log_policy = scores.log_prob()
        weights = self.weights[rows].to(log_policy)
        if self._multiplies or self._subtracts:
            moved = (log_policy.detach() - self._log_q[rows].to(log_policy)).exp()  # π/q
            weights = weights * moved if self._multiplies else weights - moved
        return -(weights * log_policy).sum()
