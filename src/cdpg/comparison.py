"""One task, several methods and seeds: a run for each, then all models side by side on the same held-out contexts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from cdpg.config import CDPGConfig
from cdpg.evaluation.summary import BASE, Evaluation
from cdpg.heldout import TUNED, HeldOut
from cdpg.job import Inputs, Job
from cdpg.models.base import LanguageModel
from cdpg.models.loading import load_model
from cdpg.runlog import RunFolder, costs, write_json
from cdpg.trainer import CDPGTrainer

FILE = "comparison.json"


@dataclasses.dataclass(frozen=True)
class Entrant:
    """One run of a comparison."""

    name: str
    method: str
    job: Job

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.job.settings.output_dir)

    def is_done(self) -> bool:
        """Whether the run has come to its end."""
        return (self.folder.model / "config.json").is_file()


def entrants(job: Job, methods: Sequence[str], seeds: int) -> Iterator[Entrant]:
    """Every method with every seed, in folders of their own below the job's; the same number of samples for all."""
    for method in methods:
        for offset in range(seeds):
            name = method if seeds == 1 else f"{method}-seed{offset}"
            settings = job.settings.replace(
                method=method,
                seed=job.settings.seed + offset,
                output_dir=str(Path(job.settings.output_dir) / name),
                evaluate_at_end=False,
            )
            yield Entrant(name, method, dataclasses.replace(job, settings=settings))


def make_trainer(job: Job, inputs: Inputs, command: str | None) -> CDPGTrainer:
    """The trainer of a job."""
    return CDPGTrainer(
        job.model,
        inputs.constraints,
        job.settings,
        inputs.tuning,
        inputs.held_out,
        stop=inputs.stop,
        measure=inputs.measure,
        command=command,
        inputs=job.inputs(),
    )


def compare(
    job: Job, inputs: Inputs, runs: Sequence[Entrant], command: str | None, resume: bool, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Train what is not trained yet, evaluate all, write ``comparison.json`` and every run's ``evaluation.json``."""
    held_out: HeldOut | None = None
    for number, run in enumerate(runs, start=1):
        if resume and run.is_done():
            tell(f"{run.name}: done before")
            continue
        tell(f"{run.name}: run {number} of {len(runs)}")
        trainer = make_trainer(run.job, inputs, command)
        trainer.train(resume_from_checkpoint=resume)
        held_out = trainer.held_out
    if held_out is None:
        held_out = make_trainer(runs[0].job, inputs, command).held_out
    about = {"task": job.task, "command": command}
    models = {run.name: _loader(run.folder.model, run.job.settings) for run in runs}
    with closing(held_out.judge):
        evaluation = held_out.evaluate(models, about, tell)
    result = evaluation.to_mapping() | {"costs": {run.name: costs(run.folder) for run in runs}}
    if len({run.method for run in runs}) < len(runs):
        result["seeds"] = _over_seeds(runs, result["models"])
    if held_out.processes.is_main:
        _write(Path(job.settings.output_dir), runs, evaluation, result)
    return result


def evaluate_model(
    job: Job, inputs: Inputs, model: str, command: str | None, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Any model beside the job's base, as ``evaluation.json`` has it."""
    held_out = make_trainer(job, inputs, command).held_out
    about = {"task": job.task, "command": command}
    with closing(held_out.judge):
        found = held_out.evaluate({TUNED: _loader(Path(model), job.settings)}, about, tell)
    return found.to_mapping({BASE: BASE, TUNED: TUNED})


def _write(folder: Path, runs: Sequence[Entrant], evaluation: Evaluation, result: dict[str, Any]) -> None:
    for run in runs:
        own = evaluation.to_mapping({BASE: BASE, run.name: TUNED}) | {"costs": {TUNED: costs(run.folder)}}
        write_json(run.folder.evaluation, own)
    write_json(folder / FILE, result)


def _loader(path: Path, config: CDPGConfig) -> Callable[[], LanguageModel]:
    return lambda: load_model(str(path), config)


def _over_seeds(runs: Sequence[Entrant], models: dict[str, Any]) -> dict[str, Any]:
    """Mean and extremes of each metric over the seeds of a method: the training's own variance."""
    found: dict[str, Any] = {}
    for method in dict.fromkeys(run.method for run in runs):
        names = [run.name for run in runs if run.method == method]
        found[method] = {}
        for metric in models[names[0]]:
            values = [models[name][metric]["mean"] for name in names]
            known = [value for value in values if value is not None]
            mean = sum(known) / len(known) if known else None
            low, high = (min(known), max(known)) if known else (None, None)
            found[method][metric] = {"mean": mean, "low": low, "high": high, "values": values}
    return found
