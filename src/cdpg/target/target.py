"""The ideal model before normalisation, P_c(x) = a(x|c) · b(x,c) · exp(tilt)."""

from __future__ import annotations

import math

from torch import Tensor


def log_target(log_a: Tensor, b: Tensor, log_tilt: Tensor | None = None) -> Tensor:
    """log P_c(x) = log a(x|c) + log b(x,c) + log_tilt, ``[context, sample]``; −∞ where b = 0.

    ``log_tilt`` is Σ λφ + Σ r/β of the target's moments and rewards, if it has any; it is finite throughout. A sample
    with b = 0 needs no base score, so ``log_a`` may hold any value there.
    """
    log_p = (log_a + b.log()).masked_fill(b == 0, -math.inf)
    return log_p if log_tilt is None else log_p + log_tilt
