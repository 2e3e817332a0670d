"""The notebook under examples/ and the program of the page on targets run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib

ROOT = Path(__file__).parents[1]


def run(source: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(source, "<example>", "exec"), names)
    return names


def test_the_notebook_runs() -> None:
    matplotlib.use("Agg")
    notebook = json.loads((ROOT / "examples" / "targets.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == []  # results are made, not stored
        if cell["cell_type"] == "code":
            run("".join(cell["source"]), names)
    assert abs(names["fitted"].fit.reached[0] - 0.5) < 1e-6
    assert len(names["lines"]) == 4
    assert len(names["axes"]) == 2


def test_the_library_without_the_trainer() -> None:
    page = (ROOT / "docs" / "targets.md").read_text(encoding="utf-8")
    (program,) = (
        one for one in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "Sampler" in one
    )
    statements = [line for line in program.splitlines() if line and not line.startswith(("from ", "import "))]
    assert len(statements) <= 20
    names = run(program, {"__name__": "page"})
    rollout = names["rollout"]
    assert names["judge"].tilt.is_fitted
    assert rollout.log_p.shape == rollout.log_q.shape == (2, 16)
    assert float(names["to_base"].abs().max()) < 1e-3  # the policy is the base
    assert bool((names["to_target"] >= 0).all())
    assert bool((names["z"] > 0).all())
