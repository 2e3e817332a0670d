"""Fits the multipliers of a target's moments (:mod:`cdpg.target.moments`): to samples of the base before a run, and
again to the policy's samples, if these have a larger effective sample size.

If the outputs that must become frequent are rare, a few samples of the base have nearly all the weight. λ is then
rough, and biased, since it cannot change the moment in a context without such a sample. The policy draws these outputs
more and more often, and its samples have weights a·b/q. So λ is fitted again while the effective sample size is small.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cdpg.constraints.factors import Tilt, function_name
from cdpg.contexts.contexts import Context
from cdpg.errors import RunError, UserError
from cdpg.models.base import PromptTokens
from cdpg.models.rng import UniformStream
from cdpg.rollout.rollout import Rollout, example_of
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.system.stopping import never_stop
from cdpg.target.moments import MomentFit, MomentSamples, Unreachable, fit_multipliers, summarize

_log = logging.getLogger(__name__)

ROUND = 16
"""Samples that are drawn for each context before λ is fitted to all so far."""
ENOUGH = 16
"""Effective samples of a context, on average, that suffice for a fit on ``moment_contexts`` contexts."""
REFIT_BELOW = 0.5
"""λ may be fitted again if the effective sample size of its fit is below this share of the samples."""
GROWN = 1.5
"""λ is fitted again if the policy's samples have an effective sample size this many times as large."""


@dataclass(frozen=True)
class Fitted:
    """A fit, and the model whose samples it was fitted to."""

    fit: MomentFit
    source: Literal["base", "policy", "given"]
    """``base``, ``policy``, or ``given`` if λ was not fitted."""
    epoch: int
    """The epoch after which it was made; 0 for the first."""

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"source": self.source, "epoch": self.epoch, **asdict(self.fit)}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Fitted:
        """What :meth:`to_mapping` gave, read from JSON."""
        own = ((f.name, values[f.name]) for f in fields(MomentFit))
        fitted: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in own}
        fit = MomentFit(**fitted)
        return cls(fit, values["source"], values["epoch"])


def describe_fits(tilt: Tilt, fits: Sequence[Fitted]) -> dict[str, Any]:
    """The content of ``moments.json``: the last fit, and what came before it."""
    last = fits[-1]
    columns = ("multipliers", "reached", "natural", "lowest", "highest")
    keys = ("multiplier", "reached", "natural", "lowest", "highest")
    moments = [
        {
            "function": function_name(moment.function),
            "mean": moment.mean,
            **{key: getattr(last.fit, column)[place] for key, column in zip(keys, columns, strict=True)},
        }
        for place, moment in enumerate(tilt.moments)
    ]
    return {
        "moments": moments,
        "effective_sample_size": last.fit.ess,
        "fitted_to": last.source,
        "epoch": last.epoch,
        "contexts": last.fit.contexts,
        "samples": last.fit.samples,
        "earlier": [
            {"epoch": one.epoch, "multipliers": list(one.fit.multipliers), "effective_sample_size": one.fit.ess}
            for one in fits[:-1]
        ],
    }


def moment_samples(rollout: Rollout, tilt: Tilt) -> MomentSamples:
    """The samples of a rollout with the weights that they have at λ = 0."""
    places = tilt.moment_places
    rest = [0.0 if place in places else value for place, value in enumerate(rollout.coefficients)]
    plain = replace(rollout, coefficients=tuple(rest))
    return MomentSamples(plain.log_ratio, plain.features[..., places], plain.valid)


def fit_to_base(
    sampler: Sampler,
    contexts: Sequence[Context],
    prompts: Sequence[PromptTokens],
    check_stop: Callable[[], None] = never_stop,
) -> Fitted:
    """λ of the target's moments from samples of the base, which ``sampler`` draws.

    The same contexts and samples are used for every method and seed, so that runs on the same data have one target.
    With fewer contexts than ``moment_contexts``, each is sampled more often, in proportion.
    """
    config, tilt = sampler.config, sampler.judge.tilt
    chosen = UniformStream(0, "moments", 0).permutation(len(contexts)).tolist()[: config.moment_contexts]
    own = [contexts[i] for i in chosen], [prompts[i] for i in chosen]
    more = max(1, config.moment_contexts // len(chosen))
    means = torch.tensor([moment.mean for moment in tilt.moments], dtype=torch.float64)
    parts: list[MomentSamples] = []
    failure: Unreachable | None = None
    drawn = 0
    while drawn < more * config.moment_draws:
        check_stop()
        size = min(more * ROUND, more * config.moment_draws - drawn)
        drawing = replace(sampler, config=config.replace(num_generations=size, batch_size=None, seed=0))
        rollout = drawing.draw(len(parts), *own, False, Stopwatch(), "moments")
        refuse_failing(rollout, config.check_failures)
        parts.append(moment_samples(rollout, tilt))
        drawn += size
        everything = MomentSamples(
            *(torch.cat([getattr(part, f.name) for part in parts], dim=1) for f in fields(MomentSamples))
        )
        if not bool((everything.log_weight > -math.inf).any()):
            continue
        try:
            found, failure = fit_multipliers(everything, means), None
        except Unreachable as error:
            failure = error
            continue
        if found.ess * found.samples >= ENOUGH * config.moment_contexts:
            break
    if not bool((everything.log_weight > -math.inf).any()):
        raise RunError(
            f"none of {everything.log_weight.numel():,} samples of the base satisfies the constraint, so no moment "
            f"can be fitted: relax the constraint, or raise moment_draws (now {config.moment_draws})"
        )
    if failure is not None:
        raise UserError(_refusal(tilt, failure.fit, drawn, config.moment_draws))
    return Fitted(found, "base", 0)


def refuse_failing(rollout: Rollout, allowed: float) -> None:
    """End before anything is written if too many checks of the base's samples fail."""
    failed, total = int(rollout.failed.sum()), rollout.b.numel()
    if not failed or (failed < total and failed <= allowed * total):
        return
    kinds = Counter(key.removeprefix("failed_") for key in rollout.checks if key.startswith("failed_"))
    example = example_of(rollout.failures)
    many = "every one" if failed == total else f"{failed:,}"
    raise RunError(
        f"the check of {many} of {total:,} samples of the base failed ({', '.join(kinds)}){example}: fix the function"
        + ("" if failed == total else ", or raise check_failures")
    )


def _refusal(tilt: Tilt, fit: MomentFit, drawn: int, most: int) -> str:
    """The message for moments that no λ reaches: it says which can be reached."""
    on = f"{drawn} samples of the base for each of {fit.contexts:,} contexts"
    for moment, low, high, natural in zip(tilt.moments, fit.lowest, fit.highest, fit.natural, strict=True):
        name = function_name(moment.function)
        if low == high:
            return (
                f"the moment {name} cannot be changed to {moment.mean:g}: in {on} it has the same value for all "
                f"satisfying samples of a context, so its mean is {natural:.4g} whatever λ is; give a function whose "
                f"value differs between outputs of one context, or raise moment_draws (now {most}) if it rarely "
                "differs"
            )
        if not low < moment.mean < high:
            return (
                f"no λ gives the moment {name} the mean {moment.mean:g}: in {on} any mean strictly between {low:.4g} "
                f"and {high:.4g} can be reached, and that of the base is {natural:.4g}; ask for a mean in this range, "
                f"or raise moment_draws (now {most}) if the outputs in question are rare"
            )
    names = [function_name(moment.function) for moment in tilt.moments]
    nearest = ", ".join(f"{name} = {value:.4g}" for name, value in zip(names, fit.reached, strict=True))
    return (
        f"each of the means of {', '.join(names)} can be reached by itself, but not all together: in {on} the nearest "
        f"is {nearest}; ask for these, or drop a moment"
    )


@dataclass(frozen=True)
class MomentBuffer:
    """The latest visits of the run's contexts, to fit λ again; immutable."""

    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """``[visit, sample]`` and ``[visit, sample, moment]``, finite throughout; empty before the first epoch."""

    def __len__(self) -> int:
        """Number of visits."""
        return len(self.tables["valid"]) if self.tables else 0

    def add(self, rollout: Rollout, tilt: Tilt, capacity: int) -> MomentBuffer:
        """With the samples of an epoch; the oldest visits beyond the capacity are dropped."""
        new = moment_samples(rollout, tilt)
        weighted = new.log_weight > -math.inf
        tables = {
            "weighted": weighted,
            "valid": new.valid,
            "log_weight": new.log_weight.where(weighted, new.log_weight.new_zeros(())),
            "phi": new.phi.where(weighted[..., None], new.phi.new_zeros(())),
        }
        joined = {
            name: torch.cat([self.tables[name], table]) if self.tables else table for name, table in tables.items()
        }
        return MomentBuffer({name: table[-capacity:] for name, table in joined.items()})

    def samples(self) -> MomentSamples:
        """As :func:`~cdpg.target.moments.fit_multipliers` takes them."""
        log_weight = self.tables["log_weight"].masked_fill(~self.tables["weighted"], -math.inf)
        return MomentSamples(log_weight, self.tables["phi"], self.tables["valid"])


def refit(buffer: MomentBuffer, last: Fitted, tilt: Tilt, epoch: int) -> Fitted | None:
    """A new fit to the policy's samples, if these have a larger effective sample size; None otherwise."""
    samples = buffer.samples().covered()
    if not len(samples.valid):
        return None
    multipliers = torch.tensor(last.fit.multipliers, dtype=torch.float64)
    if summarize(samples, multipliers).ess < GROWN * last.fit.ess:
        return None
    means = torch.tensor([moment.mean for moment in tilt.moments], dtype=torch.float64)
    try:
        return Fitted(fit_multipliers(samples, means), "policy", epoch)
    except Unreachable:  # of so few samples; the first fit has shown that there is a λ
        return None
