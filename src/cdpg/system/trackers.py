"""The trackers that ``report_to`` may name, checked without loading torch or Accelerate."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from cdpg.errors import UserError
from cdpg.messages.nearest import nearest

TRACKERS = {
    "aim": ("aim",), "clearml": ("clearml",), "comet_ml": ("comet_ml",), "dvclive": ("dvclive",),
    "mlflow": ("mlflow",), "swanlab": ("swanlab",), "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",), "wandb": ("wandb",),
}  # fmt: skip
"""Accelerate's names of trackers, each with modules of which it needs one."""


def require_trackers(names: Sequence[str]) -> None:
    """Refuse unknown trackers and trackers that are not installed."""
    for name in names:
        if name in TRACKERS:
            continue
        near = nearest(name, TRACKERS)
        hint = f"did you mean {near!r}?" if near else f"the trackers are {', '.join(TRACKERS)}"
        raise UserError(f"report_to names {name!r}, which is not a tracker: {hint}")
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        there = ", ".join(filter(_is_installed, TRACKERS)) or "none"
        what = ", ".join(map(repr, missing))
        raise UserError(
            f"report_to names {what}, which is not installed; installed: {there}: install it with "
            f"pip install {' '.join(missing)}, or leave it out"
        )


def _is_installed(name: str) -> bool:
    return any(importlib.util.find_spec(module) is not None for module in TRACKERS[name])
