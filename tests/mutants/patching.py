"""Puts a mutant into the package that is already imported: its function gets the mutant's code."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from types import CodeType, FunctionType

from operators import Mutant


def patch(mutant: Mutant) -> None:
    """Change the function in place, so that whoever holds it runs the mutant."""
    function = _function(mutant)
    (definition,) = _definitions(ast.parse(mutant.source).body, mutant.function.split("."))
    code = compile(mutant.source, function.__code__.co_filename, "exec")
    for part in mutant.function.split("."):
        (code,) = (
            constant for constant in code.co_consts if isinstance(constant, CodeType) and constant.co_name == part
        )
    function.__code__ = code
    _set_defaults(function, definition.args)


def _function(mutant: Mutant) -> FunctionType:
    found: object = importlib.import_module(_module(mutant.file))
    for part in mutant.function.split("."):
        found = vars(found)[part]
    found = getattr(found, "__func__", found)  # of a static or class method
    assert isinstance(found, FunctionType)
    return found


def _module(file: str) -> str:
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _definitions(body: list[ast.stmt], path: list[str]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and [node.name] == path:
            yield node
        elif isinstance(node, ast.ClassDef) and node.name == path[0]:
            yield from _definitions(node.body, path[1:])


def _set_defaults(function: FunctionType, arguments: ast.arguments) -> None:
    """Defaults belong to the function, not to its code; those that are literals may have changed."""
    if function.__defaults__:
        function.__defaults__ = tuple(map(_value, arguments.defaults, function.__defaults__))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None and function.__kwdefaults__:
            function.__kwdefaults__[argument.arg] = _value(default, function.__kwdefaults__[argument.arg])


def _value(default: ast.expr, now: object) -> object:
    return default.value if isinstance(default, ast.Constant) else now
