"""The notebook under examples/ and the program of the page on targets run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest

ROOT = Path(__file__).parents[1]


def run(source: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(source, "<example>", "exec"), names)
    return names


SMALL = {
    "num_generations=16": "num_generations=4",
    "epochs=3": "epochs=1",
    "max_completion_length=24": "max_completion_length=12",
    "evaluation_samples=16": "evaluation_samples=2, gain_draws=4",
}
"""Settings of the notebook, and what the short form has in their place."""


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_notebook_runs(whole: bool) -> None:
    """As it stands, or with a smaller run."""
    matplotlib.use("Agg")
    notebook = json.loads((ROOT / "examples" / "targets.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "notebook"}
    changed = []
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == []  # results are made, not stored
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            for setting, small in SMALL.items() if not whole else ():
                changed += [setting] * source.count(setting)
                source = source.replace(setting, small)
            run(source, names)
    assert changed == ([] if whole else [*SMALL])
    assert abs(names["fitted"].fit.reached[0] - 0.5) < 1e-6
    assert len(names["lines"]) == (4 if whole else 2)
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
