"""The report: what it holds, what it survives, and what it never lets through."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from cdpg import CDPGConfig, CDPGTrainer, methods
from cdpg.errors import UserError
from cdpg.evaluation.metrics import POOLED
from cdpg.report import write_figures, write_report
from cdpg.report.assembly import read_studies
from cdpg.report.charts import spread, to_svg
from cdpg.report.diagnosis import diagnose
from cdpg.report.figures import figures_of
from cdpg.report.highlight import prose, python
from cdpg.report.samples import samples_of
from cdpg.report.series import clock_of, evaluated, log10_weights, logged, seconds_by_stage, thinned
from cdpg.report.style import BASE, STAGES, dark_twins
from cdpg.report.tables import duration, neutral, tables_of, to_csv, written
from cdpg.report.values import MeanInterval, distinct, interval, number, short, text, visible
from cdpg.report.writing import write_whole
from cdpg.system import files
from enumeration import MAX_LENGTH, Universe, contexts_of, tabular
from report_runs import (
    METHODS,
    change_config,
    compare_folder,
    read_study,
    run_folder,
    run_with_pooled,
    write_json,
    write_lines,
)
from rounds import ordinary
from unpainted import EMPTY, is_one_of_a_kind, painted_if, unpainted

HOSTILE = (
    "</script><img src=x onerror=window.pwned=1>\"'`{{7*7}} $\\frac{1}{0}$ "
    "\u202eevil\u2066 \x00\x1b[31m\x9b =cmd|'/C calc'!A0 <!--"
)
UNSEEN = "\u202e\u2066\x00\x1b\x9b\u200b\ufeff"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compare_folder(tmp_path_factory.mktemp("compare") / "code", epochs=60)


@pytest.fixture(scope="module")
def page(compared: Path) -> Page:
    return Page(write_report([compared], compared / "report.html"))


@pytest.fixture
def _unpainted() -> Iterator[None]:
    """For tests of words and tables. Others paint every kind of figure, also of runs with parts missing or damaged."""
    with unpainted():
        yield


UNPAINTED = pytest.mark.usefixtures("_unpainted")


class Page(HTMLParser):
    """A page's elements, their attributes and text, as a browser would find them."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside: list[str] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag = self.inside[-1] if self.inside else ""
        self.raw.get(tag, self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def ids(self) -> list[str]:
        return [attrs["id"] or "" for _, attrs in self.elements if "id" in attrs]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


# What it holds.


def test_epochs_and_evaluations_stand_on_one_axis(tmp_path: Path) -> None:
    study = read_study([run_folder(tmp_path / "run", epochs=20)])
    (group,), clock = study.groups, clock_of(study)
    assert clock.label == "training samples"
    assert logged(group, "ess", clock).x == tuple(512.0 * epoch for epoch in range(1, 21))
    assert evaluated(group, "satisfaction", clock).x == tuple(512.0 * epoch for epoch in range(0, 21, 2))


def test_the_curve_over_seeds_stays_while_one_of_them_is_unfinished(tmp_path: Path) -> None:
    whole, part = (run_folder(tmp_path / f"cdpg-seed{seed}", epochs=200, seed=seed) for seed in range(2))
    lines = (part / "metrics.jsonl").read_text().splitlines(keepends=True)
    (part / "metrics.jsonl").write_text("".join(lines[:130]))
    study = read_study([whole, part])
    (group,), clock = study.groups, clock_of(study)
    series = logged(group, "ess", clock)
    assert len(series.x) == 33 and series.x[:2] == (512 * 2.5, 512 * 6.5), "130 epochs in bins of 4"
    values = [[json.loads(line)["ess"] for line in (run / "metrics.jsonl").open()][:4] for run in (whole, part)]
    assert series.y[0] == pytest.approx(np.mean(values))
    assert (series.low[0], series.high[0]) == pytest.approx(sorted(map(np.mean, values)))
    (part / "metrics.jsonl").write_text("")
    assert logged(read_study([whole, part]).groups[0], "ess", clock).x[-1] == 512 * 198


def test_a_comparison_has_every_table_figure_and_sample(page: Page) -> None:
    ids = page.ids()
    for name in ("requirement", "outputs", "sampling", "versus-ideal", "costs"):
        assert f"t-{name}" in ids
    for name in (
        "training-satisfaction", "training-kl-target-policy-pooled", "training-compilability", "training-ast-nodes",
        "satisfaction-against-kl", "frequency-compile-outcome", "frequency-pep8-code", "token-rank", "partition-nstd",
        "partition-by-context", "importance-weights", "effective-sample-size", "time",
    ):  # fmt: skip
        assert f"f-{name}" in ids, name
    assert page.count("svg") == page.count("figure") == sum(identifier.startswith("f-") for identifier in ids)
    assert len(set(ids)) == len(ids), "an identifier stands twice: clips and markers would be mixed up"
    for words in (
        "cdpg compare code-compilability --preset tiny --seed 7",
        "seed 0",
        "torch 2.13.0",
        "500 held-out contexts",
    ):
        assert words in page.text
    assert page.text.count("✗ not satisfied") == 5 and page.text.count("✓ satisfied") == 10


def test_the_page_asks_for_nothing_and_allows_its_own_script_and_style_alone(page: Page) -> None:
    policy = next(a["content"] or "" for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    for tag, attributes in page.elements:
        assert tag not in {"img", "iframe", "object", "embed", "form", "base", "audio", "video"}
        for name, value in attributes.items():
            assert name != "style" and not name.startswith("on"), (tag, name)
            if name in ("href", "src"):
                assert (value or "").startswith(("#", "data:,")), value
    addresses = set(re.findall(r"https?://[^\"' <]+", page.source))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a name space is no request"


def test_the_policy_has_the_hashes_of_what_is_there(page: Page) -> None:
    policy = next(a["content"] or "" for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    scripts = page.raw["script"]
    assert len(scripts) == 2 and len(page.raw["style"]) == 1
    for kind, content in (("script", scripts[1]), ("style", page.raw["style"][0])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_a_report_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    report = tmp_path / "new" / "report.html"
    monkeypatch.setattr(files, "sync", lambda path: synced.append((path.name, report.exists())))
    write_whole(report, b"whole")
    assert [(name == "new", there) for name, there in synced] == [(False, False), (True, True)]
    assert [path.name for path in report.parent.iterdir()] == ["report.html"] and report.read_bytes() == b"whole"


def test_the_report_is_made_without_torch_and_is_the_same_each_time(page: Page, compared: Path, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "from pathlib import Path; import cdpg; from cdpg.report import write_report\n"
        "from unpainted import is_one_of_a_kind, painted_if\n"
        "with painted_if(is_one_of_a_kind):\n"
        f"    write_report([Path({str(compared)!r})], Path({str(tmp_path / 'r.html')!r}))\n"
        "sys.exit(' '.join({'torch', 'transformers', 'matplotlib.pyplot', 'spacy'} & set(sys.modules)) or None)"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stderr) == (0, "")
    made = [re.split(r"(<svg.*?</svg>)", text) for text in (page.source, (tmp_path / "r.html").read_text("utf-8"))]
    assert made[0][::2] == made[1][::2]
    painted = [(first, again) for first, again in zip(made[0][1::2], made[1][1::2], strict=True) if again != EMPTY]
    assert len(painted) >= 10 and all(first == again for first, again in painted)


@UNPAINTED
@pytest.mark.parametrize("task", ordinary(["translation-numbers", "summarization-entities"], "summarization-entities"))
def test_tasks_with_prose(task: str, tmp_path: Path) -> None:
    page = Page(write_report([compare_folder(tmp_path / "runs", task, epochs=20)], tmp_path / "report.html"))
    kinds = {attributes.get("class") for tag, attributes in page.elements if tag == "mark"}
    assert kinds == {"name", "num"}
    assert ("f-frequency-entity-label" in page.ids()) == task.startswith("summ")
    assert "beam search" in page.text


def test_training_samples_of_the_base_are_called_so(tmp_path: Path) -> None:
    """Without an evaluation, figures and samples are of the epochs: of ``rft`` they do not show what it has learnt."""
    runs = [run_folder(tmp_path / name, name, epochs=20) for name in ("cdpg", "reinforce")]
    for run in runs:
        for name in ("evaluation.json", "evaluations.jsonl"):
            (run / name).unlink()

    def said() -> tuple[set[str], set[str], list[str]]:
        study = read_study(runs)
        captions = {c.caption for c in figures_of(study) if c.name.startswith("training-") and "KL" not in c.title}
        notes = {o.note for example in samples_of(study).examples for o in example.outputs if o.model == "reinforce"}
        return captions, notes, [topics for why, topics in diagnose(study).unjudged if "the base's" in why]

    captions, notes, moving = said()
    assert all(caption.endswith("From the training samples.") for caption in captions)
    assert (notes, moving) == ({"training sample"}, [])
    metrics = [json.loads(line) | {"samples_of_base": True} for line in (runs[1] / "metrics.jsonl").open()]
    write_lines(runs[1] / "metrics.jsonl", metrics)
    captions, notes, moving = said()
    assert captions and all("Those of reinforce are the base's own" in caption for caption in captions)
    assert notes == {"training sample of the base"}
    assert moving == ["change of satisfaction between the last two tenths of the run (reinforce)"]


@UNPAINTED
def test_several_runs_are_put_side_by_side(tmp_path: Path) -> None:
    runs = [run_folder(tmp_path / name, name, epochs=20) for name in ("cdpg", "reinforce")]
    study = read_study(runs)
    assert study.models == ("base", "cdpg", "reinforce")
    examples = study.evaluation["examples"]
    assert len(examples) == 3 and all(
        list(example["outputs"]) and set(example["outputs"]) == {"base", "cdpg", "reinforce"} for example in examples
    )
    assert study.change("reinforce", "satisfaction").mean == pytest.approx(0.55, abs=0.02)  # type: ignore[union-attr]
    assert write_report(runs, tmp_path / "report.html").is_file()
    assert write_report(str(runs[0]), str(tmp_path / "one.html")) == tmp_path / "one.html"  # a folder needs no list


@UNPAINTED
def test_pooled_figures_of_several_pools_stand_in_no_table(tmp_path: Path) -> None:
    runs = [run_folder(tmp_path / name, name, epochs=20) for name in ("cdpg", "reinforce")]
    assert POOLED in read_study(runs).metrics, "the base has one value in both: they are of one pool"
    content = json.loads((runs[1] / "evaluation.json").read_text())
    content["base"][POOLED]["mean"] += 0.01
    write_json(runs[1] / "evaluation.json", content)
    page = Page(write_report(runs, tmp_path / "report.html"))
    study = read_study(runs)
    assert POOLED not in study.metrics and study.change("cdpg", POOLED) is None
    assert not any(POOLED in table.csv for table in tables_of(study))
    assert "cdpg compare evaluates runs with one pool for all" in page.text
    assert "KL(p, π), pooled0.62 → 0.31 nats" in page.text, "each card has that of its own pool, beside the base's"
    assert "one pool for all" not in Page(write_report(runs[:1], tmp_path / "one.html")).text
    assert POOLED in read_study(runs[1:]).metrics


def test_seeds_are_one_line_and_a_table(tmp_path: Path) -> None:
    study = read_study([compare_folder(tmp_path / "runs", epochs=20, seeds=3)])
    assert [(group.label, len(group.runs)) for group in study.groups] == [(method, 3) for method in METHODS]
    table = next(table for table in tables_of(study) if table.name == "seeds")
    assert [row.name for row in table.rows] == list(METHODS)
    assert study.label_of("cdpg-seed1") == "cdpg-seed1"


def test_runs_with_other_settings_are_lines_of_their_own(tmp_path: Path) -> None:
    one, two = (run_folder(tmp_path / name, epochs=20) for name in ("first", "second"))
    change_config(two, num_generations=64)
    study = read_study([one, two])
    assert [group.label for group in study.groups] == ["first", "second"]
    assert study.groups[0].style == methods.METHODS["cdpg"].style != study.groups[1].style


def test_runs_whose_long_names_begin_alike_are_distinguished(tmp_path: Path) -> None:
    names = [f"translation-numbers-of-europarl-rate-{rate}" for rate in ("1e-4", "1e-5")]
    for name, rate in zip(names, (1e-4, 1e-5), strict=True):
        run = run_folder(tmp_path / name, epochs=20)
        change_config(run, learning_rate=rate)
    study = read_study([tmp_path])
    labels = [group.label for group in study.groups]
    assert (
        labels == ["transl…uroparl-rate-1e-4", "transl…uroparl-rate-1e-5"] == [study.label_of(name) for name in names]
    )
    for table in tables_of(study):
        assert [row.name for row in table.rows if not row.quiet] == labels
    charts = {chart.name: chart.draw.keywords for chart in figures_of(study) if hasattr(chart.draw, "keywords")}
    assert list(charts["time"]["rows"]) == labels
    assert list(charts["frequency-compile-outcome"]["values"]) == ["base", *labels]


def test_seeds_whose_long_names_begin_alike_are_distinguished(tmp_path: Path) -> None:
    for seed in range(2):
        run_folder(tmp_path / f"a-sentence-to-name-a-run-by-is-long-indeed-seed{seed}", epochs=20, seed=seed)
    study = read_study([tmp_path])
    (group,) = study.groups
    assert [study.label_of(model)[-5:] for model in group.models] == ["seed0", "seed1"]
    table = next(table for table in tables_of(study) if table.name == "requirement")
    assert len({row.name for row in table.rows}) == len(table.rows)


def test_labels_are_no_one_elses(tmp_path: Path) -> None:
    """Not the base's, not another method's, not those of runs that are no seeds of one another."""
    for place, name in enumerate(("x-seed0", "x-seed1", "dpg")):
        run = run_folder(tmp_path / name, epochs=20)
        change_config(run, num_generations=8 + place)
    run_folder(tmp_path / "other", "dpg", epochs=20)
    (run_folder(tmp_path / "base", epochs=20) / "config.yaml").unlink()
    study = read_study([tmp_path])
    assert [group.label for group in study.groups] == ["dpg", "x-seed0", "x-seed1", "dpg (2)", "base (2)"]
    assert len({study.label_of(model) for model in study.models}) == len(study.models) == 6


@pytest.mark.parametrize("part", ["samples.jsonl", pytest.param("", marks=pytest.mark.exhaustive, id="all")])
def test_figures_for_a_paper(part: str, compared: Path, tmp_path: Path) -> None:
    """Those of one file, or of a whole comparison: a page in PDF takes longer than one in SVG."""
    folder = compared
    if part:
        folder = tmp_path / "cdpg"
        folder.mkdir()
        shutil.copy(compared / "cdpg" / part, folder / part)
    files = write_figures([folder], tmp_path / "figures")
    names = {chart.name for chart in figures_of(read_study([folder]))}
    assert len(names) >= (1 if part else 15)
    assert {file.name for file in files} == {f"{name}.{kind}" for name in names for kind in ("pdf", "png")}
    for file in files:
        assert file.read_bytes()[:4] == (b"%PDF" if file.suffix == ".pdf" else b"\x89PNG")


def test_matplotlib_is_left_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    run = run_folder(tmp_path / "run", epochs=4)
    for name in ("evaluation.json", "evaluations.jsonl", "metrics.jsonl"):
        (run / name).unlink()
    assert figures_of(read_study([run])), "there is something to draw"
    write_report([run], tmp_path / "report.html")
    assert dict(matplotlib.rcParams) == before


def test_axes_carry_units_and_lines_their_names(page: Page) -> None:
    labels = re.findall(r"<text [^>]*>([^<]+)</text>", page.source)
    for label in ("training samples", "KL(π, a) (nats)", "length (tokens)", "minutes", "share of functions"):
        assert label in labels or (label == "minutes" and "seconds" in labels), label
    assert all(labels.count(method) > 10 for method in METHODS)


# The table.


def test_the_best_is_marked_and_the_base_is_not_ranked(compared: Path) -> None:
    table = next(table for table in tables_of(read_study([compared])) if table.name == "requirement")
    best = {
        column.title: [row.name for row in table.rows if row.cells[place].best]
        for place, column in enumerate(table.columns)
    }
    assert best["satisfaction"] == ["reinforce"]
    assert best["KL(p, π), pooled (nats)"] == ["cdpg"]
    assert best["KL(π, a) (nats)"] == [], "a price, not a merit"
    assert all(cell.change == "" for cell in table.rows[0].cells) and table.rows[0].quiet
    assert table.rows[1].cells[0].change.startswith("+0.28") and "[" in table.rows[1].cells[0].change


def test_one_tuned_model_is_not_called_best(tmp_path: Path) -> None:
    tables = tables_of(read_study([run_folder(tmp_path / "run", epochs=20)]))
    assert not any(cell.best or cell.near for table in tables for row in table.rows for cell in row.cells)


def test_numbers_are_written_so_that_they_can_be_read() -> None:
    assert [written(0.12345, 3), written(-0.5, 1), written(0.0004, 3), written(0.0, 2)] == [
        "0.123",
        "−0.5",
        "0.0004",
        "0.00",
    ]
    assert written(-1e-12, 3) == "0.00000000" and written(12345.6, 1, signed=True) == "+12,345.6"
    assert [duration(4.12), duration(200), duration(4320)] == ["4.1 s", "3 min 20 s", "1 h 12 min"]


@pytest.mark.parametrize(
    "cell", ["=1+1", "+1+1", "-2+3", "@SUM(A1)", " =1", "\t=1", "=cmd|'/C calc'!A0", "＝1", "-x", "\r=1"]
)
def test_formulas_are_neutralised(cell: str) -> None:
    (row,) = csv.reader(io.StringIO(to_csv([[cell, 'a "quoted", cell']]), newline=""))
    assert not row[0].lstrip().startswith(("=", "+", "-", "@", "＝")) and row[1] == 'a "quoted", cell'


def test_formulas_after_a_semicolon_are_neutralised() -> None:
    assert neutral('x;=HYPERLINK("y");-2; @z') == "x;'=HYPERLINK(\"y\");-2;' @z"


def test_numbers_stay_numbers_in_a_spreadsheet() -> None:
    assert [neutral(-0.25), neutral("-0.25"), neutral("+3e-5"), neutral(None), neutral(7)] == [
        "-0.25",
        "-0.25",
        "+3e-5",
        "",
        "7",
    ]


def test_every_table_has_its_csv(page: Page) -> None:
    tables = json.loads(page.raw["script"][0])
    buttons = {attributes["data-csv"] for _, attributes in page.elements if "data-csv" in attributes}
    assert buttons == set(tables) and "requirement" in tables
    rows = list(csv.DictReader(io.StringIO(tables["requirement"], newline="")))
    assert [row["model"] for row in rows] == ["base", *METHODS, "ideal"]
    assert float(rows[1]["satisfaction"]) == pytest.approx(0.66, abs=0.01) and rows[0]["satisfaction change"] == ""
    rows = list(csv.DictReader(io.StringIO(tables["between"], newline="")))
    assert [row["model"] for row in rows] == list(METHODS[1:])
    assert float(rows[1]["satisfaction low"]) < float(rows[1]["satisfaction"]) < float(rows[1]["satisfaction high"])
    assert f"Differences from {METHODS[0]}, paired by context" in page.text


# Untrusted text.


def _poison(value: Any) -> Any:
    """The same structure with every text replaced or followed by hostile text, keys included."""
    if isinstance(value, dict):
        return {(key if key in _KEPT else f"{key}{HOSTILE}"): _poison(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_poison(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


_KEPT = frozenset(
    "models base tuned changes frequencies examples outputs costs partition mean low high text prompt columns b "
    "decoding outcome difference epoch metrics samples row versions command completion log_z log_ratio "
    "satisfaction seconds ideal versus_ideal task contexts compile_outcome entity_label token_rank seeds coverage "
    "ess confidence origin method model seed config length kl_policy_base".split()
)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "a<b onclick=x>$x$ ='"
    for task, name in (("code-compilability", "code"), ("summarization-entities", "prose")):
        run = run_folder(folder / name, epochs=20, task=task)
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump({**_poison(config), "method": f"m{name}{HOSTILE}"}))
        evaluation = json.loads((run / "evaluation.json").read_text())
        write_json(
            run / "evaluation.json",
            {**_poison(evaluation), "task": f"code {HOSTILE}", "seeds": {HOSTILE: {HOSTILE: {"mean": 1}}}},
        )
        for file in ("samples.jsonl", "evaluations.jsonl", "metrics.jsonl"):
            records = [json.loads(line) for line in (run / file).read_text().splitlines()]
            write_lines(run / file, [_poison(record) for record in records])
    return folder


def test_hostile_text_stays_text(poisoned: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def is_new(name: str) -> bool:
        seen.append(re.sub(r"block-\d-", "", name))
        return seen.count(seen[-1]) == 1

    with painted_if(is_new):
        page = Page(write_report([poisoned], tmp_path / "report.html"))
    assert len(seen) > len(set(seen)) > 25, "what both runs have is painted once"
    assert page.count("script") == 2 and page.count("img") == 0
    assert not any(name.startswith("on") or name == "style" for _, attributes in page.elements for name in attributes)
    assert "onerror=window.pwned=1>" in page.text, "the text itself is shown"
    assert "{{7*7}}" in page.text and "$\\frac{1}{0}$" in page.text
    assert not set(UNSEEN) & set(page.source)
    assert "⟨U+202E⟩" in page.text and "␛" in page.text
    json.loads(page.raw["script"][0])
    assert "<" not in page.raw["script"][0]


def test_hostile_text_in_csv(poisoned: Path) -> None:
    for table in (table for study in read_studies([poisoned]) for table in tables_of(study)):
        for row in csv.reader(io.StringIO(table.csv, newline="")):
            for cell in row:
                assert not cell.lstrip().startswith(("=", "@")) and not set(UNSEEN) & set(cell)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["evaluation.json", pytest.param("", id="all")])
def test_hostile_text_in_figures(part: str, poisoned: Path, tmp_path: Path) -> None:
    """Those of one run's evaluation, whose texts name figures and bars, or all of two runs."""
    folder = poisoned
    if part:
        folder = tmp_path / poisoned.name
        folder.mkdir()
        shutil.copy(poisoned / "code" / part, folder / part)
    files = write_figures([folder], tmp_path / "figures")
    assert files and all(
        file.parent == tmp_path / "figures" and re.fullmatch(r"[a-z0-9.-]+", file.name) for file in files
    )


def test_nothing_in_a_figure_is_read_as_mathematics(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=20)
    content = json.loads((run / "evaluation.json").read_text())
    names = ["$\\nosuch{$", "$x^2$", "\\$5", "a_b"]
    content["frequencies"] = {"tuned": {"$\\frac{1}$": dict.fromkeys(names, 3)}}
    write_json(run / "evaluation.json", content)
    chart = next(chart for chart in figures_of(read_study([run])) if chart.name.startswith("frequency"))
    labels = re.findall(r"<text [^>]*>([^<]+)</text>", to_svg(chart))
    assert set(names) <= set(labels)


def test_outcomes_that_begin_alike_are_counted_each_by_its_own_name(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=20)
    content = json.loads((run / "evaluation.json").read_text())
    start = "closing parenthesis does not match opening "
    counts = {"ok": 5, f"{start}'['": 3, f"{start}'{{'": 2, " ok": 6}
    content["frequencies"] = {"tuned": {"compile_outcome": counts}}
    write_json(run / "evaluation.json", content)
    chart = next(chart for chart in figures_of(read_study([run])) if chart.name.startswith("frequency"))
    (shown,) = chart.draw.keywords["values"].values()  # type: ignore[attr-defined]
    assert list(shown.values()) == [6 / 16, 5 / 16, 3 / 16, 2 / 16]
    assert list(shown)[:2] == ["ok", "ok (2)"] and [name[-3:] for name in list(shown)[2:]] == ["'['", "'{'"]


@pytest.mark.parametrize(
    "text",
    [HOSTILE, "\ud800", "a\u200bb", "x" * 100_000, "'" * 5000 + "\\", '"""' * 2000 + "\\", "\\" * 5001, "(" * 5000],
)
def test_highlighting_hostile_text_is_quick_and_safe(text: str) -> None:
    start = time.process_time()
    shown = str(prose(text, text)) + str(python(text, 1)) + str(python(f"def f():\n    '''{text}"))
    assert time.process_time() - start < 2
    shown.encode("utf-8")
    assert set(re.findall(r"<(\w+)", shown)) <= {"span", "mark"}
    assert not set(UNSEEN) & set(shown)


def test_names_of_the_source_and_numerals_are_marked() -> None:
    source = "The mayor of Lyon, Jeanne Favre, met three delegates."
    shown = prose("Yesterday Jeanne Favre of Lyon met 3 of the three, not 2,000. The Mayor of Paris", source)
    assert re.findall(r'<mark class="name">(.*?)</mark>', shown) == ["Jeanne Favre", "Lyon", "Mayor"]
    assert re.findall(r'<mark class="num">(.*?)</mark>', shown) == ["3", "three", "2,000"]


def test_python_in_colours_keeps_every_character() -> None:
    code = 'def f(x):  # twice\n    """Doc."""\n    return len(x) * 2 if x else "a\\"b"\n'
    shown = str(python(code, 3))
    assert HTMLText(shown).text == code
    found = re.findall(r'<span class="(\w+)">([^<]*)</span>', shown)
    assert ("kw", "def") in found and ("def", "f") in found and ("com", "# twice") in found and ("fun", "len") in found
    assert ("lit", "2") in found and shown.count('class="wrong"') == 1


class HTMLText(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.feed(source)
        self.close()

    def handle_data(self, data: str) -> None:
        self.text += data


def test_what_cannot_be_seen_is_spelt_out() -> None:
    assert visible("a\u202eb\x00c\ud800\u200d") == "a⟨U+202E⟩b␀c⟨U+D800⟩⟨U+200D⟩"
    assert visible("naïve 漢字 عربى\n\tx") == "naïve 漢字 عربى\n\tx"
    assert short("a\nb" * 100, 10) == "a ba ba b…" and len(short("x" * 100)) == 40


def test_names_stay_different_when_they_are_cut() -> None:
    names = [f"{'x' * 30}-{end}" for end in ("first", "second")] + ["y" * 30, "z", "z", f"{'x' * 19}…"]
    shown = distinct(names, 20)
    assert shown == ["xxxxx…xxxxxxxx-first", "xxxxx…xxxxxxx-second", f"{'y' * 19}…", "z", "z (2)", f"{'x' * 19}…"]
    assert distinct(["a" * 50, "a" * 50], 20) == [f"{'a' * 19}…", f"{'a' * 19}… (2)"]
    far = [f"{'a' * 50}{'b' * place}c{'d' * 50}" for place in range(20)]
    assert len(set(distinct(far, 20))) == 20


CHAT = [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "How many,\nplease?"}]


def test_chats_are_written_with_their_roles() -> None:
    assert text(CHAT) == "system: Answer in French.\n\nuser: How many,\nplease?"
    assert text(CHAT, 10) == "system: An … (40 more characters)"
    assert text([{"role": "user", "content": None}]) == "{'role': 'user', 'content': None}", "no chat"
    assert text(["a", 2]) == "a, 2" and text([]) == ""


@pytest.mark.parametrize("held_out", [True, False])
def test_samples_of_chats_are_shown(held_out: bool, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=20, task="translation-numbers")
    if held_out:
        content = json.loads((run / "evaluation.json").read_text())
        write_json(run / "evaluation.json", {**content, "examples": [{**content["examples"][0], "prompt": CHAT}]})
    else:
        (run / "evaluation.json").unlink()
        other = [*CHAT[:1], {"role": "user", "content": "And now?"}]
        given = [{"epoch": 20, "prompt": prompt, "completion": "Trois.", "b": 1.0} for prompt in (CHAT, other, CHAT)]
        write_lines(run / "samples.jsonl", given)
    examples = samples_of(read_study([run])).examples
    assert str(examples[0].prompt) == "system: Answer in French.\n\nuser: How many,\nplease?"
    assert [len(example.outputs) for example in examples] == ([2] if held_out else [2, 1])


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf"), 10**400, 1e300, [], {}])
def test_what_is_no_number_is_nothing(value: Any) -> None:
    assert number(value) is None and interval({"mean": value, "low": 0, "high": 1}) is None


def test_intervals() -> None:
    assert interval({"mean": 1, "low": 0, "high": 2}) == MeanInterval(1, 0, 2)
    assert (
        interval({"mean": 1, "low": None, "high": 2}) == interval({"mean": 1, "low": 3, "high": 2}) == MeanInterval(1)
    )


# Parts missing.


FILES = ("evaluation.json", "evaluations.jsonl", "metrics.jsonl", "samples.jsonl", "config.yaml")


@UNPAINTED
@pytest.mark.parametrize("missing", ordinary(FILES, "evaluations.jsonl", "config.yaml"))
def test_a_run_without_one_of_its_files(missing: str, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=20)
    (run / missing).unlink()
    page = Page(write_report([run], tmp_path / "report.html"))
    assert page.count("svg") >= 4 and "How to repeat it" in page.text
    if missing == "evaluation.json":
        assert "has no evaluation.json" in page.text and "The last training samples" in page.text


@pytest.mark.parametrize("only", ordinary(FILES, "evaluation.json", "metrics.jsonl"))
def test_a_run_with_one_file_alone(only: str, tmp_path: Path) -> None:
    full, run = run_folder(tmp_path / "full", epochs=20), tmp_path / "run"
    run.mkdir()
    shutil.copy(full / only, run / only)
    with painted_if(is_one_of_a_kind):
        page = write_report([run], tmp_path / "report.html")
    assert Page(page).count("h1") == 1


@UNPAINTED
def test_an_unfinished_comparison(tmp_path: Path) -> None:
    folder = compare_folder(tmp_path / "compare", epochs=40)
    (folder / "comparison.json").unlink()
    for method in ("dpg", "reinforce", "ziegler"):
        (folder / method / "evaluation.json").unlink()
    shutil.rmtree(folder / "ziegler")
    lines = (folder / "dpg" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "dpg" / "metrics.jsonl").write_text(
        "".join([*lines[:4], '{"epoch": 5, "cut', "\n", *lines[5:11], lines[11][:30]])
    )
    page = Page(write_report([folder], tmp_path / "report.html"))
    assert "10 of 40 epochs are logged" in page.text
    assert "2 lines of dpg/metrics.jsonl could not be read" in page.text


def test_a_run_that_the_comparison_does_not_hold_is_named(tmp_path: Path) -> None:
    folder = compare_folder(tmp_path / "compare", epochs=20)
    assert read_study([folder]).notes == ()
    late = "a-run-that-was-put-into-the-folder-after-the-comparison-was-made"
    run_folder(folder / late, epochs=20, seed=3)
    (note,) = read_study([folder]).notes
    assert note == f"{late} is not in comparison.json: it is missing from the tables of the evaluation"


SOME = (None,)
MORE = ("text", -1, [None], [], {}, 0, True, {"x": None}, 1e300, [[[]]])


@pytest.mark.parametrize("value", [*SOME, *(pytest.param(value, marks=pytest.mark.exhaustive) for value in MORE)])
def test_anything_anywhere(value: Any, tmp_path: Path) -> None:
    folder = compare_folder(tmp_path / "compare", epochs=10)
    whole = json.loads((folder / "comparison.json").read_text())
    for key in whole:
        write_json(folder / "comparison.json", {**whole, key: value})
        for study in read_studies([folder]):
            tables_of(study), figures_of(study), diagnose(study)
    inner = {key: dict.fromkeys(item, value) if isinstance(item, dict) else value for key, item in whole.items()}
    write_json(folder / "comparison.json", {**inner, "task": None})
    for run in METHODS:
        for file in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl"):
            records = [json.loads(line) for line in (folder / run / file).read_text().splitlines()[:3]]
            write_lines(folder / run / file, [dict.fromkeys(record, value) for record in records])
        write_json(folder / run / "evaluation.json", value)
    assert write_report([folder], tmp_path / "report.html").is_file()


def test_metrics_that_nothing_describes(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=20)
    record = {"epoch": 1, "metrics": {"": {"mean": 1}, " ": {"mean": 1}, "(x": {"mean": 1}}}
    write_lines(run / "evaluations.jsonl", [record, {**record, "epoch": 2}])
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation["tuned"]["politeness"] = {"mean": 0.5, "low": 0.4, "high": 0.6}
    evaluation["frequencies"]["tuned"][""] = {"": 1, " ": 2}
    write_json(run / "evaluation.json", evaluation)
    page = Page(write_report([run], tmp_path / "report.html"))
    assert "politeness" in page.text and "Other metrics" in page.text


@UNPAINTED
def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run was given"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(UserError, match="is not a folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(UserError, match="holds no run"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(UserError, match="is a folder"):
        write_report([run_folder(tmp_path / "run", epochs=10)], tmp_path)


# Numbers for the figures.


def test_a_run_logs_the_base_of_every_pool(tmp_path: Path) -> None:
    """KL(p_c, a) = −log Z_c; the first line is of the base alone, which makes no pool."""
    base, contexts = tabular(seed=5), contexts_of(2)
    universe = Universe.of(base, contexts)
    b = universe.satisfied(lambda prompt, text: "a" in text)
    exact = float(-(universe.log_prob(base).exp() * b).sum(dim=1).log().mean())

    def has_a(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        return ["a" in text for text in completions]

    settings = {"epochs": 2, "contexts_per_epoch": 2, "num_generations": 20, "evaluation_samples": 2000}
    settings["check_workers"] = 0
    config = CDPGConfig(output_dir=str(tmp_path), max_completion_length=MAX_LENGTH, device="cpu", **settings)  # type: ignore[arg-type]
    CDPGTrainer(base, has_a, config, contexts, contexts).train()
    records = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [POOLED in record["metrics"] for record in records] == [False, True, True]
    assert "base" not in records[0] and [list(record["base"]) for record in records[1:]] == [[POOLED]] * 2
    assert [record["base"][POOLED]["mean"] for record in records[1:]] == pytest.approx([exact] * 2, abs=0.05)


@pytest.mark.parametrize("base", [0.9, None])
def test_a_curve_and_its_base_are_of_the_same_contexts_and_pools(base: float | None, tmp_path: Path) -> None:
    study = read_study([run_with_pooled(tmp_path / "run", base, [0.8, 0.6], (0.95, 0.45))])
    drawn = {chart.name: chart.draw.keywords for chart in figures_of(study) if chart.section == "training"}  # type: ignore[attr-defined]
    pooled, satisfaction = drawn["training-kl-target-policy-pooled"], drawn["training-satisfaction"]
    assert pooled["lines"][0].series.y == (0.8, 0.6) and pooled["base"] == base
    assert satisfaction["lines"][0].series.y == (0.3, 0.4, 0.4) and satisfaction["base"] == 0.3


def test_weights_are_those_of_the_second_half(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=20)
    write_lines(run / "samples.jsonl", [
        {"epoch": 1, "log_ratio": 0.0, "log_z": 0.0},
        {"epoch": 9, "log_ratio": float(np.log(1000)), "log_z": float(np.log(10))},
        {"epoch": 10, "log_ratio": None, "log_z": 0.0},
    ])  # fmt: skip
    assert log10_weights(read_study([run]).groups[0]) == pytest.approx([2.0])


def test_time_is_all_accounted_for(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=20)
    write_lines(
        run / "metrics.jsonl",
        [{"epoch": 1, "seconds": 10, "seconds_sampling": 4, "seconds_gradient": 3, "seconds_base": None}],
    )
    write_lines(run / "evaluations.jsonl", [{"epoch": 0, "seconds": 2}])
    spent = seconds_by_stage(read_study([run]).runs[0], STAGES)
    assert {key: value for key, value in spent.items() if value} == {
        "sampling": 4,
        "gradient": 3,
        "evaluation": 2,
        "other": 3,
    }


def test_thinning_keeps_the_ends() -> None:
    values = [float(n) for n in range(50_000)]
    for logarithmic in (False, True):
        points = thinned(values, 160, logarithmic)
        assert len(points) <= 160 and points[0] == (0, 0.0) and points[-1] == (49_999, 49_999.0)


@pytest.mark.parametrize("wanted", [[0.5, 0.5, 0.5], [0.0, 0.01, 0.9], [1.0, 1.0], [0.2], []])
def test_names_are_moved_apart_and_keep_their_order(wanted: list[float]) -> None:
    places = spread(wanted, 0.1, 0.0, 1.0)
    assert sorted(range(len(wanted)), key=lambda n: wanted[n]) == sorted(range(len(wanted)), key=lambda n: places[n])
    ordered = sorted(places)
    assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert not places or (ordered[0] >= -1e-9 and ordered[-1] <= 1 + 1e-9)


# Colours.

_SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}
"""Simulation matrices (Machado, Oliveira and Fernandes, 2009) on linear RGB."""


def _linear(color: str) -> np.ndarray:
    values = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(
        linear, 0, 1
    )
    f = np.cbrt(xyz / np.array([0.9505, 1, 1.089]))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", _SIGHT)
@pytest.mark.parametrize("page", ["light", "dark"])
def test_methods_can_be_distinguished_by_every_kind_of_sight(sight: str, page: str) -> None:
    styles = [BASE, *(method.style for method in methods.METHODS.values())]
    seen = [_lab(_SIGHT[sight] @ _linear(style.color if page == "light" else style.dark)) for style in styles]
    nearest = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))
    assert nearest > 14


def test_every_colour_of_the_figures_has_a_twin_for_dark_pages(page: Page) -> None:
    drawn = {
        value for tag, attributes in page.elements for key, value in attributes.items() if key in ("fill", "stroke")
    }
    assert {color for color in drawn if color and color.startswith("#")} <= set(dark_twins())
