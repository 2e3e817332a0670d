"""Have a model write JSON that follows a schema.

    pip install jsonschema
    python examples/json_schema.py --model HuggingFaceTB/SmolLM2-135M --contexts sentences.txt

The prompt shows one example; the constraint reads the answer's first line. It does not check whether the values are
*right*: the model keeps what it knows of that, since tuning changes only what the constraint requires.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from jsonschema import Draft202012Validator

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.config import parse_overrides
from cdpg.contexts.contexts import load_contexts

SCHEMA = {
    "type": "object",
    "required": ["name", "age", "city"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "additionalProperties": False,
}
VALIDATOR = Draft202012Validator(SCHEMA)
PROMPT = 'Text: Ann is 31 and lives in Oslo.\nJSON: {{"name": "Ann", "age": 31, "city": "Oslo"}}\nText: {}\nJSON:'
PEOPLE = ("Bob, Rome, 45", "Eve, Paris, 8", "Ida, Lima, 70", "Max, Bern, 19", "Lea, Cairo, 33", "Tom, Delhi, 52")
FORMS = ("{0} is {2} years old and comes from {1}.", "In {1} we met {0}, aged {2}.")
SENTENCES = [form.format(*person.split(", ")) for form in FORMS for person in PEOPLE]


def valid_json(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    """b(x,c) = 1 if the completion is JSON and follows the schema."""

    def is_valid(text: str) -> bool:
        try:
            return VALIDATOR.is_valid(json.loads(text))
        except (ValueError, RecursionError):  # an error that the text causes is a verdict, not a failure
            return False

    return [is_valid(text) for text in completions]


class FirstLine:
    """Stop rule: the answer is one line. Text after it is neither sampled nor scored."""

    watch = frozenset("\n")

    def cut(self, completion: str) -> str | None:
        return completion.partition("\n")[0] if "\n" in completion else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Have a model write JSON that follows a schema.")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M")
    parser.add_argument("--contexts", help="sentences: a text file, or one with a column 'prompt'")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting")
    options = parser.parse_args()
    sentences = [str(c.prompt) for c in load_contexts(options.contexts)] if options.contexts else SENTENCES
    rows = [{"prompt": PROMPT.format(sentence)} for sentence in sentences]
    settings = {"output_dir": "runs/json", "epochs": 100, "contexts_per_epoch": 8, "max_completion_length": 40}
    config = CDPGConfig.from_mapping({**settings, **parse_overrides(options.set)})
    held_out = rows[::4]  # every fourth sentence, for the evaluation
    tuning = [row for row in rows if row not in held_out] or rows
    CDPGTrainer(options.model, valid_json, config, tuning, held_out, stop=FirstLine()).train()


if __name__ == "__main__":
    main()
