"""Have a chat model answer briefly and in plain words: two constraints at once, one of them a soft score.

    python examples/plain_answers.py --model HuggingFaceTB/SmolLM2-135M-Instruct --contexts questions.txt

Several constraints are multiplied: an answer's verdict is the score of its reading level if its length is within
bounds, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.config import parse_overrides
from cdpg.constraints.texts import as_text
from cdpg.contexts.contexts import load_contexts

FEWEST, MOST = 8, 40
"""Words of an answer. Without a lower bound, the easiest way to satisfy the constraint is to say almost nothing."""
EASY, HARD = 6.0, 12.0
"""School grades: an answer up to the first gets 1, one from the second on gets 0."""
WISH = "Answer in one or two short, simple sentences."
"""Asking in the prompt costs nothing: the more often the base satisfies the constraint, the more there is to learn."""
QUESTIONS = (
    "Why is the sky blue?", "How does a bicycle stay upright?", "What is inflation?", "Why do cats purr?",
    "How do vaccines work?", "What makes bread rise?", "Why does the moon change its shape?", "What is a black hole?",
    "How do bees make honey?", "Why do we dream?", "What is a court of law?", "How does a fridge keep food cold?",
)  # fmt: skip


def grade(text: str) -> float:
    """The Flesch-Kincaid grade: 0.39 · words per sentence + 11.8 · syllables per word − 15.59."""
    words = re.findall(r"[^\W\d_]+", text)
    sentences = [part for part in re.split(r"[.!?]+", text) if part.strip()]
    if not words or not sentences:
        return float("inf")
    # A group of vowels is a syllable, except the silent e at a word's end; every word has at least one.
    syllables = sum(max(1, len(re.findall(r"[aeiouy]+", word.lower().removesuffix("e")))) for word in words)
    return 0.39 * len(words) / len(sentences) + 11.8 * syllables / len(words) - 15.59


def right_length(prompts: list[Any], completions: list[Any], **columns: Any) -> list[bool]:
    """b = 1 for an answer of 8 to 40 words that ends a sentence."""
    texts = [as_text(completion).strip() for completion in completions]  # a chat's answer is a list of one message
    return [FEWEST <= len(text.split()) <= MOST and text.endswith((".", "!", "?")) for text in texts]


def easy_to_read(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """b = 1 up to grade 6, 0 from grade 12, and a straight line between."""
    grades = [grade(as_text(completion)) for completion in completions]
    return [min(1.0, max(0.0, (HARD - found) / (HARD - EASY))) for found in grades]


def main() -> None:
    parser = argparse.ArgumentParser(description="Have a chat model answer briefly and in plain words.")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--contexts", help="questions: a text file, or one with a column 'prompt'")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting")
    options = parser.parse_args()
    questions = [str(c.prompt) for c in load_contexts(options.contexts)] if options.contexts else QUESTIONS
    rows = [{"prompt": [{"role": "user", "content": f"{question} {WISH}"}]} for question in questions]
    settings = {"output_dir": "runs/plain", "epochs": 100, "contexts_per_epoch": 8, "max_completion_length": 80}
    config = CDPGConfig.from_mapping({**settings, **parse_overrides(options.set)})
    held_out = rows[::4]  # every fourth question, for the evaluation
    tuning = [row for row in rows if row not in held_out] or rows
    CDPGTrainer(options.model, [right_length, easy_to_read], config, tuning, held_out).train()


if __name__ == "__main__":
    main()
