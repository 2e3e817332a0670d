"""The mutants that mutmut's operators make of a file of the source."""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import libcst
from fault_list import ROOT
from libcst.metadata import MetadataWrapper, WhitespaceInclusivePositionProvider
from mutmut.mutation.file_mutation import Mutation, create_mutations


@dataclass(frozen=True)
class Mutant:
    """One change, inside one function of a file."""

    file: str
    """The path from the root of the project."""
    function: str
    """The qualified name of the top-level function or of the method."""
    lines: tuple[int, ...]
    """The lines of the changed statement in the original, from 1."""
    change: str
    """What changed: the lines of a diff that start with - and +, without their indentation."""
    text: str
    """The whole lines of the function, with the change."""
    place: tuple[int, int]
    """The first line of the function in the original, from 1, and the one after its last."""
    earlier: int = 0
    """Mutants of the function before this one with the same change, at another of several equal lines."""

    @cached_property
    def name(self) -> str:
        """The same as long as the function's name and the changed lines are the same."""
        digest = hashlib.sha256(f"{self.file} {self.function} {self.change}".encode()).hexdigest()
        return f"{Path(self.file).stem}-{digest[:8]}" + f"-{self.earlier + 1}" * bool(self.earlier)


def mutants_of(file: str) -> Iterator[Mutant]:
    """All mutants of a file; two edits that mean the same are one."""
    source = _Source((ROOT / file).read_text(encoding="utf-8"), file)
    seen: set[tuple[tuple[int, int], str]] = set()
    alike: Counter[tuple[str, str]] = Counter()
    for mutation in source.mutations:
        place = source.place(mutation)
        if place is None:
            continue
        before = source.text(place)
        if (place, "") not in seen:
            seen |= {(place, _syntax(before)), (place, "")}
        after = source.mutated(mutation)
        if (place, syntax := _syntax(after)) in seen:
            continue
        seen.add((place, syntax))
        line, change = _difference(before, after)
        function, lines = source.statement(place[0] - 1 + line)
        yield Mutant(file, function, lines, change, after, place, alike[function, change])
        alike[function, change] += 1


class _Source:
    """A file with the edits that mutmut's operators make of it, and where its functions are."""

    def __init__(self, text: str, file: str) -> None:
        self._lines = text.splitlines(keepends=True)
        self._tree = ast.parse(text)
        self._module, self.mutations, _, _ = create_mutations(file, text)
        wrapper = MetadataWrapper(self._module, unsafe_skip_copy=True)
        self._places = wrapper.resolve(WhitespaceInclusivePositionProvider)
        self._functions = {id(function): block for function, block in _functions(self._module)}
        self._statements: dict[int, tuple[str, tuple[int, ...]]] = {}

    def place(self, mutation: Mutation) -> tuple[int, int] | None:
        """The first line of the function around an edit, and the one after its last; None outside functions."""
        function = mutation.contained_by_top_level_function
        if function is None or id(function) not in self._functions:
            return None
        span = self._places[function]
        return span.start.line, span.end.line + bool(span.end.column)

    def text(self, place: tuple[int, int]) -> str:
        return "".join(self._lines[place[0] - 1 : place[1] - 1])

    def mutated(self, mutation: Mutation) -> str:
        """The lines of the function with the edit. An edit inside a line is put into that line, which is quick."""
        span, place = self._places.get(mutation.original_node), self.place(mutation)
        assert place is not None
        if span is not None and span.start.line == span.end.line:
            line = self._lines[span.start.line - 1]
            edited = self._module.code_for_node(mutation.mutated_node)
            edited = line[: span.start.column] + edited + line[span.end.column :]
            return self.text((place[0], span.start.line)) + edited + self.text((span.start.line + 1, place[1]))
        function = mutation.contained_by_top_level_function
        assert function is not None
        changed = function.deep_replace(mutation.original_node, mutation.mutated_node)
        if self._functions[id(function)]:  # a method, which has an indentation
            text = self._module.code_for_node(libcst.IndentedBlock(body=[changed]))
            return text.removeprefix("\n")
        return self._module.code_for_node(changed)

    def statement(self, line: int) -> tuple[str, tuple[int, ...]]:
        if line not in self._statements:
            self._statements[line] = _place(self._tree, line)
        return self._statements[line]


def _functions(module: libcst.Module) -> Iterator[tuple[libcst.CSTNode, bool]]:
    """The top-level functions and the methods, and whether it is a method."""
    for statement in module.body:
        if isinstance(statement, libcst.FunctionDef):
            yield statement, False
        elif isinstance(statement, libcst.ClassDef):
            yield from ((inner, True) for inner in statement.body.body if isinstance(inner, libcst.FunctionDef))


def _syntax(function: str) -> str:
    """The syntax tree as text; empty if an operator left none, as with a positional argument after a named one."""
    try:
        return ast.dump(ast.parse(f"if True:\n{function}" if function.lstrip("\n")[:1] == " " else function))
    except SyntaxError:
        return ""


def _difference(original: str, source: str) -> tuple[int, str]:
    """The first changed line of the original, from 1, and the change as text."""
    before, after = original.splitlines(), source.splitlines()
    if len(before) == len(after):
        changed = [index for index, line in enumerate(before) if line != after[index]]
        if len(changed) == 1:
            return changed[0] + 1, f"- {before[changed[0]].strip()}\n+ {after[changed[0]].strip()}"
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
