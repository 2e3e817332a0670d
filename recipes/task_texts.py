"""Write the sentences, articles and records of the tasks, which the package holds as data.

    python recipes/task_texts.py [--output src/cdpg/tasks]

The grammars of ``recipes/corpora`` generate them. A file has a row of JSON for each text and its reference or record.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from corpora import news_pairs, record_rows, translation_pairs

DATA = Path(__file__).resolve().parent.parent / "src" / "cdpg" / "tasks"
TEXTS: dict[str, tuple[Callable[[str, int], Sequence[Any]], str, int]] = {
    "translation/data/sentences_tuning.jsonl": (translation_pairs, "tune", 3000),
    "translation/data/sentences_evaluation.jsonl": (translation_pairs, "held-out", 300),
    "summarization/data/articles_tuning.jsonl": (news_pairs, "tune", 1500),
    "summarization/data/articles_evaluation.jsonl": (news_pairs, "held-out", 200),
    "chat/data/records_tuning.jsonl": (record_rows, "tune", 1000),
    "chat/data/records_evaluation.jsonl": (record_rows, "held-out", 64),
}
"""For each file the grammar, the split and the number of rows."""


def lines(rows: Iterable[Any]) -> Iterator[str]:
    """Dataclasses as rows of a file."""
    for row in rows:
        yield json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n"


def content(name: str, count: int | None = None) -> bytes:
    """What a file of ``TEXTS`` holds, or its first ``count`` rows."""
    rows_of, split, rows = TEXTS[name]
    return "".join(lines(rows_of(split, rows if count is None else count))).encode("utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the texts of the offline presets.")
    parser.add_argument("--output", type=Path, default=DATA)
    folder = parser.parse_args().output
    for name in TEXTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content(name))


if __name__ == "__main__":
    main()
