"""Builds the parts of a run from the trainer's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdpg.config import CDPGConfig
from cdpg.constraints.judge import Judge, name_of
from cdpg.contexts.contexts import Context
from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.models.sampling import StopRule
from cdpg.storage import provenance, usage
from cdpg.system.distributed import Processes


def origin_of(
    model: Any,
    policy: LanguageModel,
    base: LanguageModel,
    judge: Judge,
    contexts: Sequence[Context],
    prompts: Sequence[PromptTokens],
    eval_contexts: Sequence[Context],
    stop: StopRule | None,
    processes: Processes,
    command: str | None,
    config: CDPGConfig,
) -> Any:
    """The origin in ``config.yaml``; ``model`` as it was given to the trainer."""
    return provenance.origin(
        model if isinstance(model, str) else provenance.model_name(policy.module), policy.module, base.module,
        [name_of(constraint) for constraint in judge.constraints], contexts, prompts,
        eval_contexts, None if stop is None else type(stop).__name__, processes.count, command,
        usage.facts(policy, config, contexts, stop),
    )  # fmt: skip
