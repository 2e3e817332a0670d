"""Reads run folders; files that cannot be read become notes in the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cdpg.config import parse_yaml
from cdpg.errors import UserError
from cdpg.evaluation.metrics import POOLED
from cdpg.messages.nearest import nearest_folder
from cdpg.report.values import count, number, short, without
from cdpg.storage.json_files import mapping

_OF_A_RUN = ("config.yaml", "metrics.jsonl", "evaluations.jsonl", "evaluation.json", "samples.jsonl")
_COMPARISON = "comparison.json"
_LARGEST_FILE = 1 << 30
Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The files of a run, unchecked except for their shape."""

    name: str
    """The folder's name."""
    path: Path
    config: Record
    config_text: str
    """The text of ``config.yaml``."""
    metrics: tuple[Record, ...]
    """A record an epoch, in order; the last one if an epoch occurs twice."""
    samples: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    """A record for each evaluation during the run, in order; that of epoch 0 is the base's, without a pooled KL."""
    evaluation: Record
    kept: Record
    """Which epoch's model is in the folder."""
    problems: tuple[str, ...] = ()
    """What could not be read, one sentence each."""

    @property
    def method(self) -> str:
        """The method's name; without a configuration, the start of the folder's name."""
        given = self.config.get("method")
        return given if isinstance(given, str) and given else self.name.split("-seed")[0]

    @property
    def best_epoch(self) -> float | None:
        """The epoch whose model was chosen by the gain on validation contexts; None where the last one is kept."""
        return count(self.kept.get("epoch")) if self.kept.get("keep") == "best" else None

    @property
    def drawn_by(self) -> str | None:
        """``base`` or ``proposal`` if another model draws the training samples: they then do not show what the run has
        learnt. None for the policy."""
        if any(record.get("samples_of_base") is True for record in self.metrics):
            return "base"
        return "proposal" if any(record.get("samples_of") for record in self.metrics) else None

    @property
    def samples_per_epoch(self) -> float | None:
        """N·M; None if the configuration lacks it."""
        contexts, samples = (number(self.config.get(key)) for key in ("contexts_per_epoch", "num_generations"))
        return contexts * samples if contexts and samples else None


@dataclass(frozen=True)
class Found:
    """The content of the given folders."""

    runs: tuple[Run, ...]
    comparisons: Mapping[Path, Record]
    """``comparison.json`` of each folder that has one."""
    problems: tuple[str, ...] = ()


def read_folders(paths: Sequence[Path]) -> Found:
    """The runs of run folders and of compare folders; a folder that holds neither is a UserError."""
    if not paths:
        raise UserError("no run was given to report on: name a run's folder, several, or one made by cdpg compare")
    runs: list[Run] = []
    comparisons: dict[Path, Record] = {}
    problems: list[str] = []
    for path in map(Path, paths):
        if not path.is_dir():
            near = None if path.exists() else nearest_folder(path)
            hint = f"; did you mean {str(near)!r}?" if near else ""
            raise UserError(f"{str(path)!r} is not a folder: expected one that cdpg run or cdpg compare wrote{hint}")
        compared = (path / _COMPARISON).is_file()
        alone = _is_run(path) and not compared
        folders = [path] if alone else sorted(folder for folder in path.iterdir() if _is_run(folder))
        if not folders and not compared:
            raise UserError(
                f"the folder {str(path)!r} holds no run: expected {', '.join(_OF_A_RUN)} in it, or folders with these"
            )
        runs += [read_run(folder) for folder in folders if folder.resolve() not in {run.path for run in runs}]
        if compared:
            comparisons[path.resolve()] = _read_json(path / _COMPARISON, problems)
    return Found(tuple(runs), comparisons, tuple(problems))


def read_run(path: Path) -> Run:
    """One run; missing files are empty."""
    problems: list[str] = []
    config_text = _read_text(path / "config.yaml", problems)
    metrics = {number(line.get("epoch")): line for line in _read_lines(path / "metrics.jsonl", problems)}
    evaluations = {number(line.get("epoch")): line for line in _read_lines(path / "evaluations.jsonl", problems)}
    return Run(
        name=path.resolve().name,
        path=path.resolve(),
        config=_parse_yaml(config_text, path / "config.yaml", problems),
        config_text=config_text,
        metrics=_in_order(metrics),
        samples=tuple(_read_lines(path / "samples.jsonl", problems)),
        evaluations=tuple(map(_without_pool_of_one, _in_order(evaluations))),
        evaluation=_read_json(path / "evaluation.json", problems),
        kept=_read_json(path / "kept.json", problems),
        problems=tuple(problems),
    )


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in _OF_A_RUN)


def _without_pool_of_one(record: Record) -> Record:
    """The base's evaluation without its pooled KL: a pool of one model is not comparable with later ones."""
    if number(record.get("epoch")) != 0:
        return record
    return {**record, "metrics": without(record.get("metrics"), POOLED)}


def _in_order(records: dict[float | None, Record]) -> tuple[Record, ...]:
    return tuple(records[epoch] for epoch in sorted(epoch for epoch in records if epoch is not None))


def _read_text(path: Path, problems: list[str]) -> str:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            problems.append(f"{_place(path)} is larger than a gibibyte and was left out")
            return ""
        return path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        problems.append(f"{_place(path)} could not be read: {error.strerror or error}")
        return ""


def _read_json(path: Path, problems: list[str]) -> Record:
    content = _read_text(path, problems)
    if not content:
        return {}
    try:
        return mapping(json.loads(content))
    except (ValueError, RecursionError):
        problems.append(f"{_place(path)} is not valid JSON and was left out")
        return {}


def _read_lines(path: Path, problems: list[str]) -> Iterator[Record]:
    """Every line that holds a JSON object; the others are counted."""
    damaged = 0
    for line in _read_text(path, problems).split("\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            yield mapping(record)
        else:
            damaged += 1
    if damaged:
        problems.append(f"{damaged} line{'s' * (damaged > 1)} of {_place(path)} could not be read and were left out")


def _parse_yaml(content: str, path: Path, problems: list[str]) -> Record:
    try:
        return mapping(parse_yaml(content)) if content else {}
    except (yaml.YAMLError, ValueError, RecursionError):
        problems.append(f"{_place(path)} is not valid YAML; its text is shown unchanged")
        return {}


def _place(path: Path) -> str:
    """A file's folder and name, shortened for a sentence."""
    return short(f"{path.resolve().parent.name}/{path.name}", 80)
