"""The documentation: it builds strictly, what is made from the program is complete, and its examples hold."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from cdpg import demo
from cdpg.cli import app
from cdpg.config import FIELDS
from cdpg.tasks import TASKS, known_metrics

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def formulas(page: Path) -> list[str]:
    """The TeX of a page: ``$…$`` in a line, or ``$$…$$``; there is none in code."""
    text = re.sub(
        r"^```.*?^```|`[^`\n]+`|^ {4}.*?$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return re.findall(r"\$\$.+?\$\$|\$[^$]+\$", text, re.DOTALL)


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("documentation_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the documentation's packages want Python 3.11")
@pytest.mark.exhaustive
def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    built = {str(path.relative_to(tmp_path / "site")): path for path in (tmp_path / "site").rglob("*.html")}
    texts = {name: path.read_text(encoding="utf-8") for name, path in built.items()}
    for name, text in texts.items():
        assert not re.search(r"<!-- (settings|inputs|metrics|presets)|:class:<code>", text), name
        fetched = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\"> ]+)", text)
        fetched += re.findall(r"<link[^>]* href=\"?(https?:[^\"> ]+)[^>]*stylesheet", text)
        assert not fetched, name
    assert all(f"<code>{setting}</code>" in texts["settings.html"] for setting in FIELDS)
    assert all(f"<code>{metric}</code>" in texts["methods/metrics.html"] for metric in known_metrics({}))
    assert 'id="cdpg.methods.cdpg"' in texts["reference/stages.html"]
    assert 'href="../reference/stages.html#cdpg.methods.cdpg"' in texts["methods/cdpg.html"]
    for page in PAGES:
        html = texts[str(page.relative_to(DOCS).with_suffix(".html"))]
        assert html.count("<math ") == len(formulas(page)), f"{page}: a formula is not rendered"
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any("CDPGTrainer" in entry["title"] for entry in index["docs"])


def test_formulas_are_rendered_by_the_build(hooks: ModuleType) -> None:
    assert len(formulas(DOCS / "methods" / "cdpg.md")) > 10
    line = hooks.on_page_content(r'<span class="arithmatex">\(Z_c &lt; 1\)</span>')
    assert "<msub><mi>Z</mi><mi>c</mi></msub><mo>&#x0003C;</mo><mn>1</mn>" in line
    assert 'display="inline"' in line
    block = hooks.on_page_content('<div class="arithmatex">\\[\n\\log a\n\\]</div>')
    assert 'display="block"' in block
    assert "\\log" not in block
    assert hooks.on_page_content("<code>$HOME</code>") == "<code>$HOME</code>"


def test_tables_are_those_of_the_program(hooks: ModuleType) -> None:
    settings = hooks.settings_table()
    assert [line.split("`")[1] for line in settings.splitlines()[2:]] == list(FIELDS)
    assert "| `epochs` | `1000` | Rounds of sampling, as in the paper; *not* passes over the data. |" in settings
    assert "| `model` | The model to tune: a hub id, a folder, or one that " in hooks.inputs_table()
    assert len(hooks.metrics_table().splitlines()) == 2 + len(known_metrics({}))
    for name, task in TASKS.items():
        for preset in task.presets.values():
            assert f"`{preset.model}`" in hooks.presets_table(name)
        assert f"<!-- presets {name} -->" in (DOCS / "tasks" / f"{name}.md").read_text(encoding="utf-8")


def test_pages_have_the_tables_of_the_program(hooks: ModuleType) -> None:
    """A page is also read without the site, which makes the tables anew."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    stale = [str(page.relative_to(ROOT)) for page, text in texts.items() if hooks.with_tables(text) != text]
    assert stale == [], "python docs/hooks.py writes the tables"
    settings = texts[DOCS / "settings.md"]
    assert hooks.settings_table() in settings
    assert hooks.inputs_table() in settings
    assert hooks.metrics_table() in texts[DOCS / "methods" / "metrics.md"]


def commands(page: Path) -> Iterator[list[str]]:
    """The words after ``cdpg`` of every command in a page."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "cdpg" in words:
                yield words[words.index("cdpg") + 1 :]


def pages_with(what: Callable[[Path], Any]) -> pytest.MarkDecorator:
    """The pages that hold something to test, and there must be some."""
    found = [page for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md") if what(page)]
    assert found
    return pytest.mark.parametrize("page", found, ids=[str(page.relative_to(ROOT)) for page in found])


@pages_with(lambda page: list(commands(page)))
def test_commands_have_the_options_that_there_are(page: Path) -> None:
    group = typer.main.get_command(app)
    for name, *words in commands(page):
        group.commands[name].make_context(name, words)  # type: ignore[attr-defined]
        for option, setting in itertools.pairwise(words):
            assert option != "--set" or setting.partition("=")[0] in FIELDS
        if words and not words[0].startswith("-") and name in ("check", "run", "compare"):
            assert words[0] in TASKS or words[0].endswith(".yaml")


def named_files(page: Path) -> list[str]:
    """Python files that the text names with their folder."""
    return re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text(encoding="utf-8"))


@pages_with(named_files)
def test_files_that_the_text_names_are_there(page: Path) -> None:
    roots = (ROOT, ROOT / "src" / "cdpg")
    assert [name for name in named_files(page) if not any((root / name).is_file() for root in roots)] == []


@pages_with(formulas)
def test_formulas_can_be_read_on_github(page: Path) -> None:
    """There Markdown takes the backslash of an escaped mark away, and a formula in a line must not be broken."""
    for formula in formulas(page):
        assert not re.search(r"\\[^A-Za-z]", formula), formula
        assert formula.startswith("$$\n") or "\n" not in formula, formula


@pages_with(lambda page: ">>> " in page.read_text(encoding="utf-8"))
def test_examples_in_the_text_hold(page: Path) -> None:
    failed, tried = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert failed == 0 < tried


@pages_with(lambda page: "from cdpg" in "".join(blocks(page, "python")))
def test_what_code_imports_is_there(page: Path) -> None:
    for block in blocks(page, "python"):
        imported = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
        for node in imported:
            if node.module and node.module.split(".")[0] == "cdpg":
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)


def test_the_worked_example_has_the_figures_of_the_base() -> None:
    page = (DOCS / "idea.md").read_text(encoding="utf-8")
    satisfied, to_ideal, to_base = demo.describe(demo.make_base(), demo.make_base())
    for model, context, i in (("base", "first", 0), ("", "second", 1)):
        figures = (f"{satisfied[i]:.3f}", f"{to_ideal[i]:.3f}", f"{to_base[i]:.3f}")
        assert f"| {' | '.join((model, context, *figures))} |".replace("|  |", "| |") in page
