"""Summarise an article with at least four named entities, all of them the article's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdpg.tasks.base import Draw, Preset, Row, Task
from cdpg.tasks.hub import halves, hub_rows
from cdpg.tasks.rows import embedded_pairs, read_pairs
from cdpg.tasks.summarization.constraint import PROMPT_PREFIX
from cdpg.tasks.summarization.metrics import SummaryMeasure

_HUB = ("abisee/cnn_dailymail", "3.0.0", "train")
_PAPER_CONTEXTS = 5000


def embedded_rows(draw: Draw) -> tuple[list[Row], list[Row]]:
    """Articles that a grammar composed."""
    return embedded_pairs("summarization", "articles")


def hub_articles(draw: Draw) -> tuple[list[Row], list[Row]]:
    """Articles of CNN and the Daily Mail."""
    return halves(hub_rows(*_HUB, _row_of_article, "source", draw, 2 * _PAPER_CONTEXTS), "source")


def _row_of_article(row: Mapping[str, Any]) -> Row | None:
    return {"source": row["article"], "reference": row["highlights"]}


ENTITIES = Task(
    name="summarization-entities",
    summary="summarise an article with at least 4 named entities, all of them from the article",
    constraint="cdpg.constraints:entities_from_source",
    measure=SummaryMeasure(),
    column="source",
    read=read_pairs,
    presets={
        "tiny": Preset(
            "t5-tiny",
            embedded_rows,
            {
                "epochs": 28,
                "contexts_per_epoch": 16,
                "num_generations": 32,
                "max_completion_length": 80,
                "learning_rate": 3e-4,
                "warmup_epochs": 5,
                "decay_epochs": 18,
                "save_every": 10,
                "evaluation_contexts": 32,
                "evaluation_samples": 8,
                "rows_per_pass": 512,
                "tokens_per_pass": 2048,
            },
            PROMPT_PREFIX,
        ),
        "paper": Preset(
            "t5-small",
            hub_articles,
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
            PROMPT_PREFIX,
        ),
    },
)
