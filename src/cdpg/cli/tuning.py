"""Commands that tune: ``run`` and ``compare``."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cdpg.cli.completion import ALL
from cdpg.cli.options import Methods, app, makes_job
from cdpg.cli.output import finish_run, plan, quiet_transformers, report_path, show
from cdpg.cli.tables import print_models
from cdpg.config import CDPGConfig
from cdpg.evaluation.held_out import contexts_in_words, on_few
from cdpg.jobs.job import Job
from cdpg.methods import METHODS
from cdpg.storage.overwriting import require_place
from cdpg.storage.run_folder import RunFolder
from cdpg.tasks import known_metrics

_log = logging.getLogger(__name__)
_PAPERS_METHODS = "cdpg,dpg,reinforce,ziegler"

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an earlier run in the output folder; without effect on --resume.")
]


@app.command()
@makes_job("{task}-{method}", by_folder=True)
def run(
    job: Job,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the output folder; it says what the run is.")
    ] = False,
    overwrite: Overwrite = False,
    report: Annotated[bool, typer.Option(help="Write report.html at the end.")] = True,
) -> None:
    """Tune a model, evaluate it before and after, and write a report.

    Examples:

      cdpg run code-compilability

      cdpg run --model t5-small --contexts sentences.csv --constraint checks:short --output-dir runs/short

      cdpg run experiment.yaml --set learning_rate=1e-5 --epochs 200

      cdpg run experiment.yaml --resume

      cdpg run --output-dir runs/short --resume --epochs 400
    """
    job = _overwriting(job) if overwrite else job
    if not resume:
        require_place(RunFolder(job.settings.output_dir), job.settings.overwrite_output_dir, job.inputs().values())
    inputs = job.load()
    # Imported only now, so that the errors above come without waiting for torch.
    from cdpg.jobs.running import make_trainer

    quiet_transformers()
    trainer = make_trainer(job, inputs, shlex.join(sys.argv))
    _log.info(f"{plan(job, inputs)}; output in {job.settings.output_dir}")
    record = trainer.train(resume_from_checkpoint=resume)
    if trainer.processes.is_main:
        finish_run(Console(), trainer.folder, record, report)


@app.command()
@makes_job("compare-{task}", "method")
def compare(
    job: Job,
    methods: Methods = _PAPERS_METHODS,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with consecutive seeds.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time, each with its share of the cores.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the comparison in the output folder.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Tune with several methods and put them side by side.

    All draw the same number of samples.

    Examples:

      cdpg compare code-compilability

      cdpg compare translation-numbers --methods cdpg,reinforce --seeds 3

      cdpg compare translation-numbers --methods all --jobs 2
    """
    names = _method_names(methods)
    asked = job.settings.method
    if asked not in (CDPGConfig.method, *names):
        _log.warning(f"method {asked} is not compared, only {', '.join(names)}: name it in --methods")
    job = _overwriting(job) if overwrite else job
    job = dataclasses.replace(job, settings=job.settings.replace(evaluate_at_end=True))  # all runs together
    inputs = job.load()
    from cdpg.jobs import comparison

    quiet_transformers()
    runs = list(comparison.comparison_runs(job, names, seeds))
    comparison.require_place(job, runs, resume)
    _log.info(f"{plan(job, inputs)}; output in {job.settings.output_dir}; {len(runs)} runs: {', '.join(names)}")
    result = comparison.carry_out(job, inputs, runs, jobs, resume, shlex.join(sys.argv))
    if result is None:  # only the main process has figures
        return
    folder = Path(job.settings.output_dir)
    lines = [f"figures: {folder / comparison.FILE}", f"report: {report_path([folder], folder / 'report.html')}"]
    title, models = f"{job.task or job.model}, {contexts_in_words(result)}", result["models"]
    if "seeds" in result:
        title += f"; beside the base, mean and range over {seeds} seeds"
        models = {"base": models["base"], **result["seeds"]}
    output = Console()
    print_models(output, title, models, caution=on_few(result), metrics=known_metrics(result))
    show(output, lines)


def _overwriting(job: Job) -> Job:
    return dataclasses.replace(job, settings=job.settings.replace(overwrite_output_dir=True))


def _method_names(methods: str) -> list[str]:
    """Methods separated by commas, each once, or all; an unknown one is refused before anything runs."""
    if methods.strip() == ALL:
        return list(METHODS)
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    for name in names or [""]:
        CDPGConfig.from_mapping({"method": name})
    return names
