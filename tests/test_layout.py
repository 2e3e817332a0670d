"""The rules of the house that a machine can check: who may import whom, sizes, and what is not used at all."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdpg.methods import METHODS

SOURCE = Path(__file__).parents[1] / "src" / "cdpg"
TESTS = Path(__file__).parent

STAGES = (
    "errors",
    "messages",
    "values",
    "config",
    "system",
    "contexts",
    "models",
    "sandbox",
    "constraints",
    "target",
    "rollout",
    "methods",
    "evaluation",
    "storage",
    "training",
    "tasks",
    "jobs",
    "preflight",
    "report",
    "cli",
    "demo",
)
"""The folders and files of the package in the order of the data: each imports only those above it."""
FRONT_DOORS = ("__init__", "__main__", "constraints/__init__")
"""These give names to what stands in later folders, on demand."""

WITHOUT_TORCH = (
    "errors", "messages", "values", "config", "sandbox", "report", "storage/run_folder", "storage/jsonl",
    "storage/json_files", "training/progress", "tasks/__init__",
)  # fmt: skip
"""Whatever lists, helps and reports must not wait for torch."""
WITHOUT_TORCH_AT_IMPORT = ("methods",)
"""These are listed with their settings, and load torch when a run begins."""
HEAVY = {"torch", "transformers", "accelerate", "peft", "datasets", "spacy"}
LONGEST_FUNCTION = 60
LONGEST_FILE = 400

RANK = {name: rank for rank, name in enumerate(STAGES)}
FILES = sorted(path for path in SOURCE.rglob("*.py") if "assets" not in path.relative_to(SOURCE).parts)


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """Several rules go through them all."""
    return list(ast.walk(tree))


def name_of(path: Path) -> str:
    """``models/causal`` for ``src/cdpg/models/causal.py``."""
    return path.relative_to(SOURCE).with_suffix("").as_posix()


def stage_of(path: Path) -> str:
    """``models/causal.py`` belongs to ``models``."""
    return name_of(path).partition("/")[0]


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module that is imported, wherever it stands, in full: ``from a import b`` counts as ``a.b``."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def order_broken(stage: str, tree: ast.AST) -> list[str]:
    problems = []
    for name, line in imports(tree):
        package, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if package != "cdpg" or other == stage:
            continue
        if other not in RANK and RANK[stage] == len(STAGES) - 1:
            continue  # the last stages come in by the front door, as users do
        if other not in RANK:
            problems.append(f"line {line}: {name} is no stage: import it from the module that defines it")
        elif RANK[other] >= RANK[stage]:
            problems.append(f"line {line}: {stage} comes before {other} and may not import it")
    return problems


def long_functions(tree: ast.AST) -> list[str]:
    problems = []
    for node in nodes_of(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONGEST_FUNCTION:
                problems.append(f"line {node.lineno}: {node.name} has {lines} lines")
    return problems


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: all but the bodies of functions."""
    yield node
    body: list[ast.AST] = []
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        body = node.body if isinstance(node.body, list) else [node.body]  # type: ignore[assignment]
    for child in ast.iter_child_nodes(node):
        if not any(child is statement for statement in body):
            yield from at_import(child)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for an attribute of a name, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and dotted(node.value):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def forbidden(tree: ast.AST) -> list[str]:
    problems = []
    for name, line in imports(tree):
        if name.split(".")[0] in {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}:
            problems.append(f"line {line}: {name}: loading such a file runs code")
        if name in {"torch.load", "torch.save", "os.environ", "os.getenv", "os.environb"}:
            problems.append(f"line {line}: {name}: not to be imported by name")
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "print":
            problems.append(f"line {node.lineno}: print")
        if dotted(node) in {"torch.load", "torch.save"} or dotted(node).endswith("read_pickle"):
            problems.append(f"line {node.lineno}: {dotted(node)}: loading such a file runs code")  # type: ignore[attr-defined]
    for node in at_import(tree):
        if dotted(node) in {"os.environ", "os.environb", "os.getenv"}:
            problems.append(f"line {node.lineno}: the environment is read at import")  # type: ignore[attr-defined]
    return problems


def names_compared_with(tree: ast.AST) -> list[str]:
    """Comparisons with the name of a method, and tables by it: a method itself says what it is like."""
    problems = []
    for node in nodes_of(tree):
        if isinstance(node, (ast.Compare, ast.Dict)):
            parts = node.keys if isinstance(node, ast.Dict) else [node.left, *node.comparators]
            texts = [part for one in parts if one is not None for part in ast.walk(one)]
            found = {text.value for text in texts if isinstance(text, ast.Constant)} & set(METHODS)
            if found - {"cdpg"} or (found and "method" in ast.unparse(node)):  # the package has the first one's name
                problems.append(f"line {node.lineno}: {ast.unparse(node)}")
    return problems


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@functools.cache
def private_attributes() -> frozenset[str]:
    """Private names that the package gives to attributes of its own objects."""
    stored = (node for path in FILES for node in nodes_of(parse(path)) if isinstance(node, ast.Attribute))
    own = {node.attr for node in stored if isinstance(node.ctx, ast.Store) and dotted(node.value) == "self"}
    return frozenset(name for name in own if is_private(name))


def private_names(tree: ast.AST) -> list[str]:
    """Private names of the package that a test imports, reads or replaces."""
    modules: set[str] = set()
    problems = []
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cdpg":
            modules |= {alias.asname or alias.name for alias in node.names}
            problems += [f"line {node.lineno}: {alias.name}" for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.Import):
            modules |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names if "cdpg" in alias.name}
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of_an_object = node.attr in private_attributes() and dotted(node.value) not in ("self", "cls")
            if of_an_object or dotted(node).partition(".")[0] in modules:
                problems.append(f"line {node.lineno}: {ast.unparse(node)}")
        if not isinstance(node, ast.Call) or not dotted(node.func).endswith(("setattr", "delattr", "getattr", "patch")):
            continue
        names = [text.value for text in node.args if isinstance(text, ast.Constant) and isinstance(text.value, str)]
        of_the_package = bool(node.args) and dotted(node.args[0]).partition(".")[0] in modules
        problems += [
            f"line {node.lineno}: {name}"
            for name in names
            if is_private(name.rpartition(".")[2]) and (of_the_package or name.startswith("cdpg."))
        ]
    return problems


def test_tests_use_public_names() -> None:
    """What a test needs is a parameter, a constant with a public name, or seen from outside."""
    problems = {str(path.relative_to(TESTS)): private_names(parse(path)) for path in sorted(TESTS.rglob("*.py"))}
    assert {path: found for path, found in problems.items() if found} == {}


def found_in_files(find: Callable[[Path], object]) -> dict[str, object]:
    """What is found in each file of the package; nothing is right."""
    assert len(FILES) > 150
    found = {name_of(path): find(path) for path in FILES}
    return {name: problem for name, problem in found.items() if problem}


def test_only_a_method_knows_its_name() -> None:
    assert found_in_files(lambda path: stage_of(path) != "methods" and names_compared_with(parse(path))) == {}


def test_a_stage_imports_only_what_comes_before_it() -> None:
    def broken(path: Path) -> object:
        stage = stage_of(path)
        if name_of(path) in FRONT_DOORS:
            return []
        return order_broken(stage, parse(path)) if stage in RANK else f"{stage} is none of STAGES: put it there"

    assert found_in_files(broken) == {}


def test_every_stage_is_there() -> None:
    assert set(RANK) == {stage_of(path) for path in FILES} - {"__init__", "__main__"}


def test_the_architecture_page_has_the_stages_in_this_order() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == STAGES


def test_files_and_functions_are_short() -> None:
    assert found_in_files(lambda path: len(path.read_text(encoding="utf-8").splitlines()) > LONGEST_FILE) == {}
    assert found_in_files(lambda path: long_functions(parse(path))) == {}


def test_the_trainer_is_the_loop_alone() -> None:
    """What sets up, saves, evaluates and resumes has modules of its own, which bring what they need."""
    names = {name.rpartition(".")[0] for name, _ in imports(parse(SOURCE / "training" / "trainer.py"))}
    assert len([name for name in names if name.startswith("cdpg")]) < 15


def test_what_is_not_used() -> None:
    assert found_in_files(lambda path: forbidden(parse(path))) == {}
    marks = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
    assert found_in_files(lambda path: marks.findall(path.read_text(encoding="utf-8"))) == {}


def files_of(stage: str) -> list[Path]:
    found = [path for path in FILES if f"{name_of(path)}/".startswith(f"{stage}/")]
    assert found, f"there is no {stage}"
    return found


def module_of(path: Path) -> str:
    """``cdpg.models.causal`` for ``src/cdpg/models/causal.py``."""
    return ".".join(("cdpg", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def first_that_loads(modules: list[str], unwanted: set[str]) -> str:
    """The first of some modules, imported one after the other, that loads one of the unwanted, with what it loads."""
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    found = {unwanted!r} & set(sys.modules)\n"
        "    if found: sys.exit(name + ' loads ' + ', '.join(sorted(found)))\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    return process.stderr.strip()


@pytest.mark.parametrize("stage", WITHOUT_TORCH)
def test_what_reads_files_only_imports_no_torch(stage: str) -> None:
    for path in files_of(stage):
        assert [name for name, _ in imports(parse(path)) if name.split(".")[0] in HEAVY] == [], path


def test_what_reads_files_only_loads_no_torch_by_way_of_others() -> None:
    stages = (*WITHOUT_TORCH, *WITHOUT_TORCH_AT_IMPORT)
    assert first_that_loads([module_of(path) for stage in stages for path in files_of(stage)], HEAVY) == ""


def test_worker_processes_start_without_large_libraries() -> None:
    """There is a new one for every run and every killed worker."""
    assert first_that_loads([module_of(path) for path in files_of("sandbox")], {*HEAVY, "numpy", "asyncio"}) == ""


def test_a_module_can_load_too_much() -> None:
    assert first_that_loads(["json", "cdpg.target.noise", "wave"], {"wave"}) == "wave loads wave"


# The rules themselves can fail.


@pytest.mark.parametrize(
    ("stage", "code"),
    [
        ("target", "from cdpg.methods.base import SampleLoss"),
        ("target", "from cdpg import methods"),
        ("target", "import cdpg.training.trainer"),
        ("target", "def f():\n    from cdpg.rollout.rollout import Rollout"),
        ("storage", "from cdpg.training.progress import RunProgress"),
        ("training", "from cdpg import CDPGConfig"),
    ],
)
def test_the_order_can_be_broken(stage: str, code: str) -> None:
    assert len(order_broken(stage, ast.parse(code))) == 1


def test_the_order_can_be_kept() -> None:
    code = "import os\nfrom cdpg import target, errors\nfrom cdpg.rollout.rollout import Rollout"
    assert order_broken("methods", ast.parse(code)) == []
    assert order_broken("demo", ast.parse("from cdpg import CDPGTrainer")) == []


@pytest.mark.parametrize(
    "code",
    [
        "passes = 4 if config.method == 'ziegler' else 1",
        "if run.method in ('cdpg', 'dpg'):\n    pass",
        "if method != 'cdpg':\n    pass",
        "LABELS = {'dpg': 'DPG'}",
    ],
)
def test_a_method_s_name_can_be_tested_for(code: str) -> None:
    assert len(names_compared_with(ast.parse(code))) == 1


@pytest.mark.parametrize("code", ["'cdpg' in versions", "method = 'dpg'", "METHODS[method].passes > 1"])
def test_names_of_methods_may_be_said(code: str) -> None:
    assert names_compared_with(ast.parse(code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "from cdpg.cli import _status",
        "from cdpg.storage import checkpoints\ncheckpoints._CHUNK",
        "import cdpg.storage\ncdpg.storage.checkpoints._CHUNK",
        "import cdpg.storage.checkpoints as c\nc._CHUNK",
        "from cdpg.storage import checkpoints as c\nmonkeypatch.setattr(c, '_CHUNK', 50)",
        "monkeypatch.setattr('cdpg.storage.checkpoints._CHUNK', 50)",
        "from cdpg import CDPGTrainer\ngetattr(CDPGTrainer, '_loop')",
        "make(tmp_path).train().judge._limits",
    ],
)
def test_a_private_name_can_be_used(code: str) -> None:
    assert len(private_names(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "self._state",
        "from cdpg import version\nversion.__doc__",
        "from torch import _C",
        "from cdpg.storage import files\nmonkeypatch.setattr(files, 'sync', 1)",
        "config._attn_implementation",
    ],
)
def test_other_names_may_be_private(code: str) -> None:
    assert private_names(ast.parse(code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "print('x')",
        "import pickle",
        "from joblib import dump",
        "def f():\n    return torch.load('x')",
        "from torch import load",
        "A = os.environ['A']",
        "class A:\n    b = os.getenv('B')",
        "def f(a=os.environ): ...",
        "@g(os.environ)\ndef f(): ...",
        "if os.environ.get('A'):\n    import x",
    ],
)
def test_the_forbidden_is_found(code: str) -> None:
    assert forbidden(ast.parse(code)) != []


@pytest.mark.parametrize(
    "code",
    [
        "console.print('x')",
        "def f():\n    return os.environ['A']",
        "f = lambda: os.getenv('A')",
        "x = safetensors.load",
    ],
)
def test_the_allowed_is_left_alone(code: str) -> None:
    assert forbidden(ast.parse(code)) == []


def test_a_function_can_be_too_long() -> None:
    code = "def f():\n" + "    a = 1\n" * LONGEST_FUNCTION
    assert long_functions(ast.parse(code)) == ["line 1: f has 61 lines"]
    assert long_functions(ast.parse(code.removesuffix("    a = 1\n"))) == []
