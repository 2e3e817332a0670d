"""The ideal model before normalisation, P_c(x) = a(x|c) · b(x,c)."""

from __future__ import annotations

import math

from torch import Tensor


def log_target(log_a: Tensor, b: Tensor) -> Tensor:
    """log P_c(x) = log a(x|c) + log b(x,c), ``[context, sample]``; −∞ where b = 0, whatever stands in ``log_a``.

    The base need not be asked about a sample with b = 0, so ``log_a`` may hold anything there.
    """
    return (log_a + b.log()).masked_fill(b == 0, -math.inf)
