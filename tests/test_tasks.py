"""Tasks by name: their contexts, presets and constraints, and the commands that run and compare them."""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import json
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cdpg import constraints
from cdpg.cli import app
from cdpg.config import FIELDS, CDPGConfig
from cdpg.errors import UserError
from cdpg.evaluation.evaluator import Evaluator
from cdpg.evaluation.metrics import METRICS
from cdpg.jobs.comparison import ComparisonRun, comparison_runs
from cdpg.jobs.job import Inputs, Job, gather, prompting
from cdpg.storage.provenance import versions
from cdpg.system.distributed import Processes
from cdpg.tasks import TASKS, find_task
from cdpg.tasks.base import Draw
from cdpg.tasks.code.constraint import FunctionEnd
from cdpg.tasks.code.task import follows_pep8
from cdpg.tasks.hub_datasets import hub_rows
from rounds import ordinary
from tiny import make_model, make_tokenizer, save, tokenizer_for
from unpainted import unpainted

NAMES = ("translation-numbers", "summarization-entities", "code-compilability", "code-pep8")


def job_of(task: str, **given: Any) -> Job:
    return Job.from_mapping({"task": task, **given})


def test_the_tasks_are_those_of_the_paper_and_one_more() -> None:
    assert set(TASKS) == {*NAMES, "chat-json"}
    for task in TASKS.values():
        assert set(task.presets) == ({"tiny", "paper"} if task.name in NAMES else {"tiny"})
        assert getattr(constraints, task.constraint.partition(":")[2])


@functools.cache
def contexts_of(name: str) -> Inputs:
    """What a task comes with."""
    return job_of(name).load()


@pytest.mark.parametrize("name", NAMES)
def test_a_task_fills_in_everything(name: str) -> None:
    job = job_of(name)
    inputs = contexts_of(name)
    assert job.model in ("t5-tiny", "code-tiny")
    assert len(inputs.tuning) >= 1000
    assert len(inputs.held_out) >= 150
    prompts = {context.prompt for context in inputs.tuning}
    assert not prompts & {context.prompt for context in inputs.held_out}
    assert inputs.constraints == [getattr(constraints, TASKS[name].constraint.partition(":")[2])]
    assert (inputs.stop is not None) == name.startswith("code")
    assert inputs.measure.beams == (0 if name.startswith("code") else 4)


@pytest.mark.parametrize(
    ("name", "tuning", "held_out"),
    [
        (
            "translation-numbers",
            "eff39650fb95e7f00ed5aa894e4679135a9646739fe8aac98ca42b863512914f",
            "1aad444b2dcb55ea0dd9fccddfca50975fdaf5abe95b094ec9f171d747e5af5b",
        ),
        (
            "summarization-entities",
            "a5dc48588165df3276e4bd95807bab919b54a40abc7bf23172e20f69b070abda",
            "7f0a117136c2f29683426ab4588509045781240480c05ebee1434c74ceedcbd8",
        ),
    ],
)
def test_the_contexts_stay_the_same_to_the_byte(name: str, tuning: str, held_out: str) -> None:
    """Other contexts make other figures: those of the docs, and those that a run is compared with."""
    inputs = contexts_of(name)
    for contexts, expected in ((inputs.tuning, tuning), (inputs.held_out, held_out)):
        lines = [json.dumps([each.prompt, list(each.columns.items()), each.row, each.group]) for each in contexts]
        assert hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest() == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_paper_preset_has_the_settings_of_the_paper(name: str) -> None:
    settings = job_of(name, preset="paper").settings
    assert (settings.epochs, settings.contexts_per_epoch, settings.warmup) == (1000, 32, 100)
    code = name.startswith("code")
    assert settings.samples_per_epoch == (2048 if code else 1024)
    assert settings.learning_rate == (1.41e-6 if code else 1e-4)
    assert settings.max_completion_length == (128 if code else 200)
    assert settings.batch_size is None


def test_what_is_given_goes_before_the_preset() -> None:
    job = job_of("code-pep8", epochs=3, model="some/model", learning_rate=1e-3)
    assert (job.settings.epochs, job.model, job.settings.learning_rate) == (3, "some/model", 1e-3)
    assert Job.from_mapping({**job.inputs(), **job.settings.to_mapping()}) == job


def test_prompts_have_the_prefix_and_columns_of_the_task() -> None:
    context = contexts_of("translation-numbers").tuning[0]
    assert context.prompt == "translate English to French: " + context.columns["source"]
    assert context.columns["reference"]
    signature = job_of("code-compilability", prompt_prefix="import os\n\n\n").load().tuning[0]
    assert signature.prompt == "import os\n\n\n" + signature.columns["signature"]


def test_signatures_that_break_pep8_are_left_out(tmp_path: Path, notices: list[str]) -> None:
    file = tmp_path / "signatures.txt"
    lines = ["def fine(a):", "def bad( a ):", *(f"def f{i}(x):" for i in range(60))]
    file.write_text("\n".join(lines) + "\n")
    assert follows_pep8([{"signature": line} for line in lines[:2]]) == [True, False]
    inputs = job_of("code-pep8", contexts=str(file)).load()
    everything = [context.prompt for context in (*inputs.tuning, *inputs.held_out)]
    assert sorted(everything) == sorted(lines[:1] + lines[2:])
    assert any("1 of 62 contexts cannot be satisfied" in text for text in notices)
    assert len(inputs.held_out) == 6


def test_a_folder_of_sources_gives_signatures(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(x):\n    return x\n\n\nclass A:\n    def g(self):\n        pass\n")
    inputs = job_of("code-compilability", contexts=str(tmp_path)).load()
    assert [context.prompt for context in inputs.tuning] == ["def f(x):", "def g(self):"]
    assert inputs.held_out == inputs.tuning  # too few to hold any out


def write_sources(folder: Path, files: int, functions: int) -> dict[str, str]:
    """A folder of sources; gives the file of each signature."""
    owners = {}
    for file in range(files):
        names = [f"def f{file}_{function}(x):" for function in range(functions)]
        text = "".join(f"{name}\n    pass\n\n\n" for name in names)
        (folder / f"m{file}.py").write_text(text + "def shared(x):\n    pass\n")
        owners |= dict.fromkeys(names, f"m{file}.py")
    return {**owners, "def shared(x):": "m0.py"}


def test_a_folder_of_sources_is_split_by_file(tmp_path: Path) -> None:
    owners = write_sources(tmp_path, files=30, functions=5)
    job = job_of("code-compilability", contexts=str(tmp_path))
    inputs = job.load()
    tuned, held_out = ({owners[str(context.prompt)] for context in part} for part in (inputs.tuning, inputs.held_out))
    assert len(tuned) + len(held_out) == 30
    assert not tuned & held_out
    assert len(inputs.tuning) + len(inputs.held_out) == 151
    assert 10 <= len(inputs.held_out) <= 15
    assert all(set(context.columns) == {"signature"} for context in (*inputs.tuning, *inputs.held_out))
    assert inputs == job.load()
    other = dataclasses.replace(job, data_seed=1).load()
    assert {owners[str(context.prompt)] for context in other.held_out} != held_out


@pytest.mark.parametrize(("files", "expected"), [(1, 61), (2, 60), (3, 60)])
def test_large_files_are_held_out_whole_or_not_at_all(
    tmp_path: Path, files: int, expected: int, notices: list[str]
) -> None:
    write_sources(tmp_path, files, functions=60)
    inputs = job_of("code-compilability", contexts=str(tmp_path)).load()
    assert len(inputs.held_out) == expected
    assert (inputs.tuning == inputs.held_out) == (files == 1)
    assert any("of one file or have one prompt" in text for text in notices) == (files == 1)


def test_equal_prompts_are_on_one_side_and_those_of_both_files_are_reported(tmp_path: Path, notices: list[str]) -> None:
    file, other = tmp_path / "sentences.csv", tmp_path / "other.csv"
    rows = [f"two dogs {number % 40},chiens {number}" for number in range(120)]
    file.write_text("\n".join(["source,reference", *rows]))
    inputs = job_of("translation-numbers", contexts=str(file)).load()
    assert (len(inputs.tuning), len(inputs.held_out)) == (108, 12)
    assert not {context.prompt for context in inputs.tuning} & {context.prompt for context in inputs.held_out}
    other.write_text("source\ntwo dogs 7\ntwo dogs 70\n")
    job_of("translation-numbers", contexts=str(file), eval_contexts=str(other)).load()
    assert sum("1 of 2 contexts to evaluate on have a prompt that is also tuned on" in text for text in notices) == 1
    plain = {"model": "m", "constraint": "test_tasks:short", "prompt_column": "source", "prompt_prefix": "Q: "}
    notices.clear()
    Job.from_mapping({**plain, "contexts": str(file), "eval_contexts": str(file)}).load()
    assert any("120 of 120 contexts to evaluate on" in text for text in notices)


def test_sentences_without_a_numeral_are_reported_and_stay(tmp_path: Path, notices: list[str]) -> None:
    file = tmp_path / "sentences.txt"
    file.write_text("two dogs\nmany cats\ntwenty-one mice\n")
    inputs = job_of("translation-numbers", contexts=str(file)).load()
    assert len(inputs.tuning) == 3
    assert any(text.startswith(f"2 of 3 sentences in {str(file)!r} have no numeral") for text in notices)


def test_a_line_that_is_no_signature_is_named(tmp_path: Path) -> None:
    file = tmp_path / "signatures.txt"
    file.write_text("def f(x):\nclass A:\n")
    with pytest.raises(UserError, match=r"row 2: expected a line 'def name"):
        job_of("code-compilability", contexts=str(file)).load()


@pytest.mark.parametrize("name", ["translation-numbers", "summarization-entities"])
def test_a_chat_is_no_text_for_a_task(tmp_path: Path, name: str) -> None:
    file = tmp_path / "chats.jsonl"
    rows = [{"text": "two dogs"}, {"text": [{"role": "user", "content": "three cats"}]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        UserError, match=r"chats\.jsonl', row 2: a chat in the column 'text', where this task takes a text"
    ):
        job_of(name, contexts=str(file), prompt_column="text").load()


def test_rows_keep_their_number_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "signatures.txt"
    file.write_text("def f(x):\n\n\ndef bad( a ):\ndef g(x):\n")
    inputs = job_of("code-pep8", contexts=str(file)).load()
    assert [(context.prompt, context.row) for context in inputs.tuning] == [("def f(x):", 1), ("def g(x):", 5)]
    file.write_text("two dogs\n\nthree cats\n")
    inputs = job_of("translation-numbers", contexts=str(file), prompt_prefix="").load()
    assert [(context.prompt, context.row) for context in inputs.tuning] == [("two dogs", 1), ("three cats", 3)]


def test_pairs_of_a_file_with_source_and_reference(tmp_path: Path) -> None:
    tuning, held_out = tmp_path / "train.csv", tmp_path / "test.csv"
    for file, count in ((tuning, 4), (held_out, 2)):
        with file.open("w", newline="") as handle:
            writer = csv.writer(handle)
            writer.writerow(["source", "reference"])
            writer.writerows([f"{count} two dogs {i}", f"deux chiens {i}"] for i in range(count))
    job = job_of("translation-numbers", contexts=str(tuning), eval_contexts=str(held_out), prompt_prefix="")
    inputs = job.load()
    assert [context.prompt for context in inputs.held_out] == ["2 two dogs 0", "2 two dogs 1"]
    assert inputs.tuning[3].columns == {"source": "4 two dogs 3", "reference": "deux chiens 3"}


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="did you mean 'code-pep8'"):
        find_task("code-pep")
    with pytest.raises(UserError, match="no preset 'big'; code-pep8 has tiny, paper"):
        job_of("code-pep8", preset="big")
    result = CliRunner().invoke(app, ["run", "summarisation-entities"])
    assert "did you mean 'summarization-entities'" in str(result.exception)


# Data sets of the hub, by a stand-in for the library.

HUB = {
    "Helsinki-NLP/europarl": [
        {"translation": {"en": f"There are {word} of us, {i}.", "fr": f"Nous sommes {i}."}}
        for i in range(40)
        for word in ("three", "many")
    ],
    "abisee/cnn_dailymail": [{"article": f"Article {i}.", "highlights": f"Short {i}."} for i in range(50)],
    "code-search-net/code_search_net": [
        {"func_code_string": f"def f{i}(x):\n    return x\n"} for i in range(30)
    ] + [{"func_code_string": "def broken(:\n"}] * 5,
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, name: str, split: str) -> list[dict[str, Any]]:
        if split != "train":
            raise ValueError(split)
        return HUB[path]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.parametrize(("name", "count"), [(NAMES[0], 40), (NAMES[1], 50), (NAMES[2], 30), (NAMES[3], 30)])
def test_contexts_come_from_the_hub(hub: None, name: str, count: int) -> None:
    inputs = job_of(name, preset="paper").load()
    assert len(inputs.tuning) == len(inputs.held_out) == count // 2
    prompts = {context.prompt for context in (*inputs.tuning, *inputs.held_out)}
    assert len(prompts) == count
    assert inputs.tuning != job_of(name, preset="paper", data_seed=1).load().tuning


def test_a_source_with_two_references_is_not_both_tuned_on_and_held_out(
    hub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [{"article": f"Article {i % 20}.", "highlights": f"Short {i}."} for i in range(60)]
    monkeypatch.setitem(HUB, "abisee/cnn_dailymail", pairs)
    inputs = job_of("summarization-entities", preset="paper").load()
    tuned, held_out = ({context.prompt for context in part} for part in (inputs.tuning, inputs.held_out))
    assert len(tuned) == len(held_out) == 10
    assert not tuned & held_out


def test_functions_of_one_repository_are_on_one_side(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [
        {"func_code_string": f"def f{i}(x):\n    return x\n", "repository_name": f"owner/{i % 10}"} for i in range(200)
    ]
    monkeypatch.setitem(HUB, "code-search-net/code_search_net", functions)
    inputs = job_of("code-compilability", preset="paper").load()
    assert len(inputs.tuning) == len(inputs.held_out) == 100
    tuned, held_out = ({context.group for context in part} for part in (inputs.tuning, inputs.held_out))
    assert not tuned & held_out
    assert tuned | held_out == {f"owner/{i}" for i in range(10)}
    assert all(set(context.columns) == {"signature"} for context in inputs.tuning)


@pytest.mark.parametrize("name", ordinary(NAMES[:3], NAMES[0]))
def test_the_paper_takes_five_thousand_contexts_to_tune_on_and_as_many_held_out(
    hub: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    many = [
        {
            "translation": {"en": f"There are three of us, {i}.", "fr": f"Nous sommes {i}."},
            "article": f"Article {i}.",
            "highlights": f"Short {i}.",
            "func_code_string": f"def f{i}(x):\n    return x\n",
        }
        for i in range(10_100)
    ]
    for path in list(HUB):
        monkeypatch.setitem(HUB, path, many)
    inputs = job_of(name, preset="paper").load()
    assert len(inputs.tuning) == len(inputs.held_out) == 5000


def signatures(count: int) -> list[dict[str, str]]:
    """Of functions, every third of which breaks PEP8 in its signature."""
    return [{"func_code_string": f"def f{i}({'x' if i % 3 else ' x'}):\n    return x\n"} for i in range(count)]


def test_signatures_of_the_hub_that_break_pep8_are_left_out(
    hub: None, monkeypatch: pytest.MonkeyPatch, notices: list[str]
) -> None:
    monkeypatch.setitem(HUB, "code-search-net/code_search_net", signatures(90))
    inputs = job_of("code-pep8", preset="paper").load()
    assert len(inputs.tuning) == len(inputs.held_out) == 30
    assert all(follows_pep8([context.columns for context in (*inputs.tuning, *inputs.held_out)]))
    (text,) = notices
    assert text.startswith("30 of 90 contexts drawn from code-search-net/code_search_net cannot be satisfied")


def test_rows_that_cannot_be_used_are_made_up_for(
    hub: None, monkeypatch: pytest.MonkeyPatch, notices: list[str]
) -> None:
    """As many as are asked for, from as many rows of the seeded order as this takes."""
    monkeypatch.setitem(HUB, "rows", [{"text": f"{i}"} for i in range(900)])

    def usable(rows: Sequence[Mapping[str, Any]]) -> list[bool]:
        return [int(row["text"]) % 3 > 0 for row in rows]

    found = hub_rows("rows", "name", "train", dict, "text", Draw(0, usable), 300)
    drawn = [int(i) for i in np.random.Generator(np.random.PCG64(0)).permutation(900)]
    used = [i for i in drawn if i % 3]
    assert found == [{"text": f"{i}"} for i in used[:300]]
    looked_at = drawn.index(used[299]) + 1
    assert looked_at > 256, "more than are checked together"
    (text,) = notices
    assert text.startswith(f"{looked_at - 300} of {looked_at} contexts drawn from rows cannot be satisfied")


def test_an_evaluation_reads_no_more_than_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # whoever asks for the hub is refused
    file = tmp_path / "sentences.txt"
    file.write_text("two dogs\nthree cats\n")

    def look(job: Job, inputs: Inputs, *rest: Any) -> None:
        raise UserError(f"{len(inputs.held_out)} contexts")

    monkeypatch.setattr("cdpg.jobs.running.evaluate_model", look)
    options = ["evaluate", "t5-tiny", "--task", "translation-numbers", "--preset", "paper"]
    assert str(CliRunner().invoke(app, [*options, "--contexts", str(file)]).exception) == "2 contexts"
    assert "not installed" in str(CliRunner().invoke(app, options).exception)
    missing = job_of("translation-numbers", contexts="no such file.csv", eval_contexts=str(file))
    assert len(missing.load(to_tune=False).held_out) == 2


def test_a_data_set_with_a_script_is_read_as_the_hub_converted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, ...]] = []

    def load_dataset(
        path: str, name: str | None = None, split: str = "", data_dir: str | None = None, revision: str | None = None
    ) -> list[dict[str, Any]]:
        asked.append((name, data_dir, revision))
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found code_search_net.py")
        if name is not None:
            raise ValueError(f"BuilderConfig {name!r} not found. Available: ['default']")
        return HUB[path]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert len(job_of("code-compilability", preset="paper").load().tuning) == 15
    assert asked == [("python", None, None), (None, "python", "refs/convert/parquet")]


def test_without_the_hub_the_message_says_what_else_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("datasets")

    def load_dataset(*names: str, **options: str) -> None:
        raise ConnectionError("no route to host\nand more")

    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(UserError, match=r"cannot load the data set .*: no route to host; .* give a file"):
        job_of(NAMES[0], preset="paper").load()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="not installed"):
        job_of(NAMES[0], preset="paper").load()


# The commands, on models made on the spot.


def short(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return [len(text) < 40 for text in completions]


def write_sentences(file: Path, count: int) -> Path:
    """Contexts for the translation task, so that its own need not be made."""
    rows = [f"translate two dogs and the {number} cats,deux chiens et les {number} chats" for number in range(count)]
    file.write_text("\n".join(["source,reference", *rows]), encoding="utf-8")
    return file


COMPARE = [
    "compare", "translation-numbers", "--epochs", "2", "--methods", "cdpg, reinforce", "--seeds", "2",
    "--constraint", "test_tasks:short",
    "--set", "contexts_per_epoch=2", "--set", "num_generations=4", "--set", "max_completion_length=6",
    "--set", "evaluation_contexts=2", "--set", "evaluation_samples=2", "--set", "check_workers=0",
    "--set", "device=cpu", "--output-dir",
]  # fmt: skip


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    model = save(folder / "t5", "t5")
    sentences = write_sentences(folder / "sentences.csv", 80)
    arguments = [*COMPARE, str(folder / "out"), "--model", str(model), "--contexts", str(sentences)]
    with unpainted():
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "report:" in result.output
    assert "mean and range over 2 seeds" in result.output
    assert re.search(r"metric .* base .* cdpg .* reinforce ", result.output)  # a column a method
    return folder / "out"


RUNS = ["cdpg-seed0", "cdpg-seed1", "reinforce-seed0", "reinforce-seed1"]


def test_a_comparison_puts_all_runs_side_by_side(comparison: Path) -> None:
    result = json.loads((comparison / "comparison.json").read_text())
    assert list(result["models"]) == ["base", *RUNS]
    assert result["decoding"] == "beam"
    assert "bleu_masked" in result["models"]["base"]
    assert set(result["seeds"]) == {"cdpg", "reinforce"}
    assert len(result["seeds"]["cdpg"]["satisfaction"]["values"]) == 2
    samples = {name: cost["samples"] for name, cost in result["costs"].items()}
    assert samples["reinforce-seed0"] == samples["reinforce-seed1"] == 16
    assert samples["cdpg-seed0"] == samples["cdpg-seed1"] == 16 + 7 * 8, "with those drawn for the validation contexts"
    assert {"python", "torch"} <= set(versions())
    assert result["versions"] == versions()
    for name in RUNS:
        own = json.loads((comparison / name / "evaluation.json").read_text())
        assert own["tuned"] == result["models"][name]
        assert own["base"] == result["models"]["base"]
        card = (comparison / name / "model" / "README.md").read_text(encoding="utf-8")
        assert f"| BLEU-4 | {own['base']['bleu']['mean']:.1f} (" in card
        assert "between" not in own
    assert (comparison / "report.html").is_file()


def test_a_comparison_holds_the_differences_between_methods(comparison: Path) -> None:
    result = json.loads((comparison / "comparison.json").read_text())
    assert list(result["between"]) == RUNS[:1]
    for name, found in result["between"][RUNS[0]].items():
        shared = {metric for metric in result["models"][RUNS[0]] if metric in METRICS and METRICS[metric].of_base}
        assert shared and found.keys() == result["models"][RUNS[0]].keys() - shared
        for metric, first in result["models"][RUNS[0]].items():
            if metric in shared:
                continue
            difference, own = found[metric]["difference"], result["models"][name][metric]
            if None not in (own["mean"], first["mean"]):
                assert difference["mean"] == pytest.approx(own["mean"] - first["mean"], abs=1e-9)
                assert difference["low"] <= difference["high"]
    assert list(result["between"][RUNS[0]]) == RUNS[1:]
    assert {"bleu", "kl_target_policy_pooled", "satisfaction"} <= set(result["between"][RUNS[0]][RUNS[2]])


def test_a_comparison_is_continued_where_it_ended(comparison: Path) -> None:
    before = (comparison / "comparison.json").read_text()
    command = json.loads(before)["command"]
    assert command  # what made it stands in the file
    config = CDPGConfig.from_mapping(
        {key: value for key, value in gather(comparison / RUNS[0] / "config.yaml", {}, []).items() if key in FIELDS}
    )
    assert (config.method, config.seed) == ("cdpg", 0)


def test_only_the_very_run_that_is_asked_for_counts_as_done(comparison: Path) -> None:
    job = Job.from_mapping(gather(comparison / RUNS[0] / "config.yaml", {}, []))
    assert ComparisonRun("cdpg", "cdpg", job).is_done()
    for change in ({"epochs": 3}, {"learning_rate": 1.0}):
        other = dataclasses.replace(job, settings=job.settings.replace(**change))
        assert not ComparisonRun("cdpg", "cdpg", other).is_done()


def test_runs_with_other_seeds_are_judged_on_the_same_contexts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"prompt {number}" for number in range(80)), encoding="utf-8")
    job = Job.from_mapping({"model": "m", "contexts": str(file), "constraint": "test_tasks:short"})
    first, second = (run.job.load() for run in comparison_runs(job, ["cdpg"], 2))
    assert len(first.held_out) == 8
    assert first.held_out == second.held_out
    assert not {context.prompt for context in first.held_out} & {context.prompt for context in second.tuning}
    assert dataclasses.replace(job, data_seed=1).load().held_out != first.held_out
    with pytest.raises(UserError, match="data_seed takes a whole number"):
        Job.from_mapping({"task": NAMES[0], "data_seed": "x"})


def test_any_model_is_evaluated_beside_its_base(comparison: Path, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    arguments = ["evaluate", str(comparison / RUNS[1]), "--output", str(output), "--set", "evaluation_samples=2"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(output.read_text())
    assert set(found) >= {"base", "tuned", "changes"}
    assert found["contexts"] == 8, "all that are held out"
    assert found["versions"] == versions()


def test_only_the_main_process_writes_and_prints(
    comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process does its part of the work and leaves no trace of its own."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(Processes, "is_main", property(lambda self: False))
    evaluate_all = Evaluator.evaluate
    monkeypatch.setattr(
        Evaluator, "evaluate", lambda *given, **options: evaluate_all(*given, **{**options, "limit": 2})
    )
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in comparison.rglob("*")}
    evaluate = ["evaluate", str(comparison / RUNS[0])]
    given = ["--model", str(comparison.parent / "t5"), "--contexts", str(comparison.parent / "sentences.csv")]
    compare = [*COMPARE, str(comparison), *given, "--resume"]
    for arguments in (evaluate, [*evaluate, "--output", "figures.json"], compare):
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert (result.exit_code, result.output) == (0, ""), arguments
    assert {path: path.stat().st_mtime_ns for path in comparison.rglob("*")} == before
    assert not list(tmp_path.iterdir())


def with_another_token(folder: Path) -> Path:
    tokenizer = tokenizer_for("t5")
    tokenizer.add_tokens(["<another>"])
    save(folder, "t5", vocabulary=301)
    tokenizer.save_pretrained(folder)
    return folder


def with_another_end(folder: Path) -> Path:
    model = make_model("t5")
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(folder)
    tokenizer_for("t5").save_pretrained(folder)
    return folder


def without_end_token(folder: Path) -> Path:
    save(folder, "t5")
    make_tokenizer(eos=False).save_pretrained(folder)
    return folder


def with_a_short_window(folder: Path) -> Path:
    save(folder, "t5")
    tokenizer = tokenizer_for("t5")
    tokenizer.model_max_length = 12
    tokenizer.save_pretrained(folder)
    return folder


OTHER_TOKENS: list[tuple[Callable[[Path], Path], str]] = [
    (with_another_end, "its texts end with token 2 or 7, the base's with 2"),
    (without_end_token, "it reads the held-out prompt of row 1 as other tokens"),
    (with_a_short_window, "its window is 12 tokens, and the longest held-out prompt of the base takes "),
    (lambda folder: save(folder, "t5", vocabulary=320), "it predicts 320 tokens, the base 300"),
]


@pytest.mark.parametrize(
    ("make", "difference"),
    [
        (with_another_token, "its tokenizer has 301 tokens, the base's 300; 1 of its own"),
        (lambda folder: save(folder, "llama"), "it has a decoder alone, the base an encoder and a decoder"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHER_TOKENS),
    ],
)
def test_a_model_with_other_tokens_than_the_base_is_refused_before_anything_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path], difference: str
) -> None:
    def look(*arguments: Any, **options: Any) -> None:
        raise AssertionError("something was sampled")

    monkeypatch.setattr("cdpg.evaluation.evaluator.Evaluator.evaluate", look)
    base, model = save(tmp_path / "base", "t5"), make(tmp_path / "model")
    settings = ["--set", "device=cpu", "--set", "check_workers=0", "--set", "max_completion_length=6"]
    sentences = write_sentences(tmp_path / "sentences.csv", 3)
    named = ["--task", "translation-numbers", "--base", str(base), "--contexts", str(sentences), *settings]
    result = CliRunner().invoke(app, ["evaluate", str(model), *named])
    assert isinstance(result.exception, UserError), result.output
    for part in (str(model), str(base), difference, "--base"):
        assert part in str(result.exception)
    with pytest.raises(AssertionError, match="sampled"):
        CliRunner().invoke(app, ["evaluate", str(base), *named], catch_exceptions=False)


def test_a_run_is_evaluated_on_another_task_by_that_task_s_constraint(
    comparison: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(job: Job, *rest: Any) -> None:
        raise UserError(f"{job.task} by {job.constraint}, base {Path(job.model).name}")

    monkeypatch.setattr("cdpg.jobs.running.evaluate_model", look)
    result = CliRunner().invoke(app, ["evaluate", str(comparison / RUNS[0]), "--task", "code-pep8"])
    assert str(result.exception) == "code-pep8 by ('cdpg.constraints:pep8_clean',), base t5"
    result = CliRunner().invoke(app, ["evaluate", str(comparison / RUNS[0]), "--task", "translation-numbers"])
    assert str(result.exception) == "translation-numbers by ('test_tasks:short',), base t5"


def test_a_run_is_sampled_with_its_prefix(comparison: Path) -> None:
    def sampled(context: str) -> str:
        words = ["sample", str(comparison / RUNS[0]), "--context", context, "--seed", "1"]
        return CliRunner().invoke(app, words).output

    assert sampled("two dogs").count("log-probability") == 4
    assert sampled("two dogs") == sampled("translate English to French: two dogs") != sampled("one dog")


def test_what_goes_before_a_prompt_and_ends_an_output() -> None:
    assert prompting({}) == ("", None)
    assert prompting({"prompt_prefix": "Q: "}) == ("Q: ", None)
    assert prompting({"task": "translation-numbers"}) == ("translate English to French: ", None)
    assert prompting({"task": "translation-numbers", "prompt_prefix": ""}) == ("", None)
    assert prompting({"task": "code-pep8", "preset": "tiny"}) == ("", FunctionEnd())


def test_the_tasks_are_listed() -> None:
    result = CliRunner().invoke(app, ["tasks"])
    assert result.exit_code == 0
    for name in NAMES:
        assert name in result.output
