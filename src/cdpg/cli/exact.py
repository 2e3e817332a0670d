"""The option ``--exact`` of the command ``sample``: samples of the ideal model, and how near they are to it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from cdpg.cli.output import shown_text
from cdpg.target.rejection import BOUND, beta_as_text

if TYPE_CHECKING:  # torch is loaded after everything else has been checked
    from cdpg.rollout.exact import ExactSamples

OPTION = "--exact"
_NUMBER = re.compile(r"[+-]?(\d|\.\d|(inf|infinity|nan)$)", re.IGNORECASE)
"""How a number begins. A folder such as ``nano`` or ``info`` is none."""

Exact = Annotated[
    float | None,
    typer.Option(
        OPTION,
        metavar="[BOUND]",
        help=f"For a run: samples of the ideal model, up to this total variation; {BOUND} if none is given.",
        show_default=False,
    ),
]


class BoundIsOptional(TyperCommand):
    """A command whose option ``--exact`` may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_bound(args))


def with_bound(words: list[str]) -> list[str]:
    """The words of a command, with the default after an ``--exact`` that no number follows."""
    found = []
    for place, word in enumerate(words):
        found.append(word)
        following = words[place + 1] if place + 1 < len(words) else ""
        if word == OPTION and not _NUMBER.match(following):
            found.append(str(BOUND))
    return found


def print_exact(console: Console, found: ExactSamples) -> None:
    """The samples as ``cdpg sample`` shows them, then the figures."""
    for sample in found.samples:
        soft = "" if sample.b == 1 else f", b = {sample.b:.2f}"
        cut = "" if sample.ended else ", cut at the limit"
        line = f"log-probability {sample.log_policy:.2f}, {len(sample.token_ids)} tokens{soft}{cut}"
        console.print(Text(line, style="dim"))
        console.print(shown_text(sample.text), soft_wrap=True)
    console.print(_figures(found))


def _figures(found: ExactSamples) -> Table:
    summary = found.summary
    table = Table(title="samples of the ideal model p, by rejection", title_justify="left")
    table.add_column("estimated")
    table.add_column("value", justify="right")
    for name, value in (
        ("bound β on P/π", beta_as_text(summary.log_beta)),
        ("acceptance rate", f"{summary.acceptance:.3f}"),
        ("draws for a sample", f"{1 / summary.acceptance:.1f}"),
        *([] if found.is_tilted else [("draws of the base for a sample, 1/Z", f"{1 / summary.z:.1f}")]),
        ("total variation to p", f"{summary.total_variation:.4f}"),
        ("KL(p, samples), nats", f"{summary.kl:.4f}"),
        ("draws that these figures come from", f"{found.draws:,}"),
        ("draws of the pilot that chose β", f"{found.pilot:,}"),
    ):
        table.add_row(name, value)
    return table
