"""Parts of the documentation that are made from the program itself.

Between ``<!-- settings -->`` (or ``inputs``, ``metrics``, ``presets TASK``) and ``<!-- end -->`` a page has a table.
It is in the page, so that it can be read without the site; ``python docs/hooks.py`` writes it, and a test compares it
with the program. In the site, links to source files become links to the reference, and formulas become MathML, which
browsers show without a script.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from cdpg.cli.settings import field_docstrings, setting_docstrings
from cdpg.config import FIELDS, CDPGConfig
from cdpg.jobs.job import Job
from cdpg.tasks import TASKS, known_metrics

_TABLE = re.compile(r"(<!-- (settings|inputs|metrics|presets)(?: ([\w-]+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_FORMULA = re.compile(r'class="arithmatex">\\([(\[])(.*?)\\[)\]]</', re.DOTALL)
_FUNCTION_NAME = re.compile(r"<m[io]>(log|min)</m[io]>")
_SPACED = r'<mi>\1</mi><mspace width="0.167em" />'  # "log a", not "loga"
_SOURCE = re.compile(r"\]\((?:\.\./)+src/(cdpg/[\w/]+)\.py\)")


def settings_table() -> str:
    """Every setting with its default and what it means."""
    texts, defaults = setting_docstrings(), CDPGConfig()
    return _table(
        ("setting", "default", "meaning"),
        [(f"`{name}`", _shown(getattr(defaults, name)), _markdown(texts[name])) for name in FIELDS],
    )


def inputs_table() -> str:
    """What a run is about, beside its settings."""
    texts = field_docstrings(Job)
    names = [field.name for field in dataclasses.fields(Job) if field.name in texts]
    return _table(("key", "meaning"), [(f"`{name}`", _markdown(texts[name])) for name in names])


def metrics_table() -> str:
    """Every metric of an evaluation."""
    rows = [
        (f"`{name}`", metric.label, _markdown(metric.meaning), metric.unit or "–", metric.better or "–")
        for name, metric in known_metrics({}).items()
    ]
    return _table(("name", "label", "meaning", "unit", "better"), rows)


def presets_table(task: str) -> str:
    """The presets of a task, side by side; settings that are in neither have their default."""
    presets = TASKS[task].presets
    names = list(dict.fromkeys(key for preset in presets.values() for key in preset.settings))
    rows = [("`model`", *(f"`{preset.model}`" for preset in presets.values()))]
    defaults = CDPGConfig()
    for name in names:
        values = [preset.settings.get(name, getattr(defaults, name)) for preset in presets.values()]
        rows.append((f"`{name}`", *map(_shown, values)))
    return _table(("setting", *presets), rows)


_TABLES: dict[str, Callable[..., str]] = {
    "settings": settings_table, "inputs": inputs_table, "metrics": metrics_table, "presets": presets_table,
}  # fmt: skip


def with_tables(markdown: str) -> str:
    """A page with its tables as the program has them."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{_made(found)}\n\n{found[5]}", markdown)


def _made(found: re.Match[str]) -> str:
    return _TABLES[found[2]](*filter(None, [found[3]]))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make the tables, without their marks, and turn links to sources around."""
    text = _TABLE.sub(_made, markdown)
    upwards = "../" * page.file.src_uri.count("/")

    def to_reference(link: re.Match[str]) -> str:
        module = link[1].replace("/", ".").removesuffix(".__init__")
        return f"]({upwards}reference/stages.md#{module})"

    return _SOURCE.sub(to_reference, text)


def on_page_content(content: str, **_: Any) -> str:
    """Every formula as MathML; the extension arithmatex has put it into an element of its own, as TeX."""

    def rendered(formula: re.Match[str]) -> str:
        display = "block" if formula[1] == "[" else "inline"
        mathml = convert(html.unescape(formula[2]).strip(), display=display)
        return f'class="arithmatex">{_FUNCTION_NAME.sub(_SPACED, mathml)}</'

    return _FORMULA.sub(rendered, content)


def _shown(value: Any) -> str:
    if value is None:
        return "`null`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value!r}`" if value == "" else f"`{value}`"


def _markdown(text: str) -> str:
    """A docstring's sentence inside a table's cell."""
    return text.replace("``", "`").replace("|", "\\|").replace("π_θ", "π")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for path in sorted(Path(__file__).parent.rglob("*.md")):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
