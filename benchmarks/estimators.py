"""Compares estimators of the gradient of CDPG on models small enough to enumerate; prints Markdown tables.

    python benchmarks/estimators.py [--quick] [--only TEXT] [--output FILE.json]

The figure is the excess of KL(p,π) over the least that the policy's class can reach, in nats, exact by enumeration, on
contexts that were never sampled. Every variant draws the same number of samples unless its name says otherwise, and has
the learning rate of the grid that suits it best. *Time* counts two units for each sample drawn and one for each
gradient of a sample, relative to the paper's estimator.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from small_training import Outcome, Variant, train
from small_world import Sizes, World, make_world

RATES = (0.01, 0.02, 0.04, 0.08)
SEEDS = 7
SIZES = Sizes()
WORLDS = {
    "Z 0.4": (0.4, SIZES),
    "Z 0.05": (0.05, SIZES),
    "Z 0.006": (0.006, SIZES),
    "Z 0.4, noisy": (0.4, replace(SIZES, noise=60, noise_scale=0.8)),
}
"""Mean of Z_c, and the sizes; in the last one most features of a context are of no use but to memorise."""
SMALL = {"training": 48, "set_aside": 12, "held_out": 40}
"""Contexts of the quick form."""

PAPER = Variant()
BATCH = Variant(decay=1 / 3)
POOLED = replace(BATCH, partition="pooled")
VARIATE = replace(POOLED, variate=1.0, truncate=2.0)
FOUR = replace(VARIATE, steps=4)
REPLAY = replace(FOUR, replay=4)
MORE = replace(FOUR, replay=12)
BLOCKS: dict[str, dict[str, Variant]] = {
    "partition and control variate, one step an epoch": {
        "the paper's: batch, decay over two thirds": PAPER,
        "the paper's, twice the epochs": replace(PAPER, epochs=60),
        "batch, decay over the last third": BATCH,
        "batch, constant rate": replace(PAPER, decay=0.0),
        "pooled": POOLED,
        "pooled, control variate": VARIATE,
        "the same, half of the failing samples": replace(VARIATE, variate=0.5),
        "the same, twice the epochs": replace(VARIATE, epochs=60),
        "the same, N = 16, M = 32": replace(VARIATE, contexts=16, samples=32),
        "the same, N = 64, M = 8": replace(VARIATE, contexts=64, samples=8),
        "the same, M_c by √(1/ESS_c − 1), exactly known": replace(VARIATE, spread=0.5),
    },
    "more steps an epoch": {
        "batch, 4 steps": replace(BATCH, steps=4),
        "pooled, 4 steps": replace(POOLED, steps=4),
        "pooled, control variate, 2 steps": replace(VARIATE, steps=2),
        "pooled, control variate, 4 steps (A)": FOUR,
        "pooled, control variate, 8 steps": replace(VARIATE, steps=8),
        "A, a quarter of the failing samples": replace(FOUR, variate=0.25),
        "A, gradient clipped at 0.1": replace(FOUR, max_grad_norm=0.1),
        "A, β₁ 0.95": replace(FOUR, betas=(0.95, 0.999)),
        "A, β₂ 0.99": replace(FOUR, betas=(0.9, 0.99)),
        "A, β₂ 0.95": replace(FOUR, betas=(0.9, 0.95)),
        "A, decay over two thirds": replace(FOUR, decay=2 / 3),
        "A, constant rate": replace(FOUR, decay=0.0),
        "A, constant rate, mean of the last half": replace(FOUR, decay=0.0, average=1.0),
        "A, constant rate, moving average 0.8": replace(FOUR, decay=0.0, average=0.8),
        "A, moving average 0.8": replace(FOUR, average=0.8),
    },
    "replay": {
        "one step, 3 whole batches": replace(VARIATE, replay=3),
        "the same, no control variate": replace(POOLED, replay=3),
        "one batch of all samples so far, 1 step": replace(POOLED, merged=True),
        "one batch of all samples so far, 4 steps": replace(POOLED, merged=True, replay=3),
        "A, 4 quarter batches (B)": REPLAY,
        "A, 12 quarter batches (C)": MORE,
        "A, 32 quarter batches": replace(FOUR, replay=32),
        "C, no control variate": replace(MORE, variate=0.0, truncate=math.inf),
        "C, control variate on fresh samples alone": replace(MORE, variate_on_replay=False, truncate=math.inf),
        "C, π/q not truncated": replace(MORE, truncate=math.inf),
        "C, π/q truncated at 1": replace(MORE, truncate=1.0),
        "C, a quarter of the failing samples": replace(MORE, variate=0.25),
        "C, visits of the last 10 epochs": replace(MORE, visits="last"),
        "C, visits by effective sample size": replace(MORE, visits="ess"),
        "C, batch partition": replace(MORE, partition="batch"),
        "C, the exact Z_c": replace(MORE, partition="exact"),
        "C, w clipped at 10": replace(MORE, largest_weight=10.0),
        "C, gradient clipped at 0.1": replace(MORE, max_grad_norm=0.1),
    },
    "guards, by the gain on contexts set aside": {
        "C, keep the best epoch": replace(MORE, guard="keep"),
        "C, constant rate, back and half of the rate": replace(MORE, guard="back", decay=0.0),
        "the same, beyond one standard error": replace(MORE, guard="back", decay=0.0, patience=1.0),
        "C, half of the replays": replace(MORE, guard="fewer"),
    },
}


@dataclass(frozen=True)
class Figures:
    """A variant in a world, with the rate that suits it best."""

    held_out: float
    error: float
    training: float
    rate: float
    work: float
    by_rate: tuple[float, ...]
    """Held-out excess for every rate."""


Results = dict[str, dict[str, Figures]]
"""By variant and world."""


def figures(outcome: Outcome, rates: tuple[float, ...]) -> Figures:
    means = outcome.held_out.mean(dim=1).nan_to_num(math.inf)
    best = int(means.argmin())
    seeds = outcome.held_out[best]
    return Figures(
        held_out=float(means[best]),
        error=float(seeds.std() / len(seeds) ** 0.5),
        training=float(outcome.training[best].mean()),
        rate=rates[best],
        work=float(outcome.work[best].mean()),
        by_rate=tuple(means.tolist()),
    )


def study(options: argparse.Namespace) -> Results:
    """The figures by variant and world; the time taken goes to standard error as it goes by."""
    results: Results = {}
    for world_name in options.worlds:
        z, sizes = WORLDS[world_name]
        world = make_world(z, options.seeds, replace(sizes, **SMALL) if options.quick else sizes)
        results.setdefault("base", {})[world_name] = base(world)
        for name, variant in (pair for block in BLOCKS.values() for pair in block.items()):
            if options.only not in name and variant != PAPER:
                continue
            since = time.process_time()
            found = figures(train(world, replace(variant, epochs=3) if options.quick else variant, RATES), RATES)
            results.setdefault(name, {})[world_name] = found
            seconds = time.process_time() - since
            print(f"{world_name}, {name}: {found.held_out:.3f}, {seconds:.1f} s", file=sys.stderr, flush=True)
    return results


def base(world: World) -> Figures:
    """The excess before any training."""
    zero = torch.zeros(1, len(world.features), world.features.shape[2], world.attributes.shape[2], dtype=torch.float64)
    excess = {name: world.excess(zero, name) for name in world.sets}
    return figures(Outcome(excess["held out"], excess["training"], torch.zeros_like(excess["training"])), (0.0,))


def table(results: Results, worlds: Sequence[str], cell: Callable[[Figures, Figures], str]) -> str:
    """A row for each variant, a cell for each world, made of the variant's figures and the paper's."""
    lines = ["| variant | " + " | ".join(worlds) + " |", "| --- |" + " --- |" * len(worlds)]
    paper = next(name for name, variant in BLOCKS[next(iter(BLOCKS))].items() if variant == PAPER)
    blocks = {"": ["base"]} | {title: list(block) for title, block in BLOCKS.items()}
    for title, names in blocks.items():
        names = [name for name in names if name in results]
        if title and names:
            lines.append(f"| *{title}* |" + " |" * len(worlds))
        for name in names:
            cells = (cell(results[name][world], results[paper][world]) for world in worlds)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main_cell(found: Figures, paper: Figures) -> str:
    """``0.130 ± 0.004 (1.09)``."""
    return f"{found.held_out:.3f} ± {found.error:.3f}" + (f" ({found.work / paper.work:.2f})" if found.work else "")


def second_cell(found: Figures, paper: Figures) -> str:
    """``0.108, 0.04``; a star where the rate is at an end of the grid."""
    end = "*" if found.rate in (RATES[0], RATES[-1]) else ""
    return f"{found.training:.3f}" + (f", {found.rate:g}{end}" if found.rate else "")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small world, 2 seeds, 3 epochs: does it run")
    parser.add_argument("--only", default="", help="only variants whose name contains this, beside the paper's")
    parser.add_argument("--worlds", default=";".join(WORLDS), help="names of worlds, with ; between them")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--output", type=Path, help="write every figure to this file as JSON")
    options = parser.parse_args(arguments)
    options.worlds = options.worlds.split(";")
    if unknown := set(options.worlds) - set(WORLDS):
        parser.error(f"--worlds takes {', '.join(WORLDS)}, not {', '.join(sorted(unknown))}")
    if options.quick:
        options.seeds, options.worlds = 2, options.worlds[:1]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # probabilities of 1e-310 are slow, and nothing here depends on them
    results = study(options)
    print("Excess KL(p,π) on held-out contexts, nats, ± standard error (time relative to the paper's)\n")
    print(table(results, options.worlds, main_cell))
    print("\nThe same on training contexts, and the rate that was chosen (* at an end of the grid)\n")
    print(table(results, options.worlds, second_cell))
    if options.output:
        plain = {name: {world: asdict(found) for world, found in row.items()} for name, row in results.items()}
        options.output.write_text(json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    main()
