"""What holds for every test: no network, one thread, the same random numbers each time."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

# Set before anything imports these libraries, and inherited by the processes that tests start. One thread, also
# without xdist: the order of a sum, and so the last bits of a result, must not depend on how the tests are run.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    OMP_NUM_THREADS="1",
    GOMP_SPINCOUNT="1000",  # tests with more threads do not crawl when other tests want the cores
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="agg",
)

import pytest

import warm
from noticed import noticed


def pytest_configure(config: pytest.Config) -> None:
    """Make ready for tests, or for starting the processes that run them, which should not have to wait for torch."""
    _restore_signals()
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        warm.share()
        return
    gc.disable()  # until the tests begin: what is imported stays
    import torch
    from hypothesis import settings

    torch.set_num_threads(1)
    # A slow machine is no failure, and a failure must come back when the test is run again.
    settings.register_profile("cdpg", deadline=None, derandomize=True)
    settings.load_profile("cdpg")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Test processes are forks of the process in which everything is imported already."""
    warm.use(specs)


def _restore_signals() -> None:
    """Tests send signals to what they start, which inherits those that a shell or nohup had these tests ignore."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_unconfigure() -> None:
    warm.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the long tests too (make test-faults)")
    parser.addoption("--engine", action="store_true", help="run the tests of the real vLLM too (make test-engine)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ("faults", "engine"):
            item.add_marker(item.path.parent.name)
    for marker in ("exhaustive", "engine"):
        if not config.getoption(f"--{marker}"):
            left_out = [item for item in items if item.get_closest_marker(marker)]
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
            config.hook.pytest_deselected(items=left_out)
    items[:] = _long_files_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


LONG = (
    "test_sharding test_values test_readme test_cli test_docs test_tasks test_disk test_signals test_training"
    " test_report test_report_browser test_snippet test_factors_cli test_checks test_tilted test_sandbox"
).split()
"""Test files with the longest tests. The last of these to end would keep the other test processes waiting."""


def _long_files_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Each of the workers begins with as many of the long files; a file stays in one piece."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path.stem, []).append(item)
    long = [files.pop(name) for name in LONG if name in files]
    others = [item for file in files.values() for item in file]
    found: list[pytest.Item] = []
    for worker in range(workers):
        found += [item for file in long[worker::workers] for item in file]
        share = -(-len(items) * (worker + 1) // workers) - len(found)
        found, others = found + others[: max(0, share)], others[max(0, share) :]
    return found + others


def pytest_collection_finish() -> None:
    """What is loaded by now stays: without this, every full collection of garbage goes through all of it."""
    gc.freeze()
    gc.set_threshold(warm.GARBAGE)
    gc.enable()


@pytest.fixture
def notices() -> Iterator[list[str]]:
    """The notices that the package gives in a test, as they come."""
    with noticed() as messages:
        yield messages


@pytest.fixture(autouse=True)
def _loggers_left_alone() -> Iterator[None]:
    """Notices are shown unless the program has set up logging. What a test sets up for logging ends with the test."""

    def loggers() -> list[logging.Logger]:
        names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "cdpg"]
        return [logging.root, *map(logging.getLogger, names)]

    before = {one: (one.level, list(one.handlers), one.propagate, one.disabled) for one in loggers()}
    yield
    for one in loggers():
        level, handlers, propagate, disabled = before.get(one, (logging.NOTSET, [], True, False))
        if one.level != level:  # setting it goes through all loggers that there are
            one.setLevel(level)
        one.handlers[:], one.propagate, one.disabled = handlers, propagate, disabled


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _global_torch_state_left_alone() -> Iterator[None]:
    """The program promises to set no global torch flag; a test that does would also disturb its neighbours."""
    import torch

    def state() -> tuple[object, ...]:
        return (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        )

    before = state()
    yield
    assert state() == before, "a global torch flag was changed"
