"""Draws docs/figures/idea.svg: the worked example's outputs, before and after tuning.

    python docs/figures/idea.py

The models are those of ``python -m cdpg.demo``, tuned in the same way, and every probability is exact.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from cdpg import demo
from cdpg.models.tabular import TabularModel
from cdpg.report.style import INK, METHODS, MUTED, PAPER, rc_settings

FILE = Path(__file__).with_suffix(".svg")
DRAWN = ("cdpg", "reinforce")
"""The other two lie on the ideal model as cdpg does, and would hide it."""


def outputs(model: TabularModel) -> list[str]:
    """Every output as a reader sees it: a text that the limit cut shows no end."""
    return [model.decode((), outcome) + ("·" if outcome[-1] == 0 else "") for outcome in model.outcomes()]


def draw(base: TabularModel, tuned: dict[str, TabularModel]) -> Figure:
    """One panel a context: bars for base and ideal model, a marker for each tuned one."""
    texts = outputs(base)
    allowed = torch.tensor([float("a" in text) for text in texts])
    with torch.no_grad():
        before = base.log_prob_table().exp()  # [context, output]
        after = {name: model.log_prob_table().exp() for name, model in tuned.items()}
    ideal = before * allowed
    ideal = ideal / ideal.sum(dim=1, keepdim=True)
    order = sorted(range(len(texts)), key=lambda i: (allowed[i].item(), len(texts[i].rstrip("·")), texts[i]))
    figure = Figure(figsize=(8.2, 5.0), layout="constrained", facecolor=PAPER[0])
    for panel, (axes, context) in enumerate(zip(figure.subplots(2, 1, sharex=True), demo.CONTEXTS, strict=True)):
        places = range(len(order))
        heights = [[table[panel, i].item() for i in order] for table in (before, ideal)]
        axes.bar([p - 0.2 for p in places], heights[0], 0.4, color="#c3c9cf", label="base a(x|c)")
        axes.bar([p + 0.2 for p in places], heights[1], 0.4, color=MUTED[0], label="ideal p(x|c)")
        for name, table in after.items():
            style, values = METHODS[name], [table[panel, i].item() for i in order]
            axes.plot(
                places, values, style.marker, color=style.color, markersize=6, markeredgecolor="white", label=name
            )
        axes.axvline(float((allowed == 0).sum()) - 0.5, color=INK[0], linewidth=0.8)
        axes.set_ylabel("probability")
        axes.set_title(f"context “{context}”", loc="left", fontsize=10)
        axes.grid(visible=False, axis="x")
        axes.set_xticks(list(places), [texts[i] for i in order])
    figure.legend(*figure.axes[0].get_legend_handles_labels(), ncols=4, loc="outside upper center")
    figure.axes[1].set_xlabel("output x (· is the end token); right of the line it holds an a")
    return figure


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, rc_context({**rc_settings(), "svg.hashsalt": "cdpg"}):
        tuned = {name: demo.tune(name, folder) for name in DRAWN}  # type: ignore[arg-type]
        draw(demo.make_base(), tuned).savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
