"""Write the sentences and articles of the offline presets, which the package holds as data.

    python recipes/task_texts.py [--output src/cdpg/tasks]

The grammars of ``recipes/corpora`` generate them. A file has a row of JSON for each text and its reference.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from corpora import Pair, news_pairs, translation_pairs

DATA = Path(__file__).resolve().parent.parent / "src" / "cdpg" / "tasks"
TEXTS = {
    "translation/data/sentences_tuning.jsonl": (translation_pairs, "tune", 3000),
    "translation/data/sentences_evaluation.jsonl": (translation_pairs, "held-out", 300),
    "summarization/data/articles_tuning.jsonl": (news_pairs, "tune", 1500),
    "summarization/data/articles_evaluation.jsonl": (news_pairs, "held-out", 200),
}
"""For each file the grammar, the split and the number of rows."""


def lines(pairs: Iterable[Pair]) -> Iterator[str]:
    """Pairs as rows of a file."""
    for pair in pairs:
        yield json.dumps({"source": pair.source, "reference": pair.reference}, ensure_ascii=False) + "\n"


def content(name: str, count: int | None = None) -> bytes:
    """What a file of ``TEXTS`` holds, or its first ``count`` rows."""
    pairs_of, split, rows = TEXTS[name]
    return "".join(lines(pairs_of(split, rows if count is None else count))).encode("utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the texts of the offline presets.")
    parser.add_argument("--output", type=Path, default=DATA)
    folder = parser.parse_args().output
    for name in TEXTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content(name))


if __name__ == "__main__":
    main()
