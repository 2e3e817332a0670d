"""A comparison: a run for each method and seed, then an evaluation of all models on the same contexts."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cdpg.config import CDPGConfig, read_yaml
from cdpg.contexts.digests import prompt_digests
from cdpg.errors import RunError, UserError
from cdpg.evaluation.results import BASE, TUNED
from cdpg.jobs.factors import with_multipliers
from cdpg.jobs.job import Inputs, Job
from cdpg.jobs.running import evaluate_saved, make_evaluator, make_trainer
from cdpg.messages.terms import term
from cdpg.methods import make_method
from cdpg.models.base import LanguageModel
from cdpg.models.loading import load_model
from cdpg.storage import overwriting, schedule
from cdpg.storage.evaluations import write_evaluation
from cdpg.storage.json_files import mapping, read_json, write_json, write_yaml
from cdpg.storage.provenance import how_to_resume
from cdpg.storage.run_folder import RunFolder, costs, kept
from cdpg.system.distributed import processes_in_all
from cdpg.system.files import refuse_links
from cdpg.system.signals import StopSignal
from cdpg.training.moments import require_target
from cdpg.training.notices import log_all

_log = logging.getLogger(__name__)

FILE = "comparison.json"


@dataclasses.dataclass(frozen=True)
class ComparisonRun:
    """One run of a comparison."""

    name: str
    method: str
    job: Job

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.job.settings.output_dir)

    def is_done(self) -> bool:
        """Whether this run, with the same settings, is finished."""
        if not (self.folder.model / "config.json").is_file():
            return False
        found = read_yaml(self.folder.config)
        asked = {**self.job.inputs(), **self.job.settings.to_mapping()}
        free = {"overwrite_output_dir", *(key for key in schedule.FOLLOWING if asked[key] is None)}
        return all(found.get(key) == value for key, value in asked.items() if key not in free)


def require_place(job: Job, runs: Sequence[ComparisonRun], resume: bool) -> None:
    """Refuse folders that hold other runs, and symbolic links."""
    refuse_links(Path(job.settings.output_dir), [FILE, *(run.name for run in runs)])
    for run in runs:
        if not resume:
            overwriting.require_place(run.folder, run.job.settings.overwrite_output_dir, run.job.inputs().values())


def _cost(run: ComparisonRun) -> tuple[bool, int]:
    """Larger for a run that takes longer than others of as many samples."""
    method = make_method(run.job.settings)
    return method.differentiates_every_sample, method.passes


def comparison_runs(job: Job, methods: Sequence[str], seeds: int) -> Iterator[ComparisonRun]:
    """Every method with every seed, in folders below the job's, with the same number of samples."""
    if job.moment or job.reward:
        require_target(methods)
    for method in methods:
        for offset in range(seeds):
            name = method if seeds == 1 else f"{method}-seed{offset}"
            settings = job.settings.replace(
                method=method,
                seed=job.settings.seed + offset,
                output_dir=str(Path(job.settings.output_dir) / name),
                evaluate_at_end=False,
            )
            yield ComparisonRun(name, method, dataclasses.replace(job, settings=settings))


def carry_out(
    job: Job,
    inputs: Inputs,
    runs: Sequence[ComparisonRun],
    jobs: int,
    resume: bool,
    command: str | None,
) -> dict[str, Any] | None:
    """Train the unfinished runs, ``jobs`` at a time, and compare; a signal stops it with a checkpoint."""
    _warn_of_replaced(Path(job.settings.output_dir) / FILE, runs)
    with StopSignal() as signal:
        if jobs > 1:
            train_side_by_side(runs, jobs, command, resume, signal)
        else:
            train_all(runs, inputs, command, resume)
        return compare(job, inputs, runs, command, signal)


def _warn_of_replaced(path: Path, runs: Sequence[ComparisonRun]) -> None:
    """Warn of models of an earlier comparison that will no longer be in the file, while it can still be saved."""
    models: Mapping[str, Any] = {}
    with suppress(UserError):  # a damaged file needs no warning
        models = mapping(mapping(read_json(path)).get("models")) if path.is_file() else {}
    others = [name for name in models if name not in {BASE, *(run.name for run in runs)}]
    if others:
        _log.warning(
            f"{str(path)!r} also holds {', '.join(others)} and will be replaced by a comparison of these runs alone: "
            "copy it to keep it, or name all methods and seeds"
        )


def train_all(runs: Sequence[ComparisonRun], inputs: Inputs, command: str | None, resume: bool) -> None:
    """Train the unfinished runs, one after the other."""
    for number, run in enumerate(runs, start=1):
        if resume and run.is_done():
            _log.info(f"{run.name}: done before")
            continue
        _log.info(f"{run.name}: run {number} of {len(runs)}")
        make_trainer(run.job, inputs, command).train(resume_from_checkpoint=resume)


def train_side_by_side(
    runs: Sequence[ComparisonRun],
    jobs: int,
    command: str | None,
    resume: bool,
    signal: StopSignal,
) -> None:
    """Train the unfinished runs, ``jobs`` at a time, each in a process with its share of the cores.

    Small models gain little from a second thread, so two runs with one thread each finish sooner than one after the
    other. The output of a run goes to ``output.txt`` in its folder. A signal stops all of them.
    """
    if processes_in_all() > 1:
        raise UserError(
            f"{term('jobs')} starts runs by itself, and a launcher has started several processes already: drop one"
        )
    waiting = [run for run in runs if not (resume and run.is_done())]
    waiting.sort(key=_cost, reverse=True)  # what takes longest comes first: last, it would run alone
    under_way: dict[str, subprocess.Popen[bytes]] = {}
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    try:
        while waiting or under_way:
            while waiting and len(under_way) < jobs:
                run = waiting.pop(0)
                _log.info(f"{run.name}: started; its progress is in {_output(run)}")
                under_way[run.name] = start_run(run, resume, environment)
            time.sleep(0.2)
            if signal.received is not None:
                situation = "stopped, and the runs under way have written checkpoints"
                raise signal.interruption(situation, how_to_resume(command))
            for run in [run for run in runs if run.name in under_way and under_way[run.name].poll() is not None]:
                status = under_way.pop(run.name).returncode
                if status != 0:
                    raise RunError(f"the run {run.name} failed with status {status}: see {str(_output(run))!r}")
                _log.info(f"{run.name}: done")
    finally:
        for process in under_way.values():
            process.terminate()  # it ends its epoch and writes a checkpoint
        for process in under_way.values():
            process.wait()


def _output(run: ComparisonRun) -> Path:
    return run.folder.path / "output.txt"


def start_run(run: ComparisonRun, resume: bool, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a run as a command."""
    folder = run.folder.path
    folder.mkdir(parents=True, exist_ok=True)
    refuse_links(folder, ["job.yaml", _output(run).name])
    write_yaml(folder / "job.yaml", {**run.job.inputs(), **run.job.settings.to_mapping()})
    words = [sys.executable, "-m", "cdpg", "run", str(folder / "job.yaml"), "--no-report"]
    words += ["--resume"] if resume else []
    with _output(run).open("ab") as output:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)


def compare(
    job: Job,
    inputs: Inputs,
    runs: Sequence[ComparisonRun],
    command: str | None,
    signal: StopSignal,
) -> dict[str, Any] | None:
    """Evaluate all runs together, write ``comparison.json`` and every run's ``evaluation.json``.

    All processes take part. Only the main one measures and writes; the others return None.
    """
    # Runs of one comparison begin with the same λ of moments, and may fit it again: that of the first is used.
    inputs = dataclasses.replace(inputs, constraints=with_multipliers(inputs.constraints, runs[0].folder))
    evaluator = make_evaluator(runs[0].job, inputs, frozenset(prompt_digests(inputs.tuning)))
    models = {run.name: _loader(run.folder.model, run.job.settings) for run in runs}
    evaluation = evaluate_saved(evaluator, models, job.task, command, signal)
    if evaluation is None:
        return None
    result = evaluation.to_mapping() | {
        "kept": {run.name: kept(run.folder) for run in runs},
        "costs": {run.name: costs(run.folder) for run in runs},
    }
    if len({run.method for run in runs}) < len(runs):
        result["seeds"] = _over_seeds(runs, result["models"])
    write_json(Path(job.settings.output_dir) / FILE, result)
    for run in runs:
        with run.folder:
            own = evaluation.to_mapping({BASE: BASE, run.name: TUNED})
            write_evaluation(run.folder, own, evaluation.ideal_samples)
    log_all(result["notices"])
    return result


def _loader(path: Path, config: CDPGConfig) -> Callable[[], LanguageModel]:
    return lambda: load_model(str(path), config)


def _over_seeds(runs: Sequence[ComparisonRun], models: dict[str, Any]) -> dict[str, Any]:
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
