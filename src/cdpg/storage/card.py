"""The model card, ``README.md`` beside the tuned weights: what the model is, how it was made, its figures and limits.

It is made from the run's files. Values from outside (names, commands) are shown as code, without control characters and
without characters that would end the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdpg.config import CDPGConfig
from cdpg.errors import RunError, UserError
from cdpg.evaluation.held_out import MODEL_NOTICES, contexts_in_words, on_few, on_gain, warning
from cdpg.evaluation.metrics import METRICS, Metric, fixed, metric_info
from cdpg.messages.text import plain_text, typed_command
from cdpg.methods import METHODS
from cdpg.models.names import EMBEDDED
from cdpg.storage.json_files import mapping, read_json, sequence
from cdpg.storage.run_folder import RunFolder, costs, kept
from cdpg.storage.usage import is_hub_id, program, settings_in_words
from cdpg.system import files

FILE = "README.md"


def write_card(model: Path, run: RunFolder) -> None:
    """Write the card of the model in folder ``model``, which ``run`` has made, atomically."""
    if not run.config.is_file():
        return  # not a run's model
    try:
        settings, spent = run.read_config(), costs(run)
        evaluation = read_json(run.evaluation) if run.evaluation.is_file() else {}
    except UserError:
        return  # the files were changed by hand; the model is kept without a card
    if mapping(mapping(mapping(evaluation).get("costs")).get("tuned")).get("epochs") != spent["epochs"]:
        evaluation = {}  # of the model as it was before the run was continued
    kind = read_json(model / "config.json") if (model / "config.json").is_file() else None
    text = card(settings, evaluation, spent, kind, kept(run))
    try:
        files.replace_file(model / FILE, text.encode("utf-8"))
    except OSError as error:
        raise RunError(f"cannot write {str(model / FILE)!r}: {error.strerror or error}; free some space") from error


def card(
    settings: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    spent: Mapping[str, float],
    kind: Any = None,
    chosen: Mapping[str, Any] | None = None,
) -> str:
    """The card, from ``config.yaml``, ``evaluation.json`` or nothing, the run's costs, the model's ``config.json``.

    ``chosen`` is the content of ``kept.json``, if there is one.
    """
    origin = mapping(settings.get("origin"))
    base = str(origin.get("model") or settings.get("model") or "unknown")
    parts = [
        _front_matter(base, settings, kind),
        f"# {_code(base)}, tuned to satisfy {_constraints(settings)}",
        _summary(base, settings, spent, mapping(chosen)),
        _figures(evaluation),
        _use(kind, settings, evaluation),
        _repetition(origin),
        _limits(evaluation),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(base: str, settings: Mapping[str, Any], kind: Any) -> str:
    """The metadata that the hub reads."""
    from huggingface_hub import ModelCardData

    tags = ["cdpg", "controlled-generation", str(settings.get("method", CDPGConfig.method)), settings.get("task")]
    known = base_on_hub(base, settings)
    writes_on = kind is not None and not mapping(kind).get("is_encoder_decoder")
    facts = ModelCardData(
        base_model=known,
        base_model_relation="finetune" if known else None,
        library_name="cdpg" if kind is None else "transformers",
        tags=[plain_text(str(tag), limit=60) for tag in tags if tag],  # a name neither ends the block nor adds a key
        pipeline_tag="text-generation" if writes_on else None,
    )
    return f"---\n{facts.to_yaml()}\n---"


def base_on_hub(base: str, settings: Mapping[str, Any]) -> str | None:
    """The base's name on the hub; None if it came from a folder or a program, since the hub accepts no other name."""
    sampling = mapping(mapping(settings.get("origin")).get("sampling"))
    if "hub_id" in sampling:
        known = sampling["hub_id"]
        return known if isinstance(known, str) and is_hub_id(known) else None
    embedded = (EMBEDDED / base).is_dir()  # of a run that did not record it
    return base if is_hub_id(base) and base != "unknown" and not embedded else None


def _summary(base: str, settings: Mapping[str, Any], spent: Mapping[str, float], chosen: Mapping[str, Any]) -> str:
    method = str(settings.get("method", CDPGConfig.method))
    origin = mapping(settings.get("origin"))
    given, tuned = (mapping(origin.get(key)).get("count") for key in ("contexts", "tuned_on"))
    tuned = given if tuned is None else tuned  # a run from before it was recorded
    aside = given - tuned if isinstance(given, int) and isinstance(tuned, int) else 0
    rows = [
        ("base", _code(base)),
        ("constraint", _constraints(settings)),
        ("task", _code(settings["task"]) if settings.get("task") else ""),
        ("method", f"{_code(method)}: {METHODS[method].description}" if method in METHODS else _code(method)),
        ("contexts to tune on", f"{tuned:,}" if isinstance(tuned, int) else ""),
        ("validation contexts", f"{aside:,}" if aside > 0 else ""),
        ("epochs", f"{spent['epochs']:,.0f}"),
        ("model of epoch", _code(chosen.get("epoch")) if chosen.get("keep") == "best" else ""),
        ("contexts per epoch (N)", _code(settings.get("contexts_per_epoch", ""))),
        ("samples per context (M)", _code(settings.get("num_generations", ""))),
        ("samples drawn", f"{spent['samples']:,.0f}"),
        ("learning rate", _code(settings.get("learning_rate", ""))),
        ("adapters", _adapters(settings)),
        ("longest completion", f"{_code(settings.get('max_completion_length', ''))} tokens"),
        ("text before every prompt", _code(settings["prompt_prefix"]) if settings.get("prompt_prefix") else ""),
    ]
    tilted = any(str(name).startswith(("moment ", "reward ")) for name in origin.get("constraints") or ())
    return (
        "The model was tuned towards p(x|c) ∝ a(x|c)·b(x,c)·exp(λ·φ(x,c) + r(x,c)/β): the distribution that always "
        "satisfies the constraint b, has the asked-for means of the moments φ, weighs the rewards r against KL(π, a) "
        "by β, and is otherwise as close as possible to the base a.\n\n"
        if tilted
        else "The model was tuned towards p(x|c) ∝ a(x|c)·b(x,c): the distribution that always satisfies the "
        "constraint b and is otherwise as close as possible to the base a.\n\n"
    ) + _table(("", ""), [(name, value) for name, value in rows if value])


def _adapters(settings: Mapping[str, Any]) -> str:
    """The adapters that were tuned; nothing where all weights were."""
    tuned = mapping(mapping(mapping(settings.get("origin")).get("sampling")).get("adapters"))
    facts = [f"{name} {_code(tuned[name])}" for name in ("rank", "alpha") if tuned.get(name) is not None]
    return ", ".join([_code(tuned.get("kind")), *facts]) if tuned else ""


def _figures(evaluation: Mapping[str, Any]) -> str:
    base, tuned = mapping(evaluation.get("base")), mapping(evaluation.get("tuned"))
    if not tuned:
        return "## Figures\n\nThe model has not been evaluated."
    known = {**METRICS, **{name: metric for name, metric in metric_info(evaluation).items() if name not in METRICS}}
    names = [name for name in known if name in tuned] + [name for name in tuned if name not in known]
    rows = [_figure(name, known.get(name), base.get(name), tuned.get(name)) for name in names]
    confidence = evaluation.get("confidence")
    share = f"{confidence:.0%} intervals" if isinstance(confidence, float) else "intervals"
    found = sequence(mapping(evaluation.get(MODEL_NOTICES)).get("tuned"))
    problems = [warning(evaluation), *(plain_text(text, limit=400) for text in found if isinstance(text, str))]
    return (
        "## Figures\n\n"
        + "".join(f"> **Warning:** {problem}.\n\n" for problem in problems if problem)
        + f"On {contexts_in_words(evaluation)}, {_count(evaluation.get('samples_per_context'))} samples each, "
        f"with {share} over contexts. {_sentence(on_few(evaluation))}{_sentence(on_gain(evaluation))}"
        "KL(p, π) is the distance from the ideal model, KL(π, a) that from the base.\n\n"
        + _table(("metric", "base", "tuned", "better"), rows)
    )


def _figure(name: str, metric: Metric | None, base: Any, tuned: Any) -> tuple[str, str, str, str]:
    """A row of the table; a metric that nothing describes is shown by its name."""
    if metric is None:
        return _code(name), _interval(base, 3), _interval(tuned, 3), ""
    label = re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", metric.label)  # it may come from a file
    return label, _interval(base, metric.digits), _interval(tuned, metric.digits), metric.better or ""


def _interval(value: Any, digits: int) -> str:
    figures = mapping(value)
    numbers = [figures.get(key) for key in ("mean", "low", "high")]
    mean, low, high = (fixed(number, digits) if isinstance(number, (int, float)) else None for number in numbers)
    if mean is None:
        return "–"
    return mean if low is None or high is None else f"{mean} ({low} to {high})"


def _sentence(text: str) -> str:
    """A text as a sentence, with a capital and a full stop; empty for an empty text."""
    return f"{text[0].upper()}{text[1:]}. " if text else ""


def _use(kind: Any, settings: Mapping[str, Any], evaluation: Mapping[str, Any]) -> str:
    """A standalone Python program that samples the model as the evaluation did."""
    if kind is None:
        return ""
    sampling = mapping(mapping(settings.get("origin")).get("sampling"))
    if not sampling:  # a run from before it was recorded
        sampling = {"seq2seq": bool(mapping(kind).get("is_encoder_decoder"))}
    notes = [*_on_use(sampling, settings), *_on_weights(mapping(sampling.get("weights")), evaluation)]
    return "\n\n".join(["## Use", _fenced(program(sampling, settings), "python"), *notes])


def _on_use(sampling: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """Notes on the program, a paragraph each."""
    yield (
        "This samples as the evaluation did: from the model's full distribution, which is what was tuned. The "
        "folder's `generation_config.json` says the same."
    )
    if sampling.get("system") is True:
        yield (
            "The prompts that the model was tuned on had different system messages: give the model one like them, or "
            "the figures do not hold."
        )
    own = mapping(sampling.get("generation_settings"))
    if own:
        yield (
            f"The base came with other generation settings, which are not kept: {_code(settings_in_words(own))}. Pass "
            "them to `generate` to use them; the figures do not hold for them."
        )
    stop = mapping(sampling.get("stop"))
    if stop and not stop.get("code"):
        yield (
            f"**The run ended outputs by its own stop rule, {_code(stop.get('name'))}, which the program above "
            "lacks**: apply the same rule, or the figures do not hold."
        )
    if mapping(settings.get("origin")).get("adapters"):
        yield (
            "The adapters that were trained are merged into the weights. `adapter/` holds them alone, to be put on the "
            'base: `PeftModel.from_pretrained(base, name, subfolder="adapter")`.'
        )


def _on_weights(weights: Mapping[str, Any], evaluation: Mapping[str, Any]) -> Iterator[str]:
    """A note on the type of the weights, if it has changed."""
    original, saved = weights.get("original"), weights.get("saved")
    if original and original != saved:
        yield f"The base's weights are {_code(original)}; these are saved as {_code(saved)}, as they were trained."
    elif original and original not in ("float32", "float64"):
        text = f"The weights were trained in float32 and are saved in the base's type, {_code(saved)}"
        if "of_saved_model" in evaluation:  # an older file does not say it
            measured = "the saved weights" if evaluation["of_saved_model"] else "the weights before rounding"
            text += f"; the figures are of {measured}"
        yield f"{text}."


def _repetition(origin: Mapping[str, Any]) -> str:
    known = mapping(origin.get("versions")).items()
    versions = ", ".join(f"{_code(name)} {_code(version)}" for name, version in known)
    lines = ["## How it was made"]
    if origin.get("command"):
        lines.append(_block(typed_command(str(origin["command"]))))
    lines.append(f"Versions: {versions}." if versions else "")
    return "\n\n".join(line for line in lines if line)


def _limits(evaluation: Mapping[str, Any]) -> str:
    sentences = [
        "Satisfaction is raised, not guaranteed: check outputs where it matters.",
        "The constraint is what its function checks and nothing more: neither truth nor safety was checked.",
        "What the base gets wrong, and its biases, remain; its licence and terms apply.",
        _scope(evaluation),
    ]
    return "## Limits\n\n" + "\n".join(f"- {sentence}" for sentence in sentences)


def _scope(evaluation: Mapping[str, Any]) -> str:
    """The contexts for which the figures hold."""
    if not mapping(evaluation.get("tuned")):
        return "Nothing was measured: evaluate the model before relying on it."
    if warning(evaluation):
        return "Contexts that were tuned on are among those measured: evaluate the model on new ones."
    return "The figures hold for contexts like those measured."


def _constraints(settings: Mapping[str, Any]) -> str:
    named = [settings.get(key) or [] for key in ("constraint", "moment", "reward")]
    judging, moments, rewards = ([given] if isinstance(given, str) else list(given) for given in named)
    names = [*judging, *(f"moment {name}" for name in moments), *(f"reward {name}" for name in rewards)]
    names = names or list(mapping(settings.get("origin")).get("constraints") or [])
    return " and ".join(_code(name) for name in names) or "a constraint"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _code(value: Any) -> str:
    """Untrusted text as a code span, with more backticks than any in it; a bar, which would end a cell, is replaced."""
    text = plain_text(str(value), limit=300).replace("|", "¦").strip() or "–"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _block(text: str) -> str:
    """Untrusted text as a block of code."""
    return _fenced(plain_text(text, limit=4000))


def _fenced(text: str, language: str = "") -> str:
    """A block of code, whose fence is longer than any in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "some"
