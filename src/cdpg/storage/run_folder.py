"""A run's folder and the files in it: strict JSON, one record a line, nothing half-written taken for whole."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import yaml
from safetensors import SafetensorError

from cdpg.errors import RunError, UserError
from cdpg.messages.terms import term
from cdpg.system import files

_UNSAFE = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Legal in a JSON string but escaped: they have no UTF-8 form, break lines, or steer a terminal that shows the file."""


class RunFolder:
    """Names of a run's files. As a context manager it creates the folder and holds it against a second run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    @property
    def config(self) -> Path:
        """Everything needed to repeat the run."""
        return self.path / "config.yaml"

    @property
    def tuned_on(self) -> Path:
        """A digest of each prompt that is tuned on, so that an evaluation knows which of its contexts are not new."""
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
        """A line for each evaluation along the run."""
        return self.path / "evaluations.jsonl"

    @property
    def failures(self) -> Path:
        """An example of each way in which checks failed, epoch by epoch."""
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
    def model(self) -> Path:
        """The tuned model, a plain Hugging Face folder."""
        return self.path / "model"

    @property
    def nonfinite(self) -> Path:
        """Folder of batches whose loss or gradient was not finite, kept for inspection."""
        return self.path / "nonfinite"

    @property
    def report(self) -> Path:
        """The report."""
        return self.path / "report.html"

    def holds_run(self) -> bool:
        """Whether a run has left metrics or a checkpoint here."""
        try:
            has_metrics = self.metrics.is_file() and self.metrics.stat().st_size > 0
            return has_metrics or any(self.checkpoints.glob("epoch-*"))
        except OSError as error:
            raise UserError(
                f"cannot look into the output folder {str(self.path)!r}: {error.strerror or error}; "
                f"make it readable, or choose another with {term('output_dir')}"
            ) from error

    def require_fresh(self) -> None:
        """Refuse a folder that holds a run already; for a run that does not resume one."""
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
        self._let_go()

    def _refuse_links(self) -> None:
        """Nothing that a run writes may lead out of its folder."""
        written = (
            *(self.config, self.metrics, self.samples, self.checkpoints, self.evaluation, self.model, self.report),
            *(self.nonfinite, self.evaluations, self.failures, self.tuned_on, self.path / ".lock"),
        )
        files.refuse_links(self.path, [path.name for path in written])
        for folder in (self.checkpoints, self.nonfinite):
            if folder.is_dir():
                files.refuse_links(folder, os.listdir(folder))

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)  # the lock is free once every process that shares it has closed it
            self._lock = None
        _HELD.discard(self)


_HELD: set[RunFolder] = set()
"""The folders that this process holds."""


def _let_go_of_all() -> None:
    for folder in list(_HELD):
        folder._let_go()


# A forked worker that outlives a killed run must not go on holding the lock. There is no way to take this back, so it
# is asked for once and not by every folder.
os.register_at_fork(after_in_child=_let_go_of_all)


def _locked(path: Path) -> int:
    """A descriptor that holds the lock until it is closed or the process dies, or a UserError naming who has it."""
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


@dataclasses.dataclass(frozen=True)
class JsonlFile:
    """An append-only file of records, one line of strict JSON each; nothing is kept open between calls."""

    path: Path

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line, ``epoch`` first and the other keys sorted; a line that does not fit the disk is taken back."""
        line = encode(_ordered(record)) + b"\n"
        start = self.position()
        try:
            files.append_bytes(self.path, line)
        except OSError as error:
            with contextlib.suppress(OSError):
                files.cut(self.path, start)
            raise _cannot_write(self.path, error) from error

    def position(self) -> int:
        """Length in bytes; 0 if there is no file yet."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def truncate(self, position: int) -> None:
        """Cut what came after ``position``, which a checkpoint recorded, so that no line is missing or doubled."""
        size = self.position()
        if size < position or not self._line_ends_at(position):
            raise RunError(
                f"{str(self.path)!r} was changed since the checkpoint was written: it had {position} bytes of whole "
                f"lines then, and does not now (it has {size}): restore the file, or start a new run in another folder"
            )
        if size == position:
            return
        try:
            files.cut(self.path, position)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def sync(self) -> None:
        """Wait until all lines are on the disk; called before a checkpoint that records the position."""
        if not self.path.exists():
            return
        try:
            files.sync(self.path)
            files.sync(self.path.parent)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def _line_ends_at(self, position: int) -> bool:
        if position == 0:
            return True
        with self.path.open("rb") as file:
            file.seek(position - 1)
            return file.read(1) == b"\n"


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; a last line cut short by a killed writer is left out, anything else is a UserError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line, parse_constant=_refuse_constant)
                except (ValueError, RecursionError) as error:
                    if not line.endswith(b"\n"):
                        return
                    raise UserError(f"line {number} of {str(path)!r} is not valid JSON: {error}") from error
                if not isinstance(record, dict):
                    kind = type(record).__name__
                    raise UserError(f"line {number} of {str(path)!r} must hold a JSON object, not a {kind}")
                yield record
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def last_record(path: Path) -> dict[str, Any]:
    """The last line of a file of records; empty if there is none."""
    records = list(read_jsonl(path)) if path.exists() else []
    return records[-1] if records else {}


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} is not valid JSON: {error}") from error


def mapping(value: Any) -> dict[str, Any]:
    """Of what was read, a mapping with text for keys; empty for anything else."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    """Of what was read, a list; empty for anything else."""
    return value if isinstance(value, list) else []


def costs(folder: RunFolder) -> dict[str, float]:
    """What a run has cost so far: epochs, samples, tokens, seconds, added up over its metrics."""
    records = list(read_jsonl(folder.metrics)) if folder.metrics.exists() else []
    keys = ("samples", "tokens", "seconds")
    return {"epochs": len(records), **{key: sum(record.get(key) or 0 for record in records) for key in keys}}


def write_json(path: Path, obj: Any) -> None:
    """Write ``obj`` as indented JSON, whole or not at all; NaN and infinities become null."""
    _write_atomically(path, encode(obj, indent=2) + b"\n")


def write_yaml(path: Path, mapping: Mapping[str, Any]) -> None:
    """Write ``mapping`` as YAML that safe loading reads back, whole or not at all; NaN and infinities become null."""
    # In ASCII: the library writes some characters, such as U+0085, so that it cannot read them back.
    text = yaml.safe_dump(_plain(mapping), sort_keys=False, allow_unicode=False)
    _write_atomically(path, text.encode("ascii"))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines of ASCII, whole or not at all."""
    _write_atomically(path, "".join(f"{line}\n" for line in lines).encode("ascii"))


def read_tuned_on(folder: RunFolder) -> frozenset[str] | None:
    """Digests of the prompts that a run was tuned on; None for what is no run, or one that did not keep them."""
    try:
        return frozenset(folder.tuned_on.read_text(encoding="ascii").split())
    except (OSError, UnicodeDecodeError):
        return None


def write_folder(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a folder, which takes the name ``path`` once it is whole and on the disk."""
    writing = path.with_name(f"{files.WRITING}{path.name}-{os.getpid()}")
    try:
        files.make_folder(writing)
        write(writing)
        files.sync_tree(writing)
        files.publish(writing, path)
    except (OSError, SafetensorError) as error:  # the latter is what a full disk is called there
        raise _cannot_write(path, error) from error
    finally:
        files.tidy(path.parent, path.name)


def encode(obj: Any, indent: int | None = None) -> bytes:
    """Strict JSON in UTF-8: null for NaN and infinities, escapes for lone surrogates and control characters."""
    text = json.dumps(_plain(obj), ensure_ascii=False, allow_nan=False, indent=indent)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode("utf-8")


def _plain(obj: Any) -> Any:
    """``obj`` in the types of JSON, without what JSON cannot say."""
    if isinstance(obj, float):
        return float(obj) if math.isfinite(obj) else None
    if isinstance(obj, Mapping):
        return {str(key): _plain(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [_plain(item) for item in obj]
    return obj


def _ordered(value: Any) -> Any:
    """The same order of keys however the record was put together: ``epoch`` first, the others by name."""
    if isinstance(value, Mapping):
        return {key: _ordered(value[key]) for key in sorted(value, key=lambda key: (key != "epoch", str(key)))}
    if isinstance(value, (list, tuple)):
        return [_ordered(item) for item in value]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _write_atomically(path: Path, data: bytes) -> None:
    try:
        files.replace_file(path, data)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: Exception) -> RunError:
    reason = getattr(error, "strerror", None) or error
    return RunError(f"cannot write {str(path)!r}: {reason}; free some space or make it writable")
