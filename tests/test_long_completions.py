"""Completions of 1,024 tokens after prompts of 4,096: a run's memory is bounded by ``tokens_per_pass``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdpg.storage.jsonl import read_jsonl

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

GIVEN = {"width": 64, "layers": 2, "vocabulary": 6000, "N": 2, "prompt": 4096, "length": 1024, "epochs": 1}
SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "memory.py"


def child(folder: Path, what: str, **changes: Any) -> float:
    """A fresh process that makes the model or a run; its peak memory in MB, if it was a run."""
    given = {**GIVEN, "M": 2, "tokens_per_pass": 5120, **changes}
    words = ["child", "--what", what, "--folder", str(folder), "--given", json.dumps(given)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, str(SCRIPT), *words], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return 0.0 if what == "model" else float(json.loads((folder / "peak-0.json").read_text())) / 1e6


def test_memory_is_that_of_a_pass_however_many_samples_there_are(tmp_path: Path) -> None:
    child(tmp_path, "model")
    few, many = child(tmp_path, "none"), child(tmp_path, "none", M=12)
    (record,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert record["samples"] == 24 and record["length"] > 900, "most go on to the limit"
    at_once = child(tmp_path, "none", M=12, tokens_per_pass=100_000)
    assert many < 1.1 * few, (few, many)
    assert at_once > 1.3 * many, (many, at_once)
