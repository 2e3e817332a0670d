"""Constraints that misbehave, in a module that worker processes can import without delay."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from cdpg.sandbox.functions import text_check

_KEPT: list[bytearray] = []


def _is_alive(pid: str) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def act(text: str) -> None:
    """Do what a text says; one that says nothing special does no harm."""
    verb, _, rest = text.partition(" ")
    if verb == "hang":
        time.sleep(3600)
    elif verb == "hold":  # a hang that can be waited for
        with Path(rest).open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(3600)
    elif verb == "crowd":  # a hang that notes how many such there are
        with Path(rest).open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            hanging = [line.split()[0] for line in file if _is_alive(line.split()[0])]
            file.write(f"{os.getpid()} {len(hanging) + 1}\n")
        time.sleep(3600)
    elif verb == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif verb == "spin":
        while True:
            pass
    elif verb == "endless":  # as a library may do that has a profiler of its own
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        while True:
            pass
    elif verb == "leak":
        _KEPT.append(bytearray(int(rest) << 20))
    elif verb == "exit":
        os._exit(int(rest or 0))
    elif verb == "leave":
        sys.exit(3)
    elif verb == "segfault":
        ctypes.string_at(0)
    elif verb == "exhaust":
        kept = []
        while True:
            kept.append(bytearray(1 << 24))
    elif verb == "raise":
        raise ZeroDivisionError("oops")
    elif verb == "family":  # a child, and one that leaves the group
        for new_session in (False, True):
            child = subprocess.Popen(["sleep", "3600"], start_new_session=new_session)
            with Path(rest).open("a") as file:
                file.write(f"{child.pid}\n")
        time.sleep(3600)
    elif verb == "talk":
        os.write(1, b"to standard output\n")
        os.write(2, b"to standard error\n")
        sys.stdout.write("to sys.stdout\n")
        sys.stderr.write("to sys.stderr\n")
        warnings.warn("a warning", stacklevel=1)


def lengths(texts: list[str]) -> list[int]:
    for text in texts:
        act(text)
    return [len(text) for text in texts]


def pids(texts: list[str]) -> list[int]:
    for text in texts:
        act(text)
    return [os.getpid()] * len(texts)


_called = list[bool]()


@text_check()
def slow_at_first(texts: list[str]) -> list[int]:
    """The process; the first call in one takes a fifth of a second."""
    if not _called:
        time.sleep(0.2)
        _called.append(True)
    return [os.getpid()] * len(texts)


@text_check()
def of_the_text(texts: list[str]) -> list[int]:
    return lengths(texts)


def computing_left(texts: list[str]) -> list[bool]:
    """Whether a limit on computing time holds in this call."""
    return [signal.getitimer(signal.ITIMER_PROF)[0] > 0.0] * len(texts)


@text_check()
def computing_left_of_the_text(texts: list[str]) -> list[bool]:
    return computing_left(texts)


@text_check()
def hungry(texts: list[str]) -> list[bool]:
    """Whether so many megabytes can be had at once; copes with less, as a check that catches MemoryError does."""
    answers = []
    for text in texts:
        try:
            answers.append(len(bytearray(int(text) << 20)) > 0)
        except MemoryError:
            answers.append(False)
    return answers


@text_check()
def crumbs(texts: list[str]) -> list[bool]:
    """The same in small pieces, the last of which stays: the allocator then keeps the room of the others."""
    answers = []
    for text in texts:
        pieces: list[bytearray] = []
        try:
            while len(pieces) < int(text) << 8:
                pieces.append(bytearray(4000))
            answers.append(True)
        except MemoryError:
            answers.append(False)
        _KEPT.append(pieces[-1])
    return answers


def no_list(texts: list[str]) -> Any:
    return True


def too_few(texts: list[str]) -> list[int]:
    return [len(text) for text in texts if len(text) > 1]


def constraint(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    """Misbehaves as the column ``act`` says for completions that start with an ``a``; else true."""
    for completion, what in zip(completions, columns["act"], strict=True):
        if completion.startswith("a"):
            act(what or "")
    return [True] * len(completions)


def always_raises(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    raise ZeroDivisionError("oops")


def half_raises(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    if any(completion.startswith("a") for completion in completions):
        raise ZeroDivisionError("oops")
    return [True] * len(completions)


def depth(texts: list[str]) -> list[list[Any]]:
    """What might differ between processes and calls, and must not."""
    here = threading.current_thread() is threading.main_thread()
    return [[here, sys.getrecursionlimit(), hash("x"), os.getcwd()]] * len(texts)


def on_odd(prompts: list[str], completions: list[str], kind: list[str], **columns: Any) -> list[bool | None]:
    """Asks for an ``a`` where the context is odd; does not apply elsewhere."""
    return ["a" in text if what == "odd" else None for text, what in zip(completions, kind, strict=True)]


def talkative(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    """Says what it sees, and what no terminal should see."""
    for completion in completions:
        print(f"judging {completion}\x1b[31m")  # noqa: T201
        if completion == "oops":
            sys.stderr.write("about to raise\n")
            raise ZeroDivisionError
        if completion == "flood":
            sys.stdout.buffer.write(b"x\n" * 10**6)
    return [True] * len(completions)


def first_alone(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    """Judges the first completion and forgets the others."""
    return [completions[0].startswith("a")]


def all_at_once(prompts: list[str], completions: list[str], **columns: Any) -> Any:
    """One verdict for all of several completions; a list for one."""
    found = [completion.startswith("a") for completion in completions]
    return found if len(found) == 1 else all(found)


def no_verdicts(prompts: list[str], completions: list[str], **columns: Any) -> None:
    """Forgets to return anything."""


def not_empty(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [bool(completion) for completion in completions]
