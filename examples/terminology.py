"""Have a translation model use the terms of a glossary.

    python examples/terminology.py --model t5-small --contexts sentences.txt

Each context has a column with the terms that its sentence requires. The constraint gets this column together with
prompts and completions.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.config import parse_overrides
from cdpg.contexts.contexts import load_contexts

PREFIX = "translate English to French: "
GLOSSARY = {
    "committee": "commission", "report": "rapport", "meeting": "séance", "vote": "scrutin", "budget": "budget",
    "member": "membre", "amendment": "amendement", "chair": "présidence", "agreement": "accord", "staff": "personnel",
}  # fmt: skip
"""The French term to use for each English one, where a dictionary offers several."""
SUBJECTS = ("The committee", "A member", "The staff", "The chair")
ACTIONS = ("approved the report.", "was late for the meeting.", "asked for a vote.", "read the amendment twice.")
SENTENCES = [f"{subject} {action}" for subject in SUBJECTS for action in ACTIONS]


def has_word(text: str, word: str) -> bool:
    """Whether the whole word occurs, in upper or lower case, in the singular or with a plural's s or x."""
    return re.search(rf"(?<!\w){re.escape(word)}[sx]?(?!\w)", text, re.IGNORECASE) is not None


def terms_of(sentence: str) -> list[str]:
    """The terms that a translation of this sentence must use."""
    return [french for english, french in GLOSSARY.items() if has_word(sentence, english)]


def uses_terms(prompts: list[str], completions: list[str], terms: list[list[str]], **columns: Any) -> list[bool]:
    """b(x,c) = 1 if every term that the source requires occurs in the translation."""
    pairs = zip(completions, terms, strict=True)
    return [all(has_word(text, term) for term in wanted) for text, wanted in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description="Have a translation model use the terms of a glossary.")
    parser.add_argument("--model", default="t5-small")
    parser.add_argument("--contexts", help="English sentences: a text file, or one with a column 'prompt'")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting")
    options = parser.parse_args()
    sentences = [str(c.prompt) for c in load_contexts(options.contexts)] if options.contexts else SENTENCES
    # A sentence without a term requires nothing: every translation satisfies the constraint, and teaches nothing.
    rows = [{"prompt": PREFIX + each, "terms": terms_of(each)} for each in sentences if terms_of(each)]
    settings = {"output_dir": "runs/terms", "epochs": 100, "contexts_per_epoch": 8, "max_completion_length": 60}
    config = CDPGConfig.from_mapping({**settings, **parse_overrides(options.set)})
    held_out = rows[::4]  # every fourth sentence, for the evaluation
    tuning = [row for row in rows if row not in held_out] or rows
    CDPGTrainer(options.model, uses_terms, config, tuning, held_out).train()


if __name__ == "__main__":
    main()
