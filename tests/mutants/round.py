"""Tries all there is, the hand-made faults and the mutants of the core, and shows those that no test notices.

    python tests/mutants/round.py

This is what ``core.py`` and ``run.py`` do, in one round. Most faults change the inside of a function only, and are
tried as the mutants are: in forks of a process that has the tests collected. Those that are not noticed there, that
change more or whose tests start processes are tried as ``run.py`` does. The exit status is 1 if one of the two fails.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import core
import fault_list
import fork_server
import run
from collected import Collected, collect
from coverage_map import CoverageMap
from fault_list import ROOT, Fault
from patching import edits_between
from scores import describe, minutes, say
from trials import Trial, run_trials, tests_for

OTHERS = tuple(
    f"tests/test_{name}.py"
    for name in (
        "chats comparison config contexts diagnosis entities factors fast judge narrow numerals prefixes"
        " python_code python_prefixes recomputing report report_values run_files steps tasks"
    ).split()
)
"""Test files for faults alone, beside those of the core: it is not known which lines their tests run."""
UNKNOWN = 20.0
"""Seconds that such a test may take."""
QUICK = 1.0
"""Seconds of other tests that a fault meets beside those that are named."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    core.add_options(parser)
    return parser.parse_args()


def fault_trials(collected: Collected, faults: Sequence[Fault], lines: CoverageMap, seconds: float) -> Iterator[Trial]:
    """Those that can be tried in place, with the named tests that run a changed line and others that run it.

    The others take at most ``seconds`` together: many a fault is noticed by a quicker test than the one that is named.
    """
    for fault in faults:
        original = (ROOT / fault.file).read_text(encoding="utf-8")
        edits = edits_between(fault.file, original, fault.applied())
        first = original.count("\n", 0, original.index(fault.find)) + 1
        changed = range(first, first + fault.find.count("\n") + 1)
        running = tests_for(lines, fault.file, changed)
        named = [name for test in fault.tests for name in collected.names(test)]
        tests = {name: running.get(name, UNKNOWN) for name in named if name in running or name not in lines.contexts}
        tests = tests_for(lines, fault.file, changed, seconds) | tests
        if edits and tests:
            yield Trial(fault.name, tuple(edits), tests)


def try_in_place(collected: Collected, given: argparse.Namespace, faults: Sequence[Fault], noticed: Path) -> int:
    """The mutants of the core, and the faults; writes which test noticed each of the latter."""
    mutants = core.core_mutants()
    known = core.map_and_check(collected, mutants.values(), given.workers)
    if known is None:
        return 1
    status = core.try_mutants(collected, given, mutants, *known)
    found: dict[str, list[str]] = {}
    for result, failed in run_trials(collected, fault_trials(collected, faults, known[0], QUICK), given.workers):
        say(f"{describe(result)}  {result.name} ({failed}), in place")
        if failed is not None and failed not in known[0].contexts:
            found[result.name] = [failed]  # to be run without the fault, too
        elif failed is not None or result.status is None:
            found[result.name] = []
    noticed.write_text(json.dumps(found), encoding="utf-8")
    say(f"{len(found)} of {len(faults)} faults were noticed in place; {minutes()}")
    return status


def main() -> int:
    given = options()
    faults = fault_list.load()
    fork_server.load_libraries()
    with TemporaryDirectory() as folder:
        noticed = Path(folder) / "noticed.json"
        child = os.fork()  # the faults that are left need a process without the package
        if not child:
            status = 70
            try:
                status = collect(core.TESTS + OTHERS, lambda found: try_in_place(found, given, faults, noticed))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = json.loads(noticed.read_text(encoding="utf-8")) if noticed.is_file() else {}
    return max(abs(status), run.try_faults(faults, given, found))


if __name__ == "__main__":
    raise SystemExit(main())
