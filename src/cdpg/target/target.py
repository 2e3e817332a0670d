"""The ideal model before normalisation, P_c(x) = a(x|c) · b(x,c)."""

from __future__ import annotations

import math

from torch import Tensor


def log_target(log_a: Tensor, b: Tensor) -> Tensor:
    """log P_c(x) = log a(x|c) + log b(x,c), ``[context, sample]``; −∞ where b = 0.

    A sample with b = 0 needs no base score, so ``log_a`` may hold any value there.
    """
    return (log_a + b.log()).masked_fill(b == 0, -math.inf)
