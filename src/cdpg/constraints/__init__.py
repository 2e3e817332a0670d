"""Constraints to use as they are: each takes ``(prompts, completions, **columns)`` and returns a verdict for each.

Their edge cases are described in the modules that define them.
"""

from __future__ import annotations

from cdpg.constraints.entities import entities_from_source
from cdpg.constraints.numerals import numerals_as_digits
from cdpg.constraints.python_code import FunctionEnd, compiles, pep8_clean

__all__ = ["FunctionEnd", "compiles", "entities_from_source", "numerals_as_digits", "pep8_clean"]
