"""Samples of the ideal model p_c, by quasi-rejection sampling from a tuned model (:mod:`cdpg.target.rejection`).

β is chosen by a *pilot*: samples of the context that are used for nothing else. The accepted samples, and the figures
that say how near they are to p, come from samples drawn afterwards. β depends on the pilot's samples: if they were
accepted by it, they would not be distributed as p_β, and the total variation estimated from them is too low.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cdpg.config import CDPGConfig
from cdpg.constraints.judge import Constraints, Judge
from cdpg.contexts.chats import as_chats
from cdpg.contexts.contexts import Context, load_contexts
from cdpg.errors import RunError, UserError
from cdpg.messages.notices import shows_notices
from cdpg.messages.terms import for_caller
from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.models.loading import load_base, load_model
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import StopRule
from cdpg.models.transformer import TransformerModel
from cdpg.rollout.rollout import Rollout, example_of
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.sandbox.limits import Limits
from cdpg.system.distributed import Processes, make_accelerator
from cdpg.target.rejection import (
    BOUND,
    RejectionSummary,
    beta_as_text,
    choose_log_beta,
    log_acceptance,
    summarize_rejection,
)

_log = logging.getLogger(__name__)

PILOT = 512
"""Samples of a pilot, at least. At least as many as it took are drawn afterwards."""
_ROUND = 256
"""Samples that are drawn together."""
_FEW = 32
"""Satisfying samples that a pilot has, at least."""
_FINE = 4
"""A pilot continues until the largest share of the total weight that a sample has is at most the bound divided by this.
Outputs that the tuned model draws too rarely to occur in the pilot should then have less weight than the bound."""
_MOST = 16
"""A pilot ends after this many times its smallest number of samples. The search for samples to accept ends after this
many times the number that it is expected to need."""


@dataclass(frozen=True)
class ExactSample:
    """An accepted sample."""

    text: str
    token_ids: tuple[int, ...]
    log_policy: float
    """log π(x|c), of the tuned model that has drawn it."""
    log_base: float
    """log a(x|c)."""
    b: float
    ended: bool
    """False where the length limit cut it."""


@dataclass(frozen=True)
class ExactSamples:
    """Samples of p_β for one context, and how near p_β is to p."""

    samples: tuple[ExactSample, ...]
    summary: RejectionSummary
    """Estimated from the ``draws``, which were not used to choose β."""
    draws: int
    """Samples of the tuned model that were drawn to accept from, with a verdict."""
    pilot: int
    """Samples of the pilot with a verdict."""
    is_tilted: bool = False
    """Whether the target has moments or rewards: Z is then not the share of the base's samples that satisfy."""

    @property
    def texts(self) -> list[str]:
        """The accepted completions."""
        return [sample.text for sample in self.samples]


class ExactSampler:
    """Draws samples of p_c ∝ a(x|c) · b(x,c) · exp(λφ + r/β), with a tuned model as the proposal.

    ``model`` is the tuned model and ``base`` the one it was tuned from, each by name or loaded; ``constraints`` are
    those that it was tuned for, moments with their λ. Of the settings in ``args`` those of prompts, samples, checks and
    the device are used; give the ones of the run. ``stop`` ends sequences as it did in training.
    """

    @shows_notices
    def __init__(
        self,
        model: str | PathLike[str] | nn.Module | LanguageModel,
        base: str | PathLike[str] | LanguageModel,
        constraints: Constraints,
        args: CDPGConfig | dict[str, Any] | None = None,
        *,
        processing_class: Any = None,
        stop: StopRule | None = None,
    ) -> None:
        self.config = CDPGConfig.of(args).replace(num_generations=_ROUND, batch_size=None)
        self.judge = Judge(constraints, Limits.of(self.config))  # first: it may fork
        self.judge.tilt.require_fitted()
        self.policy = model if isinstance(model, LanguageModel) else load_model(model, self.config, processing_class)
        self.base = load_base(base, self.config)
        processes = Processes(make_accelerator(self.config))
        self._sampler = Sampler(self.policy, self.base, self.judge, self.config, processes, stop)

    @shows_notices
    def sample(self, context: Any, number: int = 4, bound: float = BOUND, pilot: int = PILOT) -> ExactSamples:
        """Accept ``number`` samples for one context, a prompt or a row with its columns.

        β is chosen for an estimated total variation to p of at most ``bound``, by ``pilot`` samples or more.
        """
        if not 0 < bound < 1:
            raise UserError(f"the bound on the total variation must lie between 0 and 1, such as 0.05, not {bound}")
        if number < 1 or pilot < 1:
            raise UserError(f"number and pilot must be at least 1, not {number} and {pilot}")
        prompt = self._encode(context)
        ratios, least = self._pilot(prompt, pilot, bound)
        log_beta = choose_log_beta(ratios, bound)
        expected = summarize_rejection(ratios, log_beta).acceptance
        _log.info(
            f"β = {beta_as_text(log_beta)}, chosen by {len(ratios):,} draws; {expected:.1%} of the next draws should "
            "be accepted"
        )
        samples, drawn = self._accept(prompt, log_beta, number, least, math.ceil(_MOST * number / expected))
        summary = summarize_rejection(drawn, log_beta)
        return ExactSamples(samples, summary, len(drawn), len(ratios), bool(self.judge.tilt.factors))

    def close(self) -> None:
        """End the worker processes; ``sample`` starts new ones."""
        self.judge.close()

    def _encode(self, context: Any) -> tuple[Context, PromptTokens]:
        """The context with its prompt; an error if a column is missing or the models' tokens differ."""
        given = context if isinstance(context, (Context, dict)) else {"prompt": context}
        loaded = as_chats(load_contexts([given]), self.config.chat, self.config.system)
        try:
            self.judge.require_columns(loaded)
        except UserError as error:
            typed = (
                "; a context given on the command line has no columns: use cdpg.ExactSampler in Python, with a row "
                "that has them"
            )
            raise UserError(f"{error}{for_caller(typed, '')}") from error
        length = self.config.max_completion_length
        if isinstance(self.policy, TransformerModel) and isinstance(self.base, TransformerModel):
            differences = list(self.policy.token_differences(self.base, loaded, length))
            if differences:
                raise UserError(
                    "the tuned model and the base have different tokens, and P is defined on those of the base: "
                    f"{'; '.join(differences)}; name the base that the model was tuned from"
                )
        return loaded[0], self.policy.encode(loaded, length)[0]

    def _rounds(self, prompt: tuple[Context, PromptTokens], stream: str) -> Iterator[Rollout]:
        """Samples of the tuned model, judged; the base scores those that satisfy."""
        number = 0
        while True:
            yield self._sampler.draw(number, [prompt[0]], [prompt[1]], False, Stopwatch(), stream=stream)
            number += 1

    def _pilot(self, prompt: tuple[Context, PromptTokens], least: int, bound: float) -> tuple[Tensor, int]:
        """``[sample]``: log P/π of the pilot's samples, and how many were drawn: more while they are too few."""
        ratios, drawn = torch.empty(0, dtype=torch.float64), 0
        for rollout in self._rounds(prompt, "exact-pilot"):
            _refuse_unjudged(rollout)
            ratios = torch.cat([ratios, _ratios(rollout)])
            drawn += rollout.b.numel()
            satisfying = int((ratios > -math.inf).sum())
            largest = float(ratios.softmax(dim=0).max()) if satisfying else 1.0
            suffices = satisfying >= _FEW and largest <= bound / _FINE
            if drawn >= least and (suffices or drawn >= _MOST * least):
                break
        if not satisfying:
            raise RunError(
                f"none of {drawn:,} samples of the tuned model satisfies the constraint in this context, so there is "
                "nothing to accept: tune it for longer, give a context like those it was tuned on, or relax the "
                "constraint"
            )
        if not suffices:
            _log.warning(
                f"{satisfying:,} of {drawn:,} samples satisfy the constraint, and one of them has {largest:.1%} of "
                "the total weight: the tuned model is far from p in this context, and the figures below are rough"
            )
        return ratios, drawn

    def _accept(
        self, prompt: tuple[Context, PromptTokens], log_beta: float, number: int, least: int, most: int
    ) -> tuple[tuple[ExactSample, ...], Tensor]:
        """The first ``number`` samples that are accepted, and log P/π of all that were drawn for it."""
        accepted: list[ExactSample] = []
        found: list[Tensor] = []
        drawn = 0
        for rollout in self._rounds(prompt, "exact"):
            uniforms = UniformStream(self.config.seed, "exact-acceptance", rollout.number)
            for row in accepted_rows(rollout, log_beta, uniforms):
                accepted.append(_sample(rollout, row))
            found.append(_ratios(rollout))
            drawn += rollout.b.numel()
            if len(accepted) >= number and drawn >= least:
                return tuple(accepted[:number]), torch.cat(found)
            if drawn >= max(least, most):
                break
        raise RunError(
            f"only {len(accepted):,} of {number:,} samples were accepted from {drawn:,} draws, far fewer than the "
            "pilot predicted: ask for fewer, allow a larger total variation, or give another seed"
        )


def accepted_rows(rollout: Rollout, log_beta: float, uniforms: UniformStream) -> Sequence[int]:
    """The samples of one context that are accepted, in the order in which they were drawn.

    Each is accepted with probability min(1, P_c/(β π)); one without a verdict never.
    """
    count = rollout.b.shape[1]
    drawn = torch.from_numpy(uniforms.draw(np.zeros(count, dtype=np.int64), np.arange(count), position=0))
    rows: list[int] = (drawn < log_acceptance(rollout.log_ratio[0], log_beta).exp()).nonzero()[:, 0].tolist()
    return rows


def _ratios(rollout: Rollout) -> Tensor:
    """``[sample]``: log P/π of the samples with a verdict."""
    ratios = rollout.log_ratio[rollout.valid]
    if not bool((ratios < math.inf).all()):  # nor is NaN
        raise RunError("the base's probabilities are not finite: its weights hold NaN or are too large")
    return ratios


def _sample(rollout: Rollout, row: int) -> ExactSample:
    samples = rollout.samples
    return ExactSample(
        text=samples.texts[0][row],
        token_ids=tuple(samples.token_ids(0, row)),
        log_policy=float(rollout.log_q[0, row]),
        log_base=float(rollout.log_a[0, row]),
        b=float(rollout.b[0, row]),
        ended=bool(samples.ended[0, row]),
    )


def _refuse_unjudged(rollout: Rollout) -> None:
    """Raise an error if no sample has a verdict; log a warning if some checks failed."""
    count, failed = rollout.b.numel(), int(rollout.failed.sum())
    example = example_of(rollout.failures)
    if bool(rollout.inapplicable.all()):
        raise UserError(
            f"no constraint applies to any of {count:,} samples of this context (all returned None): give a context to "
            "which one applies"
        )
    if not bool(rollout.valid.any()):
        raise RunError(f"the check of every one of {count:,} samples failed{example}; fix the constraint")
    if failed:
        _log.warning(f"{failed:,} of {count:,} checks failed, and their samples are left out{example}")
