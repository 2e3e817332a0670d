"""The sampling noise in estimates of Z_c, and the deviation of Z_c between contexts without it.

The functions work on PyTorch tensors and on NumPy arrays.
"""

from __future__ import annotations

from typing import Any


def sampling_noise(ratio: Any, valid: Any, z: Any, count: Any) -> Any:
    """The variance of each Ẑ_c = mean_j P_c(x_j)/q(x_j|c), estimated by s²/M; ``[context]``.

    ``ratio`` and ``valid`` are ``[context, sample]``; ``z`` and ``count``, mean and number of the valid samples, are
    ``[context]``. Each context has two valid samples or more: of a single one s² is undefined.
    """
    spread = (ratio - z[:, None]) * valid
    return (spread * spread).sum(1) / (count - 1) / count


def without_noise(variance: Any, noise: Any) -> Any:
    """max(0, variance − noise): the variance of Z_c between contexts, from that of the estimates; NaN if either is."""
    import numpy as np  # not above: worker processes import this module and should start at once

    return np.maximum(0.0, variance - noise)
