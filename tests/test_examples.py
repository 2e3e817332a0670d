"""The programs under examples/ run as they stand, and their constraints judge as they say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import tiny
import warm
from cdpg.storage.jsonl import read_jsonl

FOLDER = Path(__file__).parents[1] / "examples"
FAMILIES = {"json_schema": "gpt2", "plain_answers": "llama", "terminology": "t5"}
SMALL = ("epochs=2", "num_generations=4", "max_completion_length=6", "evaluation_samples=2", "check_workers=1")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_and_short() -> None:
    files = {path.stem: path for path in FOLDER.glob("*.py")}
    assert files.keys() == FAMILIES.keys()
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 85 for path in files.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_runs_from_the_command_line(name: str, tmp_path: Path) -> None:
    tiny.save(tmp_path / "model", FAMILIES[name])
    texts = "The committee has a vote\nTwo dogs and the report\nA member of staff\n"
    (tmp_path / "contexts.txt").write_text(texts, encoding="utf-8")
    overrides = [word for setting in (*SMALL, f"output_dir={tmp_path / 'run'}") for word in ("--set", setting)]
    command = [warm.python(), str(FOLDER / f"{name}.py"), "--model", "model", "--contexts", "contexts.txt", *overrides]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "is called in the training process" not in result.stderr  # a script's functions run in workers
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text(encoding="utf-8"))
    assert evaluation["contexts"] == 1
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [record["epoch"] for record in records] == [1, 2]
    assert all(record.get("checks_failed", 0) == 0 for record in records)


def test_json_schema() -> None:
    example = load("json_schema")
    good = ['{"name": "Ann", "age": 31, "city": "Oslo"}', ' {"city": "", "age": -1, "name": "\\u00e9"} ']
    good.append('{"name": "Ann", "age": 31.0, "city": "Oslo"}')  # a whole number, whatever its spelling
    bad = [
        "", "null", "[" * 10_000, '{"name": "Ann", "age": 31}', '{"name": "Ann", "age": "31", "city": "Oslo"}',
        '{"name": "Ann", "age": true, "city": "Oslo"}', '{"name": "Ann", "age": 31.5, "city": "Oslo"}',
        '{"name": "Ann", "age": 31, "city": "Oslo", "x": 1}', '{"name": "Ann", "age": 31, "city": "Oslo"} Text',
    ]  # fmt: skip
    texts = [*good, *bad]
    assert example.valid_json([""] * len(texts), texts) == [True] * len(good) + [False] * len(bad)
    example.VALIDATOR.check_schema(example.SCHEMA)
    assert example.FirstLine().cut(' {"a"') is None and example.FirstLine().cut("{}\nText") == "{}"
    assert len(set(example.SENTENCES)) == 12


def test_plain_answers() -> None:
    example = load("plain_answers")
    plain = "Cats purr when they are happy. They purr to heal, too."  # 11 words of 12 syllables in 2 sentences
    assert example.grade(plain) == pytest.approx(0.39 * 11 / 2 + 11.8 * 12 / 11 - 15.59)
    learned = "Domesticated felines habitually vocalise contentment through laryngeal oscillation."
    chat = [{"role": "assistant", "content": plain}]
    answers = [plain, chat, learned, "", "Cats purr.", plain.removesuffix("."), "word " * 41 + "."]
    assert example.right_length([""] * 7, answers) == [True, True, True, False, False, False, False]
    assert example.easy_to_read([""] * 4, answers[:4]) == [1.0, 1.0, 0.0, 0.0]
    between = "The moon seems to change its shape because sunlight falls on another part of it every evening."
    assert 0 < example.easy_to_read([""], [between])[0] < 1


def test_terminology() -> None:
    example = load("terminology")
    assert example.terms_of("The Committee, and its members") == ["commission", "membre"]
    assert example.terms_of("He reported it") == []
    texts = ["Les membres de la Commission", "le membre", "la sous-commissionnaire et le membre", ""]
    wanted = [["commission", "membre"]] * 3 + [[]]
    assert example.uses_terms([""] * 4, texts, wanted) == [True, False, False, True]
