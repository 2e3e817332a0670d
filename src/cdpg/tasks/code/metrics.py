"""Metrics of the code tasks: compilability, PEP8 violations, characters, AST nodes, and kinds of errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from cdpg.contexts.contexts import Context
from cdpg.evaluation.measures import Measured, distinct_2, per_output, table_of
from cdpg.evaluation.metrics import Count, Metric
from cdpg.sandbox.reader import Apply, directly
from cdpg.tasks.code.constraint import OK, ast_nodes_of, compile_outcomes, error_lines, function_source, pep8_codes_of

EXHAUSTED = "exhausted the compiler"


METRICS = {
    "compilability": Metric("compilability", "Share of functions that compile.", better="higher", group="requirement"),
    "pep8_violations": Metric(
        "PEP8 violations", "Violations found by pycodestyle in a function.", "violations", "lower", 2
    ),
    "characters": Metric("characters", "Characters of a function, its signature included.", "characters", digits=1),
    "ast_nodes": Metric("AST nodes", "Nodes of the syntax tree, of functions that compile.", "nodes", digits=1),
}
COUNTS = {
    "compile_outcome": Count("Outcomes of compiling", "share of functions", exclusive=True),
    "pep8_code": Count("PEP8 violations by code", "violations"),
}


@dataclass(frozen=True)
class CodeMeasure:
    """Each output is judged with its signature: the ``signature`` column if there is one, else the prompt.

    PEP8 violations are counted where pycodestyle can read the text, AST nodes in functions that compile. A text that
    exhausts the compiler does not compile.
    """

    beams: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=lambda: METRICS)
    counts: Mapping[str, Count] = field(default_factory=lambda: COUNTS)

    def __call__(
        self, contexts: Sequence[Context], outputs: Sequence[Sequence[str]], apply: Apply = directly
    ) -> Measured:
        signatures = [str(context.columns.get("signature") or context.prompt) for context in contexts]
        sources = [
            [function_source(signature, text) for text in texts]
            for signature, texts in zip(signatures, outputs, strict=True)
        ]
        flat = [source for texts in sources for source in texts]
        outcomes: list[str | None] = apply(compile_outcomes, flat, EXHAUSTED)
        codes = apply(pep8_codes_of, flat)
        compiled = table_of((None if outcome is None else outcome == OK for outcome in outcomes), outputs)
        nodes = table_of(apply(ast_nodes_of, flat), outputs)
        return Measured(
            features={
                "compilability": compiled,
                "pep8_violations": table_of((None if found is None else len(found) for found in codes), outputs),
                "characters": per_output(sources, lambda source: len(source.rstrip("\n"))),
                "ast_nodes": np.where(compiled > 0, nodes, np.nan),
                "distinct_2": per_output(outputs, distinct_2),
            },
            frequencies={
                "compile_outcome": Counter(outcome for outcome in outcomes if outcome is not None),
                "pep8_code": Counter(code for found in codes for code in found or ()),
            },
            remarks={
                "outcome": np.array(outcomes, dtype=object).reshape(len(outputs), -1).tolist(),
                "line": _lines(contexts, signatures, flat, outcomes, apply),
            },
        )


def _lines(
    contexts: Sequence[Context],
    signatures: Sequence[str],
    flat: Sequence[str],
    outcomes: Sequence[str | None],
    apply: Apply,
) -> list[list[int | None]]:
    """The line of the first error, ``[context][output]``, in the prompt with its completion."""
    failed = [outcome is not None and outcome != OK for outcome in outcomes]
    found = iter(apply(error_lines, [source for source, wrong in zip(flat, failed, strict=True) if wrong]))
    lines = iter([next(found) if wrong else None for wrong in failed])
    per_context = len(flat) // max(1, len(contexts))
    return [
        [None if line is None else _lines_above(context, signature) + line for line in islice(lines, per_context)]
        for context, signature in zip(contexts, signatures, strict=True)
    ]


def _lines_above(context: Context, signature: str) -> int:
    return str(context.prompt).removesuffix(signature).count("\n")
