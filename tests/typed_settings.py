"""What type checkers know of the settings. Mypy reads this file (``make types``); an ignore without an error is one."""

from __future__ import annotations

from cdpg import CDPGConfig, CDPGTrainer


def settings() -> CDPGConfig:
    CDPGConfig(ziegler_bta=0.1)  # type: ignore[call-arg]
    CDPGConfig(ziegler_beta="high")  # type: ignore[arg-type]
    return CDPGConfig("dpg", epochs=3, ziegler_beta=0.1, learning_rate=1e-5)


def value(config: CDPGConfig) -> float:
    return config.ziegler_beta


def trainer() -> CDPGTrainer:
    CDPGTrainer("model", reward_funcs=len)  # type: ignore[call-arg]
    return CDPGTrainer("model", lambda prompts, completions: [True] * len(prompts), settings())
