"""The methods, one file each. Every file of this folder is imported, and registers its method."""

from __future__ import annotations

import importlib
import pkgutil

from cdpg.config import CDPGConfig
from cdpg.methods.base import (
    METHODS,
    EpochLoss,
    Method,
    SampleLoss,
    State,
    Style,
    WeightedMethod,
    register,
    unregister,
)

__all__ = [
    "METHODS", "EpochLoss", "Method", "SampleLoss", "State", "Style", "WeightedMethod", "label_of", "make_method",
    "register", "targets_p", "unregister",
]  # fmt: skip

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")


def make_method(config: CDPGConfig) -> Method:
    """The method that ``config`` names; a proposal that it cannot learn from is refused."""
    method = METHODS[config.method](config)
    method.require_proposal()
    return method


def label_of(name: str) -> str:
    """A method's label in figures and tables; the name itself if the method is not known."""
    return METHODS[name].label if name in METHODS else name


def targets_p(name: str) -> bool:
    """Whether the optimum of a method is the ideal model; not where it is not known."""
    return name in METHODS and METHODS[name].targets_p
