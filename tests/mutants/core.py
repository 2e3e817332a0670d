"""Tries the mutants that mutmut makes of the mathematical core and shows those that no test notices.

    python tests/mutants/core.py                            # all of them
    python tests/mutants/core.py --file src/cdpg/target/target.py  # those of one file
    python tests/mutants/core.py --name target-1a2b3c4d     # one of them
    python tests/mutants/core.py --again                    # those too that are known to live

mypy judges all of them in one run. Each of the others runs in a fork of one process that has the package and the tests
imported, and meets tests that run its line, and more of them if it lives. A mutant may live if ``survivors.yaml`` says
why, and is then not tried again unless asked for. The exit status is 1 if more than a tenth of the mutants live, if one
lives without a reason, or if the tests fail without any.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import fork_server
import survivors
from collected import Collected, collect
from coverage_map import CoverageMap
from forks import BROKEN, Result
from operators import ROOT, Mutant, mutants_of
from patching import Edit
from scores import Score, describe, minutes, report, say
from trials import Trial, map_tests, run_trials, tests_for
from type_checks import TypeCheck

CORE = tuple(
    f"src/cdpg/{folder}/{name}.py"
    for folder, names in {
        "models": "rng drawing sampling scoring head beams",
        "target": "target noise partition pooled divergence f_divergences rejection baseline moments",
        "rollout": "rollout sampler replay",
        "methods": "__init__ base cdpg cdpg_paper f_divergence dpg reinforce rft raft rloo ziegler",
        "training": "optimization replay validation",
        "evaluation": "outcome ideal_samples statistics results measures held_out plan evaluator policy_evaluations"
        " pass_at_k",
        "storage": "checkpoints",
    }.items()
    for name in names.split()
)
TESTS = tuple(
    f"tests/test_{name}.py"
    for name in (
        "adapters adding_a_method applicability checkpoints divergences diversity engine estimators evaluate evaluation"
        " evaluator exact exact_gradient head ideal_samples methods models moments optimization outcome"
        " outcome_figures policy_evaluations pooled precision preflight progress proposal pruning records replay"
        " results rivals rollout sampling scoring set_aside target tilted tilted_replay tuned_on validation values"
        " ziegler"
    ).split()
)
"""The test files that notice in one process: a mutant does not reach the processes that a test starts."""
MORE = 4
"""How many times longer are the tests that a mutant meets which has lived."""
REQUIRED = 0.9
"""The share of the mutants that must be noticed."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", action="append", default=[], help="a file of the source; may be repeated")
    parser.add_argument("--name", action="append", default=[], help="a mutant; may be repeated")
    add_options(parser)
    return parser.parse_args()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that ``round.py`` has, too."""
    parser.add_argument("--workers", type=int, default=2, help="mutants tried side by side (2)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=8,
        help="of tests that a mutant meets at most, of its own file and of others (8)",
    )
    parser.add_argument("--again", action="store_true", help="try those that are known to live, too")
    parser.add_argument("--verbose", action="store_true", help="show what the tests said of every mutant")


def try_mutants(
    collected: Collected,
    given: argparse.Namespace,
    mutants: Mapping[str, Mutant],
    lines: CoverageMap,
    rejected: set[str],
) -> int:
    """Show what becomes of some mutants; the exit status."""
    reasons = survivors.load()
    say(f"{len(mutants)} mutants, {len(rejected)} with type errors, {len(lines.contexts)} tests; {minutes()}")
    scores = {file: Score() for file in dict.fromkeys(mutant.file for mutant in mutants.values())}
    trials = []
    for mutant in mutants.values():
        score = scores[mutant.file]
        if mutant.name in rejected:
            score.killed, score.rejected = score.killed + 1, score.rejected + 1
            continue
        tests = tests_for(lines, mutant.file, mutant.lines, given.seconds)
        known = reasons.reason(mutant) and not given.again
        if tests and not known:
            edit = Edit(mutant.file, mutant.function, mutant.text, mutant.place[0])
            trials.append(Trial(mutant.name, (edit,), tests))
        else:
            score.living.append(mutant.name)
            if not known:
                say(f"no test runs it   {mutant.name}: {mutant.function}\n{mutant.change}")
    by_name, lived = {trial.name: trial for trial in trials}, list[Trial]()
    for result, failed in run_trials(collected, trials, given.workers):
        if result.passed:
            lived.append(by_name[result.name])
        else:
            show(result, failed, mutants[result.name], scores, given.verbose)
    say(f"{len(lived)} of {len(trials)} meet more tests; {minutes()}")
    more = with_more_tests(lived, mutants, lines, MORE * given.seconds)
    for result, failed in run_trials(collected, more, given.workers):
        show(result, failed, mutants[result.name], scores, given.verbose)
    return judge(report(scores, "file"), mutants, reasons)


def with_more_tests(
    lived: Iterable[Trial], mutants: Mapping[str, Mutant], lines: CoverageMap, seconds: float
) -> Iterator[Trial]:
    """Those that lived, with tests of their lines that they have not met yet."""
    for trial in lived:
        tests = tests_for(lines, mutants[trial.name].file, mutants[trial.name].lines, seconds)
        yield replace(trial, tests={name: cost for name, cost in tests.items() if name not in trial.tests})


def show(result: Result, failed: str | None, mutant: Mutant, scores: Mapping[str, Score], verbose: bool) -> None:
    """Count what became of a mutant, and say it."""
    if result.status == BROKEN:
        raise RuntimeError(f"{mutant.name} could not be tried:\n{result.output}")
    scores[mutant.file].count(result)
    end = f"\n{mutant.change}" if result.passed else f" ({failed})"
    say(f"{describe(result)}  {mutant.name}: {mutant.function}{end}")
    if verbose:
        say(result.output)


def judge(whole: Score, mutants: Mapping[str, Mutant], reasons: survivors.Survivors) -> int:
    """Say which mutants live without a reason, and which reasons are out of date; the exit status."""
    killed = sorted(name for name in set(mutants) - set(whole.living) if reasons.reason(mutants[name]))
    for name in killed:
        say(f"{survivors.LIST.name} says that {name} lives, and it was noticed: take it out")
    unexplained = [name for name in whole.living if not reasons.reason(mutants[name])]
    if unexplained:
        say(f"\n{len(unexplained)} live without a reason in {survivors.LIST.name}: {', '.join(unexplained)}")
    return int(bool(unexplained) or whole.killed < REQUIRED * whole.total)


def map_and_check(collected: Collected, mutants: Iterable[Mutant], workers: int) -> tuple[CoverageMap, set[str]] | None:
    """Which tests run which lines, and the mutants with type errors; None if a test fails without a mutant."""
    with TemporaryDirectory() as folder:
        types = TypeCheck(mutants, Path(folder))
        lines = map_tests(collected, TESTS, workers)
        rejected = types.rejected()
    return None if lines is None else (lines, rejected)


def core_mutants(files: Sequence[str] = ()) -> dict[str, Mutant]:
    os.chdir(ROOT)  # mutmut reads its settings there
    return {mutant.name: mutant for file in files or CORE for mutant in mutants_of(file)}


def main() -> int:
    given = options()
    given.again |= bool(given.name)  # those that are asked for by name are tried in any case
    mutants = core_mutants(given.file)
    chosen = {name: mutants[name] for name in given.name} or mutants
    fork_server.load_libraries()

    def use(collected: Collected) -> int:
        known = map_and_check(collected, chosen.values(), given.workers)
        return 1 if known is None else try_mutants(collected, given, chosen, *known)

    return collect(TESTS, use)


if __name__ == "__main__":
    raise SystemExit(main())
