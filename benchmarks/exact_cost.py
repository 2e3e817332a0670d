"""How many draws an exact sample of the ideal model costs: from the tuned model, and from the base.

    python benchmarks/exact_cost.py runs/demo [--contexts 40] [--bound 0.05]

For held-out contexts of the run's task, β is chosen as by ``cdpg sample RUN --exact BOUND``. The tuned model needs
1 / acceptance draws for an accepted sample, the base 1 / Z_c. Z_c is estimated from the tuned model's draws, which is
possible where the base itself would hardly ever satisfy. The draws of the pilot, which chooses β, come on top: they
serve any number of samples of the context.
"""

from __future__ import annotations

import argparse
import logging
import statistics

from cdpg.errors import RunError
from cdpg.jobs.exact import TunedRun
from cdpg.rollout.exact import ExactSamples
from cdpg.tasks import find_task
from cdpg.tasks.base import Draw

logger = logging.getLogger("exact_cost")


def held_out_texts(task_name: str, count: int) -> list[str]:
    """The first held-out contexts of a task's small preset, without prefix."""
    task = find_task(task_name)
    _, held_out = task.presets["tiny"].rows(Draw(0, task.usable))
    return [str(row[task.column]) for row in held_out[:count]]


def costs(found: ExactSamples) -> tuple[float, float]:
    """Draws for one accepted sample: from the tuned model, and from the base."""
    return 1 / found.summary.acceptance, 1 / found.summary.z


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run's folder")
    parser.add_argument("--contexts", type=int, default=40)
    parser.add_argument("--bound", type=float, default=0.05, help="on the total variation to the ideal model")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("cdpg").setLevel(logging.ERROR)
    run = TunedRun.read(given.run)
    sampler = run.sampler()
    pairs: list[tuple[float, float]] = []
    variations, pilots, failed = [], [], 0
    texts = held_out_texts(str(run.values["task"]), given.contexts)
    for text in texts:
        try:
            found = sampler.sample(run.context(text), number=1, bound=given.bound)
        except RunError as error:
            failed += 1
            logger.info("left out: %s", error)
            continue
        pairs.append(costs(found))
        variations.append(found.summary.total_variation)
        pilots.append(found.pilot)
        logger.info("%6.1f draws, base %9.1f: %s", *pairs[-1], text[:70])
    sampler.close()
    tuned, base = zip(*pairs, strict=True)
    ratios = [of_base / of_tuned for of_tuned, of_base in pairs]
    logger.info(f"\n{len(pairs)} contexts, {failed} left out; draws for one exact sample:")
    logger.info("| | median | mean |\n| --- | --- | --- |")
    for name, values in (("tuned model", tuned), ("base", base), ("base / tuned model", ratios)):
        logger.info(f"| {name} | {statistics.median(values):.1f} | {statistics.mean(values):.1f} |")
    logger.info(f"total variation: mean {statistics.mean(variations):.3f}; pilot: mean {statistics.mean(pilots):,.0f}")


if __name__ == "__main__":
    main()
