"""``evaluation.json`` and ``ideal_samples.jsonl``: the results of a run's final evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cdpg.errors import RunError
from cdpg.storage.atomic import write_bytes
from cdpg.storage.card import write_card
from cdpg.storage.json_files import encode, write_json
from cdpg.storage.run_folder import RunFolder, costs, kept
from cdpg.system import files


def write_evaluation(
    run: RunFolder, result: Mapping[str, Any], ideal_samples: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Write a run's figures and costs, the samples of the ideal model, and the card of the tuned model again.

    Returns the figures.
    """
    figures = {**result, "kept": kept(run), "costs": {"tuned": costs(run)}}
    try:
        files.make_folder(run.path)  # a trainer may evaluate before it has trained
    except OSError as error:
        raise RunError(f"cannot make the folder {str(run.path)!r}: {error.strerror or error}") from error
    write_bytes(run.ideal_samples, b"".join(encode(record) + b"\n" for record in ideal_samples))
    write_json(run.evaluation, figures)
    if run.model.is_dir():
        write_card(run.model, run)
    return figures
