"""Commands on what there is: ``evaluate``, ``tasks``, ``report``, ``sample`` and ``push``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cdpg.cli.completion import complete_run, complete_task_name
from cdpg.cli.options import ConstraintName, Preset, PromptColumn, PromptPrefix, Seed, Setting, app
from cdpg.cli.output import console_of_main, note, quiet_transformers, show, shown_text
from cdpg.config import CDPGConfig, read_yaml
from cdpg.errors import UserError
from cdpg.job import Job, gather, prompting, without_task
from cdpg.runlog import RunFolder
from cdpg.tables import models_table
from cdpg.tasks import TASKS

_WHEN_SAMPLING = ("max_completion_length", "decoder_prefix", "long_contexts", "device", "dtype")
"""Settings of a run that its samples depend on."""

ModelOrRun = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_RUN", help="A run's folder, a model's folder or a hub id.", autocompletion=complete_run
    ),
]


@app.command()
def evaluate(
    model: ModelOrRun,
    task: Annotated[
        str | None,
        typer.Option(help="The task to evaluate on; a run knows its own.", autocompletion=complete_task_name),
    ] = None,
    preset: Preset = None,
    base: Annotated[str | None, typer.Option(help="The base; by default the run's or the task's.")] = None,
    contexts: Annotated[str | None, typer.Option(help="File of held-out contexts.")] = None,
    constraint: ConstraintName = None,
    prompt_column: PromptColumn = None,
    prompt_prefix: PromptPrefix = None,
    seed: Seed = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
    settings: Setting = None,
) -> None:
    """Evaluate any model on held-out contexts beside its base.

    Examples:

      cdpg evaluate runs/code-compilability-cdpg

      cdpg evaluate ./my-model --task translation-numbers --output figures.json
    """
    folder = RunFolder(model)
    known = read_yaml(folder.config) if folder.config.is_file() else {}
    known.pop("trust_remote_code", None)  # a folder may come from anywhere: only the user may say so
    if not known and task is None:
        raise UserError(f"{model!r} is no run's folder: name the task to evaluate on with --task")
    path, _ = model_of(model)
    given = {
        "task": task, "preset": preset, "model": base, "eval_contexts": contexts, "constraint": constraint,
        "prompt_column": prompt_column, "prompt_prefix": prompt_prefix, "seed": seed,
    }  # fmt: skip
    other_task = task is not None and task != known.get("task")
    values = without_task(known) if other_task else known
    job = Job.from_mapping({**values, **gather(None, given, settings or [])})
    console = console_of_main()
    inputs = job.load(lambda text: note(console, text), to_tune=False)
    from cdpg.card import write_evaluation
    from cdpg.comparison import evaluate_model
    from cdpg.runlog import costs, write_json

    quiet_transformers()
    result = evaluate_model(job, inputs, path, shlex.join(sys.argv), lambda text: note(console, text))
    if result is None:  # not the main process: it has no figures, prints none and writes nothing
        return
    # Only what the run was made for belongs into its folder and on its model's card.
    own = known and not any((other_task, preset, base, contexts, constraint, prompt_column, prompt_prefix is not None))
    target = output or (folder.evaluation if own else Path("evaluation.json"))
    if own and output is None:
        with folder:
            write_evaluation(folder, result)
    else:
        write_json(target, result | ({"costs": {"tuned": costs(folder)}} if own else {}))
    models = {name: result[name] for name in ("base", "tuned")}
    Console().print(models_table(f"{model} on {result['contexts']} held-out contexts", models, result["changes"]))
    show(Console(), [f"figures: {target}"])


@app.command()
def tasks() -> None:
    """The tasks that come with the package.

    Example:

      cdpg tasks
    """
    table = Table(title="cdpg run TASK", title_justify="left")
    table.add_column("task", no_wrap=True)
    for column in ("what the outputs must do", "tiny", "paper"):
        table.add_column(column)
    for task in TASKS.values():
        table.add_row(task.name, task.summary, task.presets["tiny"].model, task.presets["paper"].model)
    Console().print(table)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of a comparison.")],
    output: Annotated[Path | None, typer.Option(help="The HTML file; by default report.html in the folder.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write the figures as PDF and PNG to this folder.")] = None,
) -> None:
    """Make one self-contained HTML file of runs.

    Examples:

      cdpg report runs/code-compilability-cdpg

      cdpg report runs/compare-code-pep8 --figures paper/figures
    """
    from cdpg.report import write_figures, write_report

    console = Console()
    lines = [f"report: {write_report(runs, output or runs[0] / 'report.html')}"]
    if figures is not None:
        write_figures(runs, figures)
        lines.append(f"figures: {figures}")
    show(console, lines)


@app.command()
def sample(
    model: ModelOrRun,
    context: Annotated[str, typer.Option(help="What to condition on; a run puts its prefix before it.")],
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many completions.")] = 4,
    seed: Annotated[int | None, typer.Option(min=0, help="Seeds the samples.")] = None,
    settings: Setting = None,
) -> None:
    """Sample completions, with their log-probabilities.

    Prompts begin and completions end as they did in the run.

    Example:

      cdpg sample runs/short --context "A sentence to translate." -n 4
    """
    path, run = model_of(model)
    kept = {key: run[key] for key in _WHEN_SAMPLING if key in run}
    config = CDPGConfig.from_mapping({**kept, **gather(None, {"seed": seed}, settings or [])})
    prefix, stop = prompting(run)
    from cdpg.contexts import Context
    from cdpg.models.loading import load_model
    from cdpg.sampling import assemble, sample_chunks
    from cdpg.uniforms import UniformStream

    quiet_transformers()
    language_model = load_model(path, config)
    contexts = [Context(prompt=prefix + context.removeprefix(prefix), columns={}, row=1)]
    prompts = language_model.encode(contexts, config.max_completion_length)
    chunks = sample_chunks(
        language_model, prompts, number, config.max_completion_length, UniformStream(config.seed, "sample", 0),
        config.rows_per_pass, stop,
    )  # fmt: skip
    samples = assemble(contexts, prompts, list(chunks), number)
    console = Console()
    for text, log_prob, length, ended in zip(
        samples.texts[0], samples.log_q[0].tolist(), samples.lengths[0].tolist(), samples.ended[0].tolist(), strict=True
    ):
        cut = "" if ended else ", cut at the limit"
        console.print(Text(f"log-probability {log_prob:.2f}, {length} tokens{cut}", style="dim"))
        console.print(shown_text(text), soft_wrap=True)


@app.command()
def push(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder, or that of a model.", autocompletion=complete_run)
    ],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="The repository, as user/name.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Upload a tuned model with its tokenizer and its card to the hub.

    Log in first with "hf auth login", or set HF_TOKEN.

    Examples:

      cdpg push runs/code-compilability-cdpg me/code-that-compiles

      cdpg push runs/short me/short-answers --private
    """
    path, _ = model_of(str(run))
    from cdpg.hub import push_folder

    quiet_transformers()
    show(Console(), [f"uploaded: {push_folder(Path(path), repo_id, True if private else None)}"])


def model_of(name: str) -> tuple[str, dict[str, Any]]:
    """The model's folder or id, and the configuration of the run it belongs to, if any."""
    folder = Path(name)
    if not (folder / "config.yaml").is_file():
        return name, {}
    if not (folder / "model").is_dir():
        raise UserError(f"the run {name!r} has no model yet: it is written at the end; continue the run with --resume")
    return str(folder / "model"), read_yaml(folder / "config.yaml")
