"""What a command or a configuration file asks for: a model, contexts, a constraint and the settings."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cdpg.config import FIELDS, CDPGConfig, parse_overrides, read_yaml, unknown_setting
from cdpg.errors import UserError

_ORIGIN = "origin"
"""The part of a run's ``config.yaml`` that tells where it came from; not a setting."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to be made, all of it given by names."""

    model: str
    """A hub id or a folder."""
    contexts: str
    """A CSV, JSONL, JSON or text file."""
    constraint: tuple[str, ...]
    """One or several ``module:function``."""
    prompt_column: str
    """The column of the contexts that holds the prompt."""
    settings: CDPGConfig

    def inputs(self) -> dict[str, Any]:
        """All but the settings, as :meth:`from_mapping` takes it."""
        return {
            "model": self.model,
            "contexts": self.contexts,
            "constraint": list(self.constraint),
            "prompt_column": self.prompt_column,
        }

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Job:
        """From a flat mapping of everything; what is missing or unknown is reported at once."""
        values = {key: value for key, value in values.items() if key != _ORIGIN}
        own = {field.name for field in dataclasses.fields(cls)} - {"settings"}
        problems = [unknown_setting(key, {*FIELDS, *own}) for key in values if key not in FIELDS and key not in own]
        missing = [key for key in ("model", "contexts", "constraint") if not values.get(key)]
        if missing:
            problems.append(
                f"{_listed(missing)} must be given, by {_listed(f'--{key}' for key in missing)} or in the file"
            )
        if problems:
            raise UserError("; ".join(problems))
        constraint = values["constraint"]
        return cls(
            model=str(values["model"]),
            contexts=str(values["contexts"]),
            constraint=(constraint,) if isinstance(constraint, str) else tuple(map(str, constraint)),
            prompt_column=str(values.get("prompt_column", "prompt")),
            settings=CDPGConfig.from_mapping({key: value for key, value in values.items() if key in FIELDS}),
        )


def gather(config: Path | None, options: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A file's settings, overlaid by the options that were given, overlaid by ``--set``."""
    if config is not None and not config.is_file():
        raise UserError(f"{str(config)!r} is not a configuration file: expected a YAML file of settings")
    values = read_yaml(config) if config is not None else {}
    given = {key: value for key, value in options.items() if value is not None}
    return {**values, **given, **parse_overrides(overrides)}


def load_constraint(name: str) -> Any:
    """The function that ``module:function`` names; modules are looked up in the working folder too."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise UserError(f"a constraint is given as module:function, not {name!r}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UserError(
                f"there is no module {module_name!r} for the constraint {name!r}: expected {module_name}.py in "
                f"{folder!r}, or an installed module"
            ) from error
        raise UserError(f"the module {module_name!r} of the constraint cannot be imported: {error}") from error
    except Exception as error:
        raise UserError(
            f"the module {module_name!r} of the constraint cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UserError(f"{module_name!r} has no function {attribute!r}; it has {_listed(functions) or 'none'}")
    return function


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
