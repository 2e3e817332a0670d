"""All metrics of an evaluation: names, units, and which direction is better.

Tables, figures and model cards all name metrics by this list; it imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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


def fixed(value: float, digits: int) -> str:
    """A number with so many decimals; a value that rounds to zero has no sign."""
    shown = f"{value:.{digits}f}"
    return shown if float(shown) else f"{0:.{digits}f}"


POOLED = "kl_target_policy_pooled"
"""The one metric that depends on the models evaluated together; only figures of one pool compare."""

LEFT_OUT = ("checks_failed", "not_applicable")
"""Shares of samples without a verdict; absent if 0 for all models evaluated together."""

METRICS: dict[str, Metric] = {
    "satisfaction": Metric("satisfaction", "Mean of b over ancestral samples.", better="higher"),
    "satisfaction_beam": Metric("satisfaction (beam 4)", "Mean of b over the outputs of beam search.", better="higher"),
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
    "kl_policy_base": Metric(
        "KL(π, a)", "Distance of the model from the base: the price of satisfaction, neither good nor bad.", "nats"
    ),
    "coverage": Metric("coverage", "Share of contexts with at least one satisfying sample.", better="higher"),
    "z_mean": Metric(
        "mean Z",
        "Mean over contexts of the estimated partition function: how much of the base satisfies, whichever model is "
        "sampled.",
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
    "bleu": Metric("BLEU-4", "sacreBLEU of beam-search outputs against the references.", better="higher", digits=1),
    "bleu_masked": Metric(
        "BLEU-4, numbers masked",
        "The same with un, une, deux … neuf and 1 … 9 replaced by one placeholder on both sides.",
        better="higher",
        digits=1,
    ),
    "precision_source": Metric(
        "precision-source", "Share of the output's entities that are in the source.", better="higher"
    ),
    "recall_target": Metric(
        "recall-target", "Share of the reference's entities that are in the output.", better="higher"
    ),
    "entities": Metric("entities", "Distinct named entities of an output.", "entities", "higher", 2),
    "rouge_l": Metric("ROUGE-L", "F-measure against the reference.", better="higher"),
    "compilability": Metric("compilability", "Share of functions that compile.", better="higher"),
    "pep8_violations": Metric(
        "PEP8 violations", "Violations found by pycodestyle in a function.", "violations", "lower", 2
    ),
    "characters": Metric("characters", "Characters of a function, its signature included.", "characters", digits=1),
    "ast_nodes": Metric("AST nodes", "Nodes of the syntax tree, of functions that compile.", "nodes", digits=1),
}
