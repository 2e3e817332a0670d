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
from collections.abc import Mapping, Sequence
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
    parser.add_argument("--verbose", action="store_true", help="show what the tests said of every fault")
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="do not run the tests without a fault first, which is also how long they may take",
    )
    return parser.parse_args()


def seconds_without_fault(tests: Sequence[tuple[str, ...]], workers: int) -> dict[str, float] | None:
    """How long each test file takes on the source as it is; None if one fails: it would seem to notice every fault."""
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(test for group in tests for test in group):
        files.setdefault(file_of(test), []).append(test)
    # A file that is asked for as a whole holds the tests that are asked for by name.
    jobs = [Job(file, (file,) if file in group else tuple(group)) for file, group in files.items()]
    results = list(fork_server.run(jobs, workers))
    failed = [result for result in results if not result.passed]
    for result in failed:
        say(f"{result.name} fails without a fault:\n{result.output}")
    return None if failed else {result.name: result.seconds for result in results}


def file_of(test: str) -> str:
    return test.partition("::")[0]


def with_limit(job: Job, seconds: Mapping[str, float]) -> Job:
    """A job that may take ten times as long as its test files do without a fault: what takes longer hangs."""
    return replace(job, limit=30 + 10 * sum(seconds[file] for file in {file_of(test) for test in job.tests}))


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
    if not given.no_check:
        seconds = seconds_without_fault([job.tests for job in jobs], given.workers)
        if seconds is None:
            return 1
        jobs = [with_limit(job, seconds) for job in jobs]
    by_name = {fault.name: fault for fault in chosen}
    scores = {area: Score() for area in dict.fromkeys(fault.area for fault in chosen)}
    doubtful = []
    for result in fork_server.run(jobs, given.workers):
        fault = by_name[result.name]
        scores[fault.area].count(result)
        if given.no_check and (result.status is None or result.status in fork_server.NO_SUCH_TEST):
            doubtful.append(fault.name)
        say(f"{describe(result)}  {fault.area}: {fault.name}" + f" ({fault.why})" * result.passed)
        if given.verbose:
            say(result.output)
    whole = report(scores, "area", time.monotonic() - since)
    for name in doubtful:
        say(f"{name}: its tests were not found, or were still running after {fork_server.LIMIT} seconds")
    return int(bool(whole.living or doubtful))


if __name__ == "__main__":
    raise SystemExit(main())
