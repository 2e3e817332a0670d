"""Hostile models, data, names and links: nothing is run, nothing leaves the folder, nothing steers the terminal."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import pickle  # to make what must not be read
import subprocess
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from rich.console import Console

import tiny
import unpainted
import warm
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.cli import app, exit_status
from cdpg.config import parse_overrides, read_yaml
from cdpg.errors import RunError, UserError
from cdpg.models.loading import load_model
from cdpg.storage.checkpoints import CorruptCheckpoint, load_checkpoint
from cdpg.storage.json_files import write_json
from cdpg.storage.jsonl import JsonlFile
from cdpg.storage.run_folder import RunFolder
from enumeration import contexts_of, tabular

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("src", "tests", "recipes", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if path != Path(__file__)
)


# --- nothing is run ---


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_pickled_weights_are_refused_unread(tmp_path: Path, family: str) -> None:
    folder, mark = tiny.save(tmp_path / "model", family), tmp_path / "exploded"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(UserError, match=r"pytorch_model\.bin' is a pickle, which may run any code"):
        load_model(str(folder), CDPGConfig(device="cpu"))
    assert not mark.exists()


def test_pickled_adapters_are_refused_unread(tmp_path: Path) -> None:
    folder, mark = tiny.save(tmp_path / "model", "llama"), tmp_path / "exploded"
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"], "r": 2}')
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(UserError, match=r"adapter_model\.bin' is a pickle"):
        load_model(str(folder), CDPGConfig(device="cpu"))
    assert not mark.exists()


def test_a_pickle_beside_safetensors_is_not_read(tmp_path: Path) -> None:
    folder, mark = tiny.save(tmp_path / "model", "llama"), tmp_path / "exploded"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    load_model(str(folder), CDPGConfig(device="cpu"))
    assert not mark.exists()


def test_a_models_own_code_is_not_run(tmp_path: Path) -> None:
    folder, mark = tiny.save(tmp_path / "model", "llama"), tmp_path / "exploded"
    config = (folder / "config.json").read_text()
    own = '"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}, "model_type": "nobody-knows"'
    (folder / "config.json").write_text(config.replace('"model_type": "llama"', own))
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    assert CDPGConfig().trust_remote_code is False
    with pytest.raises(UserError, match="cannot load the model"):
        load_model(str(folder), CDPGConfig(device="cpu"))
    assert not mark.exists()


@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_a_run_from_elsewhere_cannot_allow_its_models_code(tmp_path: Path, command: str) -> None:
    folder, mark = tiny.save(tmp_path / "run" / "model", "llama"), tmp_path / "exploded"
    config = (folder / "config.json").read_text()
    own = '"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}, "model_type": "nobody-knows"'
    (folder / "config.json").write_text(config.replace('"model_type": "llama"', own))
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    (tmp_path / "run" / "config.yaml").write_text("task: code-pep8\ntrust_remote_code: true\ndevice: cpu\n")
    words = [command, str(tmp_path / "run"), *(["--context", "x"] if command == "sample" else ["--base", str(folder)])]
    assert exit_status(lambda: app(args=words, standalone_mode=False)) != 0
    assert not mark.exists()


def test_pickled_adapters_of_the_hub_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository as the hub's cache holds it, since there is no hub here."""
    repository, mark = tmp_path / "hub" / "models--me--adapter", tmp_path / "exploded"
    snapshot = tiny.save(repository / "snapshots" / ("0" * 40), "llama")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    adapter = '{"peft_type": "LORA", "target_modules": ["q_proj"], "r": 2, "base_model_name_or_path": "me/adapter"}'
    (snapshot / "adapter_config.json").write_text(adapter)
    (snapshot / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    read: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *given, **options: read.append(given))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert constants.HF_HUB_OFFLINE
    with pytest.raises(UserError, match="cannot load the model 'me/adapter'") as told:
        load_model("me/adapter", CDPGConfig(device="cpu"))
    assert "adapter_model.safetensors" in "".join(traceback.format_exception(told.value)), "this is what is missing"
    assert read == []
    assert not mark.exists()


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    mark = tmp_path / "exploded"
    bomb = f"!!python/object/apply:os.mkdir ['{mark}']"
    (tmp_path / "a.yaml").write_text(f"epochs: {bomb}\n")
    with pytest.raises(UserError, match="not valid YAML"):
        read_yaml(tmp_path / "a.yaml")
    with pytest.raises(UserError, match="epochs takes a whole number"):
        CDPGConfig.from_mapping(parse_overrides([f"epochs={bomb}"]))
    assert not mark.exists()
    assert CDPGConfig.from_mapping(parse_overrides(["learning_rate=1e-5"])).learning_rate == 1e-5


RUNS_CODE = {"eval", "exec", "__import__", "compile", "execfile"}
COMPILES = {"src/cdpg/tasks/code/constraint.py", "recipes/code_tiny_data.py"}
"""Compiling is not running: the check of generated functions, and the choice of sources to train on, do the former."""
RUNS_OWN_SOURCE = {
    "tests/warm.py",
    "src/cdpg/storage/usage.py",
    "tests/test_snippet.py",
    "tests/test_notebook.py",
    "tests/test_mutants.py",
    "tests/mutants/patching.py",
}
"""These run text that is code already: the source of a stop rule's class that is loaded, the program on a card, and the
package's own functions with a fault in them."""
READS_PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
READS_ANYTHING = ("torch.load", "torch.jit.load", "read_pickle", "yaml.load", "yaml.unsafe_load", "yaml.full_load")


def dangers(tree: ast.AST) -> list[str]:
    """Calls that run text, and imports or calls that read a format which can run code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            bare = name.removeprefix("builtins.")
            shell = any(k.arg == "shell" and not is_false(k.value) for k in node.keywords)
            allowing = any(k.arg in ("allow_pickle", "weights_only") for k in node.keywords)
            if bare in RUNS_CODE or name in ("os.system", "os.popen") or name.startswith("runpy.") or shell or allowing:
                found.append(bare)
            elif name.endswith(READS_ANYTHING):
                found.append(name)
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [module for module in modules if module.split(".")[0] in READS_PICKLES]
    return found


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_nothing_runs_text_or_reads_pickles() -> None:
    assert len(SOURCES) > 200
    problems = {}
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        found = set(dangers(ast.parse(path.read_text(encoding="utf-8"))))
        if name in COMPILES:
            found -= {"compile"}
        if name in RUNS_OWN_SOURCE:
            found -= {"compile", "exec"}
        if found:
            problems[name] = found
    assert problems == {}


@pytest.mark.parametrize(
    "code",
    [
        "eval(x)", "builtins.exec(x)", "exec(compile(x, '', 'exec'))", "import pickle", "from joblib import load",
        "torch.load(f)", "yaml.load(f)", "subprocess.run(x, shell=True)", "np.load(f, allow_pickle=True)",
        "os.system(x)", "runpy.run_path(x)", "pd.read_pickle(x)", "__import__(x)",
    ],
)  # fmt: skip
def test_the_dangerous_is_found(code: str) -> None:
    assert dangers(ast.parse(code)) != []


@pytest.mark.parametrize("code", ["re.compile(x)", "model.eval()", "yaml.safe_load(f)", "subprocess.run([x])"])
def test_the_harmless_is_left_alone(code: str) -> None:
    assert dangers(ast.parse(code)) == []


# --- nothing leaves the folder ---


def trainer(folder: Path) -> CDPGTrainer:
    config = CDPGConfig(
        output_dir=str(folder), epochs=2, contexts_per_epoch=3, num_generations=4, max_completion_length=3,
        device="cpu", warmup_epochs=0,
    )  # fmt: skip
    data = [{"prompt": str(context.prompt)} for context in contexts_of(3)]
    return CDPGTrainer(tabular(4), lambda prompts, completions: [True] * len(prompts), config, data)


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml", "metrics.jsonl", "samples.jsonl", "failures.jsonl", "evaluations.jsonl", "checkpoints", "model",
        ".lock", "nonfinite", "checkpoints/x", "tuned_on.txt",
    ],
)  # fmt: skip
@pytest.mark.parametrize("resume", [False, True])
def test_links_in_a_runs_folder_are_not_written_through(tmp_path: Path, name: str, resume: bool) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    (folder / name).parent.mkdir(parents=True)
    is_folder = "." not in name
    outside.mkdir() if is_folder else outside.write_text("precious")
    (folder / name).symlink_to(outside)
    with pytest.raises(UserError, match="is a symbolic link, and nothing is written through one"):
        trainer(folder).train(resume_from_checkpoint=resume)
    assert list(outside.iterdir()) == [] if is_folder else outside.read_text() == "precious"


@pytest.mark.parametrize(
    "name",
    [
        "comparison.json",
        "cdpg",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("cdpg/output.txt", "cdpg/job.yaml")),
    ],
)
def test_links_in_a_comparisons_folder_are_not_written_through(tmp_path: Path, name: str) -> None:
    outside, link = tmp_path / "outside", tmp_path / "out" / name
    link.parent.mkdir(parents=True)
    outside.mkdir() if name == "cdpg" else outside.write_text("precious")
    link.symlink_to(outside)
    words = [
        *("compare", "code-pep8", "--methods", "cdpg", "--jobs", "2", "--epochs", "1"),
        *("--output-dir", str(tmp_path / "out"), "--set", "evaluation_contexts=1", "--set", "device=cpu"),
    ]
    assert exit_status(lambda: app(args=words, standalone_mode=False)) == 2
    assert list(outside.iterdir()) == [] if name == "cdpg" else outside.read_text() == "precious"


def test_a_link_that_appears_later_is_not_followed_either(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept\n")
    with RunFolder(tmp_path / "run") as folder:
        folder.metrics.symlink_to(precious)
        with pytest.raises(RunError, match="cannot write"):
            JsonlFile(folder.metrics).append({"epoch": 1})
        with pytest.raises(RunError, match="cannot write"):
            JsonlFile(folder.metrics).truncate(0)
        folder.evaluation.symlink_to(precious)
        write_json(folder.evaluation, {"a": 1})  # takes the link's place
        assert not folder.evaluation.is_symlink()
    assert precious.read_text() == "kept\n"


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "big-disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "big-disk")
    trainer(tmp_path / "run").train()
    assert (tmp_path / "big-disk" / "checkpoints" / "epoch-000002").is_dir()


@pytest.mark.parametrize("name", ["../../secret.json", "/etc/passwd", "a/b.json", "x.pkl"])
def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    content = {"format": 1, "epoch": 1, "files": {name: {"size": 0, "sha256": ""}}}
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True, indent=1).encode()).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps({**content, "sha256": checksum}, sort_keys=True, indent=1))
    with pytest.raises(CorruptCheckpoint, match="names files that cannot be"):
        load_checkpoint(tmp_path)


# --- nothing steers the terminal ---

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]x[/red] [link=file:///etc/passwd]y[/link]\u202e\x9b1m"


def shown(command: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    stream = io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=200, _environ={"TERM": "xterm"}, legacy_windows=False)
    monkeypatch.setattr("cdpg.cli.Console", lambda **options: terminal)
    return exit_status(command), stream.getvalue()


@pytest.mark.parametrize("kind", [UserError, RunError, ValueError, OSError, KeyError])
def test_errors_are_shown_as_they_stand(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def fail() -> None:
        raise kind(f"about {HOSTILE}\nand more")

    status, text = shown(fail, monkeypatch)
    assert status == (2 if kind is UserError else 1)
    assert not any(character in text for character in "\x1b\x07\x9b\u202e")
    assert "[red]x[/red]" in text


def test_hostile_data_a_hostile_check_and_a_hostile_folder(tmp_path: Path) -> None:
    """By the command itself: the text is in the contexts, in what the check raises and in the folder's name."""
    tiny.save(tmp_path / "llama", "llama")
    name = "o\x1b[2Jut[red]"
    (tmp_path / "contexts.jsonl").write_text('{"prompt": "a\\u001b[2J[bold]b"}\n{"prompt": "c"}\n')
    (tmp_path / "checks.py").write_text(
        f"def fine(prompts, completions): return [True] * len(prompts)\n"
        f"def bad(prompts, completions): raise ValueError({HOSTILE!r} + prompts[0])\n"
    )
    base = [warm.python(), "-m", "cdpg", "run", "--model", "llama", "--contexts", "contexts.jsonl", "--epochs", "1"]
    base += ["--set", "max_completion_length=4", "--set", "num_generations=2", "--set", "contexts_per_epoch=2"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    environment |= unpainted.IN_A_FORK
    outputs = []
    for check, folder in (("bad", "other"), ("fine", name)):
        done = subprocess.run(
            [*base, "--constraint", f"checks:{check}", "--output-dir", folder],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment,
        )  # fmt: skip
        outputs.append(done.stdout + done.stderr)
        assert done.returncode == (1 if check == "bad" else 0), done.stderr
    for output in outputs:
        assert "\x1b[2J" not in output and "\x1b]0;" not in output and "\u202e" not in output
    assert "[red]x[/red]" in outputs[0]
    assert "ut[red]" in outputs[1]


def test_torch_itself_reads_no_pickle_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run, from a folder to a folder, with torch.load out of order."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    config = CDPGConfig(
        output_dir=str(tmp_path / "run"), epochs=2, contexts_per_epoch=1, num_generations=2, max_completion_length=4,
        device="cpu", warmup_epochs=0, save_every=1,
    )  # fmt: skip
    source = str(tiny.save(tmp_path / "model", "llama"))
    for epochs in (1, 2):
        CDPGTrainer(
            source, lambda prompts, completions: [True] * len(prompts), config.replace(epochs=epochs), ["a"]
        ).train(resume_from_checkpoint=True)
    load_model(str(tmp_path / "run" / "model"), config)
