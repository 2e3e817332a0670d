"""What a finished run has left, in a form that two runs can be compared by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from victim import EPOCHS, Keeper, log_of

from cdpg.storage.jsonl import read_jsonl


def result(folder: Path) -> dict[str, Any]:
    """All that a finished run leaves, but for times: bytes where there are none in the file."""
    last = folder / "checkpoints" / f"epoch-{EPOCHS:06d}"
    state = json.loads((last / "state.json").read_bytes())
    state["positions"] = {"samples": state["positions"]["samples"]}
    del state["config"]["output_dir"]
    left = sorted(path.name for part in (folder, folder / "checkpoints") for path in part.iterdir())
    return {
        "files": {path.name: path.read_bytes() for path in [*last.glob("*.safetensors"), folder / "samples.jsonl"]},
        "model": {path.name: path.read_bytes() for path in (folder / "model").iterdir()},
        "metrics": [untimed(record) for record in read_jsonl(folder / "metrics.jsonl")],
        "evaluations": [untimed(record) for record in read_jsonl(folder / "evaluations.jsonl")],
        "evaluation": untimed(json.loads((folder / "evaluation.json").read_bytes())),
        "state": state,
        "names": left,
    }


def untimed(value: Any) -> Any:
    """A record without its times, however deep they are."""
    if isinstance(value, dict):
        return {key: untimed(inner) for key, inner in value.items() if not key.startswith("seconds")}
    return [untimed(inner) for inner in value] if isinstance(value, list) else value


def finish(keeper: Keeper, folder: Path, **request: Any) -> dict[str, Any]:
    """Run to the end, resuming if there is something to resume."""
    assert keeper.run(folder, **request) == 0, log_of(folder).read_text()
    return result(folder)
