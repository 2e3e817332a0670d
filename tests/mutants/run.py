"""Applies the hand-made faults one by one and shows those that no test notices.

    python tests/mutants/run.py                        # all of them
    python tests/mutants/run.py --area ziegler         # the faults of one list
    python tests/mutants/run.py --name some-fault      # one fault
    python tests/mutants/run.py --tests tests/test_x.py  # whether these tests notice, instead of those of the list

The exit status is 1 if a fault lives or if the tests fail without any.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import fault_list
import fork_server
from fork_server import Job
from scores import Score, describe, report, say


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", action="append", default=[], help="a list in tests/mutants/faults; may be repeated")
    parser.add_argument("--name", action="append", default=[], help="a fault; may be repeated")
    parser.add_argument("--tests", action="append", default=[], help="run these instead of the tests in the list")
    parser.add_argument("--workers", type=int, default=2, help="faults tried side by side (2)")
    parser.add_argument("--limit", type=float, default=240, help="seconds for a fault, after which it is killed (240)")
    parser.add_argument("--verbose", action="store_true", help="show what the tests said of every fault")
    parser.add_argument("--no-check", action="store_true", help="do not run the tests without a fault first")
    return parser.parse_args()


def pass_without_fault(tests: Sequence[tuple[str, ...]], workers: int, limit: float) -> bool:
    """Whether the tests pass on the source as it is; else they would seem to notice every fault."""
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(test for group in tests for test in group):
        files.setdefault(test.partition("::")[0], []).append(test)
    # A file that is asked for as a whole holds the tests that are asked for by name.
    jobs = [Job(file, (file,) if file in group else tuple(group)) for file, group in files.items()]
    failed = [result for result in fork_server.run(jobs, workers, limit * 4) if not result.passed]
    for result in failed:
        say(f"{result.name} fails without a fault:\n{result.output}")
    return not failed


def main() -> int:
    given = options()
    try:
        chosen = fault_list.load(given.area, given.name)
        jobs = [Job(fault.name, fault.tests, fault.file, fault.applied()) for fault in chosen]
    except ValueError as error:
        say(str(error))
        return 2
    if given.tests:
        jobs = [replace(job, tests=tuple(given.tests)) for job in jobs]
    since = time.monotonic()
    fork_server.load_libraries()
    if not given.no_check and not pass_without_fault([job.tests for job in jobs], given.workers, given.limit):
        return 1
    by_name = {fault.name: fault for fault in chosen}
    scores = {area: Score() for area in dict.fromkeys(fault.area for fault in chosen)}
    wrong = Counter[str]()
    for result in fork_server.run(jobs, given.workers, given.limit):
        fault = by_name[result.name]
        scores[fault.area].count(result)
        if given.no_check and result.status in fork_server.NO_SUCH_TEST:
            wrong[fault.name] += 1
        say(f"{describe(result)}  {fault.area}: {fault.name}" + f" ({fault.why})" * result.passed)
        if given.verbose:
            say(result.output)
    whole = report(scores, "area", time.monotonic() - since)
    for name in wrong:
        say(f"{name}: its tests were not found, or could not be imported")
    return int(bool(whole.living or wrong))


if __name__ == "__main__":
    raise SystemExit(main())
