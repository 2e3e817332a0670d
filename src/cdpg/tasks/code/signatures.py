"""Function signatures as contexts: extracted from Python sources with ``ast``, split by file.

A context is the dedented ``def …:`` line of a function or a method, as it is in the source. Decorators and bodies are
left out. So are ``async def`` (the code tasks complete a ``def`` line) and signatures of several lines.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import os
import random
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from cdpg.errors import UserError

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders inside a source tree that hold other people's packages, or no sources."""

SPLIT_SHARES = (0.84, 0.10, 0.06)
"""Shares of the files for training the base, for tuning and for evaluation."""


@dataclasses.dataclass(frozen=True)
class Definition:
    """A function of a file, dedented."""

    signature: str
    """``def name(...):``, one line, nothing after the colon."""
    body: str
    """The lines below the signature, each starting with a newline: ``signature + body`` is the function."""


@dataclasses.dataclass(frozen=True)
class FileSplit:
    """Files of a source tree, in three disjoint parts."""

    base: tuple[Path, ...]
    """Files to train the base model on."""
    tuning: tuple[Path, ...]
    """Files whose signatures are tuned on."""
    evaluation: tuple[Path, ...]
    """Files whose signatures are held out."""


@dataclasses.dataclass(frozen=True)
class SignatureSplit:
    """Signatures of a `FileSplit`: no file is in two parts, and no signature either."""

    base: tuple[str, ...]
    tuning: tuple[str, ...]
    evaluation: tuple[str, ...]


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def python_files(folder: Path | str) -> list[Path]:
    """All ``.py`` files under a folder, in the order of their names on every system."""
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: give a folder of Python sources.")
    found = [
        path
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS & set(path.relative_to(root).parts) and os.path.isfile(path)  # no broken link
    ]
    if not found:
        raise UserError(f"{root} holds no Python source: give a folder with .py files in it or below it.")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_source(path: Path) -> str | None:
    """A file's text by its declared encoding, or None if it cannot be read or decoded."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (OSError, SyntaxError, UnicodeError, LookupError):
        return None


def definitions(source: str) -> list[Definition]:
    """Every function and method whose signature takes one line, in the order of the file; nested ones too.

    A source that this interpreter cannot parse (Python 2, a newer grammar) gives nothing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return []
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        lines = source.split("\n")
        ordered = sorted(nodes, key=lambda node: (node.lineno, node.col_offset))
        return [found for node in ordered if (found := _definition(node, lines)) is not None]


def _definition(node: ast.FunctionDef, lines: Sequence[str]) -> Definition | None:
    # ast counts columns in bytes, but only ASCII white space precedes a def.
    first, indent = lines[node.lineno - 1], lines[node.lineno - 1][: node.col_offset]
    signature = _signature(first[node.col_offset :]) if not indent.strip() else None
    if signature is None:
        return None
    below = lines[node.lineno : node.end_lineno]
    # A line of a string literal may start left of the def: it stays as it is.
    body = "".join("\n" + line.removeprefix(indent) for line in below)
    if node.body[0].lineno == node.lineno:  # def f(): return 1
        body = first[node.col_offset + len(signature) :] + body
    return Definition(signature, body)


def _signature(line: str) -> str | None:
    """The part of a line up to the colon that ends its signature; None if it does not end in this line."""
    depth = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            if token.type != tokenize.OP:
                continue
            depth += (token.string in "([{") - (token.string in ")]}")
            if token.string == ":" and depth == 0:
                signature = line[: token.end[1]]
                ast.parse(signature + " pass")
                return signature
    except (tokenize.TokenError, SyntaxError, ValueError):
        pass
    return None


def split_files(files: Sequence[Path], seed: int = 0, shares: tuple[float, float, float] = SPLIT_SHARES) -> FileSplit:
    """Shuffle the files by a seed and split them into three parts."""
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
        raise UserError(f"shares of files are {shares}: give three that are not negative and add up to 1.")
    # Shuffled by sorting on seeded keys: random.shuffle may change between Python versions, random() may not.
    generator = random.Random(seed)
    shuffled = [path for _, path in sorted((generator.random(), path) for path in files)]
    first = round(shares[0] * len(shuffled))
    second = first + round(shares[1] * len(shuffled))
    parts = (shuffled[:first], shuffled[first:second], shuffled[second:])
    return FileSplit(*(tuple(sorted(part)) for part in parts))


def signatures_in(files: Iterable[Path]) -> list[str]:
    """The distinct signatures of some files, in the order of their first occurrence."""
    sources = (read_source(path) for path in files)
    found = (definition.signature for source in sources if source for definition in definitions(source))
    return list(dict.fromkeys(found))


def split_signatures(
    folder: Path | str | None = None,
    seed: int = 0,
    shares: tuple[float, float, float] = SPLIT_SHARES,
) -> SignatureSplit:
    """Signatures of a source tree (by default the standard library) in three parts, disjoint by file.

    A signature in files of several parts (``def setUp(self):``) belongs to the first of them, in the order base,
    tuning, evaluation. So held-out signatures occur in no other part.
    """
    files = split_files(python_files(standard_library() if folder is None else folder), seed, shares)
    base = signatures_in(files.base)
    seen = set(base)
    tuning = [signature for signature in signatures_in(files.tuning) if signature not in seen]
    seen.update(tuning)
    evaluation = [signature for signature in signatures_in(files.evaluation) if signature not in seen]
    return SignatureSplit(tuple(base), tuple(tuning), tuple(evaluation))
