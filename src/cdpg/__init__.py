"""Fine-tune conditional language models to meet a requirement without forgetting the rest of what they know."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import cdpg.methods  # noqa: F401 - makes the methods and their settings known
from cdpg.constraints.factors import Moment, Reward

if TYPE_CHECKING:
    from dataclasses import dataclass

    from cdpg import config
    from cdpg.methods.cdpg import CDPGSettings
    from cdpg.methods.ziegler import ZieglerSettings
    from cdpg.rollout.exact import ExactSampler
    from cdpg.training.trainer import CDPGTrainer

    @dataclass(frozen=True)
    class CDPGConfig(ZieglerSettings, CDPGSettings, config.CDPGConfig):
        """For type checkers: the settings of a method are added when it is registered, which they cannot see."""

else:
    from cdpg.config import CDPGConfig

__all__ = ["CDPGConfig", "CDPGTrainer", "ExactSampler", "Moment", "Reward"]


def __getattr__(name: str) -> Any:
    # The report and the command line's help must not wait for torch.
    modules = {"CDPGTrainer": "cdpg.training.trainer", "ExactSampler": "cdpg.rollout.exact"}
    if name in modules:
        from cdpg.system.threads import limit_spinning

        limit_spinning()  # has an effect only before torch is loaded
        return getattr(importlib.import_module(modules[name]), name)
    raise AttributeError(f"module 'cdpg' has no attribute {name!r}")
