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
import gc
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import fork_server
import forks
import survivors
from coverage_map import CoverageMap, Recorder
from forks import Call
from operators import ROOT, Mutant, mutants_of
from patching import patch
from scores import Score, describe, report, say

CORE = (
    "models/rng", "models/sampling", "models/scoring", "models/beams", "target/target", "target/partition",
    "target/divergence", "rollout/rollout", "rollout/sampler", "methods/base", "methods/cdpg", "methods/dpg",
    "methods/reinforce", "methods/ziegler", "training/optimization", "evaluation/outcome", "evaluation/statistics",
    "evaluation/results", "evaluation/measures", "evaluation/held_out", "storage/checkpoints",
)  # fmt: skip
TESTS = (
    "checkpoints", "evaluation", "evaluator", "exact_gradient", "methods", "optimization", "outcome",
    "outcome_figures", "precision", "records", "rollout", "sampling", "scoring", "target", "tuned_on", "values",
    "ziegler",
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


def import_tests(files: list[str]) -> None:
    """Import the package and the tests here, so that no child has to; nothing is run yet."""
    fork_server.load_libraries()
    sys.stdout.flush()
    output = os.dup(1)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        status = fork_server.run_pytest(files, Path(os.devnull), options=["--collect-only"])
    os.dup2(output, 1)
    os.close(output)
    assert status == 0, "the tests cannot be collected"
    gc.collect()
    gc.freeze()  # children share what is loaded


def map_tests(files: list[str], workers: int) -> CoverageMap:
    """Run the tests once, without a mutant, to see which lines each one runs."""
    whole = CoverageMap()
    with TemporaryDirectory() as folder:

        def record(file: str) -> Call:
            def run(place: Path) -> int:
                recorder = Recorder()
                status = fork_server.run_pytest([file], place, plugins=[recorder])
                (Path(folder) / f"{Path(file).stem}.json").write_text(recorder.map.to_json(), encoding="utf-8")
                return status

            return Call(file, run, limit=1200)

        for result in forks.run(map(record, files), workers):
            if not result.passed:
                raise SystemExit(f"{result.name} fails without a mutant:\n{result.output}")
        for path in Path(folder).glob("*.json"):
            whole.merge(CoverageMap.from_json(path.read_text(encoding="utf-8")))
    return whole


def trial(mutant: Mutant, tests: list[str], seconds: float) -> Call:
    """The tests that may notice a mutant, with the mutant in place."""

    def run(folder: Path) -> int:
        patch(mutant)
        return fork_server.run_pytest(tests, folder)

    return Call(mutant.name, run, limit=30 + 3 * seconds)


def main() -> int:
    given = options()
    os.chdir(ROOT)  # mutmut reads its settings there
    since = time.monotonic()
    files = given.file or [f"src/cdpg/{name}.py" for name in CORE]
    mutants = {mutant.name: mutant for file in files for mutant in mutants_of(file)}
    reasons = survivors.load()
    chosen = {name: mutants[name] for name in given.name} or mutants
    tests = [f"tests/test_{name}.py" for name in TESTS]
    import_tests(tests)
    lines = map_tests(tests, given.workers)
    say(f"{len(chosen)} mutants, {len(lines.contexts)} tests; {(time.monotonic() - since) / 60:.1f} minutes so far")
    scores = {file: Score() for file in files}
    calls = []
    for mutant in chosen.values():
        names = lines.tests_of(mutant.file, mutant.lines, given.seconds)
        known = survivors.key(mutant) in reasons and not (given.again or given.name)
        if names and not known:
            calls.append(trial(mutant, names, given.seconds))
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
    whole = report(scores, "file", time.monotonic() - since)
    if given.again:
        for name in sorted(set(chosen) - set(whole.living)):
            if survivors.key(chosen[name]) in reasons:
                say(f"{survivors.LIST.name} says that {name} lives, and it was noticed: take it out")
    unexplained = [name for name in whole.living if survivors.key(mutants[name]) not in reasons]
    if unexplained:
        say(f"\n{len(unexplained)} live without a reason in {survivors.LIST.name}: {', '.join(unexplained)}")
    return int(bool(unexplained) or whole.killed < REQUIRED * whole.total)


if __name__ == "__main__":
    raise SystemExit(main())
