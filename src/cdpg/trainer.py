"""The training loop: owns the order of things and no mathematics."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from rich.console import Console
from torch import nn

from cdpg import provenance
from cdpg.callbacks import Callbacks
from cdpg.checkpoints import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint, tidy
from cdpg.config import CDPGConfig
from cdpg.constraints.judge import Constraint, Judge, name_of
from cdpg.contexts import ContextStream, load_contexts
from cdpg.errors import Interrupted, RunError, UserError
from cdpg.failures import FailureLog
from cdpg.models.base import LanguageModel
from cdpg.models.loading import load_model
from cdpg.monitoring import metrics_record, sample_records
from cdpg.objectives import make_objective
from cdpg.objectives.base import Epoch
from cdpg.optimization import Updater, learning_rate, make_optimizer
from cdpg.parallel import Processes
from cdpg.progress import Progress
from cdpg.rollout import Rollout, Stopwatch
from cdpg.runlog import JsonlFile, RunFolder, write_yaml
from cdpg.sampling import StopRule
from cdpg.signals import GentleStop
from cdpg.snapshot import Trainable
from cdpg.workers.limits import Limits

_NONFINITE_LIMIT = 5
"""Epochs in a row without a finite gradient after which the run stops."""


class CDPGTrainer:
    """Tunes a conditional language model towards p_c ∝ a(x|c) · b(x,c).

    ``model`` is a hub id, a folder, a loaded Hugging Face model (tuned in place) or a
    :class:`~cdpg.models.base.LanguageModel`; ``constraints`` one or several functions of
    ``(prompts, completions, **columns)``; ``train_dataset`` anything :func:`~cdpg.contexts.load_contexts` takes.
    ``stop`` may end a sequence before its end token, for the base and the policy alike. ``command`` and ``inputs``
    (model, contexts and constraint by name) are written to ``config.yaml``, so that the run can be repeated from it.
    """

    def __init__(
        self,
        model: str | nn.Module | LanguageModel,
        constraints: Constraint | Sequence[Constraint],
        args: CDPGConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        *,
        stop: StopRule | None = None,
        command: str | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        self.args = args or CDPGConfig()
        if train_dataset is None:
            raise UserError("no contexts were given: pass train_dataset with a 'prompt' column")
        self.judge = Judge(constraints, Limits.of(self.args, _processes_here()))  # first: it may have to fork
        self.processes = Processes(_accelerator(self.args))
        self.policy, self.base = _policy_and_base(model, self.args, self.processes, processing_class, peft_config)
        self.contexts = load_contexts(train_dataset)
        self.eval_contexts = [] if eval_dataset is None else load_contexts(eval_dataset)
        self._prompts = self.policy.encode(self.contexts, self.args.max_completion_length)
        self.policy.encode(self.eval_contexts, self.args.max_completion_length)  # held-out rows must fit as well
        self.objective = make_objective(self.args, self.policy)
        modules = [self.policy.module, *([self.objective.module] if self.objective.module else [])]
        self._parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self._parameters, self.args)
        self._trainable = Trainable(self.policy.module, self.objective, self.optimizer)
        self._stream = ContextStream(self.contexts, self.args.seed)
        self._rollout = Rollout(self.policy, self.base, self.judge, self.args, self.processes, stop)
        self._updater = Updater(
            self.policy, self.objective, self.optimizer, self._parameters, self.args, self.processes
        )
        self._callbacks = Callbacks(callbacks or (), self.args, self.processes.is_main)
        self.folder = RunFolder(self.args.output_dir)
        self._metrics, self._samples = JsonlFile(self.folder.metrics), JsonlFile(self.folder.samples)
        self._failures = FailureLog(self.folder.failures, self.args.check_failures)
        self._origin = provenance.origin(
            model if isinstance(model, str) else _model_name(self.policy),
            self.base.module,
            [name_of(constraint) for constraint in self.judge.constraints],
            self.contexts,
            None if stop is None else type(stop).__name__,
            self.processes.count,
            command,
        )
        self._used, self._inputs = False, dict(inputs or {})

    @property
    def model(self) -> nn.Module:
        """The model being tuned."""
        return self.policy.module

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> dict[str, Any]:
        """Run every epoch that is left, save the model and return the last epoch's metrics.

        ``resume_from_checkpoint`` is true for the newest whole checkpoint of ``output_dir`` (from the start when there
        is none), or the path of one.
        """
        record: dict[str, Any] = {}
        main = self.processes.is_main
        with (
            _hold(self.folder, main),
            closing(self.judge),
            GentleStop() as stop,
            _progress(self.args.epochs, main) as progress,
        ):
            done = self._begin(resume_from_checkpoint, progress)
            self._callbacks.call("on_train_begin")
            self._tell_checks({}, progress)
            nonfinite_epochs = 0
            for number in range(done + 1, self.args.epochs + 1):
                record = self._epoch(number)
                progress.update(record)
                self._tell_checks(record, progress)
                signalled = bool(self.processes.total(torch.tensor(int(stop.received is not None))))
                wanted = bool(self.processes.total(torch.tensor(int(self._callbacks.should_stop))))
                ending = number == self.args.epochs or signalled or wanted
                nonfinite_epochs = nonfinite_epochs + 1 if record["steps_nonfinite"] and not record["steps"] else 0
                if ending or number % self.args.save_every == 0 or nonfinite_epochs == _NONFINITE_LIMIT:
                    self._save_checkpoint(number)
                if nonfinite_epochs == _NONFINITE_LIMIT:
                    raise RunError(
                        f"no finite gradient in {_NONFINITE_LIMIT} epochs: lower learning_rate or set max_grad_norm; "
                        f"the last checkpoint is of epoch {number}"
                    )
                if signalled:
                    # Another process may have heard the signal that this one did not.
                    cause = stop.received or signal.SIGTERM
                    raise Interrupted(f"stopped after epoch {number}; continue with --resume", cause)
                if ending:
                    break
            self._callbacks.call("on_train_end")
            if main:
                self.save_model()
                self._failures.tell_all(self.folder.metrics, progress.note)
            self.processes.wait()
        if self.args.report_to:
            self.processes.accelerator.end_training()
        return record

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write the tuned model as a plain Hugging Face folder, by default ``model/`` in the run's folder."""
        path = self.folder.model if output_dir is None else Path(output_dir)
        self.policy.save(path)
        return path

    def push_to_hub(self, repo_id: str, **options: Any) -> None:
        """Upload the tuned model and its tokenizer."""
        path = self.save_model()
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repo_id, exist_ok=True, private=options.pop("private", None))
        api.upload_folder(repo_id=repo_id, folder_path=path, **options)

    def _epoch(self, number: int) -> dict[str, Any]:
        """One round: sample, judge, score, step, log."""
        started, watch = time.perf_counter(), Stopwatch()
        chosen = self._stream.draw(number - 1, self.args.contexts_per_epoch)
        epoch = self._rollout.collect(
            number,
            [self.contexts[i] for i in chosen],
            [self._prompts[i] for i in chosen],
            self.objective.scores_every_sample,
            watch,
        )
        self._require_checks(epoch)
        summary = self._updater.update(epoch)
        watch.lap("gradient")
        record = metrics_record(
            epoch, summary, self.objective, learning_rate(self.args, number), self.args.partition_epsilon
        )
        record["seconds"] = time.perf_counter() - started
        record |= {f"seconds_{stage}": seconds for stage, seconds in watch.seconds.items()}
        if self.processes.is_main:
            self._metrics.append(record)
            for sample in sample_records(epoch, self.args.log_samples, self.args.seed):
                self._samples.append(sample)
            self._failures.append(epoch)
        if self.args.report_to:
            numbers = {key: value for key, value in record.items() if value is not None}
            self.processes.accelerator.log(numbers, step=number)
        self._callbacks.epoch_end(record)
        return record

    def _require_checks(self, epoch: Epoch) -> None:
        """End the run, with a checkpoint of what came before, if the checks of an epoch cannot be relied upon."""
        problem = self._failures.too_many(epoch)
        if problem is not None:
            if epoch.number > 1:
                self._save_checkpoint(epoch.number - 1)
            if self.processes.is_main:
                self._failures.append(epoch)
            raise RunError(problem)

    def _tell_checks(self, record: Mapping[str, Any], progress: Progress) -> None:
        while self.judge.notices:
            progress.note(self.judge.notices.pop(0))
        self._failures.tell(record, progress.note)

    def _begin(self, resume: bool | str | Path | None, progress: Progress) -> int:
        """Set up the folder or continue from a checkpoint; the number of epochs done."""
        checkpoint = self._find_checkpoint(resume, progress)
        if checkpoint is None and self._used:
            raise UserError("this trainer has trained already, and no checkpoint takes it back: make a new one")
        self._used = True
        if self.eval_contexts:
            progress.note(
                f"{len(self.eval_contexts):,} held-out contexts were checked; train() does not evaluate on them"
            )
        if checkpoint is not None:
            provenance.check_resume(checkpoint.state, self.args, self._origin)
            self._trainable.restore(checkpoint)
            self.processes.wait()  # nobody may still be reading what is tidied up below
            progress.note(f"continuing after epoch {checkpoint.epoch}")
        if self.processes.is_main:
            if not resume:
                self.folder.require_fresh()
            tidy(self.folder.checkpoints)
            for name, file in self._logs().items():
                file.truncate(0 if checkpoint is None else checkpoint.state["positions"].get(name, 0))
            write_yaml(self.folder.config, {**self._inputs, **self.args.to_mapping(), "origin": self._origin})
        if checkpoint is not None and not isinstance(resume, bool):
            self._save_checkpoint(checkpoint.epoch)  # the run is taken back: what came later goes
        if self.args.report_to:
            self.processes.accelerator.init_trackers("cdpg", config=_tracker_config(self.args))
        self.processes.wait()
        return 0 if checkpoint is None else checkpoint.epoch

    def _find_checkpoint(self, resume: bool | str | Path | None, progress: Progress) -> Checkpoint | None:
        if not resume:
            return None
        if isinstance(resume, (str, Path)):
            return load_checkpoint(Path(resume))
        checkpoint = latest_checkpoint(self.folder.checkpoints, progress.note)
        if checkpoint is None and any(self.folder.checkpoints.glob("epoch-*")):
            raise RunError(
                f"no checkpoint in {str(self.folder.checkpoints)!r} is whole: start again in another folder, or remove "
                f"them to start again in this one"
            )
        return checkpoint

    def _logs(self) -> dict[str, JsonlFile]:
        """The files whose length a checkpoint records."""
        return {"metrics": self._metrics, "samples": self._samples, "failures": self._failures.file}

    def _save_checkpoint(self, number: int) -> None:
        """Write what a resumed run needs; the logs reach the disk first."""
        if self.processes.is_main:
            for file in self._logs().values():
                file.sync()
            state: Mapping[str, Any] = {
                "config": self.args.to_mapping(),
                "origin": self._origin,
                "objective": self.objective.state(),
                "positions": {name: file.position() for name, file in self._logs().items()},
            }
            tensors = self._trainable.tensors()
            save_checkpoint(self.folder.checkpoints, number, tensors, state, self.args.keep_checkpoints)
        self._callbacks.call("on_save")
        self.processes.wait()


def _processes_here() -> int:
    """Training processes on this machine, as a launcher says it: they share the cores."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(count) if count.isdigit() else 1


def _accelerator(config: CDPGConfig) -> Accelerator:
    # Precision is the models' own affair: autocast is entered where a model runs, and nowhere else.
    known = sorted(str(tracker) for tracker in get_available_trackers())
    missing = [name for name in config.report_to if name not in known]
    if missing:
        raise UserError(
            f"report_to names {', '.join(missing)}, which is no installed tracker; "
            f"installed: {', '.join(known) or 'none'}"
        )
    return Accelerator(
        cpu=config.device == "cpu", log_with=list(config.report_to) or None, project_dir=config.output_dir
    )


def _policy_and_base(
    model: str | nn.Module | LanguageModel, config: CDPGConfig, processes: Processes, tokenizer: Any, peft_config: Any
) -> tuple[LanguageModel, LanguageModel]:
    """The policy starts as a copy of the base; with adapters, the base is the policy with its adapters off."""
    if isinstance(model, LanguageModel):
        base = copy.deepcopy(model)
        base.module.requires_grad_(False)
        return model, base
    device = processes.accelerator.device if config.device == "auto" else None
    policy = load_model(model, config, tokenizer, device, peft_config)
    if policy.has_adapters:
        return policy, policy
    base = policy.frozen_copy()
    return policy, base


def _model_name(policy: LanguageModel) -> str:
    config = getattr(policy.module, "config", None)
    return str(getattr(config, "_name_or_path", "") or type(policy.module).__name__)


def _hold(folder: RunFolder, main: bool) -> AbstractContextManager[Any]:
    """The main process holds the run's folder; the others write nothing."""
    return folder if main else nullcontext()


def _progress(epochs: int, main: bool) -> Progress:
    return Progress(epochs) if main else Progress(epochs, Console(file=StringIO()))


def _tracker_config(config: CDPGConfig) -> dict[str, Any]:
    """Settings as trackers accept them: numbers, text and booleans."""
    return {key: value if isinstance(value, (int, float, bool)) else str(value) for key, value in vars(config).items()}
