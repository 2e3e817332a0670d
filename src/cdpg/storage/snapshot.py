"""Converts a run's state to named tensors and plain numbers, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cdpg.errors import UserError
from cdpg.messages.terms import term
from cdpg.storage.checkpoints import Checkpoint
from cdpg.system import shards


@dataclass(frozen=True)
class Trainable:
    """Everything that changes while training."""

    policy: nn.Module
    module: nn.Module | None
    """The method's own parameters."""
    optimizer: torch.optim.Optimizer

    @property
    def is_divided(self) -> bool:
        """Whether each process holds only its part; then all processes take part when it is saved."""
        return any(map(shards.is_shard, self.policy.parameters()))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name, a tied one once; those of the method come last, as ``objective.…``."""
        named = {f"policy.{name}": p for name, p in self.policy.named_parameters() if p.requires_grad}
        if self.module is not None:
            named |= {f"objective.{name}": p for name, p in self.module.named_parameters()}
        return named

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Weights and optimiser state, by file."""
        parameters = self.named_parameters()
        moments = {
            f"{name}.{key}": value
            for name, parameter in parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        weights = {name: parameter.detach() for name, parameter in parameters.items()}
        return {"weights": weights, "optimizer": moments}

    def copied_weights(self) -> dict[str, Tensor]:
        """Copies of the weights on the CPU; of divided ones, copies of this process's part where it is."""
        return {
            name: parameter.detach().clone() if shards.is_shard(parameter) else parameter.detach().cpu().clone()
            for name, parameter in self.named_parameters().items()
        }

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Give the parameters these values; the optimiser's state stays."""
        with torch.no_grad():
            for name, parameter in self.named_parameters().items():
                parameter.copy_(shards.divided_like(weights[name], parameter))

    def divided(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights by name as this process holds them: whole, or only its part."""
        if not self.is_divided:
            return dict(weights)
        return {name: shards.divided_like(weights[name], p) for name, p in self.named_parameters().items()}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the same model and method."""
        parameters = self.named_parameters()
        self._check_names(checkpoint, parameters)
        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in checkpoint.tensors.get("optimizer", {}).items():
            name, _, kind = key.rpartition(".")
            moments.setdefault(name, {})[kind] = value
        self.set_weights(checkpoint.tensors["weights"])
        self.optimizer.state.clear()
        for name, parameter in parameters.items():
            if name in moments:
                self.optimizer.state[parameter] = {
                    # Fused Adam keeps its step count on the parameter's device.
                    kind: shards.divided_like(value, parameter) if value.dim() else value.to(parameter.device)
                    for kind, value in moments[name].items()
                }

    @staticmethod
    def _check_names(checkpoint: Checkpoint, parameters: Mapping[str, Any]) -> None:
        saved = checkpoint.tensors["weights"]
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        if shapes != {name: tuple(parameter.shape) for name, parameter in parameters.items()}:
            raise UserError(
                f"{str(checkpoint.path)!r} was written for another model or method: its parameters are not those of "
                f"this run; give the same {term('model')} and {term('method')}, or start in another folder"
            )
