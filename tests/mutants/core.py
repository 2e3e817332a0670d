"""Tries the mutants that mutmut makes of the mathematical core and shows those that no test notices.

    python tests/mutants/core.py                            # all of them
    python tests/mutants/core.py --file src/cdpg/target/target.py  # those of one file
    python tests/mutants/core.py --name target-1a2b3c4d     # one of them
    python tests/mutants/core.py --again                    # those too that are known to live

Each mutant runs in a fork of one process that has the package and the tests imported, and meets the tests that run its
line, quick ones first. A mutant may live if ``survivors.yaml`` says why, and is then not tried again unless asked for.
The exit status is 1 if more than a tenth of the mutants live, if one lives without a reason, or if the tests fail
without any.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import fork_server
import forks
import survivors
from collected import Collected, Deadline, collect
from coverage_map import CoverageMap, Recorder
from forks import Call
from operators import ROOT, Mutant, mutants_of
from patching import patch
from scores import Score, describe, minutes, report, say

CORE = (
    "models/rng", "models/sampling", "models/scoring", "models/head", "models/beams", "target/target", "target/noise",
    "target/partition", "target/pooled", "target/divergence", "target/rejection", "rollout/rollout", "rollout/sampler",
    "rollout/replay", "methods/__init__", "methods/base", "methods/cdpg", "methods/dpg", "methods/reinforce",
    "methods/rft", "methods/raft", "methods/rloo", "methods/ziegler", "training/optimization", "training/replay",
    "training/validation", "evaluation/outcome", "evaluation/ideal_samples", "evaluation/statistics",
    "evaluation/results", "evaluation/measures", "evaluation/held_out", "evaluation/plan", "evaluation/evaluator",
    "evaluation/policy_evaluations", "storage/checkpoints",
)  # fmt: skip
TESTS = (
    "adding_a_method", "applicability", "checkpoints", "evaluate", "evaluation", "evaluator", "exact", "exact_gradient",
    "head", "ideal_samples", "methods", "models", "optimization", "outcome", "outcome_figures", "policy_evaluations",
    "pooled", "precision", "preflight", "progress", "records", "replay", "rivals", "rollout", "sampling", "scoring",
    "target", "tuned_on", "validation", "values", "ziegler",
)  # fmt: skip
"""The test files that notice in one process: a mutant does not reach the processes that a test starts."""
REQUIRED = 0.9
"""The share of the mutants that tests must notice."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", action="append", default=[], help="a file of the source; may be repeated")
    parser.add_argument("--name", action="append", default=[], help="a mutant; may be repeated")
    parser.add_argument("--workers", type=int, default=2, help="mutants tried side by side (2)")
    parser.add_argument("--seconds", type=float, default=8, help="of tests that a mutant meets at most (8)")
    parser.add_argument("--again", action="store_true", help="try those that are known to live, too")
    parser.add_argument("--verbose", action="store_true", help="show what the tests said of every mutant")
    return parser.parse_args()


def map_tests(collected: Collected, files: list[str], workers: int) -> CoverageMap | None:
    """Run the tests once, without a mutant, to see which lines each one runs; None if one fails."""
    whole = CoverageMap()
    with TemporaryDirectory() as folder:

        def record(file: str) -> Call:
            def run(place: Path) -> int:
                recorder = Recorder()
                with recorder.recording():
                    status = collected.run(collected.names(file), place, [recorder])
                (Path(folder) / f"{Path(file).stem}.json").write_text(recorder.map.to_json(), encoding="utf-8")
                return status

            return Call(file, run, limit=3600)

        for result in forks.run(map(record, files), workers):
            if not result.passed:
                say(f"{result.name} fails without a mutant:\n{result.output}")
                return None
        for path in Path(folder).glob("*.json"):
            whole.merge(CoverageMap.from_json(path.read_text(encoding="utf-8")))
    return whole


def trial(collected: Collected, mutant: Mutant, seconds: Mapping[str, float]) -> Call:
    """The tests that may notice a mutant, each with the seconds that it takes, with the mutant in place."""

    def run(folder: Path) -> int:
        patch(mutant)
        return collected.run(list(seconds), folder, [Deadline(seconds)])

    return Call(mutant.name, run, limit=60 + 10 * sum(seconds.values()))


def try_mutants(
    collected: Collected, given: argparse.Namespace, mutants: Mapping[str, Mutant], tests: list[str]
) -> int:
    """Show what becomes of some mutants; the exit status."""
    reasons = survivors.load()
    lines = map_tests(collected, tests, given.workers)
    if lines is None:
        return 1
    say(f"{len(mutants)} mutants, {len(lines.contexts)} tests; {minutes()}")
    scores = {file: Score() for file in dict.fromkeys(mutant.file for mutant in mutants.values())}
    calls = []
    for mutant in mutants.values():
        names = lines.tests_of(mutant.file, mutant.lines, given.seconds)
        known = survivors.key(mutant) in reasons and not (given.again or given.name)
        if names and not known:
            calls.append(trial(collected, mutant, {name: lines.cost(lines.contexts[name]) for name in names}))
        else:
            scores[mutant.file].living.append(mutant.name)
            if not known:
                say(f"no test runs it   {mutant.name}: {mutant.function}\n{mutant.change}")
    for result in forks.run(calls, given.workers):
        mutant = mutants[result.name]
        scores[mutant.file].count(result)
        say(f"{describe(result)}  {mutant.name}: {mutant.function}" + f"\n{mutant.change}" * result.passed)
        if given.verbose:
            say(result.output)
    whole = report(scores, "file")
    if given.again:
        for name in sorted(set(mutants) - set(whole.living)):
            if survivors.key(mutants[name]) in reasons:
                say(f"{survivors.LIST.name} says that {name} lives, and it was noticed: take it out")
    unexplained = [name for name in whole.living if survivors.key(mutants[name]) not in reasons]
    if unexplained:
        say(f"\n{len(unexplained)} live without a reason in {survivors.LIST.name}: {', '.join(unexplained)}")
    return int(bool(unexplained) or whole.killed < REQUIRED * whole.total)


def main() -> int:
    given = options()
    os.chdir(ROOT)  # mutmut reads its settings there
    files = given.file or [f"src/cdpg/{name}.py" for name in CORE]
    mutants = {mutant.name: mutant for file in files for mutant in mutants_of(file)}
    chosen = {name: mutants[name] for name in given.name} or mutants
    fork_server.load_libraries()
    tests = [f"tests/test_{name}.py" for name in TESTS]
    return collect(tests, lambda collected: try_mutants(collected, given, chosen, tests))


if __name__ == "__main__":
    raise SystemExit(main())
