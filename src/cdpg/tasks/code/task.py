"""The code tasks: complete a Python function so that it compiles, or so that it follows PEP8."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from cdpg.contexts.contexts import load_contexts
from cdpg.errors import UserError
from cdpg.tasks.base import PAPER, Draw, OriginRow, Preset, Row, Task, satisfiable
from cdpg.tasks.code.constraint import FunctionEnd, pep8_codes_of
from cdpg.tasks.code.metrics import CodeMeasure
from cdpg.tasks.code.signatures import definitions, python_files, signatures_in
from cdpg.tasks.hub_datasets import halves, hub_rows

_HUB = ("code-search-net/code_search_net", "python", "train")
_PAPER_CONTEXTS = 5000
_TINY_HELD_OUT = 200


def embedded_rows(draw: Draw) -> tuple[list[Row], list[Row]]:
    """Signatures of the standard library; those held out come from other files."""
    tuning, held_out = (satisfiable(_listed(name), draw) for name in ("tuning", "evaluation"))
    return tuning, held_out[:_TINY_HELD_OUT]


def hub_signatures(draw: Draw) -> tuple[list[Row], list[Row]]:
    """Signatures of functions on GitHub; those held out come from other repositories."""
    return halves(hub_rows(*_HUB, _row_of_function, "signature", draw, 2 * _PAPER_CONTEXTS), "signature")


def read_signatures(path: str, column: str) -> list[Row]:
    """Signatures of a folder of Python sources, grouped by file, or of a file with one in each row.

    A signature that occurs in several files of a folder belongs to the first.
    """
    if Path(path).is_dir():
        found: dict[str, Row] = {}
        for file in python_files(path):
            group = file.relative_to(path).as_posix()
            for signature in signatures_in([file]):
                found.setdefault(signature, OriginRow({"signature": signature}, group=group))
        if not found:
            raise UserError(f"no function with a one-line signature was found in {path!r}: give a folder with some")
        return list(found.values())
    contexts = load_contexts(path, prompt_column=column)
    return [
        OriginRow({**context.columns, "signature": _checked(context.prompt, context.row, path)}, context.row)
        for context in contexts
    ]


def follows_pep8(rows: Sequence[Row]) -> list[bool]:
    """Whether the signature itself follows PEP8; if not, Z_c = 0 whatever the body."""
    return [found == [] for found in pep8_codes_of([f"{row['signature']}\n    pass\n" for row in rows])]


def _listed(name: str) -> list[Row]:
    file = resources.files("cdpg.tasks.code") / "data" / f"signatures_{name}.txt"
    return [{"signature": line} for line in file.read_text(encoding="utf-8").splitlines()]


def _row_of_function(row: Mapping[str, Any]) -> Row | None:
    found = definitions(str(row["func_code_string"]))
    return OriginRow({"signature": found[0].signature}, group=row.get("repository_name")) if found else None


def _checked(signature: Any, row: int, path: str) -> str:
    """The signature, if it is one line that ends in its colon; otherwise a UserError."""
    text = signature.rstrip() if isinstance(signature, str) else ""
    try:
        ast.parse(f"{text}\n    pass\n")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        text = ""
    if not text.startswith("def ") or "\n" in text or not text.endswith(":"):
        raise UserError(f"{path!r}, row {row}: expected a line 'def name(...):', got {str(signature)[:80]!r}")
    return text


_PAPER = PAPER | {
    "epochs": 1000,
    "contexts_per_epoch": 32,
    "num_generations": 64,
    "max_completion_length": 128,
    "learning_rate": 1.41e-6,
    "warmup_epochs": 100,
    "evaluation_contexts": 256,
    "evaluation_samples": 16,
    "long_contexts": "cut",
}
_TINY = {
    "epochs": 26,
    "contexts_per_epoch": 64,
    "num_generations": 8,
    "max_completion_length": 128,
    "learning_rate": 4e-5,
    "decay_epochs": 8,
    "partition": "pooled",
    "replay": 0,
    "save_every": 12,
    "evaluate_every": 3,
    "evaluation_contexts": 24,
    "evaluation_samples": 8,
    "rows_per_pass": 512,
    "tokens_per_pass": 2048,
}
_TINY_PEP8 = _TINY | {"contexts_per_epoch": 56}
"""Functions that follow PEP8 are longer than those that compile, so an epoch takes longer."""


def _presets(tiny: Mapping[str, Any]) -> dict[str, Preset]:
    return {
        "tiny": Preset("code-tiny", embedded_rows, tiny),
        "paper": Preset("EleutherAI/gpt-neo-125M", hub_signatures, _PAPER),
    }


COMPILABILITY = Task(
    name="code-compilability",
    summary="complete a Python function from its signature so that it compiles",
    constraint="cdpg.constraints:compiles",
    measure=CodeMeasure(),
    column="signature",
    presets=_presets(_TINY),
    read=read_signatures,
    stop=FunctionEnd(),
)
PEP8 = Task(
    name="code-pep8",
    summary="complete a Python function from its signature without a PEP8 violation",
    constraint="cdpg.constraints:pep8_clean",
    measure=CodeMeasure(),
    column="signature",
    presets=_presets(_TINY_PEP8),
    read=read_signatures,
    stop=FunctionEnd(),
    usable=follows_pep8,
)
TASKS = (COMPILABILITY, PEP8)
