"""The lists of faults fit the source as it is, and what tries them works; ``make test-mutants`` tries them."""

from __future__ import annotations

import importlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for mutant in mutants:
        first, end = mutant.place
        before, after = "".join(lines[first - 1 : end - 1]), mutant.text
        removed, added = mutant.change.removeprefix("- ").split("\n+ ")
        assert after == before.replace(removed, added) != before
    assert len({mutant.name for mutant in mutants}) == len(mutants)


def test_a_mutant_of_several_lines_keeps_their_indentation(tmp_path: Path) -> None:
    from operators import mutants_of

    path = tmp_path / "example.py"
    text = "class Thing:\n    def f(self):\n        return g(\n            1,\n            self,\n        )\n"
    path.write_text(text, encoding="utf-8")
    texts = {mutant.change: mutant.text for mutant in mutants_of(str(path))}
    assert texts == {
        "- 1,\n+ None,": "    def f(self):\n        return g(\n            None,\n            self,\n        )\n",
        "- 1,\n+ 2,": "    def f(self):\n        return g(\n            2,\n            self,\n        )\n",
        "- self,\n+ None,": "    def f(self):\n        return g(\n            1,\n            None,\n        )\n",
        "- 1,": "    def f(self):\n        return g(\n            self,\n        )\n",
        "- self,\n- )\n+ )": "    def f(self):\n        return g(\n            1,\n            )\n",
    }


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
    from operators import mutants_of
    from patching import Edit, patch

    from cdpg.target.target import log_target

    (mutant,) = (one for one in mutants_of("src/cdpg/target/target.py") if "log_a - b.log()" in one.change)
    arguments = torch.tensor([-1.0]), torch.tensor([0.5])
    code = log_target.__code__
    try:
        before = log_target(*arguments)
        patch(Edit(mutant.file, mutant.function, mutant.text, mutant.place[0]))
        after = log_target(*arguments)
        line = log_target.__code__.co_firstlineno
    finally:
        log_target.__code__ = code
    assert torch.equal(after - before, -2 * arguments[1].log())
    assert line == code.co_firstlineno


EXAMPLE = """
from functools import cached_property

LIMIT = 3


class Base:
    def f(self, x, by=2, *, more=10):
        return x * by + more


class Thing(Base):
    def f(self, x, by=2, *, more=10):
        return super().f(x, by, more=more)

    @staticmethod
    def g(x):
        return x + 1

    @property
    def h(self):
        return 1

    @cached_property
    def i(self):
        return 1
"""


@pytest.mark.parametrize(
    ("find", "replace", "call", "value"),
    [
        ("x * by + more", "x / by + more", lambda kind: kind().f(4), 12),
        ("return super().f(x, by, more=more)", "return super().f(x, by, more=1)", lambda kind: kind().f(4), 9),
        (
            "by=2, *, more=10):\n        return super", "by=3, *, more=0):\n        return super",
            lambda kind: kind().f(4), 12,
        ),
        ("x + 1", "x + 2", lambda kind: kind.g(1), 3),
        ("def h(self):\n        return 1", "def h(self):\n        return 2", lambda kind: kind().h, 2),
        ("def i(self):\n        return 1", "def i(self):\n        return 2", lambda kind: kind().i, 2),
    ],
)  # fmt: skip
def test_a_patch_reaches_methods_and_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: str, replace: str, call: Callable[[Any], int], value: int
) -> None:
    import patching

    (tmp_path / "patched_example.py").write_text(EXAMPLE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "patched_example", raising=False)
    assert EXAMPLE.count(find) == 1
    edits = patching.edits_between("src/patched_example.py", EXAMPLE, EXAMPLE.replace(find, replace))
    assert edits is not None
    module = importlib.import_module("patched_example")
    for edit in edits:
        patching.patch(edit)
    assert call(module.Thing) == value


@pytest.mark.parametrize(
    ("find", "replace"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("@staticmethod", "@classmethod"),
        ("class Thing(Base):", "class Thing:"),
        (
            "f(self, x, by=2, *, more=10):\n        return super",
            "f(self, x, by=LIMIT, *, more=0):\n        return super",
        ),
        ("def g(x):", "def g(y):"),
        ("LIMIT = 3", "LIMIT = 3\nOTHER = 3"),
    ],
)
def test_a_change_outside_functions_is_not_patched(find: str, replace: str) -> None:
    import patching

    assert EXAMPLE.count(find) == 1
    assert patching.edits_between("src/patched_example.py", EXAMPLE, EXAMPLE.replace(find, replace)) is None


def test_mypy_rejects_mutants(tmp_path: Path) -> None:
    from operators import mutants_of
    from type_checks import TypeCheck

    path = tmp_path / "example.py"
    path.write_text(
        "def double(x: int) -> int:\n    return abs(x) * 2\n\n\n"
        "class Thing:\n"
        "    def __init__(self, x: int) -> None:\n        self.x = x\n        self.y: int = x\n\n"
        "    def more(self) -> int:\n        y = abs(self.x)\n        return y + 1\n\n"
        "    def wrong(self) -> int:\n        return 'a' * 2\n",
        encoding="utf-8",
    )
    mutants = {mutant.name: mutant for mutant in mutants_of(str(path))}
    rejected = TypeCheck(mutants.values(), tmp_path).rejected()
    assert {mutants[name].change for name in rejected} == {
        "- return abs(x) * 2\n+ return abs(x) / 2",
        "- return abs(x) * 2\n+ return abs(None) * 2",
        "- self.y: int = x\n+ self.y: int = None",
        "- y = abs(self.x)\n+ y = None",
        "- y = abs(self.x)\n+ y = abs(None)",
        "- return 'a' * 2\n+ return 'a' / 2",  # has an error that the function as it is has not
    }


def test_tests_that_noticed_an_edit_of_the_function_go_first() -> None:
    from patching import Edit
    from trials import Noticing, Trial

    def trial(function: str, file: str = "file") -> Trial:
        return Trial("name", (Edit(file, function, "", 1),), {"quick": 0.1, "slow": 1.0, "slower": 1.1})

    noticing = Noticing()
    assert noticing.order(trial("f")) == ["quick", "slow", "slower"]
    for _ in range(9):
        noticing.count(trial("f"), ["quick", "slow", "slower"], "slower")
    assert noticing.order(trial("f")) == ["slower", "quick", "slow"]
    assert noticing.order(trial("g")) == ["slower", "quick", "slow"], "of the same file"
    for _ in range(9):
        noticing.count(trial("g"), ["slower", "quick", "slow"], "quick")
    assert noticing.order(trial("g")) == ["quick", "slower", "slow"]
    assert noticing.order(trial("f")) == ["slower", "quick", "slow"]
    assert noticing.order(trial("f", "other")) == ["quick", "slow", "slower"]


def test_a_mutant_meets_the_tests_that_run_its_lines_quick_ones_first() -> None:
    lines = CoverageMap(
        seconds={"a": 3.0, "b": 1.0, "c": 0.5, "fixture": 4.0, "d": 0.1},
        contexts={"a": {"a"}, "b": {"b"}, "c": {"c", "fixture"}, "d": {"d"}},
        lines={("f", 1): {"a", "fixture"}, ("f", 2): {"b"}, ("f", 3): {"d"}},
    )
    assert lines.tests_of("f", [1, 2], limit=100) == ["b", "a", "c"]
    assert lines.tests_of("f", [1, 2], limit=8) == ["b", "a"]
    assert lines.tests_of("f", [1, 2], limit=3) == ["b"]
    assert lines.tests_of("f", [1], limit=1) == ["a"], "one test at least"
    assert lines.tests_of("f", [4], limit=100) == []
    assert lines.tests_of("g", [1], limit=100) == []


def test_a_mutant_meets_the_tests_of_its_module_first() -> None:
    seconds = {"tests/test_other.py::1": 1.0, "tests/test_f.py::1": 5.0, "tests/test_f.py::2": 4.0}
    lines = CoverageMap(seconds, {test: {test} for test in seconds}, {("src/f.py", 1): set(seconds)})
    assert lines.tests_of("src/f.py", [1], limit=5) == ["tests/test_f.py::2", "tests/test_other.py::1"]
    assert lines.tests_of("src/f.py", [1], limit=9) == [
        "tests/test_f.py::2",
        "tests/test_f.py::1",
        "tests/test_other.py::1",
    ]


def test_a_mutant_meets_the_tests_by_value_of_its_folder_first() -> None:
    seconds = {"tests/test_other.py::1": 0.1, "tests/test_target.py::1": 0.5, "tests/test_f.py::2": 4.0}
    file = "src/cdpg/target/f.py"
    lines = CoverageMap(seconds, {test: {test} for test in seconds}, {(file, 1): set(seconds)})
    expected = ["tests/test_target.py::1", "tests/test_f.py::2", "tests/test_other.py::1"]
    assert lines.tests_of(file, [1], limit=5) == expected


def test_a_mutant_meets_tests_of_all_files() -> None:
    seconds = {"x::1": 1.0, "x::2": 1.0, "x::3": 1.0, "x::4": 1.0, "y::1": 2.0, "z::1": 9.0}
    lines = CoverageMap(seconds, {test: {test} for test in seconds}, {("f", 1): set(seconds)})
    assert lines.tests_of("f", [1], limit=100) == ["x::1", "x::2", "x::3", "x::4", "y::1", "z::1"]
    assert lines.tests_of("f", [1], limit=5) == ["x::1", "x::2", "y::1", "x::3"]


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
    assert results["fails"].status == forks.BROKEN
    assert "ValueError: in worker" in results["fails"].output
    assert results["computes"].computing > 0.15
    assert [name for name, result in results.items() if result.passed] == ["passes"]


def test_a_call_may_depend_on_the_results_before_it() -> None:
    status = 0

    def calls() -> Iterator[forks.Call]:
        for number in range(3):
            yield forks.Call(str(number), lambda folder: status, 60)

    found = []
    for result in forks.run(calls(), workers=1):
        found.append(result.status)
        status += 1
    assert found == [0, 1, 2]


def test_every_mutant_that_may_live_still_exists() -> None:
    import survivors

    reasons = survivors.load()
    for (file, function, change), reason in reasons.by_key.items():
        source = (ROOT / file).read_text(encoding="utf-8")
        assert len(reason) > 20
        assert f"def {function.rpartition('.')[2]}(" in source, (file, function)
        removed = [line.removeprefix("- ") for line in change.splitlines() if line.startswith("- ")]
        assert all(line in source for line in removed), (file, change)


def test_edits_that_mutants_may_have_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import survivors
    from operators import Mutant

    monkeypatch.setattr(survivors, "LIST", tmp_path / "list.yaml")
    text = "- reason: one\n  edits: [['b=1', 'b=2']]\n"
    text += "- {reason: two, mutants: [{file: f, function: g, change: '- x'}]}\n"
    survivors.LIST.write_text(text, encoding="utf-8")

    def reason(file: str, change: str) -> str | None:
        return survivors.load().reason(Mutant(file, "g", (), change, "", (1, 2)))

    assert reason("any", "- h(a, b=1)\n+ h(a, b=2)") == "one"
    assert reason("any", "- h(a, b=1)\n+ h(b=2)") is None
    assert reason("any", "- h(a, b=1)\n+ h(a, b=2) ") is None
    assert (reason("f", "- x"), reason("e", "- x")) == ("two", None)
