"""The command ``check``: samples of the base, and advice, before a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cdpg.cli.options import app, makes_job
from cdpg.cli.output import plan, quiet_transformers, shown_text
from cdpg.config import CDPGConfig
from cdpg.jobs.job import Job
from cdpg.messages.text import duration, plain_text
from cdpg.preflight.advice import ENOUGH, ProbeStatistics, advise
from cdpg.system import memory

if TYPE_CHECKING:  # torch is loaded after everything else has been checked
    from cdpg.preflight.probe import ProbeResult, ShownSample

_log = logging.getLogger(__name__)

_MARKS = {"stop": "✗", "careful": "!", "fine": "✓"}


@app.command()
@makes_job("{task}-{method}")
def check(
    job: Job,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Contexts to look at.")] = 16,
) -> None:
    """Look at samples of the base before a run.

    It shows the verdicts of the constraint, how long the run would take, and whether N and M suffice. It takes the
    options of "cdpg run" and writes nothing.

    Examples:

      cdpg check code-compilability

      cdpg check --model t5-small --contexts sentences.csv --constraint checks:short

      cdpg check experiment.yaml --set num_generations=64 -n 32
    """
    inputs = job.load()
    # Imported only now, so that the errors above come without waiting for torch.
    from cdpg.preflight.probe import probe

    quiet_transformers()
    _log.info(plan(job, inputs))
    found = probe(job, inputs, number)
    output = Console()
    output.print(_figures(found, job.settings))
    _show_examples(output, "satisfying samples", found.satisfying)
    _show_examples(output, "failing samples", found.failing)
    if found.failure is not None:
        output.print(Text(plain_text(f"a failed check: {found.failure}", limit=2000), style="dim"), soft_wrap=True)
    output.print(Text("\nwhat to do", style="bold"))
    for advice in (*found.memory.advice(job.settings, found.keeps_best), *advise(found.stats)):
        output.print(Text(f"{_MARKS[advice.level]} {advice.text}"), soft_wrap=True)


def _figures(found: ProbeResult, config: CDPGConfig) -> Table:
    stats = found.stats
    title = f"the base on {found.contexts} contexts, {stats.samples} samples each"
    table = Table(title=title, title_justify="left")
    table.add_column("measured")
    table.add_column("value", justify="right")
    unjudged = found.contexts - len(stats.z)
    if unjudged:
        table.add_row("contexts without a verdict on any sample", str(unjudged))
    for name, value in (*_partition_rows(stats), *_time_rows(found), *_memory_rows(found, config)):
        table.add_row(name, value)
    return table


def _partition_rows(stats: ProbeStatistics) -> list[tuple[str, str]]:
    if not stats.z:
        return [("satisfaction", "–")]
    expected = stats.expected_coverage(stats.samples)
    return [
        ("satisfaction", f"{stats.satisfaction:.3f}"),
        *((f"mean {name.replace('_', ' ', 1)}", f"{value:.3f}") for name, value in stats.factors.items()),
        ("Ẑ of a context, least to most", f"{min(stats.z):.3f} … {max(stats.z):.3f}"),
        ("deviation of Z between contexts, noise subtracted", f"{stats.spread:.3f}"),
        ("coverage: contexts with a satisfying sample", f"{stats.coverage:.2f}"),
        (f"expected coverage at M = {stats.samples} ({ENOUGH} suffices)", f"{expected:.2f}"),
    ]


def _time_rows(found: ProbeResult) -> list[tuple[str, str]]:
    stats, pace = found.stats, found.pace
    failed = ", ".join(f"{count} {kind}" for kind, count in found.failures.most_common())
    low, high = (duration(seconds) for seconds in found.seconds)
    workers = f"{stats.workers} worker{'s' if stats.workers != 1 else ''}" if stats.workers else "in this process"
    return [
        ("length, tokens", f"{found.tokens:.1f}"),
        ("ended before the length limit", f"{stats.ended:.0%}"),
        ("checks that failed", f"{stats.failed:.1%}" + (f" ({failed})" if failed else "")),
        *([("samples to which no constraint applies", f"{found.inapplicable:,}")] if found.inapplicable else []),
        ("sampling, a sample", _time(pace.sampling)),
        (f"constraint, a sample ({workers})", _time(pace.constraint)),
        ("scoring, a sample", _time(pace.scoring)),
        ("gradient, a sample", _time(pace.gradient)),
        ("the whole run, about", low if low == high else f"{low} to {high}"),
        ("of that, evaluations", f"{duration(found.seconds_evaluating)}, {stats.evaluations:.0%}"),
    ]


def _memory_rows(found: ProbeResult, config: CDPGConfig) -> list[tuple[str, str]]:
    use, how = found.memory, (config, found.keeps_best)
    there = "" if use.room is None else f" of {memory.format_bytes(use.room)}"
    if config.sharding == "none":
        return [("memory of a run, about", f"{memory.format_bytes(use.run(*how))}{there}")]
    return [
        ("memory of a run, divided among the processes", memory.format_bytes(use.stays(*how))),
        ("and for each process, about", f"{memory.format_bytes(use.undivided)}{there}"),
    ]


def _show_examples(console: Console, title: str, examples: Sequence[ShownSample]) -> None:
    console.print(Text(f"\n{title}: {'none' if not examples else ''}".rstrip(), style="bold"))
    for example in examples:
        soft = "" if example.b in (0.0, 1.0) else f"b = {example.b:.2f} "
        console.print(Text(f"• {soft}{plain_text(example.prompt, limit=120)}", style="dim"), soft_wrap=True)
        console.print(shown_text(example.text.strip("\n"), lines=8, width=300), soft_wrap=True)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
