"""The mutants that mutmut's operators make of a file of the source."""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst
from fault_list import ROOT
from mutmut.mutation.file_mutation import Mutation, create_mutations


@dataclass(frozen=True)
class Mutant:
    """A file with one change, inside one function."""

    file: str
    """The path from the root of the project."""
    function: str
    """The qualified name of the top-level function or of the method."""
    lines: tuple[int, ...]
    """The lines of the changed statement in the original, from 1."""
    change: str
    """What changed: the lines of a diff that start with - and +, without their indentation."""
    source: str
    """The whole text of the file."""
    earlier: int = 0
    """Mutants of the function before this one with the same change, at another of several equal lines."""

    @property
    def name(self) -> str:
        """The same as long as the function's name and the changed lines are the same."""
        digest = hashlib.sha256(f"{self.file} {self.function} {self.change}".encode()).hexdigest()
        return f"{Path(self.file).stem}-{digest[:8]}" + f"-{self.earlier + 1}" * bool(self.earlier)


def mutants_of(file: str) -> Iterator[Mutant]:
    """All mutants of a file; two edits that mean the same are one."""
    original = (ROOT / file).read_text(encoding="utf-8")
    module, mutations, _, _ = create_mutations(file, original)
    tree = ast.parse(original)
    statements = dict(_top_level(module))
    texts = {id(statement): module.code_for_node(statement) for statement in module.body}
    seen: set[tuple[int, str]] = set()
    alike: Counter[tuple[str, str]] = Counter()
    for mutation in mutations:
        statement = statements.get(id(mutation.contained_by_top_level_function))
        if statement is None:
            continue
        before = texts[id(statement)]
        start = original.index(before)
        if (start, before) not in seen:
            seen |= {(start, before), (start, _syntax(before)), (start, "")}
        after = module.code_for_node(_mutated(statement, mutation))
        if (start, syntax := _syntax(after)) in seen:
            continue
        seen.add((start, syntax))
        line, change = _difference(before, after)
        function, lines = _place(tree, original.count("\n", 0, start) + line)
        source = original[:start] + after + original[start + len(before) :]
        yield Mutant(file, function, lines, change, source, alike[function, change])
        alike[function, change] += 1


def _mutated(statement: libcst.BaseCompoundStatement, mutation: Mutation) -> libcst.CSTNode:
    """A top-level function or class with the mutation; of a class, the other methods are not gone through."""
    function = mutation.contained_by_top_level_function
    assert function is not None
    mutated = function.deep_replace(mutation.original_node, mutation.mutated_node)
    assert isinstance(mutated, libcst.CSTNode)
    if statement is function:
        return mutated
    body = statement.body.with_changes(body=[mutated if one is function else one for one in statement.body.body])
    return statement.with_changes(body=body)


def _top_level(module: libcst.Module) -> Iterator[tuple[int, libcst.BaseCompoundStatement]]:
    """The top-level statement around each function and method, by the identity of the latter."""
    for statement in module.body:
        if isinstance(statement, libcst.FunctionDef):
            yield id(statement), statement
        elif isinstance(statement, libcst.ClassDef):
            yield from (
                (id(inner), statement) for inner in statement.body.body if isinstance(inner, libcst.FunctionDef)
            )


def _syntax(function: str) -> str:
    """The syntax tree as text; empty if an operator left none, as with a positional argument after a named one."""
    try:
        return ast.dump(ast.parse(function))
    except SyntaxError:
        return ""


def _difference(original: str, source: str) -> tuple[int, str]:
    """The first changed line of the original, from 1, and the change as text."""
    before, after = original.splitlines(), source.splitlines()
    lines: list[int] = []
    change: list[str] = []
    matcher = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
    for tag, start, end, new_start, new_end in matcher.get_opcodes():
        if tag != "equal":
            lines.append(start + 1)
            change += [f"- {line.strip()}" for line in before[start:end]]
            change += [f"+ {line.strip()}" for line in after[new_start:new_end]]
    return lines[0], "\n".join(change)


def _place(tree: ast.Module, line: int) -> tuple[str, tuple[int, ...]]:
    """The function around a line, by its qualified name, and the lines of the innermost statement around it."""
    names: list[str] = []
    statement: ast.stmt | None = None
    inside_function = False
    body: list[ast.stmt] = tree.body
    while around := [node for node in body if _first_line(node) <= line <= (node.end_lineno or node.lineno)]:
        statement = around[0]
        if isinstance(statement, _NAMED) and not inside_function:
            names.append(statement.name)
            inside_function = not isinstance(statement, ast.ClassDef)
        body = list(_statements_in(statement))
    assert statement is not None and inside_function
    last = statement.end_lineno or statement.lineno
    if not isinstance(statement, _NAMED):  # the head of a function runs where the function does
        last = min([_first_line(inner) - 1 for inner in body] or [last])
    return ".".join(names), tuple(range(_first_line(statement), max(last, line) + 1))


_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def _statements_in(node: ast.stmt) -> Iterator[ast.stmt]:
    """The statements directly below a compound one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from child.body
