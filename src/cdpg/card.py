"""The model card, ``README.md`` beside the tuned weights: what it is, how it was made, what it measured, its limits.

It is made from the run's files. Whatever comes from outside (names, commands) is shown as code, without characters that
steer a reader's terminal or end the code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cdpg import files
from cdpg.config import read_yaml
from cdpg.errors import RunError, UserError
from cdpg.evaluation.catalogue import METRICS
from cdpg.evaluation.unseen import contexts_in_words, warning
from cdpg.progress import plain_text
from cdpg.runlog import RunFolder, costs, mapping, read_json, write_json

FILE = "README.md"
_HUB_ID = r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?"
_METHODS = {
    "cdpg": "conditional distributional policy gradients",
    "dpg": "distributional policy gradients with one constant for all contexts",
    "reinforce": "Reinforce, which maximises the constraint alone",
    "ziegler": "PPO with a penalty on the distance from the base",
}


def write_evaluation(run: RunFolder, result: Mapping[str, Any]) -> dict[str, Any]:
    """Write a run's figures, its costs with them, and its model's card anew; what was written."""
    figures = {**result, "costs": {"tuned": costs(run)}}
    try:
        files.make_folder(run.path)  # a trainer may evaluate before it has trained
    except OSError as error:
        raise RunError(f"cannot make the folder {str(run.path)!r}: {error.strerror or error}") from error
    write_json(run.evaluation, figures)
    if run.model.is_dir():
        write_card(run.model, run)
    return figures


def write_card(model: Path, run: RunFolder) -> None:
    """Write the card of the model in folder ``model``, which ``run`` has made; whole or not at all."""
    if not run.config.is_file():
        return  # not a run's model: there is nothing to say
    try:
        settings, spent = read_yaml(run.config), costs(run)
        evaluation = read_json(run.evaluation) if run.evaluation.is_file() else {}
    except UserError:
        return  # someone has changed the files by hand: no reason to lose the model that was to be described
    if mapping(mapping(mapping(evaluation).get("costs")).get("tuned")).get("epochs") != spent["epochs"]:
        evaluation = {}  # of the model as it was before the run was continued
    kind = read_json(model / "config.json") if (model / "config.json").is_file() else None
    text = card(settings, evaluation, spent, kind)
    try:
        files.replace_file(model / FILE, text.encode("utf-8"))
    except OSError as error:
        raise RunError(f"cannot write {str(model / FILE)!r}: {error.strerror or error}; free some space") from error


def card(
    settings: Mapping[str, Any], evaluation: Mapping[str, Any], spent: Mapping[str, float], kind: Any = None
) -> str:
    """The card, from ``config.yaml``, ``evaluation.json`` or nothing, the run's costs, the model's ``config.json``."""
    origin = mapping(settings.get("origin"))
    base = str(origin.get("model") or settings.get("model") or "unknown")
    parts = [
        _front_matter(base, settings, kind),
        f"# {_code(base)}, tuned to satisfy {_constraints(settings)}",
        _summary(base, settings, spent),
        _figures(evaluation),
        _use(kind, settings),
        _repetition(origin),
        _limits(evaluation),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(base: str, settings: Mapping[str, Any], kind: Any) -> str:
    """What the hub reads. In ASCII, so that nothing in a name can end it or pass for a key."""
    tags = ["cdpg", "controlled-generation", str(settings.get("method", "cdpg")), settings.get("task")]
    facts: dict[str, Any] = {
        "base_model": hub_name(base),
        "base_model_relation": "finetune",
        "library_name": "cdpg" if kind is None else "transformers",
        "tags": list(dict.fromkeys(plain_text(str(tag), limit=60) for tag in tags if tag)),
    }
    if kind is not None and not mapping(kind).get("is_encoder_decoder"):
        facts["pipeline_tag"] = "text-generation"
    return f"---\n{yaml.safe_dump(facts, sort_keys=False, allow_unicode=False)}---"


def hub_name(model: str) -> str:
    """A hub id as it is; of a folder its last part, as the hub takes no paths."""
    if re.fullmatch(_HUB_ID, model, re.ASCII) and not Path(model).is_dir():
        return model
    name = re.sub(r"[^\w.-]+", "-", Path(model).name, flags=re.ASCII).strip("-.")[:96]
    return name or "local-model"


def _summary(base: str, settings: Mapping[str, Any], spent: Mapping[str, float]) -> str:
    method = str(settings.get("method", "cdpg"))
    origin = mapping(settings.get("origin"))
    contexts = mapping(origin.get("contexts")).get("count")
    rows = [
        ("base", _code(base)),
        ("constraint", _constraints(settings)),
        ("task", _code(settings["task"]) if settings.get("task") else ""),
        ("method", f"{_code(method)}: {_METHODS[method]}" if method in _METHODS else _code(method)),
        ("contexts to tune on", f"{contexts:,}" if isinstance(contexts, int) else ""),
        ("epochs", f"{spent['epochs']:,.0f}"),
        ("samples drawn", f"{spent['samples']:,.0f}"),
        ("learning rate", _code(settings.get("learning_rate", ""))),
        ("longest completion", f"{_code(settings.get('max_completion_length', ''))} tokens"),
        ("text before every prompt", _code(settings["prompt_prefix"]) if settings.get("prompt_prefix") else ""),
    ]
    return (
        "The model was tuned towards p(x|c) ∝ a(x|c)·b(x,c): the distribution that always satisfies the constraint b "
        "and is otherwise as close as possible to the base a.\n\n"
        + _table(("", ""), [(name, value) for name, value in rows if value])
    )


def _figures(evaluation: Mapping[str, Any]) -> str:
    base, tuned = mapping(evaluation.get("base")), mapping(evaluation.get("tuned"))
    if not tuned:
        return "## Figures\n\nThe model has not been evaluated."
    names = [name for name in METRICS if name in tuned] + [name for name in tuned if name not in METRICS]
    rows = [
        (
            METRICS[name].label if name in METRICS else _code(name),
            _interval(name, base.get(name)),
            _interval(name, tuned.get(name)),
            (METRICS[name].better or "") if name in METRICS else "",
        )
        for name in names
    ]
    confidence = evaluation.get("confidence")
    share = f"{confidence:.0%} intervals" if isinstance(confidence, float) else "intervals"
    problem = warning(evaluation)
    return (
        "## Figures\n\n"
        + (f"> **Warning:** {problem}.\n\n" if problem else "")
        + f"On {contexts_in_words(evaluation)}, {_count(evaluation.get('samples_per_context'))} samples each, "
        f"with {share} over contexts. "
        "KL(p, π) is the distance from the ideal model, KL(π, a) that from the base.\n\n"
        + _table(("metric", "base", "tuned", "better"), rows)
    )


def _interval(metric: str, value: Any) -> str:
    figures = mapping(value)
    numbers = [figures.get(key) for key in ("mean", "low", "high")]
    if not all(isinstance(number, (int, float)) for number in numbers):
        return "–"
    digits = METRICS[metric].digits if metric in METRICS else 3
    mean, low, high = (f"{number:.{digits}f}" for number in numbers)
    return f"{mean} ({low} to {high})"


def _use(kind: Any, settings: Mapping[str, Any]) -> str:
    if kind is None:
        return ""
    auto = "AutoModelForSeq2SeqLM" if mapping(kind).get("is_encoder_decoder") else "AutoModelForCausalLM"
    length = settings.get("max_completion_length")
    limit = length if isinstance(length, int) else 128
    return (
        "## Use\n\n```python\n"
        f"from transformers import {auto}, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("...")  # this folder\n'
        f'model = {auto}.from_pretrained("...")\n'
        'inputs = tokenizer("...", return_tensors="pt")\n'
        f"outputs = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens={limit})\n```\n\n"
        "It was tuned with pure ancestral sampling (temperature 1, no top-k, no top-p); the figures hold for the "
        "decoding they name."
    )


def _repetition(origin: Mapping[str, Any]) -> str:
    known = mapping(origin.get("versions")).items()
    versions = ", ".join(f"{_code(name)} {_code(version)}" for name, version in known)
    lines = ["## How it was made"]
    if origin.get("command"):
        lines.append(_block(str(origin["command"])))
    lines.append(f"Versions: {versions}." if versions else "")
    return "\n\n".join(line for line in lines if line)


def _limits(evaluation: Mapping[str, Any]) -> str:
    sentences = [
        "Satisfaction is raised, not guaranteed: check outputs where it matters.",
        "The constraint is what its function checks and nothing more: neither truth nor safety was looked at.",
        "What the base gets wrong, and its biases, remain; its licence and terms apply.",
        _scope(evaluation),
    ]
    return "## Limits\n\n" + "\n".join(f"- {sentence}" for sentence in sentences)


def _scope(evaluation: Mapping[str, Any]) -> str:
    """What the figures hold for."""
    if not mapping(evaluation.get("tuned")):
        return "Nothing was measured: evaluate the model before relying on it."
    if warning(evaluation):
        return "Contexts that were tuned on are among those measured: evaluate the model on new ones."
    return "The figures hold for contexts like those measured."


def _constraints(settings: Mapping[str, Any]) -> str:
    given = settings.get("constraint") or mapping(settings.get("origin")).get("constraints") or []
    names = [given] if isinstance(given, str) else list(given)
    return " and ".join(_code(name) for name in names) or "a constraint"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _code(value: Any) -> str:
    """Foreign text as a code span: the backticks around it are one more than any in it; a bar would end its cell."""
    text = plain_text(str(value), limit=300).replace("|", "¦").strip() or "–"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _block(text: str) -> str:
    """Foreign text as a block of code."""
    shown = plain_text(text, limit=4000)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    return f"{fence}\n{shown}\n{fence}"


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "some"
