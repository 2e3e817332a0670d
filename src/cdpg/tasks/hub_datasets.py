"""Loads the paper's data sets from the hub, and splits them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cdpg.contexts.contexts import Context
from cdpg.contexts.splitting import groups, whole_groups
from cdpg.errors import UserError, first_line
from cdpg.messages.terms import term
from cdpg.tasks.base import Draw, OriginRow, Row

_log = logging.getLogger(__name__)

_CHUNK = 256
"""Rows that are checked together."""
_CONVERTED = "refs/convert/parquet"
"""The revision with the hub's own Parquet files of a data set with a loading script."""


def hub_rows(
    path: str,
    name: str,
    split: str,
    row: Callable[[Mapping[str, Any]], Row | None],
    column: str,
    draw: Draw,
    count: int,
) -> list[Row]:
    """The first ``count`` rows that ``row`` accepts and the task can use, in a seeded order of the data set.

    Each text of ``column`` occurs once, so that no text is both tuned on and held out.
    """
    data = _load(path, name, split)
    order = np.random.Generator(np.random.PCG64(draw.seed)).permutation(len(data))
    found: list[Row] = []
    seen: set[str] = set()
    for start in range(0, len(order), _CHUNK):
        fresh: dict[str, Row] = {}
        for index in order[start : start + _CHUNK]:
            made = row(data[int(index)])
            if made is not None and str(made[column]) not in seen:
                fresh.setdefault(str(made[column]), made)
        for text, usable in zip(fresh, draw.usable(list(fresh.values())), strict=True):
            if len(found) < count:
                seen.add(text)
                found += [fresh[text]] if usable else []
        if len(found) == count:
            break
    if len(found) < len(seen):
        _log.warning(
            f"{len(seen) - len(found):,} of {len(seen):,} contexts drawn from {path} cannot be satisfied and are left "
            f"out; {len(found):,} remain"
        )
    return found


def halves(rows: Sequence[Row], column: str) -> tuple[list[Row], list[Row]]:
    """One half to tune on, the other held out; no group is in both. ``column`` holds the text of a row."""
    origins = [row if isinstance(row, OriginRow) else OriginRow(row) for row in rows]
    numbers = groups([Context(str(row[column]), {}, 1, row.group) for row in origins])
    chosen = whole_groups(numbers, dict.fromkeys(numbers), len(rows) // 2)
    tuning = [row for row, number in zip(rows, numbers, strict=True) if number in chosen]
    return tuning, [row for row, number in zip(rows, numbers, strict=True) if number not in chosen]


def _load(path: str, name: str, split: str) -> Any:
    """A data set of the hub; if it needs a loading script, the hub's converted files."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(
            f"the data set {path} is read with the library datasets, which is not installed: "
            f"pip install 'cdpg[datasets]', or give a file of your own with {term('contexts')}"
        ) from error
    try:
        try:
            return load_dataset(path, name, split=split)
        except RuntimeError as error:
            if "script" not in str(error):  # datasets 4 and later refuse loading scripts
                raise
            return load_dataset(path, data_dir=name, split=split, revision=_CONVERTED)  # the name is a folder there
    except Exception as error:  # of the network, the hub or the cache
        raise UserError(
            f"cannot load the data set {path} ({name}, {split}) from the hub: {first_line(error)}; try "
            f"load_dataset({path!r}, {name!r}, split={split!r}) in Python, give a file of your own with "
            f"{term('contexts')}, or use {term('preset')} tiny, which needs no network"
        ) from error
