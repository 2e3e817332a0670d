"""Translate English into French with the source's numerals written as digits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from cdpg.tasks.base import Draw, Preset, Row, Task
from cdpg.tasks.hub import halves, hub_rows
from cdpg.tasks.rows import embedded_pairs, read_pairs
from cdpg.tasks.translation.constraint import numerals_of
from cdpg.tasks.translation.metrics import TranslationMeasure

_log = logging.getLogger(__name__)

PREFIX = "translate English to French: "
_HUB = ("Helsinki-NLP/europarl", "en-fr", "train")
_PAPER_CONTEXTS = 5000


def embedded_rows(draw: Draw) -> tuple[list[Row], list[Row]]:
    """Sentences that a grammar composed."""
    return embedded_pairs("translation", "sentences")


def hub_sentences(draw: Draw) -> tuple[list[Row], list[Row]]:
    """Sentences of Europarl with a numeral in them."""
    return halves(hub_rows(*_HUB, _row_of_pair, "source", draw, 2 * _PAPER_CONTEXTS), "source")


def read_sentences(path: str, column: str) -> list[Row]:
    """Sentences of the user's; those without a numeral stay, and their number is logged."""
    rows = read_pairs(path, column)
    idle = sum(not numerals_of(row["source"]) for row in rows)
    if idle:
        _log.warning(
            f"{idle:,} of {len(rows):,} sentences in {path!r} have no numeral from one to nine: every translation "
            f"satisfies them, and they teach nothing"
        )
    return rows


def _row_of_pair(row: Mapping[str, Any]) -> Row | None:
    pair = row["translation"]
    return {"source": pair["en"], "reference": pair["fr"]} if numerals_of(pair["en"]) else None


NUMBERS = Task(
    name="translation-numbers",
    summary="translate English into French with numerals (one to nine) written as digits",
    constraint="cdpg.constraints:numerals_as_digits",
    measure=TranslationMeasure(),
    column="source",
    read=read_sentences,
    presets={
        "tiny": Preset(
            "t5-tiny",
            embedded_rows,
            {
                "epochs": 36,
                "contexts_per_epoch": 24,
                "num_generations": 24,
                "max_completion_length": 64,
                "learning_rate": 1.5e-4,
                "warmup_epochs": 6,
                "decay_epochs": 24,
                "save_every": 10,
                "evaluation_contexts": 48,
                "evaluation_samples": 8,
                "rows_per_pass": 576,
                "tokens_per_pass": 2048,
            },
            PREFIX,
        ),
        "paper": Preset(
            "t5-small",
            hub_sentences,
            {
                "epochs": 1000,
                "contexts_per_epoch": 32,
                "num_generations": 32,
                "max_completion_length": 200,
                "learning_rate": 1e-4,
                "warmup_epochs": 100,
                "evaluation_contexts": 256,
                "evaluation_samples": 32,
                "long_contexts": "cut",
            },
            PREFIX,
        ),
    },
)
