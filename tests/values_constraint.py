"""The constraint of tests/test_values.py: by name, as a command takes it, and importable without anything else."""

from __future__ import annotations


def holds(prompts: list[str], completions: list[str], letter: list[str]) -> list[float | None]:
    """1 if the completion starts with the letter of its row, 0.5 if it ends in d instead, else 0.

    It does not apply to a prompt that starts with "d d", raises at a completion that starts with "b c", and answers
    nonsense to "c d".
    """
    return [_verdict(*case) for case in zip(prompts, completions, letter, strict=True)]


def _verdict(prompt: str, completion: str, letter: str) -> float | None:
    words = completion.split()
    if words[:2] == ["b", "c"]:
        raise ValueError(f"{prompt}: {completion}")
    if prompt.startswith("d d"):
        return None
    if words[:2] == ["c", "d"]:
        return 7.0
    return 1.0 if words[:1] == [letter] else 0.5 if words[-1:] == ["d"] else 0.0
