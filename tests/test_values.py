"""Every number that a command leaves behind, against a second computation of the whole run (tests/reference).

One comparison of all methods in one process, and a run of each method in two. The expected numbers come from the
model's weights, the contexts, the constraint and the settings alone: also the samples, from the documented random
numbers.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from fcntl import LOCK_EX, flock
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import values
import warm
from cdpg.report import write_report
from reference.evaluation import Evaluation, ideal_samples
from reference.methods import Settings
from reference.model import END
from reference.randomness import shuffled
from reference.target import divided
from reference.training import Run, train
from shown import Page, figures_seen, matches, numbers, points
from values import EXACT, METHODS, differences, without

PER_EPOCH = 24
"""Samples: 4 contexts, 6 of each."""
UNPREDICTABLE = ("command", "versions", "task", "of_saved_model")
LOST = re.compile(r"([a-z]+): (the check failed on|no constraint applies to) ([\d,]+) of ([\d,]+) samples, .*")


class Expected:
    """The reference's runs, each made when it is first asked for."""

    def __init__(self, folder: Path, runs: Path, held_out: tuple[str, ...], changes: dict[str, Any]) -> None:
        self.folder, self.runs, self._changes = folder, runs, changes
        self.held_out = values.contexts(held_out)
        self._known: dict[str, Run] = {}
        self._evaluations: dict[Any, Evaluation] = {}
        self.base = values.read_model(folder / "model")

    def settings(self, method: str = "cdpg") -> Settings:
        return values.settings(method, **self._changes)

    def run(self, method: str) -> Run:
        if method not in self._known:
            contexts = values.contexts(values.TRAINING)
            self._known[method] = train(self.base, contexts, values.judge, self.settings(method))
        return self._known[method]

    def evaluation(self, *methods: str, epoch: int | None = None) -> Evaluation:
        """Models beside the base on all held-out contexts, or some of them after an epoch of a run."""
        key = (methods, epoch)
        if key not in self._evaluations:
            limit = None if epoch is None else self.settings().evaluation_contexts
            contexts = self.held_out[:limit]
            tuned = {m: self.run(m).policy if epoch is None else self.run(m).along[epoch] for m in methods}
            models = {"base": self.base, **tuned}
            ideal = ideal_samples(self.base, contexts, values.judge, self.settings())
            self._evaluations[key] = Evaluation(models, contexts, values.judge, self.settings(), ideal)
        return self._evaluations[key]

    def along(self, method: str) -> dict[int, Evaluation]:
        """The evaluations during a run, that of the base first."""
        return {0: self.evaluation(epoch=0), **{e: self.evaluation(method, epoch=e) for e in self.run(method).along}}


class One(Expected):
    """``cdpg compare`` in this process."""

    @cached_property
    def figures(self) -> list[dict[str, Any]]:
        return list(json.loads((self.folder / "figures.json").read_text()))

    def figure(self, x: str, y: str) -> dict[str, Any]:
        """What was drawn over these axes, once."""
        (found,) = [figure for figure in self.figures if (figure["x"], figure["y"]) == (x, y)]
        return dict(found)

    @cached_property
    def page(self) -> Page:
        return Page((self.runs / "report.html").read_text(encoding="utf-8"))


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first of several test processes to come fills for all."""
    shared = factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared
    folder = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if not (folder / "done").exists():
            folder.mkdir()
            values.prepare(folder)
            make(folder)
            (folder / "done").touch()
    return folder


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> One:
    def make(folder: Path) -> None:
        from cdpg.cli import app

        started = time.perf_counter()
        with figures_seen(draws=False) as seen:
            words = values.command(
                "compare", folder, "held_out.jsonl", "--output-dir", str(folder / "runs"), check_workers=1
            )
            result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (result.output, result.exception)
        (folder / "figures.json").write_text(json.dumps(seen))
        (folder / "seconds").write_text(str(time.perf_counter() - started))

    folder = once(tmp_path_factory, "values-one", make)
    return One(folder, folder / "runs", values.HELD_OUT, {})


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Each half of the work in a process of its own, with what a launcher would have told it."""

    def make(folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = [
            subprocess.Popen(
                [warm.python(), values.__file__, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=240)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0, 0], outputs

    folder = once(tmp_path_factory, "values-two", make)
    return Expected(folder, folder / "two", values.FEW, values.OF_TWO)


@pytest.fixture(params=["one", "two"])
def runs(request: pytest.FixtureRequest) -> Expected:
    found: Expected = request.getfixturevalue(request.param)
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- training ---


@pytest.mark.parametrize("method", METHODS)
def test_metrics_of_every_epoch(runs: Expected, method: str) -> None:
    found = lines(runs.runs / method / "metrics.jsonl")
    times = [key for key in found[0] if key.startswith("seconds")]
    assert sorted(times) == ["seconds", *(f"seconds_{s}" for s in ("base", "constraint", "gradient", "sampling"))]
    assert differences([without(record, *times) for record in found], runs.run(method).metrics) == []
    for record in found:
        stages = [record[time] for time in times if time != "seconds"]
        assert min(stages) >= 0 and 0.5 * record["seconds"] < sum(stages) <= record["seconds"]


@pytest.mark.parametrize("method", METHODS)
def test_samples_of_every_epoch(runs: Expected, method: str) -> None:
    """All of them in one process; in two, some of the main one's, which has the first two contexts."""
    expected = []
    settings = runs.settings(method)
    for number, epoch in enumerate(runs.run(method).epochs, start=1):
        rows = range(epoch.b.size // (2 if runs.runs.name == "two" else 1))
        shown = sorted(shuffled(settings.seed, "samples", number, len(rows))[: settings.log_samples])
        for row in shown:
            context, sample = divmod(row, settings.num_generations)
            z, b = epoch.z[context], epoch.b[context, sample]
            expected.append(
                {
                    "epoch": number,
                    "row": epoch.contexts[context].row,
                    "sample": sample,
                    "prompt": epoch.contexts[context].prompt,
                    "completion": epoch.texts[row],
                    "token_ids": list(epoch.completions[row]),
                    "b": b if epoch.valid[context, sample] else None,
                    "log_q": epoch.log_q[context, sample],
                    "log_a": epoch.log_a[context, sample] if b else None,
                    "log_z": np.log(z) if z > 0 else None,
                    "log_ratio": epoch.log_ratio[context, sample] if b else None,
                    "tokens": len(epoch.completions[row]),
                    "ended": epoch.completions[row][-1] == END,
                }
            )
    assert differences(lines(runs.runs / method / "samples.jsonl"), expected) == []


@pytest.mark.parametrize("method", METHODS)
def test_an_example_of_every_failure(runs: Expected, method: str) -> None:
    """The first of each kind in each epoch; the texts of what happened are not compared."""
    expected = []
    for number, epoch in enumerate(runs.run(method).epochs, start=1):
        first: dict[str, int] = {}
        for row, kind in epoch.failures.items():
            first.setdefault(kind, row)
        for kind, row in first.items():
            context, sample = divmod(row, epoch.b.shape[1])
            expected.append(
                {
                    "epoch": number,
                    "row": epoch.contexts[context].row,
                    "sample": sample,
                    "constraint": "values_constraint:holds",
                    "kind": kind,
                    "prompt": epoch.contexts[context].prompt,
                    "completion": epoch.texts[row],
                    "token_ids": list(epoch.completions[row]),
                }
            )
    found = [without(record, "detail") for record in lines(runs.runs / method / "failures.jsonl")]
    assert differences(found, expected) == []


@pytest.mark.parametrize("method", METHODS)
def test_weights_and_moments_at_the_end(runs: Expected, method: str) -> None:
    run, folder = runs.run(method), runs.runs / method
    policy = without(run.policy, "value", "bias")
    assert weights_differ(values.read_model(folder / "model"), policy) == {}
    checkpoint = folder / "checkpoints" / f"epoch-{run.settings.epochs:06d}"
    tensors = load_file(checkpoint / "weights.safetensors")
    moments = load_file(checkpoint / "optimizer.safetensors")
    kinds = {"exp_avg": run.adam.first, "exp_avg_sq": run.adam.second}
    assert weights_differ(values.named(tensors, "policy."), policy) == {}
    for kind, expected in kinds.items():
        of_kind = {key.removesuffix(f".{kind}"): value for key, value in moments.items() if key.endswith(f".{kind}")}
        assert weights_differ(values.named(of_kind, "policy."), without(expected, "value", "bias")) == {}
        if method == "ziegler":
            head = {"value": of_kind["objective.weight"][0], "bias": of_kind["objective.bias"]}
            assert weights_differ(head, {name: expected[name] for name in head}) == {}
    if method == "ziegler":
        head = {"value": tensors["objective.weight"][0], "bias": tensors["objective.bias"]}
        assert weights_differ(head, {name: run.policy[name] for name in head}) == {}
        assert np.abs(head["value"]).max() > 0.05
    assert {float(value) for key, value in moments.items() if key.endswith(".step")} == {run.adam.steps}
    state = json.loads((checkpoint / "state.json").read_text())["objective"]
    assert differences(state, run.state) == []


def weights_differ(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """The largest difference of each array that has one; a shape or a name that differs is an error."""
    assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in expected.items()}
    gaps = {name: float(np.abs(found[name] - expected[name]).max()) for name in expected}
    return {name: gap for name, gap in gaps.items() if gap > EXACT}


# --- evaluation ---


@pytest.mark.parametrize("method", METHODS)
def test_evaluations_along_the_run(runs: Expected, method: str) -> None:
    settings = runs.settings()
    expected = []
    for epoch, evaluation in runs.along(method).items():
        record = {
            "epoch": epoch,
            "samples": epoch * settings.contexts_per_epoch * settings.num_generations,
            "contexts": settings.evaluation_contexts,
            "contexts_tuned_on": 0,
            "samples_per_context": settings.evaluation_samples,
            "metrics": evaluation.metrics(method if epoch else "base"),
        }
        if epoch:
            pooled = evaluation.metrics("base")["kl_target_policy_pooled"]
            record["base"] = {"kl_target_policy_pooled": pooled}
        expected.append(record)
    found = lines(runs.runs / method / "evaluations.jsonl")
    assert [record["epoch"] for record in found] == ([0, 2, 4, 5] if isinstance(runs, One) else [0, 2, 4])
    assert all(record["seconds"] > 0 for record in found)
    assert differences([without(record, "seconds") for record in found], expected) == []


def notices(found: list[str]) -> list[tuple[str, ...]]:
    """The numbers in the sentences on samples without a verdict."""
    matches = [LOST.fullmatch(sentence) for sentence in found]
    return [match.groups() if match else ("?", text) for match, text in zip(matches, found, strict=True)]


def expected_notices(evaluation: Evaluation, models: Mapping[str, str]) -> list[tuple[str, ...]]:
    total = len(evaluation.contexts) * evaluation.settings.evaluation_samples
    found = []
    for model, shown in models.items():
        failed, skipped = evaluation.lost(model)
        found += [(shown, "the check failed on", str(failed), str(total - skipped))] if failed else []
        found += [(shown, "no constraint applies to", str(skipped), str(total))] if skipped else []
    return found


def by_model(found: dict[str, list[str]], tuned: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """All notices on models, each of which stands with its own model."""
    assert list(found) == ["base", *tuned]
    assert all(sentence.startswith(f"{name}: ") for name, sentences in found.items() for sentence in sentences)
    return sorted(notice for sentences in found.values() for notice in notices(sentences))


def on_distance(expected: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The sentences on models that are no nearer to the ideal model than the base, from the expected figures."""
    found = []
    for shown, changes in expected["changes"].items():
        change = changes["kl_target_policy_pooled"]["difference"]
        if change["mean"] is not None and change["mean"] > 0:
            before, after = (metrics[name]["kl_target_policy_pooled"]["mean"] for name in ("base", shown))
            told = (
                f"{shown}: no nearer to the ideal model than the base: pooled KL(p, π) {before:.2f} → {after:.2f} nats"
            )
            found.append(("?", f"{told}, {change['mean']:+.2f} [{change['low']:+.2f}, {change['high']:+.2f}]"))
    return found


def on_gain(evaluation: Evaluation, expected: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The sentence on contexts without a sample of the ideal model, of those that have a verdict."""
    counted = expected["contexts_with_gain"]
    total = sum(int(block.valid.any(axis=1).sum()) for block in evaluation.outcomes["base"])
    if counted == total:
        return []
    told = f"{total - counted} of {total} contexts have no satisfying sample of the base and do not count in the gain"
    return [("?", f"{told}; raise gain_draws to find more")]


@pytest.mark.parametrize("method", METHODS)
def test_the_evaluation_at_the_end(runs: Expected, method: str) -> None:
    """In a comparison the pool is that of all models, in a run that of the base and its own."""
    evaluation = runs.evaluation(*(METHODS if isinstance(runs, One) else (method,)))
    shown = {"base": "base", method: "tuned"}
    expected = evaluation.to_mapping(shown) | {name: evaluation.metrics(key) for key, name in shown.items()}
    found = json.loads((runs.runs / method / "evaluation.json").read_text())
    assert found.pop("kept") == {"keep": "last", "epoch": runs.settings().epochs, "gain_validation": None}
    assert differences(found.pop("costs"), {"tuned": costs(runs.runs / method)}) == []
    distances, lost = on_distance(expected, expected), expected_notices(evaluation, shown)
    assert by_model(found.pop("model_notices"), expected["changes"]) == sorted([*distances, *lost])
    assert (found.pop("metric_info"), found.pop("count_info")) == ({}, {}), "a run without a task has none of its own"
    assert notices(found.pop("notices")) == [*distances, *on_gain(evaluation, expected), *lost]
    assert differences(without(found, *UNPREDICTABLE), expected) == []


def test_the_comparison(one: One) -> None:
    evaluation = one.evaluation(*METHODS)
    shown = {name: name for name in ("base", *METHODS)}
    expected = evaluation.to_mapping(shown) | {"models": {name: evaluation.metrics(name) for name in shown}}
    found = json.loads((one.runs / "comparison.json").read_text())
    assert {name: kept["epoch"] for name, kept in found.pop("kept").items()} == dict.fromkeys(METHODS, 5)
    assert differences(found.pop("costs"), {method: costs(one.runs / method) for method in METHODS}) == []
    distances, lost = on_distance(expected, expected["models"]), expected_notices(evaluation, shown)
    assert by_model(found.pop("model_notices"), expected["changes"]) == sorted([*distances, *lost])
    assert (found.pop("metric_info"), found.pop("count_info")) == ({}, {}), "a run without a task has none of its own"
    assert notices(found.pop("notices")) == [*distances, *on_gain(evaluation, expected), *lost]
    assert differences(without(found, *UNPREDICTABLE), expected) == []


def costs(run: Path) -> dict[str, Any]:
    """What a run has cost, by its own lines; all but the seconds are known beforehand."""
    found, epochs = lines(run / "metrics.jsonl"), 4 if run.parent.name == "two" else 5
    return {
        "epochs": epochs,
        "samples": epochs * PER_EPOCH,
        **{key: sum(r[key] for r in found) for key in ("tokens", "seconds")},
    }


def test_times_do_not_overlap(one: One) -> None:
    """What epochs and evaluations are said to take is no more than the command took."""
    epochs = sum(r["seconds"] for method in METHODS for r in lines(one.runs / method / "metrics.jsonl"))
    evaluations = sum(r["seconds"] for method in METHODS for r in lines(one.runs / method / "evaluations.jsonl"))
    assert epochs + evaluations < float((one.folder / "seconds").read_text())


def test_the_runs_are_about_what_they_should_be(one: One, two: Expected) -> None:
    """Ragged batches with a gradient, skipped steps, clipping, soft and failed verdicts, no luck at all."""
    for runs in (one, two):
        for method in METHODS:
            run = runs.run(method)
            norms, limit = np.array(run.norms), run.settings.max_grad_norm
            assert 0.05 < (norms > limit).mean() < 0.97, "some gradients are clipped"
            assert any(run.ragged) and run.settings.batch_size * 4 < 24 < run.settings.batch_size * 5
            verdicts = {b for epoch in run.epochs for b in epoch.b[epoch.valid].tolist()}
            assert verdicts == {0.0, 0.5, 1.0}
            assert any(epoch.valid.any(axis=1).min() == 0 for epoch in run.epochs), "a context without a verdict"
            assert any(0 < valid.sum() < 6 for epoch in run.epochs for valid in epoch.valid), "one with some"
            assert any((epoch.z == 0).any() for epoch in run.epochs), "one without a satisfying sample"
            assert {kind for epoch in run.epochs for kind in epoch.failures.values()} == {"value", "exception"}
            assert not all(epoch.applies.all() for epoch in run.epochs)
            skipped = sum(record["steps_skipped"] for record in run.metrics)
            assert skipped > 0 or method == "ziegler", "a batch without a satisfying sample"
    assert not set(values.TRAINING) & set(values.HELD_OUT)
    assert len(values.HELD_OUT) > 64, "two blocks"


# --- the report ---

LABELS = {
    "satisfaction": ("satisfaction", "higher"),
    "gain": ("gain (nats)", "higher"),
    "recall": ("recall of p", "higher"),
    "kl_target_policy_pooled": ("KL(p, π), pooled (nats)", "lower"),
    "kl_target_policy": ("KL(p, π), own samples (nats)", "lower"),
    "kl_policy_base": ("KL(π, a) (nats)", None),
    "distinct_2": ("Distinct-2", "higher"),
    "length": ("length (tokens)", None),
    "ended": ("ended", None),
    "coverage": ("coverage", "higher"),
    "z_mean": ("mean Z", None),
    "z_nstd": ("nstd(Z), raw", None),
    "z_nstd_corrected": ("nstd(Z), corrected", None),
    "ess": ("effective sample size", "higher"),
    "checks_failed": ("failed checks", "lower"),
    "not_applicable": ("not applicable", None),
}
"""Every metric of these runs: how a column or an axis is called, and which way is better."""
OF_BASE = ("z_mean", "z_nstd", "z_nstd_corrected")
"""Those that estimate a quantity of the base: there is no change, and no level that a line could leave."""
GROUPS = {
    "requirement": ("satisfaction", "gain", "recall", "kl_target_policy_pooled", "kl_target_policy", "kl_policy_base"),
    "outputs": ("distinct_2", "length", "ended"),
    "sampling": ("coverage", "z_mean", "z_nstd", "z_nstd_corrected", "ess", "checks_failed", "not_applicable"),
}
COLORS = {"base": "#30363d", "cdpg": "#0b6fd8", "dpg": "#a85d0c", "reinforce": "#075a38", "ziegler": "#86368c"}
STAGES = {
    "sampling": "#33339a", "constraint": "#d9b84a", "base": "#3aa38f", "gradient": "#8c2455",
    "evaluation": "#86c5ea", "other": "#9aa1a9",
}  # fmt: skip


def cell_differs(cell: Mapping[str, Any], value: Mapping[str, Any], change: Mapping[str, Any] | None = None) -> bool:
    """Whether a cell shows anything but a figure, its interval and its change."""
    smalls = [value["low"], value["high"]] if value["mean"] is not None else []
    smalls += [] if change is None else [change[end] for end in ("mean", "low", "high")]
    found = [text for small in cell["smalls"] for text in numbers(small)]
    shown = cell["shown"].replace("★", "").replace("≈", "").strip()
    same = matches(shown, value["mean"]) and len(found) == len(smalls) and all(map(matches, found, smalls))
    exact = differences(cell["sort"], value["mean"]) == []
    return not (same and exact)


def table_of(page: Page, name: str) -> dict[str, dict[str, Any]]:
    """The rows of a table that may go on below."""
    parts = [table for key, table in page.tables.items() if re.fullmatch(rf"{name}(-\d)?", key)]
    return {row: {label: cell for part in parts for label, cell in part[row].items()} for row in parts[0]}


def test_the_tables_of_metrics(one: One) -> None:
    """Means, intervals, paired changes, and the marks of the best and of those that cannot be told from it."""
    evaluation, page = one.evaluation(*METHODS), one.page
    ideal = evaluation.to_mapping({"base": "base", "cdpg": "cdpg"})["ideal"]
    metrics = {name: evaluation.metrics(name) for name in ("base", *METHODS)}
    wrong = []
    for table, names in GROUPS.items():
        rows = table_of(page, table)
        assert [*rows] == ["base", *METHODS, *(["ideal p (estimate)"] if set(names) & set(ideal) else [])]
        for name in names:
            label, better = LABELS[name]
            means = [metrics[method][name]["mean"] for method in METHODS]
            best = (max if better == "higher" else min)(means) if better else None
            for model in ("base", *METHODS):
                cell, value = rows[model][label], metrics[model][name]
                changes = {} if model == "base" else evaluation.changes(model)
                change = changes[name]["difference"] if model != "base" and name not in OF_BASE else None
                near = best is not None and model != "base" and value["low"] <= best <= value["high"]
                marks = model != "base" and value["mean"] == best, near and value["mean"] != best
                if cell_differs(cell, value, change) or marks != (cell["best"], cell["near"]):
                    wrong.append((table, name, model, cell, value, change, marks))
            if name in ideal and cell_differs(rows["ideal p (estimate)"][label], ideal[name]):
                wrong.append((table, name, "ideal", rows["ideal p (estimate)"][label], ideal[name]))
    assert wrong == []


def test_the_tables_of_differences_ratios_and_costs(one: One) -> None:
    evaluation, tables = one.evaluation(*METHODS), one.page.tables
    between = table_of(one.page, "between")
    for method in METHODS[1:]:
        cells = between[method]
        changes = evaluation.changes(method, "cdpg")
        names = (*GROUPS["requirement"], *GROUPS["outputs"])
        assert sorted(cells) == sorted(LABELS[name][0] for name in names)
        assert not [name for name in names if cell_differs(cells[LABELS[name][0]], changes[name]["difference"])]
    assert set(between) == set(METHODS[1:])
    for model in ("base", *METHODS):
        versus, cells = evaluation.versus_ideal(model), tables["versus-ideal"][model]
        assert not cell_differs(cells["length"], versus["length"])
        assert not cell_differs(cells["Distinct-2"], versus["distinct_2"])
    for method in METHODS:
        cost, cells = costs(one.runs / method), tables["costs"][method]
        for title, value in (("epochs", 5), ("training samples", 120), ("training tokens", cost["tokens"])):
            assert cells[title]["shown"] == str(value) and cells[title]["sort"] == value
        assert cost["tokens"] == sum(int(epoch.lengths.sum()) for epoch in one.run(method).epochs)
        assert matches(cells["time of the epochs"]["shown"].removesuffix(" s"), cost["seconds"])
        assert matches(cells["samples per second"]["shown"], 120 / cost["seconds"])


def test_the_cards_of_the_methods(one: One) -> None:
    evaluation, metrics = one.evaluation(*METHODS), {}
    for model in ("base", *METHODS):
        metrics[model] = {name: value["mean"] for name, value in evaluation.metrics(model).items()}
    for method in METHODS:
        pooled, seconds = "kl_target_policy_pooled", costs(one.runs / method)["seconds"]
        expected = [metrics["base"]["satisfaction"], metrics[method]["satisfaction"]]
        gain = evaluation.metrics(method)["gain"]
        expected += [abs(gain["mean"]), gain["low"], gain["high"], metrics["base"][pooled]]
        expected += [metrics[method][pooled], metrics[method]["kl_policy_base"], seconds]
        found = numbers(one.page.cards[method])
        assert len(found) == len(expected) and all(map(matches, found, expected)), (method, found, expected)


def test_the_csv_of_every_table_has_all_digits(one: One) -> None:
    evaluation = one.evaluation(*METHODS)
    for table, names in GROUPS.items():
        head, *rows = [line.split(",") for line in json.loads(one.page.csv)[table].splitlines()]
        by_model = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
        for model in ("base", *METHODS):
            metrics, changes = evaluation.metrics(model), {} if model == "base" else evaluation.changes(model)
            for name in names:
                parts = {"": metrics.get(name), " change": changes.get(name, {}).get("difference")}
                for part, value in parts.items():
                    ends = ("", "mean"), (" low", "low"), (" high", "high")
                    for end, key in ends:
                        text = by_model[model][f"{name}{part}{end}"]
                        expected = None if value is None else value[key]
                        found = float(text) if text else None
                        assert differences(found, expected) == [], (table, model, name, part, end)


def drawn(figure: Mapping[str, Any], kind: str, color: str) -> list[Any]:
    return [entry for entry in figure[kind] if entry["color"] == color]


def line_of(figure: Mapping[str, Any], model: str) -> list[list[float]]:
    """The points of a model's line; what is drawn across the whole axes, and the mark at an end, is none."""
    (found,) = [e for e in drawn(figure, "lines", COLORS[model]) if not e["spans"] and len(e["points"]) > 1]
    return list(found["points"])


def level_of(figure: Mapping[str, Any], color: str = COLORS["base"]) -> float:
    (found,) = [entry for entry in drawn(figure, "lines", color) if entry["spans"]]
    return float(found["points"][0][1])


@pytest.mark.parametrize("name", LABELS)
def test_a_figure_of_a_metric_through_training(one: One, name: str) -> None:
    figure = one.figure("training samples", LABELS[name][0])
    base = []
    for method in METHODS:
        expected, corners = [], set()
        for epoch, evaluation in one.along(method).items():
            if epoch or name != "kl_target_policy_pooled":
                value = evaluation.metrics(method if epoch else "base")[name]
                expected.append([epoch * PER_EPOCH, value["mean"]])
                corners |= {(epoch * PER_EPOCH, round(value[end], 7)) for end in ("low", "high")}
        assert differences(line_of(figure, method), expected) == []
        (band,) = drawn(figure, "bands", COLORS[method])
        assert {(round(x), round(y, 7)) for x, y in band["points"]} == corners
        last = one.along(method)[5 if name == "kl_target_policy_pooled" else 0].metrics("base")
        base.append(last[name]["mean"])
    if name in OF_BASE:
        assert not [entry for entry in drawn(figure, "lines", COLORS["base"]) if entry["spans"]]
    else:
        assert differences(level_of(figure), float(np.mean(base))) == []


def test_figures_of_the_epochs_and_of_the_distance(one: One) -> None:
    deviation = one.figure("training samples", "nstd(Z)")
    size = one.figure("training samples", "effective sample size (share)")
    path = one.figure("KL(π, a) (nats)", "satisfaction")
    for method in METHODS:
        metrics = one.run(method).metrics
        for figure, field in ((deviation, "z_nstd_corrected"), (size, "ess")):
            expected = [[record["epoch"] * PER_EPOCH, record[field]] for record in metrics if record[field] is not None]
            assert differences(line_of(figure, method), expected) == []
        found = [e.metrics(method if epoch else "base") for epoch, e in one.along(method).items()]
        expected = [[value["kl_policy_base"]["mean"], value["satisfaction"]["mean"]] for value in found]
        assert differences(line_of(path, method), expected) == []
        (end,) = [line["points"] for line in drawn(path, "lines", COLORS[method]) if len(line["points"]) == 1]
        assert differences(end, expected[-1:]) == []
    assert not [entry for entry in drawn(deviation, "lines", COLORS["base"]) if entry["spans"]]


def test_figures_of_tokens_and_contexts(one: One) -> None:
    evaluation = one.evaluation(*METHODS)
    ranks = one.figure("rank of the token", "share of all tokens")
    for model in COLORS:
        counts = evaluation.token_rank(model)
        expected = [[place, value / sum(counts)] for place, value in enumerate(counts, start=1)]
        assert differences(line_of(ranks, model), expected) == []
    partition = one.figure("contexts, the easiest first (%)", "estimated Z")
    z = sorted((value for value in evaluation.partition() if value is not None), reverse=True)
    expected = [[100 * place / len(z), value] for place, value in enumerate(z, start=1)]
    assert differences(line_of(partition, "cdpg"), expected) == []
    assert differences(level_of(partition, "#59626c"), float(np.mean(z))) == []


def test_the_figure_of_weights(one: One) -> None:
    """Shares of 30 bins, equal in the logarithm; of the second half of the epochs, the ends hold what lies beyond."""
    figure = one.figure("importance weight P/(Ẑ q)", "share of satisfying samples")
    logs: dict[str, Any] = {}
    for method in METHODS:
        epochs = one.run(method).epochs[2:]
        weights = [divided(epoch.ratio, epoch.z[:, None])[epoch.b > 0] for epoch in epochs]
        logs[method] = np.log10(np.concatenate(weights))
    everything = np.sort(np.concatenate([*logs.values()]))
    for method in METHODS:
        x, y = np.array(line_of(figure, method)).T
        middles = np.log10(x)
        width = (middles[-1] - middles[0]) / 29
        low, high = middles[0] - width / 2, middles[-1] + width / 2
        assert len(x) == 30 and np.allclose(np.diff(middles), width)
        assert low <= min(-0.5, everything[len(everything) // 200]) + EXACT
        assert high >= max(0.5, everything[-1 - len(everything) // 200]) - EXACT
        counts, _ = np.histogram(np.clip(logs[method], low, high), bins=30, range=(low, high))
        assert differences(y.tolist(), (counts / len(logs[method])).tolist()) == []


def test_the_figure_of_times(one: One) -> None:
    """Stages stacked from the left, evaluations among them, and the rest."""
    (figure,) = [figure for figure in one.figures if figure["x"] == "seconds"]
    assert figure["names"] == [*METHODS]
    for row, method in enumerate(METHODS):
        records = lines(one.runs / method / "metrics.jsonl")
        spent = {stage: sum(record.get(f"seconds_{stage}", 0.0) for record in records) for stage in STAGES}
        spent["other"] = sum(record["seconds"] for record in records) - sum(spent.values())
        spent["evaluation"] = sum(record["seconds"] for record in lines(one.runs / method / "evaluations.jsonl"))
        left = 0.0
        for stage, color in STAGES.items():
            bars = [bar for bar in drawn(figure, "bars", color) if round(bar["row"] + 0.3) == row]
            if spent[stage] > 0:
                assert differences([[bar["from"], bar["length"]] for bar in bars], [[left, spent[stage]]]) == []
            left += spent[stage]


def test_lines_stand_on_the_page_where_they_were_drawn(one: One, tmp_path: Path) -> None:
    """The path of every line in the page's own drawings, to the two decimals that these keep."""
    with figures_seen() as figures:
        write_report([one.runs], tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    found = {
        color: [points(path["d"]) for paths in page.paths.values() for path in paths if path.get("stroke") == color]
        for color in COLORS.values()
    }
    lines_drawn = [line for figure in figures for line in figure["lines"] if line["color"] in found]
    plain = [line["on_page"] for line in lines_drawn if not line["spans"] and 1 < len(line["points"]) < 30]
    assert len(plain) > 60
    for line in lines_drawn:
        if not line["spans"] and 1 < len(line["points"]) < 30:
            same = [path for path in found[line["color"]] if np.shape(path) == np.shape(line["on_page"])]
            assert any(np.allclose(path, line["on_page"], rtol=0, atol=0.011) for path in same), line


def test_the_model_card(one: One) -> None:
    """Its table of figures, base and tuned."""
    evaluation = one.evaluation(*METHODS)
    for method in METHODS:
        text = (one.runs / method / "model" / "README.md").read_text(encoding="utf-8")
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
        by_label = {row[0]: row[1:3] for row in rows if len(row) == 4}
        for name, (label, _) in LABELS.items():
            cells = by_label[label.removesuffix(" (nats)").removesuffix(" (tokens)")]
            for model, place in (("base", 0), (method, 1)):
                value, shown = evaluation.metrics(model)[name], numbers(cells[place])
                assert len(shown) == 3 and all(map(matches, shown, value.values())), (name, model, shown, value)
