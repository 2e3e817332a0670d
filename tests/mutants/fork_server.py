"""Runs tests against many faulty copies of the source, each in a fork of one process that has the libraries loaded.

Importing torch and Transformers takes longer than most of the tests that a fault needs. So this process imports them
once, never the package under test, and forks: a child puts its copy of ``src`` first on the path and runs pytest.
"""

from __future__ import annotations

import compileall
import gc
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import forks
from fault_list import ROOT
from forks import Call, Result

if TYPE_CHECKING:
    import pytest

LIBRARIES = (
    "accelerate", "hypothesis", "peft", "pytest", "rich.progress", "tokenizers", "torch", "torch._dynamo",
    "torch.utils.checkpoint", "transformers", "transformers.models.auto.modeling_auto",
    "transformers.models.gpt_neo.modeling_gpt_neo", "transformers.models.opt.modeling_opt", "typer",
)  # fmt: skip
"""What most tests load, beside what ``conftest.py`` and ``tiny.py`` do."""

PYTEST_OPTIONS = (
    "-x", "-q", "-p", "no:cacheprovider", "--tb=short", "--timeout=0",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",  # of plugins, which are loaded already
)  # fmt: skip
LIMIT = 900.0
"""Seconds that a job may take, on a machine that may be busy: no test of the lists waits for long."""


@dataclass(frozen=True)
class Job:
    """Tests to run with one file of the source replaced; without a file, as it is."""

    name: str
    tests: tuple[str, ...]
    file: str | None = None
    source: str = ""
    """The whole text of the file."""

    def call(self) -> Call:
        return Call(self.name, self._run, LIMIT, before=self._put, after=self._restore)

    def _put(self, folder: Path) -> None:
        if self.file is not None:
            _write(folder / self.file, self.source)

    def _restore(self, folder: Path) -> None:
        if self.file is not None:
            _write(folder / self.file, (ROOT / self.file).read_text(encoding="utf-8"))

    def _run(self, folder: Path) -> int:
        os.chdir(ROOT)
        source, here = str(folder / "src"), str(Path(__file__).parent)
        sys.path[:] = [source, *(path for path in sys.path if path != here)]  # no test is to import these modules
        os.environ["PYTHONPATH"] = source  # for what the tests start
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        importlib.invalidate_caches()
        package = importlib.util.find_spec("cdpg")
        assert package is not None and package.origin is not None and package.origin.startswith(source)
        return run_pytest(self.tests, folder)


def run_pytest(tests: Iterable[str], folder: Path) -> int:
    """Pytest's status after these tests, in this process; its last words are what failed."""
    import pytest

    temporary, failed = folder / "temporary", Failed()
    try:
        return int(pytest.main([*PYTEST_OPTIONS, f"--basetemp={temporary}", *tests], plugins=[failed]))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        failed.tell()


class Failed:
    """A pytest plugin that notes what failed: a test, or a file that cannot be imported."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def tell(self) -> None:
        """For :func:`failed_in`, at the end of the output."""
        sys.stdout.write("".join(f"\n{_MARK}{name}" for name in self.names))
        sys.stdout.flush()

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.names.append(report.nodeid)


_MARK = "that failed: "


def failed_in(result: Result) -> list[str]:
    """What failed, for pytest to run again."""
    return [line.removeprefix(_MARK) for line in result.output.splitlines() if line.startswith(_MARK)]


def load_libraries() -> None:
    """Import once what every child needs; nothing of the package itself."""
    sys.path.insert(0, str(ROOT / "tests"))
    for name in ("conftest", "tiny", *LIBRARIES):  # conftest first: it sets what libraries read at import
        importlib.import_module(name)
    for name in ("conftest", "tiny"):
        del sys.modules[name]  # pytest is to load them itself
    sys.path.remove(str(ROOT / "tests"))
    gc.collect()
    gc.freeze()  # pytest collects at its end, which would go through all of this, and copy it
    assert not any(name.partition(".")[0] == "cdpg" for name in sys.modules)


def run(jobs: Iterable[Job], workers: int) -> Iterator[Result]:
    """Run the jobs, some side by side, and give each result as it comes."""
    yield from forks.run([job.call() for job in jobs], workers, prepare=_copy_source)


def _copy_source(folder: Path) -> None:
    """A copy of ``src`` whose modules are compiled, so that a child compiles the faulty one alone."""
    shutil.copytree(ROOT / "src", folder / "src", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder / "src", quiet=2)


def _write(path: Path, source: str) -> None:
    """Replace a module; its compiled file goes, which Python would trust if size and second of change agree."""
    path.write_text(source, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
