"""Output of the commands in the terminal."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cdpg.cli.tables import print_models
from cdpg.errors import CDPGError
from cdpg.evaluation.held_out import TUNED_ON, contexts_in_words, on_few
from cdpg.jobs.job import Inputs, Job
from cdpg.messages.text import plain_text, whose_samples
from cdpg.storage.json_files import read_json
from cdpg.storage.run_folder import RunFolder
from cdpg.tasks import known_metrics


def plan(job: Job, inputs: Inputs) -> str:
    """What a run would do, in one line."""
    settings = job.settings
    held_out = contexts_in_words({"contexts": len(inputs.held_out), TUNED_ON: inputs.count_tuned_on()})
    epochs = "epoch" if settings.epochs == 1 else "epochs"
    evaluation = f"evaluation on {held_out}" if settings.evaluates else "no evaluation"
    return (
        f"{settings.method} on {job.model}: {len(inputs.tuning):,} contexts, {settings.epochs:,} {epochs} of "
        f"{settings.contexts_per_epoch} contexts × {settings.num_generations} samples; {evaluation}"
    )


def finish_run(console: Console, folder: RunFolder, record: dict[str, Any], report: bool) -> None:
    """Write the report and show the result: base → tuned if evaluated, else the last epoch; and the next commands."""
    # The report first, in case the terminal is closed by now.
    lines = [f"report: {report_path([folder.path], folder.report)}"] if report else []
    if folder.evaluation.is_file():
        result = read_json(folder.evaluation)
        models = {name: result[name] for name in ("base", "tuned")}
        title = f"{contexts_in_words(result)}, {result['samples_per_context']} samples each"
        print_models(console, title, models, result["changes"], on_few(result), known_metrics(result))
    elif record:
        console.print(_epoch_table(record))
    quoted = shlex.quote(str(folder.path))
    show(console, [*lines, f"model:  {folder.model}", f"next:   cdpg sample {quoted} --context '…'"])


def report_path(runs: list[Path], output: Path) -> str:
    """The report's path. A report that cannot be written does not fail the run: the reason is returned instead."""
    from cdpg.report import write_report

    try:
        return str(write_report(runs, output))
    except CDPGError as error:
        return f"not written: {error}"


def _epoch_table(record: dict[str, Any]) -> Table:
    table = Table(title=f"epoch {record['epoch']}")
    whose = whose_samples(record)
    kept = ", pruned ones left out" if record.get("pruned") else ""
    for column in (f"satisfaction{whose}", "coverage", "KL(p, π)", f"mean length{whose}{kept}"):
        table.add_column(column, justify="right")
    forms = {"satisfaction": ".3f", "coverage": ".2f", "kl_target_policy": ".3f", "length": ".1f"}
    table.add_row(*("–" if record[key] is None else format(record[key], form) for key, form in forms.items()))
    return table


def show(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(Text(plain_text(line, limit=2000)), soft_wrap=True)


def quiet_transformers() -> None:
    """Turn off Transformers' progress bars and advice; problems still raise errors."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def shown_text(text: str, lines: int = 1000, width: int = 10_000) -> Text:
    """Untrusted text of several lines, without control sequences."""
    kept = [plain_text(line, limit=width) for line in text.split("\n")[:lines]]
    return Text("\n".join([*kept, "…"] if text.count("\n") >= lines else kept))
