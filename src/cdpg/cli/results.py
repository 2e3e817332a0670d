"""The commands ``evaluate``, ``tasks``, ``report``, ``sample`` and ``push``."""

from __future__ import annotations

import itertools
import logging
import secrets
import shlex
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cdpg.cli.completion import complete_run, complete_task_name
from cdpg.cli.exact import BoundIsOptional, Exact, print_exact
from cdpg.cli.options import (
    Chat,
    ConstraintName,
    MomentNames,
    Preset,
    PromptColumn,
    PromptPrefix,
    RewardNames,
    Seed,
    Setting,
    System,
    app,
)
from cdpg.cli.output import quiet_transformers, show, shown_text
from cdpg.cli.tables import print_models
from cdpg.config import CDPGConfig, read_yaml
from cdpg.contexts.chats import as_chats, warn_of_plain_prompts
from cdpg.contexts.contexts import Context
from cdpg.contexts.digests import fingerprint
from cdpg.errors import UserError
from cdpg.evaluation.held_out import contexts_in_words, on_few
from cdpg.jobs.exact import SETTINGS as EXACT_SETTINGS
from cdpg.jobs.exact import TunedRun
from cdpg.jobs.factors import with_multipliers
from cdpg.jobs.job import Inputs, Job, gather, missing_inputs, prompting, without_task
from cdpg.messages.terms import on_command_line
from cdpg.models.names import locate, require_model
from cdpg.report.values import is_chat
from cdpg.storage.json_files import mapping, read_json, sequence, write_json
from cdpg.storage.jsonl import read_jsonl
from cdpg.storage.run_folder import RunFolder, costs, read_tuned_on
from cdpg.tasks import TASKS, known_metrics

_log = logging.getLogger(__name__)

_WHEN_SAMPLING = ("max_completion_length", "decoder_prefix", "long_contexts", "device", "dtype", "chat", "system")
"""Settings of a run that its samples depend on."""
_NEW_SEEDS = 10**6
"""Range of random seeds if none is given: short enough to be typed again."""
_HOW_EVALUATED = (
    *("evaluation_samples", "evaluation_contexts", "seed", "trust_remote_code", "check_failures", "check_workers"),
    *("check_output", "device", "rows_per_pass", "tokens_per_pass"),
)
"""Settings that may change in an evaluation that is still the run's own: they affect its precision and its means, not
what is measured."""
_OTHER_EVALUATION = "this is not the run's own evaluation"
_REPORT_FILE = "The HTML file; by default report.html, in the folder, or for several in the working folder."
_TO_EVALUATE = {"model": "--base", "contexts": "--contexts", "constraint": "--constraint"}
"""What an evaluation without a task needs, and the options that give it."""

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
    moment: MomentNames = None,
    reward: RewardNames = None,
    prompt_column: PromptColumn = None,
    prompt_prefix: PromptPrefix = None,
    chat: Chat = None,
    system: System = None,
    seed: Seed = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
    settings: Setting = None,
) -> None:
    """Evaluate any model beside its base, on held-out contexts.

    Examples:

      cdpg evaluate runs/code-compilability-cdpg

      cdpg evaluate ./my-model --task translation-numbers --output figures.json

      cdpg evaluate ./my-model --base t5-small --contexts held_out.csv --constraint checks:short
    """
    folder = RunFolder(model)
    known = read_yaml(folder.config) if folder.config.is_file() else {}
    known.pop("trust_remote_code", None)  # only the user may allow it: a folder may come from anywhere
    path, _ = model_of(model)
    named = {
        "task": task, "preset": preset, "model": base, "eval_contexts": contexts, "seed": seed, "moment": moment,
        "constraint": constraint, "reward": reward, "prompt_column": prompt_column, "prompt_prefix": prompt_prefix,
        "chat": chat, "system": system,
    }  # fmt: skip
    job = _asked_for(model, known, gather(None, named, settings or []))
    require_model(locate(path))  # before anything is loaded
    with on_command_line(eval_contexts="--contexts"):
        inputs = _inputs(job, folder)
        own = _is_own(job, inputs, known)
        target = output or (folder.evaluation if own else _elsewhere("evaluation.json", _OTHER_EVALUATION))
        from cdpg.jobs.running import evaluate_model
        from cdpg.storage.evaluations import write_evaluation

        quiet_transformers()
        found = evaluate_model(job, inputs, path, shlex.join(sys.argv), read_tuned_on(folder))
    if found is None:  # only the main process has figures
        return
    result, ideal_samples = found
    if own and output is None:
        with folder:
            write_evaluation(folder, result, ideal_samples)
    else:
        write_json(target, result | ({"costs": {"tuned": costs(folder)}} if own else {}))
    _show(model, result, target)


def _show(model: str, result: Mapping[str, Any], target: Path) -> None:
    shown = Console()
    models = {name: result[name] for name in ("base", "tuned")}
    title = f"{model} on {contexts_in_words(result)}"
    print_models(shown, title, models, result["changes"], on_few(result), known_metrics(result))
    show(shown, [f"figures: {target}"])


def _inputs(job: Job, folder: RunFolder) -> Inputs:
    """The inputs of an evaluation; moments that are the run's have its λ."""
    inputs = job.load(to_tune=False)
    return replace(inputs, constraints=with_multipliers(inputs.constraints, folder))


def _asked_for(model: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> Job:
    """The run's values, overridden by the given ones; for another task, the run's task-specific values are dropped."""
    other_task = "task" in given and given["task"] != known.get("task")
    values = {**(without_task(known) if other_task else known), **given}
    missing = _missing(values)
    if missing:
        why = (
            f"the run {model!r} does not name everything that it was made from"
            if known
            else (f"{model!r} is not a run's folder")
        )
        raise UserError(f"{why}: give {', '.join(missing)}, or a task with --task")
    return _evaluation_job(values)


def _missing(values: Mapping[str, Any]) -> list[str]:
    """The options that are missing for an evaluation; contexts to tune on include held-out ones."""
    if values.get("task") is not None:
        return []
    missing = missing_inputs({**values, "contexts": values.get("eval_contexts") or values.get("contexts")})
    return [_TO_EVALUATE[key] for key in missing]


def _evaluation_job(values: Mapping[str, Any]) -> Job:
    """The job to evaluate; without a task it needs contexts to tune on, which are then not read."""
    if values.get("task") is None and not values.get("contexts"):
        values = {**values, "contexts": values.get("eval_contexts")}
    return Job.from_mapping(values)


def _is_own(job: Job, inputs: Inputs, known: Mapping[str, Any]) -> bool:
    """Whether the evaluation is the run's own; only then it is written to the run's folder and card."""
    if not known or _missing(known):
        return False
    run = _evaluation_job(known)
    if job.inputs() != run.inputs():
        return False
    then = mapping(mapping(known.get("origin")).get("held_out"))
    if then and then.get("sha256") != fingerprint(inputs.held_out):
        _log.warning(
            f"the held-out contexts are not those of the run, {then.get('count')} then and {len(inputs.held_out)} "
            "now: the data have changed, and training contexts may be among them; the run's own evaluation and card "
            "are not replaced"
        )
        return False
    usual = {key: getattr(run.settings, key) for key in _HOW_EVALUATED}
    return job.settings.replace(**usual) == run.settings


def _elsewhere(name: str, what: str) -> Path:
    """The file for figures or a report that are not a run's own: in the working folder, unless that is a run's."""
    here = RunFolder(".")
    if here.config.is_file() and (here.holds_run() or here.model.is_dir()):
        raise UserError(
            f"{what}, and the working folder is a run's, whose own {name} must not be replaced: "
            "name a file with --output"
        )
    return Path(name)


@app.command()
def tasks() -> None:
    """The tasks that there are.

    Example:

      cdpg tasks
    """
    table = Table(title="cdpg run TASK", title_justify="left")
    table.add_column("task", no_wrap=True)
    for column in ("what the outputs must do", "tiny", "paper"):
        table.add_column(column)
    for task in TASKS.values():
        models = (task.presets[name].model if name in task.presets else "–" for name in ("tiny", "paper"))
        table.add_row(task.name, task.summary, *models)
    Console().print(table)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of a comparison.")],
    output: Annotated[Path | None, typer.Option(help=_REPORT_FILE)] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write the figures as PDF and PNG to this folder.")] = None,
) -> None:
    """Make one self-contained HTML file of runs.

    Examples:

      cdpg report runs/code-compilability-cdpg

      cdpg report runs/compare-code-pep8 --figures paper/figures
    """
    from cdpg.report import write_figures, write_report

    console = Console()
    if output is None:  # a report on several folders does not replace that of the first
        name, several = "report.html", "the report is on several folders"
        output = runs[0] / name if len(runs) == 1 else _elsewhere(name, several)
    lines = [f"report: {write_report(runs, output)}"]
    if figures is not None:
        write_figures(runs, figures)
        lines.append(f"figures: {figures}")
    show(console, lines)


@app.command(cls=BoundIsOptional)
def sample(
    model: ModelOrRun,
    context: Annotated[str, typer.Option(help="What to condition on; a run puts its prefix before it.")],
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many completions.")] = 4,
    exact: Exact = None,
    chat: Chat = None,
    system: System = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seeds the samples; a new one each time by default.")] = None,
    settings: Setting = None,
) -> None:
    """Sample completions, with their log-probabilities.

    New ones are drawn each time, and the seed that repeats them is shown. A run's prompt prefix and stop rule are
    applied, and the context is sent as a user's message if the run's prompts were chats. For a chat model, add --chat.

    With --exact, completions of a run are accepted or rejected so that they are samples of the ideal model, the base
    filtered by the run's constraint, up to a total variation.

    Examples:

      cdpg sample runs/short --context "A sentence to translate." -n 4

      cdpg sample runs/short --context "A sentence to translate." --exact 0.01

      cdpg sample HuggingFaceTB/SmolLM2-135M-Instruct --chat --context "Name three colours."
    """
    path, run = model_of(model)
    kept = {key: run[key] for key in (_WHEN_SAMPLING if exact is None else EXACT_SETTINGS) if key in run}
    given = gather(None, {"chat": chat, "system": system, "seed": seed}, settings or [])
    kept |= _shared_system(run)
    config = CDPGConfig.from_mapping({"seed": secrets.randbelow(_NEW_SEEDS), **kept, **given})
    if exact is not None:
        as_chat = config.chat or (bool(run) and _has_chats(RunFolder(model)))
        _sample_exactly(model, context, number, exact, config.replace(chat=as_chat))
        _log_seed(config, given)
        return
    prefix, stop = prompting(run)
    require_model(locate(path))  # before torch is loaded
    from cdpg.models.loading import load_model
    from cdpg.models.rng import UniformStream
    from cdpg.models.sampling import draw_samples

    quiet_transformers()
    language_model = load_model(path, config)
    text = prefix + context.removeprefix(prefix)
    as_chat = config.chat or (bool(run) and _has_chats(RunFolder(model)))
    contexts = as_chats([Context(prompt=text, columns={}, row=1)], as_chat, config.system)
    if not run:
        warn_of_plain_prompts(language_model.tokenizer, contexts)
    prompts = language_model.encode(contexts, config.max_completion_length)
    stream = UniformStream(config.seed, "sample", 0)
    samples = draw_samples(language_model, contexts, prompts, number, config, stream, stop)
    console = Console()
    for text, log_prob, length, ended in zip(
        samples.texts[0], samples.log_q[0].tolist(), samples.lengths[0].tolist(), samples.ended[0].tolist(), strict=True
    ):
        cut = "" if ended else ", cut at the limit"
        console.print(Text(f"log-probability {log_prob:.2f}, {length} tokens{cut}", style="dim"))
        console.print(shown_text(text), soft_wrap=True)
    _log_seed(config, given)


def _sample_exactly(run: str, context: str, number: int, bound: float, config: CDPGConfig) -> None:
    if not 0 < bound < 1:
        raise UserError(f"--exact takes a total variation between 0 and 1, such as 0.05, not {bound:g}")
    tuned = TunedRun.read(run)  # before torch is loaded
    quiet_transformers()
    with closing(tuned.sampler(config)) as sampler:
        found = sampler.sample(tuned.context(context), number, bound)
    print_exact(Console(), found)


def _log_seed(config: CDPGConfig, given: Mapping[str, Any]) -> None:
    if "seed" not in given:
        _log.info(f"the same samples again: --seed {config.seed}")


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
    from cdpg.storage.hub import push_folder

    quiet_transformers()
    show(Console(), [f"uploaded: {push_folder(Path(path), repo_id, True if private else None)}"])


def _shared_system(run: Mapping[str, Any]) -> dict[str, str]:
    """The setting ``system`` for a run whose prompts all had the same system message."""
    system = mapping(mapping(run.get("origin")).get("sampling")).get("system")
    return {"system": system} if isinstance(system, str) else {}


def _has_chats(run: RunFolder) -> bool:
    """Whether the prompts of a run were chats, by its logged samples or the examples of its evaluation."""
    kept: list[Any] = list(itertools.islice(read_jsonl(run.samples), 1)) if run.samples.is_file() else []
    kept += sequence(mapping(read_json(run.evaluation)).get("examples")) if run.evaluation.is_file() else []
    return bool(kept) and is_chat(mapping(kept[0]).get("prompt"))


def model_of(name: str) -> tuple[str, dict[str, Any]]:
    """The model's folder or id, and the configuration of the run it belongs to, if any."""
    folder = Path(name)
    if not (folder / "config.yaml").is_file():
        locate(name)  # a misspelt path is reported first
        return name, {}
    if not (folder / "model").is_dir():
        raise UserError(f"the run {name!r} has no model yet: it is written at the end; continue the run with --resume")
    return str(folder / "model"), read_yaml(folder / "config.yaml")
