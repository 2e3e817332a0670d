"""Fine-tune conditional language models to meet a requirement without forgetting the rest of what they know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cdpg.methods  # noqa: F401 - makes the methods and their settings known
from cdpg.config import CDPGConfig

if TYPE_CHECKING:
    from cdpg.training.trainer import CDPGTrainer

__all__ = ["CDPGConfig", "CDPGTrainer"]


def __getattr__(name: str) -> Any:
    # The report and the command line's help must not wait for torch.
    if name == "CDPGTrainer":
        from cdpg.system.threads import limit_spinning

        limit_spinning()  # has an effect only before torch is loaded
        from cdpg.training.trainer import CDPGTrainer

        return CDPGTrainer
    raise AttributeError(f"module 'cdpg' has no attribute {name!r}")
