"""Values of settings: conversion to their types, and ranges."""

from __future__ import annotations

import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from cdpg.errors import UserError
from cdpg.messages.nearest import nearest

_UNIONS = (types.UnionType, typing.Union)
"""``int | None`` is the first, ``Literal["a"] | None`` the second."""
_LEAST_EPSILON = 1e-38
"""Without ε, Adam divides 0 by 0 for a parameter that had no gradient yet."""
_SEEDS = 2**64
"""Seeds must be smaller: torch accepts no larger one."""
_LONGEST_WAIT = 10**9
"""Seconds; PyTorch counts a wait in nanoseconds, in 64 bits."""


def no_text(key: str, value: Any, expected: str = "text") -> str:
    """A sentence on the value of a text setting that YAML read as another type."""
    return f'{key} takes {expected}, not {value!r}: in YAML, put it in quotes, {key}: "..."'


def convert(key: str, value: Any, expected: Any) -> Any:
    """``value`` as the type that setting ``key`` takes, or a UserError that says what was expected."""
    options = typing.get_args(expected) if typing.get_origin(expected) in _UNIONS else (expected,)
    for option in options:
        try:
            return _as(option, value)
        except (TypeError, ValueError, OverflowError):  # OverflowError: infinity as an integer
            continue
    raise UserError(no_text(key, value) if expected is str else f"{key} takes {_describe(expected)}, not {value!r}")


def _as(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if kind is type(None):
        if value is None:
            return None
    elif origin is Literal:
        if value in typing.get_args(kind):
            return value
    elif origin is tuple:
        items = (
            [value] if isinstance(value, str) and value != "none" else [] if value in (None, "none") else list(value)
        )
        kinds = typing.get_args(kind)
        if kinds[-1] is Ellipsis:
            return tuple(_as(kinds[0], item) for item in items)
        if len(items) == len(kinds):
            return tuple(_as(inner, item) for inner, item in zip(kinds, items, strict=True))
    elif kind in (int, float):
        number = float(value)  # also "1e-5", which YAML 1.1 reads as text
        if not isinstance(value, bool) and kind is float:
            return number
        if not isinstance(value, bool) and number == int(number):
            # A large number loses digits as a float; int() does not read text such as "1e3".
            return int(number) if isinstance(value, str) and not value.strip().lstrip("+-").isdigit() else int(value)
    elif isinstance(value, kind):
        return value
    elif kind is str and isinstance(value, os.PathLike) and isinstance(os.fspath(value), str):
        return os.fspath(value)
    raise TypeError(kind)


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) in _UNIONS:
        return " or ".join(_describe(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "a list"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}[kind]


def too_small(settings: Any, least: Mapping[str, int]) -> Iterator[str]:
    """A sentence for each setting that is given and below its least value."""
    for key, bound in least.items():
        value = getattr(settings, key)
        if value is not None and value < bound:
            yield f"{key} must be at least {bound}, not {value}"


def negative_or_infinite(settings: Any, *keys: str) -> Iterator[str]:
    """A sentence for each setting that is not in [0, ∞)."""
    for key in keys:
        value = getattr(settings, key)
        if not 0 <= value < math.inf:
            yield f"{key} must be a finite number of at least 0, not {value}"


def not_positive(settings: Any, *keys: str) -> Iterator[str]:
    """A sentence for each setting that is not in (0, ∞)."""
    for key in keys:
        if not 0 < getattr(settings, key) < math.inf:
            yield f"{key} must be above 0 and finite, not {getattr(settings, key)}"


def not_a_share(settings: Any, *keys: str) -> Iterator[str]:
    """A sentence for each setting that is not in [0, 1]."""
    for key in keys:
        if not 0 <= getattr(settings, key) <= 1:
            yield f"{key} must lie in [0, 1], not {getattr(settings, key)}"


def out_of_range(config: Any, methods: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each setting of a run whose value has the right type but is out of range.

    ``methods`` has the settings of each method by its name.
    """
    if config.method not in methods:
        near = nearest(config.method, methods)
        hint = f"; did you mean {near!r}?" if near else ""
        yield f"method takes {' or '.join(map(repr, methods))}, not {config.method!r}{hint}"
    at_least = {
        "epochs": 1, "contexts_per_epoch": 1, "num_generations": 1, "max_completion_length": 1, "batch_size": 1,
        "warmup_epochs": 0, "decay_epochs": 0, "save_every": 1, "keep_checkpoints": 1, "evaluate_every": 0,
        "evaluation_contexts": 1, "evaluation_samples": 1, "log_samples": 0, "gain_draws": 0,
        "validation_contexts": 5, "seed": 0, "check_workers": 0, "moment_contexts": 1, "moment_draws": 2,
        "check_memory": 16, "sync_every": 1, "rows_per_pass": 1, "tokens_per_pass": 1, "lora_rank": 1,
    }  # fmt: skip
    yield from too_small(config, at_least)
    if config.seed >= _SEEDS:
        yield f"seed must be below 2**64, not {config.seed}"
    yield from negative_or_infinite(config, "learning_rate", "partition_epsilon", "adam_epsilon", "base_error")
    if config.adam_epsilon < _LEAST_EPSILON:
        yield (
            f"adam_epsilon must be at least {_LEAST_EPSILON}, which float32 distinguishes from 0, not "
            f"{config.adam_epsilon}"
        )
    yield from not_positive(config, "check_seconds", "engine_seconds", "engine_memory", "process_seconds")
    if _LONGEST_WAIT < config.process_seconds < math.inf:
        yield f"process_seconds must be at most {_LONGEST_WAIT:,}, not {config.process_seconds:g}"
    yield from not_a_share(config, "check_failures", "engine_memory")
    if config.base_dtype == "int8" and config.sharding == "full":
        yield "base_dtype: int8 cannot be divided among processes: set base_dtype: bfloat16, or sharding: none"
    if config.engine_url and config.engine != "vllm":
        yield "engine_url is the address of a vLLM server: set engine: vllm, or leave it out"
    if config.engine_url and not config.engine_url.startswith(("http://", "https://")):
        yield f"engine_url must be an address such as http://localhost:8000, not {config.engine_url!r}"
    if not all(0 <= beta < 1 for beta in config.adam_betas):
        yield f"adam_betas must lie in [0, 1), not {config.adam_betas}"
    if config.lora_rank is None and (config.lora_alpha is not None or config.lora_target_modules != ("all-linear",)):
        yield "lora_alpha and lora_target_modules are for adapters: set lora_rank, such as lora_rank: 16"
    if config.lora_alpha is not None and not 0 < config.lora_alpha < math.inf:
        yield f"lora_alpha must be above 0 and finite, not {config.lora_alpha}"
    if not config.lora_target_modules:
        yield "lora_target_modules must name a layer, or be all-linear"
    if config.max_grad_norm is not None and not config.max_grad_norm > 0:
        yield f"max_grad_norm must be above 0, not {config.max_grad_norm}"
    if config.batch_size is not None and config.batch_size > config.samples_per_epoch:
        yield (
            f"batch_size is {config.batch_size}, more than the {config.samples_per_epoch} samples of an epoch "
            f"(contexts_per_epoch × num_generations): lower it, or raise those"
        )
    for kind in methods.values():
        yield from config.settings_of(kind).problems()
