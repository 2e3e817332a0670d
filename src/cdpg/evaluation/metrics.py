"""The metrics that every evaluation has: what each is called, what it counts in, and which way is better.

A task's own metrics are defined with the task, in its measure (``Measure.metrics``). ``evaluation.json`` and
``comparison.json`` contain their descriptions, so that tables, figures and cards need the file alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from cdpg.constraints.factors import Moment, Tilt
from cdpg.messages.text import plain_text

METRIC_INFO, COUNT_INFO = "metric_info", "count_info"
"""Keys of a file: what it says of the metrics and of the counts that are its task's own."""
Group = Literal["requirement", "outputs", "sampling"]
_MOST_DIGITS = 8


@dataclass(frozen=True)
class Metric:
    """How a metric is shown."""

    label: str
    """Short name, for an axis or a column."""
    meaning: str
    """One sentence."""
    unit: str = ""
    """Unit of the axis; empty for a share or a pure number."""
    better: Literal["higher", "lower"] | None = None
    """Which direction is better; None if neither is."""
    digits: int = 3
    """Decimals in a table."""
    of_base: bool = False
    """Whether it estimates a quantity of the base, whichever model is sampled; models are not compared in it."""
    of_reference: bool = False
    """Whether it compares an output with its context's reference: contexts without one do not count in it."""
    group: Group = "outputs"
    """The table of the report that shows it."""

    def to_mapping(self) -> dict[str, Any]:
        """As the files have it."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, entry: Any) -> Metric | None:
        """A metric's description in a file, which is untrusted; None if it has no name."""
        found = _entry(entry)
        label, better, digits, group = (found.get(key) for key in ("label", "better", "digits", "group"))
        if not isinstance(label, str) or not label.strip():
            return None
        return cls(
            label=plain_text(label, limit=60),
            meaning=_text(found.get("meaning"), 300),
            unit=_text(found.get("unit"), 30),
            better=better if better in ("higher", "lower") else None,
            digits=digits if type(digits) is int and 0 <= digits <= _MOST_DIGITS else 3,
            of_base=found.get("of_base") is True,
            of_reference=found.get("of_reference") is True,
            group=next((known for known in get_args(Group) if known == group), "outputs"),
        )


@dataclass(frozen=True)
class Count:
    """How counts of what occurred in the outputs are shown."""

    title: str
    unit: str = "count"
    exclusive: bool = False
    """Whether each output has exactly one of the names: then shares of the outputs are shown."""

    def to_mapping(self) -> dict[str, Any]:
        """As the files have it."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, entry: Any) -> Count | None:
        """The description of some counts in a file, which is untrusted; None if they have no name."""
        found = _entry(entry)
        title = found.get("title")
        if not isinstance(title, str) or not title.strip():
            return None
        return cls(plain_text(title, limit=60), _text(found.get("unit"), 30), found.get("exclusive") is True)


def metric_info(record: Mapping[str, Any]) -> dict[str, Metric]:
    """The descriptions of a file's own metrics."""
    found = {name: Metric.from_mapping(entry) for name, entry in _entry(record.get(METRIC_INFO)).items()}
    return {name: metric for name, metric in found.items() if metric is not None}


def count_info(record: Mapping[str, Any]) -> dict[str, Count]:
    """The descriptions of a file's own counts."""
    found = {name: Count.from_mapping(entry) for name, entry in _entry(record.get(COUNT_INFO)).items()}
    return {name: count for name, count in found.items() if count is not None}


def _entry(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any, limit: int) -> str:
    return plain_text(value, limit) if isinstance(value, str) else ""


def fixed(value: float, digits: int) -> str:
    """A number with so many decimals; a value that rounds to zero has no sign."""
    shown = f"{value:.{digits}f}"
    return shown if float(shown) else f"{0:.{digits}f}"


POOLED = "kl_target_policy_pooled"
"""The one metric that depends on the models evaluated together; only figures from one pool are comparable."""

GAIN = "gain"
"""The metric that is measured on exact samples of the ideal model; it is comparable between evaluations."""

RECALL = "recall"
"""The metric that says how much of the ideal model's diversity is left."""

GAIN_ESS = "gain_effective_samples"
"""Key of a file: the effective number of samples that the gain of a context is measured on, as a mean over contexts;
only with moments or rewards, since the samples are then weighted."""

LEFT_OUT = ("checks_failed", "not_applicable")
"""Shares of samples without a verdict; absent if 0 for all models evaluated together."""


def factor_metrics(tilt: Tilt) -> dict[str, Metric]:
    """How the means of the target's moments and rewards are shown, by name."""
    found = {}
    for name, factor in zip(tilt.names, tilt.factors, strict=True):
        label = name.replace("_", " ", 1)
        if isinstance(factor, Moment):
            meaning = f"Mean over samples of a moment of the target, which asks for {factor.mean:g}."
            found[name] = Metric(label, meaning, group="requirement")
        else:
            meaning = f"Mean over samples of a reward of the target, at β = {factor.beta:g}."
            found[name] = Metric(label, meaning, better="higher", group="requirement")
    return found


METRICS: dict[str, Metric] = {
    "satisfaction": Metric("satisfaction", "Mean of b over ancestral samples.", better="higher"),
    "satisfaction_beam": Metric("satisfaction (beam 4)", "Mean of b over the outputs of beam search.", better="higher"),
    GAIN: Metric(
        "gain",
        "How much nearer to the ideal model than the base: KL(p, a) − KL(p, π), an unbiased estimate from satisfying "
        "samples of the base, over the contexts that have one.",
        "nats",
        "higher",
    ),
    RECALL: Metric(
        "recall of p",
        "Share of samples of the ideal model to which the model gives at least a tenth of their probability under "
        "the ideal model, over the contexts that have one.",
        better="higher",
    ),
    "kl_target_policy": Metric(
        "KL(p, π), own samples",
        "Distance from the ideal model by Algorithm 2, over contexts with a satisfying sample; at most log M.",
        "nats",
        "lower",
    ),
    POOLED: Metric(
        "KL(p, π), pooled",
        "Distance from the ideal model, from one pool of samples of the base and all models that were evaluated with "
        "it, on the same contexts.",
        "nats",
        "lower",
    ),
    "kl_policy_base": Metric("KL(π, a)", "Distance of the model from the base: a cost, neither good nor bad.", "nats"),
    "coverage": Metric("coverage", "Share of contexts with at least one satisfying sample.", better="higher"),
    "z_mean": Metric(
        "mean Z",
        "Mean over contexts of the estimated partition function: how often the base satisfies the constraint, "
        "whichever model is sampled. With moments or rewards it may have any scale.",
        of_base=True,
    ),
    "z_nstd": Metric(
        "nstd(Z), raw",
        "Deviation of Z over contexts, divided by its mean; sampling noise included.",
        of_base=True,
    ),
    "z_nstd_corrected": Metric("nstd(Z), corrected", "The same with the sampling noise subtracted.", of_base=True),
    "ess": Metric("effective sample size", "(Σw)²/Σw² of a context's samples, as a share of them.", better="higher"),
    "checks_failed": Metric(
        "failed checks",
        "Share of samples whose check failed; all other means over samples leave them out.",
        better="lower",
    ),
    "not_applicable": Metric(
        "not applicable",
        "Share of samples to which no constraint applies, all having returned None; all other means leave them out.",
    ),
    "length": Metric("length", "Tokens of a completion, its end token included.", "tokens", digits=1),
    "ended": Metric("ended", "Share of completions that ended before the length limit."),
    "distinct_2": Metric("Distinct-2", "Distinct bigrams over bigrams of one output, averaged.", better="higher"),
}
