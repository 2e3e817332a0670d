"""Puts a mutant into the package that is already imported: its function gets the mutant's code."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType


@dataclass(frozen=True)
class Edit:
    """A function to be replaced."""

    file: str
    """The path from the root of the project."""
    function: str
    """The qualified name of a top-level function or of a method."""
    text: str
    """The whole lines of the new function, as they stand in the file."""
    line: int
    """The number of the first one."""


def patch(edit: Edit) -> None:
    """Change a function in place, so that whoever holds it runs the new one."""
    found = _function(edit.file, edit.function)
    *classes, _ = path = edit.function.split(".")
    # Compiled alone, with the line numbers of the file and, for `super()` and private names, in a class.
    head = "from __future__ import annotations" + "\n" * (edit.line - 1 - len(classes))
    source = head + "".join(f"class {name}:\n" for name in classes) + edit.text
    definition: ast.AST = ast.parse(source).body[-1]
    code = compile(source, found.__code__.co_filename, "exec")
    for part in path:
        (code,) = (
            constant for constant in code.co_consts if isinstance(constant, CodeType) and constant.co_name == part
        )
    while isinstance(definition, ast.ClassDef):
        definition = definition.body[-1]
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    found.__code__ = code
    _set_defaults(found, definition.args)


def _function(file: str, function: str) -> FunctionType:
    found: object = importlib.import_module(_module(file))
    for part in function.split("."):
        found = vars(found)[part]
    for name in "__func__", "fget", "func", "__wrapped__":  # of static and class methods, properties, caches
        found = getattr(found, name, None) or found
    assert isinstance(found, FunctionType), f"{function} of {file} is no function"
    return found


def _module(file: str) -> str:
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _set_defaults(function: FunctionType, arguments: ast.arguments) -> None:
    """Defaults belong to the function, not to its code; those that are literals may have changed."""
    if function.__defaults__:
        function.__defaults__ = tuple(map(_value, arguments.defaults, function.__defaults__))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None and function.__kwdefaults__:
            function.__kwdefaults__[argument.arg] = _value(default, function.__kwdefaults__[argument.arg])


def _value(default: ast.expr, now: object) -> object:
    return default.value if isinstance(default, ast.Constant) else now


def edits_between(file: str, before: str, after: str) -> list[Edit] | None:
    """The functions in which two versions of a file differ; None if they differ elsewhere, too."""
    old, new = _Version(before), _Version(after)
    found = _changed(old, ast.parse(before).body, new, ast.parse(after).body, "")
    return None if found is None else [Edit(file, name, new.text(node), _first_line(node)) for name, node in found]


class _Version:
    def __init__(self, source: str) -> None:
        self._lines = source.splitlines(keepends=True)

    def text(self, node: ast.stmt) -> str:
        return "".join(self._lines[_first_line(node) - 1 : node.end_lineno])


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _changed(
    old: _Version, before: Sequence[ast.stmt], new: _Version, after: Sequence[ast.stmt], prefix: str
) -> list[tuple[str, ast.FunctionDef]] | None:
    if len(before) != len(after):
        return None
    found: list[tuple[str, ast.FunctionDef]] = []
    for one, other in zip(before, after, strict=True):
        if old.text(one) == new.text(other) or ast.dump(one) == ast.dump(other):
            continue
        if isinstance(one, ast.FunctionDef) and isinstance(other, ast.FunctionDef) and _head(one) == _head(other):
            found.append((prefix + other.name, other))
            continue
        inner = None
        if isinstance(one, ast.ClassDef) and isinstance(other, ast.ClassDef) and _head(one) == _head(other):
            inner = _changed(old, one.body, new, other.body, f"{prefix}{other.name}.")
        if inner is None:
            return None
        found += inner
    return found


def _head(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """What runs or counts when the module is imported."""
    parts: list[ast.AST] = [*node.decorator_list]
    if isinstance(node, ast.ClassDef):
        parts += [*node.bases, *node.keywords]
    else:
        arguments = node.args
        parts += [argument for argument in ast.walk(arguments) if isinstance(argument, ast.arg)]
        values = [*arguments.defaults, *filter(None, arguments.kw_defaults)]
        parts += [value if not isinstance(value, ast.Constant) else ast.Constant(None) for value in values]
    return [node.name, *map(ast.dump, parts)]
