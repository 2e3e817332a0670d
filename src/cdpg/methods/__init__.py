"""The methods compared, each in a file of its own."""

from __future__ import annotations

from collections.abc import Callable

from cdpg.config import CDPGConfig
from cdpg.methods.base import Credit, Objective, WeightedObjective
from cdpg.methods.cdpg import CDPG
from cdpg.methods.dpg import DPG
from cdpg.methods.reinforce import Reinforce
from cdpg.methods.ziegler import Ziegler
from cdpg.models.base import LanguageModel

__all__ = ["CDPG", "DPG", "Credit", "Objective", "Reinforce", "WeightedObjective", "Ziegler", "make_objective"]


def make_objective(config: CDPGConfig, policy: LanguageModel) -> Objective:
    """The objective that ``method`` names."""
    makers: dict[str, Callable[[], Objective]] = {
        "cdpg": lambda: CDPG(config.partition_epsilon),
        "dpg": lambda: DPG(config.partition_epsilon),
        "reinforce": Reinforce,
        "ziegler": lambda: Ziegler(config, policy),
    }
    return makers[config.method]()
