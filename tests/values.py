"""The runs of tests/test_values.py: a model that is a table, contexts, a constraint, and the commands.

As a script, one of two processes that share ``cdpg run`` for every method.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from reference.methods import Settings
from reference.model import LETTERS, Context, Parameters
from values_constraint import holds

METHODS = ("cdpg", "dpg", "reinforce", "ziegler")

# Prompts of unsorted length; the constraint does not apply to "d d". An epoch of 4 may span two passes over the 7.
TRAINING = ("a b", "c", "d c b a", "b b c", "d d", "c d a b d", "a")
# More than the 64 that are sampled together; none of them is tuned on.
HELD_OUT = tuple(" ".join(LETTERS[i // 4**j % 4] for j in range(4)) + (1 + 5 * i % 3) * " b" for i in range(10, 76))

SETTINGS: dict[str, Any] = {
    "epochs": 5,
    "contexts_per_epoch": 4,
    "num_generations": 6,
    "max_completion_length": 3,
    "learning_rate": 0.15,
    "warmup_epochs": 2,
    "decay_epochs": 2,
    "batch_size": 5,  # of 24 samples: the last batch has 4
    "max_grad_norm": 0.5,
    "seed": 13,
    "ziegler_horizon": 150,
    "ziegler_target_kl": 0.3,
    "evaluation_contexts": 9,
    "evaluation_samples": 5,
    "evaluate_every": 2,
    "gain_draws": 16,  # the evaluation's 5, a round of 8 and one of 3
    "log_samples": 24,  # all
}
TECHNICAL = {
    "control_variate": "false",  # the paper's estimator
    "replay": 0,
    "dtype": "float64",
    "device": "cpu",
    "rows_per_pass": 17,  # several chunks, whose rows are not in the order of the contexts
    "tokens_per_pass": 60,
    "check_failures": 0.9,
    "save_every": 2,
}
OF_TWO = {"log_samples": 5, "seed": 16, "epochs": 4, "evaluation_contexts": 5}
"""What differs in the runs of two processes, which also have fewer contexts held out."""
FEW = HELD_OUT[:9]
EXACT = 1e-7
"""Relative to the number, or to 1 if that is more; everything is computed in float64."""


def settings(method: str, **changes: Any) -> Settings:
    """What the reference is asked for."""
    return Settings(method=method, **{**SETTINGS, **changes})


def contexts(prompts: tuple[str, ...]) -> list[Context]:
    """Contexts with the letter that the constraint looks for."""
    return [Context(p, {"letter": LETTERS[(i + len(p)) % 3]}, i + 1) for i, p in enumerate(prompts)]


def judge(context: Context, text: str) -> float | str | None:
    """A verdict, or the kind of failure, or None where the constraint does not apply."""
    try:
        verdict = holds([context.prompt], [text], [context.columns["letter"]])[0]
    except ValueError:
        return "exception"
    return "value" if verdict == 7.0 else verdict


def prepare(folder: Path) -> None:
    """The files that a command is given: a model's folder and two files of contexts."""
    write_model(folder / "model")
    for name, prompts in (("train", TRAINING), ("held_out", HELD_OUT), ("few", FEW)):
        lines = [json.dumps({"prompt": c.prompt, **c.columns}) for c in contexts(prompts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


def write_model(folder: Path) -> None:
    for part in make_model():
        part.save_pretrained(folder)


def make_model() -> tuple[Any, Any]:
    """A tokenizer, and an OPT model without layers: embeddings of tokens and positions, and a head.

    Nothing else is in between.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

    words = {"<e>": 0, **{letter: 1 + place for place, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<e>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", pad_token="<e>")
    config = OPTConfig(
        vocab_size=5, hidden_size=4, word_embed_proj_dim=4, num_hidden_layers=0, num_attention_heads=1, ffn_dim=4,
        max_position_embeddings=24, do_layer_norm_before=False, tie_word_embeddings=False, eos_token_id=0,
        pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = OPTForCausalLM(config).double()
    generator = np.random.default_rng(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(generator.normal(0.0, 0.7, parameter.shape)))
    return fast, model


def named(tensors: dict[str, Any], prefix: str = "") -> Parameters:
    """Tensors of a file by the reference's names; OPT's positions start at the third row."""
    found = {name: tensors[f"{prefix}{key}"] for name, key in NAMES.items() if f"{prefix}{key}" in tensors}
    return {name: values[2:] if name == "positions" else values for name, values in found.items()}


NAMES = {
    "tokens": "model.decoder.embed_tokens.weight",
    "positions": "model.decoder.embed_positions.weight",
    "head": "lm_head.weight",
}


def read_model(folder: Path) -> Parameters:
    """A model's folder as the reference takes it."""
    return named(load_file(folder / "model.safetensors"))


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two values of JSON are not the same, to rounding."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        odd = [
            f"{path}/{key}: only {'found' if key in found else 'expected'}" for key in found.keys() ^ expected.keys()
        ]
        both = sorted(found.keys() & expected.keys(), key=str)
        return odd + [text for key in both for text in differences(found[key], expected[key], f"{path}/{key}")]
    if isinstance(expected, list) and isinstance(found, list):
        odd = [f"{path}: {len(found)} found, {len(expected)} expected"] if len(found) != len(expected) else []
        pairs = enumerate(zip(found, expected, strict=False))
        return odd + [text for place, pair in pairs for text in differences(*pair, f"{path}/{place}")]
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (found, expected))
    same = abs(found - expected) <= EXACT * max(1.0, abs(expected)) if numbers else found == expected
    return [] if same else [f"{path}: {found!r} found, {expected!r} expected"]


def without(record: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


def command(name: str, folder: Path, held_out: str, *words: str, **changes: Any) -> list[str]:
    """The words of a command on the files in ``folder``."""
    given = [f"--set={key}={value}" for key, value in {**SETTINGS, **TECHNICAL, **changes}.items()]
    files = ["--model", "model", "--contexts", "train.jsonl", "--eval-contexts", held_out]
    files = [word if word.startswith("--") else str(folder / word) for word in files]
    return [name, *files, "--constraint", "values_constraint:holds", *given, *words]


def main(folder: Path) -> None:
    """``cdpg run`` for every method, one after the other in one process, to load the libraries once."""
    from cdpg.cli.options import app

    for method in METHODS:
        words = ("--method", method, "--output-dir", str(folder / "two" / method), "--no-report")
        app(command("run", folder, "few.jsonl", *words, check_workers=0, **OF_TWO), standalone_mode=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
