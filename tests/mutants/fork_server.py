"""Runs tests against many faulty copies of the source, each in a fork of one process that has the libraries loaded.

Importing torch and Transformers takes longer than most of the tests that a fault needs. So this process imports them
once, never the package under test, and forks: a child puts its copy of ``src`` first on the path and runs pytest.
"""

from __future__ import annotations

import compileall
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]

LIBRARIES = (
    "accelerate", "hypothesis", "peft", "pytest", "rich.progress", "tokenizers", "torch", "torch._dynamo",
    "torch.utils.checkpoint", "transformers", "transformers.models.auto.modeling_auto",
    "transformers.models.gpt_neo.modeling_gpt_neo", "typer",
)  # fmt: skip
"""What most tests load, beside what ``conftest.py`` and ``tiny.py`` do."""

NO_SUCH_TEST = 4, 5
"""Pytest's status when what it was asked for does not exist: the fault's list of tests is wrong."""


@dataclass(frozen=True)
class Job:
    """Tests to run with one file of the source replaced; without a file, as it is."""

    name: str
    tests: tuple[str, ...]
    file: str | None = None
    source: str = ""
    """The whole text of the file."""


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    job: Job
    status: int | None
    """Pytest's status; negative for a signal; None when the time was up."""
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        return self.status == 0


@dataclass(frozen=True)
class _Running:
    job: Job
    copy: Path
    output: Path
    since: float


def load_libraries() -> None:
    """Import once what every child needs; nothing of the package itself."""
    sys.path.insert(0, str(ROOT / "tests"))
    for name in ("conftest", "tiny", *LIBRARIES):  # conftest first: it sets what libraries read at import
        importlib.import_module(name)
    for name in ("conftest", "tiny"):
        del sys.modules[name]  # pytest is to load them itself
    sys.path.remove(str(ROOT / "tests"))
    assert not any(name.partition(".")[0] == "cdpg" for name in sys.modules)


def run(jobs: Sequence[Job], workers: int, limit: float) -> Iterator[Result]:
    """Run the jobs, some side by side, and give each result as it comes; ``limit`` is in seconds a job."""
    waiting = list(reversed(jobs))
    running: dict[int, _Running] = {}
    with TemporaryDirectory(prefix="cdpg-mutants-") as folder:
        copies = [_copy_of_source(Path(folder) / f"copy{number}") for number in range(workers)]
        try:
            while waiting or running:
                while waiting and copies:
                    started = _start(waiting.pop(), copies.pop())
                    running |= started
                for process, status in _ended(running, limit):
                    entry = running.pop(process)
                    text = entry.output.read_text(encoding="utf-8", errors="replace")
                    _restore(entry)
                    copies.append(entry.copy)
                    yield Result(entry.job, status, time.monotonic() - entry.since, text)
                time.sleep(0.02)
        finally:
            for process in running:
                _kill(process)


def _copy_of_source(folder: Path) -> Path:
    """A copy of ``src`` whose modules are compiled, so that a child compiles the faulty one alone."""
    shutil.copytree(ROOT / "src", folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder, quiet=2)
    return folder


def _start(job: Job, copy: Path) -> dict[int, _Running]:
    entry = _Running(job, copy, copy.with_suffix(".txt"), time.monotonic())
    if job.file is not None:
        _write(copy, job.file, job.source)
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        status = 70
        try:
            status = _child(entry)
        finally:
            os._exit(status)  # this process's end is not its parent's
    return {process: entry}


def _write(copy: Path, file: str, source: str) -> None:
    """Replace a module; its compiled file goes, which Python would trust if size and second of change agree."""
    path = copy / Path(file).relative_to("src")
    path.write_text(source, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _restore(entry: _Running) -> None:
    if entry.job.file is not None:
        _write(entry.copy, entry.job.file, (ROOT / entry.job.file).read_text(encoding="utf-8"))


def _child(entry: _Running) -> int:
    """Run the tests in this process; its output goes to a file."""
    os.setsid()  # so that what the tests start can be ended along with it
    output = os.open(entry.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    os.chdir(ROOT)
    source, here = str(entry.copy), str(Path(__file__).parent)
    sys.path[:] = [source, *(folder for folder in sys.path if folder != here)]  # no test is to import these modules
    os.environ["PYTHONPATH"] = source  # for what the tests start
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    package = importlib.util.find_spec("cdpg")
    assert package is not None and package.origin is not None and package.origin.startswith(source)
    import pytest

    with _temporary_folder(entry.copy.with_suffix(".tmp")) as folder:
        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=short", f"--basetemp={folder}"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins, which are loaded already
        return int(pytest.main([*options, *entry.job.tests]))


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ended(running: dict[int, _Running], limit: float) -> Iterator[tuple[int, int | None]]:
    """Those that have ended, with their status; those whose time is up are killed first."""
    for process, entry in list(running.items()):
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            yield process, os.waitstatus_to_exitcode(status)
        elif time.monotonic() - entry.since > limit:
            _kill(process)
            yield process, None


def _kill(process: int) -> None:
    """End a child and all that it started in its session, which it may have begun only now."""
    for end in (os.killpg, os.kill):
        try:
            end(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.waitpid(process, 0)
