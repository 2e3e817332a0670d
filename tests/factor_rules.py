"""Functions that worker processes import by name."""

from __future__ import annotations

from typing import Any


def nonempty(prompts: list[str], completions: list[str]) -> list[bool]:
    return [bool(text) for text in completions]


def never_applies(prompts: list[str], completions: list[str]) -> list[None]:
    return [None for _ in completions]


def length(prompts: list[str], completions: list[str]) -> list[int]:
    return [len(text) for text in completions]


def minus_length(prompts: list[str], completions: list[str]) -> list[float]:
    return [-len(text) for text in completions]


def starts_with_a(prompts: list[str], completions: list[str]) -> list[bool]:
    return [text.startswith("a") for text in completions]


def few_c(prompts: list[str], completions: list[str]) -> list[bool]:
    return [text.count("c") < 2 for text in completions]


def constant(prompts: list[str], completions: list[str]) -> list[float]:
    return [0.3 for _ in completions]


def always_nan(prompts: list[str], completions: list[str]) -> list[float]:
    return [float("nan") for _ in completions]


def odd_values(prompts: list[str], completions: list[str]) -> list[Any]:
    odd: dict[str, Any] = {"nan": float("nan"), "inf": float("inf"), "none": None}
    return [odd[text] if text in odd else float(text or 0) for text in completions]
