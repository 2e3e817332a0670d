"""Run folders as training and evaluation write them, made of numbers alone: four methods on one task."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cdpg.config import CDPGConfig
from cdpg.evaluation.metrics import POOLED
from cdpg.report.assembly import read_studies
from cdpg.report.study import Study
from cdpg.tasks import known_metrics

METHODS = ("cdpg", "dpg", "reinforce", "ziegler")
ORIGIN = {
    "command": "cdpg compare {task} --preset tiny --seed 7",
    "model": "code-tiny",
    "base": "f8dc83cf" * 8,
    "device": "cpu",
    "processes": 1,
    "constraints": ["cdpg.tasks.code.constraint:compiles"],
    "stop": "FunctionEnd",
    "contexts": {"count": 5000, "sha256": "75e79619" * 8},
    "held_out": {"count": 500, "sha256": "1c9d2ab7" * 8},
    "threads": 2,
    "versions": {"python": "3.11.7", "cdpg": "0.1.0", "torch": "2.13.0", "transformers": "5.22.2", "numpy": "2.4.6"},
}
# From the base to the end of training: satisfaction, KL(p, π), KL(π, a), length, Distinct-2, effective sample size.
_ENDS = {
    "cdpg": (0.66, 0.31, 0.42, 41.0, 0.905, 0.52),
    "dpg": (0.61, 0.38, 0.47, 39.0, 0.897, 0.47),
    "reinforce": (0.93, 1.55, 3.90, 14.0, 0.71, 0.11),
    "ziegler": (0.83, 0.92, 1.70, 24.0, 0.83, 0.24),
}
_START = (0.38, 0.62, 0.0, 43.0, 0.912, 0.37)
_OTHER = {
    "code": {"compilability": 1.0, "pep8_violations": -1.4, "characters": 118.0, "ast_nodes": 31.0},
    "translation": {"satisfaction_beam": 1.1, "bleu": 27.0, "bleu_masked": 29.5},
    "summarization": {"precision_source": 0.8, "recall_target": 0.5, "entities": 3.0, "rouge_l": 0.29},
}
CODE = [
    ("def area(width, height):", "\n    return width * height\n", "\n    # the area\n    return width *\n"),
    ("def mean(values, default=0.0):",
     "\n    if not values:\n        return default\n    return sum(values) / len(values)\n",
     '\n    """Mean of values.\n    total = 0\n    for value in values:\n        total += value\n'),
    ("def open_log(path, mode='a'):", "\n    with open(path, mode) as log:\n        return log.read()\n",
     "\n    return open(path mode)\n"),
]  # fmt: skip
NEWS = [
    ("The mayor of Lyon, Jeanne Favre, met three delegates from Greenpeace in Paris on Monday. Favre said that the "
     "city had planted two thousand trees since 2019.",
     "Jeanne Favre met three delegates of Greenpeace in Paris; Lyon has planted 2,000 trees.",
     "A mayor said that trees were planted in Berlin, Berlin, Berlin and Berlin."),
]  # fmt: skip
VERSES = [
    ("We have two proposals and five amendments before Parliament.",
     "Nous avons 2 propositions et 5 amendements devant le Parliament.", "Nous avons deux propositions 2 2 5 5 5."),
]  # fmt: skip


def read_study(paths: list[Path]) -> Study:
    """The one study that some folders hold."""
    (study,) = read_studies(paths)
    return study


def change_config(run: Path, origin: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Write other settings, and other facts of its origin, into a run's configuration."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config = {**config, **settings, "origin": {**config["origin"], **(origin or {})}}
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return run


def compare_folder(folder: Path, task: str = "code-compilability", epochs: int = 200, seeds: int = 1) -> Path:
    """What ``cdpg compare`` leaves: a run for each method (and seed), and ``comparison.json``."""
    names = [(m, s, m if seeds == 1 else f"{m}-seed{s}") for m in METHODS for s in range(seeds)]
    for method, seed, name in names:
        run_folder(folder / name, method, task, epochs, seed)
    models = {"base": final_metrics(task, "base")}
    models |= {name: final_metrics(task, method, seed) for method, seed, name in names}
    whole = {**_evaluation_of(task, {name: method for method, _, name in names}, epochs), "models": models}
    whole["changes"] = {name: changes(models["base"], models[name]) for _, _, name in names}
    first, *others = [name for _, _, name in names]
    whole["between"] = {first: {name: changes(models[first], models[name]) for name in others}}
    whole["ideal"] = {"satisfaction": _of(1.0, 0), "length": _of(42.0, 1.2), "distinct_2": _of(0.91, 0.01)}
    whole["versus_ideal"] = {
        name: {key: _of(models[name][key]["mean"] / whole["ideal"][key]["mean"], 0.03) for key in whole["ideal"]}
        for name in models
    }
    if seeds > 1:
        whole["seeds"] = {
            method: {
                key: {**_of(value["mean"], 0.02), "values": [value["mean"] + 0.01 * seed for seed in range(seeds)]}
                for key, value in final_metrics(task, method).items()
            }
            for method in METHODS
        }
    write_json(folder / "comparison.json", whole)
    return folder


def run_folder(
    folder: Path, method: str = "cdpg", task: str = "code-compilability", epochs: int = 200, seed: int = 0
) -> Path:
    """One run, complete."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CDPGConfig(
        output_dir=str(folder), method=method, epochs=epochs, contexts_per_epoch=16, num_generations=32, seed=seed
    )  # type: ignore[arg-type]
    origin = {**ORIGIN, "command": ORIGIN["command"].format(task=task)}  # type: ignore[attr-defined]
    content = {**config.to_mapping(), "task": task, "origin": origin}
    (folder / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    rng = np.random.default_rng([METHODS.index(method), seed])
    write_lines(folder / "metrics.jsonl", [_epoch(method, epoch, epochs, rng) for epoch in range(1, epochs + 1)])
    samples = [sample for epoch in range(1, epochs + 1) for sample in _samples(method, task, epoch, epochs, rng)]
    write_lines(folder / "samples.jsonl", samples)
    step = max(1, epochs // 10)
    evaluations: list[dict[str, Any]] = [
        {"epoch": epoch, "samples": epoch * 512, "seconds": 5.1, "contexts": 64, "samples_per_context": 16,
         "metrics": metrics_at(task, method, epoch / epochs, 0.03, rng), "base": {POOLED: _of(_START[1], 0.02)}}
        for epoch in range(0, epochs + 1, step)
    ]  # fmt: skip
    del evaluations[0]["base"], evaluations[0]["metrics"][POOLED]
    write_lines(folder / "evaluations.jsonl", evaluations)
    base, tuned = final_metrics(task, "base"), final_metrics(task, method, seed)
    evaluation = {**_evaluation_of(task, {"tuned": method}, epochs), "base": base, "tuned": tuned}
    write_json(folder / "evaluation.json", {**evaluation, "changes": {"tuned": changes(base, tuned)}})
    return folder


def run_with_pooled(folder: Path, base: float | None, later: list[float], final: tuple[float, float]) -> Path:
    """A run with these pooled KLs along its way and at its end; without the base's, as runs once were logged."""

    def of(mean: float) -> dict[str, float]:
        return {"mean": mean, "low": mean - 0.01, "high": mean + 0.01}

    run = run_folder(folder, epochs=20)
    records = [{"epoch": 0, "metrics": {"satisfaction": of(0.3), POOLED: of(0.1)}}]  # of the base alone: no pool
    for epoch, value in enumerate(later, start=1):
        beside = {} if base is None else {"base": {POOLED: of(base)}}
        records.append({"epoch": epoch, "metrics": {"satisfaction": of(0.4), POOLED: of(value)}, **beside})
    write_lines(run / "evaluations.jsonl", records)
    content = json.loads((run / "evaluation.json").read_text())
    content["base"][POOLED], content["tuned"][POOLED] = map(of, final)
    content["changes"]["tuned"][POOLED] = {"difference": of(final[1] - final[0])}
    write_json(run / "evaluation.json", content)
    return run


def final_metrics(task: str, method: str, seed: int = 0) -> dict[str, Any]:
    """Every metric of the task for a model."""
    rng = np.random.default_rng([11, seed])
    return metrics_at(task, method, 0.0 if method == "base" else 1.0, 0.012, rng)


def metrics_at(task: str, method: str, share: float, spread: float, rng: np.random.Generator) -> dict[str, Any]:
    """All metrics when ``share`` of the training is done."""
    start, end = _START, _ENDS.get(method, _START)
    rise = 1 - math.exp(-3.2 * share) if share else 0.0
    now = [a + (b - a) * rise / (1 - math.exp(-3.2)) for a, b in zip(start, end, strict=True)]
    if method == "dpg":
        now[1] += 0.22 * max(0.0, share - 0.6)
    values = {
        "satisfaction": now[0], "kl_target_policy": now[1] * 0.8, POOLED: now[1],
        "kl_policy_base": now[2], "coverage": min(0.99, now[0] + 0.3), "z_mean": 0.38, "z_nstd": 0.74,
        "z_nstd_corrected": 0.61, "ess": now[5], "length": now[3], "ended": 0.93, "distinct_2": now[4],
    }  # fmt: skip
    for name, scale in _OTHER[task.split("-")[0]].items():
        values[name] = max(0.0, 2.0 + scale * now[0]) if scale < 0 else scale * (now[0] if scale < 2 else now[3] / 43)
    result: dict[str, Any] = {}
    metrics = known_metrics({})
    for name, value in values.items():
        noisy = value * (1 + float(rng.normal(0, 0.2 * spread))) if value else 0.0
        result[name] = _of(min(noisy, 1.0) if metrics[name].unit == "" and value <= 1 else noisy, value * spread)
    return result


def changes(base: dict[str, Any], tuned: dict[str, Any]) -> dict[str, Any]:
    """Paired differences and ratios."""
    found = {}
    for name, value in tuned.items():
        before, after = base[name]["mean"], value["mean"]
        ratio = _of(after / before, 0.02) if before else dict.fromkeys(("mean", "low", "high"))
        found[name] = {"difference": _of(after - before, 0.01 * abs(after) + 0.002), "ratio": ratio}
    return found


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, allow_nan=False), encoding="utf-8")


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records), encoding="utf-8")


def _of(mean: float, half: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _epoch(method: str, epoch: int, epochs: int, rng: np.random.Generator) -> dict[str, Any]:
    metrics = metrics_at("code", method, epoch / epochs, 0.03, rng)
    noise = float(rng.normal(0, 0.02))
    times = {"sampling": 0.82, "constraint": 0.21, "base": 0.09, "gradient": 0.55 if method != "ziegler" else 2.1}
    times = {f"seconds_{stage}": value * (1 + 3 * abs(noise)) for stage, value in times.items()}
    return {
        "epoch": epoch,
        **{key: metrics[key]["mean"] for key in ("coverage", "z_mean", "kl_target_policy", "length")},
        "satisfaction": min(1.0, max(0.0, metrics["satisfaction"]["mean"] + noise)),
        "ess": max(0.0, metrics["ess"]["mean"] + noise),
        "z_nstd": 0.74 + 2 * noise, "z_nstd_corrected": 0.61 + 2 * noise,
        "loss": 21.4 + noise, "grad_norm": 0.6 + noise, "learning_rate": 1e-5,
        "steps": 1, "steps_skipped": 0, "steps_nonfinite": 0,
        "samples": 512, "tokens": int(512 * metrics["length"]["mean"]),
        "seconds": sum(times.values()) + 0.05, **times,
    }  # fmt: skip


def _samples(method: str, task: str, epoch: int, epochs: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    start, end = _START[0], _ENDS[method][0]
    width = {"cdpg": 0.5, "dpg": 0.6, "reinforce": 2.2, "ziegler": 1.3}[method] * epoch / epochs
    records = []
    for sample in range(8):
        prompt, good, bad = _texts(task)[sample % len(_texts(task))]
        satisfied = bool(rng.random() < start + (end - start) * epoch / epochs)
        log_z = math.log(0.4) + float(rng.normal(0, 0.3))
        log_ratio = float(rng.normal(-0.5 * width**2, width)) if satisfied else None
        records.append({
            "epoch": epoch, "row": sample, "sample": sample, "prompt": prompt, "completion": good if satisfied else bad,
            "b": float(satisfied), "log_q": -30.0, "log_a": -30.5 if satisfied else None, "log_z": log_z,
            "log_ratio": None if log_ratio is None else log_ratio, "tokens": 24, "ended": True,
        })  # fmt: skip
    return records


def _texts(task: str) -> list[tuple[str, str, str]]:
    return {"code": CODE, "summarization": NEWS, "translation": VERSES}[task.split("-")[0]]


def _evaluation_of(task: str, methods: dict[str, str], epochs: int) -> dict[str, Any]:
    """All but the metrics; ``methods`` maps a model's name to its method."""
    rng = np.random.default_rng(5)
    outcomes: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(["base", *methods]):
        satisfied = _ENDS[methods[name]][0] if name in methods else _START[0]
        fails = 10280 * (1 - satisfied)
        outcomes[name] = {
            "token_rank": [int(90000 / (rank + 2) ** (1.02 + 0.04 * place)) + 1 for rank in range(4000 - 600 * place)]
        }
        if task.startswith("code"):
            kinds = {"ok": 10280 - fails, "incomplete": 0.35 * fails, "invalid syntax": 0.4 * fails}
            kinds |= {"unterminated string literal": 0.15 * fails, "unexpected indent": 0.1 * fails}
            codes = {
                "E501": 900,
                "W291": 720,
                "E231": 610,
                "E225": 500,
                "E303": 410,
                "W191": 300,
                "E261": 180,
                "E128": 90,
            }
            outcomes[name]["compile_outcome"] = {key: int(value) for key, value in kinds.items()}
            outcomes[name]["pep8_code"] = {key: int(value * (1.2 - satisfied)) for key, value in codes.items()}
        if task.startswith("summ"):
            labels = {"PERSON": 8000, "GPE": 6100, "ORG": 5900, "NORP": 2100, "LOC": 800, "FAC": 400, "EVENT": 250}
            outcomes[name]["entity_label"] = {key: int(value * (0.6 + satisfied)) for key, value in labels.items()}
    return {
        "task": task, "decoding": "ancestral" if task.startswith("code") else "beam", "contexts": 500,
        "contexts_tuned_on": 0, "samples_per_context": 32, "resamples": 1000, "confidence": 0.95, "seed": 7,
        "frequencies": outcomes, "partition": [float(z) for z in rng.beta(0.7, 1.1, 500)],
        "examples": [_example(task, row, ["base", *methods]) for row in range(3)],
        "costs": {name: {"epochs": epochs, "samples": 512 * epochs, "tokens": 20000 * epochs, "seconds": 1.7 * epochs}
                  for name in methods},
        "versions": ORIGIN["versions"], "command": f"cdpg compare {task} --preset tiny --seed 7",
    }  # fmt: skip


def _example(task: str, row: int, models: list[str]) -> dict[str, Any]:
    prompt, good, bad = _texts(task)[row % len(_texts(task))]
    outputs: dict[str, Any] = {}
    for place, model in enumerate(models):
        satisfied = (row + place) % 3 != 0
        output = {"text": good if satisfied else bad, "b": float(satisfied), "decoding": "ancestral"}
        verdict = {"outcome": "ok" if satisfied else "invalid syntax"} if task.startswith("code") else {}
        outputs[model] = [{**output, **verdict}]
    return {"row": row, "prompt": prompt, "columns": {"reference": "A reference."}, "outputs": outputs}
