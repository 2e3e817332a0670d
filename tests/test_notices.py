"""Notices through ``logging``: shown once where nothing is set up, and otherwise left to the program."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.utils import get_cpu_distributed_information

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.demo import CONTEXTS, has_an_a, make_base
from cdpg.messages.notices import NoticeHandler, launched_as_main, shown_notices

DUPLICATE = "1 of 3 contexts is a duplicate of an earlier one"
OUTLOOK = "an epoch takes about"


@pytest.fixture(autouse=True)
def _logging_left_alone() -> Iterator[None]:
    logger = logging.getLogger("cdpg")
    yield
    assert logger.handlers == [], "a handler is left behind"
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def tune(folder: Path) -> None:
    """A run with a notice of the data, when the trainer is made, and one of the first epoch."""
    config = CDPGConfig(
        output_dir=str(folder), epochs=1, contexts_per_epoch=2, num_generations=4, max_completion_length=3,
        check_workers=0, device="cpu",
    )  # fmt: skip
    CDPGTrainer(make_base(), has_an_a, config, [*CONTEXTS, CONTEXTS[0]]).train()


def test_a_program_without_logging_sees_each_notice_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(tmp_path)
    shown = capsys.readouterr().err
    assert (shown.count(DUPLICATE), shown.count(OUTLOOK)) == (1, 1)
    assert logging.getLogger("cdpg").level == logging.NOTSET


@pytest.mark.parametrize(("level", "expected"), [(logging.WARNING, (1, 0)), (logging.ERROR, (0, 0))])
def test_notices_can_be_silenced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: int, expected: tuple[int, int]
) -> None:
    logging.getLogger("cdpg").setLevel(level)
    tune(tmp_path)
    shown = capsys.readouterr().err
    assert (shown.count(DUPLICATE), shown.count(OUTLOOK)) == expected
    assert "epoch 1/1" in shown, "progress is no notice"


@pytest.mark.parametrize("name", [None, "cdpg"])
def test_a_program_that_has_set_up_logging_has_the_notices_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str | None
) -> None:
    stream = io.StringIO()
    logger, handler = logging.getLogger(name), logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        tune(tmp_path)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert f"WARNING cdpg.contexts.contexts: {DUPLICATE}" in stream.getvalue()
    assert f"INFO cdpg.training.notices: {OUTLOOK}" in stream.getvalue()
    shown = capsys.readouterr().err
    assert DUPLICATE not in shown and OUTLOOK not in shown


def test_a_library_that_sets_up_logging_meanwhile_shows_nothing_again(capsys: pytest.CaptureFixture[str]) -> None:
    root, handler = logging.getLogger(), NoticeHandler()
    with shown_notices(True):
        root.addHandler(handler)
        try:
            logging.getLogger("cdpg.models").warning("so")
        finally:
            root.removeHandler(handler)
    assert capsys.readouterr().err == "so\n"


def test_a_root_logger_that_was_set_up_for_warnings_alone_hides_no_notice(capsys: pytest.CaptureFixture[str]) -> None:
    """As notebooks and some libraries leave it."""
    root, handler = logging.getLogger(), NoticeHandler()
    root.addHandler(handler)
    try:
        with shown_notices(True):
            logging.getLogger("cdpg.models").info("so")
            logging.getLogger("cdpg.models").warning("and so")
    finally:
        root.removeHandler(handler)
    assert capsys.readouterr().err == "so\nand so\n"


@pytest.mark.parametrize("always", [True, False])
def test_only_the_main_process_shows_notices(capsys: pytest.CaptureFixture[str], always: bool) -> None:
    with shown_notices(is_main=False, always=always):
        logging.getLogger("cdpg.models").warning("so")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("level", "shown"), [(logging.NOTSET, ""), (logging.WARNING, "so\n")])
def test_a_programs_own_handler_has_the_notices_of_the_main_process_unless_it_asks_for_all(
    level: int, shown: str
) -> None:
    stream, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    root.addHandler(handler)
    logging.getLogger("cdpg").setLevel(level)
    try:
        with shown_notices(is_main=False):
            logging.getLogger("cdpg.models").warning("so")
    finally:
        root.removeHandler(handler)
    assert stream.getvalue() == shown
    assert logging.getLogger("cdpg").level == level


def test_one_within_another_shows_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_notices(True, always=True), shown_notices(True):
        logging.getLogger("cdpg.models").info("so")
    assert capsys.readouterr().err == "so\n"


@pytest.mark.parametrize("launcher", ["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"])
def test_the_main_process_is_the_one_that_accelerate_takes(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for rank in range(2):
        monkeypatch.setenv(launcher, str(rank))
        assert launched_as_main() == (get_cpu_distributed_information().rank == 0) == (rank == 0)
