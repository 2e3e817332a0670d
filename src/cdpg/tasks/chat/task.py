"""The chat task: extract a record from a sentence, as JSON that follows a schema."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from cdpg.contexts.contexts import Context, load_contexts
from cdpg.errors import UserError
from cdpg.tasks.base import Draw, OriginRow, Preset, Row, Task
from cdpg.tasks.chat.constraint import check_schema
from cdpg.tasks.chat.metrics import RecordMeasure
from cdpg.tasks.chat.schemas import request_of, schema_of


def embedded_rows(draw: Draw) -> tuple[list[Row], list[Row]]:
    """Sentences with their records; those held out come from other templates."""
    return _listed("tuning"), _listed("evaluation")


def read_requests(path: str, column: str) -> list[Row]:
    """The user's requests, each with its schema and, if there is a column ``record``, what is right."""
    return [
        OriginRow(
            {
                **context.columns,
                "request": context.prompt,
                "schema": _schema(context, path),
                "record": _record(context, path),
            },
            context.row,
        )
        for context in load_contexts(path, prompt_column=column)
    ]


def _listed(name: str) -> list[Row]:
    file = resources.files("cdpg.tasks.chat") / "data" / f"records_{name}.jsonl"
    rows: list[Row] = []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            rows.append({"request": request_of(row["kind"], row["sentence"]), "schema": schema_of(row["kind"]), **row})
    return rows


def _schema(context: Context, path: str) -> Any:
    schema = _parsed(context, "schema", path)
    if schema is None:
        raise UserError(
            f"{path!r}, row {context.row}: no schema: give the JSON schema of the answer in the column 'schema', as an "
            "object or as text"
        )
    wrong = check_schema(schema)
    if wrong:
        raise UserError(f"{path!r}, row {context.row}: the schema is not a JSON schema: {wrong}")
    return schema


def _record(context: Context, path: str) -> Any:
    record = _parsed(context, "record", path)
    if record is None or isinstance(record, dict):
        return record
    raise UserError(
        f"{path!r}, row {context.row}: the record is not an object: give the right fields with their values"
    )


def _parsed(context: Context, column: str, path: str) -> Any:
    """A column that holds JSON as a value or, in a CSV file, as text."""
    value = context.columns.get(column)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path!r}, row {context.row}: the column {column!r} is not JSON: {error}") from error


JSON = Task(
    name="chat-json",
    summary="answer a chat message with JSON that follows a schema",
    constraint="cdpg.constraints:follows_schema",
    measure=RecordMeasure(),
    column="request",
    read=read_requests,
    presets={
        "tiny": Preset(
            "smollm2",
            embedded_rows,
            {
                "chat": True,
                "epochs": 8,
                "contexts_per_epoch": 8,
                "num_generations": 8,
                "max_completion_length": 64,
                "replay": 2,
                "validation_contexts": 12,
                "gain_draws": 8,
                "learning_rate": 1e-5,
                "warmup_epochs": 1,
                "decay_epochs": 4,
                "save_every": 4,
                "evaluate_every": 0,
                "evaluation_contexts": 24,
                "evaluation_samples": 4,
                "rows_per_pass": 256,
                "tokens_per_pass": 1280,
            },
        ),
    },
)
TASKS = (JSON,)
