"""A run's folder: the names of its files, and the lock that keeps a second run out."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from cdpg.config import read_yaml
from cdpg.errors import UserError
from cdpg.messages.terms import term
from cdpg.storage.atomic import write_bytes
from cdpg.storage.json_files import encode_yaml, plain
from cdpg.storage.jsonl import read_jsonl
from cdpg.system import files


class RunFolder:
    """Names of a run's files. As a context manager it creates the folder and locks it against a second run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        self._written: tuple[bytes, dict[str, Any]] | None = None

    @property
    def config(self) -> Path:
        """Everything needed to repeat the run."""
        return self.path / "config.yaml"

    @property
    def tuned_on(self) -> Path:
        """A digest of each prompt that is tuned on; an evaluation uses it to find contexts that are not held out."""
        return self.path / "tuned_on.txt"

    @property
    def metrics(self) -> Path:
        """A line an epoch."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Some of each epoch's samples, a line each."""
        return self.path / "samples.jsonl"

    @property
    def evaluations(self) -> Path:
        """A line for each evaluation during the run."""
        return self.path / "evaluations.jsonl"

    @property
    def failures(self) -> Path:
        """An example of each kind of failed check, for each epoch."""
        return self.path / "failures.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def evaluation(self) -> Path:
        """Metrics of the base and of the tuned model."""
        return self.path / "evaluation.json"

    @property
    def ideal_samples(self) -> Path:
        """The samples of the ideal model that the gain was measured on, a line each."""
        return self.path / "ideal_samples.jsonl"

    @property
    def model(self) -> Path:
        """The tuned model, a plain Hugging Face folder."""
        return self.path / "model"

    @property
    def engine(self) -> Path:
        """The weights that an engine reads; removed at the end of the run."""
        return self.path / "engine"

    @property
    def kept(self) -> Path:
        """Which epoch's model it is, and why."""
        return self.path / "kept.json"

    @property
    def moments(self) -> Path:
        """λ of the target's moments, and what it was fitted to; only if there are moments."""
        return self.path / "moments.json"

    @property
    def nonfinite(self) -> Path:
        """Folder of batches whose loss or gradient was not finite, kept for inspection."""
        return self.path / "nonfinite"

    @property
    def report(self) -> Path:
        """The report."""
        return self.path / "report.html"

    def write_config(self, content: Mapping[str, Any]) -> None:
        """Write ``config.yaml``, atomically."""
        text = encode_yaml(content)
        write_bytes(self.config, text)
        self._written = text, plain(content)

    def read_config(self) -> Mapping[str, Any]:
        """What ``config.yaml`` says, which needs no parsing if it is as this object wrote it."""
        if self._written is not None:
            with contextlib.suppress(OSError):
                if self.config.read_bytes() == self._written[0]:
                    return self._written[1]
        return read_yaml(self.config)

    def holds_run(self) -> bool:
        """Whether the folder holds metrics or a checkpoint."""
        try:
            has_metrics = self.metrics.is_file() and self.metrics.stat().st_size > 0
            return has_metrics or any(self.checkpoints.glob("epoch-*"))
        except OSError as error:
            raise UserError(
                f"cannot look into the output folder {str(self.path)!r}: {error.strerror or error}; "
                f"make it readable, or choose another with {term('output_dir')}"
            ) from error

    def require_fresh(self) -> None:
        """Refuse a folder that already holds a run, for a run that is not resumed."""
        if self.holds_run():
            raise UserError(
                f"the folder {str(self.path)!r} holds a run already: continue it with {term('resume')}, replace it "
                f"with {term('overwrite')}, or choose another folder with {term('output_dir')}"
            )

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_links()
            self._lock = _locked(self.path / ".lock")
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"the output folder {str(self.path)!r} is a file, or lies below one") from error
        except OSError as error:
            raise UserError(
                f"cannot write in the output folder {str(self.path)!r}: {error.strerror or error}; "
                f"make it writable, or choose another with {term('output_dir')}"
            ) from error
        _HELD.add(self)
        files.tidy(self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _refuse_links(self) -> None:
        """Refuse links: nothing that a run writes may end outside its folder."""
        written = (
            *(self.config, self.metrics, self.samples, self.checkpoints, self.evaluation, self.model, self.report),
            *(self.nonfinite, self.evaluations, self.failures, self.tuned_on, self.kept, self.moments),
            *(self.ideal_samples, self.engine, self.path / ".lock"),
        )
        files.refuse_links(self.path, [path.name for path in written])
        for folder in (self.checkpoints, self.nonfinite):
            if folder.is_dir():
                files.refuse_links(folder, os.listdir(folder))

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)  # the lock is free once every process that shares it has closed it
            self._lock = None
        _HELD.discard(self)


_HELD: set[RunFolder] = set()
"""The folders that this process has locked."""


def _release_all() -> None:
    for folder in list(_HELD):
        folder._release()


# A forked worker that outlives a killed run must not keep the lock. A registration cannot be undone, so there is one
# for all folders.
os.register_at_fork(after_in_child=_release_all)


def _locked(path: Path) -> int:
    """A descriptor that holds the lock until it is closed; a UserError names the process that has the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 20, 0).decode("ascii", "replace")
        os.close(descriptor)
        who = f"process {holder}" if holder.isdigit() else "another process"
        raise UserError(
            f"the folder {str(path.parent)!r} is in use by another run ({who}): "
            f"wait until it ends, or choose another folder with {term('output_dir')}"
        ) from error
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def costs(folder: RunFolder) -> dict[str, float]:
    """A run's cost so far: epochs, samples, tokens and seconds, summed over its metrics.

    Samples and seconds include those that were drawn for the validation contexts.
    """
    records = list(read_jsonl(folder.metrics)) if folder.metrics.exists() else []
    keys = ("samples", "tokens", "seconds")

    def spent(key: str) -> float:
        return sum((record.get(key) or 0) + (record.get(f"{key}_aside") or 0) for record in records)

    return {"epochs": len(records), **{key: spent(key) for key in keys}}


def kept(folder: RunFolder) -> dict[str, Any] | None:
    """Which epoch's model a run ended with, as ``kept.json`` says; None if it does not."""
    try:
        found = json.loads(folder.kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_tuned_on(folder: RunFolder) -> frozenset[str] | None:
    """Digests of the prompts that a run was tuned on; None if the folder does not have them."""
    try:
        return frozenset(folder.tuned_on.read_text(encoding="ascii").split())
    except (OSError, UnicodeDecodeError):
        return None
