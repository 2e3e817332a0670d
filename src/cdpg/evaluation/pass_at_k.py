"""pass@k: the probability that at least one of k samples of a context satisfies the constraint."""

from __future__ import annotations

import numpy as np

from cdpg.evaluation.statistics import Array

MOST = 64
"""The largest k."""


def pass_at_k(satisfying: Array, valid: Array) -> dict[int, Array]:
    """The estimate for each context, ``[context]``, by k = 1, 2, 4, … up to the number of samples.

    Of n valid samples c satisfy: 1 − C(n−c, k)/C(n, k) is unbiased (Chen et al., 2021). NaN where n < k.
    """
    n, c = valid.sum(axis=1), (satisfying * valid).sum(axis=1)
    found, k = {}, 1
    while k <= min(MOST, satisfying.shape[1]):
        none = np.ones(len(n))
        for place in range(k):
            none = none * (n - c - place) / np.maximum(n - place, 1)  # 0 from the place n - c on
        found[k] = np.where(n >= k, 1 - none, np.nan)
        k *= 2
    return found
