"""Constraints to use as they are: each takes ``(prompts, completions, **columns)`` and returns a verdict for each.

Their edge cases are described in the modules that define them.
"""

from __future__ import annotations

from cdpg.tasks.summarization.constraint import entities_from_source
from cdpg.tasks.translation.constraint import numerals_as_digits
from cdpg.tasks.code.constraint import FunctionEnd, compiles, pep8_clean

__all__ = ["FunctionEnd", "compiles", "entities_from_source", "numerals_as_digits", "pep8_clean"]
