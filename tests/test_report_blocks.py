"""Several runs in one report: each beside its own base, and none ranked against what it does not compare with."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cdpg.cli import app
from cdpg.errors import UserError
from cdpg.evaluation.metrics import POOLED
from cdpg.report import charts, page, write_figures, write_report
from cdpg.report.assembly import read_studies
from cdpg.report.blocks import JUDGED_ALIKE, judged_apart
from cdpg.report.figures import figures_of
from cdpg.report.samples import samples_of
from cdpg.report.tables import Cell, Column, Table, TableRow, split_table, tables_of
from cdpg.report.values import MeanInterval
from report_runs import change_config, compare_folder, read_study, run_folder, write_json, write_lines
from unpainted import is_one_of_a_kind, painted_if


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and files without their drawings, which take most of the time."""
    monkeypatch.setattr(page, "to_svg", lambda chart: "<svg></svg>")
    monkeypatch.setattr(charts, "to_file", lambda chart, path: path.touch())


def change_evaluation(run: Path, **changes: Any) -> Path:
    """Write other figures into a run's evaluation; ``base`` and ``tuned`` are the satisfaction of the two."""
    content = json.loads((run / "evaluation.json").read_text())
    for model in ("base", "tuned"):
        if model in changes:
            mean = changes.pop(model)
            content[model]["satisfaction"] = {"mean": mean, "low": mean - 0.02, "high": mean + 0.02}
    write_json(run / "evaluation.json", {**content, **changes})
    return run


def blocks(*paths: Path) -> list[list[str]]:
    return [[run.name for run in study.runs] for study in read_studies(list(paths))]


def cards(page: Path) -> list[tuple[str, str, str]]:
    """Label, satisfaction of the base and of the tuned model, of each headline."""
    found = re.findall(r'<h\d class="h3">([^<]+)</h\d>\s*<p class="big"><span class="from">(\S+) →</span> (\S+)</p>',
                       page.read_text(encoding="utf-8"))  # fmt: skip
    return [(label, before, after) for label, before, after in found]


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return change_evaluation(run_folder(tmp_path / "h1", epochs=20), base=0.167, tuned=0.333)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A run of another base, under conditions that are otherwise the same."""
    run = run_folder(tmp_path / "cmp" / "cdpg-seed0", epochs=20)
    return change_evaluation(change_config(run, {"base": "0" * 64}), base=0.5, tuned=0.7)


def test_runs_of_different_bases_stand_in_blocks_each_beside_its_own_base(one: Path, other: Path) -> None:
    made = write_report([other, one], one / "report.html")
    assert cards(made) == [("cdpg-seed0", "0.500", "0.700"), ("h1", "0.167", "0.333")]
    studies = read_studies([other, one])
    for study in studies:
        for table in tables_of(study):
            assert not any(cell.best or cell.near for row in table.rows for cell in row.cells), "ranked across blocks"
    base, tuned = (next(t for t in tables_of(studies[1]) if t.name.endswith("requirement")).rows[n] for n in (0, 1))
    assert (base.cells[0].shown, tuned.cells[0].shown) == ("0.167", "0.333")
    text = made.read_text(encoding="utf-8")
    assert "These runs are not one comparison and are shown in 2 blocks. They differ in base model." in text
    assert "★" not in text


def test_a_page_with_blocks_has_every_figure_and_table_twice_under_names_of_their_own(
    one: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # drawn: a figure has identifiers of its own
    with painted_if(is_one_of_a_kind):
        made = write_report([one, other], one / "report.html").read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([^"]+)"', made)
    assert len(set(ids)) == len(ids)
    for place in (1, 2):
        assert f"f-block-{place}-training-satisfaction" in ids and f"t-block-{place}-requirement" in ids
        assert f"block-{place}-main" in ids and f'href="#block-{place}-main"' in made
    assert {*re.findall(r'(?:aria-labelledby|href)="#?([\w-]+)"', made)} <= {*ids}
    headings = [int(level) for level in re.findall(r"<h(\d)", made)]
    assert all(after - before <= 1 for before, after in itertools.pairwise(headings)), "a level is skipped"


def test_figures_of_blocks_are_files_of_their_own(one: Path, other: Path, tmp_path: Path) -> None:
    names = {file.name for file in write_figures([one, other], tmp_path / "figures")}
    assert {f"block-{place}-training-satisfaction.{kind}" for place in (1, 2) for kind in ("pdf", "png")} <= names
    single = {file.name for file in write_figures([one], tmp_path / "single")}
    assert {name.removeprefix("block-1-") for name in names if name.startswith("block-1-")} == single


def test_what_parts_runs(tmp_path: Path) -> None:
    run_folder(tmp_path / "a", "cdpg", epochs=3)
    run_folder(tmp_path / "b", "dpg", epochs=3)
    assert blocks(tmp_path) == [["a", "b"]]
    held_out = {"count": 500, "sha256": "ff" * 32}
    none = {"count": 0, "sha256": "ee" * 32}
    for origin, settings in (
        ({"base": "0" * 64}, {}),
        ({"constraints": ["rules:short"]}, {}),
        ({"held_out": held_out}, {}),
        ({"held_out": none}, {}),
        ({"stop": None}, {}),
        ({}, {"max_completion_length": 7}),
        ({}, {"task": "code-pep8"}),
    ):
        run_folder(tmp_path / "b", "dpg", epochs=3, task=settings.get("task", "code-compilability"))
        change_config(tmp_path / "b", origin, **settings)
        assert blocks(tmp_path) == [["a"], ["b"]], (origin, settings)
    run_folder(tmp_path / "b", "dpg", epochs=3)
    for origin, settings in (
        ({"contexts": held_out, "device": "cuda", "threads": 9}, {}),
        ({"model": "another/name"}, {"learning_rate": 1.0, "seed": 9}),
    ):
        change_config(tmp_path / "b", origin, **settings)
        assert blocks(tmp_path) == [["a", "b"]], (origin, settings)


def test_without_an_evaluation_runs_compare_if_they_were_tuned_on_the_same(tmp_path: Path) -> None:
    nothing = {"count": 0, "sha256": "ee" * 32}
    for name in ("a", "b"):
        run = change_config(run_folder(tmp_path / name, epochs=3, seed=len(name)), {"held_out": nothing})
        (run / "evaluation.json").unlink()
        (run / "evaluations.jsonl").unlink()
    assert blocks(tmp_path) == [["a", "b"]]
    change_config(tmp_path / "b", {"contexts": {"count": 5, "sha256": "dd" * 32}})
    assert blocks(tmp_path) == [["a"], ["b"]]


@pytest.mark.parametrize("lost", ["config.yaml", "held_out", "origin"])
def test_where_the_files_do_not_say_the_figures_of_the_base_decide(lost: str, tmp_path: Path) -> None:
    """An old or damaged folder: the same figures of the base, context by context, are of the same measurement."""
    a, b = (run_folder(tmp_path / name, epochs=3) for name in "ab")
    if lost == "config.yaml":
        (b / "config.yaml").unlink()
    else:
        config = yaml.safe_load((b / "config.yaml").read_text())
        (config if lost == "origin" else config["origin"]).pop(lost)
        (b / "config.yaml").write_text(yaml.safe_dump(config))
    assert blocks(a, b) == [["a", "b"]]
    change_evaluation(b, seed=8)
    assert blocks(a, b) == [["a"], ["b"]]
    made = write_report([a, b], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Their files do not show that they had the same base model, constraint and evaluated contexts." in made
    (b / "evaluation.json").unlink()
    assert blocks(a, b) == [["a"], ["b"]]


def test_a_constraint_that_was_changed_under_its_name_is_noticed_by_the_base(tmp_path: Path) -> None:
    a, b = (run_folder(tmp_path / name, epochs=3) for name in "ab")
    change_evaluation(b, base=0.38)
    assert blocks(a, b) == [["a", "b"]]
    change_evaluation(b, base=0.8)
    assert blocks(a, b) == [["a"], ["b"]]
    made = write_report([a, b], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "They differ in constraint, or what it calls." in made
    for run in (a, b):
        change_evaluation(run, contexts=9)
    assert blocks(a, b) == [["a", "b"]], "on so few contexts an interval says nothing"


def test_intervals_that_lie_apart() -> None:
    one = MeanInterval(0.3, 0.2, 0.4)
    assert judged_apart(one, MeanInterval(0.5, 0.41 + JUDGED_ALIKE, 0.6))
    assert judged_apart(MeanInterval(0.5, 0.41 + JUDGED_ALIKE, 0.6), one)
    assert not judged_apart(one, MeanInterval(0.5, 0.39 + JUDGED_ALIKE, 0.6))
    assert not judged_apart(one, MeanInterval(0.9)) and not judged_apart(None, one)


def test_runs_of_several_tasks_are_one_report(tmp_path: Path) -> None:
    tasks = ("code-pep8", "translation-numbers")
    runs = [run_folder(tmp_path / task, task=task, epochs=3) for task in tasks]
    assert [study.task for study in read_studies(runs)] == list(tasks)
    made = write_report(runs, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "They differ in task." in made and "<h1>runs</h1>" in made


# The base that was measured more than once.


@pytest.fixture
def seeds(tmp_path: Path) -> list[Path]:
    """Two runs that compare, evaluated with other seeds: the base's figures differ a little."""
    runs = [run_folder(tmp_path / name, name, epochs=20) for name in ("cdpg", "dpg")]
    change_evaluation(runs[1], base=0.4, seed=8)
    return runs


def test_each_run_keeps_the_base_that_it_was_measured_with(seeds: list[Path]) -> None:
    study = read_study(seeds)
    assert study.models == ("base", "cdpg", "base of dpg", "dpg") and study.tuned == ("cdpg", "dpg")
    assert [study.label_of(model) for model in study.models] == ["base of cdpg", "cdpg", "base of dpg", "dpg"]
    (table,) = (table for table in tables_of(study) if table.name == "requirement")
    assert [(row.name, row.cells[0].shown, row.quiet) for row in table.rows] == [
        ("base of cdpg", "0.380", True), ("cdpg", "0.660", False),
        ("base of dpg", "0.400", True), ("dpg", "0.610", False),
    ]  # fmt: skip
    assert [row.cells[0].best for row in table.rows] == [False, True, False, False], "the bases are not ranked"
    content = json.loads((seeds[1] / "evaluation.json").read_text())
    del content["changes"]
    write_json(seeds[1] / "evaluation.json", content)
    assert read_study(seeds).change("dpg", "satisfaction").mean == pytest.approx(0.61 - 0.4, abs=1e-3)  # type: ignore[union-attr]
    made = write_report(seeds, seeds[0] / "report.html")
    assert cards(made) == [("cdpg", "0.380", "0.660"), ("dpg", "0.400", "0.610")]
    assert "these runs were not evaluated in the same way, they differ in seed" in made.read_text(encoding="utf-8")


def test_one_base_for_all_who_have_the_same_figures_of_it(seeds: list[Path], tmp_path: Path) -> None:
    third = run_folder(tmp_path / "ziegler", "ziegler", epochs=20)
    content = json.loads((third / "evaluation.json").read_text())
    content["base"]["satisfaction"]["mean"] *= 1 + 1e-9  # what another number of threads may make of it
    content["base"][POOLED]["mean"] += 1
    write_json(third / "evaluation.json", content)
    study = read_study([*seeds, third])
    assert study.models == ("base", "cdpg", "base of dpg", "dpg", "ziegler")
    assert study.label_of("base") == "base of cdpg, ziegler" and study.base_of("ziegler") == "base"
    assert read_study([seeds[0], third]).models == ("base", "cdpg", "ziegler")


def test_nothing_of_one_run_is_said_of_all(seeds: list[Path]) -> None:
    commands = [f"cdpg run of {run.name}" for run in seeds]
    for run, command, samples in zip(seeds, commands, (16, 32), strict=True):
        change_evaluation(run, command=command, samples_per_context=samples)
    study = read_study(seeds)
    assert not {"command", "samples_per_context", "seed"} & set(study.evaluation)
    names = {chart.name for chart in figures_of(study)}
    assert "frequency-compile-outcome" in names and "token-rank" in names, "shares compare"
    assert "frequency-pep8-code" not in names, "numbers of different numbers of outputs do not"
    made = write_report(seeds, seeds[0] / "report.html").read_text(encoding="utf-8")
    assert "This was made by" not in made and "Measured on 500" in made and "samples each" not in made
    assert "they differ in samples a context, seed" in made
    assert "cdpg run of cdpg" in write_report(seeds[:1], seeds[0] / "one.html").read_text(encoding="utf-8")


def test_runs_that_were_evaluated_on_other_contexts_along_the_way_have_no_level_in_common(seeds: list[Path]) -> None:
    def levels() -> dict[str, Any]:
        drawn = {chart.name: chart for chart in figures_of(read_study(seeds)) if chart.section == "training"}
        return {name: (chart.draw.keywords["base"], chart.caption) for name, chart in drawn.items()}  # type: ignore[attr-defined]

    assert levels()["training-satisfaction"][0] == pytest.approx(0.38, abs=0.01)
    records = [json.loads(line) for line in (seeds[1] / "evaluations.jsonl").open()]
    write_lines(seeds[1] / "evaluations.jsonl", [{**record, "contexts": 8} for record in records])
    level, caption = levels()["training-satisfaction"]
    assert level is None and caption.endswith("Lines are of 8 and 64 contexts.")


def test_the_base_in_samples_is_named_by_whose_it_is(seeds: list[Path]) -> None:
    outputs = samples_of(read_study(seeds)).examples[0].outputs
    assert [output.model for output in outputs] == ["base of cdpg", "cdpg", "dpg"]


def test_what_was_tuned_otherwise_is_no_seed_of_another(tmp_path: Path) -> None:
    for seed in range(2):
        run_folder(tmp_path / f"x-seed{seed}", epochs=3, seed=seed)
    assert [len(group.runs) for group in read_study([tmp_path]).groups] == [2]
    for origin in ({"contexts": {"count": 5, "sha256": "dd" * 32}}, {"adapters": {"default": {"r": "16"}}}):
        run_folder(tmp_path / "x-seed1", epochs=3, seed=1)
        change_config(tmp_path / "x-seed1", origin)
        assert [group.label for group in read_study([tmp_path]).groups] == ["x-seed0", "x-seed1"]


# Comparisons.


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compare_folder(tmp_path_factory.mktemp("runs") / "compare", epochs=3)


def test_a_comparison_is_used_for_its_block_beside_another_run(compared: Path, other: Path) -> None:
    first, second = read_studies([compared, other])
    assert "between" in first.evaluation and first.models == ("base", "cdpg", "dpg", "reinforce", "ziegler")
    assert [group.label for group in second.groups] == ["cdpg-seed0"] and "between" not in second.evaluation


def test_with_a_run_from_elsewhere_no_comparison_speaks_for_all(compared: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "mine", "cdpg", epochs=7)
    study = read_study([compared, run])
    assert "between" not in study.evaluation
    assert [group.label for group in study.groups] == ["cdpg", "mine", "dpg", "reinforce", "ziegler"]


def test_runs_that_were_compared_stay_together(tmp_path: Path) -> None:
    folder = compare_folder(tmp_path / "compare", epochs=3)
    (folder / "dpg" / "config.yaml").unlink()
    change_config(folder / "ziegler", {"held_out": {"count": 9, "sha256": "99" * 32}})
    study = read_study([folder])
    assert len(study.runs) == 4
    (note,) = study.notes
    assert note.startswith("by their config.yaml these runs differ in evaluated contexts: the tables are of one")


def test_a_run_left_in_the_folder_of_a_comparison_stands_apart_if_it_differs(tmp_path: Path) -> None:
    folder = compare_folder(tmp_path / "compare", epochs=3)
    change_config(run_folder(folder / "late", epochs=3), {"base": "0" * 64})
    first, second = read_studies([folder])
    assert len(first.runs) == 4 and first.notes == second.notes == ()
    assert second.models == ("base", "late")


def test_a_comparison_without_its_runs(compared: Path, one: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(compared / "comparison.json", alone)
    assert [study.tuned for study in read_studies([alone])] == [("cdpg", "dpg", "reinforce", "ziegler")]
    assert [study.tuned for study in read_studies([one, alone])] == [("h1",), ("cdpg", "dpg", "reinforce", "ziegler")]
    assert write_report([one, alone], tmp_path / "report.html").is_file()
    (alone / "comparison.json").write_text("{}")
    assert write_report([alone], tmp_path / "report.html").is_file()


def test_two_comparisons_have_labels_that_tell_them_apart(compared: Path, tmp_path: Path) -> None:
    second = compare_folder(tmp_path / "again", epochs=3)
    for run in second.iterdir():
        if run.is_dir():
            change_config(run, {"base": "0" * 64})
    studies = read_studies([compared, second])
    assert [study.groups[0].label for study in studies] == ["compare/cdpg", "again/cdpg"]
    assert all("between" in study.evaluation for study in studies)


def test_figures_of_a_run_that_was_made_longer_since_are_said_to_be_old(tmp_path: Path) -> None:
    folder = compare_folder(tmp_path / "both", epochs=20)
    said = "cdpg was evaluated after 20 epochs and has 21 now"
    assert "was evaluated after" not in write_report([folder], tmp_path / "page.html").read_text(encoding="utf-8")
    file = folder / "cdpg" / "metrics.jsonl"
    last = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(last | {"epoch": 21}) + "\n")
    assert said in write_report([folder], tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_report_on_several_folders_replaces_none_of_theirs(
    one: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["report", str(one), str(other)], catch_exceptions=False)
    assert result.exit_code == 0 and (tmp_path / "report.html").is_file()
    assert not (one / "report.html").exists() and not (other / "report.html").exists()
    monkeypatch.chdir(one)
    with pytest.raises(UserError, match=r"the working folder is a run's, whose own report\.html must not be replaced"):
        CliRunner().invoke(app, ["report", str(one), str(other)], catch_exceptions=False)


@pytest.mark.parametrize(("columns", "widths"), [(0, [0]), (1, [1]), (6, [6]), (7, [4, 3]), (13, [5, 5, 3])])
def test_a_wide_table_is_split_into_parts_of_about_equal_width(columns: int, widths: list[int]) -> None:
    cells = tuple(Cell(str(number)) for number in range(columns))
    whole = Table("t", "T", tuple(Column(cell.shown) for cell in cells), (TableRow("base", "#000", cells),), "csv")
    parts = list(split_table(whole))
    assert [len(part.columns) for part in parts] == widths
    assert tuple(cell for part in parts for cell in part.rows[0].cells) == cells
    assert tuple(column for part in parts for column in part.columns) == whole.columns
    rest = range(2, len(parts) + 1)
    assert [(part.name, part.title, part.csv) for part in parts] == [
        ("t", "T", "csv"),
        *((f"t-{number}", "", "") for number in rest),
    ]
