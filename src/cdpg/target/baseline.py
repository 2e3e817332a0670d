"""Baselines: what is subtracted from a reward without changing the expected gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def leave_one_out(rewards: Tensor, valid: Tensor) -> Tensor:
    """The mean reward of the other valid samples of the context, ``[context, sample]``; 0 where there is none.

    It does not depend on the sample itself, so that subtracting it leaves the expected gradient unchanged.
    """
    rewards = rewards.where(valid, rewards.new_zeros(()))
    others = valid.sum(dim=1, keepdim=True) - valid.to(rewards)
    return (rewards.sum(dim=1, keepdim=True) - rewards) / others.clamp(min=1)
