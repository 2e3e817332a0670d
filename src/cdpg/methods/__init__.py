"""The methods, each in its own file."""

from __future__ import annotations

from cdpg.config import CDPGConfig
from cdpg.methods.base import EpochLoss, Method, SampleLoss, State, WeightedMethod
from cdpg.methods.cdpg import CDPG
from cdpg.methods.dpg import DPG
from cdpg.methods.reinforce import Reinforce
from cdpg.methods.ziegler import Ziegler

__all__ = [
    "CDPG", "DPG", "EpochLoss", "Method", "Reinforce", "SampleLoss", "State", "WeightedMethod", "Ziegler",
    "make_method",
]  # fmt: skip


def make_method(config: CDPGConfig) -> Method:
    """The method that ``config`` names."""
    kinds: dict[str, type[Method]] = {"cdpg": CDPG, "dpg": DPG, "reinforce": Reinforce, "ziegler": Ziegler}
    return kinds[config.method](config)
