"""Runs to be killed: real processes, started by ``warm.py`` so that there can be a thousand of them.

This file is both what a test calls and the program of such a process, which is told by JSON what to do.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import warm

EPOCHS = 6
UNEXPECTED = 99
"""Exit status of a run that ended with a traceback."""
WRITES = os.O_WRONLY | os.O_RDWR


# --- the test's side ---


class Keeper:
    """Makes runs in processes of their own."""

    def run(self, folder: Path, *, kill_after: float | None = None, **request: Any) -> int:
        """A run, killed after so many seconds if that is before its end: its exit status."""
        with open(request.pop("log", log_of(folder)), "wb") as log:
            process = warm.start([__file__, json.dumps({"folder": str(folder), **request})], log.fileno())
        if kill_after is not None and not process.has_ended(kill_after):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return process.wait()


def log_of(folder: Path) -> Path:
    """Where a run's standard error goes."""
    return folder.with_name(folder.name + ".log")


def events_of(folder: Path) -> list[str]:
    """The changes of the file system that a run made from its start to its end, in order."""
    return folder.with_name(folder.name + ".events").read_text().splitlines()


# --- the child's side ---


class Saboteur:
    """Counts the changes of a folder; before one of them, or in its midst, the process dies or the disk is full."""

    def __init__(self, folder: str, at: int | None, half: bool, full: bool) -> None:
        self.folder, self.at, self.half, self.full = folder, at, half, full
        self.events: list[str] = []
        self.files: dict[int, str] = {}

    def install(self) -> None:
        for name in ("fsync", "ftruncate", "write", "pwrite"):
            setattr(os, name, functools.partial(self.on_descriptor, name, getattr(os, name)))
        for name in ("rename", "replace", "truncate", "unlink", "rmdir", "mkdir"):
            setattr(os, name, functools.partial(self.on_path, name, getattr(os, name)))
        os.open = functools.partial(self.opened, os.open)  # type: ignore[assignment]
        from cdpg.models import tabular
        from cdpg.storage import checkpoints

        for module in (checkpoints, tabular):
            module.save_file = functools.partial(self.saved, module.save_file)  # type: ignore[attr-defined]

    def opened(self, original: Callable[..., int], path: Any, flags: int, *rest: Any, **options: Any) -> int:
        inside = str(path).startswith(self.folder)
        if inside and flags & WRITES:
            self.event(f"open {Path(path).name}")
        descriptor = original(path, flags, *rest, **options)
        if inside:
            self.files[descriptor] = Path(path).name
        return descriptor

    def on_descriptor(self, name: str, original: Callable[..., Any], descriptor: int, *rest: Any) -> Any:
        if descriptor in self.files:
            partial = (lambda: original(descriptor, rest[0][: len(rest[0]) // 2])) if name == "write" else None
            self.event(f"{name} {self.files[descriptor]}", partial)
        return original(descriptor, *rest)

    def on_path(self, name: str, original: Callable[..., Any], path: Any, *rest: Any, **options: Any) -> Any:
        if "dir_fd" in options or str(path).startswith(self.folder):
            self.event(f"{name} {Path(path).name}")
        return original(path, *rest, **options)

    def saved(self, original: Callable[..., Any], tensors: Any, path: Path) -> None:
        def partial() -> None:
            original(tensors, path)
            with open(path, "r+b") as file:
                file.truncate(path.stat().st_size // 2)

        self.event(f"save {path.name}", partial)
        original(tensors, path)

    def event(self, name: str, partial: Callable[[], Any] | None = None) -> None:
        self.events.append(name + (" (in pieces)" if partial else ""))
        if len(self.events) == self.at:
            if self.half and partial is not None:
                partial()
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path, kind: str = "tabular", method: str = "dpg", **changes: Any) -> None:
    """One small run, resumed if there is something to resume."""
    import tiny
    from cdpg import CDPGConfig, CDPGTrainer
    from enumeration import contexts_of, tabular

    table = kind == "tabular"
    settings: dict[str, Any] = {
        "output_dir": str(folder), "method": method, "epochs": EPOCHS, "contexts_per_epoch": 3, "num_generations": 8,
        "batch_size": 10, "max_completion_length": 3 if table else 6, "learning_rate": 0.05 if table else 1e-3,
        "warmup_epochs": 2, "save_every": 2, "keep_checkpoints": 2, "log_samples": 2, "device": "cpu",
        "evaluate_every": 3, "evaluation_samples": 4, "check_workers": 0,
    }  # fmt: skip
    model: Any = tabular(4) if table else tiny.make_model(kind)
    CDPGTrainer(
        model,
        even,
        CDPGConfig(**(settings | changes)),
        train_dataset=[{"prompt": str(context.prompt)} for context in contexts_of(3)],
        eval_dataset=[{"prompt": str(context.prompt)} for context in contexts_of(2)],
        processing_class=None if table else tiny.tokenizer_for(kind),
    ).train(resume_from_checkpoint=True)


def even(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [len(completion) % 2 == 0 for completion in completions]


def _child(request: dict[str, Any]) -> None:
    """The life of such a process."""
    from cdpg.errors import CDPGError

    folder = Path(request.pop("folder"))
    at, half, full = request.pop("at", None), request.pop("half", False), request.pop("full", False)
    headroom = request.pop("headroom", None)
    status = UNEXPECTED
    try:
        saboteur = Saboteur(str(folder), at, half, full)
        if request.pop("watch", False) or at:
            saboteur.install()
        if headroom is not None:
            limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + headroom
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        run(folder, **request)
        if saboteur.events:
            folder.with_name(folder.name + ".events").write_text("\n".join(saboteur.events))
        status = 0
    except CDPGError as error:
        status = error.exit_status
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
