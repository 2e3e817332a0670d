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
from cdpg.job import Job, gather, load_constraint
from cdpg.progress import plain_text
from cdpg.runlog import RunFolder

app = typer.Typer(
    name="cdpg",
    help="Tune a language model to meet a requirement without forgetting the rest of what it knows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Setting = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; repeatable.")]


@app.callback()
def options() -> None:
    """Tune a language model to meet a requirement without forgetting the rest of what it knows."""


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="A YAML file of settings.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder of the model to tune.")] = None,
    contexts: Annotated[str | None, typer.Option(help="CSV, JSONL, JSON or text file of contexts.")] = None,
    constraint: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="What the outputs must satisfy.")
    ] = None,
    prompt_column: Annotated[str | None, typer.Option(help="Column of the contexts that holds the prompt.")] = None,
    method: Annotated[str | None, typer.Option(help="cdpg, dpg, reinforce or ziegler.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Rounds of sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seeds everything that is random.")] = None,
    output_dir: Annotated[str | None, typer.Option(help="The run's folder.")] = None,
    settings: Setting = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
) -> None:
    """Tune a model.

    Examples:

      cdpg run --model t5-small --contexts sentences.csv --constraint checks:short --output-dir runs/short

      cdpg run experiment.yaml --set learning_rate=1e-5 --epochs 200

      cdpg run experiment.yaml --resume
    """
    named = {"model": model, "contexts": contexts, "constraint": constraint, "prompt_column": prompt_column}
    chosen = {"method": method, "epochs": epochs, "seed": seed, "output_dir": output_dir}
    job = Job.from_mapping(gather(config, {**named, **chosen}, settings or []))
    if not resume:
        RunFolder(job.settings.output_dir).require_fresh()
    constraints = [load_constraint(name) for name in job.constraint]
    console = Console(stderr=True)
    # Only now: the mistakes above are reported without waiting for torch.
    from cdpg.contexts import load_contexts
    from cdpg.trainer import CDPGTrainer

    _quiet_transformers()
    found = load_contexts(job.contexts, prompt_column=job.prompt_column, notify=lambda text: _note(console, text))
    trainer = CDPGTrainer(
        job.model, constraints, job.settings, found, command=shlex.join(sys.argv), inputs=job.inputs()
    )
    if trainer.processes.is_main:
        _note(console, _plan(job, len(found)))
    record = trainer.train(resume_from_checkpoint=resume)
    if trainer.processes.is_main:
        _summary(Console(), trainer.folder.path, record)


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


def _plan(job: Job, contexts: int) -> str:
    settings = job.settings
    return (
        f"{settings.method} on {job.model}: {contexts:,} contexts, {settings.epochs:,} epochs of "
        f"{settings.contexts_per_epoch} contexts × {settings.num_generations} samples; output in {settings.output_dir}"
    )


def _summary(console: Console, folder: Path, record: dict[str, Any]) -> None:
    """The last epoch in a table, and what to type next."""
    if record:
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
        console.print(table)
    for line in (f"model: {folder / 'model'}", f"next:  cdpg sample {shlex.quote(str(folder))} --context '…'"):
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
