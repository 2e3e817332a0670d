"""The lists of faults fit the source as it is, and what tries them works; ``make test-mutants`` tries them."""

from __future__ import annotations

import importlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mutants import fault_list
from mutants.fault_list import ROOT, Fault

sys.path.append(str(Path(fault_list.__file__).parent))  # scripts there import each other

import forks
from coverage_map import CoverageMap

FAULTS = fault_list.load()


def problems(fault: Fault) -> Iterator[str]:
    """In what a fault does not fit the project."""
    try:
        fault.applied()
    except ValueError as error:
        yield str(error)
    if not fault.tests:
        yield f"{fault.name}: no test is named that should notice it"
    for test in fault.tests:
        file, *parts = test.split("::")
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        for part in parts or [""]:
            name = part.partition("[")[0]
            if not text or (f"def {name}(" not in text and f"class {name}" not in text and name):
                yield f"{fault.name}: there is no test {test}"


@pytest.mark.parametrize("area", sorted({fault.area for fault in FAULTS}))
def test_every_fault_still_applies(area: str) -> None:
    assert [problem for fault in FAULTS if fault.area == area for problem in problems(fault)] == []


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


def example(find: str, replace: str) -> Fault:
    return Fault("area", "example", "src/cdpg/target/target.py", find, replace, "", ("tests/test_mutants.py",))


@pytest.mark.parametrize(
    ("find", "replace", "problem"),
    [
        ("no such line", "pass", "occurs 0 times"),
        ("Tensor", "Any", "times in src/cdpg/target/target.py, expected once"),
        ("b == 0,", "b == 0 ,", "means the same"),
        ("b == 0,", "b === 0,", "does not parse"),
    ],
)
def test_a_fault_that_does_not_fit_the_source_is_refused(find: str, replace: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        example(find, replace).applied()


def test_a_fault_replaces_its_place_alone() -> None:
    source = (ROOT / "src/cdpg/target/target.py").read_text(encoding="utf-8")
    assert example("b == 0,", "b == 1,").applied() == source.replace("b == 0,", "b == 1,")


def test_areas_and_names_choose_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_list, "LISTS", tmp_path)
    entry = "- {{name: {}, file: f, find: a, replace: b, why: w, tests: [t]}}\n"
    (tmp_path / "one.yaml").write_text(entry.format("first") + entry.format("second"), encoding="utf-8")
    (tmp_path / "two.yaml").write_text(entry.format("third"), encoding="utf-8")

    def names(areas: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> list[str]:
        return [fault.name for fault in fault_list.load(areas, names)]

    assert names() == ["first", "second", "third"]
    assert names(areas=("two",)) == ["third"]
    assert names(areas=("two",), names=("first",)) == ["first", "third"]
    with pytest.raises(ValueError, match="no area is called three"):
        names(areas=("three",))


def test_mutants_of_a_file(tmp_path: Path) -> None:
    from operators import mutants_of  # takes a second, which would be lost in every process that collects tests

    path = tmp_path / "example.py"
    path.write_text(
        "def double(x, by=2):\n    return x * by\n\n\nclass Thing:\n    def f(self):\n        return not self.x\n",
        encoding="utf-8",
    )
    mutants = list(mutants_of(str(path)))
    assert {(mutant.function, mutant.lines, mutant.change) for mutant in mutants} == {
        ("double", (1, 2), "- def double(x, by=2):\n+ def double(x, by=3):"),
        ("double", (2,), "- return x * by\n+ return x / by"),
        ("Thing.f", (7,), "- return not self.x\n+ return self.x"),
    }
    assert all(compile(mutant.source, mutant.file, "exec") for mutant in mutants)
    assert len({mutant.name for mutant in mutants}) == len(mutants)


def test_mutants_of_equal_lines_have_names_of_their_own(tmp_path: Path) -> None:
    from operators import mutants_of

    path = tmp_path / "example.py"
    path.write_text("def f(x):\n    x += 1\n    x += 1\n    return x\n", encoding="utf-8")
    first, *others = sorted(
        (mutant for mutant in mutants_of(str(path)) if mutant.change == "- x += 1\n+ x -= 1"), key=lambda one: one.lines
    )
    (second,) = others
    assert (first.lines, second.lines) == ((2,), (3,))
    assert second.name == f"{first.name}-2"


def test_a_patched_function_runs_the_mutant() -> None:
    import patching
    from operators import mutants_of

    from cdpg.target.target import log_target

    (mutant,) = (one for one in mutants_of("src/cdpg/target/target.py") if "log_a - b.log()" in one.change)
    arguments = torch.tensor([-1.0]), torch.tensor([0.5])
    code = log_target.__code__
    try:
        before = log_target(*arguments)
        patching.patch(mutant)
        after = log_target(*arguments)
    finally:
        log_target.__code__ = code
    assert torch.equal(after - before, -2 * arguments[1].log())


def test_a_patch_reaches_methods_and_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import patching
    from operators import mutants_of

    path = tmp_path / "patched_example.py"
    path.write_text(
        "class Thing:\n    @staticmethod\n    def f(x, by=2, *, more=10):\n        return x * by + more\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(patching, "_module", lambda file: "patched_example")
    found = {}
    for mutant in mutants_of(str(path)):
        module = importlib.import_module("patched_example")
        patching.patch(mutant)
        found[mutant.change.partition("\n+ ")[2]] = module.Thing.f(4)
        del sys.modules["patched_example"]
    assert found == {
        "def f(x, by=3, *, more=10):": 22,
        "def f(x, by=2, *, more=11):": 19,
        "return x / by + more": 12,
        "return x * by - more": -2,
    }


def test_a_mutant_meets_the_tests_that_run_its_lines_quick_ones_first() -> None:
    lines = CoverageMap(
        seconds={"a": 3.0, "b": 1.0, "c": 0.5, "fixture": 4.0, "d": 0.1},
        contexts={"a": {"a"}, "b": {"b"}, "c": {"c", "fixture"}, "d": {"d"}},
        lines={("f", 1): {"a", "fixture"}, ("f", 2): {"b"}, ("f", 3): {"d"}},
    )
    assert lines.tests_of("f", [1, 2], limit=100) == ["b", "a", "c"]
    assert lines.tests_of("f", [1, 2], limit=8) == ["b", "a"]
    assert lines.tests_of("f", [1], limit=1) == ["a"], "one test at least"
    assert lines.tests_of("f", [4], limit=100) == []
    assert lines.tests_of("g", [1], limit=100) == []


def test_forks_report_how_they_ended() -> None:
    def fail(folder: Path) -> int:
        raise ValueError(f"in {folder.name}")

    def wait(folder: Path) -> int:
        time.sleep(60)
        return 0

    def compute(folder: Path) -> int:
        signal.setitimer(signal.ITIMER_PROF, 0.2)
        while True:
            pass

    calls = [
        forks.Call("passes", lambda folder: 0, 60),
        forks.Call("status", lambda folder: 3, 60),
        forks.Call("fails", fail, 60),
        forks.Call("waits", wait, 0.2),
        forks.Call("computes", compute, 60),
    ]
    results = {result.name: result for result in forks.run(calls, workers=2)}
    assert {name: result.status for name, result in results.items()} == {
        "passes": 0, "status": 3, "fails": 70, "waits": None, "computes": None,
    }  # fmt: skip
    assert results["computes"].computing > 0.15
    assert [name for name, result in results.items() if result.passed] == ["passes"]


def test_every_mutant_that_may_live_still_exists() -> None:
    import survivors

    for (file, function, change), reason in survivors.load().items():
        source = (ROOT / file).read_text(encoding="utf-8")
        assert len(reason) > 20
        assert f"def {function.rpartition('.')[2]}(" in source, (file, function)
        removed = [line.removeprefix("- ") for line in change.splitlines() if line.startswith("- ")]
        assert all(line in source for line in removed), (file, change)
