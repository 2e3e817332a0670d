"""The list of hand-made faults fits the source as it is; whether tests notice them, ``make test-mutants`` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mutants import fault_list
from mutants.fault_list import ROOT, Fault

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
    return Fault("area", "example", "src/cdpg/target.py", find, replace, "", ("tests/test_mutants.py",))


@pytest.mark.parametrize(
    ("find", "replace", "problem"),
    [
        ("no such line", "pass", "occurs 0 times"),
        ("Tensor", "Any", "times in src/cdpg/target.py, expected once"),
        ("b == 0,", "b == 0 ,", "means the same"),
        ("b == 0,", "b === 0,", "does not parse"),
    ],
)
def test_a_fault_that_does_not_fit_the_source_is_refused(find: str, replace: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        example(find, replace).applied()


def test_a_fault_replaces_its_place_alone() -> None:
    source = (ROOT / "src/cdpg/target.py").read_text(encoding="utf-8")
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
