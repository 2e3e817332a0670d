"""Data sets of the paper, from the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from cdpg.errors import UserError, first_line
from cdpg.tasks.base import Row


def hub_rows(
    path: str, name: str, split: str, row: Callable[[Mapping[str, Any]], Row | None], column: str, seed: int, count: int
) -> list[Row]:
    """The first ``count`` rows that ``row`` accepts, in a seeded order of the data set.

    Each text of ``column`` comes once: it must not be tuned on with one reference and held out with another.
    """
    data = _load(path, name, split)
    found: dict[str, Row] = {}
    for index in np.random.Generator(np.random.PCG64(seed)).permutation(len(data)):
        made = row(data[int(index)])
        if made is not None:
            found.setdefault(str(made[column]), made)
        if len(found) == count:
            break
    return list(found.values())


def halves(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The first half to tune on, the second held out."""
    every = list(rows)
    return every[: len(every) // 2], every[len(every) // 2 :]


def _load(path: str, name: str, split: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(
            f"the data set {path} is read with the library datasets, which is not installed: "
            "pip install 'cdpg[datasets]', or give a file of your own with --contexts"
        ) from error
    try:
        return load_dataset(path, name, split=split)
    except Exception as error:  # whatever the network, the hub or the cache has to say
        raise UserError(
            f"cannot load the data set {path} ({name}) from the hub: {first_line(error)}; "
            "give a file of your own with --contexts, or use --preset tiny, which needs no network"
        ) from error
