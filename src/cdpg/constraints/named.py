"""Imports constraints given by name, ``module:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path, PurePath
from typing import Any

from cdpg.errors import UserError
from cdpg.messages.nearest import nearest


def load_constraint(name: str, kind: str = "constraint") -> Any:
    """The function that ``module:function`` names; the working folder is searched too.

    It is searched last, so that a file in it cannot replace an installed module. ``kind`` is what messages call it.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise UserError(f"a {kind} is given as module:function, not {name!r}")
    if module_name.startswith(".") or "/" in module_name or "\\" in module_name:
        raise UserError(_named_by_file(module_name, attribute, kind))
    folder = str(Path.cwd())
    file = f"{module_name.replace('.', '/')}.py"
    try:
        if folder not in sys.path and not _is_found(module_name):
            sys.path.append(folder)
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UserError(
                _named_by_file(module_name, attribute, kind)
                if module_name.endswith(".py")
                else f"there is no module {module_name!r} for the {kind} {name!r}: expected {file} in {folder!r}, "
                f"or an installed module{_meant_module(Path(folder, file))}"
            ) from error
        raise UserError(f"the module {module_name!r} of the {kind} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(
            f"the module {module_name!r} of the {kind} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        own = Path(folder, file)
        hidden = own.is_file() and own.resolve() != Path(getattr(module, "__file__", None) or "").resolve()
        hint = f"; {str(own)!r} was not used, since an installed module has that name: rename it" if hidden else ""
        near = nearest(attribute, functions)
        there = f"did you mean {near!r}?" if near else f"it has {', '.join(functions) or 'none'}"
        raise UserError(f"{module_name!r} has no function {attribute!r}; {there}{hint}")
    return function


def _meant_module(file: Path) -> str:
    """A file with nearly that name beside it, as a question; else nothing."""
    near = nearest(file.stem, sorted(found.stem for found in file.parent.glob("*.py")))
    return f"; did you mean {near!r}?" if near else ""


def _named_by_file(path: str, attribute: str, kind: str) -> str:
    """A sentence on a function whose module was given as a file."""
    given = PurePath(path.replace("\\", "/"))
    below = not given.is_absolute() and ".." not in given.parts
    parts = (*(given.parent.parts if below else ()), given.stem)
    place = "" if below else f" and start in the folder of {given.name}"
    return (
        f"a {kind} is given as module:function, not {f'{path}:{attribute}'!r}: write "
        f"{'.'.join(parts).lstrip('.')}:{attribute}{place}"
    )


def _is_found(module_name: str) -> bool:
    """Whether a module can be imported now; a folder without code is not a module."""
    if module_name in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None
