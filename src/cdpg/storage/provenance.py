"""The origin of a run, and whether it may be resumed with the present settings, model and data."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cdpg.config import FIELDS, GENERAL, METHOD_SETTINGS, CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.contexts.digests import fingerprint
from cdpg.errors import UserError
from cdpg.models.base import PromptTokens
from cdpg.models.modules import digest
from cdpg.storage.schedule import rate_changes

_PACKAGES = ("cdpg", "torch", "transformers", "accelerate", "peft", "safetensors", "numpy")
_FREE = frozenset(
    {
        "output_dir",
        "overwrite_output_dir",
        "epochs",
        "save_every",
        "keep_checkpoints",
        "evaluate_every",
        "log_samples",
        "report_to",
    }
    | {"save_dtype", "trust_remote_code", "warmup_epochs", "decay_epochs"}
    | {"evaluate_at_end", "check_workers", "check_failures", "check_output"}
    | {"engine_url", "engine_folder", "engine_seconds", "engine_memory", "process_seconds", "base_error"}
)
"""Settings that a resumed run may change without changing its result; learning rates are compared themselves."""
_OWN = re.compile(r"^cdpg\.[\w.]*:")
_ROUNDING = frozenset({"rows_per_pass", "tokens_per_pass", "sharding"})
"""Settings that change the order of sums, and so the last bits of a result; allowed, since memory may require it."""
_MEASURING = frozenset({"evaluation_contexts", "evaluation_samples"})
"""Settings that change the data of ``evaluations.jsonl``."""
_BY_EFFECT = {"keep": "last", "prune": False}
"""Settings that are compared by what they do in the run, which its origin has; each with its value without effect."""
_EARLIER = {**_BY_EFFECT, "partition": "batch", "control_variate": False, "replay": 0}
"""What a run of an earlier version did that does not have these settings."""
_LIMITS = frozenset({"check_seconds", "check_memory"})
"""Settings that may change the verdict on a text that exhausts its check."""


def origin(
    *,
    model: str,
    policy: nn.Module,
    base: nn.Module,
    proposal: nn.Module | None,
    constraints: Sequence[str],
    contexts: Sequence[Context],
    prompts: Sequence[PromptTokens],
    held_out: Sequence[Context],
    tuned_on: Sequence[Context],
    keep: str,
    prune: bool,
    stop: str | None,
    processes: int,
    command: str | None,
    sampling: Mapping[str, Any],
) -> dict[str, Any]:
    """Facts that are needed to repeat a run, beside its settings; ``sampling`` is for users of the model.

    ``tuned_on`` are the ``contexts`` without the validation contexts. ``keep`` and ``prune`` say what the settings of
    these names do in the run. ``proposal`` is a third model that draws the samples.
    """
    return {
        "command": command,
        "model": model,
        "base": weights_digest(base),
        "adapters": _adapters(policy),
        "proposal": None if proposal is None else weights_digest(proposal),
        "device": next(base.parameters()).device.type,
        "processes": processes,
        "constraints": list(constraints),
        "stop": stop,
        "contexts": {"count": len(contexts), "sha256": fingerprint(contexts)},
        "tuned_on": {"count": len(tuned_on), "sha256": fingerprint(tuned_on)},
        "keep": keep,
        "prune": prune,
        "tokens": hashlib.sha256(repr(list(prompts)).encode()).hexdigest(),
        "held_out": {"count": len(held_out), "sha256": fingerprint(held_out)},
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "sampling": dict(sampling),
    }


def weights_digest(module: nn.Module) -> str:
    """SHA-256 of the base's weights.

    Adapters that are trained are excluded; frozen adapters that the model came with are included.
    """
    return digest(p for name, p in module.named_parameters() if "lora_" not in name or not p.requires_grad)


def _adapters(module: nn.Module) -> dict[str, Any] | None:
    """The adapters' configuration where it differs from the defaults; a scale or a dropout shows in no shape."""
    asked = getattr(module, "peft_config", None)
    if not isinstance(asked, Mapping):
        return None
    return {name: _chosen(config) for name, config in asked.items()}


def _chosen(config: Any) -> dict[str, str]:
    """The settings that differ from the defaults (a later PEFT has more); the base is identified by its weights."""
    usual = type(config)().to_dict()
    free = ("peft_version", "base_model_name_or_path")
    asked = sorted(config.to_dict().items())
    return {key: _text(value) for key, value in asked if key not in free and value != usual.get(key)}


def _text(value: Any) -> str:
    return str(sorted(map(str, value)) if isinstance(value, (set, frozenset)) else value)


def model_name(module: nn.Module) -> str:
    """The name of a model that was given as an object."""
    return str(getattr(getattr(module, "config", None), "_name_or_path", "") or type(module).__name__)


def begun_with(state: Mapping[str, Any]) -> CDPGConfig:
    """The settings in a checkpoint's state; settings of another version that no longer exist are left out."""
    settings = {**_EARLIER, **state["config"]}
    return CDPGConfig.from_mapping({key: value for key, value in settings.items() if key in FIELDS})


def check_resume(
    done: int,
    state: Mapping[str, Any],
    config: CDPGConfig,
    now: Mapping[str, Any],
    checkpoints: Path,
    kept: Sequence[int],
) -> list[str]:
    """Refuse to resume a run with settings, a model or data that change its result; the error names all changes.

    ``state`` is that of the checkpoint after ``done`` epochs, ``kept`` the epochs of the checkpoints in the folder
    ``checkpoints``. Returns a notice on each allowed change that has an effect.
    """
    then = begun_with(state)
    changes = [
        f"{key} was {getattr(then, key)!r} and is {getattr(config, key)!r}"
        for key in _compared(config.method)
        if getattr(then, key) != getattr(config, key)
    ]
    changes += rate_changes(done, then, config, checkpoints, kept)
    before = _origin_then(state, then, now)
    changes += [f"{key} was {before[key]!r} and is {now[key]!r}" for key in _BY_EFFECT if before[key] != now[key]]
    changes += [
        f"the {key} changed from {before[key]!r} to {now[key]!r}"
        for key in ("model", "base", "adapters", "proposal", "device", "constraints", "stop", "contexts", "tokens")
        if _comparable(before.get(key, now[key])) != _comparable(now[key])
    ]
    tuned = {"tuned_on": now["tuned_on"], **before}["tuned_on"]
    if tuned != now["tuned_on"] and before["contexts"] == now["contexts"]:
        changes.append(
            f"the choice of validation contexts changed: {tuned['count']:,} contexts were tuned on, and "
            f"{now['tuned_on']['count']:,} others would be now"
        )
    if changes:
        raise UserError(
            f"this run cannot be continued as asked, because the result would be different: {'; '.join(changes)}. "
            "Give what it was started with, or start in another folder"
        )
    return [*_rounding(then, config, before, now), *_other_measures(then, config, before, now)]


def _compared(method: str) -> list[str]:
    """Settings that must stay the same: those of no method, and those of the run's own."""
    own = [*GENERAL, *(field.name for field in fields(METHOD_SETTINGS[method]))]
    return [key for key in own if key not in {*_FREE, *_ROUNDING, *_MEASURING, *_LIMITS, *_BY_EFFECT}]


def _origin_then(state: Mapping[str, Any], then: CDPGConfig, now: Mapping[str, Any]) -> dict[str, Any]:
    """The origin in a checkpoint's state, with what an earlier version did not record.

    Such a version wrote no adapters if the base is a copy; whether there are any shows in the parameters' names. It
    wrote no effect of settings: one that was off had none, and for one that was on, the present effect is taken.
    """
    origin = state["origin"]
    effects = {key: off if getattr(then, key) == off else now[key] for key, off in _BY_EFFECT.items()}
    return {**effects, **origin, "adapters": origin.get("adapters") or now["adapters"]}


def _comparable(fact: Any) -> Any:
    """A fact of a run's origin; functions of this package without their module, which another version may move."""
    return [_OWN.sub("cdpg:", name) for name in fact] if isinstance(fact, list) else fact


def _rounding(then: CDPGConfig, config: CDPGConfig, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A notice on changes that may affect the last bits of the result."""
    changes = _changed(_ROUNDING, then, config)
    changes += [
        f"the number of {key} was {before[key]} and is {now[key]}"
        for key in ("threads", "processes")
        if before.get(key, now[key]) != now[key]
    ]
    changes += [
        f"{package} was {before['versions'].get(package)} and is {version}"
        for package, version in now["versions"].items()
        if before["versions"].get(package) != version
    ]
    if not changes:
        return []
    return [f"the last bits of the result may differ from those of an uninterrupted run: {'; '.join(changes)}"]


def _other_measures(
    then: CDPGConfig, config: CDPGConfig, before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[str]:
    """Notices on changes after which lines of the run's files no longer compare with earlier ones."""
    changes = _changed(_MEASURING, then, config)
    if before.get("held_out", now["held_out"]) != now["held_out"]:
        changes.append(f"there were {before['held_out']['count']} held-out contexts, now there are others")
    notices = []
    if changes:
        notices.append(f"evaluations from here on are not comparable with those before: {'; '.join(changes)}")
    limits = _changed(_LIMITS, then, config)
    if limits:
        notices.append(f"texts that exhaust their check may be judged differently than before: {'; '.join(limits)}")
    return notices


def _changed(keys: frozenset[str], then: CDPGConfig, config: CDPGConfig) -> list[str]:
    return [
        f"{key} was {getattr(then, key)} and is {getattr(config, key)}"
        for key in sorted(keys)
        if getattr(then, key) != getattr(config, key)
    ]


def how_to_resume(command: str | None) -> str:
    """The command, or the call in Python, that resumes the run that ``command`` started."""
    if command is None:
        return "train(resume_from_checkpoint=True)"
    program, *arguments = shlex.split(command)
    if Path(program).name == "__main__.py":
        start = [sys.executable, "-m", "cdpg"]
    else:
        name = Path(program).name
        start = [name if shutil.which(name) else program]
    arguments = [word for word in arguments if word not in ("--resume", "--overwrite")]
    return shlex.join([*start, *arguments, "--resume"])


def versions() -> dict[str, str]:
    """Installed versions of Python and of the packages that results depend on."""
    return dict(_versions())


@functools.cache
def _versions() -> Mapping[str, str]:
    """The same, read once: it takes as long as some epochs of a small model."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
