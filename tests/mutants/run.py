"""Applies the hand-made faults one by one and shows those that no test notices.

    python tests/mutants/run.py                        # all of them
    python tests/mutants/run.py --area ziegler         # the faults of one list
    python tests/mutants/run.py --name some-fault      # one fault
    python tests/mutants/run.py --tests tests/test_x.py  # whether these tests notice, instead of those of the list

What failed with some fault is run again without any, at the end. The exit status is 1 if a fault lives, or if its tests
fail without it, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

import fault_list
import fork_server
from fault_list import Fault
from fork_server import Job
from scores import Score, describe, report, say


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", action="append", default=[], help="a list in tests/mutants/faults; may be repeated")
    parser.add_argument("--name", action="append", default=[], help="a fault; may be repeated")
    parser.add_argument("--tests", action="append", default=[], help="run these instead of the tests in the list")
    parser.add_argument("--workers", type=int, default=2, help="faults tried side by side (2)")
    parser.add_argument("--verbose", action="store_true", help="show what the tests said of every fault")
    return parser.parse_args()


def fail_without_fault(noticed: Mapping[str, Sequence[str]], workers: int) -> list[str]:
    """The faults that were noticed by tests of a file that fails on the source as it is."""
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(test for tests in noticed.values() for test in tests):
        files.setdefault(test.partition("::")[0], []).append(test)
    # A file that could not be imported with some fault is run as a whole.
    jobs = [Job(file, (file,) if file in tests else tuple(tests)) for file, tests in files.items()]
    failed = set()
    for result in fork_server.run(jobs, workers):
        if not result.passed:
            failed.add(result.name)
            say(f"{result.name} fails without a fault:\n{result.output}")
    return [name for name, tests in noticed.items() if any(test.partition("::")[0] in failed for test in tests)]


def try_faults(faults: Sequence[Fault], given: argparse.Namespace, found: Mapping[str, Sequence[str]]) -> int:
    """Show what becomes of some faults; the exit status.

    ``found`` are those that were noticed already, with the tests that must still be seen to pass without them.
    """
    scores = {area: Score() for area in dict.fromkeys(fault.area for fault in faults)}
    by_name = {fault.name: fault for fault in faults}
    noticed = dict(found)
    for name in found:
        scores[by_name[name].area].killed += 1
    doubtful = []
    jobs = [Job(fault.name, fault.tests, fault.file, fault.applied()) for fault in faults if fault.name not in found]
    for result in fork_server.run(jobs, given.workers):
        fault = by_name[result.name]
        scores[fault.area].count(result)
        if failed := fork_server.failed_in(result):
            noticed[fault.name] = failed
        elif not result.passed:
            doubtful.append(f"{fault.name}: its tests were not found, or did not come to an end:\n{result.output}")
        say(f"{describe(result)}  {fault.area}: {fault.name}" + f" ({fault.why})" * result.passed)
        if given.verbose:
            say(result.output)
    for name in fail_without_fault(noticed, given.workers):
        doubtful.append(f"{name}: noticed by tests of a file that fails without it, too")
    whole = report(scores, "area")
    for text in doubtful:
        say(text)
    return int(bool(whole.living or doubtful))


def main() -> int:
    given = options()
    try:
        chosen = fault_list.load(given.area, given.name)
        if given.tests:
            chosen = [replace(fault, tests=tuple(given.tests)) for fault in chosen]
        for fault in chosen:
            fault.applied()
    except ValueError as error:
        say(str(error))
        return 2
    fork_server.load_libraries()
    return try_faults(chosen, given, {})


if __name__ == "__main__":
    raise SystemExit(main())
