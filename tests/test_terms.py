"""Messages name what exists where the caller is: options on the command line, names in Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from cdpg.errors import UserError
from cdpg.messages import terms
from cdpg.messages.terms import for_caller, on_command_line, term
from cdpg.storage.jsonl import JsonlFile
from cdpg.storage.run_folder import RunFolder

SOURCE = Path(__file__).parents[1] / "src" / "cdpg"
OPTION = re.compile(r"(?<![\w-])--[a-z]")

NOT_MESSAGES = {
    "messages/terms.py": "the terms themselves",
    "messages/foreign_names.py": "names both",
    "storage/provenance.py": "makes a command",
    "jobs/comparison.py": "starts a command",
    "config.py": "what --set takes",
    "report/page.py": "CSS, and a command that repeats a run",
    "report/style.py": "CSS",
    "models/engines/server.py": "options of vLLM",
    "models/engines/vllm.py": "options of vLLM",
    "training/engine.py": "an option of vLLM",
}


def options_named(path: Path) -> list[str]:
    """Texts of a module that name an option, but for docstrings and what is said to the command line alone."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    allowed = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "for_caller":
            allowed |= {id(part) for part in ast.walk(node.args[0])}
    texts = (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text.value for text in texts if id(text) not in allowed and OPTION.search(text.value)]


def test_outside_the_command_line_no_message_names_an_option() -> None:
    files = {str(path.relative_to(SOURCE)): path for path in SOURCE.rglob("*.py")}
    messages = {name: options_named(path) for name, path in files.items() if not name.startswith(("cli/", "assets/"))}
    found = {name: texts for name, texts in messages.items() if texts}
    assert {name: texts for name, texts in found.items() if name not in NOT_MESSAGES} == {}
    assert set(NOT_MESSAGES) <= set(files)


def test_a_message_that_names_an_option_would_be_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    message = 'raise UserError(f"the run {run!r} goes on with --resume")'
    either = 'for_caller(f"--typed {it}", "python")'
    module.write_text(f'"""--resume"""\n{message}\n{either}\nDASHES = "a -- b ---"\n')
    assert options_named(module) == [" goes on with --resume"]


def test_the_same_error_speaks_to_either_caller(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    JsonlFile(folder.metrics).append({"epoch": 1})
    with pytest.raises(UserError) as python:
        folder.require_fresh()
    with on_command_line(), pytest.raises(UserError) as typed:
        folder.require_fresh()
    assert str(python.value).endswith(
        "holds a run already: continue it with train(resume_from_checkpoint=True), replace it with "
        "overwrite_output_dir=True, or choose another folder with output_dir"
    )
    assert str(typed.value).endswith(
        "holds a run already: continue it with --resume, replace it with --overwrite, or choose another folder with "
        "--output-dir"
    )


def test_the_caller_is_python_again_when_the_command_has_ended() -> None:
    with pytest.raises(ValueError), on_command_line():
        assert term("resume") == "--resume"
        assert term("resume", typed=False) == "train(resume_from_checkpoint=True)"
        raise ValueError
    assert term("resume") == "train(resume_from_checkpoint=True)"
    assert for_caller("typed", "python", typed=True) == "typed"


def test_a_command_may_have_a_name_of_its_own_for_a_term() -> None:
    with on_command_line(), on_command_line(eval_contexts="--contexts"):
        assert (term("eval_contexts"), term("resume")) == ("--contexts", "--resume")
        assert term("eval_contexts", typed=False) == "eval_dataset"


@pytest.mark.parametrize("name", sorted(terms.TERMS))
def test_every_term_differs_and_is_an_option_on_the_command_line(name: str) -> None:
    typed, python = terms.TERMS[name]
    assert typed.startswith("--")
    assert not OPTION.search(python)
