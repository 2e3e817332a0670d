"""The tests that the lists of faults name are run in the ordinary round."""

from __future__ import annotations

import ast
import functools

from mutants import fault_list
from mutants.fault_list import ROOT


@functools.cache
def exhaustive(file: str) -> frozenset[str]:
    """Names of the tests in a file that only the exhaustive round runs."""
    functions = [
        node for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))) if isinstance(node, ast.FunctionDef)
    ]
    marks = ((function.name, ast.unparse(mark)) for function in functions for mark in function.decorator_list)
    return frozenset(name for name, mark in marks if mark.startswith("pytest.mark.exhaustive"))


def is_left_out(test: str) -> bool:
    file, *parts = test.split("::")
    return any(part.partition("[")[0] in exhaustive(file) for part in parts)


def test_no_fault_names_a_test_that_the_ordinary_round_leaves_out() -> None:
    assert is_left_out("tests/faults/test_kills.py::test_kills_at_every_change")
    assert not is_left_out("tests/faults/test_kills.py::test_kills_at_some_changes")
    assert [(fault.name, test) for fault in fault_list.load() for test in fault.tests if is_left_out(test)] == []
