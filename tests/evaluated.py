"""Evaluations in this process that the reference repeats: small enough for all figures to be compared in no time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import reference.evaluation
import values
from cdpg import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.evaluation.evaluator import Evaluator
from cdpg.models.base import LanguageModel
from cdpg.models.loading import load_model
from reference.evaluation import Evaluation, ideal_samples
from reference.model import Parameters
from values_constraint import holds

PROMPTS = values.HELD_OUT[:9]
"""Two blocks of four contexts and one more. The constraint does not apply to the sixth."""


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    """Four contexts are sampled together, here and in the reference."""
    patch.setattr("cdpg.evaluation.evaluator.BLOCK", 4)
    patch.setattr(reference.evaluation, "BLOCK", 4)


class Said:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def working(self, message: str) -> None:
        self.lines.append(message)


class Counted:
    """A check for a stop that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


class Case:
    """A base and other models on the same contexts."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        settings = {**values.SETTINGS, **values.TECHNICAL, "control_variate": False, "check_workers": 0, **changes}
        self.config = CDPGConfig(**settings)
        tokenizer, module = values.make_model()
        self.base = load_model(module, self.config, tokenizer)
        self.contexts = values.contexts(PROMPTS)

    def other(self, seed: int) -> LanguageModel:
        """The base with noise on its weights."""
        found, generator = copy.deepcopy(self.base), np.random.default_rng(seed)
        with torch.no_grad():
            for parameter in found.module.parameters():
                parameter.add_(torch.from_numpy(generator.normal(0.0, 0.5, parameter.shape)))
        return found

    def given(self) -> list[Context]:
        """The contexts, as the program has them."""
        return [Context(context.prompt, dict(context.columns), context.row) for context in self.contexts]

    def evaluator(self, constraints: Any = holds, **given: Any) -> Evaluator:
        return Evaluator.load(self.base, constraints, self.given(), self.config, **given)

    def expected(self, models: Mapping[str, LanguageModel], limit: int | None = None) -> Evaluation:
        """What the reference finds for the base and other models."""
        settings, contexts = values.settings("cdpg", **self.changes), self.contexts[:limit]
        parameters = {name: parameters_of(model) for name, model in {"base": self.base, **models}.items()}
        ideal = ideal_samples(parameters["base"], contexts, values.judge, settings)
        return Evaluation(parameters, contexts, values.judge, settings, ideal)


def parameters_of(model: LanguageModel) -> Parameters:
    """A model as the reference takes it."""
    return values.named({name: tensor.detach().numpy().copy() for name, tensor in model.module.state_dict().items()})
