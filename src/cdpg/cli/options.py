"""The command-line application, and the options that several commands share."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from cdpg.cli.completion import complete_method, complete_methods, complete_preset, complete_setting, complete_task
from cdpg.config import CDPGConfig, parse_overrides, read_yaml
from cdpg.errors import UserError
from cdpg.jobs.job import Job, gather, idle_settings, missing_inputs
from cdpg.messages.nearest import nearest, nearest_folder
from cdpg.messages.notices import launched_as_main, shown_notices
from cdpg.messages.terms import on_command_line
from cdpg.messages.text import any_of
from cdpg.methods import METHODS
from cdpg.storage.run_folder import RunFolder
from cdpg.tasks import TASKS, find_task

_log = logging.getLogger(__name__)

_ORDER = ("tasks", "settings", "check", "run", "compare", "evaluate", "report", "sample", "push")
"""Commands in the order of use."""
SYNONYMS = {
    "run": "train tune fit finetune fine-tune start resume continue",
    "evaluate": "eval test validate score",
    "sample": "generate predict infer complete chat",
    "check": "probe preflight dry-run estimate",
    "report": "plot show results",
    "compare": "benchmark sweep",
    "push": "upload publish",
    "tasks": "list ls",
    "settings": "config options",
}
"""Names of other programs for what a command does."""


class _InOrder(TyperGroup):
    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return sorted(self.commands, key=_ORDER.index)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and not name.startswith("-") and not ctx.resilient_parsing:
            meant = next((one for one, others in SYNONYMS.items() if name.lower() in others.split()), None)
            meant = meant or nearest(name, self.commands)
            hint = f"did you mean {f'cdpg {meant}'!r}?" if meant else "cdpg --help lists the commands"
            raise UserError(f"there is no command {name!r}: {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        with on_command_line(), shown_notices(launched_as_main(), always=True):
            return super().invoke(ctx)


app = typer.Typer(
    name="cdpg",
    cls=_InOrder,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting, as cdpg settings lists them; repeatable.",
        autocompletion=complete_setting,
    ),
]
TaskOrFile = Annotated[
    str | None,
    typer.Argument(
        metavar="TASK|CONFIG.yaml", help="A task, or a YAML file of settings.", autocompletion=complete_task
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(help="A task's scale: tiny (offline, the default) or paper.", autocompletion=complete_preset),
]
Method = Annotated[str | None, typer.Option(help=f"{any_of(METHODS)}.", autocompletion=complete_method)]
Methods = Annotated[
    str, typer.Option(help="Methods to compare, separated by commas, or all.", autocompletion=complete_methods)
]
Model = Annotated[str | None, typer.Option(help="The model to tune: a hub id, a folder, code-tiny or t5-tiny.")]
Contexts = Annotated[
    str | None, typer.Option(help="File of contexts (CSV, TSV, JSONL, JSON, text); for code also a folder.")
]
EvalContexts = Annotated[
    str | None, typer.Option(help="File of held-out contexts; by default a tenth of the contexts.")
]
ConstraintName = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Function that judges outputs: rules:short is short in rules.py."),
]
MomentNames = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE:FUNCTION=MEAN", help="Function with the mean that it should have: rules:polite=0.5; repeatable."
    ),
]
RewardNames = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE:FUNCTION=BETA", help="Reward, for the target a·exp(r/β): rules:score=0.1; repeatable."
    ),
]
PromptColumn = Annotated[str | None, typer.Option(help="Column that holds the prompt; by default prompt.")]
PromptPrefix = Annotated[str | None, typer.Option(help="Text before every prompt.")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat", help="Send prompts as a user's messages, by the model's chat template.", show_default=False),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="System message of every chat; plain prompts also need --chat.")
]
Epochs = Annotated[int | None, typer.Option(help="Rounds of sampling, not passes over the data.")]
Seed = Annotated[int | None, typer.Option(help="Seeds the samples and their order; held-out contexts stay the same.")]
OutputDir = Annotated[str | None, typer.Option(help="The run's folder.")]


def _show_version(asked: bool) -> None:
    if asked:
        Console().print(Text(f"cdpg {metadata.version('cdpg')}"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Tune a language model to meet a requirement without forgetting the rest of what it knows.

    Examples:

      cdpg tasks

      cdpg check code-compilability

      cdpg run code-compilability

      cdpg COMMAND --help
    """


def _asked(
    task: TaskOrFile = None,
    preset: Preset = None,
    model: Model = None,
    contexts: Contexts = None,
    eval_contexts: EvalContexts = None,
    constraint: ConstraintName = None,
    moment: MomentNames = None,
    reward: RewardNames = None,
    prompt_column: PromptColumn = None,
    prompt_prefix: PromptPrefix = None,
    chat: Chat = None,
    system: System = None,
    method: Method = None,
    epochs: Epochs = None,
    seed: Seed = None,
    output_dir: OutputDir = None,
    settings: Setting = None,
) -> None:
    """The options that describe a job, in the order of the help."""


def makes_job(
    folder: str, *left_out: str, by_folder: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options above, before its own, and pass it the job as its first argument.

    ``folder`` is the run's below ``runs/`` where a task is named and no folder; ``left_out`` are options that the
    command does not have. With ``by_folder``, --resume needs only the folder of the run.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        asked = inspect.signature(_asked, eval_str=True).parameters
        shared = {name: option for name, option in asked.items() if name not in left_out}
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @functools.wraps(command)
        def with_job(**values: Any) -> None:
            asked = {name: values.pop(name) for name in shared}
            command(_job(asked, folder, to_resume=by_folder and values["resume"]), **values)

        signature = inspect.Signature([*shared.values(), *own])
        setattr(with_job, "__signature__", signature)  # noqa: B010 - an assignment is what mypy forbids
        return with_job

    return decorate


def _job(asked: dict[str, Any], folder: str, to_resume: bool) -> Job:
    """The job of a command: a task's name or a configuration file, overlaid by the options.

    One ``to_resume`` that is named by its folder alone is what the folder's own configuration file says.
    """
    task, settings = asked.pop("task"), asked.pop("settings") or []
    config = Path(task) if task is not None and task not in TASKS else None
    if config is not None and not config.suffix and not config.exists():
        find_task(str(task))  # it looks like a task's name: the error lists the tasks
    options = {"task": task if config is None else None, **asked}
    values = gather(config, options, settings)
    if to_resume and task is None and missing_inputs(values):
        values = {**_values_of_run(values.get("output_dir")), **values}
    if values.get("task") and "output_dir" not in values:
        values["output_dir"] = "runs/" + folder.format(
            task=values["task"], method=values.get("method") or CDPGConfig.method
        )
    job = Job.from_mapping(values)
    if "method" in asked:  # a comparison has several
        for name, reason in idle_settings(parse_overrides(settings), job.settings).items():
            _log.warning(f"--set {name} has no effect: {reason}")
    return job


def _values_of_run(folder: Any) -> dict[str, Any]:
    """The values of the run in a folder, to resume it."""
    if not isinstance(folder, str):
        raise UserError(
            "--resume continues the run of a task, of a configuration file or of a folder: give one, such as "
            "--output-dir runs/mine"
        )
    config = RunFolder(folder).config
    if not config.is_file():
        near = nearest_folder(Path(folder)) if not Path(folder).exists() else None
        hint = f"; did you mean {str(near)!r}?" if near else ""
        raise UserError(f"there is no run to continue in {folder!r}: it holds no {config.name}{hint}")
    values = read_yaml(config)
    if values.get("task") is None and missing_inputs(values):
        raise UserError(
            f"{str(config)!r} does not name model, contexts and constraint, since the run was started in Python: "
            "continue it there, with train(resume_from_checkpoint=True)"
        )
    return values
