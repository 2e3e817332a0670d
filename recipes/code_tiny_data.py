"""The training data of `code-tiny`: functions of the standard library, a tokenizer, and the lists of contexts."""

from __future__ import annotations

import ast
import dataclasses
import io
import random
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cdpg.tasks.code.constraint import pep8_clean
from cdpg.tasks.code.signatures import Definition, definitions, read_source

END, PAD = "<|end|>", "<|pad|>"
BODY_TOKENS = 128
"""Longest body, the end token included: as long as the tasks sample. A function that is cut cannot compile."""
SIGNATURE_TOKENS = 64
"""Longest signature."""
# A line break with the indentation after it is one piece, apart from the colon before it: the tokens of a signature
# are the same whether a body follows or not. ".name" and " name" are one piece each; digits stand alone.
PIECES = r"[\r\n]+[ \t]*|[ .]?_*[^\W\d_]+|_+|\d| ?[^\s\w.]+|\.+|[ \t]+|\s"


def clean_body(definition: Definition) -> str | None:
    """The body without docstring and comments, or None if it is not fit to learn from.

    Prose is most of what a docstring or a comment holds, and a model this small has no room for it.
    """
    source = definition.signature + definition.body
    if not source.isascii() or "\t" in source or "\f" in source or not definition.body.startswith("\n"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = ast.parse(source).body[0]
            tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, ValueError, tokenize.TokenError):
        return None
    lines = source.split("\n")
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    assert isinstance(function, ast.FunctionDef)
    dropped = range(0)
    if ast.get_docstring(function, clean=False) is not None:
        dropped = range(function.body[0].lineno, (function.body[0].end_lineno or 0) + 1)
    kept = [line.rstrip() for number, line in enumerate(lines[1:], start=2) if number not in dropped]
    body = "\n" + re.sub(r"\n{3,}", "\n\n", "\n".join(kept).strip("\n"))
    return body if _is_fit(definition.signature, body) else None


def _is_fit(signature: str, body: str) -> bool:
    """Indented by four spaces, in lines of ordinary length, compiling, and nowhere cut as a function's end."""
    lines = [line for line in body.split("\n") if line]
    if not lines or not re.match(r" {4}[^ ]", lines[0]) or max(map(len, lines)) > 100:
        return False
    if not all(line.startswith("    ") for line in lines):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # functions with invalid escapes are no model of Python
            compile(signature + body + "\n", "<function>", "exec")
    except (SyntaxError, ValueError, Warning):
        return False
    return True


def functions(files: Iterable[Path]) -> list[tuple[str, str]]:
    """Distinct (signature, cleaned body) of some files."""
    found: dict[tuple[str, str], None] = {}
    for source in map(read_source, files):
        for definition in definitions(source or ""):
            body = clean_body(definition)
            if body is not None:
                found[definition.signature, body] = None
    return list(found)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the pieces of `PIECES`: any text has tokens, and no token spans two pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=BODY_TOKENS + SIGNATURE_TOKENS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """A function as tokens: the signature, then the body with the end token."""

    tokens: tuple[int, ...]
    prompt: int
    """How many of the tokens are the signature's: these are given, not learnt."""


def encode(pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """Those functions that fit, as rows; a signature has the same tokens as when it is a prompt."""
    rows = []
    for signature, body in pairs:
        first, both = tokenizer.encode(signature), tokenizer.encode(signature + body)
        if both[: len(first)] != first:
            raise RuntimeError(f"the tokenizer merged across the end of {signature!r}")
        if len(first) <= SIGNATURE_TOKENS and len(both) - len(first) < BODY_TOKENS:
            rows.append(Row((*both, tokenizer.eos_token_id), len(first)))
    return rows


def batches(rows: Sequence[Row], batch_tokens: int, generator: random.Random) -> Iterator[list[Row]]:
    """One pass over the rows in random order, those of a batch being of about one length."""
    keys = [(len(row.tokens) + generator.uniform(0, 8), number) for number, row in enumerate(rows)]
    groups: list[list[Row]] = [[]]
    for _, number in sorted(keys):
        longest = max(len(row.tokens) for row in (*groups[-1], rows[number]))
        if (len(groups[-1]) + 1) * longest > batch_tokens:
            groups.append([])
        groups[-1].append(rows[number])
    generator.shuffle(groups)
    yield from groups


def choose_signatures(
    signatures: Sequence[str], number: int, tokenizer: PreTrainedTokenizerFast, seed: int
) -> list[str]:
    """Contexts for the tasks: PEP8-clean, of ordinary length, and at most half of them of test functions.

    A signature that itself breaks PEP8 can have no clean function; more than half of the standard library's functions
    are tests, whose signatures are much alike.
    """
    clean = pep8_clean(signatures, ["\n    pass"] * len(signatures))
    fit = [
        signature
        for signature, is_clean in zip(signatures, clean, strict=True)
        if is_clean and signature.isascii() and len(tokenizer.encode(signature)) <= SIGNATURE_TOKENS
    ]
    generator = random.Random(seed)
    shuffled = [signature for _, signature in sorted((generator.random(), signature) for signature in fit)]
    tests = [signature for signature in shuffled if signature.startswith("def test")][: number // 2]
    others = [signature for signature in shuffled if not signature.startswith("def test")][: number - len(tests)]
    if len(tests) + len(others) < number:
        raise RuntimeError(f"only {len(tests) + len(others)} signatures are left of {number}")
    return [signature for _, signature in sorted((generator.random(), signature) for signature in tests + others)]
