"""Saves `code-tiny`, and measures how its samples compile and how they compare with real functions."""

from __future__ import annotations

import copy
import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import GenerationConfig, GPTNeoForCausalLM, PreTrainedTokenizerFast

from cdpg.tasks.code.constraint import OK, ast_nodes_of, compile_outcomes, function_source, pep8_clean
from code_tiny_data import BODY_TOKENS, END, SIGNATURE_TOKENS
from code_tiny_packages import CHARACTERS, LONG_BODY, PACKAGES

SAMPLES = 4
"""Completions of each signature at evaluation."""
CARD = """\
---
license: [psf-2.0, apache-2.0, bsd-3-clause, bsd-2-clause, mit]
language: [code]
pipeline_tag: text-generation
library_name: transformers
---

# code-tiny

A GPT-Neo of {parameters} parameters that completes Python functions: the base model of the code tasks. It is small
enough to tune on a laptop, and fails often enough to leave room for improvement. It is not an assistant: its functions
look like Python but have no meaning.

- Prompt: the line `def name(...):`, dedented, **without** a line break after it. The model continues with a line
  break and the indented body, then the end token `{end}`. Padding has a token of its own.
- {layers} layers of width {width}, {heads} heads, tied embeddings, {vocabulary} tokens of byte-level BPE. A line break
  with its indentation is one token; no token spans the end of a signature. At most {window} tokens.
- Stored as float16, loaded as float32 (`"dtype": "float32"` in `config.json`).

## Data

Functions and methods of Python's standard library, its `test` package included, and of packages from the package index
with permissive licences. Bodies have {body} tokens or fewer. {library_functions:,} distinct functions are of the
standard library, {library_tokens:,} tokens, and {package_functions:,} of the packages, {package_tokens:,} tokens; of
packages, bodies of fewer than {stub_tokens} tokens are left out. Docstrings and comments are removed. Functions with
tabs, non-ASCII text, lines of more than 100 characters or signatures over several lines are left out, and so is
`async def`.

Files of the standard library are split by a seed: a file with signatures for tuning or evaluation is not used for
training. Nor is a file of a package that has one of these signatures, or shares a body of more than {limit} characters
with the files set apart; of the other files, functions with a body of theirs are left out. The body of a function
occurs once. The files of a package are taken up to {characters:,} characters of bodies, in an order given by a digest
of their paths.

The standard library is under the PSF licence, version 2. The packages:

| package | version | licence |
| --- | --- | --- |
{packages_table}

## Training

`OMP_NUM_THREADS=1 python recipes/code_tiny.py`, about {minutes:.0f} minutes of one core, seed {seed}, in two stages:
{first[epochs]} passes over the standard library alone, then {second_tokens:,} tokens of the standard library and the
packages mixed, each function once. The rates rise again in the second stage, and fall to 0 at the end of each. The loss
counts the tokens of the body and the end token, given the signature.

| loss, nats a token | |
| --- | --- |
| functions of the standard library, seen in training | {library_loss:.3f} |
| functions of the packages, seen in training | {package_loss:.3f} |
| held-out functions of the standard library | {held_out_loss:.3f} |

## Samples

{n} samples ({samples} for each of the held-out signatures), temperature 1, the whole vocabulary, at most {body} tokens,
cut at the function's end. They are compared with the real functions of the same signatures that fit into {body}
tokens, cleaned as in training.

| | sampled | real |
| --- | --- | --- |
{rows}

| outcome of compiling | share of the samples |
| --- | --- |
{kinds}

{memorised}
"""
MEMORISED = """\
Memorisation: of {samples:,} samples ({each} for each of {signatures:,} held-out signatures), {verbatim:.1%} have a body
that occurs verbatim in a training function, as its whole body or a part of it. Of the {long:,} samples with a body of
more than {limit} characters, {long_verbatim:.1%} do. The training functions are those of Python {python} and of the
packages.
"""


def write_model(model: GPTNeoForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Half precision on disk, to save space; the configuration has it loaded as float32."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=BODY_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    copy.deepcopy(model).half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"dtype": "float32"}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@torch.inference_mode()
def sample(model: Any, tokenizer: PreTrainedTokenizerFast, signatures: Sequence[str], seed: int) -> list[str]:
    """One completion for each signature: the whole vocabulary at temperature 1, at most `BODY_TOKENS` tokens."""
    torch.manual_seed(seed)
    model.eval()
    completions: list[str] = []
    for start in range(0, len(signatures), 100):
        prompts = tokenizer(list(signatures[start : start + 100]), return_tensors="pt", padding=True)
        prompts.pop("token_type_ids", None)
        tokens = model.generate(
            **prompts, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=BODY_TOKENS
        )
        width = prompts["input_ids"].shape[1]
        completions += tokenizer.batch_decode(tokens[:, width:], skip_special_tokens=True)
    return completions


def describe(sources: Sequence[str]) -> dict[str, Any]:
    """Share that compiles; of those that do, the mean number of AST nodes, characters and lines."""
    outcomes = compile_outcomes(sources)
    good = [source for source, outcome in zip(sources, outcomes, strict=True) if outcome == OK]
    return {
        "samples": len(sources),
        "compiles": len(good) / len(sources),
        "ast_nodes": mean(count or 0 for count in ast_nodes_of(good)),
        "characters": mean(map(len, good)),
        "characters_of_all": mean(map(len, sources)),
        "lines": mean(source.count("\n") for source in good),
        "outcomes": dict(Counter(outcomes).most_common(12)),
    }


def memorised(signatures: Sequence[str], sources: Sequence[str], learnt: Sequence[str]) -> dict[str, Any]:
    """How many sampled bodies stand verbatim in one of the bodies learnt from, whole or as a part of it."""
    known = "\0".join(learnt)  # one text to search; no body spans two, as none holds a NUL
    bodies = [
        source.removeprefix(signature).rstrip("\n") for signature, source in zip(signatures, sources, strict=True)
    ]
    found = {body: body in known for body in set(bodies)}
    long = [body for body in bodies if len(body) > LONG_BODY]
    return {
        "python": platform.python_version(),
        "signatures": len(set(signatures)),
        "each": SAMPLES,
        "samples": len(bodies),
        "verbatim": mean(found[body] for body in bodies),
        "limit": LONG_BODY,
        "long": len(long),
        "long_verbatim": mean(found[body] for body in long),
    }


def evaluate(
    folder: Path,
    signatures: Sequence[str],
    held_out: Sequence[tuple[str, str]],
    learnt: Sequence[tuple[str, str]],
    seed: int,
) -> dict[str, Any]:
    """Samples of the model as it was saved, beside the real functions of the same signatures that fit its limit."""
    model = GPTNeoForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    contexts = [signature for signature in signatures for _ in range(SAMPLES)]
    completions = sample(model, tokenizer, contexts, seed)
    sources = [function_source(context, text) for context, text in zip(contexts, completions, strict=True)]
    wanted = set(signatures)
    real = [
        (signature, body)
        for signature, body in held_out
        if signature in wanted and len(tokenizer.encode(body)) < BODY_TOKENS
    ]
    return {
        "sampled": describe(sources) | {"pep8_clean": mean(pep8_clean(contexts, completions))},
        "real": describe([function_source(*pair) for pair in real])
        | {"pep8_clean": mean(pep8_clean(*zip(*real, strict=True)))},
        "memorised": memorised(contexts, sources, [body for _, body in learnt]),
        "examples": sources[: 12 * SAMPLES : SAMPLES],
    }


def write_card(folder: Path, figures: dict[str, Any], parameters: int) -> None:
    """The model card, its figures taken from the run that made the model."""
    sampled, real, recipe = figures["sampled"], figures["real"], figures["recipe"]
    table = "\n".join(f"| {package.name} | {package.version} | {package.licence} |" for package in PACKAGES)
    rows = "\n".join(
        f"| {name} | {sampled[key]:.{digits}f} | {real[key]:.{digits}f} |"
        for name, key, digits in (
            ("share that compiles", "compiles", 3),
            ("share without PEP8 violation", "pep8_clean", 3),
            ("AST nodes of those that compile, mean", "ast_nodes", 1),
            ("characters of those that compile, mean", "characters", 0),
            ("characters of all, mean", "characters_of_all", 0),
            ("lines of those that compile, mean", "lines", 1),
        )
    )
    kinds = "\n".join(f"| {kind} | {number / sampled['samples']:.3f} |" for kind, number in sampled["outcomes"].items())
    text = CARD.format(
        rows=rows,
        kinds=kinds,
        memorised=MEMORISED.format(**figures["memorised"]).rstrip(),
        parameters=f"{parameters:,}",
        packages_table=table,
        characters=CHARACTERS,
        limit=LONG_BODY,
        **{name: figure for name, figure in figures.items() if name != "memorised"},
        **recipe,
        n=sampled["samples"],
        samples=SAMPLES,
        body=BODY_TOKENS,
        window=BODY_TOKENS + SIGNATURE_TOKENS,
        end=END,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
