"""The command ``settings``: every setting with its default and what it means."""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cdpg.cli.options import app
from cdpg.config import FIELDS, CDPGConfig
from cdpg.errors import UserError
from cdpg.messages.text import any_of
from cdpg.methods import METHODS


@app.command()
def settings(
    part: Annotated[str, typer.Argument(metavar="PART", help="Show only settings with this in their name.")] = "",
) -> None:
    """List the settings, for --set, YAML files and CDPGConfig.

    Examples:

      cdpg settings

      cdpg settings check
    """
    found = [name for name in FIELDS if part in name]
    if not found:
        raise UserError(f"no setting has {part!r} in its name: cdpg settings lists all of them")
    texts, defaults = setting_docstrings(), CDPGConfig()
    table = Table(title="--set SETTING=VALUE", title_justify="left")
    table.add_column("setting", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("meaning")
    for name in found:
        table.add_row(name, Text(_shown(getattr(defaults, name))), Text(texts[name].replace("``", "")))
    Console().print(table)


def setting_docstrings() -> dict[str, str]:
    """The description of every setting; for ``method``, of each method."""
    texts = field_docstrings(CDPGConfig)
    for method in METHODS.values():
        texts |= field_docstrings(method.Settings)
    methods = any_of(f"``{name}`` ({method.description})" for name, method in METHODS.items())
    return texts | {"method": f"{texts['method'].rstrip('.')}: {methods}."}


def field_docstrings(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass, on one line."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def _shown(value: Any) -> str:
    """A default value in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else repr(value) if value == "" else str(value)
