"""The task chat-json: JSON by a schema, the fields of the record, its contexts, and a run of it on a tiny model."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import tiny
from cdpg.cli import app
from cdpg.constraints import follows_schema
from cdpg.constraints.judge import Judge
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.jobs.job import Job
from cdpg.sandbox.functions import traits_of
from cdpg.storage.json_files import read_json as read_json_file
from cdpg.tasks.base import Draw
from cdpg.tasks.chat.constraint import NOT_JSON, VALID, check_schema, outcome
from cdpg.tasks.chat.metrics import RecordMeasure, fields_right
from cdpg.tasks.chat.schemas import FIELDS, schema_of
from cdpg.tasks.chat.task import embedded_rows, read_requests
from corpora.records import TEMPLATES

PERSON = schema_of("person")
RIGHT = {"name": "Ida Berg", "age": 34, "city": "Oslo", "job": "nurse"}
ANSWER = json.dumps(RIGHT)
hopeless: Callable[..., list[bool]] = traits_of(follows_schema).hopeless


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (ANSWER, VALID),
        (f" \n{json.dumps(RIGHT, indent=2)}\n", VALID),
        (ANSWER.replace("34", "34.0"), VALID),
        (ANSWER.replace("34", '"34"'), "a value of the wrong type"),
        (ANSWER.replace("34", "34.5"), "a value of the wrong type"),
        (ANSWER.replace("34", "true"), "a value of the wrong type"),
        (ANSWER.replace('"nurse"', "null"), "a value of the wrong type"),
        (ANSWER.replace(', "job": "nurse"', ""), "a field is missing"),
        (ANSWER.replace("}", ', "pet": "cat"}'), "a field too many"),
        (ANSWER.replace("}", ', "age": 34}'), NOT_JSON),
        (ANSWER.replace("34", "NaN"), NOT_JSON),
        (ANSWER.replace("34", "-Infinity"), NOT_JSON),
        (ANSWER.replace("34", "1" * 5000), NOT_JSON),
        (f"```json\n{ANSWER}\n```", NOT_JSON),
        (f"Here it is: {ANSWER}", NOT_JSON),
        (f"{ANSWER}\n{ANSWER}", NOT_JSON),
        (f"{ANSWER}.", NOT_JSON),
        (ANSWER[:-1], NOT_JSON),
        ("[" * 100_000, NOT_JSON),
        (f"[{ANSWER}]", "a value of the wrong type"),
        ("34", "a value of the wrong type"),
        ("", NOT_JSON),
    ],
)
def test_the_verdict_is_strict(answer: str, expected: str) -> None:
    assert outcome(answer, PERSON) == expected
    message = [{"role": "assistant", "content": answer}]
    verdict = expected == VALID
    assert follows_schema(["p", "q"], [answer, message], schema=[PERSON] * 2) == [verdict] * 2


def test_another_rule_of_a_schema() -> None:
    assert outcome("3", {"maximum": 2}) == "another rule of the schema"


def test_a_context_without_a_schema_is_one_sentence() -> None:
    with pytest.raises(UserError, match="a context has no schema: give a JSON schema in the column 'schema'"):
        follows_schema(["p"], [ANSWER], schema=[None])


def test_contexts_without_the_column_are_refused_before_anything_is_sampled() -> None:
    """As that of ``cdpg sample RUN --exact --context TEXT``."""
    with pytest.raises(
        UserError, match="follows_schema takes 'schema', which has no default, and the contexts have no"
    ):
        Judge(follows_schema).require_columns([Context("p", {"request": "p"}, 1)])


def asked(prefix: str, schema: Any = PERSON) -> bool:
    (found,) = hopeless(["p"], [prefix], schema=[schema])
    return found


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", False), (" \n", False), ("{", False), (' {"name": "I', False), (ANSWER, False), (ANSWER + " \n", False),
        ("Here", True), ("```json", True), ("[", True), ("\ufffd", True),
        (ANSWER + "\n`", True), (ANSWER.replace("34", '"34"'), True), ("{}", True), (ANSWER[:-1], False),
    ],
)  # fmt: skip
def test_what_is_hopeless(prefix: str, expected: bool) -> None:
    assert asked(prefix) is expected


def test_what_is_hopeless_depends_on_the_type() -> None:
    for kind, first in {"array": "[", "string": '"', "integer": "-", "number": "4", "boolean": "t"}.items():
        assert not asked(first, {"type": kind})
        assert asked("x", {"type": kind})
    assert asked("4", {"type": "string"})
    assert not asked("4", {"type": ["string", "integer"]}) and not asked("4", {})
    assert not asked("12 ", {"maximum": 2}), "numbers are left to the constraint"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "age"]), inner, max_size=2),
    max_leaves=4,
)
_SCHEMAS = st.sampled_from([PERSON, {}, {"type": "array"}, {"type": "integer"}, {"type": ["object", "string"]}])


@given(_VALUES, _SCHEMAS, st.sampled_from(["", " ", "\n "]), st.integers(0, 3))
def test_nothing_hopeless_can_be_satisfied(value: Any, schema: Any, blank: str, indent: int) -> None:
    """Every beginning of an answer that satisfies the constraint is asked about."""
    answer = blank + json.dumps(value, indent=indent or None) + blank
    if outcome(answer, schema) == VALID:
        assert not any(asked(answer[:end], schema) for end in range(len(answer) + 1))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (3, "it is 3, where an object was expected"),
        ({"type": "text"}, "'text' is not valid"),
        ({"properties": {"a": {"$ref": "https://example.org/a"}}}, "it refers to 'https://example.org/a'"),
        ({"allOf": [{"$ref": "other.json"}]}, "it refers to 'other.json'"),
        ({"items": {"$ref": "#/$defs/one"}, "$defs": {"on": {}}}, "it refers to '#/$defs/one', and has no such part"),
        ({"$dynamicRef": "#one"}, "it refers to '#one', and has no such part"),
    ],
)
def test_a_schema_that_is_none(schema: Any, problem: str, tmp_path: Path) -> None:
    assert (check_schema(schema) or "").startswith(problem)
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"request": "Extract.", "schema": schema}) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"requests.jsonl', row 1: the schema is not a JSON schema: ") as error:
        read_requests(str(file), "request")
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_a_schema_may_refer_to_its_parts() -> None:
    schema = {"type": "array", "items": {"$ref": "#/$defs/one"}, "$defs": {"one": {"type": "integer"}}}
    assert check_schema(schema) is None
    assert [outcome(text, schema) for text in ("[1]", '["1"]')] == [VALID, "a value of the wrong type"]
    anchored = {"$ref": "#list", "$defs": {"a/b": {"$anchor": "list", "items": {"$ref": "#/$defs/a~1b"}}}}
    inner = {"$id": "http://x.org/in", "$ref": "#/$defs/k", "$defs": {"k": {"type": "array"}}}
    for schema in (anchored, {"$ref": "#/$defs/in", "$defs": {"in": inner}}):
        assert check_schema(schema) is None
        assert outcome("[[]]", schema) == VALID


def test_a_value_or_a_property_named_like_a_reference_is_none() -> None:
    schema = {"properties": {"$ref": {"enum": [{"$ref": "elsewhere"}]}}}
    assert check_schema(schema) is None
    assert outcome('{"$ref": {"$ref": "elsewhere"}}', schema) == VALID


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        (ANSWER, 1.0),
        (json.dumps({**RIGHT, "name": " ida  berg", "city": "OSLO"}), 1.0),
        (json.dumps({**RIGHT, "age": "34"}), 0.75),
        (json.dumps({**RIGHT, "age": 34.0, "city": "Rome"}), 0.75),
        (json.dumps({"name": "Ida Berg", "age": 35, "extra": 1}), 0.25),
        (f"{ANSWER}.", 0.0),
        ("[1]", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_fields_right(answer: str, share: float) -> None:
    assert fields_right(answer, RIGHT) == share


def test_true_is_not_one() -> None:
    assert fields_right('{"a": true, "b": 1}', {"a": 1, "b": True}) == 0.0
    assert fields_right('{"a": true, "b": null}', {"a": True, "b": None}) == 1.0


def test_the_measure() -> None:
    context = Context("p", {"schema": PERSON, "record": RIGHT}, 1)
    plain = Context("q", {"schema": {"type": "integer"}, "record": None}, 2)
    wrong = json.dumps({**RIGHT, "age": "34"})
    found = RecordMeasure()([context, plain], [[ANSWER, wrong, "no"], ["3", '"3"', "no"]])
    np.testing.assert_equal(found.features["valid_json"], [[1, 0, 0], [1, 0, 0]])
    np.testing.assert_equal(found.features["fields_right"], [[1, 0.75, 0], [np.nan] * 3])
    np.testing.assert_equal(found.features["fields_right_valid"], [[1, np.nan, np.nan], [np.nan] * 3])
    assert found.frequencies["json_outcome"] == {VALID: 2, "a value of the wrong type": 2, NOT_JSON: 2}
    assert found.remarks["outcome"] == [[VALID, "a value of the wrong type", NOT_JSON]] * 2
    without = RecordMeasure()([plain], [["3"]])
    assert set(without.features) == {"valid_json", "distinct_2"}
    lost = RecordMeasure()([context], [["a", "b"]], lambda function, texts, exhausted=None: [None, exhausted])
    np.testing.assert_equal(lost.features["valid_json"], [[np.nan, 0]])


def rows() -> tuple[Any, Any]:
    return embedded_rows(Draw(0, lambda rows: [True] * len(rows)))


def test_the_contexts_that_come_with_the_package() -> None:
    tuning, held_out = rows()
    assert (len(tuning), len(held_out)) == (1000, 64)
    assert not {row["sentence"] for row in tuning} & {row["sentence"] for row in held_out}
    for row in (*tuning, *held_out):
        answer = json.dumps(row["record"])
        assert outcome(answer, row["schema"]) == VALID
        assert row["request"][-1] == {"role": "user", "content": f"Text: {row['sentence']}"}
        assert all(str(value) in row["sentence"] for value in row["record"].values()), row["sentence"]
        assert all(f'"{name}"' in row["request"][0]["content"] for name in row["record"])
    assert {row["kind"] for row in held_out} == set(FIELDS)


def test_held_out_sentences_have_other_templates() -> None:
    for kind in FIELDS:
        assert not set(TEMPLATES["tune"][kind]) & set(TEMPLATES["held-out"][kind])


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_requests_of_ones_own(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"request": "Extract.", "schema": PERSON, "record": RIGHT, "other": 1})
    (row,) = read_requests(file, "request")
    assert dict(row) == {"request": "Extract.", "schema": PERSON, "record": RIGHT, "other": 1}
    csv = tmp_path / "b.csv"
    quoted = json.dumps(PERSON).replace('"', '""')
    csv.write_text(f'text,schema\nExtract.,"{quoted}"\n', encoding="utf-8")
    (row,) = read_requests(str(csv), "text")
    assert dict(row) == {"request": "Extract.", "schema": PERSON, "record": None}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"request": "Extract."}, "row 1: no schema: give the JSON schema of the answer in the column 'schema'"),
        ({"request": "Extract.", "schema": "{"}, "row 1: the column 'schema' is not JSON: "),
        ({"request": "Extract.", "schema": {}, "record": [1]}, "row 1: the record is not an object: "),
        ({"request": [{"role": "user"}], "schema": {}}, "each message must be"),
        ({"prompt": "Extract.", "schema": {}}, "has no column 'request'"),
    ],
)
def test_bad_requests_are_one_sentence(row: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read_requests(write(tmp_path / "a.jsonl", row), "request")
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_without_jsonschema(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "jsonschema":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    prepare = traits_of(follows_schema).prepare
    assert prepare is not None
    with pytest.raises(UserError, match=r"need jsonschema, which is not installed: pip install 'cdpg\[tasks\]'"):
        prepare()


def test_prompts_are_messages(tmp_path: Path) -> None:
    tiny.save(tmp_path / "llama", "llama")
    inputs = Job.from_mapping({"task": "chat-json", "model": str(tmp_path / "llama")}).load()
    prompt: Any = inputs.held_out[0].prompt
    assert [message["role"] for message in prompt] == ["user", "assistant"] * 3 + ["user"]
    assert "exactly these keys" in prompt[0]["content"]
    for asked, answered in zip(prompt[::2], prompt[1::2], strict=False):
        record = json.loads(answered["content"])
        assert outcome(answered["content"], inputs.held_out[0].columns["schema"]) == VALID
        assert all(str(value) in asked["content"] for value in record.values())
    file = write(tmp_path / "a.jsonl", {"request": "Extract.", "schema": {}}, {"request": prompt, "schema": {}})
    given = {"task": "chat-json", "model": str(tmp_path / "llama"), "contexts": file}
    inputs = Job.from_mapping(given).load()
    assert [context.prompt for context in inputs.tuning] == [({"role": "user", "content": "Extract."},), prompt]
    with pytest.raises(UserError, match="row 2 is a chat, and prompt_prefix goes before a text"):
        Job.from_mapping({**given, "prompt_prefix": "Please. "}).load()


@pytest.mark.slow
def test_a_run_on_a_tiny_chat_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "llama", "llama")
    schema = {"type": ["object", "string", "number"], "maximum": 9}
    write(
        tmp_path / "requests.jsonl", *({"request": f"Say {i}.", "schema": schema, "record": {"a": 1}} for i in (1, 2))
    )
    words = [
        "run",
        "chat-json",
        "--model",
        "llama",
        "--contexts",
        "requests.jsonl",
        "--epochs",
        "2",
        "--output-dir",
        "r",
    ]
    settings = ("contexts_per_epoch=2", "num_generations=4", "max_completion_length=8", "evaluation_samples=2",
                "evaluation_contexts=2", "device=cpu")  # fmt: skip
    words += [word for setting in settings for word in ("--set", setting)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found: Any = read_json_file(tmp_path / "r" / "evaluation.json")
    for part in ("base", "tuned"):
        assert 0 <= found[part]["valid_json"]["mean"] == found[part]["satisfaction"]["mean"] <= 1
        assert found[part]["fields_right"]["mean"] <= found[part]["valid_json"]["mean"]
        assert {"distinct_2", "kl_policy_base"} <= set(found[part])
