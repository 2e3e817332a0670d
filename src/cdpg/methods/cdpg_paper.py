"""CDPG exactly as the paper has it, to compare with."""

from __future__ import annotations

from cdpg.config import MethodSettings
from cdpg.methods.base import Style, register
from cdpg.methods.cdpg import CDPG, CDPGSettings


@register
class PaperCDPG(CDPG):
    """w = P_c(x) / ((Ẑ_c + ε) q(x|c)) with Ẑ_c from the epoch's own samples, each used once; the last model is kept.

    The settings of the estimator (``partition``, ``control_variate``, ``replay``) do not apply to it.
    """

    name = "cdpg-paper"
    label = "cdpg (paper)"
    description = "conditional distributional policy gradients with the estimator of the paper"
    style = Style("#110022", "#aaff99", "D", (2.0, 1.0))
    Settings = MethodSettings

    @property
    def chooses_epoch(self) -> bool:
        return False

    @property
    def settings(self) -> CDPGSettings:
        return CDPGSettings(partition="batch", control_variate=False, replay=0)
