"""The ``cdpg`` command."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cdpg.config import CDPGConfig, read_yaml
from cdpg.errors import CDPGError, UserError
from cdpg.job import Job, gather
from cdpg.progress import plain_text
from cdpg.runlog import RunFolder, read_json
from cdpg.tables import models_table
from cdpg.tasks import TASKS, find_task

app = typer.Typer(
    name="cdpg",
    help="Tune a language model to meet a requirement without forgetting the rest of what it knows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Setting = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; repeatable.")]
Preset = Annotated[str | None, typer.Option(help="A task's scale: tiny (offline, the default) or paper.")]
Model = Annotated[str | None, typer.Option(help="Embedded model, hub id or folder of the model to tune.")]
Contexts = Annotated[str | None, typer.Option(help="File of contexts; for code also a folder of sources.")]
EvalContexts = Annotated[str | None, typer.Option(help="File of held-out contexts.")]
ConstraintName = Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", help="What the outputs must satisfy.")]
PromptColumn = Annotated[str | None, typer.Option(help="Column of the contexts that holds the prompt.")]
PromptPrefix = Annotated[str | None, typer.Option(help="Text before every prompt.")]
Epochs = Annotated[int | None, typer.Option(help="Rounds of sampling.")]
Seed = Annotated[int | None, typer.Option(help="Seeds everything that is random.")]
OutputDir = Annotated[str | None, typer.Option(help="The run's folder.")]


@app.callback()
def options() -> None:
    """Tune a language model to meet a requirement without forgetting the rest of what it knows."""


@app.command()
def run(
    task: Annotated[
        str | None, typer.Argument(metavar="[TASK|CONFIG.yaml]", help="A task, or a YAML file of settings.")
    ] = None,
    preset: Preset = None,
    model: Model = None,
    contexts: Contexts = None,
    eval_contexts: EvalContexts = None,
    constraint: ConstraintName = None,
    prompt_column: PromptColumn = None,
    prompt_prefix: PromptPrefix = None,
    method: Annotated[str | None, typer.Option(help="cdpg, dpg, reinforce or ziegler.")] = None,
    epochs: Epochs = None,
    seed: Seed = None,
    output_dir: OutputDir = None,
    settings: Setting = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
) -> None:
    """Tune a model, evaluate it before and after, and write a report.

    Examples:

      cdpg run code-compilability

      cdpg run --model t5-small --contexts sentences.csv --constraint checks:short --output-dir runs/short

      cdpg run experiment.yaml --set learning_rate=1e-5 --epochs 200

      cdpg run experiment.yaml --resume
    """
    named = {
        "preset": preset, "model": model, "contexts": contexts, "eval_contexts": eval_contexts,
        "constraint": constraint, "prompt_column": prompt_column, "prompt_prefix": prompt_prefix,
    }  # fmt: skip
    chosen = {"method": method, "epochs": epochs, "seed": seed, "output_dir": output_dir}
    job = _job(task, {**named, **chosen}, settings, "{task}-{method}")
    if not resume:
        RunFolder(job.settings.output_dir).require_fresh()
    console = Console(stderr=True)
    inputs = job.load(lambda text: _note(console, text))
    # Only now: the mistakes above are reported without waiting for torch.
    from cdpg.comparison import make_trainer

    _quiet_transformers()
    trainer = make_trainer(job, inputs, shlex.join(sys.argv))
    if trainer.processes.is_main:
        _note(console, _plan(job, len(inputs.tuning), len(inputs.held_out)))
    record = trainer.train(resume_from_checkpoint=resume)
    if trainer.processes.is_main:
        _finish_run(Console(), trainer.folder, record)


@app.command()
def compare(
    task: Annotated[str, typer.Argument(metavar="TASK|CONFIG.yaml", help="A task, or a YAML file of settings.")],
    methods: Annotated[str, typer.Option(help="Methods to compare, separated by commas.")] = (
        "cdpg,dpg,reinforce,ziegler"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with consecutive seeds.")] = 1,
    preset: Preset = None,
    model: Model = None,
    contexts: Contexts = None,
    eval_contexts: EvalContexts = None,
    constraint: ConstraintName = None,
    prompt_column: PromptColumn = None,
    prompt_prefix: PromptPrefix = None,
    epochs: Epochs = None,
    seed: Seed = None,
    output_dir: OutputDir = None,
    settings: Setting = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the comparison in the output folder.")] = False,
) -> None:
    """Tune with several methods at equal numbers of samples and put them side by side.

    Examples:

      cdpg compare code-compilability

      cdpg compare translation-numbers --methods cdpg,reinforce --seeds 3
    """
    named = {
        "preset": preset, "model": model, "contexts": contexts, "eval_contexts": eval_contexts,
        "constraint": constraint, "prompt_column": prompt_column, "prompt_prefix": prompt_prefix,
    }  # fmt: skip
    job = _job(task, {**named, "epochs": epochs, "seed": seed, "output_dir": output_dir}, settings, "compare-{task}")
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    for name in names or [""]:
        CDPGConfig.from_mapping({"method": name})  # an unknown one is named before anything runs
    console = Console(stderr=True)
    inputs = job.load(lambda text: _note(console, text))
    from cdpg import comparison

    _quiet_transformers()
    runs = list(comparison.entrants(job, names, seeds))
    if not resume:
        for entrant in runs:
            entrant.folder.require_fresh()
    _note(console, _plan(job, len(inputs.tuning), len(inputs.held_out)) + f"; {len(runs)} runs: {', '.join(names)}")
    result = comparison.compare(job, inputs, runs, shlex.join(sys.argv), resume, lambda text: _note(console, text))
    folder = Path(job.settings.output_dir)
    output = Console()
    output.print(models_table(f"{job.task or job.model}, {result['contexts']} held-out contexts", result["models"]))
    _next(output, [f"figures: {folder / comparison.FILE}", f"report: {_report([folder], folder / 'report.html')}"])


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="A run's folder, a model's folder or a hub id.")],
    task: Annotated[str | None, typer.Option(help="The task to evaluate on; a run knows its own.")] = None,
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
    if not known and task is None:
        raise UserError(f"{model!r} is no run's folder: name the task to evaluate on with --task")
    path, _ = _model_of(model)
    given = {
        "task": task, "preset": preset, "model": base, "eval_contexts": contexts, "constraint": constraint,
        "prompt_column": prompt_column, "prompt_prefix": prompt_prefix, "seed": seed,
    }  # fmt: skip
    job = Job.from_mapping({**known, **gather(None, given, settings or [])})
    console = Console(stderr=True)
    inputs = job.load(lambda text: _note(console, text))
    from cdpg.comparison import evaluate_model
    from cdpg.runlog import write_json

    _quiet_transformers()
    result = evaluate_model(job, inputs, path, shlex.join(sys.argv), lambda text: _note(console, text))
    target = output or (folder.evaluation if known else Path("evaluation.json"))
    write_json(target, result)
    models = {name: result[name] for name in ("base", "tuned")}
    Console().print(models_table(f"{model} on {result['contexts']} held-out contexts", models, result["changes"]))
    _next(Console(), [f"figures: {target}"])


@app.command()
def tasks() -> None:
    """The tasks that come with the package."""
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
    _next(console, lines)


@app.command()
def sample(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="A run's folder, a model's folder or a hub id.")],
    context: Annotated[str, typer.Option(help="What to condition on.")],
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many completions.")] = 4,
    seed: Annotated[int | None, typer.Option(min=0, help="Seeds the samples.")] = None,
    settings: Setting = None,
) -> None:
    """Sample completions from a model or a run, with their log-probabilities.

    Example:

      cdpg sample runs/short --context "A sentence to translate." -n 4
    """
    path, base = _model_of(model)
    values = gather(None, {"seed": seed}, settings or [])
    config = CDPGConfig.from_mapping({**base, **values})
    from cdpg.contexts import Context
    from cdpg.models.loading import load_model
    from cdpg.sampling import assemble, sample_chunks
    from cdpg.uniforms import UniformStream

    _quiet_transformers()
    language_model = load_model(path, config)
    contexts = [Context(prompt=context, columns={}, row=1)]
    prompts = language_model.encode(contexts, config.max_completion_length)
    chunks = sample_chunks(
        language_model, prompts, number, config.max_completion_length, UniformStream(config.seed, "sample", 0),
        config.rows_per_pass,
    )  # fmt: skip
    samples = assemble(contexts, prompts, list(chunks), number)
    console = Console()
    for text, log_prob, length, ended in zip(
        samples.texts[0], samples.log_q[0].tolist(), samples.lengths[0].tolist(), samples.ended[0].tolist(), strict=True
    ):
        cut = "" if ended else ", cut at the limit"
        console.print(Text(f"log-probability {log_prob:.2f}, {length} tokens{cut}", style="dim"))
        console.print(Text("\n".join(plain_text(line, limit=10_000) for line in text.split("\n"))), soft_wrap=True)


def _model_of(name: str) -> tuple[str, dict[str, Any]]:
    """The model's folder or id, and the settings of the run it belongs to, if any."""
    folder = Path(name)
    if not (folder / "config.yaml").is_file():
        return name, {}
    if not (folder / "model").is_dir():
        raise UserError(f"the run {name!r} has no model yet: it is written at the end; continue the run with --resume")
    values = read_yaml(folder / "config.yaml")
    kept = ("max_completion_length", "decoder_prefix", "long_contexts", "device", "dtype", "trust_remote_code")
    return str(folder / "model"), {key: values[key] for key in kept if key in values}


def _job(task: str | None, options: dict[str, Any], settings: list[str] | None, folder: str) -> Job:
    """The job of a command: a task's name or a configuration file, overlaid by the options."""
    config = Path(task) if task is not None and task not in TASKS else None
    if config is not None and not config.suffix and not config.exists():
        find_task(str(task))  # it looks like a task's name: say which there are
    values = gather(config, {"task": task if config is None else None, **options}, settings or [])
    if values.get("task") and "output_dir" not in values:
        values["output_dir"] = "runs/" + folder.format(task=values["task"], method=values.get("method") or "cdpg")
    return Job.from_mapping(values)


def _plan(job: Job, contexts: int, held_out: int) -> str:
    settings = job.settings
    return (
        f"{settings.method} on {job.model}: {contexts:,} contexts, {settings.epochs:,} epochs of "
        f"{settings.contexts_per_epoch} contexts × {settings.num_generations} samples; {held_out:,} contexts held out; "
        f"output in {settings.output_dir}"
    )


def _finish_run(console: Console, folder: RunFolder, record: dict[str, Any]) -> None:
    """What came out: base → tuned where that was evaluated, else the last epoch; and what to type next."""
    lines = []
    if folder.evaluation.is_file():
        result = read_json(folder.evaluation)
        models = {name: result[name] for name in ("base", "tuned")}
        title = f"{result['contexts']} held-out contexts, {result['samples_per_context']} samples each"
        console.print(models_table(title, models, result["changes"]))
        lines.append(f"report: {_report([folder.path], folder.report)}")
    elif record:
        console.print(_epoch_table(record))
    quoted = shlex.quote(str(folder.path))
    _next(console, [*lines, f"model:  {folder.model}", f"next:   cdpg sample {quoted} --context '…'"])


def _report(runs: list[Path], output: Path) -> Path:
    from cdpg.report import write_report

    return write_report(runs, output)


def _epoch_table(record: dict[str, Any]) -> Table:
    table = Table(title=f"epoch {record['epoch']}")
    for column in ("satisfaction", "coverage", "KL(p, π)", "mean length"):
        table.add_column(column, justify="right")
    kl = record["kl_target_policy"]
    table.add_row(
        f"{record['satisfaction']:.3f}",
        f"{record['coverage']:.2f}",
        "–" if kl is None else f"{kl:.3f}",
        f"{record['length']:.1f}",
    )
    return table


def _next(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(Text(plain_text(line, limit=2000)), soft_wrap=True)


def _note(console: Console, text: str) -> None:
    console.print(Text(plain_text(text, limit=2000)), soft_wrap=True)


def _quiet_transformers() -> None:
    """Its progress bars and advice belong to its own users; what matters here comes as an error."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def main(arguments: list[str] | None = None) -> None:
    """Run a command; errors become one sentence on standard error and an exit status."""
    sys.exit(_status(lambda: app(args=arguments, standalone_mode=True)))


def _status(command: Callable[[], Any]) -> int:
    console = Console(stderr=True)
    try:
        command()
    except CDPGError as error:
        console.print(Text(f"cdpg: {plain_text(str(error), limit=4000)}"), soft_wrap=True)
        return error.exit_status
    except KeyboardInterrupt:
        console.print(Text("cdpg: interrupted"))
        return 130
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except Exception as error:  # a fault of the program: told in full, but nothing in it may steer the terminal
        for line in "".join(traceback.format_exception(error)).splitlines():
            console.print(Text(plain_text(line, limit=2000)), soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    main()
